"""Mirrors: hosts.toml and registries.conf, falling through, and what mirrors may not know."""

from __future__ import annotations

import base64
import json
import random
import ssl
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.errors import (
    AccessDeniedError,
    BootseerError,
    CorruptDataError,
    NotFoundError,
    NotSupportedError,
    UsageError,
)
from bootseer.storage.http.responses import Origin
from bootseer.storage.oci.manifest import Descriptor, digest_of, index_bytes
from bootseer.storage.oci.media_types import OCI_INDEX
from bootseer.storage.oci.reference import parse_reference
from bootseer.storage.oci.registry import registry_client
from bootseer.storage.oci.registry.mirrors import Endpoint, MirrorFiles, plan_endpoints
from bootseer.storage.oci.registry.upload import BlobSource, Uploader
from bootseer.storage.request_control import Attempt
from tests.support.labs.registry_proxy import Gate, isolate, opened, push_image
from tests.support.labs.web_servers import FakeServer, head

DATA = random.Random(5).randbytes(1_000_000)
DIGEST = digest_of(DATA)
needs_registry = pytest.mark.debian("docker-registry")


@pytest.fixture(autouse=True)
def _no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(tmp_path, monkeypatch)


def plan(folder: Path, image: str) -> list[Endpoint]:
    files = MirrorFiles((str(folder / "certs.d"),), (str(folder / "registries.conf"),))
    return plan_endpoints(
        parse_reference(image), plain_http=("plain:80",), forced=None, files=files
    )


def hosts(folder: Path, host: str, text: str) -> None:
    path = folder / "certs.d" / host / "hosts.toml"
    path.parent.mkdir(parents=True)
    path.write_text(text)


def test_http_is_for_loopback_and_for_hosts_that_are_named(tmp_path: Path) -> None:
    expected = {
        "127.0.0.1:5000/a": Origin(False, "127.0.0.1", 5000),
        "localhost:5000/a": Origin(False, "localhost", 5000),
        "[::1]:5000/a": Origin(False, "::1", 5000),
        "plain:80/a": Origin(False, "plain", 80),
        "plain:81/a": Origin(True, "plain", 81),
        "10.0.0.1:5000/a": Origin(True, "10.0.0.1", 5000),
        "reg.io/a": Origin(True, "reg.io", 443),
        "localhost.evil.com/a": Origin(True, "localhost.evil.com", 443),
        "debian": Origin(True, "registry-1.docker.io", 443),
    }
    assert {image: plan(tmp_path, image)[0].origin for image in expected} == expected


def test_hosts_toml_names_mirrors_in_order(tmp_path: Path) -> None:
    hosts(
        tmp_path,
        "docker.io",
        """
server = "https://hub.example"
[host."https://one.example:8443/proxy"]
  capabilities = ["pull"]
  ca = "one.pem"
  [host."https://one.example:8443/proxy".header]
    x-key = ["a"]
[host."http://two.example"]
  skip_verify = true
[host."https://three.example/v2/hub"]
  override_path = true
""",
    )
    one, two, three, own = plan(tmp_path, "debian:12")
    assert one.origin == Origin(True, "one.example", 8443)
    assert one.target("manifests/12") == ("/proxy/v2/library/debian/manifests/12?ns=docker.io")
    assert one.abilities == {"pull"}
    assert one.ca_files == (str(tmp_path / "certs.d/docker.io/one.pem"),)
    assert one.headers == (("x-key", "a"),)
    assert "x-key" not in repr(one)
    assert two.origin == Origin(False, "two.example", 80)
    assert not two.verify_tls
    assert three.base == "/v2/hub"
    assert all(e.is_mirror for e in (one, two, three))
    assert own.origin == Origin(True, "hub.example", 443)
    assert (own.host, own.is_mirror) == ("docker.io", False)


def test_registries_conf_maps_the_longest_prefix(tmp_path: Path) -> None:
    (tmp_path / "registries.conf").write_text("""
[[registry]]
prefix = "reg.io/team"
location = "new.io/moved"
[[registry.mirror]]
location = "mirror.io:5000/team"
pull-from-mirror = "digest-only"
[[registry.mirror]]
location = "lab.io"
insecure = true
[[registry]]
location = "reg.io"
[[registry]]
prefix = "*.corp.io"
location = "corp.io"
[[registry]]
location = "bad.io"
blocked = true
""")
    mirror, secure, plain, own = plan(tmp_path, "reg.io/team/app")
    assert (mirror.origin.authority, mirror.repository) == ("mirror.io:5000", "team/app")
    assert mirror.abilities == {"pull"}
    assert (secure.origin.tls, secure.verify_tls, plain.origin.tls) == (True, False, False)
    assert (own.origin.host, own.repository, own.host) == ("new.io", "moved/app", "new.io")
    assert [e.host for e in plan(tmp_path, "reg.io/teams/app")] == ["reg.io"]
    (corp,) = plan(tmp_path, "a.corp.io/x")
    assert (corp.host, corp.repository) == ("corp.io", "x")
    with pytest.raises(AccessDeniedError, match="blocks"):
        plan(tmp_path, "bad.io/x")


