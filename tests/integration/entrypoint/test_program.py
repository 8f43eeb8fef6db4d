"""The `bootseer` program as installers leave it, before a job whose environment is not ours.

In the path of each virtual environment is a space, which no `#!` line can hold.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from bench import wrapper
from tests.support.commands.run import PACKAGE, clean_env
from tests.support.commands.start import Place

pytestmark = pytest.mark.slow

HOSTILE = {
    "PYTHONHOME": "/nowhere",
    "PYTHONPLATLIBDIR": "no-lib",
    "PYTHONHASHSEED": "nonsense",
    "PYTHONMALLOC": "nonsense",
    "PYTHONUTF8": "nonsense",
    "PYTHONINSPECT": "1",
    "PYTHONSAFEPATH": "1",
    "PYTHONWARNINGS": "error",
    "PYTHONVERBOSE": "3",
    "PYTHONSTARTUP": "/nowhere/startup.py",
    "PYTHONIOENCODING": "nonsense",
}
"""What keeps a Python from starting, most of it alone, or makes it do something else."""

ODD = {
    "my.key": "dots are for Kubernetes",
    "with-hyphen": "",
    "BASH_FUNC_greet%%": "() {  echo hi\n}",
    "lines": "one\ntwo\n\nfour",
    "bytes": "\udcff\x01\n\x02",
    "SHLVL": "41",
    "_": "/bin/before",
    "OLDPWD": "/nowhere",
    "PWD": "/somewhere/else",
}
"""What shells drop, split or set anew."""

NAMES = ("BOOTSEER_EVENTS", "BOOTSEER_TRACEPARENT")
"""What the job is told by us."""


@pytest.fixture(scope="module", params=["pip", "uv"])
def programs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment that has our dependencies."""
    folder = tmp_path_factory.mktemp("program")
    place = folder / "virtual environment"
    programs = wrapper.install(request.param, place, wrapper.copy_source(folder / "source"))
    (site,) = place.glob("lib/python*/site-packages")
    (site / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return programs


def start(
    program: Path, words: list[str], environ: dict[str, str], cwd: Path
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [program, *words],
        env={**environ, "BOOTSEER_EVENTS": str(cwd / "events")},
        cwd=cwd,
        capture_output=True,
        check=False,
        timeout=120,
    )


def environment(shown: bytes) -> dict[str, str]:
    pairs = (entry.partition(b"=") for entry in shown.split(b"\0") if entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_what_is_meant_for_the_jobs_python_is_not_for_ours(
    programs: Path, tmp_path: Path, name: str
) -> None:
    """Of each command by one of the installers: what guards our Python is before both."""
    command = "run" if (programs / "pip").exists() else "start"
    done = start(
        programs / "bootseer", [command, "--", "env", "-0"], {name: HOSTILE[name]}, tmp_path
    )
    assert (done.returncode, done.stderr) == (0, b"")
    told = environment(done.stdout)
    assert {key: value for key, value in told.items() if key not in NAMES} == {name: HOSTILE[name]}


@pytest.mark.parametrize("command", ["run", "start"])
def test_the_job_gets_the_environment_that_was_given(
    programs: Path, tmp_path: Path, command: str
) -> None:
    for given in ({}, {**ODD, **HOSTILE, "PATH": "/usr/bin:/bin", "LC_ALL": "C"}):
        done = start(programs / "bootseer", [command, "--", "/usr/bin/env", "-0"], given, tmp_path)
        assert (done.returncode, done.stderr) == (0, b"")
        told = environment(done.stdout)
        assert {key: value for key, value in told.items() if key not in NAMES} == given


@pytest.mark.parametrize("command", ["run", "start"])
def test_what_the_loader_is_told_reaches_the_job_as_it_was_given(
    programs: Path, tmp_path: Path, command: str
) -> None:
    """A library that is not there costs a line of the loader's for each program that it loads."""
    place = Place(tmp_path)
    place.settings()
    given = {
        "LD_PRELOAD": "/nowhere/a library.so:libnowhere.so",
        "LD_LIBRARY_PATH": "/nowhere::/nowhere/else",
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
    }
    words = [command, "--", "sh", "-c", "env -0; exit 7"]
    done = start(programs / "bootseer", words, given, tmp_path)
    assert done.returncode == 7
    installed, _, shown = done.stdout.rpartition(b"installed\n")
    assert (installed, place.installs) == (b"", 1 if command == "start" else 0)
    told = environment(shown)
    kept = {name: value for name, value in told.items() if name in given}
    assert kept == given
    warnings = done.stderr.splitlines()
    assert warnings
    assert all(b"ld.so: object '" in line and b"LD_PRELOAD" in line for line in warnings)
    assert place.fallbacks() == {}


def test_a_module_of_the_jobs_path_is_the_jobs_alone(programs: Path, tmp_path: Path) -> None:
    modules = tmp_path / "modules"
    modules.mkdir()
    for name in ("sitecustomize", "zstandard", "json", "bootseer"):
        (modules / f"{name}.py").write_text(
            f"import os; os.write(2, b'{name} of the job\\n')\n", encoding="utf-8"
        )
    place = Place(tmp_path)
    place.settings()
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(modules), "HOME": str(tmp_path)}
    job = [str(programs / "python"), "-c", "import json"]
    done = start(programs / "bootseer", ["start", "--", *job], environ, tmp_path)
    assert (done.returncode, done.stdout) == (0, b"installed\n")
    assert done.stderr.splitlines() == [b"sitecustomize of the job", b"json of the job"]
    # What restores is a process of its own, and unpacks by another.
    place.remove_installed()
    environ["PYTHONHOME"] = "/nowhere"
    done = start(programs / "bootseer", ["start", "--", "ls", "site"], environ, tmp_path)
    assert (done.returncode, done.stdout) == (0, b"module\n")
    assert (place.installs, place.fallbacks()) == (1, {})


@pytest.mark.parametrize("command", ["run", "start"])
@pytest.mark.parametrize("stream", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_a_closed_stream_is_closed_for_the_job_too(
    programs: Path, tmp_path: Path, command: str, stream: str
) -> None:
    """What we open must not become the job's standard input."""
    job = ["sh", "-c", "ls /proc/$$/fd >seen; exit 7"]
    told = []
    for words in (job, [str(programs / "bootseer"), command, "--", *job]):
        line = ["/bin/sh", "-c", f'exec "$@" {stream}', "-", *words]
        environ = {"PATH": "/usr/bin:/bin", "BOOTSEER_EVENTS": str(tmp_path / "events")}
        code = subprocess.run(
            line, cwd=tmp_path, env=environ, capture_output=True, check=False, timeout=120
        ).returncode
        told.append((code, (tmp_path / "seen").read_text().split()))
    assert told[0] == told[1]


def test_by_a_link_and_by_a_bare_name(programs: Path, tmp_path: Path) -> None:
    link, words = tmp_path / "a link", ["run", "--", "sh", "-c", "exit 7"]
    link.symlink_to(programs / "bootseer")
    assert start(link, words, {"PATH": "/nowhere"} | dict(os.environ), tmp_path).returncode == 7
    done = subprocess.run(["/bin/sh", "bootseer", *words], cwd=programs, check=False)
    assert done.returncode == 7


def test_where_only_pythonpath_leads(tmp_path: Path) -> None:
    source, target = wrapper.copy_source(tmp_path / "source"), tmp_path / "tar get"
    words = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", target, source]
    subprocess.run(words, check=True, capture_output=True)
    # An interpreter that has never heard of us stands for the one that installed it.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    program = target / "bin/bootseer-python"
    rest = program.read_text(encoding="utf-8").partition("\n")[2]
    program.write_text(f"#!{tmp_path}/bare/bin/python\n{rest}", encoding="utf-8")
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(target)}
    done = start(target / "bin/bootseer", ["run", "--", "echo", "ran"], environ, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"ran\n", b"")


def test_a_program_that_an_earlier_version_installed_still_runs(tmp_path: Path) -> None:
    program = tmp_path / "bootseer-python"
    program.write_text("import sys\nfrom bootseer.cli import program\nsys.exit(program.main())\n")
    environ = clean_env(PYTHONPATH=str(PACKAGE.parent), BOOTSEER_EVENTS=str(tmp_path / "events"))
    words = [sys.executable, program, "run", "--", "sh", "-c", "echo ran; exit 7"]
    done = subprocess.run(words, env=environ, capture_output=True, check=False, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (7, b"ran\n", b"")


def test_without_its_interpreter_the_job_starts_the_plain_way(
    programs: Path, tmp_path: Path
) -> None:
    for name in ("bootseer", "bootseer-python"):
        text = (programs / name).read_text(encoding="utf-8")
        if name == "bootseer-python":
            text = "#!/nowhere/bin/python\n" + text.partition("\n")[2]
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "bootseer").chmod(0o755)
    words = ["run", "--phase", "x", "--", "sh", "-c", "echo ran; exit 7"]
    done = start(tmp_path / "bootseer", words, {"PATH": "/usr/bin:/bin"}, tmp_path)
    assert (done.returncode, done.stdout) == (7, b"ran\n")
    assert b"(/nowhere/bin/python); install bootseer again" in done.stderr
    done = start(tmp_path / "bootseer", ["report"], {"PATH": "/usr/bin:/bin"}, tmp_path)
    assert (done.returncode, done.stdout) == (127, b"")
