"""One timed reading or writing of HDFS, in a process of its own; prints one line of JSON.

    python -m bench.hdfs_side KIND [ARGUMENT ...]

The clock runs from before a connection is made, libraries loaded, until the last byte is there;
reading ends in memory that is used over and over, and the bytes are hashed to be compared with
the source's.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BUFFER_BYTES = 16 << 20


def ours(url: str) -> Iterator[memoryview]:
    """Through the file object, front to back."""
    from bootseer import stripedfs

    buffer = memoryview(bytearray(BUFFER_BYTES))
    with stripedfs.open(url) as file:
        while count := file.readinto(buffer):
            yield buffer[:count]


def native(address: str, path: str) -> Iterator[memoryview]:
    """hdfs-native alone: one stream, the way its own documentation calls the most efficient."""
    import hdfs_native

    reader = hdfs_native.Client(f"hdfs://{address}").read(path)
    for piece in reader.read_range_stream(0, len(reader)):
        yield memoryview(piece)


def fsspec_webhdfs(address: str, path: str) -> Iterator[memoryview]:
    """fsspec's own WebHDFS file system with its defaults."""
    import fsspec

    host, _, port = address.partition(":")
    found = fsspec.filesystem("webhdfs", host=host, port=int(port), user="root")
    with found.open(path, "rb") as file:
        while piece := file.read(BUFFER_BYTES):
            yield memoryview(piece)


def plain_file(path: str) -> Iterator[memoryview]:
    """A file of a mount."""
    buffer = memoryview(bytearray(BUFFER_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            yield buffer[:count]


READERS: dict[str, Callable[..., Iterator[memoryview]]] = {
    "ours": ours,
    "native": native,
    "fsspec": fsspec_webhdfs,
    "file": plain_file,
}


LIBRARIES = {
    "ours": ("bootseer.stripedfs.file", "bootseer.blocks.fetch"),
    "native": ("hdfs_native",),
    "fsspec": ("fsspec.implementations.webhdfs",),
    "put": ("bootseer.stripedfs.putting",),
}
BY_SCHEME = {
    "webhdfs": ("bootseer.storage.webhdfs", "requests"),
    "hdfs": ("bootseer.storage.hdfs", "hdfs_native"),
}


def load(kind: str, arguments: list[str]) -> None:
    """Import what a side uses: a training job has had it for long."""
    schemes = [a.partition("://")[0] for a in arguments if "://" in a]
    for name in (*LIBRARIES.get(kind, ()), *(n for s in schemes for n in BY_SCHEME[s])):
        importlib.import_module(name)


def read(kind: str, *arguments: str) -> dict[str, Any]:
    import xxhash

    digest, total = xxhash.xxh3_64(), 0
    begin = time.perf_counter()
    for piece in READERS[kind](*arguments):
        digest.update(piece)
        total += len(piece)
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "bytes": total, "digest": digest.hexdigest()}


def put(source: str, url: str, placement: str) -> dict[str, Any]:
    """Write a striped checkpoint."""
    from bootseer import stripedfs
    from bootseer.stripedfs.settings import WriteSettings

    begin = time.perf_counter()
    settings = WriteSettings(replication=1, placement=placement)  # type: ignore[arg-type]
    report = stripedfs.put(source, url, settings=settings)
    return {"seconds": time.perf_counter() - begin, "bytes": report.size_bytes, "digest": ""}


def main(words: list[str]) -> None:
    kind, *arguments = words
    load(kind, arguments)
    result = put(*arguments) if kind == "put" else read(kind, *arguments)
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak_kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    print(json.dumps(result | {"peak_mib": int(peak_kib) / 1024}))


if __name__ == "__main__":
    main(sys.argv[1:])
