"""One setting, and the check of its value in TOML or plain text. Pure: no file, no environment."""

from __future__ import annotations

import os
import types
from collections.abc import Iterable, Mapping
from typing import Literal

from bootseer.light_dataclasses import dataclass

Shape = Literal["text", "whole number", "number", "truth value", "list of texts", "command"]
Value = str | int | float | bool | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Setting:
    """The description of one setting; `minimum` is None where there is no least value.

    A `default` of None is a value that can only be had by leaving the setting out.
    """

    section: str
    name: str
    shape: Shape
    default: Value | None
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


def convert_toml_value(setting: Setting, value: object) -> Value:
    """Check a TOML value and convert it.

    Raises ValueError, its message without the setting's key and valid values: "is a date".
    """
    match setting.shape, value:
        case "truth value", bool():
            return value
        case ("whole number", int()) if not isinstance(value, bool):
            return _check_range(setting, value)
        case ("number", int() | float()) if not isinstance(value, bool):
            try:
                return _check_range(setting, float(value))
            except OverflowError:
                raise ValueError("is out of range") from None
        case "text", str():
            return _check_choice(setting, value)
        case "command", str():
            return _split_command(value)
        case (("list of texts" | "command"), list()):
            for index, item in enumerate(value):
                if not isinstance(item, str):
                    raise ValueError(f"has {describe_toml_type(item)} at position {index + 1}")
                _check_no_nul(item)
            return tuple(value)
    raise ValueError(f"is {describe_toml_type(value)}")


def parse_text_value(setting: Setting, text: str) -> Value:
    """Parse a value of the environment or of `--set`; raises ValueError as `convert_toml_value`."""
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
            return _check_range(setting, number)
        case "list of texts":
            return tuple(item for item in text.split(os.pathsep) if item)
        case "command":
            return _split_command(text)
        case _:
            return _check_choice(setting, text)


_TRUTHS: Mapping[str, bool] = types.MappingProxyType(
    {"true": True, "yes": True, "on": True, "1": True}
    | {"false": False, "no": False, "off": False, "0": False}
)


def _check_no_nul(text: str) -> None:
    """Refuse a text that can be neither a program's argument nor a file's name."""
    if "\0" in text:
        raise ValueError("has a NUL character")


def _split_command(text: str) -> tuple[str, ...]:
    _check_no_nul(text)
    try:
        import shlex  # slow to load, and most settings are no commands

        return tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"cannot be split into words ({error})") from error


def _check_range(setting: Setting, number: float) -> Value:
    if isinstance(number, int) and abs(number) >= 1 << 63:
        raise ValueError("does not fit into 64 bits")
    if not number >= (setting.minimum if setting.minimum is not None else number):
        raise ValueError(f"is {number:g}")
    return number


def _check_choice(setting: Setting, text: str) -> str:
    _check_no_nul(text)
    if setting.choices and text not in setting.choices:
        raise ValueError(f"is {text!r}{suggest_name(text, setting.choices)}")
    return text


def describe_toml_type(value: object) -> str:
    """Name the type of a TOML value, with its article, for messages."""
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


def suggest_name(name: str, valid: Iterable[str]) -> str:
    """A hint for a misspelt name, "" where none is similar."""
    import difflib  # needed by messages alone

    close = difflib.get_close_matches(name, list(valid), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
