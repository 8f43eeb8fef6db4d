"""Distributed checkpoints that are being saved through a mount, one for a folder at most.

No folder lists the files of a checkpoint that is being saved (see `write.dcp_files`): until all are
published together, only the mount that they are saved through knows them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from bootseer.fuse.operations import FileSystemError, Inode
from bootseer.storage.store import Store
from bootseer.stripedfs.mount.inodes import Node, Nodes
from bootseer.stripedfs.read import namespace
from bootseer.stripedfs.write.dcp_files import StagedFile

METADATA_NAME = os.fsencode(namespace.DCP_METADATA)


class StagedSet:
    """What was saved here of a folder's next checkpoint."""

    def __init__(self) -> None:
        self.files: dict[bytes, tuple[Node, StagedFile]] = {}
        """Its files by their names."""
        self.metadata_removed = False
        """The saver removed the previous `.metadata`, which others see until there is a new one."""


class StagedSets:
    """The checkpoints that are being saved, by the inodes of their folders."""

    def __init__(self, store: Store, nodes: Nodes, say: Callable[[str], None]) -> None:
        self._store, self._nodes, self._say = store, nodes, say
        self._sets: dict[Inode, StagedSet] = {}

    def get(self, folder: Inode) -> StagedSet | None:
        """What is being saved over the checkpoint of a folder."""
        return self._sets.get(folder)

    def find(self, folder: Inode, name: bytes) -> tuple[Node, StagedFile] | None:
        """A file of a set by its name."""
        staged_set = self._sets.get(folder)
        return None if staged_set is None else staged_set.files.get(name)

    def staged_file(self, node: Node) -> StagedFile | None:
        """Where a node's bytes wait until its set is published; None for any other node."""
        entry = self.find(node.parent, node.name)
        return entry[1] if entry is not None and entry[0] is node else None

    def add(self, folder: Inode, name: bytes, node: Node, staged: StagedFile) -> None:
        """Add a file of a folder's next checkpoint."""
        files = self._sets.setdefault(folder, StagedSet()).files
        if name in files and files[name][0] is not node:
            self._nodes.set_staged(files[name][0], staged=False)
        files[name] = (node, staged)
        self._nodes.set_staged(node, staged=True)

    def remove(self, node: Node) -> None:
        """Drop a file that was removed or failed; does nothing where it is of no set."""
        if self.staged_file(node) is not None:
            del self._sets[node.parent].files[node.name]
            self._nodes.set_staged(node, staged=False)

    def drop(self, folder: Inode) -> None:
        """Discard what was saved for a folder and not published."""
        staged_set = self._sets.pop(folder, None)
        for node, staged in () if staged_set is None else staged_set.files.values():
            staged.abort()
            self._nodes.set_staged(node, staged=False)

    def publish(self, folder: Node, metadata: StagedFile) -> None:
        """Publish a set by its `.metadata`. FileSystemError(EIO): it names files that are missing.

        They may have been saved through mounts of other machines.
        """
        missing = metadata.take_named()
        if missing:
            self._say(
                f"{folder.info.name} is not published: its .metadata names "
                f"{', '.join(missing[:5])}, which nobody has saved; save it again"
            )
            raise FileSystemError(errno.EIO)
        metadata.publish()
        self.drop(folder.inode)
        info = namespace.look_up(self._store, folder.info.name, follow=False)
        with self._nodes.lock:
            folder.info = info
            self._nodes.outdate(folder)
            self._nodes.touch(folder.parent, folder.name)

    def publish_copy(self, inode: Inode) -> None:
        """Publish a set whose `.metadata` was written under its own name, once all is there.

        One process must have written all of it, so that an interrupted copy and a later save are
        not mixed.
        """
        folder, entry = self._nodes.get(inode), self.find(inode, METADATA_NAME)
        if folder is None or entry is None:
            return
        metadata = entry[1]
        copied = {
            os.fsdecode(name)
            for name, (_, staged) in self._sets[inode].files.items()
            if not staged.open and staged.owner == metadata.owner
        }
        if not metadata.open and metadata.list_named() <= copied and not metadata.take_named():
            self.publish(folder, metadata)

    def close(self) -> None:
        """Discard what was not published, and report it."""
        for inode, staged_set in list(self._sets.items()):
            folder = self._nodes.get(inode)
            if staged_set.files:
                shown = b", ".join(staged_set.files).decode(errors="replace")
                where = "" if folder is None else folder.info.name
                self._say(f"{shown} of {where} is not published: no .metadata came after it")
            self.drop(inode)
