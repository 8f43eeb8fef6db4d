"""Bench `fetch`: ranges of one object from a store that gives each connection 150 MB/s.

The store (`paced_server`) answers a request after 3 ms. Sides of `range fetch`: `one stream` (a
single request), `raw parallel` (plain sockets, `recv_into` warm memory, no checks, as many
connections as ours, each with one range of the same length) and ours: `Fetcher.read_into` over
the HTTP store, every 4 MiB block verified by xxh3-128; `ours, no check` leaves that out. Fresh
connections each round; the server's file is in the page cache, and the destination is warm, in
huge pages. Values are GB/s and the client's CPU seconds a GB, which hold what the kernel does on
behalf of the client.

In `range fetch` both ends may use every core. They then compete, and what the kernel does for
the store in an interrupt (the timers that pace it, its sending) is counted for whom it
interrupted, often the client. In `range fetch, cores apart` each end has half of the cores to
itself, as the two would have on two machines.

`local store` reads a file of the page cache, where what is left is our cost a block.
"""

from __future__ import annotations

import mmap
import os
import resource
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import xxhash

from bench import cores, harness
from bench.paced_server import PacedServer
from bootseer.blocks.fetch.fetcher import Fetcher, FetchSettings
from bootseer.blocks.fetch.slabs import populate
from bootseer.blocks.source import BlockSource, Location
from bootseer.errors import CorruptDataError
from bootseer.storage.store import Store

MEASURES = (
    "bootseer/blocks",
    "bootseer/storage",
    "bench/cores.py",
    "bench/fetch.py",
    "bench/paced_server.py",
)
BYTES_PER_S = 150e6
LATENCY_S = 0.003
CONNECTIONS = 24
BLOCK_BYTES = 4 << 20
SMALL_BLOCK_BYTES = 256 << 10
NAME = "object"
QUICK_BYTES, FULL_BYTES = 256 << 20, 2 << 30


class Verified(BlockSource):
    """`BlockSource` over one stored object, with a digest of each block, read where it `checks`."""

    in_place = True
    key = ""

    def __init__(self, store: Store, path: Path, block_bytes: int, *, checks: bool = True) -> None:
        self.store = store
        self._checks = checks
        self.size_bytes = path.stat().st_size
        self.block_bytes = block_bytes
        with path.open("rb") as file:
            blocks = iter(lambda: file.read(block_bytes), b"")
            self._digests = [xxhash.xxh3_128_digest(block) for block in blocks]

    def locate(self, index: int) -> Location:
        offset = index * self.block_bytes
        return Location(NAME, offset, min(self.block_bytes, self.size_bytes - offset))

    def ends_stretch(self, part: str, offset: int) -> int:
        return self.size_bytes

    def replicas(self, part: str, offset: int) -> tuple[str, ...]:
        return ()

    def open_block(self, index: int, stored: memoryview, raw: memoryview) -> None:
        if self._checks and xxhash.xxh3_128_digest(stored) != self._digests[index]:
            raise CorruptDataError(f"block {index} of the bench's object is not what was written")


def _measured(work: Callable[[], int]) -> tuple[float, float]:
    """GB/s and CPU seconds a GB of something that moves bytes."""
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    moved = work()
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return moved / seconds / 1e9, cpu_s / (moved / 1e9)


# --- sides -----------------------------------------------------------------------------------


