"""`image run`: a container of an image that is mounted for as long as the container runs.

Where the image cannot be mounted, podman pulls and runs it, as it would without us. What is only
needed once the image is mounted is imported meanwhile: see `import_the_rest`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from bootseer import light_dataclasses as dataclasses
from bootseer.config.paths import default_cache, default_runtime
from bootseer.errors import BootseerError, NotSupportedError, UsageError, describe
from bootseer.imageprefetch.mount import mount as mounting
from bootseer.imageprefetch.mount import server_registry
from bootseer.imageprefetch.mount.container_folders import TREE
from bootseer.imageprefetch.mount.interrupts import exit_on_signals
from bootseer.imageprefetch.mount.mount import MountedImage
from bootseer.imageprefetch.mount.settings import MountSettings
from bootseer.imageprefetch.run import podman, temporary_mounts
from bootseer.imageprefetch.run.command import EVENTS_INSIDE, run_foreground
from bootseer.storage.oci.reference import parse_reference
from bootseer.system.mountinfo import all_mounts, shown_at

if TYPE_CHECKING:
    from bootseer.imageprefetch.image_cache import ImageCache
    from bootseer.storage.oci.config import ImageConfig

_NOT_BEGUN = "not-begun"
_FAULT_OF_PODMAN = 125
_NOT_STARTED = (_FAULT_OF_PODMAN, 126, 127)
"""Exit codes of podman when it, or the runtime below it, could not start the command."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """A container of the image `mount.ref`; `run` chooses the directory of `mount`.

    `options` are podman's. `words`, if there are any, replace the image's own command. The
    directory `mount.events_dir`, if one is named, is shown to the container for its events.
    """

    mount: MountSettings
    options: Sequence[str] = ()
    words: Sequence[str] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class RunPlan:
    """How the container runs: on the mounted image, or pulled by podman for `reason`."""

    mounted: MountedImage | None = None
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class _Container:
    """A command line, and the folder and image of its mount (none where podman pulls)."""

    words: Sequence[str]
    folder: str = ""
    mounted: MountedImage | None = None


def run(
    settings: RunSettings,
    report: Callable[[RunPlan], None],
    mount: Callable[[MountSettings], MountedImage] = mounting.mount,
    complain: Callable[[str], None] | None = None,
) -> int:
    """Run the container to its end; returns its exit code. `report` is called before it starts.

    `complain` is called, in another thread, with each fault of the image's server while the
    container runs: a program whose read fails learns of nothing but an input/output error.
    `mount` mounts, and raises, as `mount.mount` does.
    Raises UsageError for invalid names and options, and NotSupportedError where there is no
    podman. Call it in a process that has one thread.
    """
    parse_reference(settings.mount.ref)
    if not _is_installed("podman"):
        raise NotSupportedError(
            "running a container needs podman: install it, or use `bootseer image mount` and "
            "whatever runs containers here"
        )
    podman.check_options(
        settings.options, instead=", or use `bootseer image mount` and podman's --rootfs"
    )
    options = [*_events_options(settings.mount.events_dir), *settings.options]
    with contextlib.ExitStack() as stack:
        try:
            container = _on_mounted_image(settings, options, stack, report, mount)
            if complain is not None and container.mounted is not None:
                from bootseer.imageprefetch.run.server_log import follow_faults

                state, ref = container.mounted.state, settings.mount.ref
                stack.enter_context(follow_faults(state, ref, complain))
        except UsageError:
            raise
        except Exception as error:  # the border: whatever is wrong with us, podman can pull
            stack.close()
            report(RunPlan(reason=describe(error)))
            container = _Container(_words_to_pull(settings, options))
        code = run_foreground(container.words, _when_terminated(container))
        _explain_end(settings, container, code, complain)
        return code


def _when_terminated(container: _Container) -> Callable[[], None]:
    """The callback that notes for the image's server that the container is asked to end."""
    mounted = container.mounted
    if mounted is None or not mounted.state:
        return lambda: None
    tree = os.path.join(container.folder, TREE)
    return functools.partial(server_registry.note_end_request, mounted.state, tree)


def _explain_end(
    settings: RunSettings,
    container: _Container,
    code: int,
    complain: Callable[[str], None] | None,
) -> None:
    last = settings.options[-1] if settings.options else "-"
    if code == _FAULT_OF_PODMAN and not last.startswith("-") and complain is not None:
        complain(f"if {last!r} is of the command to be run, put -- before that command")
    mounted = container.mounted
    if mounted is None:
        return
    if code and complain and _lost_its_server(settings, container.folder, mounted.digest):
        complain(
            f"the server of {settings.mount.ref} was killed while the container ran, which "
            "could read no more of its image; look who killed it (the kernel's log names "
            "those that memory ran out for), then start again"
        )
    if code in _NOT_STARTED:
        with contextlib.suppress(OSError), open(os.path.join(container.folder, _NOT_BEGUN), "wb"):
            pass


