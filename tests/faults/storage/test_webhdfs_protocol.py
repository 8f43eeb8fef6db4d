"""WebHDFS's JSON: errors, blocks, and what newer Hadoop and gateways do. The server is a FAKE."""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer import errors
from bootseer.storage.hdfs.remote_exceptions import from_remote_exception
from bootseer.storage.http.responses import Origin, Target
from bootseer.storage.open import open_store
from bootseer.storage.options import StoreOptions
from bootseer.storage.request_control import Attempt
from bootseer.storage.store import BlockLocation
from bootseer.storage.webhdfs import protocol as wire
from bootseer.storage.webhdfs import writer
from tests.support.labs.web_servers import FakeServer, Request, head

DATA = bytes(range(256)) * 100
ONCE = StoreOptions(retry_s=0, user="me")


@pytest.mark.parametrize(
    ("kind", "message", "error"),
    [
        ("FileNotFoundException", "File /x not found.", errors.NotFoundError),
        ("AccessControlException", "Permission denied: user=alice", errors.AccessDeniedError),
        ("SecurityException", "Failed to obtain user group information", errors.AccessDeniedError),
        ("IOException", "org.apache…SecretManager$InvalidToken: gone", errors.AccessDeniedError),
        ("DSQuotaExceededException", "The DiskSpace quota", errors.NoSpaceError),
        ("NSQuotaExceededException", "The NameSpace quota", errors.NoSpaceError),
        ("IOException", "File /x could only be replicated to 0 nodes instead of minReplication"
         " (=1).  There are 3 datanode(s) running", errors.NoSpaceError),
        ("IOException", "File /x could only be replicated to 0 nodes instead of minReplication"
         " (=1).  There are 0 datanode(s) running", errors.StoreUnavailableError),
        ("IOException", "No space left on device", errors.NoSpaceError),
        ("SafeModeException", "Name node is in safe mode", errors.StoreUnavailableError),
        ("RetriableException", "SafeModeException", errors.StoreUnavailableError),
        ("StandbyException", "Operation category READ", errors.StoreUnavailableError),
        ("FileAlreadyExistsException", "/x already exists", errors.BusyError),
        ("LeaseExpiredException", "No lease on /x", errors.BusyError),
        ("AlreadyBeingCreatedException", "by another", errors.BusyError),
        ("IOException", "Offset=9 out of the range [0, 9)", errors.CorruptDataError),
        ("ChecksumException", "Checksum error", errors.CorruptDataError),
        ("BlockMissingException", "Could not obtain block", errors.StoreUnavailableError),
        ("UnsupportedOperationException", "no", errors.NotSupportedError),
        ("IllegalArgumentException", "Invalid value for webhdfs parameter \"op\"",
         errors.NotSupportedError),
        ("InvalidPathException", "Invalid path name", errors.UsageError),
        ("ParentNotDirectoryException", "/x is not a directory", errors.NotFoundError),
        ("AccessControlException", 'Permission denied: user=a, access=EXECUTE, inode="/d/x":a:b:'
         "-rw-r--r--", errors.NotFoundError),
        ("AccessControlException", 'Permission denied: user=a, access=EXECUTE, inode="/d":a:b:'
         "drw-r--r--", errors.AccessDeniedError),
        ("AccessControlException", 'Permission denied: user=a, access=WRITE, inode="/d/x":a:b:'
         "-rw-r--r--", errors.AccessDeniedError),
        ("SomethingNew", "who knows", errors.StoreUnavailableError),
    ],
)  # fmt: skip
def test_remote_exceptions(kind: str, message: str, error: type) -> None:
    body = json.dumps({"RemoteException": {"exception": kind, "message": message + "\n\tat x"}})
    remote = wire.parse_remote_exception(body.encode())
    assert remote is not None
    mapped = from_remote_exception(remote, "read x in webhdfs://h/")
    assert type(mapped) is error
    assert str(mapped).startswith(f"cannot read x in webhdfs://h/: HDFS says {kind}: ")
    assert "\n" not in str(mapped)


