"""One set of inputs is one key; what the index decides picks among the key's snapshots."""

from __future__ import annotations

import html
import json
import os
import pwd
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bootseer
from bootseer.depsnap import pins
from bootseer.depsnap.json_faults import describe_fault
from bootseer.depsnap.key import install_roots, pip_settings, requirements, resolver
from bootseer.depsnap.key.install_command import plan
from bootseer.depsnap.key.uv_run import sync_of
from bootseer.depsnap.store import record_file
from bootseer.errors import CorruptDataError, UsageError
from tests.support.commands.deps_node import Node, uv
from tests.support.samples.wheels import make_wheel

# --- pins ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pinned", "brought", "covered"),
    [
        ({"six": "1.16.0"}, {"six": "1.16.0"}, True),
        ({"six": "1.16"}, {"six": "1.16.0"}, True),
        ({"torch": "2.13.0"}, {"torch": "2.13.0+cpu"}, True),
        ({"torch": "2.13.0+cpu"}, {"torch": "2.13.0"}, False),
        ({"six": "1.16.0", "other": "1"}, {"six": "1.16.0"}, True),
        ({"six": "1.16.0"}, {"six": "1.17.0"}, False),
        ({"six": "1.16.0"}, {"six": "1.16.0", "idna": "3.7"}, False),
        ({"six": "1.16.0"}, {"six": ""}, False),
    ],
)
def test_pins_cover_what_was_brought(
    pinned: dict[str, str], brought: dict[str, str], *, covered: bool
) -> None:
    assert pins.cover(pinned, brought) is covered


def test_pins_are_read_from_requirements_locks_and_names() -> None:
    assert pins.parse_pin("Typing_Extensions [x] == 4.16.0 ; python_version > '3'") == (
        "typing-extensions",
        "4.16.0",
    )
    assert pins.parse_pin("six==1.*") is None
    assert pins.parse_pin("six>=1") is None
    assert pins.parse_pin("six @ https://h/six.whl") is None
    assert pins.of_lock("a-b==1\n# why\nc==2  # via a\n") == {"a-b": "1", "c": "2"}
    names = ["typing_extensions-4.16.0.dist-info", "a.b-1.0-py3.11.egg-info", "old.egg-info"]
    assert pins.of_distributions(names) == {"typing-extensions": "4.16.0", "a-b": "1.0", "old": ""}


@given(st.text())
def test_no_text_is_too_odd_for_a_pin(text: str) -> None:
    pins.parse_pin(text)
    pins.of_lock(text)
    pins.of_distributions([text])


def test_a_list_that_pins_all_is_told_from_one_that_does_not(tmp_path: Path) -> None:
    (tmp_path / "r.txt").write_text("six==1.16.0\nidna==3.7 # why\n")
    for words, exact in ((["-r", "r.txt"], True), (["-r", "r.txt", "x"], False), (["./r"], False)):
        found = requirements.read_inputs(plan(["pip", "install", *words]), str(tmp_path))
        assert found.all_exact is exact
        assert found.open_ended


def test_the_project_that_a_variable_names_is_in_the_key(tmp_path: Path) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pyproject.toml").write_text(f"[project]\nname='{name}'\n")
    (tmp_path / "there/uv.lock").write_text("version = 1\n")
    environ = {"UV_PROJECT": str(tmp_path / "there")}
    found = requirements.read_inputs(plan(["uv", "sync"]), str(tmp_path / "here"), environ)
    assert sorted(found.digests) == [
        f"editable {tmp_path}/there",
        *(f"file {tmp_path}/there/{n}" for n in ("pyproject.toml", "uv.lock")),
    ]
    assert not found.open_ended


# --- the key and its snapshots -------------------------------------------------------------------


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    for name in ("bootseer_alpha", "bootseer_beta"):
        make_wheel(folder, name, "1.0")
    return folder


@pytest.fixture
def node(tmp_path: Path, wheels: Path) -> Node:
    return Node(tmp_path, wheels)


@pytest.fixture
def by_uv(node: Node) -> None:
    """The node installs by uv, in a tenth of pip's time: for what no tool decides."""
    node.tool = "uv"


def key_of_last(node: Node) -> str:
    return str(node.ends()[-1]["attributes"]["bootseer.deps.key"])


@pytest.mark.slow
def test_a_pinned_list_has_one_key_whether_it_was_resolved_or_not(node: Node) -> None:
    """The same start had two keys, by the time that resolving it took, and was installed twice."""
    (node.home / "requirements.txt").write_text("bootseer-alpha==1.0\nbootseer-beta==1.0\n")
    seen = set()
    for timeout_s in (0, 60, 0):
        done = node.run("--resolve-timeout", timeout_s)
        assert (done.returncode, done.stderr) == (0, "")
        seen.add(key_of_last(node))
        node.fresh()
    assert len(seen) == 1
    assert node.installs == 1
    (record,) = node.store.glob("deps/*/record-*.json")
    body = json.loads(record.read_text())
    assert body["lock"] == record_file.OWN
    assert body["packages"] == {"bootseer-alpha": "1.0", "bootseer-beta": "1.0"}


@pytest.mark.slow
def test_a_changed_constraint_is_no_restore_of_what_the_old_one_let_in(node: Node) -> None:
    """pip fills in a name that stands in it. Here no resolver tells the two starts apart."""
    make_wheel(node.wheels, "bootseer_alpha", "2.0")
    (node.home / "x.txt").write_text("bootseer-beta<2\n")
    node.variables |= {"PIP_CONSTRAINT": "c.txt", "C_HOME": str(node.home)}
    for limit, version in (("2", "1.0"), ("3", "2.0")):
        (node.home / "c.txt").write_text(f"-c ${{C_HOME}}/x.txt\nbootseer-alpha<{limit}\n")
        assert node.run("--resolve-timeout", 0).returncode == 0
        (found,) = node.place.glob("lib/python3*/site-packages/bootseer_alpha-*.dist-info")
        assert found.name == f"bootseer_alpha-{version}.dist-info"
        node.fresh()
    assert node.installs == 2


