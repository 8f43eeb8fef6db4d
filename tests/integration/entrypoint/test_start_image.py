"""`bootseer start` with an image's traces: beside the job, which never waits and never notices."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.entrypoint.detached import NAME
from bootseer.imageprefetch.filemode import file_trace as filetraces
from bootseer.imageprefetch.filemode.file_trace import Touch, TracedFile
from bootseer.imageprefetch.filemode.file_trace_store import FileTraceStore
from bootseer.imageprefetch.filemode.trace_names import object_name
from tests.support.commands.filemode import (
    AS_NOBODY,
    PAGE,
    PYTHON,
    cold,
    everybodys,
    evict,
    reader,
    resident,
)
from tests.support.waiting import until

pytestmark = pytest.mark.slow

FIRST_STEP = "import bootseer; bootseer.event('first_step')\n"
# What goes on beside a job has the lowest priority: on a busy machine it gets nothing for long.
LIMIT_S = 240
WAIT = """
import os, time
def wait_for(name):
    while not os.path.exists(name):
        time.sleep(.01)
"""


class Job:
    """A folder with files that a job reads, its settings, and what its starts said."""

    def __init__(self, path: Path) -> None:
        self.path, self.files = path, path / "files"
        self.traces, self.events = path / "traces", path / "events"
        self.files.mkdir()
        self.image = f"{os.getpid()}-{time.monotonic_ns()}"  # one start at a time of an image
        self.big = cold(self.files / "big", 64 * PAGE)
        self.settings()

    def settings(self, **more: Any) -> None:
        values = {
            "traces": str(self.traces),
            "image": self.image,
            "paths": [str(self.files)],
            **more,
        }
        lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
        (self.path / "bootseer.toml").write_text(f"[image]\n{lines}", encoding="utf-8")

    def start(self, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "bootseer", "start", "--events", self.events, "--"]
        return subprocess.run(
            [*command, *words], cwd=self.path, capture_output=True, text=True, check=False, **more
        )

    def points(self, name: str) -> list[dict[str, Any]]:
        texts = [path.read_text(encoding="utf-8") for path in self.events.glob("*.jsonl")]
        lines = [json.loads(line) for text in texts for line in text.splitlines()]
        return [line for line in lines if line["name"] == name]

    def point(self, name: str, number: int = 1) -> dict[str, Any]:
        """What was said that many times, once it was; the rest goes on beside us."""
        until = time.monotonic() + LIMIT_S
        while len(self.points(name)) < number:
            assert time.monotonic() < until, f"never said: {name}"
            time.sleep(0.02)
        return self.points(name)[-1]

    def accompanied(self) -> list[int]:
        """The processes that go on beside a job of this place."""
        out = []
        for name in os.listdir("/proc"):
            try:
                comm = Path(f"/proc/{name}/comm").read_bytes().strip()
                here = os.readlink(f"/proc/{name}/cwd")
            except OSError:
                continue
            if comm == NAME and here == str(self.path):
                out.append(int(name))
        return out

    def follows(self) -> bool:
        """Whether a start is followed: what its job reads from now on is heard or found."""
        for pid in self.accompanied():
            try:
                fds = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
                status = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
            except OSError:
                continue
            heard = any("trace_pipe" in fd or "inotify" in fd for fd in fds)
            if heard or (os.getuid() and int(status[38]) == os.SCHED_IDLE):
                return True
        return False

    def recorded(
        self, *pages: int, code: int = 0, before: tuple[str, ...] = (), said: str = "image.record"
    ) -> dict[str, Any]:
        """A start whose job reads pages of the large file, when it is followed, then has its first
        step and ends once `said` is; what was said."""
        for name in ("go", "end"):
            (self.path / name).unlink(missing_ok=True)
        steps = f"{WAIT}wait_for('go')\nread({str(self.big)!r}, *{pages})\n{FIRST_STEP}"
        job = reader(f"{steps}wait_for('end')\nos._exit({code})\n")
        command = [sys.executable, "-m", "bootseer", "start", "--events", str(self.events), "--"]
        with (
            (self.path / "errors").open("w") as errors,
            subprocess.Popen([*before, *command, *job], cwd=self.path, stderr=errors) as started,
        ):
            try:
                if said == "image.record":
                    until(self.follows)
                (self.path / "go").touch()
                point = self.point(said)
            finally:
                for name in ("go", "end"):
                    (self.path / name).touch()
        assert (started.returncode, (self.path / "errors").read_text()) == (code, "")
        return point

    def alone(self) -> None:
        until = time.monotonic() + LIMIT_S
        while self.accompanied():
            assert time.monotonic() < until, "it does not end"
            time.sleep(0.02)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    for pid in made.accompanied():
        os.kill(pid, 9)


@pytest.mark.usefixtures("page_cache_stays")
def test_the_first_start_records_and_the_second_reads_ahead(job: Job) -> None:
    said = job.recorded(3, 4, 40)["attributes"]
    assert said["bootseer.image.ended_by"] == "first step"
    assert said["bootseer.bytes"] == 3 * PAGE
    assert said["bootseer.image.recorder"] in ("tracefs", "residency")
    assert said["bootseer.why"]
    job.alone()
    evict(job.big)
    assert resident(job.big) == []
    # The second job reads nothing by itself; it ends when we have seen the pages come.
    command = [sys.executable, "-m", "bootseer", "start", "--events", str(job.events), "--"]
    (job.path / "go").unlink()
    second = subprocess.Popen([*command, *reader(f"{WAIT}wait_for('go')\n")], cwd=job.path)
    try:
        replayed = job.point("image.replay")["attributes"]
        assert replayed["bootseer.bytes"] == 3 * PAGE, replayed
        until = time.monotonic() + LIMIT_S
        while resident(job.big) != [(3 * PAGE, 2 * PAGE), (40 * PAGE, PAGE)]:
            assert time.monotonic() < until
            time.sleep(0.01)
    finally:
        (job.path / "go").touch()
        assert second.wait() == 0
    job.alone()


def test_the_job_finds_no_process_and_no_descriptor_that_it_did_not_make(job: Job) -> None:
    code = """
