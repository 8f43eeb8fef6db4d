"""`deps run` with real pip and uv: install once, restore everywhere, fall back on any fault."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import bootseer
from tests.support.commands.deps_node import Node, uv
from tests.support.samples.wheels import make_wheel
from tests.support.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    make_wheel(folder, "bootseer_alpha", "1.0")
    return folder


@pytest.fixture
def node(tmp_path: Path, wheelhouse: Path) -> Node:
    return Node(tmp_path, wheelhouse)


@pytest.fixture
def by_uv(node: Node) -> None:
    """The node installs by uv, in a tenth of pip's time: for what no tool decides."""
    node.tool = "uv"


def published(node: Node) -> None:
    done = node.run()
    assert (done.returncode, done.stderr) == (0, "")
    assert node.last() == ("ok", "published")
    assert node.installs == 1


# --- the way it should go ------------------------------------------------------------------------


def test_first_installs_second_machine_restores(node: Node) -> None:
    published(node)
    before = tree_of(node.place)
    node.fresh()
    done = node.run()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert node.last() == ("ok", "restored")
    assert node.installs == 1
    assert node.works()
    assert tree_of(node.place) == before
    assert byte_code_is_valid(node)
    assert not node.leftovers()


def tree_of(place: Path) -> dict[str, tuple[int, int]]:
    """Mode and mtime of everything that the install made below site-packages."""
    return {
        str(path.relative_to(place)): (path.lstat().st_mode, path.lstat().st_mtime_ns)
        for path in place.rglob("*bootseer_alpha*/**/*")
    }