@pytest.mark.usefixtures("by_uv")
@pytest.mark.slow
def test_an_unpinned_list_published_without_a_lock_fits_the_lock_found_later(node: Node) -> None:
    node.run("--resolve-timeout", 0)
    first = key_of_last(node)
    node.fresh()
    done = node.run("--resolve-timeout", 60)
    assert (done.returncode, done.stderr) == (0, "")
    assert node.last() == ("ok", "restored")
    assert key_of_last(node) == first
    assert node.installs == 1


@pytest.mark.usefixtures("by_uv")
@pytest.mark.slow
@pytest.mark.parametrize("released", [False, True])
def test_a_lock_found_after_the_install_is_recorded_where_it_fits(
    node: Node, wheels: Path, monkeypatch: pytest.MonkeyPatch, *, released: bool
) -> None:
    """A release that came out between the two gave the old packages the new lock."""
    put_uv_before(node, f"mkdir {node.home}/asked 2>/dev/null && exec sleep 600", monkeypatch)
    child = node.start("scanned after", "print", resolve_timeout_s=60.0)
    assert child.stdout is not None
    assert child.stdin is not None
    assert child.stdout.readline() == "scanned after\n"
    assert (node.home / "asked").exists()
    if released:
        make_wheel(wheels, "bootseer_alpha", "2.0")
    child.stdin.write("\n")
    child.stdin.flush()
    assert node.finish(child) == (0, "")
    (path,) = node.store.glob("deps/*/record-*.json")
    record = json.loads(path.read_text())
    assert record["packages"] == {"bootseer-alpha": "1.0"}
    assert bool(record["lock"]) is not released
    node.fresh()
    node.run()
    assert versions_in(node) == [f"bootseer_alpha-{'2.0' if released else '1.0'}"]


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
def test_what_a_new_environment_brings_keeps_no_snapshot_from_fitting(
    node: Node, wheels: Path, monkeypatch: pytest.MonkeyPatch, *, late: bool
) -> None:
    """pip and setuptools are in no lock: such a snapshot fitted none, and was installed again.

    Python's own venv brings them, and so does uv's if asked: here wheels of these names.
    """
    shutil.rmtree(node.place)
    if late:
        put_uv_before(node, f"mkdir {node.home}/asked 2>/dev/null && exec sleep 600", monkeypatch)
        for name in ("pip", "setuptools", "wheel"):
            make_wheel(wheels, name, "99.0")
        node.tool = "uv"
        where = ["--no-index", "--find-links", str(wheels), "--python", sys.executable]
        make = [uv(), "venv", "-q", str(node.place), "--seed", *where]
        fill = node.plain
    else:
        make = [sys.executable, "-m", "venv", str(node.place)]
        where = ["--no-index", "--find-links", str(wheels), "-r", "requirements.txt"]
        fill = [str(node.place / "bin/pip"), "install", "-q", *where]
    make[0] = node.counting(make[0])
    command = ["sh", "-c", f"{shlex.join(make)} && {shlex.join(fill)}"]
    node.run("--resolve-timeout", 60 if late else 0, command=command)
    assert node.last() == ("ok", "published")
    node.fresh()
    shutil.rmtree(node.place)
    done = node.run("--resolve-timeout", 60, command=command)
    assert (done.returncode, done.stderr) == (0, "")
    assert node.last() == ("ok", "restored")
    assert node.installs == 1
    assert list(node.place.glob("lib/python3*/site-packages/pip-*.dist-info"))
    assert list(node.place.glob("lib/python3*/site-packages/setuptools-*.dist-info"))
    assert (node.home / "asked").exists() is late


@pytest.mark.parametrize(
    ("lock", "packages", "contradicts"),
    [
        ("six==1.17\n", {"six": "1.17.0"}, False),
        ("six==1.17\n", {"six": "1.16"}, True),
        ("six==1.17\nfoo @ file:///foo\n", {"six": "1.17", "foo": "1", "pip": "24"}, False),
        ("six==1.17\nfoo @ git+https://h/foo@1a2b\n", {"six": "1.17", "pip": "24"}, False),
        ("six==1.17\nfoo @ git+https://h/foo@1a2b\n", {"six": "1.17", "foo": "1"}, True),
    ],
)
def test_a_lock_contradicts_other_versions_and_unknown_commits(
    tmp_path: Path, lock: str, packages: dict[str, str], *, contradicts: bool
) -> None:
    program = tmp_path / "uv"
    program.write_text(f"#!/bin/sh\ncat <<END\n{lock}END\n")
    program.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    installs = plan(["pip", "install", "six", "foo"])
    found = resolver.Resolution(installs, sys.executable, environ, str(tmp_path), 60).lock()
    assert found is not None
    assert found.contradicts(packages) is contradicts


@pytest.mark.slow
def test_the_lock_picks_among_the_snapshots_of_one_key(node: Node, wheels: Path) -> None:
    node.run()
    node.fresh()
    newer = make_wheel(wheels, "bootseer_alpha", "2.0")
    done = node.run()
    assert node.last() == ("ok", "published")
    assert done.stderr == (
        "bootseer: the newest snapshot has other packages: bootseer-alpha 1.0 → 2.0\n"
    )
    node.fresh()
    newer.rename(node.home / "aside")
    node.run()
    assert node.last() == ("ok", "restored")
    assert list(node.place.rglob("bootseer_alpha-1.0.dist-info"))
    (node.home / "aside").rename(newer)
    node.fresh()
    node.run()
    assert node.last() == ("ok", "restored")
    assert list(node.place.rglob("bootseer_alpha-2.0.dist-info"))
    assert node.installs == 2
    assert len(list(node.store.glob("deps/*/lease"))) == 1


@pytest.mark.usefixtures("by_uv")
@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_a_snapshot_that_does_not_fit_never_reaches_the_target(
    node: Node, wheels: Path, *, shared: bool
) -> None:
    """It is unpacked while the index is asked, and handed over only then."""
    node.run()
    node.fresh()
    (wheels / "bootseer_alpha-1.0-py3-none-any.whl").rename(node.home / "aside")
    make_wheel(wheels, "bootseer_alpha", "2.0")
    node.run("--form", "auto" if shared else "archive", cache_shared=shared)
    assert list(node.place.rglob("bootseer_alpha-2.0.dist-info"))
    assert not list(node.place.rglob("bootseer_alpha-1.0.dist-info"))
    assert not node.leftovers()


