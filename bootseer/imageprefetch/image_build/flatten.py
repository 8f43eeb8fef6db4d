"""Flattening layers to one tree, which a container program would show after unpacking them.

Layers are read once each, from the top one down, so that only what stays visible is ever stored.
First a layer's own tree is made, as unpacking it alone would make it; the layers above hide parts
of it, and the rest is merged into the tree. Nothing is written to a disk: names that would lead out
of the tree are refused, and links are followed within it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NoReturn

from bootseer.blockimage.tree_entries import Content, Entry, Kind, Stored
from bootseer.errors import CorruptDataError
from bootseer.imageprefetch.image_build.layer_inode import (
    MAX_PATH_BYTES,
    OVERLAY_OPAQUE,
    Inode,
    overlay_opaque,
    path_parts,
    shown_name,
    whiteout,
)
from bootseer.imageprefetch.image_build.layer_reader import Members
from bootseer.imageprefetch.image_build.tar_reader import Member

WHITEOUT = b".wh."
OPAQUE = b".wh..wh..opq"
_AUFS = b".wh..wh."
MAX_LINKS_FOLLOWED = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of an image; `unpacked_bytes` counts the tar bytes of all layers.

    `entry_bytes` limits paths, link targets and attributes, on average for each entry: they are
    held in memory.
    """

    entries: int = 1_000_000
    unpacked_bytes: int = 256 << 30
    entry_bytes: int = 512

    @property
    def header_bytes(self) -> int:
        """The limit of all entries together; a single one may have far more than the average."""
        return max(1 << 20, self.entries * self.entry_bytes)


LIMITS = Limits()


class _Node:
    """A name. A directory without an inode is only implied by a layer.

    `opaque`: nothing below it of lower layers is visible. `final`: nor are mode, owner and time of
    the directory in lower layers. A name that is `removed` is hidden in lower layers, and missing.
    """

    __slots__ = ("children", "final", "inode", "opaque", "removed")

    def __init__(self, inode: Inode | None, *, removed: bool = False) -> None:
        self.inode = inode
        self.children: dict[bytes, _Node] | None = None
        if not removed and (inode is None or inode.kind is Kind.DIRECTORY):
            self.children = {}
        self.opaque = self.final = False
        self.removed = removed


class Flattener:
    """Takes layers from the top one down, and then gives the tree.

    `store(content, size)` is called for each visible file while its bytes are read. `for_overlay`:
    the tree will lie above another one in an overlay, and what its layers hide in others is kept.
    """

    def __init__(
        self,
        store: Callable[[Content, int], Stored],
        limits: Limits = LIMITS,
        *,
        for_overlay: bool = False,
    ) -> None:
        self._store, self._limits, self._for_overlay = store, limits, for_overlay
        self._top = _Node(None)
        self._entries = self._unpacked_bytes = self._header_bytes = 0

    def add(self, opened: Callable[[], AbstractContextManager[Iterator[bytes]]], name: str) -> None:
        """Take the next lower layer; `opened()` gives its tar bytes, more than once if necessary.

        Raises CorruptDataError, naming the layer by `name`, for an invalid layer.
        """
        try:
            layer = _Layer(self)
            with opened() as pieces:
                layer.read(Members(pieces, self._count))
            if layer.wanted:
                with opened() as pieces:
                    layer.read_wanted(Members(pieces, _ignore))
        except CorruptDataError as error:
            raise CorruptDataError(f"{name}: {error}") from error
        _merge_below(self._top, layer.root)

    def entries(self) -> list[Entry]:
        """The whole tree."""
        out: list[Entry] = []
        names: dict[int, bytes] = {}  # an inode's first name
        stack = [(b"", self._top)]
        while stack:
            path, node = stack.pop()
            if node.removed:
                if self._for_overlay:
                    out.append(whiteout(path))
                continue
            if node.children is None:
                assert node.inode is not None
                first = names.setdefault(id(node.inode), path)
                linked = Entry(path=path, kind=node.inode.kind, hardlink_of=first)
                out.append(node.inode.entry(path) if first is path else linked)
                continue
            implied = Entry(path=path, kind=Kind.DIRECTORY, mode=0o755)
            folder = node.inode.entry(path) if node.inode is not None else implied
            if self._for_overlay and node.opaque:
                folder.xattrs = {**folder.xattrs, OVERLAY_OPAQUE: b"y"}
            out.append(folder)
            prefix = path + b"/" if path else b""
            stack += [(prefix + name, child) for name, child in sorted(node.children.items())]
        return out

    def sees(self, parts: list[bytes]) -> bool:
        """Whether a file of the next lower layer is visible below the layers so far."""
        node = self._top
        for part in parts:
            if node.children is None or node.opaque:
                return False
            below = node.children.get(part)
            if below is None:
                return True
            node = below
        return False

    def store(self, content: Content, size_bytes: int) -> Stored:
        return self._store(content, size_bytes)

    def count_header(self, header_bytes: int) -> None:
        """Count the bytes of an entry that are held in memory."""
        self._header_bytes += header_bytes
        if self._header_bytes > self._limits.header_bytes:
            raise CorruptDataError(
                f"the image's paths, links and attributes have more than "
                f"{self._limits.header_bytes} bytes; raise the limit of entries if they may"
            )

    def count_entry(self) -> None:
        self._entries += 1
        if self._entries > self._limits.entries:
            raise CorruptDataError(
                f"the image has more than {self._limits.entries} entries; raise the limit if it "
                "may have so many"
            )

    def _count(self, size_bytes: int) -> None:
        self._unpacked_bytes += size_bytes
        if self._unpacked_bytes > self._limits.unpacked_bytes:
            raise CorruptDataError(
                f"the image unpacks to more than {self._limits.unpacked_bytes} bytes; raise the "
                "limit if it may be so large"
            )


