"""A distributed checkpoint saved over an earlier one through a `--rw` mount: the old or the new."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer import stripedfs
from bootseer.stripedfs.write.gc import collect_garbage
from tests.support import page_cache
from tests.support.mounts.checkpoints import CHUNK, WIDTH, Served, content, served, store_of, stripe
from tests.support.mounts.fuse import in_time, output, refusal
from tests.support.paths import TESTS

pytestmark = [pytest.mark.root, pytest.mark.slow]

SIZE = 8 * CHUNK + 55
WRITING = {"width": WIDTH, "chunk_bytes": CHUNK}
RANKS = ("__0_0.distcp", "__1_0.distcp")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def mount(root: Path, tmp_path: Path) -> Iterator[Served]:
    with served(root, tmp_path / "mnt", writable=True, writing=WRITING) as mount:
        yield mount


def save_rank(folder: Path, rank: int, step: int) -> None:
    (folder / RANKS[rank]).write_bytes(content(SIZE if rank else 100, step * 10 + rank))


def save_metadata(folder: Path, step: int, ranks: tuple[str, ...] = RANKS) -> None:
    """As torch does it, which removes the one of before first."""
    (folder / ".metadata.tmp").write_bytes(b"step %d\0%s" % (step, "\0".join(ranks).encode()))
    (folder / ".metadata").unlink(missing_ok=True)
    (folder / ".metadata.tmp").rename(folder / ".metadata")


def save(folder: Path, step: int) -> None:
    folder.mkdir(exist_ok=True)
    for rank in range(len(RANKS)):
        save_rank(folder, rank, step)
    save_metadata(folder, step)


def step_of(folder: Path) -> int:
    """Which save a folder holds; fails where it holds parts of two."""
    step = int((folder / ".metadata").read_bytes().split(b"\0")[0].split()[1])
    for rank, name in enumerate(RANKS):
        assert (folder / name).read_bytes() == content(SIZE if rank else 100, step * 10 + rank)
    return step


def step_by_name(root: Path) -> int:
    """As `step_of`, by the names that fsspec and Python's users have."""
    with stripedfs.open(f"{root}/run/.metadata") as file:
        step = int(file.read().split(b"\0")[0].split()[1])
    for rank, name in enumerate(RANKS):
        with stripedfs.open(f"{root}/run/{name}") as file:
            assert file.read() == content(SIZE if rank else 100, step * 10 + rank)
    return step


def test_each_save_over_another_appears_at_once(mount: Served, root: Path, tmp_path: Path) -> None:
    run = mount.directory / "run"
    in_time(lambda: save(run, 1))
    in_time(lambda: (run / "meta.pt").write_bytes(b"mine"))
    for step in (2, 3):
        with served(root, tmp_path / "other") as other:
            for rank in range(len(RANKS)):
                in_time(lambda step=step, rank=rank: save_rank(run, rank, step))
                assert in_time(lambda: step_of(run)) == step - 1
                assert in_time(lambda: step_of(other.directory / "run")) == step - 1
                assert step_by_name(root) == step - 1
        in_time(lambda step=step: save_metadata(run, step))
        assert in_time(lambda: step_of(run)) == step
        assert step_by_name(root) == step
        with served(root, tmp_path / "other") as other:
            assert in_time(lambda: step_of(other.directory / "run")) == step
            assert in_time((other.directory / "run/meta.pt").read_bytes) == b"mine"
        in_time(lambda step=step: (run / "meta.pt").write_bytes(b"mine"))  # Lightning's way
        assert in_time(lambda: sorted(os.listdir(run))) == [".metadata", *RANKS, "meta.pt"]
    listed = json.loads(stripe("ls", "--json", root / "run").stdout)
    assert [e["name"].rpartition("/")[2] for e in listed] == [".metadata", *RANKS, "meta.pt"]
    assert sorted(os.listdir(root / "run")) == ["meta.pt"]
    got = stripe("get", root / "run", tmp_path / "got")
    assert got.returncode == 7
    assert "also holds run/meta.pt" in got.stderr
    in_time((run / "meta.pt").unlink)
    assert stripe("get", root / "run", tmp_path / "got").returncode == 0
    assert step_of(tmp_path / "got") == 3
    assert (
        len(list(collect_garbage(store_of(root), "run", grace_s=0))) == 1
    )  # the version of step 2
    assert in_time(lambda: step_of(run)) == 3


