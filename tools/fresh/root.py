"""A bare Debian in a folder, and commands in it: own mounts, own processes, nothing of ours."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from tools import debian
from tools.fresh import inside
from tools.fresh.configuration import Configuration

PACKAGES = ("make", "python3", "python3-venv", "git")
"""What README asks for, and what brings a clone."""
USER = "stranger"
HOMES = {"root": "/root", USER: f"/home/{USER}"}
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TIME_ENDED = 124
END_S = 60.0
_WITH_US = ("setpriv", "--pdeathsig", "KILL")
_NETWORK = ("resolv.conf", "hosts", "hostname")


class BareRoot:
    """Debian's smallest system below `folder`; a context manager. Needs root.

    Entering makes it, unless the folder holds one that was kept, and starts its first process;
    leaving ends every process in it, and with them go its mounts. `keep` leaves the folder; a
    folder that holds anything else is neither used nor removed.
    """

    def __init__(self, folder: Path, configuration: Configuration, *, keep: bool) -> None:
        self.folder = folder
        self._configuration = configuration
        self._keep = keep
        self._ours = False
        self._first: subprocess.Popen[bytes] | None = None
        self._pid = 0

    def make(self, log: BinaryIO) -> None:
        """Install Debian into the folder. Raises RuntimeError when that fails; `log` says why."""
        if (self.folder / inside.BINDS).is_file():
            self._ours = True
            return
        if self.folder.is_dir() and any(self.folder.iterdir()):
            raise RuntimeError(
                f"{self.folder} is neither empty nor a root that was kept; name another folder"
            )
        self._ours = True
        include = f"--include={','.join(PACKAGES)}"
        words = ["debootstrap", "--variant=minbase", include, debian.release()]
        self._call([*words, str(self.folder), debian.mirror()], log)
        # An empty cache, as after any installation.
        shutil.rmtree(self.folder / "var/cache/apt/archives")
        (self.folder / "var/cache/apt/archives/partial").mkdir(parents=True)
        for name in _NETWORK:
            if os.path.exists(f"/etc/{name}"):
                (self.folder / "etc" / name).unlink(missing_ok=True)
                shutil.copyfile(f"/etc/{name}", self.folder / "etc" / name)
        words = ["chroot", str(self.folder), "useradd", "--create-home", "--shell", "/bin/sh", USER]
        self._call(words, log)
        self._give_configuration()

    def _give_configuration(self) -> None:
        binds = [(path, path) for path in self._configuration.paths]
        for home in HOMES.values():
            for below, path in self._configuration.in_home.items():
                binds.append((path, f"{home}/{below}"))
                self._make_way(home, Path(below).parent)
        (self.folder / inside.BINDS).write_text(json.dumps(binds), encoding="utf-8")

    def _make_way(self, home: str, below: Path) -> None:
        """Folders of a home that its owner can write to."""
        about = (self.folder / home[1:]).stat()
        for part in [below, *below.parents][-2::-1]:
            place = self.folder / home[1:] / part
            place.mkdir(exist_ok=True)
            os.chown(place, about.st_uid, about.st_gid)

    def __enter__(self) -> Self:
        return self

    def start(self) -> None:
        """Enter it: from now on commands can run. Raises RuntimeError when that fails."""
        namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child=KILL"]
        command = [*_WITH_US, *namespaces, sys.executable, "-I", inside.__file__, str(self.folder)]
        self._first = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert self._first.stdout is not None
        if self._first.stdout.readline() != b"ready\n":
            raise RuntimeError(f"cannot enter {self.folder}")
        children = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children")
        self._pid = int(children.read_text(encoding="ascii").split()[0])

    def run(self, command: str, user: str, folder: str, log: BinaryIO, *, limit_s: float) -> int:
        """Run a shell's line as a user in a folder; its exit code, 124 when its time ran out."""
        environ = {"HOME": HOMES[user], "LOGNAME": user, "USER": user, "PATH": PATH}
        environ |= {"LANG": "C.UTF-8", **self._configuration.variables}
        given = [f"{name}={value}" for name, value in environ.items()]
        line = f"umask 022; cd {folder} && {command}"
        process = subprocess.Popen(
            [
                *(*_WITH_US, "nsenter", f"--target={self._pid}", "--mount", "--pid", "--"),
                *("runuser", "-u", user, "--", "env", "-i", *given, "sh", "-c", line),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._end_all()
            return TIME_ENDED
        finally:
            process.kill()
            process.wait()

    def _end_all(self) -> None:
        """End every process in it but the first, which a signal to -1 spares."""
        words = ["nsenter", f"--target={self._pid}", "--mount", "--pid", "--"]
        subprocess.run([*words, "sh", "-c", "kill -KILL -1"], check=False)

    def left_behind(self) -> list[str]:
        """Command lines of processes that still run in it, but for the first."""
        words = ["nsenter", f"--target={self._pid}", "--mount", "--pid", "--"]
        listed = "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline; echo; done 2>/dev/null"
        done = subprocess.run(
            [*words, "sh", "-c", listed], stdout=subprocess.PIPE, text=True, check=False
        )
        ours = ("/proc/[0-9]", inside.__file__, "tr ")
        lines = [line.strip() for line in done.stdout.splitlines()]
        return [line for line in lines if line and not any(word in line for word in ours)]

    def stop(self) -> None:
        """End all that runs in it; twice is safe."""
        first, self._first = self._first, None
        if first is not None:
            first.kill()  # and with it the namespace's first process, and with that all others
            first.wait()
            assert first.stdout is not None
            first.stdout.close()
            until = time.monotonic() + END_S
            # It ends last of all, and its mounts with it; only then may the folder go.
            while os.path.exists(f"/proc/{self._pid}") and time.monotonic() < until:
                time.sleep(0.05)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
        if self._ours and not self._keep:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _call(self, words: Sequence[str], log: BinaryIO) -> None:
        code = subprocess.call(
            [*_WITH_US, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        if code:
            raise RuntimeError(f"{words[0]} failed with code {code}")
