"""`image record`: run a command on an image and record what its cold start reads."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence

from bootseer import light_dataclasses as dataclasses
from bootseer.blocks.trace.recorder import WINDOW_S
from bootseer.blocks.trace.trace_file import Trace
from bootseer.config.loading import default_cache, default_runtime
from bootseer.errors import NotSupportedError, UsageError
from bootseer.imageprefetch.image_cache import ImageCache
from bootseer.imageprefetch.mount import mount
from bootseer.imageprefetch.mount.interrupts import exit_on_signals
from bootseer.imageprefetch.mount.mount import MountedImage
from bootseer.imageprefetch.mount.settings import MountSettings
from bootseer.imageprefetch.record.first_step import FirstStepWatch
from bootseer.imageprefetch.record.trace_store import TraceStore
from bootseer.imageprefetch.run import chroot, podman, podman_options, temporary_mounts
from bootseer.imageprefetch.run.command import Command
from bootseer.imageprefetch.run.server_log import follow_faults
from bootseer.imageprefetch.workloads import check_workload
from bootseer.storage.oci.config import (
    LIMIT_BYTES,
    ImageConfig,
    check_platform_of,
    parse_config,
)
from bootseer.storage.oci.open import open_repository
from bootseer.storage.options import DEFAULTS, StoreOptions


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordSettings:
    """One start of the command `words` on the image `ref`; "" for the node's usual `cache`.

    `runner` is podman, chroot or auto; `podman_options` need podman. With `stop` the command is
    ended once it is recorded, after `window_s` or its first step; otherwise it runs to its end.
    """

    ref: str
    words: Sequence[str]
    workload: str = ""
    cache: str = ""
    window_s: float = WINDOW_S
    runner: str = "auto"
    stop: bool = False
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    podman_options: Sequence[str] = ()
    options: StoreOptions = DEFAULTS
    plain_http: bool | None = None
    deadline_s: float = 60.0
    log_file: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedStart:
    """The result of a recording.

    `start` is what this start read, `trace` what all starts of the workload on this node have read;
    both are None when nothing was read, or the command failed before its recording was over.
    """

    digest: str
    exit_code: int
    failed: bool
    start: Trace | None
    trace: Trace | None


def record(
    settings: RecordSettings, complain: Callable[[str], None] | None = None
) -> RecordedStart:
    """Run the command on a mount of its own and keep the trace of what it read.

    Meanwhile nothing is replayed or filled, and the page cache is cold. `complain` is called, in
    another thread, with each fault of the image's server. Raises what mounting raises. Call it in a
    process that has one thread.
    """
    check_workload(settings.workload)
    podman_options.check_options(settings.podman_options, instead="", ours=("--name",))
    podman_options.check_platform(settings.podman_options)
    needs_podman = UsageError("podman's options need podman: install it, or leave them out")
    if settings.podman_options and settings.runner == "chroot":
        raise needs_podman
    runner = choose_runner(settings.runner)
    if settings.podman_options and runner != "podman":
        raise needs_podman
    cache = os.path.abspath(settings.cache or default_cache())
    runtime = os.path.abspath(default_runtime())
    with exit_on_signals(), temporary_mounts.directory(runtime) as tree:
        work = os.path.dirname(tree)
        events, traces = os.path.join(work, "events"), os.path.join(work, "traces")
        os.mkdir(events)
        os.chmod(events, 0o777)  # any user of the image may report the first step there
        config = _fetch_config(settings)
        with temporary_mounts.unmounting(tree, runtime):
            mounted = mount.mount(_mount_settings(settings, tree, events, cache, traces))
            is_over = _RecordingEnd(FirstStepWatch.begin(events), settings.window_s)
            command = Command(
                tree=tree,
                words=settings.words,
                config=config,
                environment=settings.environment,
                events_dir=events,
                options=settings.podman_options,
            )
            with _reporting_faults(mounted, settings, complain):
                run = podman.run if runner == "podman" else chroot.run
                code = run(command, is_over if settings.stop else None)
        # What a command read that broke off says nothing about starts.
        failed = code != 0 and not is_over()
        start = TraceStore(traces).load(settings.workload)
        if failed or start is None:
            return RecordedStart(mounted.digest, code, failed, None, None)
        store = TraceStore(ImageCache(cache).trace_folder(mounted.digest))
        return RecordedStart(mounted.digest, code, failed, start, store.add(start))


def choose_runner(wanted: str) -> str:
    """`podman` or `chroot`; raises NotSupportedError when neither is possible."""
    if wanted != "chroot" and shutil.which("podman"):
        return "podman"
    if wanted == "podman":
        raise NotSupportedError("podman is not installed; install it, or use --with chroot")
    if os.geteuid() != 0:
        raise NotSupportedError("a chroot needs root; run as root, or install podman")
    return "chroot"


def _reporting_faults(
    mounted: MountedImage, settings: RecordSettings, complain: Callable[[str], None] | None
) -> contextlib.AbstractContextManager[None]:
    if complain is None:
        return contextlib.nullcontext()
    return follow_faults(mounted.state, settings.ref, complain)


class _RecordingEnd:
    """Whether the recording of a start that begins now is over."""

    def __init__(self, watch: FirstStepWatch, window_s: float) -> None:
        self._watch, self._end_s = watch, time.monotonic() + window_s
        self._is_over = False

    def __call__(self) -> bool:
        self._is_over |= self._watch.was_reached() or time.monotonic() > self._end_s
        return self._is_over


def _mount_settings(
    settings: RecordSettings, tree: str, events: str, cache: str, traces: str
) -> MountSettings:
    return MountSettings(
        ref=settings.ref,
        directory=tree,
        platform_known=True,
        workload=settings.workload,
        cache=cache,
        share=False,  # a server of its own, even if the image is mounted elsewhere
        fill=False,
        hot=False,
        record=True,
        record_window_s=settings.window_s,
        traces=traces,
        events_dir=events,
        options=settings.options,
        plain_http=settings.plain_http,
        deadline_s=settings.deadline_s,
        log_file=settings.log_file,
    )


def _fetch_config(settings: RecordSettings) -> ImageConfig:
    repository, reference = open_repository(
        settings.ref, settings.options, plain_http=settings.plain_http
    )
    with repository:
        _, manifest = repository.image(reference.version)
        raw = repository.blob(manifest.config, limit_bytes=LIMIT_BYTES)
    check_platform_of(raw, settings.ref)
    return parse_config(raw)
