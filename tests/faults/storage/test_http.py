"""What the HTTP store does about faults, seen from a FAKE server that injects them."""

from __future__ import annotations

import email.utils
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.errors import (
    AccessDeniedError,
    CorruptDataError,
    NotFoundError,
    NotSupportedError,
    StoreUnavailableError,
    UselessAnswerError,
)
from bootseer.storage.http import responses
from bootseer.storage.open import open_store
from bootseer.storage.options import StoreOptions
from bootseer.storage.request_control import Attempt
from bootseer.storage.store import Store
from tests.support.labs.web_servers import FakeServer, Request, head, serve_range

DATA = os.urandom(1 << 20)
ONCE = StoreOptions(retry_s=0.0, stall_s=5.0)
NO_ADDRESS = "redirects to no address that can be used; let it redirect to one of http or https"
ODD_ADDRESS = "redirects to an address with characters that none may have"
CIRCLE = "answers 302 Found too often; its redirects lead in a circle"
LONG_HEADER = "sends a header of more than 64 KiB, which is read by nobody"
MANY_HEADERS = "sends more than 100 headers, which are read by nobody"


def read(store: Store, offset: int, size: int, attempt: Attempt | None = None) -> bytes:
    buffer = bytearray(size)
    store.read_scatter("x", offset, [memoryview(buffer)], attempt or Attempt(stall_s=5.0))
    return bytes(buffer)


def good(_: FakeServer, sock: socket.socket, request: Request) -> bool:
    return serve_range(DATA, sock, request)


def test_connections_are_used_again_and_errors_do_not_spoil_them() -> None:
    def answer(_: FakeServer, sock: socket.socket, request: Request) -> bool:
        if request.target == "/x":
            return serve_range(DATA, sock, request)
        sock.sendall(head("404 No", Content_Length=9) + b"not here!")
        return True

    with FakeServer(answer) as server:
        store = open_store(f"http://{server.authority}/", ONCE)
        for n in range(10):
            assert read(store, n, 5000) == DATA[n : n + 5000]
            with pytest.raises(NotFoundError, match="404"):
                store.stat("no")
        store.close()
        assert server.connections == 1
        assert read(store, 0, 1) == DATA[:1]
        assert server.connections == 2
        store.close()


def test_a_connection_closed_while_idle_is_replaced_once() -> None:
    def closing(_: FakeServer, sock: socket.socket, request: Request) -> bool:
        serve_range(DATA, sock, request)  # says nothing of closing
        return False

    with FakeServer(closing) as server:
        store = open_store(f"http://{server.authority}/", ONCE)
        for n in range(5):
            assert read(store, n, 10) == DATA[n : n + 10]
        assert server.connections == 5
        store.close()


def test_a_connection_closed_under_the_request_is_replaced_once() -> None:
    """The server closes when the second request comes, which the idle check cannot foresee."""

    def answer(fake: FakeServer, sock: socket.socket, request: Request) -> bool:
        if len(fake.requests) in (2, 4, 5):
            return False
        return serve_range(DATA, sock, request)

    with FakeServer(answer) as server:
        store = open_store(f"http://{server.authority}/", ONCE)
        assert read(store, 0, 10) == DATA[:10]
        assert read(store, 1, 10) == DATA[1:11]
        with pytest.raises(StoreUnavailableError):  # the fresh one failed too
            read(store, 2, 10)
        assert len(server.requests) == 5
        store.close()


