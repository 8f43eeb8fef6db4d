"""A containerd of its own: socket, state and content below one folder.

It ends with this process. `stop` ends its containers' shims and undoes the mounts below the
folder; the folder itself is the caller's to remove.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from tools.podman import mounts_below
from tools.servers import Running

READY_TIMEOUT_S = 30.0
NAMESPACE = "lab"
_CONFIG = """\
version = 2
root = "{folder}/root"
state = "{folder}/state"
disabled_plugins = [
  "io.containerd.grpc.v1.cri", "io.containerd.internal.v1.opt",
  "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs",
  "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.devmapper",
]
[grpc]
  address = "{folder}/c.sock"
[ttrpc]
  address = "{folder}/t.sock"
"""
_PROXY = """\
[proxy_plugins.{name}]
  type = "snapshot"
  address = "{address}"
"""


class Containerd(Running):
    """A containerd that runs from `start` to `stop`; a context manager that does both.

    `snapshotters` are proxy plugins, name -> path of the socket; `prefix` is put before every
    command, to run it in another network namespace. The folder's path must be short, as sockets
    lie in it. Needs root, an overlay-capable file system and runc.
    """

    def __init__(
        self,
        folder: Path,
        *,
        snapshotters: Mapping[str, Path] | None = None,
        prefix: Sequence[str] = (),
        extra_config: str = "",
    ) -> None:
        self.folder = folder
        self.address = folder / "c.sock"
        self._prefix = tuple(prefix)
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        text = _CONFIG.format(folder=folder)
        for name, socket in (snapshotters or {}).items():
            text += _PROXY.format(name=name, address=socket)
        (folder / "config.toml").write_text(text + extra_config, encoding="utf-8")

    def start(self) -> Self:
        """Start it and wait until it answers; RuntimeError with its log when it does not."""
        command = ["setpriv", "--pdeathsig", "KILL", "containerd", "--config"]
        log_path = self.folder / "containerd.log"
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._prefix, *command, str(self.folder / "config.toml")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                umask=0o022,
            )
        until = time.monotonic() + READY_TIMEOUT_S
        while self("version", check=False).returncode:
            if self._process.poll() is not None or time.monotonic() > until:
                self.stop()
                said = log_path.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"containerd does not answer: {said}")
            time.sleep(0.05)
        return self

    def command(self, *words: str, program: str = "ctr") -> list[str]:
        """A whole command line for this containerd."""
        return [*self._prefix, program, "-a", str(self.address), "-n", NAMESPACE, *words]

    def __call__(
        self, *words: str, program: str = "ctr", check: bool = True, timeout_s: float = 300.0
    ) -> subprocess.CompletedProcess[str]:
        """Run `ctr WORDS` to its end; RuntimeError with its words when it fails."""
        done = subprocess.run(
            self.command(*words, program=program),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode:
            said = (done.stderr or done.stdout).strip()[-2000:]
            raise RuntimeError(f"{program} {' '.join(words)}: {said}")
        return done

    def stop(self) -> None:
        """End it, its containers and its mounts. Safe to call twice."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        for pid in _shims(str(self.address)):
            _end(pid)
        for path in mounts_below(self.folder):
            subprocess.run(["umount", "-l", path], check=False, stderr=subprocess.DEVNULL)


def _shims(address: str) -> list[int]:
    """The containers' keepers: they are no children of containerd, but name its socket."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"containerd-shim" in words[0] and address.encode() in words:
                found.append(int(name))
    return found


def _end(pid: int) -> None:
    """End a shim with its containers."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        for each in [*map(int, children), pid]:
            os.kill(each, signal.SIGKILL)
    except (OSError, ValueError):
        pass
