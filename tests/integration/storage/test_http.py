"""The HTTP store against a real nginx, and against a FAKE server that breaks on purpose."""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.errors import (
    AccessDeniedError,
    BootseerError,
    CorruptDataError,
    NotFoundError,
    NotSupportedError,
    StoreUnavailableError,
    UsageError,
    UselessAnswerError,
)
from bootseer.storage.open import open_object, open_store
from bootseer.storage.options import StoreOptions
from bootseer.storage.request_control import Attempt
from bootseer.storage.store import Store
from tests.support.labs.web_servers import (
    Answer,
    FakeServer,
    Request,
    certificates,
    head,
    nginx,
    open_sockets,
    reset,
    serve_range,
)

DATA = os.urandom(3 << 20)
ONCE = StoreOptions(retry_s=0.0, stall_s=5.0)
QUICK = StoreOptions(retry_s=0.0, stall_s=0.3)


def scatter(store: Store, offset: int, *sizes: int, attempt: Attempt | None = None) -> bytes:
    buffers = [memoryview(bytearray(size)) for size in sizes]
    store.read_scatter("x", offset, buffers, attempt or Attempt(stall_s=5.0))
    return b"".join(buffers)


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("nginx")
    (folder / "www/a b").mkdir(parents=True)
    (folder / "www/x").write_bytes(DATA)
    (folder / "www/empty").write_bytes(b"")
    (folder / "www/a b/ü%#;?+").write_bytes(b"named")
    (folder / "passwords").write_text("user:{PLAIN}pass word\n")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)
    server = (
        f"listen 127.0.0.1:PORT; root {folder}/www; "
        f"location /safe/ {{ alias {folder}/www/; auth_basic x; "
        f"auth_basic_user_file {folder}/passwords; }}"
        "location /moved/ { rewrite ^/moved/(.*)$ /$1 redirect; }"
    )
    with nginx(folder / "run", server) as port:
        yield port


