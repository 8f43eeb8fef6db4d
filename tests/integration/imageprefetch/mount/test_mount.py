"""Mounting images lazily: the same bytes, one server an image, nothing left behind."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.blocks.cache.present_index import ABSENT, ENTRY_BYTES, HEADER
from bootseer.blocks.link_turns import DEMAND, LinkTurns
from bootseer.blocks.link_turns import HOT as HOT_SET
from bootseer.errors import BusyError, NotFoundError, NotSupportedError, UsageError
from bootseer.imageprefetch.mount import server_registry
from bootseer.imageprefetch.record.trace_store import TraceStore
from bootseer.storage.oci import media_types
from bootseer.system import processes
from tests.support.labs.registry_proxy import Gate, Halves
from tests.support.mounts.images import (
    Mounts,
    Published,
    mounts_below,
    publish,
    some_files,
    tree_of,
)
from tests.support.paths import ROOT
from tests.support.waiting import until

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.debian("docker-registry")]

FILES = some_files()
HOT = sorted(FILES)[:12]


@pytest.fixture(scope="module")
def image(registry: Any, tmp_path_factory: pytest.TempPathFactory) -> Published:
    hot = {"": HOT, "other": sorted(FILES)[20:25]}
    ref = registry.reference("mounts/plain", "1")
    return publish(ref, FILES, tmp_path_factory.mktemp("image"), hot=hot)


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    with mounts_below(tmp_path) as made:
        yield made


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("hot", [False, True])
def test_a_mounted_image_has_the_files_of_the_image(
    mounts: Mounts, image: Published, loop: bool, hot: bool
) -> None:
    mounted = mounts.mount(image.ref, loop=loop, hot=hot)
    assert (mounted.loop, mounted.shared, bool(mounted.hot_set)) == (loop, False, hot)
    assert tree_of(mounted.directory) == FILES
    mounts.umount(mounted)
    assert mounts.gone()
    loops = subprocess.run(["losetup", "-l"], capture_output=True, text=True, check=True).stdout
    assert str(mounts.folder) not in loops


def test_a_replayed_hot_set_is_read_without_the_registry(
    mounts: Mounts, own_registry: Any, tmp_path: Path
) -> None:
    registry = own_registry()
    ref = registry.reference("mounts/hot", "1")
    image = publish(ref, FILES, tmp_path / "image", hot={"": HOT})
    mounted = mounts.mount(image.ref)
    wait_for_replay(mounts, mounted.directory)
    registry.stop()
    assert all((Path(mounted.directory) / path).read_bytes() == FILES[path] for path in HOT)


def test_a_node_is_told_of_a_replay_and_of_cold_reads(
    mounts: Mounts, registry: Any, tmp_path: Path
) -> None:
    """Other processes of the node, which may be about to fetch a checkpoint, look for this.

    A FAKE stands between, so that answers stop in the middle while it is looked at.
    """
    ref = registry.reference("mounts/turns", "1")
    image = publish(ref, FILES, tmp_path / "image", hot={"": HOT})
    pack_bytes = registry.blob_path(image.packs[""]).stat().st_size
    cold = sorted(FILES)[-1]
    read: list[bytes] = []
    with Gate(registry.host) as gate, LinkTurns.of(str(mounts.runtime)) as turns:
        hot = Halves(gate, image.packs[""], least_bytes=pack_bytes // 2)
        gate.rules = [hot.rule]
        mounted = mounts.mount(ref.replace(registry.host, gate.authority))
        assert hot.is_halfway()
        until(lambda: turns.is_taken((HOT_SET,)), "the replay is announced")
        gate.rules = []
        hot.cut()
        until(lambda: not turns.is_taken(), "the replay has ended")
        demand = Halves(gate, image.blobs[media_types.DATA])
        gate.rules = [demand.rule]
        reader = threading.Thread(
            target=lambda: read.append((Path(mounted.directory) / cold).read_bytes())
        )
        reader.start()
        try:
            assert demand.is_halfway()
            until(lambda: turns.is_taken((DEMAND,)), "the read is announced")
        finally:
            gate.rules = []
            demand.cut()
            reader.join(60)
        assert read == [FILES[cold]]
        until(lambda: not turns.is_taken(), "nobody waits any more")


def wait_for_replay(mounts: Mounts, directory: str) -> None:
    """Wait until the pack was kept, which its last frame does."""
    folder = mounts.cache / "images"
    until(lambda: any(folder.glob("sha256-*/pack-*")), "the replay of the hot set")


def test_one_server_stands_for_an_image(mounts: Mounts, image: Published) -> None:
    first = mounts.mount(image.ref)
    second = mounts.mount(image.ref, workload="other")
    assert (first.shared, second.shared) == (False, True)
    assert len(server_registry.list_servers(str(mounts.runtime))) == 1
    mounts.umount(first)
    assert tree_of(second.directory) == FILES
    mounts.umount(second)
    assert mounts.gone()


def test_a_server_of_ones_own_is_not_shared(mounts: Mounts, image: Published) -> None:
    first = mounts.mount(image.ref, share=False)
    second = mounts.mount(image.ref)
    third = mounts.mount(image.ref, share=False)
    assert not any((first.shared, second.shared, third.shared))
    assert len(server_registry.list_servers(str(mounts.runtime))) == 3


def test_mounts_that_begin_at_once_share_one_server(mounts: Mounts, image: Published) -> None:
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from tests.support.mounts.images import Mounts\n"
        "print(Mounts(Path(sys.argv[2])).mount(sys.argv[3], directory=sys.argv[4]).shared)\n"
    )
    children = []
    for number in range(6):
        directory = mounts.folder / f"at-once{number}"
        directory.mkdir()
        words = [str(ROOT), str(mounts.folder), image.ref, str(directory)]
        children.append(
            subprocess.Popen(
                [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True
            )
        )
    said = [child.communicate(timeout=120)[0].strip() for child in children]
    assert sorted(said) == ["False"] + ["True"] * 5
    assert len(server_registry.list_servers(str(mounts.runtime))) == 1
    for number in range(6):
        assert tree_of(mounts.folder / f"at-once{number}") == FILES
        mounts.umount(str(mounts.folder / f"at-once{number}"))
    assert mounts.gone()


def test_a_mount_in_use_is_left_alone_unless_lazily(mounts: Mounts, image: Published) -> None:
    mounted = mounts.mount(image.ref)
    path = sorted(FILES)[-1]
    with (Path(mounted.directory) / path).open("rb") as file:
        with pytest.raises(BusyError, match=f"process {os.getpid()}"):
            mounts.umount(mounted)
        mounts.umount(mounted, lazily=True)
        assert not os.listdir(mounted.directory)
        assert file.read() == FILES[path]
    assert mounts.gone()


@pytest.mark.root
def test_who_looks_into_a_mount_for_a_moment_keeps_nobody_from_unmounting(
    mounts: Mounts, image: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As found: a busy mount that no process used. Here another mount is its user."""
    mounted = mounts.mount(image.ref)
    folder = next(each for each in Path(mounted.directory).iterdir() if each.is_dir())
    subprocess.run(["mount", "-t", "tmpfs", "none", folder], check=True)
    looks = []

    def users_of(target: str) -> list[str]:
        looks.append(target)
        if len(looks) == 3:
            subprocess.run(["umount", folder], check=True)
        return []

    monkeypatch.setattr(processes, "users_of", users_of)
    mounts.umount(mounted)
    assert looks == [mounted.directory] * 3
    assert mounts.gone()


