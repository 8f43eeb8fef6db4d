"""A podman that shares nothing with the machine's: own configuration, storage and run folder.

Everything lies below one folder. `close` ends its containers and leaves no mount behind; it
works after a crash as well, for what is mounted is looked up, not remembered.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

SERVICE_TIMEOUT_S = 30.0
CLEAN_UP_TIMEOUT_S = 10.0

_CONTAINERS = """\
[containers]
netns = "none"
log_driver = "k8s-file"
default_ulimits = [{limits}]
apparmor_profile = "unconfined"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
lock_type = "file"
tmp_dir = "{folder}/tmp"
static_dir = "{folder}/graph/libpod"
volume_path = "{folder}/graph/volumes"
"""
_STORAGE = """\
[storage]
driver = "overlay"
graphroot = "{folder}/graph"
runroot = "{folder}/run"
"""


class Podman:
    """Podman below `folder`; a context manager. Needs root, an overlay-capable file system, runc.

    The folder's path must be short: podman takes no run folder of more than 50 characters.
    `trusted` are registry hosts that are spoken to in plain http (or with any certificate);
    `prefix` is put before every command, to run it in another network namespace.
    """

    def __init__(
        self, folder: Path, *, trusted: Sequence[str] = (), prefix: Sequence[str] = ()
    ) -> None:
        self.folder = folder
        self._prefix = tuple(prefix)
        self._trusted = list(trusted)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "containers.conf").write_text(
            _CONTAINERS.format(folder=folder, limits=_limits()), "ascii"
        )
        (folder / "storage.conf").write_text(_STORAGE.format(folder=folder), "ascii")
        (folder / "policy.json").write_text('{"default":[{"type":"insecureAcceptAnything"}]}')
        (folder / "auth.json").write_text("{}")
        self._write_registries()

    @property
    def environment(self) -> dict[str, str]:
        """What makes any podman command be this one's."""
        return {
            **os.environ,
            "CONTAINERS_CONF": str(self.folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(self.folder / "storage.conf"),
            "CONTAINERS_REGISTRIES_CONF": str(self.folder / "registries.conf"),
            "REGISTRY_AUTH_FILE": str(self.folder / "auth.json"),
            "TMPDIR": str(self.folder),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def trust(self, host: str) -> None:
        """Speak plain http with this registry host too."""
        self._trusted.append(host)
        self._write_registries()

    def log_in(self, auth: Mapping[str, object]) -> None:
        """Use the logins of a `config.json`."""
        (self.folder / "auth.json").write_text(json.dumps(auth), encoding="utf-8")

    def command(self, *words: str) -> list[str]:
        """The whole command line, to be started with `environment`."""
        folders = ["--root", f"{self.folder}/graph", "--runroot", f"{self.folder}/run"]
        tmp = ["--tmpdir", f"{self.folder}/tmp"]
        return [*self._prefix, "podman", *folders, *tmp, *words]

    def __call__(
        self, *words: str, check: bool = True, timeout_s: float = 300.0
    ) -> subprocess.CompletedProcess[str]:
        """Run `podman WORDS` to its end; RuntimeError with its words when it fails."""
        done = subprocess.run(
            self.command(*words),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode:
            said = (done.stderr or done.stdout).strip()[-2000:]
            raise RuntimeError(f"podman {' '.join(words)}: {said}")
        return done

    def pull(self, reference: str) -> str:
        """Pull an image; returns its id."""
        return self("pull", "--quiet", reference).stdout.strip()

    def run(self, image: str, *command: str, options: Sequence[str] = ()) -> str:
        """Run a throw-away container of an image without network; returns its output."""
        return self("run", "--rm", *options, image, *command).stdout

    def run_rootfs(self, root: Path, *command: str, options: Sequence[str] = ()) -> str:
        """Run a throw-away container on a tree, under an overlay that is thrown away as well."""
        return self("run", "--rm", *options, "--rootfs", f"{root}:O", *command).stdout

    @contextlib.contextmanager
    def mounted(self, image: str) -> Iterator[Path]:
        """The image's tree as podman unpacked it, read-only."""
        path = self("image", "mount", image).stdout.strip()
        try:
            yield Path(path)
        finally:
            self("image", "umount", image, check=False)

    @contextlib.contextmanager
    def service(self) -> Iterator[str]:
        """Its API (Docker's as well) on a socket; yields `unix://PATH`."""
        path = self.folder / "podman.sock"
        path.unlink(missing_ok=True)
        command = self.command("system", "service", "--time", "0", f"unix://{path}")
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            _wait_for(path, process)
            yield f"unix://{path}"
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def forget_images(self) -> None:
        """Remove all images and containers: the next pull is a whole one."""
        self("rmi", "--all", "--force", check=False)

    def close(self) -> None:
        """End all containers, undo all mounts below the folder, remove the folder."""
        if not self.folder.exists():
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self("rm", "--all", "--force", "--time", "0", check=False, timeout_s=60)
        # A container's monitor calls podman once more, behind us, and that writes below the folder.
        until = time.monotonic() + CLEAN_UP_TIMEOUT_S
        while _is_used(self.folder) and time.monotonic() < until:
            time.sleep(0.02)
        for path in mounts_below(self.folder):
            subprocess.run(["umount", "-l", path], check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write_registries(self) -> None:
        parts = [f'[[registry]]\nlocation = "{host}"\ninsecure = true\n' for host in self._trusted]
        (self.folder / "registries.conf").write_text("".join(parts), encoding="utf-8")


def _limits() -> str:
    """Limits no higher than those podman itself runs under, which it cannot raise everywhere.

    Without CAP_SYS_RESOURCE nobody can; and it lowers its own number of processes to pid_max.
    -1 is no limit at all, which the remainder turns into a very high one.
    """
    files = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1] % (1 << 64), 1 << 20)
    most = int(Path("/proc/sys/kernel/pid_max").read_text(encoding="ascii"))
    processes = min(resource.getrlimit(resource.RLIMIT_NPROC)[1] % (1 << 64), most)
    return f'"nofile={files}:{files}", "nproc={processes}:{processes}"'


def _is_used(folder: Path) -> bool:
    """Whether any process has a place in the folder in its command line."""
    inside = f"{folder}/".encode()
    for words in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if inside in words.read_bytes():
                return True
    return False


def mounts_below(folder: Path) -> list[str]:
    """What is mounted at or below a folder, last mounted first."""
    top = str(folder.resolve())
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        points = [_unescaped(line.split(" ")[4]) for line in file]
    return [p for p in reversed(points) if p == top or p.startswith(f"{top}/")]


def _unescaped(path: str) -> str:
    for code, letter in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(code, letter)
    return path


def _wait_for(path: Path, process: subprocess.Popen[Any]) -> None:
    until = time.monotonic() + SERVICE_TIMEOUT_S
    while True:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
                return
            except OSError:
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError("podman's service does not answer") from None
        time.sleep(0.02)
