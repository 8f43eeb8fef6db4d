"""The files of a distributed checkpoint (torch's DCP) that is saved over an earlier one.

Every rank writes its `__<rank>_<n>.distcp`, then one writes `.metadata.tmp` and renames it to
`.metadata`. Each closed file stays in a draft of the directory, of which its writer offers it;
the rename takes all that `.metadata` names into one version and publishes it: readers see the
checkpoint before or this one. The ranks may save through mounts on several machines. Who copies
a checkpoint writes `.metadata` under its own name, before or after the others: then the last of
all that it names publishes them.
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
    """Whether a file that is begun under this name waits for the others to be published."""
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
        """Refused: its name says what it is."""
        raise UsageError(f"{name} is part of a checkpoint that is being saved")

    def close(self) -> None:
        """The bytes are on the store, and wait there; twice is safe."""
        if self.open:
            self.open = False
            self._file.close()
            self._tree.offer()

    def abort(self) -> None:
        """Give up, also after `close`; what was published stays."""
        self.open = False
        self._file.abort()
        self._tree.leave_nothing()

    def named(self) -> set[str]:
        """Of `.metadata`: the files that belong to it."""
        return {name.decode() for name in _NAMED.findall(bytes(self._metadata or b""))}

    def missing(self) -> list[str]:
        """Of `.metadata`: takes what it names from who offered it; names what nobody did."""
        wanted = self.named()
        return sorted(wanted - self._tree.take(wanted or None))

    def publish(self) -> None:
        """Of `.metadata`, after `missing`: make all of it the directory's checkpoint."""
        self._tree.publish(shares_folder=True)
        with contextlib.suppress(BootseerError):  # it is published: what is left hides nothing
            self._tree.forget_offers()
            rename_remove.remove_members(self._store, self._folder)