def byte_code_is_valid(node: Node) -> bool:
    """Python uses the restored .pyc, which it does only for the source's mtime and size."""
    done = subprocess.run(
        [node.place / "bin/python", "-v", "-c", "import bootseer_alpha"],
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = [ln for ln in done.stderr.splitlines() if "bootseer_alpha" in ln and "matches" in ln]
    return "__pycache__" in line


@pytest.mark.usefixtures("by_uv")
def test_restart_in_place_does_nothing(node: Node) -> None:
    published(node)
    node.run()
    assert node.last() == ("ok", "in place")
    node.fresh()
    node.run()
    node.run()
    assert node.last() == ("ok", "in place")
    assert node.installs == 1


@pytest.mark.usefixtures("by_uv")
@pytest.mark.parametrize("limit_s", ["inf", "100000000000"])
def test_a_store_may_be_waited_for_as_long_as_one_likes(node: Node, limit_s: str) -> None:
    """A thread cannot be waited for so long: the start was a plain one, and kept nothing."""
    done = node.run("--store-timeout", limit_s)
    assert (done.returncode, done.stderr) == (0, "")
    assert node.last() == ("ok", "published")


@pytest.mark.usefixtures("by_uv")
def test_after_a_reboot_what_stands_is_put_there_anew(node: Node) -> None:
    """Nothing was synced: files of another boot may be empty, though their names are there."""
    published(node)
    (note,) = node.cache.glob("deps/targets/*.json")
    note.write_text(json.dumps(json.loads(note.read_text()) | {"boot": "another"}))
    (module,) = node.place.glob("lib/python3*/site-packages/bootseer_alpha/__init__.py")
    module.write_text("")
    node.run()
    assert node.last() == ("ok", "restored")
    assert node.works()
    node.run()
    assert node.last() == ("ok", "in place")
    assert node.installs == 1


def test_an_install_on_top_of_another_is_not_one_from_nothing(tmp_path: Path) -> None:
    """The second finds a part of what it needs there, which its snapshot then lacks."""
    for name in ("alpha", "beta"):
        make_wheel(tmp_path / "wheels", f"bootseer_{name}", "1.0")
    node = Node(tmp_path, tmp_path / "wheels", tool="uv")
    second = node.counted([*node.plain[:-2], "bootseer-alpha", "bootseer-beta"])
    for _ in range(2):
        node.run()
        assert node.run(command=second).returncode == 0
        assert node.last()[0] == "ok"
        node.fresh()
    assert node.last() == ("ok", "restored")
    assert node.installs == 2
    node.run(command=second)
    assert node.last() == ("ok", "published")
    assert node.works()


@pytest.mark.usefixtures("by_uv")
def test_what_was_left_out_is_not_given_to_those_who_want_it(node: Node) -> None:
    node.run("--exclude", "data.txt")
    node.fresh()
    node.run("--exclude", "data.txt")
    assert node.last() == ("ok", "restored")
    assert not list(node.place.rglob("data.txt"))
    node.fresh()
    node.run()
    assert node.last() == ("ok", "published")
    assert list(node.place.rglob("bootseer_alpha/data.txt"))


@pytest.mark.usefixtures("by_uv")
def test_removed_package_is_restored_in_place(node: Node) -> None:
    published(node)
    for path in node.place.glob("lib/python3*/site-packages/bootseer_alpha*"):
        shutil.rmtree(path)
    node.run()
    assert node.last()[1] in ("restored", "published")
    assert node.works()


def test_new_version_in_the_index_is_installed(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    make_wheel(wheels, "bootseer_alpha", "1.0")
    node = Node(tmp_path, wheels, tool="uv")
    published(node)
    make_wheel(wheels, "bootseer_alpha", "1.1")
    node.fresh()
    node.run()
    assert node.last() == ("ok", "published")
    assert node.installs == 2
    script = node.place / "bin/bootseer_alpha-run"
    assert subprocess.check_output([script], text=True) == "bootseer_alpha 1.1\n"


def test_uv_into_a_venv(node: Node) -> None:
    node.tool = "uv"
    assert node.run().returncode == 0
    assert node.last() == ("ok", "published")
    node.fresh()
    assert node.run().returncode == 0
    assert node.last() == ("ok", "restored")
    assert node.installs == 1
    assert node.works()


def test_venv_that_the_command_makes(node: Node) -> None:
    shutil.rmtree(node.place)
    make = f"{node.counting(sys.executable)} -m venv {node.place}"
    script = f"{make} && {node.place}/bin/pip install -q --no-index"
    script += f" --find-links {node.wheels} bootseer-alpha"
    command = ["sh", "-c", script]
    assert node.run(command=command).returncode == 0
    assert node.last() == ("ok", "published")
    assert node.run(command=command).returncode == 0
    assert node.last() == ("ok", "in place")
    shutil.rmtree(node.place)
    node.cache = node.cache.with_name("cache9")
    assert node.run(command=command).returncode == 0
    assert node.last() == ("ok", "restored")
    assert node.installs == 1
    assert node.works()
    pip = subprocess.run([node.place / "bin/pip", "--version"], capture_output=True, check=True)
    assert str(node.place).encode() in pip.stdout


def test_target_directory(node: Node) -> None:
    lib = node.home / "lib"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index"]
    command += ["--find-links", str(node.wheels), "--target", "lib", "bootseer-alpha"]
    assert node.run(command=node.counted(command)).returncode == 0
    shutil.rmtree(lib)
    node.cache = node.cache.with_name("cache9")
    assert node.run(command=node.counted(command)).returncode == 0
    assert node.last() == ("ok", "restored")
    code = "import bootseer_alpha; print(bootseer_alpha.VERSION)"
    shown = subprocess.check_output([sys.executable, "-c", code], env={"PYTHONPATH": str(lib)})
    assert shown == b"1.0\n"


def test_prefix_like_a_system(node: Node) -> None:
    """A prefix that already holds much: only what changed travels."""
    prefix = node.home / "prefix"
    (prefix / "share").mkdir(parents=True)
    (prefix / "share/there").write_text("from the image")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index"]
    command += ["--find-links", str(node.wheels), "--prefix", str(prefix), "bootseer-alpha"]
    assert node.run(command=node.counted(command)).returncode == 0
    shutil.rmtree(prefix)
    (prefix / "share").mkdir(parents=True)
    (prefix / "share/there").write_text("from the image")
    node.cache = node.cache.with_name("cache9")
    assert node.run(command=node.counted(command)).returncode == 0
    assert node.last() == ("ok", "restored")
    assert (prefix / "share/there").read_text() == "from the image"
    assert list(prefix.glob("lib/python3*/site-packages/bootseer_alpha/__init__.py"))
    (key,) = [json.loads(p.read_text())["key"] for p in node.store.glob("deps/*/record-*.json")]
    shown = json.loads(node.cli("inspect", "--store", node.store, "--json", "--files", key).stdout)
    assert not [row for row in shown["files"] if row[0].endswith("there")]


@pytest.mark.root
@pytest.mark.debian("python3")
def test_system_python(node: Node) -> None:
    """Two machines whose /usr/local is as the image has it: private mounts, nothing of ours."""
    install = [uv(), "pip", "install", "-q", "--python", "/usr/bin/python3", "--no-index"]
    install += ["--system", "--break-system-packages", "--find-links", str(node.wheels)]
    install = node.counted([*install, "bootseer-alpha"])
    for number, result in enumerate(("published", "restored")):
        words = ["run", "--store", node.store, "--publish", "inline", "--form", "archive"]
        words += ["--cache", node.home / f"cache{number}", "--", *install]
        start = shlex.join([sys.executable, "-m", "bootseer", "deps", *map(str, words)])
        shown = in_private_root(
            node, f"mount -t tmpfs none /usr/local && {start} && bootseer_alpha-run"
        )
        assert shown == "bootseer_alpha 1.0\n"
        assert node.last() == ("ok", result)
    assert node.installs == 1
    (record,) = node.store.glob("deps/*/record-*.json")
    assert json.loads(record.read_text())["roots"] == ["/usr/local"]


def in_private_root(node: Node, script: str) -> str:
    environ = node.environ()
    environ["PATH"] = f"/usr/local/bin:{environ['PATH']}"
    return subprocess.run(
        ["unshare", "-m", "sh", "-ec", script],
        cwd=node.home,
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


@pytest.mark.root
def test_whole_root_less_mounts_and_temporary_files(node: Node, tmp_path: Path) -> None:
    """`--also /` in a small root of its own, whose programs are mounted from this machine."""
    commands = "mkdir -p /etc/app /tmp; echo on > /etc/app/conf; rm /etc/old; echo x > /tmp/t;"
    commands += " echo x > /proc/none 2>/dev/null; echo x > /data/huge; chmod 600 /etc/app/conf"
    for number, result in enumerate(("published", "restored")):
        root = tmp_path / f"root{number}"
        (root / "etc").mkdir(parents=True)
        (root / "etc/old").write_text("from the image")
        script = prepared_root(root, node, ["sh", "-c", commands])
        in_private_root(node, script)
        assert node.last() == ("ok", result)
        assert (root / "etc/app/conf").read_text() == "on\n"
        assert (root / "etc/app/conf").stat().st_mode & 0o777 == 0o600
        assert not (root / "etc/old").exists()
    (record,) = node.store.glob("deps/*/record-*.json")
    shown = json.loads(
        node.cli("inspect", "--json", "--files", "--store", node.store, record.parent.name).stdout
    )
    paths = [path for path, kind, _ in shown["files"] if kind == "f"]
    assert paths == ["/etc/app/conf"]
    assert shown["deleted"] == {"/": ["etc/old"]}


def prepared_root(root: Path, node: Node, command: list[str]) -> str:
    """A script that makes a root with this machine's programs and starts `deps run` in it."""
    programs = {os.path.dirname(sys.executable), os.path.realpath(sys.base_prefix)}
    programs |= {os.path.dirname(os.path.dirname(bootseer.__file__)), "/usr", "/dev"}
    node.store.mkdir(exist_ok=True)
    shared = {str(node.store), str(node.events.parent)}
    lines = [f"mkdir -p {root}/data {root}/proc", f"mount -t tmpfs none {root}/data"]
    lines += [
        f"mkdir -p {root}{place}; mount --bind {place} {root}{place}"
        for place in sorted(programs | shared)
    ]
    lines += [f"ln -s usr/{name} {root}/{name}" for name in ("bin", "lib", "lib64", "sbin")]
    lines.append(f"mount -t proc none {root}/proc")
    words = ["run", "--store", node.store, "--publish", "inline", "--form", "archive"]
    words += ["--cache", "/data/cache", "--also", "/", "--resolve-timeout", "0", "--", *command]
    start = shlex.join([sys.executable, "-m", "bootseer", "deps", *map(str, words)])
    return "; ".join([*lines, f"cd {root}; exec chroot . {start}"])


def test_other_directory_and_deletions(node: Node) -> None:
    """What a command changes and deletes counts too, for any directory named by --also."""
    place = node.home / "compiled"

    def image() -> None:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        (place / "old").write_text("old")
        (place / "edited").write_text("before")

    image()
    script = "rm compiled/old; echo after > compiled/edited; echo new > compiled/new"
    command = ["sh", "-c", f"echo x >> {node.count}; {script}"]
    options = ["--also", place, "--resolve-timeout", 0]
    assert node.run(*options, command=command).returncode == 0
    image()
    node.fresh()
    assert node.run(*options, command=command).returncode == 0
    assert node.last() == ("ok", "restored")
    assert node.installs == 1
    assert sorted(os.listdir(place)) == ["edited", "new"]
    assert (place / "edited").read_text() == "after\n"


def test_fresh_machine_is_never_taken_for_one_that_has_it(node: Node) -> None:
    """Machines of one cache (a mounted directory of the host) whose files differ below --also."""
    place = node.home / "data"
    script = f"echo x >> {node.count}; mkdir -p data/deep/er; echo made > data/deep/er/file"
    for number in range(3):
        shutil.rmtree(place, ignore_errors=True)
        (place / "deep").mkdir(parents=True)
        (place / "deep/image").write_text("i")
        assert node.run("--also", place, command=["sh", "-c", script]).returncode == 0
        assert (place / "deep/er/file").read_text() == "made\n"
        assert node.last()[1] == ("restored" if number else "published")
        node.run("--also", place, command=["sh", "-c", script])
        assert node.last()[1] == "in place"
    (place / "deep/er/file").unlink()
    node.run("--also", place, command=["sh", "-c", script])
    assert (place / "deep/er/file").exists()
    (place / "deep/image").write_text("another image")
    shutil.rmtree(place / "deep/er")
    node.run("--also", place, command=["sh", "-c", script])
    assert node.last() == ("ok", "published")


@pytest.mark.usefixtures("by_uv")
def test_unresolved_requirements_age(node: Node) -> None:
    options = ["--resolve-timeout", 0, "--max-age", 1]
    node.run(*options)
    node.fresh()
    node.run(*options)
    assert node.last() == ("ok", "restored")
    node.fresh()
    node.run("--resolve-timeout", 0, "--max-age", 0)
    assert node.last() == ("ok", "published")
    assert node.installs == 2
    node.fresh()
    node.run(*options)
    assert node.last() == ("ok", "restored")


def test_index_that_is_down_still_finds_the_newest_snapshot(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    make_wheel(wheels, "bootseer_alpha", "1.0")
    node = Node(tmp_path, wheels)
    published(node)
    node.fresh()
    for wheel in wheels.iterdir():
        wheel.unlink()
    done = node.run()
    assert done.returncode == 0
    assert "whether newer packages are out is not known" in done.stderr
    assert node.last() == ("ok", "restored")
    assert node.works()


# --- transparency --------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [1, 3, 77])
def test_failing_install_passes_its_code_and_output_and_publishes_nothing(
    node: Node, code: int
) -> None:
    script = f"touch {node.place}/half; echo out; echo err >&2; exit {code}"
    done = node.run("--also", node.place, command=["sh", "-c", script])
    assert (done.returncode, done.stdout, done.stderr) == (code, "out\n", "err\n")
    assert not node.archives()
    assert not node.leftovers()
    end = node.ends()[-1]
    assert (end["status"], end["attributes"]["process.exit.code"]) == ("error", code)


def test_commands_that_cannot_run(node: Node, tmp_path: Path) -> None:
    script = tmp_path / "plain"
    script.write_text("no program")
    assert node.run("--also", node.place, command=["/no/such/program"]).returncode == 127
    assert node.run("--also", node.place, command=[str(script)]).returncode == 126
    done = node.run("--also", node.place, command=["sh", "-c", "kill -9 $$"])
    assert done.returncode == 137


def test_program_whose_writes_nobody_knows_needs_also(node: Node) -> None:
    script = f"ls; {sys.executable} -m pip --python {node.place} install --no-index -q pip || true"
    done = node.run(command=["sh", "-c", script])
    assert done.returncode == 0
    assert "--also" in done.stderr
    assert node.last() == ("fallback", "installed")
    assert not node.archives()


def test_standard_streams_and_descriptors_pass_through(node: Node) -> None:
    read, write = os.pipe()
    words = ["run", "--store", str(node.store), "--cache", str(node.cache), "--also", "x", "--"]
    code = f"import os, sys; os.write(1, sys.stdin.buffer.read()); os.write({write}, b'three')"
    words += [sys.executable, "-c", code]
    done = subprocess.run(
        [sys.executable, "-m", "bootseer", "deps", *words],
        cwd=node.home,
        env=node.environ(),
        input=b"\x00\xff bytes",
        stdout=subprocess.PIPE,
        pass_fds=(write,),
        check=True,
    )
    os.close(write)
    assert done.stdout == b"\x00\xff bytes"
    with open(read, "rb") as pipe:
        assert pipe.read() == b"three"


@pytest.mark.parametrize("stream", ["2>&-", "2>/dev/full", "<&- >&- 2>&-"])
def test_the_exit_code_is_the_commands_when_nobody_can_be_told(node: Node, stream: str) -> None:
    words = [sys.executable, "-m", "bootseer", "deps", "run", "--store", str(node.store)]
    command = f"{shlex.join(words)} -- sh -c 'exit 7' {stream}"  # unknown: we say so
    done = subprocess.run(["sh", "-c", command], env=node.environ(), check=False)
    assert done.returncode == 7
    assert "--also" in node.spans("deps.install")[0]["attributes"]["bootseer.reason"]


def test_signal_reaches_the_install(node: Node) -> None:
    trap = "trap 'echo got; exit 9' TERM; echo ready; while :; do sleep 0.05; done"
    child = node.start(command=["sh", "-c", trap], also=[str(node.place)])
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGTERM)
    assert child.stdout.readline() == "got\n"
    assert node.finish(child)[0] == 9
    assert not node.archives()
    assert not node.leftovers()


SIGNALLED_ELSEWHERE = """
import os, signal, sys, threading, time
from bootseer.depsnap import install_process
def late():
    time.sleep(0.5)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
threading.Thread(target=late).start()
loop = "trap 'exit 9' TERM; for i in $(seq 200); do sleep 0.05; done; exit 5"
sys.exit(install_process.run(["sh", "-c", loop], os.environ))
"""


def test_a_signal_that_does_not_interrupt_the_wait_reaches_the_install() -> None:
    """It came just before the wait began, or in a thread, and was kept until the install's end."""
    done = subprocess.run([sys.executable, "-c", SIGNALLED_ELSEWHERE], timeout=60, check=False)
    assert done.returncode == 9


@pytest.mark.usefixtures("by_uv")
def test_install_within_an_install_is_plain(node: Node) -> None:
    inner = [sys.executable, "-m", "bootseer", "deps", "run", "--store", str(node.store), "--"]
    done = node.run("--also", node.place, command=[*inner, *node.install])
    assert done.returncode == 0
    assert node.works()
    assert len(node.archives()) == 1


def test_events_have_sub_phases_of_pip(node: Node) -> None:
    published(node)
    for name in ("deps.install.key", "deps.install.scan", "deps.install.install", "deps.publish"):
        assert node.spans(name), name
    assert all(len(node.spans(n)) == 1 for n in ("deps.install", "deps.publish"))


# --- publishing in the background ----------------------------------------------------------------


@pytest.mark.usefixtures("by_uv")
def test_background_publication_outlives_the_start(node: Node) -> None:
    done = node.run("--publish", "background")
    assert (done.returncode, done.stderr) == (0, "")
    assert node.last() == ("ok", "publishing")
    # The job starts and writes beside the packages while they are packed.
    site = next(node.place.glob("lib/python3*/site-packages"))
    (site / "bootseer_alpha/written_by_the_job").write_text("x")
    until(lambda: node.spans("deps.publish"))
    assert node.spans("deps.publish")[0]["status"] == "ok"
    node.fresh()
    node.run()
    assert node.last() == ("ok", "restored")
    assert node.works()
    assert not list(node.place.rglob("written_by_the_job"))


@pytest.mark.usefixtures("by_uv")
def test_a_relative_store_is_the_same_one_in_the_background(node: Node) -> None:
    store = os.path.relpath(node.store, node.home)
    done = node.run("--publish", "background", "--store", store)
    assert (done.returncode, done.stderr) == (0, "")
    assert node.last() == ("ok", "publishing")
    until(lambda: node.spans("deps.publish"))
    assert node.archives()
    node.fresh()
    node.run("--store", store)
    assert node.last() == ("ok", "restored")
    assert node.works()


def test_file_that_changes_while_it_is_packed_is_not_published(node: Node) -> None:
    """The scan saw one content; what a running job makes of it later is nobody's snapshot."""
    child = node.start("scanned after", "print")
    assert child.stdout is not None
    assert child.stdout.readline() == "scanned after\n"
    module = next(node.place.glob("lib/python3*/site-packages/bootseer_alpha/__init__.py"))
    module.write_text("VERSION = 'edited by the job'\n")
    code, errors = node.finish(child)
    assert code == 0
    assert "changed" in errors
    assert node.last() == ("fallback", "installed")
    assert not node.archives()
    assert not node.leftovers()
    node.fresh()
    node.run()
    assert node.last() == ("ok", "published")


@pytest.mark.parametrize("by", ["uv.toml", "pyproject.toml", "nobody knows"])
@pytest.mark.parametrize("named", ["-r requirements.txt", "bootseer-alpha==1.0", "alpha.whl"])
def test_what_goes_where_we_do_not_look_is_installed_each_time(
    tmp_path: Path, named: str, by: str
) -> None:
    """A setting leads elsewhere: the roots stay as they were, and so would a note of them, while
    what was installed may be gone."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = make_wheel(wheels, "bootseer_alpha", "1.0")
    node = Node(tmp_path, wheels, tool="uv")
    elsewhere = node.home / "elsewhere"
    said = f'target = "{elsewhere}"\n'
    if by == "nobody knows":  # an option that a later uv may have, or a wrapper of that name
        program = tmp_path / "bin/uv"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {uv()} "$@" --target {elsewhere}\n')
        program.chmod(0o755)
    else:
        program = Path(uv())
        table = "[pip]\n" if by == "uv.toml" else "[tool.uv.pip]\n"
        (node.home / by).write_text(table + said)
    words = [str(wheel)] if named == "alpha.whl" else named.split()
    command = [str(program), "pip", "install", "-q", "--python", str(node.place), "--no-index"]
    command += ["--find-links", str(wheels), *words]
    for _ in range(2):
        done = node.run(command=command)
        assert done.returncode == 0, done.stderr
        assert (elsewhere / "bootseer_alpha").is_dir(), (done.stderr, node.ends())
        assert "--also" in done.stderr
        shutil.rmtree(elsewhere)
    assert not node.archives()


@pytest.mark.parametrize("output", ["2>&1", "> log", ">>log 2>&1", "&>log", ">/dev/null"])
def test_where_a_scripts_output_goes_is_no_requirement(tmp_path: Path, output: str) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    make_wheel(wheels, "bootseer_alpha", "1.0")
    node = Node(tmp_path, wheels, tool="uv")
    command = ["bash", "-c", f"{shlex.join(node.plain)} {output}"]
    results = []
    for _ in range(2):
        done = node.run(command=command)
        assert done.returncode == 0, done.stderr
        results.append(node.last())
    node.fresh()
    node.run(command=command)
    results.append(node.last())
    assert results == [("ok", "published"), ("ok", "in place"), ("ok", "restored")]


def test_a_satisfied_install_is_in_place_the_next_time(tmp_path: Path) -> None:
    """By the system below the environment: nothing comes to the roots, and nothing is missing."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    make_wheel(wheels, "bootseer_alpha", "1.0")
    node = Node(tmp_path, wheels)
    below = tmp_path / "below"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--find-links", str(wheels)]
    subprocess.run([*pip, "--target", str(below), "bootseer-alpha"], check=True)
    (site,) = node.place.glob("lib/python3*/site-packages")
    (site / "below.pth").write_text(f"{below}\n")
    node.run()
    node.run()
    assert node.last() == ("ok", "in place")
    assert node.installs == 1
