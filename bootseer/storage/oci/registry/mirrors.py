"""The endpoints of a repository: its mirrors, then its own registry.

Sources: containerd's `hosts.toml` (a folder a host), Docker's `certs.d`, and Podman's
`registries.conf` version 2. A host with a `hosts.toml` follows it alone; any other follows
`registries.conf`.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from bootseer import light_dataclasses as dataclasses
from bootseer.errors import AccessDeniedError, UsageError, from_os_error
from bootseer.storage.http.responses import Origin
from bootseer.storage.oci.reference import DEFAULT_HOST, Reference

HUB = "registry-1.docker.io"
FILE_LIMIT_BYTES = 1 << 20
PULL, RESOLVE, PUSH = "pull", "resolve", "push"
ALL = frozenset((PULL, RESOLVE, PUSH))


@dataclasses.dataclass(frozen=True, slots=True)
class Endpoint:
    """One server that has a repository, with the settings of requests to it.

    `host` is the name that logins are stored under. `base` is the path before the repository's
    name, `repository` its name there. `namespace` tells a mirror of several registries which one
    is meant (`ns=`). Client certificates are (certificate, key) paths, the key "" when it is in
    the same file.
    """

    origin: Origin
    host: str
    repository: str
    base: str = "/v2"
    abilities: frozenset[str] = ALL
    is_mirror: bool = False
    namespace: str = ""
    headers: tuple[tuple[str, str], ...] = dataclasses.field(default=(), repr=False)
    ca_files: tuple[str, ...] = ()
    verify_tls: bool = True
    client_pairs: tuple[tuple[str, str], ...] = ()

    def __hash__(self) -> int:
        return hash((self.origin, self.host))  # each request looks it up several times

    @property
    def authority(self) -> str:
        """Its name in messages and in `Attempt.prefer`."""
        return self.origin.authority

    def target(self, tail: str, query: str = "") -> str:
        """The path and query of a request for `manifests/…`, `blobs/…` and so on."""
        namespace = f"ns={self.namespace}" if self.namespace else ""
        query = "&".join(part for part in (query, namespace) if part)
        return f"{self.base}/{self.repository}/{tail}" + (f"?{query}" if query else "")


@dataclasses.dataclass(frozen=True, slots=True)
class MirrorFiles:
    """Where mirrors are configured: folders with a folder a host, and `registries.conf` files."""

    hosts_directories: tuple[str, ...] = ()
    registries_conf: tuple[str, ...] = ()


def plan_endpoints(
    reference: Reference, *, plain_http: tuple[str, ...], forced: bool | None, files: MirrorFiles
) -> list[Endpoint]:
    """The endpoints to ask for a repository, in order; the registry itself comes last.

    `plain_http` names registries that are asked by http, and `forced` says so of this one alone;
    one on loopback is asked by http unless there is a certificate in its folder. Raises UsageError
    for a file that cannot be understood.
    """
    own = _make_own_endpoint(reference, plain_http, forced)
    for directory in files.hosts_directories:
        endpoints = _hosts_toml(directory, reference, own, plain_http)
        if endpoints is not None:
            return endpoints
    for directory in files.hosts_directories:
        own = _with_certificates(own, os.path.join(directory, reference.host))
    host, port = _split(reference.host)
    if own.ca_files and forced is None and not _is_named(host, port, plain_http):
        own = dataclasses.replace(own, origin=own.origin._replace(tls=True))  # even on loopback
    return _registries_conf(files.registries_conf, reference, own, plain_http)


def is_loopback(host: str) -> bool:
    """Whether a host name can only mean this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _make_own_endpoint(
    reference: Reference, plain_http: tuple[str, ...], forced: bool | None
) -> Endpoint:
    host, port = _split(reference.host)
    plain = forced if forced is not None else _may_be_plain(host, port, plain_http)
    server = HUB if reference.host == DEFAULT_HOST else host
    origin = Origin(not plain, server, port or (80 if plain else 443))
    return Endpoint(origin, reference.host, reference.repository)


def _may_be_plain(host: str, port: int, plain_http: tuple[str, ...]) -> bool:
    return is_loopback(host) or _is_named(host, port, plain_http)


def _is_named(host: str, port: int, plain_http: tuple[str, ...]) -> bool:
    names = {host.lower(), f"{host.lower()}:{port}", f"[{host.lower()}]:{port}"}
    return not names.isdisjoint(plain_http)


