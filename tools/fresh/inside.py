"""The first process of a bare root: enter it, then take in orphans until killed.

Started by `tools.fresh.root` in mount and PID namespaces of its own, with one argument: the
folder, below which a file `BINDS` lists what of the machine is to be seen. Prints `ready`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

BINDS = "fresh-binds.json"
MNT_DETACH = 2
SYS_PIVOT_ROOT = 155  # x86-64


def main() -> None:
    """Never returns."""
    root = sys.argv[1]
    binds = json.loads(Path(root, BINDS).read_text(encoding="utf-8"))
    # Tests start programs as children that outlive their parents, which come to this process.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    _mount("--bind", root, root)
    for name in ("dev", "sys"):
        _mount("--rbind", f"/{name}", f"{root}/{name}")
    _mount("-t", "proc", "proc", f"{root}/proc")
    for source, target in binds:
        _give(source, root + target)
    _enter(root)
    print("ready", flush=True)
    while True:
        signal.sigwait({signal.SIGCHLD})
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _give(source: str, target: str) -> None:
    """Show something of the machine in the root, read-only."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(target).touch()
    _mount("--bind", source, target)
    _mount("-o", "remount,bind,ro", target)


def _enter(root: str) -> None:
    """Make `root` the root of this mount namespace, with nothing of the old one left in it."""
    libc = ctypes.CDLL(None, use_errno=True)
    os.chdir(root)
    if libc.syscall(SYS_PIVOT_ROOT, b".", b".") or libc.umount2(b".", MNT_DETACH):
        raise OSError(ctypes.get_errno(), "pivot_root", root)
    os.chroot(".")
    os.chdir("/")


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


if __name__ == "__main__":
    main()
