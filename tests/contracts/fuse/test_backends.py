"""One read-test suite over both servers, ours and fusepy's: the same trees, the same answers."""

from __future__ import annotations

import errno
import mmap
import os
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.errors import BootseerError, NotFoundError, NotSupportedError, UsageError
from bootseer.fuse import fusepy_server
from tests.support.mounts.fuse import in_time, output, refusal
from tests.support.programs.fuse_backend import BACKENDS, backend_mount
from tests.support.trees.memory import MemoryTree, pattern

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.debian("libfuse2")]

MANY = 10_000
SIZES = {"empty": 0, "one": 1, "page": 4096, "odd": 4097, "big": (3 << 20) + 12_345}
CONTENT = {name: pattern(size, seed=number) for number, (name, size) in enumerate(SIZES.items())}
NOT_UTF8 = b"caf\xe9 \xff\x01"
SPARSE_BYTES = (5 << 30) + 3


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("source")
    root.chmod(0o755)
    for name, content in CONTENT.items():
        (root / name).write_bytes(content)
    many = root / "many"
    many.mkdir()
    for number in range(MANY):
        (many / f"name-{number:05}").touch()
    deep = root / "d" / "e" / "f"
    deep.mkdir(parents=True)
    (deep / "deep").write_bytes(b"deep")
    os.mkdir(os.fsencode(root) + b"/d/" + NOT_UTF8)
    (root / os.fsdecode(b"d/" + NOT_UTF8) / os.fsdecode(NOT_UTF8)).write_bytes(b"bytes")
    for name, target in (("link", b"one"), ("dangling", b"no/such"), ("absolute", b"/dev/null")):
        os.symlink(target, root / name)
    os.symlink(NOT_UTF8, root / "odd-link")
    os.link(root / "one", root / "hard")
    os.mkfifo(root / "fifo")
    os.chown(root / "page", 12, 34)
    os.chmod(root / "page", 0o4750)
    os.utime(root / "one", ns=(0, 1_234_567_890_123_456_789))
    os.setxattr(root / "one", "user.colour", b"blue\0\xff")
    os.setxattr(root / "one", "user.empty", b"")
    os.setxattr(root / "d", "user.of-a-directory", b"x" * 1000)
    with (root / "sparse").open("wb") as file:
        file.seek(SPARSE_BYTES - 3)
        file.write(b"end")
    return root


@pytest.fixture(scope="module", params=BACKENDS)
def mount(request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory):
    where = tmp_path_factory.mktemp("mount")
    with backend_mount(request.param, str(source), where) as mounted:
        yield mounted


@pytest.fixture(scope="module", params=BACKENDS)
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    where = tmp_path_factory.mktemp("answers")
    with backend_mount(request.param, ":answers", where) as mounted:
        yield mounted


def everything(root: Path) -> dict[bytes, tuple[int, ...]]:
    """Path -> attributes of all but the directory of many names."""
    found = {}
    top = os.fsencode(root)
    for folder, folders, files in os.walk(top):
        if folder == top:
            folders.remove(b"many")
        for name in folders + files:
            path = os.path.join(folder, name)
            s = os.lstat(path)
            fields = (s.st_ino, s.st_mode, s.st_size, s.st_mtime_ns, s.st_nlink, s.st_uid, s.st_gid)
            found[os.path.relpath(path, top)] = fields
    return found


def test_every_entry_has_the_attributes_of_its_source(mount: Path, source: Path) -> None:
    served = in_time(lambda: everything(mount))
    assert served == everything(source)
    assert b"d/" + NOT_UTF8 + b"/" + NOT_UTF8 in served


def test_a_large_listing_is_complete(mount: Path, source: Path) -> None:
    def kinds(root: Path) -> dict[str, tuple[bool, int]]:
        with os.scandir(root) as found:
            return {e.name: (e.is_file(follow_symlinks=False), e.inode()) for e in found}

    served = in_time(lambda: kinds(mount / "many"))
    assert len(served) == MANY
    assert served == kinds(source / "many")
    assert in_time(lambda: kinds(mount)) == kinds(source)


@pytest.mark.parametrize("name", SIZES)
def test_whole_files(mount: Path, name: str) -> None:
    assert in_time((mount / name).read_bytes) == CONTENT[name]


@settings(max_examples=150)
@given(
    name=st.sampled_from(sorted(SIZES)),
    offset=st.integers(0, SIZES["big"] + 10_000),
    size=st.integers(0, 2 << 20),
)
def test_any_range_is_that_of_the_source(mount: Path, name: str, offset: int, size: int) -> None:
    fd = os.open(mount / name, os.O_RDONLY)
    try:
        found = in_time(lambda: os.pread(fd, size, offset))
    finally:
        os.close(fd)
    assert found == CONTENT[name][offset : offset + size]


def test_behind_four_gib(mount: Path) -> None:
    fd = os.open(mount / "sparse", os.O_RDONLY)
    try:
        assert in_time(lambda: os.pread(fd, 100, SPARSE_BYTES - 10)) == bytes(7) + b"end"
        assert in_time(lambda: os.pread(fd, 100, SPARSE_BYTES)) == b""
        assert in_time(lambda: os.pread(fd, 8, (4 << 30) - 4)) == bytes(8)
    finally:
        os.close(fd)


def test_mmap(mount: Path) -> None:
    with (mount / "big").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        assert in_time(lambda: bytes(mapped)) == CONTENT["big"]
        mapped.close()


