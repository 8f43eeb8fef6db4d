"""`bootseer stripe` as people and scripts call it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.cli.shared import sizes
from tests.support.commands.terminal import Terminal
from tests.support.samples.stripes import (
    CHUNK,
    local_tree,
    make_tree,
    sample,
    tree_of,
    version_folder,
    whole,
)

pytestmark = pytest.mark.slow


def _run(*words: object, code: int = 0, cwd: Path | None = None, **env: str) -> str:
    """Standard output; the other stream must be empty unless the command fails."""
    done = subprocess.run(
        [sys.executable, "-m", "bootseer", "stripe", *map(str, words)],
        capture_output=True,
        check=False,
        cwd=cwd,
        env={**os.environ, **env},
    )
    errors = done.stderr.decode()
    assert done.returncode == code, errors
    assert bool(errors) == bool(code), errors
    if code:
        assert errors.startswith("bootseer: ")
        assert errors.count("\n") == 1
        return errors
    return done.stdout.decode("utf-8", "surrogateescape")


def test_a_file_goes_there_and_back(tmp_path: Path) -> None:
    data = sample(50 * CHUNK + 1)
    (tmp_path / "f.pt").write_bytes(data)
    url = f"file://{tmp_path}/s/ckpt.pt"
    put = _run("put", tmp_path / "f.pt", url, "--chunk", "4KiB", "--width", 5)
    assert (
        put
        == f"{version_folder(tmp_path / 's', 'ckpt.pt').relative_to(tmp_path / 's')}: 200.0 KiB\n"
    )
    assert whole(tmp_path / "s", "ckpt.pt") == data
    assert len(list(version_folder(tmp_path / "s", "ckpt.pt").glob("stripe-*"))) == 5
    assert "are right" in _run("verify", url)
    _run("get", url, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == data
    (tmp_path / "dir").mkdir()
    _run("get", f"{url}.stripes", tmp_path / "dir")
    assert (tmp_path / "dir/ckpt.pt").read_bytes() == data
    listed = _run("ls", f"{tmp_path}/s")
    assert listed.startswith("200.0 KiB  file  5 x 4.0 KiB  1 version  20")
    assert listed.endswith("s/ckpt.pt\n")
    _run("rm", url)
    assert list((tmp_path / "s").iterdir()) == []
    assert "no striped checkpoint" in _run("rm", url, code=3)


def test_a_directory_goes_there_and_back(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "src")
    body = json.loads(_run("put", "src", "s/step-7", "--chunk", CHUNK, "--json", cwd=tmp_path))
    assert (body["kind"], body["files"], body["kept_bytes"]) == ("tree", 6, 0)
    assert tree_of(tmp_path / "s", "step-7") == local_tree(source)
    _run("get", "s/step-7", "out", cwd=tmp_path)
    assert local_tree(tmp_path / "out") == local_tree(source)
    assert "is there already" in _run("get", "s/step-7", "out", code=2, cwd=tmp_path)
    listed = json.loads(_run("ls", "s/step-7", "--recursive", "--json", cwd=tmp_path))
    assert [each["name"].removeprefix("step-7/") for each in listed] == sorted(local_tree(source))
    model = next(each for each in listed if each["name"] == "step-7/model.bin")
    assert (model["kind"], model["width"], model["chunk_bytes"]) == ("file", 6, CHUNK)
    one = json.loads(_run("ls", "s/step-7/sub/deep/small.json", "--json", cwd=tmp_path))
    assert [each["size_bytes"] for each in one] == [8]


def test_cat_streams_files_striped_plain_and_within_directories(tmp_path: Path) -> None:
    make_tree(tmp_path / "src")
    _run("put", tmp_path / "src", tmp_path / "s/ck", "--chunk", CHUNK)
    (tmp_path / "s/plain").write_bytes(sample(3 << 20))
    for name, wanted in (
        ("ck/model.bin", sample(9 * CHUNK + 5)),
        ("ck/sub/link", sample(9 * CHUNK + 5)),
        ("ck/sub/nothing", b""),
        ("plain", sample(3 << 20)),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "bootseer", "stripe", "cat", tmp_path / "s" / name],
            capture_output=True,
            check=True,
        )
        assert done.stdout == wanted
    for name, code in (("ck", 2), ("ck/none", 3), ("none", 3)):
        assert _run("cat", tmp_path / "s" / name, code=code)


def test_cat_without_standard_output_says_so(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"bytes")
    line = f"{sys.executable} -m bootseer stripe cat {tmp_path}/plain >&-"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "bootseer: standard output is closed; redirect it to where the file shall go\n"
    )


def test_cat_into_a_pipe_that_closes(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(sample(3 << 20))
    line = f"{sys.executable} -m bootseer stripe cat {tmp_path}/plain | head -c 5"
    done = subprocess.run(
        ["bash", "-c", f"{line}; echo ${{PIPESTATUS[0]}}"], capture_output=True, check=True
    )
    assert done.stdout == sample(3 << 20)[:5] + b"141\n"
    assert done.stderr == b""


def test_damage_has_its_exit_code_and_its_place(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(sample(20 * CHUNK))
    _run("put", tmp_path / "f", tmp_path / "s/f", "--chunk", CHUNK, "--width", 3)
    os.truncate(version_folder(tmp_path / "s", "f") / "stripe-00001", 7)
    words = [sys.executable, "-m", "bootseer", "stripe", "verify", tmp_path / "s/f"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 6
    assert "stripe-00001 has 7 bytes instead of" in done.stdout
    assert "1 damaged place" in done.stderr
    done = subprocess.run([*words, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 6
    assert [each["stripe"] for each in json.loads(done.stdout)["damages"]] == [1]
    assert "stripe-00001" in _run("get", tmp_path / "s/f", tmp_path / "out", code=6)


def test_gc_tells_what_it_removes(tmp_path: Path) -> None:
    for seed in (1, 2):
        (tmp_path / "f").write_bytes(sample(9 * CHUNK, seed))
        _run("put", tmp_path / "f", tmp_path / "s/f")
        _run("put", tmp_path / "f", tmp_path / "s/g")
    assert _run("gc", tmp_path / "s") == "nothing to remove\n"
    dry = json.loads(_run("gc", tmp_path / "s", "--grace", 0, "--dry-run", "--json"))
    assert [each["reason"] for each in dry] == ["unreferenced version"] * 2
    assert "would be removed" in _run("gc", tmp_path / "s/f", "--grace", 0, "--dry-run")
    assert _run("gc", tmp_path / "s", "--grace", 0).count("removed\n") == 2
    assert _run("gc", tmp_path / "s", "--grace", 0) == "nothing to remove\n"
    assert whole(tmp_path / "s", "f") == sample(9 * CHUNK, 2)


def test_a_put_interrupted_by_ctrl_c_goes_on(tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    (source / "a.bin").write_bytes(sample(20 * CHUNK))
    (source / "b.bin").write_bytes(sample(30 * CHUNK, 1))
    words = ["put", source, tmp_path / "s/ck", "--chunk", CHUNK, "--jobs", 1]
    code = (
        "import os, signal, sys\n"
        "from bootseer.storage.local import LocalWriter\n"
        "real = LocalWriter.write\n"
        "def write(self, data):\n"
        "    if self._name.endswith('b.bin/stripe-00003'):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        import time; time.sleep(0.2)\n"
        "    real(self, data)\n"
        "LocalWriter.write = write\n"
        "from bootseer.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "stripe", *map(str, words)], capture_output=True, check=False
    )
    assert done.returncode == 130, done.stderr
    assert done.stderr.strip() == b""
    assert not (tmp_path / "s/ck.stripes/CURRENT").exists()
    body = json.loads(_run(*words, "--json"))
    assert body["kept_bytes"] == 20 * CHUNK
    assert tree_of(tmp_path / "s", "ck") == local_tree(source)


def test_a_terminal_sees_a_bar_and_a_pipe_does_not(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(sample(9 * CHUNK))
    words = [sys.executable, "-m", "bootseer", "stripe", "put", str(tmp_path / "f")]
    with Terminal([*words, str(tmp_path / "s/f")], {**os.environ, "TERM": "xterm"}) as terminal:
        assert terminal.wait() == 0
        assert "━".encode() in terminal.text
        assert b"36.0 KiB" in terminal.text
    with Terminal(
        ["sh", "-c", " ".join([*words, str(tmp_path / "s/f"), "2>/dev/null"])], dict(os.environ)
    ) as terminal:
        assert terminal.wait() == 0
        assert "━".encode() not in terminal.text


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["put", "none", "s/f"], 3, "none"),
        (["put", ".", "s/f", "--chunk", "5x"], 2, "no size"),
        (["put", ".", "s/f", "--chunk", "5000"], 2, "multiple of 4096"),
        (["put", ".", "s/f", "--jobs", "0"], 2, "jobs"),
        (["put", ".", "ftp://host/f"], 7, "ftp"),
        (["get", "none", "out"], 3, "none"),
        (["get", "none"], 2, "DST"),
        (["verify", "none"], 3, "no striped checkpoint"),
        (["ls", "none"], 3, "none"),
        (["gc", "none"], 3, "none"),
    ],
)
def test_mistakes_have_one_line_and_a_code(
    tmp_path: Path, words: list[str], code: int, told: str
) -> None:
    assert told in _run(*words, code=code, cwd=tmp_path)


def test_options_come_from_the_environment(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(sample(20 * CHUNK))
    _run("put", tmp_path / "f", tmp_path / "s/f", BOOTSEER_STRIPE_PUT_CHUNK="8K")
    manifest = json.loads((version_folder(tmp_path / "s", "f") / "manifest.json").read_bytes())
    assert manifest["chunk_bytes"] == 8192


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("4MiB", 4 << 20), ("4m", 4 << 20), ("1.5 GB", 3 << 29), ("7", 7), ("64k", 65536), ("0", 0)],
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert sizes.parse_size(None, None, text) == size_bytes  # type: ignore[arg-type]


def test_sizes_are_shown_with_units() -> None:
    shown = [sizes.format_size(n) for n in (0, 1023, 1024, 1 << 20, (1 << 30) - 1, 1 << 45)]
    assert shown == ["0 B", "1023 B", "1.0 KiB", "1.0 MiB", "1.0 GiB", "32.0 TiB"]


@pytest.mark.parametrize("is_tree", [False, True])
def test_a_version_that_is_gone_is_damage_to_every_command(tmp_path: Path, is_tree: bool) -> None:
    """Its pointer is there, so there is nothing wrong with the path."""
    source = tmp_path / "f"
    if is_tree:
        make_tree(source)
    else:
        source.write_bytes(sample(9 * CHUNK))
    url = tmp_path / "s/X"
    _run("put", source, url, "--chunk", "4KiB")
    version_folder(tmp_path / "s", "X").rename(tmp_path / "elsewhere")
    commands = [
        ["get", url, tmp_path / "out"],
        ["verify", url],
        ["cat", f"{url}/a" * is_tree or url],
    ]
    for words in commands:
        assert "is gone or incomplete, yet it is the current version" in _run(*words, code=6)
    done = subprocess.run(
        [sys.executable, "-m", "bootseer", "stripe", "ls", str(url)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "is gone or incomplete" in done.stderr) == (6, True)
    assert not (tmp_path / "out").exists()
