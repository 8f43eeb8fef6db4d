"""Hostile archives with a matching digest: each would escape if its check were gone."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
import zstandard

from bootseer.depsnap.restore.archive_restore import restore
from bootseer.depsnap.types import Digest, Limits
from bootseer.errors import BootseerError, CorruptDataError, NoSpaceError
from tests.support.samples.hostile_archives import ROOT, build, entry
from tests.support.trees.snapshots import describe, leftovers

LIMITS = Limits(total=1 << 30, holes=1 << 26, frame_raw=1 << 20, entries=50, index_raw=1 << 20)

ATTACKS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "parent": ([entry("../escaped", data=b"x")], {}),
    "parent within": ([entry("d", "d"), entry("d/../../escaped", data=b"x")], {}),
    "dot": ([entry(".", data=b"x")], {}),
    "absolute": ([entry("/tmp/escaped", data=b"x")], {}),
    "nul": ([entry("a\0b", data=b"x")], {}),
    "empty part": ([entry("a", "d"), entry("a//b", data=b"x")], {}),
    "duplicate": ([entry("a", data=b"1"), entry("a", data=b"2")], {}),
    "duplicate over link": ([entry("a", "l", link="/etc"), entry("a", data=b"2")], {}),
    "through a symlink": ([entry("s", "l", link="/tmp"), entry("s/escaped", data=b"x")], {}),
    "below a file": ([entry("f", data=b"x"), entry("f/x", data=b"x")], {}),
    "no parent": ([entry("a/b", data=b"x")], {}),
    "hard link out": ([entry("h", "h", link="../../../etc/passwd")], {}),
    "hard link absolute": ([entry("h", "h", link="/etc/passwd")], {}),
    "hard link to link": ([entry("s", "l", link="/etc/passwd"), entry("h", "h", link="s")], {}),
    "character device": ([entry("null", "c")], {}),
    "fifo": ([entry("fifo", "p")], {}),
    "long name": ([entry("n" * 256, data=b"x")], {}),
    "empty link": ([entry("s", "l", link="")], {}),
    "link without text": ([entry("s", "l")], {}),
    "attributes on a link": ([entry("s", "l", link="x", xattrs={"user.a": b"1"})], {}),
    "huge attributes": ([entry("f", data=b"x", xattrs={"user.a": bytes(200_000)})], {}),
    "negative size": ([entry("f", size=-1)], {}),
    "size as text": ([entry("f", size="1")], {}),
    "size over the frame": ([entry("f", size=4000, data=b"x")], {}),
    "data missing": ([entry("f", data=b"x")], {"frame": {"units": []}}),
    "data twice": ([entry("f", data=b"x")], {"frame": {"units": [1, 0, 0, 1, 0, 0]}}),
    "data of another": ([entry("f", data=b"x")], {"frame": {"units": [0, 0, 0]}}),
    "data before the frame": ([entry("f", data=b"x")], {"frame": {"units": [1, 0, -1]}}),
    "sparse bomb": ([entry("f", size=1 << 29, segments=[])], {}),
    "sparse beyond its end": ([entry("f", size=3, data=b"xxxx", segments=[0, 4])], {}),
    "sparse overlapping": ([entry("f", size=9, data=b"xxxx", segments=[0, 2, 1, 2])], {}),
    "total": ([entry("f", size=1 << 40, data=b"x")], {}),
    "many entries": ([entry(f"f{n}", data=b"x") for n in range(60)], {}),
    "frame bomb": ([entry("f", data=bytes(2 << 20))], {}),
    "frame longer than said": ([entry("f", data=bytes(1 << 19))], {"frame": {"raw": 512}}),
    "frame shorter than said": ([entry("f", data=b"x")], {"frame": {"raw": 1 << 19}}),
    "frame altered": ([entry("f", data=b"x")], {"frame": {"digest": "0" * 64}}),
    "frame no zstd": ([entry("f", data=b"x")], {"frame": {"bytes": b"no zstd at all"}}),
    "index bomb": ([entry("f", data=b"x")], {"skipped": ["x" * (2 << 20)]}),
    "staging": ([entry(".bootseer-stage", "d")], {}),
    "journal": (
        [entry("d", "d"), entry("d/.bootseer-stage", "d"), entry("d/.bootseer-stage/x", data=b"")],
        {},
    ),
    "deletion of a staging": (
        [entry("f", data=b"x")],
        {"roots": [{"root": ROOT, "count": 2, "deleted": [".bootseer-stage/old"]}]},
    ),
    "one name in two spellings": ([entry("é", data=b"1"), entry("\udcc3\udca9", data=b"2")], {}),
    "link over a directory": (
        [entry("é", "d"), entry("é/f", data=b"1"), entry("\udcc3\udca9", "l", link="/tmp")],
        {},
    ),
    "no name": ([entry("\ud800", data=b"x")], {}),
    "link to no name": ([entry("s", "l", link="\ud800")], {}),
    "overlay redirect": ([entry("d", "d", xattrs={"trusted.overlay.redirect": b"/etc"})], {}),
    "attribute with nul": ([entry("f", data=b"x", xattrs={"user.a\0b": b"1"})], {}),
    "attributes of nobody": ([entry("f", data=b"x")], {"xattrs": {"99": [["user.a", ""]]}}),
    "segments of nobody": ([entry("f", data=b"x")], {"segments": {"99": [0, 1]}}),
    "two slashes": (
        [entry("f", data=b"x")],
        {"roots": [{"root": "//r", "count": 2, "deleted": []}]},
    ),
    "deletion outside": (
        [entry("f", data=b"x")],
        {"roots": [{"root": ROOT, "count": 2, "deleted": ["../victim"]}]},
    ),
    "deletion absolute": (
        [entry("f", data=b"x")],
        {"roots": [{"root": ROOT, "count": 2, "deleted": ["/etc/victim"]}]},
    ),
    "relative root": (
        [entry("f", data=b"x")],
        {"roots": [{"root": "r", "count": 2, "deleted": []}]},
    ),
    "climbing root": (
        [entry("f", data=b"x")],
        {"roots": [{"root": "/a/../b", "count": 2, "deleted": []}]},
    ),
    "root count": ([entry("f", data=b"x")], {"roots": [{"root": ROOT, "count": 9, "deleted": []}]}),
    "implied file": ([entry("f", data=b"x")], {"implied": [1]}),
    "other version": ([entry("f", data=b"x")], {"version": 99}),
    "no columns": ([entry("f", data=b"x")], {"mode": []}),
    "mode too large": ([entry("f", data=b"x")], {"mode": [0o755, 0o100644]}),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_is_refused_and_nothing_is_left(tmp_path: Path, name: str) -> None:
    entries, document = ATTACKS[name]
    digest = build(tmp_path / "a", entries, **document)
    (tmp_path / "in/target").mkdir(parents=True)
    (tmp_path / "in/target/mine").write_text("old")
    (tmp_path / "in/victim").write_text("old")
    before = describe(tmp_path / "in")
    targets = {ROOT: str(tmp_path / "in/target")}
    with pytest.raises(CorruptDataError):
        restore(str(tmp_path / "a"), digest, targets, limits=LIMITS)
    assert describe(tmp_path / "in") == before
    assert not os.path.lexists("/tmp/escaped")


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        (Limits(roots=("/somewhere/else",)), "roots"),
        (Limits(roots=(ROOT, "/another")), "roots"),
        (Limits(raw=4), "data"),
        (Limits(entries=1), "entries"),
    ],
)
def test_an_archive_that_is_not_what_its_record_says(
    tmp_path: Path, limits: Limits, why: str
) -> None:
    digest = build(tmp_path / "a", [entry("f", data=b"hello")])
    with pytest.raises(CorruptDataError, match=why):
        restore(str(tmp_path / "a"), digest, {ROOT: str(tmp_path / "t")}, limits=limits)
    assert sorted(os.listdir(tmp_path)) == ["a"]


def test_a_stored_frame_no_longer_than_zstd_makes_it(tmp_path: Path) -> None:
    """Else a sparse file of 2 GiB in the store would be read into every worker's memory."""
    digest = build(tmp_path / "a", [entry("f", data=b"x")], frame={"bytes": bytes(1 << 20)})
    with pytest.raises(CorruptDataError, match="1048576 bytes, 1 unpacked"):
        restore(str(tmp_path / "a"), digest, {ROOT: str(tmp_path / "t")})


