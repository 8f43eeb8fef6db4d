"""What the snapshotter does with its events' files."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from bootseer.events.writer import Writer
from bootseer.imageprefetch.snapshotter import event_cleanup, lazy_mounter
from bootseer.imageprefetch.snapshotter.lazy_mounter import BlockImageMounter, LazySettings
from bootseer.imageprefetch.snapshotter.types import StockImage
from bootseer.storage.options import StoreOptions
from bootseer.storage.request_control import STALL_S

HOST = os.uname().nodename
WEEK_S = 7 * event_cleanup.DAY_S
NO_PROCESS = 4_194_305  # beyond what Linux gives


def aged(path: Path, days: float) -> Path:
    path.touch()
    at_s = time.time() - days * event_cleanup.DAY_S
    os.utime(path, (at_s, at_s))
    return path


def test_old_files_of_ended_writers_of_this_host_go(tmp_path: Path) -> None:
    with Writer(str(tmp_path)) as writer:
        name = os.path.basename(writer.path)
        assert f"-{os.getpid()}-" in name
        alive = aged(tmp_path / name, 30)
        old = aged(tmp_path / name.replace(f"-{os.getpid()}-", f"-{NO_PROCESS}-"), 8)
        young = aged(tmp_path / f"{HOST}-{NO_PROCESS}-1.jsonl", 6)
        others = [aged(tmp_path / n, 30) for n in ("other-4194305-1.jsonl", "kept.jsonl", HOST)]
        folder = tmp_path / f"{HOST}-{NO_PROCESS}-2.jsonl"
        folder.mkdir()
        os.utime(folder, (0, 0))
        assert event_cleanup.remove_old_files(str(tmp_path), WEEK_S) == 1
        assert not old.exists()
        assert all(path.exists() for path in (alive, young, folder, *others))
    assert event_cleanup.remove_old_files(str(tmp_path / "none"), WEEK_S) == 0


@pytest.mark.parametrize("days", [7, 0])
def test_they_go_when_the_snapshotter_starts_if_it_is_told(tmp_path: Path, days: int) -> None:
    old = aged(tmp_path / f"{HOST}-{NO_PROCESS}-1.jsonl", 8)
    with event_cleanup.daily_cleanup(str(tmp_path), days * event_cleanup.DAY_S):
        pass
    assert old.exists() is (days == 0)


def test_while_a_pull_waits_a_registry_that_hangs_is_given_up_sooner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class AskedError(Exception):
        pass

    asked: list[StoreOptions] = []

    def ask(reference: str, options: StoreOptions) -> None:
        asked.append(options)
        raise AskedError

    monkeypatch.setattr(lazy_mounter, "open_repository", ask)
    mounter = BlockImageMounter(LazySettings(options=StoreOptions(plain_http=("a",))))
    monkeypatch.setattr(mounter._helper, "mount", lambda settings: asked.append(settings.options))
    image = StockImage("sha256:" + "0" * 64, "reg.example/a:1", ("layer",))
    mounter.mount(image, "/nowhere")
    for call in (
        lambda: mounter.find(image.reference, image.digest),
        lambda: mounter.unpack(image, 1, "/nowhere"),
    ):
        with pytest.raises(AskedError):
            call()
    assert [one.stall_s for one in asked] == [
        lazy_mounter.PULL_STALL_S,
        lazy_mounter.PULL_STALL_S,
        STALL_S,
    ]
    assert {one.plain_http for one in asked} == {("a",)}
