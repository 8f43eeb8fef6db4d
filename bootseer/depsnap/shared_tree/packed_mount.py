"""A node-shared tree as one file that the kernel mounts: nothing to create, one file to check.

A packed tree is two files: `data`, all files' bytes, each file from a multiple of 4 KiB on, and
`meta`, the EROFS metadata that points into it, with one directory a root (`0`, `1`, …). Unpacking
writes one large file in place of many small ones, and whether it was changed since is told by the
two files alone: their inode, size, owner, mode, mtime and ctime, which no program can set.

It is used below an overlay and nowhere else, and needs Linux 6.12 (EROFS over plain files).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from bootseer.depsnap.restore import staging
from bootseer.depsnap.types import DIRECTORY, FILE, HARDLINK, HOST_XATTRS, XAttrs
from bootseer.errors import NotSupportedError, UsageError
from bootseer.system import mount_calls
from bootseer.system.file_lock import FileLock, acquire_directory
from bootseer.system.mountinfo import is_mounted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from bootseer.blockimage.tree_entries import Entry
    from bootseer.depsnap.format.index_records import Index

DATA, META = "data", "meta"
_BLOCK_BYTES = 4096
_TRIAL = ".trial-"
_IN_TRIAL = ("image", "upper", "work", "shown")
_META_AHEAD_BYTES = 16 << 20
_MOST_PADDING_BYTES = 1 << 30
"""Holes and padding beyond this many bytes are better off as files of their own."""


def layout(index: Index) -> tuple[list[int], int]:
    """Where each entry's content begins in `data`, and the length of `data`.

    Entries without content have 0. Raises NotSupportedError for a tree that is mostly holes.
    """
    places = [0] * index.entries
    end = 0
    for number, kind in enumerate(index.kind):
        if kind == FILE and index.size[number]:
            places[number] = end
            end += -(-index.size[number] // _BLOCK_BYTES) * _BLOCK_BYTES
    if end > 2 * index.raw_bytes + _MOST_PADDING_BYTES:
        raise NotSupportedError("the snapshot is mostly holes, which a packed tree cannot keep")
    return places, end


def metadata(
    index: Index,
    places: Sequence[int],
    data_bytes: int,
    mode: Sequence[int],
    xattrs: Mapping[int, XAttrs],
) -> tuple[bytearray, int]:
    """The bytes of `meta`, and how many attributes it cannot hold.

    `places` and `data_bytes` are those of `layout`, `mode` and `xattrs` what entries shall have.
    Raises NotSupportedError, CorruptDataError.
    """
    from bootseer.blockimage import erofs_writer as image
    from bootseer.blockimage.tree_entries import Entry, Kind

    entries = [Entry(path=b"", kind=Kind.DIRECTORY, mode=0o755)]
    lost = 0
    for root_number, root in enumerate(index.roots):
        prefix = b"%d" % root_number
        for number in range(root.first, root.first + root.count):
            entry = _entry(index, number, prefix, places[number], mode[number])
            kept, dropped = _attributes(xattrs.get(number, ()))
            if kept:
                entry.xattrs = kept
            lost += dropped
            entries.append(entry)
    try:
        return image.metadata(entries, data_bytes), lost
    except UsageError as error:
        raise NotSupportedError(f"a packed tree cannot hold the snapshot: {error}") from error


def _entry(index: Index, number: int, prefix: bytes, place: int, mode: int) -> Entry:
    from bootseer.blockimage.tree_entries import Entry, FileExtent, Kind, Stored

    kind, path = index.kind[number], index.path[number]
    full = prefix + b"/" + os.fsencode(path) if path else prefix
    if kind == HARDLINK:
        target = prefix + b"/" + os.fsencode(index.link[number])
        return Entry(path=full, kind=Kind.FILE, hardlink_of=target)
    entry = Entry(
        path=full,
        kind=Kind.FILE,
        mode=mode,
        uid=index.uid[number],
        gid=index.gid[number],
        mtime_ns=index.mtime_ns[number],
    )
    if kind == DIRECTORY:
        entry.kind = Kind.DIRECTORY
    elif kind == FILE:
        size = index.size[number]
        if size:
            entry.size_bytes = size
            # One chunk for the whole file: all its bytes lie in a row.
            chunk_bytes = max(_BLOCK_BYTES, 1 << (size - 1).bit_length())
            entry.content = Stored(b"", (FileExtent(0, place, size),), chunk_bytes)
    else:
        entry.kind = Kind.SYMLINK
        entry.link_target = os.fsencode(index.link[number])
    return entry


def _attributes(xattrs: XAttrs) -> tuple[dict[bytes, bytes], int]:
    """Those that EROFS can hold, and how many it cannot."""
    if not xattrs:
        return {}, 0
    from bootseer.blockimage import erofs_format

    kept = {
        os.fsencode(name): value
        for name, value in xattrs
        if not name.startswith(HOST_XATTRS)
        and erofs_format.xattr_index(os.fsencode(name)) is not None
    }
    return kept, len(xattrs) - len(kept)


def seal(folder: str) -> list[list[int]]:
    """What tells that neither file was changed. Raises OSError where one is missing."""
    out = []
    for name in (DATA, META):
        s = os.lstat(os.path.join(folder, name))
        times = [s.st_mtime_ns, s.st_ctime_ns]
        out.append([s.st_mode, s.st_ino, s.st_size, s.st_uid, *times])
    return out


def mount(folder: str, target: str) -> None:
    """Mount a packed tree read-only. Raises OSError, NotSupportedError."""
    data = os.path.join(folder, DATA)
    if "," in data:
        raise NotSupportedError("the cache's path holds a comma, which mount(2) cannot")
    meta = os.path.join(folder, META)
    read_ahead(folder)
    flags = mount_calls.MS_RDONLY | mount_calls.MS_NODEV | mount_calls.MS_NOATIME
    mount_calls.mount(meta, target, "erofs", flags, f"device={data}")


def read_ahead(folder: str) -> None:
    """Have the kernel read the metadata at once: the mount would wait for each block in turn.

    Waits for none of it. Raises OSError where there is none.
    """
    descriptor = os.open(os.path.join(folder, META), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        os.posix_fadvise(descriptor, 0, _META_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
    except OSError:
        pass  # of a file system that takes no advice
    finally:
        os.close(descriptor)


def works_in(folder: str) -> bool:
    """Whether this process may mount an overlay over a packed tree whose files lie in `folder`.

    Tried with an empty one, since many things decide: the kernel, privileges, the file system.
    """
    if os.geteuid() != 0:
        return False
    from bootseer.blockimage import erofs_writer as image
    from bootseer.blockimage.tree_entries import Entry, Kind

    for name in os.listdir(folder):
        if name.startswith(_TRIAL):
            _clear_dead(os.path.join(folder, name))
    trial = os.path.join(folder, _TRIAL + os.urandom(8).hex())
    lower, upper, work, shown = (os.path.join(trial, name) for name in _IN_TRIAL)
    lock = FileLock(-1)
    try:
        os.mkdir(trial)
        lock = _locked(trial)
        for path in (lower, upper, work, shown):
            os.mkdir(path)
        root = Entry(path=b"", kind=Kind.DIRECTORY, mode=0o755)
        for name, content in ((META, image.metadata([root], 0)), (DATA, bytes(_BLOCK_BYTES))):
            with open(os.path.join(trial, name), "wb") as file:
                file.write(content)
        mount(trial, lower)
        options = f"lowerdir={lower},upperdir={upper},workdir={work}"
        mount_calls.mount("overlay", shown, "overlay", 0, options)
    except (OSError, NotSupportedError):
        return False
    finally:
        _clear(trial)
        lock.close()
    return True


def _locked(trial: str) -> FileLock:
    """A lock that says that this trial is under way. Raises OSError when it is.

    No process number says that: containers that share a cache know each other's by other numbers.
    """
    return acquire_directory(trial, limit_s=0)


def _clear_dead(trial: str) -> None:
    """Clear what a process that was killed during its trial has left."""
    try:
        lock = _locked(trial)
    except OSError:
        return  # it is under way, or gone
    with lock:
        try:
            _clear(trial)
        except OSError:
            pass  # of another mount namespace, perhaps: it disturbs nobody


def _clear(trial: str) -> None:
    for name in ("shown", "image"):
        place = os.path.join(trial, name)
        if is_mounted(place):
            mount_calls.unmount(place)
    staging.remove_tree(trial)
