"""An `ImageMounter` that mounts nothing: every image is pulled the plain way."""

from __future__ import annotations

from typing import NoReturn

from bootseer.config.loading import default_runtime
from bootseer.errors import NotFoundError
from bootseer.imageprefetch.snapshotter import lazy_mounter
from bootseer.imageprefetch.snapshotter.types import StockImage


class PlainMounter:
    """Refuses to mount, and leaves what is mounted until it is removed; a context manager."""

    def __init__(self, runtime_dir: str = "") -> None:
        self._runtime = runtime_dir or default_runtime()

    def __enter__(self) -> PlainMounter:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is held."""

    def check(self, reference: str) -> None:
        self._refuse()

    def find(self, reference: str, digest: str) -> StockImage:
        self._refuse()

    def mount(self, image: StockImage, directory: str) -> None:
        self._refuse()

    def umount(self, directory: str) -> None:
        lazy_mounter.umount(directory, self._runtime)

    def answers(self, directory: str) -> bool:
        return lazy_mounter.answers(directory, self._runtime)

    def unpack(self, image: StockImage, layers: int, directory: str) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotFoundError("lazy images are switched off; start the snapshotter without --plain")
