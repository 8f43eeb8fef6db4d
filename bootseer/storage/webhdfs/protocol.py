"""WebHDFS's JSON and addresses, to and from our records. Pure; see Hadoop's "WebHDFS REST API"."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlencode

from bootseer.errors import StoreUnavailableError
from bootseer.storage.hdfs.remote_exceptions import RemoteException
from bootseer.storage.http.responses import Target, origin_of
from bootseer.storage.store import BlockLocation, Stat
from bootseer.storage.urls import quote_path

PREFIX = "/webhdfs/v1"
REUSABLE = ("user.name", "doas", "delegation", "namenoderpcaddress")
"""Parameters of a redirect that name user and cluster: they serve other requests as well."""

Parameters = list[tuple[str, str]]


class Datanode(NamedTuple):
    """A DataNode: where it serves WebHDFS, and where it serves blocks, each "host:port"."""

    web: str
    data: str


class Block(NamedTuple):
    """One block of a file, `corrupt` when every replica of it is known to be damaged."""

    offset: int
    length: int
    datanodes: tuple[Datanode, ...]
    corrupt: bool


def parse_json(raw: bytes, what: str) -> dict[str, Any]:
    """A JSON object; StoreUnavailableError when it is none. An empty body is an empty object."""
    try:
        value = json.loads(raw) if raw.strip() else {}
    except ValueError as error:
        raise StoreUnavailableError(f"cannot {what}: the answer is not JSON") from error
    if not isinstance(value, dict):
        raise StoreUnavailableError(f"cannot {what}: the answer is not a JSON object")
    return value


@contextlib.contextmanager
def expecting_fields(what: str) -> Iterator[None]:
    """Raise StoreUnavailableError for a response that lacks fields which WebHDFS's have."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise StoreUnavailableError(f"cannot {what}: the answer is none of WebHDFS's") from error


