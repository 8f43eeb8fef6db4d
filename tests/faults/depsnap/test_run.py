"""`deps run` when things break: kills at every step, races, corruption, a store that is gone."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from bootseer.depsnap.capture import scan
from bootseer.depsnap.capture.entries import RootDelta
from bootseer.depsnap.format import archive
from bootseer.depsnap.store import record_file, records
from bootseer.storage.open import open_store
from tests.support.commands.deps_node import Node
from tests.support.mounts.tmpfs import tmpfs
from tests.support.samples.wheels import make_wheel
from tests.support.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    make_wheel(folder, "bootseer_alpha", "1.0")
    return folder


@pytest.fixture
def node(tmp_path: Path, wheelhouse: Path) -> Node:
    return Node(tmp_path, wheelhouse, tool="uv")


def published(node: Node) -> dict[str, object]:
    assert node.run().returncode == 0
    assert node.last() == ("ok", "published")
    (path,) = node.store.glob("deps/*/record-*.json")
    body: dict[str, object] = json.loads(path.read_text())
    return body


@pytest.fixture(scope="session")
def first(tmp_path_factory: pytest.TempPathFactory, wheelhouse: Path) -> Path:
    """Where a node stood that published a snapshot; what it stored is put aside in `kept`."""
    base = tmp_path_factory.mktemp("nodes")
    node = Node(base, wheelhouse, tool="uv")
    published(node)
    node.store.rename(base / "kept")
    return base


@pytest.fixture
def second(first: Path, wheelhouse: Path) -> Node:
    """A new node at the place of the first, whose store has what that one published."""
    for path in first.iterdir():
        if path.name != "kept":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    node = Node(first, wheelhouse, tool="uv")
    shutil.copytree(first / "kept", node.store)
    return node


def fell_back(node: Node, *options: object) -> str:
    """A start that went the plain way, all the same with the install's code; its reason."""
    done = node.run(*options)
    assert done.returncode == 0
    assert node.works()
    assert node.last()[0] == "fallback"
    assert node.reason() in done.stderr
    assert done.stderr.count("\n") == 1
    return node.reason()


# --- kills ---------------------------------------------------------------------------------------

STEPS = (
    *("key", "lease", "scanned before", "installed", "scanned after"),
    *("packed", "verified", "stored", "recorded"),
)


@pytest.mark.parametrize("step", STEPS)
def test_kill_9_at_any_point_of_capture_and_publish(node: Node, step: str) -> None:
    code, _ = node.finish(node.start(step, "SIGKILL"))
    assert code == -signal.SIGKILL
    node.fresh()
    done = node.run()
    assert (done.returncode, done.stderr) == (0, "")
    assert node.last() == ("ok", "restored" if step == "recorded" else "published")
    assert node.works()
    node.fresh()
    node.run()
    assert node.last() == ("ok", "restored")
    assert node.works()


@pytest.mark.parametrize("step", STEPS)
def test_sigterm_in_every_phase_leaves_nothing_behind(node: Node, step: str) -> None:
    code, _ = node.finish(node.start(step, "SIGTERM"))
    assert code == 128 + signal.SIGTERM
    assert not node.leftovers()
    assert len(node.archives()) == (1 if step == "recorded" else 0)
    node.fresh()
    node.run()
    assert node.last() == ("ok", "restored" if step == "recorded" else "published")


@pytest.mark.parametrize("step", ["restore", "staging made", "staged"])
@pytest.mark.parametrize("action", ["SIGKILL", "SIGTERM"])
def test_end_while_restoring_never_leaves_half_an_environment(
    second: Node, step: str, action: str
) -> None:
    code, _ = second.finish(second.start(step, action))
    assert code == {"SIGKILL": -signal.SIGKILL, "SIGTERM": 128 + signal.SIGTERM}[action]
    if action == "SIGTERM":
        assert not second.leftovers()
    half = list(second.place.glob("lib/python3*/site-packages/*alpha*"))
    assert second.works() or not half
    second.run()
    assert second.last() == ("ok", "restored")
    assert second.works()
    assert not second.leftovers()


@pytest.mark.parametrize("step", STEPS[:3])
def test_fault_before_the_install_falls_back(node: Node, step: str) -> None:
    code, errors = node.finish(node.start(step, "raise"))
    assert code == 0
    assert "injected fault" in errors
    assert node.works()
    assert node.last()[0] == "fallback"


