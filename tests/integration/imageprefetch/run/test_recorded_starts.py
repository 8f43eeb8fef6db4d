"""A stock image from a registry: recorded, packed, published, mounted lazily, by the commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.blocks.trace.trace_file import Trace
from bootseer.imageprefetch.hotset.image_hotsets import open_image
from bootseer.imageprefetch.hotset.summary import summarise
from bootseer.imageprefetch.image_cache import ImageCache
from bootseer.imageprefetch.record.trace_store import TraceStore
from bootseer.storage.oci.open import open_repository
from tests.support import page_cache
from tests.support.mounts.images import Mounts, evict, mounts_below, noise
from tests.support.samples.images import Image, directory, file, symlink, write_layout

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.debian("docker-registry"),
    pytest.mark.debian("busybox-static"),
]

DATA = {f"data/f{n}": noise(400_000 + n, n) for n in range(12)}
STEP = """printf '{"v":1,"event":"point","name":"first_step"}\\n' > $BOOTSEER_EVENTS/rank.jsonl"""
START = f"cat /data/f7 /data/f2 > /dev/null; {STEP}; sleep 2; cat /data/f5 > /dev/null"


def layers(**changed: bytes) -> list[list[Any]]:
    tools = [file("bin/busybox", Path("/bin/busybox").read_bytes(), mode=0o755)]
    tools += [symlink(f"bin/{name}", "busybox") for name in ("sh", "cat", "sleep", "id", "env")]
    users = b"root:x:0:0::/:/bin/sh\nbob:x:1234:55::/:/bin/sh\n"
    base = [directory("bin"), *tools, directory("etc"), file("etc/passwd", users)]
    # What leads out of the tree must lead nowhere.
    base += [symlink("run", "/tmp/outside-of-the-image/run"), directory("tmp", mode=0o1777)]
    data = {**DATA, **{f"data/{name}": content for name, content in changed.items()}}
    return [base, [directory("data"), *(file(path, held) for path, held in data.items())]]


CONFIG = {
    "Env": ["PATH=/bin", "GREETING=hello"],
    "WorkingDir": "/data",
    "User": "",
}


class Lab:
    """The commands, with a cache of their own, over one image of a registry."""

    def __init__(self, folder: Path, ref: str) -> None:
        self.ref = ref
        self.cache = folder / "cache"
        self.own = {
            "BOOTSEER_CACHE": str(self.cache),
            "BOOTSEER_RUNTIME": str(folder / "runtime"),
        }
        self.environment = {**os.environ, **self.own}

    def run(self, *words: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "bootseer", "image", *words],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def record(self, script: str, *options: str, code: int = 0) -> str:
        words = ("record", self.ref, "--with", "chroot", *options, "--", "sh", "-c", script)
        return self.run(*words, code=code)

    def trace(self, workload: str = "") -> Trace | None:
        with open_repository(self.ref)[0] as repository:
            digest = repository.image("1")[0].digest
        return TraceStore(ImageCache(str(self.cache)).trace_folder(digest)).load(workload)

    def read(self, workload: str = "") -> list[str]:
        """The data files that a workload's trace holds whole, in its order."""
        trace = self.trace(workload)
        assert trace is not None
        with open_image(self.ref, str(self.cache)) as image:
            shown = summarise(trace, image.parts.files)
        whole = [p for p in shown.files if p.name in DATA and p.touched_bytes >= p.size_bytes]
        return [p.name for p in sorted(whole, key=lambda part: part.first_touch_ms)]


