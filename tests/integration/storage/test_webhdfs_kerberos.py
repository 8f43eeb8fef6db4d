"""WebHDFS on a Kerberos cluster: SPNEGO, delegation tokens, and what is said without them."""

from __future__ import annotations

import base64
import logging
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from bootseer.errors import AccessDeniedError, BootseerError
from bootseer.storage.open import open_store
from bootseer.storage.options import StoreOptions
from bootseer.storage.request_control import Attempt
from bootseer.storage.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.debian("krb5-kdc")]

DATA = os.urandom(3 << 20)


@pytest.fixture(scope="module")
def cluster(own_hdfs: Any) -> Any:
    made = own_hdfs(datanodes=1, kerberos=True)
    made.shell("-mkdir", "-p", "/alice")
    made.shell("-chown", "alice", "/alice")
    made.realm.login("alice")
    return made


@pytest.fixture(autouse=True)
def tickets(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in cluster.realm.environ("alice").items():
        if name.startswith("KRB5"):
            monkeypatch.setenv(name, value)


@pytest.fixture
def url(cluster: Any) -> str:
    return f"{cluster.webhdfs_url}/alice"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    opened = open_store(url, StoreOptions(auth="kerberos", retry_s=0))
    yield opened
    opened.close()


def read(store: Store, offset: int, size: int, **wishes: Any) -> bytes:
    buffer = bytearray(size)
    store.read_scatter("x", offset, [memoryview(buffer)], Attempt(**wishes))
    return bytes(buffer)


def token_of(store: Any) -> str:
    """A delegation token, as `hdfs fetchdt` gets one."""
    found = store._client.namenodes.call(
        "GET", "/", "GETDELEGATIONTOKEN", [("renewer", "alice")], "x"
    )
    return str(found["Token"]["urlString"])


def test_everything_with_a_ticket(store: Store) -> None:
    with store.writer("x") as writer:
        writer.write(DATA)
    [web] = store.locations("x")[0].replicas
    assert read(store, 0, len(DATA)) == DATA
    assert read(store, 5, 500, prefer=web) == DATA[5:505]
    assert store.write_nodes() == [web]
    assert store.create("d/y", b"1")
    assert not store.create("d/y", b"2")
    assert [s.name for s in store.list("d")] == ["d/y"]
    store.delete_tree("d")


def test_everything_with_a_token_and_none_of_it_is_shown(
    store: Store, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level(logging.DEBUG)
    store.replace("x", DATA)
    text = token_of(store)
    caplog.clear()
    (tmp_path / "token").write_text(text + "\n")
    raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    (tmp_path / "hadoop").write_bytes(b"HDTS\0\1\5alias" + raw + b"\0")
    monkeypatch.setenv("KRB5CCNAME", f"FILE:{tmp_path}/none")
    said = []
    for where, options in (
        (url, StoreOptions(token_file=str(tmp_path / "token"), retry_s=0)),
        (url, StoreOptions(token_file=str(tmp_path / "hadoop"), auth="token", retry_s=0)),
        (f"{url}?delegation={text}", StoreOptions(retry_s=0)),
    ):
        opened = open_store(where, options)
        assert opened.stat("x").size_bytes == len(DATA)
        [web] = opened.locations("x")[0].replicas
        assert read(opened, 1, 100) == DATA[1:101]
        assert read(opened, 7, 100, prefer=web) == DATA[7:107]
        opened.replace("y", b"new")
        assert opened.read("y", limit_bytes=3) == b"new"
        for action in (
            lambda o=opened: o.stat("none"),
            lambda o=opened: o.read_range("none", 0, bytearray(1)),
            lambda o=opened: o.rename("none", "other"),
        ):
            with pytest.raises(BootseerError) as caught:
                action()
            said.append("".join(traceback.format_exception(caught.value)))
        said.append(f"{opened!r} {opened.url} {vars(opened)!r}")
        opened.close()
    said.extend(f"{r.getMessage()} {r.args!r}" for r in caplog.records)
    assert not [s for s in said if text in s or "delegation=" in s]


def test_a_direct_request_whose_token_died_is_asked_for_again(store: Any) -> None:
    """What a redirect taught is forgotten when a DataNode refuses it."""
    store.replace("x", DATA)
    [web] = store.locations("x")[0].replicas
    read(store, 0, 5)
    reader = store._reader
    [(_, token)] = [p for p in reader._reusable.parameters if p[0] == "delegation"]
    store._client.namenodes.call("PUT", "/", "CANCELDELEGATIONTOKEN", [("token", token)], "x")
    assert read(store, 3, 50, prefer=web) == DATA[3:53]
    assert dict(reader._reusable.parameters)["delegation"] != token


def test_a_cancelled_token(store: Store, url: str, tmp_path: Path) -> None:
    text = token_of(store)
    (tmp_path / "token").write_text(text)
    opened = open_store(url, StoreOptions(token_file=str(tmp_path / "token"), retry_s=0))
    opened.mkdir("d")
    again: Any = store
    again._client.namenodes.call("PUT", "/", "CANCELDELEGATIONTOKEN", [("token", text)], "x")
    with pytest.raises(AccessDeniedError, match="token"):
        opened.stat("d")
    opened.close()


def test_without_ticket_or_token(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KRB5CCNAME", f"FILE:{tmp_path}/none")
    for options in (
        StoreOptions(auth="kerberos", retry_s=0),
        StoreOptions(user="alice", retry_s=0),
    ):
        opened = open_store(url, options)
        with pytest.raises(AccessDeniedError, match=r"kinit|401"):
            opened.stat("x")
        opened.close()
    with pytest.raises(AccessDeniedError, match="token_file"):
        open_store(url, StoreOptions(auth="token"))


def test_redirects_carry_what_must_not_be_shown(store: Any) -> None:
    target = store._client.namenodes.redirect("GET", "/alice/x", "OPEN", [], "read x")
    assert "delegation" in parse_qs(urlsplit(target.request).query)
    assert "delegation" not in repr(target)
