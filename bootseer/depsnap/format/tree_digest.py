"""The tree digest: the same sha256 for the same tree, in whichever form it is kept. Pure."""

from __future__ import annotations

import hashlib
import os

from bootseer.depsnap.capture.entries import Entry
from bootseer.depsnap.types import FILE, Digest


class TreeHasher:
    """Hashes roots in order and each root's entries depth first by name.

    An entry counts with kind, path, mode, owner, mtime to the ns, size, link, extended attributes
    and, for files, the digest of its content (`unit_layout.content_digest`). Strings are hashed
    with their length, so that no two trees give the same bytes.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256(b"bootseer tree 1\n")

    def add_root(self, path: str) -> None:
        """Begin the next root."""
        self._add(b"root", os.fsencode(path))

    def add_entry(self, entry: Entry, content: bytes) -> None:
        """`entry.kind` may be HARDLINK, with the first path of the same file as `target`."""
        size = entry.size if entry.kind == FILE else 0
        numbers = b"%d %d %d %d %d" % (entry.mode, entry.uid, entry.gid, entry.mtime_ns, size)
        self._add(
            entry.kind.encode(),
            os.fsencode(entry.path),
            numbers,
            os.fsencode(entry.target),
            content,
        )
        if entry.kind != "h":
            for name, value in entry.xattrs:
                self._add(b"x", os.fsencode(name), value)

    def _add(self, *parts: bytes) -> None:
        self._hash.update(b"".join([b"%d:%b," % (len(part), part) for part in parts]))

    def digest(self) -> Digest:
        """The digest of all that was added."""
        return Digest(self._hash.hexdigest())