def test_a_plain_umount_ends_the_server_too(mounts: Mounts, image: Published) -> None:
    mounted = mounts.mount(image.ref)
    subprocess.run(["umount", mounted.directory], check=True)
    assert mounts.gone()


def test_a_tree_lives_on_in_another_namespace(mounts: Mounts, image: Published) -> None:
    """As in a container: its mounts are copies of ours, and outlive them."""
    path = sorted(FILES)[-1]
    mounted = mounts.mount(image.ref, record=True, hot=False)
    (Path(mounted.directory) / HOT[0]).read_bytes()
    code = f"read line; cat {mounted.directory}/{path} | sha256sum; echo; read line"
    with subprocess.Popen(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", f"echo in; {code}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "in\n"
        mounts.umount(mounted)
        traces = TraceStore(next((mounts.cache / "images").glob("sha256-*")) / "traces")
        assert traces.load("") is not None
        print(file=child.stdin, flush=True)
        expected = hashlib.sha256(FILES[path]).hexdigest()
        assert child.stdout.readline().split()[0] == expected
        assert mounts.left()
        print(file=child.stdin, flush=True)
    assert mounts.gone()


def test_what_is_not_an_image_of_ours_is_not_unmounted(mounts: Mounts) -> None:
    with pytest.raises(NotFoundError):
        mounts.umount(str(mounts.folder))
    other = mounts.folder / "other"
    other.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(other)], check=True)
    with pytest.raises(UsageError, match="tmpfs"):
        mounts.umount(str(other))