def test_a_try_without_data_is_cancelled_from_another_thread() -> None:
    arrived = threading.Event()

    def hang(fake: FakeServer, sock: socket.socket, request: Request) -> bool:
        sock.sendall(head("206 P", Content_Length=100, Content_Range="bytes 0-99/1000") + b"1")
        arrived.set()
        fake.ended.wait(30)
        return False

    with FakeServer(hang) as server:
        store = open_store(f"http://{server.authority}/", ONCE)
        attempt = Attempt(stall_s=60)
        failed: list[BaseException] = []

        def run() -> None:
            try:
                read(store, 0, 100, attempt)
            except StoreUnavailableError as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        arrived.wait(10)
        while attempt.received_bytes < 1:
            time.sleep(0.01)
        attempt.cancel()
        thread.join(10)
        assert [str(e) for e in failed] == [f"cannot read x in {store.url}: it was given up"]
        assert attempt.replica == server.authority
        store.close()


def test_slow_data_is_no_stall() -> None:
    def drip(_: FakeServer, sock: socket.socket, request: Request) -> bool:
        sock.sendall(head("206 P", Content_Length=8, Content_Range=f"bytes 0-7/{len(DATA)}"))
        for n in range(8):
            time.sleep(0.15)
            sock.sendall(DATA[n : n + 1])
        return True

    with FakeServer(drip) as server:
        store = open_store(f"http://{server.authority}/", ONCE)
        assert read(store, 0, 8, Attempt(stall_s=0.6)) == DATA[:8]
        store.close()


