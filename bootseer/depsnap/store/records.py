"""Records: the small JSON beside an archive that says what it is.

Layout below a store, terms as in `bootseer.storage.lease`:

    deps/KEY/record-NNNNNN.json    generation N of what is published for KEY; made by one create
    deps/KEY/record-NNNNNN.bad     its mark of being corrupt or refused; the next holder publishes
    deps/KEY/archive-TOKEN.tar.zst the archives that records name
    deps/KEY/lease/                who is installing and publishing now
    deps/latest/LABEL.json         newest key of a command, and its inputs: what a miss differs in
    deps/times/WORKLOAD.json       how long the last install and publication took

The records of a key without a mark are the snapshots of one set of inputs; where an index has a
say too, the lock that each is published with picks among them. Marks and records are never
replaced, so a slow reader of a corrupt record cannot condemn its successor.
A signature is HMAC-SHA256, key from a file, over the canonical JSON of all other fields; the
index digest in it covers the archive.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence

from bootseer import light_dataclasses as dataclasses
from bootseer.depsnap.json_faults import MALFORMED, ShapeError, fault
from bootseer.depsnap.types import Digest, Limits
from bootseer.errors import (
    CorruptDataError,
    NotFoundError,
    NotSupportedError,
    UsageError,
    from_os_error,
)
from bootseer.storage.store import Store

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

VERSION = 2
"""Version 1 had the lock in the key: its records are read, and never found by a key of today."""
FOLDER = "deps"
INTERPRETERS = "interpreters"
"""In `host`, by line: programs outside of the roots that environments in them link to."""
LIMIT_BYTES = 1 << 20
# What an index may unpack to: names of deleted things, of which a record says nothing, and entries
# with long names or attributes.
_INDEX_BYTES, _INDEX_ENTRY_BYTES = 64 << 20, 32 << 10
KEY = re.compile(r"[0-9a-f]{64}")
ARCHIVE = re.compile(r"archive-[0-9a-f]{32}\.tar\.zst")
OWN = "own"
_LOCK = re.compile(r"own|[0-9a-f]{64}|")
_ONLY_1, _SINCE_2 = ("base", "resolved"), ("lock", "packages", "inputs")
_RECORD = re.compile(r"record-(\d{6})\.(json|bad)")


@dataclasses.dataclass(frozen=True, slots=True)
class Archive:
    """An archive as its record knows it; sizes in bytes, `owners` are (uid, gid) pairs."""

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
    not known; `packages` are name -> version of what the install brought; `inputs` the key's.
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


def absent(record: Record) -> str:
    """A Python that a record's environments link to and that is not on this machine, else ""."""
    paths = filter(None, record.host.get(INTERPRETERS, "").split("\n"))
    return next((path for path in paths if not os.path.exists(path)), "")


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A record with the generation it was read from and its size in bytes."""

    record: Record
    generation: int


@dataclasses.dataclass(frozen=True, slots=True)
class Times:
    """How long the last install, publication and restore of a workload took, in seconds."""

    install_s: float
    publish_s: float
    restore_s: float


def folder(key: str) -> str:
    """The store's folder of a key; CorruptDataError for what is no key."""
    if not KEY.fullmatch(key):
        raise NotFoundError(f"{key[:80]!r} is not a key; `bootseer deps ls` prints them")
    return f"{FOLDER}/{key}"


def limits(roots: Sequence[str], size: int, raw_bytes: int, entries: int) -> Limits:
    """What an archive of these roots, stored bytes, files' bytes and entries may be at most."""
    most = Limits()
    return Limits(
        index_stored=min(most.index_stored, size),
        index_raw=min(most.index_raw, _INDEX_BYTES + entries * _INDEX_ENTRY_BYTES),
        entries=entries,
        raw=raw_bytes,
        roots=tuple(roots),
    )


def limits_of(record: Record) -> Limits:
    """What the archive of a record may be at most."""
    known = record.archive
    return limits(record.roots, known.size, known.raw_bytes, known.entries)


def _body(record: Record) -> dict[str, Any]:
    """The fields that a record of its version has."""
    body = dataclasses.asdict(record)
    for name in _ONLY_1 if record.version > 1 else _SINCE_2:
        del body[name]
    return body


