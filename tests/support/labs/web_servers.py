"""Web servers for tests: a real nginx, certificates, and a FAKE that injects faults."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import signal
import socket
import ssl
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One request as the fake saw it; header names in lower case."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes = b""

    @property
    def span(self) -> tuple[int, int]:
        """The range asked for as [start, end)."""
        first, last = self.headers["range"].removeprefix("bytes=").split("-")
        return int(first), int(last) + 1


Answer = Callable[["FakeServer", socket.socket, Request], bool]


class FakeServer:
    """FAKE, for fault injection only: what it answers is a function of the test.

    The function writes to the socket and returns whether the connection is kept.
    """

    def __init__(
        self, answer: Answer, context: ssl.SSLContext | None = None, host: str = "127.0.0.1"
    ) -> None:
        self._answer, self._context, self._host = answer, context, host
        self._listener = socket.create_server((host, 0))
        self.port: int = self._listener.getsockname()[1]
        self.requests: list[Request] = []
        self.connections = 0
        self.ended = threading.Event()
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def authority(self) -> str:
        return f"{self._host}:{self.port}"

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(sock)
            thread = threading.Thread(target=self._serve, args=(sock,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        # Who tries TLS where there is none sends no text.
        with contextlib.suppress(OSError, UnicodeDecodeError), contextlib.ExitStack() as stack:
            if self._context is not None:
                sock = self._context.wrap_socket(sock, server_side=True)
            stack.enter_context(sock)
            stream = stack.enter_context(sock.makefile("rb"))
            while (request := _parse(stream)) is not None:
                self.requests.append(request)
                if not self._answer(self, sock, request):
                    break
                if "transfer-encoding" in request.headers:
                    # An upload, which waits for its answer only so long: what comes now, if
                    # anything, is its data. Its connection serves no other request.
                    stream.read()
                    break

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        shut(self._listener)
        self._listener.close()
        self._threads[0].join()
        for sock in self._open:
            shut(sock)
        for thread in self._threads[1:]:
            thread.join()
        for sock in self._open:
            sock.close()


def _parse(stream: object) -> Request | None:
    line = stream.readline().decode()  # type: ignore[attr-defined]
    if not line:
        return None
    method, target, _ = line.split()
    headers = {}
    while (line := stream.readline().decode().strip()) != "":  # type: ignore[attr-defined]
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    body = stream.read(int(headers.get("content-length", 0)))  # type: ignore[attr-defined]
    return Request(method, target, headers, body)


def open_sockets() -> set[str]:
    """This process's sockets, by inode."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return {name for name in found if name.startswith("socket:")}


def shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def reset(sock: socket.socket) -> None:
    """Close with a TCP reset."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def head(status: str, **headers: object) -> bytes:
    """The head of an answer; underscores in names become hyphens."""
    lines = [f"HTTP/1.1 {status}", *(f"{k.replace('_', '-')}: {v}" for k, v in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def serve_range(data: bytes, sock: socket.socket, request: Request, **headers: object) -> bool:
    """Answer as a good server does."""
    if request.method == "HEAD":
        sock.sendall(head("200 OK", Content_Length=len(data), **headers))
    elif "range" not in request.headers:
        sock.sendall(head("200 OK", Content_Length=len(data), **headers) + data)
    else:
        start, end = request.span
        end = min(end, len(data))
        span = f"bytes {start}-{end - 1}/{len(data)}"
        sock.sendall(
            head("206 Partial", Content_Length=end - start, Content_Range=span, **headers)
            + data[start:end]
        )
    return True


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


@contextlib.contextmanager
def nginx(folder: Path, server: str) -> Iterator[int]:
    """A real nginx with one `server` block's text, in which `PORT` stands for the port given."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("body", "proxy", "fastcgi", "uwsgi", "scgi"):
        (folder / part).mkdir(exist_ok=True)
    paths = "".join(
        f"{name}_temp_path {folder}/{part};"
        for name, part in (
            ("client_body", "body"), ("proxy", "proxy"), ("fastcgi", "fastcgi"),
            ("uwsgi", "uwsgi"), ("scgi", "scgi"),
        )
    )  # fmt: skip
    (folder / "nginx.conf").write_text(
        f"daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;\n"
        f"events {{}}\nhttp {{ access_log {folder}/access.log; {paths}\n"
        f"server {{ {server.replace('PORT', str(port))} }} }}\n"
    )
    process = subprocess.Popen(
        ["/usr/sbin/nginx", "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", "stderr"],
        preexec_fn=die_with_parent,
        stderr=subprocess.DEVNULL,
    )
    try:
        while True:
            assert process.poll() is None, (folder / "error.log").read_text()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.01)
        yield port
    finally:
        process.kill()
        process.wait()


KEY_USAGE = "keyUsage=critical,keyCertSign,cRLSign"
"""Python 3.13 believes no authority without it."""


def certificates(folder: Path) -> tuple[Path, Path, Path]:
    """Make an authority and a server's certificate for 127.0.0.1: (ca, certificate, key)."""
    folder.mkdir(parents=True, exist_ok=True)
    ca, ca_key = folder / "ca.pem", folder / "ca.key"
    own, key, ask = folder / "own.pem", folder / "own.key", folder / "own.csr"
    extra = folder / "extra"
    extra.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\nauthorityKeyIdentifier=keyid\n")
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    _openssl("req", "-x509", *curve, "-keyout", ca_key, "-out", ca, "-subj", "/CN=test-authority",
             "-days", "30", "-addext", KEY_USAGE)  # fmt: skip
    _openssl("req", "-new", *curve, "-keyout", key, "-out", ask, "-subj", "/CN=127.0.0.1")
    _openssl("x509", "-req", "-in", ask, "-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-out",
             own, "-days", "30", "-extfile", extra)  # fmt: skip
    return ca, own, key


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
