"""Where an http(s) store may redirect to: servers at public, private and loopback addresses.

The addresses belong to the loopback device of an empty network that a thread has to itself; the
redirects are those of a FAKE server.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bootseer.errors import AccessDeniedError, UsageError
from bootseer.storage.http.redirects import Reach, reach_of
from bootseer.storage.open import open_store
from bootseer.storage.options import StoreOptions
from bootseer.storage.request_control import Attempt
from tests.support.labs.web_servers import Answer, FakeServer, Request, head, serve_range
from tools.netlab import enter_own_network

if TYPE_CHECKING:
    from bootseer.storage.options import Redirects

DATA = os.urandom(100_000)
PUBLIC, PUBLIC_TOO = "8.8.4.4", "1.1.1.1"
PRIVATE, PRIVATE_TOO = "10.20.30.40", "192.168.7.7"
MACHINE = "127.0.0.1"
LINK = "169.254.169.254"


def in_own_network(work: Callable[[], None]) -> None:
    """Do it in a network whose only machine has all the addresses above."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            enter_own_network(PUBLIC, PUBLIC_TOO, PRIVATE, PRIVATE_TOO, LINK)
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def good(_: FakeServer, sock: socket.socket, request: Request) -> bool:
    return serve_range(DATA, sock, request)


def redirecting(authority: str) -> Answer:
    def answer(_: FakeServer, sock: socket.socket, request: Request) -> bool:
        location = f"http://{authority}{request.target}"
        sock.sendall(head("302 Found", Location=location, Content_Length=0))
        return True

    return answer


def read_through(first: str, second: str, rule: Redirects) -> str:
    """What comes of a read from a server at one address that redirects to one at another."""
    with (
        FakeServer(good, host=second) as inner,
        FakeServer(redirecting(inner.authority), host=first) as outer,
    ):
        options = StoreOptions(retry_s=0.0, stall_s=5.0, redirects=rule)
        store = open_store(f"http://{outer.authority}/", options)
        try:
            for offset in (0, 7):  # the second by the address that the first one led to
                buffer = bytearray(1000)
                store.read_scatter("x", offset, [memoryview(buffer)], Attempt(stall_s=5.0))
                assert buffer == DATA[offset : offset + 1000]
        except AccessDeniedError as error:
            assert outer.requests, "the server that redirects was asked"
            assert not inner.requests, "nothing was sent to where it must not lead"
            return str(error)
        finally:
            store.close()
        assert len(outer.requests) == 1
        assert len(inner.requests) == 2
        return ""


@pytest.mark.root
def test_redirects_lead_outward_only_unless_any_is_allowed() -> None:
    def work() -> None:
        assert read_through(PUBLIC, PUBLIC_TOO, "outward") == ""
        assert read_through(PRIVATE, PUBLIC, "outward") == ""
        assert read_through(PRIVATE, PRIVATE_TOO, "outward") == ""
        assert read_through(MACHINE, PRIVATE, "outward") == ""
        said = read_through(PUBLIC, PRIVATE, "outward")
        assert f"redirects to {PRIVATE}, which is in a private network; allow it by --redirect" in (
            said
        )
        for first in (PUBLIC, PRIVATE):
            assert "which is this machine itself" in read_through(first, MACHINE, "outward")
        for first, second in ((PUBLIC, PRIVATE), (PUBLIC, MACHINE), (PRIVATE, MACHINE)):
            assert read_through(first, second, "any") == ""
        assert "for themselves alone" in read_through(PUBLIC, LINK, "any")
        said = read_through(PUBLIC, PUBLIC_TOO, "same-host")
        assert f"redirects to another host, {PUBLIC_TOO}" in said
        assert read_through(PUBLIC, PUBLIC, "same-host") == ""  # another port

    in_own_network(work)


@pytest.mark.root
def test_a_name_counts_by_the_address_that_is_connected_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that resolves to a private address, then to a public one, and the reverse."""
    named = {"hub.example": PUBLIC, "files.example": PUBLIC_TOO}
    look_up = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *rest, **more: look_up(named.get(host, host), *rest, **more),
    )

    def work() -> None:
        with (
            FakeServer(good, host="0.0.0.0") as inner,
            FakeServer(redirecting(f"files.example:{inner.port}"), host=PUBLIC) as outer,
        ):
            store = open_store(f"http://hub.example:{outer.port}/", StoreOptions(retry_s=0.0))
            for address in (PRIVATE, MACHINE, LINK):
                named["files.example"] = address
                with pytest.raises(AccessDeniedError, match=rf"files\.example \({address}\)"):
                    store.stat("x")
            assert not inner.requests
            named["files.example"] = PUBLIC_TOO
            assert store.stat("x").size_bytes == len(DATA)
            store.close()  # so that what was learnt is asked over a new connection
            named["files.example"] = PRIVATE
            with pytest.raises(AccessDeniedError):
                store.stat("x")
            assert len(inner.requests) == 1
            store.close()

    in_own_network(work)


def test_who_names_no_options_goes_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeServer(good) as inner, FakeServer(redirecting(f"localhost:{inner.port}")) as outer:
        url = f"http://{outer.authority}/"
        store = open_store(url)
        assert store.read("x", limit_bytes=len(DATA)) == DATA
        store.close()
        monkeypatch.setenv("BOOTSEER_STORE_REDIRECTS", "same-host")
        store = open_store(url)
        with pytest.raises(AccessDeniedError, match="to another host, localhost"):
            store.read("x", limit_bytes=len(DATA))
        store.close()
        monkeypatch.setenv("BOOTSEER_STORE_REDIRECTS", "everywhere")
        with pytest.raises(UsageError, match="outward, any"):
            open_store(url)


@pytest.mark.parametrize(
    ("address", "reach"),
    [
        ("8.8.8.8", Reach.PUBLIC),
        ("2606:4700::1111", Reach.PUBLIC),
        ("64:ff9b::808:808", Reach.PUBLIC),
        ("10.0.0.1", Reach.NETWORK),
        ("172.31.0.1", Reach.NETWORK),
        ("100.64.0.1", Reach.NETWORK),
        ("fd00::7", Reach.NETWORK),
        ("::ffff:10.0.0.1", Reach.NETWORK),
        ("2002:0a00:0001::1", Reach.NETWORK),
        ("64:ff9b::a00:1", Reach.NETWORK),
        ("127.9.9.9", Reach.MACHINE),
        ("::1", Reach.MACHINE),
        ("0.0.0.0", Reach.MACHINE),
        ("::ffff:127.0.0.1", Reach.MACHINE),
        ("169.254.169.254", Reach.LINK),
        ("::ffff:169.254.169.254", Reach.LINK),
        ("fe80::1%eth0", Reach.LINK),
        ("fd00:ec2::254", Reach.LINK),
    ],
)
def test_the_reach_of_an_address(address: str, reach: Reach) -> None:
    assert reach_of(address) is reach
