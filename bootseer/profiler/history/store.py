"""The history's files: `<store>/history/<trace id>.parquet`, one start each, zstd-compressed.

Terms: a *record* is one start (`model.StartRecord`), one row of one file; its nested lists hold
nodes and node x phase times. Files appear whole or not at all (temporary name, fsync, rename, fsync
of the directory) under an exclusive lock of the directory, so any number of processes may add at
once, and a temporary file seen under the lock was left by a process that died.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from typing import TYPE_CHECKING, Any, Literal, cast

from bootseer.errors import CorruptDataError, NotSupportedError, from_os_error
from bootseer.profiler.history.model import (
    FORMAT_VERSION,
    KINDS,
    Kind,
    NodePhase,
    NodeTime,
    Problem,
    StartRecord,
)
from bootseer.system.atomic import PREFIX, replace_file
from bootseer.system.file_lock import acquire
from bootseer.system.regular_files import opener

if TYPE_CHECKING:
    import pyarrow as pa

SUFFIX = ".parquet"
_TRACE_ID = re.compile(r"[0-9a-f]{32}")

_REQUIRED = {
    "trace_id": str,
    "job": str,
    "begin_unix_nano": int,
    "held_unix_nano": int,
    "rank_count": int,
    "event_count": int,
}
_OPTIONAL_NUMBERS = ("attempt", "start_s", "held_start_s", "job_s", "gpu_count")

AddResult = Literal["added", "extended", "unchanged"]


class NewerRecordError(NotSupportedError):
    """A record of a format that only a newer bootseer reads."""


def directory_of(store: str) -> str:
    """Return the directory in which a store keeps its history."""
    return os.path.join(store, "history")


def add(store: str, record: StartRecord) -> AddResult:
    """Keep one start; adding the same record again changes nothing.

    A record replaces an existing one of the same trace only if it has more events ("extended":
    the job has continued since). Raises NotSupportedError without pyarrow, and the mapped
    operating-system errors (no space, access denied). A record that a newer bootseer wrote stays
    as it is: NewerRecordError.
    """
    data = _encode_record(record)
    directory = directory_of(store)
    try:
        os.makedirs(directory, exist_ok=True)
        with acquire(os.path.join(directory, ".lock"), 0o666):
            return _publish(directory, record, data)
    except OSError as error:
        raise from_os_error(error, f"add a start to the history {directory}") from error


def read_all(store: str) -> tuple[list[StartRecord], list[Problem]]:
    """Return every readable record, ordered by time, and the files that were left out.

    A store without a history reads as empty. Raises NotSupportedError without pyarrow, and the
    mapped operating-system errors of the directory.
    """
    directory = directory_of(store)
    try:
        names = sorted(name for name in os.listdir(directory) if _is_record_name(name))
    except FileNotFoundError:
        return [], []
    except OSError as error:
        raise from_os_error(error, f"read the history {directory}") from error
    records: list[StartRecord] = []
    problems: list[Problem] = []
    for name in names:
        path = os.path.join(directory, name)
        try:
            records.append(_read_record(path))
        except FileNotFoundError:
            continue
        except OSError as error:
            problems.append(Problem(path, error.strerror or str(error)))
        except (CorruptDataError, NewerRecordError) as error:
            problems.append(Problem(path, str(error)))
    records.sort(key=lambda r: (r.begin_unix_nano, r.trace_id))
    return records, problems


def _is_record_name(name: str) -> bool:
    return name.endswith(SUFFIX) and not name.startswith(".")


def _make_file_name(trace_id: str) -> str:
    """Return a name that cannot lead out of the directory, whatever an event file claimed."""
    if _TRACE_ID.fullmatch(trace_id):
        return trace_id + SUFFIX
    return "x" + hashlib.sha256(trace_id.encode("utf-8", "surrogatepass")).hexdigest() + SUFFIX


def _publish(directory: str, record: StartRecord, data: bytes) -> AddResult:
    """Write a record's file; the directory is locked."""
    for name in os.listdir(directory):
        if name.startswith(PREFIX):
            os.unlink(os.path.join(directory, name))
    path = os.path.join(directory, _make_file_name(record.trace_id))
    result: AddResult = "added"
    if os.path.lexists(path):
        event_count = _read_event_count(path)
        if event_count is not None and event_count >= record.event_count:
            return "unchanged"
        result = "extended"
    replace_file(path, data)
    return result