def canonical(record: Record) -> bytes:
    """What is signed: all fields but the signature."""
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
    """A name for a signing key that gives nothing of it away; "" without one."""
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
            found = file.read(64 << 10).rstrip(b"\r\n")
    except OSError as error:
        raise from_os_error(error, f"read the signing key {path}") from error
    if len(found) < 16:
        raise UsageError(f"the signing key {path} is shorter than 16 bytes; make a longer one")
    return found


def decode(key: str, data: bytes) -> Record:
    """Parse and check a record read from an untrusted store.

    Raises NotSupportedError for a newer version and CorruptDataError for anything else that is
    not a record of this key.
    """
    try:
        body = json.loads(data)
        if _is(body, dict).get("version") != VERSION and _is(body["version"], int) > VERSION:
            raise NotSupportedError(
                f"the snapshot {key[:12]} has format {body['version']}, this program reads "
                f"{VERSION}; use a newer bootseer"
            )
        record = _record(body)
    except MALFORMED as error:
        raise CorruptDataError(f"the record of {key[:12]} is damaged: {fault(error)}") from error
    if record.key != key:
        raise CorruptDataError(f"the record of {key[:12]} belongs to {record.key[:12]}")
    return record


def _record(body: dict[str, Any]) -> Record:
    version = _is(body["version"], int)
    if version < 1:
        raise ShapeError(f"the version {version} is unknown")
    first = version == 1
    return Record(
        key=_match(body["key"], KEY),
        base=_match(body["base"], KEY) if first else "",
        workload=_match(body["workload"], KEY),
        created_unix_s=_number(body["created_unix_s"]),
        command=_texts(body["command"]),
        roots=_texts(body["roots"]),
        fresh_roots=_texts(body["fresh_roots"]),
        install_s=_number(body["install_s"]),
        publish_s=_number(body["publish_s"]),
        resolved=_is(body["resolved"], bool) if first else False,
        lock="" if first else _match(body["lock"], _LOCK),
        packages={} if first else _map(body["packages"]),
        inputs={} if first else _map(body["inputs"]),
        host=_map(body["host"]),
        archive=_archive(_is(body["archive"], dict)),
        form=_is(body["form"], str),
        version=version,
        signature=_is(body["signature"], str),
    )


def _archive(body: dict[str, Any]) -> Archive:
    pairs = [_is(p, list) for p in _is(body["owners"], list)]
    return Archive(
        name=_match(body["name"], ARCHIVE),
        size=int(_number(body["size"])),
        raw_bytes=int(_number(body["raw_bytes"])),
        entries=int(_number(body["entries"])),
        index_digest=Digest(_match(body["index_digest"], KEY)),
        tree_digest=Digest(_match(body["tree_digest"], KEY)),
        owners=tuple((_is(u, int), _is(g, int)) for u, g in pairs),
    )


_SAID = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
_SAID |= {list: "a list", dict: "an object", type(None): "null"}


def _said(kind: type) -> str:
    return _SAID.get(kind, "something else")


