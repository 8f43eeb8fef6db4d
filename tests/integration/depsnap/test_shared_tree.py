"""The node-shared tree: unpacked once, placed in every form; writes to it are found out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bootseer.depsnap.capture import scan
from bootseer.depsnap.capture.entries import RootDelta
from bootseer.depsnap.format import archive
from bootseer.depsnap.shared_tree import cache as treecache
from bootseer.depsnap.shared_tree import forms, placement_records
from bootseer.depsnap.types import ArchiveInfo, SharedTree
from bootseer.errors import BusyError, CorruptDataError, NotFoundError, NotSupportedError
from bootseer.system import mount_calls
from bootseer.system.mountinfo import is_mounted
from tests.support.trees.snapshots import as_shared, describe, leftovers, pack, rich, write

pytestmark = pytest.mark.slow

FARMS = ["hardlink", "copy"]
MOUNTS = [pytest.param(f, marks=pytest.mark.root) for f in ("overlay", "bind")]


class Shared:
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
        return treecache.ensure(self.cache, str(self.archive), self.info.index_digest)

    def find(self) -> SharedTree | None:
        return treecache.find(self.cache, self.info.index_digest)

    @property
    def targets(self) -> dict[str, str]:
        return {str(self.root): str(self.target)}


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Shared]:
    made = Shared(tmp_path)
    yield made
    forms.unplace(str(made.target), made.cache)
    assert not is_mounted(str(made.target))


def test_unpacked_once_then_found(shared: Shared) -> None:
    assert shared.find() is None
    first = shared.ensure()
    assert first.fresh
    shown = as_shared(describe(first.roots[str(shared.root)]))
    assert shown == as_shared(describe(shared.root))
    shared.archive.unlink()
    again = shared.ensure()
    assert not again.fresh
    assert again.path == first.path
    assert leftovers(shared.folder) == []


def test_a_corrupt_archive_leaves_no_tree(shared: Shared) -> None:
    data = bytearray(shared.archive.read_bytes())
    data[5000] ^= 1
    shared.archive.write_bytes(data)
    with pytest.raises(CorruptDataError):
        shared.ensure()
    assert shared.find() is None
    assert [n for n in os.listdir(Path(shared.cache) / "trees") if not n.endswith(".lock")] == []


def test_killed_while_unpacking_it_is_unpacked_anew(shared: Shared) -> None:
    code = (
        "import os, signal, sys; from bootseer.depsnap.shared_tree import cache as treecache\n"
        "def step(name):\n    if name == sys.argv[4]: os.kill(os.getpid(), signal.SIGKILL)\n"
        "treecache.ensure(*sys.argv[1:4], on_step=step)"
    )
    for moment in ("made", "unpacked", "fingerprinted"):
        arguments = [shared.cache, shared.archive, shared.info.index_digest, moment]
        done = subprocess.run([sys.executable, "-c", code, *arguments], check=False)
        assert done.returncode == -9
        assert shared.find() is None
    assert shared.ensure().fresh
    shown = as_shared(describe(shared.ensure().roots[str(shared.root)]))
    assert shown == as_shared(describe(shared.root))


def test_two_processes_unpack_it_once(shared: Shared) -> None:
    code = "import sys; from bootseer.depsnap.shared_tree import cache as treecache\n"
    code += "print(treecache.ensure(*sys.argv[1:4]).fresh)"
    words = [sys.executable, "-c", code, shared.cache, shared.archive, shared.info.index_digest]
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert sorted(p.communicate()[0] for p in both) == ["False\n", "False\n", "True\n"]


def _append(path: Path) -> None:
    before = os.stat(path)
    with path.open("ab") as file:
        file.write(b"x")
    os.truncate(path, before.st_size)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("how", ["write", "add", "remove", "mode", "link"])
def test_any_change_of_the_tree_is_found(shared: Shared, how: str) -> None:
    place = Path(shared.ensure().roots[str(shared.root)])
    if os.geteuid() != 0:
        for folder in (place, place / "lib", place / "bin"):
            folder.chmod(0o755)
        (place / "lib/a.py").chmod(0o644)
    {
        "write": lambda: _append(place / "lib/a.py"),
        "add": lambda: (place / "lib/new").mkdir(),
        "remove": lambda: (place / "bin/empty").unlink(),
        "mode": lambda: (place / "lib/a.py").chmod(0o777),
        "link": lambda: os.replace(place / "bin/python", place / "dangling"),
    }[how]()
    assert shared.find() is None
    assert shared.ensure().fresh
    shown = as_shared(describe(shared.ensure().roots[str(shared.root)]))
    assert shown == as_shared(describe(shared.root))


def test_a_tree_of_another_boot_is_not_trusted(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared.ensure()
    monkeypatch.setattr(treecache, "boot_id", lambda: "another")
    assert shared.find() is None


@pytest.mark.parametrize("form", [*MOUNTS, "symlink", *FARMS])
def test_each_form_shows_the_tree_and_goes_again(shared: Shared, form: str) -> None:
    made = shared.ensure()
    (placed,) = forms.place(made, shared.targets, form=form)  # type: ignore[arg-type]
    assert (placed.form, placed.why) == (form, "asked for")
    inside = describe(os.path.realpath(shared.target))
    wanted = describe(shared.root)
    if form == "overlay":  # overlayfs cannot show that lower files are links of each other
        inside = {k: v[:5] for k, v in inside.items()}
        wanted = {k: v[:5] for k, v in wanted.items()}
    if form in ("symlink", "hardlink"):  # the shared files themselves
        inside, wanted = as_shared(inside), as_shared(wanted)
    assert inside == wanted
    assert shared.find() is not None
    assert placement_records.in_use(shared.cache, made.digest) == (form not in FARMS)
    assert forms.unplace(str(shared.target), shared.cache) == (form not in FARMS)
    assert shared.target.exists() == (form in FARMS)
    assert leftovers(shared.folder) == []


@pytest.mark.root
def test_writes_to_an_overlay_stay_private(shared: Shared) -> None:
    made = shared.ensure()
    forms.place(made, shared.targets, form="overlay")
    write(shared.target / "lib/a.py", "x = 'mine'\n")
    (shared.target / "bin/empty").unlink()
    write(shared.target / "lib/new/file", "new")
    assert describe(made.roots[str(shared.root)]) == describe(shared.root)
    assert shared.find() is not None
    with pytest.raises(BusyError):
        treecache.discard(shared.cache, made.digest)
    forms.unplace(str(shared.target), shared.cache)
    assert os.listdir(Path(shared.cache) / "placements") == []
    treecache.discard(shared.cache, made.digest)
    assert treecache.list_trees(shared.cache) == ()
    with pytest.raises(NotFoundError):
        treecache.discard(shared.cache, made.digest)


@pytest.mark.root
def test_a_read_only_bind_refuses_writes(shared: Shared) -> None:
    forms.place(shared.ensure(), shared.targets, form="bind")
    with pytest.raises(OSError, match="Read-only"):
        write(shared.target / "new")


@pytest.mark.parametrize("form", FARMS)
def test_files_of_their_own_can_be_replaced(shared: Shared, form: str) -> None:
    made = shared.ensure()
    forms.place(made, shared.targets, form=form)  # type: ignore[arg-type]
    (shared.target / "lib/a.py").unlink()
    write(shared.target / "lib/a.py", "mine")
    write(shared.target / "lib/new", "mine")
    assert shared.find() is not None
    assert describe(made.roots[str(shared.root)], times=False) != describe(shared.target)


@pytest.mark.root
def test_a_write_into_a_hard_linked_file_is_found(shared: Shared) -> None:
    forms.place(shared.ensure(), shared.targets, form="hardlink")
    with (shared.target / "lib/a.py").open("a") as file:
        file.write("x")
    assert shared.find() is None


@contextmanager
def _overlaid(shared: SharedTree, target: Path, root: Path, cache: str) -> Iterator[None]:
    forms.place(shared, {str(root): str(target)}, form="overlay")
    try:
        yield
    finally:
        forms.unplace(str(target), cache)


@pytest.mark.root
def test_an_overlay_over_a_base_adds_changes_and_deletes(tmp_path: Path) -> None:
    root = tmp_path / "r"
    for path in ("keep", "lib/change", "gone", "old/gone", "old/deep/gone"):
        write(root / path, path)
    subprocess.run(["cp", "-a", root, tmp_path / "base"], check=True)
    before = scan.scan(str(root))
    write(root / "lib/change", "changed")
    write(root / "lib/new/file", "new")
    (root / "gone").unlink()
    subprocess.run(["rm", "-r", root / "old"], check=True)
    delta = RootDelta.of_delta(scan.diff(before, scan.scan(str(root))))
    info = archive.create(str(tmp_path / "a"), [delta])
    base, cache = tmp_path / "base", str(tmp_path / "cache")
    old = describe(base)
    shared = treecache.ensure(cache, str(tmp_path / "a"), info.index_digest)
    with _overlaid(shared, base, root, cache):
        assert describe(base) == describe(root)
    assert describe(base) == old


@pytest.mark.root
def test_auto_takes_an_overlay_and_says_why(shared: Shared) -> None:
    made = shared.ensure()
    (placed,) = forms.place(made, shared.targets)
    assert (placed.form, placed.tried) == ("overlay", ())
    assert "mounts are allowed" in placed.why
    (again,) = forms.place(made, shared.targets)
    assert again.why == "it stands there already"


@pytest.mark.root
def test_auto_read_only_takes_a_bind(shared: Shared) -> None:
    (placed,) = forms.place(shared.ensure(), shared.targets, writable=False)
    assert placed.form == "bind"


def test_auto_without_mounts_falls_through_with_reasons(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(mount_calls, "mount", refuse)
    made = shared.ensure()
    (placed,) = forms.place(made, shared.targets)
    assert placed.form in ("reflink", "hardlink")
    assert placed.tried[0] == ("overlay", "Operation not permitted")
    assert as_shared(describe(shared.target)) == as_shared(describe(shared.root))


def test_a_form_that_cannot_be_is_named_and_leaves_nothing(shared: Shared) -> None:
    made = shared.ensure()
    write(shared.target / "mine", "old")
    for form in ("bind", "symlink"):
        with pytest.raises(NotSupportedError, match="would hide"):
            forms.place(made, shared.targets, form=form)  # type: ignore[arg-type]
    assert os.listdir(shared.target) == ["mine"]
    assert not placement_records.in_use(shared.cache, made.digest)


def test_records_of_placements_that_are_gone_are_swept(shared: Shared) -> None:
    made = shared.ensure()
    forms.place(made, shared.targets, form="symlink")
    assert placement_records.in_use(shared.cache, made.digest)
    shared.target.unlink()
    assert not placement_records.in_use(shared.cache, made.digest)
    assert placement_records.sweep(shared.cache) == 1
    assert list(placement_records.all_records(shared.cache)) == []


# --- where a mount would not be seen, or hide something -------------------------------------------


@pytest.mark.root
def test_nothing_is_mounted_over_the_working_directory(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process keeps the directory it is in: the job would not see what lies over it."""
    write(shared.target / "sub/mine", "old")
    monkeypatch.chdir(shared.target / "sub")
    made = shared.ensure()
    with pytest.raises(NotSupportedError, match="working directory"):
        forms.place(made, shared.targets, form="overlay")
    (placed,) = forms.place(made, shared.targets)
    assert placed.form in ("reflink", "hardlink", "copy")
    assert Path("../lib/a.py").exists()


