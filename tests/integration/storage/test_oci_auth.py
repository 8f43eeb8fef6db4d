"""Logging in at registries: tokens and their renewal, logins from files and helpers.

A real registry stands behind a gate (a FAKE for fault injection) that asks for tokens.
"""

from __future__ import annotations

import base64
import json
import random
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from bootseer.errors import AccessDeniedError, BootseerError, StoreUnavailableError
from bootseer.storage.oci.manifest import digest_of
from bootseer.storage.oci.registry.logins import find_login
from tests.support.labs.registry_proxy import Gate, Tokens, in_threads, isolate, opened, push_image
from tests.support.labs.web_servers import FakeServer, certificates, head

pytestmark = [pytest.mark.slow, pytest.mark.debian("docker-registry")]

DATA = random.Random(2).randbytes(2_000_000)
DIGEST = digest_of(DATA)
SECRET = "s3cr3t-word"


@pytest.fixture(autouse=True)
def _no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(tmp_path, monkeypatch)


@pytest.fixture
def gate(registry: Any, tmp_path: Path) -> Iterator[Gate]:
    name = f"auth/{tmp_path.name.lower().strip('_')}"
    push_image(f"{registry.host}/{name}", DATA)
    with Gate(registry.host) as gate:
        gate.place = f"{gate.authority}/{name}"  # type: ignore[attr-defined]
        gate.name = name  # type: ignore[attr-defined]
        yield gate


@pytest.fixture
def log_in(tmp_path: Path) -> Callable[[dict[str, object]], None]:
    """Write Docker's config.json."""

    def write(settings: dict[str, object]) -> None:
        (tmp_path / "docker").mkdir(exist_ok=True)
        (tmp_path / "docker/config.json").write_text(json.dumps(settings))

    return write


def entry(user: str, password: str, **more: str) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{user}:{password}".encode()).decode(), **more}


def ranges(repository: Any, count: int = 6) -> None:
    for number in range(count):
        buffer = bytearray(50_000)
        repository.store.read_range(DIGEST, number * 60_000, buffer)
        assert buffer == DATA[number * 60_000 :][:50_000]


def test_one_anonymous_token_serves_all_requests(gate: Any) -> None:
    tokens = Tokens()
    gate.rules = [tokens.rule]
    with opened(gate.place) as repository:
        repository.image("v1")
        ranges(repository)
    assert len(tokens.issued) == 1
    (asked,) = tokens.asked
    query = parse_qs(urlsplit(asked.target).query)
    assert query["service"] == ["reg,x"]
    assert f"repository:{gate.name}:pull" in query["scope"]


def test_who_pushes_asks_for_that_right_at_once(gate: Any) -> None:
    tokens = Tokens()
    gate.rules = [tokens.rule]
    push_image(gate.place, DATA[:1000], "v2")
    assert len(tokens.issued) == 1
    query = parse_qs(urlsplit(tokens.asked[0].target).query)
    assert f"repository:{gate.name}:pull,push" in query["scope"]


@pytest.mark.parametrize("refusal", [401, 403])
def test_a_token_that_expires_during_a_long_read_is_renewed(gate: Any, refusal: int) -> None:
    tokens = Tokens()
    tokens.refusal = refusal
    gate.rules = [tokens.rule]
    with opened(gate.place) as repository:
        ranges(repository)
        tokens.dead.update(tokens.issued)
        ranges(repository)
        assert len(tokens.issued) == 2
        with repository.stream(DIGEST) as stream:
            tokens.dead.update(tokens.issued)
            assert stream.read() == DATA
    assert len(tokens.issued) == 3


def test_a_stream_that_is_cut_goes_on_with_a_fresh_token(gate: Any) -> None:
    tokens = Tokens()
    cut: list[int] = []

    def cutting(sock: Any, request: Any) -> bool | None:
        if "/blobs/" not in request.target or cut:
            return None
        cut.append(1)
        tokens.dead.update(tokens.issued)
        sock.sendall(head("200 OK", Content_Length=len(DATA)) + DATA[:700_000])
        return False

    gate.rules = [tokens.rule, cutting]
    with opened(gate.place) as repository, repository.stream(DIGEST) as stream:
        assert stream.read() == DATA
    assert [r.headers.get("range") for r in gate.asked("/blobs/")][-1] == "bytes=700000-"
    assert len(tokens.issued) == 2


