"""Reading a checkpoint whole and naming everything that is wrong with it."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bootseer.errors import CorruptDataError, NotFoundError
from bootseer.storage.store import Store
from bootseer.stripedfs.format import pointer
from bootseer.stripedfs.format.manifest import Manifest, TreeFile
from bootseer.stripedfs.format.pointer import StripedObject, Version
from bootseer.stripedfs.format.stripe_layout import stripe_name
from bootseer.stripedfs.read import batches
from bootseer.stripedfs.read.open import Tree, in_parallel
from bootseer.stripedfs.read.sources import FileSource, SmallSource, Stretches, StripedSource
from bootseer.stripedfs.write.stripe_pool import Pool
from bootseer.stripedfs.write.write_settings import SILENT, Progress

if TYPE_CHECKING:
    from bootseer.blocks.fetch.fetcher import Fetcher
    from bootseer.storage.options import StoreOptions

MAX_DAMAGES = 10_000


@dataclasses.dataclass(frozen=True, slots=True)
class Damage:
    """One fault. `path` is the file of a tree ("" for a file's own checkpoint).

    `stripe` and `chunk` are -1 where the fault is not of one.
    """

    path: str
    object: str
    stripe: int
    chunk: int
    problem: str


@dataclasses.dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was read, and what was wrong with it."""

    version: Version
    files: int
    size_bytes: int
    checked_bytes: int
    damages: tuple[Damage, ...]


def verify(
    url: str,
    *,
    options: StoreOptions | None = None,
    fetcher: Fetcher | None = None,
    progress: Progress = SILENT,
) -> VerifyReport:
    """Read every byte of the checkpoint `url` and compare it with its digest.

    Damage is reported, not raised. Raises NotFoundError when there is no striped checkpoint,
    CorruptDataError when pointer or manifest are damaged, and the store's other errors.
    """
    from bootseer.storage.open import open_object
    from bootseer.stripedfs.shared_fetcher import shared_fetcher

    store, name = open_object(url, options)
    try:
        return verify_in(store, name, fetcher or shared_fetcher(), progress=progress)
    finally:
        store.close()


def verify_in(
    store: Store, name: str, fetcher: Fetcher, *, progress: Progress = SILENT
) -> VerifyReport:
    """`verify` in a store that is open already."""
    loaded = pointer.load(store, pointer.resolve(store, name))
    if loaded is None:
        raise NotFoundError(
            f"there is no striped checkpoint {name} in {store.url}; check the name, or put one"
        )
    version, manifest = loaded
    run = _Run(store, version, fetcher, progress)
    if isinstance(manifest, Manifest):
        progress.expect(manifest.layout.size_bytes)
        files: Iterator[tuple[str, FileSource]] = run.striped(
            "", StripedObject(version.folder, manifest), version.folder
        )
        count = 1
    else:
        tree = Tree(store, version, manifest)
        progress.expect(manifest.size_bytes)
        files = run.tree(tree)
        count = sum(1 for _ in manifest.files())
    batches.run(files, run.check, limit_bytes=batches.batch_bytes(store))
    damages = tuple(sorted(run.damages, key=lambda d: (d.path, d.chunk, d.object)))
    return VerifyReport(version, count, version.pointer.size_bytes, run.checked_bytes, damages)


class _Run:
    """One verification: collects damages from several threads."""

    def __init__(
        self, store: Store, version: Version, fetcher: Fetcher, progress: Progress
    ) -> None:
        self._store, self._version = store, version
        self._fetcher, self._progress = fetcher, progress
        self._lock = threading.Lock()
        self._lost: dict[str, frozenset[int]] = {}
        self.damages: list[Damage] = []
        self.checked_bytes = 0

    def tree(self, tree: Tree) -> Iterator[tuple[str, FileSource]]:
        """Every file of a tree that can be opened."""
        for entry in tree.manifest.files():
            if entry.striped:
                yield from self._of_tree(entry)
                continue
            name = f"{self._version.folder}/{entry.object}"
            label = f"{entry.path} of {self._version.folder} in {self._store.url}"
            problem = self._length(name, entry.size_bytes)
            if problem:
                self._add(Damage(entry.path, name, -1, -1, problem))
                continue
            yield entry.path, SmallSource(self._store, name, entry.size_bytes, entry.digest, label)

    def _of_tree(self, entry: TreeFile) -> Iterator[tuple[str, FileSource]]:
        name = f"{self._version.folder}/{entry.object}"
        try:
            found = pointer.striped_file(self._store, self._version, entry)
        except CorruptDataError as error:
            self._add(Damage(entry.path, f"{name}/{pointer.MANIFEST}", -1, -1, str(error)))
            return
        yield from self.striped(entry.path, found, f"{entry.path} of {self._version.folder}")

    def striped(
        self, path: str, striped: StripedObject, label: str
    ) -> Iterator[tuple[str, FileSource]]:
        """A striped file; its missing and wrongly long stripes are told at once."""
        layout = striped.manifest.layout
        parts = {striped.part(s): s for s in range(layout.width)}
        lengths = {part: layout.stripe_length(stripe) for part, stripe in parts.items()}
        problems = in_parallel(lambda part: self._length(part, lengths[part]), list(parts))
        lost = set()
        for (part, stripe), problem in zip(parts.items(), problems, strict=True):
            if problem:
                lost.add(stripe)
                self._add(Damage(path, part, stripe, -1, problem))
        good = [part for part, stripe in parts.items() if stripe not in lost and lengths[part]]
        placed = in_parallel(lambda part: Stretches(self._store.locations(part)), good)
        stretches = dict(zip(good, placed, strict=True))
        self._lost[path] = frozenset(lost)
        yield path, StripedSource(self._store, striped, label, stretches)

    def check(self, batch: batches.Batch, memory: list[memoryview], pool: Pool) -> None:
        """Fetch a batch; where that fails, find out which blocks are damaged."""
        pool.check()
        whole = not any(self._lost.get(segment.path) for segment in batch)
        if whole:
            try:
                batches.fetch(self._fetcher, list(zip(batch, memory, strict=True)))
                self._count(sum(segment.length for segment in batch))
                return
            except (CorruptDataError, NotFoundError):
                pass  # something in it; block by block tells what
        for segment, view in zip(batch, memory, strict=True):
            self._blocks(segment, view, pool)

    def _blocks(self, segment: batches.Segment, view: memoryview, pool: Pool) -> None:
        source, lost = segment.source, self._lost.get(segment.path, frozenset())
        for start in range(0, segment.length, source.block_bytes):
            pool.check()
            index = (segment.offset + start) // source.block_bytes
            piece = view[start : start + source.block_bytes]
            stripe = -1
            if isinstance(source, StripedSource):
                stripe = source.layout.chunk_location(index).stripe
            if stripe in lost:
                continue
            one = batches.Segment(segment.path, source, segment.offset + start, len(piece))
            try:
                batches.fetch(self._fetcher, [(one, piece)])
                self._count(len(piece))
            except (CorruptDataError, NotFoundError) as error:
                chunk = index if stripe >= 0 else -1
                name = source.locate(index).part
                self._add(Damage(segment.path, name, stripe, chunk, str(error)))

    def _length(self, name: str, expected_bytes: int) -> str:
        """What is wrong with an object at first sight; "" when nothing is."""
        try:
            found = self._store.stat(name)
        except NotFoundError:
            return "is missing"
        if found.is_folder:
            return "is a folder"
        if found.size_bytes != expected_bytes:
            return f"has {found.size_bytes} bytes instead of {expected_bytes}"
        return ""

    def _count(self, size_bytes: int) -> None:
        with self._lock:
            self.checked_bytes += size_bytes
        self._progress.advance(size_bytes)

    def _add(self, damage: Damage) -> None:
        with self._lock:
            if len(self.damages) >= MAX_DAMAGES:
                raise CorruptDataError(
                    f"{self._version.folder} in {self._store.url} has more than {MAX_DAMAGES} "
                    "faults; put it anew"
                )
            self.damages.append(damage)


def sentence(damage: Damage) -> str:
    """A damage as a line for people."""
    where = f"chunk {damage.chunk} of {stripe_name(damage.stripe)}" if damage.chunk >= 0 else ""
    file = f"{damage.path}: " if damage.path else ""
    if where:
        return f"{file}{where} ({damage.object}) does not match its digest"
    return f"{file}{damage.object} {damage.problem}"
