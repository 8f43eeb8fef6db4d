"""`image record`: one cold start of a command on an image, recorded."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence

from bootseer import light_dataclasses as dataclasses
from bootseer.blocks.trace.recorder import WINDOW_S
from bootseer.blocks.trace.trace_file import Trace
from bootseer.config.loading import default_cache, default_runtime
from bootseer.errors import UsageError
from bootseer.imageprefetch.image_cache import LocalStore
from bootseer.imageprefetch.mount import mount, temporary_mounts
from bootseer.imageprefetch.mount.mount import Mounted, MountSettings
from bootseer.imageprefetch.record.start_recording import FirstStepWatch
from bootseer.imageprefetch.record.trace_store import TraceStore
from bootseer.imageprefetch.run import container
from bootseer.imageprefetch.run import image_config as image_config_file
from bootseer.imageprefetch.run.container import Command, ImageConfig, choose_runner
from bootseer.imageprefetch.run.podman_options import check_options, check_platform
from bootseer.imageprefetch.run.server_log import following
from bootseer.imageprefetch.workloads import check_workload
from bootseer.storage.options import DEFAULTS, StoreOptions


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordSettings:
    """A start of `words` on the image `ref`. "" for `cache` is this node's usual place.

    `runner`: podman, chroot or auto; `podman_options` are podman's own, and need it. With `stop`
    the command is ended once it is recorded, after `window_s` or its first step; else it runs as
    long as it likes.
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
class Recorded:
    """What came of it.

    `start` is what this start read, `trace` what all starts of the workload on this node did; both
    are None when nothing was read, or the command failed before it was recorded.
    """

    digest: str
    exit_code: int
    failed: bool
    start: Trace | None
    trace: Trace | None


def record(settings: RecordSettings, complain: Callable[[str], None] | None = None) -> Recorded:
    """Mount the image apart from all others, run the command on it, and keep what it read.

    Nothing is replayed and nothing is filled meanwhile, and the page cache has nothing of it.
    `complain` is called, by another thread, with each fault that the image's server meets.
    Raises what mounting raises. Call it in a process that has one thread.
    """
    check_workload(settings.workload)
    check_options(settings.podman_options, instead="", ours=("--name",))
    check_platform(settings.podman_options)
    needs_podman = UsageError("podman's options need podman: install it, or leave them out")
    if settings.podman_options and settings.runner == "chroot":
        raise needs_podman
    runner = choose_runner(settings.runner)
    if settings.podman_options and runner != "podman":
        raise needs_podman
    cache = os.path.abspath(settings.cache or default_cache())
    place = os.path.abspath(default_runtime())
    with temporary_mounts.ending(), temporary_mounts.directory(place) as tree:
        work = os.path.dirname(tree)
        events, traces = os.path.join(work, "events"), os.path.join(work, "traces")
        os.mkdir(events)
        os.chmod(events, 0o777)  # whoever the image's user is, may tell the first step there
        config = image_config(settings)
        with temporary_mounts.unmounting(tree, place):
            mounted = mount.mount(_mount_settings(settings, tree, events, cache, traces))
            recorded = _Recorded(events, settings.window_s)
            command = Command(
                tree=tree,
                words=settings.words,
                config=config,
                environment=settings.environment,
                events_dir=events,
                options=settings.podman_options,
            )
            with _following(mounted, settings, complain):
                code = container.run(command, runner, recorded if settings.stop else None)
        # A command that broke off tells nothing of what a start reads.
        failed = code != 0 and not recorded()
        start = TraceStore(traces).load(settings.workload)
        if failed or start is None:
            return Recorded(mounted.digest, code, failed, None, None)
        store = TraceStore(LocalStore(cache).trace_folder(mounted.digest))
        return Recorded(mounted.digest, code, failed, start, store.add(start))


def _following(
    mounted: Mounted, settings: RecordSettings, complain: Callable[[str], None] | None
) -> contextlib.AbstractContextManager[None]:
    if complain is None:
        return contextlib.nullcontext()
    return following(mounted.state, settings.ref, complain)


class _Recorded:
    """Whether the recording of a start that begins now is over."""

    def __init__(self, events: str, window_s: float) -> None:
        self._watch, self._end_s = FirstStepWatch(events), time.monotonic() + window_s
        self._over = False

    def __call__(self) -> bool:
        self._over |= self._watch.reached() or time.monotonic() > self._end_s
        return self._over


def _mount_settings(
    settings: RecordSettings, tree: str, events: str, cache: str, traces: str
) -> MountSettings:
    return MountSettings(
        ref=settings.ref,
        directory=tree,
        platform_known=True,
        workload=settings.workload,
        cache=cache,
        share=False,  # a server of its own, whoever has mounted the image
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


def image_config(settings: RecordSettings) -> ImageConfig:
    """How the image wants its programs to be run. Raises what the registry raises."""
    from bootseer.storage.oci.open import open_repository

    repository, reference = open_repository(
        settings.ref, settings.options, plain_http=settings.plain_http
    )
    with repository:
        _, manifest = repository.image(reference.version)
        raw = repository.blob(manifest.config, limit_bytes=image_config_file.LIMIT_BYTES)
    image_config_file.check_machine(raw, settings.ref)
    return container.parse_config(raw)