@pytest.mark.parametrize("refusal", [401, 403])
def test_of_many_readers_one_renews(gate: Any, refusal: int) -> None:
    tokens = Tokens()
    tokens.delay_s, tokens.refusal = 0.3, refusal
    gate.rules = [tokens.rule]
    with opened(gate.place) as repository:
        ranges(repository, 1)
        tokens.dead.update(tokens.issued)
        in_threads(8, lambda _: ranges(repository, 2))
    assert len(tokens.issued) == 2


def test_a_token_near_its_end_is_renewed_before_it_is_refused(gate: Any) -> None:
    tokens = Tokens(life_s=0.001)
    gate.rules = [tokens.rule]
    with opened(gate.place) as repository:
        ranges(repository, 4)
    bare = [r for r in gate.asked("/v2/") if "authorization" not in r.headers]
    assert len(bare) == 1  # the very first; no other was refused
    assert len(tokens.issued) >= 4


def test_without_a_word_of_its_life_a_token_lives_a_minute(gate: Any) -> None:
    tokens = Tokens(life_s=None)
    gate.rules = [tokens.rule]
    with opened(gate.place) as repository:
        ranges(repository, 4)
    assert len(tokens.issued) == 1


def test_the_login_of_the_file_goes_to_the_token_service_only(gate: Any, log_in: Any) -> None:
    tokens = Tokens(login=f"bob:{SECRET}")
    gate.rules = [tokens.rule]
    log_in({"auths": {gate.authority: entry("bob", SECRET)}})
    with opened(gate.place) as repository:
        ranges(repository, 2)
    assert all(
        not r.headers.get("authorization", "").startswith("Basic")
        for r in gate.requests
        if not r.target.startswith("/token")
    )


@pytest.mark.parametrize("settings", ["none", "wrong", "helper missing"])
def test_a_refused_login_says_what_to_do_and_no_secret(
    gate: Any, log_in: Any, settings: str
) -> None:
    tokens = Tokens(login="bob:other")
    gate.rules = [tokens.rule]
    says = "podman login"
    if settings == "wrong":
        log_in({"auths": {gate.authority: entry("bob", SECRET)}})
        says = "refuses the login of bob"
    elif settings == "helper missing":
        log_in({"credHelpers": {gate.authority: "no-such-thing"}})
        says = "docker-credential-no-such-thing is not installed"
    with opened(gate.place) as repository:
        with pytest.raises(AccessDeniedError, match=says) as caught:
            repository.resolve("v1")
        assert SECRET not in repr(caught.value)
        assert SECRET not in repr(repository)


@pytest.mark.parametrize("posts", [True, False])
def test_an_identity_token_is_exchanged(gate: Any, log_in: Any, posts: bool) -> None:
    tokens = Tokens(identity=SECRET, login=f"<token>:{SECRET}")
    tokens.posts = posts
    gate.rules = [tokens.rule]
    log_in({"auths": {gate.authority: {"identitytoken": SECRET}}})
    with opened(gate.place) as repository:
        ranges(repository, 2)
    assert [r.method for r in tokens.asked] == (["POST"] if posts else ["POST", "GET"])
    if posts:
        fields = parse_qs(tokens.asked[0].body.decode())
        assert fields["grant_type"] == ["refresh_token"]
        assert fields["scope"][0].endswith(":pull")


