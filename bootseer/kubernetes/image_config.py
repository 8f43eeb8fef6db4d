"""The command that an image starts, read from its registry.

Sources: OCI image specification (index, manifest, config) and distribution specification; the
Docker media types of the same shape; Docker's token authentication.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from bootseer.errors import (
    AccessDeniedError,
    CorruptDataError,
    NotFoundError,
    NotSupportedError,
    StoreUnavailableError,
    UsageError,
)

if TYPE_CHECKING:
    import requests

TIMEOUT_S = (5.0, 20.0)
LIMIT_BYTES = 4 << 20
HUB, HUB_KEY = "registry-1.docker.io", "https://index.docker.io/v1/"
INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True, slots=True)
class ImageConfig:
    """What an image runs: ENTRYPOINT and CMD in Dockerfile's words."""

    entrypoint: tuple[str, ...]
    command: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Reference:
    """An image's name taken apart; `version` is a tag or a digest."""

    host: str
    repository: str
    version: str


def parse_reference(image: str) -> Reference:
    """Take `[HOST/]REPOSITORY[:TAG][@DIGEST]` apart as container runtimes do; UsageError else."""
    name, _, digest = image.partition("@")
    head, slash, rest = name.partition("/")
    if slash and ("." in head or ":" in head or head == "localhost"):
        host, path = head, rest
    else:
        host, path = "docker.io", name
    path, colon, tag = path.partition(":")
    if not path or (colon and not tag) or (digest and not _DIGEST.fullmatch(digest)):
        raise UsageError(f"{image!r} is not an image's name")
    if host == "docker.io":
        host = HUB
        path = path if "/" in path else f"library/{path}"
    return Reference(host, path, digest or tag or "latest")


def resolver(
    *, plain_http: bool = False, architecture: str = "amd64"
) -> Callable[[str], ImageConfig]:
    """A function from an image's name to its configuration; each image is asked for once.

    Credentials are those of `$REGISTRY_AUTH_FILE`, else of Docker's `config.json`, where they
    stand in the file itself. Raises a BootseerError that completes "and ...".
    """
    known: dict[str, ImageConfig] = {}

    def resolve(image: str) -> ImageConfig:
        if image not in known:
            with contextlib.closing(_Client(parse_reference(image), plain_http)) as client:
                known[image] = client.config(architecture)
        return known[image]

    return resolve


