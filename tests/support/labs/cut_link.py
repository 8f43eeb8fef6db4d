"""FAKE, for fault injection only: a TCP link to a real server that is cut in the middle."""

from __future__ import annotations

import contextlib
import socket
import threading

from tests.support.labs.web_servers import reset

_PIECE_BYTES = 16 << 10


class CutLink:
    """Forwards connections to `upstream` ("host:port"); `address` is its own.

    Once `cut_after_bytes` have come from there, all connections are reset, and so is every new one,
    for `cut_s`. `cuts` counts the connections that this struck.
    """

    def __init__(self, upstream: str, *, cut_after_bytes: int, cut_s: float) -> None:
        host, _, port = upstream.rpartition(":")
        self._upstream = (host, int(port))
        self._left_bytes, self._cut_s = cut_after_bytes, cut_s
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._is_cut = False
        self.cuts = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                with self._lock:
                    if self._is_cut:
                        self.cuts += 1
                        reset(near)
                        continue
                try:
                    far = socket.create_connection(self._upstream)
                except OSError:
                    reset(near)
                    continue
                with self._lock:
                    self._sockets |= {near, far}
                threading.Thread(target=self._forward_both, args=(near, far), daemon=True).start()

    def _forward_both(self, near: socket.socket, far: socket.socket) -> None:
        back = threading.Thread(target=self._forward, args=(far, near, True), daemon=True)
        back.start()
        self._forward(near, far, False)
        back.join()
        with self._lock:
            self._sockets -= {near, far}
        near.close()
        far.close()

    def _forward(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_PIECE_BYTES):
                target.sendall(data)
                if counted:
                    self._count(len(data))
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _count(self, size_bytes: int) -> None:
        with self._lock:
            was_left = self._left_bytes > 0
            self._left_bytes -= size_bytes
            if not was_left or self._left_bytes > 0:
                return
            self._is_cut = True
            self.cuts += len(self._sockets) // 2
            for one in self._sockets:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            self._sockets.clear()
        timer = threading.Timer(self._cut_s, self._heal)
        timer.daemon = True
        timer.start()

    def _heal(self) -> None:
        with self._lock:
            self._is_cut = False

    def __enter__(self) -> CutLink:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            for one in self._sockets:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
        self._listener.close()