@pytest.mark.root
def test_a_volume_below_the_target_is_not_hidden(shared: Shared) -> None:
    volume = shared.target / "data"
    volume.mkdir(parents=True)
    mount_calls.mount("tmpfs", str(volume), "tmpfs")
    try:
        (volume / "mine").write_text("old")
        (placed,) = forms.place(shared.ensure(), shared.targets)
        assert placed.form in ("reflink", "hardlink", "copy")
        assert f"{volume} is mounted below" in dict(placed.tried)["overlay"]
        assert (volume / "mine").read_text() == "old"
    finally:
        mount_calls.unmount(str(volume))


@pytest.mark.root
def test_nothing_is_mounted_over_the_root_directory(shared: Shared) -> None:
    shared.ensure()
    done = in_namespace(shared, "/", form="overlay")
    assert "keep their root directory" in done.communicate()[0]


@pytest.mark.root
@pytest.mark.parametrize("form", ["overlay", "bind", "symlink"])
def test_what_others_mounted_or_linked_there_since_a_reboot_stays(
    shared: Shared, form: str, tmp_path: Path
) -> None:
    """A volume at the target was unmounted, as if it were the overlay of before."""
    forms.place(shared.ensure(), shared.targets, form=form)  # type: ignore[arg-type]
    (record,) = placement_records.all_records(shared.cache)
    place = Path(record.folder, "record.json")
    place.write_text(json.dumps(json.loads(place.read_text()) | {"boot": "another"}))
    if form == "symlink":
        shared.target.unlink()
        shared.target.symlink_to(tmp_path)
        forms.unplace(str(shared.target), shared.cache)
        assert shared.target.readlink() == tmp_path
        return
    mount_calls.unmount(str(shared.target))
    mount_calls.mount("tmpfs", str(shared.target), "tmpfs")
    try:
        (shared.target / "mine").write_text("of the volume")
        forms.place(shared.ensure(), shared.targets, form="copy")
        assert (shared.target / "mine").read_text() == "of the volume"
        assert (shared.target / "lib/a.py").exists()
    finally:
        mount_calls.unmount(str(shared.target))
    assert not (shared.target / "lib").exists()


