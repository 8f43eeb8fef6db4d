"""Restore: the very tree comes back, or the target stays as it was."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bootseer.depsnap.capture import scan
from bootseer.depsnap.capture.entries import RootDelta
from bootseer.depsnap.format import archive
from bootseer.depsnap.format.index import read_index
from bootseer.depsnap.format.verifier import verify
from bootseer.depsnap.restore.archive_restore import restore
from bootseer.depsnap.restore.commit import recover
from bootseer.depsnap.types import ArchiveInfo
from bootseer.errors import (
    AccessDeniedError,
    BootseerError,
    BusyError,
    CorruptDataError,
    NoSpaceError,
    NotSupportedError,
    UsageError,
)
from bootseer.system.mount_calls import MS_RDONLY, MS_REMOUNT, mount
from tests.support.mounts.tmpfs import tmpfs
from tests.support.trees.snapshots import MERGEABLE, NS, describe, leftovers, pack, rich, write

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("jobs", [1, 3])
def test_round_trip_to_an_absent_target(tmp_path: Path, jobs: int) -> None:
    root = rich(tmp_path / "r")
    info = pack(root, tmp_path / "a")
    target = tmp_path / "new/deep/t"
    done = restore(str(tmp_path / "a"), info.index_digest, {str(root): str(target)}, jobs=jobs)
    assert describe(target) == describe(root)
    assert os.stat(target / "sparse").st_blocks * 512 < 1 << 20
    assert (done.entries, done.raw_bytes) == (info.entries, info.raw_bytes)
    assert leftovers(tmp_path) == []


def test_default_target_is_where_it_was(tmp_path: Path) -> None:
    root = rich(tmp_path / "r")
    info = pack(root, tmp_path / "a")
    root.rename(tmp_path / "moved")
    restore(str(tmp_path / "a"), info.index_digest)
    assert describe(root) == describe(tmp_path / "moved")


def test_restoring_again_over_itself_changes_nothing(tmp_path: Path) -> None:
    root = rich(tmp_path / "r", shut=MERGEABLE)
    info = pack(root, tmp_path / "a")
    wanted = describe(root)
    restore(str(tmp_path / "a"), info.index_digest)
    assert describe(root) == wanted
    assert leftovers(tmp_path) == []


def _change(root: Path) -> None:
    """What an install may do: add, change, delete, turn kinds into each other."""
    write(root / "lib/new/deep/file", "new")
    write(root / "lib/a.py", "x = 2\n", mtime_ns=NS + 99)
    (root / "lib/b.so").chmod(0o500)
    (root / "bin/empty").unlink()
    (root / "dangling").unlink()
    (root / "dangling").symlink_to("elsewhere")
    (root / "empty dir").rmdir()
    write(root / "empty dir", "a file now")
    (root / "old").unlink()
    write(root / "old/became/a", "directory")
    (root / "shut").chmod(0o755)
    (root / "shut/inside").unlink()
    (root / "shut").rmdir()
    (root / "shut").symlink_to("lib")


def _delta(root: Path, path: Path) -> ArchiveInfo:
    before = scan.scan(str(root))
    _change(root)
    delta = RootDelta.of_delta(scan.diff(before, scan.scan(str(root))))
    return archive.create(str(path), [delta])


def _copy(source: Path, target: Path) -> Path:
    subprocess.run(["cp", "-a", source, target], check=True)
    return target


def test_a_delta_turns_the_base_into_what_the_install_left(tmp_path: Path) -> None:
    root = rich(tmp_path / "r", shut=MERGEABLE)
    base = _copy(root, tmp_path / "base")
    write(base / "mine", "not part of the capture")
    os.utime(base, ns=(NS, NS + 7))
    info = _delta(root, tmp_path / "a")
    done = restore(str(tmp_path / "a"), info.index_digest, {str(root): str(base)})
    assert (base / "mine").read_text() == "not part of the capture"
    (base / "mine").unlink()
    os.utime(base, ns=(NS, os.stat(root).st_mtime_ns))
    assert describe(base) == describe(root)
    assert done.kept == ()
    assert leftovers(tmp_path) == []


def test_attributes_of_a_directory_that_is_there_come_too(tmp_path: Path) -> None:
    root = tmp_path / "r"
    write(root / "d/f")
    write(root / "kept/f")
    for name in ("d", "kept"):
        os.setxattr(root / name, "user.old", b"1")
    base = _copy(root, tmp_path / "base")
    old = describe(base)
    before = scan.scan(str(root))
    os.removexattr(root / "d", "user.old")
    os.setxattr(root / "d", "user.new", b"\0\xff")
    write(root / "kept/g")
    delta = RootDelta.of_delta(scan.diff(before, scan.scan(str(root))))
    info = archive.create(str(tmp_path / "a"), [delta])

    def stop(name: str) -> None:
        if name == "metadata ":  # of the root, the last of all
            raise OSError(5, "injected")

    with pytest.raises(BootseerError, match="injected"):
        restore(str(tmp_path / "a"), info.index_digest, {str(root): str(base)}, on_step=stop)
    assert describe(base) == old
    restore(str(tmp_path / "a"), info.index_digest, {str(root): str(base)})
    assert describe(base) == describe(root)


def test_a_deleted_directory_with_foreign_files_is_kept_and_named(tmp_path: Path) -> None:
    root = tmp_path / "r"
    write(root / "d/old")
    before = scan.scan(str(root))
    (root / "d/old").unlink()
    (root / "d").rmdir()
    delta = RootDelta.of_delta(scan.diff(before, scan.scan(str(root))))
    info = archive.create(str(tmp_path / "a"), [delta])
    write(tmp_path / "t/d/old")
    write(tmp_path / "t/d/mine")
    done = restore(str(tmp_path / "a"), info.index_digest, {str(root): str(tmp_path / "t")})
    assert done.kept == (str(tmp_path / "t/d"),)
    assert os.listdir(tmp_path / "t/d") == ["mine"]


def test_a_directory_that_must_give_way_but_holds_more_refuses_all(tmp_path: Path) -> None:
    root = rich(tmp_path / "r")
    base = _copy(root, tmp_path / "base")
    write(base / "empty dir/mine")
    info = _delta(root, tmp_path / "a")
    before = describe(base)
    with pytest.raises(NotSupportedError, match="mine"):
        restore(str(tmp_path / "a"), info.index_digest, {str(root): str(base)})
    assert describe(base) == before


def test_several_roots_all_or_none(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / name / "f", name)
    roots = [RootDelta.of_tree(scan.scan(str(tmp_path / n))) for n in ("one", "two")]
    info = archive.create(str(tmp_path / "a"), roots)
    targets = {str(tmp_path / n): str(tmp_path / "out" / n) for n in ("one", "two")}
    write(tmp_path / "out/two/f", "old")
    (tmp_path / "out/two/f").rename(tmp_path / "out/two/g")
    write(tmp_path / "out/two/f/x", "a directory in the way")
    before = describe(tmp_path / "out")
    with pytest.raises(NotSupportedError):
        restore(str(tmp_path / "a"), info.index_digest, targets)
    assert describe(tmp_path / "out", times=False) == {
        k: (*v[:3], *v[4:]) for k, v in before.items()
    }
    (tmp_path / "out/two/f/x").unlink()
    (tmp_path / "out/two/f").rmdir()
    restore(str(tmp_path / "a"), info.index_digest, targets)
    assert [(tmp_path / "out" / n / "f").read_text() for n in ("one", "two")] == ["one", "two"]


NAMES = st.text(st.characters(exclude_characters="/\0", codec="utf-8"), min_size=1, max_size=12)
FILES = st.tuples(st.binary(max_size=2000), st.sampled_from([0o644, 0o755, 0o400, 0o1666]))
TREES = st.recursive(
    FILES | st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1, max_size=9),
    lambda below: st.dictionaries(NAMES, below, max_size=4),
    max_leaves=12,
)


def _make(path: Path, what: object, stamp: Iterator[int]) -> None:
    if isinstance(what, dict):
        path.mkdir()
        for name, below in what.items():
            if name not in (".", ".."):
                _make(path / name, below, stamp)
    elif isinstance(what, str):
        path.symlink_to(what)
        return
    else:
        path.write_bytes(what[0])
        path.chmod(what[1])
    moment = next(stamp)
    os.utime(path, ns=(moment, moment))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(tree=st.dictionaries(NAMES, TREES, max_size=5), seed=st.integers(-(10**9), 4 * 10**18))
def test_any_tree_comes_back(tree: dict, seed: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _make(folder / "r", tree, iter(range(seed, seed + 1000)))
        info = pack(folder / "r", folder / "a")
        restore(str(folder / "a"), info.index_digest, {str(folder / "r"): str(folder / "t")})
        assert describe(folder / "t") == describe(folder / "r")
        index = read_index(str(folder / "a"), expected_digest=info.index_digest)
        assert verify(str(folder / "a"), index) == info.tree_digest


def test_umask_and_a_setgid_parent_do_not_matter(tmp_path: Path) -> None:
    root = rich(tmp_path / "r")
    info = pack(root, tmp_path / "a")
    parent = tmp_path / "parent"
    parent.mkdir()
    parent.chmod(0o2777)
    before = os.umask(0o077)
    try:
        targets = {str(root): str(parent / "t")}
        restore(str(tmp_path / "a"), info.index_digest, targets)
    finally:
        os.umask(before)
    assert describe(parent / "t") == describe(root)


def test_the_journal_and_its_name_are_synced_before_anything_is_switched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut must not keep some of the switch and forget that there was one."""
    info = pack(rich(tmp_path / "r"), tmp_path / "a")
    synced: list[str] = []
    fsync = os.fsync

    def sync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    before: list[list[str]] = []

    def look(name: str) -> None:
        if name == "committed":
            before.append(synced[-2:])

    monkeypatch.setattr(os, "fsync", sync)
    targets = {str(tmp_path / "r"): str(tmp_path / "t")}
    restore(str(tmp_path / "a"), info.index_digest, targets, on_step=look)
    [[journal, folder]] = before
    assert os.path.dirname(journal) == folder
    assert ".bootseer-" in folder


