"""`bootseer start` with a checkpoint: mounted, copied, or brought the plain way."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.config.sections import CheckpointSettings
from bootseer.entrypoint import plain_times
from bootseer.entrypoint.parts import checkpoint_part
from bootseer.errors import NoSpaceError, NotFoundError, StoreUnavailableError
from bootseer.fuse.mount.mount_point import find_mount, unmount
from bootseer.profiler.report import analysis
from bootseer.profiler.report.load import load
from bootseer.storage import retry
from bootseer.stripedfs.read import open as opening
from tests.support.labs.web_servers import FakeServer, Request, head, serve_range
from tests.support.mounts.images import begun_with
from tests.support.page_cache import page_cache_stays
from tests.support.paths import ROOT
from tests.support.waiting import until

pytestmark = pytest.mark.slow

__all__ = ["page_cache_stays"]

SIZE_BYTES = (9 << 20) + 17
BOOTSEER = [sys.executable, "-m", "bootseer"]


class Running:
    """A start whose job runs, and the servers that it has begun."""

    def __init__(self, process: subprocess.Popen[bytes], variable: str) -> None:
        self.process, self._variable = process, variable

    def read_line(self) -> bytes:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def write_line(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def servers(self) -> list[int]:
        return [pid for pid in begun_with(self._variable) if pid != self.process.pid]

    def signal_servers(self, number: signal.Signals) -> None:
        for pid in self.servers():
            os.kill(pid, number)


class Job:
    """A folder with a checkpoint in a striped store, settings, and a job that reads it."""

    def __init__(self, path: Path) -> None:
        self.path, self.to, self.events = path, path / "to", path / "events"
        self.data = os.urandom(SIZE_BYTES)
        (path / "model.pt").write_bytes(self.data)
        self.url = f"file://{path}/store/model.pt"
        put = [
            *BOOTSEER,
            "stripe",
            "put",
            "--width",
            "3",
            "--chunk",
            "1MiB",
            str(path / "model.pt"),
        ]
        subprocess.run([*put, self.url], check=True, capture_output=True)

    def settings(self, **more: Any) -> None:
        values = {"url": self.url, "to": str(self.to), **more}
        lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
        (self.path / "bootseer.toml").write_text(f"[checkpoint]\n{lines}", encoding="utf-8")

    def start(self, *job: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [*BOOTSEER, "start", "--events", str(self.events), "--", *job],
            cwd=self.path,
            capture_output=True,
            check=False,
        )

    @contextlib.contextmanager
    def running(self, *job: str) -> Iterator[Running]:
        """A start whose job goes on meanwhile; nothing of it is left afterwards."""
        variable = "BOOTSEER_TEST_RUNNING"
        mark = f"{self.path}-{time.monotonic_ns()}"
        with subprocess.Popen(
            [*BOOTSEER, "start", "--events", str(self.events), "--", *job],
            cwd=self.path,
            env={**os.environ, variable: mark},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process:
            try:
                yield Running(process, f"{variable}={mark}")
            finally:
                process.kill()
                for pid in begun_with(f"{variable}={mark}"):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)
        until(lambda: not begun_with(f"{variable}={mark}"), "its servers have ended")

    def sum_line(self) -> bytes:
        """What `sha256sum` says of the checkpoint."""
        return f"{hashlib.sha256(self.data).hexdigest()}  {self.to}/model.pt\n".encode()

    def log(self) -> Path:
        """Where this user's mounts say what went wrong."""
        return Path(os.environ["XDG_STATE_HOME"]) / "bootseer/checkpoint.log"

    def lines(self) -> list[dict[str, Any]]:
        texts = (path.read_text(encoding="utf-8") for path in self.events.glob("*.jsonl"))
        return [json.loads(line) for text in texts for line in text.splitlines()]

    def reasons(self) -> list[str]:
        return [
            e["attributes"]["bootseer.reason"]
            for e in self.lines()
            if "bootseer.reason" in e["attributes"]
        ]

    def ends(self) -> list[dict[str, Any]]:
        loads = [e for e in self.lines() if e["name"] == "checkpoint.load" and e["event"] == "end"]
        return sorted(loads, key=lambda event: event["time_unix_nano"])

    def form(self) -> str:
        (end,) = self.ends()
        return str(end["attributes"].get("bootseer.form"))

    def unmounted(self) -> bool:
        """Whether the mount went away by itself, within a generous time."""
        until = time.monotonic() + 30
        while find_mount(str(self.to)) is not None and time.monotonic() < until:
            time.sleep(0.05)
        return find_mount(str(self.to)) is None


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    if find_mount(str(made.to)) is not None:
        with contextlib.suppress(NotFoundError):  # it ends by itself too, with its job
            unmount(str(made.to), lazily=True)


