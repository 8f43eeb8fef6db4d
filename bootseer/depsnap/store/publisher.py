"""Publish a snapshot: pack the changes, read the archive back, make it visible by one create."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence

from bootseer.depsnap.capture.changes import Changes
from bootseer.depsnap.format import archive
from bootseer.depsnap.format.index import read_index
from bootseer.depsnap.format.verifier import verify
from bootseer.depsnap.key.snapshot_key import Key
from bootseer.depsnap.store import archive_access, record_file, records
from bootseer.depsnap.store.record_file import Record
from bootseer.depsnap.types import ArchiveInfo, Step
from bootseer.errors import CorruptDataError
from bootseer.events.redaction import redact_command_for_key
from bootseer.storage.store import Store
from bootseer.system.paths import is_within

_RESTORE_PER_VERIFY = 2.0
"""Creating the files costs about as much again as reading and checking the archive."""
_SHOWN_CHARACTERS = 200
_MOST_LINKS = 40
"""As many as the kernel follows."""


@dataclasses.dataclass(frozen=True, slots=True)
class Publication:
    """What is to be published.

    `created_unix_s` is when the install ended, `packages` are what it added, `lock` gives what the
    index decides, called when all else is ready (see `record_file.Record`). `supersedes` is a
    record generation found too old, `known` those that did not fit; `cache` is where an archive for
    a remote store is made.
    """

    key: Key
    command: Sequence[str]
    changes: Changes
    install_s: float
    created_unix_s: float
    packages: Mapping[str, str]
    lock: Callable[[], str]
    known: Collection[int] = ()
    supersedes: int | None = None
    sign_key: bytes | None = None
    threads: int | None = None
    cache: str = ""


def publish(store: Store, job: Publication, on_step: Step) -> Record | None:
    """Publish and return the record; None when another node's came first.

    Raises BusyError when a captured file changed meanwhile, CorruptDataError when the store
    returns other bytes than it was given, and the store's errors. Nothing of it is visible then.
    """
    begun = time.monotonic()
    folder = records.folder(job.key.digest)
    store.mkdir(folder)
    name = f"archive-{uuid.uuid4().hex}.tar.zst"
    temporary = store.temporary_name(folder)
    placed = False
    try:
        with archive_access.draft_path(store, temporary, job.cache) as path:
            info = archive.create(path, job.changes.deltas, threads=job.threads)
            on_step("packed")
            verify_s = _read_back(path, info, [d.root for d in job.changes.deltas])
            on_step("verified")
            archive_access.upload(store, temporary, path)
        store.rename(temporary, f"{folder}/{name}")
        placed = True
        on_step("stored")
        publish_s = time.monotonic() - begun
        record = _record(job, name, info, publish_s)
        if not records.add(store, record, job.sign_key, supersedes=job.supersedes, known=job.known):
            store.delete(f"{folder}/{name}")
            return None
    except BaseException:  # a signal too: nothing unreferenced may stay behind
        store.delete(f"{folder}/{name}" if placed else temporary)
        raise
    on_step("recorded")
    times = records.Times(job.install_s, record.publish_s, verify_s * _RESTORE_PER_VERIFY)
    records.remember(store, record, times, job.key.label)
    return record


def _read_back(path: str, info: ArchiveInfo, roots: Sequence[str]) -> float:
    """Drop the archive from the page cache where possible, read all of it, return the seconds.

    Within the limits of every later reader, so that no archive is published that is beyond them.
    """
    begun = time.monotonic()
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    limits = record_file.limits(roots, info.size, info.raw_bytes, info.entries)
    index = read_index(path, expected_digest=info.index_digest, limits=limits)
    if verify(path, index) != info.tree_digest:
        raise CorruptDataError(f"the archive {path} does not read back as it was written")
    return time.monotonic() - begun


def inputs_of(key: Key) -> dict[str, str]:
    """The key's ingredients as a record keeps them."""
    return {i.name: _shorten(i.value) for i in key.ingredients}


def _shorten(value: str) -> str:
    """An ingredient's value, or for a long one its digest."""
    if len(value) <= _SHOWN_CHARACTERS:
        return value
    return hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()


def _record(job: Publication, name: str, info: ArchiveInfo, publish_s: float) -> Record:
    return Record(
        key=job.key.digest,
        workload=job.key.workload,
        created_unix_s=job.created_unix_s,
        command=tuple(redact_command_for_key(job.command)),
        roots=tuple(d.root for d in job.changes.deltas),
        fresh_roots=job.changes.fresh,
        install_s=round(job.install_s, 6),
        publish_s=round(publish_s, 6),
        lock=job.lock(),
        packages=dict(job.packages),
        inputs=inputs_of(job.key),
        host={
            "system": platform.system(),
            "machine": platform.machine(),
            "python": platform.python_version(),
            "cpus": str(os.cpu_count() or 0),
            **_interpreters([d.root for d in job.changes.deltas]),
        },
        archive=record_file.Archive(
            name=name,
            size=info.size,
            raw_bytes=info.raw_bytes,
            entries=info.entries,
            index_digest=info.index_digest,
            tree_digest=info.tree_digest,
            owners=info.owners,
        ),
    )


def _interpreters(roots: Sequence[str]) -> dict[str, str]:
    """The programs outside of the roots that are the Python of environments there."""
    programs = (_outside_of(root, os.path.join(root, "bin", "python")) for root in roots)
    paths = sorted({path for path in programs if path})
    return {record_file.INTERPRETERS: "\n".join(paths)} if paths else {}


def _outside_of(root: str, path: str) -> str:
    """What a link in a root leads to outside of it; "" for what is no such link."""
    for _ in range(_MOST_LINKS):
        if not os.path.islink(path):
            return ""
        path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))
        if not is_within(path, root):
            return path
    return ""