@pytest.mark.parametrize("raw", [b"", b"null", b"[]", b"{}", b'{"RemoteException": 3}', b"\xff"])
def test_what_is_no_remote_exception(raw: bytes) -> None:
    assert wire.parse_remote_exception(raw) is None


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20))),
    st.integers(0, 100),
)
def test_stretches_cover_without_gaps_or_overlaps(blocks: list[tuple[int, int]], more: int) -> None:
    found, end = [], 0
    for gap, length in blocks:
        found.append(wire.Block(end + gap, length, (wire.Datanode("d:1", "d:2"),), False))
        end += gap + length
    places = wire.locations_of(found, end + more)
    assert [p.offset for p in places] == [
        sum(q.length for q in places[:n]) for n in range(len(places))
    ]
    assert sum(p.length for p in places) == end + more
    assert [p.length for p in places if p.replicas] == [length for _, length in blocks if length]


def test_a_redirect_keeps_our_spelling_of_the_path() -> None:
    origin, other = Origin(False, "n", 1), Origin(False, "d", 2)
    asked = Target(origin, "/webhdfs/v1/a%3Bb?op=OPEN")
    led = Target(other, "/webhdfs/v1/a;b?op=OPEN&user.name=x")
    assert wire.keep_path(asked, led) == Target(other, "/webhdfs/v1/a%3Bb?op=OPEN&user.name=x")
    gateway = Target(other, "/gateway/webhdfs/v1/a?op=OPEN")
    assert wire.keep_path(asked, gateway) == gateway


def test_live_datanodes_leave_out_those_that_go() -> None:
    nodes = {
        "a:1": {"infoAddr": "10.1.1.1:80", "infoSecureAddr": "10.1.1.1:0",
                "adminState": "In Service"},
        "b:1": {"infoAddr": "10.0.0.2:80", "adminState": "Decommissioned"},
        "c:1": {"infoAddr": "10.0.0.3:80", "infoSecureAddr": "10.0.0.3:81", "xferaddr": "x:1"},
    }  # fmt: skip
    found = {"beans": [{"LiveNodes": json.dumps(nodes)}]}
    assert wire.parse_live_datanodes(found, tls=False) == [("a:80", "a:1"), ("c:80", "x:1")]
    assert wire.parse_live_datanodes(found, tls=True) == [("c:81", "x:1")]
    assert wire.parse_live_datanodes({"beans": []}, tls=False) == []
    assert wire.parse_live_datanodes({"beans": [{"LiveNodes": "[]"}]}, tls=False) == []


@pytest.mark.parametrize("text", ["[]", "null", "3", '"a:1"', "{", '[{"infoAddr": "a:80"}]'])
def test_a_page_of_live_nodes_that_is_no_object(text: str) -> None:
    found = {"beans": [{"LiveNodes": text}]}
    assert wire.parse_live_datanodes(found, tls=False) == []
    assert wire.parse_remaining_bytes(found) is None


def test_a_live_node_that_is_no_object() -> None:
    found = {"beans": [{"LiveNodes": '{"a:1": null, "b:1": {"infoAddr": "10.0.0.2:80"}}'}]}
    assert wire.parse_live_datanodes(found, tls=False) == [("b:80", "b:1")]
    assert wire.parse_remaining_bytes(found) is None


def ask(request: Request) -> dict[str, str]:
    return {k: v[0] for k, v in parse_qs(urlsplit(request.target).query).items()}


def tell(sock: socket.socket, body: Any) -> bool:
    raw = json.dumps(body).encode()
    sock.sendall(head("200 OK", Content_Length=len(raw), Content_Type="application/json") + raw)
    return True


def entry(name: str, size: int = 1) -> dict[str, Any]:
    return {"pathSuffix": name, "length": size, "modificationTime": 5, "type": "FILE", "fileId": 7}


