"""The file object in child processes, under torch, and over a hundred thousand reads."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer import stripedfs
from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.blocks.settings import FetchSettings
from bootseer.stripedfs.file import StripedFile
from tests.support.mounts.checkpoints import CHUNK, content, put_bytes, store_of

SIZE = 9 * CHUNK + 123


def resident_bytes() -> int:
    """Memory of this process in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def url(tmp_path: Path) -> str:
    put_bytes(store_of(tmp_path / "store"), "ckpt", content(SIZE), tmp_path)
    return f"file://{tmp_path}/store/ckpt"


@pytest.fixture
def file(url: str) -> Iterator[StripedFile]:
    with stripedfs.open(url) as file:
        yield file


def _read_in_child(file: StripedFile, results: multiprocessing.Queue[bytes]) -> None:
    results.put(file.read())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_process_reads_on(file: StripedFile, method: str) -> None:
    file.read(10)  # threads and memory are in use before the fork
    context = multiprocessing.get_context(method)
    results = context.Queue()
    child = context.Process(target=_read_in_child, args=(file, results))
    child.start()
    assert results.get(timeout=60) == content(SIZE)[10:]
    child.join(60)
    assert child.exitcode == 0


@pytest.mark.slow
def test_many_small_reads_do_not_grow_memory(url: str) -> None:
    with (
        Fetcher(FetchSettings(memory_bytes=1 << 20)) as fetcher,
        stripedfs.open(url, fetcher=fetcher) as file,
    ):
        buffer = bytearray(16)

        def read(count: int) -> None:
            for number in range(count):
                file.read_at(number * 6007 % SIZE, buffer)

        read(2000)
        before = resident_bytes()
        read(100_000)
        assert resident_bytes() - before < 8 << 20


@pytest.mark.slow
def test_torch_loads_from_it(tmp_path: Path) -> None:
    import torch

    state = {
        "weights": torch.arange(300_000, dtype=torch.float32),
        "nested": {"bias": torch.ones(7, 5), "step": 12},
    }
    torch.save(state, tmp_path / "model.pt")
    put_bytes(
        store_of(tmp_path / "store"), "model.pt", (tmp_path / "model.pt").read_bytes(), tmp_path
    )
    with stripedfs.open(f"{tmp_path}/store/model.pt") as file:
        loaded = torch.load(file)
    assert torch.equal(loaded["weights"], state["weights"])
    assert torch.equal(loaded["nested"]["bias"], state["nested"]["bias"])
    assert loaded["nested"]["step"] == 12
