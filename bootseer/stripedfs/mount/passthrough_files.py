"""Files that the node cache holds whole, read by the kernel itself (FUSE passthrough).

Such a read verifies nothing, so only sealed objects are handed to the kernel, and those of which
this process has just verified all blocks: see `blocks.cache.sealed_objects`. A file that a mount
has read whole is sealed once no file is open through the mount, at the lowest priority and with
pauses, for the next opening.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from bootseer.blocks.cache import sealed_objects
from bootseer.blocks.cache.present_index import identity_of
from bootseer.blocks.cache.sealed_objects import Sealed
from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.errors import BootseerError, NotFoundError
from bootseer.fuse.operations import Handle
from bootseer.stripedfs.mount.open_files import ONE_READ_BYTES
from bootseer.stripedfs.read.sources import FileSource

QUIET_S = 2.0
PAUSE_S = 0.01
"""Pause after every few verified megabytes: a few hundred megabytes a second are enough."""
MOST_WAITING = 1000


class Passing:
    """Sealed objects of the cache `directory`, by the handles that have them open.

    `busy` says whether files are open that the mount serves itself: nothing is sealed meanwhile,
    nor while one is open that has just been fetched. `say` receives why an object could not be
    sealed.
    """

    def __init__(
        self,
        directory: str,
        fetcher: Fetcher,
        *,
        busy: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        self._directory, self._fetcher = directory, fetcher
        self._busy, self._say = busy, say
        self._lock = threading.Lock()
        self._open: dict[Handle, tuple[Sealed, FileSource]] = {}
        self._waiting: dict[str, FileSource] = {}
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def open_sealed(self, source: FileSource) -> Sealed | None:
        """Open a file's sealed object, pinned; None where the mount must serve the file itself.

        What this process reads and stores of the file from now on counts as verified.
        """
        if not source.has_raw_digests:
            return None
        identity = identity_of(source)
        if identity is None:
            return None
        sealed = sealed_objects.open_sealed(self._directory, identity)
        if sealed is not None or source.size_bytes <= ONE_READ_BYTES:
            return sealed
        verified = self._fetcher.direct_reads(source)
        if verified is None:
            return None
        return sealed_objects.open_verified(self._directory, identity, verified)

    def keep(self, handle: Handle, sealed: Sealed, source: FileSource) -> None:
        """Keep a file's object pinned until `drop`."""
        with self._lock:
            self._open[handle] = sealed, source

    def drop(self, handle: Handle) -> FileSource | None:
        """Unpin the object of a handle that the kernel closed; returns the file, if it had one."""
        with self._lock:
            sealed, source = self._open.pop(handle, (None, None))
        if sealed is not None:
            sealed.close()
        return source

    def note_closed(self, source: FileSource) -> None:
        """Seal a file that was read, later, if the cache holds it whole."""
        if not source.has_raw_digests:
            return
        with self._lock:
            if self._closing.is_set() or len(self._waiting) >= MOST_WAITING:
                return
            self._waiting[source.key] = source
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="stripe-seal", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Stop sealing and unpin everything; the kernel keeps what it has open. Twice is safe."""
        self._closing.set()
        with self._lock:
            objects, self._open = list(self._open.values()), {}
        for sealed, _ in objects:
            sealed.close()

    def _run(self) -> None:
        while self._quiet():
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                source = self._waiting.pop(next(iter(self._waiting)))
            try:
                self._seal(source)
            except NotFoundError:
                pass  # nothing of it is cached
            except BootseerError as error:  # the mount serves it next time, too
                self._say(f"{source.key}: {error}")

    def _seal(self, source: FileSource) -> None:
        identity = identity_of(source)
        if identity is None or not sealed_objects.seal(
            self._directory, source, go_on=self._go_on, whole_pages=False
        ):
            return
        self._fetcher.forget(source)  # freezing, by the first opening, needs the object alone
        sealed = sealed_objects.open_sealed(self._directory, identity)
        if sealed is not None:
            sealed.close()

    def _quiet(self) -> bool:
        """Wait until no file has been open for a while; False when closed."""
        while not self._closing.wait(QUIET_S):
            if not self._is_busy():
                return True
        return False

    def _go_on(self) -> bool:
        if self._closing.wait(PAUSE_S):
            return False
        return not self._is_busy() or self._quiet()

    def _is_busy(self) -> bool:
        with self._lock:
            loads = any(not sealed.has_mark for sealed, _ in self._open.values())
        return loads or self._busy()