def test_a_registry_said_to_speak_http_is_not_tried_by_https(tmp_path: Path) -> None:
    """`--plain-http` beside `insecure = true`: each try of https, in vain, took a start 20 ms."""
    (tmp_path / "registries.conf").write_text("""
[[registry]]
location = "reg.io:5000"
insecure = true
[[registry.mirror]]
location = "lab.io"
insecure = true
""")
    files = MirrorFiles((), (str(tmp_path / "registries.conf"),))

    def asked(forced: bool | None) -> list[tuple[str, bool]]:
        reference = parse_reference("reg.io:5000/team/app")
        made = plan_endpoints(reference, plain_http=(), forced=forced, files=files)
        return [(one.host, one.origin.tls) for one in made]

    mirror = [("lab.io", True), ("lab.io", False)]
    assert asked(True) == [*mirror, ("reg.io:5000", False)]
    assert asked(None) == [*mirror, ("reg.io:5000", True), ("reg.io:5000", False)]


def test_a_registries_conf_of_comments_alone_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "registries.conf").write_text('# [[registry]]\n\n  # location = "a"\n')
    assert [e.host for e in plan(tmp_path, "reg.io/a")] == ["reg.io"]
    (tmp_path / "registries.conf").write_text("# [[registry]]\nx = \n")
    with pytest.raises(UsageError, match="is not TOML"):
        plan(tmp_path, "reg.io/a")


@needs_registry
@pytest.mark.slow
def test_no_authorities_are_read_for_a_registry_that_speaks_http(
    registry: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are a hundred and more, and take 20 ms, which starts wait for."""
    place = f"{registry.host}/plain/{tmp_path.name.lower().strip('_')}"
    push_image(place, DATA)
    (tmp_path / "registries.conf").write_text(
        f'[[registry]]\nlocation = "{registry.host}"\ninsecure = true\n'
    )
    made: list[object] = []
    monkeypatch.setattr(ssl.SSLContext, "__new__", lambda *words, **_: made.append(words))
    check(place)
    assert made == []


SENSELESS = ["x = ", '[host."ftp://a"]', '[host."https://u:p@a"]', "host=5", "client=[1]"]


@pytest.mark.parametrize("text", [*SENSELESS, "header={a=[2]}"])
def test_a_hosts_toml_that_makes_no_sense_is_named(tmp_path: Path, text: str) -> None:
    hosts(tmp_path, "reg.io", text)
    with pytest.raises(UsageError, match=r"hosts\.toml"):
        plan(tmp_path, "reg.io/a")


@pytest.fixture
def pair(registry: Any, tmp_path: Path) -> Iterator[tuple[Any, Any, str]]:
    """A mirror and its origin (FAKES before one real registry), and the image's name."""
    name = f"mirrors/{tmp_path.name.lower().strip('_')}"
    push_image(f"{registry.host}/{name}", DATA)
    with Gate(registry.host) as mirror, Gate(registry.host) as origin:
        hosts(tmp_path, origin.authority, f'[host."http://{mirror.authority}"]\n')
        yield mirror, origin, f"{origin.authority}/{name}"


def check(place: str, **options: Any) -> None:
    """Everything that is read comes out right, wherever from."""
    with opened(place, **options) as repository:
        repository.image("v1")
        buffer = bytearray(100_000)
        repository.store.read_range(DIGEST, 200_000, buffer)
        assert buffer == DATA[200_000:300_000]
        assert repository.stream(DIGEST).read() == DATA
        assert repository.store.read(DIGEST, limit_bytes=len(DATA)) == DATA


@needs_registry
@pytest.mark.slow
def test_a_mirror_spares_the_registry(pair: tuple[Any, Any, str], tmp_path: Path) -> None:
    mirror, origin, place = pair
    auth = base64.b64encode(b"bob:secret").decode()
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker/config.json").write_text(
        json.dumps({"auths": {origin.authority: {"auth": auth}}})
    )
    check(place)
    assert origin.requests == []
    assert all(f"ns={origin.authority}" in r.target for r in mirror.requests)
    assert all("authorization" not in r.headers for r in mirror.requests)


