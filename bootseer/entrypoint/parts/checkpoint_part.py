"""The checkpoint as a part of a start: mounted and read on demand, or copied before the job."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from typing import TYPE_CHECKING

from bootseer.config.sections import CheckpointSettings, Config
from bootseer.entrypoint import job_process
from bootseer.entrypoint.parts.part import Progress, decode_section
from bootseer.entrypoint.plan import PartPlan, Request
from bootseer.errors import (
    BootseerError,
    CorruptDataError,
    DeadlineError,
    NotFoundError,
    StoreUnavailableError,
    UsageError,
    from_os_error,
)
from bootseer.events.writer import NullWriter

if TYPE_CHECKING:
    from bootseer.storage.options import StoreOptions
    from bootseer.storage.store import Store
    from bootseer.stripedfs.read.namespace import PathInfo

MIB = 1 << 20
PROCESS_MIB = 80
LOOK_S = 4.0
"""Limit of the first request to a store where the plain way is to follow soon."""
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

        with contextlib.suppress(BootseerError):
            mount.umount(decode_section(CheckpointSettings, request).to, lazily=True)


def _bring_checkpoint(checkpoint: CheckpointSettings) -> tuple[str, str]:
    """Mount or copy the checkpoint; returns which of these, and the reason."""
    look_s = LOOK_S if checkpoint.load else math.inf
    if checkpoint.form == "copy":
        _copy(checkpoint, look_s=look_s)
        return "copy", "asked for"
    try:
        _mount(checkpoint, look_s)
        return "mount", "asked for" if checkpoint.form == "mount" else "this machine can mount"
    except BootseerError as error:
        is_lasting = isinstance(error, NotFoundError | CorruptDataError)
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
    from bootseer.stripedfs.mount import settings as mount_settings

    _make_directory(checkpoint.to)
    never = mount_settings.NEVER_DIRECT
    mount.mount(
        mount_settings.MountSettings(
            url=checkpoint.url,
            mountpoint=checkpoint.to,
            look_s=look_s,
            options=_store_options(checkpoint),
            direct_bytes=never if checkpoint.buffered else mount_settings.DIRECT_BYTES,
            cache=checkpoint.cache,
            memory_bytes=_block_bytes(checkpoint),
            # `start` becomes the job, so the job has its process id.
            for_pid=os.getppid(),
            log_file=background_log.own_log(),  # the server has no streams of the job's
        )
    )


def _block_bytes(checkpoint: CheckpointSettings) -> int:
    """The memory for blocks in bytes: the limit of the process less what the rest of it takes."""
    whole_mib = checkpoint.memory_mib
    return max(whole_mib - PROCESS_MIB, whole_mib // 2) * MIB


def _copy(checkpoint: CheckpointSettings, *, look_s: float = math.inf) -> None:
    """Copy the checkpoint. The first request to its store is limited to `look_s` seconds."""
    from bootseer.blocks.fetch.fetcher import Fetcher, FetchSettings
    from bootseer.events.redaction import redact_message
    from bootseer.storage import retry
    from bootseer.storage.bounded_calls import call_with_limit
    from bootseer.stripedfs.read.get import get_from_store
    from bootseer.stripedfs.read.open import locate

    def look() -> tuple[Store, PathInfo]:
        with retry.limited(look_s):
            return locate(checkpoint.url, _store_options(checkpoint))

    if look_s == math.inf:
        store, info = look()
    else:
        store, info = call_with_limit(look, look_s, f"look at {redact_message(checkpoint.url)}")
    try:
        if not info.is_folder:
            _make_directory(checkpoint.to)
        settings = FetchSettings(memory_bytes=_block_bytes(checkpoint))
        with Fetcher(settings) as fetcher:
            get_from_store(store, info, checkpoint.to, fetcher)
    except OSError as error:
        raise from_os_error(error, f"copy the checkpoint to {checkpoint.to}") from error
    finally:
        store.close()


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
