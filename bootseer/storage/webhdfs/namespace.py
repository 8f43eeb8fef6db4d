"""The names in one folder of HDFS: everything that moves no data."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

from bootseer.errors import (
    BootseerError,
    BusyError,
    NoSpaceError,
    NotFoundError,
    NotSupportedError,
    StoreUnavailableError,
)
from bootseer.storage.http.pool import Pool
from bootseer.storage.options import StoreOptions
from bootseer.storage.request_control import Attempt
from bootseer.storage.retry import retrying
from bootseer.storage.store import Stat, check_name
from bootseer.storage.urls import StoreUrl
from bootseer.storage.webhdfs.namenodes import NameNodes, Parameters
from bootseer.storage.webhdfs.protocol import (
    Block,
    Datanode,
    block_locations,
    file_stat,
    is_object_listing,
    listed,
    live_datanodes,
    located_blocks,
    quota_left,
    room_left,
    understood,
)

HIDDEN = "."
TEMPORARY = ".tmp-"
PROBES = 8
NAMENODE_INFO = "Hadoop:service=NameNode,name=NameNodeInfo"


class Folder:
    """Names below the folder that a store's URL names, on one cluster.

    `names` are its NameNodes, `pool` the connections to its DataNodes.
    """

    def __init__(self, at: StoreUrl, options: StoreOptions) -> None:
        self.url = at.shown
        self.options = options
        self.names = NameNodes(at, options)
        self.pool = Pool(connect_s=options.connect_s, ca_file=options.ca_file)
        self._root = "/" + at.path.strip("/")
        self._lock = threading.Lock()
        self._data_ports: dict[str, str] = {}
        self._lists_in_parts = True
        self._locates_privately = True

    def close(self) -> None:
        self.pool.close()
        self.names.close()

    def path(self, name: str) -> str:
        """The absolute path of a name; UsageError when it is none."""
        return f"{self._root.rstrip('/')}/{check_name(name)}"

    def data_path(self, name: str) -> str:
        """The path of an object that DataNodes are to be asked for.

        Those of Hadoop 2 decode a path twice, so "a%41" would silently be the object "aA"; and
        a "+" makes them lose letters beyond ASCII.
        """
        path = self.path(name)
        if "%" in path or ("+" in path and not path.isascii()):
            raise NotSupportedError(
                f"{name} in {self.url} has a % (or a + beside letters beyond ASCII) in its path,"
                " which DataNodes misread over WebHDFS; use hdfs:// or another name"
            )
        return path

    def attempt(self) -> Attempt:
        """A try that nobody else watches."""
        return Attempt(stall_s=self.options.stall_s)

    def data_address(self, web: str) -> str:
        """Where a DataNode serves blocks, by which `excludedatanodes` knows it."""
        return self._data_ports.get(web, web)

    def stat(self, name: str) -> Stat:
        what = f"look at {name} in {self.url}"
        found = self.names.call("GET", self.path(name), "GETFILESTATUS", [], what)
        with understood(what):
            return file_stat(name, found["FileStatus"])

    def children(self, folder: str) -> Iterator[Stat]:
        """Direct children, hidden ones included."""
        path = self.path(folder) if folder else self._root
        prefix = f"{folder}/" if folder else ""
        what = f"list {folder or 'the root'} of {self.url}"
        after: Parameters = []
        while self._lists_in_parts:  # Hadoop 2.8 and later: a huge folder comes in pieces
            try:
                found = self.names.call("GET", path, "LISTSTATUS_BATCH", after, what)
            except NotSupportedError:
                self._lists_in_parts = False
                break
            with understood(what):
                part = found["DirectoryListing"]["partialListing"]
                more = found["DirectoryListing"].get("remainingEntries")
                if more:
                    last = part["FileStatuses"]["FileStatus"][-1]["pathSuffix"]
                    after = [("startAfter", last)]
                entries = _entries(part, prefix, what)
            yield from entries
            if not more:
                return
        found = self.names.call("GET", path, "LISTSTATUS", [], what)
        with understood(what):
            entries = _entries(found, prefix, what)
        yield from entries

    def blocks(self, name: str) -> list[Block]:
        """An object's blocks in order; none where the server cannot tell."""
        path, what = self.path(name), f"find the blocks of {name} in {self.url}"
        if self._locates_privately:
            try:
                found = self.names.call("GET", path, "GET_BLOCK_LOCATIONS", [], what)
                with understood(what):
                    blocks = located_blocks(found, tls=self.names.tls)
                self._learn([d for b in blocks for d in b.datanodes])
                return blocks
            except NotSupportedError:
                self._locates_privately = False
        try:
            found = self.names.call("GET", path, "GETFILEBLOCKLOCATIONS", [], what)
        except NotSupportedError:
            return []
        with understood(what):
            return block_locations(found)

    def datanodes(self) -> list[str]:
        """DataNodes in service: the NameNode's own list, or whom it sends writers to."""
        what = f"find the DataNodes of {self.url}"
        self.names.call("GET", "/", "GETFILESTATUS", [], what)  # finds the active NameNode
        try:
            found = live_datanodes(self.names.beans(NAMENODE_INFO, what), tls=self.names.tls)
        except BootseerError:
            found = []  # not every cluster shows this page to every user
        if found:
            self._learn(found)
            return [d.web for d in found]
        seen = {
            self.names.redirect("PUT", f"{self._root}/{TEMPORARY}", "CREATE", [], what).origin
            for _ in range(PROBES)
        }
        return sorted(o.authority for o in seen) if len(seen) > 1 else []

    def lack_of_room(self, name: str, what: str) -> NoSpaceError | None:
        """Whether a quota or full DataNodes explain that a stream to `name` ended early.

        DataNodes of Hadoop 2 say "201 Created" then, and keep what they have.
        """
        try:
            status = self.names.call("GET", self.path(name), "GETFILESTATUS", [], what, retry_s=0)
            with understood(what):
                block = int(status["FileStatus"]["blockSize"])
                needed = block * int(status["FileStatus"]["replication"])
            folder = self.path(name).rpartition("/")[0]
            while folder:
                left = quota_left(self._usage(folder, what))
                if left is not None and left < needed:
                    return NoSpaceError(
                        f"cannot {what}: the space quota of {folder} leaves {left} bytes and the"
                        f" next block needs {needed}; free space, raise the quota or write smaller"
                        " blocks"
                    )
                folder = folder.rpartition("/")[0]
            room = room_left(self.names.beans(NAMENODE_INFO, what))
        except BootseerError:
            return None
        if room is None or room >= block:
            return None
        return NoSpaceError(
            f"cannot {what}: no DataNode has room for a block of {block} bytes; free space"
        )

    def _usage(self, folder: str, what: str) -> dict[str, Any]:
        try:  # cheap, where the server has it
            found = self.names.call("GET", folder, "GETQUOTAUSAGE", [], what)
        except NotSupportedError:
            found = self.names.call("GET", folder, "GETCONTENTSUMMARY", [], what)
        usage: dict[str, Any] = found.get("QuotaUsage") or found.get("ContentSummary") or {}
        return usage

    def move(self, old: str, new: str, *, replace: bool, version: str) -> None:
        """RENAME in its atomic form; BusyError when the name is taken and not to be replaced.

        The plain form would move an object *into* a folder of the new name. `version` tells
        whether a try whose answer was lost did it after all.
        """
        what = f"rename {old} to {new} in {self.url}"
        option = "OVERWRITE" if replace else "NONE"
        parameters = [("destination", self.path(new)), ("renameoptions", option)]
        self._make_parent(new)
        tries = 0

        def once() -> None:
            nonlocal tries
            tries += 1
            try:
                found = self.names.call(
                    "PUT", self.path(old), "RENAME", parameters, what, retry_s=0
                )
            except (NotFoundError, BusyError):
                if tries > 1 and version and self.stat(new).version == version:
                    return
                raise
            if found.get("boolean") is False:
                raise BusyError(f"cannot {what}: HDFS refuses, as the name is taken")

        retrying(once, retry_s=self.options.retry_s)

    def delete(self, name: str, *, recursive: str, retry_s: float | None = None) -> bool:
        """Remove an object or folder; False when there was none."""
        found = self.names.call(
            "DELETE", self.path(name), "DELETE", [("recursive", recursive)],
            f"delete {name} in {self.url}", retry_s=retry_s,
        )  # fmt: skip
        return found.get("boolean") is not False

    def mkdir(self, folder: str) -> None:
        what = f"make the folder {folder} in {self.url}"
        found = self.names.call("PUT", self.data_path(folder), "MKDIRS", [], what)
        if found.get("boolean") is False:
            raise StoreUnavailableError(f"cannot {what}: HDFS refuses")

    def _make_parent(self, name: str) -> None:
        folder = name.rpartition("/")[0]
        if folder:
            self.mkdir(folder)
        elif self._root != "/":
            self.names.call("PUT", self._root, "MKDIRS", [], f"make the folder {self.url}")

    def _learn(self, datanodes: Sequence[Datanode]) -> None:
        with self._lock:
            self._data_ports.update(datanodes)


def _entries(found: dict[str, Any], prefix: str, what: str) -> list[Stat]:
    if is_object_listing(found):
        raise NotFoundError(f"cannot {what}: it is an object, not a folder")
    return list(listed(found, prefix))
