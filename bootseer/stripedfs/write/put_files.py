"""Uploading local files to a draft, with what an interrupted put left there."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from bootseer.errors import BootseerError, CorruptDataError, NotFoundError
from bootseer.storage.store import Stat, Store
from bootseer.stripedfs.format.json_fields import DIGEST_BYTES, compute_digest
from bootseer.stripedfs.format.manifest import MANIFEST_LIMIT_BYTES, Manifest, TreeFile
from bootseer.stripedfs.format.pointer import MANIFEST
from bootseer.stripedfs.format.stripe_layout import Layout, check_chunks, trim_width
from bootseer.stripedfs.progress import Progress
from bootseer.stripedfs.workers import Task, WorkerPool
from bootseer.stripedfs.write.draft import WRITING, Draft
from bootseer.stripedfs.write.local_walk import object_name
from bootseer.stripedfs.write.stripe_upload import (
    SourceFile,
    StripeUpload,
    check_length,
    replace_with_retries,
    run_with_retries,
)
from bootseer.stripedfs.write.write_settings import WritePlan, choose_place

RECORD = re.compile(r"stripe-([0-9a-f]{32})-([0-9]{5})\.json\Z")
Records = dict[str, dict[int, str]]
"""Names of the records of complete stripes, by the tag of their file and their number."""


class FileUploads:
    """The uploads of one put: its plan, threads, sources, and what an interrupted put recorded."""

    def __init__(
        self, draft: Draft, plan: WritePlan, progress: Progress, records: Records | None = None
    ) -> None:
        """`records` are those in an adopted draft; see `read_records`."""
        self.draft, self.plan, self.progress = draft, plan, progress
        self.store = draft.store
        self.pool = WorkerPool(plan.jobs, plan.chunk_bytes)
        self._lock = threading.Lock()
        self._sources: set[SourceFile] = set()
        self._striped: list[StripeUpload] = []
        self._records = records or {}

    @property
    def kept_bytes(self) -> int:
        """Bytes that an interrupted put had stored and this one kept."""
        return sum(upload.kept_bytes for upload in self._striped)

    def striped_tasks(
        self, folder: str, source: SourceFile, done: Callable[[Manifest], None]
    ) -> Iterable[Task]:
        """The tasks that stripe a file below `folder`; the last of them calls `done`."""
        plan = self.plan
        check_chunks(source.size_bytes, plan.chunk_bytes)  # not only after hours of writing
        width = trim_width(source.size_bytes, plan.chunk_bytes, plan.width)
        layout = Layout(source.size_bytes, plan.chunk_bytes, width)
        within = folder.removeprefix(self.draft.folder)
        tag = compute_digest(within.encode(errors="surrogateescape"))

        def record(stripe: int, digests: bytes) -> None:
            if layout.stripe_length(stripe) < plan.keep_bytes:
                return
            name = f"{self.draft.writing}/stripe-{tag.hex()}-{stripe:05d}.json"
            text = base64.b64encode(digests).decode("ascii")
            body = {"size": layout.size_bytes, "digests": text}
            try:
                self.store.replace(name, json.dumps(body).encode())
            except BootseerError:
                return  # a put that is continued would keep less; this one loses nothing

        claims = self._read_claims(folder, tag.hex(), layout)
        if self.draft.adopted and not claims and folder != self.draft.folder:
            self.store.delete_tree(folder)  # stripes of a file that was larger then
        upload = StripeUpload(
            self.store,
            plan,
            source,
            layout,
            folder,
            first=choose_place(within),
            pool=self.pool,
            progress=self.progress,
            done=lambda digests: done(Manifest(layout, digests)),
            claims=claims,
            record=record,
        )
        with self._lock:
            self._striped.append(upload)
        return upload.tasks()

    def _plain_task(self, name: str, source: SourceFile, done: Callable[[bytes], None]) -> Task:
        """The task that stores a file smaller than a chunk as one object."""

        def task(buffer: memoryview) -> None:
            view = buffer[: source.size_bytes]
            source.read_into(0, view)
            source.check_unchanged()
            first = choose_place(name)

            def write(attempt: int) -> None:
                with self.store.writer(name, self.plan.hints(first + attempt)) as writer:
                    writer.write(view)
                check_length(self.store, name, len(view))

            run_with_retries(write, self.plan.tries, self.pool.pause)
            self.progress.advance(len(view))
            done(compute_digest(view))
            self.close(source)

        return task

    def tree_file_tasks(
        self, path: str, source: SourceFile, done: Callable[[TreeFile], None]
    ) -> Iterable[Task]:
        """The tasks that store a file of a tree; the last of them calls `done`."""
        name = object_name(path)
        target = f"{self.draft.folder}/{name}"
        fields = (path, source.mode, source.identity.mtime_ns, source.size_bytes)

        def add_plain(digest: bytes) -> None:
            done(TreeFile(*fields, False, name, digest))

        def add_striped(manifest: Manifest) -> None:
            size, digest = write_manifest(self.store, target, manifest)
            done(TreeFile(*fields, True, name, digest, size))

        if source.size_bytes < self.plan.chunk_bytes:
            return [self._plain_task(target, source, add_plain)]
        return self.striped_tasks(target, source, add_striped)

    def clear_leftovers(self, wanted: Mapping[str, bool] | None) -> None:
        """Remove from an adopted draft what this put does not use.

        `wanted` maps a tree's objects to whether they are striped; None stands for a single file.
        """
        if not self.draft.adopted:
            return
        base = self.draft.folder
        above = {name[:end] for name in wanted or () for end, c in enumerate(name) if c == "/"}
        folders = [base]
        while folders:
            folder = folders.pop()
            try:
                for stat in self.store.temporaries(folder):
                    self.store.delete_tree(stat.name)
                listed = [] if wanted is None else list(self.store.list(folder))
            except NotFoundError:
                continue
            for stat in listed:
                name = stat.name.removeprefix(f"{base}/")
                if not _is_wanted(wanted or {}, above, name, stat):
                    self.store.delete_tree(stat.name)
                elif stat.is_folder and name != WRITING:
                    folders.append(stat.name)

    def open(self, path: str) -> SourceFile:
        """Open a source; `closing` closes it at the latest."""
        source = SourceFile.open(path)
        with self._lock:
            self._sources.add(source)
        return source

    def close(self, source: SourceFile) -> None:
        """Close a source early: there may be many."""
        source.close()
        with self._lock:
            self._sources.discard(source)

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Close all sources at the end."""
        try:
            yield
        finally:
            for source in tuple(self._sources):
                self.close(source)

    def _read_claims(self, folder: str, tag: str, layout: Layout) -> dict[int, bytes]:
        """Chunk digests of stripes that an interrupted put recorded as complete; unchecked."""
        if not self.draft.adopted:
            return {}
        manifest = self._read_manifest(folder)
        if manifest is not None and manifest.layout == layout:
            return {
                stripe: b"".join(manifest.digest(chunk) for chunk in layout.stripe_chunks(stripe))
                for stripe in range(layout.width)
            }
        claims = {}
        for stripe, name in self._records.get(tag, {}).items():
            digests = _read_digests(self.draft, name, layout.size_bytes)
            if stripe < layout.width and digests:
                claims[stripe] = digests
        return claims

    def _read_manifest(self, folder: str) -> Manifest | None:
        name = f"{folder}/{MANIFEST}"
        try:
            return Manifest.parse(self.store.read(name, limit_bytes=MANIFEST_LIMIT_BYTES), name)
        except (NotFoundError, CorruptDataError):
            return None