def _split(authority: str) -> tuple[str, int]:
    """Host and port (0: none was named) of "host:port"."""
    parts = urlsplit(f"//{authority}")
    try:
        return parts.hostname or "", parts.port or 0
    except ValueError as error:
        raise UsageError(f"{authority!r} is no host with a port") from error


def _hosts_toml(
    directory: str, reference: Reference, own: Endpoint, plain_http: tuple[str, ...]
) -> list[Endpoint] | None:
    """The endpoints by a folder's `hosts.toml` for this host or `_default`; None without one."""
    for name in (reference.host, reference.host.replace(":", "_") + "_", "_default"):
        folder = os.path.join(directory, name)
        path = os.path.join(folder, "hosts.toml")
        if not os.path.exists(path):
            continue
        table = _read_toml(path)
        _check_shapes(table, path)
        own = _with_certificates(own, folder)
        if isinstance(table.get("server"), str) and table["server"] and name != "_default":
            own = _at_url(own, table["server"], own.host, table, path, plain_http)
        own = _with_settings(own, table, path)
        mirrors = []
        for url, host_table in (table.get("host") or {}).items():
            settings = host_table if isinstance(host_table, dict) else {}
            _check_shapes(settings, path)
            plain = Endpoint(own.origin, "", reference.repository, is_mirror=True)
            mirror = _at_url(plain, url, "", settings, path, plain_http)
            if mirror.origin != own.origin:
                mirror = dataclasses.replace(mirror, namespace=reference.host)
            mirrors.append(_with_settings(mirror, settings, path))
        return [*mirrors, own]
    return None


def _check_shapes(table: Mapping[str, Any], path: str) -> None:
    """Raise UsageError for values of a table whose types are not those that are read here."""
    ca, pairs, headers, hosts = (table.get(n) or [] for n in ("ca", "client", "header", "host"))
    values = list(headers.values()) if isinstance(headers, dict) else []
    words = [word for one in values for word in (one if isinstance(one, list) else [one])]
    good = (
        isinstance(ca, str | list)
        and isinstance(pairs, str | list)
        and all(isinstance(pair, str | list) and pair for pair in pairs)
        and all(isinstance(one, dict) or not one for one in (headers, hosts))
        and all(isinstance(word, str) and word.isprintable() for word in words)
    )
    if not good:
        raise UsageError(f"{path} has a setting of a form that is not known; correct it")


def _at_url(
    endpoint: Endpoint,
    url: str,
    host: str,
    settings: Mapping[str, Any],
    path: str,
    plain_http: tuple[str, ...],
) -> Endpoint:
    """An endpoint with the server that a configuration names."""
    parts = urlsplit(url if "://" in url else f"https://{url}")
    try:
        name, port = parts.hostname or "", parts.port or 0
    except ValueError:
        name, port = "", 0
    if parts.scheme not in ("http", "https") or not name or parts.username or parts.query:
        raise UsageError(f"{path} names a host that is no http(s) address; correct it")
    tls = parts.scheme == "https"
    if "://" not in url:
        tls = not _may_be_plain(name, port, plain_http)
    base = parts.path.rstrip("/")
    if not settings.get("override_path"):
        base += "/v2"
    if name == DEFAULT_HOST:
        name = HUB
    origin = Origin(tls, name, port or (443 if tls else 80))
    return dataclasses.replace(endpoint, origin=origin, base=base, host=host or parts.netloc)


def _with_settings(endpoint: Endpoint, table: Mapping[str, Any], path: str) -> Endpoint:
    folder = os.path.dirname(path)
    words = table.get("capabilities")
    abilities = frozenset(map(str, words)) & ALL if isinstance(words, list) else None
    headers = []
    for name, value in (table.get("header") or {}).items():
        values = value if isinstance(value, list) else [value]
        headers += [(str(name), str(one)) for one in values]
    pairs = table.get("client") or []
    if isinstance(pairs, str):
        pairs = [pairs]
    client = tuple(
        (_below(folder, p), "") if isinstance(p, str) else (_below(folder, p[0]), _key(folder, p))
        for p in pairs
    )
    ca = table.get("ca") or []
    ca_files = tuple(_below(folder, one) for one in ([ca] if isinstance(ca, str) else ca))
    return dataclasses.replace(
        endpoint,
        abilities=endpoint.abilities if abilities is None else abilities,
        headers=endpoint.headers + tuple(headers),
        ca_files=endpoint.ca_files + ca_files,
        verify_tls=endpoint.verify_tls and not table.get("skip_verify"),
        client_pairs=endpoint.client_pairs + client,
    )


def _below(folder: str, path: object) -> str:
    return os.path.join(folder, str(path))


