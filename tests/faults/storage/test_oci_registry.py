"""Registries that fail: cut, slow, corrupt, redirecting, limiting, ignoring ranges.

Faults are injected by a gate (a FAKE) in front of a real registry, or by killing that registry.
"""

from __future__ import annotations

import email.utils
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bootseer.errors import (
    BootseerError,
    CorruptDataError,
    StoreUnavailableError,
)
from bootseer.storage.oci.manifest import digest_of
from bootseer.storage.request_control import Attempt
from tests.support.labs.registry_proxy import (
    Gate,
    SignedBlobs,
    Tokens,
    in_threads,
    isolate,
    opened,
    push_image,
)
from tests.support.labs.web_servers import head, reset
from tests.support.store_faults import note_store_faults, wait_for_fault

pytestmark = [pytest.mark.slow, pytest.mark.debian("docker-registry")]

DATA = random.Random(3).randbytes(2_000_000)
DIGEST = digest_of(DATA)


@pytest.fixture(autouse=True)
def _no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(tmp_path, monkeypatch)


@pytest.fixture
def gate(registry: Any, tmp_path: Path) -> Iterator[Any]:
    name = f"faults/{tmp_path.name.lower().strip('_')}"
    push_image(f"{registry.host}/{name}", DATA)
    with Gate(registry.host) as gate:
        gate.place = f"{gate.authority}/{name}"  # type: ignore[attr-defined]
        yield gate


def read(repository: Any, offset: int, size: int = 40_000) -> None:
    buffer = bytearray(size)
    repository.store.read_range(DIGEST, offset, buffer)
    assert buffer == DATA[offset : offset + size]


def once(rule: Any, part: str = "/blobs/", times: int = 1) -> Any:
    """A rule for the first requests of blobs only."""
    left = [times]

    def limited(sock: Any, request: Any) -> bool | None:
        if part not in request.target or not left[0]:
            return None
        left[0] -= 1
        kept: bool | None = rule(sock, request)
        return kept

    return limited


# Redirects


def test_a_redirect_is_told_no_login_and_asked_for_once(gate: Any) -> None:
    tokens = Tokens()
    with SignedBlobs(DATA) as blobs:
        gate.rules = [tokens.rule, blobs.rule]
        with opened(gate.place) as repository:
            for offset in range(0, 500_000, 50_000):
                read(repository, offset)
            assert repository.store.stat(DIGEST).size_bytes == len(DATA)
            assert repository.stream(DIGEST, 17).read() == DATA[17:]
        assert len(blobs.requests) == 12
        assert len(blobs.signatures) == 1
        assert all("authorization" not in r.headers for r in blobs.requests)


@pytest.mark.parametrize("refusal", [0, 403, 405])
@pytest.mark.parametrize("missing", [False, True])
def test_whether_a_blob_is_there_is_asked_where_it_is(
    gate: Any, refusal: int, missing: bool
) -> None:
    """Addresses that are signed for reading alone refuse to be asked by HEAD."""
    tokens = Tokens()
    with SignedBlobs(DATA) as blobs:
        blobs.head_refusal, blobs.gone = refusal, missing
        gate.rules = [tokens.rule, blobs.rule]
        with opened(gate.place, push=True) as repository:
            assert repository.has_blob(DIGEST) is not missing
            if not missing:
                read(repository, 0)
                assert repository.has_blob(DIGEST)
        assert blobs.requests
        assert all("authorization" not in r.headers for r in blobs.requests)
        assert all(r.headers.get("range") for r in blobs.requests if r.method == "GET")


@pytest.mark.parametrize("refusal", [400, 401, 403, 404, 410])
def test_an_expired_signature_is_fetched_anew(gate: Any, refusal: int) -> None:
    with SignedBlobs(DATA) as blobs:
        blobs.refusal = refusal
        gate.rules = [blobs.rule]
        with opened(gate.place) as repository:
            read(repository, 0)
            blobs.expired.update(blobs.signatures)
            read(repository, 100_000)
        assert len(blobs.signatures) == 2


