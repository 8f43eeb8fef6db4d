"""Settings of `bootseer start`: defaults < `bootseer.toml` < environment < flags.

The records of `config_sections` own names, types, defaults, choices and help. Apart from the
event writer this is the only module that reads the environment. `load` is strict
(`start --check`); `read` never fails on a bad file or variable but returns what was readable and
a `Problem` for the rest, so that a job starts in spite of its configuration.
"""

from __future__ import annotations

import dataclasses
import json
import os
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from bootseer.config.paths import (
    default_cache,
    default_runtime,
    default_store,
    plain_http_hosts,
    registries_conf_files,
    registry_auth_files,
    registry_hosts_directories,
)
from bootseer.config.sections import PLAIN_COMMANDS, SECTIONS, Config, Section
from bootseer.config.values import Setting, Shape, Value, did_you_mean, from_text, from_toml, kind
from bootseer.errors import BootseerError, UsageError, from_os_error
from bootseer.system import regular_files

__all__ = [
    "DEFAULT_FILE",
    "Config",
    "Loaded",
    "Problem",
    "default_cache",
    "default_runtime",
    "default_store",
    "load",
    "parse_flag",
    "plain_http_hosts",
    "read",
    "registries_conf_files",
    "registry_auth_files",
    "registry_hosts_directories",
    "settings",
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
    """What could be read, and what could not. Settings with a problem have the next lower
    layer's value. `path` is None when no file was asked for and none is there."""

    config: Config
    problems: tuple[Problem, ...]
    path: str | None


def settings() -> tuple[Setting, ...]:
    """Every setting there is, in the order of the documentation."""
    return tuple(
        setting for section, record in SECTIONS.items() for setting in _of_section(section, record)
    )


def _of_section(section: str, record: Section) -> Iterable[Setting]:
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
    {bool: "truth value", int: "whole number", float: "number", tuple[str, ...]: "list of texts"}
)


def load(
    path: str | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Value] | None = None,
) -> Config:
    """Read all layers strictly.

    Raises `UsageError` naming the key, the file and the line (or the variable), `NotFoundError`
    or `AccessDeniedError` when the file cannot be read.
    """
    if path is not None:
        _read_text(path)  # raises the error with its own class and exit code
    loaded = read(path, environ, flags)
    if loaded.problems:
        more = len(loaded.problems) - 1
        suffix = f" (and {more} more)" if more else ""
        raise UsageError(loaded.problems[0].message + suffix)
    return loaded.config


