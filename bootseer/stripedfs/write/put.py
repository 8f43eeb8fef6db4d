"""Put a local file or directory as a checkpoint: in parallel, resumable, published at once."""

from __future__ import annotations

import dataclasses
import os
import stat as stat_module
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from bootseer.errors import (
    BootseerError,
    BusyError,
    DeadlineError,
    StoreUnavailableError,
    from_os_error,
)
from bootseer.storage.open import open_object
from bootseer.storage.store import Store
from bootseer.stripedfs.format.json_fields import digest_of
from bootseer.stripedfs.format.manifest import (
    Manifest,
    TreeEntry,
    TreeFile,
    TreeFolder,
    TreeLink,
    TreeManifest,
)
from bootseer.stripedfs.format.pointer import MANIFEST, Version
from bootseer.stripedfs.write.draft import Draft
from bootseer.stripedfs.write.local_walk import Found, object_of, walk
from bootseer.stripedfs.write.put_files import FileWorks
from bootseer.stripedfs.write.stripe_pool import Work, replace_surely
from bootseer.stripedfs.write.write_settings import (
    SILENT,
    Progress,
    WritePlan,
    WriteSettings,
    plan_write,
)

if TYPE_CHECKING:
    from bootseer.storage.options import StoreOptions


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
    """Store the file or directory `source` as the checkpoint `url`, replacing what it was.

    Readers see the old checkpoint or the new one. An interrupted put of the same unchanged source
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
    try:
        found = os.stat(source)
    except OSError as error:
        raise from_os_error(error, f"read {source}") from error
    plan = plan_write(settings or WriteSettings(), store)
    is_folder = stat_module.S_ISDIR(found.st_mode)
    entries = walk(source, follow_links=follow_links) if is_folder else []
    note = _note(source, found, plan)
    draft = (Draft.adopt(store, name, note) if resume else None) or Draft.begin(store, name, note)
    try:
        works = FileWorks(draft, plan, progress)
        with works.closing():
            if is_folder:
                return _put_tree(works, source, entries, follow_links=follow_links)
            return _put_file(works, source)
    except BaseException as error:  # interrupted: a later put may go on from it
        _settle(draft, error, resume=resume)
        raise


def _settle(draft: Draft, error: BaseException, *, resume: bool) -> None:
    """Keep the draft after an error that time may heal, or an interrupt; else remove it."""
    ours = isinstance(error, BootseerError)
    heals = isinstance(error, StoreUnavailableError | DeadlineError) or not ours
    try:
        if heals and resume:
            draft.keep()
        else:
            draft.discard()
    except BootseerError:
        return  # the first error is the one to tell; gc finds the draft


def _note(source: str, found: os.stat_result, plan: WritePlan) -> dict[str, Any]:
    """What makes a later put the same one."""
    note: dict[str, Any] = {"source": source, "chunk": plan.chunk_bytes, "width": plan.width}
    note |= {"replication": plan.replication, "block": plan.block_bytes}
    if stat_module.S_ISREG(found.st_mode):
        note |= {"size": found.st_size, "mtime_ns": found.st_mtime_ns, "inode": found.st_ino}
    return note


def _put_file(works: FileWorks, path: str) -> PutReport:
    manifests: list[Manifest] = []
    works.clear_leftovers(None)
    source = works.open(path)
    works.progress.expect(source.size_bytes)
    works.pool.run(works.striped(works.draft.folder, source, manifests.append))
    manifest = manifests[0]
    version = works.draft.publish("file", manifest.layout.size_bytes, manifest.encode())
    return _report(works, version, 1, manifest.layout.width)


def _put_tree(works: FileWorks, root: str, found: list[Found], *, follow_links: bool) -> PutReport:
    files = [entry for entry in found if entry.kind == "file"]
    chunk_bytes = works.plan.chunk_bytes
    works.clear_leftovers({object_of(f.path): f.size_bytes >= chunk_bytes for f in files})
    works.progress.expect(sum(entry.size_bytes for entry in files))
    stored: dict[str, TreeFile] = {}
    works.pool.run(_tree_works(works, files, stored))
    if walk(root, follow_links=follow_links) != found:
        raise BusyError(f"{root} changed while it was put; put it again when it is at rest")
    mode = stat_module.S_IMODE(os.stat(root).st_mode)
    tree = TreeManifest(mode, chunk_bytes, tuple(_entry(entry, stored) for entry in found))
    version = works.draft.publish("tree", tree.size_bytes, tree.encode())
    return _report(works, version, len(files), works.plan.width)


class _About(NamedTuple):
    """The fields of a `TreeFile` that come from the source."""

    path: str
    mode: int
    mtime_ns: int
    size_bytes: int


def _tree_works(
    works: FileWorks, files: list[Found], stored: dict[str, TreeFile]
) -> Iterator[Work]:
    """Pieces of work file by file; sources are opened only when their turn comes."""
    lock = threading.Lock()

    def keep(entry: TreeFile) -> None:
        with lock:
            stored[entry.path] = entry

    for entry in files:
        source = works.open(entry.local)
        name = object_of(entry.path)
        about = _About(entry.path, source.mode, source.identity.mtime_ns, source.size_bytes)
        if source.size_bytes < works.plan.chunk_bytes:

            def plain(digest: bytes, about: _About = about, name: str = name) -> None:
                keep(TreeFile(*about, False, name, digest))

            yield works.plain(f"{works.draft.folder}/{name}", source, plain)
            continue

        def striped(manifest: Manifest, about: _About = about, name: str = name) -> None:
            size, digest = store_manifest(works.store, f"{works.draft.folder}/{name}", manifest)
            keep(TreeFile(*about, True, name, digest, size))

        yield from works.striped(f"{works.draft.folder}/{name}", source, striped)


def store_manifest(store: Store, folder: str, manifest: Manifest) -> tuple[int, bytes]:
    """Write a striped file's manifest below `folder`; its length and digest."""
    data = manifest.encode()
    replace_surely(store, f"{folder}/{MANIFEST}", data)
    return len(data), digest_of(data)


def _entry(found: Found, stored: dict[str, TreeFile]) -> TreeEntry:
    if found.kind == "folder":
        return TreeFolder(found.path, found.mode, found.mtime_ns)
    if found.kind == "link":
        return TreeLink(found.path, found.target)
    return stored[found.path]


def _report(works: FileWorks, version: Version, files: int, width: int) -> PutReport:
    size_bytes = version.pointer.size_bytes
    return PutReport(version, files, size_bytes, works.kept_bytes, width, works.plan.chunk_bytes)