def test_an_image_without_a_block_image_says_how_to_make_one(
    mounts: Mounts, registry: Any, tmp_path: Path
) -> None:
    ref = registry.reference("mounts/stock", "1")
    publish(ref, {"a": b"x"}, tmp_path / "stock", block_image=False)
    with pytest.raises(NotFoundError, match=f"bootseer image build {ref}"):
        mounts.mount(ref)
    with pytest.raises(NotFoundError):
        mounts.mount(registry.reference("mounts/nothing", "1"))
    with pytest.raises(NotFoundError, match="no directory"):
        mounts.mount(ref, directory=str(tmp_path / "missing"))
    assert mounts.gone()


def test_a_machine_without_fuse_hears_of_the_file_mode(
    mounts: Mounts, image: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: path != "/dev/fuse" and exists(path))
    with pytest.raises(NotSupportedError, match="file mode"):
        mounts.mount(image.ref)
    monkeypatch.undo()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NotSupportedError, match="file mode"):
        mounts.mount(image.ref)


def test_what_programs_read_is_recorded(mounts: Mounts, image: Published) -> None:
    path = sorted(FILES)[30]
    mounted = mounts.mount(image.ref, record=True, hot=False, workload="w")
    (Path(mounted.directory) / path).read_bytes()
    mounts.umount(mounted)
    assert mounts.gone()
    trace = TraceStore(next((mounts.cache / "images").glob("sha256-*")) / "traces").load("w")
    assert trace is not None
    assert trace.starts == 1
    assert trace.touched_bytes() == -(-len(FILES[path]) // 4096) * 4096
    # Two threads hear of reads: on a busy machine the second one's may be noted first.
    assert min(extent.offset for extent in trace.extents) == image.data_offset(path)


@pytest.mark.parametrize("loop", [False, True])
def test_replay_is_no_touch(mounts: Mounts, image: Published, loop: bool) -> None:
    mounted = mounts.mount(image.ref, record=True, loop=loop)
    wait_for_replay(mounts, mounted.directory)
    path = sorted(FILES)[30]
    (Path(mounted.directory) / path).read_bytes()
    mounts.umount(mounted)
    assert mounts.gone()
    trace = TraceStore(next((mounts.cache / "images").glob("sha256-*")) / "traces").load("")
    assert trace is not None
    assert trace.starts == 0
    assert trace.touched_bytes() == -(-len(FILES[path]) // 4096) * 4096


def wait_for_all_blocks(cache: Path) -> None:
    """Wait until a node cache has every block of what it holds a part of."""

    def filled() -> bool:
        entries = [
            table[at : at + ENTRY_BYTES]
            for table in (path.read_bytes() for path in cache.glob("blocks/*/present"))
            for at in range(HEADER.size, len(table), ENTRY_BYTES)
        ]
        return bool(entries) and ABSENT not in entries

    until(filled)


def test_filling_fetches_the_rest(mounts: Mounts, own_registry: Any, tmp_path: Path) -> None:
    registry = own_registry()
    image = publish(registry.reference("mounts/fill", "1"), FILES, tmp_path / "image")
    mounted = mounts.mount(image.ref, fill=True)
    wait_for_all_blocks(mounts.cache)
    registry.stop()
    assert tree_of(mounted.directory) == FILES


def test_the_command_mounts_and_unmounts(mounts: Mounts, image: Published) -> None:
    directory = mounts.folder / "by-command"
    directory.mkdir()
    places = ["--runtime", str(mounts.runtime)]
    bootseer = [sys.executable, "-m", "bootseer", "image"]
    words = [*places, "--cache", str(mounts.cache), "--json", image.ref, str(directory)]
    done = subprocess.run(
        [*bootseer, "mount", *words], capture_output=True, text=True, timeout=120, check=True
    )
    assert json.loads(done.stdout)["digest"] == image.digest
    assert tree_of(directory) == FILES
    subprocess.run([*bootseer, "umount", *places, str(directory)], timeout=60, check=True)
    assert mounts.gone()


def test_a_closed_output_does_not_fail_a_mount(mounts: Mounts, image: Published) -> None:
    directory = mounts.folder / "unheard"
    directory.mkdir()
    places = ["--runtime", str(mounts.runtime)]
    words = [*places, "--cache", str(mounts.cache), "--json", image.ref, str(directory)]
    command = [sys.executable, "-m", "bootseer", "image", "mount", *words]
    shell = ["sh", "-c", '"$@" >&-', "sh", *command]
    done = subprocess.run(shell, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert tree_of(directory) == FILES


@pytest.mark.parametrize("closing", [">&-", "<&- >&- 2>&-"])
def test_a_mount_made_without_streams_stays_when_the_next_is_made(
    mounts: Mounts, image: Published, tmp_path: Path, closing: str
) -> None:
    """Its lock had the number of a stream, and was let go of with that."""
    other = publish(f"oci-layout:{tmp_path}/layout:1", FILES, tmp_path / "other")
    places = ["--runtime", str(mounts.runtime), "--cache", str(mounts.cache)]
    command = [sys.executable, "-m", "bootseer", "image", "mount", *places]
    for name, ref in (("first", other.ref), ("second", image.ref)):
        (mounts.folder / name).mkdir()
        shell = ["sh", "-c", f'"$@" {closing}', "sh", *command, ref, str(mounts.folder / name)]
        subprocess.run(shell, timeout=120, check=True)
    assert tree_of(mounts.folder / "first") == FILES
    assert tree_of(mounts.folder / "second") == FILES


def test_an_agent_mounts_with_the_callers_own_environment(mounts: Mounts, image: Published) -> None:
    directory, events = mounts.folder / "by-agent", mounts.folder / "events"
    directory.mkdir()
    places = ["--runtime", str(mounts.runtime)]
    bootseer = [sys.executable, "-m", "bootseer", "image"]
    with subprocess.Popen([*bootseer, "agent", *places]) as agent:
        try:
            socket = mounts.runtime / "images/agent.sock"
            until(socket.exists)
            again = subprocess.run([*bootseer, "agent", *places], capture_output=True, text=True)
            assert again.returncode == BusyError.exit_code
            done = subprocess.run(
                [*bootseer, "mount", *places, "--cache", "cache", image.ref, "by-agent"],
                cwd=mounts.folder,
                env={**os.environ, "BOOTSEER_EVENTS": str(events)},
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert done.returncode == 0, done.stderr
            assert tree_of(directory) == FILES
            assert (mounts.folder / "cache/images").is_dir()
            assert "image.mount" in "".join(p.read_text() for p in events.glob("*"))
            wrong = subprocess.run(
                [*bootseer, "mount", *places, image.ref, "nowhere"],
                cwd=mounts.folder,
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert wrong.returncode == NotFoundError.exit_code
            assert "nowhere is no directory" in wrong.stderr
        finally:
            agent.terminate()
    assert not socket.exists()
    assert tree_of(directory) == FILES
    with subprocess.Popen([*bootseer, "agent", *places]) as agent:  # the mount holds not its place
        try:
            until(socket.exists)
        finally:
            agent.terminate()
    mounts.umount(str(directory))
    assert mounts.gone()


def test_a_server_holds_nothing_of_who_mounted(mounts: Mounts, image: Published) -> None:
    readable, writable = os.pipe()
    mounts.mount(image.ref)
    os.close(writable)
    try:
        assert os.read(readable, 1) == b""
    finally:
        os.close(readable)