@pytest.mark.root
def test_the_job_reads_from_a_mount_that_ends_with_it(job: Job) -> None:
    job.settings()
    done = job.start("cat", str(job.to / "model.pt"))
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == job.data
    assert (job.form(), job.reasons()) == ("mount", [])
    assert job.unmounted()


@pytest.mark.root
@pytest.mark.parametrize("reader", ["read", "map"])
def test_why_the_jobs_read_failed_is_in_the_log_and_the_report(
    job: Job, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    """A wrong bit on the store: the job gets EIO, or SIGBUS, which say nothing."""
    monkeypatch.setenv("XDG_STATE_HOME", str(job.path / "state"))
    stripe = next((job.path / "store/model.pt.stripes").glob("v-*/stripe-00000"))
    stripe.chmod(0o644)
    data = bytearray(stripe.read_bytes())
    data[99] ^= 4
    stripe.write_bytes(data)
    job.settings()
    mapped = (
        "import mmap, sys\n"
        "with open(sys.argv[1]) as file:\n"
        "    mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)[99]"
    )
    words = ["cat"] if reader == "read" else [sys.executable, "-c", mapped]
    done = job.start(*words, str(job.to / "model.pt"))
    assert done.returncode == (1 if reader == "read" else -signal.SIGBUS)
    assert job.form() == "mount"
    (line,) = job.log().read_text().splitlines()
    assert "does not match its digest" in line
    assert "model.pt" in line
    assert job.log().stat().st_mode & 0o777 == 0o600
    (told,) = analysis.analyse(load.load([str(job.events)])).incidents
    assert (told.status, told.phase) == ("fallback", "checkpoint.fault")
    assert "does not match its digest" in told.reason
    assert job.unmounted()


@pytest.mark.root
def test_a_log_that_cannot_be_kept_keeps_nobody_from_mounting(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job.path / "no-folder").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(job.path / "no-folder"))
    job.settings()
    done = job.start("cat", str(job.to / "model.pt"))
    assert (done.returncode, done.stdout) == (0, job.data)
    (said,) = done.stderr.splitlines()
    assert said.startswith(b"bootseer: no log of what goes wrong in this mount: ")
    assert job.form() == "mount"


