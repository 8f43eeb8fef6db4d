"""A lease: of all hosts that share a store, one holder at a time.

A lease is a folder; its *generations* are objects `00000001.json`, `00000002.json`, …. The highest
generation is the lease; it is held or released. A process takes the lease by creating the next
generation after a released or expired one; creation is exclusive, so one of several processes
wins. A generation below another one counts no more, so that a slow process, even one that finds
the name of a deleted generation free, cannot take a newer lease.

A holder raises its *beat* every few seconds. A watcher regards a generation as expired when its
beat has not changed for `ttl_s` of the watcher's own monotonic clock: no two clocks are compared.
On the holder's own machine a lease expires as soon as its process has exited.

A holder that was stopped and resumes after its lease was taken finds the higher generation and sets
`lost`. So the work that is done under a lease must still be published exclusively.

Nothing of a lease is synced to disk: a power cut ends its holder as well, and a generation that it
damaged expires by the clock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from bootseer.context_managers import Closing
from bootseer.errors import BootseerError, CorruptDataError, NotFoundError
from bootseer.storage.store import Store
from bootseer.system.processes import boot_id, pid_namespace, start_ticks

BEAT_S = 3.0
TTL_S = 20.0
LIMIT_BYTES = 64 << 10
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Owner:
    """The process that holds a lease, as far as another one on its machine can check it."""

    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    started_ticks: int


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """One generation as it is stored. `info` is the holder's own note, renewed with each beat."""

    generation: int
    token: str
    beat: int
    released: bool
    held_s: float
    owner: Owner
    info: dict[str, Any]


def this_owner() -> Owner:
    """Describe this process. Parts that /proc does not give are empty and match nothing."""
    try:
        boot, namespace = boot_id(), f"pid:[{pid_namespace()}]"
    except OSError:
        boot = namespace = ""
    pid = os.getpid()
    return Owner(os.uname().nodename, boot, namespace, pid, start_ticks(pid))


def surely_dead(owner: Owner) -> bool:
    """True only when the owner lived on this machine, in our PID namespace, and has ended."""
    here = this_owner()
    if not owner.boot_id or not owner.pid_namespace or owner.pid <= 0:
        return False
    if (owner.boot_id, owner.pid_namespace) != (here.boot_id, here.pid_namespace):
        return False
    try:
        return start_ticks(owner.pid) != owner.started_ticks
    except TimeoutError:
        return False  # it lives: the kernel keeps back only what is in execve(2)


class Lease(Closing):
    """An acquired lease, which a thread renews; a context manager that releases it.

    `lost` turns true when another process took it, or when it could not be renewed for as long as
    others wait before they regard it as expired.
    """

    def __init__(
        self, store: Store, folder: str, held: Held, *, beat_s: float, ttl_s: float
    ) -> None:
        self._store = store
        self._folder = folder
        self._held = held
        self._beat_s = beat_s
        self._ttl_s = ttl_s
        self._begun = time.monotonic() - held.held_s
        self._renewed = time.monotonic()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.lost = False

    @property
    def generation(self) -> int:
        return self._held.generation

    def start(self) -> None:
        """Begin renewing in a daemon thread; after a fork the child calls it again."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="lease", daemon=True)
        self._thread.start()

    def pause(self) -> None:
        """Stop renewing without releasing, so that a forked child may `adopt`."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def adopt(self, store: Store | None = None) -> None:
        """Make this process the owner; for a forked child, before its parent exits.

        `store` is the same store as the child has opened it, where it needs its own.
        """
        self._store = store or self._store
        self._lock = threading.Lock()
        self._held = dataclasses.replace(self._held, owner=this_owner())
        self.renew()
        self.start()

    def forget(self) -> None:
        """Leave the lease to the child that adopted it: `close` then does nothing."""
        self.pause()
        self._closed = True

    def note(self, **info: object) -> None:
        """Add to the note that watchers read; it is stored with the next beat."""
        with self._lock:
            self._held = dataclasses.replace(self._held, info={**self._held.info, **info})

    def renew(self) -> None:
        """Store one beat now; sets `lost`, and raises none of the store's errors."""
        with self._lock:
            try:
                if highest(self._store, self._folder) > self._held.generation:
                    self.lost = True
                    return
                held_s = time.monotonic() - self._begun
                self._held = dataclasses.replace(
                    self._held, beat=self._held.beat + 1, held_s=held_s
                )
                self._store.replace(
                    _name(self._folder, self.generation), _encode(self._held), durable=False
                )
                self._renewed = time.monotonic()
            except BootseerError:
                if time.monotonic() - self._renewed > self._ttl_s:
                    self.lost = True

    def _loop(self) -> None:
        while not self._stop.wait(self._beat_s) and not self.lost:
            self.renew()

    def close(self) -> None:
        """Release; without its store the lease expires."""
        self.pause()
        if self._closed:
            return
        self._closed = True
        if self.lost:
            return
        with self._lock:
            released = dataclasses.replace(self._held, released=True, beat=self._held.beat + 1)
            try:
                if highest(self._store, self._folder) == self.generation:
                    name = _name(self._folder, self.generation)
                    self._store.replace(name, _encode(released), durable=False)
            except BootseerError:
                return


