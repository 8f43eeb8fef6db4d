"""Writers in one directory that remove what they find empty."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bootseer.errors import NotFoundError
from bootseer.storage.local import LocalStore

TRIES = 3000


def _create(store: LocalStore, number: int) -> None:
    assert store.create(f"base/draft-{number}/file", b"x", durable=False)
    store.delete_tree(f"base/draft-{number}")


def _write(store: LocalStore, number: int) -> None:
    store.writer(f"base/draft-{number}/file").abort()
    store.delete_tree(f"base/draft-{number}")


def _make_folder(store: LocalStore, number: int) -> None:
    store.mkdir(f"base/draft-{number}/folder")
    store.delete_tree(f"base/draft-{number}")


def _rename(store: LocalStore, number: int) -> None:
    store.replace(f"draft-{number}", b"x", durable=False)
    store.rename(f"draft-{number}", f"base/draft-{number}/file")
    store.delete_tree(f"base/draft-{number}")


# Another process, which at any moment removes the folder if it is empty, until its input ends. It
# rests after every second time: where the disk holds up whoever makes a folder for a millisecond,
# it would be the next each time, and nobody removes a folder as often as it can be made.
REMOVE = """
import os, random, select, sys, time
removed = 0
while not select.select([0], [], [], 0)[0]:
    time.sleep(random.random() * 1e-3)
    try:
        os.rmdir(sys.argv[1])
        removed += 1
        if removed % 2 == 0:
            time.sleep(random.random() * 1e-2)
    except OSError:
        pass
print(removed)
"""


@pytest.mark.parametrize("act", [_create, _write, _make_folder, _rename])
def test_a_folder_that_is_removed_as_it_is_made(
    tmp_path: Path, act: Callable[[LocalStore, int], None]
) -> None:
    """The mount of a checkpoint did so: what a killed save had begun went as the next one began."""
    store = LocalStore(str(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", REMOVE, str(tmp_path / "base")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as remover:
        try:
            for number in range(TRIES):
                act(store, number)
            removed, _ = remover.communicate(timeout=60)
        finally:
            remover.kill()
    assert int(removed) > 20  # it struck


def test_what_is_missing_is_missing(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        LocalStore(str(tmp_path)).rename("missing", "folder/name")
