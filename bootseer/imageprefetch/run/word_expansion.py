"""Variables in words, expanded as podman's --env-merge and a Dockerfile do. Pure.

`$NAME`, `${NAME}`, `${NAME:-WORD}` and `${NAME:+WORD}` stand for a variable's value, "" for an
unset one; a name that begins with a digit is that digit alone. Text in single quotes is kept as it
is, text in double quotes is expanded, and a backslash keeps the next character. `$` before anything
else stands for itself. Found by trying podman 4.3
(`tests/integration/imageprefetch/run/test_run_image.py` repeats that).
"""

from __future__ import annotations

from collections.abc import Mapping

_ESCAPED_IN_QUOTES = ('"', "$", "\\")


def expand_word(text: str, variables: Mapping[str, str]) -> str:
    """`text` with its variables expanded. Raises ValueError for text that cannot be parsed."""
    return _Expansion(text, variables).read_until("")


class _Expansion:
    """A text that is being expanded from its start."""

    def __init__(self, text: str, variables: Mapping[str, str]) -> None:
        self._text, self._variables, self._place = text, variables, 0

    def _peek(self) -> str:
        return self._text[self._place : self._place + 1]

    def _next(self) -> str:
        character = self._peek()
        self._place += 1
        return character

    def read_until(self, stop: str) -> str:
        """The text before `stop`, expanded; "" stands for the end of the text."""
        out = ""
        while (character := self._next()) != stop:
            if not character:
                raise ValueError(f"{self._text!r} lacks a closing {stop}")
            if character == "\\":
                out += self._next()
            elif character == "'":
                out += self._read_single_quoted()
            elif character == '"':
                out += self._read_double_quoted()
            elif character == "$":
                out += self._read_variable()
            else:
                out += character
        return out

    def _read_single_quoted(self) -> str:
        end = self._text.find("'", self._place)
        if end < 0:
            raise ValueError(f"{self._text!r} lacks a closing '")
        quoted = self._text[self._place : end]
        self._place = end + 1
        return quoted

    def _read_double_quoted(self) -> str:
        out = ""
        while (character := self._next()) != '"':
            if not character:
                raise ValueError(f'{self._text!r} lacks a closing "')
            if character == "$":
                out += self._read_variable()
            elif character == "\\" and self._peek() in _ESCAPED_IN_QUOTES:
                out += self._next()
            else:
                out += character
        return out

    def _read_variable(self) -> str:
        if self._peek() != "{":
            name = self._read_name()
            return self._variables.get(name, "") if name else "$"
        self._next()
        name = self._read_name()
        value = self._variables.get(name, "")
        character = self._next()
        if character == "}":
            return value
        modifier = self._next()
        word = self.read_until("}")
        if character != ":" or modifier not in ("-", "+"):
            raise ValueError(f"{self._text!r} has an unknown substitution")
        return word if bool(value) == (modifier == "+") else value

    def _read_name(self) -> str:
        if self._peek().isdecimal():
            return self._next()
        begin = self._place
        while self._peek().isalpha() or self._peek().isdecimal() or self._peek() == "_":
            self._next()
        return self._text[begin : self._place]
