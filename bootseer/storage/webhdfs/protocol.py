"""WebHDFS's JSON and addresses, to and from our records. Pure; see Hadoop's "WebHDFS REST API"."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlencode

from bootseer.errors import (
    AccessDeniedError,
    BootseerError,
    BusyError,
    CorruptDataError,
    NoSpaceError,
    NotFoundError,
    NotSupportedError,
    StoreUnavailableError,
    UsageError,
)
from bootseer.events.redaction import redact_message
from bootseer.storage.http.responses import Target, origin_of
from bootseer.storage.store import Placed, Stat
from bootseer.storage.urls import quote_path

PREFIX = "/webhdfs/v1"
MESSAGE_LENGTH = 200
# What a redirect tells of the cluster and the caller, good for other requests too.
REUSABLE = ("user.name", "doas", "delegation", "namenoderpcaddress")

MISSING = {"FileNotFoundException", "NoSuchFileException"}
REFUSED = {
    "AccessControlException", "SecurityException", "AuthenticationException", "InvalidToken",
    "AuthorizationException",
}  # fmt: skip
FULL = {
    "DSQuotaExceededException", "NSQuotaExceededException", "QuotaExceededException",
    "QuotaByStorageTypeExceededException", "DiskOutOfSpaceException", "MaxDirectoryItemsExceeded",
    "FSLimitException.MaxDirectoryItemsExceededException", "MaxDirectoryItemsExceededException",
}  # fmt: skip
TAKEN = {
    "FileAlreadyExistsException", "PathIsNotEmptyDirectoryException", "LeaseExpiredException",
    "AlreadyBeingCreatedException", "RecoveryInProgressException",
}  # fmt: skip
UNKNOWN = {"UnsupportedOperationException", "IllegalArgumentException", "ParamException"}
DAMAGED = {"ChecksumException", "CorruptFileException"}
IMPOSSIBLE = {"InvalidPathException", "PathComponentTooLongException"}
# Who may not enter a plain file: Hadoop 2 says so to all but the superuser of a path below one,
# with that file's mode; Hadoop 3 has ParentNotDirectoryException instead.
_BELOW_A_FILE = re.compile(r'access=EXECUTE, inode="[^"]*":[^:]*:[^:]*:-')


class Remote(NamedTuple):
    """A RemoteException: its class without packages, and its text."""

    kind: str
    message: str


class Datanode(NamedTuple):
    """A DataNode: where it serves WebHDFS, and where it serves blocks, each "host:port"."""

    web: str
    data: str


def parse_json(raw: bytes, what: str) -> dict[str, Any]:
    """A JSON object; StoreUnavailableError when it is none. An empty body is an empty object."""
    try:
        found = json.loads(raw) if raw.strip() else {}
    except ValueError as error:
        raise StoreUnavailableError(f"cannot {what}: the answer is not JSON") from error
    if not isinstance(found, dict):
        raise StoreUnavailableError(f"cannot {what}: the answer is not a JSON object")
    return found


@contextlib.contextmanager
def understood(what: str) -> Iterator[None]:
    """StoreUnavailableError for JSON that lacks what WebHDFS's answers have."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise StoreUnavailableError(f"cannot {what}: the answer is none of WebHDFS's") from error


