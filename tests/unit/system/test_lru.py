"""What is kept is what came last."""

from __future__ import annotations

from bootseer.system.lru import put_youngest


def test_the_oldest_goes_and_what_is_set_again_is_young() -> None:
    kept: dict[str, int] = {}
    assert [put_youngest(kept, key, number, 2) for number, key in enumerate("aba")] == [None] * 3
    assert list(kept.items()) == [("b", 1), ("a", 2)]
    assert put_youngest(kept, "c", 3, 2) == "b"
    assert list(kept.items()) == [("a", 2), ("c", 3)]
