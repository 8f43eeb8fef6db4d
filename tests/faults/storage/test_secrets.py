"""No token, password or signed address is ever shown, whatever goes wrong. FAKE servers break."""

from __future__ import annotations

import json
import logging
import socket
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.errors import BootseerError
from bootseer.storage.open import open_store
from bootseer.storage.options import StoreOptions
from bootseer.storage.request_control import Attempt
from bootseer.storage.store import Store, WriteHints
from bootseer.storage.token_files import HadoopToken, parse_tokens, read_token
from bootseer.storage.webhdfs import writer
from tests.support.labs.web_servers import Answer, FakeServer, Request, head, reset

TOKEN = "T0kenS3CRET"
PASSWORD = "PassS3CRET"
SIGNED = "SigS3CRET"
TELL_TALE = "S3CRET"


def remote(kind: str, message: str) -> bytes:
    return json.dumps({"RemoteException": {"exception": kind, "message": message}}).encode()


def answer_with(status: str, body: bytes = b"", **headers: object) -> Answer:
    def answer(_: FakeServer, sock: socket.socket, request: Request) -> bool:
        sock.sendall(head(status, Content_Length=len(body), **headers) + body)
        return True

    return answer


def cut_off(_: FakeServer, sock: socket.socket, request: Request) -> bool:
    sock.sendall(head("200 OK", Content_Length=1000) + b"some")
    return False


def cut_hard(_: FakeServer, sock: socket.socket, request: Request) -> bool:
    time.sleep(0.02)
    reset(sock)
    return False


def hang(fake: FakeServer, sock: socket.socket, request: Request) -> bool:
    fake.ended.wait(20)
    return False


def echo(_: FakeServer, sock: socket.socket, request: Request) -> bool:
    """A server that quotes the whole request in its error."""
    body = remote("IOException", f"no such thing: {request.target}")
    sock.sendall(head("500 Oops", Content_Length=len(body)) + body)
    return True


FAULTS: list[Answer] = [
    cut_off,
    cut_hard,
    hang,
    echo,
    *(answer_with(status) for status in ("200 OK", "400 Bad", "401 No", "403 No", "404 No")),
    answer_with("416 No"),
    answer_with("503 Busy", b"<html>", Retry_After=0),
    answer_with("302 Away"),
    answer_with("302 Away", Location=f"http://u:{PASSWORD}@:bad/?sig={SIGNED}"),
    answer_with("302 Away", Location=f"http://u:{PASSWORD}@127.0.0.1:1/?delegation={SIGNED}"),
    answer_with("302 Away", Location=f"https://127.0.0.1:1/?delegation={SIGNED}"),
    answer_with("302 Away", Location=f"ftp://127.0.0.1/?delegation={SIGNED}"),
    answer_with("302 Away", Location=f"http://127.0.0.1:1/a b?delegation={SIGNED}"),
    answer_with("200 OK", json.dumps({"Location": f"ftp://h/?delegation={SIGNED}"}).encode(),
                Content_Type="application/json"),
    answer_with("403 No", remote("InvalidToken", f"token (owner=a) delegation={TOKEN} expired")),
    answer_with("401 No", remote("SecurityException", f"token={TOKEN} is unknown")),
    answer_with("403 No", remote("StandbyException", f"not here: ?delegation={TOKEN}")),
    answer_with("404 No", remote("FileNotFoundException", f"http://u:{PASSWORD}@h/ is no file")),
    answer_with("200 OK", b"not json"),
    answer_with("200 OK", b"gzip?", Content_Encoding="gzip"),
]  # fmt: skip


