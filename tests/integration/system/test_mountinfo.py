"""What is mounted, from what the kernel writes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bootseer.depsnap.capture.exclusions import list_exclusions
from bootseer.system.mount_calls import mount, unmount
from bootseer.system.mountinfo import Mounted, all_mounts, is_mounted, parse_mountinfo, shown_at


def test_mountinfo_is_read_with_its_escapes() -> None:
    text = (
        rb"22 1 8:1 / / rw - ext4 /dev/sda rw" + b"\n"
        rb"90 22 0:57 / /a\040b\134c rw,nosuid shared:3 - fuse.bootseer bootseer ro" + b"\n"
        b"cut line\n"
    )
    assert parse_mountinfo(text) == [
        Mounted("/", "8:1", "ext4", "/dev/sda", "/", 22, 1),
        Mounted("/a b\\c", "0:57", "fuse.bootseer", "bootseer", "/", 90, 22),
    ]


def test_a_carriage_return_in_a_mount_points_name_ends_no_line() -> None:
    text = b"22 1 8:1 / / rw - ext4 /dev/sda rw\n90 22 0:57 / /a\rb rw - tmpfs none rw\n"
    assert [mount.target for mount in parse_mountinfo(text)] == ["/", "/a\rb"]


def test_what_a_path_leads_to_is_what_lies_uppermost() -> None:
    lines = ["30 7 0:1 / /", "31 30 0:2 / /a", "32 31 0:3 / /a/b", "33 32 0:4 / /a/b"]
    covering = ["34 31 0:5 / /a", "35 34 0:6 / /a/c"]

    def shown(lines: list[str], target: str) -> int | None:
        text = "\n".join(f"{line} rw - tmpfs none rw" for line in lines)
        found = shown_at(parse_mountinfo(text.encode()), target)
        return found and found.number

    assert [shown(lines, at) for at in ("/", "/a", "/a/b", "/a/c")] == [30, 31, 33, None]
    both = lines + covering
    assert [shown(both, at) for at in ("/a", "/a/b", "/a/c")] == [34, None, 35]
    # In a container whose root is a directory of a mount that is not its own.
    assert [shown(both[1:], at) for at in ("/", "/a", "/a/c")] == [None, 34, 35]


@pytest.mark.root
@pytest.mark.parametrize("name", ["with blank", "tab\tand\nnewline", "back\\slash", "a#b", "r\rn"])
def test_a_mount_is_found_by_its_name(tmp_path: Path, name: str) -> None:
    """One of them failed in two of three parsers, with all other mounts: a carriage return."""
    place = tmp_path / name
    place.mkdir()
    assert not is_mounted(str(place))
    mount("a source", str(place), "tmpfs")
    try:
        assert is_mounted(str(place))
        assert not is_mounted(str(tmp_path))
        shown = shown_at(all_mounts(), str(place))
        assert shown is not None
        assert (shown.kind, shown.source, shown.root) == ("tmpfs", "a source", "/")
        assert str(place) in list_exclusions(["/"], [], [])
    finally:
        unmount(str(place))
