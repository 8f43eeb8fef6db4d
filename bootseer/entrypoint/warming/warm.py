"""Make a node ready for a job, or say how ready it is, without starting the job.

One process of a node warms at a time. It uses the processor, the disk and the link when nobody else
does, a start on this node above all; what it has brought when it is ended stays.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, MutableMapping, Sequence

from bootseer import events
from bootseer.blocks.link_turns import LinkTurns
from bootseer.config.paths import default_runtime
from bootseer.config.sections import Config
from bootseer.entrypoint import standby
from bootseer.entrypoint.parts import checkpoint_part
from bootseer.entrypoint.parts.deps_part import DepsPart
from bootseer.entrypoint.warming.node_state import NodeState, PartState
from bootseer.entrypoint.warming.warm_container import ContainerWarming
from bootseer.errors import BootseerError, UsageError, from_os_error
from bootseer.imageprefetch.mount.mount import with_absolute_paths
from bootseer.imageprefetch.mount.settings import MountSettings
from bootseer.light_dataclasses import dataclass, replace
from bootseer.stripedfs.mount import checkpoint_fill
from bootseer.stripedfs.mount.settings import MountSettings as CheckpointMount
from bootseer.system import file_lock
from bootseer.system.priority import go_idle

PHASE = "node.warm"
_LOCK = "warm.lock"
_ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class WarmSettings:
    """What is to be warmed: a job's settings and, for one in a container, its image.

    `mount` is None for a job outside containers; `options` are podman's for the container. All
    parts agree in `runtime` with what starts on this node ("": the node's default).
    """

    config: Config
    mount: MountSettings | None = None
    options: Sequence[str] = ()
    runtime: str = ""


def warm(
    settings: WarmSettings, say: Callable[[str], None], environ: MutableMapping[str, str]
) -> NodeState:
    """Bring all inputs of a job to this node; returns what is there then.

    A part that fails keeps no other from being brought. Raises UsageError where the settings name
    nothing, and the errors of `from_os_error`. Call it in a process that has one thread.
    """
    settings = _check(settings)
    target = settings.config.job.events or environ.get("BOOTSEER_EVENTS")
    with (
        _taking_turns(settings.runtime, say),
        events.open_writer(target or None, environ) as writer,
    ):
        go_idle()
        span = writer.begin(PHASE)
        parts: list[PartState] = []
        try:
            if settings.mount is not None:
                parts += _container(settings, settings.mount, writer, environ, say).warm()
            elif _has_deps(settings.config):
                parts.append(_warm_deps(settings.config, writer))
            if _has_checkpoint(settings.config):
                parts.append(_warm_checkpoint(settings.config, settings.runtime))
        except BaseException as error:
            writer.end(span, PHASE, "error", {"error.type": type(error).__name__})
            raise
        state = NodeState.of(parts)
        if state.ready:
            image = "" if settings.mount is None else settings.mount.ref
            standby.mark_ready(settings.runtime, image, settings.config)
        reasons = "; ".join(f"{part.part}: {part.reason}" for part in parts if part.exit_code)
        about = {"bootseer.reason": reasons} if reasons else {}
        writer.end(span, PHASE, "ok" if state.ready else "error", about)
        return state


def look(
    settings: WarmSettings, say: Callable[[str], None], environ: MutableMapping[str, str]
) -> NodeState:
    """What of a job's inputs is on this node; fetches nothing but names. Raises as `warm`."""
    settings = _check(settings)
    parts: list[PartState] = []
    if settings.mount is not None:
        nobody = events.NullWriter()
        parts += _container(settings, settings.mount, nobody, environ, say).look()
    elif _has_deps(settings.config):
        parts.append(_look_at_deps(settings.config))
    if _has_checkpoint(settings.config):
        parts.append(_look_at_checkpoint(settings.config))
    return NodeState.of(parts)


def _has_deps(config: Config) -> bool:
    return bool(config.deps.install) and config.deps.enabled


def _has_checkpoint(config: Config) -> bool:
    return bool(config.checkpoint.url) and config.checkpoint.enabled


def _check(settings: WarmSettings) -> WarmSettings:
    config, mount = settings.config, settings.mount
    if mount is None and not _has_deps(config) and not _has_checkpoint(config):
        raise UsageError(
            "there is nothing to warm: name an image with --image, or set [deps] install or "
            "[checkpoint] url"
        )
    if mount is not None:
        mount = with_absolute_paths(mount)
        return replace(settings, mount=mount, runtime=mount.runtime)
    return replace(settings, runtime=os.path.abspath(settings.runtime or default_runtime()))


def _taking_turns(runtime: str, say: Callable[[str], None]) -> file_lock.FileLock:
    path = os.path.join(runtime, _LOCK)
    try:
        os.makedirs(runtime, exist_ok=True)  # pods reach the agent's socket in it
        return file_lock.acquire(
            path, waiting=lambda: say("another `bootseer warm` runs on this node; waiting for it")
        )
    except OSError as error:
        raise from_os_error(error, f"lock {path}") from error


# --- the image, with the layer of its dependencies -----------------------------------------------


def _container(
    settings: WarmSettings,
    mount: MountSettings,
    writer: events.NullWriter,
    environ: MutableMapping[str, str],
    say: Callable[[str], None],
) -> ContainerWarming:
    return ContainerWarming(mount, settings.config.deps, settings.options, writer, environ, say)


# --- the dependencies of a job outside containers ------------------------------------------------


def _warm_deps(config: Config, writer: events.NullWriter) -> PartState:
    """Restore or install, as a start would."""
    from bootseer.depsnap import run

    command = config.deps.install
    name = " ".join(events.redact(command))
    try:
        settings = DepsPart().build_settings(config.deps)
        if settings.publish == "background":  # what goes on when we end would stay at our priority
            settings = replace(settings, publish="inline")
        with _watching_signals() as received:
            outcome = run.execute(settings, command, writer)
            code = outcome.code if received() else run.follow(settings, outcome)
            if ended_by := received():  # for all of us, whether the install heeded it or not
                raise SystemExit(code or 128 + ended_by[0])
    except (BootseerError, OSError) as error:
        return PartState.failed("deps", name, error)
    reason = "; ".join(outcome.reasons)
    if code and not reason:
        reason = f"the install ended with exit code {code}"
    return PartState("deps", name, ready=not code, reason=reason, exit_code=code)


@contextlib.contextmanager
def _watching_signals() -> Iterator[Callable[[], list[int]]]:
    """Yield a function for the signals until then that ask to end, whoever handles them."""
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    before = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    numbers: list[int] = []

    def received() -> list[int]:
        with contextlib.suppress(BlockingIOError):
            numbers.extend(number for number in os.read(read_fd, 4096) if number in _ENDING)
        return numbers

    try:
        yield received
    finally:
        signal.set_wakeup_fd(before)
        os.close(read_fd)
        os.close(write_fd)


def _look_at_deps(config: Config) -> PartState:
    from bootseer.depsnap import run

    name = " ".join(events.redact(config.deps.install))
    try:
        ready = run.is_in_place(DepsPart().build_settings(config.deps), config.deps.install)
    except (BootseerError, OSError) as error:
        return PartState.failed("deps", name, error)
    return PartState(
        "deps",
        name,
        ready,
        reason="" if ready else "the install has to run, or a snapshot to be restored",
    )


# --- the checkpoint ------------------------------------------------------------------------------


def _warm_checkpoint(config: Config, runtime: str) -> PartState:
    url = events.redact([config.checkpoint.url])[0]
    try:
        with LinkTurns.of(runtime) as turns:
            local = checkpoint_fill.fill_checkpoint(_checkpoint_mount(config), turns)
    except (BootseerError, OSError) as error:
        return PartState.failed("checkpoint", url, error)
    return _checkpoint_state(url, local)


def _look_at_checkpoint(config: Config) -> PartState:
    url = events.redact([config.checkpoint.url])[0]
    try:
        local = checkpoint_fill.look_at_checkpoint(_checkpoint_mount(config))
    except (BootseerError, OSError) as error:
        return PartState.failed("checkpoint", url, error)
    return _checkpoint_state(url, local)


def _checkpoint_mount(config: Config) -> CheckpointMount:
    return checkpoint_part.make_mount_settings(config.checkpoint)


def _checkpoint_state(url: str, local: checkpoint_fill.LocalCheckpoint) -> PartState:
    reason = "" if local.names else "no files are expected to be loaded: set [checkpoint] prefetch"
    return PartState(
        "checkpoint", url, local.complete, local.present_bytes, local.total_bytes, reason
    )
