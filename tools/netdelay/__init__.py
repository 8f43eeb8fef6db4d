"""A round-trip time for a network namespace, on kernels without netem.

What comes in over TCP waits in a netfilter queue; so put it on the side that sends little, and it
holds requests and acknowledgements, not data.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("delay.c")
QUEUE = 7


def program() -> Path:
    """The compiled delayer; RuntimeError with the compiler's words when it does not build."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    target = Path(base) / f"bootseer/netdelay-{digest}"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.{os.getpid()}")
        words = ["gcc", "-O2", "-Wall", "-o", str(part), str(SOURCE), "-lnetfilter_queue"]
        done = subprocess.run([*words, "-lnfnetlink"], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"install Debian's libnetfilter-queue-dev: {done.stderr[-1000:]}")
        part.replace(target)
    return target


@contextlib.contextmanager
def delayed(inside: Sequence[str], rtt_ms: float) -> Iterator[None]:
    """Within it, what a namespace receives over TCP waits `rtt_ms`; 0 leaves it alone.

    `inside` are the words before a command that run it in that namespace.
    """
    if not rtt_ms:
        yield
        return
    rule = ["INPUT", "-p", "tcp", "-j", "NFQUEUE", "--queue-num", str(QUEUE)]
    process = subprocess.Popen(
        [
            "setpriv",
            "--pdeathsig",
            "KILL",
            *inside,
            str(program()),
            str(QUEUE),
            f"{rtt_ms * 1e3:.0f}",
        ],
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError("packets cannot be delayed here: no netfilter queue")
        subprocess.run([*inside, "iptables-legacy", "-A", *rule], check=True)
        try:
            yield
        finally:
            subprocess.run([*inside, "iptables-legacy", "-D", *rule], check=True)
    finally:
        process.kill()
        process.communicate()
