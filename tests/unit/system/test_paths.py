"""Whether a path lies in a folder, by their names."""

from __future__ import annotations

from pathlib import Path

import pytest

from bootseer.depsnap.capture.entries import RootDelta, Tree
from bootseer.depsnap.format import archive
from bootseer.errors import UsageError
from bootseer.imageprefetch.run.podman_options import places_anything_at
from bootseer.system.paths import is_within


@pytest.mark.parametrize(
    ("path", "folder", "within"),
    [
        ("/a/b", "/a", True),
        ("/a", "/a", True),
        ("/a", "/a/b", False),
        ("/a-b", "/a", False),
        ("/ab", "/a", False),
        ("/", "/", True),
        ("/a", "/", True),
        ("/", "/a", False),
        ("/a/", "/a", True),
        ("/a", "/a/", True),
        ("/a/b", "/a//", True),
        ("//a/b", "/a", True),
        ("/a/../b", "/a", False),
        ("/b/../a/c", "/a", True),
        ("/a/./b", "/a/.", True),
        ("a/b", "a", True),
        ("a/b", "/a", False),
        ("", "/", False),
    ],
)
def test_it_is_told_by_names(path: str, folder: str, within: bool) -> None:
    assert is_within(path, folder) == within


def test_a_mount_over_everything_covers_the_working_directory() -> None:
    assert places_anything_at("/job", ["--tmpfs", "/"])
    assert not places_anything_at("/job", ["-v", "/:/host"])
    assert not places_anything_at("/job", ["--mount", "type=bind,source=/,target=/host"])
    assert not places_anything_at("/job/x", ["-v", "/job:/host"])
    assert places_anything_at("/job", ["-v", "/:/job"])
    assert places_anything_at("/job", ["-v", "/here:/"])
    assert places_anything_at("/job/x", ["--volume=/job"])
    assert places_anything_at("/job", ["--mount=type=bind,source=/here,dst=/job,ro"])
    assert places_anything_at("/job", ["-v", "/here:/job/"])
    assert not places_anything_at("/job", ["-v", "/here:/jobs"])


def test_roots_that_overlap_are_refused_though_another_sorts_between(tmp_path: Path) -> None:
    """`-` comes before `/`: only neighbours were compared."""
    roots = [RootDelta.of_tree(Tree(f"{tmp_path}/{name}", {})) for name in ("a", "a-b", "a/c")]
    with pytest.raises(UsageError, match="overlap"):
        archive.create(str(tmp_path / "x"), roots)
