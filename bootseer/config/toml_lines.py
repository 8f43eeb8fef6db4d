"""The lines on which the keys of a TOML file stand, which `tomllib` does not report.

Works on text that `tomllib` has accepted, so it need not find faults, only skip values exactly.
Paths are tuples of keys and, for elements of arrays, indices from 0; lines count from 1.
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


def find_key_lines(text: str) -> dict[Path, int]:
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
                prefix = self._scan_header()
            else:
                self._scan_pair(prefix)
            self._skip(_BETWEEN)
        return self._lines

    def _scan_header(self) -> Path:
        brackets = 2 if self._text.startswith("[[", self._at) else 1
        self._at += brackets
        path: Path = ()
        keys = self._scan_dotted_key()
        for position, key in enumerate(keys):
            path = (*path, key)
            self._record_line(path)
            is_last = position == len(keys) - 1
            if is_last and brackets == 2:
                self._tables[path] = self._tables.get(path, 0) + 1
            if path in self._tables:  # a later header refers to the newest element
                path = (*path, self._tables[path] - 1)
                self._record_line(path)
        self._at += brackets
        return path

    def _scan_pair(self, prefix: Path) -> None:
        path = prefix
        for key in self._scan_dotted_key():
            path = (*path, key)
            self._record_line(path)
        self._at += 1  # the equals sign
        self._skip(_BLANK)
        self._scan_value(path)

    def _scan_dotted_key(self) -> list[str]:
        """Read `a . "b".c`; stop on what follows it."""
        keys = []
        while True:
            self._skip(_BLANK)
            if self._text[self._at] in "\"'":
                start = self._at
                self._scan_string()
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

    def _scan_value(self, path: Path) -> None:
        head = self._text[self._at]
        if head in "\"'":
            self._scan_string()
        elif head == "[":
            self._scan_array(path)
        elif head == "{":
            self._scan_inline_table(path)
        else:
            self._skip(_SCALAR)

    def _scan_array(self, path: Path) -> None:
        self._at += 1
        index = 0
        while True:
            self._skip(_BETWEEN)
            if self._text[self._at] == "]":
                break
            self._record_line((*path, index))
            self._scan_value((*path, index))
            index += 1
            self._skip(_BETWEEN)
            if self._text[self._at] == ",":
                self._at += 1
        self._at += 1

    def _scan_inline_table(self, path: Path) -> None:
        self._at += 1
        while True:
            self._skip(_BETWEEN)
            if self._text[self._at] == "}":
                break
            self._scan_pair(path)
            self._skip(_BETWEEN)
            if self._text[self._at] == ",":
                self._at += 1
        self._at += 1

    def _scan_string(self) -> None:
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

    def _record_line(self, path: Path) -> None:
        self._lines.setdefault(path, self._text.count("\n", 0, self._at) + 1)


_LONGEST_STATEMENT_LINES = 300  # each end is tried: bounds the delay of a start
_HEADER_LINE = re.compile(r"^[ \t]*\[\[?[ \t]*([^\[\]\n]+?)[ \t]*\]\]?[ \t]*(?:#.*)?$")


def salvage_value(text: str, table: str, key: str) -> object | None:
    """Return the value of `key` in `[table]` from text that does not parse as a whole, or None.

    The statement must parse on its own: the fault has to lie elsewhere in the file. A table or
    key that appears twice gives None, as it is unclear which one was meant.
    """
    lines = text.splitlines()
    statement = re.compile(
        rf"^[ \t]*(?:{re.escape(key)}|\"{re.escape(key)}\"|'{re.escape(key)}')[ \t]*="
    )
    current_table = ""
    starts: list[int] = []
    for number, line in enumerate(lines):
        header = _HEADER_LINE.match(line)
        if header is not None:
            current_table = header.group(1).strip("\"'")
        elif current_table == table and statement.match(line):
            starts.append(number)
    if len(starts) != 1:
        return None
    last = min(len(lines), starts[0] + _LONGEST_STATEMENT_LINES)
    for end in range(starts[0] + 1, last + 1):
        try:
            value: object = tomllib.loads("\n".join(lines[starts[0] : end]))[key]
        except (ValueError, RecursionError):
            continue
        return value
    return None