@pytest.mark.parametrize("step", STEPS[4:8])
def test_fault_after_the_install_costs_the_snapshot_only(node: Node, step: str) -> None:
    code, errors = node.finish(node.start(step, "raise"))
    assert code == 0
    assert "injected fault" in errors
    assert node.works()
    assert not node.archives()
    assert not node.leftovers()
    node.fresh()
    node.run()
    assert node.last() == ("ok", "published")


@pytest.mark.parametrize("step", ["packed", "verified", "stored"])
def test_killed_background_publisher_hands_over(node: Node, step: str) -> None:
    node.finish(node.start(step, "SIGKILL", publish="background"))
    assert node.last() == ("ok", "publishing")
    until(lambda: node.steps()[-1] == step)
    assert len(node.archives()) == (1 if step == "stored" else 0)
    node.fresh()
    done = node.run("--wait", "always", "--wait-limit", 60)
    assert done.returncode == 0
    assert node.works()
    assert node.last() == ("ok", "published")  # for the other one recorded nothing
    assert node.steps()[-1] == step


KILLS = 100
"""How many meet a capture, and how many a restore, are half of these."""
BOUNDS = {"capture": ("lease", "recorded"), "restore": ("restore", "done")}
"""The first and the last step of the work that a kill must meet."""
OTHER_ROOTS = (
    "bootseer: the newest snapshot of this command was made from other inputs: roots before\n"
)
"""What a start says when it, or the one that published, went on from what a kill had left."""


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("publish", ["inline", "background"])
def test_kills_at_random_moments(node: Node, publish: str) -> None:
    """Starts killed while they capture or restore; what the next one finds is whole."""
    chance, found, usual_s = Random(20240817), Counter[str](), dict[str, float]()
    for turn in range(20 * KILLS):
        work = min(BOUNDS, key=lambda kind: found[kind])
        if found[work] == KILLS // 2:
            break
        if work == "capture":
            shutil.rmtree(node.store, ignore_errors=True)
        node.fresh()
        child = node.start(publish=publish)
        first, last = BOUNDS[work]
        # What is stored may be of an environment that a kill had left, and not be restored here.
        while first not in node.steps() and child.poll() is None:
            time.sleep(0.001)
        began_s, begun = time.monotonic(), first in node.steps()
        if begun and work in usual_s:
            time.sleep(chance.uniform(0.0, usual_s[work]))
            child.kill()
        code, _ = node.finish(child)
        assert code in (0, -signal.SIGKILL)
        if begun:
            usual_s.setdefault(work, time.monotonic() - began_s)
        found[work] += begun and code != 0 and last not in node.steps()
        node.cache = node.cache.with_name(f"after{turn}")
        done = node.run("--wait", "always", "--wait-limit", 120)
        assert done.returncode == 0, turn
        assert done.stderr in ("", OTHER_ROOTS), turn
        assert node.works(), turn
        for record in node.store.glob("deps/*/record-*.json"):
            body = json.loads(record.read_text())
            assert (record.parent / body["archive"]["name"]).exists()
        shutil.rmtree(node.cache)
    assert found == dict.fromkeys(BOUNDS, KILLS // 2), "starts end too early to be killed"


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.root
def test_many_nodes_many_times(node: Node) -> None:
    for _ in range(20):
        shutil.rmtree(node.store, ignore_errors=True)
        node.count.unlink(missing_ok=True)
        shutil.rmtree(node.events, ignore_errors=True)
        race(node, 8)


# --- several nodes -------------------------------------------------------------------------------


@pytest.mark.root
def test_nodes_with_wait_always_install_once(node: Node) -> None:
    race(node, 4)


def race(node: Node, count: int) -> None:
    """Real processes, each with its own environment at the same path, as in containers."""
    homes = [node.home.parent / f"node{n}" for n in range(count)]
    children = []
    for home in homes:
        shutil.rmtree(home, ignore_errors=True)
        shutil.copytree(node.home, home, symlinks=True)
        words = ["run", "--store", str(node.store), "--cache", str(home / "cache")]
        words += ["--wait", "always", "--publish", "inline", "--form", "archive", "--"]
        start = [sys.executable, "-m", "bootseer", "deps", *words, *node.install]
        script = f"mount --bind {home} {node.home} && cd {node.home} && exec {shlex.join(start)}"
        children.append(
            subprocess.Popen(
                ["unshare", "-m", "sh", "-c", script],
                env=node.environ(),
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    for child in children:
        _, errors = child.communicate(timeout=120)
        assert (child.returncode, errors) == (0, "")
    assert node.installs == 1
    results = sorted(end["attributes"]["bootseer.deps.result"] for end in node.ends())
    assert results == ["published", *["restored"] * (count - 1)]
    for home in homes:
        assert list(home.glob("venv/lib/python3*/site-packages/bootseer_alpha/__init__.py"))


def test_two_processes_on_one_node_with_one_target(node: Node) -> None:
    children = [node.start(wait="always") for _ in range(3)]
    for child in children:
        assert node.finish(child)[0] == 0
    assert node.installs == 1
    assert sorted(e["attributes"]["bootseer.deps.result"] for e in node.ends()) == [
        *("in place", "in place", "published")
    ]
    assert node.works()


def holder(node: Node, at: str = "scanned before") -> subprocess.Popen[str]:
    """Another node that holds the lease and does not go on by itself."""
    child = node.start(at, "print", cache=str(node.home.parent / "other"))
    assert child.stdout is not None
    assert child.stdout.readline() == at + "\n"
    return child


def test_wait_never_and_auto_without_past_install_at_once(node: Node) -> None:
    other = holder(node)
    for policy in ("never", "auto"):
        assert node.run("--wait", policy).returncode == 0
        assert node.last() == ("ok", "installed")
        shutil.rmtree(node.place)
        node.make_venv()
        node.cache = node.cache.with_name(policy)
    node.finish(other)


def test_wait_always_is_bounded(node: Node) -> None:
    other = holder(node)
    done = node.run("--wait", "always", "--wait-limit", 0.5)
    assert done.returncode == 0
    assert "waited" in node.reason()
    assert node.works()
    assert node.spans("deps.install.wait")[-1]["attributes"]["bootseer.wait"] is True
    node.finish(other)


@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGSTOP])
def test_dead_or_stopped_holder_does_not_stop_the_others(node: Node, signal_: int) -> None:
    other = holder(node)
    other.send_signal(signal_)
    child = node.start(wait="always")
    code, errors = node.finish(child)
    assert (code, errors) == (0, "")
    assert node.last() == ("ok", "published")
    if signal_ == signal.SIGSTOP:
        # It wakes up, finishes its own install, and finds that another was first.
        other.send_signal(signal.SIGCONT)
    node.finish(other)
    assert len(node.archives()) == 1
    node.fresh()
    node.run()
    assert node.last() == ("ok", "restored")


def test_failing_holder_lets_the_next_one_install(node: Node) -> None:
    """With `always` the followers try one after the other, never at the same time."""
    flag = node.home.parent / "fail"
    flag.write_text("")
    command = ["sh", "-c", f"[ ! -e {flag} ] || exit 5; {shlex.join(node.plain)}"]
    options = {"command": command, "also": [str(node.place)]}
    first = node.start("installed", "print", cache=f"{node.cache}-first", **options)
    assert first.stdout is not None
    assert first.stdout.readline() == "installed\n"
    flag.unlink()
    second = node.start("wait", "print", wait="always", **options)
    assert second.stdout is not None
    assert second.stdout.readline() == "wait\n"
    assert node.finish(first)[0] == 5
    assert node.finish(second) == (0, "")
    assert node.last() == ("ok", "published")


# --- the store -----------------------------------------------------------------------------------


def test_store_that_is_a_file(node: Node) -> None:
    node.store.write_text("no directory")
    assert "store" in fell_back(node)


def test_unknown_store(node: Node) -> None:
    done = node.run("--store", "s3://bucket/x")
    assert done.returncode == 0
    assert "s3://" in node.reason()
    assert node.works()


def test_store_that_goes_away_during_the_install(node: Node) -> None:
    child = node.start("installed", "print")
    assert child.stdout is not None
    child.stdout.readline()
    node.store.rename(node.store.with_name("away"))  # at once: the holder writes there meanwhile
    node.store.write_text("gone")
    code, errors = node.finish(child)
    assert code == 0
    assert errors
    assert node.last()[0] == "fallback"
    assert node.works()


def test_unwritable_cache(node: Node) -> None:
    node.cache.write_text("no directory")
    fell_back(node)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with tmpfs(tmp_path / "store", "64k") as folder:
        yield folder


@pytest.mark.root
def test_full_store(node: Node, disk: Path) -> None:
    (disk / "filler").write_bytes(bytes(40 << 10))
    script = f"head -c 200000 /dev/urandom > {node.place}/big; {shlex.join(node.plain)}"
    done = node.run("--also", node.place, command=["sh", "-c", script])
    assert done.returncode == 0
    assert node.last()[0] == "fallback"
    assert "space" in node.reason().lower()
    assert node.works()
    assert not node.archives()
    assert not node.leftovers()


@pytest.mark.root
def test_read_only_store_still_restores(node: Node, disk: Path) -> None:
    published(node)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    node.fresh()
    node.run()
    assert node.last() == ("ok", "restored")
    assert node.works()
    (node.home / "requirements.txt").write_text("bootseer-alpha==1.0\n")
    node.fresh()
    assert "read-only" in fell_back(node).lower()


# --- corruption ----------------------------------------------------------------------------------


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x40
    path.write_bytes(data)


@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_flipped_byte_falls_back_and_is_published_anew(second: Node, where: str) -> None:
    (archive,) = second.archives()
    size = archive.stat().st_size
    flip(archive, {"first": 20, "middle": size // 3, "last": size - 30}[where])
    reason = fell_back(second)
    assert "archive" in reason
    assert second.last()[1] == "published"
    assert second.installs == 1
    second.fresh()
    second.run()
    assert second.last() == ("ok", "restored")
    assert second.works()
    assert list(second.store.glob("deps/*/record-000001.bad"))


def test_a_folder_in_an_archives_place_is_published_anew(second: Node) -> None:
    """Every start installed, for ever."""
    (archive,) = second.archives()
    archive.unlink()
    archive.mkdir()
    (archive / "file").write_bytes(b"x")
    assert "it is a folder" in fell_back(second)
    assert second.last()[1] == "published"
    second.fresh()
    second.run()
    assert second.last() == ("ok", "restored")


def test_a_damaged_snapshot_is_no_matter_of_other_inputs(second: Node) -> None:
    """The command's newest snapshot is another one, and was blamed."""
    (archive,) = second.archives()
    (second.home / "requirements.txt").write_text("bootseer-alpha==1.0\n")
    assert "made from other inputs" in second.run().stderr
    assert second.last() == ("ok", "published")
    (second.home / "requirements.txt").write_text("bootseer-alpha\n")
    second.fresh()
    flip(archive, 20)
    assert "archive" in fell_back(second)  # in one line
    assert second.last()[1] == "published"


def test_truncated_and_missing_archives(second: Node) -> None:
    (archive,) = second.archives()
    archive.write_bytes(archive.read_bytes()[:-100])
    fell_back(second)
    (newer,) = [a for a in second.archives() if a != archive]
    newer.unlink()
    second.fresh()
    fell_back(second)
    second.fresh()
    second.run()
    assert second.last() == ("ok", "restored")


HOSTILE = (
    *(b"", b"{", b"null", b"[]", b"\xff\xfe\x00", b"[" * 100_000, b'{"version": 1}'),
    *(b'{"version": "1"}', b'{"version": true}', b"x" * (2 << 20)),
)


@pytest.mark.parametrize("content", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_record_falls_back_and_is_published_anew(second: Node, content: bytes) -> None:
    (path,) = second.store.glob("deps/*/record-*.json")
    path.write_bytes(content)
    assert "record" in fell_back(second)
    assert second.last()[1] == "published"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("roots", "x"),
        ("roots", [1]),
        ("install_s", -1),
        ("install_s", "1"),
        ("install_s", 1e300),
        ("created_unix_s", None),
        ("key", "0" * 64),
        ("host", {"a": 1}),
        ("archive", []),
        ("archive.name", "../../../etc/passwd"),
        ("archive.name", "archive-x.tar.zst"),
        ("archive.index_digest", "zz"),
        ("archive.owners", [[0]]),
        ("archive.size", True),
    ],
)
def test_wrong_types_in_a_record(tmp_path: Path, field: str, value: object) -> None:
    body = json.loads(record_file.encode(sample()))
    outer, _, inner = field.partition(".")
    if inner:
        body[outer][inner] = value
    else:
        body[outer] = value
    store = open_store(str(tmp_path))
    store.create(f"deps/{KEY}/record-000001.json", json.dumps(body).encode())
    with pytest.raises(records.BadRecordError) as caught:
        records.find_newest(store, KEY)
    assert caught.value.generation == 1
    assert "\n" not in str(caught.value)


KEY = "ab" * 32


def sample() -> record_file.Record:
    archive = record_file.Archive(
        f"archive-{'0' * 32}.tar.zst",
        1,
        1,
        1,
        record_file.Digest("1" * 64),
        record_file.Digest("2" * 64),
        (),
    )
    return record_file.Record(KEY, KEY, 1.0, ("pip",), ("/x",), (), 1.0, 1.0, {"a": "b"}, archive)


def test_record_of_a_newer_version_is_left_alone(second: Node) -> None:
    (path,) = second.store.glob("deps/*/record-*.json")
    body = json.loads(path.read_text())
    path.write_text(json.dumps(body | {"version": record_file.VERSION + 1, "new": "field"}))
    assert "use a newer bootseer" in fell_back(second)
    assert not list(second.store.glob("deps/*/*.bad"))


@pytest.mark.parametrize("version", [0, -1])
def test_record_of_a_version_that_never_was_is_refused(second: Node, version: int) -> None:
    (path,) = second.store.glob("deps/*/record-*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": version}))
    assert f"the version {version} is unknown" in fell_back(second)
    assert second.last() == ("fallback", "published")
    second.fresh()
    second.run()
    assert second.last() == ("ok", "restored")


