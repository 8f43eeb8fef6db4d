"""A version being written: a temporary folder that becomes a version at once, or vanishes.

Beside the data it holds `writing/`: `lease/` (what is being put, and whether somebody still
writes), `open/` (an empty folder: the draft has not been taken away from its writer) and records
of what is complete. A draft whose writer is gone may be taken over by who puts the same thing
again; the one who succeeds in renaming it has it.
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
    StoreUnavailableError,
    UsageError,
)
from bootseer.storage import lease as leases
from bootseer.storage.store import Store
from bootseer.stripedfs.format.json_fields import digest_of
from bootseer.stripedfs.format.manifest import Kind, Link, Pointer
from bootseer.stripedfs.format.pointer import (
    CURRENT,
    MANIFEST,
    Version,
    current,
    folder_of,
    manifest_of,
    pointed,
)
from bootseer.stripedfs.write.stripe_pool import replace_surely, surely

WRITING = "writing"
LEASE = "lease"
OPEN = "open"
BEAT_S = 10.0
STALE_S = 60.0


class Draft:
    """A temporary folder of one checkpoint; as a context manager it discards what is unpublished.

    `token` names it to other processes that shall write into it too (`join`). `name` may be set
    to another one until it is published: it is published there.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        folder: str,
        note: dict[str, Any] | None,
        *,
        adopted: bool = False,
    ) -> None:
        self.store = store
        self.name = name
        self.folder = folder
        self.adopted = adopted
        self._open = note is not None  # who joined neither publishes nor removes
        self._lease: leases.Lease | None = None
        self._error: BaseException | None = None
        self._begun_s = time.monotonic()
        self._leasing: threading.Thread | None = None
        if note is not None:
            # Beside the first stripes: a small object can take a store half a second.
            self._leasing = threading.Thread(target=self._acquire, args=(note,), daemon=True)
            self._leasing.start()

    @classmethod
    def begin(cls, store: Store, name: str, note: dict[str, Any]) -> Draft:
        """Make a fresh one. `note` is what `adopt` will compare."""
        folder = store.temporary_name(folder_of(name))
        store.mkdir(f"{folder}/{WRITING}/{OPEN}")
        return cls(store, name, folder, note)

    @classmethod
    def adopt(cls, store: Store, name: str, note: dict[str, Any]) -> Draft | None:
        """Take over a draft of the same note whose writer is gone; None when there is none."""
        base = folder_of(name)
        for folder in temporaries(store, base):
            if read_note(store, folder) != note or not idle(store, base, folder):
                continue
            ours = store.temporary_name(base)
            try:
                store.rename(folder, ours)
                store.delete_tree(f"{ours}/{WRITING}/{LEASE}")
            except (NotFoundError, BusyError):
                continue  # another was quicker
            return cls(store, name, ours, note, adopted=True)
        return None

    @classmethod
    def join(cls, store: Store, name: str, token: str) -> Draft:
        """Write into a draft that another process began and will publish."""
        if "/" in token or not token.startswith("."):
            raise UsageError(f"{token!r} is no token of a checkpoint being written")
        folder = f"{folder_of(name)}/{token}"
        store.stat(f"{folder}/{WRITING}/{OPEN}")
        return cls(store, name, folder, None)

    def _acquire(self, note: dict[str, Any]) -> None:
        folder = f"{self.writing}/{LEASE}"

        def acquire() -> None:
            # Nobody else knows the folder: what stands there is of a try whose answer was lost.
            watch = leases.Watch(self.store, folder, ttl_s=0.0)
            self._lease = leases.try_acquire(
                self.store, folder, watch, info=note, beat_s=BEAT_S, ttl_s=STALE_S
            )

        try:
            surely(acquire)
        except BaseException as error:  # told when the draft is published
            self._error = error

    def _leased(self) -> leases.Lease | None:
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

    def _check(self) -> None:
        """Raise BusyError when another process took this draft over: we were stopped too long."""
        lease = self._leased()
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
        self, kind: Kind, size_bytes: int, manifest: bytes, *, beside: bool = False
    ) -> Version:
        """Write the manifest, give the folder its version's name, and point to it.

        Of several who publish at once the last pointer wins; every version stays whole.
        """
        name = f"{self.folder}/{MANIFEST}"
        replace_surely(self.store, name, manifest)
        found = self.store.stat(name).size_bytes
        if found != len(manifest):
            raise StoreUnavailableError(
                f"{name} in {self.store.url} holds {found} of {len(manifest)} bytes; put it again"
            )
        self._check()
        self._stop_lease()
        self.store.delete_tree(self.writing)  # without a note nobody can take it over any more
        about = (version_name(), size_bytes, len(manifest), digest_of(manifest))
        pointer = Pointer(kind, *about, beside=beside)
        version = Version(f"{folder_of(self.name)}/{pointer.version}", pointer)
        base = folder_of(self.name)
        if self._base != base:
            self.store.mkdir(base)
        self._rename(version)
        self._open = False
        self._point(version)
        if self._base != base:
            self.remove_base()
        return version

    def _rename(self, version: Version) -> None:
        try:
            self.store.rename(self.folder, version.folder)
        except NotFoundError:
            # A request repeated after its first answer was lost finds its own work done.
            self._check_there(version)

    def _point(self, version: Version) -> None:
        """Name it as the current one; a collector that removes it meanwhile leaves the last one."""
        try:
            before = self._before()
            self._check_there(version)
            replace_surely(self.store, self._pointer, version.pointer.encode())
        except BootseerError:
            self._remove_unless_current(version)
            raise
        try:
            self._check_there(version)
        except BusyError:
            self._point_back(version, before)
            raise
        except BootseerError:
            return  # it is published, and was there a moment ago

    @property
    def _pointer(self) -> str:
        return f"{folder_of(self.name)}/{CURRENT}"

    def _before(self) -> Version | Link | None:
        try:
            return pointed(self.store, self.name)
        except CorruptDataError:
            return None  # it is replaced now

    def _check_there(self, version: Version) -> None:
        """Raise BusyError when the version was removed, as by a collector without grace."""
        try:
            self.store.stat(f"{version.folder}/{MANIFEST}")
        except NotFoundError as error:
            raise BusyError(
                f"{version.folder} in {self.store.url} was collected while it was published; "
                "put it again, and give gc a grace period"
            ) from error

    def _point_back(self, version: Version, before: Version | Link | None) -> None:
        """The pointer must not name what is gone, unless it is another's by now."""
        try:
            found = current(self.store, self.name)
            if found is None or found.folder != version.folder:
                return
            if isinstance(before, Link):
                self.store.replace(self._pointer, before.encode())
                return
            if before is None or not self._whole(before):
                self.store.delete(self._pointer)
                return
            self.store.replace(self._pointer, before.pointer.encode())
            if not self._whole(before):  # collected just then, for nothing pointed to it
                self.store.delete(self._pointer)
        except BootseerError:
            return  # what was removed is the error to tell

    def _whole(self, version: Version) -> bool:
        try:
            manifest_of(self.store, version)
        except (NotFoundError, CorruptDataError):
            return False
        return True

    def _remove_unless_current(self, version: Version) -> None:
        try:
            found = current(self.store, self.name)
            if found is None or found.folder != version.folder:
                self.store.delete_tree(version.folder)
        except BootseerError:
            return  # who cannot be asked may point to it already: left to gc

    def keep(self) -> None:
        """Leave it to be taken over by who puts the same again."""
        self._open = False
        lease = self._leased()
        if lease is not None:
            lease.close()

    def discard(self) -> None:
        """Remove it, as far as the store can be reached; twice is safe, as after `publish`."""
        if not self._open:
            return
        self._open = False
        self._stop_lease()
        try:
            self.store.delete_tree(self.folder)
        except BootseerError:
            return  # gc finds it

    def remove_base(self) -> None:
        """Remove the folder of the checkpoint that it was begun in if nothing else is in it."""
        try:
            self.store.delete(self._base)
        except BootseerError:
            return  # there is

    @property
    def _base(self) -> str:
        return self.folder.rpartition("/")[0]

    def _stop_lease(self) -> None:
        lease = self._leased()
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


