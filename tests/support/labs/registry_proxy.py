"""FAKE, for fault injection only: a server in front of a real registry that spoils its answers.

A `Gate` hands each request on to the registry, unless one of its `rules` answers it first. The
token service and the blob store that registries redirect to are rules of this kind, too.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from urllib.parse import parse_qs, urlsplit

import pytest

from bootseer.storage.oci.manifest import Descriptor, digest_of, manifest_bytes
from bootseer.storage.oci.media_types import ACCEPT, OCI_CONFIG, OCI_MANIFEST
from bootseer.storage.oci.open import open_repository
from bootseer.storage.oci.repository import Repository
from tests.support.labs.web_servers import FakeServer, Request, head, serve_range

Rule = Callable[[socket.socket, Request], bool | None]
"""Answers a request and says whether the connection is kept; None: it is not for this rule."""

LAYER = "application/vnd.oci.image.layer.v1.tar"
HOP_HEADERS = ("transfer-encoding", "connection", "content-length", "keep-alive")


class Gate(FakeServer):
    """FAKE: a proxy in front of the registry at `upstream`; the first rule that answers counts."""

    def __init__(self, upstream: str) -> None:
        self.rules: list[Rule] = []
        self._upstream = upstream
        super().__init__(self._decide)

    def _decide(self, _: FakeServer, sock: socket.socket, request: Request) -> bool:
        for rule in list(self.rules):
            kept = rule(sock, request)
            if kept is not None:
                return kept
        return self.forward(sock, request)

    def forward(self, sock: socket.socket, request: Request) -> bool:
        status, reason, headers, body = self.ask(request)
        sock.sendall(head(f"{status} {reason}", **headers) + body)
        return True

    def ask(self, request: Request) -> tuple[int, str, dict[str, object], bytes]:
        """What the registry answers, its own address replaced by ours."""
        sent = {k: v for k, v in request.headers.items() if k not in ("host", "connection")}
        if "/manifests/" in request.target:  # some clients send a header for each type
            sent["accept"] = ACCEPT
        connection = http.client.HTTPConnection(self._upstream, timeout=30)
        try:
            connection.request(
                request.method, request.target, request.body, {**sent, "Host": self.authority}
            )
            answer = connection.getresponse()
            body = answer.read()
            headers: dict[str, object] = {
                k: v for k, v in answer.getheaders() if k.lower() not in HOP_HEADERS
            }
            length = answer.getheader("Content-Length") if request.method == "HEAD" else None
            headers["Content-Length"] = length or len(body)
            return answer.status, answer.reason, headers, body
        finally:
            connection.close()

    def asked(self, part: str, method: str = "GET") -> list[Request]:
        """The requests so far whose address holds `part`."""
        return [r for r in self.requests if r.method == method and part in r.target]


class Halves:
    """FAKE: a rule that stops within answers about one blob, so that a fault strikes right there.

    Half of each answer of `least_bytes` or more is sent, and its connection stands still until
    `cut` ends it. After `cuts` of them all answers come whole.
    """

    def __init__(self, gate: Gate, blob: str, *, least_bytes: int = 1, cuts: int = 1) -> None:
        self._gate, self._blob, self._least_bytes = gate, blob, least_bytes
        self._sent = [threading.Event() for _ in range(cuts)]
        self._over = [threading.Event() for _ in range(cuts)]
        self._cuts = 0

    def rule(self, sock: socket.socket, request: Request) -> bool | None:
        turn = self._cuts
        if turn == len(self._over) or request.method != "GET" or self._blob not in request.target:
            return None
        status, reason, headers, body = self._gate.ask(request)
        stops = len(body) >= self._least_bytes
        sent = body[: len(body) // 2] if stops else body
        sock.sendall(head(f"{status} {reason}", **headers) + sent)
        if not stops:
            return True
        self._sent[turn].set()
        while not (self._over[turn].wait(0.05) or self._gate.ended.is_set()):
            pass
        return False

    def is_halfway(self, timeout_s: float = 60.0) -> bool:
        """Whether an answer stands still; waits for it."""
        return self._sent[self._cuts].wait(timeout_s)

    def cut(self) -> None:
        """End the connections that stand still; the next answers are the next cut's."""
        turn, self._cuts = self._cuts, self._cuts + 1
        self._over[turn].set()