def test_many_readers_at_once(mount: Path) -> None:
    wrong: list[int] = []

    def read(number: int) -> None:
        fd = os.open(mount / "big", os.O_RDONLY)
        try:
            for turn in range(40):
                offset = (number * 7919 + turn * 104_729) % SIZES["big"]
                if os.pread(fd, 50_000, offset) != CONTENT["big"][offset : offset + 50_000]:
                    wrong.append(offset)
        finally:
            os.close(fd)

    threads = [threading.Thread(target=read, args=(n,), daemon=True) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert wrong == []


def test_links_say_where_they_point(mount: Path, source: Path) -> None:
    for name in (b"link", b"dangling", b"absolute", b"odd-link"):
        path = os.fsencode(mount) + b"/" + name
        assert in_time(lambda path=path: os.readlink(path)) == os.readlink(
            os.fsencode(source) + b"/" + name
        )
    assert in_time((mount / "link").read_bytes) == CONTENT["one"]


def test_names_are_bytes(mount: Path) -> None:
    path = os.fsencode(mount) + b"/d/" + NOT_UTF8
    assert in_time(lambda: os.listdir(path)) == [NOT_UTF8]
    assert in_time(Path(os.fsdecode(path + b"/" + NOT_UTF8)).read_bytes) == b"bytes"


def test_extended_attributes(mount: Path) -> None:
    one = str(mount / "one")
    assert in_time(lambda: sorted(os.listxattr(one))) == ["user.colour", "user.empty"]
    assert in_time(lambda: os.getxattr(one, "user.colour")) == b"blue\0\xff"
    assert in_time(lambda: os.getxattr(one, "user.empty")) == b""
    assert in_time(lambda: os.getxattr(mount / "d", "user.of-a-directory")) == b"x" * 1000
    assert in_time(lambda: os.listxattr(mount / "page")) == []
    assert refusal(lambda: os.getxattr(one, "user.none")) == errno.ENODATA
    assert refusal(lambda: os.getxattr(mount / "none", "user.none")) == errno.ENOENT


def test_statvfs(mount: Path, source: Path) -> None:
    served, local = in_time(lambda: os.statvfs(mount)), os.statvfs(source)
    assert served.f_blocks * served.f_frsize == local.f_blocks * local.f_frsize
    assert served.f_files == local.f_files
    assert served.f_flag & os.ST_RDONLY


def test_what_is_not_there(mount: Path) -> None:
    assert refusal((mount / "none").stat) == errno.ENOENT
    assert refusal((mount / "none" / "below").stat) == errno.ENOENT
    assert refusal((mount / "one" / "below").stat) == errno.ENOTDIR
    assert refusal(lambda: os.listdir(mount / "one")) == errno.ENOTDIR
    assert refusal((mount / ("x" * 256)).stat) == errno.ENAMETOOLONG
    assert refusal(lambda: os.readlink(mount / "one")) == errno.EINVAL
    assert refusal((mount / "dangling").read_bytes) == errno.ENOENT


def test_nothing_can_be_changed(mount: Path) -> None:
    changes = [
        lambda: (mount / "new").write_bytes(b""),
        lambda: (mount / "one").write_bytes(b"x"),
        lambda: (mount / "one").unlink(),
        lambda: (mount / "d").rename(mount / "dd"),
        lambda: (mount / "new").mkdir(),
        lambda: os.truncate(mount / "big", 5),
        lambda: os.chmod(mount / "one", 0o600),
        lambda: os.setxattr(mount / "one", "user.new", b""),
    ]
    assert {refusal(change) for change in changes} == {errno.EROFS}


def test_permissions_are_checked_for_other_users(mount: Path) -> None:
    code = """
directory = os.open(sys.argv[1], os.O_PATH)  # its parents are closed to that user
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
for name in ("one", "page"):
    try:
        os.close(os.open(name, os.O_RDONLY, dir_fd=directory))
        print("opened", name)
    except PermissionError:
        print("refused", name)
"""
    assert output(code, mount).splitlines() == ["opened one", "refused page"]


# --- reads that are answered in unusual ways -----------------------------------------------------


@pytest.mark.parametrize("name", ["later", "pieces", "view"])
def test_bytes_may_come_later_or_in_pieces(answers: Path, name: str) -> None:
    assert in_time((answers / name).read_bytes) == b"0123456789" * 1000


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("refused", errno.EACCES),
        ("refused later", errno.ETIMEDOUT),
        ("fails", errno.EIO),
        ("corrupt", errno.EIO),
    ],
)
def test_a_read_that_fails_costs_one_answer(answers: Path, name: str, number: int) -> None:
    assert refusal((answers / name).read_bytes) == number
    assert in_time((answers / "view").read_bytes) == b"0123456789" * 1000


# --- what the thin server says when it cannot ----------------------------------------------------


def refused(kind: type[BootseerError], mountpoint: Path) -> str:
    with pytest.raises(kind) as raised:
        fusepy_server.serve(MemoryTree({}), str(mountpoint))
    return str(raised.value)


def test_a_mount_point_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "make the directory" in refused(NotFoundError, tmp_path / "none")
    assert "no directory" in refused(UsageError, tmp_path / "file")


def test_fusepy_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "fuse", None)
    assert "bootseer[fusepy]" in refused(NotSupportedError, tmp_path)


def test_another_module_of_that_name_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "fuse", sys)
    assert "not fusepy's" in refused(NotSupportedError, tmp_path)
