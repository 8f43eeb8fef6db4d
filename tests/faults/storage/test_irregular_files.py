"""FIFOs, sockets and devices where a store's files belong: refused at once, never waited for.

Who may write into a shared store can put them there. Each command here ends within its time
limit, which opening a FIFO without another end never does.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bootseer.errors import CorruptDataError
from bootseer.storage.local import LocalStore
from tests.support.samples.stripes import sample

LIMIT_S = 120.0
DEPS = ["--publish", "inline", "--form", "archive", "--key-file", "requirements", "--also", "site"]
INSTALL = ["sh", "-c", "echo run >> ran; mkdir -p site && cp payload site/module"]


def bootseer(cwd: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bootseer", *map(str, words)],
        cwd=cwd,
        env={**os.environ, "BOOTSEER_EVENTS": str(cwd / "events")},
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's name is short
        try:
            bound.bind(path.name)
        finally:
            os.chdir(here)


def make_device(path: Path) -> None:
    # Reading the console's input device waits for a key that nobody presses.
    os.mknod(path, 0o020666, os.makedev(5, 1))


Make = Callable[[Path], None]
KINDS = [
    pytest.param(os.mkfifo, id="fifo"),
    pytest.param(make_socket, id="socket"),
    pytest.param(make_device, id="device", marks=pytest.mark.root),
]


def replaced(files: list[Path]) -> Iterator[Path]:
    """Each file in turn with a FIFO in its place, and then itself again."""
    for file in files:
        file.rename(file.with_name(".kept"))
        os.mkfifo(file)
        yield file
        file.unlink()
        file.with_name(".kept").rename(file)


@pytest.mark.parametrize("make", KINDS)
def test_a_store_in_a_directory_opens_none(tmp_path: Path, make: Make) -> None:
    make(tmp_path / "odd")
    (tmp_path / "file").write_bytes(b"x")
    store = LocalStore(str(tmp_path))
    with pytest.raises(CorruptDataError, match=r"odd in file://.* is a "):
        store.stat("odd")
    for look in (
        lambda: store.read("odd", limit_bytes=1),
        lambda: store.read_range("odd", 0, bytearray(1)),
    ):
        with pytest.raises(CorruptDataError, match=r" is a .*remove it"):
            look()
    assert [found.name for found in store.list("")] == ["file"]
    store.delete("odd")
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.slow
def test_a_checkpoint_with_one_costs_itself_alone(tmp_path: Path) -> None:
    data = sample(50_000)
    (tmp_path / "f").write_bytes(data)
    for name in ("bad.pt", "good.pt"):
        put = bootseer(tmp_path, "stripe", "put", "f", f"{tmp_path}/s/{name}", "--chunk", "4KiB")
        assert put.returncode == 0, put.stderr
    files = sorted(p for p in (tmp_path / "s/bad.pt.stripes").rglob("*") if p.is_file())
    assert {"CURRENT", "manifest.json"} < {file.name for file in files}
    for file in replaced(files):
        for words in (("cat", "s/bad.pt"), ("get", "s/bad.pt", "out"), ("verify", "s/bad.pt")):
            done = bootseer(tmp_path, "stripe", *words)
            assert done.returncode == 6, (file.name, words, done.stderr)
            assert "; remove it" in done.stderr or file.name.startswith("stripe-")
            assert done.stderr.count("\n") == 1
        listed = bootseer(tmp_path, "stripe", "ls", "s")
        assert "s/good.pt\n" in listed.stdout
        assert bootseer(tmp_path, "stripe", "gc", "s").returncode in (0, 6)
        assert bootseer(tmp_path, "stripe", "get", "s/good.pt", "good").returncode == 0
        assert (tmp_path / "good").read_bytes() == data
        (tmp_path / "good").unlink()
    assert bootseer(tmp_path, "stripe", "get", "s/bad.pt", "out").returncode == 0
    assert (tmp_path / "out").read_bytes() == data


@pytest.mark.slow
def test_a_plain_object_that_is_none_is_no_empty_file(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    os.mkfifo(tmp_path / "s/odd")
    for words in (("get", "s/odd", "out"), ("cat", "s/odd")):
        done = bootseer(tmp_path, "stripe", *words)
        assert (done.returncode, done.stdout) == (6, "")
        assert "s is a " in done.stderr
        assert "; remove it" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_dependency_store_with_one_lets_the_install_run(tmp_path: Path) -> None:
    run = ["deps", "run", "--store", "store", "--cache", "cache", *DEPS, "--", *INSTALL]
    first = tmp_path / "first"
    first.mkdir()
    (first / "requirements").write_text("module==1\n")
    (first / "payload").write_bytes(b"payload\n" * 1000)
    assert bootseer(first, *run).returncode == 0
    files = [p.relative_to(first) for p in (first / "store").rglob("*") if p.is_file()]
    assert any(name.name.endswith(".tar.zst") for name in files)
    for number, name in enumerate(files):
        node = tmp_path / f"node{number}"
        shutil.copytree(first, node, ignore=shutil.ignore_patterns("site", "cache"))
        (node / name).unlink()
        os.mkfifo(node / name)
        for words in ("ls", "verify", "gc"):
            bootseer(node, "deps", words, "--store", "store")
        done = bootseer(node, *run)
        assert done.returncode == 0, done.stderr
        assert (node / "site/module").read_bytes() == (node / "payload").read_bytes()


@pytest.mark.slow
def test_requirements_from_a_pipe_stay_the_installers(tmp_path: Path) -> None:
    """`pip install -r <(…)`: what we read of it, the command would not."""
    os.mkfifo(tmp_path / "pipe")
    install = ["sh", "-c", "cat $0 > got", "pipe"]
    words = ["deps", "run", "--store", "store", "--key-file", "pipe", "--also", "site", "--"]
    feed = subprocess.Popen(["sh", "-c", "echo module==1 > pipe"], cwd=tmp_path)
    try:
        done = bootseer(tmp_path, *words, *install)
    finally:
        feed.kill()
        feed.wait()
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "got").read_text() == "module==1\n"
    assert "cannot read the key file" in done.stderr


@pytest.mark.slow
def test_settings_that_are_no_file_hold_no_start_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "bootseer.toml")
    done = bootseer(tmp_path, "start", "--", "echo", "ran")
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert "it is a FIFO" in done.stderr
    settings = "<(printf '[job]\\nphase = \"named\"\\n')"
    shell = f"exec {sys.executable} -m bootseer start -c {settings} -- echo ran"
    environ = {**os.environ, "BOOTSEER_EVENTS": str(tmp_path / "events")}
    subprocess.run(["bash", "-c", shell], cwd=tmp_path, env=environ, check=True, timeout=LIMIT_S)
    told = [path.read_text() for path in (tmp_path / "events").iterdir()]
    assert any('"name":"named"' in text for text in told), told
