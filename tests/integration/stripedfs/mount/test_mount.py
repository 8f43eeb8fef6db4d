"""`bootseer stripe mount` and `umount`, as people use them."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.fuse.mount.mount_point import find_mount
from bootseer.fuse.operations import ROOT, FileSystemError
from bootseer.stripedfs.mount import read_tree as trees
from bootseer.stripedfs.write.put import put_into
from tests.support.mounts.checkpoints import (
    BOOTSEER,
    CHUNK,
    SMALL,
    WIDTH,
    content,
    put_bytes,
    served,
    store_of,
    stripe,
    tree_at,
)
from tests.support.mounts.fuse import end_mount, in_time, refusal
from tests.support.waiting import until

pytestmark = [pytest.mark.root, pytest.mark.slow]

SIZE = 8 * CHUNK + 55


def servers_of(directory: Path) -> list[int]:
    """Processes whose command line names a mount's directory."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid, words = int(entry.name), (entry / "cmdline").read_bytes().split(b"\0")
            if pid != os.getpid() and os.fsencode(directory) in words:
                found.append(pid)
    return found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with a striped file, a plain one, and a directory checkpoint."""
    store = store_of(tmp_path / "store")
    put_bytes(store, "ckpt.pt", content(SIZE), tmp_path)
    (tmp_path / "store" / "plain").write_bytes(content(SIZE, 1))
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "x").write_bytes(content(SIZE, 2))
    (folder / "deep" / "x").chmod(0o640)
    (folder / "empty").mkdir()
    (folder / "link").symlink_to("deep/x")
    put_into(store, "run", str(folder), settings=SMALL)
    return tmp_path / "store"


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """Where to mount; whatever is left there is unmounted, and its servers end."""
    path = tmp_path / "mnt"
    path.mkdir()
    yield path
    for _ in range(3):
        end_mount(path)
    for pid in servers_of(path):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def test_it_returns_once_the_mount_answers_and_umount_ends_it(root: Path, directory: Path) -> None:
    done = stripe("mount", root, directory)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert in_time(lambda: (directory / "ckpt.pt").read_bytes()) == content(SIZE)
    assert servers_of(directory)
    done = stripe("umount", directory)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(directory.iterdir()) == []
    until(lambda: not servers_of(directory))


def test_a_relative_path_and_directory_are_the_callers(root: Path, directory: Path) -> None:
    done = stripe("mount", "store", "mnt", cwd=root.parent)
    assert done.returncode == 0, done.stderr
    assert in_time(lambda: (directory / "plain").read_bytes()) == content(SIZE, 1)


@pytest.mark.parametrize(
    ("url", "place", "code", "said"),
    [
        ("none", "mnt", 3, "none"),
        ("store", "none", 3, "none"),
        ("store", "file", 2, "no directory"),
        ("s3://bucket/x", "mnt", 7, "s3"),
    ],
)
def test_what_cannot_be_mounted_is_said_in_one_line(
    root: Path, directory: Path, url: str, place: str, code: int, said: str
) -> None:
    (root.parent / "file").touch()
    done = stripe("mount", url, place, cwd=root.parent)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("bootseer: ")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr
    assert find_mount(str(directory)) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["store", "store"], "would hide the store"),
        (["file://{}/store", "link"], "would hide the store"),
        (["store/ckpt.pt", "store/ckpt.pt.stripes"], "would hide the store"),
        (["store/plain", "store"], "would hide the store"),
        (["store", "."], "would hide the store"),
        (["mnt/far/ckpt.pt", "mnt"], "would hide the store"),
        (["link/ckpt.pt", "."], "would hide the store"),
        (["--cache", "mnt", "store", "mnt"], "would hide the cache"),
        (["--cache", "mnt/deep/cache", "store", "mnt"], "would hide the cache"),
    ],
)
@pytest.mark.parametrize("more", [[], ["--foreground"]])
def test_a_mount_over_what_its_server_reads_is_refused(
    root: Path, directory: Path, words: list[str], said: str, more: list[str]
) -> None:
    (root.parent / "link").symlink_to("store")
    (directory / "far").symlink_to("../store")
    words = [word.format(root.parent) for word in words]
    try:
        done = stripe("mount", *more, *words, cwd=root.parent)
    finally:
        for place in (root, root / "ckpt.pt.stripes", root.parent):
            end_mount(place)
    assert (done.returncode, done.stdout) == (2, "")
    assert (done.stderr.count("\n"), done.stderr.count(said)) == (1, 1)
    assert (root / "plain").read_bytes() == content(SIZE, 1)


def test_a_link_to_the_directory_is_the_directory(root: Path, directory: Path) -> None:
    link, chain = root.parent / "link", root.parent / "chain"
    link.symlink_to("mnt")
    chain.symlink_to("./link/")
    assert stripe("mount", root, chain).returncode == 0
    found = find_mount(str(link))
    assert found is not None
    assert found.target == str(directory)
    for name in (directory, link, chain):
        done = stripe("mount", root, name)
        assert done.returncode == 9, done.stderr
    done = stripe("umount", link)
    assert (done.returncode, done.stderr) == (0, "")
    assert find_mount(str(directory)) is None


def test_a_damaged_checkpoint_is_refused_before_it_is_mounted(root: Path, directory: Path) -> None:
    next((root / "ckpt.pt.stripes").glob("v-*/stripe-00001")).unlink()
    done = stripe("mount", root / "ckpt.pt", directory)
    assert done.returncode == 6
    assert "stripe-00001" in done.stderr
    assert find_mount(str(directory)) is None


def test_a_second_mount_is_refused(root: Path, directory: Path) -> None:
    assert stripe("mount", root, directory).returncode == 0
    done = stripe("mount", root, directory)
    assert done.returncode == 9
    assert "mounted already" in done.stderr
    assert in_time(lambda: (directory / "plain").read_bytes()) == content(SIZE, 1)


@pytest.mark.parametrize("name", ["mnt", "link"])
def test_a_stale_mount_of_a_crash_is_replaced(root: Path, directory: Path, name: str) -> None:
    (root.parent / "link").symlink_to("mnt")
    assert stripe("mount", root, directory).returncode == 0
    for pid in servers_of(directory):  # the supervisor first, so that nobody tidies up
        os.kill(pid, signal.SIGSTOP)
    for pid in servers_of(directory):
        os.kill(pid, signal.SIGKILL)
    until(lambda: not servers_of(directory))
    assert refusal(lambda: os.listdir(directory)) in (errno.ENOTCONN, errno.ECONNABORTED)
    done = stripe("mount", root, root.parent / name)
    assert done.returncode == 0, done.stderr
    assert in_time(lambda: (directory / "plain").read_bytes()) == content(SIZE, 1)
    assert stripe("umount", root.parent / name).returncode == 0
    assert find_mount(str(directory)) is None


def test_a_busy_mount_says_who_and_goes_lazily(root: Path, directory: Path) -> None:
    assert stripe("mount", root, directory).returncode == 0
    with (directory / "ckpt.pt").open("rb", buffering=0) as file:
        assert file.read(10) == content(SIZE)[:10]
        done = stripe("umount", directory)
        assert done.returncode == 9
        assert "--lazy" in done.stderr
        assert f"(process {os.getpid()})" in done.stderr
        assert stripe("umount", "--lazy", directory).returncode == 0
        assert list(directory.iterdir()) == []
        assert in_time(file.read) == content(SIZE)[10:]
        assert servers_of(directory)
    until(lambda: not servers_of(directory))


@pytest.mark.parametrize("given", ["nothing", "other"])
def test_umount_touches_no_mount_but_ours(directory: Path, given: str) -> None:
    if given == "other":
        subprocess.run(["mount", "-t", "tmpfs", "none", directory], check=True)
        done = stripe("umount", directory)
        assert done.returncode == 2
        assert "tmpfs" in done.stderr
        assert find_mount(str(directory)) is not None
    else:
        done = stripe("umount", directory)
        assert done.returncode == 3
        assert "nothing is mounted" in done.stderr


def test_it_ends_with_the_process_it_was_made_for(root: Path, directory: Path) -> None:
    with subprocess.Popen(["sleep", "300"]) as job:
        try:
            done = stripe("mount", "--for-pid", job.pid, root, directory)
            assert done.returncode == 0, done.stderr
            assert in_time(lambda: os.listdir(directory))
        finally:
            job.kill()
    until(lambda: find_mount(str(directory)) is None)
    until(lambda: not servers_of(directory))
    assert stripe("mount", "--for-pid", job.pid, root, directory).returncode == 2


def test_no_device_names_the_other_faces(root: Path, directory: Path) -> None:
    hidden = "mount -t tmpfs none /dev && mknod /dev/null c 1 3 && mknod /dev/urandom c 1 9"
    hidden += f" && exec {' '.join(BOOTSEER)} mount {root} {directory}"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", hidden], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 7
    assert all(word in done.stderr for word in ("/dev/fuse", "stripe get", "striped::", "open"))


@pytest.mark.parametrize("backend", ["own", "fusepy"])
def test_both_servers_show_the_same_tree(root: Path, directory: Path, backend: str) -> None:
    done = stripe("mount", "--fuse-backend", backend, root, directory)
    assert done.returncode == 0, done.stderr

    def look() -> None:
        names = sorted(os.path.relpath(path, directory) for path in directory.rglob("*"))
        assert names == [
            "ckpt.pt",
            "plain",
            "run",
            "run/deep",
            "run/deep/x",
            "run/empty",
            "run/link",
        ]
        assert (directory / "ckpt.pt").read_bytes() == content(SIZE)
        assert (directory / "run" / "link").read_bytes() == content(SIZE, 2)
        assert os.readlink(directory / "run" / "link") == "deep/x"
        found = (directory / "run" / "deep" / "x").stat()
        assert stat.S_IMODE(found.st_mode) == 0o440
        assert found.st_size == SIZE
        assert found.st_uid == os.getuid()
        assert refusal(lambda: (directory / "ckpt.pt").open("r+b")) == errno.EROFS
        with pytest.raises(FileNotFoundError):
            (directory / "none").stat()
        assert os.getxattr(directory / "ckpt.pt", "user.bootseer.width") == str(WIDTH).encode()

    in_time(look)


def test_extended_attributes_say_what_a_file_is(root: Path, directory: Path) -> None:
    with served(root, directory):

        def attributes(name: str) -> dict[str, bytes]:
            path = directory / name
            return {key: os.getxattr(path, key) for key in os.listxattr(path)}

        striped = in_time(lambda: attributes("ckpt.pt"))
        assert striped["user.bootseer.url"] == f"file://{root}/ckpt.pt".encode()
        assert striped["user.bootseer.chunk"] == str(CHUNK).encode()
        assert striped["user.bootseer.digest"].startswith(b"xxh3-128-")
        plain = in_time(lambda: attributes("plain"))
        assert sorted(plain) == ["user.bootseer.url"]
        asked = lambda: os.getxattr(directory / "plain", "user.other")  # noqa: E731
        assert refusal(asked) == errno.ENODATA
        total = in_time(lambda: os.statvfs(directory))
        assert total.f_bavail == 0


@pytest.mark.parametrize(
    ("name", "inside"),
    [("ckpt.pt", {"ckpt.pt": 0}), ("plain", {"plain": 1}), ("run/deep", {"x": 2})],
)
def test_a_file_or_a_part_of_a_tree_can_be_mounted(
    root: Path, directory: Path, name: str, inside: dict[str, int]
) -> None:
    with served(root / name, directory):
        assert in_time(lambda: sorted(os.listdir(directory))) == sorted(inside)
        for base, seed in inside.items():
            assert in_time(lambda base=base: (directory / base).read_bytes()) == content(SIZE, seed)


def test_torch_loads_from_the_mount(root: Path, directory: Path, tmp_path: Path) -> None:
    import torch

    state = {"weights": torch.arange(200_000, dtype=torch.float32), "step": 3}
    torch.save(state, tmp_path / "model.pt")
    put_bytes(store_of(root), "model.pt", (tmp_path / "model.pt").read_bytes(), tmp_path)
    for direct_bytes in (0, 1 << 62):
        with served(root, directory, direct_bytes=direct_bytes):
            for mapped in (False, True):
                loaded = in_time(
                    lambda mapped=mapped: torch.load(directory / "model.pt", mmap=mapped)
                )
                assert torch.equal(loaded["weights"], state["weights"])
            del loaded


# --- the tree itself, without a mount ----------------------------------------------------------


def test_inodes_are_the_same_in_another_process(root: Path) -> None:
    def look(tree: trees.StripedTree) -> dict[str, int]:
        found, waiting = {}, [(ROOT, "")]
        while waiting:
            inode, path = waiting.pop()
            for entry in tree.readdir(inode):
                name = f"{path}/{os.fsdecode(entry.name)}"
                found[name] = entry.attr.inode
                if stat.S_ISDIR(entry.attr.mode):
                    waiting.append((entry.attr.inode, name))
        return found

    with Fetcher() as fetcher:
        first = look(tree_at(trees.StripedTree, store_of(root), "", fetcher))
        assert first == look(tree_at(trees.StripedTree, store_of(root), "", fetcher))
        # One that has looked at nothing yet finds what another one told the kernel.
        fresh = tree_at(trees.StripedTree, store_of(root), "", fetcher)
        assert fresh.getattr(first["/run/deep/x"]).size_bytes == SIZE  # type: ignore[arg-type]
        with pytest.raises(FileSystemError) as caught:
            fresh.getattr(12345)  # type: ignore[arg-type]
        assert caught.value.errno == errno.ESTALE


def test_what_others_put_or_remove_is_seen_after_a_while(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Fetcher() as fetcher:
        tree = tree_at(trees.StripedTree, store_of(root), "", fetcher)
        before = tree.lookup(ROOT, b"ckpt.pt")
        put_bytes(store_of(root), "new", b"", tmp_path)
        put_bytes(store_of(root), "ckpt.pt", content(SIZE + 1), tmp_path)
        (root / "plain").unlink()
        assert [e.name for e in tree.readdir(ROOT)] == [b"ckpt.pt", b"plain", b"run"]
        monkeypatch.setattr(trees, "REFRESH_S", -1.0)
        assert [e.name for e in tree.readdir(ROOT)] == [b"ckpt.pt", b"new", b"run"]
        after = tree.lookup(ROOT, b"ckpt.pt")
        assert after.size_bytes == SIZE + 1
        assert after.inode != before.inode  # with pages of its own


def test_a_handle_of_replaced_bytes_is_stale_in_another_process(root: Path, tmp_path: Path) -> None:
    answers: list[object] = []

    class Later:
        interrupted = False

        def data(self, data: object) -> None:
            answers.append(data)

        def error(self, number: int) -> None:
            answers.append(number)

    with Fetcher() as fetcher:
        first = tree_at(trees.StripedTree, store_of(root), "", fetcher)
        inode = first.lookup(ROOT, b"ckpt.pt").inode
        handle = first.open(inode, os.O_RDONLY).handle
        second = tree_at(trees.StripedTree, store_of(root), "", fetcher)
        assert second.read(inode, handle, 5, 7, Later) is None
        until(lambda: answers)
        assert b"".join(answers.pop().views) == content(SIZE)[5:12]  # type: ignore[attr-defined]
        put_bytes(store_of(root), "ckpt.pt", content(SIZE, 9), tmp_path)
        third = tree_at(trees.StripedTree, store_of(root), "", fetcher)
        assert third.read(inode, handle, 5, 7, Later) is None
        until(lambda: answers)
        assert answers == [errno.ESTALE]
        for tree in (first, second, third):
            tree.destroy()