def version_name() -> str:
    """A fresh name; names sort by time as far as clocks agree, which nothing relies on."""
    return f"v-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{uuid.uuid4().hex[:8]}"


def temporaries(store: Store, base: str) -> Iterator[str]:
    """Folders of drafts, finished by nobody yet."""
    try:
        found = [stat.name for stat in store.temporaries(base) if stat.is_folder]
    except NotFoundError:
        return
    yield from found


def read_note(store: Store, folder: str) -> dict[str, Any] | None:
    """What a draft says it is; None for one without a readable note."""
    held, _ = leases.Watch(store, f"{folder}/{WRITING}/{LEASE}").look()
    return held.info if held is not None else None


def idle(store: Store, base: str, folder: str, *, now_s: float | None = None) -> bool:
    """Whether a draft's writer is surely or very likely gone; the store is asked for no `now_s`."""
    lease_folder = f"{folder}/{WRITING}/{LEASE}"
    held, free = leases.Watch(store, lease_folder).look()
    if held is not None and free:
        return True
    try:
        last_s = max(stat.mtime_s for stat in store.list(lease_folder))
    except (NotFoundError, ValueError):
        try:
            last_s = store.stat(f"{folder}/{WRITING}").mtime_s  # its lease is just being made
        except NotFoundError:
            return True
    return (store_now_s(store, base) if now_s is None else now_s) - last_s > STALE_S


def store_now_s(store: Store, base: str) -> float:
    """The store's own clock, asked by writing an object: no two clocks are ever compared."""
    probe = store.temporary_name(base) if base else f".tmp-{uuid.uuid4().hex}"  # hidden as well
    store.replace(probe, b"")
    try:
        return store.stat(probe).mtime_s
    finally:
        store.delete(probe)