def test_authorization_goes_to_its_own_server_alone(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("S3CRET\n")
    with FakeServer(good) as other:

        def away(_: FakeServer, sock: socket.socket, request: Request) -> bool:
            to = f"http://{other.authority}/y?sig=5IGNED"
            sock.sendall(head("307 Away", Location=to, Content_Length=0))
            return True

        with FakeServer(away) as server:
            url = f"http://{server.authority}/"
            store = open_store(url, StoreOptions(token_file=str(tmp_path / "token"), retry_s=0))
            assert read(store, 3, 7) == DATA[3:10]
            assert server.requests[0].headers["authorization"] == "Bearer S3CRET"
            assert "authorization" not in other.requests[0].headers
            assert other.requests[0].target == "/y?sig=5IGNED"
            read(store, 4, 7)
            assert len(server.requests) == 1  # the signed address is kept
            assert "5IGNED" not in repr(vars(store))
            store.close()


def test_a_signed_address_that_was_refused_is_asked_for_again() -> None:
    def signed(fake: FakeServer, sock: socket.socket, request: Request) -> bool:
        if request.target != f"/y?sig={len(server.requests)}":
            sock.sendall(head("403 Expired", Content_Length=0))
            return True
        return serve_range(DATA, sock, request)

    def away(fake: FakeServer, sock: socket.socket, request: Request) -> bool:
        to = f"http://{other.authority}/y?sig={len(fake.requests)}"
        sock.sendall(head("302 Away", Location=to, Content_Length=0))
        return True

    with FakeServer(signed) as other, FakeServer(away) as server:
        store = open_store(f"http://{server.authority}/", ONCE)
        assert read(store, 0, 5) == DATA[:5]
        server.requests.append(server.requests[0])  # what was signed is now too old
        assert read(store, 1, 5) == DATA[1:6]
        assert [r.target for r in other.requests] == ["/y?sig=1", "/y?sig=1", "/y?sig=3"]
        store.close()


def test_https_never_becomes_http() -> None:
    base = responses.Target(responses.Origin(True, "h", 443), "/x")
    with pytest.raises(AccessDeniedError, match="https to http"):
        responses.resolve_location(base, "http://h/x", "read x")
    assert responses.resolve_location(base, "../y?a=b", "read x").request == "/y?a=b"
    assert responses.resolve_location(base, "https://k:1/z", "read x").origin.authority == "k:1"
    for bad in (None, "", "https://h:x/", "file:///etc/passwd", "https://h/a b", "https://a b/"):
        with pytest.raises(UselessAnswerError):
            responses.resolve_location(base, bad, "read x")


@pytest.mark.parametrize("scheme", ["http", "webhdfs"])
@pytest.mark.parametrize(
    ("status", "headers", "asked", "said"),
    [
        ("302 Found", {"Location": "file:///etc/passwd"}, 1, NO_ADDRESS),
        ("302 Found", {"Location": "gopher://127.0.0.1/x"}, 1, NO_ADDRESS),
        ("302 Found", {"Location": "http://127.0.0.1:99999/x"}, 1, NO_ADDRESS),
        ("302 Found", {"Location": "http://exa mple/x"}, 1, ODD_ADDRESS),
        ("302 Found", {"Location": "http://h/a\x01b"}, 1, ODD_ADDRESS),
        ("302 Found", {"Location": "/x"}, 6, CIRCLE),  # the first address, and five redirects
        ("302 Found", {}, 1, NO_ADDRESS),
        ("200 OK", {"X": "a" * 70_000}, 1, LONG_HEADER),
        ("200 OK", {f"X{number}": "a" for number in range(200)}, 1, MANY_HEADERS),
    ],
)
def test_what_will_never_be_of_use_is_asked_for_once(
    scheme: str, status: str, headers: dict[str, str], asked: int, said: str
) -> None:
    """And within the time that a store may be away; a token goes along each time."""
    requests: list[Request] = []

    def answer(_: FakeServer, sock: socket.socket, request: Request) -> bool:
        requests.append(request)
        sock.sendall(head(status, Content_Length=0, **headers))
        return True

    with FakeServer(answer) as server:
        store = open_store(f"{scheme}://{server.authority}/", StoreOptions(retry_s=30))
        with pytest.raises(StoreUnavailableError, match="cannot look at x") as caught:
            store.stat("x")
        store.close()
    assert len(requests) <= asked
    what = f"cannot look at x in {scheme}://{server.authority}/"
    if scheme == "http" or status == "200 OK":
        assert type(caught.value) is UselessAnswerError
        assert str(caught.value) == f"{what}: {server.authority} {said}"
    else:
        assert str(caught.value) == f"{what}: the answer is none of WebHDFS's"


def test_head_may_be_refused() -> None:
    def answer(_: FakeServer, sock: socket.socket, request: Request) -> bool:
        if request.method == "HEAD":
            sock.sendall(head("403 No", Content_Length=0))
            return True
        return serve_range(DATA, sock, request, ETag='"v1"')

    with FakeServer(answer) as server:
        store = open_store(f"http://{server.authority}/", ONCE)
        found = store.stat("x")
        assert found.size_bytes == len(DATA)
        assert '"v1"' in found.version
        assert server.requests[-1].headers["range"] == "bytes=0-0"
        store.close()


def test_empty_object_where_head_is_refused() -> None:
    def answer(_: FakeServer, sock: socket.socket, request: Request) -> bool:
        status = "405 No" if request.method == "HEAD" else "416 No"
        sock.sendall(head(status, Content_Length=0, Content_Range="bytes */0"))
        return True

    with FakeServer(answer) as server:
        store = open_store(f"http://{server.authority}/", ONCE)
        assert store.stat("x").size_bytes == 0
        store.close()


def test_an_object_that_changed_is_not_mixed() -> None:
    state = {"tag": '"one"', "data": DATA}

    def answer(_: FakeServer, sock: socket.socket, request: Request) -> bool:
        return serve_range(state["data"], sock, request, ETag=state["tag"])  # type: ignore[arg-type]

    with FakeServer(answer) as server:
        store = open_store(f"http://{server.authority}/", ONCE)
        before = store.stat("x")
        assert read(store, 0, 5) == DATA[:5]
        for change in ({"tag": '"two"'}, {"tag": '"one"', "data": DATA + b"more"}):
            state.update(change)  # type: ignore[arg-type]
            with pytest.raises(CorruptDataError, match="changed"):
                read(store, 5, 5)
        after = store.stat("x")
        assert after.version != before.version
        assert read(store, 5, 5) == DATA[5:10]
        store.close()


def test_no_version_where_the_server_tells_nothing() -> None:
    with FakeServer(good) as server:
        store = open_store(f"http://{server.authority}/", ONCE)
        assert store.stat("x").version == ""
        store.close()


def test_the_query_is_part_of_the_version_but_not_of_the_url() -> None:
    def answer(_: FakeServer, sock: socket.socket, request: Request) -> bool:
        return serve_range(DATA, sock, request, ETag='"1"')

    with FakeServer(answer) as server:
        versions = set()
        for query in ("v=1", "v=2", "v=2&X-Amz-Signature=abcdefg"):
            store = open_store(f"http://{server.authority}/?{query}", ONCE)
            versions.add(store.stat("x").version)
            assert server.requests[-1].target == f"/x?{query}"
            assert "v=" not in store.url
            store.close()
        assert len(versions) == 2


def test_the_wait_that_the_server_asks_for_is_told_and_kept() -> None:
    times: list[float] = []

    def answer(_: FakeServer, sock: socket.socket, request: Request) -> bool:
        times.append(time.monotonic())
        if len(times) < 3:
            sock.sendall(head("429 Slow", Content_Length=0, Retry_After=1))
            return True
        return serve_range(DATA, sock, request)

    with FakeServer(answer) as server:
        store = open_store(f"http://{server.authority}/", StoreOptions(retry_s=30))
        with pytest.raises(StoreUnavailableError) as caught:
            read(store, 0, 5)
        assert caught.value.retry_after_s == 1.0
        assert store.stat("x").size_bytes == len(DATA)
        assert times[2] - times[1] >= 1.0
        store.close()


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("5", 5, 5),
        ("", 0, 0),
        ("soon", 0, 0),
        ("-5", 0, 0),
        ("99999", 300, 300),
        ("Mon, 01 Jan 99999999999999999999 00:00:00 GMT", 0, 0),
    ],
)
def test_retry_after(text: str, low: float, high: float) -> None:
    assert low <= responses.parse_retry_after({"Retry-After": text}) <= high


