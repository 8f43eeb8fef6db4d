"""Counters of the fetcher: sums, threads, events."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from bootseer.blocks import stats
from bootseer.blocks.source import BlockSource
from bootseer.blocks.stats import Counters, Stats
from bootseer.events.writer import Writer


def points(folder: Path) -> list[dict[str, object]]:
    texts = [file.read_text(encoding="ascii") for file in folder.iterdir()]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    return [line["attributes"] for line in lines if line["event"] == "point"]


def test_classes_are_summed_apart_and_together():
    some = Stats()
    some.add("image", bytes=10, requests=1)
    some.add("image", bytes=5, retries=2)
    some.add("plain", bytes=1)
    assert some.snapshot() == {
        "image": Counters(bytes=15, requests=1, retries=2),
        "plain": Counters(bytes=1),
    }
    assert some.total() == Counters(bytes=16, requests=1, retries=2)


def test_an_unknown_counter_is_a_mistake():
    with pytest.raises(KeyError):
        Stats().add("image", byte=1)


def test_threads_lose_nothing():
    some = Stats()
    together = threading.Barrier(4)

    def count() -> None:
        together.wait()
        for _ in range(20_000):
            some.add("plain", bytes=3, requests=1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert some.total() == Counters(bytes=240_000, requests=80_000)


def test_a_name_per_object_does_not_grow_without_bound():
    some = Stats()
    for number in range(10_000):
        some.add(f"object-{number}", bytes=1)
    found = some.snapshot()
    assert len(found) == stats.MAX_CLASSES + 1
    assert found[stats.OTHER].bytes == 10_000 - stats.MAX_CLASSES
    assert some.total().bytes == 10_000


def test_events_tell_what_was_added_since_the_last_ones(tmp_path: Path):
    some = Stats()
    with Writer(str(tmp_path)) as writer:
        some.emit(writer)
        some.add("image", bytes=10, blocked_ns=7)
        some.emit(writer, workload="train")
        some.add("plain", bytes=1)
        some.add("image", requests=1)
        some.emit(writer)
        some.emit(writer)
    assert points(tmp_path) == [
        {
            "bootseer.source_class": "image",
            "bootseer.bytes": 10,
            "bootseer.blocked_ns": 7,
            "workload": "train",
        },
        {"bootseer.source_class": "image", "bootseer.requests": 1},
        {"bootseer.source_class": "plain", "bootseer.bytes": 1},
    ]


def test_a_source_names_its_class_or_is_plain():
    class Image(BlockSource):
        source_class = "image"

    class Unnamed(BlockSource):
        pass

    assert Image.source_class == "image"
    assert Unnamed.source_class == "plain"
