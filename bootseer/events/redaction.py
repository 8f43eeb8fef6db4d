"""Secrets out of what is shown."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_SECRET_WORDS = (
    "token",
    "passw",
    "secret",
    "credential",
    "signature",
    "apikey",
    "api_key",
    "access_key",
    "private_key",
    "auth",
)
_SCHEMES = ("bearer", "basic")  # of an HTTP Authorization header: the secret is the word after
_GIVE_A_VARIABLE = ("-e", "--env")
_QUOTES = "'\""


def redact_command(words: Iterable[str]) -> list[str]:
    """Return a command's words without what looks like a secret.

    Hidden are the credentials and queries of URLs, the value in `NAME=VALUE` and the word after
    `--NAME` or `NAME:` where NAME speaks of a token, password, secret, signature, credential,
    authorization or a key to something; also inside a word that is itself a script or a header,
    as in `sh -c SCRIPT`; and, outside of scripts, the value of each variable after `-e`, `--env`.
    By hand: `re` costs more than everything else that `run` does.
    """
    out: list[str] = []
    hide = is_variable = False
    for word in words:
        option = "--env=" if word.startswith("--env=") else word[:2] if word[:2] == "-e" else ""
        name, equals, _ = word[len(option) :].partition("=")
        if equals and (option or is_variable) and name.isidentifier():
            out.append(option + name + "=***")
            hide = is_variable = False
            continue
        is_variable = word in _GIVE_A_VARIABLE
        name = word.partition("=")[0]
        if not (hide or _is_secret(name)) and len(word.split(None, 1)) > 1:
            out.append(_redact_script(word))
            continue
        shown, hide = _redact_word(word, hide)
        out.append(shown)
    return out


def _is_secret(name: str) -> bool:
    plain = name.lower().replace("-", "_")
    return any(mark in plain for mark in _SECRET_WORDS) and len(name.split(None, 1)) < 2


def _redact_word(word: str, hide: bool) -> tuple[str, bool]:
    """Return a word as it may be shown, and whether the next one is to be hidden."""
    bare = word.strip(_QUOTES)
    if hide and not word.startswith("-"):
        return "***", bare.lower() in _SCHEMES
    name, equals, _ = word.partition("=")
    if _is_secret(name):
        if equals:
            return name + "=***", False
        return word, word.startswith("-") or bare.endswith(":")
    return redact_url(word), bare.lower() in _SCHEMES


def _redact_script(text: str) -> str:
    """Redact the words of a script; what stays keeps its place and its lines (tabs are blanks)."""
    out: list[str] = []
    hide = False
    quote = ""  # open since a hidden value began
    for word in text.replace("\t", " ").replace("\n", " \n ").split(" "):
        if word in ("", "\\", "\n"):
            out.append(word)  # a line that goes on does not separate an option from its value
        elif quote:
            quote = "" if quote in word else quote
        else:
            shown, hide = _redact_word(word, hide)
            out.append(shown)
            if shown == "***" or shown.endswith("=***"):
                quote = _open_quote(word)
    return " ".join(out).replace(" \n ", "\n")


def _open_quote(word: str) -> str:
    """Return the quote that a value (after `=`, or the whole word) opens and leaves open."""
    value = word.partition("=")[2] or word
    return value[0] if value[0] in _QUOTES and value.count(value[0]) == 1 else ""


def redact_url(text: str) -> str:
    """Return `text` with user, password and query of every URL in it replaced by `***`."""
    out: list[str] = []
    rest = text
    while True:
        head, mark, rest = rest.partition("://")
        out.append(head + mark)
        if not mark:
            return "".join(out)
        end = len(rest)
        for stop in " \t\r\n\"'<>,;":
            found = rest.find(stop, 0, end)
            end = found if found >= 0 else end
        url, rest = rest[:end], rest[end:]
        url, query, _ = url.partition("?")
        authority, slash, path = url.partition("/")
        if "@" in authority:
            authority = "***@" + authority.rpartition("@")[2]
        out.append(authority + slash + path + ("?***" if query else ""))