def test_such_a_folder_is_renamed_and_removed_as_any_other(mount: Served, root: Path) -> None:
    run, moved = mount.directory / "run", mount.directory / "moved"

    def check() -> None:
        for step in (1, 2):
            save(run, step)
        (run / "sub").mkdir()
        (run / "sub/x").write_bytes(b"x")
        run.rename(moved)
        assert step_of(moved) == 2
        assert (moved / "sub/x").read_bytes() == b"x"
        save_rank(moved, 0, 3)  # and what waits for its .metadata goes with it
        shutil.rmtree(moved)

    in_time(check)
    assert os.listdir(root) == []
    in_time(lambda: save(run, 1))
    in_time(lambda: save_rank(run, 0, 2))
    in_time(lambda: shutil.rmtree(run))
    assert os.listdir(root) == []


def test_a_folder_renamed_at_the_end_appears_whole(mount: Served, root: Path) -> None:
    top = mount.directory
    in_time(lambda: save(top / "run", 1))
    for step in (2, 3):
        in_time(lambda step=step: save(top / "run.tmp", step))
        assert step_by_name(root) == step - 1
        in_time(lambda: (top / "run").rename(top / "run.old"))
        in_time(lambda: (top / "run.tmp").rename(top / "run"))
        assert in_time(lambda: step_of(top / "run")) == step_by_name(root) == step
        in_time(lambda: shutil.rmtree(top / "run.old"))
    assert os.listdir(root) == ["run"]


def test_parts_of_it_change_only_with_the_whole(mount: Served) -> None:
    run = mount.directory / "run"
    for step in (1, 2):
        in_time(lambda step=step: save(run, step))
    other = mount.directory / "other"
    in_time(lambda: other.write_bytes(b"x"))
    assert refusal(lambda: other.rename(run / RANKS[0])) == errno.EROFS
    assert refusal(lambda: (run / RANKS[0]).open("ab").write(b"x")) == errno.EROFS
    assert refusal(lambda: (run / RANKS[0]).rename(run / "x")) == errno.EROFS
    in_time((run / RANKS[0]).unlink)
    assert in_time((run / RANKS[0]).exists) is False
    in_time(lambda: save(run, 3))
    assert in_time(lambda: step_of(run)) == 3


@pytest.mark.parametrize("place", range(3))
def test_a_checkpoint_copied_over_another_appears_with_its_last_file(
    mount: Served, root: Path, place: int
) -> None:
    run = mount.directory / "run"
    in_time(lambda: save(run, 1))
    order = list(RANKS)
    order.insert(place, ".metadata")
    for step in (2, 3):  # over files that were published one by one, and over a whole directory
        for name in order:
            assert in_time(lambda: step_of(run)) == step - 1
            assert step_by_name(root) == step - 1
            if name == ".metadata":
                text = b"step %d\0%s" % (step, "\0".join(RANKS).encode())
                in_time(lambda text=text: (run / ".metadata").write_bytes(text))
            else:
                rank = RANKS.index(name)
                in_time(lambda rank=rank, step=step: save_rank(run, rank, step))
        assert in_time(lambda: step_of(run)) == step
        assert step_by_name(root) == step


def test_a_copy_that_was_cut_short_is_no_part_of_a_later_save(mount: Served, root: Path) -> None:
    run = mount.directory / "run"
    in_time(lambda: save(run, 1))
    output(
        "import pathlib, sys\n"
        "pathlib.Path(sys.argv[1], '.metadata').write_bytes(b'step 9\\0' + sys.argv[2].encode())\n",
        run,
        " ".join(RANKS),
    )
    for rank in range(len(RANKS)):
        in_time(lambda rank=rank: save_rank(run, rank, 2))
        assert in_time(lambda: step_of(run)) == 1
    in_time(lambda: save_metadata(run, 2))
    assert in_time(lambda: step_of(run)) == step_by_name(root) == 2


