"""The trees of remote snapshots: lazily mounted images, and plain ones where that cannot be.

An image is mounted when its first layer is asked for, before containerd is told that it need not
fetch it: what cannot be mounted is pulled the plain way, all of it. Later, when a mount is gone
and cannot be made again, or a tree is wanted that no block image holds (some of an image's
layers, on which another image stands), the layers are fetched and unpacked.
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
from bootseer.imageprefetch.snapshotter.database import State
from bootseer.imageprefetch.snapshotter.labels import Wanted
from bootseer.imageprefetch.snapshotter.types import Image, Snapshot

RESTORED_AT_ONCE = 8
REMEMBER_S = 30.0
"""For how long the answer about one image serves whoever pulls it."""
FAILED_S = 300.0
"""The same for a registry that failed us: each new try may take as long as that one did."""
PULLED_S = 3600.0
"""For how long a pull that goes the plain way stays on it, from layer to layer."""


class ImageMounter(Protocol):
    """How stock images become trees; every method raises errors of ours."""

    def check(self, reference: str) -> None:
        """Raise why images of that name must not be lazy. Asks nobody."""

    def find(self, reference: str, digest: str) -> Image:
        """The stock image by its manifest's digest, or "" to take what the tag names now."""

    def mount(self, image: Image, directory: str) -> None:
        """Mount the image's tree and leave its server in the background, out of our life.

        Raises NotFoundError when the image has no block image, saying what to do.
        """

    def umount(self, directory: str) -> None:
        """Nothing mounted there is no error."""

    def answers(self, directory: str) -> bool:
        """Whether the image is mounted there and alive; takes no longer than seconds."""

    def unpack(self, image: Image, layers: int, directory: str) -> None:
        """Fetch the first `layers` layers and unpack them into an empty directory."""


_TREE = "fs"
Report = Callable[[str, str, Image | Wanted, str], None]
"""status (ok or fallback), mode (lazy, plain, unpacked, waiting), of what, reason"""


