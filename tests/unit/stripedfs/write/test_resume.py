"""Puts that were interrupted go on; what others still do is let alone."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from bootseer.errors import BusyError, StoreUnavailableError
from bootseer.storage.local import LocalStore
from bootseer.stripedfs.write import draft, stripe_upload
from bootseer.stripedfs.write.draft import Draft
from bootseer.stripedfs.write.gc import collect_garbage, remove_checkpoint
from bootseer.stripedfs.write.put import put_into
from bootseer.stripedfs.write.write_settings import WriteSettings
from tests.support.samples.stripes import (
    CHUNK,
    Watched,
    leftovers,
    local_tree,
    make_tree,
    opened,
    sample,
    tree_of,
    version_folder,
    whole,
)

ONE_BY_ONE = WriteSettings(chunk_bytes=CHUNK, width=4, jobs=1, keep_bytes=0)


def _gone_at(part: str) -> Callable[[str], None]:
    def before(name: str) -> None:
        if name.endswith(part):
            raise StoreUnavailableError("the server went away")

    return before


@pytest.fixture(autouse=True)
def _no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stripe_upload, "BACKOFF_S", 0.001)
    monkeypatch.setattr(stripe_upload, "MAX_BACKOFF_S", 0.001)


def _interrupted(tmp_path: Path, part: str = "stripe-00002", size: int = 20 * CHUNK + 5) -> Path:
    source = tmp_path / "f"
    source.write_bytes(sample(size))
    with pytest.raises(StoreUnavailableError):
        put_into(Watched(tmp_path / "s", _gone_at(part)), "f", str(source), settings=ONE_BY_ONE)
    assert not (tmp_path / "s/f.stripes/CURRENT").exists()
    return source


def test_a_put_goes_on_with_the_stripes_that_are_missing(tmp_path: Path) -> None:
    source = _interrupted(tmp_path)
    store = Watched(tmp_path / "s")
    report = put_into(store, "f", str(source), settings=ONE_BY_ONE)
    assert store.begun == ["stripe-00002", "stripe-00003"]
    assert report.kept_bytes == 10 * CHUNK + 5  # of 21 chunks in 4 stripes; the last has 5 bytes
    assert whole(tmp_path / "s", "f") == source.read_bytes()
    assert leftovers(tmp_path / "s", "f") == []


def test_a_put_begins_anew_when_told_to_or_when_it_must(tmp_path: Path) -> None:
    source = _interrupted(tmp_path)
    store = Watched(tmp_path / "s")
    put_into(store, "f", str(source), settings=ONE_BY_ONE, resume=False)
    assert len(store.begun) == 4
    source.write_bytes(sample(20 * CHUNK + 5, 7))  # another time, another content
    store.begun.clear()
    assert put_into(store, "f", str(source), settings=ONE_BY_ONE).kept_bytes == 0
    assert len(store.begun) == 4
    assert len(leftovers(tmp_path / "s", "f")) == 2  # the first version, and the draft for gc


def test_a_source_changed_behind_its_times_is_noticed(tmp_path: Path) -> None:
    source = _interrupted(tmp_path)
    stat = source.stat()
    with open(source, "r+b") as file:
        file.seek(4 * CHUNK)  # chunk 4 lies in stripe 0, which is complete
        file.write(b"changed")
    os.utime(source, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    store = Watched(tmp_path / "s")
    put_into(store, "f", str(source), settings=ONE_BY_ONE)
    assert store.begun == ["stripe-00000", "stripe-00002", "stripe-00003"]
    assert whole(tmp_path / "s", "f") == source.read_bytes()


def test_a_kept_stripe_must_be_there_with_its_length(tmp_path: Path) -> None:
    source = _interrupted(tmp_path)
    (folder,) = (tmp_path / "s/f.stripes").iterdir()
    (folder / "stripe-00000").unlink()
    os.truncate(folder / "stripe-00001", 7)
    store = Watched(tmp_path / "s")
    put_into(store, "f", str(source), settings=ONE_BY_ONE)
    assert len(store.begun) == 4
    assert whole(tmp_path / "s", "f") == source.read_bytes()


@pytest.mark.parametrize("damage", [b"", b"{}", b"[" * 10000, b'{"size": 1, "digests": "x"}'])
def test_damaged_records_are_not_believed(tmp_path: Path, damage: bytes) -> None:
    source = _interrupted(tmp_path)
    for record in tmp_path.glob("s/f.stripes/*/writing/stripe-*.json"):
        record.write_bytes(damage)
    store = Watched(tmp_path / "s")
    put_into(store, "f", str(source), settings=ONE_BY_ONE)
    assert len(store.begun) == 4
    assert whole(tmp_path / "s", "f") == source.read_bytes()


def test_a_directory_goes_on_too(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "src")
    (source / "z.bin").write_bytes(sample(20 * CHUNK, 9))
    with pytest.raises(StoreUnavailableError):
        put_into(
            Watched(tmp_path / "s", _gone_at("z.bin/stripe-00002")),
            "ck",
            str(source),
            settings=ONE_BY_ONE,
        )
    (source / "sub/exact").unlink()  # stored already, and now a folder with something in it
    (source / "sub/exact").mkdir()
    (source / "sub/exact/in").write_bytes(b"it")
    (source / "model.bin").write_bytes(b"small now")
    (source / "sub/deep/small.json").unlink()
    store = Watched(tmp_path / "s")
    report = put_into(store, "ck", str(source), settings=ONE_BY_ONE)
    assert report.kept_bytes == 10 * CHUNK + 3 * CHUNK - 1  # half of z.bin, and the odd one
    assert tree_of(tmp_path / "s", "ck") == local_tree(source)
    data = version_folder(tmp_path / "s", "ck") / "data"
    objects = {p.relative_to(data).as_posix() for p in data.rglob("*") if p.is_file()}
    assert not [o for o in objects if "small.json" in o or o.startswith("sub/exact/stripe")]
    assert "model.bin" in objects


def _held_elsewhere(folder: Path, *, age_s: float) -> None:
    """Make a draft's lease look like one of another machine that beat so long ago."""
    (lease,) = folder.glob("writing/lease/*.json")
    body = json.loads(lease.read_bytes())
    body["owner"]["boot_id"] = "another machine"
    body["released"] = False
    lease.write_text(json.dumps(body))
    when = lease.stat().st_mtime - age_s
    for path in [*folder.rglob("*"), folder]:
        os.utime(path, (when, when))


