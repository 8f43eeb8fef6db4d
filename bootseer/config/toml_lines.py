"""Where in a TOML file each key stands: what `tomllib` knows while parsing and does not tell.

Works on text that `tomllib` has already accepted, so it need not find faults, only skip values
exactly. Paths are tuples of keys and, for elements of arrays, indices from 0; lines count from 1.
"""

from __future__ import annotations

import re
import tomllib

Path = tuple[str | int, ...]

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_SCALAR = re.compile(r"[^,\]}\s#]+(?:[ \t]+[0-9][^,\]}\s#]*)?")  # a date may hold one space
_BLANK = re.compile(r"[ \t]*")
_BETWEEN = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
# In this order: a triple quote also begins like a single one.
_STRINGS = (
    re.compile(r'"""(?:[^\\]|\\.)*?"{3,5}(?!")', re.DOTALL),
    re.compile(r"'''.*?'{3,5}(?!')", re.DOTALL),
    re.compile(r'"(?:[^"\\\n]|\\.)*"'),
    re.compile(r"'[^'\n]*'"),
)


def key_lines(text: str) -> dict[Path, int]:
    """Return the line of the first mention of every key, table and array element in `text`.

    A table named only by a longer header (`[a.b]` mentions `a`) has that header's line.
    """
    return _Scanner(text).scan()


class _Scanner:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._lines: dict[Path, int] = {}
        self._tables: dict[Path, int] = {}  # arrays of tables -> elements seen so far

    def scan(self) -> dict[Path, int]:
        prefix: Path = ()
        self._skip(_BETWEEN)
        while self._at < len(self._text):
            if self._text[self._at] == "[":
                prefix = self._header()
            else:
                self._pair(prefix)
            self._skip(_BETWEEN)
        return self._lines

    def _header(self) -> Path:
        brackets = 2 if self._text.startswith("[[", self._at) else 1
        self._at += brackets
        path: Path = ()
        keys = self._dotted()
        for position, key in enumerate(keys):
            path = (*path, key)
            self._note(path)
            last = position == len(keys) - 1
            if last and brackets == 2:
                self._tables[path] = self._tables.get(path, 0) + 1
            if path in self._tables:  # a later header speaks of the newest element
                path = (*path, self._tables[path] - 1)
                self._note(path)
        self._at += brackets
        return path

    def _pair(self, prefix: Path) -> None:
        path = prefix
        for key in self._dotted():
            path = (*path, key)
            self._note(path)
        self._at += 1  # the equals sign
        self._skip(_BLANK)
        self._value(path)

    def _dotted(self) -> list[str]:
        """Read `a . "b".c`; stop on what follows it."""
        keys = []
        while True:
            self._skip(_BLANK)
            if self._text[self._at] in "\"'":
                start = self._at
                self._string()
                keys.append(str(tomllib.loads(f"k = {self._text[start : self._at]}")["k"]))
            else:
                match = _BARE_KEY.match(self._text, self._at)
                assert match is not None
                keys.append(match.group())
                self._at = match.end()
            self._skip(_BLANK)
            if not self._text.startswith(".", self._at):
                return keys
            self._at += 1

    def _value(self, path: Path) -> None:
        head = self._text[self._at]
        if head in "\"'":
            self._string()
        elif head == "[":
            self._array(path)
        elif head == "{":
            self._inline_table(path)
        else:
            self._skip(_SCALAR)

    def _array(self, path: Path) -> None:
        self._at += 1
        index = 0
        while True:
            self._skip(_BETWEEN)
            if self._text[self._at] == "]":
                break
            self._note((*path, index))
            self._value((*path, index))
            index += 1
            self._skip(_BETWEEN)
            if self._text[self._at] == ",":
                self._at += 1
        self._at += 1

    def _inline_table(self, path: Path) -> None:
        self._at += 1
        while True:
            self._skip(_BETWEEN)
            if self._text[self._at] == "}":
                break
            self._pair(path)
            self._skip(_BETWEEN)
            if self._text[self._at] == ",":
                self._at += 1
        self._at += 1

    def _string(self) -> None:
        for pattern in _STRINGS:
            match = pattern.match(self._text, self._at)
            if match is not None:
                self._at = match.end()
                return
        raise AssertionError("not called on a string")

    def _skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self._text, self._at)
        assert match is not None
        self._at = match.end()

    def _note(self, path: Path) -> None:
        self._lines.setdefault(path, self._text.count("\n", 0, self._at) + 1)


_LONGEST_STATEMENT_LINES = 300  # each end is tried, so this bounds a start's delay
_HEADER_LINE = re.compile(r"^[ \t]*\[\[?[ \t]*([^\[\]\n]+?)[ \t]*\]\]?[ \t]*(?:#.*)?$")


def salvage(text: str, table: str, key: str) -> object | None:
    """Return the value of `key` in `[table]` from text that does not parse as a whole, else None.

    The statement itself must parse on its own: the fault has to lie elsewhere in the file. A
    table or key that appears twice is given up on, for nobody can say which one was meant.
    """
    lines = text.splitlines()
    statement = re.compile(
        rf"^[ \t]*(?:{re.escape(key)}|\"{re.escape(key)}\"|'{re.escape(key)}')[ \t]*="
    )
    here, found = "", []
    for number, line in enumerate(lines):
        header = _HEADER_LINE.match(line)
        if header is not None:
            here = header.group(1).strip("\"'")
        elif here == table and statement.match(line):
            found.append(number)
    if len(found) != 1:
        return None
    last = min(len(lines), found[0] + _LONGEST_STATEMENT_LINES)
    for end in range(found[0] + 1, last + 1):
        try:
            value: object = tomllib.loads("\n".join(lines[found[0] : end]))[key]
        except (ValueError, RecursionError):
            continue
        return value
    return None
