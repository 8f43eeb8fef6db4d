"""What gc and rm take, and what they leave."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bootseer.errors import AccessDeniedError, NotFoundError
from bootseer.stripedfs.write.gc import (
    collect_garbage,
    collect_temporaries,
    find_checkpoints,
    list_unreferenced,
    remove_checkpoint,
)
from bootseer.stripedfs.write.stripe_stream import StripedWriter
from bootseer.stripedfs.write.write_settings import WriteSettings
from tests.support.faulty_store import WrappedStore
from tests.support.samples.stripes import CHUNK, leftovers, opened, sample, version_folder, whole

SMALL = WriteSettings(chunk_bytes=CHUNK, width=4)


def _versions(tmp_path: Path, count: int) -> list[Path]:
    made = []
    for number in range(count):
        with StripedWriter.begin(opened(tmp_path), "f", SMALL) as out:
            out.write(sample(5 * CHUNK, number))
        made.append(version_folder(tmp_path, "f"))
        for each in made:  # an hour passes
            stat = (each / "manifest.json").stat()
            os.utime(each / "manifest.json", (stat.st_mtime - 3600,) * 2)
    return made


def test_gc_takes_versions_that_were_replaced_long_ago(tmp_path: Path) -> None:
    old, older_than_current, current = _versions(tmp_path, 3)
    # Replaced two hours ago, replaced one hour ago, and the current one of an hour ago.
    assert [r.name for r in collect_garbage(opened(tmp_path), "f", grace_s=3 * 3600)] == []
    gone = list(collect_garbage(opened(tmp_path), "f", grace_s=1.5 * 3600, dry_run=True))
    assert [tmp_path / r.name for r in gone] == [old]
    assert old.exists()
    gone = list(collect_garbage(opened(tmp_path), "f.stripes", grace_s=1.5 * 3600))
    assert [tmp_path / r.name for r in gone] == [old]
    assert not old.exists()
    assert older_than_current.exists()
    list(collect_garbage(opened(tmp_path), "f", grace_s=0))
    assert leftovers(tmp_path, "f") == []
    assert whole(tmp_path, "f") == sample(5 * CHUNK, 2)
    assert current.exists()


def test_gc_with_a_damaged_pointer_takes_no_version(tmp_path: Path) -> None:
    _versions(tmp_path, 2)
    (tmp_path / "f.stripes/CURRENT").write_text("{")
    assert list(collect_garbage(opened(tmp_path), "f", grace_s=0)) == []


def test_gc_of_a_removal_that_was_cut_short(tmp_path: Path) -> None:
    _versions(tmp_path, 2)
    (tmp_path / "f.stripes/CURRENT").unlink()
    assert len(list(collect_garbage(opened(tmp_path), "f", grace_s=1))) == 2


def test_gc_of_a_folder_finds_what_begins_with_a_dot(tmp_path: Path) -> None:
    """As safetensors' temporary names do; what a store calls temporary is its own."""
    for name in ("folder/f", "folder/.tmpAb3dEf", "folder/.tmp-1"):
        with StripedWriter.begin(opened(tmp_path), name, SMALL) as out:
            out.write(b"data")
    found = find_checkpoints(opened(tmp_path), "folder")
    assert found == ["folder/.tmpAb3dEf.stripes", "folder/f.stripes"]
    assert find_checkpoints(opened(tmp_path / "folder"), "") == [".tmpAb3dEf.stripes", "f.stripes"]


def test_when_a_version_became_unused() -> None:
    dated = [(1.0, "a"), (2.0, "b"), (3.0, "c"), (4.0, "d")]
    assert [(u.name, u.since_s) for u in list_unreferenced(dated, "c")] == [
        ("a", 2.0),
        ("b", 3.0),
        ("d", 4.0),
    ]


def test_rm_removes_all_of_it(tmp_path: Path) -> None:
    _versions(tmp_path, 2)
    (tmp_path / "g").write_text("a plain neighbour")
    assert remove_checkpoint(opened(tmp_path), "f") == "f.stripes"
    assert [p.name for p in tmp_path.iterdir()] == ["g"]
    for name in ("f", "g"):
        with pytest.raises(NotFoundError, match="no striped checkpoint"):
            remove_checkpoint(opened(tmp_path), name)


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    """Who may only read the store can see what would go."""
    _versions(tmp_path, 2)
    draft = tmp_path / "f.stripes/.tmp-old/writing"
    draft.mkdir(parents=True)
    os.utime(draft, (1e9, 1e9))
    os.utime(draft.parent, (1e9, 1e9))
    old = tmp_path / ".tmp-0123"
    old.write_bytes(b"")
    os.utime(old, (1e9, 1e9))

    class ReadOnly(WrappedStore):
        """A FAKE store, for fault injection: it refuses to be written to."""

        def replace(self, name: str, data: bytes, *, durable: bool = True) -> None:
            raise AccessDeniedError("read-only")

    store = ReadOnly(opened(tmp_path))
    found = [r.name for r in collect_garbage(store, "f", grace_s=0, dry_run=True)]
    assert len(found) == 2
    assert "f.stripes/.tmp-old" in found
    assert [r.name for r in collect_temporaries(store, "", grace_s=0, dry_run=True)] == [
        ".tmp-0123"
    ]
    assert old.exists()


def test_gc_takes_what_plain_writers_left_in_the_folder(tmp_path: Path) -> None:
    for name, age_s in ((".tmp-old", 7200), (".tmp-young", 10), (".mine", 7200)):
        (tmp_path / name).write_bytes(b"x")
        when = (tmp_path / name).stat().st_mtime - age_s
        os.utime(tmp_path / name, (when, when))
    assert list(collect_temporaries(opened(tmp_path), "")) != []
    assert list(collect_temporaries(opened(tmp_path), "", grace_s=0)) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == [".mine", ".tmp-young"]
