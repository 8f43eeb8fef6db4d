"""The trees of remote snapshots: lazily mounted images, and plain ones where that cannot be.

An image is mounted when its first layer is asked for, before containerd is told that it need not
fetch it: what cannot be mounted is pulled the plain way, all of it. Later, when a mount is gone
and cannot be made again, or a tree is wanted that no block image holds (some of an image's
layers, on which another image stands), the layers are fetched and unpacked.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Protocol

from bootseer.errors import BootseerError, NotFoundError
from bootseer.imageprefetch.snapshotter.labels import Wanted
from bootseer.imageprefetch.snapshotter.records import TARGET_LABEL, Image, Snapshot
from bootseer.imageprefetch.snapshotter.state import State

REMEMBER_S = 30.0
"""For how long the answer about one image serves all its layers' questions."""


class ImageMounter(Protocol):
    """How stock images become trees; every method raises errors of ours."""

    def find(self, reference: str, digest: str) -> Image:
        """The image, when there is a block image of it.

        `digest` is its manifest's, or "" to take what the reference's tag names now. Raises
        NotFoundError when there is none, saying what to do.
        """

    def mount(self, image: Image, directory: str) -> None:
        """Mount the image's tree and leave its server in the background, out of our life."""

    def umount(self, directory: str) -> None:
        """Nothing mounted there is no error."""

    def answers(self, directory: str) -> bool:
        """Whether the image is mounted there and alive; takes no longer than seconds."""

    def unpack(self, image: Image, layers: int, directory: str) -> None:
        """Fetch the first `layers` layers and unpack them into an empty directory."""


Report = Callable[[str, str, Image | Wanted, str], None]
"""status (ok or fallback), mode (lazy, plain, unpacked), of what, reason"""


class Images:
    """Trees by image, each made once however many ask; safe to use from several threads."""

    def __init__(self, root: str, state: State, mounter: ImageMounter, report: Report) -> None:
        self._mounts, self._trees = os.path.join(root, "images"), os.path.join(root, "trees")
        self._state, self._mounter, self._report = state, mounter, report
        self._lock = threading.Lock()
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        # (reference, digest) -> (until when on the monotonic clock, what `offer` found)
        self._found: dict[tuple[str, str], tuple[float, Image | BootseerError]] = {}
        for path in (self._mounts, self._trees):
            os.makedirs(path, mode=0o700, exist_ok=True)

    def _single(self, name: str) -> threading.Lock:
        with self._lock:
            return self._locks[name]

    # --- offering ---------------------------------------------------------------------------

    def offer(self, wanted: Wanted, depth: int) -> Image:
        """The image of which `wanted` is layer `depth`, mounted.

        Raises an error of ours, whose text is the reason, when it has to be pulled plainly.
        """
        if not wanted.reference:
            raise NotFoundError("the client did not say which image it pulls")
        image = self._find_mounted(wanted)
        if depth >= len(image.layers) or image.layers[depth] != wanted.layer:
            raise NotFoundError(
                f"layer {wanted.layer} is not layer {depth + 1} of {image.digest}; the tag moved, "
                "or the image has an unusual manifest"
            )
        return image

    def _find_mounted(self, wanted: Wanted) -> Image:
        key = (wanted.reference, wanted.digest)
        with self._single("find " + " ".join(key)):
            until, found = self._found.get(key, (0.0, NotFoundError()))
            if time.monotonic() > until:
                try:
                    found = self._mounter.find(wanted.reference, wanted.digest)
                    self._mounted(found)
                    self._report("ok", "lazy", found, "")
                except BootseerError as error:
                    found = error
                self._found[key] = (time.monotonic() + REMEMBER_S, found)
                self._forget_old()
        if isinstance(found, BootseerError):
            raise type(found)(str(found)) from found
        return found

    def _forget_old(self) -> None:
        now = time.monotonic()
        for key in [key for key, (until, _) in self._found.items() if until < now]:
            self._found.pop(key, None)

    # --- trees ------------------------------------------------------------------------------

    def tree(self, row: Snapshot) -> str:
        """The tree that the remote snapshot `row` stands for; made now if it must be."""
        image = self._state.image(row.image)
        if not row.top:
            return self._unpacked(row, image)
        try:
            return self._mounted(image)
        except BootseerError as error:
            self._report("fallback", "unpacked", image, str(error))
            return self._unpacked(row, image)

    def _mounted(self, image: Image) -> str:
        place = self._mount_place(image.digest)
        with self._single(place):
            if not self._mounter.answers(place):
                self._mounter.umount(place)
                os.makedirs(place, mode=0o700, exist_ok=True)
                self._mounter.mount(image, place)
        return place

    def _unpacked(self, row: Snapshot, image: Image) -> str:
        place = self._tree_place(row)
        with self._single(place):
            tree, draft = os.path.join(place, "fs"), os.path.join(place, "new")
            if not os.path.isdir(tree):
                shutil.rmtree(draft, ignore_errors=True)
                os.makedirs(draft, mode=0o755)
                os.chmod(draft, 0o755)
                if not row.top:
                    reason = "another image or container stands on some of its layers"
                    self._report("fallback", "unpacked", image, reason)
                try:
                    self._mounter.unpack(image, row.depth + 1, draft)
                except BaseException:
                    shutil.rmtree(draft, ignore_errors=True)
                    raise
                os.rename(draft, tree)
        return tree

    def _mount_place(self, digest: str) -> str:
        return os.path.join(self._mounts, _short(digest))

    def _tree_place(self, row: Snapshot) -> str:
        return os.path.join(self._trees, _short(row.labels.get(TARGET_LABEL, row.name)))

    # --- life -------------------------------------------------------------------------------

    def restore(self) -> None:
        """Mount again what was mounted before this process began and is not any more."""
        for image in self._state.images():
            if any(row.top for row in self._state.uses(image.digest)):
                try:
                    self._mounted(image)
                except BootseerError as error:
                    # The next container of it tries again, and can have it unpacked.
                    self._report("fallback", "plain", image, f"not mounted at start: {error}")

    def sweep(self) -> None:
        """Unmount images and remove trees that no snapshot stands for."""
        kept = set()
        for image in self._state.images():
            place = self._mount_place(image.digest)
            with self._single(place):
                if not self._state.forget_image(image.digest):
                    kept.add(os.path.basename(place))
        kept |= {_short(image.digest) for image in self._recent()}
        for name in set(os.listdir(self._mounts)) - kept:
            place = os.path.join(self._mounts, name)
            with self._single(place):
                self._mounter.umount(place)
                _remove_empty(place)
        trees = {self._tree_place(row) for row in self._state.all() if row.image}
        for name in os.listdir(self._trees):
            place = os.path.join(self._trees, name)
            if place not in trees:
                with self._single(place):
                    shutil.rmtree(place, ignore_errors=True)

    def _recent(self) -> Iterable[Image]:
        """Images mounted a moment ago, whose first snapshot may not be noted yet."""
        now = time.monotonic()
        return [
            found
            for until, found in list(self._found.values())
            if until > now and isinstance(found, Image)
        ]


def _short(name: str) -> str:
    """A directory's name for a digest or a snapshot's name."""
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def _remove_empty(path: str) -> None:
    try:
        os.rmdir(path)
    except OSError:
        pass  # still mounted: the next sweep finds it
