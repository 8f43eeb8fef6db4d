"""A tree's EROFS metadata: where each inode stands, and then its bytes.

Inodes stand in the order of their paths, the root first; behind them the blocks of directories
and links that are not inline. Equal entries give equal bytes.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence

from bootseer.blockimage import erofs_format
from bootseer.blockimage.tree_entries import Entry, Kind, Stored
from bootseer.errors import CorruptDataError, UsageError

MAX_META_BYTES = 1 << 30
_EMPTY = Stored(hashlib.sha256(b"").digest(), (), erofs_format.BLOCK_BYTES)
_INLINE_OR_MOVE_BYTES = 1024  # a longer tail that does not fit gets a block, not a gap before it


class _Node:
    """One inode under way."""

    __slots__ = (
        "at",
        "children",
        "entry",
        "layout",
        "links",
        "parent",
        "place",
        "size_bytes",
        "xattrs",
    )

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.children: list[tuple[bytes, _Node]] | None = None
        if entry.kind is Kind.DIRECTORY:
            self.children = []
        self.parent = self
        self.links = 1
        self.at = self.place = self.size_bytes = 0
        self.layout = erofs_format.PLAIN
        self.xattrs = erofs_format.xattr_body(entry.xattrs)

    @property
    def nid(self) -> int:
        return self.at // erofs_format.SLOT_BYTES

    def names(self) -> list[bytes]:
        return [name for name, _, _ in self.listing()]

    def listing(self) -> list[tuple[bytes, int, int]]:
        """A directory's (name, nid, kind), in the order in which kernels search them."""
        assert self.children is not None
        rows = [(name, node.nid, int(node.entry.kind)) for name, node in self.children]
        rows.append((b".", self.nid, int(Kind.DIRECTORY)))
        rows.append((b"..", self.parent.nid, int(Kind.DIRECTORY)))
        rows.sort()
        return rows


