"""What the links between HDFS's machines carry by plain TCP."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from tools.netlab import Host

MIB = 1 << 20
TCP_PORT = 5001
TCP_SECONDS = 1.5
SENDER = """
import socket
server = socket.create_server(("", %d))
print("up", flush=True)
block = bytes(1 << 20)
while True:
    with server.accept()[0] as connection:
        try:
            while True:
                connection.sendall(block)
        except OSError:
            pass
"""


@contextlib.contextmanager
def senders(hosts: Sequence[Host]) -> Iterator[None]:
    """On each host a program that sends as fast as its link allows."""
    processes = []
    try:
        for host in hosts:
            words = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-c", SENDER % TCP_PORT]
            process = subprocess.Popen([*host.prefix, *words], stdout=subprocess.PIPE)
            processes.append(process)
            assert process.stdout is not None
            process.stdout.readline()
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def link_sum(hosts: Sequence[Host]) -> float:
    """MiB a second that all links carry at once by one TCP connection each."""
    counts = [0] * len(hosts)

    def receive(number: int) -> None:
        buffer = bytearray(MIB)
        with socket.create_connection((hosts[number].address, TCP_PORT)) as connection:
            end = time.perf_counter() + TCP_SECONDS
            while time.perf_counter() < end:
                counts[number] += connection.recv_into(buffer)

    threads = [threading.Thread(target=receive, args=(n,)) for n in range(len(counts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / MIB / TCP_SECONDS