@pytest.mark.parametrize("form", ["symlink", pytest.param("bind", marks=pytest.mark.root)])
def test_what_stands_there_stays_where_the_next_snapshot_is_refused(
    shared: Shared, tmp_path: Path, form: str
) -> None:
    """It was taken away before anybody knew whether the other one fits."""
    forms.place(shared.ensure(), shared.targets, form=form)  # type: ignore[arg-type]
    write(tmp_path / "more/r/second", "2")
    info = pack(tmp_path / "more/r", tmp_path / "more/a")
    second = treecache.ensure(shared.cache, str(tmp_path / "more/a"), info.index_digest)

    def refuse() -> None:
        raise NotFoundError("the index decides otherwise")

    target = {str(tmp_path / "more/r"): str(shared.target)}
    with pytest.raises(NotFoundError):
        forms.place(second, target, before_switch=refuse)
    assert (shared.target / "lib/a.py").exists()
    assert not (shared.target / "second").exists()


@pytest.mark.root
def test_an_overlay_with_writes_in_it_stays(shared: Shared, tmp_path: Path) -> None:
    """What another snapshot brought, and what was installed on top of it, is what the next
    command builds on."""
    first = shared.ensure()
    forms.place(first, shared.targets, form="overlay")
    write(shared.target / "own", "written by the job")
    write(tmp_path / "more/r/second", "2")
    info = pack(tmp_path / "more/r", tmp_path / "more/a")
    second = treecache.ensure(shared.cache, str(tmp_path / "more/a"), info.index_digest)
    target = {str(tmp_path / "more/r"): str(shared.target)}
    (placed,) = forms.place(second, target)
    assert placed.form in ("reflink", "hardlink", "copy")
    assert (shared.target / "own").read_text() == "written by the job"
    assert (shared.target / "second").read_text() == "2"
    assert (shared.target / "lib/a.py").exists()