@pytest.mark.usefixtures("by_uv")
@pytest.mark.slow
def test_an_unresolved_start_says_that_the_newest_serves(node: Node) -> None:
    node.run("--resolve-timeout", 0)
    node.fresh()
    done = node.run("--resolve-timeout", 0)
    assert node.last() == ("ok", "restored")
    assert "for up to 7 days" in done.stderr
    assert "--resolve-timeout is 0" in done.stderr
    assert node.ends()[-1]["attributes"]["bootseer.deps.lock"] == "unresolved"
    done = node.run("--resolve-timeout", 0)
    assert node.last() == ("ok", "in place")
    assert "for up to 7 days" in done.stderr


def run_without_uv(node: Node, base: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """`bootseer` of a Python beside which there is no uv, nor is one on the PATH."""
    python = base / "bare/bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", base / "bare"], check=True)
        (site,) = (base / "bare").glob("lib/python3*/site-packages")
        (site / "all.pth").write_text("\n".join(path for path in sys.path if path))
    environ = node.environ()
    folders = environ["PATH"].split(os.pathsep)
    environ["PATH"] = os.pathsep.join(f for f in folders if not os.path.exists(f"{f}/uv"))
    return subprocess.run(
        [python, "-m", "bootseer", *map(str, words)],
        cwd=node.home,
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )


@pytest.mark.usefixtures("by_uv")
@pytest.mark.slow
def test_the_report_says_that_nobody_could_resolve(node: Node, tmp_path: Path) -> None:
    """The events had it, and no report read them."""
    options = ("--store", node.store, "--form", "archive", "--publish", "inline")
    words = ("deps", "run", *options, "--", *node.install)
    done = run_without_uv(node, tmp_path, *words)
    assert node.last() == ("ok", "published")
    node.fresh()
    for path in node.events.glob("*.jsonl"):
        path.unlink()
    done = run_without_uv(node, tmp_path, *words)
    assert node.last() == ("ok", "restored")
    assert resolver.NO_RESOLVER in done.stderr
    shown = run_without_uv(node, tmp_path, "report", "--json", node.events).stdout
    report = json.loads(shown)
    (note,) = report["notes"]
    assert (note["phase"], note["count"], len(note["nodes"])) == ("deps.install", 1, 1)
    assert note["text"].startswith("the newest snapshot of these requirements serves")
    assert note["text"].endswith(resolver.NO_RESOLVER)
    assert report["incidents"] == []
    shown = run_without_uv(node, tmp_path, "report", node.events).stdout
    wanted = f"Notes deps.install: {note['text']}, on {note['nodes'][0]} "
    assert wanted in " ".join(shown.split()) + " "
    page = tmp_path / "page.html"
    run_without_uv(node, tmp_path, "report", "--html", page, node.events)
    assert html.escape(note["text"], quote=False) in page.read_text(encoding="utf-8")


@pytest.mark.usefixtures("by_uv")
@pytest.mark.slow
def test_an_interpreter_that_is_late_is_no_other_key(node: Node) -> None:
    """Fault injection: a Python that never tells what it is, and does all else. It had a key of
    its own, and a snapshot without a version of Python."""
    node.run()
    published, keys = key_of_last(node), sorted((node.store / "deps").rglob("*"))
    node.fresh()
    real = (node.place / "bin/python").resolve()
    shown = node.place / "bin/python"
    shown.unlink()
    shown.write_text(
        f"""#!/bin/sh
case "$*" in *CS_GNU_LIBC_VERSION*) echo $$ >> {node.home}/hung; exec sleep 1000 ;; esac
exec -a {node.place}/bin/python3 {real} "$@"
""".replace("#!/bin/sh", "#!/bin/bash")
    )
    shown.chmod(0o755)
    done = node.run()
    assert done.returncode == 0
    (hung,) = (node.home / "hung").read_text().split()
    assert not os.path.exists(f"/proc/{hung}")
    assert node.last() == ("fallback", "installed")
    assert "bootseer.deps.key" not in node.ends()[-1]["attributes"]
    (line,) = done.stderr.splitlines()
    assert f"{shown} was asked what it is; it did not answer within 10 s" in line
    assert "did not answer within 10 s" in node.ends()[-1]["attributes"]["bootseer.reason"]
    assert sorted((node.store / "deps").rglob("*")) == keys
    node.fresh()
    node.run()
    assert (node.last(), key_of_last(node)) == (("ok", "restored"), published)


@pytest.mark.usefixtures("by_uv")
@pytest.mark.slow
def test_a_miss_says_which_input_differs(node: Node) -> None:
    node.run()
    node.fresh()
    (node.home / "requirements.txt").write_text("bootseer-beta\n")
    command = node.install
    done = node.run(command=command)
    assert node.last() == ("ok", "published")
    assert "was made from other inputs: file requirements.txt" in done.stderr


def test_without_uv_the_report_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    installs = plan(["pip", "install", "six"])
    asked = resolver.Resolution(installs, "/usr/bin/python3", {"PATH": ""}, str(tmp_path), 5)
    assert asked.lock() is None
    assert asked.why == resolver.NO_RESOLVER