class Watch:
    """Watches another process's lease for the moment at which it may be taken."""

    def __init__(
        self,
        store: Store,
        folder: str,
        *,
        ttl_s: float = TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._folder = folder
        self._ttl_s = ttl_s
        self._clock = clock
        self._last: tuple[int, str, int] | None = None
        self._changed = clock()

    def look(self) -> tuple[Held | None, bool]:
        """The lease as it is stored, None when it never was held; and whether it may be taken."""
        generation = highest(self._store, self._folder)
        if generation == 0:
            return None, True
        try:
            held = _decode(
                generation,
                self._store.read(_name(self._folder, generation), limit_bytes=LIMIT_BYTES),
            )
            seen = (generation, held.token, held.beat)
        except NotFoundError:
            held, seen = None, (generation, "", 0)
        except CorruptDataError:
            # Damaged, or being created on a file system without links: judged by the clock alone.
            held, seen = None, (generation, "", 0)
        now = self._clock()
        if seen != self._last:
            self._last, self._changed = seen, now
        expired = now - self._changed >= self._ttl_s
        if held is None:
            return None, expired
        return held, held.released or expired or surely_dead(held.owner)


def try_acquire(
    store: Store,
    folder: str,
    watch: Watch | None = None,
    *,
    info: dict[str, Any] | None = None,
    beat_s: float = BEAT_S,
    ttl_s: float = TTL_S,
) -> Lease | None:
    """Take the lease when it is free, released or, by `watch`, expired; None when it is held.

    `watch` sees that a lease has expired when its `look` was called repeatedly for `ttl_s`. Raises
    the store's errors.
    """
    watch = watch or Watch(store, folder, ttl_s=ttl_s)
    generation = highest(store, folder)
    _, free = watch.look()
    if not free:
        return None
    held = Held(generation + 1, os.urandom(16).hex(), 1, False, 0.0, this_owner(), info or {})
    if not store.create(_name(folder, held.generation), _encode(held), durable=False):
        return None
    try:
        if highest(store, folder) > held.generation:
            # This process slept while ours was taken and deleted, and its name was free again.
            store.delete(_name(folder, held.generation))
            return None
        for old in range(max(1, generation - 8), held.generation - 1):
            store.delete(_name(folder, old))
    except BootseerError:
        # It will not be held. Were it deleted, a process that looked before could take its number.
        with contextlib.suppress(BootseerError):
            released = dataclasses.replace(held, released=True)
            store.replace(_name(folder, held.generation), _encode(released), durable=False)
        raise
    lease = Lease(store, folder, held, beat_s=beat_s, ttl_s=ttl_s)
    lease.start()
    return lease


def highest(store: Store, folder: str) -> int:
    """The highest generation; 0 when this lease never was held."""
    try:
        stems = [s.name.rpartition("/")[2].partition(".")[0] for s in store.list(folder)]
    except NotFoundError:
        return 0
    return max((int(stem) for stem in stems if stem.isascii() and stem.isdigit()), default=0)


def _name(folder: str, generation: int) -> str:
    return f"{folder}/{generation:08d}.json"


def _encode(held: Held) -> bytes:
    body = dataclasses.asdict(held)
    del body["generation"]
    return json.dumps({"version": 1, **body}).encode()


def _decode(generation: int, data: bytes) -> Held:
    """Parse one generation; CorruptDataError for anything but the format."""
    try:
        body = json.loads(data)
        owner = body["owner"]
        return Held(
            generation=generation,
            token=_check_type(body["token"], str),
            beat=_check_type(body["beat"], int),
            released=_check_type(body["released"], bool),
            held_s=float(body["held_s"]),
            owner=Owner(
                host=_check_type(owner["host"], str),
                boot_id=_check_type(owner["boot_id"], str),
                pid_namespace=_check_type(owner["pid_namespace"], str),
                pid=_check_type(owner["pid"], int),
                started_ticks=_check_type(owner["started_ticks"], int),
            ),
            info=_check_type(body["info"], dict),
        )
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptDataError(f"lease generation {generation} is damaged: {error}") from error


def _check_type(value: object, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"expected {kind.__name__}, found {type(value).__name__}")
    return value
