"""The filters by which clients list snapshots. Pure.

A filter is `field[op value]`; of several joined by commas all must match, of several filters one
must. `op` is `==`, `!=` or `~=` (a regular expression that matches anywhere); a field alone matches
if it is set. Field parts are joined by dots, or quoted: `labels."a.b/c"==x`. A regular expression
may also be quoted by `/` or `|`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bootseer.errors import UsageError
from bootseer.imageprefetch.snapshotter.types import Snapshot

Match = Callable[[Snapshot], bool]

_SPACE = re.compile(r"\s*")
_FIELD = re.compile(r"[A-Za-z0-9_]+")
_OPERATOR = re.compile(r"[=!~]+")
_VALUE = re.compile(r"[^\s,]+")
_QUOTED = {mark: re.compile(rf"{mark}((?:[^{mark}\\\n]|\\.)*){mark}") for mark in ('"', "/")}
_QUOTED["|"] = re.compile(r"\|((?:[^|\\\n]|\\.)*)\|")
_ESCAPE = re.compile(
    r"\\(?:([0-7]{3})|x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL
)
_PLAIN = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\\": "\\"}


def parse_all(texts: Sequence[str]) -> Match:
    """A function that matches what any of `texts` matches; everything when there is none.

    Raises UsageError, naming the filter and the place, for a syntax error.
    """
    if not texts:
        return _match_everything
    parsed = [_parse(text) for text in texts]
    return lambda snapshot: any(match(snapshot) for match in parsed)


def _match_everything(_: Snapshot) -> bool:
    return True


def _parse(text: str) -> Match:
    if not text:
        return _match_everything
    reader = _Reader(text)
    terms = [_parse_term(reader)]
    while reader.take(","):
        terms.append(_parse_term(reader))
    if not reader.is_at_end():
        raise reader.error("a comma or the end was expected")
    return lambda snapshot: all(term(snapshot) for term in terms)


def _parse_term(reader: _Reader) -> Match:
    path = [reader.field()]
    while reader.take("."):
        path.append(reader.field())
    operator = reader.operator()
    if not operator:
        return lambda snapshot: _field_of(snapshot, path) is not None
    if operator not in ("==", "!=", "~="):
        raise reader.error(f"the operator {operator} is not known")
    value = reader.value(regular=operator == "~=")
    if operator == "~=":
        try:
            pattern = re.compile(value)
        except re.error as error:
            raise reader.error(f"the regular expression is wrong: {error}") from error
        return lambda snapshot: pattern.search(_field_of(snapshot, path) or "") is not None
    if operator == "==":
        return lambda snapshot: _field_of(snapshot, path) == value
    return lambda snapshot: _field_of(snapshot, path) != value


def _field_of(snapshot: Snapshot, path: Sequence[str]) -> str | None:
    match path[0]:
        case "kind":
            return snapshot.kind.name.lower()
        case "name":
            return snapshot.name
        case "parent":
            return snapshot.parent
        case "labels":
            return snapshot.labels.get(".".join(path[1:]))
    return None


@dataclass(slots=True)
class _Reader:
    """A filter that is parsed up to `at`."""

    text: str
    at: int = 0

    def _skip(self) -> None:
        space = _SPACE.match(self.text, self.at)
        self.at = space.end() if space else self.at

    def is_at_end(self) -> bool:
        self._skip()
        return self.at == len(self.text)

    def take(self, mark: str) -> bool:
        self._skip()
        if not self.text.startswith(mark, self.at):
            return False
        self.at += 1
        return True

    def _match(self, pattern: re.Pattern[str]) -> str | None:
        match = pattern.match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        return match[0]

    def field(self) -> str:
        self._skip()
        if self.text.startswith('"', self.at):
            return self._read_quoted('"')
        name = self._match(_FIELD)
        if name is None:
            raise self.error("a field's name was expected")
        return name

    def operator(self) -> str:
        self._skip()
        return self._match(_OPERATOR) or ""

    def value(self, *, regular: bool) -> str:
        self._skip()
        mark = self.text[self.at : self.at + 1]
        if mark == '"' or (regular and mark in ("/", "|")):
            return self._read_quoted(mark)
        value = self._match(_VALUE) if mark not in ("/", "|") else None
        if value is None:
            raise self.error("a value was expected")
        return value

    def _read_quoted(self, mark: str) -> str:
        match = _QUOTED[mark].match(self.text, self.at)
        if match is None:
            raise self.error("the quote is not closed")
        self.at = match.end()
        return _ESCAPE.sub(lambda escape: self._unescape(escape, mark), match[1])

    def _unescape(self, escape: re.Match[str], mark: str) -> str:
        octal, *hexes, other = escape.groups()
        digits = next((digits for digits in hexes if digits), None)
        if other == mark:
            return mark
        if other is not None and other in _PLAIN:
            return _PLAIN[other]
        number = int(octal, 8) if octal else int(digits, 16) if digits else -1
        if 0 <= number <= 0x10FFFF and not (octal and number > 0xFF):
            return chr(number)
        raise self.error(f"the escape {escape[0]} is not known")

    def error(self, what: str) -> UsageError:
        return UsageError(f"cannot use the filter {self.text!r}: {what} at character {self.at + 1}")
