"""A record: the small JSON file next to an archive that describes one snapshot.

A signature is HMAC-SHA256, key from a file, over the canonical JSON of all other fields; the
index digest in it covers the archive.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence

from bootseer import light_dataclasses as dataclasses
from bootseer.depsnap.json_faults import MALFORMED, ShapeError, describe_fault
from bootseer.depsnap.types import Digest, Limits
from bootseer.errors import CorruptDataError, NotSupportedError, UsageError, from_os_error

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

VERSION = 2
"""Version 1 had the lock in the key: its records are read, and never found by a key of today."""
INTERPRETERS = "interpreters"
"""In `host`, by line: programs outside of the roots that environments in them link to."""
# What an index may unpack to: names of deleted files, of which a record does not know the number,
# and entries with long names or attributes.
_INDEX_BYTES, _INDEX_ENTRY_BYTES = 64 << 20, 32 << 10
KEY = re.compile(r"[0-9a-f]{64}")
ARCHIVE = re.compile(r"archive-[0-9a-f]{32}\.tar\.zst")
OWN = "own"
"""The lock of a snapshot whose inputs alone decide what is installed."""
_LOCK = re.compile(r"own|[0-9a-f]{64}|")
_ONLY_1, _SINCE_2 = ("base", "resolved"), ("lock", "packages", "inputs")


@dataclasses.dataclass(frozen=True, slots=True)
class Archive:
    """An archive as its record describes it; sizes in bytes, `owners` are (uid, gid) pairs."""

    name: str
    size: int
    raw_bytes: int
    entries: int
    index_digest: Digest
    tree_digest: Digest
    owners: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """One published snapshot. Times in seconds; `created_unix_s` by the publisher's clock.

    `lock` is OWN where the inputs alone decide, the resolved list's sha256, or "" where it was
    not known; `packages` are name -> version of what the install added; `inputs` the key's.
    `base` and `resolved` are version 1's.
    """

    key: str
    workload: str
    created_unix_s: float
    command: tuple[str, ...]
    roots: tuple[str, ...]
    fresh_roots: tuple[str, ...]
    install_s: float
    publish_s: float
    host: dict[str, str]
    archive: Archive
    lock: str = ""
    packages: dict[str, str] = dataclasses.field(default_factory=dict)
    inputs: dict[str, str] = dataclasses.field(default_factory=dict)
    base: str = ""
    resolved: bool = False
    form: str = "archive"
    version: int = VERSION
    signature: str = ""


class UnsignedError(CorruptDataError):
    """A record that was not signed with the given key."""


def missing_interpreter(record: Record) -> str:
    """A Python that a record's environments link to and this machine lacks, else ""."""
    paths = filter(None, record.host.get(INTERPRETERS, "").split("\n"))
    return next((path for path in paths if not os.path.exists(path)), "")


def limits(roots: Sequence[str], size: int, raw_bytes: int, entries: int) -> Limits:
    """The limits of an archive with these roots, stored bytes, files' bytes and entries."""
    most = Limits()
    return Limits(
        index_stored=min(most.index_stored, size),
        index_raw=min(most.index_raw, _INDEX_BYTES + entries * _INDEX_ENTRY_BYTES),
        entries=entries,
        raw=raw_bytes,
        roots=tuple(roots),
    )


def limits_of(record: Record) -> Limits:
    """The limits of a record's archive."""
    archive = record.archive
    return limits(record.roots, archive.size, archive.raw_bytes, archive.entries)


def _body(record: Record) -> dict[str, Any]:
    """The fields that a record of its version has."""
    body = dataclasses.asdict(record)
    for name in _ONLY_1 if record.version > 1 else _SINCE_2:
        del body[name]
    return body


def canonical(record: Record) -> bytes:
    """What is signed: all fields except the signature."""
    body = _body(record)
    del body["signature"]
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def encode(record: Record, sign_key: bytes | None = None) -> bytes:
    """The record's file, signed when there is a key."""
    body = _body(record)
    body["signature"] = sign(record, sign_key) if sign_key else ""
    return json.dumps(body, indent=1, sort_keys=True).encode() + b"\n"


def sign(record: Record, sign_key: bytes) -> str:
    """HMAC-SHA256 of the canonical form, in hex."""
    import hmac  # unsigned records need none

    return hmac.new(sign_key, canonical(record), "sha256").hexdigest()


def check_signature(record: Record, sign_key: bytes | None) -> None:
    """Raise UnsignedError when a key is given and the record was not signed with it."""
    if not sign_key:
        return
    import hmac

    if not hmac.compare_digest(sign(record, sign_key), record.signature):
        raise UnsignedError(
            f"the snapshot {record.key[:12]} is not signed with the given key; it is not used"
        )


