"""`bootseer start` when all is well: what the job gets, and what it is spared."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.profiler.report import analysis
from bootseer.profiler.report.load import load
from tests.support.commands.start import JOB_EXIT, Place
from tests.support.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_the_second_start_restores_and_both_run_the_job(place: Place) -> None:
    place.settings()
    first = place.start()
    assert (first.returncode, first.stdout, first.stderr) == (JOB_EXIT, b"installed\n", b"")
    place.remove_installed()
    second = place.start()
    assert (second.returncode, second.stdout) == (JOB_EXIT, b"")
    # Of a script no resolver can tell whether it would install something newer by now.
    (line,) = second.stderr.splitlines()
    assert b"the newest snapshot of these requirements serves, for up to 7 days" in line
    assert place.installs == 1
    assert place.fallbacks() == {}


@pytest.mark.parametrize("form", ["symlink", "copy"])
def test_a_store_and_a_cache_may_be_relative(place: Place, form: str) -> None:
    place.store = Path("store")
    place.publish = "background"
    place.settings(more=f'cache = "cache"\nform = "{form}"')
    assert place.start().returncode == JOB_EXIT
    until(lambda: list(place.path.glob("store/deps/*/record-*.json")))
    place.remove_installed()
    for _ in range(2):  # it is placed, and then it stands there
        assert place.start().returncode == JOB_EXIT
        assert place.installs == 1
        assert place.fallbacks() == {}
        assert (place.path / "site").is_symlink() == (form == "symlink")


def test_no_install_writes_through_a_link_into_the_shared_tree(place: Place) -> None:
    place.settings(more='cache = "cache"\nform = "symlink"')
    place.start()
    place.remove_installed()
    place.start()
    shared = (place.path / "site").readlink() / "module"
    before = shared.stat()
    (place.path / "payload").write_bytes(b"another")
    (place.path / "requirements").write_text("module==2\n")
    assert place.start().returncode == JOB_EXIT
    assert place.installs == 2
    assert not (place.path / "site").is_symlink()
    assert shared.stat() == before
    assert shared.read_bytes() == b"payload\n" * 1000


def test_the_job_replaces_us_and_finds_a_clean_house(place: Place) -> None:
    # A shell, because Python itself ignores signals and would hide what it was given.
    show = "echo $$; grep -E 'Sig(Ign|Blk|Cgt)' /proc/self/status; ls /proc/self/fd"
    plain = subprocess.run(["sh", "-c", show], stdout=subprocess.PIPE, check=True)
    place.settings(more="enabled = false")
    process = place.begin(("sh", "-c", show))
    out, _ = process.communicate()
    assert out.splitlines()[:2] == [b"installed", str(process.pid).encode()]
    assert out.splitlines()[2:] == plain.stdout.splitlines()[1:]


def test_standard_streams_are_the_jobs(place: Place) -> None:
    place.settings()
    place.extra("cat > stolen\n")
    data = os.urandom(100_000)
    done = place.start(("cat",), input=data)
    assert done.stdout == b"installed\n" + data
    assert (place.path / "stolen").read_bytes() == b""


def test_what_the_job_is_told(place: Place) -> None:
    place.settings(job="attempt = 2")
    done = place.start(("env",))
    given = dict(line.split("=", 1) for line in done.stdout.decode().splitlines() if "=" in line)
    ours = {k: v for k, v in given.items() if k.startswith("BOOTSEER_")}
    trace = ours.pop("BOOTSEER_TRACEPARENT").split("-")
    assert ours == {
        "BOOTSEER_EVENTS": str(place.events),
        "BOOTSEER_JOB_UID": "u",
        "BOOTSEER_ATTEMPT": "2",
    }
    assert [start.trace_id for start in load.load([str(place.events)]).starts] == [trace[1]]


def test_events_that_cannot_be_written_keep_nobody_from_starting(place: Place) -> None:
    place.settings()
    place.environ["BOOTSEER_EVENTS"] = "/dev/null/events"
    done = place.start()
    assert (done.returncode, done.stderr) == (JOB_EXIT, b"")


@pytest.mark.parametrize(
    ("job", "code"),
    [
        (("no-such-program",), 127),
        (("./payload",), 126),
        (("sh", "-c", "kill -KILL $$"), -signal.SIGKILL),
        (("sh", "-c", "exit 0"), 0),
    ],
)
def test_exit_codes_are_the_jobs(place: Place, job: tuple[str, ...], code: int) -> None:
    assert place.start(job).returncode == code


def test_a_script_without_a_first_line_runs_as_execvp_would(place: Place) -> None:
    script = place.path / "script"
    script.write_text("exit 5\n")
    script.chmod(0o755)
    assert place.start(("./script",)).returncode == 5


@pytest.mark.parametrize("enabled", ["true", "false"])
def test_a_failed_install_is_passed_through(place: Place, enabled: str) -> None:
    place.settings(more=f"enabled = {enabled}")
    place.extra("echo why >&2; exit 3\n")
    done = place.start(("touch", "job-began"))
    assert (done.returncode, done.stderr) == (3, b"why\n")
    assert place.installs == 1
    assert not (place.path / "job-began").exists()


def test_an_install_command_that_is_not_there(place: Place) -> None:
    place.settings()
    place.flags = ["--set", "deps.install=no-such-program", "--set", "deps.enabled=false"]
    done = place.start(("touch", "job-began"))
    assert done.returncode == 127
    assert done.stderr.count(b"\n") == 1
    assert not (place.path / "job-began").exists()


def test_disabled_deps_install_plainly_and_that_is_no_fallback(place: Place) -> None:
    place.settings(more="enabled = false")
    for _ in range(2):
        done = place.start()
        assert (done.returncode, done.stdout, done.stderr) == (JOB_EXIT, b"installed\n", b"")
    assert place.installs == 2
    assert place.fallbacks() == {}


def test_our_own_deadline_stands_still_while_the_command_runs(place: Place) -> None:
    place.settings(more="deadline_s = 4")
    place.extra("sleep 5\n")
    done = place.start()
    assert (done.returncode, done.stderr, place.installs) == (JOB_EXIT, b"", 1)


def test_log_rules_keep_us_in_front_and_the_exit_code(place: Place) -> None:
    rules = place.path / "rules.ini"
    rules.write_text("[step]\nphase = first_step\npoint = ^step 1$\n")
    place.settings(job=f"log_rules = ['{rules}']")
    done = place.start(("sh", "-c", "echo step 1; echo more; exit 9"))
    assert done.returncode == 9
    assert done.stdout == b"installed\nstep 1\nmore\n"
    report = analysis.analyse(load.load([str(place.events)]))
    assert report.start.complete


def test_a_phase_measures_the_whole_job(place: Place) -> None:
    place.settings(job="phase = 'training'")
    assert place.start().returncode == JOB_EXIT
    report = analysis.analyse(load.load([str(place.events)]))
    assert {"training", "deps.install"} <= {phase.name for phase in report.phases}


def test_check_names_the_fault_and_starts_nothing(place: Place) -> None:
    path = place.settings(more="stor = 1")
    place.flags = ["--check", "-c", str(path)]
    done = place.start()
    line = path.read_text().splitlines().index("stor = 1") + 1
    assert done.returncode == 2
    message = f"bootseer: {path}, line {line}: unknown key 'deps.stor' (did you mean 'store'?)\n"
    assert done.stderr.decode() == message
    assert place.installs == 0


def test_check_of_good_settings_says_nothing(place: Place) -> None:
    place.settings()
    place.flags = ["--check"]
    done = place.start(())
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_bad_flag_of_our_own_is_a_usage_error(place: Place) -> None:
    place.flags = ["--set", "deps.stor=x"]
    done = place.start()
    assert done.returncode == 2
    assert b"did you mean 'deps.store'?" in done.stderr
    assert place.installs == 0


def test_a_flag_stands_over_a_variable(place: Place) -> None:
    place.settings()
    place.flags = ["--set", f"job.events={place.path / 'elsewhere'}"]
    assert place.start().returncode == JOB_EXIT
    assert list((place.path / "elsewhere").glob("*.jsonl"))
    assert not place.events.exists()


def test_no_job_is_a_usage_error(place: Place) -> None:
    assert place.start(()).returncode == 2


@pytest.mark.root
def test_as_pid_1_the_job_is_pid_1_without_zombies(place: Place) -> None:
    place.settings()
    # The part leaves an orphan that dies; as PID 1 we inherit it, and the job must not see it.
    place.extra("(sleep 0.2 &) ; sleep 0.5\n")
    script = "import os; print(os.getpid()); print([open(f'/proc/{p}/stat').read().split()[2]"
    script += " for p in os.listdir('/proc') if p.isdecimal()].count('Z'))"
    command = [*place.command, sys.executable, "-c", script]
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", *command],
        cwd=place.path,
        env=place.full_environ,
        capture_output=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == (b"installed\n1\n0\n", b"")


# Waits for the sleeper's end; unlike a shell it collects no children that it does not know.
JOB = """
import os, sys, time
def states():
    found = []
    for p in filter(str.isdecimal, os.listdir("/proc")):
        try:
            found.append(open(f"/proc/{p}/stat").read().split())
        except OSError:  # it has ended since
            pass
    return [fields[2] for fields in found if fields[1] == "(sleep)"]
