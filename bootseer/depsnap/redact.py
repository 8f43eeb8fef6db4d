"""Credentials out of words, texts and URLs before they are hashed, stored or shown (pure).

What is removed: user and password of a URL; the value of a query parameter, option or shell
assignment whose name says that it is secret. The rest stays, so that two starts which differ in
nothing but a token still have one key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

GONE = "***"
SECRET_NAME = (
    r"[\w-]*(?:token|secret|passw(?:or)?d|credential|signature|api[_-]?key|access[_-]?key)[\w-]*"
)

_URL_USER = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)[^/\s'\"@]*(?:@[^/\s'\"@]*)*@")
_NAMED = re.compile(
    rf"(?P<name>(?:^|(?<=[\s?&;'\"(]))-{{0,2}}(?:{SECRET_NAME}|sig|key(?==)))(?P<mark>=)(?:'[^']*'|\"[^\"]*\"|[^\s&'\"]+)",
    re.IGNORECASE | re.MULTILINE,
)
_SECRET_OPTION = re.compile(rf"--{SECRET_NAME}", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(
    r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|SIGNATURE|API_?KEY|ACCESS_?KEY|USERNAME|KEYRING"
)


def text(value: str) -> str:
    """A text without credentials; applying it twice changes nothing more."""
    return _NAMED.sub(rf"\g<name>\g<mark>{GONE}", _URL_USER.sub(r"\g<scheme>", value))


def words(command: Iterable[str]) -> list[str]:
    """A command's words without credentials, `--token VALUE` pairs included."""
    out: list[str] = []
    hide = False
    for word in command:
        out.append(GONE if hide else text(word))
        hide = bool(_SECRET_OPTION.fullmatch(word))
    return out


def is_secret_variable(name: str) -> bool:
    """Whether an environment variable of this name is never to be read into a key."""
    return bool(_SECRET_VARIABLE.search(name.upper()))
