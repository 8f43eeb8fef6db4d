"""A version that is being written: a temporary folder that becomes a version, or is removed.

Next to the data it holds `writing/`: `lease/` (what is being put, and whether its writer is alive),
`open/` (an empty folder: no other process has taken the draft over) and records of what is
complete. A draft whose writer is dead may be taken over by another put of the same source: by the
one that succeeds in renaming it.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from bootseer.errors import (
    BootseerError,
    BusyError,
    CorruptDataError,
    NotFoundError,
    UsageError,
)
from bootseer.storage import lease as leases
from bootseer.storage.store import TEMPORARY, Store
from bootseer.stripedfs.format.json_fields import compute_digest
from bootseer.stripedfs.format.manifest import Kind, Link, Pointer
from bootseer.stripedfs.format.pointer import (
    CURRENT,
    MANIFEST,
    Version,
    checkpoint_folder,
    read_current,
    read_manifest,
    read_pointer,
)
from bootseer.stripedfs.write.stripe_upload import (
    SMALL_TRIES,
    check_length,
    replace_with_retries,
    run_with_retries,
)

WRITING = "writing"
LEASE = "lease"
OPEN = "open"
BEAT_S = 10.0
STALE_S = 60.0


class Draft:
    """A temporary folder of one checkpoint; as a context manager it discards what is unpublished.

    Other processes that write into it, too, join it by its `token`. It is published under `name`,
    which may be set to another one until then.
    """

    def __init__(self, store: Store, name: str, folder: str, *, adopted: bool = False) -> None:
        self.store = store
        self.name = name
        self.folder = folder
        self.adopted = adopted
        self._owned = False
        """This process has yet to publish or remove it; False for a draft that was joined."""
        self._lease: leases.Lease | None = None
        self._error: BaseException | None = None
        self._begun_s = time.monotonic()
        self._leasing: threading.Thread | None = None

    @classmethod
    def begin(cls, store: Store, name: str, note: dict[str, Any]) -> Draft:
        """Make a new one. `note` is what `adopt` will compare."""
        folder = store.temporary_name(checkpoint_folder(name))
        store.mkdir(f"{folder}/{WRITING}/{OPEN}")
        return cls(store, name, folder)._begin_lease(note)

    @classmethod
    def adopt(cls, store: Store, name: str, note: dict[str, Any]) -> Draft | None:
        """Take over a draft of the same note whose writer is dead; None when there is none."""
        base = checkpoint_folder(name)
        for folder in list_drafts(store, base):
            if read_note(store, folder) != note or not is_abandoned(store, base, folder):
                continue
            ours = store.temporary_name(base)
            try:
                store.rename(folder, ours)
                store.delete_tree(f"{ours}/{WRITING}/{LEASE}")
            except (NotFoundError, BusyError):
                continue  # another process was quicker
            return cls(store, name, ours, adopted=True)._begin_lease(note)
        return None

    @classmethod
    def join(cls, store: Store, name: str, token: str) -> Draft:
        """Write into a draft that another process began and will publish."""
        if "/" in token or not token.startswith("."):
            raise UsageError(f"{token!r} is no token of a checkpoint being written")
        folder = f"{checkpoint_folder(name)}/{token}"
        store.stat(f"{folder}/{WRITING}/{OPEN}")
        return cls(store, name, folder)

    def _begin_lease(self, note: dict[str, Any]) -> Draft:
        """Begin to acquire its lease, which a store may take half a second for; returns itself."""
        self._owned = True
        self._leasing = threading.Thread(target=self._acquire, args=(note,), daemon=True)
        self._leasing.start()
        return self

    def _acquire(self, note: dict[str, Any]) -> None:
        folder = f"{self.writing}/{LEASE}"

        def acquire(_: int) -> None:
            # No other process knows the folder: a lease in it is of a try whose answer was lost.
            watch = leases.Watch(self.store, folder, ttl_s=0.0)
            self._lease = leases.try_acquire(
                self.store, folder, watch, info=note, beat_s=BEAT_S, ttl_s=STALE_S
            )

        try:
            run_with_retries(acquire, SMALL_TRIES, time.sleep)
        except BaseException as error:  # raised when the draft is published
            self._error = error

    def _wait_for_lease(self) -> leases.Lease | None:
        if self._leasing is not None:
            self._leasing.join()
            self._leasing = None
        return self._lease

    @property
    def token(self) -> str:
        """Names this draft to `join`."""
        return self.folder.rpartition("/")[2]

    @property
    def writing(self) -> str:
        """The folder of records, which is removed before the version is published."""
        return f"{self.folder}/{WRITING}"

    def _check_owned(self) -> None:
        """Raise BusyError when another process took the draft over: ours was stopped too long."""
        lease = self._wait_for_lease()
        if self._error is not None:
            raise self._error
        if lease is not None and time.monotonic() - self._begun_s > STALE_S / 2:
            lease.renew()
        try:
            self.store.stat(f"{self.writing}/{OPEN}")
        except NotFoundError:
            lost = True
        else:
            lost = lease is None or lease.lost
        if lost:
            raise BusyError(
                f"writing {self.name} to {self.store.url} was interrupted for too long; "
                "put it again"
            )

    def publish(
        self, kind: Kind, size_bytes: int, manifest: bytes, *, shares_folder: bool = False
    ) -> Version:
        """Write the manifest, give the folder its version's name, and point to it.

        Of several that are published at once the last pointer wins; every version stays whole.
        """
        name = f"{self.folder}/{MANIFEST}"
        replace_with_retries(self.store, name, manifest)
        check_length(self.store, name, len(manifest))
        self._check_owned()
        self._stop_lease()
        self.store.delete_tree(self.writing)  # without a note it cannot be taken over any more
        about = (new_version_name(), size_bytes, len(manifest), compute_digest(manifest))
        pointer = Pointer(kind, *about, shares_folder=shares_folder)
        version = Version(f"{checkpoint_folder(self.name)}/{pointer.version}", pointer)
        base = checkpoint_folder(self.name)
        if self._base != base:
            self.store.mkdir(base)
        self._rename(version)
        self._owned = False
        self._point(version)
        if self._base != base:
            self.remove_base()
        return version

    def _rename(self, version: Version) -> None:
        try:
            self.store.rename(self.folder, version.folder)
        except NotFoundError:
            # A request that is repeated after its first answer was lost finds its own work done.
            self._check_exists(version)

    def _point(self, version: Version) -> None:
        """Make it current; if a collector removes it meanwhile, the previous version remains."""
        try:
            previous = self._read_previous()
            self._check_exists(version)
            replace_with_retries(self.store, self._pointer, version.pointer.encode())
        except BootseerError:
            self._remove_unless_current(version)
            raise
        try:
            self._check_exists(version)
        except BusyError:
            self._restore_pointer(version, previous)
            raise
        except BootseerError:
            return  # it is published, and existed a moment ago

    @property
    def _pointer(self) -> str:
        return f"{checkpoint_folder(self.name)}/{CURRENT}"

    def _read_previous(self) -> Version | Link | None:
        try:
            return read_pointer(self.store, self.name)
        except CorruptDataError:
            return None  # it is replaced now

    def _check_exists(self, version: Version) -> None:
        """Raise BusyError when the version was removed, as by a collector without grace."""
        try:
            self.store.stat(f"{version.folder}/{MANIFEST}")
        except NotFoundError as error:
            raise BusyError(
                f"{version.folder} in {self.store.url} was collected while it was published; "
                "put it again, and give gc a grace period"
            ) from error

    def _restore_pointer(self, version: Version, previous: Version | Link | None) -> None:
        """Make the previous version current again, unless another was published meanwhile."""
        try:
            current = read_current(self.store, self.name)
            if current is None or current.folder != version.folder:
                return
            if isinstance(previous, Link):
                self.store.replace(self._pointer, previous.encode())
                return
            if previous is None or not self._is_whole(previous):
                self.store.delete(self._pointer)
                return
            self.store.replace(self._pointer, previous.pointer.encode())
            if not self._is_whole(previous):  # collected just then, for nothing pointed to it
                self.store.delete(self._pointer)
        except BootseerError:
            return  # that the version was removed is the error to report

    def _is_whole(self, version: Version) -> bool:
        try:
            read_manifest(self.store, version)
        except (NotFoundError, CorruptDataError):
            return False
        return True

    def _remove_unless_current(self, version: Version) -> None:
        try:
            current = read_current(self.store, self.name)
            if current is None or current.folder != version.folder:
                self.store.delete_tree(version.folder)
        except BootseerError:
            return  # a pointer that cannot be read may name it already: left to gc

    def keep(self) -> None:
        """Leave it for another put of the same source to take over."""
        self._owned = False
        lease = self._wait_for_lease()
        if lease is not None:
            lease.close()

    def discard(self) -> None:
        """Remove it, as far as the store can be reached; twice is safe, as after `publish`."""
        if not self._owned:
            return
        self._owned = False
        self._stop_lease()
        try:
            self.store.delete_tree(self.folder)
        except BootseerError:
            return  # gc finds it

    def remove_base(self) -> None:
        """Remove the checkpoint's folder that it was begun in, if nothing else is in it."""
        try:
            self.store.delete(self._base)
        except BootseerError:
            return  # something else is in it

    @property
    def _base(self) -> str:
        return self.folder.rpartition("/")[0]

    def _stop_lease(self) -> None:
        lease = self._wait_for_lease()
        if lease is not None:
            lease.forget()

    def __enter__(self) -> Draft:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.discard()


