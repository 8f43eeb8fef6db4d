"""Parsing of `image mount` and `image run` without click, whose import takes longer than a mount.

The result is the same as that of the click commands. They parse what is left out here: options
that are rarely given, anything that is wrong, and help.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_TEXTS = {
    "--workload": "workload",
    "--cache": "cache",
    "--runtime": "runtime",
    "--events": "events_dir",
    "--log-file": "log_file",
}
_FLAGS = {
    "--fill": ("fill", True),
    "--no-fill": ("fill", False),
    "--record": ("record", True),
    "--no-record": ("record", False),
    "--plain-http": ("plain_http", True),
    "--hot": ("hot", True),
    "--no-hot": ("hot", False),
}
_TEXTS_OF_RUN = {**_TEXTS, "--config": "config"}
_FLAGS_OF_MOUNT = {
    **_FLAGS,
    "--nosuid": ("nosuid", True),
    "--loop": ("loop", True),
    "--no-loop": ("loop", False),
    "--json": ("as_json", True),
}
_OPTIONS_FOR_CLICK = (
    *("--help", "-h", "--cache-limit", "--kept-limit", "--fill-rate"),
    *("--record-window", "--deadline", "--platform"),
)
"""Options of these commands that only click parses."""
_VARIABLES = {"BOOTSEER_CACHE": "cache", "BOOTSEER_RUNTIME": "runtime"}
_VARIABLES_FOR_CLICK = ("BOOTSEER_IMAGE_", "_BOOTSEER_COMPLETE")


def parse_mount(words: list[str], environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Parse `image mount WORDS...` into fields of `MountSettings`, and `as_json`.

    Returns None if click must parse it.
    """
    fields = _read_environment(environ)
    if fields is None or "--" in words:
        return None
    rest = _take_options(words, fields, _TEXTS, _FLAGS_OF_MOUNT)
    if rest is None or len(rest) != 2 or any(word.startswith("-") for word in rest):
        return None
    fields["ref"], fields["directory"] = rest
    fields.setdefault("as_json", False)
    return _finish(fields)


def parse_run(
    words: list[str], environ: Mapping[str, str]
) -> tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]] | None:
    """Parse `image run WORDS...`: fields of `MountSettings` and perhaps `config`, podman's options,
    the command.

    Returns None if click must parse it.
    """
    fields = _read_environment(environ)
    if fields is None:
        return None
    at = words.index("--") if "--" in words else len(words)
    rest = _take_options(words[:at], fields, _TEXTS_OF_RUN, _FLAGS)
    if not rest or rest[0].startswith("-"):
        return None
    fields["ref"] = rest[0]
    finished = _finish(fields)
    return None if finished is None else (finished, tuple(rest[1:]), tuple(words[at + 1 :]))


def _read_environment(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the fields that environment variables set; None if one is for click alone."""
    fields: dict[str, Any] = {}
    for name, value in environ.items():
        if name.startswith(_VARIABLES_FOR_CLICK) and value:
            return None
        if name in _VARIABLES and value:
            fields[_VARIABLES[name]] = value
    events = environ.get("BOOTSEER_EVENTS", "")
    if events and not events.endswith(".jsonl"):  # first steps are looked for in directories only
        fields["events_dir"] = events
    return fields


def _take_options(
    words: list[str],
    fields: dict[str, Any],
    texts: Mapping[str, str],
    flags: Mapping[str, tuple[str, bool]],
) -> list[str] | None:
    """Put known options into `fields`; return the other words, None if click must parse them."""
    rest = []
    following = iter(words)
    for word in following:
        name, equals, value = word.partition("=")
        if name in _OPTIONS_FOR_CLICK:
            return None
        if name in texts:
            text = value if equals else next(following, None)
            if text is None:
                return None
            fields[texts[name]] = text
        elif name in flags:
            if equals:
                return None
            field, setting = flags[name]
            fields[field] = setting
        else:
            rest.append(word)
    return rest


def _finish(fields: dict[str, Any]) -> dict[str, Any] | None:
    """Complete the fields; None if the events directory is a file, which click reports."""
    if fields.get("events_dir", "").endswith(".jsonl"):
        return None
    fields["plain_http"] = fields.get("plain_http") or None
    return fields


def may_mount(directory: str | None) -> bool:
    """Whether mounting can succeed here; if not, the mount itself finds and reports the reason."""
    return os.geteuid() == 0 and os.path.exists("/dev/fuse") and os.path.isdir(directory or "/")