class _Client:
    """Reads one image's manifest and configuration."""

    def __init__(self, reference: Reference, plain_http: bool) -> None:
        try:
            import requests
        except ImportError as error:
            raise NotSupportedError(
                "registries cannot be asked without `requests`; install bootseer[kubernetes]"
            ) from error
        self._session = requests.Session()
        self._session.trust_env = False
        self._reference = reference
        scheme = "http" if plain_http else "https"
        self._base = f"{scheme}://{reference.host}/v2/{reference.repository}"

    def close(self) -> None:
        """Close the connections; twice is safe."""
        self._session.close()

    def config(self, architecture: str) -> ImageConfig:
        """The image's configuration for an architecture, digests checked."""
        version = self._reference.version
        manifest = self._get(f"manifests/{version}", (*INDEXES, *MANIFESTS), version)
        if "manifests" in manifest:
            digest = _platform(manifest, architecture, self._reference)
            manifest = self._get(f"manifests/{digest}", MANIFESTS, digest)
        digest = str(manifest.get("config", {}).get("digest", ""))
        if not _DIGEST.fullmatch(digest):
            raise CorruptDataError(f"the manifest of {self._reference.repository} has no config")
        run = self._get(f"blobs/{digest}", (), digest).get("config") or {}
        return ImageConfig(_words(run.get("Entrypoint")), _words(run.get("Cmd")))

    def _get(self, path: str, accept: tuple[str, ...], version: str) -> dict[str, Any]:
        headers = {"Accept": ", ".join(accept)} if accept else {}
        answer = self._ask(path, headers)
        if answer.status_code == 401:
            answer.close()
            headers["Authorization"] = self._authorise(answer.headers.get("WWW-Authenticate", ""))
            answer = self._ask(path, headers)
        with answer:
            _check_status(answer.status_code, self._reference)
            body = answer.raw.read(LIMIT_BYTES + 1, decode_content=True)
        if len(body) > LIMIT_BYTES:
            raise CorruptDataError(f"the registry {self._reference.host} sent too long an answer")
        if _DIGEST.fullmatch(version) and hashlib.sha256(body).hexdigest() != version[7:]:
            raise CorruptDataError(f"the registry {self._reference.host} sent other bytes")
        return _object(body, self._reference.host)

    def _ask(self, path: str, headers: Mapping[str, str]) -> requests.Response:
        import requests

        try:
            return self._session.get(
                f"{self._base}/{path}", headers=dict(headers), timeout=TIMEOUT_S, stream=True
            )
        except requests.RequestException as error:
            raise StoreUnavailableError(
                f"the registry {self._reference.host} cannot be reached"
            ) from error

    def _authorise(self, challenge: str) -> str:
        """The Authorization header that answers a challenge."""
        user = _credentials(self._reference.host)
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "basic" and user:
            return "Basic " + user
        fields = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        if scheme.lower() != "bearer" or "realm" not in fields:
            raise AccessDeniedError(f"the registry {self._reference.host} wants a login")
        return "Bearer " + self._token(fields, user)

    def _token(self, fields: Mapping[str, str], user: str) -> str:
        import requests

        query = {
            "service": fields.get("service", ""),
            "scope": fields.get("scope") or f"repository:{self._reference.repository}:pull",
        }
        headers = {"Authorization": "Basic " + user} if user else {}
        try:
            answer = self._session.get(
                fields["realm"], params=query, headers=headers, timeout=TIMEOUT_S
            )
        except requests.RequestException as error:
            raise StoreUnavailableError(
                f"the token service of {self._reference.host} cannot be reached"
            ) from error
        _check_status(answer.status_code, self._reference)
        body = _object(answer.content, self._reference.host)
        return str(body.get("token") or body.get("access_token") or "")


def _platform(index: Mapping[str, Any], architecture: str, reference: Reference) -> str:
    for entry in index["manifests"]:
        platform = entry.get("platform") or {}
        if (platform.get("os"), platform.get("architecture")) == ("linux", architecture):
            digest = str(entry.get("digest", ""))
            if _DIGEST.fullmatch(digest):
                return digest
    raise NotFoundError(f"the image {reference.repository} has no linux/{architecture} variant")


def _words(value: object) -> tuple[str, ...]:
    return tuple(str(word) for word in value) if isinstance(value, list) else ()


def _object(body: bytes, host: str) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise CorruptDataError(f"the registry {host} sent no JSON") from error
    if not isinstance(value, dict):
        raise CorruptDataError(f"the registry {host} sent no JSON object")
    return value


def _check_status(status: int, reference: Reference) -> None:
    host, name = reference.host, f"{reference.repository}:{reference.version}"
    if status in (401, 403):
        raise AccessDeniedError(f"the registry {host} refuses to show {name}")
    if status == 404:
        raise NotFoundError(f"the registry {host} does not have {name}")
    if status != 200:
        raise StoreUnavailableError(f"the registry {host} answered {status} for {name}")


def _credentials(host: str) -> str:
    """Base64 of `user:password` for a host, "" when the file has none."""
    from bootseer.config import registry_auth_files

    for path in registry_auth_files():
        try:
            with open(path, encoding="utf-8") as file:
                auths = json.load(file).get("auths") or {}
        except (OSError, ValueError, AttributeError):
            continue
        for key in (host, f"https://{host}", HUB_KEY if host == HUB else host):
            found = auths.get(key)
            if isinstance(found, dict) and isinstance(found.get("auth"), str):
                return base64.b64encode(base64.b64decode(found["auth"])).decode()
    return ""