def _read_event_count(path: str) -> int | None:
    """Return the number of events behind an existing file; None for a damaged one."""
    try:
        return _read_record(path).event_count
    except NewerRecordError as error:
        raise NewerRecordError(f"{path}: {error}") from error
    except (CorruptDataError, OSError):
        return None


def _import_pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise NotSupportedError(
            "the history needs pyarrow, which is not installed; "
            "install it with: pip install 'bootseer[history]'"
        ) from error
    return pyarrow


def _build_schema(pa: Any) -> pa.Schema:
    node = pa.struct([("node", pa.string()), ("own_s", pa.float64())])
    node_phase = pa.struct([("node", pa.string()), ("phase", pa.string()), ("own_s", pa.float64())])
    return pa.schema(
        [
            ("v", pa.int32()),
            ("trace_id", pa.string()),
            ("job", pa.string()),
            ("attempt", pa.int64()),
            ("declared_kind", pa.string()),
            ("places", pa.list_(pa.string())),
            ("begin_unix_nano", pa.int64()),
            ("held_unix_nano", pa.int64()),
            ("start_s", pa.float64()),
            ("held_start_s", pa.float64()),
            ("job_s", pa.float64()),
            ("gpu_count", pa.int64()),
            ("rank_count", pa.int64()),
            ("event_count", pa.int64()),
            ("nodes", pa.list_(node)),
            ("node_phases", pa.list_(node_phase)),
        ]
    )


def _encode_record(record: StartRecord) -> bytes:
    pa = _import_pyarrow()
    # Names in foreign events may have lone surrogates, which UTF-8 cannot encode: `?`.
    text = json.dumps(dataclasses.asdict(record), ensure_ascii=False).encode("utf-8", "replace")
    row = {"v": FORMAT_VERSION, **json.loads(text)}
    table = pa.Table.from_pylist([row], schema=_build_schema(pa))
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(table, sink, compression="zstd")
    return cast(bytes, sink.getvalue().to_pybytes())


def _read_record(path: str) -> StartRecord:
    """Read one file; raise CorruptDataError with the reason if it is no record of ours."""
    pa = _import_pyarrow()
    with open(path, "rb", opener=opener) as file:
        data = file.read()
    try:
        # No threads: one row needs none, and a pool still busy when the interpreter exits has
        # been seen to abort the process.
        reader = pa.parquet.ParquetFile(pa.BufferReader(data), pre_buffer=False)
        rows = reader.read(use_threads=False).to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise CorruptDataError(f"not a readable Parquet file: {first_line}") from error
    if len(rows) != 1:
        raise CorruptDataError(f"expected one row, found {len(rows)}")
    return _build_record(rows[0])


def _build_record(row: dict[str, Any]) -> StartRecord:
    version = row.pop("v", None)
    if version != FORMAT_VERSION:
        is_newer = isinstance(version, int) and version > FORMAT_VERSION
        raise (NewerRecordError if is_newer else CorruptDataError)(
            f"format version {version}, this bootseer reads {FORMAT_VERSION}; upgrade it"
        )
    try:
        kind = row.pop("declared_kind")
        nodes = tuple(NodeTime(**node) for node in row.pop("nodes"))
        node_phases = tuple(NodePhase(**node_phase) for node_phase in row.pop("node_phases"))
        places = tuple(row.pop("places"))
        for name, kind_of in _REQUIRED.items():
            if not isinstance(row[name], kind_of):
                raise TypeError(f"{name} is {row[name]!r:.40}")
        for name in _OPTIONAL_NUMBERS:
            if row[name] is not None and not isinstance(row[name], int | float):
                raise TypeError(f"{name} is {row[name]!r:.40}")
        for own_s in (*(n.own_s for n in nodes), *(p.own_s for p in node_phases)):
            if not isinstance(own_s, int | float):
                raise TypeError(f"own_s is {own_s!r:.40}")
        return StartRecord(
            declared_kind=cast(Kind, kind) if kind in KINDS else None,
            nodes=nodes,
            node_phases=node_phases,
            places=places,
            **row,
        )
    except (KeyError, TypeError) as error:
        raise CorruptDataError(f"columns do not match the format: {error}") from error