def _key(folder: str, pair: Any) -> str:
    return _below(folder, pair[1]) if len(pair) > 1 else ""


def _with_certificates(endpoint: Endpoint, folder: str) -> Endpoint:
    """An endpoint with the certificates in a host's folder, as Docker keeps them."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return endpoint
    ca = tuple(_below(folder, n) for n in names if n.endswith(".crt"))
    pairs = tuple(
        (_below(folder, n), _below(folder, key))
        for n in names
        if n.endswith(".cert") and (key := n.removesuffix(".cert") + ".key") in names
    )
    return dataclasses.replace(
        endpoint,
        ca_files=endpoint.ca_files + ca,
        client_pairs=endpoint.client_pairs + pairs,
    )


def _registries_conf(
    paths: tuple[str, ...], reference: Reference, own: Endpoint, plain_http: tuple[str, ...]
) -> list[Endpoint]:
    """The endpoints by `registries.conf`, from its table with the longest matching prefix."""
    whole = f"{reference.host}/{reference.repository}"
    best: tuple[int, str, Mapping[str, Any], str] | None = None
    for path in paths:
        for table in _tables(path):
            prefix = str(table.get("prefix") or table.get("location") or "")
            size = _matches(prefix, whole)
            if size and (best is None or size >= best[0]):
                best = size, prefix, table, path
    if best is None:
        return [own]
    size, prefix, table, path = best
    if table.get("blocked"):
        raise AccessDeniedError(f"{path} blocks {prefix}; the image {whole} is not asked for")
    rest = whole[size:]
    mirrors: list[Endpoint] = []
    for mirror in table.get("mirror") or ():
        mirrors += _make_located_endpoints(mirror, rest, own, plain_http, path, is_mirror=True)
    location = str(table.get("location") or "")
    if table.get("insecure") or (location and location != whole[:size]):
        settings = {**table, "location": location or whole[:size]}
        return mirrors + _make_located_endpoints(
            settings, rest, own, plain_http, path, is_mirror=False
        )
    return [*mirrors, own]


def _tables(path: str) -> Iterator[Mapping[str, Any]]:
    if not os.path.exists(path):
        return
    tables = _read_toml(path).get("registry") or ()
    yield from (table for table in tables if isinstance(table, dict))


def _matches(prefix: str, whole: str) -> int:
    """How many characters of a name a prefix matches; 0 when it does not match."""
    if prefix.startswith("*."):
        host = whole.partition("/")[0]
        return len(host) if host.endswith(prefix[1:]) else 0
    if prefix and (whole == prefix or whole.startswith(prefix + "/")):
        return len(prefix)
    return 0


def _make_located_endpoints(
    table: Mapping[str, Any],
    rest: str,
    own: Endpoint,
    plain_http: tuple[str, ...],
    path: str,
    *,
    is_mirror: bool,
) -> list[Endpoint]:
    """The endpoints of a `location`; an insecure one is tried by https first, then by http."""
    host, _, repository = (str(table.get("location") or "") + rest).partition("/")
    name, port = _split(host)
    if not name or not repository:
        raise UsageError(f"{path} has a location that names no registry; correct it")
    kinds = {"digest-only": {PULL}, "tag-only": {RESOLVE}}
    abilities = frozenset(kinds.get(str(table.get("pull-from-mirror")), {PULL, RESOLVE}))
    if name == DEFAULT_HOST:
        name = HUB
    by_https = Endpoint(
        Origin(True, name, port or 443),
        host,
        repository,
        abilities=abilities if is_mirror else own.abilities,
        is_mirror=is_mirror,
        ca_files=own.ca_files if host == own.host else (),
        verify_tls=not table.get("insecure"),
    )
    by_http = dataclasses.replace(by_https, origin=Origin(False, name, port or 80))
    # Where the user said so of this registry (`--plain-http`), https is not tried.
    is_plain = host == own.host and not own.origin.tls
    if is_plain or _may_be_plain(name, port, plain_http):
        return [by_http]
    return [by_https, by_http] if table.get("insecure") else [by_https]


def _read_toml(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            text = file.read(FILE_LIMIT_BYTES).decode()
        if all(line.lstrip()[:1] in ("", "#") for line in text.splitlines()):
            return {}  # Debian's file is such: importing the parser takes 2 ms of a start
        import tomllib

        return tomllib.loads(text)
    except OSError as error:
        raise from_os_error(error, f"read the registry settings {path}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not TOML; correct it ({str(error)[:80]})") from error
