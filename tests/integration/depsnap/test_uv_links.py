"""A start whose packages uv has in its own cache: uv links them, faster than we unpack them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.commands.deps_node import PATIENT_S, Node
from tests.support.samples.wheels import make_wheel
from tests.support.waiting import until


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """The store has the snapshot, uv's cache the wheels; the environment is a new one."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    make_wheel(wheels, "bootseer_alpha", "1.0")
    node = Node(tmp_path, wheels, tool="uv")
    (node.home / "requirements.txt").write_text("bootseer-alpha==1.0\n")
    assert started(node) == ("ok", "published")
    node.fresh()
    return node


def start(
    node: Node, command: Sequence[str], *options: object, **variables: str
) -> subprocess.CompletedProcess[str]:
    """A start without a cache of ours."""
    words = ["--store", node.store, "--store-timeout", PATIENT_S, "--publish", "inline", *options]
    return subprocess.run(
        [sys.executable, "-m", "bootseer", "deps", "run", *map(str, words), "--", *command],
        cwd=node.home,
        env=node.environ() | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def started(node: Node, *options: object, **variables: str) -> tuple[str, str]:
    """What one did, which said nothing."""
    done = start(node, node.plain, *options, **variables)
    assert (done.returncode, done.stderr) == (0, "")
    assert node.works()
    return node.last()


def is_linked(node: Node) -> bool:
    (module,) = node.place.glob("lib/*/site-packages/bootseer_alpha/__init__.py")
    return module.stat().st_nlink > 1


def test_uv_links_what_it_has(node: Node) -> None:
    """Each start unpacked the archive again, several times slower than the command alone."""
    assert started(node) == ("ok", "installed")
    assert node.ends()[-1]["attributes"]["bootseer.deps.why"] == "uv links them from its own cache"
    assert is_linked(node)
    assert len(node.archives()) == 1
    assert started(node) == ("ok", "in place")


def test_it_does_so_beside_the_command_newest_of_other_inputs(node: Node) -> None:
    """And blames nothing."""
    (latest,) = node.store.glob("deps/latest/*.json")
    latest.write_text(json.dumps(json.loads(latest.read_text()) | {"key": "0" * 64}))
    assert started(node) == ("ok", "installed")


@pytest.mark.parametrize(
    "variables",
    [{"UV_LINK_MODE": "copy"}, {"UV_NO_CACHE": "1"}, {"UV_CACHE_DIR": "elsewhere"}],
    ids=["it copies", "no cache", "another cache"],
)
def test_what_it_does_not_link_is_restored(node: Node, variables: dict[str, str]) -> None:
    assert started(node, **variables) == ("ok", "restored")


def test_the_snapshot_is_restored_where_the_command_fails(node: Node) -> None:
    """As with an index that is down: a snapshot needs none."""
    for wheel in node.wheels.iterdir():
        wheel.unlink()
    done = start(node, node.plain)
    assert "bootseer-alpha was not found" in done.stderr  # uv's own words
    assert "the snapshot of the same inputs was restored" in done.stderr
    assert (done.returncode, node.last()) == (0, ("ok", "restored"))
    assert node.works()
    assert not is_linked(node)
    assert started(node) == ("ok", "in place")


def through(node: Node, folder: Path, first: str) -> list[str]:
    """The command by a program named `uv` that runs shell words first where `spoilt` is there."""
    real, *words = node.plain
    program = folder / "bin/uv"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\ntest -e {folder}/spoilt && {{ {first}; }}\nexec {real} "$@"\n')
    program.chmod(0o755)
    command = [str(program), *words]
    assert start(node, command).returncode == 0
    node.fresh()
    (folder / "spoilt").touch()
    return command


def test_nothing_is_put_over_what_a_command_left_that_failed(node: Node, tmp_path: Path) -> None:
    done = start(node, through(node, tmp_path, f"touch {node.place}/bin/begun; exit 3"))
    assert (done.returncode, node.last()) == (3, ("error", "installed"))
    assert "bootseer.deps.why" not in node.ends()[-1]["attributes"]
    assert (node.place / "bin/begun").exists()
    assert not node.works()


def test_a_command_that_was_told_to_end_is_not_made_good(node: Node, tmp_path: Path) -> None:
    """Though it has an exit code of its own then: the job is not to start."""
    ready = tmp_path / "ready"
    words = f"trap 'exit 1' TERM; touch {ready}; while :; do sleep 0.1; done"
    command = through(node, tmp_path, words)
    options = ["--store", node.store, "--store-timeout", PATIENT_S, "--publish", "inline"]
    child = subprocess.Popen(
        [sys.executable, "-m", "bootseer", "deps", "run", *map(str, options), "--", *command],
        cwd=node.home,
        env=node.environ(),
    )
    try:
        until(ready.exists, "the command's begin")
        child.terminate()
        assert child.wait(120) == 1
    finally:
        child.kill()
        child.wait()
    assert node.last() == ("error", "installed")
    assert not node.works()


def test_a_list_with_a_newer_release_is_published_anew(node: Node) -> None:
    """Left to uv, it was installed by each node and published by none."""
    (node.home / "requirements.txt").write_text("bootseer-alpha\n")
    assert start(node, node.plain).returncode == 0
    assert node.last() == ("ok", "published")
    node.fresh()
    make_wheel(node.wheels, "bootseer_alpha", "2.0")
    done = start(node, node.plain)
    assert (done.returncode, node.last()) == (0, ("ok", "published"))
    assert len(node.archives()) == 3


def test_so_is_what_its_settings_file_may_have_it_copy(node: Node) -> None:
    folder = node.home.parent / ".config/uv"
    folder.mkdir(parents=True)
    (folder / "uv.toml").write_text('link-mode = "hardlink"\n')
    node.run(command=node.plain)  # settings files are part of the key
    node.fresh()
    assert started(node) == ("ok", "restored")


@pytest.mark.parametrize("lost", ["wheels-v*/*/*/bootseer-alpha", "archive-v*/*"])
def test_so_is_what_its_cache_has_in_part(node: Node, lost: str) -> None:
    uv_cache = node.home.parent / ".cache/uv"
    (folder,) = uv_cache.glob(lost)
    shutil.rmtree(folder)
    assert started(node) == ("ok", "restored")


def test_so_is_what_a_form_was_asked_for_or_a_shared_cache_given(node: Node) -> None:
    assert started(node, "--form", "archive") == ("ok", "restored")
    node.fresh()
    assert started(node, "--cache", node.cache, "--form", "copy") == ("ok", "restored")


@pytest.mark.root
def test_so_is_what_lies_on_another_file_system(node: Node) -> None:
    uv_cache = node.home.parent / ".cache/uv"
    kept = node.home.parent / "kept"
    os.rename(uv_cache, kept)
    uv_cache.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", uv_cache], check=True)
    try:
        shutil.copytree(kept, uv_cache, symlinks=True, dirs_exist_ok=True)
        assert started(node) == ("ok", "restored")
    finally:
        subprocess.run(["umount", uv_cache], check=True)
