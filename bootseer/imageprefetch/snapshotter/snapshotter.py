"""The calls of containerd's snapshots API, without its wire format.

What they promise is containerd's own documentation of its Snapshotter interface; where that says
nothing, they do as containerd's overlayfs snapshotter does. Every call may come from any thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping, Sequence

from bootseer.errors import BootseerError, describe
from bootseer.imageprefetch.snapshotter import filters, mount_plan, snapshot_dirs
from bootseer.imageprefetch.snapshotter.database import State
from bootseer.imageprefetch.snapshotter.image_mounts import ImageMounter, Images, Report
from bootseer.imageprefetch.snapshotter.labels import Wanted, wanted
from bootseer.imageprefetch.snapshotter.snapshot_dirs import Folders
from bootseer.imageprefetch.snapshotter.types import (
    NOTHING,
    Image,
    Kind,
    Mount,
    Snapshot,
    SnapshotExistsError,
    Usage,
)

_INDEX = "/sys/module/overlay/parameters/index"


class Snapshotter:
    """Snapshots below `root`; what it says through `report` goes to the log and to events."""

    def __init__(self, root: str, state: State, mounter: ImageMounter, report: Report) -> None:
        self._state = state
        self._report = report
        self._folders = Folders(os.path.join(root, "snapshots"))
        self._images = Images(root, state, mounter, report)
        self._index_off = os.path.exists(_INDEX)  # kernels that keep one refuse shared lowers

    # --- making -----------------------------------------------------------------------------

    def prepare(self, key: str, parent: str, labels: Mapping[str, str]) -> Mount:
        """An active snapshot over `parent`.

        Where the labels ask for an image's layer to exist and a block image of it does, raises
        SnapshotExistsError instead: the layer is there, nothing needs to be fetched.
        """
        layer = wanted(labels)
        if layer is not None:
            self._take_remote(layer, parent, labels)
        return self._create(Kind.ACTIVE, key, parent, labels)

    def view(self, key: str, parent: str, labels: Mapping[str, str]) -> Mount:
        """A snapshot that is only read."""
        return self._create(Kind.VIEW, key, parent, labels)

    def _take_remote(self, layer: Wanted, parent: str, labels: Mapping[str, str]) -> None:
        """Raise SnapshotExistsError once `layer` stands for itself; return to pull it plainly."""
        depth = len(self._state.chain(parent))
        try:
            image = self._images.find(layer, depth)
            with self._images.offering(image):
                self._offer(layer, parent, labels, image, depth)
        except Exception as error:  # the border: whatever is wrong with us, it can be pulled
            self._report("fallback", "plain", layer, describe(error))
            return
        raise SnapshotExistsError(f"the snapshot {layer.target} exists, without a fetch")

    def _offer(
        self, layer: Wanted, parent: str, labels: Mapping[str, str], image: Image, depth: int
    ) -> None:
        """Have a snapshot stand for the layer, and the image mounted; or neither."""
        name = _remote_name(layer.target, parent)
        made = self._state.add_remote(name, parent, labels, image, depth)
        try:
            self._images.ensure(layer, image)
        except BaseException:  # the answer is an error, so nothing was made
            if made:
                with contextlib.suppress(BootseerError):
                    self._state.remove(name)
            raise

    def _create(self, kind: Kind, key: str, parent: str, labels: Mapping[str, str]) -> Mount:
        lowers = self._lowers(parent)
        folder = self._folders.make(kind, lowers[0] if lowers else "")
        try:
            self._state.create(kind, key, parent, folder, labels)
        except BaseException:  # what is not recorded nobody removes
            self._folders.remove(folder)
            raise
        self._folders.made(folder)
        return self._mount(kind, folder, lowers)

    def _mount(self, kind: Kind, folder: str, lowers: Sequence[str]) -> Mount:
        upper, work = self._folders.upper(folder), self._folders.work(folder)
        return mount_plan.plan(kind, upper, work, lowers, index_off=self._index_off)

    def _lowers(self, parent: str) -> list[str]:
        """The parents' trees, nearest first; a remote one holds all that is below it."""
        out = []
        for row in self._state.chain(parent):
            if row.image:
                out.append(self._images.tree(row))
                break
            out.append(self._folders.upper(row.folder))
        return out

    def mounts(self, key: str) -> Mount:
        """What `prepare` or `view` said, for an active snapshot or view.

        Raises NotFoundError, and SnapshotStateError for a committed one.
        """
        row = self._state.open(key)
        return self._mount(row.kind, row.folder, self._lowers(row.parent))

    def commit(self, name: str, key: str, labels: Mapping[str, str]) -> None:
        """Make the active snapshot `key` the committed one `name`."""
        row = self._state.get(key)
        size = snapshot_dirs.usage(self._folders.upper(row.folder)) if row.folder else NOTHING
        self._state.commit(key, name, size, labels)

    # --- asking and changing ----------------------------------------------------------------

    def stat(self, key: str) -> Snapshot:
        return self._state.get(key)

    def update(self, name: str, labels: Mapping[str, str], paths: Sequence[str]) -> Snapshot:
        return self._state.update(name, labels, paths)

    def list(self, texts: Sequence[str]) -> list[Snapshot]:
        match = filters.parse_all(texts)
        return [row for row in self._state.all() if match(row)]

    def usage(self, key: str) -> Usage:
        """Of a committed snapshot as it was then, of an active one now; of a remote one nothing:
        its bytes are the node cache's, which has a limit of its own."""
        row = self._state.get(key)
        return (
            snapshot_dirs.usage(self._folders.upper(row.folder)) if _is_active(row) else row.usage
        )

    # --- ending -----------------------------------------------------------------------------

    def remove(self, key: str) -> None:
        row = self._state.remove(key)
        if row.folder:
            self._folders.remove(row.folder)

    def cleanup(self) -> None:
        """Remove what belongs to no snapshot: containerd asks after each garbage collection."""
        found = self._folders.unclaimed()
        self._folders.sweep(found, self._state.folders())
        self._images.sweep()

    def restore(self) -> None:
        """After a start: remove what a kill left behind, mount again what is not mounted."""
        try:
            self.cleanup()
        finally:
            self._images.restore()


def _is_active(row: Snapshot) -> bool:
    return row.kind is Kind.ACTIVE


def _remote_name(target: str, parent: str) -> str:
    """containerd looks remote snapshots up by label and parent; the name has only to be unique."""
    return f"{target}/{hashlib.sha256(parent.encode()).hexdigest()[:16]}" if parent else target
