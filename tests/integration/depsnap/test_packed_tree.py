"""The node-shared tree as two files: the same tree through an overlay; any change is found."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bootseer.depsnap.shared_tree import cache as treecache
from bootseer.depsnap.shared_tree import forms, packed_mount, placement_records
from bootseer.depsnap.types import ArchiveInfo, SharedTree
from bootseer.errors import CorruptDataError, NotSupportedError
from bootseer.system import mount_calls
from bootseer.system.mountinfo import is_mounted
from tests.support.page_cache import share_in_memory
from tests.support.trees.snapshots import describe, leftovers, pack, rich, write
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.root]


class Packed:
    """A captured tree with its archive and a cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = rich(folder / "r")
        self.archive = folder / "a"
        self.info: ArchiveInfo = pack(self.root, self.archive)
        self.cache = str(folder / "cache")
        self.target = folder / "in/t"
        (folder / "in").mkdir()

    def ensure(self) -> SharedTree:
        return treecache.ensure(self.cache, str(self.archive), self.info.index_digest, packed=True)

    def find(self) -> SharedTree | None:
        return treecache.find(self.cache, self.info.index_digest, packed=True)

    def place(self) -> None:
        (placed,) = forms.place(self.ensure(), {str(self.root): str(self.target)})
        assert placed.form == "overlay"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Packed]:
    made = Packed(tmp_path)
    yield made
    forms.unplace(str(made.target), made.cache)
    assert str(tmp_path) not in Path("/proc/mounts").read_text()


def _without_links(described: dict[str, tuple]) -> dict[str, tuple]:
    """Overlayfs cannot show that lower files are links of each other."""
    return {
        path: tuple(part for part in what if not _is_paths(part))
        for path, what in described.items()
    }


def _is_paths(part: object) -> bool:
    return isinstance(part, tuple) and all(isinstance(path, str) for path in part)


def _shown(node: Packed) -> dict[str, tuple]:
    return _without_links(describe(node.target))


def test_an_overlay_shows_all_of_it_and_nothing_else_stays_mounted(node: Packed) -> None:
    made = node.ensure()
    assert made.packed
    assert made.fresh
    assert sorted(os.listdir(made.path)) == ["data", "meta", "tree.json"]
    node.place()
    assert _shown(node) == _without_links(describe(node.root))
    own = [
        line for line in Path("/proc/mounts").read_text().splitlines() if str(node.folder) in line
    ]
    assert [line.split()[1] for line in own] == [str(node.target)]
    assert leftovers(node.folder) == []


def test_made_once_then_found_without_the_archive(node: Packed) -> None:
    first = node.ensure()
    node.archive.unlink()
    again = node.ensure()
    assert (again.path, again.fresh) == (first.path, False)
    node.place()
    assert _shown(node) == _without_links(describe(node.root))


def test_a_process_with_threads_packs_the_same(node: Packed) -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        node.place()
    finally:
        ended.set()
        thread.join()
    assert _shown(node) == _without_links(describe(node.root))


def test_files_of_every_size_around_a_block_and_a_unit(tmp_path: Path) -> None:
    root = tmp_path / "r"
    for size in (0, 1, 4095, 4096, 4097, 8192, (4 << 20) - 1, 4 << 20, (4 << 20) + 1, 9_000_001):
        write(root / f"f{size}", os.urandom(size))
    info = pack(root, tmp_path / "a")
    cache, target = str(tmp_path / "cache"), tmp_path / "t"
    made = treecache.ensure(cache, str(tmp_path / "a"), info.index_digest, packed=True)
    forms.place(made, {str(root): str(target)})
    try:
        assert describe(target) == describe(root)
    finally:
        forms.unplace(str(target), cache)


def test_writes_stay_private_and_the_tree_is_found_again(node: Packed) -> None:
    node.place()
    write(node.target / "lib/a.py", "x = 'mine'\n")
    (node.target / "bin/empty").unlink()
    os.rename(node.target / "lib/b.so", node.target / "lib/c.so")
    forms.unplace(str(node.target), node.cache)
    assert node.find() is not None
    node.place()
    assert _shown(node) == _without_links(describe(node.root))


def test_what_stands_there_already_stays_below(node: Packed) -> None:
    write(node.target / "mine/file", "mine")
    node.place()
    assert (node.target / "mine/file").read_text() == "mine"
    assert (node.target / "lib/a.py").read_text() == "x = 1\n"


