"""The init container's image: the same bytes every time, and a payload that works by itself."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from tools.archives import extract_all
from tools.initimage import payload
from tools.initimage.__main__ import build

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.debian("patchelf")]

LAUNCHER, BUSYBOX = "/opt/bootseer/bin/bootseer", "/opt/bootseer/bin/busybox"


def files_of(image: Path) -> dict[str, bytes]:
    with tarfile.open(image) as archive:
        members = ((m.name, archive.extractfile(m)) for m in archive.getmembers())
        return {name: file.read() for name, file in members if file is not None}


@pytest.fixture(scope="module")
def installed(init_image: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty root with the payload copied where pods mount it: no Python, no C library."""
    root = tmp_path_factory.mktemp("bare")
    (packed,) = (d for d in files_of(init_image).values() if d.startswith(b"\x1f\x8b"))
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(packed))) as layer:
        extract_all(layer, root)
    for name in ("opt/bootseer", "tmp", "dev", "proc", "scratch"):
        (root / name).mkdir(parents=True)
    (root / "dev/null").touch()
    call(root, "/payload/bin/busybox", "sh", "/payload/install.sh", "install", "/opt/bootseer")
    (root / "payload").rename(root / "was-payload")  # as in the job's container: not there
    return root


def call(root: Path, *command: str) -> str:
    """What the command prints in the root, with a /proc as pods have one."""
    enter = '/bin/mount -t proc proc "$0/proc" && exec /usr/sbin/chroot "$0" "$@"'
    done = subprocess.run(
        ["/usr/bin/unshare", "-m", "--", "/bin/sh", "-c", enter, str(root), *command],
        env={"HOME": "/tmp", "PATH": "/opt/bootseer/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def python(root: Path, code: str) -> str:
    return call(root, "/opt/bootseer/python/bin/python3", "-I", "-c", code)


def test_the_same_input_gives_the_same_image(tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    shutil.copytree(payload.ROOT / "bootseer", sources)
    written = build(tmp_path / "a.tar", "name:1", level=1, sources=sources)
    for path in sources.rglob("*"):
        os.utime(path, (1, 1))  # a clone's times are its own
    assert build(tmp_path / "b.tar", "name:1", level=1, sources=sources) == written
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
    (sources / "errors.py").write_text("", encoding="ascii")
    assert build(tmp_path / "c.tar", "name:1", level=1, sources=sources) != written


def test_the_image_names_what_it_runs(init_image: Path) -> None:
    found = files_of(init_image).values()
    (config,) = (json.loads(d) for d in found if d.startswith(b"{") and b'"rootfs"' in d)
    assert config["config"]["User"] == "65534:65534"
    assert config["config"]["Entrypoint"][-1] == "/payload/install.sh"


def test_the_payloads_libraries_work_in_an_empty_root(installed: Path) -> None:
    code = (
        "import bz2, ctypes, hashlib, lzma, select, socket, ssl, uuid, zlib\n"
        "import click, fsspec, requests, xxhash, zstandard\n"
        "assert ssl.create_default_context() and requests.get\n"
        "import codecs; 'x'.encode('gb18030')  # a locale of the image may name it\n"
        "print(zstandard.decompress(zstandard.compress(b'x')), xxhash.xxh3_64(b'').hexdigest())"
    )
    assert python(installed, code) == "b'x' 2d06800538d394c2\n"


def test_byte_code_is_used_whatever_the_copys_times_are(installed: Path) -> None:
    code = (
        "import importlib.util as u, bootseer.__main__, json, click\n"
        "for module in (bootseer.__main__, json, click):\n"
        "    head = open(module.__cached__, 'rb').read(8)\n"
        "    assert head[:4] == u.MAGIC_NUMBER and head[4:] == b'\\1\\0\\0\\0', module\n"
        "print('ok')"
    )
    assert python(installed, code) == "ok\n"


def test_the_job_gets_the_environment_that_its_pod_has(installed: Path) -> None:
    """A shell would drop the first, and tell a job without PATH or PWD of its own."""
    given = ["my.key=of a ConfigMap", "PYTHONHOME=/nowhere", "BOOTSEER_EVENTS=/tmp/events"]
    for command in ("run", "start"):
        words = [LAUNCHER, command, "--", BUSYBOX, "env"]
        told = call(installed, BUSYBOX, "env", "-i", *given, *words).splitlines()
        assert sorted(t for t in told if not t.startswith("BOOTSEER_TRACE")) == sorted(given)


def test_checkpoints_are_put_and_got_and_opened_by_fsspec(installed: Path) -> None:
    data = bytes(range(256)) * (20 << 10)
    (installed / "scratch/m.pt").write_bytes(data)
    call(installed, LAUNCHER, "stripe", "put", "/scratch/m.pt", "/scratch/store/m.pt")
    call(installed, LAUNCHER, "stripe", "get", "/scratch/store/m.pt", "/scratch/copy.pt")
    assert (installed / "scratch/copy.pt").read_bytes() == data
    code = "from bootseer.stripedfs.fsspec_face.filesystem import StripedFileSystem as S; "
    code += "print(len(S().cat_file('/scratch/store/m.pt')))"
    assert python(installed, code).strip() == str(len(data))


def test_dependencies_are_snapshot_and_restored_by_the_payload(installed: Path) -> None:
    words = ["deps", "run", "--store", "/scratch/snapshots", "--also", "/scratch/site"]
    words += ["--publish", "inline"]
    install = f"{BUSYBOX} mkdir -p /scratch/site && {BUSYBOX} touch /scratch/site/x && "
    install += "echo ran >> /scratch/ran"
    for _ in range(2):
        call(installed, LAUNCHER, *words, "--", BUSYBOX, "sh", "-c", install)
        assert (installed / "scratch/site/x").exists()
        (installed / "scratch/site/x").unlink()
    assert (installed / "scratch/ran").read_text(encoding="ascii") == "ran\n"