def test_record_that_writes_elsewhere_is_refused(second: Node) -> None:
    (path,) = second.store.glob("deps/*/record-*.json")
    body = json.loads(path.read_text())
    path.write_text(json.dumps(body | {"roots": ["/etc"]}))
    assert "/etc" in fell_back(second)
    assert second.last() == ("fallback", "published")
    second.fresh()
    second.run()
    assert second.last() == ("ok", "restored")


def test_newest_of_another_command_is_not_taken(node: Node) -> None:
    """`latest/` is unsigned: who writes there must not choose another environment."""
    node.run()
    node.fresh()
    node.run(command=node.counted([*node.plain, "bootseer-alpha"]))
    one, other = node.store.glob("deps/latest/*.json")
    texts = one.read_text(), other.read_text()
    one.write_text(texts[1])
    other.write_text(texts[0])
    node.fresh()
    (node.home / "requirements.txt").write_text("bootseer-alpha==1.0\n")
    node.run("--resolve-timeout", 0)
    assert node.last() == ("ok", "published")
    assert node.works()


@pytest.mark.parametrize("shared", [False, True])
def test_archive_that_writes_elsewhere_is_refused(node: Node, *, shared: bool) -> None:
    """The record names the command's roots alone, the archive that it points to another."""
    published(node)
    other = node.home / "elsewhere"
    other.mkdir()
    (other / "file").write_text("x")
    (path,) = node.archives()
    info = archive.create(str(path), [RootDelta.of_tree(scan.scan(str(other)))])
    shutil.rmtree(other)
    (record,) = node.store.glob("deps/*/record-*.json")
    body = json.loads(record.read_text())
    for field in ("size", "raw_bytes", "entries", "index_digest", "tree_digest"):
        body["archive"][field] = getattr(info, field)
    record.write_text(json.dumps(body))
    node.fresh()
    assert node.run(cache_shared=shared).returncode == 0
    assert "roots" in node.reason()
    assert node.last() == ("fallback", "published")
    assert not other.exists()
    assert node.works()


