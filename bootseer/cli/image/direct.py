"""`image mount` and `image run`, without click where their arguments allow it.

On a node without an agent each import here delays a job, so everything is imported when needed.
"""

from __future__ import annotations

import gc
import os
import sys
import time

from bootseer.agent import client as agent
from bootseer.cli.image import words as image_words
from bootseer.entrypoint import job_process

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
"""How long `image run` looks for a block image in the registry.

A job waits 5 s at most for a registry that brings nothing; starting this process is part of that.
"""


def run_without_click(args: list[str], *, with_helper: bool = True) -> int | None:
    """Run `image mount ...` or `image run ...`; None if click must parse the arguments.

    Without a helper process the mount asks the registry itself, as in an agent, which has imported
    everything already.
    """
    if args[1] == "mount":
        fields = image_words.parse_mount(args[2:], os.environ)
        if fields is None:
            return None
        return _run_guarded(lambda: mount(fields, with_helper=with_helper))
    parsed = image_words.parse_run(args[2:], os.environ)
    return None if parsed is None else _run_guarded(lambda: run(*parsed))


def _run_guarded(body: Callable[[], int]) -> int:
    """Run `body` and return its exit code; print an error as one line, as `root.main` does.

    The garbage collector is off meanwhile: importing makes no garbage, and looking for some takes
    a twentieth of its time. A mount's worker, and `run` once it has mounted, turn it on again.
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

        return failures.report_error(error)
    finally:
        gc.enable()


def mount(fields: dict[str, Any], *, with_helper: bool = True) -> int:
    """Run `image mount`; `fields` are those of `MountSettings`, and `as_json`."""
    helper = _start_helper(fields, fields["directory"]) if with_helper else None
    from bootseer.cli.image import outcome
    from bootseer.imageprefetch.mount import mount as mounting
    from bootseer.imageprefetch.mount.interrupts import exit_on_signals
    from bootseer.imageprefetch.mount.settings import MountSettings

    as_json = fields.pop("as_json")
    outcome.export_events_directory(fields.get("events_dir", ""))
    with exit_on_signals():
        mounted = mounting.mount(MountSettings(**fields), helper)
    if as_json:
        outcome.print_json(mounted)
    else:
        outcome.print_mounted(mounted)
    return 0


def run(fields: dict[str, Any], options: tuple[str, ...], words: tuple[str, ...]) -> int:
    """Run `image run`: `fields` of `MountSettings`, podman's options, the container's command."""
    begun_s = time.monotonic()
    helper = None
    if not agent.is_available(fields.get("runtime", "")):
        helper = _start_helper(fields, None, hurried=True)
    from bootseer.cli.image import outcome
    from bootseer.imageprefetch.mount.settings import MountSettings
    from bootseer.imageprefetch.run import run_image

    outcome.export_events_directory(fields.get("events_dir", ""))
    settings = run_image.RunSettings(
        mount=MountSettings(
            directory="",
            options=_hurried_options(),
            look_s=_RUN_LOOK_S,
            look_begun_s=begun_s,
            **fields,
        ),
        options=options,
        words=words,
    )
    try:
        return run_image.run(
            settings,
            outcome.print_plan,
            lambda mount_settings: _mount(mount_settings, helper),
            job_process.say,
        )
    finally:
        if helper is not None:  # where it was not mounted at all
            helper.close()


def _mount(settings: MountSettings, helper: socket | None) -> MountedImage:
    """Mount through the node's agent, which has imported everything; without one, here."""
    from bootseer.imageprefetch.mount import mount as mounting
    from bootseer.imageprefetch.run import run_image

    try:
        if helper is None:
            mounted = _mount_by_agent(settings)
            if mounted is not None:
                return mounted
        return mounting.mount(settings, helper, run_image.import_the_rest)
    finally:
        gc.enable()  # the container may run for weeks


def _mount_by_agent(settings: MountSettings) -> MountedImage | None:
    """Return what the agent mounted; None if there is no agent."""
    if not agent.is_available(settings.runtime):
        return None
    from functools import partial

    from bootseer.imageprefetch.mount import mount_task

    return mount_task.mount_by(partial(agent.ask, runtime=settings.runtime), settings)


def _start_helper(
    fields: dict[str, Any], directory: str | None, *, hurried: bool = False
) -> socket | None:
    """Start a process that asks the registry meanwhile; None if the image cannot be mounted."""
    if fields["ref"].startswith(_LAYOUT) or not image_words.may_mount(directory):
        return None
    from bootseer.cli import read_ahead

    read_ahead.prefetch_modules(read_ahead.IMAGE_MOUNT)
    from bootseer.imageprefetch.resolve import registry_helper
    from bootseer.storage import options
    from bootseer.storage.oci import manifest

    del manifest, options  # both the helper and the server need them: imported once for both
    try:
        return registry_helper.start(
            fields["ref"],
            workload=fields.get("workload", ""),
            plain_http=fields["plain_http"],
            options=_hurried_options if hurried else _default_options,
            keep_config_in=_cache_directory(fields) if hurried else None,
        )
    except OSError:  # no process or descriptor to be had: the server asks the registry itself
        return None


def _cache_directory(fields: dict[str, Any]) -> str:
    from bootseer.config.paths import default_cache

    return os.path.abspath(fields.get("cache") or default_cache())


def _default_options() -> StoreOptions:
    from bootseer.storage.options import DEFAULTS

    return DEFAULTS


def _hurried_options() -> StoreOptions:
    """Options that give up soon: what fails for longer than 5 seconds is pulled by podman."""
    from bootseer.storage.options import StoreOptions

    return StoreOptions(retry_s=5.0, stall_s=5.0)