def _write_in_place(path: Path) -> None:
    """As quietly as a program can: same length, same mtime."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(before.st_size // 2)
        file.write(b"\xa5")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _replace(path: Path) -> None:
    before = path.stat()
    copy = path.with_suffix(".copy")
    copy.write_bytes(path.read_bytes())
    copy.chmod(before.st_mode & 0o7777)
    os.utime(copy, ns=(before.st_atime_ns, before.st_mtime_ns))
    copy.replace(path)


@pytest.mark.parametrize("name", ["data", "meta"])
@pytest.mark.parametrize("change", [_write_in_place, _replace, lambda p: p.chmod(0o666), os.unlink])
def test_a_changed_tree_is_never_placed(
    node: Packed, name: str, change: Callable[[Path], None]
) -> None:
    made = node.ensure()
    time.sleep(0.02)  # a kernel's clock for ctimes ticks every 1 to 10 ms
    change(Path(made.path) / name)
    assert node.find() is None
    node.place()
    assert _shown(node) == _without_links(describe(node.root))


def test_a_tree_of_another_boot_is_not_trusted(
    node: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.ensure()
    monkeypatch.setattr(treecache, "boot_id", lambda: "another")
    assert node.find() is None


def test_a_corrupt_archive_leaves_no_tree(node: Packed) -> None:
    data = bytearray(node.archive.read_bytes())
    data[5000] ^= 1
    node.archive.write_bytes(data)
    with pytest.raises(CorruptDataError):
        node.ensure()
    assert node.find() is None
    names = os.listdir(Path(node.cache) / "trees")
    assert [name for name in names if not name.endswith(".lock")] == []


def test_killed_while_unpacking_it_is_unpacked_again(node: Packed) -> None:
    code = (
        "import os, signal, sys; from bootseer.depsnap.shared_tree import cache as treecache\n"
        "def step(name):\n    if name == sys.argv[4]: os.kill(os.getpid(), signal.SIGKILL)\n"
        "treecache.ensure(*sys.argv[1:4], on_step=step, packed=True)"
    )
    for moment in ("made", "unpacked", "fingerprinted"):
        arguments = [node.cache, str(node.archive), node.info.index_digest, moment]
        done = subprocess.run([sys.executable, "-c", code, *arguments], check=False)
        assert done.returncode == -9
        assert node.find() is None
    node.place()
    assert _shown(node) == _without_links(describe(node.root))


def test_killed_between_its_two_mounts_the_next_start_clears_and_places(node: Packed) -> None:
    """Fault injection: the process is killed while the packed tree is mounted for the overlay."""
    code = (
        "import os, signal, sys\n"
        "from bootseer.depsnap.shared_tree import cache as treecache, forms\n"
        "forms._overlay_over = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "made = treecache.ensure(*sys.argv[1:4], packed=True)\n"
        "forms.place(made, {sys.argv[4]: sys.argv[5]})"
    )
    arguments = [node.cache, str(node.archive), node.info.index_digest, node.root, node.target]
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], check=False)
    assert done.returncode == -9
    (record,) = placement_records.all_records(node.cache)
    assert is_mounted(os.path.join(record.folder, placement_records.IMAGE))
    node.place()
    assert not is_mounted(os.path.join(record.folder, placement_records.IMAGE))
    assert _shown(node) == _without_links(describe(node.root))


def test_a_killed_trial_is_cleared_by_the_next(node: Packed, tmp_path: Path) -> None:
    """Fault injection: killed right after its mounts, when it would look at them."""
    folder = tmp_path / "cache/trees"
    folder.mkdir(parents=True)
    code = (
        "import os, signal, sys\n"
        "from bootseer.depsnap.shared_tree import packed_mount as packed\n"
        "packed._clear = lambda _: os.kill(os.getpid(), signal.SIGKILL)\n"
        "packed.works_in(sys.argv[1])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], check=False)
    assert done.returncode == -9
    (left,) = folder.iterdir()
    assert is_mounted(str(left / "shown"))
    assert packed_mount.works_in(str(folder))
    assert list(folder.iterdir()) == []


def test_a_trial_of_another_container_is_left_alone(tmp_path: Path) -> None:
    """Two containers share a node's cache, and neither sees the other's processes."""
    folder = tmp_path / "trees"
    folder.mkdir()
    code = (
        "import sys\n"
        "from bootseer.depsnap.shared_tree import packed_mount as packed\n"
        "real = packed.mount\n"
        "def late(*words):\n"
        "    real(*words); print('mounted', flush=True); sys.stdin.readline()\n"
        "packed.mount = late\n"
        "print(packed.works_in(sys.argv[1]), flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "mounted\n"
        look = "import sys; from bootseer.depsnap.shared_tree import packed_mount as packed\n" + (
            "sys.exit(not packed.works_in(sys.argv[1]))"
        )
        apart = ["unshare", "--pid", "--fork", "--mount-proc"]
        subprocess.run([*apart, sys.executable, "-c", look, str(folder)], check=True)
        other.stdin.write("\n")
        other.stdin.flush()
        assert other.stdout.readline() == "True\n"
    assert list(folder.iterdir()) == []


def test_where_it_cannot_be_mounted_the_tree_is_files(
    node: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault injection: a kernel that refuses EROFS over plain files, as before Linux 6.12."""

    def refuse(_folder: str, target: str) -> None:
        raise OSError(15, "Block device required", target)

    monkeypatch.setattr(packed_mount, "mount", refuse)
    made = node.ensure()
    assert not made.packed
    assert describe(made.roots[str(node.root)]) == describe(node.root)


