"""A directory checkpoint that is written by several processes and published once.

One process begins (`TreeWriter.begin`) and gives its `token` to the others, which join
(`TreeWriter.join`). Each adds its own files, at any time and in any order, and finishes. When all
have finished, which the caller must make sure of (a barrier), the one that began publishes; nothing
is visible before.
"""

from __future__ import annotations

import os
import posixpath
import threading
import time
import uuid
from collections.abc import Collection, Iterator

from bootseer.context_managers import Committing
from bootseer.errors import BootseerError, CorruptDataError, NotFoundError, UsageError
from bootseer.storage.store import Store
from bootseer.stripedfs.format import json_fields
from bootseer.stripedfs.format.json_fields import BadFieldError, compute_digest
from bootseer.stripedfs.format.manifest import (
    MANIFEST_LIMIT_BYTES,
    TreeEntry,
    TreeFile,
    TreeFolder,
    TreeLink,
    TreeManifest,
    check_target,
    check_tree,
    parse_entries,
)
from bootseer.stripedfs.format.pointer import Version, checkpoint_folder
from bootseer.stripedfs.progress import SILENT
from bootseer.stripedfs.write.draft import WRITING, Draft, list_drafts
from bootseer.stripedfs.write.local_walk import object_name
from bootseer.stripedfs.write.put_files import FileUploads, write_manifest
from bootseer.stripedfs.write.stripe_stream import Buffer, StripeStream
from bootseer.stripedfs.write.stripe_upload import check_length
from bootseer.stripedfs.write.write_settings import (
    WritePlan,
    WriteSettings,
    choose_place,
    plan_write,
)

PART = "part-"
OFFER = "offer-"
FILE_MODE, FOLDER_MODE = 0o644, 0o755


