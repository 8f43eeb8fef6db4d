"""An image's own command, asked of a real registry."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from bootseer.errors import (
    AccessDeniedError,
    CorruptDataError,
    NotFoundError,
    NotSupportedError,
    StoreUnavailableError,
    UsageError,
)
from bootseer.kubernetes.image_config import make_resolver
from bootseer.storage.oci.config import ImageConfig
from tests.support.paths import TESTS

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
USER = ("bob", "open-sesame")


def digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


class Registry:
    """Debian's docker-registry on a port of its own, with a folder of its own."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.host = f"127.0.0.1:{probe.getsockname()[1]}"
        settings = {
            "version": "0.1",
            "log": {"level": "error"},
            "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
            "http": {"addr": self.host},
        }
        (folder / "registry.yml").write_text(json.dumps(settings), encoding="utf-8")
        program = shutil.which("docker-registry")
        assert program, "Debian's docker-registry is not installed"
        self.process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", program, "serve", str(folder / "registry.yml")],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.session = requests.Session()
        self.session.trust_env = False
        until = time.monotonic() + 30
        while True:
            try:
                self.session.get(f"http://{self.host}/v2/", timeout=5)
                return
            except requests.ConnectionError:
                assert time.monotonic() < until, "the registry does not answer"
                time.sleep(0.05)

    def stop(self) -> None:
        self.session.close()
        self.process.kill()
        self.process.wait()

    def blob(self, repository: str, data: bytes) -> dict[str, Any]:
        answer = self.session.post(f"http://{self.host}/v2/{repository}/blobs/uploads/")
        place = answer.headers["Location"]
        sign = "&" if "?" in place else "?"
        done = self.session.put(f"{place}{sign}digest={digest(data)}", data=data)
        assert done.status_code == 201
        return {"digest": digest(data), "size": len(data)}

    def manifest(self, repository: str, tag: str, kind: str, body: dict[str, Any]) -> bytes:
        data = json.dumps({"schemaVersion": 2, "mediaType": kind, **body}).encode()
        url = f"http://{self.host}/v2/{repository}/manifests/{tag}"
        done = self.session.put(url, data=data, headers={"Content-Type": kind})
        assert done.status_code == 201, done.text
        return data

    def image(self, repository: str, tag: str, entrypoint: Any, command: Any) -> bytes:
        config = {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Entrypoint": entrypoint, "Cmd": command},
            "rootfs": {"type": "layers", "diff_ids": []},
        }
        blob = self.blob(repository, json.dumps(config).encode())
        blob["mediaType"] = "application/vnd.oci.image.config.v1+json"
        return self.manifest(repository, tag, MANIFEST, {"config": blob, "layers": []})


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    made = Registry(tmp_path_factory.mktemp("registry"))
    yield made
    made.stop()


pytestmark = [pytest.mark.slow, pytest.mark.debian("docker-registry")]


def test_entrypoint_and_command_of_an_image(registry: Registry) -> None:
    registry.image("a/b", "1", ["/entry", "x"], ["serve"])
    resolve = make_resolver(plain_http=True)
    assert resolve(f"{registry.host}/a/b:1") == ImageConfig(("/entry", "x"), ("serve",))
    data = registry.image("a/b", "2", None, ["python"])
    by_digest = f"{registry.host}/a/b@{digest(data)}"
    assert resolve(by_digest) == ImageConfig((), ("python",))


def test_an_index_is_followed_to_its_platform(registry: Registry) -> None:
    data = registry.image("multi", "amd", ["/amd"], None)
    entry = {"mediaType": MANIFEST, "digest": digest(data), "size": len(data)}
    unknown = {**entry, "platform": {"os": "unknown", "architecture": "unknown"}}
    ours = {**entry, "platform": {"os": "linux", "architecture": "amd64"}}
    registry.manifest("multi", "all", INDEX, {"manifests": [unknown, ours]})
    name = f"{registry.host}/multi:all"
    assert make_resolver(plain_http=True)(name).entrypoint == ("/amd",)
    with pytest.raises(NotSupportedError, match="no image for linux/arm64; there are linux/amd64"):
        make_resolver(plain_http=True, architecture="arm64")(name)


def test_an_image_that_is_not_there(registry: Registry) -> None:
    with pytest.raises(NotFoundError, match=r"manifest 1 of 127\.0\.0\.1:.*/no/such"):
        make_resolver(plain_http=True)(f"{registry.host}/no/such:1")


def test_other_bytes_than_the_digest_says(registry: Registry, tmp_path: Path) -> None:
    registry.image("flip", "1", ["/e"], None)
    folder = Path(registry.process.args[-1]).parent  # type: ignore[index]
    name = f"{registry.host}/flip:1"
    config = [p for p in folder.rglob("data") if p.is_file() and b'"/e"' in p.read_bytes()]
    for path in config:
        path.write_bytes(path.read_bytes().replace(b'"/e"', b'"/f"'))
    with pytest.raises(CorruptDataError, match="other bytes"):
        make_resolver(plain_http=True)(name)


def test_a_registry_that_is_away() -> None:
    with pytest.raises(StoreUnavailableError, match="not reachable"):
        make_resolver(plain_http=True)("127.0.0.1:1/a:1")


def test_a_login_is_taken_from_the_containers_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small server of ours stands for a registry with token authentication: fault injection."""
    server = subprocess.Popen(
        [sys.executable, str(TESTS / "support/programs/token_registry.py"), ":".join(USER)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        host = server.stdout.readline().strip()
        auth = base64.b64encode(":".join(USER).encode()).decode()
        path = tmp_path / "auth.json"
        path.write_text(json.dumps({"auths": {host: {"auth": auth}}}), encoding="utf-8")
        monkeypatch.setenv("REGISTRY_AUTH_FILE", str(path))
        config = make_resolver(plain_http=True)(f"{host}/private:1")
        assert config == ImageConfig(("/private",), ())
        path.write_text("{}", encoding="utf-8")
        with pytest.raises(AccessDeniedError) as caught:
            make_resolver(plain_http=True)(f"{host}/private:1")
        assert USER[1] not in str(caught.value)
    finally:
        server.kill()
        server.wait()
        assert server.stdout is not None
        server.stdout.close()


@pytest.mark.parametrize("image", ["", "r.io/", "a:", "x@sha256:12"])
def test_names_that_are_none(image: str) -> None:
    with pytest.raises(UsageError):
        make_resolver()(image)