@needs_registry
@pytest.mark.slow
def test_a_mirror_that_asks_for_a_login_does_not_get_the_registrys(
    pair: tuple[Any, Any, str], tmp_path: Path
) -> None:
    mirror, origin, place = pair
    auth = base64.b64encode(b"bob:secret").decode()
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker/config.json").write_text(
        json.dumps({"auths": {origin.authority: {"auth": auth}}})
    )

    def ask(sock: Any, request: Any) -> bool:
        sock.sendall(head("401 No", WWW_Authenticate='Basic realm="x"', Content_Length=0))
        return True

    mirror.rules = [ask]
    check(place)
    assert all("authorization" not in r.headers for r in mirror.requests)


@needs_registry
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["404", "500", "corrupt", "cut", "gone", "no ranges", "429"])
def test_a_mirror_that_fails_is_passed_over(pair: tuple[Any, Any, str], fault: str) -> None:
    mirror, origin, place = pair

    def fail(sock: Any, request: Any) -> bool:
        if fault in ("404", "500", "429"):
            sock.sendall(head(f"{fault} No", Content_Length=0, Retry_After=200))
            return True
        if fault == "no ranges":
            request.headers.pop("range", None)
        status, reason, headers, body = mirror.ask(request)
        if fault == "corrupt" and "/blobs/" in request.target:
            body = body[:-1] + bytes([body[-1] ^ 1])
        if fault == "cut":
            body = body[: len(body) // 2]
        sock.sendall(head(f"{status} {reason}", **headers) + body)
        return fault != "cut"

    mirror.rules = [fail]
    if fault == "gone":
        mirror.__exit__()
    if fault == "corrupt":
        with opened(place) as repository:
            repository.image("v1")
            with pytest.raises(BootseerError, match="other bytes"):
                repository.stream(DIGEST).read()  # what was handed out cannot be taken back
            assert repository.stream(DIGEST).read() == DATA  # and the mirror is asked last now
            assert repository.store.read(DIGEST, limit_bytes=len(DATA)) == DATA
    else:
        check(place)
    assert fault == "no ranges" or origin.requests


@needs_registry
@pytest.mark.slow
def test_missing_is_what_the_registry_itself_says(pair: tuple[Any, Any, str]) -> None:
    mirror, origin, place = pair
    with opened(place) as repository, pytest.raises(NotFoundError, match=origin.authority):
        repository.resolve("nothing")
    assert mirror.requests


@needs_registry
@pytest.mark.slow
def test_a_further_try_asks_another_than_the_first(pair: tuple[Any, Any, str]) -> None:
    mirror, origin, place = pair
    view = memoryview(bytearray(100))
    with opened(place) as repository:
        names = repository.store.locations(DIGEST)[0].replicas
        assert names == (mirror.authority, origin.authority)
        asked = []
        for attempt in (
            Attempt(),
            Attempt(number=1),
            Attempt(prefer=origin.authority),
            Attempt(avoid=frozenset((mirror.authority,))),
            Attempt(avoid=frozenset((origin.authority,))),
        ):
            repository.store.read_scatter(DIGEST, 0, [view], attempt)
            asked.append(attempt.replica)
    assert asked == [names[0], names[1], names[1], names[1], names[0]]


@needs_registry
@pytest.mark.slow
def test_what_is_pushed_goes_to_the_registry_alone(pair: tuple[Any, Any, str]) -> None:
    mirror, _, place = pair
    push_image(place, DATA[:100], "v2")
    assert mirror.requests == []


@pytest.fixture
def gate(registry: Any, tmp_path: Path) -> Iterator[Any]:
    with Gate(registry.host) as gate:
        name = tmp_path.name.lower().strip("_")
        gate.place = f"{gate.authority}/pushes/{name}"  # type: ignore[attr-defined]
        yield gate


def upload(gate: Any, rules: list[Any]) -> None:
    """Push in chunks past the rules; the blob must come out right, each byte told once."""
    gate.rules = rules
    told: list[int] = []
    with opened(gate.place, push=True) as repository:
        uploads = Uploader(repository._client, chunk_bytes=300_000)  # type: ignore[attr-defined]
        uploads.push(BlobSource(DATA, DIGEST, len(DATA)), told.append)
        gate.rules = []
        assert repository.store.read(DIGEST, limit_bytes=len(DATA)) == DATA
        assert sum(told) == len(DATA)


def first(method: str, answer: Any, times: int = 1) -> Any:
    left = [times]

    def rule(sock: Any, request: Any) -> bool | None:
        if request.method != method or not left[0]:
            return None
        left[0] -= 1
        kept: bool | None = answer(sock, request)
        return kept

    return rule


@needs_registry
@pytest.mark.slow
@pytest.mark.parametrize("method", ["POST", "PATCH", "PUT", "HEAD"])
def test_an_upload_goes_on_after_a_fault(gate: Any, method: str) -> None:
    def fail(sock: Any, request: Any) -> bool:
        sock.sendall(head("503 Later", Content_Length=0))
        return True

    upload(gate, [first(method, fail, 2)])


@needs_registry
@pytest.mark.slow
def test_a_chunk_whose_answer_was_lost_is_not_sent_twice(gate: Any) -> None:
    kept: dict[str, object] = {}

    def swallow(sock: Any, request: Any) -> bool:
        kept.update(gate.ask(request)[2])
        return False

    def tell(sock: Any, request: Any) -> bool | None:
        """Debian's registry cannot tell where an upload stands once its state was lost."""
        if "/uploads/" not in request.target:
            return None
        sock.sendall(head("204 Here", Location=kept["Location"], Range=kept["Range"]))
        return True

    upload(gate, [first("PATCH", swallow), first("GET", tell)])
    sizes = [int(r.headers["content-length"]) for r in gate.asked("/uploads/", "PATCH")]
    assert sum(sizes) == len(DATA)


@needs_registry
@pytest.mark.slow
def test_an_upload_that_was_forgotten_begins_anew(gate: Any) -> None:
    def forget(sock: Any, request: Any) -> bool:
        gate.ask(type(request)("DELETE", request.target, {}))
        return False

    upload(gate, [first("PATCH", lambda s, r: gate.forward(s, r)), first("PATCH", forget)])


@needs_registry
@pytest.mark.slow
def test_a_registry_without_chunks_gets_one_piece(gate: Any) -> None:
    def refuse(sock: Any, request: Any) -> bool:
        sock.sendall(head("416 No Chunks", Content_Length=0))
        return True

    upload(gate, [first("PATCH", refuse, 99)])
    (put,) = gate.asked("/uploads/", "PUT")
    assert int(put.headers["content-length"]) == len(DATA)


@needs_registry
@pytest.mark.slow
def test_an_upload_is_not_sent_to_another_server(gate: Any) -> None:
    def elsewhere(sock: Any, request: Any) -> bool:
        place = "http://other.example/upload?token=secret"
        sock.sendall(head("202 There", Location=place, Content_Length=0))
        return True

    gate.rules = [first("POST", elsewhere, 9)]
    with opened(gate.place, push=True) as repository:
        with pytest.raises(NotSupportedError) as caught:
            repository.push_blob(DATA, DIGEST, len(DATA))
        assert "secret" not in str(caught.value)


@needs_registry
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["api", "html", "filtered"])
def test_referrers_come_by_pages_or_by_tag(gate: Any, kind: str) -> None:
    subject, _ = push_image(gate.place, DATA)
    entries = [Descriptor("m", f"sha256:{n:064x}", 1, {}, f"t{n % 2}") for n in range(6)]

    def answer(sock: Any, request: Any) -> bool | None:
        if "/referrers/" not in request.target:
            return None
        if kind == "html":
            sock.sendall(head("200 OK", Content_Type="text/html", Content_Length=2) + b"hi")
            return True
        page = int(request.target.rpartition("page=")[2]) if "page=" in request.target else 0
        body = index_bytes(entries[page * 2 : page * 2 + 2])
        more = {"Link": f'<{request.target.partition("?")[0]}?page={page + 1}>; rel="next"'}
        headers = {"Content_Type": OCI_INDEX, **(more if page < 2 else {})}
        sock.sendall(head("200 OK", Content_Length=len(body), **headers) + body)
        return True

    gate.rules = [answer]
    with opened(gate.place) as repository:
        wanted = "t1" if kind == "filtered" else ""
        found = repository.referrers(subject.digest, wanted)
    expected = [] if kind == "html" else [e for e in entries if wanted in ("", e.artifact_type)]
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["tags", "referrers"])
def test_a_list_that_leads_back_to_its_own_page_takes_no_more_memory(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [Descriptor("m", f"sha256:{n:064x}", 1) for n in range(1000)]
    tags = json.dumps({"tags": [f"v{n}" for n in range(10_000)]}).encode()
    body = tags if asked == "tags" else index_bytes(entries)

    def answer(_: FakeServer, sock: Any, request: Any) -> bool:
        headers = {"Content_Type": OCI_INDEX, "Link": f'<{request.target}>; rel="next"'}
        sock.sendall(head("200 OK", Content_Length=len(body), **headers) + body)
        return True

    monkeypatch.setattr(registry_client, "MOST_PAGES", 50)
    with FakeServer(answer) as server, opened(f"{server.authority}/a") as repository:
        tracemalloc.start()
        try:
            with pytest.raises(CorruptDataError, match="no end"):
                repository.tags() if asked == "tags" else repository.referrers(DIGEST)
            _, most_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert len(server.requests) == 50
    assert most_bytes < 8 << 20  # the entries of all pages take more
