"""Put a local file or directory as a checkpoint: in parallel, resumable, published at once."""

from __future__ import annotations

import dataclasses
import os
import stat as stat_module
import threading
from collections.abc import Iterator
from typing import Any

from bootseer.errors import (
    BootseerError,
    BusyError,
    DeadlineError,
    OsAction,
    StoreUnavailableError,
)
from bootseer.storage.open import open_object
from bootseer.storage.options import StoreOptions
from bootseer.storage.store import Store
from bootseer.stripedfs.format.manifest import (
    Manifest,
    TreeEntry,
    TreeFile,
    TreeFolder,
    TreeLink,
    TreeManifest,
)
from bootseer.stripedfs.format.pointer import Version
from bootseer.stripedfs.progress import SILENT, Progress
from bootseer.stripedfs.workers import Task
from bootseer.stripedfs.write.draft import Draft
from bootseer.stripedfs.write.local_walk import LocalEntry, object_name, walk_folder
from bootseer.stripedfs.write.put_files import FileUploads, read_records
from bootseer.stripedfs.write.write_settings import WritePlan, WriteSettings, plan_write


@dataclasses.dataclass(frozen=True, slots=True)
class PutReport:
    """What a put did; `kept_bytes` were already there from an interrupted one."""

    version: Version
    files: int
    size_bytes: int
    kept_bytes: int
    width: int
    chunk_bytes: int


def put(
    source: str,
    url: str,
    *,
    settings: WriteSettings | None = None,
    options: StoreOptions | None = None,
    resume: bool = True,
    follow_links: bool = False,
    progress: Progress = SILENT,
) -> PutReport:
    """Store the file or directory `source` as the checkpoint `url`, replacing the previous one.

    Readers see the previous checkpoint or this one. An interrupted put of the same unchanged source
    is continued with `resume`. Raises the store's errors; BusyError when the source changes.
    """
    store, name = open_object(url, options)
    try:
        return put_into(
            store,
            name,
            source,
            settings=settings,
            resume=resume,
            follow_links=follow_links,
            progress=progress,
        )
    finally:
        store.close()


def put_into(
    store: Store,
    name: str,
    source: str,
    *,
    settings: WriteSettings | None = None,
    resume: bool = True,
    follow_links: bool = False,
    progress: Progress = SILENT,
) -> PutReport:
    """`put` into a store that is open already."""
    source = os.path.abspath(source)
    with OsAction(f"read {source}"):
        stat = os.stat(source)
    plan = plan_write(settings or WriteSettings(), store)
    is_folder = stat_module.S_ISDIR(stat.st_mode)
    entries = walk_folder(source, follow_links=follow_links) if is_folder else []
    note = _make_note(source, stat, plan)
    draft = (Draft.adopt(store, name, note) if resume else None) or Draft.begin(store, name, note)
    try:
        uploads = FileUploads(draft, plan, progress, read_records(draft))
        with uploads.closing():
            if is_folder:
                return _put_tree(uploads, source, entries, follow_links=follow_links)
            return _put_file(uploads, source)
    except BaseException as error:  # interrupted: a later put may go on from it
        _keep_or_discard(draft, error, resume=resume)
        raise


def _keep_or_discard(draft: Draft, error: BaseException, *, resume: bool) -> None:
    """Keep the draft after an error that may pass, or an interrupt; else remove it."""
    is_ours = isinstance(error, BootseerError)
    may_pass = isinstance(error, StoreUnavailableError | DeadlineError) or not is_ours
    try:
        if may_pass and resume:
            draft.keep()
        else:
            draft.discard()
    except BootseerError:
        return  # the first error is the one to report; gc finds the draft


def _make_note(source: str, stat: os.stat_result, plan: WritePlan) -> dict[str, Any]:
    """What must be equal in a later put for it to go on from this one."""
    note: dict[str, Any] = {"source": source, "chunk": plan.chunk_bytes, "width": plan.width}
    note |= {"replication": plan.replication, "block": plan.block_bytes}
    if stat_module.S_ISREG(stat.st_mode):
        note |= {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "inode": stat.st_ino}
    return note


def _put_file(uploads: FileUploads, path: str) -> PutReport:
    manifests: list[Manifest] = []
    uploads.clear_leftovers(None)
    source = uploads.open(path)
    uploads.progress.expect(source.size_bytes)
    uploads.pool.run(uploads.striped_tasks(uploads.draft.folder, source, manifests.append))
    manifest = manifests[0]
    version = uploads.draft.publish("file", manifest.layout.size_bytes, manifest.encode())
    return _make_report(uploads, version, 1, manifest.layout.width)


def _put_tree(
    uploads: FileUploads, root: str, entries: list[LocalEntry], *, follow_links: bool
) -> PutReport:
    files = [entry for entry in entries if entry.kind == "file"]
    chunk_bytes = uploads.plan.chunk_bytes
    uploads.clear_leftovers({object_name(f.path): f.size_bytes >= chunk_bytes for f in files})
    uploads.progress.expect(sum(entry.size_bytes for entry in files))
    stored: dict[str, TreeFile] = {}
    uploads.pool.run(_tree_tasks(uploads, files, stored))
    if walk_folder(root, follow_links=follow_links) != entries:
        raise BusyError(f"{root} changed while it was put; put it again when it is at rest")
    mode = stat_module.S_IMODE(os.stat(root).st_mode)
    tree = TreeManifest(mode, chunk_bytes, tuple(_tree_entry(entry, stored) for entry in entries))
    version = uploads.draft.publish("tree", tree.size_bytes, tree.encode())
    return _make_report(uploads, version, len(files), uploads.plan.width)


def _tree_tasks(
    uploads: FileUploads, files: list[LocalEntry], stored: dict[str, TreeFile]
) -> Iterator[Task]:
    """The tasks of file after file; a source is opened when its turn comes."""
    lock = threading.Lock()

    def keep(entry: TreeFile) -> None:
        with lock:
            stored[entry.path] = entry

    for entry in files:
        yield from uploads.tree_file_tasks(entry.path, uploads.open(entry.local), keep)


def _tree_entry(local: LocalEntry, stored: dict[str, TreeFile]) -> TreeEntry:
    if local.kind == "folder":
        return TreeFolder(local.path, local.mode, local.mtime_ns)
    if local.kind == "link":
        return TreeLink(local.path, local.target)
    return stored[local.path]


def _make_report(uploads: FileUploads, version: Version, files: int, width: int) -> PutReport:
    size_bytes = version.pointer.size_bytes
    return PutReport(
        version, files, size_bytes, uploads.kept_bytes, width, uploads.plan.chunk_bytes
    )