class TreeWriter(Committing):
    """One process's part in writing a directory checkpoint; several threads may add at once.

    Leaving the block finishes; in the process that began, everything that is not published by then
    is removed.
    """

    def __init__(self, draft: Draft, plan: WritePlan, *, begun: bool) -> None:
        """`begun`: this process began the draft, and will publish it."""
        self._draft, self._store = draft, draft.store
        self._plan = plan
        self._begun = begun
        self._entries: dict[str, TreeEntry] = {}
        self._lock = threading.Lock()
        self._finished = False

    @classmethod
    def begin(cls, store: Store, name: str, settings: WriteSettings) -> TreeWriter:
        """Begin a new version of the directory checkpoint `name`."""
        plan = plan_write(settings, store)
        return cls(Draft.begin(store, name, {}), plan, begun=True)

    @classmethod
    def join(cls, store: Store, name: str, settings: WriteSettings, *, token: str) -> TreeWriter:
        """Add to a version that another process began; `token` is that writer's."""
        plan = plan_write(settings, store)
        return cls(Draft.join(store, name, token), plan, begun=False)

    @property
    def token(self) -> str:
        """What other processes need to join."""
        return self._draft.token

    def add_file(self, path: str, source: str) -> TreeFile:
        """Store a local file as `path` of the tree, in parallel."""
        path = _check_path(path)
        uploads = FileUploads(self._draft, self._plan, SILENT)
        entries: list[TreeFile] = []
        with uploads.closing():
            file = uploads.open(source)
            uploads.pool.run(uploads.tree_file_tasks(path, file, entries.append))
        self._add(entries[0])
        return entries[0]

    def open_file(self, path: str) -> TreeFileWriter:
        """Write `path` of the tree as a stream; its `close` adds it."""
        path = _check_path(path)
        folder = f"{self._draft.folder}/{object_name(path)}"
        stream = StripeStream(self._store, self._plan, folder, first=choose_place(folder))
        return TreeFileWriter(self, path, folder, stream)

    def add_folder(self, path: str, *, mode: int = FOLDER_MODE) -> None:
        """Add a folder; parents of files need not be added."""
        self._add(TreeFolder(_check_path(path), mode & 0o7777, time.time_ns()))

    def add_link(self, path: str, target: str) -> None:
        """Add a symbolic link. Raises UsageError for a target that may leave the tree."""
        path = _check_path(path)
        try:
            self._add(TreeLink(path, check_target(path, target)))
        except BadFieldError as error:
            raise UsageError(f"{path} cannot be kept: {error}") from error

    def remove(self, path: str) -> None:
        """Remove what this process added as `path`, if it did."""
        with self._lock:
            entry = self._entries.pop(path, None)
        if isinstance(entry, TreeFile):
            self._store.delete_tree(f"{self._draft.folder}/{entry.object}")

    def finish(self) -> None:
        """List all that was added for the publisher; nothing can be added afterwards."""
        with self._lock:
            if self._finished:
                return
            self._finished = True
            entries = [entry.to_json() for entry in self._entries.values()]
        if self._begun:
            return  # this process is the publisher
        data = json_fields.encode("part", {"entries": entries})
        self._store.replace(f"{self._draft.writing}/{PART}{uuid.uuid4().hex}.json", data)

    def offer(self) -> None:
        """Offer what was added so far to other publishers of this directory (`take`)."""
        with self._lock:
            entries = [entry.to_json() for entry in self._entries.values()]
        data = json_fields.encode("part", {"entries": entries})
        self._store.replace(f"{self._draft.writing}/{OFFER}{uuid.uuid4().hex}.json", data)

    def take(self, wanted: Collection[str] | None = None) -> set[str]:
        """Add what other writers of this directory offered; returns all paths that are added.

        Of several offers of a path the newest by the store's clock counts; `wanted` says which
        paths (None: all). What was offered is moved from their drafts into this one.
        """
        newest: dict[str, tuple[float, str, TreeFile]] = {}
        for draft in list_drafts(self._store, checkpoint_folder(self._draft.name)):
            if draft == self._draft.folder:
                continue
            for when_s, entry in self._read_offers(draft):
                if isinstance(entry, TreeFile) and (wanted is None or entry.path in wanted):
                    known = newest.get(entry.path)
                    if known is None or known[0] <= when_s:
                        newest[entry.path] = (when_s, draft, entry)
        for path, (_, draft, entry) in newest.items():
            if path in self._entries:
                continue
            target = f"{self._draft.folder}/{entry.object}"
            self._store.mkdir(posixpath.dirname(target))
            try:
                self._store.rename(f"{draft}/{entry.object}", target)
            except NotFoundError:
                continue  # taken by a publisher that was interrupted long ago
            self._add(entry)
        return set(self._entries)

    def forget_offers(self) -> None:
        """Remove drafts with offers: what they offer was published, or never will be."""
        for draft in list(list_drafts(self._store, checkpoint_folder(self._draft.name))):
            if next(iter(self._read_offers(draft)), None) is not None:
                self._store.delete_tree(draft)

    def _read_offers(self, draft: str) -> Iterator[tuple[float, TreeEntry]]:
        try:
            listed = list(self._store.list(f"{draft}/{WRITING}"))
        except NotFoundError:
            return
        for stat in listed:
            if posixpath.basename(stat.name).startswith(OFFER):
                for entry in self._read_part(stat.name):
                    yield stat.mtime_s, entry

    def publish(self, *, shares_folder: bool = False) -> Version:
        """Merge what all processes added and make it the checkpoint; once, in the one that began.

        `shares_folder`: more files of the directory are in the plain folder of its name. Raises
        UsageError when two processes added one path, or a file lies below a file.
        """
        if not self._begun:
            raise UsageError("this process joined; the one that began publishes")
        self.finish()
        entries = dict(self._entries)
        for stat in self._store.list(self._draft.writing):
            if posixpath.basename(stat.name).startswith(PART):
                for entry in self._read_part(stat.name):
                    if entries.setdefault(entry.path, entry) != entry:
                        raise UsageError(f"two processes wrote {entry.path}; give each its own")
        for path in list(entries):
            _add_parents(entries, path)
        ordered = tuple(entries[path] for path in sorted(entries))
        try:
            check_tree(ordered)
        except BadFieldError as error:
            raise UsageError(f"what was added is no tree: {error}") from error
        tree = TreeManifest(FOLDER_MODE, self._plan.chunk_bytes, ordered)
        return self._draft.publish(
            "tree", tree.size_bytes, tree.encode(), shares_folder=shares_folder
        )

    def close(self) -> None:
        """Finish; removes what the process that began did not publish. Twice is safe."""
        if self._begun:
            self._draft.discard()
        else:
            self.finish()

    def abort(self) -> None:
        """Remove what this process added; everything, in the process that began."""
        if self._begun:
            self._draft.discard()
        for path in () if self._begun or self._finished else tuple(self._entries):
            self.remove(path)
        self._finished = True

    def leave_nothing(self) -> None:
        """As `abort`; also removes the directory's own folder if nothing else is in it."""
        self.abort()
        self._draft.remove_base()

    def _add(self, entry: TreeEntry) -> None:
        with self._lock:
            if self._finished:
                raise UsageError(f"{entry.path} comes after this process sealed; add it before")
            self._entries[entry.path] = entry

    def _read_part(self, name: str) -> tuple[TreeEntry, ...]:
        where = f"{name} in {self._store.url}"
        data = self._store.read(name, limit_bytes=MANIFEST_LIMIT_BYTES)
        try:
            return parse_entries(json_fields.decode(data, "part", where))
        except BadFieldError as error:
            raise CorruptDataError(f"{where} is damaged: {error}; write it anew") from error


