"""Every fault of ours: the job starts plainly, its exit code is its own, the report says why."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.config.loading import Problem
from bootseer.entrypoint import fallback, plan, process_groups
from bootseer.entrypoint.fallback import Decision, Outcome
from bootseer.entrypoint.plan import PartPlan
from tests.support.commands.start import (
    JOB_EXIT,
    Place,
    kill,
    kill_parts,
    nothing_left,
    part_process,
    processes_of_parts,
)
from tests.support.mounts.tmpfs import tmpfs
from tests.support.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    place.settings()
    yield place
    nothing_left(place)


def started_plainly(place: Place, phase: str, reason: str, installs: int = 1) -> None:
    """Start; check the job, the plain install, the one line, and the report's reason."""
    place.forget_events()
    before = place.installs
    done = place.start()
    assert done.returncode == JOB_EXIT, done.stderr
    assert place.installs - before == installs
    assert done.stdout == b"installed\n" * installs
    assert done.stderr.count(b"\n") == 1
    assert reason in done.stderr.decode()
    assert reason in place.fallbacks()[phase]


# --- the store and what is in it -----------------------------------------------------------------


def test_a_store_that_cannot_be(place: Place) -> None:
    place.store = Path("/dev/null/store")
    place.settings()
    started_plainly(place, "deps.install", "/dev/null/store")


def test_a_store_that_hangs_is_given_up_when_it_is_told_to(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        place.store = f"webhdfs://127.0.0.1:{hanging.getsockname()[1]}/snapshots"
        place.store_timeout_s = 1.5
        place.settings()
        started_plainly(place, "deps.install", "did not answer for 1.5 s")
        hanging.accept()[0].close()  # it was asked


def test_a_store_that_is_gone_on_the_second_start(place: Place) -> None:
    assert place.start().returncode == JOB_EXIT
    place.remove_installed()
    place.store.rename(place.path / "moved")
    place.store.write_text("not a directory")
    started_plainly(place, "deps.install", "store")


def archives(place: Place) -> list[Path]:
    files = [path for path in place.store.rglob("*") if path.is_file()]
    return [path for path in files if path.read_bytes()[:4] == b"\x28\xb5\x2f\xfd"]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("flip", "do not match their digest"),
        ("truncate", "no index at its end"),
        ("missing", "no archive at"),
    ],
)
def test_a_corrupt_snapshot_is_never_restored(place: Place, damage: str, reason: str) -> None:
    assert place.start().returncode == JOB_EXIT
    place.remove_installed()
    (archive,) = archives(place)
    data = bytearray(archive.read_bytes())
    archive.chmod(0o644)
    if damage == "flip":
        data[len(data) // 3] ^= 1
        archive.write_bytes(data)
    elif damage == "truncate":
        archive.write_bytes(data[:-20])
    else:
        archive.unlink()
    started_plainly(place, "deps.install", reason)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is damaged: it is not JSON"),
        (b"{", "is damaged: it is not JSON"),
        (b"\xff\x00", "is damaged: it is not JSON"),
        (b'{"version": 999}', "has format 999"),
    ],
    ids=["empty", "cut", "no text", "newer"],
)
def test_a_damaged_record(place: Place, content: bytes, reason: str) -> None:
    assert place.start().returncode == JOB_EXIT
    place.remove_installed()
    records = [p for p in place.store.rglob("*.json") if b"index_digest" in p.read_bytes()]
    assert records
    for record in records:
        record.chmod(0o644)
        record.write_bytes(content)
    started_plainly(place, "deps.install", reason)


@pytest.mark.root
def test_a_full_disk_under_the_store(place: Place) -> None:
    (place.path / "payload").write_bytes(os.urandom(1 << 20))
    with tmpfs(place.store, "256k"):
        started_plainly(place, "deps.install", "space")
        assert archives(place) == []


@pytest.mark.root
def test_a_full_disk_under_the_target_of_a_restore(place: Place) -> None:
    """The restore fails for want of space; the plain install then needs less and succeeds."""
    (place.path / "payload").write_bytes(os.urandom(1 << 20))
    assert place.start().returncode == JOB_EXIT
    place.remove_installed()
    with tmpfs(place.path / "site", "512k"):
        place.extra("echo small > site/module; echo installed; exit 0\n")
        done = place.start(("sh", "-c", "cat site/module; exit 7"))
        assert (done.returncode, done.stdout) == (JOB_EXIT, b"installed\nsmall\n")
        reason = place.fallbacks()["deps.install"]
        assert "cannot restore below" in reason
        assert "free space" in reason


