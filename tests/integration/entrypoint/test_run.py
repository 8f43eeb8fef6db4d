"""`bootseer run` beside plain exec: nobody may be able to tell them apart."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.support.commands.run import BOOTSEER, clean_env, lines, named, run, wrapped

pytestmark = pytest.mark.slow

OURS = ("BOOTSEER_EVENTS", "BOOTSEER_TRACEPARENT", "BOOTSEER_TRACE_RESTART")

# What a process finds: everything that an exec passes on.
PROBE = """
import json, os, sys
status = open("/proc/self/status").read()
fds = {n: os.readlink(f"/proc/self/fd/{n}") for n in sorted(os.listdir("/proc/self/fd"))
       if os.path.exists(f"/proc/self/fd/{n}")}
json.dump({
    "signals": {line.split()[0]: int(line.split()[1], 16) for line in status.splitlines()
                if line.startswith(("SigBlk", "SigIgn", "SigCgt"))},
    "fds": fds, "cwd": os.getcwd(), "group": os.getpgid(0), "session": os.getsid(0),
    "mask": os.umask(0), "env": dict(os.environ), "nice": os.nice(0), "args": sys.argv[1:],
    "limits": open("/proc/self/limits").read(),
}, sys.stdout)
"""


def shell_code(code: int) -> int:
    """What a shell calls an exit code."""
    return 128 - code if code < 0 else code


def shell(*command: str, **kwargs) -> int:
    return shell_code(subprocess.run(command, capture_output=True, timeout=60, **kwargs).returncode)


@pytest.mark.parametrize(
    "script",
    ["exit 0", "exit 1", "exit 2", "exit 7", "exit 126", "exit 127", "exit 128", "exit 255"]
    + [f"kill -{number} $$" for number in (1, 2, 3, 6, 9, 10, 11, 13, 14, 15, 24, 25, 31, 34, 64)],
)
def test_exit_codes_are_the_shells(tmp_path, script):
    plain = ["sh", "-c", f"ulimit -c 0; {script}"]
    done = run(wrapped(*plain), tmp_path)
    assert done.returncode == shell(*plain)
    assert done.stdout + done.stderr == b""
    end = named(tmp_path, "job", "end")[0]
    assert end["attributes"]["process.exit.code"] == done.returncode
    assert end["status"] == ("error" if done.returncode else "ok")


def test_commands_that_cannot_run(tmp_path):
    plain = tmp_path / "plain"
    plain.write_text("no program")
    directory = tmp_path / "directory"
    directory.mkdir()
    bad = tmp_path / "bad"
    bad.write_text("#!/nowhere/python\n")
    bad.chmod(0o755)
    for command in ("no-such-command", "/no/such", str(plain), str(directory), str(bad)):
        expected = shell("env", command)
        done = run(wrapped(command), tmp_path / "events")
        assert (command, done.returncode) == (command, expected)
        assert done.stdout == b""
        assert done.stderr.count(b"\n") == 1
        assert done.stderr.startswith(b"bootseer: cannot run ")
    types = {e["attributes"]["error.type"] for e in named(tmp_path / "events", "job", "end")}
    assert types == {"not_found", "not_executable"}


def test_a_script_without_first_line_runs_in_a_shell(tmp_path):
    script = tmp_path / "script"
    script.write_text('echo "ran $1"; exit 5\n')
    script.chmod(0o755)
    for command in (str(script), "script"):
        env = clean_env(PATH=f"{tmp_path}:{os.environ['PATH']}")
        done = run(wrapped(command, "x"), tmp_path / "events", env=env)
        assert (done.returncode, done.stdout) == (5, b"ran x\n")


def probe(prefix: list[str], **kwargs) -> dict:
    done = subprocess.run(
        [*prefix, sys.executable, "-S", "-c", PROBE, "a b", "", "é"],
        stdout=subprocess.PIPE,
        timeout=60,
        check=True,
        **kwargs,
    )
    found = json.loads(done.stdout)
    for fd, target in found["fds"].items():
        found["fds"][fd] = target.split(":")[0] if target.startswith("pipe:") else target
    for name in OURS:
        found["env"].pop(name, None)
    # glibc's posix_spawn ignores its two internal signals in every child, and sets them up when
    # it needs them.
    found["signals"]["SigIgn:"] &= ~(1 << 31 | 1 << 32)
    return found


def _ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2, signal.SIGTERM})
    os.umask(0o027)
    os.nice(3)


def _close_streams() -> None:
    os.close(0)
    os.close(2)


@pytest.mark.parametrize("prepare", [None, _ignore_signals, _close_streams])
def test_the_command_inherits_what_it_would_without_us(tmp_path, prepare):
    env = clean_env(BOOTSEER_EVENTS=str(tmp_path / "events"))
    read_end, write_end = os.pipe()
    kwargs = {"env": env, "cwd": tmp_path, "pass_fds": (read_end, write_end)}
    if prepare is not None:
        kwargs["preexec_fn"] = prepare
    if prepare is not _close_streams:
        kwargs["stdin"] = subprocess.DEVNULL
    plain, ours = probe([], **kwargs), probe([*BOOTSEER, "run", "--"], **kwargs)
    os.close(read_end)
    os.close(write_end)
    assert ours == plain
    assert named(tmp_path / "events", "job", "end")[0]["attributes"]["process.exit.code"] == 0


@pytest.mark.parametrize("env", [{}, {"LC_ALL": "C"}, {"LANG": "C"}, {"LC_CTYPE": "C.UTF-8"}])
def test_python_leaves_no_locale_behind(tmp_path, env):
    env = {"PATH": os.environ["PATH"], "BOOTSEER_EVENTS": str(tmp_path), **env}
    plain = subprocess.run(["env"], env=env, capture_output=True, check=True).stdout.splitlines()
    ours = subprocess.run(wrapped("env"), env=env, capture_output=True, check=True).stdout
    ours = [line for line in ours.splitlines() if not line.startswith(b"BOOTSEER_TRACEPARENT=")]
    assert ours == plain


def test_bytes_pass_untouched(tmp_path):
    data = bytes(range(256)) * 4096
    done = run(wrapped("cat"), tmp_path, input=data)
    assert done.stdout == data
    done = run(wrapped("sh", "-c", "cat >&2"), tmp_path, input=data)
    assert (done.stdout, done.stderr) == (b"", data)


def test_arguments_and_variables_that_are_no_text(tmp_path):
    env = {**os.environb, b"ODD": b"\xff\xfe", b"BOOTSEER_EVENTS": os.fsencode(tmp_path)}
    command = [os.fsencode(w) for w in wrapped("sh", "-c", 'printf %s "$ODD$1"', "sh")] + [b"\xe9"]
    done = subprocess.run(command, env=env, capture_output=True, check=True, timeout=60)
    assert done.stdout == b"\xff\xfe\xe9"
    assert lines(tmp_path), "and its events are still strict JSON"


def test_the_phase_and_its_attributes(tmp_path):
    options = ("--phase", "deps.install", "--attr", "n=3", "--attr=s=a=b", "--wait")
    run(wrapped("true", options=options), tmp_path)
    begin = named(tmp_path, "deps.install", "begin")[0]
    expected = {"n": 3, "s": "a=b", "bootseer.wait": True, "bootseer.source": "run"}
    assert begin["attributes"] == {**expected, "bootseer.command": ["true"]}


def test_options_from_the_environment(tmp_path):
    env = clean_env(
        BOOTSEER_RUN_PHASE="imports", BOOTSEER_RUN_ATTR="a=1,b=x", BOOTSEER_RUN_WAIT="1"
    )
    run(wrapped("true"), tmp_path, env=env)
    found = named(tmp_path, "imports", "begin")[0]["attributes"]
    assert (found["a"], found["b"], found["bootseer.wait"]) == (1, "x", True)


def test_a_run_inside_a_run_is_its_child(tmp_path):
    inner = wrapped("true", options=("--phase", "inner"))
    run(wrapped(*inner, options=("--phase", "outer")), tmp_path)
    outer, child = named(tmp_path, "outer", "begin")[0], named(tmp_path, "inner", "begin")[0]
    assert child["parent_span_id"] == outer["span_id"]
    assert child["trace_id"] == outer["trace_id"]


def test_events_go_to_the_default_place(tmp_path):
    done = run(
        wrapped("sh", "-c", 'echo "$BOOTSEER_EVENTS"'), env=clean_env(XDG_STATE_HOME=tmp_path)
    )
    place = tmp_path / "bootseer" / "events"
    assert done.stdout.decode().strip() == str(place)
    assert named(place, "job", "end")


@pytest.mark.parametrize("place", ["file/below", "file/x.jsonl"])
def test_events_that_cannot_be_written_are_not_the_jobs_business(tmp_path, place):
    (tmp_path / "file").write_text("")
    done = run(wrapped("sh", "-c", "echo out; exit 3"), tmp_path / place)
    assert (done.returncode, done.stdout, done.stderr) == (3, b"out\n", b"")


def test_variables_of_ours_that_do_not_fit_are_left_out():
    code = """
