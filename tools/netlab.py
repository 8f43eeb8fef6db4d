"""Hosts with capped links on one machine: network namespaces joined by a bridge.

Nothing has a name in the machine's own lists: namespaces live as long as the processes in them,
and everything is gone when this process is, however it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import NamedTuple, Self

CLONE_NEWNET = 0x40000000
OURS = "10.97.0.1"
BURST = "128k"  # less than one GSO frame (64 KiB) would cut frames up, at a cost
QUEUE_S = 0.02


class Host(NamedTuple):
    """One host: its address, and the words before a command that run it there."""

    address: str
    prefix: tuple[str, ...]


@contextlib.contextmanager
def own_network() -> Iterator[None]:
    """Move this thread, and what it starts from now on, into an empty network; then back.

    Call it in the main thread, while there are no others. Needs CAP_SYS_ADMIN.
    """
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check("unshare", _libc().unshare(CLONE_NEWNET))
        try:
            _ip("link", "set", "lo", "up")
            yield
        finally:
            _check("setns", _libc().setns(before, CLONE_NEWNET))
    finally:
        os.close(before)


def enter_own_network(*addresses: str) -> None:
    """Move this thread, and the threads it starts from now on, into an empty network for good.

    Its loopback device has `addresses` besides its own. Needs CAP_SYS_ADMIN.
    """
    _check("unshare", _libc().unshare(CLONE_NEWNET))
    _ip("link", "set", "lo", "up")
    for address in addresses:
        _ip("addr", "add", f"{address}/32", "dev", "lo")


class Network:
    """Hosts on a bridge that we are on as well, at `OURS`; a context manager.

    To be used within `own_network`. Both directions of each host's link carry `mbit` megabits a
    second, Ethernet, IP and TCP headers included; 0 leaves them free.
    """

    def __init__(self, count: int, *, mbit: float = 0) -> None:
        self._count = count
        self._mbit = mbit
        self._holders: list[subprocess.Popen[bytes]] = []
        self.hosts: list[Host] = []

    def __enter__(self) -> Self:
        try:
            _ip("link", "add", "br0", "type", "bridge", "stp_state", "0", "forward_delay", "0")
            _ip("addr", "add", f"{OURS}/16", "dev", "br0")
            _ip("link", "set", "br0", "up")
            for number in range(self._count):
                self.hosts.append(self._add(number))
        except BaseException:  # no namespaces stay behind
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def _end(self) -> None:
        # A port would go with its host's namespace: some time after the last process in there.
        ports = [f"port{number}" for number in range(len(self._holders))]
        for device in (*ports, "br0"):
            subprocess.run(["ip", "link", "del", device], check=False, capture_output=True)
        for holder in self._holders:
            holder.kill()
            holder.wait()

    def _add(self, number: int) -> Host:
        holder = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sleep", "infinity"]
        )
        self._holders.append(holder)
        pid = str(holder.pid)
        ours = os.stat("/proc/self/ns/net").st_ino
        while os.stat(f"/proc/{pid}/ns/net").st_ino == ours:
            time.sleep(0.005)
        port, address = f"port{number}", f"10.97.1.{number + 1}"
        inside = ("nsenter", "-t", pid, "-n")
        _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", pid)
        _ip("link", "set", port, "master", "br0", "up")
        _ip("link", "set", "lo", "up", inside=inside)
        _ip("addr", "add", f"{address}/16", "dev", "eth0", inside=inside)
        _ip("link", "set", "eth0", "up", inside=inside)
        if self._mbit:
            self._cap("eth0", inside)
            self._cap(port, ())
        return Host(address, inside)

    def _cap(self, device: str, inside: Sequence[str]) -> None:
        limit = max(256 << 10, int(self._mbit * 1e6 / 8 * QUEUE_S))
        rate = ("rate", f"{self._mbit:g}mbit", "burst", BURST, "limit", str(limit))
        _run(*inside, "tc", "qdisc", "replace", "dev", device, "root", "tbf", *rate)


def _ip(*words: str, inside: Sequence[str] = ()) -> None:
    _run(*inside, "ip", *words)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(call: str, result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{call}: {os.strerror(ctypes.get_errno())}")