def helper(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A credential helper that answers with the lines of a file of its own."""
    path = folder / "bin" / f"docker-credential-{name}"
    path.parent.mkdir(exist_ok=True)
    answer = folder / f"{name}.json"
    path.write_text(
        f'#!/bin/sh\nread server; echo "$1 $server" >>{folder}/{name}.log\n'
        f"if [ -s {answer} ]; then cat {answer}; else\n"
        'echo "credentials not found in native keychain"; exit 1; fi\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")
    return answer


def test_a_helper_is_asked_again_when_the_token_is_renewed(
    gate: Any, log_in: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = helper(tmp_path, "vault", monkeypatch)
    answer.write_text(json.dumps({"Username": "bob", "Secret": "one"}))
    tokens = Tokens(login="bob:one")
    gate.rules = [tokens.rule]
    log_in({"credHelpers": {gate.authority: "vault"}})
    with opened(gate.place) as repository:
        ranges(repository, 2)
        tokens.login = "bob:two"
        answer.write_text(json.dumps({"Username": "bob", "Secret": "two"}))
        tokens.dead.update(tokens.issued)
        ranges(repository, 2)
    assert (tmp_path / "vault.log").read_text() == f"get {gate.authority}\n" * 2


def test_the_most_special_login_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = helper(tmp_path, "store", monkeypatch)
    first, second = tmp_path / "auth.json", tmp_path / "config.json"
    files = [str(tmp_path / "missing"), str(first), str(second)]
    auths = {
        "reg.io": entry("host", "h"),
        "reg.io/team": entry("team", "t"),
        "reg.io/team/app": entry("app", "a:b"),
        "reg.io/empty": {},
        "https://index.docker.io/v1/": entry("hub", "x"),
    }
    first.write_text(json.dumps({"auths": auths}))
    second.write_text(json.dumps({"auths": {"old.io": {"auth": "!"}}, "credsStore": "store"}))

    def user(host: str, repository: str) -> str:
        return find_login(files, host, repository).user

    assert user("reg.io", "team/app") == "app"
    assert find_login(files, "reg.io", "team/app").password == "a:b"
    assert user("reg.io", "team/application") == "team"
    assert user("reg.io", "empty/x") == "host"
    assert user("docker.io", "library/debian") == "hub"
    assert not find_login(files, "other.io", "x")  # the helper knows none
    assert not find_login(files, "old.io", "x")
    answer.write_text(json.dumps({"Username": "<token>", "Secret": SECRET}))
    found = find_login(files, "other.io", "x")
    assert (found.identity_token, found.basic) == (SECRET, "")
    assert SECRET not in repr(found)
    first.write_text("{")
    answer.write_text("")
    assert "auth.json cannot be read" in find_login(files, "reg.io", "x").trouble


@pytest.mark.parametrize("name", ["../evil", "a b", "x;y"])
def test_a_helper_that_is_a_path_is_not_run(tmp_path: Path, name: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"credsStore": name}))
    assert "no program" in find_login([str(path)], "reg.io", "x").trouble


def test_a_password_is_not_sent_over_plain_http_for_a_tls_registry(
    tmp_path: Path, log_in: Any
) -> None:
    import ssl

    ca, certificate, key = certificates(tmp_path / "tls")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)

    def refuse(server: FakeServer, sock: Any, request: Any) -> bool:
        challenge = 'Bearer realm="http://auth.example:1/token",service="x"'
        sock.sendall(head("401 No", Content_Length=0, WWW_Authenticate=challenge))
        return True

    with FakeServer(refuse, context) as server:
        log_in({"auths": {server.authority: entry("bob", SECRET)}})
        place = f"{server.authority}/a/b"
        with (
            opened(place, ca_file=str(ca)) as repository,
            pytest.raises(AccessDeniedError, match="plain http"),
        ):
            repository.resolve("v1")


@pytest.mark.parametrize(
    "challenge",
    [
        "",
        "Negotiate",
        'Bearer realm="http://127.0.0.1:1/t\xf6ken"',
        'Bearer realm="http://a..b/t"',
        'Bearer realm="http://127.0.0.1:1/a b"',
        'Bearer service="x"',
        'Bearer realm="file:///etc/passwd"',
        'Basic realm="x"',
    ],
)
def test_a_challenge_that_cannot_be_met_is_a_refusal(gate: Any, challenge: str) -> None:
    def refuse(sock: Any, request: Any) -> bool:
        headers = {"WWW_Authenticate": challenge} if challenge else {}
        sock.sendall(head("401 No", Content_Length=0, **headers))
        return True

    gate.rules = [refuse]
    errors = (AccessDeniedError, StoreUnavailableError)
    with opened(gate.place, retry_s=0.0) as repository, pytest.raises(errors):
        repository.resolve("v1")


@pytest.mark.parametrize("body", [b"", b"[]", b'{"token": 5}', b'{"token": "a\\nb: c"}', b"{" * 9])
def test_a_token_service_that_talks_nonsense_is_an_error_of_ours(gate: Any, body: bytes) -> None:
    def nonsense(sock: Any, request: Any) -> bool | None:
        if not request.target.startswith("/token"):
            return None
        sock.sendall(head("200 OK", Content_Length=len(body)) + body)
        return True

    gate.rules = [nonsense, Tokens().rule]
    with opened(gate.place, retry_s=0.1) as repository, pytest.raises(BootseerError):
        repository.resolve("v1")
