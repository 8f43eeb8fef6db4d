"""A version that somebody collects just when it is published; memory of many writers at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from bootseer.errors import BusyError, StoreUnavailableError
from bootseer.storage.store import NO_HINTS, ObjectWriter, Stat, WriteHints
from bootseer.stripedfs.format.pointer import read_current
from bootseer.stripedfs.workers import WorkerPool
from bootseer.stripedfs.write import stripe_stream as streams
from bootseer.stripedfs.write import stripe_upload
from bootseer.stripedfs.write.gc import collect_garbage
from bootseer.stripedfs.write.put import put_into
from bootseer.stripedfs.write.stripe_stream import Budget, StripedWriter, StripeStream
from bootseer.stripedfs.write.write_settings import BUFFER_BUDGET_BYTES, WriteSettings, plan_write
from tests.support.faulty_store import WrappedStore
from tests.support.samples.stripes import CHUNK, leftovers, opened, sample, whole

SMALL = WriteSettings(chunk_bytes=CHUNK, width=4)


class Hooked(WrappedStore):
    """A FAKE store, for fault injection: something happens before a rename, or with a pointer."""

    def __init__(self, root: Path) -> None:
        super().__init__(opened(root))
        self.renamed: Callable[[], None] = lambda: None
        self.pointing: Callable[[], None] = lambda: None
        self.pointed: Callable[[], None] = lambda: None

    def rename(self, old: str, new: str) -> None:
        self.inner.rename(old, new)
        self.renamed()

    def replace(self, name: str, data: bytes, *, durable: bool = True) -> None:
        if not name.endswith("/CURRENT"):
            self.inner.replace(name, data, durable=durable)
            return
        self.pointing()
        self.inner.replace(name, data)
        self.pointed()


class Limiting(Hooked):
    """A FAKE store: the first writer of each object is told to come back later."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.begun: set[str] = set()

    def writer(self, name: str, hints: WriteHints = NO_HINTS) -> ObjectWriter:
        base = name.rpartition("/")[2]
        if base not in self.begun:
            self.begun.add(base)
            raise StoreUnavailableError("slowly", retry_after_s=50.0)
        return super().writer(name, hints)


def test_a_server_is_left_alone_for_as_long_as_it_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused: list[float] = []
    told = [StoreUnavailableError("slowly", retry_after_s=40.0)]

    def pointing() -> None:
        if told:
            raise told.pop()

    monkeypatch.setattr(WorkerPool, "pause", lambda _, pause_s: paused.append(pause_s))
    fake = SimpleNamespace(sleep=paused.append, monotonic=time.monotonic)
    monkeypatch.setattr(stripe_upload, "time", fake)
    (tmp_path / "d").mkdir()
    (tmp_path / "d/small").write_bytes(b"small")
    (tmp_path / "d/large").write_bytes(sample(CHUNK * 2))
    store = Limiting(tmp_path / "s")
    store.pointing = pointing
    put_into(store, "d", str(tmp_path / "d"), settings=SMALL)
    assert paused == [50.0] * (len(paused) - 1) + [40.0]
    assert {"small", "stripe-00000", "stripe-00001"} <= store.begun
    assert len(paused) == len(store.begun) + 1


def write(store: WrappedStore, seed: int) -> None:
    with StripedWriter.begin(store, "f", SMALL) as out:
        out.write(sample(5 * CHUNK, seed))


def gc(root: Path) -> None:
    assert len(list(collect_garbage(opened(root), "f", grace_s=0))) == 1


@pytest.mark.parametrize("when", ["renamed", "pointing"])
@pytest.mark.parametrize("earlier", [True, False])
def test_a_version_that_is_collected_at_once_leaves_the_one_before(
    tmp_path: Path, when: str, earlier: bool
) -> None:
    store = Hooked(tmp_path)
    if earlier:
        write(store, 1)

    def once() -> None:
        setattr(store, when, lambda: None)
        gc(tmp_path)

    setattr(store, when, once)
    with pytest.raises(BusyError, match="collected while it was published"):
        write(store, 2)
    if earlier:
        assert whole(tmp_path, "f") == sample(5 * CHUNK, 1)
    else:
        assert read_current(opened(tmp_path), "f") is None
    assert leftovers(tmp_path, "f") == []


