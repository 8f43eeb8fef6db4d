"""Whose bytes go first, between processes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from bootseer.blocks import link_turns
from bootseer.blocks.link_turns import DEMAND, HOT, LinkTurns


@pytest.mark.parametrize("name", [DEMAND, HOT])
def test_others_see_it_as_long_as_it_is_held(tmp_path: Path, name: str) -> None:
    with LinkTurns.of(str(tmp_path)) as mine, LinkTurns.of(str(tmp_path)) as other:
        assert not other.is_taken()
        with mine.holding(name), mine.holding(name):
            assert other.is_taken()
        assert not other.is_taken()


def test_two_may_hold_it_at_once(tmp_path: Path) -> None:
    one, two = LinkTurns.of(str(tmp_path)), LinkTurns.of(str(tmp_path))
    with one, two, one.holding(HOT):
        with two.holding(HOT):
            pass
        assert two.is_taken()


def test_a_process_that_dies_holds_nothing(tmp_path: Path) -> None:
    ready_r, ready_w = os.pipe()
    child = os.fork()
    if not child:
        with LinkTurns.of(str(tmp_path)).holding(DEMAND):
            os.write(ready_w, b"x")
            time.sleep(60)
        os._exit(0)
    os.close(ready_w)
    assert os.read(ready_r, 1) == b"x"
    os.close(ready_r)
    with LinkTurns.of(str(tmp_path)) as turns:
        assert turns.is_taken()
        os.kill(child, 9)
        os.waitpid(child, 0)
        assert not turns.is_taken()


def test_a_wait_ends_with_what_it_waits_for_or_by_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LinkTurns.of(str(tmp_path)) as mine, LinkTurns.of(str(tmp_path)) as other:
        other.wait(lambda: False)
        monkeypatch.setattr(link_turns, "LIMIT_S", 0.05)
        looks = iter([False, True])
        with mine.holding(HOT):
            other.wait(lambda: False)
            monkeypatch.setattr(link_turns, "LIMIT_S", 3600.0)
            other.wait(lambda: next(looks))
        assert next(looks, None) is None


def test_where_there_is_no_place_for_it_nobody_waits(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with LinkTurns.of(str(tmp_path / "file")) as turns, turns.holding(HOT):
        assert not turns.is_taken()