def read(
    path: str | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Value] | None = None,
) -> Loaded:
    """Read all layers as far as they can be read; never raises for a bad file or variable.

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
    known = {setting.key: setting for setting in settings()}
    if not equals or key not in known:
        fault = f"unknown setting {key!r}{did_you_mean(key, known)}" if equals else "no `=` in it"
        raise UsageError(f"--set {text}: {fault}; write SECTION.KEY=VALUE")
    try:
        return key, from_text(known[key], value)
    except ValueError as error:
        raise UsageError(f"--set {key}: {error}; give {known[key].expected}") from error


def _read_text(path: str) -> str:
    try:
        # What is named may be `<(…)`; what merely stands there is a file or nothing to wait for.
        found_here = regular_files.opener if path == DEFAULT_FILE else None
        with open(path, "rb", opener=found_here) as file:
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
    import tomllib  # a start without a file is spared it

    from bootseer.config import toml_lines

    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of 5,000 digits
        problems.append(Problem("", "", f"{path}{_toml_fault(error, text)}; correct the file"))
        _salvage_commands(text, values)
        return
    try:
        lines = toml_lines.key_lines(text)
    except RecursionError:  # nested as deep as `tomllib` could just follow
        lines = {}
    by_section = {section: list(_of_section(section, SECTIONS[section])) for section in SECTIONS}
    for name, table in document.items():
        where = f"{path}, line {lines.get((name,), 1)}"
        if name not in by_section:
            hint = did_you_mean(name, by_section)
            what = "section" if isinstance(table, dict) else "key"
            problems.append(Problem(name, name, f"{where}: unknown {what} {name!r}{hint}"))
        elif not isinstance(table, dict):
            fault = f"{name} is {kind(table)}, but must be a table: [{name}]"
            problems.append(Problem(name, name, f"{where}: {fault}"))
        else:
            known = {setting.name: setting for setting in by_section[name]}
            for key, value in table.items():
                line = lines.get((name, key), 1)
                _apply_key(known, name, key, value, f"{path}, line {line}", values, problems)


def _apply_key(
    known: Mapping[str, Setting],
    section: str,
    key: str,
    value: object,
    where: str,
    values: dict[str, Value],
    problems: list[Problem],
) -> None:
    full = f"{section}.{key}"
    setting = known.get(key)
    if setting is None:
        fault = f"unknown key {full!r}{did_you_mean(key, known)}"
        problems.append(Problem(section, full, f"{where}: {fault}"))
        return
    try:
        values[full] = from_toml(setting, value)
    except ValueError as error:
        message = f"{where}: {full} {error}; give {setting.expected}"
        problems.append(Problem(section, full, message))


def _toml_fault(error: Exception, source: str) -> str:
    """`tomllib` ends with "(at line 3, column 5)"; put the line where our messages have it."""
    fault, mark, place = str(error).rpartition(" (at ")
    if not mark:
        return f" cannot be read: {error}"
    if not place.startswith("line "):  # "end of document"
        place = f"line {source.count(chr(10)) + 1}"
    return f", {place.rstrip(')')}: not valid TOML: {fault}"


def _salvage_commands(text: str, values: dict[str, Value]) -> None:
    """A job whose configuration is damaged elsewhere still needs its inputs."""
    from bootseer.config import toml_lines

    for setting in (s for s in settings() if s.key in PLAIN_COMMANDS):
        raw = toml_lines.salvage(text, setting.section, setting.name)
        try:
            values[setting.key] = from_toml(setting, raw)
        except ValueError:
            pass


def _apply_environment(
    environ: Mapping[str, str], values: dict[str, Value], problems: list[Problem]
) -> None:
    for setting in settings():
        text = environ.get(setting.env, "")
        if not text:
            continue
        try:
            values[setting.key] = from_text(setting, text)
        except ValueError as error:
            message = f"the environment variable {setting.env} {error}; give {setting.expected}"
            problems.append(Problem(setting.section, setting.key, message))


def describe() -> str:
    """The body of the generated document on configuration, in Markdown."""
    import inspect  # not at a start's cost

    parts = [_INTRODUCTION]
    for section, record in SECTIONS.items():
        purpose = (inspect.getdoc(record) or "").partition(":")[2].strip()
        parts.append(f"## `[{section}]`\n\n{purpose[:1].upper()}{purpose[1:]}\n")
        rows = ["| key | value | default | variable | meaning |", "|---|---|---|---|---|"]
        for item in _of_section(section, record):
            default = json.dumps(list(item.default) if item.default == () else item.default)
            cells = (f"`{item.name}`", item.expected, f"`{default}`", f"`{item.env}`", item.help)
            rows.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


_INTRODUCTION = """\
`bootseer start` reads `bootseer.toml` of the working directory, or the file named by `-c`. A
setting's value comes from, the later over the earlier: its default, the file, the environment,
the command line (`--events`, `--store`, `--cache`, `--set SECTION.KEY=VALUE`). Paths are relative
to the working directory of `bootseer start`, as they are for the commands in the file. In the
environment an empty variable counts as unset, several paths are separated by `:`, and a command
is split into words as a shell would.

A fault in the configuration never keeps a job from starting. `bootseer start --check -c FILE`
names the first fault with its key, file and line, and exits with code 2; without `--check`:

| fault | what `start` does |
|---|---|
| on its own command line (`--set`) | says so and exits with code 2: nothing has begun |
| a key, a type or a value in `[job]`, or its variable | warns; that setting has its default |
| a key, a type or a value in `[deps]`, or its variable | warns; `install` runs plainly |
| a key, a type or a value in `[checkpoint]`, or its variable | warns; `load` runs plainly |
| a key, a type or a value in `[image]`, or its variable | warns; nothing is read ahead |
| the file is not valid TOML | warns; `install` and `load` run plainly as far as they can be read |
| a command cannot be read, or the whole file cannot | warns; the job starts without it |

The warning is one line on standard error. An event named `config` with `status=fallback` carries
the reason into the report.
"""
