"""`bootseer inject` and `uninject` as commands: files, pipes, refusals, what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mounts.tmpfs import tmpfs

GOOD = """\
# the job
kind: Pod
metadata: {name: good}
spec:
  containers:
  - name: main
    image: x
    command: [train, --fast]
"""
BAD = GOOD.replace("good", "bad").replace("    command: [train, --fast]\n", "")


def bootseer(*words: str | Path, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "bootseer", *map(str, words)]
    return subprocess.run(command, input=data, capture_output=True, check=False)


def test_a_file_is_injected_in_place_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(GOOD, encoding="utf-8")
    path.chmod(0o640)
    done = bootseer("inject", "-f", path, "-o", path)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert "bootseer-init" in path.read_text(encoding="utf-8")
    assert path.stat().st_mode & 0o777 == 0o640
    assert bootseer("uninject", "-f", path, "-o", path).returncode == 0
    assert path.read_text(encoding="utf-8") == GOOD
    assert list(tmp_path.iterdir()) == [path]


def test_a_pipe_keeps_every_byte() -> None:
    raw = GOOD.replace("\n", "\r\n").replace("the job", "der Auftrag: ü").encode()
    injected = bootseer("inject", "-f", "-", "--store", "pvc:c", data=raw).stdout
    assert injected.count(b"\n") == injected.count(b"\r\n") > raw.count(b"\n")
    assert bootseer("inject", "-f", "-", "--store", "pvc:c", data=injected).stdout == injected
    assert bootseer("uninject", "-f", "-", data=injected).stdout == raw


def test_one_refused_pod_keeps_all_from_being_written(tmp_path: Path) -> None:
    path, out = tmp_path / "two.yaml", tmp_path / "out.yaml"
    path.write_text(f"{GOOD}---\n{BAD}", encoding="utf-8")
    done = bootseer("inject", "-f", path, "-o", out, "--offline")
    assert done.returncode == 7
    assert b"Pod/bad" in done.stderr
    assert b"1 of its pods cannot be injected, nothing was written" in done.stderr
    assert not out.exists()
    done = bootseer("inject", "-f", path, "-o", out, "--offline", "--skip-refused")
    assert done.returncode == 0
    assert b"Pod/bad" in done.stderr
    good, bad = out.read_text(encoding="utf-8").split("---\n")
    assert "bootseer-init" in good
    assert bad == BAD
    done = bootseer("inject", "-f", path, "--offline", "--command", "python 'a b.py'")
    assert done.stdout.count(b"name: bootseer-init") == 2
    assert b"a b.py" in done.stdout


def test_explaining_says_each_change_and_its_reason_and_writes_no_manifest() -> None:
    done = bootseer("inject", "-f", "-", "--explain", data=GOOD.encode())
    said = done.stdout.decode()
    assert done.returncode == 0
    assert "line 6: Pod/good spec: command: /opt/bootseer/bin/bootseer, start, --" in said
    assert "    copies the wrapper into the pod" in said
    assert "kind: Pod" not in said
    done = bootseer("inject", "-f", "-", "--explain", "--json", "--offline", data=BAD.encode())
    assert done.returncode == 7
    (refusal,) = json.loads(done.stdout)["refusals"]
    assert refusal["pod"] == "Pod/bad spec"


def test_pods_without_the_named_container_are_passed_over(tmp_path: Path) -> None:
    other = GOOD.replace("good", "cache").replace("name: main", "name: redis")
    path = tmp_path / "two.yaml"
    path.write_text(f"{GOOD}---\n{other}", encoding="utf-8")
    done = bootseer("inject", "-f", path, "--container", "main", "--image-pull-policy", "Never")
    assert done.returncode == 0, done.stderr
    injected, left = done.stdout.decode().split("---\n")
    assert "imagePullPolicy: Never" in injected
    assert left == other
    assert b"Pod/cache spec: passed over: it has no container 'main'" in done.stderr
    again = bootseer("inject", "-f", "-", "--container", "main", "--explain", data=done.stdout)
    assert b"Pod/cache spec: passed over" in again.stdout
    looked = bootseer("k8s", "check", "-f", path, "--container", "main")
    assert looked.returncode == 0
    assert b"passed over: it has no container 'main'" in looked.stdout


REDIS = BAD.replace("bad", "cache").replace("image: x", "image: redis:7")


def test_one_command_never_goes_into_several_images(tmp_path: Path) -> None:
    data = f"{BAD}---\n{REDIS}".encode()
    plain = ("inject", "-f", "-", "--offline", "--command", "python train.py")
    done = bootseer(*plain, data=data)
    said = done.stderr.decode()
    assert (done.returncode, done.stdout) == (7, b"")
    assert "2 images: Pod/bad/main (x), Pod/cache/main (redis:7)" in said
    assert "--command POD/CONTAINER=WORDS" in said
    # Named, each has its own; what is for all goes to the rest.
    done = bootseer(*plain, "--command", "cache/main=redis-server --port 1", data=data)
    assert done.returncode == 0, done.stderr
    assert b"- redis-server\n" in done.stdout
    again = bootseer(*plain, "--command", "Pod/cache/main=redis-server --port 1", data=done.stdout)
    assert again.stdout == done.stdout
    assert bootseer("uninject", "-f", "-", data=done.stdout).stdout == data
    # The same image twice is one command's.
    done = bootseer(*plain, data=f"{BAD}---\n{REDIS.replace('redis:7', 'x')}".encode())
    assert (done.returncode, done.stdout.count(b"- train.py")) == (0, 2)


def test_explaining_says_the_words_of_a_given_command() -> None:
    words = ("-f", "-", "--explain", "--command", "python 'a b.py'")
    done = bootseer("inject", *words, data=BAD.encode())
    assert b"command: /opt/bootseer/bin/bootseer start -- python 'a b.py'\n" in done.stdout


def test_commands_of_the_environment_stand_one_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOTSEER_INJECT_COMMAND", "python train.py\ncache/main=redis-server -x")
    done = bootseer("inject", "-f", "-", data=f"{BAD}---\n{REDIS}".encode())
    assert done.returncode == 0, done.stderr
    assert b"- train.py\n" in done.stdout
    assert b"- redis-server\n" in done.stdout


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--parts", "events,nonsense"), 2, "unknown 'nonsense'; there are events, image, deps"),
        (("--tier", "fuse"), 2, "needs --fuse-resource"),
        (("--events", "somewhere"), 2, "write pvc:CLAIM or host:/DIRECTORY"),
        (("--cache", "host:relative"), 2, "write pvc:CLAIM or host:/DIRECTORY"),
        (("--events", "pvc:Bad Name!"), 2, "'Bad Name!' cannot be an object's name"),
        (("--store", "pvc:-a"), 2, "'-a' cannot be an object's name"),
        (("--cache", "pvc:" + "a" * 254), 2, "it has at most 253 characters"),
        (("--cache", "host:/srv/../etc"), 2, "takes no '..'"),
        (("--config-map", "Settings"), 2, "'Settings' cannot be an object's name"),
        (("--image-pull-policy", "Foo"), 2, "'Always', 'IfNotPresent', 'Never'"),
        (("--container", "other"), 7, "it has no container 'other'; it has main"),
        (("--command", "sh -c 'x"), 2, "no closing quotation; quote it as a shell takes it"),
        (("--command", " "), 2, "it has no words"),
        (("--command", "a", "--command", "b"), 2, "is given twice for all containers"),
        (("--command", "good/other=x"), 2, "no container without a command has this name"),
        (("-f", "/no/such/file"), 3, "/no/such/file"),
        (("-f", "/dev/zero"), 2, "/dev/zero: it is a device; name a file, a pipe, or -"),
        (("-o", "/no/such/folder/x"), 3, "/no/such/folder/x"),
    ],
)
def test_what_is_asked_wrongly_is_one_line(words: tuple[str, ...], code: int, message: str) -> None:
    done = bootseer("inject", "-f", "-", *words, data=GOOD.encode())
    assert done.returncode == code, done.stderr
    assert done.stdout == b""
    assert message in done.stderr.decode()
    assert b"Traceback" not in done.stderr


def test_the_null_device_is_an_empty_manifest() -> None:
    """It was refused as a device; a closed standard input was a traceback."""
    for path in ("/dev/null", "/dev/stdin", "-"):
        for name in ("inject", "uninject"):
            done = run_from("< /dev/null", name, "-f", path)
            assert (done.returncode, done.stdout) == (0, b""), done.stderr
            done = run_from("<&-", name, "-f", path)
            if path == "-":
                said = b"cannot read standard input: it is closed; name a file, or give it one\n"
                assert (done.returncode, done.stderr) == (2, b"bootseer: " + said)
            assert b"Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inject", "uninject", "k8s check"])
@pytest.mark.parametrize(
    ("path", "code", "message"),
    [
        (".", 2, "Is a directory; name a file"),
        ("/dev/zero", 2, "it is a device; name a file, a pipe, or -"),
        ("torn.yaml", 2, "torn.yaml, line 2: not valid YAML"),
        ("none.yaml", 3, "No such file or directory; check the path"),
        # The kernel lets nobody read the first, nor its owner root; the second begins with a hole.
        ("/proc/sys/vm/compact_memory", 4, "Permission denied; check owner and mode"),
        ("/proc/self/mem", 5, "cannot read the manifest /proc/self/mem: Input/output error"),
        ("changed.yaml", 6, "lines between the bootseer marks were changed; move what is yours"),
    ],
)
def test_what_cannot_be_read_has_its_exit_code(
    name: str, path: str, code: int, message: str, tmp_path: Path
) -> None:
    (tmp_path / "torn.yaml").write_text("volumes: [bootseer\n", encoding="utf-8")
    new = bootseer("inject", "-f", "-", data=GOOD.encode()).stdout
    (tmp_path / "changed.yaml").write_bytes(new.replace(b"name: bootseer-init", b"name: mine"))
    done = bootseer(*name.split(), "-f", tmp_path / path)
    assert (done.returncode, done.stdout) == (code, b""), done.stderr
    assert message in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inject", "uninject"])
@pytest.mark.parametrize(
    ("path", "code", "message"),
    [
        (".", 2, "Is a directory; name a file"),
        ("fifo", 2, "it is a FIFO (named pipe); name a file"),
        ("/dev/full", 2, "it is a device; name a file"),
        ("n" * 300, 2, "File name too long"),
        ("none/x", 3, "No such file or directory; check the path"),
        ("/sys/x", 4, "cannot write the manifest /sys/x"),  # the kernel's own files alone
        ("circle", 5, "Too many levels of symbolic links"),
    ],
)
def test_what_cannot_be_written_has_its_exit_code(
    name: str, path: str, code: int, message: str, tmp_path: Path
) -> None:
    """A FIFO or a device was replaced by a file, where root asked for it."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "circle").symlink_to("circle")
    before = sorted(tmp_path.iterdir())
    done = bootseer(name, "-f", "-", "-o", tmp_path / path, data=GOOD.encode())
    assert (done.returncode, done.stdout) == (code, b""), done.stderr
    assert message in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "fifo").is_fifo()
    assert Path("/dev/full").is_char_device()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inject", "uninject"])
