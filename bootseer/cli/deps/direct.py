"""`deps run`, parsed without click, whose import takes longer than placing a snapshot.

The result is the same as that of the click command. It parses what is left out here: numbers and
choices that it would refuse, anything else that is wrong, and help.
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
"""The default of each parameter of the click command."""
_VARIABLES = {
    "BOOTSEER_STORE": "store",
    "BOOTSEER_CACHE": "cache",
    "BOOTSEER_SIGN_KEY": "sign_key",
    "BOOTSEER_EVENTS": "events",
}
_VARIABLES_FOR_CLICK = ("BOOTSEER_DEPS_", "_BOOTSEER_COMPLETE")


def run_without_click(args: list[str]) -> int | None:
    """Run `deps run ...` and return its exit code; None if click must parse the arguments."""
    parameters = parse_run(args[2:], os.environ)
    if parameters is None:
        return None
    from bootseer.cli import read_ahead

    read_ahead.prefetch_modules(read_ahead.DEPS_RUN)
    gc.disable()  # importing would cause a dozen collections, and makes no garbage
    from bootseer.errors import BootseerError

    try:
        code = run(**parameters)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except (BootseerError, OSError) as error:
        from bootseer.cli.shared import failures

        return failures.report_error(error)
    finally:
        gc.enable()


def parse_run(words: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Parse `deps run WORDS...` into the arguments of `run`; None if click must parse it."""
    parameters: dict[str, Any] = dict(DEFAULTS)
    for name, value in environ.items():
        if value and name.startswith(_VARIABLES_FOR_CLICK):
            return None
        if value and name in _VARIABLES:
            parameters[_VARIABLES[name]] = value
    at = 0
    while at < len(words) and words[at].startswith("-"):
        word = words[at]
        at += 1
        if word == "--":
            break
        name, equals, value = word.partition("=")
        if name in _FLAGS and not equals:
            parameters[_FLAGS[name]] = True
            continue
        if not equals:
            if at == len(words):
                return None
            value = words[at]
            at += 1
        if not _take_option(parameters, name, value):
            return None
    parameters["install"] = tuple(words[at:])
    return parameters if parameters["install"] else None


def _take_option(parameters: dict[str, Any], name: str, value: str) -> bool:
    """Put an option's value into `parameters`; return whether it is one that is parsed here."""
    if name in _TEXTS:
        parameters[_TEXTS[name]] = value
    elif name in _LISTS:
        parameters[_LISTS[name]] += (value,)
    elif name in _NUMBERS:
        if not value.isascii() or not value.replace(".", "", 1).isdigit():
            return False
        parameters[_NUMBERS[name]] = float(value)
    elif name.startswith("--") and value in CHOICES.get(name[2:], ()):
        parameters[name[2:]] = value
    else:
        return False
    return True


def make_settings(store: str | None, cache: str | None, **more: Any) -> DepsSettings:
    """Make settings from options, with default paths for those that are not given.

    Unpacked trees are shared between starts only if a cache is given.
    """
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
    """Run `deps run` and return its exit code; its parameters are those of the click command."""
    command = list(install)
    from bootseer.depsnap.key import install_roots

    # In the background, during the imports that follow.
    install_roots.begin_to_ask(command, os.environ, os.getcwd())
    from bootseer.depsnap import run as runs
    from bootseer.depsnap.settings import DAY_S
    from bootseer.entrypoint import job_process
    from bootseer.events.writer import open_writer

    if not gc.isenabled():
        gc.freeze()  # otherwise the next collection examines everything that was imported
        gc.enable()
    settings = make_settings(
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

        read_ahead.prefetch_modules(read_ahead.DEPS_RESTORE)
    with open_writer(events) as writer:
        outcome = runs.execute(settings, command, writer)
    if outcome.reasons:
        prefix = "no snapshot kept: " if outcome.result == "installed" else ""
        prefix = f"installed, and {prefix}" if prefix and not outcome.code else prefix
        job_process.say(f"{prefix}{'; '.join(outcome.reasons)}")
    for note in outcome.notes:
        job_process.say(note)
    if not outcome.reasons and sys.stderr is not None and sys.stderr.isatty():
        form = outcome.details.get("bootseer.deps.form", "")
        job_process.say(f"dependencies {outcome.result} {form}")
    return runs.follow(settings, outcome)