def parse_remote_exception(raw: bytes) -> RemoteException | None:
    """The RemoteException in a response's body; None when there is none."""
    try:
        fields = json.loads(raw)["RemoteException"]
        kind = str(fields.get("exception") or "").rpartition(".")[2].rpartition("$")[2]
        return RemoteException(kind, str(fields.get("message") or ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def parse_file_status(name: str, status: dict[str, Any]) -> Stat:
    """A FileStatus as a `Stat`; `fileId` is missing from HttpFS and old servers."""
    folder = status.get("type") == "DIRECTORY"
    size = 0 if folder else int(status["length"])
    modified = int(status["modificationTime"])
    version = "" if folder else f"{status.get('fileId', 0)}:{modified}:{size}"
    return Stat(name, size, modified / 1000, folder, version)


def parse_listing(listing: dict[str, Any], prefix: str) -> Iterator[Stat]:
    """The entries of a FileStatuses object; one without a name is the folder itself."""
    for entry in listing["FileStatuses"]["FileStatus"]:
        if suffix := entry.get("pathSuffix"):
            yield parse_file_status(prefix + suffix, entry)


def is_listing_of_file(listing: dict[str, Any]) -> bool:
    """Whether a listing is of a file, which lists as itself."""
    entries = listing["FileStatuses"]["FileStatus"]
    return len(entries) == 1 and not entries[0].get("pathSuffix") and entries[0]["type"] == "FILE"


def parse_located_blocks(response: dict[str, Any], *, tls: bool) -> list[Block]:
    """The blocks of a LocatedBlocks object (GET_BLOCK_LOCATIONS)."""
    blocks = [
        Block(
            int(b["startOffset"]),
            int(b["block"]["numBytes"]),
            tuple(_parse_datanode(d, tls=tls) for d in b.get("locations", [])),
            bool(b.get("isCorrupt")),
        )
        for b in response["LocatedBlocks"].get("locatedBlocks") or []
    ]
    return sorted(blocks)


def parse_block_locations(response: dict[str, Any]) -> list[Block]:
    """The blocks of a BlockLocations object (GETFILEBLOCKLOCATIONS), which has no web addresses."""
    return sorted(
        Block(int(b["offset"]), int(b["length"]), (), bool(b.get("corrupt")))
        for b in response["BlockLocations"]["BlockLocation"]
    )


def locations_of(blocks: Iterable[Block], size: int) -> list[BlockLocation]:
    """Locations that cover `[0, size)` without gaps, one per block."""
    locations, end = [], 0
    for block in blocks:
        if block.offset > end:
            locations.append(BlockLocation(end, block.offset - end))
        if block.length:
            replicas = tuple(datanode.web for datanode in block.datanodes)
            locations.append(BlockLocation(block.offset, block.length, replicas))
        end = max(end, block.offset + block.length)
    if end < size or not locations:
        locations.append(BlockLocation(end, size - end))
    return locations


def parse_live_datanodes(beans: dict[str, Any], *, tls: bool) -> list[Datanode]:
    """DataNodes in service, of the NameNode's JMX bean NameNodeInfo."""
    datanodes = []
    for key, node in (_live_nodes(beans) or {}).items():
        if not isinstance(node, dict):
            continue
        # The key's host is what the NameNode's redirects use; the port is that of the web address.
        port = str(node.get("infoSecureAddr" if tls else "infoAddr", "")).rpartition(":")[2]
        if port.isdigit() and int(port) and node.get("adminState", "In Service") == "In Service":
            host = key.rpartition(":")[0]
            datanodes.append(Datanode(f"{host}:{port}", str(node.get("xferaddr") or key)))
    return sorted(datanodes)


def parse_remaining_bytes(beans: dict[str, Any]) -> int | None:
    """The most bytes that any DataNode still takes, of the same bean; None without it."""
    nodes = _live_nodes(beans)
    if nodes is None:
        return None
    try:
        return max((int(node["remaining"]) for node in nodes.values()), default=0)
    except (KeyError, TypeError, ValueError):
        return None


def parse_remaining_quota(usage: dict[str, Any]) -> int | None:
    """Bytes that a folder's space quota leaves (of a QuotaUsage or ContentSummary)."""
    quota = int(usage.get("spaceQuota", -1))
    return None if quota < 0 else quota - int(usage.get("spaceConsumed", 0))


def request_path(path: str, op: str, parameters: Iterable[tuple[str, str]]) -> str:
    """Path and query of a WebHDFS request."""
    query = urlencode([("op", op), *parameters], quote_via=quote)
    return f"{PREFIX}{quote_path(path)}?{query}"


def keep_path(asked: Target, led_to: Target) -> Target:
    """A redirect with the path as we encode it: NameNodes leave `;` bare, which cuts it there."""
    path, _, _ = asked.request.partition("?")
    theirs, mark, query = led_to.request.partition("?")
    if unquote(theirs) != unquote(path):
        return led_to
    return Target(led_to.origin, path + mark + query)


def reusable_parameters(target: Target) -> Parameters:
    """The part of a redirect's query that serves requests to any DataNode; holds the token."""
    pairs = parse_qsl(target.request.partition("?")[2])
    return [(key, value) for key, value in pairs if key.lower() in REUSABLE]


def at_datanode(target: Target, web: str) -> Target:
    """The same request, sent to another DataNode."""
    return Target(origin_of(target.origin.tls, web), target.request)


def _parse_datanode(fields: dict[str, Any], *, tls: bool) -> Datanode:
    host = fields.get("hostName") or fields.get("ipAddr")
    port = fields.get("infoSecurePort" if tls else "infoPort") or 0
    data = fields.get("name") or f"{fields.get('ipAddr')}:{fields.get('xferPort')}"
    return Datanode(f"{host}:{port}", str(data))


def _live_nodes(beans: dict[str, Any]) -> Mapping[str, Any] | None:
    """The live DataNodes of the bean NameNodeInfo, by "host:port"; None without the bean."""
    try:
        nodes = json.loads(beans["beans"][0]["LiveNodes"])
    except (KeyError, IndexError, TypeError, ValueError):
        return None
    return nodes if isinstance(nodes, dict) else None
