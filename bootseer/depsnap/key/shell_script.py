"""The simple commands of a command line or a shell's script, as far as it is plain (pure).

For each: the variables that it is given, its words, and whether its failure is the script's. After
POSIX.1-2017, Shell Command Language: 2.2 quoting, 2.3 tokens, 2.9 commands, `set -e`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence

from bootseer import light_dataclasses as dataclasses

_PIECE = (
    r"""'(?P<single>[^']*)'|"(?P<double>(?:[^"\\]|\\.)*)"|\\(?P<escaped>[^\n])|(?P<joined>\\\n)"""
)
_TOKEN = (
    r"(?s:(?P<blank>[ \t]+|\\\n)|(?P<comment>#[^\n]*)|(?P<operator>&&|\|\||;;|&(?!>)|[;|()\n])|"
    r"(?P<redirect>(?P<number>[0-9]*)(?:&>>?|<<-|<<<?|>>|>\||<>|[<>]&?))|"
    r"(?P<word>(?:{piece}|[^\s;&|()<>'\"\\])+))"
)
_EXPANSION = r"[$`*?{]|\[(?!$|[\w.,-]+\](?:$|[=<>!~@; ]))|^~"
"""What a shell expands where it is unquoted. `name[extra]` only matches a file of that name."""
_QUOTED_EXPANSION = r"(?s)(?<!\\)(?:\\\\)*[$`]"
_RESERVED_TEXT = """
    ! { } [[ if then else elif fi for while until do done case esac function select time coproc eval
"""
_RESERVED = frozenset(_RESERVED_TEXT.split())
_DISCARDED_TO = frozenset(("/dev/null", "/dev/stdout", "/dev/stderr"))
_SET = re.compile(r"[-+][eEuxo]+")
_SUBSTITUTION = r"\$[(\[]|`|\$\{\w*[^\w}]"
"""In a word: what runs another command, or sets a variable, or asks whether one is set."""
_HARMLESS_OPTIONS = frozenset({"--norc", "--noprofile"})
_SHELLS = ("sh", "bash", "dash", "ash")
"""Not zsh, which reads files of its own first."""
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_EXPORTED = r"(?s)[A-Za-z_][A-Za-z0-9_]*(?:=.*)?"
_UNKNOWN = "$"
"""The value of a variable that is not known: no shell assigns it as it stands."""
_CONDITIONS = re.compile(r"\(|\|\||&&[^;\n]*\bexport\b[^;\n]*[;\n]")
"""In a script: what may restrict its variables to some of its commands."""
UNREAD = "a shell alone knows what this script does"


class Expanded(str):
    """A word that the shell expands: it is not given to the command as it stands."""

    __slots__ = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One simple command of a script.

    `failure_shows`: where it fails, so does the script. `reads` and `writes`: a file replaces its
    input or output; `piped`: the command before it writes to it.
    """

    words: tuple[str, ...]
    failure_shows: bool = False
    reads: bool = False
    writes: bool = False
    piped: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Script:
    """The simple commands of a script. Not `plain`: they may not run one after the other."""

    parts: tuple[Part, ...]
    plain: bool


@dataclasses.dataclass(frozen=True, slots=True)
class SimpleCommand:
    """A simple command of a command line.

    `variables` are assigned for it; `part` is it in its script. `plain` as in `Script`; a command
    outside of a script shows its own failure.
    """

    variables: Mapping[str, str]
    words: list[str]
    part: Part
    plain: bool = True


def simple_commands(
    command: Sequence[str], given: Mapping[str, str] | None = None
) -> list[SimpleCommand]:
    """Split `sh -c 'a && b'` into its simple commands; another command is one of itself.

    Each has the variables that are assigned for it, on top of those `given`.
    """
    variables, words = _split_assignments(command)
    variables = {**(given or {}), **variables}
    if not words:
        return []
    name = os.path.basename(words[0])
    if name in _SHELLS:
        options, text = _script_of(words[1:])
        if text is not None:
            script = parse(text, options, bash=name == "bash")
            if isinstance(text, Expanded) or "BASH_ENV" in variables:
                script = dataclasses.replace(script, plain=False)
            return _commands_of(script, text, variables)
    return [SimpleCommand(variables, words, Part(tuple(words), failure_shows=True))]


def _commands_of(script: Script, text: str, variables: Mapping[str, str]) -> list[SimpleCommand]:
    out: list[SimpleCommand] = []
    values: dict[str, str] = {}
    exported = dict(variables)
    for part in script.parts:
        assigned, words = _split_assignments(part.words)
        if words and words[0] != "export":
            inner_commands = simple_commands(part.words, exported)
            moves = any(i.words[0] == "cd" and i.words != words for i in inner_commands)
            leaves = moves or "exec" in part.words[: len(part.words) - len(words)]
            for inner in inner_commands:
                shows = inner.part.failure_shows and part.failure_shows
                own = dataclasses.replace(inner.part, failure_shows=shows)
                if inner.words == words:
                    own = dataclasses.replace(part, words=inner.part.words)
                plain = inner.plain and script.plain and not (leaves and part != script.parts[-1])
                out.append(SimpleCommand(inner.variables, inner.words, own, plain))
            continue
        exports_names = all(re.fullmatch(_EXPORTED, word) for word in words[1:])
        if part.writes or part.reads or not exports_names:
            out.append(SimpleCommand({}, [":"], part, script.plain and exports_names))
        named = [word.partition("=") for word in words[1:]]
        values |= assigned | {name: value for name, equals, value in named if equals}
        names = exported.keys() | {name for name, _, _ in named}
        exported |= {name: value for name, value in values.items() if name in names}
        # The words do not show whether the start exports it already, nor for which commands.
        exported |= {name: _UNKNOWN for name in assigned if name not in exported}
        if _CONDITIONS.search(text):
            exported |= dict.fromkeys(values, _UNKNOWN)
    return out


def _split_assignments(command: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The variables that are assigned in front of a simple command's words, and the words."""
    words = list(command)
    variables: dict[str, str] = {}
    while words:
        if _ASSIGNMENT.match(words[0]):
            name, _, value = words[0].partition("=")
            variables[name] = value
        elif os.path.basename(words[0]) not in ("env", "exec", "command"):
            break
        words = words[1:]
    return variables, words


