"""Pack what was captured, check it by reading it back, and make it visible by one create."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence

from bootseer.depsnap.capture.exclusions import Captured
from bootseer.depsnap.format import archive
from bootseer.depsnap.key import redact
from bootseer.depsnap.key.snapshot_key import Key
from bootseer.depsnap.store import archive_access, records
from bootseer.depsnap.types import ArchiveInfo
from bootseer.errors import CorruptDataError
from bootseer.storage.store import Store
from bootseer.system.paths import is_within

# Creating the files costs about as much again as reading and checking the archive.
RESTORE_PER_VERIFY = 2.0
_SHOWN_CHARACTERS = 200
_LINKS = 40  # as many as the kernel follows


@dataclasses.dataclass(frozen=True, slots=True)
class Publication:
    """What is to be published.

    `created_unix_s` is when the install ended, `packages` what it brought, `lock` what the index
    decides, asked when all else is ready (see `records.Record`). `supersedes` is a record
    generation found too old, `known` those that did not fit; `cache` is where an archive for a
    store elsewhere is made.
    """

    key: Key
    command: Sequence[str]
    captured: Captured
    install_s: float
    created_unix_s: float
    packages: Mapping[str, str]
    lock: Callable[[], str]
    known: Collection[int] = ()
    supersedes: int | None = None
    sign_key: bytes | None = None
    threads: int | None = None
    cache: str = ""


def publish(
    store: Store, job: Publication, on_step: Callable[[str], None]
) -> records.Record | None:
    """Publish and return the record; None when another node's came first.

    Raises BusyError when a captured file changed meanwhile, CorruptDataError when the store gives
    back other bytes than it was given, and the store's errors. Nothing of it is visible then.
    """
    begun = time.monotonic()
    folder = records.folder(job.key.digest)
    store.mkdir(folder)
    name = f"archive-{uuid.uuid4().hex}.tar.zst"
    temporary = store.temporary_name(folder)
    placed = False
    try:
        with archive_access.draft_path(store, temporary, job.cache) as path:
            info = archive.create(path, job.captured.deltas, threads=job.threads)
            on_step("packed")
            verify_s = _read_back(path, info, [d.root for d in job.captured.deltas])
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
    except BaseException:  # a signal's too: nothing unreferenced shall stay behind
        store.delete(f"{folder}/{name}" if placed else temporary)
        raise
    on_step("recorded")
    times = records.Times(job.install_s, record.publish_s, verify_s * RESTORE_PER_VERIFY)
    records.remember(store, record, times, job.key.label)
    return record


def _read_back(path: str, info: ArchiveInfo, roots: Sequence[str]) -> float:
    """Drop the archive from the page cache where possible, read all of it, return the seconds.

    Within the limits of every later reader, so that nothing is published that nobody may read.
    """
    begun = time.monotonic()
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    limits = records.limits(roots, info.size, info.raw_bytes, info.entries)
    index = archive.read_index(path, expected_digest=info.index_digest, limits=limits)
    if archive.verify(path, index) != info.tree_digest:
        raise CorruptDataError(f"the archive {path} does not read back as it was written")
    return time.monotonic() - begun


def inputs_of(key: Key) -> dict[str, str]:
    """The key's ingredients as a record keeps them."""
    return {i.name: _short(i.value) for i in key.ingredients}


def _short(value: str) -> str:
    """An ingredient's value, or for a long one its digest."""
    if len(value) <= _SHOWN_CHARACTERS:
        return value
    return hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()


def _record(job: Publication, name: str, info: ArchiveInfo, publish_s: float) -> records.Record:
    return records.Record(
        key=job.key.digest,
        workload=job.key.workload,
        created_unix_s=job.created_unix_s,
        command=tuple(redact.words(job.command)),
        roots=tuple(d.root for d in job.captured.deltas),
        fresh_roots=job.captured.fresh,
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
            **_interpreters([d.root for d in job.captured.deltas]),
        },
        archive=records.Archive(
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
    found = (_behind(root, os.path.join(root, "bin", "python")) for root in roots if root != "/")
    paths = sorted({path for path in found if path})
    return {records.INTERPRETERS: "\n".join(paths)} if paths else {}


def _behind(root: str, path: str) -> str:
    """What a link in a root leads to outside of it; "" for what is none."""
    for _ in range(_LINKS):
        if not os.path.islink(path):
            return ""
        path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))
        if not is_within(path, root):
            return path
    return ""
