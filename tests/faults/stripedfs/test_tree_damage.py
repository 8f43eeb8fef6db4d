"""Directory checkpoints whose pointer, manifest or files are damaged or gone: what each face says.

Nothing hangs, nothing comes out empty instead, and what lies beside is read as ever.
"""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bootseer import stripedfs
from bootseer.errors import BootseerError, CorruptDataError, NotFoundError
from bootseer.stripedfs.file_errors import FileCorruptError
from bootseer.stripedfs.fsspec_face.filesystem import StripedFileSystem
from bootseer.stripedfs.write.put import put_into
from tests.support.mounts.checkpoints import SMALL, content, put_bytes, served, store_of, stripe
from tests.support.mounts.fuse import in_time, refusal

pytestmark = [pytest.mark.root, pytest.mark.slow]

FILES = {
    ".metadata": b"what torch's loader reads first",
    "__0_0.distcp": content(40_000),
    "small": b"x",
    "sub/second": content(30_000, 2),
}
GONE = "; what was opened was replaced since, or is incomplete: open it again, or put it anew"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """`run` is to be damaged; `a`, a file, and `other`, a directory of the same files, are not."""
    root, source = tmp_path / "store", tmp_path / "source"
    put_bytes(store_of(root), "a", content(50_000), tmp_path)
    for name, data in FILES.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
    for name in ("run", "other"):
        put_into(store_of(root), name, str(source), settings=SMALL)
    return root


def version(root: Path) -> Path:
    (found,) = (root / "run.stripes").glob("v-*")
    return found


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@dataclasses.dataclass(frozen=True)
class Damage:
    """What is done to `run`, and what is said of it from then on.

    `hidden` files cannot be read, the others can. Of a `whole` one the directory itself is
    refused, and all of its files with it.
    """

    do: Callable[[Path], None]
    said: str
    hidden: tuple[str, ...] = tuple(FILES)
    whole: bool = True


DAMAGES = {
    "manifest cut": Damage(lambda r: cut(version(r) / "manifest.json"), "truncated or damaged"),
    "manifest empty": Damage(
        lambda r: os.truncate(version(r) / "manifest.json", 0), "truncated or damaged"
    ),
    "manifest gone": Damage(
        lambda r: (version(r) / "manifest.json").unlink(), "gone or incomplete"
    ),
    "pointer cut": Damage(lambda r: cut(r / "run.stripes/CURRENT"), "CURRENT in "),
    "a file's manifest cut": Damage(
        lambda r: cut(version(r) / "data/__0_0.distcp/manifest.json"),
        "/data/__0_0.distcp/manifest.json in ",
        ("__0_0.distcp",),
        whole=False,
    ),
    "a file's manifest gone": Damage(
        lambda r: (version(r) / "data/__0_0.distcp/manifest.json").unlink(),
        "the manifest of __0_0.distcp of ",
        ("__0_0.distcp",),
        whole=False,
    ),
    "metadata gone": Damage(
        lambda r: (version(r) / "data/~2Emetadata").unlink(),
        "/data/~2Emetadata in ",
        (".metadata",),
        whole=False,
    ),
}


@pytest.fixture(params=DAMAGES)
def damage(request: pytest.FixtureRequest, root: Path) -> Damage:
    chosen = DAMAGES[request.param]
    chosen.do(root)
    return chosen


def test_the_commands_say_it_in_one_line(root: Path, tmp_path: Path, damage: Damage) -> None:
    out = tmp_path / "out"

    def refused(*words: object) -> None:
        done = stripe(*words)
        assert (done.returncode, done.stdout) == (6, ""), done.stderr
        assert damage.said in done.stderr
        assert done.stderr.endswith(" anew\n")
        assert done.stderr.count("\n") == 1

    for name in FILES:
        if name in damage.hidden:
            refused("cat", root / "run" / name)
            refused("get", root / "run" / name, out)
        else:
            assert stripe("get", root / "run" / name, out).returncode == 0
            assert out.read_bytes() == FILES[name]
            out.unlink()
    refused("get", root / "run", out)
    assert not out.exists()
    verified = stripe("verify", root / "run")
    assert verified.returncode == 6
    # Of one file the report names it; where there is nothing to be checked, it is an error.
    assert damage.hidden[0] in verified.stdout or damage.said in verified.stderr
    assert verified.stderr.count("\n") == 1
    assert stripe("get", root / "other", out).returncode == 0
    assert {name: (out / name).read_bytes() for name in FILES} == FILES


def test_ls_lists_what_there_is(root: Path, damage: Damage) -> None:
    listed = stripe("ls", root)
    names = [row.split()[-1] for row in listed.stdout.splitlines()]
    assert names == ["store/a", "store/other", "store/run"]
    assert listed.returncode == (6 if damage.whole else 0)
    if damage.whole:
        (line,) = listed.stderr.splitlines()
        assert line.startswith("bootseer: store/run: ")
        assert damage.said in line
    within = stripe("ls", root / "run")
    if damage.whole:
        assert (within.returncode, within.stdout) == (6, "")
        assert damage.said in within.stderr
        assert within.stderr.count("\n") == 1
    else:
        names = [row.split()[-1] for row in within.stdout.splitlines()]
        assert names == ["run/.metadata", "run/__0_0.distcp", "run/small", "run/sub"]
        # Files that are stored as they are have nothing to be looked at for a listing.
        assert within.returncode == (0 if damage.hidden == (".metadata",) else 6)
    assert stripe("ls", root / "other").returncode == 0