def _lost_its_server(settings: RunSettings, folder: str, digest: str) -> bool:
    """Whether the tree in a container's folder is not served any more."""
    try:
        servers = server_registry.list_records(
            os.path.abspath(settings.mount.runtime or default_runtime())
        )
        shown = shown_at(all_mounts(), os.path.join(folder, TREE))
    except OSError:  # the container's own end is what counts
        return False
    if shown is None:  # its server unmounted it at the end, or another process did
        mine = [server for server in servers if server.digest == digest]
        return not any(server.sealed or server_registry.is_alive(server) for server in mine)
    server = next((one for one in servers if server_registry.is_mount_of(one, shown)), None)
    return server is not None and not server.sealed and not server_registry.is_alive(server)


def import_the_rest() -> None:
    """Import what a container needs besides its mount, while the mount comes up."""
    import subprocess

    from bootseer.imageprefetch import image_cache
    from bootseer.storage.oci import config, manifest

    del config, image_cache, manifest, subprocess


def _is_installed(program: str) -> bool:
    """Whether a program is on the path; `shutil.which` would take milliseconds to import."""
    paths = (os.path.join(folder, program) for folder in os.get_exec_path())
    return any(os.path.isfile(path) and os.access(path, os.X_OK) for path in paths)


def _on_mounted_image(
    settings: RunSettings,
    options: Sequence[str],
    stack: contextlib.ExitStack,
    report: Callable[[RunPlan], None],
    mount: Callable[[MountSettings], MountedImage],
) -> _Container:
    """A container on the image, which stays mounted until `stack` is left."""
    podman.check_platform(options)
    runtime = os.path.abspath(settings.mount.runtime or default_runtime())
    stack.enter_context(exit_on_signals())
    tree = stack.enter_context(temporary_mounts.directory(runtime))
    stack.enter_context(temporary_mounts.unmounting(tree, runtime))
    folder = os.path.dirname(tree)
    mount_settings = dataclasses.replace(
        settings.mount,
        directory=tree,
        platform_known=True,  # its config, which we read anyway, has it
        not_begun=os.path.join(folder, _NOT_BEGUN),
    )
    begun_s = settings.mount.look_begun_s or time.monotonic()
    mounted = mount(mount_settings)
    config = _config(settings.mount, mounted.digest, begun_s)
    words = podman.container_words(tree, config, options, settings.words)
    report(RunPlan(mounted))
    return _Container(words, folder, mounted)


def _words_to_pull(settings: RunSettings, options: Sequence[str]) -> list[str]:
    """The command line by which podman pulls and runs the image."""
    insecure = ["--tls-verify=false"] if _is_plain_http(settings.mount) else []
    words = ["podman", "run", "--rm", *insecure, *options]
    return [*words, settings.mount.ref, *settings.words]


def _is_plain_http(mount: MountSettings) -> bool:
    """Whether the registry speaks no TLS, on which podman would insist."""
    from bootseer.storage.oci.open import open_repository

    if mount.plain_http is not None:
        return mount.plain_http
    try:
        with open_repository(mount.ref, mount.options)[0] as repository:
            return repository.plain_http
    except BootseerError:  # podman will report what is wrong with it
        return False


def _events_options(events_dir: str) -> list[str]:
    """Podman's options that show a directory of events to the container."""
    if not events_dir:
        return []
    events_dir = os.path.abspath(events_dir)
    with contextlib.suppress(OSError):
        os.makedirs(events_dir, exist_ok=True)
    if not os.path.isdir(events_dir):
        return []
    volume = f"{events_dir}:{EVENTS_INSIDE}"
    return ["--volume", volume, "--env", f"BOOTSEER_EVENTS={EVENTS_INSIDE}"]


def _config(mount: MountSettings, digest: str, begun_s: float) -> ImageConfig:
    """How the image's programs are run; kept on this node. Raises what the registry raises.

    It is the last part of what the registry is asked before the start, which began at `begun_s`.
    """
    from bootseer.imageprefetch.image_cache import ImageCache
    from bootseer.storage.oci.config import check_platform_of, parse_config

    cache = ImageCache(os.path.abspath(mount.cache or default_cache()))
    raw = cache.config(digest)
    if raw is None:
        raw = _fetch_config(mount, digest, cache, begun_s)
    check_platform_of(raw, mount.ref)
    return parse_config(raw)


def _fetch_config(mount: MountSettings, digest: str, cache: ImageCache, begun_s: float) -> bytes:
    from bootseer.imageprefetch.resolve.deadline import BoundedRepository, FirstLook
    from bootseer.storage.oci.open import open_repository

    repository, _ = open_repository(mount.ref, mount.options, plain_http=mount.plain_http)
    look = FirstLook(mount.ref, mount.look_s, lambda: None, begun_s=begun_s)
    with BoundedRepository(lambda: repository, look) as bounded:
        image, manifest = bounded.image(digest)
        return cache.fetch_config(bounded, image, manifest)
