"""A checkpoint moved over another by somebody who is killed at some step: nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bootseer.errors import NotFoundError
from bootseer.storage.local import LocalStore
from bootseer.stripedfs.read import namespace
from bootseer.stripedfs.write import rename_remove
from bootseer.stripedfs.write.gc import collect_garbage
from bootseer.stripedfs.write.stripe_stream import StripedWriter
from bootseer.stripedfs.write.write_settings import WriteSettings
from tests.support.samples.stripes import CHUNK, leftovers, opened, read_back, sample

SMALL = WriteSettings(chunk_bytes=CHUNK, width=4)
OLD, NEW = sample(5 * CHUNK, 0), sample(6 * CHUNK, 1)
STEPS = 12
"""More than a move has."""


class Killed(BaseException):
    """Stands for the end of the process."""


class KilledStore(LocalStore):
    """Fault injection: the process ends when it is to change the store once more than `steps`."""

    def __init__(self, root: str, steps: int) -> None:
        super().__init__(root)
        self._steps = steps

    def _step(self) -> None:
        self._steps -= 1
        if self._steps < 0:
            raise Killed

    def rename(self, *words: Any) -> None:
        self._step()
        super().rename(*words)

    def replace(self, *words: Any, **more: Any) -> None:
        self._step()
        super().replace(*words, **more)

    def delete(self, *words: Any) -> None:
        self._step()
        super().delete(*words)

    def delete_tree(self, *words: Any) -> None:
        self._step()
        super().delete_tree(*words)


def move(store: LocalStore) -> None:
    rename_remove.move(store, namespace.look_up(store, "tmp"), "latest")


@pytest.mark.parametrize("steps", range(STEPS))
def test_a_move_that_was_cut_short_loses_nothing(tmp_path: Path, steps: int) -> None:
    for name, data in (("latest", OLD), ("tmp", NEW)):
        with StripedWriter.begin(opened(tmp_path), name, SMALL) as out:
            out.write(data)
    try:
        move(KilledStore(str(tmp_path), steps))
    except Killed:
        assert steps < STEPS - 1
    else:
        assert leftovers(tmp_path, "latest") == []
        assert [p.name for p in tmp_path.iterdir()] == ["latest.stripes"]
    assert read_back(opened(tmp_path), "latest") in (OLD, NEW)
    for name in ("latest", "tmp"):
        if (tmp_path / f"{name}.stripes").exists():
            list(collect_garbage(opened(tmp_path), name, grace_s=0))
    try:
        move(LocalStore(str(tmp_path)))  # once more finishes it
    except NotFoundError:
        assert namespace.look_up(opened(tmp_path), "latest").size_bytes == len(NEW)
    assert read_back(opened(tmp_path), "latest") == NEW
    list(collect_garbage(opened(tmp_path), "latest", grace_s=0))
    assert leftovers(tmp_path, "latest") == []
