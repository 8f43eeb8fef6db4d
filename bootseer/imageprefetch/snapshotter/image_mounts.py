"""The trees of remote snapshots: lazily mounted images, and unpacked layers where that fails.

An image is mounted when its first layer is requested, before containerd learns that it need not
fetch it: an image that cannot be mounted is pulled the plain way, all of it. Later its layers are
fetched and unpacked if its mount is lost and cannot be repeated, or if a tree is needed that no
block image has (some of its layers, on which another image is based).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from bootseer.errors import (
    BootseerError,
    DeadlineError,
    NotFoundError,
    StoreUnavailableError,
    from_os_error,
)
from bootseer.imageprefetch.snapshotter.database import Database
from bootseer.imageprefetch.snapshotter.labels import RequestedLayer
from bootseer.imageprefetch.snapshotter.types import Snapshot, StockImage

RESTORED_AT_ONCE = 8
REMEMBER_S = 30.0
"""How long a decision about an image is valid for all its pulls."""
FAILED_S = 300.0
"""The same after an error of the registry: a new try may take as long as that one did."""
PULLED_S = 3600.0
"""How long a plain pull stays plain, from one layer to the next."""


class ImageMounter(Protocol):
    """What makes trees of stock images; every method raises errors of ours."""

    def check(self, reference: str) -> None:
        """Raise the reason why images of that name must not be lazy; makes no request."""

    def find(self, reference: str, digest: str) -> StockImage:
        """The stock image by its manifest's digest, or with "" by its tag."""

    def mount(self, image: StockImage, directory: str) -> None:
        """Mount the image's tree; its server runs in the background and outlives this process.

        Raises NotFoundError when the image has no block image, saying what to do.
        """

    def umount(self, directory: str) -> None:
        """Unmount what is mounted there, if anything."""

    def answers(self, directory: str) -> bool:
        """Whether the image is mounted there and its server lives; takes seconds at most."""

    def unpack(self, image: StockImage, layers: int, directory: str) -> None:
        """Fetch the first `layers` layers and unpack them into an empty directory."""


_TREE = "fs"
Report = Callable[[str, str, StockImage | RequestedLayer, str], None]
"""status (ok or fallback), mode (lazy, plain, unpacked, waiting), subject, reason"""


