"""Checkpoints behind plain web addresses, signed ones too. FAKE servers answer in odd ways."""

from __future__ import annotations

import contextlib
import random
import socket
import traceback
from collections.abc import Callable

import pytest

from bootseer import stripedfs
from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.blocks.settings import FetchSettings
from bootseer.errors import (
    AccessDeniedError,
    BootseerError,
    CorruptDataError,
    NotFoundError,
    StoreUnavailableError,
)
from bootseer.storage.options import StoreOptions
from bootseer.stripedfs.fsspec_face.filesystem import StripedFileSystem
from tests.support.labs.web_servers import FakeServer, Request, head, serve_range

DATA = random.Random(5).randbytes(300_000)
SIGNED = "/bucket/model.pt?X-Amz-Signature=SigS3CRET&part=1"
LOGIN = "alice:PassS3CRET"
QUICK = StoreOptions(retry_s=0, stall_s=2)


def server(otherwise: bytes, *, signed: str = SIGNED) -> FakeServer:
    """FAKE: one object under one address; everything else gets `otherwise`."""

    def answer(_: FakeServer, sock: socket.socket, request: Request) -> bool:
        if request.target == signed:
            return serve_range(DATA, sock, request)
        sock.sendall(otherwise if request.method != "HEAD" else otherwise.partition(b"<")[0])
        return True

    return FakeServer(answer)


def page(status: str, size: int = 100) -> bytes:
    body = b"<html>" + b" " * size
    return head(status, Content_Length=len(body), Content_Type="text/html") + body


def by_python(url: str) -> bytes:
    with stripedfs.open(url, options=QUICK) as file:
        return file.read()


def by_fsspec(url: str) -> bytes:
    with web_files() as fs, fs.open(url) as file:
        return bytes(file.read())


def web_files() -> contextlib.closing[StripedFileSystem]:
    return contextlib.closing(StripedFileSystem(target_protocol="http", options=QUICK))


@pytest.mark.parametrize("read", [by_python, by_fsspec])
@pytest.mark.parametrize(
    "otherwise", [page("403 No"), page("401 No"), page("200 OK"), page("200 OK", 1 << 21)]
)
def test_a_plain_object_is_read_although_nothing_else_may_be_asked(
    read: Callable[[str], bytes], otherwise: bytes
) -> None:
    with server(otherwise) as web:
        assert read(f"http://{web.authority}{SIGNED}") == DATA


@pytest.mark.parametrize("read", [by_python, by_fsspec])
def test_who_may_read_nothing_is_told_so(read: Callable[[str], bytes]) -> None:
    refused = pytest.raises((AccessDeniedError, PermissionError))
    with server(page("403 No"), signed="/none") as web, refused:
        read(f"http://{web.authority}{SIGNED}")


def test_a_damaged_pointer_never_shows_what_it_hides() -> None:
    """A plain object of the same name is not the checkpoint."""

    def answer(_: FakeServer, sock: socket.socket, request: Request) -> bool:
        body = b'{"format": 1, "versi' if request.target.endswith("CURRENT") else DATA
        return serve_range(body, sock, request)

    with FakeServer(answer) as web, pytest.raises(CorruptDataError):
        by_python(f"http://{web.authority}/model.pt")


@pytest.mark.parametrize("status", ["404 No", "403 No", "500 Oh"])
def test_no_face_shows_a_login_or_a_signature(status: str) -> None:
    shown: list[str] = []
    with server(page(status), signed="/none") as web, web_files() as fs:
        url = f"http://{LOGIN}@{web.authority}{SIGNED}"
        actions: list[Callable[[], object]] = [
            lambda: fs.open(url),
            lambda: fs.open(url, "ab"),
            lambda: fs.open(url, "wb").close(),
            lambda: fs.info(url),
            lambda: fs.ls(url),
            lambda: fs.cat_file(url, 0, 10),
            lambda: fs.rm(url),
            lambda: fs.mv(url, f"http://{LOGIN}@127.0.0.1:9/y"),
            lambda: by_python(url),
        ]
        for action in actions:
            with pytest.raises((BootseerError, OSError, NotFoundError)) as caught:
                action()
            shown += [repr(caught.value), "".join(traceback.format_exception(caught.value))]
        shown += [repr(one) for one in fs.cat_ranges([url], [0], [10])]
    with server(page("403 No")) as web, web_files() as fs:
        file = fs.open(f"http://{LOGIN}@{web.authority}{SIGNED}")
        with file:
            shown.append(repr(file))
            assert file.read(10) == DATA[:10]
    assert len(shown) == 2 * len(actions) + 2
    for text in shown:
        assert "S3CRET" not in text, text


def test_a_reader_is_told_how_long_the_server_wants_to_be_left_alone() -> None:
    def answer(_: FakeServer, sock: socket.socket, request: Request) -> bool:
        if "range" in request.headers:
            sock.sendall(head("429 Slowly", Content_Length=0, Retry_After=7))
            return True
        missing = request.target.endswith("CURRENT")
        return serve_range(DATA, sock, request) if not missing else _no(sock)

    with FakeServer(answer) as web, Fetcher(FetchSettings(tries=1)) as fetcher:
        url = f"http://{web.authority}/model.pt"
        file = stripedfs.open(url, options=QUICK, fetcher=fetcher)
        with file, pytest.raises(StoreUnavailableError) as caught:
            file.read()
        assert caught.value.retry_after_s == 7


def _no(sock: socket.socket) -> bool:
    sock.sendall(head("404 No", Content_Length=0))
    return True
