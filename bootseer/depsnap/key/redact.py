"""Credentials out of words, texts and URLs before they are hashed, stored or shown (pure).

What is removed: user and password of a URL; the value of a query parameter, option, header or shell
assignment whose name says that it is secret; the password of curl's `-u USER:PASSWORD`; words that
have the form of a well-known service's token. The rest stays, so that two starts which differ in
nothing but a token still have one key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

GONE = "***"
SECRET_NAME = (
    r"[\w-]*(?:token|secret|passw(?:or)?d|credential|signature|api[_-]?key|access[_-]?key)[\w-]*"
    r"|(?:[\w-]*[_-])?(?:auth|pat|private_key)|delegation"
)

# Texts: a pattern takes longer to compile than a start's few words to search, and most words hold
# none of the signs without which it cannot match. Signs in small letters are looked for in ASCII
# alone: there are letters of other alphabets that a pattern takes for an `s` or a `k`.
_URL_USER = r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)[^/\s'\"@]*(?:@[^/\s'\"@]*)*@"
# `tokenizers==0.19` and `tiktoken = "^0.7"` are packages: what decides an install must stay.
_NO_VERSION = r"(?!=|['\"]?[\^~<>=! ]*\d+(?:\.[\w*]+)+)"
_NAMED = (
    rf"(?im)(?P<name>(?:^|(?<=[\s?&;'\"(]))-{{0,2}}(?:{SECRET_NAME}|(?:[\w-]*[_-])?private-key|sig"
    r"|key)(?==))(?P<mark>=)"
    rf"{_NO_VERSION}(?:'[^']*'|\"[^\"]*\"|[^\s&'\"]+)"
)
_HEADER = (
    r"(?i)(?P<name>\b(?:(?:proxy-)?authorization|(?:private|job|deploy|x(?:-[\w-]+)?)-(?:token|key))\s*:\s*)"
    r"(?:(?:bearer|basic|token)\s+)?[^\s'\"]+"
)
_LOGIN = r"(?P<name>(?:^|\s)(?:-u|--user|--proxy-user)[\s=]*['\"]?[^\s:'\"]+:)[^\s'\"]+"
_NAMED_SIGNS = ("token", "secret", "passw", "credential", "deleg", "auth", "pat", "sig", "key")
_HEADER_SIGNS = ("authorization", "token", "key")
_LOGIN_SIGNS = ("-u",)
_SHAPED_SIGNS = ("gh", "hf_", "github_pat_", "sk-", "glpat-", "xox", "pypi-AgE", "AKIA")
_SHAPED = (
    r"\b(?:(?:gh[opsur]|hf)_[A-Za-z0-9]{20,}|github_pat_\w{20,}|sk-[A-Za-z0-9]{20,}"
    r"|(?:glpat|xox[abp])-[\w-]{10,}|pypi-AgE[\w-]+|AKIA[0-9A-Z]{16}\b)"
)
_SECRET_OPTION = rf"(?i)--(?:{SECRET_NAME})"
# In a script, what follows may be another command, a variable, or a requirement after a flag.
_OPTION_VALUE = (
    r"(?i)(?P<name>(?:^|(?<=[\s'\"(]))--(?!(?:no|use|with|without|ask|skip|enable|disable|allow"
    r"|require|always|print|show)-)(?:[\w-]*[_-])?"
    r"(?:token|secret|passw(?:or)?d|credential|signature|(?:api|access)[_-]?key|pat)"
    r"(?:[ \t]|\\\n)+)(?!['\"]?(?:\$|[\w.\[\]-]+[=~<>!]=\d))"
    r"(?:'[^']*'|\"[^\"]*\"|[^\s'\"\\;&|<>()-][^\s'\";&|<>()]*)"
)
_SECRET_VARIABLE = (
    r"TOKEN(?!IZE)|SECRET|PASSWORD|PASSWD|CREDENTIAL|SIGNATURE"
    r"|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|(?:^|_)PAT$|USERNAME|KEYRING"
)


def text(value: str) -> str:
    """A text without credentials; applying it twice changes nothing more."""
    plain = value
    if "://" in plain:
        plain = re.sub(_URL_USER, r"\g<scheme>", plain)
    small = plain.lower() if plain.isascii() else ""
    if "=" in plain and _has(_NAMED_SIGNS, small):
        plain = re.sub(_NAMED, rf"\g<name>\g<mark>{GONE}", plain)
    if ":" in plain:
        for pattern, signs in ((_HEADER, _HEADER_SIGNS), (_LOGIN, _LOGIN_SIGNS)):
            if _has(signs, small):
                plain = re.sub(pattern, rf"\g<name>{GONE}", plain)
    if any(sign in plain for sign in _SHAPED_SIGNS):
        plain = re.sub(_SHAPED, GONE, plain)
    return plain


def _has(signs: Iterable[str], small: str) -> bool:
    """Whether a text can hold what its pattern looks for; "" is one that is not looked through."""
    return not small or any(sign in small for sign in signs)


def words(command: Iterable[str]) -> list[str]:
    """A command's words without credentials, `--token VALUE` pairs included, in scripts too."""
    out: list[str] = []
    before = ""
    for word in command:
        hide = before.startswith("--") and re.fullmatch(_SECRET_OPTION, before)
        login = ":" in word and re.fullmatch(_LOGIN, f"{before} {word}")
        out.append(GONE if hide else f"{word.partition(':')[0]}:{GONE}" if login else _script(word))
        before = word
    return out


def _script(word: str) -> str:
    plain = text(word)
    small = plain.lower() if plain.isascii() else ""
    if "--" in plain and " " in plain and _has(_NAMED_SIGNS, small):
        plain = re.sub(_OPTION_VALUE, rf"\g<name>{GONE}", plain)
    return plain


def is_secret_variable(name: str) -> bool:
    """Whether an environment variable of this name is never to be read into a key."""
    upper = name.upper()
    return not upper.endswith("VERSION") and bool(re.search(_SECRET_VARIABLE, upper))
