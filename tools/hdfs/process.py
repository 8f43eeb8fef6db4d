"""One Java server as a child that cannot outlive us."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

QUICK_START = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xss512k")
FULL_SPEED = ("-XX:+UseParallelGC",)
COMMON = (
    "-Xshare:auto",
    "-XX:-UsePerfData",
    "-Djava.net.preferIPv4Stack=true",
    "-Djava.awt.headless=true",
)
# Each server holds this much heap at most; a test cluster of four stays below one GiB.
HEAP = ("-Xms64m", "-Xmx256m")


class Server:
    """A Java main class with its configuration folder and its log; started by `start`.

    The kernel kills it when the thread that called `start` ends: start it in the main thread.
    """

    def __init__(
        self,
        name: str,
        main: str,
        folder: Path,
        classpath: str,
        *,
        options: Sequence[str],
        prefix: Sequence[str] = (),
        arguments: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.folder = folder
        self.log = folder / "log"
        self._command = [
            *prefix,
            *("setpriv", "--pdeathsig", "KILL", "java", *COMMON, *options),
            f"-Djava.io.tmpdir={folder}/tmp",
            *("-cp", f"{classpath}:{folder}", main, *arguments),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The Java process's own id; its namespaces and limits are set before Java starts."""
        if self._process is None:
            raise RuntimeError(f"{self.name} was never started")
        return self._process.pid

    def start(self) -> None:
        (self.folder / "tmp").mkdir(exist_ok=True)
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("HADOOP_", "JAVA_"))}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environ,
            )

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def send(self, signal_number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal_number)

    def pause(self) -> None:
        """Stop it; each of its threads stands still when this returns."""
        self.send(signal.SIGSTOP)
        if self._process is not None:
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def kill(self) -> None:
        """End it at once, also when it is stopped; twice is safe."""
        self.send(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def wait(self, timeout_s: float) -> int:
        """Its exit code; raises RuntimeError with its log's end when it takes longer."""
        assert self._process is not None
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise RuntimeError(f"{self.name} did not end; {self.tail()}") from None

    def tail(self) -> str:
        """The end of its log, for an error message."""
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            return f"its log cannot be read: {error}"
        return f"its log {self.log} ends:\n{text[-3000:]}"


def wait_until(what: str, ready: object, timeout_s: float, servers: Sequence[Server]) -> None:
    """Poll `ready()` until true. RuntimeError when a server died or time is up."""
    assert callable(ready)
    end = time.monotonic() + timeout_s
    while not ready():
        for server in servers:
            if not server.running():
                raise RuntimeError(f"{server.name} died before {what}; {server.tail()}")
        if time.monotonic() > end:
            logs = "\n".join(f"{s.name}: {s.tail()}" for s in servers)
            raise RuntimeError(f"{timeout_s:.0f} s were not enough for {what};\n{logs}")
        time.sleep(0.05)
