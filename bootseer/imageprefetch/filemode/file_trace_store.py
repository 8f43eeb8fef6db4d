"""File traces in a directory or any store, one object for each image and workload.

Its name is `files/<image>/<workload>.files`. Each start merges its own trace. A lock orders them in
a directory; in another store the last writer wins, and a start's trace may be lost, never damaged.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from bootseer.context_managers import Closing
from bootseer.errors import CorruptDataError, NotFoundError, from_os_error
from bootseer.imageprefetch.filemode import file_trace as filetraces
from bootseer.imageprefetch.filemode.file_trace import FileTrace
from bootseer.imageprefetch.filemode.trace_names import object_name
from bootseer.storage.open import open_store
from bootseer.storage.options import StoreOptions
from bootseer.storage.store import Store
from bootseer.system import file_lock


class FileTraceStore(Closing):
    """The file traces in a store; a context manager. Errors are the store's."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @classmethod
    def open(cls, place: str, options: StoreOptions | None = None) -> FileTraceStore:
        """Open the traces in a directory or in the store at a URL."""
        return cls(open_store(place, options))

    @property
    def url(self) -> str:
        """The store's URL without credentials; safe to print."""
        return self._store.url

    def load(self, image: str, workload: str = "") -> FileTrace | None:
        """A workload's merged trace; None when there is none. CorruptDataError: it is damaged."""
        name = object_name(image, workload)
        try:
            data = self._store.read(name, limit_bytes=filetraces.MAX_BYTES)
        except NotFoundError:
            return None
        return filetraces.parse(data, name=f"the trace {name} in {self.url}")

    def add(self, image: str, trace: FileTrace) -> FileTrace:
        """Merge a trace in and return the merged one; a damaged one is replaced."""
        name = object_name(image, trace.workload)
        with self._hold_lock(name):
            try:
                kept = self.load(image, trace.workload)
            except CorruptDataError:
                kept = None  # it must not prevent recording for ever
            merged = filetraces.merge([kept, trace]) if kept else trace
            self._store.replace(name, filetraces.serialise(merged))
        return merged

    @contextlib.contextmanager
    def _hold_lock(self, name: str) -> Iterator[None]:
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
        """Close the store; twice is safe."""
        self._store.close()
