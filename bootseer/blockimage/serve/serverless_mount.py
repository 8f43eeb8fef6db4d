"""A mounted image all of whose bytes are on this node: the kernel reads them without a server.

EROFS has the node cache's own file as its device; `blocks.cache.sealed_objects` guarantees that it
is complete and stays unchanged. The processes here only warm the hot set; the mount needs none of
them, and outlives them.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from bootseer.blockimage import erofs_mount
from bootseer.blockimage.serve import page_cache_warmer
from bootseer.blockimage.serve.opened_image import BlockImage
from bootseer.blocks.cache.sealed_objects import Sealed
from bootseer.errors import BootseerError, CorruptDataError

if TYPE_CHECKING:
    from collections.abc import Callable

READ_AHEAD_KIB = 128
_PIECE_BYTES = 1 << 20


class CompleteImage:
    """One image over its sealed data, which is closed with it. `say` as for `ImageServer`."""

    def __init__(
        self,
        image: BlockImage,
        sealed: Sealed,
        *,
        loop: bool | None = None,
        say: Callable[[str, str], None],
    ) -> None:
        self.image = image
        self._sealed, self._loop, self._say = sealed, loop, say
        self._warmer: page_cache_warmer.Warmer | None = None
        self._closed = False

    def mount(self, target: str) -> erofs_mount.Erofs:
        """Mount the image at `target`. Raises as `mount_erofs`."""
        erofs = erofs_mount.mount_erofs(
            self.image.meta_path, self._sealed.path, target, loop=self._loop
        )
        erofs_mount.set_read_ahead(erofs.bdis, READ_AHEAD_KIB)
        return erofs

    @property
    def descriptors(self) -> tuple[int, int]:
        """Those of its data, for a process that closes what it inherits."""
        return self._sealed.descriptors

    def begin(self, target: str) -> None:
        """Warm the hot set in the background; keeps a pack that is not on this node yet."""
        threading.Thread(
            target=self._run_guarded, args=(target,), name="image-hot", daemon=True
        ).start()

    def _run_guarded(self, target: str) -> None:
        try:
            self._run(target)
        except (BootseerError, OSError) as error:  # programs read what they need without us
            self._say("warm", f"the page cache cannot be warmed: {error}")
        finally:
            if self.image.frames is not None:
                self.image.frames.close()

    def _run(self, target: str) -> None:
        index = self.image.index() if self.image.index is not None else None
        if index is not None and index.frames and not self._closed:
            # Whole ranges of files in the order of their first touch, from a disk.
            made = self._warmer = page_cache_warmer.Warmer(
                page_cache_warmer.clone_mount(target), index, lambda _: None
            ).start()
            for number in range(len(index.frames)):
                made.put(number)
            made.end()
        self._keep_frames()

    def _keep_frames(self) -> None:
        """Read the stream to its end, since it keeps what comes from the registry."""
        stream = self.image.frames
        if stream is None:
            return
        room = memoryview(bytearray(_PIECE_BYTES))
        with contextlib.suppress(CorruptDataError):
            while not self._closed and stream.readinto(room):
                pass

    def give_up(self) -> None:
        """Release the data after a failed mount, and leave the image as it was."""
        self._sealed.close()

    def close(self) -> None:
        """End warming and unpin the data; the mount goes on. Twice is safe."""
        self._closed = True
        if self._warmer is not None:
            self._warmer.close()
        self._sealed.close()
