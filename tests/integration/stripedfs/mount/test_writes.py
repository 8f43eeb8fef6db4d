"""Saving through a mount: every file appears whole, and its errors reach `close`."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bootseer import stripedfs
from bootseer.errors import UsageError
from bootseer.stripedfs.mount import mount as mounting
from bootseer.stripedfs.mount.settings import MountSettings
from bootseer.stripedfs.write.put import put_into
from tests.support.mounts.checkpoints import (
    CHUNK,
    SMALL,
    WIDTH,
    Served,
    content,
    put_bytes,
    served,
    store_of,
    stripe,
)
from tests.support.mounts.fuse import in_time, output, refusal
from tests.support.mounts.tmpfs import tmpfs
from tests.support.waiting import until

pytestmark = [pytest.mark.root, pytest.mark.slow]

SIZE = 8 * CHUNK + 55
WRITING = {"width": WIDTH, "chunk_bytes": CHUNK}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def mount(root: Path, tmp_path: Path) -> Iterator[Served]:
    """A store mounted for saving, made by mounting it."""
    with served(root, tmp_path / "mnt", writable=True, writing=WRITING) as mount:
        yield mount


def shell(script: str, directory: Path) -> None:
    done = subprocess.run(["sh", "-ec", script], cwd=directory, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


def read_or_lose(read: Callable[[], bytes]) -> bytes:
    """What is read; nothing where its reader is told that it is lost."""
    try:
        return read()
    except OSError as error:
        if error.errno not in (errno.EIO, errno.ENOENT, errno.ESTALE):
            raise
        return b""


def read_url(root: Path, name: str) -> bytes:
    with stripedfs.open(f"{root}/{name}") as file:
        return file.read()


def test_a_copied_file_is_striped_and_reads_back(mount: Served, root: Path, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(content(SIZE))
    (tmp_path / "small").write_bytes(b"small")
    shell("cp ../large ../small . && cmp large ../large && cmp small ../small", mount.directory)
    assert read_url(root, "large") == content(SIZE)
    assert sorted(os.listdir(root)) == ["large.stripes", "small"]
    assert in_time(lambda: sorted(os.listdir(mount.directory))) == ["large", "small"]
    shell("cp ../small large && cp ../large small", mount.directory)  # each over the other
    assert (read_url(root, "large"), read_url(root, "small")) == (b"small", content(SIZE))
    shell("cmp ../small large && cmp ../large small", mount.directory)


@pytest.mark.parametrize("read_before", [False, True])
@pytest.mark.parametrize("size", [3, SIZE])
def test_a_file_that_was_opened_is_read_under_its_new_name(
    mount: Served, size: int, read_before: bool
) -> None:
    """As `rsync -a` saves: it opens what it wrote for its mode alone, and then renames it."""
    folder, bytes_there = mount.directory / "f", content(size)

    def go_on() -> None:
        folder.mkdir()
        (folder / ".x.W9fvJt").write_bytes(bytes_there)
        fd = os.open(folder / ".x.W9fvJt", os.O_RDONLY)
        os.fchmod(fd, 0o640)
        os.close(fd)
        held = [os.open(folder / ".x.W9fvJt", os.O_RDONLY) for _ in range(2)]
        if read_before:
            assert os.pread(held[0], 2, 0) == bytes_there[:2]
        (folder / ".x.W9fvJt").rename(folder / "x")
        assert (folder / "x").read_bytes() == bytes_there
        folder.rename(mount.directory / "g")
        assert (mount.directory / "g" / "x").read_bytes() == bytes_there
        for descriptor in held:
            assert b"".join(iter(lambda fd=descriptor: os.read(fd, CHUNK), b"")) == bytes_there
            os.close(descriptor)

    in_time(go_on)
    assert mount.said == ""


@pytest.mark.parametrize("size", [3, SIZE])
def test_who_holds_a_file_below_a_folder_goes_on_when_that_is_renamed(
    mount: Served, size: int
) -> None:
    folder, bytes_there = mount.directory / "f", content(size)

    def go_on() -> None:
        folder.mkdir()
        (folder / "x").write_bytes(bytes_there)
        with (folder / "x").open("rb") as file:
            folder.rename(mount.directory / "g")
            (mount.directory / "y").write_bytes(bytes_there[::-1])
            (mount.directory / "y").rename(mount.directory / "g" / "z")
            assert file.read() == bytes_there
        assert (mount.directory / "g" / "z").read_bytes() == bytes_there[::-1]

    in_time(go_on)


@pytest.mark.parametrize("how", ["replaced", "removed", "removed before"])
@pytest.mark.parametrize("size", [3, 400_000, SIZE])
def test_who_holds_a_file_that_left_its_name_never_gets_what_has_it_now(
    mount: Served, size: int, how: str
) -> None:
    """Also when the folder is renamed in which the two had one name, one after the other."""
    folder, bytes_there, others = mount.directory / "f", b"o" * size, b"n" * size

    def go_on() -> None:
        folder.mkdir()
        (folder / "x").write_bytes(bytes_there)
        with (folder / "x").open("rb", buffering=0) as file:
            begun = os.pread(file.fileno(), 2, 0) if size > 3 else b""
            assert begun == bytes_there[: len(begun)]
            if how == "replaced":
                (folder / "y").write_bytes(others)
                (folder / "y").rename(folder / "x")
            else:
                (folder / "x").unlink()
                if how == "removed":
                    (folder / "x").write_bytes(others)
            folder.rename(mount.directory / "g")
            if how == "removed before":
                (mount.directory / "g" / "x").write_bytes(others)
                (mount.directory / "g").rename(mount.directory / "h")
            opened_again = Path(f"/proc/self/fd/{file.fileno()}")
            for read in (opened_again.read_bytes, file.read):
                assert set(read_or_lose(read)) <= {ord("o")}

    in_time(go_on)


@pytest.mark.parametrize("opened_anew", [False, True])
def test_who_holds_a_file_that_others_replaced_never_gets_theirs_by_a_rename(
    mount: Served, root: Path, opened_anew: bool
) -> None:
    """The mount has not noticed yet that it was replaced in the store. Who opens it now gets the
    new bytes, in pages of their own."""
    folder = mount.directory / "f"

    def go_on() -> None:
        folder.mkdir()
        (folder / "x").write_bytes(b"o" * 1000)
        with (folder / "x").open("rb", buffering=0) as file:
            (root / "f" / "new").write_bytes(b"n" * 1000)
            (root / "f" / "new").rename(root / "f" / "x")
            folder.rename(mount.directory / "g")
            if opened_anew:
                assert (mount.directory / "g" / "x").read_bytes() == b"n" * 1000
            assert set(read_or_lose(file.read)) <= {ord("o")}

    in_time(go_on)


def test_a_file_appears_to_others_when_it_is_closed(mount: Served, root: Path) -> None:
    def save() -> None:
        with (mount.directory / "x").open("wb", buffering=0) as file:
            file.write(content(SIZE)[:5000])
            os.fsync(file.fileno())
            assert os.fstat(file.fileno()).st_size == 5000
            assert "x" in os.listdir(mount.directory)
            assert "x" not in [p.name.removesuffix(".stripes") for p in root.glob("*/CURRENT")]
            file.write(content(SIZE)[5000:])

    in_time(save)
    assert read_url(root, "x") == content(SIZE)


def test_shells_write_by_several_descriptors(mount: Served, root: Path) -> None:
    script = f"""
        : > empty
        echo one > plain
        (echo one; echo two) > both
        (head -c {SIZE} /dev/zero; head -c {SIZE} /dev/zero; echo end) > long
        echo anew > plain
    """
    shell(script, mount.directory)
    assert read_url(root, "empty") == b""
    assert read_url(root, "plain") == b"anew\n"
    assert read_url(root, "both") == b"one\ntwo\n"
    assert read_url(root, "long") == bytes(2 * SIZE) + b"end\n"


def test_names_are_made_moved_and_removed(mount: Served, root: Path, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(content(SIZE))
    script = """
        mkdir -p a/b
        cp ../large a/b/tmp && mv a/b/tmp a/b/final
        cp ../large a/b/tmp && echo other > a/b/other && mv a/b/other a/b/tmp
        [ "$(cat a/b/tmp)" = other ] && cmp a/b/final ../large
        mv a/b/final a/b/tmp && cmp a/b/tmp ../large
        mv a c && cmp c/b/tmp ../large
        ! rmdir c/b 2>/dev/null
        ! mkdir c 2>/dev/null
        rm c/b/tmp && rmdir c/b c
        mkdir .hidden && echo x > .hidden/.metadata && [ "$(cat .hidden/.metadata)" = x ]
    """
    shell(script, mount.directory)
    assert os.listdir(root) == [".hidden"]
    assert read_url(root, ".hidden/.metadata") == b"x\n"


def test_writing_elsewhere_than_at_the_end_is_refused_by_name(mount: Served, root: Path) -> None:
    path = mount.directory / "x"

    def write(offset: int, flags: int = os.O_WRONLY) -> None:
        fd = os.open(path, flags)
        try:
            os.pwrite(fd, b"y", offset)
        finally:
            os.close(fd)

    in_time(lambda: path.write_bytes(content(SIZE)))
    assert refusal(lambda: write(7)) == errno.ESPIPE
    assert refusal(lambda: write(5, os.O_WRONLY | os.O_TRUNC)) == errno.ESPIPE
    in_time(lambda: path.write_bytes(content(SIZE)))
    assert refusal(lambda: os.truncate(path, SIZE + 1)) == errno.ESPIPE
    assert refusal(lambda: path.rename(mount.directory / "x.stripes")) == errno.EINVAL
    assert read_url(root, "x") == content(SIZE)
    in_time(lambda: write(SIZE))  # at its end: made anew with what it held
    assert read_url(root, "x") == content(SIZE) + b"y"
    in_time(lambda: os.truncate(path, 0))
    assert read_url(root, "x") == b""


def test_a_file_opened_for_both_is_read_until_it_is_written(mount: Served, root: Path) -> None:
    path = mount.directory / "x"

    def change() -> None:
        path.write_bytes(content(SIZE))
        with path.open("r+b", buffering=0) as file:
            assert file.read(100) == content(SIZE)[:100]
            file.truncate(0)
            file.seek(0)
            file.write(b"anew")
            file.truncate(0)  # and once more from the start
            file.seek(0)
            file.write(b"new")
        with path.open("xb") as file:
            pass

    with pytest.raises(FileExistsError):
        in_time(change)
    assert read_url(root, "x") == b"new"


def test_only_one_writes_a_file_at_a_time(mount: Served) -> None:
    path = mount.directory / "x"
    with path.open("wb") as file:
        file.write(b"one")
        file.flush()
        assert refusal(lambda: path.open("wb")) == errno.EBUSY
        assert refusal(lambda: path.read_bytes()) == errno.EBUSY
    assert in_time(path.read_bytes) == b"one"


def test_a_directory_checkpoint_in_it_stays_as_it_is(
    mount: Served, root: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "x").write_bytes(content(SIZE))
    put_into(store_of(root), "run", str(folder), settings=SMALL)
    run = mount.directory / "run"
    assert in_time((run / "x").read_bytes) == content(SIZE)
    for change in (
        lambda: (run / "x").unlink(),
        lambda: (run / "y").write_bytes(b"y"),
        lambda: (run / "x").rename(mount.directory / "x"),
        lambda: (run / "d").mkdir(),
        lambda: os.truncate(run / "x", 0),
    ):
        assert refusal(change) == errno.EROFS
    assert refusal(run.rmdir) == errno.ENOTEMPTY
    assert in_time((run / "x").read_bytes) == content(SIZE)
    in_time(lambda: run.rename(mount.directory / "renamed"))
    assert in_time((mount.directory / "renamed" / "x").read_bytes) == content(SIZE)


def test_a_full_store_is_told_by_write_or_close(tmp_path: Path) -> None:
    with (
        tmpfs(tmp_path / "small", "256k") as root,
        served(root, tmp_path / "mnt", writable=True, writing=WRITING) as mount,
    ):
        path = mount.directory / "x"
        in_time(lambda: path.write_bytes(content(SIZE)))
        assert refusal(lambda: path.write_bytes(content(1 << 20))) == errno.ENOSPC
        assert in_time(path.read_bytes) == content(SIZE)  # the old one is whole
        assert in_time(lambda: os.listdir(mount.directory)) == ["x"]


def test_what_was_being_written_when_the_server_died_is_not_published(
    mount: Served, root: Path
) -> None:
    path = mount.directory / "x"
    in_time(lambda: path.write_bytes(b"old"))
    file = path.open("wb", buffering=0)
    file.write(content(SIZE))
    (worker,) = mount.workers()
    os.kill(worker, signal.SIGKILL)
    assert refusal(lambda: file.write(b"more")) == errno.EIO
    assert refusal(file.close) == errno.EIO
    until(lambda: worker not in mount.workers())
    assert in_time(path.read_bytes) == b"old"
    in_time(lambda: path.write_bytes(content(SIZE)))
    assert read_url(root, "x") == content(SIZE)


def test_a_new_file_cannot_be_mapped_for_writing(mount: Served, root: Path) -> None:
    """It was killed by SIGBUS instead; a process of its own, for that."""
    (root / "old").write_bytes(content(5 << 20))
    said = output(
        # When Python's own mmap fails, some versions raise what closing its duplicate brought.
        "import ctypes, errno, mmap, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "shared = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED\n"
        "os.chdir(sys.argv[1])\n"
        "for name in ('new', 'old'):\n"
        "    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC * (name == 'new'))\n"
        "    if name == 'new': os.ftruncate(fd, 8192)\n"
        "    assert libc.mmap(None, ctypes.c_size_t(8192), *shared, fd, ctypes.c_long(0)) == -1\n"
        "    print(errno.errorcode[ctypes.get_errno()])\n"
        "    try: os.close(fd)\n"
        "    except OSError as error: print('close:', errno.errorcode[error.errno])\n"
        "with open('old', 'rb') as file:\n"
        "    with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:\n"
        "        print(memory[:] == file.read())\n",
        mount.directory,
    )
    assert said.split() == ["ENODEV", "close:", "EIO", "ENODEV", "True"]
    assert os.listdir(root) == ["old"]


def test_files_are_cut_short_and_announced(mount: Served, root: Path) -> None:
    path = mount.directory / "x"

    def check() -> None:
        for size in (SIZE, 100):
            path.write_bytes(content(size))
            os.truncate(path, 50)
            assert path.read_bytes() == content(size)[:50]
        path.write_bytes(content(SIZE))
        os.truncate(path, 2 * CHUNK + 1)
        with path.open("r+b") as file:
            assert os.fstat(file.fileno()).st_size == 2 * CHUNK + 1
            file.truncate(CHUNK)
        assert path.read_bytes() == content(SIZE)[:CHUNK]
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, SIZE)
            assert os.fstat(file.fileno()).st_size == SIZE
            file.write(content(SIZE))
            file.flush()
            with pytest.raises(OSError, match="Illegal seek"):
                os.posix_fallocate(file.fileno(), 0, SIZE + 1)  # and the file is none the worse
        assert path.read_bytes() == content(SIZE)

    in_time(check)
    assert read_url(root, "x") == content(SIZE)


def test_what_is_no_file_is_refused_and_long_names_are_told(mount: Served, root: Path) -> None:
    top = mount.directory
    assert refusal(lambda: os.mkfifo(top / "fifo")) == errno.EPERM
    assert refusal(lambda: os.mknod(top / "null", stat.S_IFCHR | 0o600)) == errno.EPERM
    in_time(lambda: os.mknod(top / "empty", stat.S_IFREG | 0o644))
    assert refusal(lambda: os.mknod(top / "empty")) == errno.EEXIST
    most = in_time(lambda: os.pathconf(top, "PC_NAME_MAX"))
    assert most == 247
    in_time(lambda: (top / ("n" * most)).write_bytes(b"long"))
    for length in range(most + 1, 257):
        name = top / ("n" * length)
        assert refusal(lambda name=name: name.write_bytes(b"")) == errno.ENAMETOOLONG
        assert refusal(lambda name=name: os.symlink("empty", name)) == errno.ENAMETOOLONG
    assert read_url(root, "n" * most) == b"long"
    assert sorted(os.listdir(root)) == ["empty", "n" * most]


def test_torch_saves_into_it(mount: Served, root: Path) -> None:
    import torch

    state = {"weights": torch.arange(50_000, dtype=torch.float32), "step": 4}
    in_time(lambda: torch.save(state, mount.directory / "model.pt"))
    with stripedfs.open(f"{root}/model.pt") as file:
        assert torch.equal(torch.load(file)["weights"], state["weights"])
    assert (root / "model.pt.stripes").is_dir()


def test_torch_saves_a_distributed_checkpoint_into_it(mount: Served) -> None:
    # A process of its own: torch's threads must not wait on a mount that this one ends.
    output(
        "import warnings; warnings.simplefilter('ignore')\n"
        "import torch, torch.distributed.checkpoint as dcp\n"
        "where = sys.argv[1] + '/step-10'\n"
        "state = {'weights': torch.arange(100_000, dtype=torch.float32)}\n"
        "dcp.save(state, checkpoint_id=where, no_dist=True)\n"
        "loaded = {'weights': torch.zeros(100_000)}\n"
        "dcp.load(loaded, checkpoint_id=where, no_dist=True)\n"
        "assert torch.equal(loaded['weights'], state['weights'])\n",
        mount.directory,
    )


def test_what_cannot_be_saved_into_is_refused(tmp_path: Path) -> None:
    store = store_of(tmp_path / "store")
    put_bytes(store, "file", content(SIZE), tmp_path)
    (tmp_path / "folder").mkdir()
    put_into(store, "tree", str(tmp_path / "folder"), settings=SMALL)
    (tmp_path / "mnt").mkdir()
    for name, said in (("file", "needs a folder"), ("tree", "never changes")):
        settings = MountSettings(
            url=f"{tmp_path}/store/{name}", mountpoint=f"{tmp_path}/mnt", writable=True
        )
        with pytest.raises(UsageError, match=said):
            mounting.mount(settings)
    done = stripe("mount", "--rw", "--fuse-backend", "fusepy", tmp_path / "store", tmp_path / "mnt")
    assert done.returncode == 2
    assert "read-only" in done.stderr


def test_a_copied_tree_is_the_same(mount: Served, root: Path, tmp_path: Path) -> None:
    source = tmp_path / "tree"
    for size in (0, 1, CHUNK - 1, CHUNK, WIDTH * CHUNK + 1):
        (source / "deep" / str(size)).mkdir(parents=True)
        (source / "deep" / str(size) / "x").write_bytes(content(size))
    in_time(lambda: shutil.copytree(source, mount.directory / "copy"))
    shell("diff -r copy ../tree", mount.directory)