def test_a_signature_that_is_refused_at_once_is_an_error_without_it(gate: Any) -> None:
    with SignedBlobs(DATA) as blobs:
        blobs.expired.update(f"s{n}" for n in range(99))
        gate.rules = [blobs.rule]
        with opened(gate.place) as repository:
            with pytest.raises(BootseerError) as caught:
                read(repository, 0)
            assert "Signature" not in str(caught.value)
        assert len(blobs.signatures) <= 2


def test_redirects_in_a_circle_end(gate: Any) -> None:
    def circle(sock: Any, request: Any) -> bool:
        sock.sendall(head("307 Again", Location=request.target, Content_Length=0))
        return True

    gate.rules = [circle]
    with opened(gate.place, retry_s=0.01) as repository, pytest.raises(StoreUnavailableError):
        repository.resolve("v1")


@pytest.mark.parametrize("place", ["http://a..b/x", "http://127.0.0.1/\xf6", "x" * 300, "//["])
def test_a_redirect_to_nowhere_is_an_error_of_ours(gate: Any, place: str) -> None:
    def nowhere(sock: Any, request: Any) -> bool:
        sock.sendall(b"HTTP/1.1 307 There\r\nLocation: " + place.encode("latin-1") + b"\r\n")
        sock.sendall(b"Content-Length: 0\r\n\r\n")
        return True

    gate.rules = [nowhere]
    with opened(gate.place, retry_s=0.0) as repository, pytest.raises(BootseerError):
        repository.resolve("v1")


# Too many requests


@pytest.mark.parametrize("as_date", [False, True])
def test_429_is_heeded_and_shared_by_all_who_ask(gate: Any, as_date: bool) -> None:
    def limit(sock: Any, request: Any) -> bool:
        # A date has whole seconds only, so two of them are at least one from now.
        wait = email.utils.formatdate(time.time() + 2, usegmt=True) if as_date else 1
        sock.sendall(head("429 Slow Down", Retry_After=wait, Content_Length=0))
        return True

    gate.rules = [once(limit)]
    with opened(gate.place) as repository:
        view = memoryview(bytearray(1000))
        with pytest.raises(StoreUnavailableError) as first:
            repository.store.read_scatter(DIGEST, 0, [view], Attempt())
        assert first.value.retry_after_s > 0
        asked = len(gate.requests)
        with pytest.raises(StoreUnavailableError, match="without any") as second:
            repository.store.read_scatter(DIGEST, 5, [view], Attempt())
        assert 0 < second.value.retry_after_s <= 2
        assert len(gate.requests) == asked  # others need not find out for themselves
        read(repository, 0)


def test_429_while_a_stream_goes_on_is_waited_for(gate: Any) -> None:
    def limit(sock: Any, request: Any) -> bool:
        sock.sendall(head("429 Slow Down", Retry_After=1, Content_Length=0))
        return True

    gate.rules = [once(limit)]
    with opened(gate.place) as repository:
        assert repository.stream(DIGEST).read() == DATA
    assert len(gate.asked("/blobs/")) == 2


# Ignored and wrong ranges


def whole(gate: Gate) -> Any:
    def ignore(sock: Any, request: Any) -> bool | None:
        if "/blobs/" not in request.target:
            return None
        request.headers.pop("range", None)
        return gate.forward(sock, request)

    return ignore


def test_a_server_that_ignores_ranges_sends_the_blob_once(gate: Any) -> None:
    gate.rules = [whole(gate)]
    with opened(gate.place) as repository:
        read(repository, 1_000_000)
        in_threads(8, lambda n: read(repository, n * 200_000))
        with pytest.raises(CorruptDataError, match="truncated"):
            read(repository, len(DATA) - 10, 11)
    assert len(gate.asked("/blobs/")) == 2  # the first range, and the whole


