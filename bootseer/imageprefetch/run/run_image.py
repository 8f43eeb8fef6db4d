"""`image run`: a container of an image that is mounted for as long as the container runs.

Where the image cannot be mounted, podman pulls and runs it, as it would without us. What is only
needed once the image is mounted is imported meanwhile: see `import_the_rest`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from bootseer import light_dataclasses as dataclasses
from bootseer.config.paths import default_cache, default_runtime
from bootseer.errors import BootseerError, NotSupportedError, UsageError, describe
from bootseer.imageprefetch.mount import mount as mounting
from bootseer.imageprefetch.mount import server_registry
from bootseer.imageprefetch.mount.interrupts import exit_on_signals
from bootseer.imageprefetch.mount.mount import MountedImage
from bootseer.imageprefetch.mount.settings import MountSettings
from bootseer.imageprefetch.run import podman, podman_options, temporary_mounts
from bootseer.imageprefetch.run.command import EVENTS_INSIDE, RunProgram, run_foreground
from bootseer.storage.oci.reference import parse_reference
from bootseer.system.mountinfo import all_mounts, shown_at

if TYPE_CHECKING:
    from bootseer.imageprefetch.image_cache import ImageCache
    from bootseer.storage.oci.config import ImageConfig

_NOT_BEGUN = "not-begun"
_PROCESS = "process"
"""A file that podman makes once there is a process of the container."""
_KILLED = "the server of the image was killed before the container began"
_FAULT_OF_PODMAN = 125
_NOT_STARTED = (_FAULT_OF_PODMAN, 126, 127)
"""Exit codes of podman when it, or the runtime below it, could not start the command."""


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """What a container gets besides its image.

    `options` are podman's; `before` is a line of a shell that runs in it before its own command,
    `root` a directory that is its root, in place of the image's tree ("": none).
    """

    options: Sequence[str] = ()
    before: str = ""
    root: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class ImageAtHand:
    """An image that is mounted for a container: its tree, digest and config.

    `options` are podman's for the container, as far as they are known.
    """

    tree: str
    digest: str
    config: ImageConfig
    options: Sequence[str]


class InputFailedError(Exception):
    """A command that the container needs before its own failed, or a signal ended the start."""

    def __init__(self, exit_code: int, *, by_signal: bool = False) -> None:
        super().__init__(exit_code)
        self.exit_code, self.by_signal = exit_code, by_signal


class Beside(Protocol):
    """What is brought for a container while its image is mounted."""

    def begin(self, folder: str) -> None:
        """Begin, and return at once. `folder` is the container's on this node, "" for none."""

    def finish(self, image: ImageAtHand | None) -> Inputs:
        """Wait until all is there; called before the container starts.

        `image` is None where podman pulls it. Raises InputFailedError where the container must not
        start.
        """

    def settle(self) -> None:
        """End what the container did not have to wait for; called while podman makes it."""

    def mounts(self) -> Sequence[tuple[str, MountedImage]]:
        """Images that were mounted for the container besides its own, by their directories."""

    def leave_image(self) -> None:
        """The container has ended: let go of the image's tree, which is unmounted next."""

    def close(self) -> None:
        """The container has ended, or never began: leave nothing in the folder."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """A container of the image `mount.ref`; `run` chooses the directory of `mount`.

    `options` are podman's. `words`, if there are any, replace the image's own command. The
    directory `mount.events_dir`, if one is named, is shown to the container for its events.

    `beside` brings what else the container needs. `starting` is called once podman makes the
    container on its mounted image, while this process has one thread; it must not raise.
    `run_program` runs the container's podman, `run_before` what has to be run before it.
    """

    mount: MountSettings
    options: Sequence[str] = ()
    words: Sequence[str] = ()
    beside: Beside | None = None
    starting: Callable[[], None] | None = None
    run_program: RunProgram = run_foreground
    run_before: RunProgram = run_foreground


@dataclasses.dataclass(frozen=True, slots=True)
class RunPlan:
    """How the container runs: on the mounted image, or pulled by podman for `reason`."""

    mounted: MountedImage | None = None
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class _Container:
    """A command line, the container's folder, and the images below it, by their directories.

    There are none where podman pulls; the container's own is the first.
    """

    words: Sequence[str]
    folder: str = ""
    mounts: Sequence[tuple[str, MountedImage]] = ()


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
    try:
        return _run(settings, report, mount, complain)
    except InputFailedError as failure:
        return failure.exit_code


def _run(
    settings: RunSettings,
    report: Callable[[RunPlan], None],
    mount: Callable[[MountSettings], MountedImage],
    complain: Callable[[str], None] | None,
) -> int:
    parse_reference(settings.mount.ref)
    if not _is_installed("podman"):
        raise NotSupportedError(
            "running a container needs podman: install it, or use `bootseer image mount` and "
            "whatever runs containers here"
        )
    podman_options.check_options(
        settings.options, instead=", or use `bootseer image mount` and podman's --rootfs"
    )
    options = [*_events_options(settings.mount.events_dir), *settings.options]
    # The image is unmounted first, then what was brought beside it; then the folder goes.
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as image_stack:
        stack.enter_context(exit_on_signals())
        place = _Place.make(settings, stack)
        if settings.beside is not None:
            stack.callback(settings.beside.close)
            settings.beside.begin(place.folder)
        try:
            container = _on_mounted_image(settings, place, options, image_stack, report, mount)
        except (UsageError, InputFailedError):
            raise
        except Exception as error:  # the border: whatever is wrong with us, podman can pull
            container = _leave_image(settings, options, image_stack, report, describe(error))
        code = settings.run_program(
            container.words,
            _noting_end_requests(container),
            on_begun=lambda: _watch_mounts(settings, container, image_stack, complain),
        )
        if _was_never_there(settings, container, code):
            container = _leave_image(settings, options, image_stack, report, _KILLED)
            code = settings.run_program(container.words, _noting_end_requests(container))
        _explain_end(settings, container, code, complain)
        return code


def _watch_mounts(
    settings: RunSettings,
    container: _Container,
    stack: contextlib.ExitStack,
    complain: Callable[[str], None] | None,
) -> None:
    """Begin what stands beside a container, which podman makes meanwhile, and end what is left.

    Nothing raises: podman would be left alone, and its images unmounted beneath it.
    """

    def follow(state: str) -> None:
        if complain is not None:
            from bootseer.imageprefetch.run.server_log import follow_faults

            stack.enter_context(follow_faults(state, settings.mount.ref, complain))

    follows = [functools.partial(follow, mounted.state) for _, mounted in container.mounts]
    steps = [settings.starting, *follows] if follows else []  # the first one forks
    if settings.beside is not None:
        steps.append(settings.beside.settle)
    for step in steps:
        try:
            if step is not None:
                step()
        except Exception as error:  # the border: the container is what counts
            if complain is not None:
                complain(f"{settings.mount.ref}: {describe(error)}; the container goes on")


def _leave_image(
    settings: RunSettings,
    options: Sequence[str],
    stack: contextlib.ExitStack,
    report: Callable[[RunPlan], None],
    reason: str,
) -> _Container:
    """Unmount, and have podman pull the image instead."""
    stack.close()
    report(RunPlan(reason=reason))
    inputs = _take_inputs(settings, None)
    return _Container(_words_to_pull(settings, options, inputs))


def _was_never_there(settings: RunSettings, container: _Container, code: int) -> bool:
    """Whether a container could not be made because a server of its images was killed."""
    if code not in _NOT_STARTED or not container.mounts:
        return False
    if os.path.exists(os.path.join(container.folder, _PROCESS)):
        return False
    return any(_lost_its_server(settings, at, mounted.digest) for at, mounted in container.mounts)


def _noting_end_requests(container: _Container) -> Callable[[int], None]:
    """The callback that notes for the images' servers that the container is asked to end."""

    def note(number: int) -> None:
        for directory, mounted in container.mounts:
            if number == signal.SIGTERM and mounted.state:
                server_registry.note_end_request(mounted.state, directory)

    return note


