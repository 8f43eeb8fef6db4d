"""Make an archive: an ordinary `.tar.zst` of independent frames with an index at its end."""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from typing import Any

from bootseer.depsnap.capture.entries import RootDelta, owners_of
from bootseer.depsnap.format import index as index_format
from bootseer.depsnap.format.index import VERSION, encode
from bootseer.depsnap.format.index_records import Index
from bootseer.depsnap.format.packer import (
    Member,
    Packed,
    Packer,
    changed,
    member_units,
    members_of,
    write_all,
)
from bootseer.depsnap.format.unit_layout import BLOCK
from bootseer.depsnap.format.unit_layout import frames as plan_frames
from bootseer.depsnap.format.verifier import verify
from bootseer.depsnap.types import DIRECTORY, FILE, HARDLINK, SYMLINK, ArchiveInfo, Digest, Limits
from bootseer.errors import UsageError, from_os_error
from bootseer.system.atomic import Draft
from bootseer.system.paths import is_within

__all__ = ["Index", "create", "read_index", "verify"]


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
    members, skipped = members_of(ordered)
    plan = plan_frames(
        (number, member_units(number, member)) for number, member in enumerate(members)
    )
    packer = Packer(ordered, members, level)
    workers = threads or len(os.sched_getaffinity(0))
    try:
        with Draft(path, mode=0o600, prefix=f".{os.path.basename(path)}.") as draft:
            frames = packer.run(draft.fd, plan, workers)
            _check_unchanged(ordered, members)
            tree = packer.tree_digest()
            document = _document(ordered, members, frames, tree, skipped)
            tail, digest = encode(document)
            write_all(draft.fd, tail)
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


def read_index(path: str, *, expected_digest: Digest | None, limits: Limits | None = None) -> Index:
    """Read and check an archive's index; without `expected_digest` only its form is checked.

    Raises NotFoundError, CorruptDataError (altered, hostile or beyond `limits`).
    """
    return index_format.read(path, expected_digest=expected_digest, limits=limits or Limits())


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
    """Directories and symlinks have no data to check while reading; compare them at the end."""
    for member in members:
        if member.kind not in (DIRECTORY, SYMLINK):
            continue
        path = os.path.join(roots[member.root].root, member.entry.path)
        try:
            now = os.lstat(path)
        except OSError as error:
            raise changed(path) from error
        entry = member.entry
        # A directory's mtime may move on: a job that already runs adds its `__pycache__` beside
        # what was captured, and the archive holds what the scan saw.
        touched = member.kind == SYMLINK and now.st_mtime_ns != entry.mtime_ns
        if touched or (now.st_ino, now.st_uid) != (entry.ino, entry.uid):
            raise changed(path)


def _document(
    roots: Sequence[RootDelta],
    members: Sequence[Member],
    frames: Sequence[Packed],
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
