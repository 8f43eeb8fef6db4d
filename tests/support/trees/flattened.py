"""Layers flattened in memory: `entries, contents, kept = flatten([lower, upper])`."""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Iterator, Sequence

from bootseer.blockimage.tree_entries import Content, Entry, Kind, Stored
from bootseer.imageprefetch.image_build.flatten import Flattener, Limits
from bootseer.imageprefetch.image_build.layer_reader import decompress, prefetch
from tests.support.samples.images import Layer, Member, write_tar


class Kept:
    """Stands for the data: keeps contents by digest."""

    def __init__(self) -> None:
        self.held: dict[bytes, bytes] = {}
        self.times = 0

    def store(self, content: Content, size_bytes: int) -> Stored:
        self.times += 1
        out = bytearray()
        taken = b"".join(map(bytes, content.chunks(1 << 20)))
        at = 0
        for offset, length in content.segments or [(0, size_bytes)]:
            out += bytes(offset - len(out)) + taken[at : at + length]
            at += length
        assert at == len(taken)
        out += bytes(size_bytes - len(out))
        digest = hashlib.sha256(out).digest()
        self.held[digest] = bytes(out)
        return Stored(digest, (), 4096)


def tar_of(members: Sequence[Member]) -> bytes:
    out = io.BytesIO()
    write_tar(out, Layer(members))
    return out.getvalue()


def flatten(
    layers: Sequence[bytes | Sequence[Member]], limits: Limits | None = None
) -> tuple[dict[bytes, Entry], dict[bytes, bytes], Kept]:
    """Entries by path and contents by path, of layers from the lowest to the top."""
    kept = Kept()
    flattener = Flattener(kept.store, limits or Limits())
    for layer in reversed(layers):
        raw = layer if isinstance(layer, bytes) else tar_of(layer)

        @contextlib.contextmanager
        def opened(raw: bytes = raw) -> Iterator[Iterator[bytes]]:
            with prefetch(decompress(io.BytesIO(raw))) as pieces:
                yield pieces

        flattener.add(opened, "the layer")
    entries = {entry.path: entry for entry in flattener.entries()}
    contents = {}
    for path, entry in entries.items():
        own = entries[entry.hardlink_of] if entry.hardlink_of is not None else entry
        if own.kind is Kind.FILE:
            stored = own.content
            contents[path] = kept.held[stored.digest] if isinstance(stored, Stored) else b""
    return entries, contents, kept
