"""The checkpoint as a part of a start: mounted and read on demand, or copied before the job."""

from __future__ import annotations

import math
import os
import time
from typing import TYPE_CHECKING

from bootseer import light_dataclasses as dataclasses
from bootseer.config.sections import CheckpointSettings, Config
from bootseer.entrypoint import job_process, plain_times
from bootseer.entrypoint.parts.part import Progress, decode_section
from bootseer.entrypoint.plan import PartPlan, Request
from bootseer.errors import (
    BootseerError,
    BusyError,
    CorruptDataError,
    DeadlineError,
    NotFoundError,
    StoreUnavailableError,
    UsageError,
    from_os_error,
)
from bootseer.events.writer import NullWriter

if TYPE_CHECKING:
    from bootseer.blocks.fetch.fetcher import Fetcher
    from bootseer.storage.options import StoreOptions
    from bootseer.storage.store import Store
    from bootseer.stripedfs.mount.settings import MountSettings
    from bootseer.stripedfs.read.namespace import PathInfo

MIB = 1 << 20
PROCESS_MIB = 80
LOOK_SHARE = 0.8
"""Of what a silent store may cost before the plain way follows: the rest is for our own work."""
LAST_LOOK_S = 10.0
"""Limit for a store that the mount has already waited for, as the plain way is to follow soon."""


class CheckpointPart:
    """Makes `[checkpoint] url` readable at `to`; its plain way is the command `load`."""

    name = "checkpoint"
    phase = "checkpoint.load"

    def plan(self, config: Config, problem: str) -> PartPlan | None:
        checkpoint = config.checkpoint
        if not checkpoint.url and not checkpoint.load:
            return None
        reason = problem
        if checkpoint.enabled and not problem and not (checkpoint.url and checkpoint.to):
            reason = "[checkpoint] needs both url and to"
        if reason or not checkpoint.enabled:
            return PartPlan(self.name, self.phase, None, plain=checkpoint.load, reason=reason)
        return PartPlan(
            self.name,
            self.phase,
            dataclasses.asdict(checkpoint),
            plain=checkpoint.load,
            deadline_s=checkpoint.deadline_s,
        )

    def run(self, request: Request, writer: NullWriter, progress: Progress) -> int:
        checkpoint = decode_section(CheckpointSettings, request)
        span = writer.begin(self.phase, {"bootseer.source": "checkpoint"})
        try:
            form, why = _bring_checkpoint(checkpoint)
        except BaseException as error:  # the event has the type of any error
            writer.end(span, self.phase, "error", {"error.type": type(error).__name__})
            raise
        writer.end(span, self.phase, "ok", {"bootseer.form": form, "bootseer.why": why})
        return 0

    def repair(self, request: Request) -> None:
        """Remove a mount that a killed part left: the plain command writes there."""
        from bootseer.stripedfs.mount import mount

        mount.remove_last(make_mount_settings(decode_section(CheckpointSettings, request)))


def _bring_checkpoint(checkpoint: CheckpointSettings) -> tuple[str, str]:
    """Mount or copy the checkpoint; returns which of these, and the reason."""
    look_s = math.inf
    if checkpoint.load:  # which waits behind it
        look_s = LOOK_SHARE * plain_times.find_patience_s(checkpoint.load)
    if checkpoint.form == "copy":
        _copy(checkpoint, look_s=look_s)
        return "copy", "asked for"
    try:
        _mount(checkpoint, look_s)
        return "mount", "asked for" if checkpoint.form == "mount" else "this machine can mount"
    except BootseerError as error:
        # Busy: a copy would be written into a mount of another job.
        is_lasting = isinstance(error, NotFoundError | CorruptDataError | BusyError)
        if is_lasting or checkpoint.form == "mount":
            raise  # a copy would fail in the same way
        why = f"no mount here: {error}"
        is_unreachable = isinstance(error, StoreUnavailableError | DeadlineError)
        if is_unreachable and checkpoint.load:
            raise
    job_process.say(f"checkpoint: {why}; copying it")
    _copy(checkpoint, look_s=LAST_LOOK_S if is_unreachable else look_s)
    return "copy", why


def _mount(checkpoint: CheckpointSettings, look_s: float) -> None:
    from bootseer.stripedfs.mount import background_log, mount

    settings = make_mount_settings(checkpoint)
    over = mount.make_way(settings)
    _make_directory(checkpoint.to)
    mount.mount(
        dataclasses.replace(
            settings,
            over=over,
            look_s=look_s,
            # `start` becomes the job, so the job has its process id.
            for_pid=os.getppid(),
            log_file=background_log.own_log(),  # the server has no streams of the job's
        )
    )


