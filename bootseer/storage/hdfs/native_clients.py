"""hdfs-native's clients as a store's options ask for them, and readers that are used again."""

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

try:
    from hdfs_native import Client
except ImportError as missing:
    raise NotSupportedError(
        "hdfs:// needs the package hdfs-native: pip install 'bootseer[hdfs]', or use webhdfs://"
    ) from missing

if TYPE_CHECKING:
    from hdfs_native import FileReader, FileStatus

NAME_SERVICE = "bootseer-namenodes"
# The library retries a dead NameNode for minutes; our own retries know their deadline.
FAILOVER = {
    "dfs.client.failover.max.attempts": "2",
    "dfs.client.failover.sleep.base.millis": "50",
    "dfs.client.failover.sleep.max.millis": "500",
}
# A DataNode that is silent for this long is left for another replica. The library asks it a second
# time before it goes on, so a reader stalls for twice as long at most.
READ_TIMEOUT_MS = 2000
# A pipeline's acknowledgement may well wait for a busy disk.
WRITE_TIMEOUT_MS = 60_000
KEPT_READERS = 64
KEPT_PATHS = 4096
Version = tuple[int, int] | None
"""A file's modification time and length: the library does not give its number."""
# Another host may have put another file in its place, and given it the old one's times.
READER_LIFE_S = 10.0


class Clients:
    """One client for reading and one for all else: they differ in how long they wait."""

    def __init__(self, url: StoreUrl, options: StoreOptions) -> None:
        self._hosts = (*url.hosts, *options.hosts)
        self._user = options.user or url.user
        self._token_file = options.token_file
        self._kerberos = options.auth == "kerberos"
        self._lock = threading.Lock()
        self._clients: dict[int, Client] = {}

    def set_environment(self) -> None:
        """Set what the library reads from the environment alone. Raises UsageError."""
        _set_variable("HADOOP_USER_NAME", self._user)
        _set_variable("HADOOP_TOKEN_FILE_LOCATION", self._token_file)

    def data_client(self) -> Client:
        """The client for data, which leaves a silent DataNode soon."""
        return self._client(READ_TIMEOUT_MS)

    def metadata(self) -> Client:
        """The client for everything else."""
        return self._client(WRITE_TIMEOUT_MS)

    def close(self) -> None:
        """Drop the clients and with them their connections; the next call makes new ones."""
        with self._lock:
            self._clients.clear()

    def _client(self, timeout_ms: int) -> Client:
        with self._lock:
            if timeout_ms not in self._clients:
                self._clients[timeout_ms] = self._connect(timeout_ms)
            return self._clients[timeout_ms]

    def _connect(self, timeout_ms: int) -> Client:
        settings = {**FAILOVER, "dfs.client.socket-timeout": str(timeout_ms)}
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


@dataclasses.dataclass(frozen=True, slots=True)
class PooledReader:
    """A reader that one thread uses until it is given back to its `ReaderPool`."""

    path: str
    reader: FileReader
    made_s: float
    generation: int


class ReaderPool:
    """Readers that know where a file's blocks are, so that not every range asks the NameNode.

    Each goes to the first replica in its own order, so parallel requests spread by having their
    own; after any fault all are dropped, and new ones learn the blocks' new locations.

    A reader goes on with the blocks of the file that it opened, also when another file has taken
    that file's name. So a path has generations: a new one begins when another version is seen, and
    readers of an older one are dropped. A caller that sees the same version before and after a
    read can trust it: no reader is older than the first look.
    """

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._lock = threading.Lock()
        self._generations = itertools.count()
        self._known: dict[str, tuple[int, Version]] = {}
        self._idle: dict[str, list[PooledReader]] = {}

    def note_status(self, path: str, status: FileStatus) -> None:
        """Take note of a path's status, before the caller relies on it."""
        version = (status.modification_time, status.length)
        with self._lock:
            if self._known.get(path, (0, None))[1] != version:
                self._renew(path, version)

    def take(self, path: str, *, fresh: bool) -> PooledReader:
        """A reader of the version that was seen last, or of one that came after it."""
        with self._lock:
            idle = self._idle.get(path, [])
            while idle and not fresh:
                pooled = idle.pop()
                if time.monotonic() - pooled.made_s < READER_LIFE_S:
                    return pooled
            if path not in self._known:
                self._renew(path, None)
            generation = self._known[path][0]
        made_s = time.monotonic()
        return PooledReader(path, self._clients.data_client().read(path), made_s, generation)

    def give_back(self, pooled: PooledReader) -> None:
        """Keep a reader for the next range, unless a newer generation has begun."""
        with self._lock:
            if self._known.get(pooled.path, (-1, None))[0] != pooled.generation:
                return
            if sum(map(len, self._idle.values())) >= KEPT_READERS:
                self._idle.clear()
            self._idle.setdefault(pooled.path, []).append(pooled)

    def drop(self, path: str | None = None) -> None:
        """Drop the readers of a path (None: of all), whether idle or in use."""
        with self._lock:
            for name in list(self._known) if path is None else [path]:
                if name in self._known:
                    self._renew(name, self._known[name][1])

    def _renew(self, path: str, version: Version) -> None:
        """Begin a path's next generation; called with the lock held."""
        self._idle.pop(path, None)
        oldest = put_youngest(self._known, path, (next(self._generations), version), KEPT_PATHS)
        if oldest is not None:
            self._idle.pop(oldest, None)


def _set_variable(name: str, value: str) -> None:
    """Set a variable that the library reads with each connection; UsageError if it differs."""
    if not value:
        return
    current = os.environ.setdefault(name, value)
    if current != value:
        shown = f" says {current}" if name == "HADOOP_USER_NAME" else " names another"
        raise UsageError(
            f"hdfs:// takes one user and token file a process, and {name}{shown}; "
            "unset it, or use webhdfs://"
        )


def _name_service(hosts: tuple[str, ...]) -> dict[str, str]:
    names = [f"nn{n}" for n in range(1, len(hosts) + 1)]
    settings = {f"dfs.ha.namenodes.{NAME_SERVICE}": ",".join(names)}
    for name, host in zip(names, hosts, strict=True):
        port = "" if ":" in host else f":{DEFAULT_PORTS['hdfs']}"
        settings[f"dfs.namenode.rpc-address.{NAME_SERVICE}.{name}"] = host + port
    return settings