@pytest.fixture(scope="module")
def ref(registry: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("stock")
    made = write_layout(folder / "layout", Image(layers(), config=CONFIG), tag="1")
    name: str = registry.push(made.source, "starts/stock", "1")
    Lab(folder, name).run("build", name)
    return name


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    with mounts_below(tmp_path) as made:
        yield made


@pytest.fixture
def lab(tmp_path: Path, ref: str, mounts: Mounts) -> Lab:
    return Lab(tmp_path, ref)


def test_a_start_is_recorded_until_its_first_step_and_replayed(lab: Lab, mounts: Mounts):
    told = lab.record(START, "--workload", "cats", "--push")
    assert "1 full starts" in told
    assert lab.read("cats") == ["data/f7", "data/f2"]
    mounted = mounts.mount(lab.ref, workload="cats")
    assert mounted.hot_set
    for path, data in DATA.items():
        assert (Path(mounted.directory) / path).read_bytes() == data
    mounts.umount(mounted)
    shown = json.loads(lab.run("hotset", "show", lab.ref, "--workload", "cats", "--json"))
    names = {part["name"] for part in shown["files"]}
    assert {"data/f7", "data/f2", "bin/busybox"} <= names
    assert "data/f5" not in names
    published = json.loads(lab.run("hotset", "ls", lab.ref, "--json"))["published"]
    (row,) = (row for row in published if row["workload"] == "cats")
    assert (row["starts"], row["of_this_block_image"]) == (1, True)


def test_what_is_recorded_is_replayed_here_without_being_pushed(lab: Lab, mounts: Mounts):
    lab.record("cat /data/f7 > /dev/null", "--workload", "alone")
    for _ in range(9000):
        if list(lab.cache.glob("images/*/own/alone/manifest.json")):
            break
        threading.Event().wait(0.01)
    assert mounts.mount(lab.ref, workload="alone", cache=str(lab.cache)).hot_set


def test_the_command_runs_as_the_image_says_and_changes_nothing_of_it(lab: Lab):
    script = (
        '[ "$GREETING" = hello ] && [ "$(pwd)" = /data ] && [ "$MORE" = "a b" ] || exit 9; '
        "echo gone > /data/f1; echo new > /tmp/new; exit 0"
    )
    lab.record(script, "--env", "MORE=a b")
    assert not Path("/tmp/outside-of-the-image").exists()
    lab.record("cat /data/f1 > /dev/null; [ ! -e /tmp/new ]")
    assert "data/f1" in lab.read()


def test_what_failed_before_its_first_step_is_not_kept(lab: Lab):
    told = lab.record("cat /data/f3 > /dev/null; exit 3", code=3)
    assert "nothing is kept" in told
    assert lab.trace() is None
    lab.run("record", lab.ref, "--with", "chroot", "--", "no-such-program", code=127)
    assert lab.trace() is None
    lab.record(f"cat /data/f3 > /dev/null; {STEP}; sleep 1; exit 3", code=3)
    assert lab.read() == ["data/f3"]


def test_a_start_that_would_go_on_for_ever_is_ended_when_it_is_recorded(lab: Lab):
    lab.record(f"cat /data/f3 > /dev/null; {STEP}; exec sleep 1000", "--stop", code=143)
    assert lab.read() == ["data/f3"]


@pytest.mark.debian("podman")
def test_podman_runs_the_command_where_it_is_installed(lab: Lab, podman: Any):
    lab.environment = {**podman.environment, **lab.own}
    script = '[ "$GREETING" = hello ] && [ "$(pwd)" = /data ] && cat f7 f2 > /dev/null'
    told = lab.run("record", lab.ref, "--with", "podman", "--", "sh", "-c", f"{script}; {STEP}")
    assert "1 full starts" in told
    assert lab.read() == ["data/f7", "data/f2"]


def test_nothing_recorded_is_said_with_what_to_do(lab: Lab):
    for words in (("build",), ("show",), ("push",)):
        told = lab.run("hotset", *words, lab.ref, "--workload", "never", code=3)
        assert "bootseer image" in told


def test_twenty_starts_from_a_warm_page_cache_leave_the_hot_set_as_it_was(lab: Lab, mounts: Mounts):
    lab.record("cat /data/f7 /data/f2 > /dev/null")
    before = lab.trace()
    cache = str(lab.cache)
    mounted = mounts.mount(lab.ref, record=True, cache=cache)
    read = [Path(mounted.directory, path) for path in ("data/f7", "data/f2")]
    for turn in range(20):
        # Later starts find all in the page cache, and take turns at sharing the mount.
        again = mounts.mount(lab.ref, record=True, cache=cache) if turn % 5 == 4 else None
        for path in read:
            assert len(path.read_bytes()) > 400_000
        if again is not None:
            assert again.shared
            mounts.umount(again)
    mounts.umount(mounted)
    after = lab.trace()
    assert before is not None
    assert after is not None
    assert pages(after) == pages(before)
    assert pages(after.select_hot(1.0)) >= files_of(lab)


def files_of(lab: Lab) -> set[int]:
    """The first pages of the files that every start read."""
    with open_image(lab.ref, str(lab.cache)) as image:
        rows = {f.path.decode(): f.extents for f in image.parts.files.files}
    return {rows[path][0].data_offset for path in ("data/f7", "data/f2")}


def pages(trace: Trace) -> set[int]:
    return {page for e in trace.extents for page in range(e.offset, e.offset + e.length, 4096)}


def test_a_hot_set_is_carried_over_to_the_next_version(
    lab: Lab, registry: Any, tmp_path: Path, mounts: Mounts
):
    lab.record("cat /data/f7 /data/f2 > /dev/null")
    changed = layers(f2=noise(400_000, "another"), a=noise(90_000))
    made = write_layout(tmp_path / "next", Image(changed, config=CONFIG), tag="2")
    newer = registry.push(made.source, "starts/next", "1")
    lab.run("build", newer)
    told = lab.run("hotset", "build", newer, "--from", lab.ref, "--push")
    assert "carried over" in told
    with open_image(newer, str(lab.cache)) as image:
        trace = image.trace()
        assert trace is not None
        names = {part.name for part in summarise(trace, image.parts.files).files}
    assert {"data/f7", "bin/busybox"} <= names
    assert not {"data/f2", "data/a"} & names
    assert mounts.mount(newer).hot_set


def test_recordings_of_nodes_are_merged(lab: Lab, tmp_path: Path, mounts: Mounts):
    lab.record("cat /data/f7 > /dev/null", "--workload", "merged")
    lab.run("hotset", "merge", lab.ref, "--workload", "merged", "-o", str(tmp_path / "one.trace"))
    other = Lab(tmp_path / "other", lab.ref)
    other.record("cat /data/f4 > /dev/null", "--workload", "merged")
    file_ = str(tmp_path / "one.trace")
    body = json.loads(
        other.run("hotset", "merge", lab.ref, file_, "--workload", "merged", "--json")
    )
    assert (body["starts"], body["merged"]) == (2, 2)
    assert set(other.read("merged")) == {"data/f7", "data/f4"}


def test_replay_reads_ahead_in_a_tree_and_is_no_start(lab: Lab, mounts: Mounts):
    lab.record("cat /data/f7 /data/f2 > /dev/null", "--workload", "warm", "--push")
    evict(str(lab.cache))
    mounted = mounts.mount(lab.ref, hot=False, record=True, workload="replayed", cache=lab.cache)
    with page_cache.staying():
        lab.run("replay", lab.ref, mounted.directory, "--workload", "warm")
        read = [Path(mounted.directory, path) for path in ("data/f7", "data/f2")]
        with page_cache.held_in_memory(read, limit_s=0):
            assert page_cache.share_in_memory(Path(mounted.directory, "data/f5")) < 1
    mounts.umount(mounted)
    assert lab.trace("replayed") is None
