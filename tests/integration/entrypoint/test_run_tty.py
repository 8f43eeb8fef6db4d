"""`bootseer run` on a real terminal: what a program sees of it, Ctrl-C, Ctrl-Z and fg."""

from __future__ import annotations

import os
import shlex
import signal
import sys

import pytest

from tests.support.commands.run import clean_env, named, wrapped
from tests.support.commands.terminal import Terminal

pytestmark = pytest.mark.slow

RULES = "[one]\nphase = first_step\npoint = step 1\n"
SEES = """
import os, sys
print([os.isatty(n) for n in range(3)], tuple(os.get_terminal_size(1)),
      os.tcgetpgrp(0) == os.getpgrp(), os.ttyname(0) != "", flush=True)
"""
COUNT = """
import os, select, signal, sys
# Through a pipe: a handler that runs just before read() begins would be heard only after it.
reader, writer = os.pipe()
os.set_blocking(writer, False)
signal.set_wakeup_fd(writer)
for number in (signal.SIGINT, signal.SIGWINCH): signal.signal(number, lambda *_: None)
print("ready", flush=True)
while True:
    ready = select.select([0, reader], [], [])[0]
    for number in os.read(reader, 100) if reader in ready else b"":
        heard = number == signal.SIGINT
        print("heard" if heard else f"size {tuple(os.get_terminal_size(1))}", flush=True)
    if 0 in ready:
        line = os.read(0, 1000).decode().strip()
        print("line", line, flush=True)
        if line == "end": sys.exit(9)
"""


@pytest.fixture(params=["plain", "run", "tap"])
def wrap(request, tmp_path):
    """The same expectations hold without us, with us, and with the output tapped."""
    rules = tmp_path / "rules.ini"
    rules.write_text(RULES)
    options = ("--log-rules", str(rules)) if request.param == "tap" else ()

    def command(*words: str) -> list[str]:
        return list(words) if request.param == "plain" else wrapped(*words, options=options)

    command.kind = request.param
    return command


@pytest.fixture
def env(tmp_path):
    return clean_env(BOOTSEER_EVENTS=str(tmp_path / "events"), PS1="$ ", TERM="dumb")


def test_the_command_sees_the_terminal(wrap, env):
    with Terminal(
        ["sh", "-c", "sleep 0.2; exec " + shlex.join(wrap(sys.executable, "-c", SEES))], env
    ) as terminal:
        terminal.expect(b"[True, True, True] (97, 31) True True\r\n")
        assert terminal.wait() == 0


def test_input_signals_and_size_pass_as_they_are(wrap, env):
    with Terminal(wrap(sys.executable, "-c", COUNT), env) as terminal:
        terminal.expect(b"ready\r\n")
        terminal.send(b"hello\n")
        terminal.expect(b"line hello\r\n")
        terminal.send(b"\x03")
        terminal.expect(b"heard\r\n")
        terminal.resize(20, 50)
        terminal.expect(b"size (50, 20)\r\n")
        terminal.send(b"end\n")
        terminal.expect(b"line end\r\n")
        # One Ctrl-C is heard once: twice would make many programs give up at once.
        assert b"heard" not in terminal.text
        assert os.waitstatus_to_exitcode(terminal.wait()) == 9


def test_control_c_kills_and_the_shell_learns_of_it(wrap, env):
    with Terminal(wrap("sh", "-c", "echo ready; exec sleep 60"), env) as terminal:
        terminal.expect(b"ready\r\n")
        terminal.send(b"\x03")
        assert os.waitstatus_to_exitcode(terminal.wait()) == -signal.SIGINT


def test_control_c_ends_a_shells_loop(wrap, env):
    job = shlex.join(wrap("sh", "-c", "echo ready; exec sleep 60"))
    loop = f"for i in 1 2 3; do {job}; done; echo on"
    with Terminal(["bash", "-c", loop], env) as terminal:
        terminal.expect(b"ready\r\n")
        terminal.send(b"\x03")
        assert os.waitstatus_to_exitcode(terminal.wait()) == -signal.SIGINT
        assert b"ready" not in terminal.text


def test_control_z_fg_and_bg(wrap, env):
    job = shlex.join(wrap("sh", "-c", "echo up; read x; echo got $x; exit 4"))
    with Terminal(["bash", "--norc", "--noprofile", "-i"], env) as terminal:
        terminal.expect(b"$ ")
        terminal.send(job.encode() + b"\n")
        terminal.expect(b"up\r\n")
        terminal.send(b"\x1a")
        terminal.expect(b"Stopped")
        terminal.expect(b"$ ")
        terminal.send(b"bg\n")  # it reads the terminal, so the kernel stops it again
        terminal.expect(b"$ ")
        shown = b""
        while b"Stopped" not in shown:  # until the shell knows, its `fg` continues nobody
            terminal.send(b"jobs\n")
            shown = terminal.expect(b"$ ")
        terminal.send(b"fg\n")
        terminal.expect(b"exit 4")
        terminal.send(b"word\n")
        terminal.expect(b"got word\r\n")
        terminal.send(b"echo code $?\n")
        terminal.expect(b"code 4\r\n")
        terminal.send(b"exit\n")
        terminal.wait()


def test_a_pipeline_keeps_its_foreground(wrap, env):
    line = shlex.join(wrap("sh", "-c", "echo a; echo b >&2; tty; cat")) + " | tr a-z A-Z; echo end"
    with Terminal(["bash", "--norc", "--noprofile", "-i"], env) as terminal:
        terminal.expect(b"$ ")
        terminal.send(line.encode() + b"\n")
        terminal.expect(b"A\r\n")
        terminal.send(b"typed\n\x04")
        terminal.expect(b"TYPED\r\n")
        terminal.expect(b"end\r\n")
        terminal.send(b"exit\n")
        terminal.wait()


def test_a_hang_up_reaches_the_command(wrap, env, tmp_path):
    mark = tmp_path / "mark"
    script = f"trap 'echo hung > {mark}; exit 0' HUP; echo ready; while :; do sleep 0.05; done"
    terminal = Terminal(wrap("sh", "-c", script), env)
    terminal.expect(b"ready\r\n")
    os.close(terminal.master)
    os.waitpid(terminal.pid, 0)
    assert mark.read_text() == "hung\n"


def test_rules_see_what_the_terminal_shows(env, tmp_path):
    rules = tmp_path / "rules.ini"
    rules.write_text(RULES)
    job = wrapped("sh", "-c", "echo step 1", options=("--log-rules", str(rules)))
    with Terminal(job, env) as terminal:
        terminal.expect(b"step 1\r\n")
        assert terminal.wait() == 0
    assert named(tmp_path / "events", "first_step", "point")