def _script_of(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """A shell's own options, and the script that follows its `-c`."""
    options: list[str] = []
    rest = list(arguments)
    while rest and rest[0][:1] == "-" and rest[0] not in ("-", "--"):
        word = rest.pop(0)
        if word.startswith("--"):
            options.append(word)
            continue
        if word != "-c":
            options.append(word.replace("c", ""))
        if "o" in word and rest:
            options.append(rest.pop(0))
        if "c" in word:
            return options, rest[0] if rest else None
    return options, None


@dataclasses.dataclass(slots=True)
class _State:
    """The options that `set` has set; `known` until it sets others than those here."""

    errexit: bool = False
    pipefail: bool = False
    known: bool = True

    def set(self, words: Sequence[str]) -> None:
        """Apply the words of one `set`."""
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


def parse(script: str, options: Sequence[str] = (), *, bash: bool = True) -> Script:
    """Split a script, whose shell was given `options`, into simple commands.

    `&>` redirects all output in `bash`, and puts a command into the background elsewhere. A script
    that cannot be split, such as for an unclosed quote, is one part that says nothing.
    """
    state = _State()
    state.set([word for word in options if word not in _HARMLESS_OPTIONS])
    tokens = list(_tokens(script))
    if ("", "") in tokens:
        return Script((Part((":",)),), plain=False)
    plain = state.known and (bash or not any(t[:2] == "&>" for k, t in tokens if k == "redirect"))
    lists = _lists(tokens)
    parts: list[Part] = []
    for number, (operators, commands) in enumerate(lists):
        plain &= not any(operator in ("(", ")", "&", ";;") for operator in operators)
        plain &= not any(part.words[0] in _RESERVED for part in commands if part.words)
        shown = _which_failures_show(operators, commands, state, last=number == len(lists) - 1)
        for at, (part, shows) in enumerate(zip(commands, shown, strict=True)):
            words = part.words
            while words and words[0] in _RESERVED:
                words = words[1:]
            plain &= not any(re.search(_SUBSTITUTION, w) for w in words if isinstance(w, Expanded))
            before, program = operators[at - 1] if at else "", words[0] if words else ""
            if program in ("set", "export", "cd", "exit"):
                plain &= "|" not in (before, operators[at])
            if program == "exit":
                ends = at == len(commands) - 1 and (before == "||" or number == len(lists) - 1)
                plain &= ends
                plain &= not any(isinstance(word, Expanded) and word != "$?" for word in words)
            if program == "set":
                state.set(words[1:])
                plain &= state.known and at == 0 and operators[0] != "||"
            if words or part.writes:
                parts.append(dataclasses.replace(part, words=words or (":",), failure_shows=shows))
    return Script(tuple(parts), plain)


def _which_failures_show(
    operators: Sequence[str], commands: Sequence[Part], state: _State, *, last: bool
) -> list[bool]:
    """For each command of a list, whether its failure is the script's; `operators` follow each."""
    count = len(commands)
    guarded = count > 1 and operators[count - 2] == "||" and _is_failing_exit(commands[-1])
    alternatives = "||" in operators[: count - 2 if guarded else count]
    shown = []
    ends = count - 1 if guarded else count
    for index in range(count):
        at_end = "&&" not in operators[index:ends]
        seen = guarded or last or (state.errexit and at_end)
        shown.append(not alternatives and seen and (operators[index] != "|" or state.pipefail))
    return shown


def _is_failing_exit(part: Part) -> bool:
    """Whether a script ends here, as failed, after a command that failed."""
    program, *codes = part.words or ("",)
    if program != "exit" or len(codes) > 1:
        return False
    return not codes or codes[0] == "$?" or (codes[0].isdecimal() and 0 < int(codes[0]) < 256)


def _lists(tokens: Sequence[tuple[str, str]]) -> list[tuple[list[str], list[Part]]]:
    """The lists between semicolons and lines: the operator after each command, and the commands."""
    lists: list[tuple[list[str], list[Part]]] = []
    operators: list[str] = []
    commands: list[Part] = []
    words: list[str] = []
    reads = writes = False
    rest = iter([*tokens, ("operator", "\n")])
    for kind, text in rest:
        if kind in ("word", "expanded"):
            words.append(Expanded(text) if kind == "expanded" else text)
        elif kind == "redirect":
            target_kind, target = next(rest)
            duplicates = text[-1:] == "&" and (target.isdigit() or target == "-")
            harmless = duplicates or target in _DISCARDED_TO
            runs = target_kind == "expanded" and re.search(_SUBSTITUTION, target)
            if runs or target_kind not in ("word", "expanded") or text.startswith("<<"):
                words.insert(0, "eval")  # its input is another text than this one, or none
            reads |= text[:1] == "<" and not harmless
            writes |= text[:1] in ">&" and not harmless
        else:
            if words or writes:
                piped = bool(operators) and operators[-1] == "|"
                commands.append(Part(tuple(words), reads=reads, writes=writes, piped=piped))
                operators.append(text)
            elif text == "\n" and operators and operators[-1] in ("&&", "||", "|"):
                continue  # the list goes on in the next line
            elif text != "\n":
                operators.append(text)  # a group begins or ends
                commands.append(Part(("eval",)))
            words, reads, writes = [], False, False
            if text in (";", "\n", "&", ";;") and commands:
                lists.append((operators, commands))
                operators, commands = [], []
    if commands:
        lists.append((operators, commands))
    return lists


def _tokens(script: str) -> Iterator[tuple[str, str]]:
    """Kinds and texts: word, expanded, operator or redirect; ("", "") and no more after a fault."""
    token = re.compile(_TOKEN.replace("{piece}", re.sub(r"\?P<\w+>", "?:", _PIECE)))
    piece = re.compile(rf"(?s:{_PIECE}|(?P<bare>[^\s;&|()<>'\"\\]+))")
    at = 0
    while at < len(script):
        match = token.match(script, at)
        if match is None:
            yield "", ""
            return
        at = match.end()
        kind = match.lastgroup
        if match["operator"]:
            yield "operator", match["operator"]
        elif match["redirect"]:
            yield "redirect", match["redirect"][len(match["number"]) :]
        elif match["word"]:
            yield _word(list(piece.finditer(match["word"])))
        else:
            assert kind in ("blank", "comment")


def _word(pieces: Sequence[re.Match[str]]) -> tuple[str, str]:
    text, expanded = "", False
    unquoted = ""
    for piece in pieces:
        if piece["single"] is not None:
            text += piece["single"]
            unquoted += "'"
        elif piece["double"] is not None:
            expanded |= bool(re.search(_QUOTED_EXPANSION, piece["double"]))
            text += re.sub(r"(?s)\\([$`\"\\\n])", _unescape, piece["double"])
            unquoted += "'"
        elif piece["escaped"] is not None:
            text += piece["escaped"]
            unquoted += "'"
        elif piece["bare"] is not None:
            text += piece["bare"]
            unquoted += piece["bare"]
    expanded |= bool(re.search(_EXPANSION, unquoted))
    return ("expanded" if expanded else "word"), text


def _unescape(match: re.Match[str]) -> str:
    return "" if match[1] == "\n" else match[1]