import os
try:
    os.waitpid(-1, os.WNOHANG)
    print("a child")
except ChildProcessError:
    print("no child")
print(sorted(os.listdir("/proc/self/fd"))[:-1])
"""
    done = job.start(sys.executable, "-c", code)
    plain = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=job.path
    )
    assert done.stdout.splitlines()[0] == "no child"
    assert done.stdout == plain.stdout
    job.alone()


def test_a_store_that_hangs_neither_delays_the_job_nor_outlives_it(job: Job) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        job.settings(traces=f"http://127.0.0.1:{server.getsockname()[1]}/t")
        # The job itself ends only once the store was asked: nobody answers before or after.
        (job.path / "asked").unlink(missing_ok=True)
        command = [sys.executable, "-m", "bootseer", "start", "--events", str(job.events), "--"]
        wait = "while [ ! -e asked ]; do sleep .02; done; echo done"
        started = subprocess.Popen(
            [*command, "sh", "-c", wait], cwd=job.path, stdout=subprocess.PIPE, text=True
        )
        try:
            connection = server.accept()[0]
        finally:
            (job.path / "asked").touch()
            out = started.communicate()[0]
        assert (started.returncode, out) == (0, "done\n")
        job.alone()
        connection.close()


@pytest.mark.parametrize("damage", [b"", b"BSFILES\x01", b"x" * 1000])
def test_a_damaged_trace_is_told_and_replaced_by_what_this_start_reads(
    job: Job, damage: bytes
) -> None:
    path = job.traces / object_name(job.image, "")
    path.parent.mkdir(parents=True)
    path.write_bytes(damage)
    job.recorded(3)
    assert job.point("image.replay")["status"] == "fallback"
    assert filetraces.parse(path.read_bytes()).trace.touched_bytes() == PAGE
    job.alone()


def test_a_setting_that_cannot_be_read_turns_it_off(job: Job) -> None:
    job.settings(record="sometimes")
    done = job.start("echo", "hello")
    assert (done.returncode, done.stdout) == (0, "hello\n")
    assert "image.record" in done.stderr
    assert job.points("image.record") == []
    assert "image.record" in job.point("config")["attributes"]["bootseer.reason"]
    assert job.accompanied() == []


def test_a_place_that_cannot_be_written_is_told(job: Job) -> None:
    job.settings(traces="/proc/nowhere")
    assert job.recorded(3, said="image")["status"] == "fallback"
    job.alone()


def test_a_first_step_during_the_survey_counts(job: Job) -> None:
    """A large image takes seconds to look at, and a quick job does not wait for that."""
    for number in range(2000):
        (job.files / f"d{number}").mkdir()
        (job.files / f"d{number}" / "f").write_bytes(b"x")
    job.events.mkdir()
    # Of an earlier start, and still growing.
    old = '{"event":"point","name":"first_step","time_unix_nano":1}\n'
    (job.events / "old.jsonl").write_text(old)
    code = f"{WAIT}read({str(job.big)!r}, 3)\n{FIRST_STEP}wait_for('end')\n"
    command = [sys.executable, "-m", "bootseer", "start", "--events", str(job.events), "--"]
    with subprocess.Popen([*command, *reader(code)], cwd=job.path):
        try:
            said = job.point("image.record")["attributes"]
        finally:
            (job.path / "end").touch()
    assert said["bootseer.image.ended_by"] == "first step"
    job.alone()


def test_of_many_ranks_one_records(job: Job) -> None:
    code = f"{WAIT}wait_for('go')\n{FIRST_STEP}wait_for('end')\n"
    command = [sys.executable, "-m", "bootseer", "start", "--events", str(job.events), "--"]
    ranks = [subprocess.Popen([*command, *reader(code)], cwd=job.path) for _ in range(4)]
    try:
        job.point("image.replay", 3)
        (job.path / "go").touch()
        # While its job runs: once that has ended, who records has half a minute left.
        job.point("image.record")
    finally:
        for name in ("go", "end"):
            (job.path / name).touch()
        assert [rank.wait() for rank in ranks] == [0] * 4
    job.alone()
    assert len(job.points("image.record")) == 1
    others = [point["attributes"].get("bootseer.why") for point in job.points("image.replay")]
    assert others == ["another start does it"] * 3


@pytest.mark.root
def test_as_the_first_process_of_a_container(job: Job) -> None:
    container = ("unshare", "-pf", "--mount-proc", "--kill-child", "--")
    assert job.recorded(3, code=7, before=container)["attributes"]["bootseer.bytes"] == PAGE


@pytest.mark.root
@pytest.mark.usefixtures("page_cache_stays")
def test_user_65534_on_a_read_only_root_reads_ahead() -> None:
    place = Path(f"/tmp/bootseer-{os.getpid()}-{time.monotonic_ns()}")
    try:
        site = everybodys(place)
        files = place / "files"
        files.mkdir(mode=0o755)
        big = cold(files / "big", 64 * PAGE)
        status = big.stat()
        listed = {str(big): TracedFile(str(big), status.st_size, status.st_mtime_ns)}
        trace = filetraces.trace_of_touches(
            listed, [Touch(str(big), 8 * PAGE, PAGE, 0)], "", full=True
        )
        with FileTraceStore.open(str(place / "traces")) as keeper:
            keeper.add(place.name, trace)
        settings = (
            f'[image]\ntraces = "{place}/traces"\nimage = "{place.name}"\npaths = ["{files}"]\n'
        )
        (place / "bootseer.toml").write_text(settings)
        read_only = 'mount --rbind / /mnt && mount -o remount,bind,ro /mnt && cd / && exec "$@"'
        wait = f"while [ ! -e {place}/go ]; do sleep 0.02; done"
        start = ["bootseer", "start", "-c", f"{place}/bootseer.toml", "--", "sh", "-c", wait]
        environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(site)}
        root = ["unshare", "-m", "sh", "-c", read_only, "-", "/usr/sbin/chroot", "/mnt"]
        words = [*root, *AS_NOBODY, PYTHON, "-m", *start]
        with subprocess.Popen(words, env=environ, cwd="/") as started:
            try:
                until(lambda: resident(big) == [(8 * PAGE, PAGE)])
            finally:
                (place / "go").touch()
        assert started.returncode == 0
    finally:
        subprocess.run(["rm", "-rf", str(place)], check=True)
