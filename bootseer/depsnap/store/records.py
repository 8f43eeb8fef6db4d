"""The records of a store: which snapshots there are of a key, and which of them can be used.

Layout below a store, terms as in `bootseer.storage.lease`:

    deps/KEY/record-NNNNNN.json    generation N of what is published for KEY; made by one create
    deps/KEY/record-NNNNNN.bad     marks it as corrupt or refused; the next holder publishes
    deps/KEY/archive-TOKEN.tar.zst the archives that records name
    deps/KEY/lease/                who is installing and publishing now
    deps/latest/LABEL.json         newest key of a command, and its inputs: what a miss differs in
    deps/times/WORKLOAD.json       how long the last install and publication took

The records of a key without a mark are the snapshots of one set of inputs; where an index decides
too, the lock that each was published with picks among them. Marks and records are never replaced,
so a slow reader of a corrupt record cannot condemn its successor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator

from bootseer import light_dataclasses as dataclasses
from bootseer.depsnap.store.record_file import (
    KEY,
    Record,
    UnsignedError,
    check_map,
    check_number,
    check_signature,
    check_text,
    decode,
    encode,
)
from bootseer.errors import CorruptDataError, NotFoundError
from bootseer.storage.store import Store

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Generations = tuple[list[int], set[int]]

FOLDER = "deps"
LIMIT_BYTES = 1 << 20
_RECORD = re.compile(r"record-(\d{6})\.(json|bad)")


@dataclasses.dataclass(frozen=True, slots=True)
class Published:
    """A record and the generation it was read from."""

    record: Record
    generation: int


@dataclasses.dataclass(frozen=True, slots=True)
class Times:
    """How long the last install, publication and restore of a workload took, in seconds."""

    install_s: float
    publish_s: float
    restore_s: float


class BadRecordError(CorruptDataError):
    """A record that cannot be used; `key` and `generation` are what `condemn` takes.

    One that is only `unsigned` may be good where no signature, or another, is asked for.
    """

    def __init__(self, message: str, key: str, generation: int, *, unsigned: bool = False) -> None:
        super().__init__(message)
        self.key = key
        self.generation = generation
        self.unsigned = unsigned


def folder(key: str) -> str:
    """The store's folder of a key; NotFoundError for what is no key."""
    if not KEY.fullmatch(key):
        raise NotFoundError(f"{key[:80]!r} is not a key; `bootseer deps ls` prints them")
    return f"{FOLDER}/{key}"


def lease_folder(key: str) -> str:
    """The store's folder of the lease on a key."""
    return f"{folder(key)}/lease"


def record_name(key: str, generation: int) -> str:
    """A record's name in its store."""
    return f"{folder(key)}/record-{generation:06d}.json"


def archive_name(record: Record) -> str:
    """The name in its store of a record's archive."""
    return f"{folder(record.key)}/{record.archive.name}"


def list_keys(store: Store) -> list[str]:
    """Every key that has a folder, in order."""
    try:
        names = [s.name.rpartition("/")[2] for s in store.list(FOLDER) if s.is_folder]
    except NotFoundError:
        return []
    return sorted(n for n in names if KEY.fullmatch(n))


def list_generations(store: Store, key: str) -> Generations:
    """Ascending generations of a key's records, and those marked bad."""
    generations: list[int] = []
    bad: set[int] = set()
    try:
        for stat in store.list(folder(key)):
            match = _RECORD.fullmatch(stat.name.rpartition("/")[2])
            if match and match[2] == "json":
                generations.append(int(match[1]))
            elif match:
                bad.add(int(match[1]))
    except NotFoundError:
        return [], set()
    return sorted(generations), bad


def find_newest(store: Store, key: str, sign_key: bytes | None = None) -> Published | None:
    """The newest usable record of a key, or None when nothing usable is published.

    Raises CorruptDataError (damaged or unsigned), NotSupportedError (newer) and the store's errors.
    """
    return next(find_usable(store, key, sign_key), None)


def find_usable(
    store: Store,
    key: str,
    sign_key: bytes | None = None,
    listed: Generations | None = None,
    on_damaged: Callable[[BadRecordError], None] | None = None,
) -> Iterator[Published]:
    """The usable records of a key, newest first; read one by one. Raises as `find_newest`.

    `listed` is what `list_generations` gave a moment ago. `on_damaged` is called with each damaged
    or unsigned record, and older ones follow. A record that was removed meanwhile is left out.
    """
    known, bad = listed or list_generations(store, key)
    for generation in reversed(known):
        if generation in bad:
            continue
        try:
            record = decode(key, store.read(record_name(key, generation), limit_bytes=LIMIT_BYTES))
            check_signature(record, sign_key)
        except NotFoundError:
            continue
        except CorruptDataError as error:
            unsigned = isinstance(error, UnsignedError)
            damaged = BadRecordError(str(error), key, generation, unsigned=unsigned)
            if on_damaged is None:
                raise damaged from error
            on_damaged(damaged)
            continue
        yield Published(record, generation)


def add(
    store: Store,
    record: Record,
    sign_key: bytes | None,
    *,
    supersedes: int | None = None,
    known: Collection[int] = (),
) -> bool:
    """Publish as the next generation; False when another node published a usable one first.

    `supersedes` is the generation, if any, that the publisher found too old, `known` are those
    that it saw and that did not fit: they stay, for starts that they fit.
    """
    if supersedes is not None:
        condemn(store, record.key, supersedes, "older than the greatest age")
    generations, bad = list_generations(store, record.key)
    if any(g not in bad and g not in known for g in generations):
        return False
    generation = max([*generations, *bad], default=0) + 1
    return store.create(record_name(record.key, generation), encode(record, sign_key))


def condemn(store: Store, key: str, generation: int, reason: str) -> None:
    """Mark one generation as unusable; it is not read again and the next holder publishes."""
    name = f"{folder(key)}/record-{generation:06d}.bad"
    store.create(name, json.dumps({"reason": reason[:500]}).encode())


def remember(store: Store, record: Record, times: Times, label: str) -> None:
    """Keep the times, and what the newest snapshot of a command was made from."""
    store.replace(
        f"{FOLDER}/times/{record.workload}.json", json.dumps(dataclasses.asdict(times)).encode()
    )
    newest = {"key": record.key, "inputs": record.inputs}
    store.replace(f"{FOLDER}/latest/{label}.json", json.dumps(newest).encode())


def read_times(store: Store, workload: str) -> Times | None:
    """Past times of a workload; None when there are none or they are damaged."""
    body = _read_small(store, f"{FOLDER}/times/{workload}.json")
    try:
        return Times(*(check_number(body[n]) for n in ("install_s", "publish_s", "restore_s")))
    except (TypeError, KeyError, ValueError):
        return None


def read_latest(store: Store, label: str) -> tuple[str, dict[str, str]] | None:
    """The newest published key of a command and its inputs; None when there is none."""
    body = _read_small(store, f"{FOLDER}/latest/{label}.json", LIMIT_BYTES)
    try:
        return check_text(body["key"], KEY), check_map(body["inputs"])
    except (KeyError, TypeError, ValueError):
        return None


def _read_small(store: Store, name: str, limit_bytes: int = 4096) -> dict[str, Any]:
    try:
        body = json.loads(store.read(name, limit_bytes=limit_bytes))
    except (NotFoundError, CorruptDataError, ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}
