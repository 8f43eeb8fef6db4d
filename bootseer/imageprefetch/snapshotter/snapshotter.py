"""The calls of containerd's snapshots API, without its wire format.

They do what containerd's documentation of its Snapshotter interface says, and otherwise what
containerd's overlayfs snapshotter does. Any thread may call them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping, Sequence

from bootseer.errors import BootseerError, describe
from bootseer.imageprefetch.snapshotter import filters, snapshot_dirs
from bootseer.imageprefetch.snapshotter.database import Database
from bootseer.imageprefetch.snapshotter.image_mounts import ImageMounter, ImageTrees, Report
from bootseer.imageprefetch.snapshotter.labels import RequestedLayer, requested_layer
from bootseer.imageprefetch.snapshotter.mount_plan import plan_mount
from bootseer.imageprefetch.snapshotter.snapshot_dirs import SnapshotDirs
from bootseer.imageprefetch.snapshotter.types import (
    NOTHING,
    Kind,
    Mount,
    Snapshot,
    SnapshotExistsError,
    StockImage,
    Usage,
)

_INDEX = "/sys/module/overlay/parameters/index"


class Snapshotter:
    """The snapshots below `root`; `report` writes to the log and to events."""

    def __init__(
        self, root: str, database: Database, mounter: ImageMounter, report: Report
    ) -> None:
        self._database = database
        self._report = report
        self._dirs = SnapshotDirs(os.path.join(root, "snapshots"))
        self._images = ImageTrees(root, database, mounter, report)
        self._index_off = os.path.exists(_INDEX)  # with an index, the kernel refuses shared lowers

    def make_folders(self) -> None:
        """Make the folders below the root."""
        os.makedirs(self._dirs.root, mode=0o700, exist_ok=True)
        self._images.make_folders()

    # --- making -----------------------------------------------------------------------------

    def prepare(self, key: str, parent: str, labels: Mapping[str, str]) -> Mount:
        """An active snapshot over `parent`.

        Raises SnapshotExistsError instead where the labels name an image's layer and the image has
        a block image: the layer need not be fetched.
        """
        layer = requested_layer(labels)
        if layer is not None:
            self._take_remote(layer, parent, labels)
        return self._create(Kind.ACTIVE, key, parent, labels)

    def view(self, key: str, parent: str, labels: Mapping[str, str]) -> Mount:
        """A snapshot that is only read."""
        return self._create(Kind.VIEW, key, parent, labels)

    def _take_remote(self, layer: RequestedLayer, parent: str, labels: Mapping[str, str]) -> None:
        """Raise SnapshotExistsError once `layer` has a snapshot; return to have it pulled."""
        depth = len(self._database.chain(parent))
        try:
            image = self._images.find(layer, depth)
            with self._images.offer_lock(image):
                self._offer(layer, parent, labels, image, depth)
        except Exception as error:  # the border: whatever is wrong with us, it can be pulled
            self._report("fallback", "plain", layer, describe(error))
            return
        raise SnapshotExistsError(f"the snapshot {layer.target} exists, without a fetch")

    def _offer(
        self,
        layer: RequestedLayer,
        parent: str,
        labels: Mapping[str, str],
        image: StockImage,
        depth: int,
    ) -> None:
        """Add the layer's snapshot and mount the image, or neither."""
        name = _remote_name(layer.target, parent)
        is_new = self._database.add_remote(name, parent, labels, image, depth)
        try:
            self._images.ensure(layer, image)
        except BaseException:  # the answer will be an error, so nothing may stay
            if is_new:
                with contextlib.suppress(BootseerError):
                    self._database.remove(name)
            raise

    def _create(self, kind: Kind, key: str, parent: str, labels: Mapping[str, str]) -> Mount:
        lowers = self._lowers(parent)
        folder = self._dirs.make(kind, lowers[0] if lowers else "")
        try:
            self._database.create(kind, key, parent, folder, labels)
        except BaseException:  # what is not in the database would never be removed
            self._dirs.remove(folder)
            raise
        self._dirs.note_made(folder)
        return self._mount(kind, folder, lowers)

    def _mount(self, kind: Kind, folder: str, lowers: Sequence[str]) -> Mount:
        upper, work = self._dirs.upper(folder), self._dirs.work(folder)
        return plan_mount(kind, upper, work, lowers, index_off=self._index_off)

    def _lowers(self, parent: str) -> list[str]:
        """The parents' trees, nearest first; a remote one includes all of its own parents."""
        out = []
        for row in self._database.chain(parent):
            if row.image:
                out.append(self._images.tree(row))
                break
            out.append(self._dirs.upper(row.folder))
        return out

    def mounts(self, key: str) -> Mount:
        """The mount that `prepare` or `view` gave for an active snapshot or a view.

        Raises NotFoundError, and SnapshotStateError for a committed one.
        """
        row = self._database.get_open(key)
        return self._mount(row.kind, row.folder, self._lowers(row.parent))

    def commit(self, name: str, key: str, labels: Mapping[str, str]) -> None:
        """Make the active snapshot `key` the committed one `name`."""
        row = self._database.get(key)
        size = snapshot_dirs.usage(self._dirs.upper(row.folder)) if row.folder else NOTHING
        self._database.commit(key, name, size, labels)

    # --- asking and changing ----------------------------------------------------------------

    def stat(self, key: str) -> Snapshot:
        return self._database.get(key)

    def update(self, name: str, labels: Mapping[str, str], paths: Sequence[str]) -> Snapshot:
        return self._database.update(name, labels, paths)

    def list(self, texts: Sequence[str]) -> list[Snapshot]:
        match = filters.parse_all(texts)
        return [row for row in self._database.all() if match(row)]

    def usage(self, key: str) -> Usage:
        """The disk usage of a committed snapshot as it was then, of an active one now.

        A remote one uses nothing: its bytes are in the node cache, which has its own limit.
        """
        row = self._database.get(key)
        return snapshot_dirs.usage(self._dirs.upper(row.folder)) if _is_active(row) else row.usage

    # --- ending -----------------------------------------------------------------------------

    def remove(self, key: str) -> None:
        row = self._database.remove(key)
        if row.folder:
            self._dirs.remove(row.folder)

    def cleanup(self) -> None:
        """Remove what belongs to no snapshot; containerd calls it after each garbage collection."""
        listed = self._dirs.list_all()
        self._dirs.sweep(listed, self._database.folders())
        self._images.sweep()

    def restore(self) -> None:
        """After a start: remove what a kill left, and mount again what is not mounted."""
        try:
            self.cleanup()
        finally:
            self._images.restore()


def _is_active(row: Snapshot) -> bool:
    return row.kind is Kind.ACTIVE


def _remote_name(target: str, parent: str) -> str:
    """A unique name; containerd looks remote snapshots up by label and parent."""
    return f"{target}/{hashlib.sha256(parent.encode()).hexdigest()[:16]}" if parent else target