def test_a_stream_goes_on_although_ranges_are_ignored(gate: Any) -> None:
    def cut(sock: Any, request: Any) -> bool:
        sock.sendall(head("200 OK", Content_Length=len(DATA)) + DATA[:300_000])
        return False

    gate.rules = [once(cut), whole(gate)]
    with opened(gate.place) as repository:
        assert repository.stream(DIGEST).read() == DATA


def test_a_reader_of_a_blob_without_ranges_can_give_up(gate: Any) -> None:
    gate.rules = [whole(gate)]
    entered, release = threading.Event(), threading.Event()

    def hang(sock: Any, request: Any) -> bool:
        entered.set()
        release.wait(20)
        return False

    try:
        with opened(gate.place) as repository:
            view = memoryview(bytearray(10))
            attempt = Attempt()
            gate.rules = [once(whole(gate)), hang]
            thread = threading.Thread(target=lambda: (entered.wait(20), attempt.cancel()))
            thread.start()
            with pytest.raises(StoreUnavailableError, match="given up"):
                repository.store.read_scatter(DIGEST, 7, [view], attempt)
            thread.join()
    finally:
        release.set()


@pytest.mark.parametrize("fault", ["other start", "no Content-Range", "longer", "gzip"])
def test_a_range_that_is_not_the_one_asked_for_is_not_used(gate: Any, fault: str) -> None:
    def wrong(sock: Any, request: Any) -> bool:
        start, end = request.span
        shift = 1 if fault == "other start" else 0
        more = 1 if fault == "longer" else 0
        body = DATA[start + shift : end + shift + more]
        headers = {"Content_Range": f"bytes {start + shift}-{end + shift + more - 1}/{len(DATA)}"}
        if fault == "no Content-Range":
            headers = {}
        if fault == "gzip":
            headers["Content_Encoding"] = "gzip"
        sock.sendall(head("206 Partial", Content_Length=len(body), **headers) + body)
        return True

    gate.rules = [once(wrong, times=99)]
    view = memoryview(bytearray(1000))
    with opened(gate.place) as repository, pytest.raises(BootseerError):
        repository.store.read_scatter(DIGEST, 100, [view], Attempt())


# Corrupt and truncated


