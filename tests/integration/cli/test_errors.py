"""Whatever is wrong with a command line or its output: one line, and the exit code of its class."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer import errors
from bootseer.entrypoint import start_guard
from bootseer.errors import NotFoundError, describe
from tests.support.commands.run import BOOTSEER, clean_env
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow


def said(tmp_path: Path, *words: str, shell: str = '"$@"') -> tuple[int, str]:
    done = subprocess.run(
        ["sh", "-c", shell, "sh", *BOOTSEER, *words],
        cwd=tmp_path,
        env=clean_env(HOME=str(tmp_path)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["nosuch"], 2, "No such command 'nosuch'; see `bootseer --help`"),
        (["deps", "nosuch"], 2, "No such command 'nosuch'; see `bootseer deps --help`"),
        (["start", "--nosuch"], 2, "No such option '--nosuch'; see `bootseer start --help`"),
        (["start"], 2, "no job given; write it after `--`"),
        (["deps", "run"], 2, "Missing argument 'INSTALL...'; see `bootseer deps run --help`"),
        (["sh", "more"], 2, "unexpected extra argument (more); see `bootseer sh --help`"),
        (["deps", "run", "--wait", "x", "--", "true"], 2, "Invalid value for '--wait': 'x'"),
        (["import", "log"], 2, "Missing argument 'LOG...'"),
        (["start", "--check", "-c", "none.toml"], 3, "none.toml: No such file or directory"),
        (["start", "--check", "-c", "."], 2, "Is a directory; name a file"),
        (["report", "none"], 3, "none"),
    ],
)
def test_one_line_and_the_code(tmp_path: Path, words: list[str], code: int, text: str) -> None:
    exit_code, line = said(tmp_path, *words)
    assert exit_code == code
    assert line.startswith("bootseer: ")
    assert line.count("\n") == 1
    assert text in line


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a%0Ab%0Dc", r"a\nb\rc"),
        ("a%1B%5B31mb", r"a\x1b[31mb"),
        ("a%C2%85b%E2%80%A8c", r"a\x85b\u2028c"),
        ("ä%20b", "ä b"),
    ],
)
def test_a_name_with_control_characters_stays_in_its_line(
    tmp_path: Path, name: str, shown: str
) -> None:
    exit_code, line = said(tmp_path, "stripe", "get", f"file://{tmp_path}/{name}", "to")
    assert exit_code == 3
    assert shown in line
    assert line.endswith("\n")
    assert all(character.isprintable() for character in line[:-1])


@pytest.mark.parametrize("words", [["--help"], ["report", "--help"], ["sh"]])
def test_output_that_cannot_be_written(tmp_path: Path, words: list[str]) -> None:
    exit_code, line = said(tmp_path, *words, shell='"$@" > /dev/full')
    assert exit_code == 8
    assert line == (
        "bootseer: cannot write the output: No space left on device; "
        "free space or choose another file system\n"
    )


def test_a_reader_that_left_hears_nothing(tmp_path: Path) -> None:
    # The reader is gone before we begin: the fifo's other end closes with its opener.
    shell = 'mkfifo f; sh -c ": < f" & exec 3> f; wait; "$@" >&3'
    exit_code, line = said(tmp_path, "--help", shell=shell)
    assert exit_code != 0
    assert line == ""


@pytest.mark.parametrize("closing", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams(tmp_path: Path, closing: str) -> None:
    assert said(tmp_path, "--help", shell=f'"$@" {closing}') == (0, "")
    assert said(tmp_path, "nosuch", shell=f'"$@" {closing}')[0] == 2


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOENT, errors.NotFoundError),
        (errno.EISDIR, errors.UsageError),
        (errno.ENAMETOOLONG, errors.UsageError),
        (errno.EACCES, errors.AccessDeniedError),
        (errno.EROFS, errors.AccessDeniedError),
        (errno.ENOSPC, errors.NoSpaceError),
        (errno.EDQUOT, errors.NoSpaceError),
        (errno.ETIMEDOUT, errors.DeadlineError),
        (errno.EBUSY, errors.BusyError),
        (errno.EIO, errors.StoreUnavailableError),
    ],
)
def test_faults_of_the_system_have_a_class(number: int, kind: type[errors.BootseerError]) -> None:
    mapped = errors.from_os_error(OSError(number, "why"), "read the file x")
    assert type(mapped) is kind
    assert str(mapped).startswith("cannot read the file x: why")
    assert "\n" not in str(mapped)


def test_exit_codes_are_the_documented_ones() -> None:
    classes = errors.BootseerError.__subclasses__()
    assert sorted(c.exit_code for c in classes if c.__module__ == errors.__name__) == [
        *range(2, 11)
    ]
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    assert "2 usage · 3 not found · 4 access denied · 5 store unavailable · 6 corrupt data" in page


def test_python_tells_its_own_faults_by_a_trace() -> None:
    """A defect is no error of ours: it is not dressed up as one."""
    script = "from bootseer.cli import root\nroot.group.main = lambda **_: 1 / 0\nroot.main([])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert b"ZeroDivisionError" in done.stderr


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (KeyError(), "KeyError"),
        (TimeoutError("\n"), "TimeoutError"),
        (ValueError("two\nlines"), "ValueError: two lines"),
        (NotFoundError("no such\nfile"), "no such file"),
        (NotFoundError(), "NotFoundError"),
    ],
)
def test_no_reason_is_empty_or_of_two_lines(error: Exception, words: str) -> None:
    assert describe(error) == words
    assert start_guard._describe(error).endswith(words)