def new_version_name() -> str:
    """A new name. Names sort by time as far as clocks agree, but nothing relies on it."""
    return f"v-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{uuid.uuid4().hex[:8]}"


def list_drafts(store: Store, base: str) -> Iterator[str]:
    """The folders of a checkpoint's drafts."""
    try:
        folders = [stat.name for stat in store.temporaries(base) if stat.is_folder]
    except NotFoundError:
        return
    yield from folders


def read_note(store: Store, folder: str) -> dict[str, Any] | None:
    """The note that a draft was begun with; None where it cannot be read."""
    held, _ = leases.Watch(store, f"{folder}/{WRITING}/{LEASE}").look()
    return held.info if held is not None else None


def is_abandoned(store: Store, base: str, folder: str, *, now_s: float | None = None) -> bool:
    """Whether a draft's writer is surely or very likely dead.

    `now_s` is the store's clock, which is read where it is not given.
    """
    lease_folder = f"{folder}/{WRITING}/{LEASE}"
    held, free = leases.Watch(store, lease_folder).look()
    if held is not None and free:
        return True
    try:
        last_s = max(stat.mtime_s for stat in store.list(lease_folder))
    except (NotFoundError, ValueError):
        try:
            last_s = store.stat(f"{folder}/{WRITING}").mtime_s  # its lease is just being acquired
        except NotFoundError:
            return True
    return (read_store_clock(store, base) if now_s is None else now_s) - last_s > STALE_S


def read_store_clock(store: Store, base: str) -> float:
    """The store's own clock, read by writing an object: no two clocks are ever compared.

    The object is hidden.
    """
    probe = store.temporary_name(base) if base else f"{TEMPORARY}{uuid.uuid4().hex}"
    store.replace(probe, b"")
    try:
        return store.stat(probe).mtime_s
    finally:
        store.delete(probe)