@pytest.fixture
def shown(
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[list[str]]:
    """Texts that came out; with the logs (all levels) and outputs they are searched at the end."""
    for wait in ("GO_AHEAD_S", "FLUSH_S", "ABORT_S"):
        monkeypatch.setattr(writer, wait, 0.05)
    caplog.set_level(logging.DEBUG)
    texts: list[str] = []
    yield texts
    out, err = capfd.readouterr()
    logged = [record.getMessage() + repr(record.args) for record in caplog.records]
    for text in (*texts, out, err, caplog.text, *logged):
        assert TELL_TALE not in text, text


def exercise(store: Store, shown: list[str]) -> int:
    """Do everything once; returns how many calls failed."""
    failed = 0
    buffer = memoryview(bytearray(100))
    for action in (
        lambda: store.stat("x"),
        lambda: store.read("x", limit_bytes=100),
        lambda: store.read_range("x", 0, buffer),
        lambda: store.read_scatter("x", 0, [buffer], Attempt(stall_s=0.1)),
        lambda: store.read_scatter("x", 5, [buffer], Attempt(stall_s=0.1, prefer="127.0.0.1:1")),
        lambda: store.read_scatter("x", 5, [buffer], Attempt(stall_s=0.1, avoid=frozenset("a"))),
        lambda: store.locations("x"),
        lambda: store.write_nodes(),
        lambda: list(store.list("d")),
        lambda: store.create("y", b"data"),
        lambda: store.replace("y", b"data"),
        lambda: store.writer("y", WriteHints(node="127.0.0.1:1")).close(),
        lambda: store.rename("x", "z"),
        lambda: store.delete("x"),
        lambda: store.mkdir("d"),
    ):
        try:
            action()
        except BootseerError as error:
            failed += 1
            shown.extend((str(error), repr(error), repr(error.args)))
            shown.append("".join(traceback.format_exception(error)))
    shown.extend((store.url, repr(store), repr(store.preferred)))
    return failed


@pytest.mark.parametrize("number", range(len(FAULTS)))
def test_webhdfs_with_a_token(number: int, tmp_path: Path, shown: list[str]) -> None:
    (tmp_path / "token").write_text(TOKEN)
    options = StoreOptions(retry_s=0, stall_s=0.1, token_file=str(tmp_path / "token"))
    quick = StoreOptions(retry_s=0, stall_s=0.1)
    with FakeServer(FAULTS[number]) as broken:

        def namenode(_: FakeServer, sock: socket.socket, request: Request) -> bool:
            """All is well but where data goes to."""
            if "op=OPEN" in request.target or "op=CREATE" in request.target:
                query = f"op=OPEN&delegation={SIGNED}&namenoderpcaddress=h:1"
                to = f"http://{broken.authority}/webhdfs/v1/x?{query}"
                sock.sendall(head("307 Away", Location=to, Content_Length=0))
                return True
            found = {"fileId": 1, "length": 100, "modificationTime": 1, "type": "FILE"}
            body = json.dumps({"FileStatus": found, "boolean": True}).encode()
            sock.sendall(head("200 OK", Content_Length=len(body)) + body)
            return True

        with FakeServer(namenode) as good:
            for at in (broken, good):
                for url, chosen in (
                    (f"webhdfs://{at.authority}/d", options),
                    (f"webhdfs://u:{PASSWORD}@{at.authority}/d?delegation={TOKEN}", quick),
                ):
                    store = open_store(url, chosen)
                    assert exercise(store, shown) > 0
                    store.close()
            assert any(f"delegation={TOKEN}" in r.target for r in good.requests)
            assert any(f"delegation={SIGNED}" in r.target for r in broken.requests)


@pytest.mark.parametrize("number", range(len(FAULTS)))
def test_http_with_a_password_and_a_signature(
    number: int, tmp_path: Path, shown: list[str]
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    with FakeServer(FAULTS[number]) as broken:

        def away(_: FakeServer, sock: socket.socket, request: Request) -> bool:
            to = f"http://{broken.authority}/x?sig={SIGNED}"
            sock.sendall(head("307 Away", Location=to, Content_Length=0))
            return True

        with FakeServer(away) as good:
            for at in (broken, good):
                for url, token in (
                    (f"http://u:{PASSWORD}@{at.authority}/d?sig={SIGNED}", ""),
                    (f"http://{at.authority}/d?X-Amz-Signature={SIGNED}", str(tmp_path / "token")),
                ):
                    options = StoreOptions(retry_s=0, stall_s=0.1, token_file=token)
                    store = open_store(url, options)
                    assert exercise(store, shown) > 0
                    store.close()


def number(value: int) -> bytes:
    """Hadoop's variable-length integer, written independently of the code under test."""
    return bytes([value]) if value < 128 else bytes([0x8F, value])


def token_file(*tokens: tuple[bytes, bytes, bytes, bytes, bytes]) -> bytes:
    out = b"HDTS\0" + number(len(tokens))
    for fields in tokens:
        out += b"".join(number(len(f)) + f for f in fields)
    return out + b"\0"


def test_hadoop_token_files(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    other = (b"mapred", b"i1", b"p1", b"MAPREDUCE", b"s1")
    mine = (b"alias", b"i" * 200, b"p" * 20, b"HDFS_DELEGATION_TOKEN", b"10.0.0.1:8020")
    path.write_bytes(token_file(other, mine))
    parsed = parse_tokens(path.read_bytes(), "f")
    assert parsed == [HadoopToken(*other), HadoopToken(*mine)]
    assert "p1" not in repr(parsed)
    import base64

    text = read_token(str(path))
    raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    assert raw == b"".join(number(len(f)) + f for f in mine[1:])


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "holds no token"),
        (b"two words", "holds no token"),
        (b"\xff\xfe", "holds no token"),
        (b"HDTS\1rest", "newer format"),
        (token_file((b"a", b"b", b"c", b"MAPREDUCE", b"d")), "no HDFS token"),
        (b"HDTS", "format|cut off"),
    ],
)
def test_files_without_a_token(tmp_path: Path, raw: bytes, words: str) -> None:
    (tmp_path / "f").write_bytes(raw)
    with pytest.raises(BootseerError, match=words):
        read_token(str(tmp_path / "f"))


def test_a_token_file_cut_anywhere_is_said_to_be() -> None:
    whole = token_file((b"a", b"i" * 200, b"p" * 20, b"HDFS_DELEGATION_TOKEN", b"s"))
    for length in range(5, len(whole) - 1):
        with pytest.raises(BootseerError, match="cut off"):
            parse_tokens(whole[:length], "f")


def test_a_token_file_that_is_missing(tmp_path: Path) -> None:
    store = open_store("webhdfs://127.0.0.1:1/", StoreOptions(token_file=str(tmp_path / "no")))
    with pytest.raises(BootseerError, match="token file"):
        store.stat("x")
    store.close()
