"""The words of `image mount` and `image run`, read by hand: click takes longer than a mount.

What is read here means the same to the click commands, which read everything else: options that
are rarely given, whatever is wrong, and help.
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
}
_FLAGS_OF_MOUNT = {
    **_FLAGS,
    "--hot": ("hot", True),
    "--no-hot": ("hot", False),
    "--nosuid": ("nosuid", True),
    "--loop": ("loop", True),
    "--no-loop": ("loop", False),
    "--json": ("as_json", True),
}
_OTHERS = (
    *("--help", "-h", "--cache-limit", "--kept-limit", "--fill-rate"),
    *("--record-window", "--deadline", "--platform"),
)
"""Options of ours that click reads."""
_VARIABLES = {"BOOTSEER_CACHE": "cache", "BOOTSEER_RUNTIME": "runtime"}
_READ_BY_CLICK = ("BOOTSEER_IMAGE_", "_BOOTSEER_COMPLETE")


def mount_words(words: list[str], environ: Mapping[str, str]) -> dict[str, Any] | None:
    """What `image mount WORDS...` asks for: fields of `MountSettings`, and `as_json`.

    None: click is to read it.
    """
    given = _from_environment(environ)
    if given is None or "--" in words:
        return None
    rest = _read(words, given, _TEXTS, _FLAGS_OF_MOUNT)
    if rest is None or len(rest) != 2 or any(word.startswith("-") for word in rest):
        return None
    given["ref"], given["directory"] = rest
    given.setdefault("as_json", False)
    return _checked(given)


def run_words(
    words: list[str], environ: Mapping[str, str]
) -> tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]] | None:
    """What `image run WORDS...` asks for: fields of `MountSettings`, podman's options, a command.

    None: click is to read it.
    """
    given = _from_environment(environ)
    if given is None:
        return None
    at = words.index("--") if "--" in words else len(words)
    rest = _read(words[:at], given, _TEXTS, _FLAGS)
    if not rest or rest[0].startswith("-"):
        return None
    given["ref"] = rest[0]
    checked = _checked(given)
    return None if checked is None else (checked, tuple(rest[1:]), tuple(words[at + 1 :]))


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """What variables say; None where one says what click alone reads."""
    given: dict[str, Any] = {}
    for name, value in environ.items():
        if name.startswith(_READ_BY_CLICK) and value:
            return None
        if name in _VARIABLES and value:
            given[_VARIABLES[name]] = value
    events = environ.get("BOOTSEER_EVENTS", "")
    if events and not events.endswith(".jsonl"):  # a file: nobody looks there for a first step
        given["events_dir"] = events
    return given


def _read(
    words: list[str],
    given: dict[str, Any],
    texts: Mapping[str, str],
    flags: Mapping[str, tuple[str, bool]],
) -> list[str] | None:
    """Take our options into `given`; the other words, or None where click is to read them."""
    rest = []
    following = iter(words)
    for word in following:
        name, equals, value = word.partition("=")
        if name in _OTHERS:
            return None
        if name in texts:
            text = value if equals else next(following, None)
            if text is None:
                return None
            given[texts[name]] = text
        elif name in flags:
            if equals:
                return None
            field, setting = flags[name]
            given[field] = setting
        else:
            rest.append(word)
    return rest


def _checked(given: dict[str, Any]) -> dict[str, Any] | None:
    if given.get("events_dir", "").endswith(".jsonl"):
        return None
    given["plain_http"] = given.get("plain_http") or None
    return given


def may_mount(directory: str | None) -> bool:
    """Whether mounting has a chance here; what is wrong is found out, and said, by the mount."""
    return os.geteuid() == 0 and os.path.exists("/dev/fuse") and os.path.isdir(directory or "/")