def test_signed_records(node: Node, tmp_path: Path) -> None:
    (tmp_path / "key1").write_text("0123456789abcdef-one\n")
    (tmp_path / "key2").write_text("0123456789abcdef-two\n")
    signed = ["--sign-key", tmp_path / "key1"]
    node.run(*signed)
    assert node.last() == ("ok", "published")
    node.fresh()
    node.run(*signed)
    assert node.last() == ("ok", "restored")
    node.fresh()
    node.run("--sign-key", tmp_path / "key2")
    assert node.last() == ("ok", "published")
    for path in node.store.glob("deps/*/record-*.json"):
        body = json.loads(path.read_text())
        path.write_text(json.dumps(body | {"install_s": 99.0}))
    node.fresh()
    node.run(*signed)
    assert node.last() == ("fallback", "published")
    assert "not signed" in node.reason()
    node.fresh()
    (tmp_path / "key1").write_text("short")
    assert "shorter than 16" in fell_back(node, *signed)


def test_an_older_snapshot_serves_where_the_newest_record_is_forged(
    node: Node, tmp_path: Path
) -> None:
    """The search ended at a record that is not signed, and each start installed for itself."""
    (tmp_path / "key").write_text("0123456789abcdef\n")
    signed = ["--sign-key", tmp_path / "key"]
    node.run(*signed)
    (path,) = node.store.glob("deps/*/record-*.json")
    forged = path.with_name("record-000002.json")
    forged.write_text(path.read_text().replace('"install_s": ', '"install_s": 9'))
    node.fresh()
    done = node.run(*signed)
    assert node.last() == ("fallback", "restored")
    assert "is not signed with the given key" in done.stderr
    assert "plain install" not in done.stderr
    assert node.installs == 1
    done = node.cli("verify", "--store", node.store, "--mark", "--json", *signed)
    problems = {row["generation"]: row["problem"] for row in json.loads(done.stdout)}
    assert "not signed" in problems[2]
    assert problems[1] == ""
    assert not list(node.store.glob("deps/*/*.bad"))  # it may be another key's
    path.unlink()
    node.fresh()
    assert "not signed" in fell_back(node, *signed)
    assert node.last() == ("fallback", "published")


