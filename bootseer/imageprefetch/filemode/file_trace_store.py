"""Where traces of files are kept: a directory or any store, one object an image and workload.

The name is `files/<image>/<workload>.files`. Starts merge what they saw into it. In a directory a
lock keeps them apart; in another store the one that writes last wins, and a start's trace may be
lost, never damaged.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from bootseer.errors import CorruptDataError, NotFoundError, from_os_error
from bootseer.imageprefetch.filemode import file_trace as filetraces
from bootseer.imageprefetch.filemode.file_trace import FileTrace
from bootseer.imageprefetch.filemode.trace_names import check_image, image_here, object_name
from bootseer.storage.open import open_store
from bootseer.storage.options import StoreOptions
from bootseer.storage.store import Store
from bootseer.system import file_lock

__all__ = ["Keeper", "check_image", "image_here"]


class Keeper:
    """Traces in one place; a context manager. Errors are the store's (see `storage.store`)."""

    def __init__(self, place: str, options: StoreOptions | None = None) -> None:
        self._store: Store = open_store(place, options)

    @property
    def url(self) -> str:
        """The place, without credentials; safe to print."""
        return self._store.url

    def name(self, image: str, workload: str) -> str:
        """The object that holds a workload's trace."""
        return object_name(image, workload)

    def load(self, image: str, workload: str = "") -> FileTrace | None:
        """A workload's merged trace; None when there is none. CorruptDataError: it is damaged."""
        name = self.name(image, workload)
        try:
            data = self._store.read(name, limit_bytes=filetraces.MAX_BYTES)
        except NotFoundError:
            return None
        return filetraces.parse(data, name=f"the trace {name} in {self.url}")

    def add(self, image: str, trace: FileTrace) -> FileTrace:
        """Merge a trace in and return what is kept now. One that is damaged is replaced."""
        name = self.name(image, trace.workload)
        with self._locked(name):
            try:
                kept = self.load(image, trace.workload)
            except CorruptDataError:
                kept = None  # it must not end recording for ever
            merged = filetraces.merge([kept, trace]) if kept else trace
            self._store.replace(name, filetraces.serialise(merged))
        return merged

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        path = self._store.local_path(name)
        if path is None:
            yield
            return
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            lock = file_lock.acquire(f"{path}.lock", 0o644)
        except OSError as error:
            raise from_os_error(error, f"keep the trace {path}") from error
        with lock:
            yield

    def close(self) -> None:
        """Twice is safe."""
        self._store.close()

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
