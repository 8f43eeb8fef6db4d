"""Calls to the NameNode that move no data: status, listings, block locations, renames, space."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bootseer.errors import (
    BootseerError,
    BusyError,
    NoSpaceError,
    NotFoundError,
    NotSupportedError,
    StoreUnavailableError,
)
from bootseer.storage.retry import retry_call
from bootseer.storage.store import TEMPORARY, Stat
from bootseer.storage.webhdfs.client import Client
from bootseer.storage.webhdfs.protocol import (
    Block,
    Parameters,
    expecting_fields,
    is_listing_of_file,
    parse_block_locations,
    parse_file_status,
    parse_listing,
    parse_live_datanodes,
    parse_located_blocks,
    parse_remaining_bytes,
    parse_remaining_quota,
)

PROBES = 8
NAMENODE_INFO = "Hadoop:service=NameNode,name=NameNodeInfo"


class Namespace:
    """The names below one folder of HDFS; any number of threads may use it."""

    def __init__(self, client: Client) -> None:
        self._client, self._url = client, client.url
        self._lists_in_parts = True  # LISTSTATUS_BATCH, of Hadoop 2.8 and later
        self._has_block_locations = True  # GET_BLOCK_LOCATIONS, which is private to Hadoop

    def _call(
        self,
        method: str,
        path: str,
        op: str,
        parameters: Parameters,
        what: str,
        *,
        retry_s: float | None = None,
    ) -> dict[str, Any]:
        return self._client.namenodes.call(method, path, op, parameters, what, retry_s=retry_s)

    def stat(self, name: str) -> Stat:
        """Describe one object or folder."""
        what = f"look at {name} in {self._url}"
        response = self._call("GET", self._client.path(name), "GETFILESTATUS", [], what)
        with expecting_fields(what):
            return parse_file_status(name, response["FileStatus"])

    def children(self, folder: str) -> Iterator[Stat]:
        """Direct children, hidden ones included."""
        path = self._client.path(folder) if folder else self._client.root
        prefix = f"{folder}/" if folder else ""
        what = f"list {folder or 'the root'} of {self._url}"
        after: Parameters = []
        while self._lists_in_parts:  # a huge folder comes in several responses
            try:
                response = self._call("GET", path, "LISTSTATUS_BATCH", after, what)
            except NotSupportedError:
                self._lists_in_parts = False
                break
            with expecting_fields(what):
                part = response["DirectoryListing"]["partialListing"]
                more = response["DirectoryListing"].get("remainingEntries")
                if more:
                    last = part["FileStatuses"]["FileStatus"][-1]["pathSuffix"]
                    after = [("startAfter", last)]
                entries = _entries(part, prefix, what)
            yield from entries
            if not more:
                return
        response = self._call("GET", path, "LISTSTATUS", [], what)
        with expecting_fields(what):
            entries = _entries(response, prefix, what)
        yield from entries

    def blocks(self, name: str) -> list[Block]:
        """An object's blocks in order; none where the server cannot say."""
        client = self._client
        path, what = client.path(name), f"find the blocks of {name} in {self._url}"
        if self._has_block_locations:
            try:
                response = self._call("GET", path, "GET_BLOCK_LOCATIONS", [], what)
                with expecting_fields(what):
                    blocks = parse_located_blocks(response, tls=client.namenodes.tls)
                client.learn_addresses(d for block in blocks for d in block.datanodes)
                return blocks
            except NotSupportedError:
                self._has_block_locations = False
        try:
            response = self._call("GET", path, "GETFILEBLOCKLOCATIONS", [], what)
        except NotSupportedError:
            return []
        with expecting_fields(what):
            return parse_block_locations(response)

    def datanodes(self) -> list[str]:
        """DataNodes in service: by the NameNode's own list, or by where it sends writers."""
        namenodes, what = self._client.namenodes, f"find the DataNodes of {self._url}"
        self._call("GET", "/", "GETFILESTATUS", [], what)  # finds the active NameNode
        try:
            beans = namenodes.beans(NAMENODE_INFO, what)
            datanodes = parse_live_datanodes(beans, tls=namenodes.tls)
        except BootseerError:
            datanodes = []  # not every cluster shows this page to every user
        if datanodes:
            self._client.learn_addresses(datanodes)
            return [datanode.web for datanode in datanodes]
        probe = f"{self._client.root}/{TEMPORARY}"
        origins = {
            namenodes.redirect("PUT", probe, "CREATE", [], what).origin for _ in range(PROBES)
        }
        return sorted(origin.authority for origin in origins) if len(origins) > 1 else []

    def find_lack_of_space(self, name: str, what: str) -> NoSpaceError | None:
        """Whether a quota or full DataNodes explain that a stream to `name` ended early.

        DataNodes of Hadoop 2 answer "201 Created" then, and keep the bytes that they have.
        """
        path = self._client.path(name)
        try:
            response = self._call("GET", path, "GETFILESTATUS", [], what, retry_s=0)
            with expecting_fields(what):
                block = int(response["FileStatus"]["blockSize"])
                needed = block * int(response["FileStatus"]["replication"])
            folder = path.rpartition("/")[0]
            while folder:
                left = parse_remaining_quota(self._usage(folder, what))
                if left is not None and left < needed:
                    return NoSpaceError(
                        f"cannot {what}: the space quota of {folder} leaves {left} bytes and the"
                        f" next block needs {needed}; free space, raise the quota or write smaller"
                        " blocks"
                    )
                folder = folder.rpartition("/")[0]
            room = parse_remaining_bytes(self._client.namenodes.beans(NAMENODE_INFO, what))
        except BootseerError:
            return None
        if room is None or room >= block:
            return None
        return NoSpaceError(
            f"cannot {what}: no DataNode has room for a block of {block} bytes; free space"
        )

    def _usage(self, folder: str, what: str) -> dict[str, Any]:
        try:  # cheap, where the server has it
            response = self._call("GET", folder, "GETQUOTAUSAGE", [], what)
        except NotSupportedError:
            response = self._call("GET", folder, "GETCONTENTSUMMARY", [], what)
        usage: dict[str, Any] = response.get("QuotaUsage") or response.get("ContentSummary") or {}
        return usage

    def move(self, old: str, new: str, *, replace: bool, version: str) -> None:
        """RENAME in its atomic form; BusyError when the name is taken and not to be replaced.

        The plain form would move an object *into* a folder of the new name. `version` is the
        object's: it shows whether an attempt whose answer was lost has renamed it after all.
        """
        what = f"rename {old} to {new} in {self._url}"
        source, option = self._client.path(old), "OVERWRITE" if replace else "NONE"
        parameters = [("destination", self._client.path(new)), ("renameoptions", option)]
        self._make_parent(new)
        attempts = 0

        def once() -> None:
            nonlocal attempts
            attempts += 1
            try:
                response = self._call("PUT", source, "RENAME", parameters, what, retry_s=0)
            except (NotFoundError, BusyError):
                if attempts > 1 and version and self.stat(new).version == version:
                    return
                raise
            if response.get("boolean") is False:
                raise BusyError(f"cannot {what}: HDFS refuses, as the name is taken")

        retry_call(once, retry_s=self._client.options.retry_s)

    def delete(self, name: str, *, recursive: str, retry_s: float | None = None) -> bool:
        """Remove an object or folder; False when there was none."""
        path, what = self._client.path(name), f"delete {name} in {self._url}"
        parameters = [("recursive", recursive)]
        response = self._call("DELETE", path, "DELETE", parameters, what, retry_s=retry_s)
        return response.get("boolean") is not False

    def mkdir(self, folder: str) -> None:
        """Make a folder and its parents."""
        what = f"make the folder {folder} in {self._url}"
        response = self._call("PUT", self._client.data_path(folder), "MKDIRS", [], what)
        if response.get("boolean") is False:
            raise StoreUnavailableError(f"cannot {what}: HDFS refuses")

    def _make_parent(self, name: str) -> None:
        folder = name.rpartition("/")[0]
        if folder:
            self.mkdir(folder)
        elif self._client.root != "/":
            what = f"make the folder {self._url}"
            self._call("PUT", self._client.root, "MKDIRS", [], what)


def _entries(listing: dict[str, Any], prefix: str, what: str) -> list[Stat]:
    if is_listing_of_file(listing):
        raise NotFoundError(f"cannot {what}: it is an object, not a folder")
    return list(parse_listing(listing, prefix))