def test_where_both_are_gone_nothing_is_pointed_to(tmp_path: Path) -> None:
    store = Hooked(tmp_path)
    write(store, 1)
    before = read_current(store, "f")
    assert before is not None

    def lose() -> None:
        for folder in (tmp_path / "f.stripes").glob("v-*"):
            opened(tmp_path).delete_tree(f"f.stripes/{folder.name}")

    store.pointing = lose  # and once more when it points back
    with pytest.raises(BusyError):
        write(store, 2)
    assert read_current(store, "f") is None


def test_a_version_that_cannot_be_looked_at_is_taken_back(tmp_path: Path) -> None:
    """The store goes away in the moment between a version's renaming and the pointer."""

    class Blind(WrappedStore):
        def stat(self, name: str) -> Stat:
            if "/v-" in name:
                raise StoreUnavailableError("it is away; wait")
            return self.inner.stat(name)

    with pytest.raises(StoreUnavailableError):
        write(Blind(opened(tmp_path)), 1)
    assert not list(tmp_path.glob("*.stripes/v-*"))
    write(WrappedStore(opened(tmp_path)), 2)


def test_the_pointer_of_somebody_quicker_stays(tmp_path: Path) -> None:
    store = Hooked(tmp_path)
    write(store, 1)

    def overtake() -> None:
        write(WrappedStore(opened(tmp_path)), 3)
        gc_all = list(collect_garbage(opened(tmp_path), "f", grace_s=0))
        assert gc_all

    store.pointed = overtake
    with pytest.raises(BusyError):
        write(store, 2)
    assert whole(tmp_path, "f") == sample(5 * CHUNK, 3)


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("chunk", "jobs", "wanted"), [(64 << 20, 256, 4), (4 << 20, 8, 8)])
def test_jobs_stay_within_the_budget(tmp_path: Path, chunk: int, jobs: int, wanted: int) -> None:
    plan = plan_write(WriteSettings(chunk_bytes=chunk, jobs=jobs), opened(tmp_path))
    assert plan.jobs == wanted
    assert plan.jobs * plan.chunk_bytes <= BUFFER_BUDGET_BYTES


def taken_bytes(budget: Budget) -> int:
    """What all streams have."""
    return sum(budget._taken.values())


def test_streams_share_their_memory(tmp_path: Path) -> None:
    store, plan = opened(tmp_path), plan_write(SMALL, opened(tmp_path))
    budget = Budget(9 * CHUNK)
    made = [StripeStream(store, plan, f"s{number}", budget=budget) for number in range(5)]
    most = 0
    for part in range(40):
        for number, stream in enumerate(made):
            stream.write(sample(CHUNK + 7, 100 * number + part))
            most = max(most, taken_bytes(budget))
    assert most <= (9 + 2 * 5) * CHUNK
    for stream in made[1:]:
        assert stream.finish().layout.size_bytes == 40 * (CHUNK + 7)
    made[0].abort()
    assert taken_bytes(budget) == 0


def test_a_stream_alone_has_a_chunk_a_stripe_in_any_case(tmp_path: Path) -> None:
    store, plan = opened(tmp_path), plan_write(SMALL, opened(tmp_path))
    budget = Budget(CHUNK)
    first = StripeStream(store, plan, "s", budget=budget)
    granted = 0
    while budget.take(first, CHUNK, least_bytes=5 * CHUNK):
        granted += 1
    assert granted == 5
    second = StripeStream(store, plan, "t", budget=budget)
    assert [budget.take(second, CHUNK, least_bytes=5 * CHUNK) for _ in range(3)] == [
        True,
        True,
        False,
    ]
    del second  # without an end
    assert taken_bytes(budget) == 5 * CHUNK


def test_all_writers_of_a_process_are_counted(tmp_path: Path) -> None:
    before = taken_bytes(streams.BUDGET)
    with StripedWriter.begin(opened(tmp_path), "f", SMALL) as out:
        out.write(sample(5 * CHUNK))
        assert taken_bytes(streams.BUDGET) > before
    assert taken_bytes(streams.BUDGET) == before