def signer(sign_key: bytes | None) -> str:
    """A name for a signing key that reveals nothing of it; "" without one."""
    if not sign_key:
        return ""
    import hmac

    return hmac.new(sign_key, b"bootseer-key-id", "sha256").hexdigest()[:16]


def read_sign_key(path: str | None) -> bytes | None:
    """The bytes of a key file without its last newline; None when there is no path."""
    if not path:
        return None
    try:
        with open(path, "rb") as file:
            key = file.read(64 << 10).rstrip(b"\r\n")
    except OSError as error:
        raise from_os_error(error, f"read the signing key {path}") from error
    if len(key) < 16:
        raise UsageError(f"the signing key {path} is shorter than 16 bytes; make a longer one")
    return key


def decode(key: str, data: bytes) -> Record:
    """Parse and check a record read from an untrusted store.

    Raises NotSupportedError for a newer version and CorruptDataError for anything else that is
    not a record of this key.
    """
    try:
        body = json.loads(data)
        if check_type(check_type(body, dict)["version"], int) > VERSION:
            raise NotSupportedError(
                f"the snapshot {key[:12]} has format {body['version']}, this program reads "
                f"{VERSION}; use a newer bootseer"
            )
        record = _record(body)
    except MALFORMED as error:
        raise CorruptDataError(
            f"the record of {key[:12]} is damaged: {describe_fault(error)}"
        ) from error
    if record.key != key:
        raise CorruptDataError(f"the record of {key[:12]} belongs to {record.key[:12]}")
    return record


def _record(body: dict[str, Any]) -> Record:
    version = check_type(body["version"], int)
    if version < 1:
        raise ShapeError(f"the version {version} is unknown")
    first = version == 1
    return Record(
        key=check_text(body["key"], KEY),
        base=check_text(body["base"], KEY) if first else "",
        workload=check_text(body["workload"], KEY),
        created_unix_s=check_number(body["created_unix_s"]),
        command=_check_texts(body["command"]),
        roots=_check_texts(body["roots"]),
        fresh_roots=_check_texts(body["fresh_roots"]),
        install_s=check_number(body["install_s"]),
        publish_s=check_number(body["publish_s"]),
        resolved=check_type(body["resolved"], bool) if first else False,
        lock="" if first else check_text(body["lock"], _LOCK),
        packages={} if first else check_map(body["packages"]),
        inputs={} if first else check_map(body["inputs"]),
        host=check_map(body["host"]),
        archive=_archive(check_type(body["archive"], dict)),
        form=check_type(body["form"], str),
        version=version,
        signature=check_type(body["signature"], str),
    )


def _archive(body: dict[str, Any]) -> Archive:
    pairs = [check_type(p, list) for p in check_type(body["owners"], list)]
    return Archive(
        name=check_text(body["name"], ARCHIVE),
        size=int(check_number(body["size"])),
        raw_bytes=int(check_number(body["raw_bytes"])),
        entries=int(check_number(body["entries"])),
        index_digest=Digest(check_text(body["index_digest"], KEY)),
        tree_digest=Digest(check_text(body["tree_digest"], KEY)),
        owners=tuple((check_type(u, int), check_type(g, int)) for u, g in pairs),
    )


_TYPE_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
_TYPE_NAMES |= {list: "a list", dict: "an object", type(None): "null"}


def _type_name(kind: type) -> str:
    return _TYPE_NAMES.get(kind, "something else")


def check_type(value: Any, kind: Any) -> Any:
    """A field of this type. Raises ShapeError."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ShapeError(f"a field is {_type_name(type(value))} where {_type_name(kind)} belongs")
    return value


def check_number(value: Any) -> float:
    """A field that is a number of a usual size. Raises ShapeError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1 << 62:
        raise ShapeError("a field is not a number from 0 to 2^62")
    return float(value)


def check_map(value: Any) -> dict[str, str]:
    """A field that maps texts to texts. Raises ShapeError."""
    return {check_type(k, str): check_type(v, str) for k, v in check_type(value, dict).items()}


def _check_texts(value: Any) -> tuple[str, ...]:
    return tuple(check_type(v, str) for v in check_type(value, list))


def check_text(value: Any, pattern: re.Pattern[str]) -> str:
    """A field whose text matches a pattern. Raises ShapeError."""
    text: str = check_type(value, str)
    if not pattern.fullmatch(text):
        raise ShapeError(f"a field holds the unexpected text {text[:40]!r}")
    return text