class TestOnNginx:
    @pytest.fixture
    def store(self, web: int) -> Iterator[Store]:
        opened = open_store(f"http://127.0.0.1:{web}/", ONCE)
        yield opened
        opened.close()

    pytestmark = pytest.mark.debian("nginx-light")

    def test_what_is_there(self, store: Store) -> None:
        found = store.stat("x")
        assert (found.size_bytes, found.is_folder) == (len(DATA), False)
        assert abs(found.mtime_s - time.time()) < 600
        assert found.version == store.stat("x").version != store.stat("empty").version
        assert store.stat("empty").size_bytes == 0
        assert [(p.offset, p.length) for p in store.locations("x")] == [(0, len(DATA))]
        with pytest.raises(NotFoundError):
            store.stat("no")

    def test_a_connection_in_use_is_closed_after_the_store(self, store: Store) -> None:
        """A reader has its last byte before the thread that read it gives its connection back."""
        before = open_sockets()
        buffers = [memoryview(bytearray(9))]
        held: list[set[str]] = []

        def close(_: int) -> None:
            held.append(open_sockets() - before)
            store.close()

        store.read_scatter("x", 0, buffers, Attempt(), close)
        assert len(held[0]) == 1
        assert not open_sockets() - before

    def test_ranges(self, store: Store) -> None:
        told: list[int] = []
        buffers = [memoryview(bytearray(n)) for n in (1, 0, 70_000, 1 << 20, 5)]
        attempt = Attempt()
        store.read_scatter("x", 999, buffers, attempt, told.append)
        total = sum(map(len, buffers))
        assert b"".join(buffers) == DATA[999 : 999 + total]
        assert told == [0, 1, 2, 3, 4]
        assert attempt.received_bytes == total
        store.read_range("x", 0, bytearray(0))
        store.read_scatter("x", 0, [memoryview(bytearray(0))], Attempt(), told.append)
        assert told[-1] == 0
        whole = bytearray(len(DATA))
        store.read_range("x", 0, whole)
        assert whole == DATA

    @pytest.mark.parametrize(("offset", "size"), [(len(DATA) - 5, 10), (len(DATA), 1)])
    def test_ranges_past_the_end(self, store: Store, offset: int, size: int) -> None:
        with pytest.raises(CorruptDataError, match="truncated"):
            store.read_range("x", offset, bytearray(size))

    def test_whole_objects(self, store: Store) -> None:
        assert store.read("x", limit_bytes=len(DATA)) == DATA
        assert store.read("empty", limit_bytes=0) == b""
        assert store.read("a b/ü%#;?+", limit_bytes=5) == b"named"
        with pytest.raises(CorruptDataError, match=f"{len(DATA)} bytes"):
            store.read("x", limit_bytes=10)

    def test_object_by_its_own_url(self, web: int) -> None:
        store, name = open_object(f"http://127.0.0.1:{web}/a%20b/%C3%BC%25%23%3B%3F%2B", ONCE)
        assert name == "ü%#;?+"
        assert store.read(name, limit_bytes=5) == b"named"
        store.close()

    def test_user_and_password(self, web: int) -> None:
        good = open_store(f"http://user:pass%20word@127.0.0.1:{web}/safe", ONCE)
        assert good.stat("x").size_bytes == len(DATA)
        assert scatter(good, 1, 10) == DATA[1:11]
        good.close()
        for url in (f"http://127.0.0.1:{web}/safe", f"http://user:S3CRET@127.0.0.1:{web}/safe"):
            bad = open_store(url, ONCE)
            for action in (lambda b=bad: b.stat("x"), lambda b=bad: scatter(b, 0, 1)):
                with pytest.raises(AccessDeniedError) as caught:
                    action()
                assert "S3CRET" not in f"{caught.value}{bad!r}{bad.url}"
            bad.close()

    def test_redirects_are_followed(self, web: int) -> None:
        store = open_store(f"http://127.0.0.1:{web}/moved", ONCE)
        assert store.stat("x").size_bytes == len(DATA)
        assert scatter(store, 5, 5) == DATA[5:10]
        store.close()

    def test_nothing_is_written_or_listed(self, store: Store, tmp_path: Path) -> None:
        for action in (
            lambda: store.create("n", b""),
            lambda: store.replace("n", b""),
            lambda: store.create_from_file("n", str(tmp_path)),
            lambda: store.writer("n"),
            lambda: store.rename("x", "n"),
            lambda: store.delete("x"),
            lambda: store.delete_tree("x"),
            lambda: store.mkdir("n"),
            lambda: store.list(""),
            lambda: store.temporary_name(""),
        ):
            with pytest.raises(NotSupportedError):
                action()
        assert store.write_nodes() == []
        assert store.local_path("x") is None
        for name in ("", "../x", "a//b"):
            with pytest.raises(UsageError):
                store.stat(name)

    def test_many_threads_share_few_connections(self, store: Store) -> None:
        wrong: list[int] = []

        def read(seed: int) -> None:
            for n in range(20):
                at = (seed * 7919 + n * 104_729) % (len(DATA) - 5000)
                if scatter(store, at, 1000, 4000) != DATA[at : at + 5000]:
                    wrong.append(at)

        threads = [threading.Thread(target=read, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


@pytest.mark.debian("openssl")
def test_tls_believes_the_named_authority_alone(tmp_path: Path) -> None:
    ca, own, key = certificates(tmp_path / "one")
    other, _, _ = certificates(tmp_path / "two")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own, key)
    with FakeServer(lambda _, sock, request: serve_range(DATA, sock, request), context) as server:
        url = f"https://127.0.0.1:{server.port}/"
        store = open_store(url, StoreOptions(ca_file=str(ca), retry_s=0))
        assert store.stat("x").size_bytes == len(DATA)
        assert scatter(store, 100, 1, 2_000_000, 77) == DATA[100:2_000_178]
        store.close()
        assert server.connections == 1
        for options in (ONCE, StoreOptions(ca_file=str(other), retry_s=0)):
            with pytest.raises(AccessDeniedError, match=r"not trusted.*ca_file"):
                open_store(url, options).stat("x")
    (tmp_path / "none.pem").write_text("no certificate")
    with pytest.raises(UsageError, match=r"none\.pem"):
        open_store("https://127.0.0.1:1/", StoreOptions(ca_file=str(tmp_path / "none.pem"))).stat(
            "x"
        )


def _plain(status: str, **headers: object) -> Answer:
    def answer(_: FakeServer, sock: socket.socket, request: Request) -> bool:
        sock.sendall(head(status, Content_Length=0, **headers))
        return True

    return answer


def _body(status: str, body: bytes, **headers: object) -> Answer:
    def answer(_: FakeServer, sock: socket.socket, request: Request) -> bool:
        sock.sendall(head(status, **headers) + body)
        return False

    return answer


def _cut(_: FakeServer, sock: socket.socket, request: Request) -> bool:
    start, end = request.span
    length, span = end - start, f"bytes {start}-{end - 1}/{len(DATA)}"
    sock.sendall(head("206 P", Content_Length=length, Content_Range=span) + DATA[start : end - 9])
    return False


def _reset(fake: FakeServer, sock: socket.socket, request: Request) -> bool:
    start, end = request.span
    span = f"bytes {start}-{end - 1}/{len(DATA)}"
    sock.sendall(head("206 P", Content_Length=end - start, Content_Range=span) + DATA[:20])
    time.sleep(0.05)
    reset(sock)
    return False


def _hang(fake: FakeServer, sock: socket.socket, request: Request) -> bool:
    start, end = request.span
    span = f"bytes {start}-{end - 1}/{len(DATA)}"
    sock.sendall(head("206 P", Content_Length=end - start, Content_Range=span) + DATA[:20])
    fake.ended.wait(30)
    return False


def _silent(fake: FakeServer, sock: socket.socket, request: Request) -> bool:
    fake.ended.wait(30)
    return False


SPAN = f"bytes 0-99/{len(DATA)}"


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (_plain("401 No"), AccessDeniedError, "401 No"),
        (_plain("403 No"), AccessDeniedError, "403"),
        (_plain("404 No"), NotFoundError, "404"),
        (_plain("410 Gone"), NotFoundError, "410"),
        (_plain("416 No", Content_Range=f"bytes */{len(DATA)}"), CorruptDataError, "truncated"),
        (_plain("418 Teapot"), NotSupportedError, "418"),
        (_plain("500 Oops"), StoreUnavailableError, "500"),
        (_plain("503 Busy", Retry_After="7"), StoreUnavailableError, "503"),
        (_plain("302 Found"), UselessAnswerError, "redirects to no address"),
        (_plain("302 Found", Location="/x"), UselessAnswerError, "circle"),
        (_plain("302 Found", Location="ftp://h/x"), UselessAnswerError, "no address"),
        (_body("206 P", DATA[:100], Content_Length=100), StoreUnavailableError, "another range"),
        (_body("206 P", DATA[:100], Content_Length=100, Content_Range="bytes 5-104/200"),
         StoreUnavailableError, "another range"),
        (_body("206 P", DATA[:100], Content_Length=100, Content_Range=f"bytes 0-{'9' * 5000}/*"),
         StoreUnavailableError, "another range"),
        (_body("206 P", DATA[:50], Content_Length=50, Content_Range="bytes 0-49/50"),
         CorruptDataError, "truncated"),
        (_body("206 P", DATA[:200], Content_Length=200, Content_Range=SPAN),
         StoreUnavailableError, "length"),
        (_body("206 P", DATA[:100], Content_Length=100, Content_Range="bytes 0-199/200"),
         StoreUnavailableError, "length"),
        (_body("200 OK", DATA, Content_Length=len(DATA)), NotSupportedError, "ignores ranges"),
        (_body("200 OK", DATA[:50], Content_Length=50), NotSupportedError, "ignores ranges"),
        (_body("206 P", zlib.compress(DATA[:100]), Content_Range=SPAN, Content_Encoding="gzip"),
         NotSupportedError, "Content-Encoding gzip"),
        (_body("206 P", DATA[:60], Content_Range=SPAN), StoreUnavailableError, "60 of 100"),
        (_body("206 P", DATA[:160], Content_Range=SPAN), CorruptDataError, "goes on"),
        (_body("206 P", b"20\r\nabc", Content_Range=SPAN, Transfer_Encoding="chunked"),
         StoreUnavailableError, "ended the answer"),
        (_body("206 P", b"zz\r\nabc", Content_Range=SPAN, Transfer_Encoding="chunked"),
         StoreUnavailableError, "broke|ended"),
        (_cut, StoreUnavailableError, "91 of 100"),
        (_reset, StoreUnavailableError, "broke|ended"),
        (_hang, StoreUnavailableError, "sent nothing for 0.3 s"),
        (_silent, StoreUnavailableError, "sent nothing for 0.3 s"),
        (lambda _, sock, request: sock.sendall(b"garbage\r\n\r\n"), StoreUnavailableError, "broke"),
        (lambda _, sock, request: False, StoreUnavailableError, "broke"),
    ],
)  # fmt: skip
def test_answers_that_are_no_data(answer: Answer, error: type[BootseerError], words: str) -> None:
    with FakeServer(answer) as server:
        store = open_store(f"http://127.0.0.1:{server.port}/", QUICK)
        with pytest.raises(error, match=words) as caught:
            scatter(store, 0, 60, 40, attempt=Attempt(stall_s=0.3))
        assert type(caught.value) in (error, *error.__subclasses__())
        assert caught.value.retryable == error.retryable
        store.close()


