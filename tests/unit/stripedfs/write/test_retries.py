"""How often a put tries again: a store that names a dead server again and again, and one that
is slow to fail."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest

from bootseer.errors import StoreUnavailableError
from bootseer.storage.open import open_store
from bootseer.stripedfs.write import stripe_upload
from bootseer.stripedfs.write.put import put_into
from bootseer.stripedfs.write.write_settings import WriteSettings
from tests.support.samples.stripes import read_back

CHUNK = 64 << 10


@pytest.mark.parametrize(
    ("attempt", "tries", "past_s", "over"),
    [
        (1, 1, 0, True),
        (15, 16, 0, False),
        (16, 16, 0, True),
        (8, 16, 59, False),
        (8, 16, 61, True),
        (7, 16, 61, False),
    ],
)
def test_what_takes_long_is_tried_half_as_often(
    attempt: int, tries: int, past_s: float, over: bool
) -> None:
    assert stripe_upload.are_tries_over(attempt, tries, time.monotonic() - past_s) is over


def test_pauses_stay_short() -> None:
    error = StoreUnavailableError("gone")
    assert max(stripe_upload.backoff_s(attempt, error) for attempt in range(1, 40)) <= 4.0


@pytest.mark.parametrize("size_bytes", [CHUNK // 2, 5 * CHUNK])
def test_servers_that_refuse_in_turn_cost_time_and_not_the_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size_bytes: int
) -> None:
    """The store is a fake: of each object's writers the first twelve are refused."""
    (tmp_path / "f").write_bytes(bytes(range(256)) * (size_bytes // 256))
    monkeypatch.setattr(stripe_upload, "backoff_s", lambda attempt, error: 0.0)
    settings = WriteSettings(chunk_bytes=CHUNK, width=2, jobs=1)
    store = open_store(str(tmp_path / "store"))
    writer, asked = store.writer, itertools.count(1)

    def refusing(name: str, *more: Any, **options: Any) -> Any:
        if next(asked) % 13:
            raise StoreUnavailableError(f"{name}: Connection refused")
        return writer(name, *more, **options)

    monkeypatch.setattr(store, "writer", refusing)
    put_into(store, "f", str(tmp_path / "f"), settings=settings)
    assert next(asked) > 13
    assert read_back(store, "f") == (tmp_path / "f").read_bytes()