def test_a_dead_lease_holder_holds_nobody_up(place: Place) -> None:
    place.settings(more="wait = 'always'")
    place.extra("touch began; sleep 600\n")
    holder = place.begin()
    until((place.path / "began").exists)
    leases = [lease.name for lease in place.store.rglob("lease/*.json")]
    assert len(leases) == 1
    os.killpg(holder.pid, signal.SIGKILL)
    kill_parts(place)
    holder.communicate()
    assert holder.returncode == -signal.SIGKILL
    place.extra("")
    done = place.start()
    said = (done.returncode, done.stdout, place.installs)
    assert said == (JOB_EXIT, b"installed\n", 2), (done.stderr, place.fallbacks())
    # It met the dead one's lease and took the next.
    after = sorted(lease.name for lease in place.store.rglob("lease/*.json"))
    assert (after[:1], len(after)) == (leases, 2), (after, done.stderr, place.fallbacks())
    assert not (place.path / "job-began").exists()


# --- the part's process --------------------------------------------------------------------------


def test_the_part_is_killed_while_it_installs(place: Place) -> None:
    place.extra("[ -e began ] || { touch began; sleep 600; }\n")
    process = place.begin()
    until((place.path / "began").exists)
    kill(part_process(place))
    _, errors = process.communicate()
    assert process.returncode == 0
    assert place.installs == 2
    assert (place.path / "job-began").exists()
    assert b"killed by SIGKILL" in errors
    assert "killed by SIGKILL" in place.fallbacks()["deps.install"]


def test_the_part_hangs(place: Place) -> None:
    place.settings(more="deadline_s = 1.5")
    place.module("zstandard", "import time; time.sleep(600)")
    started_plainly(place, "deps.install", "not done after its deadline of 1.5 s")


def test_the_part_hangs_and_hears_no_sigterm(place: Place) -> None:
    place.settings(more="deadline_s = 1.5")
    deaf = "import signal, subprocess, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    # A process in a session of its own, which a signal to the group does not reach.
    deaf += "subprocess.Popen(['sleep', '600'], start_new_session=True); time.sleep(600)"
    place.module("zstandard", deaf)
    started_plainly(place, "deps.install", "not done after its deadline")
    assert list(processes_of_parts(place)) == []


def test_the_part_crashes(place: Place) -> None:
    place.module("zstandard", "import os; os.kill(os.getpid(), 11)")
    started_plainly(place, "deps.install", "killed by SIGSEGV")


def test_the_part_leaves_without_a_word(place: Place) -> None:
    place.module("zstandard", "import os; os._exit(3)")
    started_plainly(place, "deps.install", "ended with exit code 3")


def test_a_library_of_ours_is_broken(place: Place) -> None:
    place.module("zstandard", "raise ImportError('no such thing')")
    started_plainly(place, "deps.install", "ImportError: no such thing")


def test_a_part_that_failed_waits_for_no_thread_that_hangs() -> None:
    """Fault injection: the part is a fake whose thread hangs. The plain way waits for us."""
    part = (
        "import sys, threading, time\n"
        "from bootseer.entrypoint import part_process\n"
        "from bootseer.entrypoint.parts import all_parts as parts\n"
        "class Fake:\n"
        "    def run(self, *_):\n"
        "        threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "        raise OSError('the store is away')\n"
        "parts.get_part = lambda name: Fake()\n"
        "part_process.SOCKET_FD = int(sys.argv[1])\n"
        "sys.exit(part_process.main())\n"
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        words = [sys.executable, "-c", part, str(theirs.fileno())]
        with subprocess.Popen(words, pass_fds=[theirs.fileno()]) as process:
            theirs.close()
            message = {"part": "fake", "action": "run", "request": {}, "parent": os.getpid()}
            ours.sendall(json.dumps(message).encode())
            ours.shutdown(socket.SHUT_WR)
            try:
                assert b"the store is away" in ours.recv(1 << 16)
                assert process.wait(timeout=60) == 0
            finally:
                process.kill()


def test_our_interpreter_is_gone(place: Place) -> None:
    script = "import sys; sys.executable = '/no/python'; sys.argv[0] = 'bootseer'\n"
    script += "from bootseer.__main__ import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", script, "start", "--", "sh", "-c", "exit 7"],
        cwd=place.path,
        env=place.full_environ,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, place.installs) == (JOB_EXIT, 1)
    assert "cannot be started" in place.fallbacks()["deps.install"]


def test_start_itself_is_broken(place: Place) -> None:
    script = "import sys; from bootseer.entrypoint import start\n"
    script += "def broken(self): raise RuntimeError('a defect')\n"
    script += "start.Runner.run = broken; sys.argv[0] = 'bootseer'\n"
    script += "from bootseer.__main__ import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", script, "start", "--", "sh", "-c", "exit 7"],
        cwd=place.path,
        env=place.full_environ,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, place.installs) == (JOB_EXIT, 1)
    assert b"RuntimeError: a defect" in done.stderr