@pytest.mark.root
def test_an_older_snapshot_serves_where_a_store_can_only_be_read(
    node: Node, tmp_path: Path
) -> None:
    """The mark of a damaged record could not be made there, and that ended the search."""
    published(node)
    (path,) = node.store.glob("deps/*/record-*.json")
    path.with_name("record-000002.json").write_text("{")
    node.fresh()
    words = [sys.executable, "-m", "bootseer", "deps", "run", "--store", str(node.store)]
    words += ["--cache", str(node.cache), "--form", "archive", "--", *node.install]
    store = shlex.quote(str(node.store))
    script = (
        f"mount --bind {store} {store} && mount -o remount,bind,ro {store} && {shlex.join(words)}"
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script],
        cwd=node.home,
        env=node.environ(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert "is damaged" in done.stderr
    assert node.last() == ("fallback", "restored")
    assert node.installs == 1
    assert node.works()


def test_a_record_that_is_removed_while_they_are_read_is_passed_over(tmp_path: Path) -> None:
    """`deps gc` came between listing and reading, and the start went the plain way."""
    store = open_store(str(tmp_path))
    for generation in (1, 2, 3):
        store.create(f"deps/{KEY}/record-{generation:06d}.json", record_file.encode(sample()))
    found = records.find_usable(store, KEY)
    assert next(found).generation == 3
    store.delete(f"deps/{KEY}/record-000002.json")
    assert next(found).generation == 1


# --- the shared tree -----------------------------------------------------------------------------


def test_second_start_on_a_node_uses_the_shared_tree(node: Node) -> None:
    published(node)
    node.fresh()
    for _ in range(2):
        done = node.run(cache_shared=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert node.last() == ("ok", "restored")
        assert node.ends()[-1]["attributes"]["bootseer.deps.form"] != "archive"
        assert node.works()
        clear(node)
    assert len(list((node.cache / "trees").rglob("tree.json"))) == 1


def clear(node: Node) -> None:
    """The container ends: its mounts go, and a new one has the image's files."""
    while os.path.ismount(node.place):
        subprocess.run(["umount", node.place], check=True)
    shutil.rmtree(node.place)
    node.make_venv()


@pytest.fixture(autouse=True)
def no_mounts(tmp_path: Path) -> Iterator[None]:
    yield
    text = Path("/proc/self/mounts").read_text(encoding="utf-8")
    left = [line.split()[1] for line in text.splitlines() if f"{tmp_path}/" in line]
    for place in reversed(left):
        subprocess.run(["umount", place], check=True)
