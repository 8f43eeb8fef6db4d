"""Layers stacked: what hides what, and that the way from the top down is the plain way's equal."""

from __future__ import annotations

import tarfile

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bootseer.blockimage.tree_entries import Kind
from tests.support.examples import examples
from tests.support.samples.images import Member, directory, file, hardlink, opaque, whiteout
from tests.support.trees.flattened import flatten


def test_only_what_is_seen_is_stored() -> None:
    lower = [file(f"f{n}", b"lower %d" % n) for n in range(50)]
    upper = [file(f"f{n}", b"upper %d" % n) for n in range(40)] + [whiteout("f45")]
    _, contents, kept = flatten([lower, upper])
    assert kept.times == 49
    assert contents[b"f3"] == b"upper 3"
    assert contents[b"f44"] == b"lower 44"
    assert b"f45" not in contents


def test_directories_that_are_only_implied_take_the_lower_layers_word() -> None:
    lower = [directory("d", mode=0o700, uid=5), file("d/a", b"1")]
    entries, _, _ = flatten([lower, [file("d/b", b"2"), file("new/x", b"3")]])
    assert (entries[b"d"].mode, entries[b"d"].uid) == (0o700, 5)
    assert (entries[b"new"].mode, entries[b"new"].uid) == (0o755, 0)


@pytest.mark.parametrize("between", [whiteout("d"), file("d", b"a file for a while")])
def test_what_lay_below_something_gone_stays_gone(between: Member) -> None:
    lowest = [directory("d", uid=5, mode=0o700), directory("d/sub"), file("d/sub/old", b"1")]
    layers = [lowest, [between], [file("d/sub/new", b"3")]]
    entries, contents, _ = flatten(layers)
    assert contents == {b"d/sub/new": b"3"}
    assert (entries[b"d"].uid, entries[b"d"].mode) == (0, 0o755)
    renewed = [whiteout("d"), file("d/new", b"2")]
    for layers in ([lowest, renewed], [lowest, renewed, [directory("x"), file("d/x", b"")]]):
        entries, contents, _ = flatten(layers)
        assert contents[b"d/new"] == b"2"
        assert b"d/sub/old" not in contents
        assert entries[b"d"].uid == 0


def test_whiteouts_hide_lower_layers_only_wherever_they_stand() -> None:
    lower = [directory("d"), file("d/x", b"1"), file("d/y", b"1"), file("f", b"1")]
    upper = [whiteout("d/x"), file("d/x", b"2"), opaque("d"), file("f", b"2"), whiteout("f")]
    _, contents, _ = flatten([lower, upper])
    assert contents == {b"d/x": b"2", b"f": b"2"}


def test_of_two_members_of_one_name_the_later_counts() -> None:
    layer = [file("a", b"1"), hardlink("b", "a"), file("a", b"2"), file("d", b""), directory("d")]
    entries, contents, _ = flatten([layer])
    assert contents == {b"a": b"2", b"b": b"1"}
    assert entries[b"d"].kind is Kind.DIRECTORY


def test_an_overlayfs_whiteout_and_opaque_mark_count_too() -> None:
    gone = tarfile.TarInfo("a")
    gone.type = tarfile.CHRTYPE
    lower = [file("a", b"1"), directory("d"), file("d/x", b"1")]
    upper = [Member(gone), directory("d", xattrs={"trusted.overlay.opaque": b"y"})]
    entries, contents, _ = flatten([lower, upper])
    assert contents == {}
    assert entries[b"d"].xattrs == {}


PATHS = st.lists(st.sampled_from("ab"), min_size=1, max_size=4).map("/".join)
STEPS = st.lists(
    st.tuples(st.sampled_from(["file", "directory", "whiteout", "opaque"]), PATHS), max_size=8
)


def below(path: str, tree: dict[str, bytes | None]) -> list[str]:
    return [name for name in tree if name.startswith(f"{path}/")]


def parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:n]) for n in range(1, len(parts))]


def stacked(layers: list[list[tuple[str, str]]]) -> dict[str, bytes | None]:
    """The plain way, from the lowest layer up: a file's content by its path, None for folders."""
    tree: dict[str, bytes | None] = {}
    for number, steps in enumerate(layers):
        own: dict[str, bytes | None] = {}
        hidden: list[str] = []
        for what, path in steps:
            own.update(dict.fromkeys(parents(path)))
            if what in ("whiteout", "opaque"):
                hidden += [path] * (what == "whiteout")
                if what == "opaque":
                    own[path] = None
                    hidden.append(f"{path}/")
                continue
            if what == "file":
                for name in below(path, own):
                    del own[name]
                # Unpacking takes the folder away with the marks in it.
                hidden = [name for name in hidden if not name.startswith(f"{path}/")]
            own[path] = b"%d %s" % (number, path.encode()) if what == "file" else None
        for path in hidden:
            for name in [*below(path.rstrip("/"), tree), path]:
                tree.pop(name, None)
        for path, content in own.items():
            if content is not None or tree.get(path) is not None:
                for name in [*below(path, tree), path]:
                    tree.pop(name, None)
        tree.update(own)
    return tree


def sound(steps: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The steps without those that lie below a file of their own layer."""
    files: set[str] = set()
    out = []
    for what, path in steps:
        if files & {*parents(path), *([path] if what == "opaque" else [])}:
            continue
        files -= {path} if what == "directory" else set()
        files |= {path} if what == "file" else set()
        out.append((what, path))
    return out


@settings(max_examples=examples(300), deadline=None)
@example([[("file", "b/a")], [("opaque", "b"), ("file", "b"), ("directory", "b")]])
@example([[("file", "b/a")], [("whiteout", "b/a"), ("file", "b"), ("directory", "b")]])
@given(st.lists(STEPS.map(sound), min_size=1, max_size=4))
def test_any_layers_from_the_top_down_are_as_from_the_bottom_up(
    layers: list[list[tuple[str, str]]],
) -> None:
    makers = {"directory": directory, "whiteout": whiteout, "opaque": opaque}
    made = [
        [
            file(path, b"%d %s" % (number, path.encode())) if what == "file" else makers[what](path)
            for what, path in steps
        ]
        for number, steps in enumerate(layers)
    ]
    entries, contents, _ = flatten(made)
    shown = {
        path.decode(): contents.get(path) if entry.kind is Kind.FILE else None
        for path, entry in entries.items()
        if path
    }
    assert shown == stacked(layers)