def test_an_index_nested_too_deep(tmp_path: Path) -> None:
    stored = zstandard.ZstdCompressor().compress(b"[" * 500_000)
    tail = stored + struct.pack("<Q8s", len(stored), b"bootseer")
    (tmp_path / "a").write_bytes(struct.pack("<II", 0x184D2A5E, len(tail)) + tail)
    digest = Digest(hashlib.sha256(stored).hexdigest())
    with pytest.raises(CorruptDataError, match="malformed"):
        restore(str(tmp_path / "a"), digest, {ROOT: str(tmp_path / "t")})


def test_the_builder_makes_good_archives_too(tmp_path: Path) -> None:
    entries = [entry("d", "d"), entry("d/f", data=b"hello"), entry("d/l", "l", link="/etc")]
    digest = build(tmp_path / "a", entries)
    restore(str(tmp_path / "a"), digest, {ROOT: str(tmp_path / "t")}, limits=LIMITS)
    assert (tmp_path / "t/d/f").read_text() == "hello"
    assert os.readlink(tmp_path / "t/d/l") == "/etc"


def test_nothing_is_written_or_deleted_through_a_link_in_the_target(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/victim").write_text("old")
    (tmp_path / "t").mkdir()
    (tmp_path / "t/d").symlink_to(tmp_path / "outside")
    entries = [entry("d", "d"), entry("d/new", data=b"x")]
    implied = {"implied": [0, 1]}
    digest = build(tmp_path / "a", entries, **implied)
    with pytest.raises(BootseerError, match="no directory here"):
        restore(str(tmp_path / "a"), digest, {ROOT: str(tmp_path / "t")})
    roots = [{"root": ROOT, "count": 1, "deleted": ["d/victim"]}]
    digest = build(tmp_path / "b", [], roots=roots)
    restore(str(tmp_path / "b"), digest, {ROOT: str(tmp_path / "t")})
    assert os.listdir(tmp_path / "outside") == ["victim"]
    assert leftovers(tmp_path) == []


def test_setuid_setgid_and_capabilities_come_only_when_allowed(tmp_path: Path) -> None:
    entries = [entry("s", mode=0o6755, data=b"x"), entry("dir", "d", mode=0o2755)]
    entries[0]["xattrs"] = {"security.capability": bytes.fromhex("01000002" + "00" * 16)}
    digest = build(tmp_path / "a", entries)
    done = restore(str(tmp_path / "a"), digest, {ROOT: str(tmp_path / "no")})
    assert done.dropped_privileges == 2
    assert os.stat(tmp_path / "no/s").st_mode & 0o7777 == 0o755
    assert os.listxattr(tmp_path / "no/s") == []
    assert os.stat(tmp_path / "no/dir").st_mode & 0o7777 == 0o2755
    targets = {ROOT: str(tmp_path / "yes")}
    done = restore(str(tmp_path / "a"), digest, targets, allow_setuid=True)
    assert done.dropped_privileges == 0
    assert os.stat(tmp_path / "yes/s").st_mode & 0o7777 == 0o6755


@pytest.mark.root
def test_foreign_owners_are_refused_unless_recorded(tmp_path: Path) -> None:
    digest = build(tmp_path / "a", [entry("f", data=b"x", uid=1234, gid=99)])
    targets = {ROOT: str(tmp_path / "t")}
    with pytest.raises(CorruptDataError, match="1234:99"):
        restore(str(tmp_path / "a"), digest, targets)
    with pytest.raises(CorruptDataError, match="1234:99"):
        restore(str(tmp_path / "a"), digest, targets, owners=[(0, 0), (1234, 1234)])
    assert not (tmp_path / "t").exists()
    restore(str(tmp_path / "a"), digest, targets, owners=[(0, 0), (1234, 99)])
    assert (os.stat(tmp_path / "t/f").st_uid, os.stat(tmp_path / "t/f").st_gid) == (1234, 99)


def test_more_than_fits_is_refused_before_the_first_byte(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    free = status.f_bavail * status.f_frsize
    # Far more: whatever others free meanwhile, a restore that began would fill the machine's disk.
    blocks = 4 * free // (4 << 20) + 2
    size = blocks * (4 << 20)
    raw = zstandard.ZstdCompressor().compress(bytes(4 << 20))
    units = [x for n in range(blocks) for x in (1, n, 0)]
    frame = {"bytes": raw, "raw": 4 << 20, "units": units}
    digest = build(tmp_path / "a", [entry("f", size=size)], frame=frame)
    with pytest.raises(NoSpaceError, match="free"):
        restore(str(tmp_path / "a"), digest, {ROOT: str(tmp_path / "t")})
    assert sorted(os.listdir(tmp_path)) == ["a"]


@pytest.mark.root
def test_a_planted_journal_of_another_user_is_not_obeyed(tmp_path: Path) -> None:
    target = tmp_path / "t"
    stage = target / ".bootseer-stage"
    stage.mkdir(parents=True)
    (stage / "journal.json").write_text("{}")
    os.chown(stage, 1234, 1234)
    digest = build(tmp_path / "a", [entry("f", data=b"x")])
    with pytest.raises(BootseerError, match="1234"):
        restore(str(tmp_path / "a"), digest, {ROOT: str(target)})
    assert not (target / "f").exists()


def test_what_tar_would_unpack_is_not_what_decides(tmp_path: Path) -> None:
    """The frames hold a tar with `..`; restore goes by the checked index alone."""
    (tmp_path / "evil").write_text("x")
    subprocess.run(
        ["tar", "-cPf", "evil.tar", "--transform=s,evil,../escaped,", "evil"],
        cwd=tmp_path,
        check=True,
    )
    data = (tmp_path / "evil.tar").read_bytes()
    digest = build(tmp_path / "a", [entry("f", data=data)])
    restore(str(tmp_path / "a"), digest, {ROOT: str(tmp_path / "in/t")})
    assert os.listdir(tmp_path / "in") == ["t"]
    assert not (tmp_path / "escaped").exists()