def test_a_file_that_is_only_called_as_dcps_is_an_ordinary_one(mount: Served, root: Path) -> None:
    def check() -> None:
        for text in (b"one", b"two"):
            (mount.directory / "x").mkdir(exist_ok=True)
            (mount.directory / "x/.metadata.tmp").write_bytes(text)
            (mount.directory / "x/.metadata.tmp").rename(mount.directory / "x/.metadata")
            assert (mount.directory / "x/.metadata").read_bytes() == text
            (mount.directory / "x/.metadata").write_bytes(text)

    in_time(check)
    assert os.listdir(root) == ["x"]
    assert os.listdir(root / "x") == [".metadata"]


def test_ranks_save_through_mounts_of_their_own(root: Path, tmp_path: Path) -> None:
    with (
        served(root, tmp_path / "a", writable=True, writing=WRITING) as a,
        served(root, tmp_path / "b", writable=True, writing=WRITING) as b,
    ):
        in_time(lambda: save(a.directory / "run", 1))
        for step in (2, 3):
            for rank, mount in enumerate((a, b)):
                in_time(lambda s=step, r=rank, m=mount: save_rank(m.directory / "run", r, s))
            assert step_by_name(root) == step - 1
            in_time(lambda step=step: save_metadata(a.directory / "run", step))
            assert in_time(lambda: step_of(a.directory / "run")) == step
            assert step_by_name(root) == step
        in_time(lambda: save_rank(b.directory / "run", 1, 9))  # its saver was killed then
    assert "no .metadata came" in b.said
    with served(root, tmp_path / "a", writable=True, writing=WRITING) as a:
        assert in_time(lambda: step_of(a.directory / "run")) == 3


def test_metadata_that_names_what_nobody_saved_publishes_nothing(mount: Served, root: Path) -> None:
    run = mount.directory / "run"
    in_time(lambda: save(run, 1))
    in_time(lambda: save_rank(run, 0, 2))
    assert refusal(lambda: save_metadata(run, 2)) == errno.EIO
    assert f"names {RANKS[1]}, which nobody has saved" in mount.said
    assert in_time(lambda: step_of(run)) == 1
    in_time(lambda: save(run, 2))
    assert in_time(lambda: step_of(run)) == 2


def test_what_the_kernel_forgets_of_a_save_that_is_not_published_is_found_again(
    mount: Served, root: Path
) -> None:
    run = mount.directory / "run"
    in_time(lambda: save(run, 1))
    for step in (2, 3):
        in_time(lambda step=step: save_rank(run, 0, step))
        in_time(lambda: (run / ".metadata.tmp").write_bytes(b"its saver was killed"))
        page_cache.drop(page_cache.INODES)
        assert in_time((run / ".metadata.tmp").stat).st_size == len(b"its saver was killed")
    in_time(lambda: save(run, 4))
    assert in_time(lambda: step_of(run)) == step_by_name(root) == 4


CRASHING = TESTS / "support/programs/dcp_save_killer.py"


def crashed(*words: object) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, CRASHING, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=540,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_save_by_torch_killed_at_each_step_leaves_the_old_or_the_new(
    mount: Served, root: Path
) -> None:
    found = crashed("ranks", root, mount.directory)
    assert found["kills"] == found["old"] + found["new"] == 16  # each was seen to strike
    assert found["new"] == 1  # after the rename
    assert found["whole"] == 2


def test_a_mount_killed_at_each_step_of_such_a_save_leaves_the_old_or_the_new(
    tmp_path: Path,
) -> None:
    found = crashed("server", tmp_path / "store")
    assert found["kills"] == found["old"] + found["new"] >= 40
    assert found["old"] >= 30
    assert found["new"] >= 3
