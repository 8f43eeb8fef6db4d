"""`deps run` itself, and its words read by hand: click takes longer than a placement.

What is read here means the same to the click command, which reads everything else: other commands
of `deps`, numbers and choices that it would refuse, whatever is wrong, and help.
"""

from __future__ import annotations

import gc
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from bootseer.depsnap.settings import DepsSettings

_TEXTS = {
    "--store": "store",
    "--cache": "cache",
    "--sign-key": "sign_key",
    "--events": "events",
    "--image-digest": "image_digest",
}
_LISTS = {
    "--key-file": "key_files",
    "--key-env": "key_env",
    "--also": "also",
    "--exclude": "exclude",
}
_FLAGS = {"--read-only": "read_only", "--allow-setuid": "allow_setuid"}
_NUMBERS = {
    "--wait-limit": "wait_limit",
    "--store-timeout": "store_timeout",
    "--max-age": "max_age",
    "--resolve-timeout": "resolve_timeout",
}
CHOICES = {
    "wait": ("auto", "always", "never"),
    "form": ("auto", "archive", "overlay", "bind", "symlink", "reflink", "hardlink", "copy"),
    "publish": ("background", "inline"),
}
DEFAULTS = {
    "key_files": (),
    "key_env": (),
    "also": (),
    "image_digest": "",
    "store": None,
    "cache": None,
    "sign_key": None,
    "wait": "auto",
    "wait_limit": 1800.0,
    "store_timeout": 4.0,
    "form": "auto",
    "read_only": False,
    "publish": "background",
    "max_age": 7.0,
    "resolve_timeout": 5.0,
    "exclude": (),
    "allow_setuid": False,
    "events": None,
}
"""What each parameter of the click command is when nobody gives it."""
_VARIABLES = {
    "BOOTSEER_STORE": "store",
    "BOOTSEER_CACHE": "cache",
    "BOOTSEER_SIGN_KEY": "sign_key",
    "BOOTSEER_EVENTS": "events",
}
_READ_BY_CLICK = ("BOOTSEER_DEPS_", "_BOOTSEER_COMPLETE")


def command(args: list[str]) -> int | None:
    """Run `deps run ...`; None where click is to read the words."""
    given = words_of(args[2:], os.environ)
    if given is None:
        return None
    from bootseer.cli import read_ahead

    read_ahead.ask_for(read_ahead.DEPS_RUN)
    gc.disable()  # until all is imported: a dozen collections, and no garbage among it
    from bootseer.errors import BootseerError

    try:
        code = run(**given)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except (BootseerError, OSError) as error:
        from bootseer.cli.shared import failures

        return failures.report(error)
    finally:
        gc.enable()


def words_of(words: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any] | None:
    """What `deps run WORDS...` asks for: arguments of `run`. None: click is to read it."""
    given: dict[str, Any] = dict(DEFAULTS)
    for name, value in environ.items():
        if value and name.startswith(_READ_BY_CLICK):
            return None
        if value and name in _VARIABLES:
            given[_VARIABLES[name]] = value
    at = 0
    while at < len(words) and words[at].startswith("-"):
        word = words[at]
        at += 1
        if word == "--":
            break
        name, equals, value = word.partition("=")
        if name in _FLAGS and not equals:
            given[_FLAGS[name]] = True
            continue
        if not equals:
            if at == len(words):
                return None
            value = words[at]
            at += 1
        if not _take(given, name, value):
            return None
    given["install"] = tuple(words[at:])
    return given if given["install"] else None


def _take(given: dict[str, Any], name: str, value: str) -> bool:
    """Take an option with its value; False for what click is to read."""
    if name in _TEXTS:
        given[_TEXTS[name]] = value
    elif name in _LISTS:
        given[_LISTS[name]] += (value,)
    elif name in _NUMBERS:
        if not value.isascii() or not value.replace(".", "", 1).isdigit():
            return False
        given[_NUMBERS[name]] = float(value)
    elif name.startswith("--") and value in CHOICES.get(name[2:], ()):
        given[name[2:]] = value
    else:
        return False
    return True


def settings_of(store: str | None, cache: str | None, **more: Any) -> DepsSettings:
    """Settings from options, with the defaults of a user who gave none."""
    from bootseer.config.paths import default_cache, default_store
    from bootseer.depsnap.settings import DepsSettings

    return DepsSettings(
        store=store or default_store(),
        cache=os.path.abspath(cache or default_cache()),
        share_trees=bool(cache),
        environ=dict(os.environ),
        cwd=os.getcwd(),
        **more,
    )


def run(
    install: Sequence[str],
    store: str | None,
    cache: str | None,
    events: str | None,
    max_age: float,
    wait_limit: float,
    store_timeout: float,
    resolve_timeout: float,
    read_only: bool,
    **rest: Any,
) -> int:
    """`deps run`: its parameters are those of the click command; returns the exit code."""
    command = list(install)
    from bootseer.depsnap.key import install_roots

    install_roots.begin_to_ask(
        command, os.environ, os.getcwd()
    )  # while all that follows is imported
    from bootseer.depsnap import run as runs
    from bootseer.depsnap.settings import DAY_S
    from bootseer.events.writer import open_writer

    if not gc.isenabled():
        gc.freeze()  # or the next collection looks through all that was imported
        gc.enable()
    settings = settings_of(
        store,
        cache,
        max_age_s=max_age * DAY_S,
        wait_limit_s=wait_limit,
        store_timeout_s=store_timeout,
        resolve_timeout_s=resolve_timeout,
        writable=not read_only,
        **rest,
    )
    if settings.share_trees and not os.path.lexists(os.path.join(settings.cache, "trees")):
        from bootseer.cli import read_ahead

        read_ahead.ask_for(read_ahead.DEPS_RESTORE)
    with open_writer(events) as writer:
        outcome = runs.execute(settings, command, writer)
    if outcome.reasons:
        what = "no snapshot kept: " if outcome.result == "installed" else ""
        what = f"installed, and {what}" if what and not outcome.code else what
        _say(f"{what}{'; '.join(outcome.reasons)}")
    for note in outcome.notes:
        _say(note)
    if not outcome.reasons and sys.stderr is not None and sys.stderr.isatty():
        form = outcome.details.get("bootseer.deps.form", "")
        _say(f"dependencies {outcome.result} {form}")
    return runs.follow(settings, outcome)


def _say(text: str) -> None:
    """Write one line to standard error; where that is closed or full, the exit code still tells."""
    try:
        sys.stderr.write(f"bootseer: {text}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass
