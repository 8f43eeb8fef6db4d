"""`image mount` and `image run`, without click where their arguments allow it.

On a node without an agent each import here delays a job, so everything is imported when needed.
"""

from __future__ import annotations

import gc
import os
import sys
import time

from bootseer.agent import client as agent
from bootseer.cli.image import by_agent
from bootseer.cli.image import words as image_words
from bootseer.entrypoint import job_process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _socket import socket
    from collections.abc import Callable
    from typing import Any

    from bootseer.agent.client_programs import ClientPrograms
    from bootseer.imageprefetch.mount.complete_mount import KeptMount
    from bootseer.imageprefetch.mount.mount import MountedImage
    from bootseer.imageprefetch.mount.settings import MountSettings
    from bootseer.storage.options import StoreOptions

_LAYOUT = "oci-layout:"
_RUN_LOOK_S = 4.0
"""How long `image run` looks for a block image in the registry.

A job waits 5 s at most for a registry that brings nothing; starting this process is part of that.
"""


def run_without_click(
    args: list[str], *, in_agent: bool = False, programs: ClientPrograms | None = None
) -> int | None:
    """Run `image mount ...` or `image run ...`; None if click must parse the arguments.

    In an agent, which has imported everything already, a mount's server asks the registry itself.
    `programs` has podman run by its client.
    """
    if args[1] == "mount":
        fields = image_words.parse_mount(args[2:], os.environ)
        if fields is None:
            return None
        return _run_guarded(lambda: mount(fields, with_helper=not in_agent))
    parsed = image_words.parse_run(args[2:], os.environ)
    if parsed is None:
        return None
    return _run_guarded(lambda: run(*parsed, programs=programs))


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


def run(
    fields: dict[str, Any],
    options: tuple[str, ...],
    words: tuple[str, ...],
    *,
    programs: ClientPrograms | None = None,
) -> int:
    """Run `image run`: `fields` of `MountSettings` and perhaps `config`, the file with what the
    container needs besides; podman's options; the container's command.

    In a task of the agent, `programs` has podman run by its client.
    """
    in_agent = programs is not None
    begun_s = time.monotonic()
    config = fields.pop("config", "")
    helper = None
    if config if in_agent else not agent.is_available(fields.get("runtime", "")):
        helper = _start_helper(
            fields, None, in_agent=in_agent, hurried=True, digest_first=bool(config)
        )
    from bootseer.cli.image import outcome
    from bootseer.imageprefetch.mount.settings import MountSettings
    from bootseer.imageprefetch.run import run_image
    from bootseer.imageprefetch.run.command import run_foreground

    outcome.export_events_directory(fields.get("events_dir", ""))
    kept: list[KeptMount] = []
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
        starting=lambda: _start_keeper(kept),
        run_program=programs.run if programs is not None else run_foreground,
        run_before=programs.run_before if programs is not None else run_foreground,
    )

    def mount_image(mount_settings: MountSettings) -> MountedImage:
        nonlocal helper
        own, helper = helper, None  # it asks for the container's image alone
        return _mount(mount_settings, own, kept if config else None, in_agent=in_agent)

    try:
        if config:
            from bootseer.config import loading
            from bootseer.entrypoint.container import start

            loaded = loading.load_tolerantly(config)
            return start.run(settings, loaded, outcome.print_plan, mount_image, job_process.say)
        return run_image.run(settings, outcome.print_plan, mount_image, job_process.say)
    finally:
        if helper is not None:  # where it was not mounted at all
            helper.close()
        by_agent.leave_agent(fields.get("runtime", ""))


def _mount(
    settings: MountSettings,
    helper: socket | None,
    kept: list[KeptMount] | None = None,
    *,
    in_agent: bool = False,
) -> MountedImage:
    """Mount through the node's agent, which has imported everything; without one, here.

    With `kept` more mounts follow: what all their servers need is imported here, once, and what is
    mounted without a server is added to it.
    """
    from bootseer import light_dataclasses as dataclasses
    from bootseer.imageprefetch.mount import mount as mounting
    from bootseer.imageprefetch.resolve import registry_helper
    from bootseer.imageprefetch.run import run_image

    notes = []
    try:
        if helper is None and not in_agent:
            mounted, is_lost = _mount_by_agent(settings)
            if mounted is not None:
                return mounted
            if is_lost:  # what it took is not to be missing for the registry
                notes = [agent.LOST_TEXT]
                settings = dataclasses.replace(settings, look_begun_s=0.0)
        if kept is not None:
            # Whoever ends all processes of a start must not break another one.
            own = dataclasses.replace(settings, share=False)
            if not in_agent:  # whose servers are of no start
                settings = own
            try:
                complete = _mount_complete(own, helper, kept)
            except BaseException:  # no helper waits for what does not come
                if helper is not None:
                    registry_helper.end(helper)
                raise
            if complete is not None:
                if helper is not None:
                    registry_helper.end(helper)
                return dataclasses.replace(complete, notes=(*notes, *complete.notes))
            if helper is not None:
                registry_helper.go_on(helper)
            _import_server(settings.cache)
        mounted = mounting.mount(
            settings, helper, run_image.import_the_rest if kept is None else _import_meanwhile
        )
        return dataclasses.replace(mounted, notes=(*notes, *mounted.notes)) if notes else mounted
    finally:
        gc.freeze()  # what is imported is no garbage
        gc.enable()  # the container may run for weeks


def _mount_complete(
    settings: MountSettings, helper: socket | None, kept: list[KeptMount]
) -> MountedImage | None:
    """Mount an image that this node has whole; None where it has not, or that is not sure."""
    from bootseer.imageprefetch.image_cache import BLOCKS

    if not os.path.isdir(os.path.join(settings.cache or _cache_directory({}), BLOCKS)):
        return None  # before more is imported
    from bootseer.imageprefetch.mount import complete_mount

    made = complete_mount.mount_complete(settings, helper, names_content=bool(kept))
    if made is None:
        return None
    kept.append(made[1])
    return made[0]


def _start_keeper(kept: list[KeptMount]) -> None:
    if kept:
        from bootseer.imageprefetch.mount import complete_mount

        complete_mount.start_keeper(kept)


def _import_server(cache: str) -> None:
    """Import what a server of an image needs that has a helper at the registry."""
    from bootseer.fuse.serve import handover
    from bootseer.imageprefetch.hotset import local_hotsets
    from bootseer.imageprefetch.image_cache import BLOCKS
    from bootseer.imageprefetch.mount import mount_worker
    from bootseer.imageprefetch.resolve import helped_repository

    del handover, helped_repository, local_hotsets, mount_worker
    if os.path.isdir(os.path.join(cache or _cache_directory({}), BLOCKS)):
        from bootseer.blockimage.serve import serverless_mount
        from bootseer.blocks.cache import sealed_objects
        from bootseer.imageprefetch.mount import serverless_choice

        del sealed_objects, serverless_choice, serverless_mount
    else:
        from bootseer.blockimage.serve import image_server

        del image_server


def _import_meanwhile() -> None:
    """Import what the rest of a container's start needs, and the next server without a helper."""
    import encodings.idna

    from bootseer.entrypoint.container import deps_layer
    from bootseer.imageprefetch.run import run_image
    from bootseer.storage.oci import registry_repository

    run_image.import_the_rest()
    del deps_layer, encodings, registry_repository


def _mount_by_agent(settings: MountSettings) -> tuple[MountedImage | None, bool]:
    """Return what the agent mounted, None if it did not, and whether it was lost meanwhile."""
    if not agent.is_available(settings.runtime):
        return None, False
    from bootseer.config.paths import default_runtime
    from bootseer.errors import StoreUnavailableError
    from bootseer.imageprefetch.mount import mount_task

    is_lost = False
    runtime = settings.runtime or default_runtime()

    def ask(words: list[str], output: int) -> int | None:
        nonlocal is_lost
        exit_code = agent.ask(
            words,
            output,
            runtime=runtime,
            before_kill=lambda task: mount_task.end_unregistered(task, runtime),
        )
        is_lost = exit_code == agent.LOST
        return exit_code

    try:
        return mount_task.mount_by(ask, settings), False
    except StoreUnavailableError:
        if not is_lost:
            raise
    mount_task.take_back(settings)
    return None, True


def _start_helper(
    fields: dict[str, Any],
    directory: str | None,
    *,
    in_agent: bool = False,
    hurried: bool = False,
    digest_first: bool = False,
) -> socket | None:
    """Start a process that asks the registry meanwhile; None if the image cannot be mounted."""
    if fields["ref"].startswith(_LAYOUT) or not image_words.may_mount(directory):
        return None
    if not in_agent:
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
            digest_first=digest_first,
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
