"""`image mount` and `image run` themselves; click reads their words only where it has to.

On a node without an agent all that is imported here delays a job, so everything is imported late.
"""

from __future__ import annotations

import gc
import os
import sys
import time

from bootseer.agent import client as agent
from bootseer.cli.image import words as image_words

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _socket import socket
    from collections.abc import Callable
    from typing import Any

    from bootseer.imageprefetch.mount.mount import MountedImage
    from bootseer.imageprefetch.mount.settings import MountSettings
    from bootseer.storage.options import StoreOptions

_LAYOUT = "oci-layout:"
_RUN_LOOK_S = 4.0
"""A job waits 5 s at most for a registry that brings nothing; our own start is part of that."""


def command(args: list[str], *, helped: bool = True) -> int | None:
    """Run `image mount ...` or `image run ...`; None where click is to read the words.

    A mount that is not `helped` asks the registry by itself: all is imported already.
    """
    if args[1] == "mount":
        given = image_words.mount_words(args[2:], os.environ)
        return None if given is None else _guarded(lambda: mount(given, helped=helped))
    read = image_words.run_words(args[2:], os.environ)
    return None if read is None else _guarded(lambda: run(*read))


def _guarded(body: Callable[[], int]) -> int:
    """As `root.main` has it: errors are one line and an exit code.

    Without collections of garbage, of which importing makes none: looking for it takes a
    twentieth of that time. A mount's worker, and `run` once it has mounted, collect again.
    """
    from bootseer.errors import BootseerError

    gc.disable()
    try:
        code = body()
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        if sys.stderr is not None:
            sys.stderr.write("\n")
        return agent.INTERRUPTED
    except (BootseerError, OSError) as error:
        from bootseer.cli.shared import failures

        return failures.report(error)
    finally:
        gc.enable()


def mount(given: dict[str, Any], *, helped: bool = True) -> int:
    """`image mount`: `given` are fields of `MountSettings`, and `as_json`."""
    helper = _helper(given, given["directory"]) if helped else None
    from bootseer.cli.image import outcome
    from bootseer.imageprefetch.mount import mount as mounting
    from bootseer.imageprefetch.mount.interrupts import exit_on_signals
    from bootseer.imageprefetch.mount.settings import MountSettings

    as_json = given.pop("as_json")
    outcome.write_events_to(given.get("events_dir", ""))
    with exit_on_signals():
        made = mounting.mount(MountSettings(**given), helper)
    if as_json:
        outcome.print_json(made)
    else:
        outcome.tell(made)
    return 0


def run(given: dict[str, Any], options: tuple[str, ...], words: tuple[str, ...]) -> int:
    """`image run`: `given` are fields of `MountSettings`; podman's options, a command."""
    begun_s = time.monotonic()
    helper = None
    if not agent.is_available(given.get("runtime", "")):
        helper = _helper(given, None, hurried=True)
    from bootseer.cli.image import outcome
    from bootseer.imageprefetch.mount.settings import MountSettings
    from bootseer.imageprefetch.run import run_image

    outcome.write_events_to(given.get("events_dir", ""))
    settings = run_image.RunSettings(
        mount=MountSettings(
            directory="", options=_hurried(), look_s=_RUN_LOOK_S, look_begun_s=begun_s, **given
        ),
        options=options,
        words=words,
    )
    try:
        return run_image.run(
            settings,
            outcome.report_plan,
            lambda wanted: _mounted(wanted, helper),
            outcome.complain,
        )
    finally:
        if helper is not None:  # where it was not mounted at all
            helper.close()


def _mounted(settings: MountSettings, helper: socket | None) -> MountedImage:
    """Have the node's agent mount, which has all imported that it takes; else do it here."""
    from bootseer.imageprefetch.mount import mount as mounting
    from bootseer.imageprefetch.run import run_image

    try:
        if helper is None:
            made = _mounted_by_agent(settings)
            if made is not None:
                return made
        return mounting.mount(settings, helper, run_image.import_the_rest)
    finally:
        gc.enable()  # the container may run for weeks


def _mounted_by_agent(settings: MountSettings) -> MountedImage | None:
    """What the agent mounted; None where there is none."""
    if not agent.is_available(settings.runtime):
        return None
    from functools import partial

    from bootseer.imageprefetch.mount import mount_task

    return mount_task.mount_by(partial(agent.ask, runtime=settings.runtime), settings)


def _helper(
    given: dict[str, Any], directory: str | None, *, hurried: bool = False
) -> socket | None:
    """A process that asks the registry from now on; None where mounting has no chance."""
    if given["ref"].startswith(_LAYOUT) or not image_words.may_mount(directory):
        return None
    from bootseer.cli import read_ahead

    read_ahead.ask_for(read_ahead.IMAGE_MOUNT)
    from bootseer.imageprefetch.resolve import registry_helper
    from bootseer.storage import options
    from bootseer.storage.oci import manifest

    del manifest, options  # both the helper and the server need them: imported once for both
    try:
        return registry_helper.start(
            given["ref"],
            workload=given.get("workload", ""),
            plain_http=given["plain_http"],
            options=_hurried if hurried else _usual,
            keep_config_in=_cache(given) if hurried else None,
        )
    except OSError:  # no process or descriptor to be had: the server asks the registry itself
        return None


def _cache(given: dict[str, Any]) -> str:
    from bootseer.config.paths import default_cache

    return os.path.abspath(given.get("cache") or default_cache())


def _usual() -> StoreOptions:
    from bootseer.storage.options import DEFAULTS

    return DEFAULTS


def _hurried() -> StoreOptions:
    """Podman's own pull waits for nobody: what fails for longer is pulled plainly."""
    from bootseer.storage.options import StoreOptions

    return StoreOptions(retry_s=5.0, stall_s=5.0)
