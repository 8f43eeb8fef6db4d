"""One timed reading or writing of HDFS, in a process of its own; prints one line of JSON.

    python -m bench.hdfs.side KIND [ARGUMENT ...]

The clocks, of time and processor, run from before a connection is made, libraries loaded, until
the last byte is there; reading ends in memory that is used over and over, and the bytes are
hashed to be compared with the source's. `torch` and `mapped` load a state dict, `state` makes
one. `stall BYTES KIND …` prints a line once that much was read, and tells the longest pause
between two pieces from then on.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BUFFER_BYTES = 16 << 20
PIECE_BYTES = 1 << 20


def ours(url: str, piece_bytes: int = BUFFER_BYTES) -> Iterator[memoryview]:
    """Through the file object, front to back."""
    from bootseer import stripedfs

    buffer = memoryview(bytearray(piece_bytes))
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


def plain_file(path: str, piece_bytes: int = BUFFER_BYTES) -> Iterator[memoryview]:
    """A file of a mount."""
    buffer = memoryview(bytearray(piece_bytes))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            yield buffer[:count]


def loaded(path: str) -> Iterator[memoryview]:
    """The tensors of a file that torch.load reads."""
    return _tensors(path, mapped=False)


def mapped(path: str) -> Iterator[memoryview]:
    """The tensors of a file that torch.load maps; they come when they are looked at."""
    return _tensors(path, mapped=True)


def _tensors(path: str, *, mapped: bool) -> Iterator[memoryview]:
    import torch

    for tensor in torch.load(path, mmap=mapped, weights_only=True).values():
        yield memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


READERS: dict[str, Callable[..., Iterator[memoryview]]] = {
    "ours": ours,
    "native": native,
    "fsspec": fsspec_webhdfs,
    "file": plain_file,
    "torch": loaded,
    "mapped": mapped,
}


LIBRARIES = {
    "ours": ("bootseer.stripedfs.file", "bootseer.blocks.fetch.fetcher"),
    "native": ("hdfs_native",),
    "fsspec": ("fsspec.implementations.webhdfs",),
    "put": ("bootseer.stripedfs.write.put",),
    "torch": ("torch",),
    "mapped": ("torch",),
}
BY_SCHEME = {
    "webhdfs": ("bootseer.storage.webhdfs.store", "requests"),
    "hdfs": ("bootseer.storage.hdfs.native_store", "hdfs_native"),
}


def load(kind: str, arguments: list[str]) -> None:
    """Import what a side uses: a training job has had it for long."""
    schemes = [a.partition("://")[0] for a in arguments if "://" in a]
    for name in (*LIBRARIES.get(kind, ()), *(n for s in schemes for n in BY_SCHEME[s])):
        importlib.import_module(name)


def read(kind: str, *arguments: str) -> dict[str, Any]:
    import xxhash

    digest = xxhash.xxh3_64()
    begin, before_s = time.perf_counter(), time.process_time()
    for piece in READERS[kind](*arguments):
        digest.update(piece)
    seconds, cpu_s = time.perf_counter() - begin, time.process_time() - before_s
    return {"seconds": seconds, "cpu_s": cpu_s, "digest": digest.hexdigest()}


def stall(mark_bytes: str, kind: str, *arguments: str) -> dict[str, Any]:
    """Read in pieces of 1 MiB; `pause_s` is the longest time between two after `mark_bytes`."""
    import xxhash

    digest, total, pause_s, marked = xxhash.xxh3_64(), 0, 0.0, False
    begin = last = time.perf_counter()
    for piece in READERS[kind](*arguments, piece_bytes=PIECE_BYTES):
        now = time.perf_counter()
        pause_s = max(pause_s, now - last) if marked else 0.0
        last = now
        digest.update(piece)
        total += len(piece)
        if not marked and total >= int(mark_bytes):
            marked = True
            print("marked", flush=True)
    return {"seconds": last - begin, "pause_s": pause_s, "digest": digest.hexdigest()}


def put(source: str, url: str, placement: str, replication: str) -> dict[str, Any]:
    """Write a striped checkpoint."""
    from bootseer import stripedfs
    from bootseer.stripedfs.write.write_settings import WriteSettings

    begin, before_s = time.perf_counter(), time.process_time()
    settings = WriteSettings(replication=int(replication), placement=placement)  # type: ignore[arg-type]
    stripedfs.put(source, url, settings=settings)
    return {"seconds": time.perf_counter() - begin, "cpu_s": time.process_time() - before_s}


def state(path: str, size_bytes: str) -> dict[str, Any]:
    """Save a transformer's state dict of about this size; the digest is of its tensors' bytes."""
    import torch
    import xxhash

    layers = 8
    width = math.isqrt(int(size_bytes) // layers // 24) // 16 * 16  # 12 d^2 parameters of 2 bytes
    made = [
        torch.nn.TransformerEncoderLayer(width, 16, 4 * width, dtype=torch.bfloat16)
        for _ in range(layers)
    ]
    torch.save(torch.nn.ModuleList(made).state_dict(), path)
    digest = xxhash.xxh3_64()
    for piece in loaded(path):
        digest.update(piece)
    return {"digest": digest.hexdigest()}


DOERS: dict[str, Callable[..., dict[str, Any]]] = {"put": put, "state": state, "stall": stall}


def main(words: list[str]) -> None:
    kind, *arguments = words
    load(arguments[1] if kind == "stall" else kind, arguments)
    result = DOERS[kind](*arguments) if kind in DOERS else read(kind, *arguments)
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak_kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    print(json.dumps(result | {"peak_mib": int(peak_kib) / 1024}))


if __name__ == "__main__":
    main(sys.argv[1:])
