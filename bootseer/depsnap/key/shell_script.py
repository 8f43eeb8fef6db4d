"""Read a shell's script as far as it is plain: its simple commands, and whose failure shows (pure).

After POSIX.1-2017, Shell Command Language: 2.2 quoting, 2.3 tokens, 2.9 commands, `set -e`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from bootseer import light_dataclasses as dataclasses

_PIECE = (
    r"""'(?P<single>[^']*)'|"(?P<double>(?:[^"\\]|\\.)*)"|\\(?P<escaped>[^\n])|(?P<joined>\\\n)"""
)
_TOKEN = (
    r"(?s:(?P<blank>[ \t]+|\\\n)|(?P<comment>#[^\n]*)|(?P<operator>&&|\|\||;;|&(?!>)|[;|()\n])|"
    r"(?P<redirect>(?P<number>[0-9]*)(?:&>>?|<<-|<<<?|>>|>\||<>|[<>]&?))|"
    r"(?P<word>(?:{piece}|[^\s;&|()<>'\"\\])+))"
)
_OPEN = r"[$`*?{]|\[(?!$|[\w.,-]+\](?:$|[=<>!~@; ]))|^~"
"""Unquoted: what a shell makes something else of. `name[extra]` is left alone but where a file is
called so."""
_OPEN_QUOTED = r"(?s)(?<!\\)(?:\\\\)*[$`]"
_RESERVED_TEXT = """
    ! { } [[ if then else elif fi for while until do done case esac function select time coproc eval
"""
_RESERVED = frozenset(_RESERVED_TEXT.split())
_NOWHERE = frozenset(("/dev/null", "/dev/stdout", "/dev/stderr"))
_SET = re.compile(r"[-+][eEuxo]+")
_SUBSTITUTED = r"\$[(\[]|`|\$\{\w*[^\w}]"
"""In a word: what runs another command, or sets, or asks whether a variable is set."""
_NEITHER = frozenset({"--norc", "--noprofile"})
UNREAD = "a shell alone knows what this script does"


class Opened(str):
    """A word that its shell makes something else of."""

    __slots__ = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One simple command of a script.

    `shows`: where it fails, so does the script. `reads` and `writes` tell of files in place of
    its input and output; `piped` of a command before it that writes to it.
    """

    words: tuple[str, ...]
    shows: bool = False
    reads: bool = False
    writes: bool = False
    piped: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Script:
    """The simple commands of a script. Not `plain`: they may run otherwise than one by one."""

    parts: tuple[Part, ...]
    plain: bool


@dataclasses.dataclass(slots=True)
class _State:
    """What `set` has said; `known` until it says something else than is known here."""

    errexit: bool = False
    pipefail: bool = False
    known: bool = True

    def options(self, words: Sequence[str]) -> None:
        words = list(words)
        while words:
            word = words.pop(0)
            if not _SET.fullmatch(word):
                self.known = False
                return
            on = word[0] == "-"
            self.errexit = on if "e" in word else self.errexit
            if "o" in word and words:
                name = words.pop(0)
                self.errexit = on if name == "errexit" else self.errexit
                self.pipefail = on if name == "pipefail" else self.pipefail
                self.known &= name in ("errexit", "pipefail", "nounset", "xtrace")


def read(script: str, options: Sequence[str] = (), *, bash: bool = True) -> Script:
    """Split a script, which its shell was given `options` for, into simple commands.

    `&>` sends all output to a file in `bash`, and a command to the background elsewhere. Of a
    script that cannot be split, such as for an unclosed quote, nothing is read.
    """
    state = _State()
    state.options([word for word in options if word not in _NEITHER])
    tokens = list(_tokens(script))
    if ("", "") in tokens:
        return Script((Part((":",)),), plain=False)
    plain = state.known and (bash or not any(t[:2] == "&>" for k, t in tokens if k == "redirect"))
    lists = _lists(tokens)
    parts: list[Part] = []
    for number, (bounds, commands) in enumerate(lists):
        plain &= not any(bound in ("(", ")", "&", ";;") for bound in bounds)
        plain &= not any(part.words[0] in _RESERVED for part in commands if part.words)
        shown = _shown(bounds, commands, state, last=number == len(lists) - 1)
        for at, (part, shows) in enumerate(zip(commands, shown, strict=True)):
            words = part.words
            while words and words[0] in _RESERVED:
                words = words[1:]
            plain &= not any(re.search(_SUBSTITUTED, w) for w in words if isinstance(w, Opened))
            before, program = bounds[at - 1] if at else "", words[0] if words else ""
            if program in ("set", "export", "cd", "exit"):
                plain &= "|" not in (before, bounds[at])
            if program == "exit":
                ends = at == len(commands) - 1 and (before == "||" or number == len(lists) - 1)
                told = not any(isinstance(word, Opened) and word != "$?" for word in words)
                plain &= ends and told
            if program == "set":
                state.options(words[1:])
                plain &= state.known and at == 0 and bounds[0] != "||"
            if words or part.writes:
                parts.append(dataclasses.replace(part, words=words or (":",), shows=shows))
    return Script(tuple(parts), plain)


def _shown(
    bounds: Sequence[str], commands: Sequence[Part], state: _State, *, last: bool
) -> list[bool]:
    """Of each command of a list: whether its failure is the script's; `bounds` are behind each."""
    count = len(commands)
    guarded = count > 1 and bounds[count - 2] == "||" and _is_exit(commands[-1])
    alternatives = "||" in bounds[: count - 2 if guarded else count]
    shown = []
    ends = count - 1 if guarded else count
    for index in range(count):
        at_end = "&&" not in bounds[index:ends]
        seen = guarded or last or (state.errexit and at_end)
        shown.append(not alternatives and seen and (bounds[index] != "|" or state.pipefail))
    return shown


