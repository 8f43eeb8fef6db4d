"""One setting, and its value out of TOML or plain text. Pure: no file, no environment."""

from __future__ import annotations

import os
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Shape = Literal["text", "whole number", "number", "truth value", "list of texts", "command"]
Value = str | int | float | bool | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting as the reader and the documentation see it."""

    section: str
    name: str
    shape: Shape
    default: Value
    choices: tuple[str, ...]
    minimum: float | None
    env: str
    help: str

    @property
    def key(self) -> str:
        """The name in full, e.g. `deps.wait`."""
        return f"{self.section}.{self.name}"

    @property
    def expected(self) -> str:
        """The valid values, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        article = "an array of texts" if self.shape == "list of texts" else f"a {self.shape}"
        if self.shape == "command":
            article = "a command: an array of words, or one text that is split as a shell would"
        elif self.shape == "truth value":
            article = "true or false"
        return article + (f" of at least {self.minimum:g}" if self.minimum is not None else "")


def from_toml(setting: Setting, value: object) -> Value:
    """Check a TOML value; raises ValueError with "is ..." (without the valid values)."""
    match setting.shape, value:
        case "truth value", bool():
            return value
        case ("whole number", int()) if not isinstance(value, bool):
            return _in_range(setting, value)
        case ("number", int() | float()) if not isinstance(value, bool):
            try:
                return _in_range(setting, float(value))
            except OverflowError:
                raise ValueError("is out of range") from None
        case "text", str():
            return _chosen(setting, value)
        case "command", str():
            return _split(value)
        case (("list of texts" | "command"), list()):
            for index, item in enumerate(value):
                if not isinstance(item, str):
                    raise ValueError(f"has {kind(item)} at position {index + 1}")
                _without_nul(item)
            return tuple(value)
    raise ValueError(f"is {kind(value)}")


def from_text(setting: Setting, text: str) -> Value:
    """Parse a value of the environment or of `--set`; raises ValueError with "is ..."."""
    match setting.shape:
        case "truth value":
            truth = _TRUTHS.get(text.strip().lower())
            if truth is None:
                raise ValueError(f"is {text!r}")
            return truth
        case "whole number" | "number":
            try:
                number = int(text) if setting.shape == "whole number" else float(text)
            except ValueError:
                raise ValueError(f"is {text!r}") from None
            return _in_range(setting, number)
        case "list of texts":
            return tuple(item for item in text.split(os.pathsep) if item)
        case "command":
            return _split(text)
        case _:
            return _chosen(setting, text)


_TRUTHS: Mapping[str, bool] = types.MappingProxyType(
    {"true": True, "yes": True, "on": True, "1": True}
    | {"false": False, "no": False, "off": False, "0": False}
)


def _without_nul(text: str) -> str:
    """No program can be given such a word, no file such a name."""
    if "\0" in text:
        raise ValueError("has a NUL character")
    return text


def _split(text: str) -> tuple[str, ...]:
    _without_nul(text)
    try:
        import shlex  # loads much, and most settings are no commands

        return tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"cannot be split into words ({error})") from error


def _in_range(setting: Setting, number: float) -> Value:
    if isinstance(number, int) and abs(number) >= 1 << 63:
        raise ValueError("does not fit into 64 bits")
    if not number >= (setting.minimum if setting.minimum is not None else number):
        raise ValueError(f"is {number:g}")
    return number


def _chosen(setting: Setting, text: str) -> str:
    _without_nul(text)
    if setting.choices and text not in setting.choices:
        raise ValueError(f"is {text!r}{did_you_mean(text, setting.choices)}")
    return text


def kind(value: object) -> str:
    match value:
        case bool():
            return "a truth value"
        case int():
            return "a whole number"
        case float():
            return "a number"
        case str():
            return "a text"
        case list():
            return "an array"
        case dict():
            return "a table"
        case None:
            return "missing"
        case _:
            return "a date or time"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint for a misspelt name, or nothing."""
    import difflib  # only on the way to a message

    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