def _is(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ShapeError(f"a field is {_said(type(value))} where {_said(kind)} belongs")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1 << 62:
        raise ShapeError("a field is not a number from 0 to 2^62")
    return float(value)


def _map(value: Any) -> dict[str, str]:
    return {_is(k, str): _is(v, str) for k, v in _is(value, dict).items()}


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(_is(v, str) for v in _is(value, list))


def _match(value: Any, pattern: re.Pattern[str]) -> str:
    text: str = _is(value, str)
    if not pattern.fullmatch(text):
        raise ShapeError(f"a field holds the unexpected text {text[:40]!r}")
    return text


def generations(store: Store, key: str) -> tuple[list[int], set[int]]:
    """Ascending generations of a key's records, and those marked bad."""
    seen: list[int] = []
    bad: set[int] = set()
    try:
        for found in store.list(folder(key)):
            match = _RECORD.fullmatch(found.name.rpartition("/")[2])
            if match and match[2] == "json":
                seen.append(int(match[1]))
            elif match:
                bad.add(int(match[1]))
    except NotFoundError:
        return [], set()
    return sorted(seen), bad


def current(store: Store, key: str, sign_key: bytes | None = None) -> Found | None:
    """The newest usable record of a key, or None when nothing usable is published.

    Raises CorruptDataError (damaged or unsigned), NotSupportedError (newer) and the store's errors.
    """
    return next(usable(store, key, sign_key), None)


def usable(
    store: Store,
    key: str,
    sign_key: bytes | None = None,
    seen: tuple[list[int], set[int]] | None = None,
    on_damaged: Callable[[BadRecordError], None] | None = None,
) -> Iterator[Found]:
    """The usable records of a key, newest first; read one by one. Raises as `current`.

    `seen` is what `generations` found a moment ago; `on_damaged`, where it is given, is told of
    each damaged or unsigned record, and older ones follow. One that is gone by now is passed over.
    """
    known, bad = seen or generations(store, key)
    for generation in reversed(known):
        if generation in bad:
            continue
        try:
            record = decode(key, store.read(name_of(key, generation), limit_bytes=LIMIT_BYTES))
            check_signature(record, sign_key)
        except NotFoundError:
            continue
        except CorruptDataError as error:
            unsigned = isinstance(error, UnsignedError)
            found = BadRecordError(str(error), key, generation, unsigned=unsigned)
            if on_damaged is None:
                raise found from error
            on_damaged(found)
            continue
        yield Found(record, generation)


class UnsignedError(CorruptDataError):
    """A record that was not signed with the given key."""


class BadRecordError(CorruptDataError):
    """A record that cannot be used; `key` and `generation` are what `condemn` takes.

    One that is merely `unsigned` may be good for whoever asks for no signature, or for another.
    """

    def __init__(self, message: str, key: str, generation: int, *, unsigned: bool = False) -> None:
        super().__init__(message)
        self.key = key
        self.generation = generation
        self.unsigned = unsigned


def add(
    store: Store,
    record: Record,
    sign_key: bytes | None,
    *,
    supersedes: int | None = None,
    known: Collection[int] = (),
) -> bool:
    """Publish as the next generation; False when another published a usable one first.

    `supersedes` is the generation, if any, that the publisher found too old, `known` are those
    that it saw and that did not fit: they stay, for starts that they fit.
    """
    if supersedes is not None:
        condemn(store, record.key, supersedes, "older than the greatest age")
    seen, bad = generations(store, record.key)
    if any(g not in bad and g not in known for g in seen):
        return False
    generation = (max([*seen, *bad], default=0)) + 1
    return store.create(name_of(record.key, generation), encode(record, sign_key))


def condemn(store: Store, key: str, generation: int, reason: str) -> None:
    """Mark one generation as unusable; it is not read again and the next holder publishes."""
    name = f"{folder(key)}/record-{generation:06d}.bad"
    store.create(name, json.dumps({"reason": reason[:500]}).encode())


def name_of(key: str, generation: int) -> str:
    """A record's name in its store."""
    return f"{folder(key)}/record-{generation:06d}.json"


def remember(store: Store, record: Record, times: Times, label: str) -> None:
    """Keep the times, and what the newest snapshot of a command was made from."""
    store.replace(
        f"{FOLDER}/times/{record.workload}.json", json.dumps(dataclasses.asdict(times)).encode()
    )
    newest = {"key": record.key, "inputs": record.inputs}
    store.replace(f"{FOLDER}/latest/{label}.json", json.dumps(newest).encode())


def times(store: Store, workload: str) -> Times | None:
    """Past times of a workload; None when there are none or they are damaged."""
    body = _small(store, f"{FOLDER}/times/{workload}.json")
    try:
        return Times(*(_number(body[n]) for n in ("install_s", "publish_s", "restore_s")))
    except (TypeError, KeyError, ValueError):
        return None


def latest(store: Store, label: str) -> tuple[str, dict[str, str]] | None:
    """The newest published key of a command and its inputs; None when there is none."""
    body = _small(store, f"{FOLDER}/latest/{label}.json", LIMIT_BYTES)
    try:
        return _match(body["key"], KEY), _map(body["inputs"])
    except (KeyError, TypeError, ValueError):
        return None


def _small(store: Store, name: str, limit_bytes: int = 4096) -> dict[str, Any]:
    try:
        body = json.loads(store.read(name, limit_bytes=limit_bytes))
    except (NotFoundError, CorruptDataError, ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def keys(store: Store) -> list[str]:
    """Every key that has a folder, in order."""
    try:
        names = [s.name.rpartition("/")[2] for s in store.list(FOLDER) if s.is_folder]
    except NotFoundError:
        return []
    return sorted(n for n in names if KEY.fullmatch(n))