def test_a_file_that_standard_output_goes_to_is_not_replaced(name: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"precious\n")
    words = [sys.executable, "-m", "bootseer", name, "-f", "-", "-o", "/dev/stdout"]
    with log.open("ab") as out:
        done = subprocess.run(words, input=GOOD.encode(), stdout=out, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert b"/dev/stdout: it is one of the system's own; name a file" in done.stderr
    assert log.read_bytes() == b"precious\n"


def test_a_link_to_a_manifest_stays_one(tmp_path: Path) -> None:
    path, link = tmp_path / "job.yaml", tmp_path / "link.yaml"
    path.write_text(GOOD, encoding="utf-8")
    link.symlink_to("job.yaml")
    assert bootseer("inject", "-f", link, "-o", link).returncode == 0
    assert link.is_symlink()
    assert "bootseer-init" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["inject", "uninject"])
def test_an_output_without_room_has_its_exit_code(name: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(GOOD, encoding="utf-8")
    done = run_from("> /dev/full", name, "-f", str(path))
    assert done.returncode == 8
    assert b"cannot write the output: No space left on device; free space" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inject", "uninject"])
def test_a_closed_output_is_one_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(GOOD, encoding="utf-8")
    done = run_from(">&-", name, "-f", str(path))
    said = b"bootseer: standard output is closed; name a file with --output\n"
    assert (done.returncode, done.stderr) == (2, said)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    with tmpfs(tmp_path / "disk", "16k") as folder:
        (folder / "filler").write_bytes(bytes(12 << 10))
        yield folder


@pytest.mark.root
@pytest.mark.parametrize("name", ["inject", "uninject"])
def test_a_full_disk_has_its_exit_code_and_keeps_what_was(name: str, full_disk: Path) -> None:
    path = full_disk / "job.yaml"
    path.write_text(GOOD, encoding="utf-8")
    done = bootseer(name, "-f", path, "-o", path)
    assert done.returncode == 8
    assert b"job.yaml: No space left on device; free space" in done.stderr
    assert path.read_text(encoding="utf-8") == GOOD
    assert sorted(each.name for each in full_disk.iterdir()) == ["filler", "job.yaml"]


def test_text_that_has_nothing_of_ours_comes_back_valid_or_not() -> None:
    done = bootseer("uninject", "-f", "-", data=b"kind: [Pod\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"kind: [Pod\n", b"")


def run_from(redirection: str, *words: str) -> subprocess.CompletedProcess[bytes]:
    """By a shell, which gives it that standard input."""
    command = ["sh", "-c", f'exec "$@" {redirection}', "-", sys.executable, "-m", "bootseer"]
    return subprocess.run([*command, *words], capture_output=True, check=False, timeout=120)


def test_a_manifest_without_pods_is_written_as_it_was() -> None:
    raw = b"kind: ConfigMap\ndata: {a: b}\n"
    done = bootseer("inject", "-f", "-", data=raw)
    assert (done.returncode, done.stdout) == (0, raw)
    assert b"no pod in it" in done.stderr


UNKNOWN = """\
apiVersion: example.com/v1
kind: Fleet
metadata: {name: f}
spec:
  driver:
    template: {spec: {containers: [{name: a, image: i, command: [x]}]}}
  executor:
    template: {spec: {containers: [{name: b, image: i, command: [y]}]}}
"""


def test_a_kind_that_nobody_here_knows_is_said_to_be_unknown_once() -> None:
    """Nobody can tell whether what runs it starts the command; it was injected without a word."""
    note = b"the kind Fleet (example.com/v1) is unknown here: see that what runs its pods takes"
    done = bootseer("inject", "-f", "-", data=UNKNOWN.encode())
    assert done.returncode == 0
    assert done.stdout.count(b"initContainers") == 2
    assert done.stderr.count(note) == 1
    told = bootseer("inject", "-f", "-", "--explain", data=UNKNOWN.encode())
    assert told.stdout.count(note) == 1
    told = bootseer("inject", "-f", "-", "--explain", "--json", data=UNKNOWN.encode())
    assert [each["line"] for each in json.loads(told.stdout)["unknown"]] == [6]