def write_manifest(store: Store, folder: str, manifest: Manifest) -> tuple[int, bytes]:
    """Write a striped file's manifest below `folder`; its length and digest."""
    data = manifest.encode()
    replace_with_retries(store, f"{folder}/{MANIFEST}", data)
    return len(data), compute_digest(data)


def _is_wanted(wanted: Mapping[str, bool], above: set[str], name: str, stat: Stat) -> bool:
    """Whether a put of a tree uses an object or folder of an adopted draft, named within it."""
    if name in (WRITING, MANIFEST) or wanted.get(name.rpartition("/")[0]):
        return True
    if stat.is_folder:
        return bool(wanted.get(name)) or name in above
    return wanted.get(name) is False


def read_records(draft: Draft) -> Records:
    """The names of what an adopted draft records of complete stripes."""
    records: Records = {}
    if not draft.adopted:
        return records
    try:
        for stat in draft.store.list(draft.writing):
            match = RECORD.search(stat.name)
            if match:
                records.setdefault(match[1], {})[int(match[2])] = stat.name
    except NotFoundError:
        return {}
    return records


def _read_digests(draft: Draft, name: str, size_bytes: int) -> bytes:
    try:
        body = json.loads(draft.store.read(name, limit_bytes=MANIFEST_LIMIT_BYTES))
        if body["size"] != size_bytes:
            return b""
        digests = base64.b64decode(body["digests"], validate=True)
    except (NotFoundError, CorruptDataError, ValueError, LookupError, TypeError, RecursionError):
        return b""
    return digests if len(digests) % DIGEST_BYTES == 0 else b""
