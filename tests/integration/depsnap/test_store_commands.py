"""The commands that look at a store, what gc may remove, and when a follower waits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.cli import root
from bootseer.depsnap.store import gc
from bootseer.depsnap.store.records import Times
from bootseer.depsnap.wait_policy import keep_waiting, poll_s
from bootseer.storage.store import Stat
from tests.support.commands.deps_node import Node
from tests.support.samples.wheels import make_wheel

pytestmark = pytest.mark.slow

# --- waiting -------------------------------------------------------------------------------------

PAST = Times(install_s=100.0, publish_s=10.0, restore_s=5.0)


@pytest.mark.parametrize(
    ("policy", "past", "held_s", "waited_s", "wait"),
    [
        ("never", PAST, 109, 0, False),
        ("auto", None, 50, 0, False),
        ("always", None, 50, 0, True),
        ("always", PAST, 5000, 899, True),
        ("always", PAST, 50, 900, False),
        # Holder expected to finish in 110 - held; ours to restore 5; a plain install takes 100.
        ("auto", PAST, 14, 0, False),
        ("auto", PAST, 15, 0, True),
        ("auto", PAST, 109, 90, True),
        ("auto", PAST, 120, 94, True),
        ("auto", PAST, 120, 96, False),
        ("auto", PAST, 138, 20, False),
    ],
)
def test_keep_waiting(
    policy: str, past: Times | None, held_s: float, waited_s: float, wait: bool
) -> None:
    assert keep_waiting(policy, past, held_s, waited_s, 900) is wait  # type: ignore[arg-type]


times = st.floats(min_value=0, max_value=1e5)


@given(times, times, times, times, st.floats(min_value=0.1, max_value=3))
def test_auto_never_costs_more_than_one_plain_install(
    install_s: float, publish_s: float, restore_s: float, held_s: float, step_s: float
) -> None:
    """Whatever the holder does, the wait ends before a plain install of our own would have."""
    past = Times(install_s, publish_s, restore_s)
    if keep_waiting("auto", past, held_s, 0.0, 1e9):
        assert max(0.0, install_s + publish_s - held_s) + restore_s <= install_s
    waited_s = install_s + step_s
    assert not keep_waiting("auto", past, held_s, waited_s, 1e9)


def test_poll_slows_down_to_a_second() -> None:
    assert poll_s(0) == 0.1
    assert poll_s(1000) == 1.0


# --- gc ------------------------------------------------------------------------------------------

DAY = 86400.0
NOW = 1000 * DAY


def state(
    key: str, *, age_days: float, size: int, extra: tuple[Stat, ...] = (), lease_days: float = 900
) -> gc.KeyState:
    born = NOW - age_days * DAY
    archive = f"deps/{key}/archive-{key * 32}.tar.zst"
    objects = (
        Stat(f"deps/{key}/record-000001.json", 10, born, False),
        Stat(archive, size, born, False),
        *extra,
    )
    lease = Stat(f"deps/{key}/lease/00000001.json", 1, NOW - lease_days * DAY, False)
    return gc.KeyState(key, objects, (), (lease,), (gc.Snapshot(objects[0].name, archive),))


def names(removals: list[gc.Removal]) -> list[str]:
    return [removal.name for removal in removals]


def test_nothing_goes_without_a_reason() -> None:
    assert gc.plan([state("a", age_days=500, size=10)], NOW) == []


def test_age_removes_records_before_archives_and_keeps_lease_numbers() -> None:
    plan = gc.plan(
        [state("a", age_days=8, size=5), state("b", age_days=6, size=5)], NOW, max_age_s=7 * DAY
    )
    assert names(plan) == ["deps/a/record-000001.json", f"deps/a/archive-{'a' * 32}.tar.zst"]


def test_size_removes_the_oldest() -> None:
    states = [state("a", age_days=1, size=50), state("b", age_days=3, size=50)]
    states.append(state("c", age_days=2, size=50))
    plan = gc.plan(states, NOW, max_size_bytes=100)
    assert {name.split("/")[1] for name in names(plan)} == {"b"}
    plan = gc.plan(states, NOW, max_size_bytes=60)
    assert {name.split("/")[1] for name in names(plan)} == {"b", "c"}


def test_held_or_fresh_lease_protects_its_key() -> None:
    young = state("a", age_days=8, size=5, lease_days=0)
    assert gc.plan([young], NOW, max_age_s=0, max_size_bytes=0) == []


def test_leftovers_wait_for_a_day() -> None:
    old = Stat(f"deps/a/archive-{'f' * 32}.tar.zst", 7, NOW - 2 * DAY, False)
    new = Stat(f"deps/a/archive-{'e' * 32}.tar.zst", 7, NOW - DAY / 2, False)
    found = state("a", age_days=8, size=5, extra=(old, new))
    left = (
        Stat("deps/a/.tmp-1", 9, NOW - 2 * DAY, False),
        Stat("deps/a/.tmp-2", 9, NOW - DAY / 2, False),
    )
    found = gc.KeyState(found.key, found.objects, left, found.leases, found.snapshots)
    plan = gc.plan([found], NOW)
    assert names(plan) == ["deps/a/.tmp-1", old.name]
    assert [removal.why for removal in plan] == ["temporary", "unreferenced"]


def three_generations() -> gc.KeyState:
    """Of 9, 5 and 1 days and 50 bytes each; the second is marked bad."""
    objects: list[Stat] = []
    snapshots = []
    for number, age_days in enumerate((9, 5, 1), start=1):
        record, born = f"deps/a/record-{number:06d}.json", NOW - age_days * DAY
        archive = f"deps/a/archive-{str(number) * 32}.tar.zst"
        objects += [Stat(archive, 50, born, False), Stat(record, 10, born, False)]
        snapshots.append(gc.Snapshot(record, archive))
    objects.append(Stat("deps/a/record-000002.bad", 1, NOW, False))
    return gc.KeyState("a", tuple(objects), (), (), (snapshots[2], snapshots[0]))


def test_each_generation_goes_by_its_own_age_and_counts_by_its_own_size() -> None:
    state = three_generations()
    bad = f"deps/a/archive-{'2' * 32}.tar.zst"
    oldest = ["deps/a/record-000001.json", f"deps/a/archive-{'1' * 32}.tar.zst"]
    assert names(gc.plan([state], NOW)) == [bad]
    assert names(gc.plan([state], NOW, max_age_s=7 * DAY)) == [bad, *oldest]
    assert names(gc.plan([state], NOW, max_size_bytes=100)) == [bad]
    assert names(gc.plan([state], NOW, max_size_bytes=99)) == [bad, *oldest]
    assert set(names(gc.plan([state], NOW, max_age_s=0))) == {o.name for o in state.objects}


def test_of_a_newer_version_nothing_but_temporaries_goes() -> None:
    found = three_generations()
    left = (Stat("deps/a/.tmp-1", 9, NOW - 2 * DAY, False),)
    unread = gc.KeyState(found.key, found.objects, left, (), None)
    assert names(gc.plan([unread], NOW, max_age_s=0, max_size_bytes=0)) == ["deps/a/.tmp-1"]


# --- the commands --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Node:
    """A store with one snapshot, made by pip."""
    base = tmp_path_factory.mktemp("node")
    make_wheel(base / "wheels", "bootseer_alpha", "1.0")
    node = Node(base, base / "wheels", tool="uv")
    assert node.run().returncode == 0
    return node


def shown(node: Node, *words: object, code: int = 0) -> object:
    done = node.cli(*words[:1], "--store", node.store, "--json", *words[1:])
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def test_ls(filled: Node) -> None:
    (row,) = shown(filled, "ls")  # type: ignore[misc]
    assert row["roots"] == [str(filled.place)]
    assert row["install_s"] > 0
    plain = filled.cli("ls", "--store", filled.store).stdout
    assert plain.startswith(row["key"][:12])
    assert plain.count("\n") == 1


def test_inspect(filled: Node) -> None:
    (row,) = shown(filled, "ls")  # type: ignore[misc]
    body = shown(filled, "inspect", "--files", row["key"][:10])
    assert isinstance(body, dict)
    assert next(iter(body["packages"])).startswith("bootseer_alpha")
    assert any(path.endswith("bootseer_alpha/__init__.py") for path, _, _ in body["files"])
    assert "bootseer_alpha" in filled.cli("inspect", "--store", filled.store, row["key"]).stdout


def test_key_is_the_one_that_run_uses(filled: Node) -> None:
    (row,) = shown(filled, "ls")  # type: ignore[misc]
    done = filled.cli("key", "--cache", filled.cache, "--json", "--", *filled.install)
    body = json.loads(done.stdout)
    assert body["key"] == row["key"]
    assert body["decided_by"] == "index"
    assert [i["name"] for i in body["ingredients"]][:3] == ["format", "python", "python prefix"]
    explained = filled.cli("key", "--cache", filled.cache, "--explain", "--", *filled.install)
    assert explained.stdout.startswith(row["key"] + "\n")
    assert "roots before" in explained.stdout


def test_verify_good_and_bad(tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", "bootseer_alpha", "1.0")
    node = Node(tmp_path, tmp_path / "wheels", tool="uv")
    node.run()
    (row,) = shown(node, "verify")  # type: ignore[misc]
    assert row["problem"] == ""
    (archive,) = node.archives()
    data = bytearray(archive.read_bytes())
    data[100] ^= 1
    archive.write_bytes(data)
    (row,) = shown(node, "verify", "--mark", row["key"], code=6)  # type: ignore[misc]
    assert "archive" in row["problem"]
    assert shown(node, "ls") == []
    node.fresh()
    node.run()
    assert node.last() == ("ok", "published")


def test_a_key_without_a_snapshot_is_not_called_good(tmp_path: Path) -> None:
    """An install that changed nothing leaves a lease and publishes nothing."""
    make_wheel(tmp_path / "wheels", "bootseer_alpha", "1.0")
    node = Node(tmp_path, tmp_path / "wheels", tool="uv")
    node.run()
    (row,) = shown(node, "ls")  # type: ignore[misc]
    other = "f" * len(row["key"])
    (Path(node.store) / "deps" / other / "lease").mkdir(parents=True)
    assert [each["key"] for each in shown(node, "verify")] == [row["key"]]  # type: ignore[union-attr, attr-defined]
    done = node.cli("verify", "--store", node.store, other[:12])
    assert done.returncode == 3
    assert "nothing usable is published" in done.stderr


def test_restore_by_key_says_which_form_and_why(filled: Node, tmp_path: Path) -> None:
    (row,) = shown(filled, "ls")  # type: ignore[misc]
    place = tmp_path / "elsewhere"
    words = ["restore", "--to", f"{filled.place}={place}", "--form", "archive", row["key"][:8]]
    body = shown(filled, *words)
    assert isinstance(body, dict)
    assert (body["form"], body["why"]) == ("archive", "asked for")
    assert list(place.glob("lib/python3*/site-packages/bootseer_alpha/__init__.py"))


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("inspect", "--store", "S", "ffff"), 3),
        (("restore", "--store", "S", "ffff"), 3),
        (("verify", "--store", "S", "ffff"), 3),
        (("ls", "--store", "s3://x/y"), 7),
        (("gc", "--store", "S", "--max-size", "many"), 2),
        (("run", "--store", "S"), 2),
        (("key", "--", "ls"), 2),
        (("key", "--key-file", "none.txt", "--also", "venv", "--", "ls"), 3),
    ],
)
def test_exit_codes_and_one_line(filled: Node, words: tuple[str, ...], code: int) -> None:
    done = filled.cli(*(str(filled.store) if w == "S" else w for w in words))
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    if code != 2 or words[0] == "key":
        assert done.stderr.count("\n") == 1
        assert done.stderr.startswith("bootseer: ")


@pytest.mark.parametrize(
    ("size", "code"), [("5GiB", 0), ("1.5T", 0), ("\N{SUPERSCRIPT TWO}", 2), ("5GG", 2), ("-1", 2)]
)
def test_sizes_are_those_of_all_commands(filled: Node, size: str, code: int) -> None:
    """A superscript digit was a traceback, and `GiB`, as we print it, no size."""
    done = filled.cli("gc", "--store", filled.store, "--dry-run", "--max-size", size)
    assert done.returncode == code
    assert "Traceback" not in done.stderr


def test_verify_needs_no_standard_error(filled: Node) -> None:
    words = [sys.executable, "-m", "bootseer", "deps", "verify", "--store", str(filled.store)]
    done = subprocess.run(
        ["sh", "-c", '"$@" 2>&-', "sh", *words],
        cwd=filled.home,
        env=filled.environ(),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.count("good")) == (0, 1)


def test_gc_of_a_real_store(tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", "bootseer_alpha", "1.0")
    node = Node(tmp_path, tmp_path / "wheels", tool="uv")
    node.run()
    (archive,) = node.archives()
    long_ago = time.time() - 10 * DAY
    for path in [*archive.parent.rglob("*"), archive.parent]:
        os.utime(path, (long_ago, long_ago))
    leftover = archive.parent / ".tmp-killed"
    leftover.write_bytes(b"x" * 1000)
    os.utime(leftover, (long_ago, long_ago))
    body = shown(node, "gc", "--max-age", 7, "--dry-run")
    assert isinstance(body, dict)
    assert {row["why"] for row in body["removed"]} == {"temporary", "too old"}
    assert archive.exists()
    assert leftover.exists()
    freed = shown(node, "gc", "--max-age", 7)
    assert isinstance(freed, dict)
    assert freed["bytes"] == body["bytes"] > 1000
    assert not archive.exists()
    assert not leftover.exists()
    assert shown(node, "ls") == []
    node.fresh()
    node.run()
    assert node.last() == ("ok", "published")


def test_ls_and_verify_see_each_snapshot_of_a_key(tmp_path: Path) -> None:
    """They saw the newest alone, and a damaged record hid all older ones from starts too."""
    wheels = tmp_path / "wheels"
    make_wheel(wheels, "bootseer_alpha", "1.0")
    node = Node(tmp_path, wheels, tool="uv")
    node.run()
    newer = make_wheel(wheels, "bootseer_alpha", "2.0")
    node.fresh()
    node.run()
    rows = shown(node, "ls")
    assert isinstance(rows, list)
    assert [row["packages"]["bootseer-alpha"] for row in rows] == ["2.0", "1.0"]
    assert [row["generation"] for row in rows] == [2, 1]
    key = rows[0]["key"]
    for name, version in ((key, "2.0"), (f"{key[:9]}:1", "1.0"), (f"{key}:2", "2.0")):
        body = shown(node, "inspect", name)
        assert isinstance(body, dict)
        assert f"bootseer_alpha-{version}.dist-info" in body["packages"]
    place = tmp_path / "elsewhere"
    shown(node, "restore", "--to", f"{node.place}={place}", "--form", "archive", f"{key}:1")
    assert list(place.rglob("bootseer_alpha-1.0.dist-info"))
    for name, code in ((f"{key}:3", 3), (f"{key}:x", 2), (f"{key}:", 2)):
        done = node.cli("inspect", "--store", node.store, name)
        assert (done.returncode, done.stderr.count("\n")) == (code, 1)
    archive = node.store / "deps" / rows[1]["key"] / rows[1]["archive"]["name"]
    whole = archive.read_bytes()
    archive.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    checked = shown(node, "verify", code=6)
    assert isinstance(checked, list)
    assert [bool(row["problem"]) for row in checked] == [False, True]
    archive.write_bytes(whole)
    (newest,) = node.store.glob("deps/*/record-000002.json")
    newest.write_text("{")
    rows = shown(node, "ls")
    assert isinstance(rows, list)
    assert sorted(bool(row.get("problem")) for row in rows) == [False, True]
    newer.unlink()
    node.fresh()
    node.run()
    assert node.last() == ("fallback", "restored")
    assert "is damaged" in node.reason()
    assert node.installs == 2


def test_gc_keeps_each_snapshot_of_a_key(tmp_path: Path) -> None:
    """The archives of all but the newest were taken for unreferenced after a day."""
    wheels = tmp_path / "wheels"
    make_wheel(wheels, "bootseer_alpha", "1.0")
    node = Node(tmp_path, wheels, tool="uv")
    node.run()
    newer = make_wheel(wheels, "bootseer_alpha", "2.0")
    node.fresh()
    node.run()
    assert len(list(node.store.glob("deps/*/record-*.json"))) == len(node.archives()) == 2
    old = time.time() - 2 * DAY
    for path in [*node.archives()[0].parent.rglob("*")]:
        os.utime(path, (old, old))
    body = shown(node, "gc", "--max-age", 7)
    assert isinstance(body, dict)
    assert body["removed"] == []
    newer.unlink()
    node.fresh()
    node.run()
    assert node.last() == ("ok", "restored")
    assert node.installs == 2


def test_gc_keeps_a_tree_in_use(tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", "bootseer_alpha", "1.0")
    node = Node(tmp_path, tmp_path / "wheels", tool="uv")
    node.run()
    node.fresh()
    node.run("--form", "copy", cache_shared=True)
    trees = node.cache / "trees"
    assert len(list(trees.rglob("bootseer_alpha/__init__.py"))) == 1
    cache = str(node.cache)
    shown(node, "gc", "--cache", cache, "--max-age", 0, "--max-size", 0)
    assert list(trees.rglob("bootseer_alpha/__init__.py")), "used a moment ago"
    later = time.time() + DAY
    assert gc.plan_trees(cache, later, max_age_s=2 * DAY, max_size_bytes=1 << 40) == []
    plan = gc.plan_trees(cache, later, max_age_s=DAY / 2)
    assert [removal.why for removal in plan] == ["too old"]
    assert gc.carry_out_trees(cache, plan, time.time()) == 0, "found a moment ago"
    assert gc.carry_out_trees(cache, plan, later) > 0
    assert not list(trees.rglob("bootseer_alpha/__init__.py"))
    assert node.works()


def test_help_of_every_command(filled: Node) -> None:
    for name in ("", "run", "key", "restore", "ls", "inspect", "verify", "gc"):
        done = filled.cli(*filter(None, [name]), "--help")
        assert done.returncode == 0
        assert done.stdout.startswith("Usage: bootseer deps")


def test_key_command_does_not_need_a_store(filled: Node) -> None:
    words = ["key", "--", *filled.plain]
    done = filled.cli(*words)
    assert len(done.stdout.strip()) == 64


@pytest.mark.parametrize("command", [["ls"], ["verify"], ["gc", "--max-age", "1"]])
def test_a_named_store_that_is_not_there_is_not_found(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert root.main(["deps", *command, "--store", str(tmp_path / "slip")]) == 3
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert "check --store" in said.err
    (tmp_path / "slip").mkdir()
    assert root.main(["deps", *command, "--store", str(tmp_path / "slip")]) == 0