def hadoop3(fake: FakeServer, sock: socket.socket, request: Request) -> bool:
    """FAKE of the calls that Hadoop 3 has and 2.7 has not."""
    asked = ask(request)
    names = [f"n{n}" for n in range(5)]
    if asked["op"] == "LISTSTATUS_BATCH":
        at = names.index(asked["startAfter"]) + 1 if "startAfter" in asked else 0
        part = {"FileStatuses": {"FileStatus": [entry(n) for n in names[at : at + 2]]}}
        left = max(0, len(names) - at - 2)
        return tell(sock, {"DirectoryListing": {"partialListing": part, "remainingEntries": left}})
    if asked["op"] == "GETFILESTATUS":
        return tell(sock, {"FileStatus": entry("", len(DATA))})
    if asked["op"] == "GETFILEBLOCKLOCATIONS":
        blocks = [{"offset": 0, "length": 20_000}, {"offset": 20_000, "length": len(DATA) - 20_000}]
        return tell(sock, {"BlockLocations": {"BlockLocation": blocks}})
    if asked["op"] == "OPEN" and "noredirect" in asked:
        to = f"http://{fake.authority}{request.target.replace('&noredirect=true', '')}&go=1"
        return tell(sock, {"Location": to})
    if asked["op"] == "OPEN":
        start, length = int(asked["offset"]), int(asked["length"])
        body = DATA[start : start + length]
        sock.sendall(head("200 OK", Transfer_Encoding="chunked"))
        sock.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        return True
    unknown = {"exception": "IllegalArgumentException", "message": "Invalid value for op"}
    raw = json.dumps({"RemoteException": unknown}).encode()
    sock.sendall(head("400 Bad", Content_Length=len(raw)) + raw)
    return True


def test_newer_hadoop() -> None:
    with FakeServer(hadoop3) as server:
        store = open_store(f"webhdfs://{server.authority}/d", ONCE)
        assert [s.name for s in store.list("f")] == [f"f/n{n}" for n in range(5)]
        assert [ask(r).get("startAfter") for r in server.requests] == [None, "n1", "n3"]
        assert store.locations("x") == [
            BlockLocation(0, 20_000),
            BlockLocation(20_000, len(DATA) - 20_000),
        ]
        buffer = bytearray(1000)
        store.read_scatter("x", 300, [memoryview(buffer)], Attempt())
        assert buffer == DATA[300:1300]
        assert "go" in ask(server.requests[-1])
        store.close()


def test_a_gateway_that_serves_data_itself() -> None:
    """FAKE of HttpFS, which redirects nobody: its answer is not read through requests."""

    def httpfs(_: FakeServer, sock: socket.socket, request: Request) -> bool:
        asked = ask(request)
        start, length = int(asked["offset"]), int(asked["length"])
        body = DATA[start : start + length]
        sock.sendall(head("200 OK", Content_Length=len(body)) + body)
        return True

    with FakeServer(httpfs) as server:
        store = open_store(f"webhdfs://{server.authority}/d", ONCE)
        buffer = bytearray(1000)
        store.read_scatter("x", 300, [memoryview(buffer)], Attempt())
        assert buffer == DATA[300:1300]
        assert ask(server.requests[-1])["user.name"] == "me"
        store.close()


@pytest.mark.parametrize(
    ("length", "error", "words"),
    [
        (50, errors.CorruptDataError, "ends at byte 50.*truncated"),
        (150, errors.StoreUnavailableError, "150 bytes where 100"),
    ],
)
def test_bodies_of_another_length(length: int, error: type, words: str) -> None:
    def answer(_: FakeServer, sock: socket.socket, request: Request) -> bool:
        sock.sendall(head("200 OK", Content_Length=length) + bytes(length))
        return True

    with FakeServer(answer) as server:
        store = open_store(f"webhdfs://{server.authority}/d", ONCE)
        with pytest.raises(error, match=words):  # type: ignore[call-overload]
            store.read_scatter("x", 0, [memoryview(bytearray(100))], Attempt())
        store.close()


def test_a_rename_whose_answer_was_lost_is_found_done() -> None:
    """FAKE: the NameNode renames, and its answer is lost."""
    renamed: list[str] = []

    def answer(_: FakeServer, sock: socket.socket, request: Request) -> bool:
        asked = ask(request)
        if asked["op"] == "GETFILESTATUS":
            return tell(sock, {"FileStatus": entry("")})
        if asked["op"] == "MKDIRS":
            return tell(sock, {"boolean": True})
        renamed.append(request.target)
        if len(renamed) == 1:
            return False
        gone = {"exception": "FileNotFoundException", "message": "rename source is not found"}
        raw = json.dumps({"RemoteException": gone}).encode()
        sock.sendall(head("404 No", Content_Length=len(raw)) + raw)
        return True

    with FakeServer(answer) as server:
        store = open_store(f"webhdfs://{server.authority}/d", StoreOptions(retry_s=20, user="me"))
        store.rename("x", "y")
        assert len(renamed) == 2
        store.close()


