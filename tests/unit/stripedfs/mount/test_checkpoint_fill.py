"""A checkpoint brought to the node's cache before any start."""

from __future__ import annotations

import dataclasses
import errno
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from bootseer.blocks.cache import sealed_objects
from bootseer.blocks.link_turns import HOT, LinkTurns
from bootseer.errors import NotFoundError, StoreUnavailableError, UsageError
from bootseer.stripedfs.mount.checkpoint_fill import fill_checkpoint, look_at_checkpoint
from bootseer.stripedfs.mount.settings import MountSettings
from tests.support.mounts.checkpoints import content, put_bytes, store_of

SIZE = 3_000_000


@pytest.fixture
def settings(tmp_path: Path) -> MountSettings:
    put_bytes(store_of(tmp_path / "store"), "model.pt", content(SIZE), tmp_path)
    url = f"file://{tmp_path}/store/model.pt"
    return MountSettings(url=url, mountpoint="", cache=str(tmp_path / "cache"), prefetch="")


@pytest.fixture
def turns(tmp_path: Path) -> LinkTurns:
    return LinkTurns(str(tmp_path / "link"))


def test_all_of_it_is_there_afterwards(settings: MountSettings, turns: LinkTurns) -> None:
    before = look_at_checkpoint(settings)
    assert (before.present_bytes, before.total_bytes, before.complete) == (0, SIZE, False)
    done = fill_checkpoint(settings, turns)
    assert (done.present_bytes, done.total_bytes, done.complete) == (SIZE, SIZE, True)
    assert look_at_checkpoint(settings) == done
    assert fill_checkpoint(settings, turns) == done


def test_a_start_that_runs_goes_first(settings: MountSettings, turns: LinkTurns) -> None:
    with turns.holding(HOT):
        thread = threading.Thread(target=fill_checkpoint, args=(settings, turns))
        thread.start()
        time.sleep(1)
        assert look_at_checkpoint(settings).present_bytes == 0
    thread.join()
    assert look_at_checkpoint(settings).complete


def test_what_cannot_be_kept_is_said(settings: MountSettings, turns: LinkTurns) -> None:
    for field in ("cache", "prefetch"):
        given = dataclasses.replace(settings, **{field: "" if field == "cache" else None})
        with pytest.raises(UsageError, match="cache and prefetch"):
            fill_checkpoint(given, turns)
    missing = dataclasses.replace(settings, url=f"{settings.url}-2")
    with pytest.raises(NotFoundError):
        fill_checkpoint(missing, turns)


def test_what_is_wrong_in_the_cache_is_fetched_again(
    settings: MountSettings, turns: LinkTurns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Injected: a bit turns after all has come, before it is read for the mark."""
    seal, struck = sealed_objects.seal, list[bytes]()

    def spoil_and_seal(*arguments: Any, **options: Any) -> bool:
        (data,) = Path(settings.cache).glob("*/data")
        if not struck:
            with data.open("r+b") as file:
                file.seek(SIZE // 2)
                file.write(bytes([content(SIZE)[SIZE // 2] ^ 1]))
            struck.append(data.read_bytes())
        return seal(*arguments, **options)

    monkeypatch.setattr(sealed_objects, "seal", spoil_and_seal)
    done = fill_checkpoint(settings, turns)
    assert struck[0] != content(SIZE)
    assert done.complete
    (data,) = Path(settings.cache).glob("*/data")
    assert data.read_bytes() == content(SIZE)
    assert sealed_count(settings) == 1


def sealed_count(settings: MountSettings) -> int:
    return len(list(Path(settings.cache).glob(f"*/{sealed_objects.MARK}")))


def test_what_cannot_be_sealed_is_reported_and_kept(
    settings: MountSettings, turns: LinkTurns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Injected: the disk fails when it is read for the mark."""

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setenv("BOOTSEER_EVENTS", str(tmp_path / "events"))
    monkeypatch.setattr(sealed_objects, "_verify", fail)
    assert fill_checkpoint(settings, turns).complete
    assert sealed_count(settings) == 0
    files = (tmp_path / "events").glob("*.jsonl")
    written = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    (fault,) = [event for event in written if event["name"] == "checkpoint.fault"]
    assert fault["status"] == "fallback"
    assert "Input/output error" in fault["attributes"]["error.message"]


def test_wrong_bytes_are_not_kept(
    settings: MountSettings, turns: LinkTurns, tmp_path: Path
) -> None:
    (stripe,) = [p for p in (tmp_path / "store").rglob("*") if p.is_file() and "stripe" in p.name][
        :1
    ]
    data = bytearray(stripe.read_bytes())
    data[100] ^= 1
    stripe.write_bytes(data)
    with pytest.raises(StoreUnavailableError, match=r"^[0-9]+ bytes of the checkpoint"):
        fill_checkpoint(settings, turns)
    assert not look_at_checkpoint(settings).complete