def _explain_end(
    settings: RunSettings,
    container: _Container,
    code: int,
    complain: Callable[[str], None] | None,
) -> None:
    last = settings.options[-1] if settings.options else "-"
    if code == _FAULT_OF_PODMAN and not last.startswith("-") and complain is not None:
        complain(f"if {last!r} is of the command to be run, put -- before that command")
    if not container.mounts:
        return
    if (
        code
        and complain
        and any(_lost_its_server(settings, at, mounted.digest) for at, mounted in container.mounts)
    ):
        complain(
            f"the server of {settings.mount.ref} was killed while the container ran, which "
            "could read no more of its image; look who killed it (the kernel's log names "
            "those that memory ran out for), then start again"
        )
    if code in _NOT_STARTED:
        with contextlib.suppress(OSError), open(os.path.join(container.folder, _NOT_BEGUN), "wb"):
            pass


def _lost_its_server(settings: RunSettings, directory: str, digest: str) -> bool:
    """Whether an image of a container is not served any more."""
    try:
        servers = server_registry.list_records(
            os.path.abspath(settings.mount.runtime or default_runtime())
        )
        shown = shown_at(all_mounts(), directory)
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


def _take_inputs(settings: RunSettings, image: ImageAtHand | None) -> Inputs:
    return Inputs() if settings.beside is None else settings.beside.finish(image)


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """A container's folder on this node with the directory of its tree, or why there is none."""

    runtime: str
    tree: str = ""
    fault: BootseerError | None = None

    @property
    def folder(self) -> str:
        return os.path.dirname(self.tree)

    @classmethod
    def make(cls, settings: RunSettings, stack: contextlib.ExitStack) -> _Place:
        runtime = os.path.abspath(settings.mount.runtime or default_runtime())
        try:
            return cls(runtime, stack.enter_context(temporary_mounts.directory(runtime)))
        except BootseerError as error:
            return cls(runtime, fault=error)


