"""Publish what an install changed, in the background while the job starts, or before it does."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from bootseer.depsnap import run_plan
from bootseer.depsnap.capture.changes import Changes
from bootseer.depsnap.run_plan import Prepared
from bootseer.depsnap.settings import DepsSettings
from bootseer.depsnap.snapshot_search import SnapshotSearch
from bootseer.depsnap.store import detached_publish, publisher, record_file, records
from bootseer.depsnap.store.isolated_store import IsolatedStore
from bootseer.events.writer import NullWriter
from bootseer.storage.open import open_store
from bootseer.storage.store import Store
from bootseer.system.blocking_calls import call_in_process

_PATIENT_RESOLVE_S = 60.0
"""How long a publication in the background, which holds up nothing, asks the index."""


def publish_install(
    search: SnapshotSearch, prepared: Prepared, changes: Changes, install_s: float, ended_s: float
) -> None:
    """Publish the changes of an install under the lease of its search, or have a child do it."""
    assert search.lease is not None
    settings, report = search.settings, search.report
    store, writer = search.store, report.writer
    search.ask_again(lambda: records.list_generations(store, prepared.key.digest))  # it may hang
    packages = run_plan.added_packages(prepared)
    # hdfs-native's threads do not exist in a forked child, and it cannot make new ones there.
    forkable = not store.url.startswith("hdfs:")
    in_background = settings.publish == "background" and forkable
    cpus = os.cpu_count() or 1
    job = publisher.Publication(
        key=prepared.key,
        command=search.command,
        changes=changes,
        install_s=install_s,
        created_unix_s=ended_s,
        packages=packages,
        lock=lambda: _lock_to_publish(settings, prepared, packages, in_background),
        known=search.known_generations,
        supersedes=search.supersedes,
        sign_key=record_file.read_sign_key(settings.sign_key),
        threads=max(1, cpus // 2) if in_background else None,
        cache=settings.cache,
    )
    if in_background:
        detached_publish.detach(
            search.lease,
            lambda: open_store(settings.store),
            lambda own: _publish(settings, own, job, writer, in_background=True),
        )
        report.outcome.result = "publishing"
    else:
        _publish(settings, store, job, writer, in_background=False)
        report.outcome.result = "published"


def _publish(
    settings: DepsSettings,
    store: Store,
    job: publisher.Publication,
    writer: NullWriter,
    *,
    in_background: bool,
) -> None:
    span = writer.begin("deps.publish", {"bootseer.background": in_background})
    attributes: dict[str, object] = {}
    status = "ok"
    try:
        if isinstance(store, IsolatedStore):
            size = _publish_isolated(settings, store, job)
        else:
            record = publisher.publish(store, job, settings.on_step)
            size = record.archive.size if record is not None else None
        if size is not None:
            attributes["bootseer.bytes"] = size
    except BaseException as error:  # the event says what it was, whatever it is
        status = "fallback"
        attributes |= {"bootseer.reason": str(error), "error.type": type(error).__name__}
        raise
    finally:
        writer.end(span, "deps.publish", status, attributes)


def _publish_isolated(
    settings: DepsSettings, store: Store, job: publisher.Publication
) -> int | None:
    """`publisher.publish` to a store that may hang, by a process that can be left behind.

    Returns the archive's size, None where another node's came first.
    """
    lock = job.lock()  # this may run a resolver, which that process must not
    job = dataclasses.replace(job, lock=lambda: lock)
    plain = open_store(settings.store)

    def publish() -> bytes:
        record = publisher.publish(plain, job, settings.on_step)
        return b"" if record is None else str(record.archive.size).encode()

    limit_s = settings.publish_stall_s
    size = call_in_process(publish, limit_s, store.url, while_at_work=True)
    return int(size) if size else None


def _lock_to_publish(
    settings: DepsSettings, prepared: Prepared, packages: Mapping[str, str], in_background: bool
) -> str:
    """What the index decides, asked again where a start had no time to wait for it."""
    matcher, limit_s = prepared.matcher, settings.resolve_timeout_s
    if in_background and limit_s > 0:
        limit_s = max(limit_s, _PATIENT_RESOLVE_S)
    if matcher.resolution.ended or prepared.key.is_lock_of(packages):
        return matcher.lock_for(packages)
    patient = dataclasses.replace(settings, resolve_timeout_s=limit_s)
    resolution = run_plan.new_resolution(patient, prepared.target)
    matcher = dataclasses.replace(matcher, resolution=resolution)
    # The index may have changed since the install.
    return matcher.lock_for(packages) if matcher.may_be_lock_of(packages) else ""