def flip(gate: Gate, part: str, times: int = 99) -> Any:
    def flipped(sock: Any, request: Any) -> bool:
        status, reason, headers, body = gate.ask(request)
        spoiled = bytearray(body)
        spoiled[len(spoiled) // 2] ^= 1
        sock.sendall(head(f"{status} {reason}", **headers) + spoiled)
        return True

    return once(flipped, part, times)


def test_a_flipped_byte_is_never_handed_out(gate: Any) -> None:
    gate.rules = [flip(gate, "/v2/")]
    with opened(gate.place) as repository:
        for version in ("v1", digest_of(b"any")):
            with pytest.raises(BootseerError):
                repository.resolve(version)
        with pytest.raises(CorruptDataError, match="other bytes"):
            repository.store.read(DIGEST, limit_bytes=len(DATA))
        with pytest.raises(CorruptDataError, match="other bytes"):
            repository.stream(DIGEST).read()


def test_a_manifest_that_is_another_than_asked_for_is_refused(registry: Any, gate: Any) -> None:
    other, _ = push_image(gate.place, DATA[:500], "v2")
    with opened(gate.place) as repository:
        digest = repository.resolve("v1").digest

    def swap(sock: Any, request: Any) -> bool:
        request = type(request)(
            "GET", request.target.replace(digest, other.digest), request.headers
        )
        return bool(gate.forward(sock, request))

    gate.rules = [once(swap, "/manifests/")]
    with opened(gate.place) as repository:
        with pytest.raises(CorruptDataError, match="other bytes"):
            repository.resolve(digest)
        assert repository.resolve(digest).digest == digest


def test_a_cut_blob_goes_on_where_it_was_cut(gate: Any) -> None:
    def cut(sock: Any, request: Any) -> bool:
        status, reason, headers, body = gate.ask(request)
        sock.sendall(head(f"{status} {reason}", **headers) + body[:400_000])
        if len(gate.requests) % 2:
            reset(sock)
        return False

    gate.rules = [once(cut, times=4)]
    with opened(gate.place) as repository:
        assert repository.stream(DIGEST).read() == DATA
    asked = [r.headers.get("range", "0-") for r in gate.asked("/blobs/")]
    starts = [int(text.removeprefix("bytes=").rstrip("-")) for text in asked]
    assert starts == sorted(starts)
    assert starts[-1] > 0


def test_a_blob_that_is_shorter_on_the_server_is_corrupt(own_registry: Any, tmp_path: Path) -> None:
    server = own_registry()
    place = f"{server.host}/a/b"
    push_image(place, DATA)
    path = server.blob_path(DIGEST)
    path.write_bytes(DATA[:1_000_000])
    with opened(place, retry_s=0.1) as repository:
        with pytest.raises(CorruptDataError, match="truncated"):
            read(repository, 990_000, 20_000)
        with pytest.raises(CorruptDataError):
            repository.stream(DIGEST).read()
        with pytest.raises(CorruptDataError):
            repository.store.read(DIGEST, limit_bytes=len(DATA))


# Servers that go away


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_faults_of_the_server_are_waited_out(gate: Any, status: int) -> None:
    def fail(sock: Any, request: Any) -> bool:
        sock.sendall(head(f"{status} Oh", Content_Length=0))
        return True

    gate.rules = [once(fail, "/v2/", 2)]
    with opened(gate.place) as repository:
        repository.image("v1")
        gate.rules = [once(fail, "/v2/", 2)]
        read(repository, 5)
        gate.rules = [once(fail, "/v2/", 2)]
        assert repository.stream(DIGEST).read() == DATA


def test_a_registry_that_restarts_is_read_on(
    own_registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies while a blob is read, and is asked for the rest in vain before it is back."""
    server = own_registry()
    place = f"{server.host}/a/b"
    large = random.Random(4).randbytes(24 << 20)  # more than the kernel keeps for us
    push_image(place, large)
    faults = note_store_faults(monkeypatch)
    with opened(place, retry_s=300.0) as repository:
        with (
            repository.stream(digest_of(large)) as stream,
            ThreadPoolExecutor(1) as pool,
        ):
            begin = stream.read(100_000)
            server.stop()
            rest = pool.submit(stream.read)
            try:
                wait_for_fault(rest, lambda: any("not reachable" in fault for fault in faults))
            finally:
                server.start()
            assert begin + rest.result() == large
        server.stop()
    with (
        opened(place, retry_s=0.1) as other,
        pytest.raises(StoreUnavailableError, match="not reachable"),
    ):
        other.resolve("v1")


def test_a_registry_that_hangs_is_not_waited_for_for_ever(own_registry: Any) -> None:
    server = own_registry()
    place = f"{server.host}/a/b"
    push_image(place, DATA)
    with opened(place) as patient, opened(place, retry_s=0.1, stall_s=0.3) as hurried:
        patient.resolve("v1")
        server.pause()
        try:
            for call in (
                lambda: hurried.resolve("v1"),
                lambda: read(hurried, 0),
                lambda: hurried.stream(DIGEST).read(),
            ):
                with pytest.raises(StoreUnavailableError, match="sent nothing"):
                    call()
        finally:
            server.resume()
        read(patient, 0)


def test_a_stream_can_be_cancelled(gate: Any) -> None:
    sent = threading.Event()

    def stop_half_way(sock: Any, request: Any) -> bool:
        sock.sendall(head("200 OK", Content_Length=len(DATA)) + DATA[:100_000])
        sent.set()
        gate.ended.wait(20)
        return False

    gate.rules = [once(stop_half_way)]
    with opened(gate.place, stall_s=60.0) as repository:
        stream = repository.stream(DIGEST)
        thread = threading.Thread(target=lambda: (sent.wait(20), stream.cancel()))
        thread.start()
        with pytest.raises(StoreUnavailableError):
            stream.read()
        thread.join()
        gate.ended.set()
        stream.close()