@pytest.mark.parametrize(("age_s", "writes"), [(10, 4), (draft.STALE_S + 10, 2)])
def test_a_draft_of_another_machine_is_left_while_it_beats(
    tmp_path: Path, age_s: float, writes: int
) -> None:
    source = _interrupted(tmp_path)
    (folder,) = (tmp_path / "s/f.stripes").iterdir()
    _held_elsewhere(folder, age_s=age_s)
    store = Watched(tmp_path / "s")
    put_into(store, "f", str(source), settings=ONE_BY_ONE)
    assert len(store.begun) == writes
    assert folder.exists() == (writes == 4)


def test_a_draft_that_is_being_written_is_left(tmp_path: Path) -> None:
    source = tmp_path / "f"
    source.write_bytes(sample(20 * CHUNK))
    reached, go_on = threading.Event(), threading.Event()

    def before(name: str) -> None:
        if name.endswith("stripe-00002"):
            reached.set()
            go_on.wait(30)

    slow = Watched(tmp_path / "s", before)
    first = threading.Thread(
        target=put_into, args=(slow, "f", str(source)), kwargs={"settings": ONE_BY_ONE}
    )
    first.start()
    reached.wait(30)
    store = Watched(tmp_path / "s")
    put_into(store, "f", str(source), settings=ONE_BY_ONE)
    assert len(store.begun) == 4
    assert [r.name for r in collect_garbage(store, "f", grace_s=0)] == []
    with pytest.raises(BusyError, match="being written"):
        remove_checkpoint(store, "f")
    go_on.set()
    first.join()
    assert whole(tmp_path / "s", "f") == source.read_bytes()
    assert len(leftovers(tmp_path / "s", "f")) == 1


def test_who_was_stopped_too_long_publishes_nothing(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    sleeper = Draft.begin(store, "f", {"of": "it"})
    assert sleeper._wait_for_lease() is not None
    folder = tmp_path / sleeper.folder
    _held_elsewhere(folder, age_s=draft.STALE_S + 10)
    thief = Draft.adopt(store, "f", {"of": "it"})
    assert thief is not None
    assert not folder.exists()
    sleeper._lease.renew()  # type: ignore[union-attr]  # it wakes up, and writes its lease anew
    with pytest.raises(BusyError, match="interrupted for too long"):
        sleeper.publish("file", 0, b"a manifest")
    sleeper.discard()
    assert not (tmp_path / "f.stripes/CURRENT").exists()
    thief.discard()
    assert list((tmp_path / "f.stripes").iterdir()) == []


def test_gc_takes_drafts_whose_writer_is_gone(tmp_path: Path) -> None:
    _interrupted(tmp_path)
    store = opened(tmp_path / "s")
    assert list(collect_garbage(store, "f", grace_s=3600)) == []  # the put may still be continued
    (gone,) = collect_garbage(store, "f", grace_s=0)
    assert gone.reason == "orphaned temporary"
    assert list((tmp_path / "s/f.stripes").iterdir()) == []
