"""A web server of ranges, each connection paced by the kernel, each request late by a fixed time.

It stands for a store that serves one stream slowly and many streams well. SO_MAX_PACING_RATE
caps a connection without bursts; bodies go by sendfile from the page cache, from several
processes, so that the server is not the limit. `python -m bench.paced_server ROOT` prints its
port and serves until its standard input ends.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from pathlib import Path
from types import TracebackType

SO_MAX_PACING_RATE = 47
TCP_CORK = 3
PIECE_BYTES = 4 << 20
ROOT = Path(__file__).parent.parent
_REQUEST = re.compile(rb"(GET|HEAD) /(\S+) HTTP/1\.1\r\n")
_RANGE = re.compile(rb"\r\n[Rr]ange: bytes=(\d+)-(\d+)\r\n")


class PacedServer:
    """Runs the server in processes of its own; a context manager. `url` is its root.

    `cpus` are the only processors it may use, any when empty.
    """

    def __init__(
        self,
        folder: Path,
        *,
        bytes_per_s: float,
        latency_s: float,
        processes: int = 3,
        cpus: Collection[int] = (),
    ) -> None:
        words = [sys.executable, "-m", "bench.paced_server", str(folder)]
        words += ["--rate", str(bytes_per_s), "--latency", str(latency_s)]
        words += ["--processes", str(processes), "--cpus", ",".join(map(str, cpus))]
        self._child = subprocess.Popen(
            words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        out = self._child.stdout
        self.port = int(out.readline()) if out is not None else 0
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> PacedServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()
        self._child.wait(10)


def _serve(listener: socket.socket, folder: str, rate: int, latency_s: float) -> None:
    while True:
        connection, _ = listener.accept()
        words = (connection, folder, rate, latency_s)
        threading.Thread(target=_converse, args=words, daemon=True).start()


def _converse(connection: socket.socket, folder: str, rate: int, latency_s: float) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if rate:
        connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate)
    text = b""
    try:
        while True:
            while b"\r\n\r\n" not in text:
                received = connection.recv(65536)
                if not received:
                    return
                text += received
            head, _, text = text.partition(b"\r\n\r\n")
            time.sleep(latency_s)
            _answer(connection, folder, head + b"\r\n")
    except ConnectionError:
        pass
    finally:
        connection.close()


def _answer(connection: socket.socket, folder: str, head: bytes) -> None:
    request, wanted = _REQUEST.match(head), _RANGE.search(head)
    if request is None:
        raise ConnectionError("not a request")
    try:
        fd = os.open(f"{folder}/{request[2].decode()}", os.O_RDONLY)
    except OSError:
        connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        return
    try:
        size = os.fstat(fd).st_size
        start, end = 0, size - 1
        status = "200 OK"
        if wanted is not None:
            start, end = int(wanted[1]), min(int(wanted[2]), size - 1)
            status = f"206 Partial Content\r\nContent-Range: bytes {start}-{end}/{size}"
        answer = f'HTTP/1.1 {status}\r\nETag: "1"\r\nContent-Length: {end + 1 - start}\r\n\r\n'
        connection.setsockopt(socket.IPPROTO_TCP, TCP_CORK, 1)
        connection.sendall(answer.encode())
        while request[1] == b"GET" and start <= end:
            start += os.sendfile(connection.fileno(), fd, start, min(end + 1 - start, PIECE_BYTES))
        connection.setsockopt(socket.IPPROTO_TCP, TCP_CORK, 0)
    finally:
        os.close(fd)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root")
    parser.add_argument("--rate", type=float, default=0.0, help="bytes a second a connection")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before each answer")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--cpus", default="", help="such as 1,3; any when empty")
    words = parser.parse_args()
    if words.cpus:
        os.sched_setaffinity(0, {int(cpu) for cpu in words.cpus.split(",")})
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    for _ in range(words.processes):
        if os.fork() == 0:
            threading.Thread(
                target=_serve,
                args=(listener, words.root, int(words.rate), words.latency),
                daemon=True,
            ).start()
            os.read(0, 1)  # ends with whoever started us
            os._exit(0)
    print(listener.getsockname()[1], flush=True)
    os.read(0, 1)


if __name__ == "__main__":
    main()
