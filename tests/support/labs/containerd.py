"""A real containerd with the snapshotter, for tests: `with containerd.Lab(folder) as lab`.

Both run in mount and PID namespaces of their own, below a process that ends with the test's:
whatever happens, no mount, server or container is left. `lab.folder` is short, as sockets need.

    lab.pull(ref)                       what `ctr-remote images rpull` does: layers by label
    lab.cri_pull(ref)                   what kubelet asks of containerd, by the same socket
    lab.run(ref, "cat", "/x")           a container's output
    lab.kill_snapshotter(), lab.start_snapshotter()
    lab.said()                          the snapshotter's log
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tests.support.labs.snapshotter_client import Client
from tools.containerd.server import NAMESPACE, Containerd

NAME = "bootseer"
READY_S = 60.0
_PLUGIN = 'disabled_plugins = [\n  "io.containerd.grpc.v1.cri",'
_CRI = """
[plugins."io.containerd.grpc.v1.cri".containerd]
  snapshotter = "bootseer"
  disable_snapshot_annotations = false
[plugins."io.containerd.grpc.v1.cri".cni]
  conf_dir = "{folder}/cni"
[plugins."io.containerd.grpc.v1.cri"]
  disable_apparmor = true
"""
# Process 1 of the namespaces: reaps, and ends when the test does.
_INIT = "import os,time\nwhile 1:\n try: os.wait()\n except OSError: time.sleep(.2)"


def children_of(pid: int) -> list[str]:
    """The ids of a process's children."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def start_namespaces() -> tuple[subprocess.Popen[bytes], list[str]]:
    """Mount and PID namespaces, and the words before a command that runs in them.

    The process ends with the test's; whoever kills it ends all that runs and is mounted there.
    """
    command = ["setpriv", "--pdeathsig", "KILL", "unshare", "-m", "-p", "-f", "--mount-proc"]
    command += ["--kill-child", "--propagation", "private", sys.executable, "-c", _INIT]
    init = subprocess.Popen(command)
    until(lambda: "python" in _name_of(children_of(init.pid)), "the namespaces")
    inside = ["nsenter", "-t", children_of(init.pid)[0], "-m", "-p"]
    return init, [*inside, "setpriv", "--pdeathsig", "KILL"]


class Lab:
    def __init__(self, *options: str, cri: bool = False) -> None:
        """`options` are the snapshotter's."""
        self.folder = Path(tempfile.mkdtemp(prefix="cd-"))
        self.socket = self.folder / "snap.sock"
        self.root = self.folder / "snap"
        self._options = options
        self._init: subprocess.Popen[bytes] | None = None
        self._snapshotter: subprocess.Popen[bytes] | None = None
        self._cri = cri
        self._number = 0
        self.environment = {
            **os.environ,
            "BOOTSEER_CACHE": str(self.folder / "cache"),
            "BOOTSEER_RUNTIME": str(self.folder / "runtime"),
        }

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        self._init, self.prefix = start_namespaces()
        extra = _CRI.format(folder=self.folder) if self._cri else ""
        self.containerd = Containerd(
            self.folder, snapshotters={NAME: self.socket}, prefix=self.prefix, extra_config=extra
        )
        if self._cri:
            config = self.folder / "config.toml"
            config.write_text(config.read_text().replace(_PLUGIN, "disabled_plugins = ["))
        self.start_snapshotter()
        self.containerd.start()

    def __exit__(self, *_: object) -> None:
        if self._snapshotter is not None:
            self.kill_snapshotter()
        if self._init is not None:
            if hasattr(self, "containerd"):
                self.containerd.stop()
            self._init.kill()
            self._init.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- the snapshotter ----------------------------------------------------------------------

    def start_snapshotter(self, *options: str) -> None:
        words = ["--root", str(self.root), "--address", str(self.socket), *self._options, *options]
        command = [*self.prefix, sys.executable, "-m", "bootseer", "snapshotter", *words]
        before = self.said().count("listening")
        with (self.folder / "snapshotter.log").open("ab") as log:
            self._snapshotter = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment
            )
        until(lambda: self.said().count("listening") > before, "the snapshotter", self.said)

    def kill_snapshotter(self) -> None:
        """By signal 9: it is its parent's death signal."""
        assert self._snapshotter is not None
        self._snapshotter.kill()
        self._snapshotter.wait()
        self._snapshotter = None

    def said(self) -> str:
        path = self.folder / "snapshotter.log"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    # --- containerd ---------------------------------------------------------------------------

    def wait_connected(self) -> None:
        """After a restart, containerd tries again only after a pause of up to 3 s."""
        words = ("snapshots", "--snapshotter", NAME, "ls")
        until(lambda: not self.containerd(*words, check=False).returncode, "containerd", self.said)

    def pull(self, ref: str) -> str:
        words = ["images", "rpull", "--plain-http", "--snapshotter", NAME, ref]
        return self.containerd(*words, program="ctr-remote").stdout

    def cri_pull(self, ref: str) -> str:
        """The image's id. The message's one field holds another whose first is the name."""
        import grpc

        name = ref.encode()
        spec = b"\x0a" + bytes([len(name)]) + name
        with grpc.insecure_channel(f"unix:{self.containerd.address}") as channel:
            call = channel.unary_unary("/runtime.v1.ImageService/PullImage")
            answer = call(b"\x0a" + bytes([len(spec)]) + spec, timeout=120)
        return answer[2:].decode()

    def run(self, ref: str, *words: str, namespace: str = NAMESPACE) -> str:
        self._number += 1
        # runc knows those of all labs; not every name of a folder is an identifier.
        container = f"{self.folder.name.encode().hex()}-{self._number}"
        ctr = [*self.prefix, "ctr", "-a", str(self.containerd.address), "-n", namespace]
        # Through ctr's own FIFOs the output of a command that ends at once may be lost on a busy
        # machine: it gives up opening them (containerd/containerd, issue 770).
        log = self.folder / f"{container}.log"
        command = ["run", "--rm", "--snapshotter", NAME, "--env", "PATH=/bin:/usr/bin"]
        command += ["--log-uri", f"file://{log}", ref]
        done = subprocess.run(
            [*ctr, *command, container, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if done.returncode:
            said = log.read_text() if log.exists() else ""
            raise RuntimeError(f"{' '.join(words)}: {said}{done.stderr}\n{self.said()}")
        return log.read_text()

    def snapshots(self) -> list[list[str]]:
        """Name, parent and kind, as `ctr` lists them."""
        said = self.containerd("snapshots", "--snapshotter", NAME, "ls").stdout
        return [line.split() for line in said.splitlines()[1:]]

    def client(self, *, lease: str) -> Client:
        """Speaks to containerd's own snapshots service, under a lease."""
        about = (("containerd-namespace", NAMESPACE), ("containerd-lease", lease))
        return Client(self.containerd.address, about)

    def inside(self, *words: str) -> str:
        """A command's output in the namespaces."""
        done = subprocess.run([*self.prefix, *words], capture_output=True, text=True, check=True)
        return done.stdout


def _name_of(pids: Sequence[str]) -> str:
    try:
        return os.readlink(f"/proc/{pids[0]}/exe") if pids else ""
    except OSError:
        return ""


def until(ready: object, what: str, said: object = None) -> None:
    """Wait for something to come true; RuntimeError with what was said when it does not."""
    end = time.monotonic() + READY_S
    while not ready():  # type: ignore[operator]
        if time.monotonic() > end:
            raise RuntimeError(f"{what} did not come: {said() if said else ''}")  # type: ignore[operator]
        time.sleep(0.02)
