"""Blocks fetched from a registry whose mirror, tokens or answers fail under way."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.blocks.settings import FetchSettings
from bootseer.blocks.table import Codec, Stored, Table, TableSource
from bootseer.errors import CorruptDataError, StoreUnavailableError
from bootseer.storage.oci.manifest import Descriptor, digest_of, index_bytes, manifest_bytes
from bootseer.storage.oci.media_types import OCI_EMPTY, OCI_INDEX, OCI_MANIFEST
from bootseer.storage.oci.registry import upload
from bootseer.storage.oci.registry.upload import BlobSource, Uploader
from bootseer.storage.request_control import Attempt
from tests.support.labs.registry_proxy import Gate, SignedBlobs, Tokens, isolate, opened, push_image
from tests.support.labs.web_servers import head

pytestmark = [pytest.mark.slow, pytest.mark.debian("docker-registry")]

BLOCK = 64 << 10
DATA = random.Random(6).randbytes(40 * BLOCK + 17)
DIGEST = digest_of(DATA)
EMPTY = Descriptor(OCI_EMPTY, digest_of(b"{}"), 2)
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
        stretches = repository.store.locations(DIGEST) if told else ()
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
    mirror, origin, place = pair
    mirror.__exit__()
    tokens, served = Tokens(), [0]

    def ageing(sock: Any, request: Any) -> bool | None:
        served[0] += "authorization" in request.headers
        if served[0] in (3, 7):
            tokens.dead.update(tokens.issued)
            served[0] += 1
        return tokens.rule(sock, request)

    origin.rules = [ageing]
    with opened(place) as repository, Fetcher(SMALL) as fetcher:
        source = TableSource(table(), repository.store, DIGEST)
        for block in range(0, 40, 4):
            buffer = bytearray(BLOCK)
            assert fetcher.read_into(source, block * BLOCK, buffer) == BLOCK
            assert buffer == DATA[block * BLOCK :][:BLOCK]
    assert len(tokens.issued) == 3


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


def once(rule: Any, part: str = "/blobs/") -> Any:
    """A rule for the first such request alone."""
    left = [1]

    def limited(sock: Any, request: Any) -> bool | None:
        if part not in request.target or request.method != "GET" or not left[0]:
            return None
        left[0] = 0
        kept: bool | None = rule(sock, request)
        return kept

    return limited


def test_nobody_is_told_of_a_buffer_twice(pair: tuple[Any, Any, str]) -> None:
    mirror, _, place = pair

    def cut(sock: Any, request: Any) -> bool:
        status, reason, headers, body = mirror.ask(request)
        sock.sendall(head(f"{status} {reason}", **headers) + body[: 2 * BLOCK + 5])
        return False

    mirror.rules = [once(cut)]
    buffers = [memoryview(bytearray(BLOCK)) for _ in range(4)]
    told: list[int] = []
    with opened(place) as repository:
        with pytest.raises(StoreUnavailableError, match="ended the answer"):
            repository.store.read_scatter(DIGEST, 0, buffers, Attempt(), told.append)
        assert told == [0, 1]
        told.clear()
        repository.store.read_scatter(DIGEST, 0, buffers, Attempt(number=1), told.append)
    assert told == [0, 1, 2, 3]
    assert b"".join(buffers) == DATA[: 4 * BLOCK]


@pytest.mark.parametrize("fault", ["other start", "other size"])
def test_a_stream_goes_on_with_its_own_bytes_only(pair: tuple[Any, Any, str], fault: str) -> None:
    mirror, origin, place = pair
    mirror.__exit__()

    def cut(sock: Any, request: Any) -> bool:
        sock.sendall(head("200 OK", Content_Length=len(DATA)) + DATA[:1000])
        return False

    def wrong(sock: Any, request: Any) -> bool:
        start = 1000 if fault == "other size" else 900
        size = len(DATA) - (100 if fault == "other size" else 0)
        body = DATA[start:size]
        span = f"bytes {start}-{size - 1}/{size}"
        sock.sendall(head("206 Partial", Content_Length=len(body), Content_Range=span) + body)
        return True

    origin.rules = [once(cut), once(wrong)]
    with opened(place) as repository:
        # Not verified at the end: whoever checks the parts does without.
        assert repository.stream(DIGEST, verify=False).read() == DATA
    assert len(origin.asked("/blobs/")) == 3


def test_blobs_that_moved_from_a_server_that_is_gone_are_found(
    pair: tuple[Any, Any, str],
) -> None:
    mirror, origin, place = pair
    mirror.__exit__()
    view = memoryview(bytearray(1000))
    with opened(place) as repository:
        with SignedBlobs(DATA) as first:
            origin.rules = [first.rule]
            repository.store.read_scatter(DIGEST, 0, [view], Attempt())
        with SignedBlobs(DATA) as second:
            origin.rules = [second.rule]
            repository.store.read_range(DIGEST, 5000, view)
            assert second.requests
    assert view == DATA[5000:6000]


@pytest.mark.parametrize("stands", ["0-299999", "0-1", f"0-{10**9}", f"0-{'9' * 5000}"])
def test_a_registry_that_cannot_count_chunks_gets_one_piece(
    pair: tuple[Any, Any, str], stands: str
) -> None:
    _, origin, place = pair

    def miscount(sock: Any, request: Any) -> bool | None:
        if request.method != "PATCH":
            return None
        status, reason, headers, body = origin.ask(request)
        headers = {key: value for key, value in headers.items() if key.lower() != "range"}
        sock.sendall(head(f"{status} {reason}", **headers, Range=stands) + body)
        return True

    origin.rules = [miscount]
    data = DATA[::-1]
    with opened(place, push=True) as repository:
        uploads = Uploader(repository._client, chunk_bytes=300_000)  # type: ignore[attr-defined]
        uploads.push(BlobSource(data, digest_of(data), len(data)), None)
        assert repository.store.read(digest_of(data), limit_bytes=len(data)) == data


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 64 << 20])
def test_a_registry_may_take_its_time_over_a_large_blob(
    pair: tuple[Any, Any, str], monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    _, origin, place = pair

    def slow(sock: Any, request: Any) -> bool | None:
        if request.method == "PUT" and "/uploads/" in request.target:
            time.sleep(1.0)
        return None

    origin.rules = [slow]
    data = DATA[1:]
    monkeypatch.setattr(upload, "COMMIT_BYTES_S", len(data) // 10)
    with opened(place, push=True, stall_s=0.5) as repository:
        uploads = Uploader(repository._client, chunk_bytes=chunk_bytes)  # type: ignore[attr-defined]
        uploads.push(BlobSource(data, digest_of(data), len(data)), None)
    assert len(origin.asked("/uploads/", "PUT")) == 1


def test_a_referrer_that_another_push_wiped_out_is_entered_again(
    pair: tuple[Any, Any, str],
) -> None:
    _, origin, place = pair
    seen: list[int] = []

    def wipe(sock: Any, request: Any) -> bool | None:
        if "/manifests/sha256-" not in request.target or request.method != "GET":
            return None
        kept = origin.forward(sock, request)
        seen.append(1)
        if len(seen) == 2:  # our entry was there just now: somebody writes what they read before
            empty = index_bytes([])
            headers = {"content-type": OCI_INDEX, "content-length": str(len(empty))}
            assert origin.ask(type(request)("PUT", request.target, headers, empty))[0] == 201
        return bool(kept)

    origin.rules = [wipe]
    with opened(place, push=True) as repository:
        subject = repository.resolve("v1")
        repository.push_blob(b"{}", EMPTY.digest, 2)
        raw = manifest_bytes(config=EMPTY, layers=[], subject=subject, artifact_type="a/b")
        made = repository.push_manifest(raw, OCI_MANIFEST)
        assert [one.digest for one in repository.referrers(subject.digest)] == [made.digest]
    assert len(seen) > 2
