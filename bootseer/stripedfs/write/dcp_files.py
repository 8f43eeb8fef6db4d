"""The files of a distributed checkpoint (torch's DCP) that is saved over an earlier one.

Every rank writes its `__<rank>_<n>.distcp`, then one rank writes `.metadata.tmp` and renames it to
`.metadata`. Each closed file stays in a draft of the directory, in which its writer offers it to
the others; the rename takes all that `.metadata` names into one version and publishes it: readers
see the previous checkpoint or this one. The ranks may save through mounts on several machines. A
program that copies a checkpoint writes `.metadata` under its own name, before or after the others:
then the last of all files that it names publishes them.
"""

from __future__ import annotations

import contextlib
import re

from bootseer.context_managers import Committing
from bootseer.errors import BootseerError, UsageError
from bootseer.storage.store import Store
from bootseer.stripedfs.read.namespace import DCP_METADATA, is_dcp_file
from bootseer.stripedfs.write import rename_remove
from bootseer.stripedfs.write.tree_writer import TreeWriter
from bootseer.stripedfs.write.write_settings import WriteSettings

METADATA_DRAFT = ".metadata.tmp"
_NAMED = re.compile(rb"__\d+_\d+\.distcp")


def is_staged(base: str) -> bool:
    """Whether a file that is begun under this name is published together with others."""
    return base == METADATA_DRAFT or is_dcp_file(base)


class StagedFile(Committing):
    """Takes a file's bytes in order, as `SavedFile`; `close` offers it, and publishes nothing."""

    def __init__(self, store: Store, folder: str, path: str, tree: TreeWriter) -> None:
        self._store, self._folder = store, folder
        self._metadata = bytearray() if path == DCP_METADATA else None
        self._tree = tree
        self._file = tree.open_file(path)
        self.open = True
        self.size_bytes = 0
        self.owner = 0
        """Which process wrote it; as in `WritableOperations.write`."""

    @classmethod
    def begin(cls, store: Store, folder: str, base: str, settings: WriteSettings) -> StagedFile:
        """Begin the file `base` of a folder's next checkpoint."""
        path = DCP_METADATA if base == METADATA_DRAFT else base
        return cls(store, folder, path, TreeWriter.begin(store, folder, settings))

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append all of `data`; an error ends the file."""
        if self._metadata is not None:
            self._metadata += data
        self._file.write(data)
        self.size_bytes += len(data)

    def move(self, name: str) -> None:
        """Always refused, since the name determines which file of the checkpoint it is."""
        raise UsageError(f"{name} is part of a checkpoint that is being saved")

    def close(self) -> None:
        """Complete the file on the store, and offer it; twice is safe."""
        if self.open:
            self.open = False
            self._file.close()
            self._tree.offer()

    def abort(self) -> None:
        """Discard the file, also after `close`; what was published stays."""
        self.open = False
        self._file.abort()
        self._tree.leave_nothing()

    def list_named(self) -> set[str]:
        """Of `.metadata`: the files that it names."""
        return {name.decode() for name in _NAMED.findall(bytes(self._metadata or b""))}

    def take_named(self) -> list[str]:
        """Of `.metadata`: take the offered files that it names; returns the names of the others."""
        named = self.list_named()
        return sorted(named - self._tree.take(named or None))

    def publish(self) -> None:
        """Of `.metadata`, after `take_named`: make all of it the directory's checkpoint."""
        self._tree.publish(shares_folder=True)
        with contextlib.suppress(BootseerError):  # it is published, and what is left is not shown
            self._tree.forget_offers()
            rename_remove.remove_dcp_files(self._store, self._folder)