def test_planning_is_broken(place: Place) -> None:
    """A defect that leaves not even the install command known: the job starts alone."""
    place.module("sitecustomize", BROKEN_PLAN)
    done = place.start(("sh", "-c", "exit 7"))
    assert (done.returncode, done.stdout, place.installs) == (JOB_EXIT, b"", 0)
    assert done.stderr.count(b"\n") == 1
    assert b"ValueError: a defect" in done.stderr


BROKEN_PLAN = """
import bootseer.entrypoint.plan
def plan(*_):
    raise ValueError("a defect")
bootseer.entrypoint.plan.plan_start = plan
"""


@pytest.mark.parametrize("text", ["raise ImportError('not for you')", "__version__ = '1.0'"])
def test_a_click_of_the_job_stands_in_front_of_ours(place: Place, text: str) -> None:
    """Missing, broken or of another age: what the command line asks for is done without it."""
    place.module("click", text)
    path = place.settings().rename(place.path / "other.toml")
    place.flags = ["-c", str(path), "--store=elsewhere", "--set", "job.attempt=3"]
    done = place.start(("sh", "-c", "cmp payload site/module && exit $((BOOTSEER_ATTEMPT + 4))"))
    assert (done.returncode, done.stdout, place.installs) == (JOB_EXIT, b"installed\n", 1)
    assert done.stderr.count(b"\n") == 1
    assert b"going on without it" in done.stderr
    assert (place.path / "elsewhere").exists()
    assert not place.store.exists()


def test_nothing_of_ours_can_be_imported(place: Place) -> None:
    place.settings()
    place.module("tomllib", "raise ImportError('no such thing')")
    done = place.start(("sh", "-c", "exit 7"))
    assert (done.returncode, done.stdout, place.installs) == (JOB_EXIT, b"", 0)
    assert done.stderr.count(b"\n") == 1
    assert b"no such thing; starting the job alone" in done.stderr
    place.flags = ["--check"]
    done = place.start(())
    assert (done.returncode, done.stderr.count(b"\n")) == (7, 1)


@pytest.mark.parametrize("closing", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_fault(place: Place, closing: str) -> None:
    place.store = Path("/dev/null/store")  # something to say
    place.settings()
    place.extra("exec > /dev/null\n")
    command = ["sh", "-c", f'exec "$@" {closing}', "sh", *place.command, "sh", "-c", "exit 7"]
    done = subprocess.run(command, cwd=place.path, env=place.full_environ, check=False)
    assert (done.returncode, place.installs) == (JOB_EXIT, 1)
    assert "/dev/null/store" in place.fallbacks()["deps.install"]


def test_a_module_of_the_job_cannot_shadow_ours(place: Place) -> None:
    for name in ("json", "zstandard", "bootseer"):
        (place.path / f"{name}.py").write_text("raise RuntimeError('not for you')")
    script = "import sys; sys.path.remove('') if '' in sys.path else None\n"
    script += "from bootseer.__main__ import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, "start", "--", "sh", "-c", "exit 7"],
        cwd=place.path,
        env=place.full_environ,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr, place.installs) == (JOB_EXIT, b"", 1)
    assert place.fallbacks() == {}


# --- the configuration ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "reason"),
    [("stor = 1", "unknown key 'deps.stor'"), ("wait = 3", "deps.wait is a whole number")],
)
def test_an_unreadable_part_of_the_settings_installs_plainly(
    place: Place, line: str, reason: str
) -> None:
    place.settings(more=line)
    started_plainly(place, "deps.install", reason)
    assert not place.store.exists()
    assert reason in place.fallbacks()["config"]


def test_an_unreadable_job_setting_leaves_the_other_parts_alone(place: Place) -> None:
    place.settings(job="attempt = 'x'")
    started_plainly(place, "config", "job.attempt is a text")
    assert place.store.exists()


@pytest.mark.parametrize("key", ["uid", "events", "phase"])
def test_a_text_that_no_program_can_be_given(place: Place, key: str) -> None:
    path = place.settings()
    path.write_text(path.read_text().replace("uid = 'u'", f'{key} = "a\\u0000b"'))
    place.environ["BOOTSEER_EVENTS"] = str(place.events)
    started_plainly(place, "config", f"job.{key} has a NUL character")


def test_a_bad_variable(place: Place) -> None:
    place.environ["BOOTSEER_DEPS_WAIT"] = "maybe"
    started_plainly(place, "deps.install", "the environment variable BOOTSEER_DEPS_WAIT")


def test_a_file_that_is_not_toml_still_installs(place: Place) -> None:
    path = place.settings()
    path.write_text(path.read_text().replace("[job]", "[job"))
    started_plainly(place, "deps.install", "not valid TOML")