def remote_exception(raw: bytes) -> Remote | None:
    """The RemoteException in an answer's body; None when there is none."""
    try:
        found = json.loads(raw)["RemoteException"]
        kind = str(found.get("exception") or "").rpartition(".")[2].rpartition("$")[2]
        return Remote(kind, str(found.get("message") or ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def remote_error(remote: Remote, what: str, *, retry_after_s: float = 0.0) -> BootseerError:
    """Our error for Hadoop's; `retry_after_s` is what its answer asked for, if anything."""
    first_line = redact_message(remote.message).strip().partition("\n")[0][:MESSAGE_LENGTH]
    said = f"cannot {what}: HDFS says {remote.kind}: {first_line}"
    text = remote.message
    if remote.kind == "ParentNotDirectoryException" or _BELOW_A_FILE.search(text):
        return NotFoundError(f"{said}; a part of the path is a file: check the path")
    if remote.kind in REFUSED or "InvalidToken" in text or "token (" in text:
        return AccessDeniedError(f"{said}; check the user, the token and the permissions")
    if remote.kind in MISSING:
        return NotFoundError(f"{said}; check the path")
    if remote.kind in FULL or "No space left" in text or _lacks_room(text):
        return NoSpaceError(f"{said}; free space or raise the quota")
    if "out of the range" in text:
        return CorruptDataError(f"{said}; it is truncated")
    if remote.kind in DAMAGED:
        return CorruptDataError(f"{said}; restore it from another copy")
    if remote.kind in TAKEN:
        return BusyError(f"{said}; choose another name or wait for the other writer")
    if remote.kind in IMPOSSIBLE or "must both be directories" in text:
        return UsageError(f"{said}; choose another name")
    if remote.kind in UNKNOWN:
        return NotSupportedError(f"{said}; this server does not do it")
    return StoreUnavailableError(said, retry_after_s=retry_after_s)


def is_standby(remote: Remote) -> bool:
    """Whether this NameNode is not the one to ask (now)."""
    return remote.kind == "StandbyException" or "StandbyException" in remote.message


def _lacks_room(text: str) -> bool:
    """No DataNode took a block although some are there: they are full."""
    return "could only be" in text and "There are 0 datanode" not in text


def file_stat(name: str, found: dict[str, Any]) -> Stat:
    """A FileStatus as ours; `fileId` is missing from HttpFS and old servers."""
    folder = found.get("type") == "DIRECTORY"
    size = 0 if folder else int(found["length"])
    modified = int(found["modificationTime"])
    version = "" if folder else f"{found.get('fileId', 0)}:{modified}:{size}"
    return Stat(name, size, modified / 1000, folder, version)


def listed(found: dict[str, Any], prefix: str) -> Iterator[Stat]:
    """The entries of a FileStatuses object; one without a name is the folder asked for itself."""
    for entry in found["FileStatuses"]["FileStatus"]:
        if suffix := entry.get("pathSuffix"):
            yield file_stat(prefix + suffix, entry)


def is_object_listing(found: dict[str, Any]) -> bool:
    """Whether a listing is of an object, which lists as itself."""
    entries = found["FileStatuses"]["FileStatus"]
    return len(entries) == 1 and not entries[0].get("pathSuffix") and entries[0]["type"] == "FILE"


class Block(NamedTuple):
    """One block of a file, `corrupt` when every replica of it is known to be damaged."""

    offset: int
    length: int
    datanodes: tuple[Datanode, ...]
    corrupt: bool


def located_blocks(found: dict[str, Any], *, tls: bool) -> list[Block]:
    """The blocks of a LocatedBlocks object (GET_BLOCK_LOCATIONS)."""
    inner = found["LocatedBlocks"]
    blocks = [
        Block(
            int(b["startOffset"]),
            int(b["block"]["numBytes"]),
            tuple(_datanode(d, tls=tls) for d in b.get("locations", [])),
            bool(b.get("isCorrupt")),
        )
        for b in inner.get("locatedBlocks") or []
    ]
    return sorted(blocks)


def block_locations(found: dict[str, Any]) -> list[Block]:
    """The blocks of a BlockLocations object (GETFILEBLOCKLOCATIONS), which names no web address."""
    inner = found["BlockLocations"]["BlockLocation"]
    return sorted(
        Block(int(b["offset"]), int(b["length"]), (), bool(b.get("corrupt"))) for b in inner
    )


def stretches(blocks: Iterable[Block], size: int) -> list[Placed]:
    """The blocks as stretches that cover `[0, size)` without gaps."""
    out, end = [], 0
    for block in blocks:
        if block.offset > end:
            out.append(Placed(end, block.offset - end))
        if block.length:
            out.append(Placed(block.offset, block.length, tuple(d.web for d in block.datanodes)))
        end = max(end, block.offset + block.length)
    if end < size or not out:
        out.append(Placed(end, size - end))
    return out


def live_datanodes(found: dict[str, Any], *, tls: bool) -> list[Datanode]:
    """DataNodes in service, of the NameNode's JMX bean NameNodeInfo."""
    try:
        nodes = json.loads(found["beans"][0]["LiveNodes"]).items()
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        return []
    out = []
    for key, node in nodes:
        if not isinstance(node, dict):
            continue
        # The key's host is what the NameNode's redirects use; the port is that of the web address.
        port = str(node.get("infoSecureAddr" if tls else "infoAddr", "")).rpartition(":")[2]
        if port.isdigit() and int(port) and node.get("adminState", "In Service") == "In Service":
            host = key.rpartition(":")[0]
            out.append(Datanode(f"{host}:{port}", str(node.get("xferaddr") or key)))
    return sorted(out)


def quota_left(usage: dict[str, Any]) -> int | None:
    """Bytes that a folder's space quota leaves (of a QuotaUsage or ContentSummary)."""
    quota = int(usage.get("spaceQuota", -1))
    return None if quota < 0 else quota - int(usage.get("spaceConsumed", 0))


def room_left(found: dict[str, Any]) -> int | None:
    """The most bytes that any DataNode still takes; None when that is not told."""
    try:
        nodes = json.loads(found["beans"][0]["LiveNodes"]).values()
        return max((int(n["remaining"]) for n in nodes), default=0)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        return None


def request_path(path: str, op: str, parameters: Iterable[tuple[str, str]]) -> str:
    """Path and query of a WebHDFS request."""
    query = urlencode([("op", op), *parameters], quote_via=quote)
    return f"{PREFIX}{quote_path(path)}?{query}"


def same_path(asked: Target, led_to: Target) -> Target:
    """A redirect with the path as we spell it: NameNodes leave `;` bare, which then cuts it."""
    path, _, _ = asked.request.partition("?")
    theirs, mark, query = led_to.request.partition("?")
    if unquote(theirs) != unquote(path):
        return led_to
    return Target(led_to.origin, path + mark + query)


def reusable_parameters(target: Target) -> tuple[tuple[str, str], ...]:
    """What of a redirect's query serves further requests to any DataNode; holds the token."""
    pairs = parse_qsl(target.request.partition("?")[2])
    return tuple((k, v) for k, v in pairs if k.lower() in REUSABLE)


def at_datanode(target: Target, web: str) -> Target:
    """The same request, sent to another DataNode."""
    return Target(origin_of(target.origin.tls, web), target.request)


def _datanode(found: dict[str, Any], *, tls: bool) -> Datanode:
    host = found.get("hostName") or found.get("ipAddr")
    port = found.get("infoSecurePort" if tls else "infoPort") or 0
    data = found.get("name") or f"{found.get('ipAddr')}:{found.get('xferPort')}"
    return Datanode(f"{host}:{port}", str(data))