def metadata(entries: Iterable[Entry], data_bytes: int) -> bytearray:
    """The metadata of these entries; each file's content is `Stored`, or None for an empty one.

    Raises UsageError for entries that do not form a tree (doubled paths, missing parents, links
    to nothing), and CorruptDataError for a tree that is too large.
    """
    nodes = _tree(entries)
    end = _lay_out(nodes)
    block = -(-end // erofs_format.BLOCK_BYTES)
    for node in nodes:
        if node.size_bytes and node.layout != erofs_format.CHUNKED:
            tail = (
                node.size_bytes % erofs_format.BLOCK_BYTES
                if node.layout == erofs_format.INLINE
                else 0
            )
            node.place = block
            block += -(-(node.size_bytes - tail) // erofs_format.BLOCK_BYTES)
    if block * erofs_format.BLOCK_BYTES == end:
        # fsck.erofs 1.5 reads behind the last inode too, where attributes would stand.
        block += 1
    out = bytearray(block * erofs_format.BLOCK_BYTES)
    for node in nodes:
        _write(out, node)
    uuid = hashlib.sha256(memoryview(out)[erofs_format.FIRST_INODE_BYTES :]).digest()[:16]
    out[: erofs_format.FIRST_INODE_BYTES] = erofs_format.superblock(
        inodes=len(nodes),
        root_nid=nodes[0].nid,
        blocks=block,
        device_blocks=-(-data_bytes // erofs_format.BLOCK_BYTES),
        uuid=uuid,
    )
    erofs_format.write_checksum(out)
    return out


def _tree(entries: Iterable[Entry]) -> list[_Node]:
    """Nodes by path, the root first, each in its parent's list; links join their targets."""
    ordered = sorted(entries, key=lambda entry: entry.path)
    if not ordered or ordered[0].path or ordered[0].kind is not Kind.DIRECTORY:
        raise UsageError("a tree begins with its root, a directory of the empty path")
    for before, after in itertools.pairwise(ordered):
        if before.path == after.path:
            raise UsageError(f"{after.path!r} is there twice")
    own = [entry for entry in ordered if entry.hardlink_of is None]
    nodes = {entry.path: _Node(entry) for entry in own}
    for entry in ordered:
        target = nodes.get(entry.path if entry.hardlink_of is None else entry.hardlink_of)
        if target is None or (entry.hardlink_of is not None and target.children is not None):
            raise UsageError(f"{entry.path!r} links to nothing that can be linked to")
        if entry.hardlink_of is not None:
            target.links += 1
        if entry.path:
            _adopt(nodes, entry.path, target)
    return list(nodes.values())


def _adopt(nodes: dict[bytes, _Node], path: bytes, node: _Node) -> None:
    folder, _, name = path.rpartition(b"/")
    parent = nodes.get(folder)
    if parent is None or parent.children is None:
        raise UsageError(f"the parent of {path!r} is no directory of the tree")
    if name in (b"", b".", b"..") or b"\0" in name or len(name) > erofs_format.NAME_BYTES:
        raise UsageError(f"{path!r} is no path of a tree")
    parent.children.append((name, node))
    if node.children is not None:
        node.parent = parent
        node.links += 1  # its own "."; and below its parent's, for its ".."
        parent.links += 1


def _lay_out(nodes: Sequence[_Node]) -> int:
    """Give each inode its place; returns the end of the inodes."""
    nodes[0].links += 1
    at = erofs_format.FIRST_INODE_BYTES
    for node in nodes:
        head = erofs_format.INODE_BYTES + len(node.xattrs)
        kind = node.entry.kind
        if kind is Kind.FILE:
            node.size_bytes = node.entry.size_bytes
            body = _chunks_bytes(node, head)
        elif kind in (Kind.DIRECTORY, Kind.SYMLINK):
            at, body = _lay_out_inline(node, at, head)
        else:
            body = 0
        node.at = at
        at += head + body
        at += -at % erofs_format.SLOT_BYTES
        if at > MAX_META_BYTES:
            raise CorruptDataError(f"the tree needs more than {MAX_META_BYTES} bytes of metadata")
    return at


def _chunks_bytes(node: _Node, head: int) -> int:
    if not node.size_bytes:
        return 0
    node.layout = erofs_format.CHUNKED
    count = erofs_format.chunk_count(node.size_bytes, _stored_content(node).chunk_bytes)
    return -head % 8 + 8 * count


def _lay_out_inline(node: _Node, at: int, head: int) -> tuple[int, int]:
    """A directory's or link's last part stands behind its inode, within the same block."""
    if node.children is not None:
        node.size_bytes = erofs_format.directory_bytes(
            sorted([*map(_first, node.children), b".", b".."])
        )
        before = (at + head - 1) % erofs_format.BLOCK_BYTES + 1
    else:
        node.size_bytes = len(node.entry.link_target)
        # Older kernels read a link only from the block in which its inode ends.
        before = (
            (at + erofs_format.INODE_BYTES - 1) % erofs_format.BLOCK_BYTES + 1 + len(node.xattrs)
        )
    tail = node.size_bytes % erofs_format.BLOCK_BYTES
    room = erofs_format.BLOCK_BYTES - before
    if tail > room:
        gap = -at % erofs_format.BLOCK_BYTES
        # Behind attributes of a block's length the next block would not do either.
        if tail > _INLINE_OR_MOVE_BYTES or head + tail > erofs_format.BLOCK_BYTES:
            return at, 0
        at += gap
    if not tail:
        return at, 0
    node.layout = erofs_format.INLINE
    return at, tail


def _first(pair: tuple[bytes, _Node]) -> bytes:
    return pair[0]


def _stored_content(node: _Node) -> Stored:
    content = node.entry.content
    if content is None and not node.entry.size_bytes:
        return _EMPTY
    if not isinstance(content, Stored):
        raise UsageError(f"the content of {node.entry.path!r} has not been stored")
    return content


def _write(out: bytearray, node: _Node) -> None:
    entry = node.entry
    place = node.place
    body = b""
    if node.layout == erofs_format.CHUNKED:
        stored = _stored_content(node)
        place = erofs_format.chunk_format(stored.chunk_bytes)
        body = erofs_format.chunk_indexes(node.size_bytes, stored.chunk_bytes, stored.extents)
    elif entry.kind in (Kind.CHARACTER, Kind.BLOCK):
        place = erofs_format.device_number(entry.rdev)
    inode = erofs_format.inode(
        layout=node.layout,
        xattr_bytes=len(node.xattrs),
        mode=int(entry.kind) << 12 | entry.mode & 0o7777,
        size_bytes=node.size_bytes,
        place=place,
        owner=(entry.uid, entry.gid),
        mtime_ns=entry.mtime_ns,
        links=node.links,
    )
    head = inode + node.xattrs
    at = node.at
    out[at : at + len(head)] = head
    at += len(head)
    if body:
        at += -at % 8
        out[at : at + len(body)] = body
    elif node.size_bytes:
        _write_inline(out, node, at)


def _write_inline(out: bytearray, node: _Node, at: int) -> None:
    if node.children is not None:
        content = erofs_format.directory(node.listing())
    else:
        content = node.entry.link_target
    tail = len(content) % erofs_format.BLOCK_BYTES if node.layout == erofs_format.INLINE else 0
    whole = len(content) - tail
    start = node.place * erofs_format.BLOCK_BYTES
    out[start : start + whole] = content[:whole]
    out[at : at + tail] = content[whole:]