def test_a_server_that_does_not_know_how_to_rename_over() -> None:
    """FAKE of a gateway that ignores `renameoptions` and says false."""

    def answer(_: FakeServer, sock: socket.socket, request: Request) -> bool:
        if ask(request)["op"] == "GETFILESTATUS":
            return tell(sock, {"FileStatus": entry("")})
        return tell(sock, {"boolean": ask(request)["op"] != "RENAME"})

    with FakeServer(answer) as server:
        store = open_store(f"webhdfs://{server.authority}/d", ONCE)
        with pytest.raises(errors.BusyError, match="taken"):
            store.rename("x", "y")
        store.close()


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("ConnectException", errors.StoreUnavailableError),  # another address of the NameNode
        ("FileNotFoundException", None),  # another cluster has that address now
        ("IllegalArgumentException", None),  # newer DataNodes take other parameters
        ("InvalidToken", None),
    ],
)
def test_what_was_learned_of_a_cluster_goes_when_an_answer_contradicts_it(
    kind: str, error: type | None
) -> None:
    """FAKE of a cluster that comes back as another one while it is read."""
    rpc = "old:8020"

    def answer(fake: FakeServer, sock: socket.socket, request: Request) -> bool:
        if "noredirect" in ask(request):
            to = request.target.replace("&noredirect=true", f"&namenoderpcaddress={rpc}")
            return tell(sock, {"Location": f"http://{fake.authority}{to}"})
        if ask(request)["namenoderpcaddress"] == rpc:
            sock.sendall(head("200 OK", Content_Length=100) + DATA[:100])
            return True
        raw = json.dumps({"RemoteException": {"exception": kind, "message": "no"}}).encode()
        sock.sendall(head("403 No", Content_Length=len(raw)) + raw)
        return True

    with FakeServer(answer) as server:
        store = open_store(f"webhdfs://{server.authority}/d", ONCE)

        def read() -> int:
            """How many requests the NameNode got."""
            before, buffer = len(server.requests), bytearray(100)
            wishes = Attempt(prefer=server.authority)
            store.read_scatter("x", 0, [memoryview(buffer)], wishes)
            assert buffer == DATA[:100]
            return sum("noredirect" in ask(r) for r in server.requests[before:])

        assert [read() for _ in range(3)] == [1, 0, 0]
        rpc = "new:8020"
        if error is not None:
            with pytest.raises(error):
                read()
        assert [read() for _ in range(3)] == [1, 0, 0]
        store.close()


@pytest.mark.parametrize("whose", ["noredirect", "offset"])
def test_a_wait_that_hadoop_asks_for_is_kept(whose: str) -> None:
    """FAKE: a NameNode, or a DataNode, says what is wrong and how long to leave it alone."""

    def answer(fake: FakeServer, sock: socket.socket, request: Request) -> bool:
        if whose not in ask(request):
            return tell(sock, {"Location": f"http://{fake.authority}/webhdfs/v1/d/x?offset=0"})
        raw = json.dumps({"RemoteException": {"exception": "RetriableException"}}).encode()
        sock.sendall(head("503 Later", Content_Length=len(raw), Retry_After=7) + raw)
        return True

    with FakeServer(answer) as server:
        store = open_store(f"webhdfs://{server.authority}/d", ONCE)
        with pytest.raises(errors.StoreUnavailableError, match="RetriableException") as caught:
            store.read_scatter("x", 0, [memoryview(bytearray(100))], Attempt())
        assert caught.value.retry_after_s == 7
        store.close()


def test_a_refusal_that_comes_after_the_data_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """FAKE of a DataNode too slow for the wait before the data: what it says then is told."""

    def refuse(fake: FakeServer, sock: socket.socket, request: Request) -> bool:
        if request.method == "GET":
            sock.sendall(head("404 No", Content_Length=0))
        elif ask(request)["op"] == "CREATE" and "go" not in ask(request):
            to = f"http://{fake.authority}{request.target}&go=1"
            sock.sendall(head("307 Away", Location=to, Content_Length=0))
        else:
            sock.sendall(head("403 No", Content_Length=0))
        return True

    monkeypatch.setattr(writer, "GO_AHEAD_S", 0.0)
    with FakeServer(refuse) as server:
        store = open_store(f"webhdfs://{server.authority}/d", ONCE)
        with pytest.raises(errors.AccessDeniedError):
            store.create("x", b"data" * 1000)
        assert [r.method for r in server.requests if "go" in ask(r)] == ["PUT"]
        store.close()
