"""Settings of `bootseer start`: defaults < `bootseer.toml` < environment < flags.

The records of `sections` define names, types, defaults, choices and help. `paths` and the event
writer read the few environment variables of their own. `load_strictly` raises the first fault
(`start --check`); `load_tolerantly` never fails on a bad file or variable but returns what was
readable and a `Problem` for the rest, so that a job starts in spite of its configuration.
"""

from __future__ import annotations

import functools
import os
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from bootseer import light_dataclasses as dataclasses
from bootseer.config.paths import default_cache, default_runtime, default_store
from bootseer.config.sections import PLAIN_COMMANDS, SECTIONS, Config, Section
from bootseer.config.values import (
    Setting,
    Shape,
    Value,
    convert_toml_value,
    describe_toml_type,
    parse_text_value,
    suggest_name,
)
from bootseer.errors import BootseerError, UsageError, from_os_error
from bootseer.light_dataclasses import dataclass
from bootseer.system import regular_files

__all__ = [
    "DEFAULT_FILE",
    "Config",
    "Loaded",
    "Problem",
    "default_cache",
    "default_runtime",
    "default_store",
    "list_settings",
    "load_strictly",
    "load_tolerantly",
    "parse_flag",
]

DEFAULT_FILE = "bootseer.toml"
MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a setting could not be used; `section` is empty when the whole file could not."""

    section: str
    key: str
    message: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """The settings that could be read, and the problems of the others.

    A setting with a problem has the value of the next lower layer. `path` is None when no file
    was named and the working directory has none.
    """

    config: Config
    problems: tuple[Problem, ...]
    path: str | None


@functools.cache  # each layer asks for them
def list_settings() -> tuple[Setting, ...]:
    """Every setting there is, in the order of the documentation."""
    return tuple(
        setting
        for section, record in SECTIONS.items()
        for setting in _list_section_settings(section, record)
    )


def _list_section_settings(section: str, record: Section) -> Iterable[Setting]:
    hints = typing.get_type_hints(record)
    for item in dataclasses.fields(record):
        assert item.default is not dataclasses.MISSING
        hint, meta = hints[item.name], item.metadata
        choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
        env = meta["env"] or f"BOOTSEER_{section}_{item.name}".upper()
        shape: Shape = "command" if meta["words"] else _SHAPES.get(hint, "text")
        yield Setting(
            section, item.name, shape, item.default, choices, meta["minimum"], env, meta["help"]
        )


_SHAPES: Mapping[object, Shape] = types.MappingProxyType(
    {
        bool: "truth value",
        bool | None: "truth value",
        int: "whole number",
        float: "number",
        tuple[str, ...]: "list of texts",
    }
)


def load_strictly(
    path: str | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Value] | None = None,
) -> Config:
    """Read all layers; fail at the first fault.

    Raises `UsageError` naming the key, the file and the line (or the variable), `NotFoundError`
    or `AccessDeniedError` when the file cannot be read.
    """
    if path is not None:
        _read_text(path)  # raises the error with its own class and exit code
    loaded = load_tolerantly(path, environ, flags)
    if loaded.problems:
        more = len(loaded.problems) - 1
        suffix = f" (and {more} more)" if more else ""
        raise UsageError(loaded.problems[0].message + suffix)
    return loaded.config


def load_tolerantly(
    path: str | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Value] | None = None,
) -> Loaded:
    """Read all layers as far as possible; never raises for a bad file or variable.

    Without `path`, `bootseer.toml` of the working directory is used if it is there. `flags` maps
    full keys (`deps.store`) to values of the right type (see `parse_flag`).
    """
    if path is None and os.path.exists(DEFAULT_FILE):
        path = DEFAULT_FILE
    values: dict[str, Value] = {}
    problems: list[Problem] = []
    if path is not None:
        _apply_file(path, values, problems)
    _apply_environment(os.environ if environ is None else environ, values, problems)
    values.update(flags or {})
    chosen: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for key, value in values.items():
        section, name = key.split(".", 1)
        chosen[section][name] = value
    # The values were checked against the records' own types one by one.
    records: dict[str, Any] = {name: SECTIONS[name](**values) for name, values in chosen.items()}
    return Loaded(Config(**records), tuple(problems), path)


def parse_flag(text: str) -> tuple[str, Value]:
    """Parse `section.key=value`, the value written as in the environment; raises UsageError."""
    key, equals, value = text.partition("=")
    by_key = {setting.key: setting for setting in list_settings()}
    if not equals or key not in by_key:
        fault = f"unknown setting {key!r}{suggest_name(key, by_key)}" if equals else "no `=` in it"
        raise UsageError(f"--set {text}: {fault}; write SECTION.KEY=VALUE")
    try:
        return key, parse_text_value(by_key[key], value)
    except ValueError as error:
        raise UsageError(f"--set {key}: {error}; give {by_key[key].expected}") from error


def _read_text(path: str) -> str:
    try:
        # A named file may be a pipe (`<(…)`); the default file must be a regular one.
        opener = regular_files.opener if path == DEFAULT_FILE else None
        with open(path, "rb", opener=opener) as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise from_os_error(error, f"read the configuration {path}") from error
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"{path} is larger than {MAX_FILE_BYTES} bytes; name a configuration file")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{path}, line {line}: not UTF-8 text; save the file as UTF-8") from error


def _apply_file(path: str, values: dict[str, Value], problems: list[Problem]) -> None:
    try:
        text = _read_text(path)
    except BootseerError as error:
        problems.append(Problem("", "", str(error)))
        return
    import tomllib  # not loaded by a start without a file

    from bootseer.config import toml_lines

    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of 5,000 digits
        fault = _format_toml_error(error, text)
        problems.append(Problem("", "", f"{path}{fault}; correct the file"))
        _salvage_commands(text, values)
        return
    try:
        lines = toml_lines.find_key_lines(text)
    except RecursionError:  # nested to just the depth that `tomllib` can follow
        lines = {}
    by_section = {
        section: list(_list_section_settings(section, record))
        for section, record in SECTIONS.items()
    }
    for name, table in document.items():
        where = f"{path}, line {lines.get((name,), 1)}"
        if name not in by_section:
            hint = suggest_name(name, by_section)
            noun = "section" if isinstance(table, dict) else "key"
            problems.append(Problem(name, name, f"{where}: unknown {noun} {name!r}{hint}"))
        elif not isinstance(table, dict):
            fault = f"{name} is {describe_toml_type(table)}, but must be a table: [{name}]"
            problems.append(Problem(name, name, f"{where}: {fault}"))
        else:
            by_name = {setting.name: setting for setting in by_section[name]}
            for key, value in table.items():
                line = lines.get((name, key), 1)
                _apply_key(by_name, name, key, value, f"{path}, line {line}", values, problems)


def _apply_key(
    by_name: Mapping[str, Setting],
    section: str,
    key: str,
    value: object,
    where: str,
    values: dict[str, Value],
    problems: list[Problem],
) -> None:
    full = f"{section}.{key}"
    setting = by_name.get(key)
    if setting is None:
        fault = f"unknown key {full!r}{suggest_name(key, by_name)}"
        problems.append(Problem(section, full, f"{where}: {fault}"))
        return
    try:
        values[full] = convert_toml_value(setting, value)
    except ValueError as error:
        message = f"{where}: {full} {error}; give {setting.expected}"
        problems.append(Problem(section, full, message))


def _format_toml_error(error: Exception, source: str) -> str:
    """Move the place that `tomllib` puts last, "(at line 3, column 5)", to where ours stands."""
    fault, mark, place = str(error).rpartition(" (at ")
    if not mark:
        return f" cannot be read: {error}"
    if not place.startswith("line "):  # "end of document"
        place = f"line {source.count(chr(10)) + 1}"
    return f", {place.rstrip(')')}: not valid TOML: {fault}"


def _salvage_commands(text: str, values: dict[str, Value]) -> None:
    """Read the plain commands from a file that is damaged elsewhere: the job needs its inputs."""
    from bootseer.config import toml_lines

    for setting in (s for s in list_settings() if s.key in PLAIN_COMMANDS):
        raw = toml_lines.salvage_value(text, setting.section, setting.name)
        try:
            values[setting.key] = convert_toml_value(setting, raw)
        except ValueError:
            pass


def _apply_environment(
    environ: Mapping[str, str], values: dict[str, Value], problems: list[Problem]
) -> None:
    for setting in list_settings():
        text = environ.get(setting.env, "")
        if not text:
            continue
        try:
            values[setting.key] = parse_text_value(setting, text)
        except ValueError as error:
            message = f"the environment variable {setting.env} {error}; give {setting.expected}"
            problems.append(Problem(setting.section, setting.key, message))