class Tokens:
    """FAKE: a token service, and the registry's part that believes its tokens.

    `life_s` is what it says of a token; the tokens in `dead` are refused. `login` is the user and
    password asked for ("" = none), `identity` the refresh token that it takes.
    """

    def __init__(self, *, login: str = "", identity: str = "", life_s: float | None = 300) -> None:
        self.login, self.identity, self.life_s = login, identity, life_s
        self.issued: list[str] = []
        self.asked: list[Request] = []
        self.dead: set[str] = set()
        self.refusal = 401
        self.posts = True
        self.delay_s = 0.0
        self.realm = ""

    def rule(self, sock: socket.socket, request: Request) -> bool | None:
        if urlsplit(request.target).path == "/token":
            return self._issue(sock, request)
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if given in self.issued and given not in self.dead:
            return None
        status = 401 if not given else self.refusal
        realm = self.realm or f"http://{request.headers['host']}/token"
        challenge = f'Bearer realm="{realm}",service="reg,x",scope="repository:s:pull"'
        headers = {"WWW_Authenticate": challenge} if status == 401 else {}
        sock.sendall(head(f"{status} No", Content_Length=2, **headers) + b"{}")
        return True

    def _issue(self, sock: socket.socket, request: Request) -> bool:
        self.asked.append(request)
        time.sleep(self.delay_s)
        if request.method == "POST" and not self.posts:
            sock.sendall(head("405 Not Allowed", Content_Length=0))
            return True
        given = request.headers.get("authorization", "")
        if request.method == "POST":
            fields = parse_qs(request.body.decode())
            good = fields.get("refresh_token") == [self.identity]
        elif self.login:
            good = given == "Basic " + base64.b64encode(self.login.encode()).decode()
        else:
            good = not given
        if not good:
            sock.sendall(head("401 No", Content_Length=2) + b"{}")
            return True
        token = f"token-{len(self.issued)}"
        self.issued.append(token)
        answer: dict[str, object] = {"access_token" if self.identity else "token": token}
        if self.life_s is not None:
            answer["expires_in"] = self.life_s
        body = json.dumps(answer).encode()
        sock.sendall(head("200 OK", Content_Length=len(body)) + body)
        return True


class SignedBlobs(FakeServer):
    """FAKE: the object store behind a registry: serves `data` to signatures that are not old."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.signatures: list[str] = []
        self.expired: set[str] = set()
        self.refusal = 403
        self.head_refusal = 0  # what HEAD gets, where it is not allowed
        self.gone = False
        super().__init__(self._object)

    def rule(self, sock: socket.socket, request: Request) -> bool | None:
        """The registry's part: blobs are elsewhere, under a fresh signature."""
        if "/blobs/" not in request.target or request.method not in ("GET", "HEAD"):
            return None
        signature = f"s{len(self.signatures)}"
        self.signatures.append(signature)
        place = f"http://localhost:{self.port}/object?X-Amz-Signature={signature}"
        sock.sendall(head("307 Elsewhere", Location=place, Content_Length=0))
        return True

    def _object(self, _: FakeServer, sock: socket.socket, request: Request) -> bool:
        signature = request.target.rpartition("=")[2]
        if signature in self.expired or signature not in self.signatures:
            sock.sendall(head(f"{self.refusal} Expired", Content_Length=0))
            return True
        if (request.method == "HEAD" and self.head_refusal) or self.gone:
            status = self.head_refusal if request.method == "HEAD" and self.head_refusal else 404
            sock.sendall(head(f"{status} No", Content_Length=0))
            return True
        text = request.headers.get("range", "")
        if text.endswith("-"):
            request.headers["range"] = f"{text}{len(self.data) - 1}"
        return serve_range(self.data, sock, request)


@contextlib.contextmanager
def opened(place: str, *, push: bool = False, **options: object) -> Iterator[Repository]:
    from bootseer.storage.options import StoreOptions

    options.setdefault("retry_s", 5.0)
    options.setdefault("stall_s", 5.0)
    repository, _ = open_repository(place, StoreOptions(**options), push=push)  # type: ignore[arg-type]
    with repository:
        yield repository


def push_image(place: str, layer: bytes, tag: str = "v1") -> tuple[Descriptor, Descriptor]:
    """An image of one layer; returns its manifest's and the layer's descriptors."""
    with opened(place, push=True) as repository:
        rootfs = {"type": "layers", "diff_ids": [digest_of(layer)]}
        config = json.dumps({"architecture": "amd64", "os": "linux", "rootfs": rootfs}).encode()
        repository.push_blob(config, digest_of(config), len(config))
        repository.push_blob(layer, digest_of(layer), len(layer))
        described = Descriptor(LAYER, digest_of(layer), len(layer))
        raw = manifest_bytes(
            config=Descriptor(OCI_CONFIG, digest_of(config), len(config)), layers=[described]
        )
        return repository.push_manifest(raw, OCI_MANIFEST, tag), described


def isolate(folder: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file of this machine's user counts; only what the test writes below `folder`."""
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("DOCKER_CONFIG", f"{folder}/docker")
    monkeypatch.setenv("BOOTSEER_REGISTRY_HOSTS", f"{folder}/certs.d")
    monkeypatch.setenv("CONTAINERS_REGISTRIES_CONF", f"{folder}/registries.conf")
    for name in ("REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR", "BOOTSEER_PLAIN_HTTP"):
        monkeypatch.delenv(name, raising=False)


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work(i)` at once in threads; the first error rises here."""
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
