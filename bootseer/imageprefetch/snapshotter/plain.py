"""No image lazily: everything is handed to the plain way."""

from __future__ import annotations

from typing import NoReturn

from bootseer.errors import NotFoundError
from bootseer.imageprefetch.snapshotter.records import Image


class PlainMounter:
    """An ImageMounter that mounts nothing; a context manager as the others are."""

    def __enter__(self) -> PlainMounter:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to end."""

    def find(self, reference: str, digest: str) -> Image:
        self._refuse()

    def mount(self, image: Image, directory: str) -> None:
        self._refuse()

    def umount(self, directory: str) -> None:
        """Nothing was mounted."""

    def answers(self, directory: str) -> bool:
        return False

    def unpack(self, image: Image, layers: int, directory: str) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotFoundError("lazy images are switched off; start the snapshotter without --plain")