from bootseer.entrypoint import job_process as process
script = ["/bin/sh", "-c", 'test -z "$OURS" && test -n "$THEIRS" && exit 4']
child = process.start(script, {"THEIRS": "x"}, {"OURS": "x" * 200_000})
raise SystemExit(child.wait().code)
"""
    assert run([sys.executable, "-c", code]).returncode == 4


@pytest.mark.parametrize(
    ("arguments", "env"),
    [
        ([], {}),
        (["--"], {}),
        (["--phase"], {}),
        (["--phase="], {}),
        (["--nonsense", "true"], {}),
        (["--wait=1", "true"], {}),
        (["--attr", "x", "true"], {}),
        (["true"], {"BOOTSEER_RUN_WAIT": "maybe"}),
        (["true"], {"BOOTSEER_RUN_ATTR": "x"}),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(tmp_path, arguments, env):
    done = run([*BOOTSEER, "run", *arguments], tmp_path, env=clean_env(**env))
    assert done.returncode == 2
    assert done.stderr.startswith(b"bootseer: ")
    assert done.stderr.count(b"\n") == 1
    assert not lines(tmp_path)


def test_the_commands_own_options_are_not_ours(tmp_path):
    done = run([*BOOTSEER, "run", "echo", "--phase", "--help", "--"], tmp_path)
    assert done.stdout == b"--phase --help --\n"


def test_help_names_every_option_and_variable():
    done = run([*BOOTSEER, "run", "--help"])
    text = done.stdout.decode()
    for word in ("--phase", "--events", "--attr", "--wait", "--log-rules", "--import-times"):
        assert word in text
    assert done.returncode == 0
    assert run([*BOOTSEER, "run", "-h"]).stdout.decode() == text


def test_the_path_of_run_imports_nothing_foreign(tmp_path):
    """A third-party or heavy module here would be paid by every process of a job."""
    env = clean_env(BOOTSEER_EVENTS=str(tmp_path))
    bare = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "pass"], env=env, capture_output=True, check=True
    )
    ours = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "bootseer", "run", "true"],
        env=env,
        capture_output=True,
        check=True,
    )

    def modules(done: subprocess.CompletedProcess) -> set[str]:
        return {line.rpartition("|")[2].strip() for line in done.stderr.decode().splitlines()}

    # runpy and what it needs are the price of `-m`, not ours.
    runpy = {"runpy", "pkgutil", "importlib", "importlib._bootstrap", "importlib._abc"}
    more = {m for m in modules(ours) - modules(bare) - runpy if not m.startswith("importlib")}
    allowed = {"__future__", "_json", "bootseer", "bootseer.__main__", "bootseer.cli"}
    allowed |= {"bootseer.__main__", "bootseer.entrypoint", "bootseer.entrypoint.job_process"}
    allowed |= {"bootseer.entrypoint.run", "bootseer.profiler", "bootseer.events.writer"}
    allowed |= {f"bootseer.events{name}" for name in ("", ".encoding", ".redaction", ".resource")}
    # What a container's first process looks at.
    allowed |= {"bootseer.entrypoint.container_start", "bootseer.system"}
    allowed |= {"bootseer.system.processes"}
    heavy = {"json", "re", "typing", "enum", "signal", "subprocess", "hashlib", "contextvars"}
    heavy |= {"threading", "dataclasses", "argparse", "click", "logging", "tempfile", "uuid"}
    if "runpy" in modules(ours):
        from_runpy = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "this"], capture_output=True, check=True
        )
        more -= modules(from_runpy)
    assert more <= allowed, sorted(more - allowed)
    assert not (more & heavy)


def test_a_closed_standard_error_does_not_change_the_code(tmp_path):
    done = subprocess.run(
        wrapped("no-such-command"),
        env=clean_env(BOOTSEER_EVENTS=str(tmp_path)),
        preexec_fn=lambda: os.close(2),
        timeout=60,
    )
    assert done.returncode == 127