class ImageTrees:
    """The trees of images, each made once for all callers; safe to use from several threads.

    Mounts are in `<root>/images`, unpacked trees in `<root>/trees`.
    """

    def __init__(
        self, root: str, database: Database, mounter: ImageMounter, report: Report
    ) -> None:
        self._mounts, self._trees = os.path.join(root, "images"), os.path.join(root, "trees")
        self._database, self._mounter, self._report = database, mounter, report
        self._lock = threading.Lock()
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._decisions: dict[tuple[str, str], _Decision] = {}  # by reference and digest
        self._offered: dict[str, float] = {}  # digest -> until when more layers may be requested

    def make_folders(self) -> None:
        """Make the folders of mounts and trees."""
        for path in (self._mounts, self._trees):
            os.makedirs(path, mode=0o700, exist_ok=True)

    def _lock_of(self, name: str) -> threading.Lock:
        with self._lock:
            return self._locks[name]

    # --- offering ---------------------------------------------------------------------------

    def find(self, layer: RequestedLayer, depth: int) -> StockImage:
        """The image of which `layer` is number `depth`; nothing is mounted yet.

        Raises an error of ours, with the reason, when the image has to be pulled the plain way.
        """
        if not layer.reference:
            raise NotFoundError("the client did not say which image it pulls")
        image = self._decide(layer, depth)
        if isinstance(image, BootseerError):
            raise type(image)(str(image)) from image
        if depth >= len(image.layers) or image.layers[depth] != layer.layer:
            raise NotFoundError(
                f"layer {layer.layer} is not layer {depth + 1} of {image.digest}; the tag moved, "
                "or the image has an unusual manifest"
            )
        return image

    def _decide(self, layer: RequestedLayer, depth: int) -> StockImage | BootseerError:
        """The image, or why it is pulled plainly; a pull that begins plainly ends so."""
        key = _key(layer)
        with self._lock_of("find " + " ".join(key)):
            decision = self._decisions.get(key)
            now_s = time.monotonic()
            if decision is None or not decision.is_valid(now_s, depth):
                decision = self._remember(key, self._find(layer))
            decision.used_s = now_s
        return decision.image

    def _find(self, layer: RequestedLayer) -> StockImage | BootseerError:
        try:
            self._mounter.check(layer.reference)  # a known image may come by any name
            image = self._database.find_image(layer.digest)
            if image is not None:  # under the name that was given last
                return replace(image, reference=layer.reference)
            return self._mounter.find(layer.reference, layer.digest)
        except BootseerError as error:
            return error

    def _remember(self, key: tuple[str, str], image: StockImage | BootseerError) -> _Decision:
        now_s = time.monotonic()
        has_failed = isinstance(image, (StoreUnavailableError, DeadlineError))
        decision = _Decision(image, now_s + (FAILED_S if has_failed else REMEMBER_S), now_s)
        with self._lock:
            self._decisions[key] = decision
            for old_key, old in list(self._decisions.items()):
                if old.used_s + PULLED_S < now_s:
                    del self._decisions[old_key]
        return decision

    def offer_lock(self, image: StockImage) -> threading.Lock:
        """The lock for offering a layer of an image: a failure must undo only its own changes."""
        return self._lock_of(f"offer {image.digest}")

    def ensure(self, layer: RequestedLayer, image: StockImage) -> None:
        """Mount what `find` gave; a failure is remembered for the image's other layers.

        The image must have a snapshot already, or a sweep may unmount it again.
        """
        self._offered[image.digest] = time.monotonic() + REMEMBER_S
        try:
            self._ensure_mounted(image)
        except BootseerError as error:
            self._remember(_key(layer), error)
            raise

    # --- trees ------------------------------------------------------------------------------

    def tree(self, row: Snapshot) -> str:
        """The tree that the remote snapshot `row` represents; made now if necessary."""
        image = self._database.image(row.image)
        if not row.top or self._stays_unpacked(row, image):
            return self._ensure_unpacked(row, image)
        try:
            return self._ensure_mounted(image)
        except BootseerError as error:
            self._report("fallback", "unpacked", image, str(error))
            return self._ensure_unpacked(row, image)

    def _stays_unpacked(self, row: Snapshot, image: StockImage) -> bool:
        """Whether an image was unpacked because it could not be mounted: that is not repeated."""
        is_unpacked = os.path.isdir(os.path.join(self._tree_folder(row), _TREE))
        return is_unpacked and not self._mounter.answers(self._mount_point(image.digest))

    def _ensure_mounted(self, image: StockImage) -> str:
        mount_point = self._mount_point(image.digest)
        with self._lock_of(mount_point), _map_errors(f"mount {image.reference}"):
            if not self._mounter.answers(mount_point):
                self._mounter.umount(mount_point)
                os.makedirs(mount_point, mode=0o700, exist_ok=True)
                self._mounter.mount(image, mount_point)
                self._report("ok", "lazy", image, "")
        return mount_point

    def _ensure_unpacked(self, row: Snapshot, image: StockImage) -> str:
        folder = self._tree_folder(row)
        with self._lock_of(folder), _map_errors(f"unpack {image.reference}"):
            tree, draft = os.path.join(folder, _TREE), os.path.join(folder, "new")
            if not os.path.isdir(tree):
                shutil.rmtree(folder, ignore_errors=True)
                os.makedirs(draft, mode=0o755)
                os.chmod(draft, 0o755)
                if not row.top:
                    reason = "another image or container stands on some of its layers"
                    self._report("fallback", "unpacked", image, reason)
                try:
                    self._mounter.unpack(image, row.depth + 1, draft)
                except BaseException:  # a signal as well: an incomplete tree must not stay
                    shutil.rmtree(folder, ignore_errors=True)
                    raise
                os.rename(draft, tree)
        return tree

    def _mount_point(self, digest: str) -> str:
        return os.path.join(self._mounts, _hash_name(digest))

    def _tree_folder(self, row: Snapshot) -> str:
        return os.path.join(self._trees, _hash_name(row.name))  # labels may change under containers

    # --- life -------------------------------------------------------------------------------

    def restore(self) -> None:
        """Mount again what was mounted before this process started, if it is not any more."""
        images = [
            image
            for image in self._database.images()
            if any(row.top for row in self._database.uses(image.digest))
        ]
        # In parallel: an image whose registry is away takes seconds.
        with ThreadPoolExecutor(RESTORED_AT_ONCE, "restore") as pool:
            list(pool.map(self._restore, images))

    def _restore(self, image: StockImage) -> None:
        try:
            self._ensure_mounted(image)
        except BootseerError as error:
            # Its next container tries again, and otherwise has it unpacked.
            self._report("fallback", "waiting", image, str(error))

    def sweep(self) -> None:
        """Unmount images and remove trees without a snapshot.

        Trees that are just being made are left to the next sweep, as containerd waits for this
        one. Raises the reason why an image could not be unmounted, when everything else is done.
        """
        errors: list[BootseerError] = []
        images = {self._mount_point(image.digest): image for image in self._database.images()}
        for name in os.listdir(self._mounts):
            mount_point = os.path.join(self._mounts, name)
            with self._unless_busy(mount_point) as is_free:
                if is_free and self._is_unused(mount_point, images.get(mount_point)):
                    try:
                        self._mounter.umount(mount_point)
                    except BootseerError as error:  # it is left to the next sweep
                        errors.append(error)
                    _remove_empty(mount_point)
        for name in os.listdir(self._trees):
            folder = os.path.join(self._trees, name)
            with self._unless_busy(folder) as is_free:
                is_used = any(self._tree_folder(row) == folder for row in self._database.remote())
                if is_free and not (is_used and os.path.isdir(os.path.join(folder, _TREE))):
                    _discard(folder)
        if errors:
            raise errors[0]

    def _is_unused(self, mount_point: str, image: StockImage | None) -> bool:
        """Whether a mount is not needed; an image without snapshots is forgotten."""
        if image is not None:
            return self._database.forget_image(image.digest) or self._is_remainder(image)
        images = self._database.images()  # its first snapshot may have been added a moment ago
        return not any(self._mount_point(one.digest) == mount_point for one in images)

    def _is_remainder(self, image: StockImage) -> bool:
        """Whether an image is removed, and only layers are left that others share with it."""
        if time.monotonic() < self._offered.get(image.digest, 0.0):
            return False  # it is being pulled
        self._offered.pop(image.digest, None)
        return not any(row.top for row in self._database.uses(image.digest))

    @contextmanager
    def _unless_busy(self, name: str) -> Iterator[bool]:
        lock = self._lock_of(name)
        is_free = lock.acquire(blocking=False)
        try:
            yield is_free
        finally:
            if is_free:
                lock.release()


@dataclass(slots=True)
class _Decision:
    """An image that is mounted, or why it is pulled plainly; times by the monotonic clock."""

    image: StockImage | BootseerError
    until_s: float
    used_s: float

    def is_valid(self, now_s: float, depth: int) -> bool:
        """Whether it is valid for a pull that has come to layer `depth`."""
        is_plain = isinstance(self.image, BootseerError)
        return now_s <= self.until_s or (depth > 0 and is_plain)


def _key(layer: RequestedLayer) -> tuple[str, str]:
    return layer.reference, layer.digest


def _hash_name(name: str) -> str:
    """A directory's name for a digest or a snapshot's name."""
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def _remove_empty(path: str) -> None:
    try:
        os.rmdir(path)
    except OSError:
        pass  # still mounted: it is left to the next sweep


def _discard(folder: str) -> None:
    """Remove a tree; rename it first, as a half-removed one must never be taken for a tree."""
    with contextlib.suppress(OSError):
        os.rename(os.path.join(folder, _TREE), os.path.join(folder, f"gone-{secrets.token_hex(4)}"))
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _map_errors(action: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise from_os_error(error, action) from error