def _ignore(size_bytes: int) -> None:
    """The second reading of a layer was counted in the first."""


class _Layer:
    """One layer's own tree, as unpacking it into an empty directory would make it."""

    def __init__(self, above: Flattener) -> None:
        self._above = above
        self._whiteouts: list[tuple[_Node, bytes]] = []
        self._number = 0
        self.root = _Node(None)
        self.wanted: dict[int, Inode] = {}

    def read(self, members: Members) -> None:
        for member in members:
            self._above.count_entry()
            self._number += 1
            try:
                self._take(member, members)
            except CorruptDataError as error:
                raise CorruptDataError(f"{shown_name(member.name)}: {error}") from error
        for parent, name in self._whiteouts:
            assert parent.children is not None
            node = parent.children.get(name)
            if node is None:
                parent.children[name] = _Node(None, removed=True)
            else:
                node.opaque = node.final = True

    def read_wanted(self, members: Members) -> None:
        """Store files whose own names are hidden, but to which visible names link."""
        for number, member in enumerate(members, 1):
            inode = self.wanted.get(number)
            if inode is not None:
                inode.stored = self._above.store(members, member.size_bytes)

    def _take(self, member: Member, members: Members) -> None:
        parts = path_parts(member.name)
        if not parts:
            self._take_root(member)
            return
        parents, name = self._resolve(parts[:-1]), parts[-1]
        self._above.count_header(_path_bytes(parents) + len(name) + _header_bytes(member))
        parent = self._make(parents)
        assert parent.children is not None
        if name.startswith(WHITEOUT):
            self._take_whiteout(parent, name)
            return
        if member.kind is None:
            self._link(parent, [*parents, name], member)
            return
        if member.kind is Kind.CHARACTER and member.rdev == 0:
            self._whiteouts.append((parent, name))  # the form of overlayfs
            return
        inode = Inode(member, member.kind, self._number)
        before = parent.children.get(name)
        if inode.kind is Kind.DIRECTORY and before is not None and before.children is not None:
            before.inode = inode
            node = before
        else:
            node = parent.children[name] = _Node(inode)
        if overlay_opaque(member.xattrs):
            node.opaque = True
        if inode.size_bytes and self._above.sees([*parents, name]):
            inode.stored = self._above.store(members, inode.size_bytes)

    def _take_root(self, member: Member) -> None:
        if member.kind is not Kind.DIRECTORY:
            raise CorruptDataError("the root of a layer is no directory")
        self.root.inode = Inode(member, Kind.DIRECTORY, self._number)

    def _take_whiteout(self, parent: _Node, name: bytes) -> None:
        if name == OPAQUE:
            parent.opaque = True
            return
        if name.startswith(_AUFS):
            return  # metadata of aufs that no other file system needs
        hidden = name[len(WHITEOUT) :]
        if hidden in (b"", b".", b".."):
            raise CorruptDataError("it hides a name that is none")
        self._whiteouts.append((parent, hidden))

    def _link(self, parent: _Node, parts: list[bytes], member: Member) -> None:
        wanted = path_parts(member.link_target)
        node = self._find(self._resolve(wanted[:-1]))
        if node is not None and wanted and node.children is not None:
            node = node.children.get(wanted[-1])
        if node is None or node.inode is None or node.children is not None:
            target = shown_name(member.link_target)
            raise CorruptDataError(f"it is a hard link to {target}, which its layer does not have")
        inode = node.inode
        inode.relink(member)
        assert parent.children is not None
        parent.children[parts[-1]] = _Node(inode)
        if inode.size_bytes and inode.stored is None and self._above.sees(parts):
            self.wanted[inode.number] = inode

    def _resolve(self, parts: list[bytes]) -> list[bytes]:
        """The path of a directory with this layer's own links followed, as the kernel does."""
        node: _Node | None = self.root
        for part in parts:
            node = node.children.get(part) if node is not None and node.children else None
            if node is None:
                break
            if node.children is None:
                return self._follow_links(parts)
        return parts

    def _follow_links(self, parts: list[bytes]) -> list[bytes]:
        """As `_resolve`, for a path with links."""
        done: list[bytes] = []
        nodes: list[_Node | None] = [self.root]  # the nodes along `done`; None: not there yet
        left = [*reversed(parts)]
        followed = 0
        while left:
            part = left.pop()
            if part in (b"", b"."):
                continue
            if part == b"..":
                if done:
                    done.pop()
                    nodes.pop()
                continue
            here = nodes[-1]
            node = here.children.get(part) if here is not None and here.children else None
            if node is None or node.children is not None:
                done.append(part)
                nodes.append(node)
                continue
            if node.inode is None or node.inode.kind is not Kind.SYMLINK:
                _not_there()
            followed += 1
            target = node.inode.link_target
            left += reversed(target.split(b"/"))
            if target.startswith(b"/"):
                done, nodes = [], [self.root]
            if followed > MAX_LINKS_FOLLOWED or len(left) > MAX_PATH_BYTES:
                raise CorruptDataError("it lies behind too many links")
        if _path_bytes(done) > MAX_PATH_BYTES:
            raise CorruptDataError(f"links give its name more than {MAX_PATH_BYTES} bytes")
        return done

    def _find(self, parts: list[bytes]) -> _Node | None:
        """The node at `parts`, if it exists."""
        node: _Node | None = self.root
        for part in parts:
            if node is None:
                return None
            node = node.children.get(part) if node.children is not None else _not_there()
        return node

    def _make(self, parts: list[bytes]) -> _Node:
        """The directory at `parts`; a missing one is implied, with its parents."""
        node = self.root
        for part in parts:
            below = node.children.get(part) if node.children is not None else _not_there()
            if below is None:
                self._above.count_entry()
                self._above.count_header(_path_bytes(parts))
                assert node.children is not None
                below = node.children[part] = _Node(None)
            node = below
        if node.children is None:
            _not_there()
        return node


def _path_bytes(parts: list[bytes]) -> int:
    return sum(map(len, parts)) + len(parts)


def _header_bytes(member: Member) -> int:
    """The bytes of a member that are held in memory, besides its name."""
    own = sum(len(name) + len(value) for name, value in member.xattrs.items())
    return own + len(member.link_target)


def _not_there() -> NoReturn:
    raise CorruptDataError("it lies below something that is no directory")


def _merge_below(top: _Node, lower: _Node) -> None:
    """Merge a lower layer's tree into the tree of the layers above."""
    stack = [(top, lower)]
    while stack:
        above, below = stack.pop()
        if above.inode is None and not above.final:
            above.inode = below.inode
        assert above.children is not None
        assert below.children is not None
        for name, child in below.children.items() if not above.opaque else ():
            known = above.children.get(name)
            if known is None:
                above.children[name] = child
            elif known.children is not None and child.children is not None:
                stack.append((known, child))
            elif known.children is not None:
                known.opaque = known.final = True  # a file or a whiteout hides lower layers
        above.opaque |= below.opaque
        above.final |= below.final