def _is_exit(part: Part) -> bool:
    """Whether a script ends here, and as failed, behind what has failed."""
    program, *codes = part.words or ("",)
    if program != "exit" or len(codes) > 1:
        return False
    return not codes or codes[0] == "$?" or (codes[0].isdecimal() and 0 < int(codes[0]) < 256)


def _lists(tokens: Sequence[tuple[str, str]]) -> list[tuple[list[str], list[Part]]]:
    """The lists between semicolons and lines: what stands behind each command, and these."""
    lists: list[tuple[list[str], list[Part]]] = []
    bounds: list[str] = []
    commands: list[Part] = []
    words: list[str] = []
    reads = writes = False
    rest = iter([*tokens, ("operator", "\n")])
    for kind, text in rest:
        if kind in ("word", "opened"):
            words.append(Opened(text) if kind == "opened" else text)
        elif kind == "redirect":
            what, to = next(rest)
            aside = (text[-1:] == "&" and (to.isdigit() or to == "-")) or to in _NOWHERE
            runs = what == "opened" and re.search(_SUBSTITUTED, to)
            if runs or what not in ("word", "opened") or text.startswith("<<"):
                words.insert(0, "eval")  # another text than this one, or none
            reads |= text[:1] == "<" and not aside
            writes |= text[:1] in ">&" and not aside
        else:
            if words or writes:
                piped = bool(bounds) and bounds[-1] == "|"
                commands.append(Part(tuple(words), reads=reads, writes=writes, piped=piped))
                bounds.append(text)
            elif text == "\n" and bounds and bounds[-1] in ("&&", "||", "|"):
                continue  # the list goes on in the next line
            elif text != "\n":
                bounds.append(text)  # a group begins or ends
                commands.append(Part(("eval",)))
            words, reads, writes = [], False, False
            if text in (";", "\n", "&", ";;") and commands:
                lists.append((bounds, commands))
                bounds, commands = [], []
    if commands:
        lists.append((bounds, commands))
    return lists


def _tokens(script: str) -> Iterator[tuple[str, str]]:
    """Kinds and texts: word, opened, operator or redirect. ("", "") where it goes on in no way."""
    token = re.compile(_TOKEN.replace("{piece}", re.sub(r"\?P<\w+>", "?:", _PIECE)))
    piece = re.compile(rf"(?s:{_PIECE}|(?P<bare>[^\s;&|()<>'\"\\]+))")
    at = 0
    while at < len(script):
        found = token.match(script, at)
        if found is None:
            yield "", ""
            return
        at = found.end()
        kind = found.lastgroup
        if found["operator"]:
            yield "operator", found["operator"]
        elif found["redirect"]:
            yield "redirect", found["redirect"][len(found["number"]) :]
        elif found["word"]:
            yield _word(list(piece.finditer(found["word"])))
        else:
            assert kind in ("blank", "comment")


def _word(pieces: Sequence[re.Match[str]]) -> tuple[str, str]:
    text, opened = "", False
    bare = ""  # with what is quoted left out
    for found in pieces:
        if found["single"] is not None:
            text += found["single"]
            bare += "'"
        elif found["double"] is not None:
            opened |= bool(re.search(_OPEN_QUOTED, found["double"]))
            text += re.sub(r"(?s)\\([$`\"\\\n])", _unquoted, found["double"])
            bare += "'"
        elif found["escaped"] is not None:
            text += found["escaped"]
            bare += "'"
        elif found["bare"] is not None:
            text += found["bare"]
            bare += found["bare"]
    opened |= bool(re.search(_OPEN, bare))
    return ("opened" if opened else "word"), text


def _unquoted(found: re.Match[str]) -> str:
    return "" if found[1] == "\n" else found[1]