def _get(connection: socket.socket, offset: int, view: memoryview) -> None:
    """One range by hand."""
    end = offset + len(view) - 1
    text = f"GET /{NAME} HTTP/1.1\r\nHost: bench\r\nRange: bytes={offset}-{end}\r\n\r\n"
    connection.sendall(text.encode())
    head = b""
    while b"\r\n\r\n" not in head:
        received = connection.recv(1024)
        if not received:
            raise ConnectionError("the server ended an answer")
        head += received
    body = head.partition(b"\r\n\r\n")[2]
    view[: len(body)] = body
    done = len(body)
    while done < len(view):
        count = connection.recv_into(view[done:], 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionError("the server ended an answer")
        done += count


def _raw(port: int, buffer: memoryview, connections: int) -> int:
    """All of `buffer` by plain sockets: one range for each connection, all of one length.

    Nothing can be sooner than that, for every connection works until the end.
    """
    length = -(-len(buffer) // connections)
    failed: list[BaseException] = []

    def work(offset: int) -> None:
        try:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _get(connection, offset, buffer[offset : offset + length])
        except BaseException as error:  # raised by the caller, below
            failed.append(error)

    offsets = range(0, len(buffer), length)
    threads = [threading.Thread(target=work, args=(offset,)) for offset in offsets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return len(buffer)


def _one_stream(port: int, buffer: memoryview) -> int:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        _get(connection, 0, buffer)
    return len(buffer)


def _ours(source: BlockSource, buffer: memoryview, settings: FetchSettings) -> int:
    with Fetcher(settings) as fetcher:
        done = fetcher.read_into(source, 0, buffer)
    source.store.close()
    return done


def _local(path: Path, buffer: memoryview) -> int:
    """The file by one thread, no checks."""
    fd = os.open(path, os.O_RDONLY)
    try:
        done = 0
        while done < len(buffer):
            done += os.preadv(fd, [buffer[done : done + BLOCK_BYTES]], done)
    finally:
        os.close(fd)
    return done


# --- the benchmark ---------------------------------------------------------------------------


def _cases(name: str, sides: dict[str, Callable[[], int]], rounds: int) -> list[harness.Case]:
    cpu: dict[str, list[float]] = {side: [] for side in sides}

    def measured(side: str, work: Callable[[], int]) -> float:
        speed, cpu_s = _measured(work)
        cpu[side].append(cpu_s)
        return speed

    speeds = harness.interleave(
        {side: lambda s=side, w=work: measured(s, w) for side, work in sides.items()},  # type: ignore[misc]
        rounds=rounds,
    )
    counted = {side: values[-rounds:] for side, values in cpu.items()}
    return [
        *harness.cases_of(name, speeds, unit="GB/s", better="higher"),
        *harness.cases_of(name, counted, unit="CPU s/GB"),
    ]


def _over_the_network(
    path: Path, buffer: memoryview, options: harness.Options, *, apart: bool
) -> list[harness.Case]:
    """The cases of the paced store; `apart`: with half of the cores for each end."""
    from bootseer.storage.http.store import HttpStore
    from bootseer.storage.options import StoreOptions

    near, far = cores.halves() if apart else ([], [])
    server_of = PacedServer(path.parent, bytes_per_s=BYTES_PER_S, latency_s=LATENCY_S, cpus=far)
    with server_of as server, cores.only_on(near):
        store = HttpStore(server.url, StoreOptions(streams=CONNECTIONS))
        source = Verified(store, path, BLOCK_BYTES)
        trusting = Verified(store, path, BLOCK_BYTES, checks=False)
        settings = FetchSettings(connections=CONNECTIONS)
        raw = {"raw parallel": lambda: _raw(server.port, buffer, CONNECTIONS)}
        sides: dict[str, Callable[[], int]] = {
            harness.OURS: lambda: _ours(source, buffer, settings),
            "ours, no check": lambda: _ours(trusting, buffer, settings),
            **raw,
        }
        paced = f"each connection {BYTES_PER_S / 1e6:g} MB/s, answers after {LATENCY_S * 1e3:g} ms"
        if apart:
            made = _cases("range fetch, cores apart", sides, options.runs)
            split = f"client on {len(near)} cores, store on {len(far)} others"
            return harness.under(f"{paced}; {split}", made)
        sides["one stream"] = lambda: _one_stream(server.port, buffer[: len(buffer) // 8])
        cases = _cases("range fetch", sides, options.runs)
        small = Verified(store, path, SMALL_BLOCK_BYTES)
        sides = {harness.OURS: lambda: _ours(small, buffer, settings), **raw}
        cases += _cases("range fetch, 256 KiB blocks", sides, options.runs)
        return harness.under(f"{paced}; cores shared", cases)


def run(options: harness.Options) -> list[harness.Case]:
    """See the module text; `--quick` reads an eighth of the bytes."""
    from bootseer.storage.local import LocalStore

    size = QUICK_BYTES if options.quick else FULL_BYTES
    buffer = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    populate(buffer, huge=True)
    cases: list[harness.Case] = []
    with tempfile.TemporaryDirectory(prefix="bootseer-bench-") as folder:
        path = Path(folder) / NAME
        _fill(path, size)
        cases += _over_the_network(path, buffer, options, apart=False)
        if len(os.sched_getaffinity(0)) > 1:
            cases += _over_the_network(path, buffer, options, apart=True)
        local = LocalStore(folder)
        for block_bytes, name in ((BLOCK_BYTES, "4 MiB"), (SMALL_BLOCK_BYTES, "256 KiB")):
            near = Verified(local, path, block_bytes)
            sides = {
                harness.OURS: lambda near=near: _ours(near, buffer, FetchSettings()),  # type: ignore[misc]
                "one preadv loop": lambda: _local(path, buffer),
            }
            made = _cases(f"local store, {name} blocks", sides, options.runs)
            cases += harness.under("page cache warm", made)
    return cases


def _fill(path: Path, size: int) -> None:
    """Bytes that no two blocks share."""
    with path.open("wb", buffering=0) as file:
        for _ in range(size >> 20):
            file.write(os.urandom(1 << 20))
        os.fsync(file.fileno())  # so that nothing is written back while we measure