class TreeFileWriter(Committing):
    """A file of a tree that is written from start to end; `close` adds it, `abort` discards it."""

    def __init__(self, tree: TreeWriter, path: str, folder: str, stream: StripeStream) -> None:
        self._tree, self._path = tree, path
        self._folder, self._stream = folder, stream
        self.closed = False

    def write(self, data: Buffer) -> int:
        """Append all of `data`; waits while the stripes are busy."""
        if self.closed:
            raise UsageError(f"{self._path} is closed; open it anew to write it again")
        try:
            return self._stream.write(data)
        except BaseException:  # a gap cannot be filled later
            self.abort()
            raise

    def close(self) -> None:
        """Write the rest and add the file to its tree; twice is safe."""
        if self.closed:
            return
        self.closed = True
        try:
            entry = self._store_entry()
        except BaseException:  # nothing unpublished may stay
            self._stream.abort()
            raise
        self._tree._add(entry)

    def _store_entry(self) -> TreeFile:
        store, size = self._tree._store, self._stream.size_bytes
        name, now = object_name(self._path), time.time_ns()
        tail = self._stream.tail()
        if tail is None:
            manifest = self._stream.finish()
            length, digest = write_manifest(store, self._folder, manifest)
            return TreeFile(self._path, FILE_MODE, now, size, True, name, digest, length)
        with store.writer(self._folder, self._tree._plan.hints(0)) as writer:
            writer.write(tail)
        check_length(store, self._folder, size)
        digest = compute_digest(tail)
        self._stream.abort()  # it has written nothing
        return TreeFile(self._path, FILE_MODE, now, size, False, name, digest)

    def abort(self) -> None:
        """Discard what was written; twice is safe."""
        if not self.closed:
            self.closed = True
            self._stream.abort()
            try:
                self._tree._store.delete_tree(self._folder)
            except BootseerError:
                return  # gc finds what is left in the draft


def _check_path(path: str) -> str:
    try:
        return json_fields.check_path(os.fsdecode(path), "the path")
    except BadFieldError as error:
        raise UsageError(f"{error}; name a file within the tree") from error


def _add_parents(entries: dict[str, TreeEntry], path: str) -> None:
    parent = posixpath.dirname(path)
    while parent and parent not in entries:
        entries[parent] = TreeFolder(parent, FOLDER_MODE, time.time_ns())
        parent = posixpath.dirname(parent)