@pytest.mark.slow
def test_without_uv_each_start_says_so(node: Node, tmp_path: Path) -> None:
    """Whole commands of a bootseer beside which, and on whose PATH, there is no uv."""
    bare = tmp_path / "bare"
    subprocess.run([uv(), "venv", "-q", "--python", sys.executable, bare], check=True)
    (site,) = bare.glob("lib/python3*/site-packages")
    ours = [sysconfig.get_path("purelib"), str(Path(bootseer.__file__).parent.parent)]
    (site / "ours.pth").write_text("\n".join(ours) + "\n", encoding="utf-8")
    assert shutil.which("uv", path="/usr/bin:/bin") is None
    for result in ("published", "restored", "in place"):
        words = [bare / "bin/python", "-m", "bootseer", "deps", "run", "--publish", "inline"]
        words += ["--store", node.store, "--cache", node.cache, "--form", "archive"]
        done = subprocess.run(
            [*words, "--", *node.install],
            cwd=node.home,
            env=node.environ() | {"PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert node.last() == ("ok", result)
        if result == "published":
            node.fresh()
            continue
        (line,) = done.stderr.splitlines()
        assert resolver.NO_RESOLVER in line
        assert "for up to 7 days" in line


def test_a_resolver_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    slow = tmp_path / "uv"
    slow.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    slow.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    installs = plan(["pip", "install", "six"])
    asked = resolver.Resolution(installs, sys.executable, environ, str(tmp_path), 1)
    assert asked.lock() is None
    assert asked.why == "they were not resolved within 1 s"
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.slow
def test_a_start_without_a_network_does_not_wait_for_one(node: Node) -> None:
    """An index that refuses is known to at once; the resolver's limit is not waited for."""
    with socket.socket() as taken:  # bound and not listening: whoever connects is refused
        taken.bind(("127.0.0.1", 0))
        index = f"http://127.0.0.1:{taken.getsockname()[1]}/simple"
        where = ["--python", str(node.place), "install", "-q", "--no-deps"]
        what = ["--index-url", index, "--find-links", str(node.wheels), "--retries", "0"]
        words = [sys.executable, "-m", "pip", *where, *what, "-r", "requirements.txt"]
        assert node.run(command=words).returncode == 0
        assert node.last() == ("ok", "published")
        node.fresh()
        # Below the limit from which on an index that refuses is asked again.
        done = node.run("--resolve-timeout", 9.9, command=words)
    assert node.last() == ("ok", "restored")
    assert "not known: `uv pip compile` could not resolve them" in done.stderr


@pytest.mark.usefixtures("by_uv")
@pytest.mark.slow
def test_a_store_that_refuses_is_given_up_after_four_seconds(node: Node) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        store = f"webhdfs://127.0.0.1:{taken.getsockname()[1]}/snapshots"
        done = node.run("--store", store, "--store-timeout", 4)  # the default
    assert (done.returncode, node.installs, node.works()) == (0, 1, True)
    assert node.ends()[-1]["status"] == "fallback"
    assert "did not answer for 4 s" in done.stderr


def test_the_resolver_looks_where_pip_is_told_to_look(tmp_path: Path, wheels: Path) -> None:
    """pip.conf alone names the index; to uv it is unknown."""
    (tmp_path / ".config/pip").mkdir(parents=True)
    more = tmp_path / "more"
    more.mkdir()
    make_wheel(more, "bootseer_beta", "1.0")
    text = f"[global]\nno-index = true\n[install]\nfind-links =\n    {wheels}\n    {more}\n"
    (tmp_path / ".config/pip/pip.conf").write_text(text)
    home = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    for command, found in ((["pip"], True), (["uv", "pip"], False)):
        installs = plan([*command, "install", "bootseer-alpha", "bootseer-beta"])
        offline = {**home, "UV_OFFLINE": "1"}
        asked = resolver.Resolution(installs, sys.executable, offline, str(tmp_path), 60)
        lock = asked.lock()
        assert (lock is not None) is found, asked.why
        if lock is not None:
            assert set(lock.pinned) == {"bootseer-alpha", "bootseer-beta"}


def test_settings_of_pip_are_said_to_uv_in_its_own_words(tmp_path: Path) -> None:
    machines = tmp_path / "machine/pip/pip.conf"  # what this machine's pip is told is none of ours
    machines.parent.mkdir(parents=True)
    machines.write_text("[global]\nconstraint = /c1 /c2\nindex-url = https://lowest\n")
    config = tmp_path / "xdg"
    (config / "pip").mkdir(parents=True)
    (config / "pip/pip.conf").write_text(
        "[global]\nindex-url = https://low\nextra-index-url = https://a\n  https://b\n"
        "cert = /ca.pem\npre = no\n[install]\nindex-url = https://high\n"
    )
    (tmp_path / "pip.conf").write_text("[global]\nfind_links = /w1 /w2\ntrusted-host = h\n")
    environ = {
        "XDG_CONFIG_DIRS": f"/nonexistent:{tmp_path}/machine",
        "XDG_CONFIG_HOME": str(config),
        "PIP_CERT": "/other.pem",
        "UV_INDEX": "https://mine",
    }

    def said(environ: dict[str, str], prefix: str = "") -> dict[str, str]:
        told = pip_settings.read(environ, prefix, str(tmp_path))
        return pip_settings.environment_for_uv(environ, told)

    made = said(environ, str(tmp_path))
    assert made.items() >= environ.items()
    assert {name: made[name] for name in made.keys() - environ.keys()} == {
        "UV_DEFAULT_INDEX": "https://high",
        "UV_FIND_LINKS": "/w1,/w2",
        "UV_CONSTRAINT": "/c1 /c2",
        "UV_INSECURE_HOST": "h",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "SSL_CERT_FILE": "/other.pem",
    }
    nothing = said({**environ, "PIP_CONFIG_FILE": os.devnull})
    assert "UV_DEFAULT_INDEX" not in nothing
    (tmp_path / "chosen").write_text("[global]\nno-index = yes\n")
    chosen = {**environ, "PIP_CONFIG_FILE": str(tmp_path / "chosen")}  # pip leaves the user's out
    made = said(chosen)
    assert (made["UV_NO_INDEX"], made["UV_DEFAULT_INDEX"]) == ("1", "https://lowest")
    broken = {"PIP_CONFIG_FILE": str(tmp_path / "broken"), "HOME": "/nonexistent"}
    (tmp_path / "broken").write_text("index-url = without a section\n")
    assert said(broken).items() >= broken.items()
    os.mkfifo(tmp_path / "fifo")  # nobody writes into it
    waiting = {"PIP_CONFIG_FILE": str(tmp_path / "fifo"), "HOME": "/nonexistent"}
    assert said(waiting).items() >= waiting.items()


def test_those_settings_count_that_pip_heeds(tmp_path: Path) -> None:
    machine, chosen = tmp_path / "all/pip/pip.conf", tmp_path / "chosen"
    machine.parent.mkdir(parents=True)
    machine.write_text("[global]\nconstraint = c.txt\npre = yes\n[install]\n--no_deps = 1\n")
    chosen.write_text("[global]\npre =\n[install]\nconstraint =\n--find-links = /w\n")
    environ = {"HOME": str(tmp_path), "XDG_CONFIG_DIRS": "~/all:~", "PIP_CONFIG_FILE": "chosen"}
    environ |= {"PIP_Index_URL": "https://h", "PIP___CERT": "/mine.pem", "PIP_FIND_LINKS": ""}
    told = pip_settings.read(environ, "", str(tmp_path))
    wanted = {"constraint": "c.txt", "find-links": "/w", "index-url": "https://h"}
    assert told.items() >= (wanted | {"cert": "/mine.pem", "no-deps": "1"}).items()
    assert "pre" not in told, "a later file takes back what an earlier one says in that section"
    home = pwd.getpwuid(os.getuid()).pw_dir
    assert f"{home}/.config/pip/pip.conf" in pip_settings.settings_files({}, "", str(tmp_path))
    assert "/.pip/pip.conf" in pip_settings.settings_files({"HOME": ""}, "", str(tmp_path))


def test_a_resolver_tells_uv_nothing_of_an_environment_that_is_being_made(tmp_path: Path) -> None:
    """uv keeps what it learns of `venv/bin/python`; without pyvenv.cfg that is its base's."""
    venv, home = tmp_path / "venv", {**os.environ, "HOME": str(tmp_path)}
    home.pop("UV_CACHE_DIR", None)
    subprocess.run([uv(), "venv", "-q", "--python", sys.executable, venv], check=True, env=home)
    (venv / "pyvenv.cfg").rename(tmp_path / "later")
    installs = plan(["uv", "pip", "install", "--no-index", "six"])
    python = str(venv / "bin/python")
    resolver.Resolution(installs, python, home, str(tmp_path), 60).lock()
    assert list(tmp_path.glob(".cache/uv/interpreter-*"))  # uv did look at an interpreter
    (tmp_path / "later").rename(venv / "pyvenv.cfg")
    command = [uv(), "pip", "list", "-v", "--python", python]
    done = subprocess.run(command, env=home, capture_output=True, text=True, check=True)
    assert f"environment at: {venv}\n" in done.stderr


def put_uv_before(node: Node, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault injection: a resolver that does this before it resolves."""
    program = node.home / "bin" / "uv"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\n{script}\nexec {uv()} "$@"\n')
    program.chmod(0o755)
    environ = node.environ()
    environ["PATH"] = f"{program.parent}:{environ['PATH']}"
    monkeypatch.setattr(node, "environ", lambda: environ)


@pytest.mark.usefixtures("by_uv")
@pytest.mark.slow
def test_a_waiting_node_unpacks_what_does_not_fit_at_most_once(node: Node, wheels: Path) -> None:
    """It was unpacked anew at each look, and each time reported as an error."""
    node.run()
    (wheels / "bootseer_alpha-1.0-py3-none-any.whl").rename(node.home / "aside")
    make_wheel(wheels, "bootseer_alpha", "2.0")
    node.fresh()
    holder = node.start("lease", "print", lease_ttl_s=60.0)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "lease\n"
    looked = len(node.spans("deps.install.restore"))
    assert looked <= 1
    node.cache = node.cache.with_name("follower")
    waiting = node.start("", "", wait="always", wait_limit_s=3.0, lease_ttl_s=60.0)
    code, errors = node.finish(waiting)
    assert code == 0
    assert "waited 3 s for another node in vain" in errors
    spans = node.spans("deps.install.restore")
    assert len(spans) <= looked + 1
    assert {span["status"] for span in spans} <= {"ok"}
    assert holder.stdin is not None
    holder.stdin.write("\n")
    holder.stdin.flush()
    assert node.finish(holder)[0] == 0


@pytest.mark.usefixtures("by_uv")
@pytest.mark.slow
def test_a_snapshot_that_does_not_fit_is_no_error_in_the_report(
    node: Node, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.run()
    node.fresh()
    make_wheel(wheels, "bootseer_alpha", "2.0")
    begun = f"grep -qs deps.install.restore {node.events}/*.jsonl"
    put_uv_before(node, f"until {begun}; do sleep 0.05; done", monkeypatch)
    node.run("--resolve-timeout", 60)
    (span,) = node.spans("deps.install.restore")
    assert span["status"] == "ok"
    assert span["attributes"]["bootseer.deps.fits"] is False
    assert node.last() == ("ok", "published")


# --- where something stands already --------------------------------------------------------------


def change_note(node: Node, **fields: object) -> None:
    (note,) = node.cache.glob("deps/targets/*.json")
    note.write_text(json.dumps(json.loads(note.read_text()) | fields))


def versions_in(node: Node) -> list[str]:
    """The distributions that stand in the environment."""
    found = node.place.glob("lib/python3*/site-packages/bootseer_*.dist-info")
    return sorted(path.name.removesuffix(".dist-info") for path in found)


@pytest.mark.usefixtures("by_uv")
@pytest.mark.slow
def test_an_upgrade_of_what_stands_is_not_published_as_the_whole(node: Node, wheels: Path) -> None:
    """The command brings a part alone; a node without the rest got half an environment."""
    (node.home / "requirements.txt").write_text("bootseer-alpha\nbootseer-beta\n")
    upgrade = node.counted([*node.plain, "--upgrade"])
    node.run("--resolve-timeout", 0, command=upgrade)
    assert node.last() == ("ok", "published")
    make_wheel(wheels, "bootseer_alpha", "2.0")
    change_note(node, created_s=0.0)
    node.run("--resolve-timeout", 0, command=upgrade)
    assert versions_in(node) == ["bootseer_alpha-2.0", "bootseer_beta-1.0"]
    assert node.installs == 2
    node.fresh()
    node.run("--resolve-timeout", 0, command=upgrade)
    assert node.last() == ("ok", "restored")
    assert [name.partition("-")[0] for name in versions_in(node)] == [
        "bootseer_alpha",
        "bootseer_beta",
    ]


@pytest.mark.usefixtures("by_uv")
@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [{"created_s": 0.0}, {"boot": "another"}, {"created_s": 0.0, "boot": "another"}],
    ids=["too old", "after a reboot", "both"],
)
@pytest.mark.parametrize("condemned", [False, True])
def test_no_other_snapshot_is_put_over_the_one_that_stands(
    node: Node, wheels: Path, change: dict[str, object], *, condemned: bool
) -> None:
    """Two versions of a package stood side by side, since a restore takes away what it lists."""
    node.run("--resolve-timeout", 0)
    first, cache = node.home / "first", node.cache
    node.place.rename(first)
    node.fresh()
    make_wheel(wheels, "bootseer_alpha", "2.0")
    node.run()
    assert node.last() == ("ok", "published")
    if condemned:
        for record in node.store.glob("deps/*/record-000001.json"):
            record.with_suffix(".bad").write_text("{}")
    shutil.rmtree(node.place)
    first.rename(node.place)
    node.cache = cache
    change_note(node, **change)
    done = node.run("--resolve-timeout", 0)
    assert done.returncode == 0
    assert versions_in(node) == ["bootseer_alpha-1.0"]
    same = "created_s" not in change and not condemned
    assert node.last() == ("ok", "restored" if same else "installed")
    node.run("--resolve-timeout", 0)
    assert node.last() == ("ok", "in place")


@pytest.mark.slow
def test_after_a_reboot_a_directory_without_packages_gets_its_own_snapshot(node: Node) -> None:
    """No package tells two snapshots of it apart: their times do."""
    place = node.home / "compiled"
    command = node.counted(["sh", "-c", f"date +%N > {place}/$(date +%N)"])
    place.mkdir()
    node.run("--also", place, command=command)
    assert node.last() == ("ok", "published")
    (kept,) = place.iterdir()
    change_note(node, boot="another")
    node.run("--also", place, command=command)
    assert node.last() == ("ok", "restored")
    change_note(node, boot="another", created_s=1e9)
    node.run("--also", place, "--max-age", 1e6, command=command)
    assert node.last() == ("ok", "published")
    assert kept in place.iterdir()
    assert len(list(place.iterdir())) == 2


# --- records of version 1 ------------------------------------------------------------------------

VERSION_1 = {
    "key": "ab" * 32,
    "base": "cd" * 32,
    "workload": "ef" * 32,
    "created_unix_s": 1.0,
    "command": ["pip", "install", "six"],
    "roots": ["/v"],
    "fresh_roots": [],
    "install_s": 1.0,
    "publish_s": 1.0,
    "resolved": True,
    "host": {},
    "archive": {
        "name": f"archive-{'0' * 32}.tar.zst",
        "size": 1,
        "raw_bytes": 1,
        "entries": 1,
        "index_digest": "0" * 64,
        "tree_digest": "0" * 64,
        "owners": [],
    },
    "form": "archive",
    "version": 1,
    "signature": "",
}


def test_a_signed_record_of_version_1_is_read() -> None:
    """Its signature covers the fields that it has, and no more."""
    import hmac

    unsigned = {k: v for k, v in VERSION_1.items() if k != "signature"}
    text = json.dumps(unsigned, sort_keys=True, separators=(",", ":")).encode()
    # Numbers are floats, sizes whole numbers, as version 1 wrote them.
    signature = hmac.new(b"k" * 16, text, "sha256").hexdigest()
    body = json.dumps(VERSION_1 | {"signature": signature}).encode()
    record = record_file.decode("ab" * 32, body)
    record_file.check_signature(record, b"k" * 16)
    assert (record.version, record.lock, record.packages) == (1, "", {})
    changed = json.dumps(VERSION_1 | {"signature": signature, "install_s": 2.0}).encode()
    with pytest.raises(CorruptDataError, match="not signed"):
        record_file.check_signature(record_file.decode("ab" * 32, changed), b"k" * 16)


# --- what is wrong with a file -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"version": ' + "9" * 5000 + "}", "a number that is too large"),
        ("[" * 100_000, "nested too deeply"),
        ("{", "not JSON"),
        ('{"version": 2}', "the field 'key' is missing"),
        ('{"version": "x"}', "a field is text where a whole number belongs"),
        ("[]", "a field is a list where an object belongs"),
        ("\udcff", "bytes that are no text"),
    ],
)
def test_a_damaged_record_is_described_in_words(text: str, said: str) -> None:
    with pytest.raises(CorruptDataError, match=said) as caught:
        record_file.decode("ab" * 32, text.encode("utf-8", "surrogateescape"))
    assert "sys." not in str(caught.value)


def test_python_faults_are_said_of_the_file() -> None:
    assert describe_fault(IndexError("string index out of range")) == (
        "it refers to something that it does not hold"
    )


# --- commands whose environment is plain to see --------------------------------------------------


def test_plan_of_removals_directories_and_uv_run() -> None:
    (removal,) = plan(["/v/bin/pip", "uninstall", "-y", "six"])
    assert (removal.tool, removal.removes, removal.requirements) == ("pip", True, ())
    (removal,) = plan(["uv", "pip", "uninstall", "--python", "/v", "six"])
    assert (removal.tool, removal.python, removal.removes) == ("uv", "/v", True)
    made, install = plan(["sh", "-c", "mkdir -p out /x && pip install six"])
    assert (made.tool, made.folders, install.tool) == ("mkdir", ("out", "/x"), "pip")
    for unsure in ("mkdir $X", "mkdir -m 700 x", "mkdir 'a*'", "cd $Y; mkdir x"):
        assert [f.tool for f in plan(["sh", "-c", unsure])] == ["other"]


@pytest.mark.parametrize(
    ("words", "sync"),
    [
        ("uv run train.py", "uv sync --inexact"),
        (
            "/b/uv -q run --extra gpu -p3.11 --locked --with x -m train -q",
            "/b/uv -q sync --extra gpu -p3.11 --locked --inexact",
        ),
        ("uv --project p run --exact --env-file=e -- python -m p", "uv --project p sync"),
        ("uv run plain.py", "uv sync --inexact"),
        ("uv run own.py", None),
        ("uv run -", None),
        ("uv run https://h/x.py", None),
        ("uv run --isolated x", None),
        ("uv run --no-project x", None),
        ("uv run --no-sync x", None),
        ("uv run --reinstall x", None),
        ("uv run -qm x", None),
        ("uv run", None),
        ("uv --project none/here run x", "uv --project none/here sync --inexact"),
        ("uv --project /none run x", None),
        ("uv --package a run x", None),
        ("uv sync", None),
        ("env A=b uv run x", None),
        ("pip install six", None),
    ],
)
def test_the_sync_within_a_uv_run(tmp_path: Path, words: str, sync: str | None) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname='p'\n")
    (tmp_path / "plain.py").write_text("import os\n")
    (tmp_path / "own.py").write_text("# /// script\n# dependencies = []\n# ///\n")
    found = sync_of(words.split(), {}, str(tmp_path))
    assert found == (sync.split() if sync else None)
    assert sync_of(words.split(), {"UV_NO_SYNC": "1"}, str(tmp_path)) is None
    (tmp_path / "pyproject.toml").write_text("[project]\n[tool.uv]\nmanaged = false\n")
    assert sync_of(words.split(), {}, str(tmp_path)) is None


@pytest.mark.parametrize(
    ("folder", "environment"),
    [("a", ""), ("libs/b", ""), ("libs/b/src", ""), ("libs/no", "libs/no"), ("", "")],
)
def test_a_member_of_a_workspace_has_the_workspaces_environment(
    tmp_path: Path, folder: str, environment: str
) -> None:
    """Nothing of it was found at the member, and the command ran in full each time."""
    (tmp_path / "ws/libs/b/src").mkdir(parents=True)
    text = "[project]\nname='{}'\nversion='1'\nrequires-python='>=3.11'\n"
    for name in ("a", "libs/b", "libs/no"):
        (tmp_path / "ws" / name).mkdir(exist_ok=True)
        described = text.format(name.replace("/", "-"))
        (tmp_path / "ws" / name / "pyproject.toml").write_text(described)
    text += "[tool.uv.workspace]\nmembers=['a', 'libs/*']\nexclude=['libs/no']\n"
    (tmp_path / "ws/pyproject.toml").write_text(text.format("root"))
    place = tmp_path / "ws" / folder
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("UV", "VIRTUAL"))}
    target = install_roots.find([uv(), "sync"], environ, str(place))
    words = [uv(), "sync", "-q", "--offline", "--python", sys.executable]
    subprocess.run(words, cwd=place, env=environ, check=True)
    (made,) = tmp_path.rglob(".venv")
    assert made == tmp_path / "ws" / environment / ".venv"
    assert target.paths == [str(made)]


def test_other_uv_runs_are_programs_that_may_write_anywhere(tmp_path: Path) -> None:
    for words in (["uv", "run", "x"], ["sh", "-c", "uv sync && uv run x"]):
        with pytest.raises(UsageError, match="cannot tell where uv writes"):
            install_roots.find(words, {"PATH": os.environ["PATH"]}, str(tmp_path))


@pytest.mark.parametrize(
    "words",
    [
        "sh -c 'cd app && pip install -r r.txt'",
        "sh -c 'cd . && cd app && pip install -r r.txt'",
        "uv --directory app pip install -r r.txt",
        "env A=1 uv pip install --directory=app -r r.txt",
        "uv pip install -r r.txt",
    ],
)
def test_a_list_is_read_where_the_command_reads_it(tmp_path: Path, words: str) -> None:
    """One of the same name in the working directory was in the key, and said what is pinned."""
    (tmp_path / "app").mkdir()
    (tmp_path / "r.txt").write_text("six==1.0\n")
    (tmp_path / "app/r.txt").write_text("six==2.0\n")
    environ = {"PATH": os.environ["PATH"]}
    if "app" not in words:
        environ["UV_WORKING_DIR"] = "app"
    target = install_roots.find([*shlex.split(words), "--target", "t"], environ, str(tmp_path))
    if words.startswith("sh"):
        target = install_roots.find(
            ["sh", "-c", shlex.split(words)[2] + " --target t"], environ, str(tmp_path)
        )
    assert target.paths == [f"{tmp_path}/app/t"]
    found = requirements.read_inputs(target.installs, str(tmp_path), environ)
    assert found.pinned == {"six": "2.0"}
    assert list(found.digests) == ["file app/r.txt"]


@pytest.mark.parametrize(
    ("script", "tool"),
    [
        ("cd $X && pip install -r r.txt", "other"),
        ("cd - && pip install ./p", "other"),
        ("(cd app && pip install a); pip install -e .", "other"),
        ("cd $X && uv sync", "other"),
        ("cd $X && uv pip install six", "other"),
        ("cd $X && pip install -r /r.txt", "pip"),
        ("cd $X && uv pip install --python /v six", "uv"),
    ],
)
def test_where_a_script_goes_is_told_or_not_guessed(script: str, tool: str) -> None:
    assert plan(["sh", "-c", script])[-1].tool == tool


def test_the_project_of_an_editable_install_is_in_the_key(tmp_path: Path) -> None:
    """Nothing of it was: other dependencies in its description were not installed for a week."""
    text = "[project]\nname='p'\nversion='1'\n"
    (tmp_path / "pyproject.toml").write_text(text)
    (tmp_path / "src/p").mkdir(parents=True)
    seen = set()

    def look() -> int:
        found = requirements.read_inputs(plan(["pip", "install", "-e", ".[x]"]), str(tmp_path))
        assert list(found.digests) == [f"editable {tmp_path}"]
        assert found.open_ended
        assert not found.all_exact
        seen.add(found.digests[f"editable {tmp_path}"])
        return len(seen)

    assert look() == 1
    (tmp_path / "pyproject.toml").write_text(text + "dependencies=['six']\n")
    assert look() == 2
    (tmp_path / "src/p/__init__.py").write_text("")
    assert look() == 3
    (tmp_path / "src/p/__init__.py").write_text("x = 1\n")
    (tmp_path / "train.log").write_text("started")
    assert look() == 3
    closed = requirements.read_inputs(
        plan(["pip", "install", "--no-deps", "-e", "."]), str(tmp_path)
    )
    assert not closed.open_ended


_BACKEND = """
import tomllib, zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    with open("pyproject.toml", "rb") as file:
        needed = tomllib.load(file)["project"]["dependencies"]
    texts = {"METADATA": "Metadata-Version: 2.1\\nName: p\\nVersion: 1\\n"}
    texts["METADATA"] += "".join(f"Requires-Dist: {name}\\n" for name in needed)
    texts["WHEEL"] = "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
    texts["RECORD"] = "".join(f"p-1.dist-info/{name},,\\n" for name in (*texts, "RECORD"))
    with zipfile.ZipFile(f"{folder}/p-1-py3-none-any.whl", "w") as wheel:
        for name, text in texts.items():
            wheel.writestr(f"p-1.dist-info/{name}", text)
    return "p-1-py3-none-any.whl"
"""


@pytest.mark.slow
def test_other_dependencies_of_an_editable_project_are_installed(node: Node) -> None:
    project = node.home / "pyproject.toml"
    (node.home / "backend.py").write_text(_BACKEND)
    text = "[project]\nname='p'\nversion='1'\ndependencies=['bootseer-{}']\n"
    text += "[build-system]\nrequires=[]\nbuild-backend='backend'\nbackend-path=['.']\n"
    where = ["--no-index", "--find-links", str(node.wheels)]
    pip = [sys.executable, "-m", "pip", "--python", str(node.place), "install", "-q", *where]
    for name, number in (("alpha", 1), ("alpha", 1), ("beta", 2)):
        project.write_text(text.format(name))
        done = node.run(command=node.counted([*pip, "-e", "."]))
        assert done.returncode == 0
        assert "could not resolve" not in done.stderr
        assert node.installs == number
        assert versions_in(node) == [f"bootseer_{name}-1.0"]
        node.fresh()


@pytest.mark.slow
def test_directories_that_the_script_makes_are_there_after_a_restore(node: Node) -> None:
    script = f"mkdir -p {node.home}/out/deep && {' '.join(node.plain)}"
    node.run(command=["sh", "-c", script])
    assert node.last() == ("ok", "published")
    node.fresh()
    shutil.rmtree(node.home / "out")
    done = node.run(command=["sh", "-c", script])
    assert (done.returncode, done.stderr) == (0, "")
    assert node.last() == ("ok", "restored")
    assert (node.home / "out/deep").is_dir()
    node.run(command=["sh", "-c", f"mkdir -p {node.home}/alone"])
    assert node.last() == ("ok", "installed")


@pytest.mark.slow
def test_an_uninstall_is_captured_and_restored(node: Node) -> None:
    removal = [sys.executable, "-m", "pip", "--python", str(node.place), "uninstall", "-q", "-y"]
    command = node.counted([*removal, "bootseer-alpha"])
    for result in ("published", "restored"):
        subprocess.run(node.plain, cwd=node.home, env=node.environ(), check=True)
        done = node.run(command=command)
        assert (done.returncode, done.stderr) == (0, "")
        assert node.last() == ("ok", result)
        assert not list(node.place.rglob("bootseer_alpha*"))
        node.fresh()
    assert node.installs == 1


@pytest.fixture
def project(node: Node, wheels: Path) -> Path:
    """A project of uv with a lock, in the node's home."""
    (node.home / "pyproject.toml").write_text(
        "[project]\nname='p'\nversion='1'\nrequires-python='>=3.11'\n"
        "dependencies=['bootseer-alpha']\n"
        f"[tool.uv]\npackage=false\nno-index=true\nfind-links=['{wheels}']\n"
    )
    subprocess.run(
        [uv(), "lock", "-q", "--python", sys.executable],
        cwd=node.home,
        env=node.environ(),
        check=True,
    )
    return node.home


def uv_run(code: str) -> list[str]:
    return [uv(), "run", "-q", "--python", sys.executable, "python", "-c", code]


_TRAINING = """
import bootseer_alpha, fcntl, glob, os, sys
out = open(sys.argv[1], "a")
(lock,) = glob.glob(sys.argv[2] + "/deps/targets/*.lock")
try:
    fcntl.flock(os.open(lock, os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)
    print("free", "BOOTSEER_DEPS_INSIDE" in os.environ, file=out)
except BlockingIOError:
    print("held", file=out)
open(os.path.join(os.path.dirname(bootseer_alpha.__file__), "checkpoint"), "w").close()
sys.exit(7)
"""


@pytest.mark.slow
def test_uv_run_runs_once_each_start_outside_of_the_lock(node: Node, project: Path) -> None:
    """The lock and on a first start the lease were held for a whole training."""
    count = node.home / "runs"
    for number, result in enumerate(("published", "restored", "in place"), start=1):
        done = node.run(command=[*uv_run(_TRAINING), count, node.cache])
        assert (done.returncode, done.stderr) == (7, "")
        assert node.last() == ("ok", result)
        assert count.read_text() == "free False\n" * number
        if result == "published":
            shutil.rmtree(project / ".venv")
            node.fresh()
            words = ["inspect", "--store", node.store, "--json", "--files", key_of_last(node)]
            files = json.loads(node.cli(*words).stdout)["files"]
            assert any(path.endswith("bootseer_alpha/__init__.py") for path, _, _ in files)
            assert not any(path.endswith("checkpoint") for path, _, _ in files)


@pytest.mark.slow
def test_uv_run_runs_once_where_nothing_can_be_kept(node: Node, project: Path) -> None:
    """A store that cannot be used, a failing install and a nested start leave the command."""
    count = node.home / "runs"
    command = uv_run(f"open({str(count)!r}, 'a').write('x')")
    (node.home / "file").write_text("")
    done = node.cli(*("run", "--store", node.home / "file", "--cache", node.cache, "--", *command))
    assert done.returncode == 0
    assert "installed, and no snapshot kept: " in done.stderr
    assert count.read_text() == "x"
    assert list(project.glob(".venv/lib/python3*/site-packages/bootseer_alpha"))
    inner = [sys.executable, "-m", "bootseer", "deps", "run", "--store", str(node.store)]
    outer = [*inner, "--cache", str(node.cache), "--", *command]
    assert node.run("--also", node.home / "also", command=outer).returncode == 0
    assert node.last() == ("ok", "installed")
    assert count.read_text() == "xx"
    shutil.rmtree(project / ".venv")
    shutil.rmtree(node.wheels)
    done = node.run(command=command)
    assert done.returncode == 2
    assert "Failed to read `--find-links`" in done.stderr
    assert count.read_text() == "xx"