def _two(tmp_path: Path) -> tuple[ArchiveInfo, dict[str, str]]:
    """An archive of two roots, and where they shall stand: one is not there yet, one is."""
    for name in ("one", "two"):
        write(tmp_path / name / "f", name)
    roots = [RootDelta.of_tree(scan.scan(str(tmp_path / n))) for n in ("one", "two")]
    write(tmp_path / "out/two/f", "old")
    info = archive.create(str(tmp_path / "a"), roots)
    return info, {str(tmp_path / n): str(tmp_path / "out" / n) for n in ("one", "two")}


def test_a_journal_whose_folder_cannot_be_synced_commits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else recovery would go forward over what was installed after the restore had failed."""
    info, targets = _two(tmp_path)
    before = describe(tmp_path / "out/two")
    fsync, failed = os.fsync, []

    def fail(fd: int) -> None:
        folder = os.readlink(f"/proc/self/fd/{fd}")
        if folder.endswith(".bootseer-one.stage"):
            failed.append(os.listdir(folder))
            raise OSError(errno.EIO, "made to fail")
        fsync(fd)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(BootseerError, match="made to fail"):
            restore(str(tmp_path / "a"), info.index_digest, targets)
    assert "journal.json" in failed[0], "it had its name"
    assert describe(tmp_path / "out/two") == before
    assert leftovers(tmp_path) == []
    for target in targets.values():
        write(Path(target) / "f", "installed plainly")
    for target in targets.values():
        assert recover(target).outcome == "clean"
        assert (Path(target) / "f").read_text() == "installed plainly"


def test_works_in_a_process_with_threads(tmp_path: Path) -> None:
    root = rich(tmp_path / "r")
    info = pack(root, tmp_path / "a")
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    try:
        restore(str(tmp_path / "a"), info.index_digest, {str(root): str(tmp_path / "t")})
        data = bytearray((tmp_path / "a").read_bytes())
        data[100] ^= 1
        (tmp_path / "bad").write_bytes(data)
        with pytest.raises(CorruptDataError):
            restore(str(tmp_path / "bad"), info.index_digest, {str(root): str(tmp_path / "u")})
    finally:
        stop.set()
        other.join()
    assert describe(tmp_path / "t") == describe(root)
    assert not (tmp_path / "u").exists()


def test_a_flipped_byte_anywhere_leaves_the_target_alone(tmp_path: Path) -> None:
    root = tmp_path / "r"
    for n in range(40):
        write(root / f"f{n}", os.urandom(200_000))
    info = pack(root, tmp_path / "a")
    good = (tmp_path / "a").read_bytes()
    write(tmp_path / "t/mine", "old")
    before = describe(tmp_path / "t")
    places = [0, 1, len(good) - 1, len(good) - 20, *range(7, len(good), len(good) // 25)]
    for position in places:
        data = bytearray(good)
        data[position] ^= 0x10
        (tmp_path / "bad").write_bytes(data)
        targets = {str(root): str(tmp_path / "t")}
        with pytest.raises(CorruptDataError, match=str(tmp_path / "bad")):
            restore(str(tmp_path / "bad"), info.index_digest, targets)
        assert describe(tmp_path / "t") == before
    assert leftovers(tmp_path) == []


@pytest.mark.root
@pytest.mark.parametrize("existing", [False, True])
def test_a_full_disk_leaves_the_target_alone(tmp_path: Path, existing: bool) -> None:
    root = tmp_path / "r"
    for n in range(2000):
        write(root / f"f{n}", b"x")
    info = pack(root, tmp_path / "a")
    with tmpfs(tmp_path / "small", "4m") as small:
        if existing:
            write(small / "t/mine", "old")
        before = describe(small)
        with pytest.raises(NoSpaceError):
            restore(str(tmp_path / "a"), info.index_digest, {str(root): str(small / "t")})
        after = describe(small)
        if not existing:  # a directory's time cannot be put back by who made and removed its entry
            after["."], before["."] = (), ()
        assert after == before


@pytest.mark.root
def test_a_read_only_target_is_access_denied(tmp_path: Path) -> None:
    write(tmp_path / "r/f")
    info = pack(tmp_path / "r", tmp_path / "a")
    with tmpfs(tmp_path / "ro", "4m") as read_only:
        (read_only / "t").mkdir()
        mount("none", str(read_only), "tmpfs", MS_REMOUNT | MS_RDONLY)
        for target in ("t", "absent"):
            with pytest.raises(AccessDeniedError, match="writable"):
                restore(
                    str(tmp_path / "a"),
                    info.index_digest,
                    {str(tmp_path / "r"): str(read_only / target)},
                )
        assert os.listdir(read_only) == ["t"]


@pytest.mark.root
def test_an_immutable_directory_undoes_all(tmp_path: Path) -> None:
    root = tmp_path / "r"
    write(root / "a/f", "new")
    write(root / "b/f", "new")
    info = pack(root, tmp_path / "a.zst")
    write(tmp_path / "t/a/f", "old")
    write(tmp_path / "t/b/g", "old")
    before = describe(tmp_path / "t")
    frozen = os.open(tmp_path / "t/b", os.O_RDONLY)
    flags = bytearray(8)
    fcntl.ioctl(frozen, 0x80086601, flags)  # FS_IOC_GETFLAGS
    flags[0] |= 0x10  # FS_IMMUTABLE_FL
    fcntl.ioctl(frozen, 0x40086602, flags)
    try:
        with pytest.raises(AccessDeniedError):
            restore(str(tmp_path / "a.zst"), info.index_digest, {str(root): str(tmp_path / "t")})
    finally:
        flags[0] &= ~0x10
        fcntl.ioctl(frozen, 0x40086602, flags)
        os.close(frozen)
    assert describe(tmp_path / "t", times=False) == {k: (*v[:3], *v[4:]) for k, v in before.items()}
    assert leftovers(tmp_path) == []


@pytest.mark.root
def test_an_unprivileged_user_restores_as_himself(tmp_path: Path) -> None:
    root = rich(tmp_path / "r")
    os.chown(root / "lib/a.py", 1234, 99)
    info = pack(root, tmp_path / "a")
    # pytest keeps its directories from other users.
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        home.chmod(0o755)
        (home / "a").write_bytes((tmp_path / "a").read_bytes())
        (home / "mine").mkdir()
        os.chown(home / "mine", 65534, 65534)
        code = (
            "from bootseer.depsnap.restore.archive_restore import restore; import os, sys, signal;"
            "import encodings.ascii, json;os.setgroups([]); os.setgid(65534); os.setuid(65534);"
            "restore(sys.argv[1], sys.argv[2], {sys.argv[3]: sys.argv[4]})"
        )
        arguments = [home / "a", info.index_digest, root, home / "mine/t"]
        subprocess.run([sys.executable, "-c", code, *arguments], check=True)
        wanted = {k: (v[0], 65534, 65534, *v[3:]) for k, v in describe(root).items()}
        assert describe(home / "mine/t") == wanted
        arguments[-1] = home / "other"
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True,
            check=False,
        )
        assert b"AccessDeniedError" in done.stderr
        assert sorted(os.listdir(home)) == ["a", "mine"]


def test_compiled_python_stays_valid(tmp_path: Path) -> None:
    root = tmp_path / "r"
    write(root / "pkg/__init__.py", "from pkg import part\n")
    write(root / "pkg/part.py", "VALUE = 42\n")
    subprocess.run([sys.executable, "-m", "compileall", "-q", root], check=True)
    info = pack(root, tmp_path / "a")
    restore(str(tmp_path / "a"), info.index_digest, {str(root): str(tmp_path / "t")})
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-v", "-c", "import pkg; print(pkg.part.VALUE)"],
        env={**environment, "PYTHONPATH": str(tmp_path / "t")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "42\n"
    ours = [line for line in done.stderr.splitlines() if str(tmp_path / "t/pkg") in line]
    assert sum("matches" in line for line in ours) == 2
    assert not [line for line in ours if "wrote" in line or "could not create" in line]


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("moment", ["staging made", "staged", "before commit"])
def test_sigterm_cleans_up(tmp_path: Path, existing: bool, moment: str) -> None:
    root = rich(tmp_path / "r")
    info = pack(root, tmp_path / "a")
    (tmp_path / "in").mkdir()
    if existing:
        write(tmp_path / "in/t/mine", "old")
    before = describe(tmp_path / "in", times=False)
    code = (
        "import os, signal, sys; from bootseer.depsnap.restore.archive_restore import restore\n"
        "def step(name):\n    if name == sys.argv[5]: os.kill(os.getpid(), signal.SIGTERM)\n"
        "restore(sys.argv[1], sys.argv[2], {sys.argv[3]: sys.argv[4]}, on_step=step)"
    )
    arguments = [tmp_path / "a", info.index_digest, root, tmp_path / "in/t", moment]
    done = subprocess.run([sys.executable, "-c", code, *arguments], check=False)
    assert done.returncode == 128 + signal.SIGTERM
    assert describe(tmp_path / "in", times=False) == before


def test_a_restore_in_progress_is_busy(tmp_path: Path) -> None:
    write(tmp_path / "r/f")
    info = pack(tmp_path / "r", tmp_path / "a")
    stage = tmp_path / "t/.bootseer-stage"
    stage.mkdir(parents=True, mode=0o700)
    lock = os.open(stage, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BusyError):
            restore(
                str(tmp_path / "a"),
                info.index_digest,
                {str(tmp_path / "r"): str(tmp_path / "t")},
            )
        with pytest.raises(BusyError):
            recover(str(tmp_path / "t"))
    finally:
        os.close(lock)
    assert recover(str(tmp_path / "t")).outcome == "removed"
    assert recover(str(tmp_path / "t")).outcome == "clean"


def test_targets_that_cannot_be_are_named(tmp_path: Path) -> None:
    write(tmp_path / "r/f")
    info = pack(tmp_path / "r", tmp_path / "a")
    (tmp_path / "link").symlink_to("r")
    for targets, text in (
        ({"/no/such/root": "/x"}, "has no root /no/such/root"),
        ({str(tmp_path / "r"): str(tmp_path / "link")}, "symlink"),
        ({str(tmp_path / "r"): str(tmp_path / "a")}, "no directory"),
    ):
        with pytest.raises(UsageError, match=text):
            restore(str(tmp_path / "a"), info.index_digest, targets)


def test_an_error_in_the_middle_of_the_switch_undoes_all(tmp_path: Path) -> None:
    root = rich(tmp_path / "r", shut=MERGEABLE)
    base = _copy(root, tmp_path / "base")
    info = _delta(root, tmp_path / "a")
    before = describe(base)
    steps: list[str] = []
    probe = _copy(base, tmp_path / "probe")
    targets = {str(root): str(probe)}
    restore(str(tmp_path / "a"), info.index_digest, targets, on_step=steps.append)
    start, end = steps.index("committed") + 1, steps.index("switched")
    assert end - start > 10
    for wrong in steps[start:end]:

        def fail(name: str, wrong: str = wrong) -> None:
            if name == wrong:
                raise OSError(errno.EIO, "made to fail", wrong)

        with pytest.raises(BootseerError, match="made to fail"):
            restore(str(tmp_path / "a"), info.index_digest, {str(root): str(base)}, on_step=fail)
        assert describe(base) == before, wrong
        assert leftovers(tmp_path) == []
