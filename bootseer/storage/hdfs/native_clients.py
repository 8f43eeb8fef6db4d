"""hdfs-native's clients as a store's options ask for them, made on first use."""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
import time
from typing import TYPE_CHECKING

from bootseer.errors import NotSupportedError, UsageError
from bootseer.storage.options import StoreOptions
from bootseer.storage.urls import DEFAULT_PORTS, StoreUrl
from bootseer.system.lru import put_youngest

if TYPE_CHECKING:
    from hdfs_native import Client, FileReader, FileStatus

NAME_SERVICE = "bootseer-namenodes"
# The library retries a dead NameNode for minutes; our own retries know their deadline.
FAILOVER = {
    "dfs.client.failover.max.attempts": "2",
    "dfs.client.failover.sleep.base.millis": "50",
    "dfs.client.failover.sleep.max.millis": "500",
}
# A DataNode that says nothing for this long is left for another replica. The library asks it a
# second time before it goes on, so a reader stalls for twice as long at most.
SILENT_MS = 2000
# A pipeline's acknowledgement may well wait for a busy disk.
WRITE_SILENT_MS = 60_000
KEPT_READERS = 64
KEPT_PATHS = 4096
Seen = tuple[int, int] | None
# Another host may have put another file in its place, and given it the old one's times.
READER_LIFE_S = 10.0


class Clients:
    """One client for reading and one for all else: they differ in how long they wait."""

    def __init__(self, url: StoreUrl, options: StoreOptions) -> None:
        try:
            import hdfs_native  # noqa: F401
        except ImportError as error:
            raise NotSupportedError(
                "hdfs:// needs the package hdfs-native: pip install 'bootseer[hdfs]', "
                "or use webhdfs://"
            ) from error
        self._hosts = (*url.hosts, *options.hosts)
        self._adopt("HADOOP_USER_NAME", options.user or url.user)
        self._adopt("HADOOP_TOKEN_FILE_LOCATION", options.token_file)
        self._kerberos = options.auth == "kerberos"
        self._lock = threading.Lock()
        self._made: dict[int, Client] = {}

    def reading(self) -> Client:
        """The client for data; impatient."""
        return self._client(SILENT_MS)

    def metadata(self) -> Client:
        """The client for everything else."""
        return self._client(WRITE_SILENT_MS)

    def close(self) -> None:
        """Drop the clients and with them their connections; the next call makes new ones."""
        with self._lock:
            self._made.clear()

    def _client(self, silent_ms: int) -> Client:
        with self._lock:
            if silent_ms not in self._made:
                self._made[silent_ms] = self._make(silent_ms)
            return self._made[silent_ms]

    def _make(self, silent_ms: int) -> Client:
        from hdfs_native import Client

        settings = {**FAILOVER, "dfs.client.socket-timeout": str(silent_ms)}
        if self._kerberos:
            settings["hadoop.security.authentication"] = "kerberos"
        if len(self._hosts) > 1:
            return Client(f"hdfs://{NAME_SERVICE}", settings | _name_service(self._hosts))
        [host] = self._hosts
        try:
            return Client(f"hdfs://{host}", settings)
        except RuntimeError as error:
            # A name without a port is a name service, where a configuration folder knows it.
            if ":" in host or "No NameNode hosts found" not in str(error):
                raise
        return Client(f"hdfs://{host}:{DEFAULT_PORTS['hdfs']}", settings)

    @staticmethod
    def _adopt(variable: str, value: str) -> None:
        """The library reads these from the environment alone, and anew with each connection."""
        if not value:
            return
        there = os.environ.setdefault(variable, value)
        if there != value:
            shown = f" says {there}" if variable == "HADOOP_USER_NAME" else " names another"
            raise UsageError(
                f"hdfs:// takes one user and token file a process, and {variable}{shown}; "
                "unset it, or use webhdfs://"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Lent:
    """A reader that nobody else uses; `Readers.give` takes it back."""

    path: str
    reader: FileReader
    made_s: float
    generation: int


class Readers:
    """Readers that know where a file's blocks are, so that not every range asks the NameNode.

    Each goes to the first replica of its own order, so parallel requests spread by having their
    own; after any fault they are all forgotten, and new ones learn the new places.

    A reader goes on with the blocks of the file that it found, also when another file was put in
    that one's place. So a path has generations: a new one begins when another status is seen, and
    readers of an older one are dropped. Whoever sees the same status before and after a read may
    thus trust it: no reader is older than the first look.
    """

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._lock = threading.Lock()
        self._generations = itertools.count()
        self._known: dict[str, tuple[int, Seen]] = {}
        self._idle: dict[str, list[Lent]] = {}

    def saw(self, path: str, status: FileStatus) -> None:
        """Take note of what the NameNode says of a path. To be called before anyone relies on it.

        The library does not tell a file's number: time and length are all there is.
        """
        seen = (status.modification_time, status.length)
        with self._lock:
            if self._known.get(path, (0, None))[1] != seen:
                self._renew(path, seen)

    def take(self, path: str, *, fresh: bool) -> Lent:
        """A reader of the file that was last seen, or of one that came after it."""
        with self._lock:
            idle = self._idle.get(path, [])
            while idle and not fresh:
                lent = idle.pop()
                if time.monotonic() - lent.made_s < READER_LIFE_S:
                    return lent
            if path not in self._known:
                self._renew(path, None)
            generation = self._known[path][0]
        made_s = time.monotonic()
        return Lent(path, self._clients.reading().read(path), made_s, generation)

    def give(self, lent: Lent) -> None:
        """Keep a reader for the next range, unless a newer generation has begun."""
        with self._lock:
            if self._known.get(lent.path, (-1, None))[0] != lent.generation:
                return
            if sum(len(v) for v in self._idle.values()) >= KEPT_READERS:
                self._idle.clear()
            self._idle.setdefault(lent.path, []).append(lent)

    def forget(self, path: str | None = None) -> None:
        """Keep no reader that was made until now, whether idle or in use."""
        with self._lock:
            for name in list(self._known) if path is None else [path]:
                if name in self._known:
                    self._renew(name, self._known[name][1])

    def _renew(self, path: str, seen: Seen) -> None:
        """Begin a path's next generation; called with the lock held."""
        self._idle.pop(path, None)
        oldest = put_youngest(self._known, path, (next(self._generations), seen), KEPT_PATHS)
        if oldest is not None:
            self._idle.pop(oldest, None)


def _name_service(hosts: tuple[str, ...]) -> dict[str, str]:
    names = [f"nn{n}" for n in range(1, len(hosts) + 1)]
    out = {f"dfs.ha.namenodes.{NAME_SERVICE}": ",".join(names)}
    for name, host in zip(names, hosts, strict=True):
        port = "" if ":" in host else f":{DEFAULT_PORTS['hdfs']}"
        out[f"dfs.namenode.rpc-address.{NAME_SERVICE}.{name}"] = host + port
    return out