@pytest.mark.root
def test_what_was_deleted_in_an_overlay_comes_back(shared: Shared) -> None:
    made = shared.ensure()
    forms.place(made, shared.targets, form="overlay")
    (shared.target / "lib/a.py").unlink()
    (placed,) = forms.place(made, shared.targets)
    assert placed.why != "it stands there already"
    assert describe(shared.target) == describe(shared.root)


# --- containers: mount namespaces with the same paths ---------------------------------------------

IN_NAMESPACE = """
import sys
from bootseer.depsnap.shared_tree import cache as treecache, forms
from bootseer.errors import BootseerError
cache, digest, root, target, form = sys.argv[1:]
made = treecache.find(cache, digest)
try:
    (placed,) = forms.place(made, {root: target}, form=form)
    print(placed.form, flush=True)
except BootseerError as error:
    print(error, flush=True)
sys.stdin.read()
"""


def in_namespace(
    shared: Shared, target: Path | str, *, form: str, hide: Path | None = None
) -> subprocess.Popen[str]:
    """Place the tree in a mount namespace of its own, which lives until its input ends."""
    words = [sys.executable, "-c", IN_NAMESPACE, shared.cache, shared.info.index_digest]
    words += [str(shared.root), str(target), form]
    script = f"mount -t tmpfs none {hide} && " if hide else ""
    return subprocess.Popen(
        ["unshare", "-m", "sh", "-c", f'{script}exec "$@"', "sh", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def first_line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


@pytest.mark.root
def test_containers_overlay_the_same_path_side_by_side(shared: Shared) -> None:
    made = shared.ensure()
    with in_namespace(shared, shared.target, form="auto") as one:
        assert first_line(one) == "overlay"
        with in_namespace(shared, shared.target, form="auto") as two:
            assert first_line(two) == "overlay"
            (mine,) = forms.place(made, shared.targets)
            assert mine.form == "overlay"
            forms.unplace(mine.target, shared.cache)
            assert placement_records.sweep(shared.cache) == 0
            with pytest.raises(BusyError):
                treecache.discard(shared.cache, made.digest)
            two.communicate()
        one.communicate()


SWEEP = """
import subprocess, sys
from bootseer.depsnap.shared_tree.placement_records import in_use, sweep
cache, digest, *command = sys.argv[1:]
with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
    print(child.stdout.readline().decode().strip(), in_use(cache, digest), sweep(cache))
    child.communicate()
print(in_use(cache, digest), sweep(cache), sweep(cache))
"""


@pytest.mark.root
@pytest.mark.parametrize("form", ["overlay", "bind", "symlink"])
def test_the_end_of_a_container_is_noticed(shared: Shared, form: str) -> None:
    """In a PID namespace of its own, where root may look at every process."""
    shared.ensure()
    words = [shared.cache, shared.info.index_digest]
    inner = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs none {shared.target.parent}; exec "$@"']
    inner += ["sh", sys.executable, "-c", IN_NAMESPACE, *words]
    inner += [str(shared.root), str(shared.target), form]
    outer = ["unshare", "-m", "-p", "-f", "--mount-proc", sys.executable, "-c", SWEEP]
    done = subprocess.run([*outer, *words, *inner], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{form} True 0", "False 1 0"]
    assert list(placement_records.all_records(shared.cache)) == []


@pytest.mark.root
def test_a_link_in_another_container_pins_its_tree(shared: Shared) -> None:
    made = shared.ensure()
    with in_namespace(shared, shared.target, form="symlink", hide=shared.target.parent) as one:
        assert first_line(one) == "symlink"
        assert not os.path.lexists(shared.target)
        assert placement_records.in_use(shared.cache, made.digest)
        one.communicate()


def test_trees_are_listed_with_size_and_use(shared: Shared) -> None:
    made = shared.ensure()
    (status,) = treecache.list_trees(shared.cache)
    assert (status.digest, status.size, status.in_use) == (made.digest, made.size, False)
    assert treecache.recently_used(status, status.last_used_ns + 1)
    assert not treecache.recently_used(status, status.last_used_ns + 10**12)