def test_fsspec_raises_it(root: Path, tmp_path: Path, damage: Damage) -> None:
    files, run = StripedFileSystem(), str(root / "run")

    def refused(work: Callable[[], object], kind: type[BootseerError] = FileCorruptError) -> None:
        with pytest.raises(kind, match=damage.said) as caught:
            in_time(work)
        assert type(caught.value) is kind
        assert "\n" not in str(caught.value)
        assert str(caught.value).endswith(" anew")
        if kind is FileCorruptError:
            assert caught.value.errno == errno.EIO

    for name in FILES:
        path = f"{run}/{name}"
        if name in damage.hidden:
            refused(lambda path=path: files.cat_file(path))
            refused(lambda path=path: files.open(path).read())
            refused(lambda path=path: files.cat_ranges([path], [0], [1], on_error="raise"))
            refused(lambda path=path: files.get_file(path, str(tmp_path / "file")))
        else:
            assert in_time(lambda path=path: files.cat_file(path)) == FILES[name]
    hidden = f"{run}/{damage.hidden[0]}"
    kind = FileCorruptError if damage.hidden == (".metadata",) else CorruptDataError
    refused(lambda: stripedfs.open(hidden).read(), kind)
    lists = [files.ls, files.find, lambda path: files.glob(f"{path}/*"), files.du]
    for each in lists:
        if damage.whole:
            refused(lambda each=each: each(run))
        else:
            assert in_time(lambda each=each: each(run))
    refused(lambda: files.get(run, str(tmp_path / "got"), recursive=True))
    refused(lambda: files.get(str(root), str(tmp_path / "all"), recursive=True))
    listed = {Path(entry["name"]).name: entry for entry in files.ls(str(root))}
    assert sorted(listed) == ["a", "other", "run"]
    assert files.cat_file(str(root / "a")) == content(50_000)
    found = {path.removeprefix(f"{root}/other/") for path in files.find(str(root / "other"))}
    assert found == set(FILES)


@pytest.mark.parametrize("backend", ["own", "fusepy"])
def test_a_mount_refuses_it_alone(root: Path, tmp_path: Path, damage: Damage, backend: str) -> None:
    with served(root, tmp_path / "m", backend=backend) as mount:
        m = mount.directory
        assert in_time(lambda: sorted(os.listdir(m))) == ["a", "other", "run"]
        if damage.whole:
            assert refusal(lambda: os.listdir(m / "run")) == errno.EIO
        for name, data in FILES.items():
            if name in damage.hidden:
                assert refusal((m / "run" / name).read_bytes) == errno.EIO
            else:
                assert in_time((m / "run" / name).read_bytes) == data
            assert in_time((m / "other" / name).read_bytes) == data
        assert in_time((m / "a").read_bytes) == content(50_000)
        (line,) = {line.partition(": ")[2] for line in mount.said.splitlines()}
        assert damage.said in line
        assert line.endswith(GONE if damage.hidden == (".metadata",) else " anew")


def test_a_mount_of_it_alone_is_refused_too(root: Path, tmp_path: Path, damage: Damage) -> None:
    (tmp_path / "m").mkdir()
    done = stripe("mount", root / "run", tmp_path / "m", "--log-file", tmp_path / "log")
    if damage.whole:
        assert (done.returncode, done.stdout) == (6, "")
        assert damage.said in done.stderr
        assert done.stderr.count("\n") == 1
        assert not os.path.ismount(tmp_path / "m")
        return
    try:
        assert done.returncode == 0, done.stderr
        for name, data in FILES.items():
            path = tmp_path / "m" / name
            if name in damage.hidden:
                assert refusal(path.read_bytes) == errno.EIO
            else:
                assert in_time(path.read_bytes) == data
    finally:
        assert stripe("umount", tmp_path / "m").returncode == 0


def test_without_its_pointer_it_is_not_there(root: Path, tmp_path: Path) -> None:
    """What a put that was cut short leaves looks the same."""
    (root / "run.stripes/CURRENT").unlink()
    for words in (["cat", root / "run/small"], ["ls", root / "run"], ["verify", root / "run"]):
        done = stripe(*words)
        assert (done.returncode, done.stdout) == (NotFoundError.exit_code, ""), done.stderr
        assert done.stderr.count("\n") == 1
    listed = stripe("ls", root)
    assert [row.split()[-1] for row in listed.stdout.splitlines()] == ["store/a", "store/other"]
    assert (listed.returncode, listed.stderr) == (0, "")
    files = StripedFileSystem()
    with pytest.raises(FileNotFoundError):
        files.cat_file(str(root / "run/small"))
    assert files.find(str(root / "run")) == []
    assert not files.exists(str(root / "run"))
    with served(root, tmp_path / "m") as mount:
        assert in_time(lambda: sorted(os.listdir(mount.directory))) == ["a", "other"]
        assert refusal((mount.directory / "run/small").read_bytes) == errno.ENOENT
        assert in_time((mount.directory / "other/small").read_bytes) == FILES["small"]
        assert mount.said == ""