@pytest.mark.parametrize(
    "content",
    [
        b"[deps",
        b"\xff\xfe",
        b"install = [",
        b"x = " + b"[" * 5000,
        b"x = " + b"1" * 5000,
        b"[deps]\ninstall = " + b"[" * 5000,
        b"#" * (2 << 20),
    ],
    ids=["open", "bytes", "no end", "deep", "long", "deep install", "large"],
)
def test_a_file_of_which_nothing_can_be_read(place: Place, content: bytes) -> None:
    (place.path / "bootseer.toml").write_bytes(content)
    done = place.start(("sh", "-c", "exit 7"))
    assert (done.returncode, done.stdout, place.installs) == (JOB_EXIT, b"", 0)
    assert done.stderr.count(b"\n") == 1
    assert "config" in place.fallbacks()


def test_a_file_that_is_missing(place: Place) -> None:
    place.flags = ["-c", "no.toml"]
    done = place.start(("sh", "-c", "exit 7"))
    assert done.returncode == JOB_EXIT
    assert "no.toml" in place.fallbacks()["config"]


def test_log_rules_that_are_not_there(place: Place) -> None:
    place.settings(job="log_rules = ['/no/rules.ini']")
    done = place.start(("sh", "-c", "echo job; exit 7"))
    assert (done.returncode, done.stdout) == (JOB_EXIT, b"installed\njob\n")
    assert "/no/rules.ini" in place.fallbacks()["log_rules"]


def test_a_wrapper_that_cannot_be_had_is_left_out(place: Place) -> None:
    place.settings(job="phase = 'training'")
    place.environ["BOOTSEER_RUN_WAIT"] = "maybe"
    done = place.start(("sh", "-c", "echo job; exit 7"))
    assert (done.returncode, done.stdout) == (JOB_EXIT, b"installed\njob\n")
    assert b"BOOTSEER_RUN_WAIT" in done.stderr


# --- decisions -----------------------------------------------------------------------------------

PLAN = PartPlan("deps", "deps.install", {}, plain=("install",))


@pytest.mark.parametrize(
    ("outcome", "decision"),
    [
        (Outcome(result=0), Decision("done")),
        (Outcome(result=3), Decision("stop", exit_code=3)),
        (Outcome(fault="why"), Decision("plain", "why")),
        # The command had done its work before we fell over: once is enough.
        (Outcome(fault="why", command_exit=0), Decision("done", "why")),
        (Outcome(fault="why", command_exit=3), Decision("stop", "why", 3)),
        (Outcome(), Decision("plain", "the part ended without a result")),
    ],
)
def test_decisions_after_a_part(outcome: Outcome, decision: Decision) -> None:
    assert fallback.decide_after_part(PLAN, outcome) == decision


def test_a_part_without_a_plain_way_is_left_out_after_a_fault() -> None:
    without = PartPlan("image", "image.pull", {})
    assert fallback.decide_after_part(without, Outcome(fault="why")) == Decision("done", "why")


def test_parts_come_after_those_they_wait_for() -> None:
    class Part:
        def __init__(self, name: str, after: tuple[str, ...]) -> None:
            self.name, self.after = name, after

        def plan(self, config: object, problem: str) -> PartPlan:
            return PartPlan(self.name, self.name, {}, reason=problem, after=self.after)

    from bootseer.config.loading import Loaded
    from bootseer.config.sections import Config

    loaded = Loaded(Config(), (Problem("b", "b.x", "wrong"),), None)
    parts = [Part("a", ("b", "unknown")), Part("b", ()), Part("c", ("a",))]
    planned = plan.plan_start(loaded, ["job"], parts)
    assert [(p.name, p.reason) for p in planned.parts] == [("b", "wrong"), ("a", ""), ("c", "")]
    with pytest.raises(ValueError, match="wait for each other: a, b"):
        plan.plan_start(loaded, ["job"], [Part("a", ("b",)), Part("b", ("a",))])


def test_plans_survive_their_way_to_the_part() -> None:
    from bootseer.config.sections import Config, DepsSettings
    from bootseer.entrypoint.parts import deps_part, part

    deps = DepsSettings(install=("a", "b"), also=("/x",), max_age_days=1.5)
    request = deps_part.DepsPart().plan(Config(deps=deps), "")
    assert request is not None
    decoded = part.decode_section(DepsSettings, json.loads(json.dumps(request.request)))
    assert decoded == deps


def test_a_part_that_dies_while_it_is_asked_is_noticed_by_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Injected: its end of the socket is gone with bytes unread in it."""
    struck = []

    def reset(self: socket.socket, data: bytes) -> None:
        struck.append(len(data))
        raise ConnectionResetError(104, "Connection reset by peer")

    monkeypatch.setattr(socket.socket, "sendall", reset)
    with process_groups.spawn_part({"part": "deps"}, os.environ) as child:
        assert struck
        assert child.pid > 0
    assert child.reap()
