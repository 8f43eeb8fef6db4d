"""Blocks fetched from a registry whose mirror, tokens or answers fail under way."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from oci_proxy import Gate, Tokens, isolate, opened, push_image
from web_fakes import head

from bootseer.blocks.fetch import Fetcher
from bootseer.blocks.settings import FetchSettings
from bootseer.blocks.table import Codec, Stored, Table, TableSource
from bootseer.errors import CorruptDataError
from bootseer.storage.oci.manifest import digest_of

pytestmark = [pytest.mark.slow, pytest.mark.debian("docker-registry")]

BLOCK = 64 << 10
DATA = random.Random(6).randbytes(40 * BLOCK + 17)
DIGEST = digest_of(DATA)
SMALL = FetchSettings(connections=4, backoff_s=0.01)


def table() -> Table:
    pieces = [DATA[at : at + BLOCK] for at in range(0, len(DATA), BLOCK)]
    blocks = [
        Stored(n * BLOCK, len(piece), Codec.NONE, hashlib.sha256(piece).digest())
        for n, piece in enumerate(pieces)
    ]
    return Table.of(len(DATA), blocks, block_bytes=BLOCK)


@pytest.fixture
def pair(
    registry: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Any, Any, str]]:
    """A mirror and its origin (FAKES before one real registry), and the image's name."""
    isolate(tmp_path, monkeypatch)
    name = f"fetch/{tmp_path.name.lower().strip('_')}"
    push_image(f"{registry.host}/{name}", DATA)
    with Gate(registry.host) as mirror, Gate(registry.host) as origin:
        path = tmp_path / "certs.d" / origin.authority / "hosts.toml"
        path.parent.mkdir(parents=True)
        path.write_text(f'[host."http://{mirror.authority}"]\n')
        yield mirror, origin, f"{origin.authority}/{name}"


def flip(gate: Gate) -> Any:
    def flipped(sock: Any, request: Any) -> bool | None:
        if "/blobs/" not in request.target or request.method != "GET":
            return None
        status, reason, headers, body = gate.ask(request)
        spoiled = bytearray(body)
        spoiled[len(spoiled) // 2] ^= 1
        sock.sendall(head(f"{status} {reason}", **headers) + spoiled)
        return True

    return flipped


@pytest.mark.parametrize("told", [True, False])
def test_blocks_that_a_mirror_spoils_come_from_the_registry(
    pair: tuple[Any, Any, str], told: bool
) -> None:
    mirror, origin, place = pair
    mirror.rules = [flip(mirror)]
    with opened(place, range_bytes=4 * BLOCK) as repository, Fetcher(SMALL) as fetcher:
        stretches = repository.store.places(DIGEST) if told else ()
        source = TableSource(table(), repository.store, DIGEST, stretches=stretches)
        buffer = bytearray(len(DATA))
        assert fetcher.read_into(source, 0, buffer) == len(DATA)
        assert buffer == DATA
        assert fetcher.stats.total().corrupt
    assert origin.asked("/blobs/")


def test_blocks_that_all_spoil_are_given_to_nobody(pair: tuple[Any, Any, str]) -> None:
    mirror, origin, place = pair
    mirror.rules, origin.rules = [flip(mirror)], [flip(origin)]
    with opened(place) as repository, Fetcher(SMALL) as fetcher:
        source = TableSource(table(), repository.store, DIGEST)
        with pytest.raises(CorruptDataError, match="digest"):
            fetcher.read_into(source, 20 * BLOCK, bytearray(BLOCK))


def test_tokens_run_out_while_blocks_are_fetched(pair: tuple[Any, Any, str]) -> None:
    mirror, _, place = pair
    tokens, served = Tokens(), [0]

    def ageing(sock: Any, request: Any) -> bool | None:
        served[0] += "/blobs/" in request.target
        if served[0] % 5 == 4:
            tokens.dead.update(tokens.issued)
        return tokens.rule(sock, request)

    mirror.rules = [ageing]
    with opened(place, range_bytes=BLOCK) as repository, Fetcher(SMALL) as fetcher:
        source = TableSource(table(), repository.store, DIGEST)
        buffer = bytearray(len(DATA))
        assert fetcher.read_into(source, 0, buffer) == len(DATA)
        assert buffer == DATA
    assert len(tokens.issued) > 2


def test_too_many_requests_are_waited_out(pair: tuple[Any, Any, str]) -> None:
    mirror, origin, place = pair
    left = [1]

    def limit(sock: Any, request: Any) -> bool | None:
        if "/blobs/" not in request.target or not left[0]:
            return None
        left[0] -= 1
        sock.sendall(head("429 Slow Down", Retry_After=1, Content_Length=0))
        return True

    mirror.__exit__()
    origin.rules = [limit]
    with opened(place) as repository, Fetcher(SMALL) as fetcher:
        source = TableSource(table(), repository.store, DIGEST)
        buffer = bytearray(BLOCK)
        assert fetcher.read_into(source, 0, buffer) == BLOCK
        assert buffer == DATA[:BLOCK]
    assert len(origin.asked("/blobs/")) == 2  # nothing was asked in the second that it wanted