@pytest.mark.parametrize(("ahead_s", "low", "high"), [(200, 100, 200), (-100, 0, 0)])
def test_retry_after_a_date(ahead_s: float, low: float, high: float) -> None:
    text = email.utils.formatdate(time.time() + ahead_s, usegmt=True)
    assert low <= responses.parse_retry_after({"Retry-After": text}) <= high


def test_ranges_and_whole_objects_are_tried_again() -> None:
    def answer(fake: FakeServer, sock: socket.socket, request: Request) -> bool:
        if len(fake.requests) % 2:
            sock.sendall(head("503 Busy", Content_Length=0))
            return True
        return serve_range(DATA, sock, request)

    with FakeServer(answer) as server:
        store = open_store(f"http://{server.authority}/", StoreOptions(retry_s=10))
        buffer = bytearray(100)
        store.read_range("x", 9, buffer)
        assert buffer == DATA[9:109]
        assert store.read("x", limit_bytes=len(DATA)) == DATA
        assert len(server.requests) == 4
        store.close()


def test_a_whole_object_without_length_is_bounded() -> None:
    def answer(_: FakeServer, sock: socket.socket, request: Request) -> bool:
        sock.sendall(head("200 OK") + DATA)
        return False

    with FakeServer(answer) as server:
        store = open_store(f"http://{server.authority}/", ONCE)
        assert store.read("x", limit_bytes=len(DATA)) == DATA
        with pytest.raises(CorruptDataError, match=f"{len(DATA) - 1} bytes"):
            store.read("x", limit_bytes=len(DATA) - 1)
        with pytest.raises(NotSupportedError, match="size"):
            store.stat("x")
        store.close()