SHARE = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.support.page_cache import share_in_memory
path = Path(sys.argv[1])
path.read_bytes()
print(share_in_memory(path))
"""


@pytest.mark.root
@pytest.mark.usefixtures("page_cache_stays")
@pytest.mark.parametrize(
    ("more", "is_kept"),
    [
        ({}, True),
        ({"buffered": False}, False),
        ({"prefetch": ""}, False),
        ({"prefetch": "", "buffered": True}, True),
    ],
)
def test_the_page_cache_is_used_as_the_settings_say(
    job: Job, more: dict[str, Any], is_kept: bool
) -> None:
    job.settings(**more)
    done = job.start(sys.executable, "-c", SHARE, str(job.to / "model.pt"))
    assert (float(done.stdout) > 0.5) == is_kept, done
    assert job.form() == "mount"


@pytest.mark.root
@pytest.mark.parametrize("goes_on", ["soon", "later"])
def test_what_a_killed_job_has_left_mounted_is_replaced(job: Job, goes_on: str) -> None:
    """Its servers are stopped when it is killed, as those of a busy machine may be for a while.

    They go on while the second start looks at their mount, or only after it has its own, which
    they leave alone.
    """
    job.settings()
    read = f"sha256sum {job.to}/model.pt"
    with job.running("sh", "-c", f"{read}; exec sleep 300") as first:
        assert first.read_line() == job.sum_line()
        first.signal_servers(signal.SIGSTOP)
        left = first.servers()
        first.process.kill()
        first.process.wait()
        old = find_mount(str(job.to))
        assert old is not None  # it struck
        timer = threading.Timer(1.0, first.signal_servers, (signal.SIGCONT,))
        if goes_on == "soon":
            timer.start()
        with job.running("sh", "-c", f"{read}; read line; {read}") as second:
            assert second.read_line() == job.sum_line()
            if goes_on == "later":
                assert set(first.servers()) == set(left)
                first.signal_servers(signal.SIGCONT)
            until(lambda: not first.servers(), "the old servers have ended")
            second.write_line()
            assert second.read_line() == job.sum_line()
            assert second.process.wait(30) == 0
    assert [end["attributes"]["bootseer.form"] for end in job.ends()] == ["mount", "mount"]
    assert job.reasons() == []
    assert job.unmounted()


@pytest.mark.root
def test_the_mount_of_a_job_that_runs_is_there_again_afterwards(job: Job) -> None:
    job.settings()
    script = f"echo ready; read line; sha256sum {job.to}/model.pt"
    with job.running("sh", "-c", script) as first:
        assert first.read_line() == b"ready\n"
        done = job.start("cat", str(job.to / "model.pt"))
        assert (done.returncode, done.stdout) == (0, job.data), done.stderr
        first.write_line()
        assert first.read_line() == job.sum_line()
        assert first.process.wait(30) == 0
    assert job.reasons() == []
    assert job.unmounted()


@pytest.mark.root
def test_a_look_that_fails_takes_nothing_from_a_job_that_runs(job: Job) -> None:
    job.settings()
    store, away = job.path / "store", job.path / "away"
    script = f"echo ready; read line; sha256sum {job.to}/model.pt"
    with job.running("sh", "-c", script) as first:
        assert first.read_line() == b"ready\n"
        store.rename(away)
        done = job.start("echo", "job")
        away.rename(store)
        assert (done.returncode, done.stdout) == (0, b"job\n"), done.stderr
        first.write_line()
        assert first.read_line() == job.sum_line()
        assert first.process.wait(30) == 0
    assert any(str(store) in reason for reason in job.reasons())
    assert job.unmounted()


@pytest.mark.root
def test_a_job_that_takes_its_time_to_end_takes_nothing_from_the_next(job: Job) -> None:
    job.settings()
    script = f"echo ready; read line; sha256sum {job.to}/model.pt"
    with job.running("sh", "-c", script) as first:
        assert first.read_line() == b"ready\n"
        with job.running("sh", "-c", script) as second:
            assert second.read_line() == b"ready\n"
            first.process.kill()
            first.process.wait()
            time.sleep(1.5)  # in which its server looks whether it can unmount
            assert first.servers()
            second.write_line()
            assert second.read_line() == job.sum_line()
            assert second.process.wait(30) == 0
        until(lambda: not first.servers(), "the first one's servers have ended")
    assert job.reasons() == []
    assert job.unmounted()


@pytest.mark.root
def test_the_mount_of_another_checkpoint_that_is_in_use_is_not_written_into(job: Job) -> None:
    job.settings()
    script = f"echo ready; read line; sha256sum {job.to}/model.pt"
    with job.running("sh", "-c", script) as first:
        assert first.read_line() == b"ready\n"
        job.settings(url=f"file://{job.path}/store")
        done = job.start("echo", "job")
        assert (done.returncode, done.stdout) == (0, b"job\n"), done.stderr
        first.write_line()
        assert first.read_line() == job.sum_line()
    (reason,) = job.reasons()
    assert f"{job.to} is mounted already, from {job.url}" in reason


def test_a_copy_is_there_before_the_job(job: Job) -> None:
    job.settings(form="copy")
    done = job.start("cat", str(job.to / "model.pt"))
    assert (done.returncode, done.stdout) == (0, job.data)
    assert job.form() == "copy"


@pytest.mark.root
def test_without_a_device_the_checkpoint_is_copied_and_the_report_says_why(job: Job) -> None:
    """In a mount namespace where /dev/fuse is something else."""
    job.settings()
    hidden = [
        "unshare",
        "-m",
        "sh",
        "-c",
        'mount --bind /dev/null /dev/fuse && exec "$@"',
        "-",
    ]
    done = subprocess.run(
        [*hidden, *BOOTSEER, "start", "--events", job.events, "--", "cat", job.to / "model.pt"],
        cwd=job.path,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, job.data)
    assert b"no mount here" in done.stderr
    assert job.form() == "copy"


@pytest.mark.parametrize("damage", ["gone", "corrupt", "newer"])
def test_a_store_that_fails_is_replaced_by_the_plain_command(job: Job, damage: str) -> None:
    stripes = job.path / "store/model.pt.stripes"
    if damage == "gone":
        job.url = f"file://{job.path}/nowhere/model.pt"
    else:
        (manifest,) = stripes.rglob("manifest.json")
        text = manifest.read_text(encoding="utf-8")
        manifest.chmod(0o644)
        document = json.loads(text)
        document["version"] = 99
        manifest.write_text(text[:50] if damage == "corrupt" else json.dumps(document))
    load = ["sh", "-c", f"mkdir -p {job.to} && cp {job.path}/model.pt {job.to}/"]
    job.settings(load=load, form="copy")
    done = job.start("cat", str(job.to / "model.pt"))
    assert (done.returncode, done.stdout) == (0, job.data)
    assert b"going on the plain way" in done.stderr
    (reason, *_) = job.reasons()
    assert reason


@pytest.mark.parametrize("known_s", [None, 70.0])
def test_a_store_that_falls_silent_costs_seconds(job: Job, known_s: float | None) -> None:
    """Fault injection: the store is a fake that sends half of the file, and then nothing."""

    def answer(server: FakeServer, sock: socket.socket, request: Request) -> bool:
        if request.method == "HEAD" or "range" not in request.headers:
            return serve_range(job.data, sock, request, ETag='"1"', Accept_Ranges="bytes")
        start, end = request.span
        if start == 0:
            return serve_range(job.data, sock, request, ETag='"1"', Accept_Ranges="bytes")
        span = f"bytes {start}-{end - 1}/{len(job.data)}"
        sock.sendall(
            head("206 Partial", Content_Length=end - start, Content_Range=span, ETag='"1"')
            + job.data[start : start + 1000]
        )
        server.ended.wait(60)
        return False

    load = ["sh", "-c", f"mkdir -p {job.to} && cp {job.path}/model.pt {job.to}/"]
    if known_s is not None:
        plain_times.note_duration(load, known_s)
    with FakeServer(answer) as server:
        job.url = f"http://{server.authority}/model.pt"
        job.settings(load=load, form="copy")
        began_s = time.monotonic()
        done = job.start("cat", str(job.to / "model.pt"))
        took_s = time.monotonic() - began_s
        assert len(server.requests) > 2  # it struck
    assert (done.returncode, done.stdout) == (0, job.data), done.stderr
    wait_s = 5.0 if known_s is None else 7.0
    assert f"nothing came from {job.url} for {wait_s:g} s" in job.reasons()[0]
    assert took_s < wait_s + 10  # of which starting Python and the plain command are most
    assert plain_times.find_patience_s(load) == 5.0  # by how long it took this time


@pytest.mark.root
@pytest.mark.parametrize("known_s", [None, 70.0])
def test_a_store_that_falls_silent_while_it_is_mounted_costs_seconds(
    job: Job, known_s: float | None
) -> None:
    """Fault injection: a fake that answers all that mounting asks but the last."""
    silent_s: list[float] = []
    answered: float = math.inf

    def answer(server: FakeServer, sock: socket.socket, request: Request) -> bool:
        if len(server.requests) > answered:
            silent_s.append(time.monotonic())
            server.ended.wait(60)
            return False
        return serve_range(job.data, sock, request, ETag='"1"', Accept_Ranges="bytes")

    load = ["sh", "-c", f"mkdir -p {job.to} && cp {job.path}/model.pt {job.to}/"]
    if known_s is not None:
        plain_times.note_duration(load, known_s)
    with FakeServer(answer) as server:
        job.url = f"http://{server.authority}/model.pt"
        job.settings(load=load, prefetch="")
        assert job.start("true").returncode == 0
        assert job.form() == "mount"
        assert job.unmounted()
        answered = 2 * len(server.requests) - 1
        done = job.start("cat", str(job.to / "model.pt"))
        took_s = time.monotonic() - silent_s[0]
    assert (done.returncode, done.stdout) == (0, job.data), done.stderr
    assert took_s < (5.0 if known_s is None else 7.0) + 3
    assert "cannot look at" in job.reasons()[0]
    assert not job.to.is_mount()


def test_a_plain_command_that_fails_stops_the_start(job: Job) -> None:
    job.settings(enabled=False, load=["sh", "-c", "exit 9"])
    done = job.start("echo", "never")
    assert (done.returncode, done.stdout) == (9, b"")


def test_half_of_the_settings_are_not_tried(job: Job) -> None:
    job.settings(to="", load=["sh", "-c", "echo plain"])
    done = job.start("echo", "job")
    assert done.stdout == b"plain\njob\n"
    assert job.reasons() == ["[checkpoint] needs both url and to"]


def test_what_went_wrong_with_a_copy_is_told(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Injected: no space, after the directory was made."""

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bootseer.stripedfs.read.get.get_from_store", fail)
    settings = CheckpointSettings(url=job.url, to=str(job.to), form="copy")
    with pytest.raises(NoSpaceError, match=f"copy the checkpoint to {job.to}: No space"):
        checkpoint_part._copy(settings)