assert states() == ["S"]
until = time.monotonic() + 10
while states() and time.monotonic() < until:
    time.sleep(0.05)
sys.exit(3 if states() else 7)
"""


@pytest.mark.root
def test_as_pid_1_what_outlives_the_parts_is_collected(place: Place) -> None:
    """Such as a publication in the background: the job must not be left with its zombie."""
    place.settings()
    place.extra("(sleep 2 > /dev/null 2>&1 &)\n")
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", *place.command, sys.executable, "-c", JOB],
        cwd=place.path,
        env=place.full_environ,
        check=False,
    )
    assert done.returncode == JOB_EXIT


@pytest.mark.root
def test_as_pid_1_sigterm_ends_the_parts(place: Place) -> None:
    place.settings()
    place.extra("echo began; sleep 60\n")
    process = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *place.command, "true"],
        cwd=place.path,
        env=place.full_environ,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"began\n"
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    os.kill(int(until(children.read_text).split()[0]), signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM
    process.stdout.close()


@pytest.mark.parametrize(
    ("section", "reasons"),
    [
        ("[image]\ntraces = '/t'\nnonsense = 1\n", {"config", "image.replay"}),
        ("[checkpoint]\nurl = 'file:///c'\nenabled = false\n", set()),
        ("[checkpoint]\nurl = 'file:///c'\n", {"checkpoint.load"}),
    ],
)
def test_a_part_without_a_plain_way_that_is_not_tried_costs_the_others_nothing(
    place: Place, section: str, reasons: set[str]
) -> None:
    place.settings()
    assert place.start().returncode == JOB_EXIT
    place.remove_installed()
    place.forget_events()
    place.settings(more=section)
    done = place.start()
    assert (done.returncode, done.stdout) == (JOB_EXIT, b"")
    assert place.installs == 1  # restored
    assert set(place.fallbacks()) == reasons
    assert b"Error" not in done.stderr
    assert (b"going on without it" in done.stderr) == bool(reasons)