def make_mount_settings(checkpoint: CheckpointSettings) -> MountSettings:
    """The settings of a checkpoint's mount, as far as a job's settings have them."""
    from bootseer.stripedfs.mount import settings

    never, expected = settings.NEVER_DIRECT, _expected(checkpoint.prefetch)
    # What is here before the job asks comes fastest while the kernel reads ahead of it.
    is_buffered = expected is not None if checkpoint.buffered is None else checkpoint.buffered
    return settings.MountSettings(
        url=checkpoint.url,
        mountpoint=checkpoint.to,
        options=_store_options(checkpoint),
        allow_other=checkpoint.allow_other,
        direct_bytes=never if is_buffered else settings.DIRECT_BYTES,
        cache=checkpoint.cache,
        memory_bytes=_block_bytes(checkpoint),
        prefetch=expected,
    )


def _expected(setting: str) -> str | None:
    """What is to be fetched ahead, as the mount's settings have it."""
    if not setting:
        return None
    return "" if setting == "." else setting


def _block_bytes(checkpoint: CheckpointSettings) -> int:
    """The memory for blocks in bytes: the limit of the process less what the rest of it takes."""
    whole_mib = checkpoint.memory_mib
    return max(whole_mib - PROCESS_MIB, whole_mib // 2) * MIB


def _copy(checkpoint: CheckpointSettings, *, look_s: float = math.inf) -> None:
    """Copy the checkpoint. The first request to its store is limited to `look_s` seconds."""
    from bootseer.blocks.fetch.fetcher import Fetcher, FetchSettings
    from bootseer.events.redaction import redact_message
    from bootseer.storage import retry
    from bootseer.storage.bounded_calls import call_until, call_with_limit
    from bootseer.stripedfs.read.get import get_from_store
    from bootseer.stripedfs.read.open import locate

    options = _store_options(checkpoint)
    settings = FetchSettings(memory_bytes=_block_bytes(checkpoint))
    if checkpoint.load:  # which could run as well
        wait_s = plain_times.find_patience_s(checkpoint.load)
        stall_s, retry_s = min(options.stall_s, wait_s), min(options.retry_s, wait_s)
        options = dataclasses.replace(options, stall_s=stall_s, retry_s=retry_s)

    def look() -> tuple[Store, PathInfo]:
        with retry.limited(look_s):
            return locate(checkpoint.url, options)

    if look_s == math.inf:
        store, info = look()
    else:
        store, info = call_with_limit(look, look_s, f"look at {redact_message(checkpoint.url)}")
    try:
        if not info.is_folder:
            _make_directory(checkpoint.to)
        with Fetcher(settings) as fetcher:

            def copy() -> object:
                return get_from_store(store, info, checkpoint.to, fetcher)

            if checkpoint.load:
                message = f"nothing came from {redact_message(checkpoint.url)} for {wait_s:g} s"
                call_until(copy, _Silence(fetcher, wait_s).end_s, message)
            else:
                copy()
    except OSError as error:
        raise from_os_error(error, f"copy the checkpoint to {checkpoint.to}") from error
    finally:
        store.close()


class _Silence:
    """Tells when a store has sent nothing for `limit_s` while bytes were asked of it."""

    def __init__(self, fetcher: Fetcher, limit_s: float) -> None:
        self._fetcher, self._limit_s = fetcher, limit_s
        self._received_bytes, self._since_s = -1, 0.0

    def end_s(self) -> float:
        """The moment of the monotonic clock at which it has, unless something comes."""
        received_bytes, under_way = self._fetcher.look_at_requests()
        if received_bytes != self._received_bytes or not under_way:
            self._received_bytes, self._since_s = received_bytes, time.monotonic()
        return self._since_s + self._limit_s


def _make_directory(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the directory {path}: {error.strerror}") from error


def _store_options(checkpoint: CheckpointSettings) -> StoreOptions:
    from bootseer.storage.options import StoreOptions

    return StoreOptions(
        user=checkpoint.user,
        auth=checkpoint.auth,
        token_file=checkpoint.token_file,
        ca_file=checkpoint.ca_file,
        redirects=checkpoint.redirects,
    )
