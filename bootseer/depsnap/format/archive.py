"""Write an archive: an ordinary `.tar.zst` of independent frames with an index at its end."""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from typing import Any

from bootseer.depsnap.capture.entries import RootDelta, owners_of
from bootseer.depsnap.format.index import VERSION, encode
from bootseer.depsnap.format.packer import (
    Member,
    PackedFrame,
    Packer,
    changed_error,
    collect_members,
    units_of_member,
)
from bootseer.depsnap.format.unit_layout import BLOCK, fill_frames
from bootseer.depsnap.types import DIRECTORY, FILE, HARDLINK, SYMLINK, ArchiveInfo, Digest
from bootseer.errors import UsageError, from_os_error
from bootseer.system.atomic import Draft
from bootseer.system.paths import is_within


def create(
    path: str, roots: Sequence[RootDelta], *, level: int = 3, threads: int | None = None
) -> ArchiveInfo:
    """Pack the roots' entries into a new archive at `path` (temporary name, fsync, rename).

    The same input gives the same bytes, whatever `threads` (default: all cores). Memory is about
    16 MiB a thread. Every file is read once. Raises BusyError when something changed since its
    scan or while it was read, UsageError when roots overlap, NoSpaceError, AccessDeniedError;
    nothing is left at `path` then.
    """
    ordered = sorted(roots, key=lambda r: r.root)
    _check_roots(ordered)
    members, skipped = collect_members(ordered)
    plan = fill_frames(
        (number, units_of_member(number, member)) for number, member in enumerate(members)
    )
    packer = Packer(ordered, members, level)
    workers = threads or len(os.sched_getaffinity(0))
    try:
        with Draft(path, mode=0o600, prefix=f".{os.path.basename(path)}.") as draft:
            frames = packer.run(draft.write, plan, workers)
            _check_unchanged(ordered, members)
            tree = packer.tree_digest()
            document = _document(ordered, members, frames, tree, skipped)
            tail, digest = encode(document)
            draft.write(tail)
            os.fchmod(draft.fd, 0o644)
            draft.publish()
    except OSError as error:
        raise from_os_error(error, f"write the archive {path}") from error
    files = [m.entry for m in members if m.kind == FILE]
    return ArchiveInfo(
        index_digest=digest,
        tree_digest=tree,
        size=os.path.getsize(path),
        raw_bytes=packer.raw_bytes,
        logical_bytes=sum(e.size for e in files),
        entries=len(members),
        deleted=sum(len(r.deleted) for r in ordered),
        skipped=tuple(skipped),
        owners=owners_of(m.entry for m in members),
    )


def _check_roots(roots: Sequence[RootDelta]) -> None:
    if not roots:
        raise UsageError("an archive needs at least one root")
    for number, root in enumerate(roots):
        if os.path.normpath(root.root) != root.root or not root.root.startswith("/"):
            raise UsageError(f"root {root.root!r} is not a normal absolute path")
        for before in roots[:number]:
            if is_within(root.root, before.root):
                raise UsageError(f"roots {before.root} and {root.root} overlap; name only one")


def _check_unchanged(roots: Sequence[RootDelta], members: Sequence[Member]) -> None:
    """Compare directories and symlinks at the end: they have no data to check while reading."""
    for member in members:
        if member.kind not in (DIRECTORY, SYMLINK):
            continue
        path = os.path.join(roots[member.root].root, member.entry.path)
        try:
            now = os.lstat(path)
        except OSError as error:
            raise changed_error(path) from error
        entry = member.entry
        # A directory's mtime may change: a job that already runs adds its `__pycache__` to what
        # was captured, and the archive holds what the scan saw.
        changed = member.kind == SYMLINK and now.st_mtime_ns != entry.mtime_ns
        if changed or (now.st_ino, now.st_uid) != (entry.ino, entry.uid):
            raise changed_error(path)


def _document(
    roots: Sequence[RootDelta],
    members: Sequence[Member],
    frames: Sequence[PackedFrame],
    tree: Digest,
    skipped: Sequence[str],
) -> dict[str, Any]:
    """The index as JSON values; the format is described in `docs/depsnap-format.md`."""
    entries = [m.entry for m in members]
    counts = [0] * len(roots)
    for member in members:
        counts[member.root] += 1
    return {
        "version": VERSION,
        "block": BLOCK,
        "tree": tree,
        "roots": [
            {"root": r.root, "count": n, "deleted": sorted(r.deleted)}
            for r, n in zip(roots, counts, strict=True)
        ],
        "path": [e.path for e in entries],
        "kind": "".join([m.kind for m in members]),
        "mode": [e.mode for e in entries],
        "uid": [e.uid for e in entries],
        "gid": [e.gid for e in entries],
        "mtime_ns": [e.mtime_ns for e in entries],
        "size": [m.entry.size if m.kind == FILE else 0 for m in members],
        "link": {str(n): m.link for n, m in enumerate(members) if m.link},
        "xattrs": {
            str(n): [[k, base64.b64encode(v).decode()] for k, v in m.entry.xattrs]
            for n, m in enumerate(members)
            if m.entry.xattrs and m.kind != HARDLINK
        },
        "segments": {
            str(n): [x for segment in m.segments for x in segment]
            for n, m in enumerate(members)
            if m.segments is not None
        },
        "implied": [n for n, m in enumerate(members) if m.entry.path in roots[m.root].implied],
        "frames": [[f.size, f.raw, f.digest, f.upto, f.units] for f in frames],
        "skipped": list(skipped),
    }