def test_a_length_that_is_none_is_asked_for_otherwise() -> None:
    def answer(_: FakeServer, sock: socket.socket, request: Request) -> bool:
        if request.method == "HEAD":
            sock.sendall(head("200 OK", Content_Length="9" * 5000))
            return False
        return serve_range(DATA, sock, request)

    with FakeServer(answer) as server:
        store = open_store(f"http://127.0.0.1:{server.port}/", QUICK)
        assert store.stat("x").size_bytes == len(DATA)
        store.close()


def test_an_address_whose_server_is_gone_is_asked_for_again() -> None:
    def data(_: FakeServer, sock: socket.socket, request: Request) -> bool:
        return serve_range(DATA, sock, request)

    places: list[str] = []

    def away(_: FakeServer, sock: socket.socket, request: Request) -> bool:
        sock.sendall(head("302 Away", Location=f"http://{places[-1]}/y", Content_Length=0))
        return True

    with FakeServer(away) as server:
        store = open_store(f"http://127.0.0.1:{server.port}/", QUICK)
        with FakeServer(data) as first:
            places.append(first.authority)
            scatter(store, 0, 100)
        with FakeServer(data) as second:
            places.append(second.authority)
            with pytest.raises(StoreUnavailableError, match="not reachable"):
                scatter(store, 0, 100)
            scatter(store, 0, 100)
            assert second.requests
        store.close()


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(StoreUnavailableError, match="not reachable"):
        open_store(f"http://127.0.0.1:{port}/", QUICK).stat("x")