class Images:
    """Trees by image, each made once however many ask; safe to use from several threads."""

    def __init__(self, root: str, state: State, mounter: ImageMounter, report: Report) -> None:
        self._mounts, self._trees = os.path.join(root, "images"), os.path.join(root, "trees")
        self._state, self._mounter, self._report = state, mounter, report
        self._lock = threading.Lock()
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._found: dict[tuple[str, str], _Decision] = {}  # by reference and digest
        self._offered: dict[str, float] = {}  # digest -> until when more layers may be asked for
        for path in (self._mounts, self._trees):
            os.makedirs(path, mode=0o700, exist_ok=True)

    def _single(self, name: str) -> threading.Lock:
        with self._lock:
            return self._locks[name]

    # --- offering ---------------------------------------------------------------------------

    def find(self, wanted: Wanted, depth: int) -> Image:
        """The image of which `wanted` is layer `depth`; nothing is mounted yet.

        Raises an error of ours, whose text is the reason, when it has to be pulled plainly.
        """
        if not wanted.reference:
            raise NotFoundError("the client did not say which image it pulls")
        found = self._decided(wanted, depth)
        if isinstance(found, BootseerError):
            raise type(found)(str(found)) from found
        if depth >= len(found.layers) or found.layers[depth] != wanted.layer:
            raise NotFoundError(
                f"layer {wanted.layer} is not layer {depth + 1} of {found.digest}; the tag moved, "
                "or the image has an unusual manifest"
            )
        return found

    def _decided(self, wanted: Wanted, depth: int) -> Image | BootseerError:
        """What is known of the image. A pull that began the plain way ends on it."""
        key = _key(wanted)
        with self._single("find " + " ".join(key)):
            known = self._found.get(key)
            now = time.monotonic()
            if known is None or not (now <= known.until_s or (depth and known.is_plain)):
                known = self._remember(key, self._ask(wanted))
            known.asked_s = now
        return known.found

    def _ask(self, wanted: Wanted) -> Image | BootseerError:
        try:
            self._mounter.check(wanted.reference)  # known images may come by any name
            known = self._state.find_image(wanted.digest)
            if known is not None:  # under the name that was given last
                return replace(known, reference=wanted.reference)
            return self._mounter.find(wanted.reference, wanted.digest)
        except BootseerError as error:
            return error

    def _remember(self, key: tuple[str, str], found: Image | BootseerError) -> _Decision:
        now = time.monotonic()
        failed = isinstance(found, (StoreUnavailableError, DeadlineError))
        made = _Decision(found, now + (FAILED_S if failed else REMEMBER_S), now)
        with self._lock:
            self._found[key] = made
            for old in [old for old, one in self._found.items() if one.asked_s + PULLED_S < now]:
                del self._found[old]
        return made

    def offering(self, image: Image) -> threading.Lock:
        """Held while a layer is offered: who fails takes back what it said of the image."""
        return self._single(f"offer {image.digest}")

    def ensure(self, wanted: Wanted, image: Image) -> None:
        """Mount what `find` found; why it cannot be mounted is remembered for its other layers.

        A snapshot must stand for the image already, or a sweep may unmount it again.
        """
        self._offered[image.digest] = time.monotonic() + REMEMBER_S
        try:
            self._mounted(image)
        except BootseerError as error:
            self._remember(_key(wanted), error)
            raise

    # --- trees ------------------------------------------------------------------------------

    def tree(self, row: Snapshot) -> str:
        """The tree that the remote snapshot `row` stands for; made now if it must be."""
        image = self._state.image(row.image)
        if not row.top or self._stays_unpacked(row, image):
            return self._unpacked(row, image)
        try:
            return self._mounted(image)
        except BootseerError as error:
            self._report("fallback", "unpacked", image, str(error))
            return self._unpacked(row, image)

    def _stays_unpacked(self, row: Snapshot, image: Image) -> bool:
        """It was unpacked since it could not be mounted: nobody waits for another try."""
        unpacked = os.path.isdir(os.path.join(self._tree_place(row), _TREE))
        return unpacked and not self._mounter.answers(self._mount_place(image.digest))

    def _mounted(self, image: Image) -> str:
        place = self._mount_place(image.digest)
        with self._single(place), _mapped(f"mount {image.reference}"):
            if not self._mounter.answers(place):
                self._mounter.umount(place)
                os.makedirs(place, mode=0o700, exist_ok=True)
                self._mounter.mount(image, place)
                self._report("ok", "lazy", image, "")
        return place

    def _unpacked(self, row: Snapshot, image: Image) -> str:
        place = self._tree_place(row)
        with self._single(place), _mapped(f"unpack {image.reference}"):
            tree, draft = os.path.join(place, _TREE), os.path.join(place, "new")
            if not os.path.isdir(tree):
                shutil.rmtree(place, ignore_errors=True)
                os.makedirs(draft, mode=0o755)
                os.chmod(draft, 0o755)
                if not row.top:
                    reason = "another image or container stands on some of its layers"
                    self._report("fallback", "unpacked", image, reason)
                try:
                    self._mounter.unpack(image, row.depth + 1, draft)
                except BaseException:  # a signal too: half a tree must not be found
                    shutil.rmtree(place, ignore_errors=True)
                    raise
                os.rename(draft, tree)
        return tree

    def _mount_place(self, digest: str) -> str:
        return os.path.join(self._mounts, _short(digest))

    def _tree_place(self, row: Snapshot) -> str:
        return os.path.join(self._trees, _short(row.name))  # labels may change under containers

    # --- life -------------------------------------------------------------------------------

    def restore(self) -> None:
        """Mount again what was mounted before this process began and is not any more."""
        wanted = [
            image
            for image in self._state.images()
            if any(row.top for row in self._state.uses(image.digest))
        ]
        # Side by side: one whose registry is away takes seconds.
        with ThreadPoolExecutor(RESTORED_AT_ONCE, "restore") as pool:
            list(pool.map(self._restore, wanted))

    def _restore(self, image: Image) -> None:
        try:
            self._mounted(image)
        except BootseerError as error:
            # The next container of it tries again, and can have it unpacked.
            self._report("fallback", "waiting", image, str(error))

    def sweep(self) -> None:
        """Unmount images and remove trees that no snapshot stands for.

        What is just being made is left for the next time: containerd waits for us. Raises what
        kept an image mounted, when all else is done.
        """
        faults: list[BootseerError] = []
        known = {self._mount_place(image.digest): image for image in self._state.images()}
        for name in os.listdir(self._mounts):
            place = os.path.join(self._mounts, name)
            with self._unless_busy(place) as free:
                if free and self._is_unused(place, known.get(place)):
                    try:
                        self._mounter.umount(place)
                    except BootseerError as error:  # it waits for the next time, all others not
                        faults.append(error)
                    _remove_empty(place)
        for name in os.listdir(self._trees):
            place = os.path.join(self._trees, name)
            with self._unless_busy(place) as free:
                wanted = any(self._tree_place(row) == place for row in self._state.remote())
                if free and not (wanted and os.path.isdir(os.path.join(place, _TREE))):
                    _discard(place)
        if faults:
            raise faults[0]

    def _is_unused(self, place: str, image: Image | None) -> bool:
        """Whether nobody needs the mount; an image that no snapshot stands for is forgotten."""
        if image is not None:
            return self._state.forget_image(image.digest) or self._is_rest(image)
        images = self._state.images()  # its first snapshot may have come a moment ago
        return not any(self._mount_place(one.digest) == place for one in images)

    def _is_rest(self, image: Image) -> bool:
        """Whether the image is removed, and only layers that others share with it are left."""
        if time.monotonic() < self._offered.get(image.digest, 0.0):
            return False  # it is being pulled
        self._offered.pop(image.digest, None)
        return not any(row.top for row in self._state.uses(image.digest))

    @contextmanager
    def _unless_busy(self, place: str) -> Iterator[bool]:
        lock = self._single(place)
        free = lock.acquire(blocking=False)
        try:
            yield free
        finally:
            if free:
                lock.release()


@dataclass(slots=True)
class _Decision:
    """What `find` found, until when it holds, and when it was asked for last, by our clock."""

    found: Image | BootseerError
    until_s: float
    asked_s: float

    @property
    def is_plain(self) -> bool:
        return isinstance(self.found, BootseerError)


def _key(wanted: Wanted) -> tuple[str, str]:
    return wanted.reference, wanted.digest


def _short(name: str) -> str:
    """A directory's name for a digest or a snapshot's name."""
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def _remove_empty(path: str) -> None:
    try:
        os.rmdir(path)
    except OSError:
        pass  # still mounted: the next sweep finds it


def _discard(place: str) -> None:
    """Remove a tree; first its name, as what a kill leaves half removed must never be one."""
    with contextlib.suppress(OSError):
        os.rename(os.path.join(place, _TREE), os.path.join(place, f"gone-{secrets.token_hex(4)}"))
    shutil.rmtree(place, ignore_errors=True)


@contextmanager
def _mapped(action: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise from_os_error(error, action) from error