def _on_mounted_image(
    settings: RunSettings,
    place: _Place,
    options: Sequence[str],
    stack: contextlib.ExitStack,
    report: Callable[[RunPlan], None],
    mount: Callable[[MountSettings], MountedImage],
) -> _Container:
    """A container on the image, which stays mounted until `stack` is left."""
    podman_options.check_platform(options)
    if place.fault is not None:
        raise place.fault
    tree, folder = place.tree, place.folder
    stack.enter_context(temporary_mounts.unmounting(tree, place.runtime))
    mount_settings = dataclasses.replace(
        settings.mount,
        directory=tree,
        platform_known=True,  # its config, which we read anyway, has it
        not_begun=os.path.join(folder, _NOT_BEGUN),
    )
    begun_s = settings.mount.look_begun_s or time.monotonic()
    mounted = mount(mount_settings)
    config = _config(settings.mount, mounted.digest, begun_s)
    report(RunPlan(mounted))
    if settings.beside is not None:
        stack.callback(settings.beside.leave_image)
    inputs = _take_inputs(settings, ImageAtHand(tree, mounted.digest, config, options))
    has_own = podman_options.has(options, "--pidfile")
    own = [] if has_own else ["--pidfile", os.path.join(folder, _PROCESS)]
    words = podman.container_words(
        tree,
        config,
        [*own, *inputs.options, *options],
        settings.words,
        before=inputs.before,
        root=inputs.root,
    )
    beside = settings.beside.mounts() if settings.beside is not None else ()
    return _Container(words, folder, [(tree, mounted), *beside])


def _words_to_pull(settings: RunSettings, options: Sequence[str], inputs: Inputs) -> list[str]:
    """The command line by which podman pulls and runs the image."""
    insecure = ["--tls-verify=false"] if _is_plain_http(settings.mount) else []
    options = [*inputs.options, *options]
    words = ["podman", "run", "--rm", *insecure]
    if not inputs.before:
        return [*words, *options, settings.mount.ref, *settings.words]
    from bootseer.imageprefetch.run import pulled_image

    def pull(words: Sequence[str]) -> int:
        ended_by: list[int] = []
        code = settings.run_before(words, ended_by.append)
        if ended_by:  # the signal was for the start, whether the pull heeded it or not
            raise InputFailedError(code or 128 + ended_by[0], by_signal=True)
        return code

    program = pulled_image.pull_program(settings.mount.ref, insecure, options, settings.words, pull)
    options = podman_options.without_entrypoint(options)
    shell, *rest = podman.words_after(inputs.before, program)
    return [*words, *options, "--entrypoint", shell, settings.mount.ref, *rest]


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
    """How the image's programs are run. Raises what the registry raises.

    It is the last part of what the registry is asked before the start, which began at `begun_s`.
    """
    from bootseer.storage.oci.config import check_platform_of, parse_config

    raw = raw_config(mount, digest, begun_s)
    check_platform_of(raw, mount.ref)
    return parse_config(raw)


def mounted_config(mount: MountSettings, digest: str) -> ImageConfig:
    """The config of an image that is mounted for something else than `run`."""
    return _config(mount, digest, time.monotonic())


def raw_config(mount: MountSettings, digest: str, begun_s: float) -> bytes:
    """An image's config, kept on this node. Raises what the registry raises."""
    from bootseer.imageprefetch.image_cache import ImageCache

    cache = ImageCache(os.path.abspath(mount.cache or default_cache()))
    raw = cache.config(digest)
    return _fetch_config(mount, digest, cache, begun_s) if raw is None else raw


def _fetch_config(mount: MountSettings, digest: str, cache: ImageCache, begun_s: float) -> bytes:
    from bootseer.imageprefetch.resolve.deadline import BoundedRepository, FirstLook
    from bootseer.storage.oci.open import open_repository

    repository, _ = open_repository(mount.ref, mount.options, plain_http=mount.plain_http)
    look = FirstLook(mount.ref, mount.look_s, lambda: None, begun_s=begun_s)
    with BoundedRepository(lambda: repository, look) as bounded:
        image, manifest = bounded.image(digest)
        return cache.fetch_config(bounded, image, manifest)
