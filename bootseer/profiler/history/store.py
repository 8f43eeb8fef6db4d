"""The history's files: `<store>/history/<trace id>.parquet`, one start each, zstd-compressed.

Terms: a *record* is one start (`history_model.StartRecord`), one row of one file; its nested
lists hold nodes and node x phase times. Files appear whole or not at all (temporary name, fsync,
rename, fsync of the directory) under an exclusive lock of the directory, so any number of
processes may add at once, and a temporary file met under the lock belongs to a dead one.
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
from bootseer.system.atomic import replace_file
from bootseer.system.file_lock import acquire
from bootseer.system.regular_files import opener

if TYPE_CHECKING:
    import pyarrow as pa

SUFFIX = ".parquet"
_TEMPORARY = ".tmp-"
_TRACE_ID = re.compile(r"[0-9a-f]{32}")

Added = Literal["added", "extended", "unchanged"]


def directory_of(store: str) -> str:
    """Where a store keeps its history."""
    return os.path.join(store, "history")


def add(store: str, record: StartRecord) -> Added:
    """Keep one start; adding the same again changes nothing.

    A record of a trace that is there already replaces it only if it saw more events ("extended":
    the job went on since). Raises NotSupportedError without pyarrow, and the mapped
    operating-system errors (no space, access denied).
    """
    data = _encode(record)
    directory = directory_of(store)
    try:
        os.makedirs(directory, exist_ok=True)
        with acquire(os.path.join(directory, ".lock"), 0o666):
            return _publish(directory, record, data)
    except OSError as error:
        raise from_os_error(error, f"add a start to the history {directory}") from error


def read_all(store: str) -> tuple[list[StartRecord], list[Problem]]:
    """Every readable record, ordered by time, and the files that had to be left out.

    A store without a history reads as empty.
    """
    directory = directory_of(store)
    try:
        names = sorted(n for n in os.listdir(directory) if _is_record(n))
    except FileNotFoundError:
        return [], []
    except OSError as error:
        raise from_os_error(error, f"read the history {directory}") from error
    records: list[StartRecord] = []
    problems: list[Problem] = []
    for name in names:
        path = os.path.join(directory, name)
        try:
            records.append(_decode(path))
        except FileNotFoundError:
            continue
        except OSError as error:
            problems.append(Problem(path, error.strerror or str(error)))
        except CorruptDataError as error:
            problems.append(Problem(path, str(error)))
    records.sort(key=lambda r: (r.begin_unix_nano, r.trace_id))
    return records, problems


def _is_record(name: str) -> bool:
    return name.endswith(SUFFIX) and not name.startswith(".")


def _file_name(trace_id: str) -> str:
    """A name that cannot leave the directory, whatever an event file claimed."""
    if _TRACE_ID.fullmatch(trace_id):
        return trace_id + SUFFIX
    return "x" + hashlib.sha256(trace_id.encode("utf-8", "surrogatepass")).hexdigest() + SUFFIX


def _publish(directory: str, record: StartRecord, data: bytes) -> Added:
    for name in os.listdir(directory):
        if name.startswith(_TEMPORARY):
            os.unlink(os.path.join(directory, name))
    path = os.path.join(directory, _file_name(record.trace_id))
    result: Added = "added"
    if os.path.lexists(path):
        known = _known_events(path)
        if known is not None and known >= record.event_count:
            return "unchanged"
        result = "extended"
    replace_file(path, data, prefix=_TEMPORARY)
    return result


def _known_events(path: str) -> int | None:
    """Events behind a file that is there; None = damaged, to be replaced."""
    try:
        return _decode(path).event_count
    except (CorruptDataError, OSError):
        return None


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise NotSupportedError(
            "the history needs pyarrow, which is not installed; "
            "install it with: pip install 'bootseer[history]'"
        ) from error
    return pyarrow


def _schema(pa: Any) -> pa.Schema:
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


def _encode(record: StartRecord) -> bytes:
    pa = _pyarrow()
    # Names from elsewhere may have lone surrogates, which UTF-8 cannot hold: `?`.
    told = json.dumps(dataclasses.asdict(record), ensure_ascii=False).encode("utf-8", "replace")
    row = {"v": FORMAT_VERSION, **json.loads(told)}
    table = pa.Table.from_pylist([row], schema=_schema(pa))
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(table, sink, compression="zstd")
    return cast(bytes, sink.getvalue().to_pybytes())


def _decode(path: str) -> StartRecord:
    """Read one file; raise CorruptDataError with the reason if it is no record of ours."""
    pa = _pyarrow()
    with open(path, "rb", opener=opener) as file:
        data = file.read()
    try:
        # No threads: one row needs none, and a pool still busy when the interpreter ends has
        # been seen to abort the process.
        reader = pa.parquet.ParquetFile(pa.BufferReader(data), pre_buffer=False)
        rows = reader.read(use_threads=False).to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise CorruptDataError(f"not a readable Parquet file: {first_line}") from error
    if len(rows) != 1:
        raise CorruptDataError(f"expected one row, found {len(rows)}")
    return _record(rows[0])


def _record(row: dict[str, Any]) -> StartRecord:
    version = row.pop("v", None)
    if version != FORMAT_VERSION:
        raise CorruptDataError(
            f"format version {version}, this bootseer reads {FORMAT_VERSION}; upgrade it"
        )
    try:
        kind = row.pop("declared_kind")
        nodes = tuple(NodeTime(**node) for node in row.pop("nodes"))
        node_phases = tuple(NodePhase(**each) for each in row.pop("node_phases"))
        places = tuple(row.pop("places"))
        for name in ("trace_id", "job", "begin_unix_nano", "held_unix_nano", "event_count"):
            if row[name] is None:
                raise TypeError(f"{name} is missing")
        return StartRecord(
            declared_kind=cast(Kind, kind) if kind in KINDS else None,
            nodes=nodes,
            node_phases=node_phases,
            places=places,
            **row,
        )
    except (KeyError, TypeError) as error:
        raise CorruptDataError(f"columns do not match the format: {error}") from error