def test_a_tree_of_files_that_is_there_serves_as_well(node: Packed) -> None:
    files = treecache.ensure(node.cache, str(node.archive), node.info.index_digest)
    made = node.ensure()
    assert (made.path, made.packed, made.fresh) == (files.path, False, False)


def test_it_has_no_other_form_than_the_overlay(node: Packed) -> None:
    made = node.ensure()
    for form in ("bind", "symlink", "hardlink", "reflink", "copy"):
        with pytest.raises(NotSupportedError):
            forms.place(made, {str(node.root): str(node.target)}, form=form)  # type: ignore[arg-type]
    assert not node.target.exists()


def test_mostly_holes_stay_files(tmp_path: Path) -> None:
    root = tmp_path / "r"
    root.mkdir()
    with (root / "hole").open("wb") as file:
        file.truncate(3 << 30)
    info = pack(root, tmp_path / "a")
    with pytest.raises(NotSupportedError, match="mostly holes"):
        treecache.ensure(str(tmp_path / "c"), str(tmp_path / "a"), info.index_digest, packed=True)
    assert treecache.list_trees(str(tmp_path / "c")) == ()


def test_it_is_listed_and_collected_like_any_tree(node: Packed) -> None:
    made = node.ensure()
    (status,) = treecache.list_trees(node.cache)
    assert (status.digest, status.packed, status.in_use) == (made.digest, True, False)
    node.place()
    assert treecache.list_trees(node.cache)[0].in_use
    forms.unplace(str(node.target), node.cache)
    assert treecache.discard(node.cache, made.digest, packed=True) == made.size
    assert treecache.list_trees(node.cache) == ()
    assert not Path(made.path).exists()


def _cold_tree(folder: Path, name: str) -> SharedTree:
    """A tree with much metadata, none of which is in memory."""
    root = folder / name
    root.mkdir()
    for number in range(3000):
        (root / f"{number:04} {'n' * 200}").touch()
    archive = folder / f"{name}.archive"
    info = pack(root, archive)
    made = treecache.ensure(str(folder / "cache"), str(archive), info.index_digest, packed=True)
    with _meta(made).open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert share_in_memory(_meta(made)) < 0.1
    return made


def _meta(made: SharedTree) -> Path:
    return Path(made.path) / "meta"


@pytest.mark.usefixtures("page_cache_stays")
def test_the_metadata_of_the_tree_used_last_is_read_before_its_name_is_known(
    tmp_path: Path,
) -> None:
    cache = tmp_path / "cache"
    treecache.read_ahead_newest(str(cache))  # there is none
    used, other = (_cold_tree(tmp_path, name) for name in ("used", "other"))
    os.utime(Path(other.path) / "tree.json", ns=(1, 1))
    half_made = cache / "trees" / ("0" * 64 + ".packed")
    half_made.mkdir()
    treecache.read_ahead_newest(str(cache))
    until(lambda: share_in_memory(_meta(used)) == 1, "the metadata in memory")
    assert share_in_memory(_meta(other)) < 0.1
    os.mkfifo(half_made / "meta")
    (half_made / "tree.json").touch()
    treecache.read_ahead_newest(str(cache))  # nobody writes into the FIFO


@pytest.mark.usefixtures("page_cache_stays")
def test_the_metadata_of_a_cold_tree_is_read_at_once(tmp_path: Path) -> None:
    """A mount read it block by block, and waited for the disk each time."""
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    made = _cold_tree(tmp_path, "root")
    meta = _meta(made)
    packed_mount.mount(made.path, str(mounted))
    try:
        until(lambda: share_in_memory(meta) == 1, "the metadata in memory")
    finally:
        mount_calls.unmount(str(mounted))