@pytest.mark.root
def test_what_a_killed_part_left_mounted_is_taken_away_for_the_plain_command(job: Job) -> None:
    """It fails while a mount of the same URL holds the mount point's name."""
    job.settings(
        cache=str(job.path / "model.pt"),  # no directory
        load=["sh", "-c", f"mkdir -p {job.to}; touch {job.to}/x"],
    )
    mount = [*BOOTSEER, "stripe", "mount", job.url, str(job.to)]
    job.to.mkdir()
    subprocess.run(mount, check=True, capture_output=True)
    done = job.start("ls", str(job.to))
    assert (done.returncode, done.stdout) == (0, b"x\n")


def test_a_store_that_the_mount_found_away_is_not_waited_for_as_long_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The plain way waits behind it."""
    left_s: list[float] = []

    def mount(*_: object) -> None:
        raise StoreUnavailableError("cannot look at it: nobody answers")

    def locate(*_: object) -> None:
        left_s.append(retry._end_s.get() - time.monotonic())
        raise StoreUnavailableError("cannot look at it: still nobody")

    monkeypatch.setattr(checkpoint_part, "_mount", mount)
    monkeypatch.setattr(opening, "locate", locate)
    for form in ("auto", "copy"):
        with pytest.raises(StoreUnavailableError, match="still nobody"):
            checkpoint_part._bring_checkpoint(
                CheckpointSettings(url="webhdfs://nobody/x", to=str(tmp_path), form=form)
            )
    assert 0 < left_s[0] <= checkpoint_part.LAST_LOOK_S
    assert left_s[1] == math.inf


@pytest.mark.parametrize("form", ["auto", "copy"])
def test_a_store_that_hangs_is_left_to_a_plain_command_that_waits(job: Job, form: str) -> None:
    """Fault injection: a server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        job.url = f"http://127.0.0.1:{hanging.getsockname()[1]}/model.pt"
        job.settings(load=["sh", "-c", f"mkdir -p {job.to} && echo plain >{job.to}/x"], form=form)
        began_s = time.monotonic()
        done = job.start("cat", str(job.to / "x"))
        assert time.monotonic() - began_s < 4 + 8  # of which all but 4 s is a busy machine's
        hanging.settimeout(0)
        hanging.accept()[0].close()  # it was asked
    assert (done.returncode, done.stdout) == (0, b"plain\n")
    waited = r"no answer for (4|3\.[0-9]+) s"  # less where the look began late in the 4 s
    assert re.search(waited.encode(), done.stderr)
    assert re.search(waited, job.reasons()[0])
    assert not job.to.is_mount()