class Pieces:
    """Sends every body cut into random pieces, announced in any of three ways."""

    def __init__(self) -> None:
        self.random = random.Random(1)
        self.style = "length"

    def __call__(self, fake: FakeServer, sock: socket.socket, request: Request) -> bool:
        start, end = request.span
        how = {
            "length": {"Content_Length": end - start},
            "chunked": {"Transfer_Encoding": "chunked"},
            "close": {"Connection": "close"},
        }[self.style]
        out = head("206 P", Content_Range=f"bytes {start}-{end - 1}/{len(DATA)}", **how)
        while start < end:
            size = min(self.random.choice((1, 50, 9000, 100_000)), end - start)
            piece = DATA[start : start + size]
            out += b"%x\r\n%b\r\n" % (size, piece) if self.style == "chunked" else piece
            start += size
            if self.random.random() < 0.7:
                sock.sendall(out)
                out = b""
        sock.sendall(out + (b"0\r\n\r\n" if self.style == "chunked" else b""))
        return self.style != "close"


@pytest.fixture(scope="module")
def pieces() -> Iterator[tuple[Pieces, Store]]:
    answer = Pieces()
    with FakeServer(answer) as server:
        store = open_store(f"http://{server.authority}/", ONCE)
        yield answer, store
        store.close()


@given(
    offset=st.integers(0, len(DATA) - 1),
    sizes=st.lists(st.sampled_from([0, 1, 17, 4096, 8191, 8192, 50_001, 300_000]), max_size=6),
    style=st.sampled_from(["length", "length", "chunked", "close"]),
)
@settings(max_examples=150)
def test_any_cut_of_the_body_fills_any_buffers(
    pieces: tuple[Pieces, Store], offset: int, sizes: list[int], style: str
) -> None:
    answer, store = pieces
    answer.style = style
    while offset + sum(sizes) > len(DATA):
        sizes.pop()
    buffers = [memoryview(bytearray(n)) for n in sizes]
    told: list[int] = []
    store.read_scatter("x", offset, buffers, Attempt(stall_s=20), told.append)
    assert b"".join(buffers) == DATA[offset : offset + sum(sizes)]
    assert told == list(range(len(sizes)))


@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254",
        "2852039166",
        "0xa9fea9fe",
        "[::ffff:169.254.169.254]",
        "[fe80::1]",
        "[fd00:ec2::254]",
    ],
)
def test_no_redirect_leads_to_a_machines_own_services(host: str) -> None:
    """However the address is written; a store that is named by such an address may redirect."""
    location = f"http://{host}/latest/meta-data"
    base = responses.Target(responses.origin_of(False, "store.example:80"), "/a")
    with pytest.raises(AccessDeniedError, match="for themselves alone"):
        responses.resolve_location(base, location, "read a")
    near = responses.Target(responses.origin_of(False, "169.254.1.1:80"), "/a")
    assert responses.resolve_location(near, location, "read a").request == "/latest/meta-data"


def test_other_redirects_are_followed() -> None:
    base = responses.Target(responses.origin_of(False, "store.example:80"), "/a")
    for host in ("10.0.0.1", "127.0.0.1", "node-7", "[fd00::7]", "169.253.1.1"):
        assert responses.resolve_location(base, f"http://{host}/b", "read a").request == "/b"


@pytest.mark.parametrize("digits", [19, 23, 400, 5000])
@pytest.mark.parametrize("ranged", [False, True])
def test_a_size_that_no_file_can_have_is_no_size(digits: int, ranged: bool) -> None:
    size = "9" * digits

    def answer(_: FakeServer, sock: socket.socket, request: Request) -> bool:
        if ranged and request.method == "HEAD":
            sock.sendall(head("405 No", Content_Length=0))
        elif ranged:
            told = head("206 Part", Content_Range=f"bytes 0-0/{size}", Content_Length=1)
            sock.sendall(told + b"x")
        else:
            sock.sendall(head("200 OK", Content_Length=size))
        return False

    with FakeServer(answer) as server:
        store = open_store(f"http://{server.authority}/", ONCE)
        with pytest.raises(NotSupportedError, match="size"):
            store.stat("x")
        store.close()
