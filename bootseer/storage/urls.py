"""Store URLs: parsed, and spelt without the secrets that they may hold. Pure; no I/O.

Terms: the *authority* is one "host:port"; *shown* is the spelling that may be printed. It has
no user, no password and no query, since a query may carry a delegation token or a signature.
"""

from __future__ import annotations

import functools
from urllib.parse import parse_qsl, quote, unquote

from bootseer import light_dataclasses as dataclasses
from bootseer.errors import UsageError
from bootseer.events.redaction import safe_url

HTTP_SCHEMES = ("http", "https")
WEBHDFS_SCHEMES = ("webhdfs", "webhdfss")
DEFAULT_PORTS = {"http": 80, "https": 443, "webhdfs": 9870, "webhdfss": 9871, "hdfs": 8020}
SAME_SCHEMES = {"swebhdfs": "webhdfss"}


@dataclasses.dataclass(frozen=True, slots=True)
class StoreUrl:
    """One parsed URL. `repr` shows no more than `shown`."""

    scheme: str
    """In lower case, one spelling a scheme; "file" for a plain path."""
    hosts: tuple[str, ...]
    """One "host:port" each; several NameNodes of one cluster; () for files."""
    path: str
    """Absolute (or a plain path as given), percent-decoded."""
    user: str = ""
    password: str = dataclasses.field(default="", repr=False)
    query: str = dataclasses.field(default="", repr=False)

    @property
    def shown(self) -> str:
        """The URL as messages may print it."""
        if self.scheme == "file":
            return f"file://{self.path}"
        default = f":{DEFAULT_PORTS[self.scheme]}" if self.scheme in HTTP_SCHEMES else ""
        hosts = ",".join(h.removesuffix(default) if default else h for h in self.hosts)
        path = self.path.rstrip("/") or "/"
        for mark in "%?#":  # only these would change their meaning when the text is parsed again
            path = path.replace(mark, f"%{ord(mark):02X}")
        return f"{self.scheme}://{hosts}{path}"

    def parameter(self, name: str) -> str:
        """The first value of a query parameter, decoded; "" when there is none."""
        return next((v for k, v in parse_qsl(self.query) if k.lower() == name), "")

    def __repr__(self) -> str:
        return f"StoreUrl({self.shown!r})"


def parse_url(url: str) -> StoreUrl:
    """Parse a store's URL; UsageError, without its secrets, when it is none.

    A text without "://" is a plain path. Several hosts may be given, separated by commas, where
    one cluster has several NameNodes: `webhdfs://nn1:9870,nn2:9870/path`.
    """
    head, mark, rest = url.partition("://")
    if not mark:
        if not url:
            raise UsageError("the store is an empty string; give a directory or a URL")
        return StoreUrl("file", (), url)
    scheme = SAME_SCHEMES.get(head.lower(), head.lower())
    if scheme == "file":
        host, slash, path = rest.partition("/")
        if host not in ("", "localhost") or not slash:
            raise UsageError("a file:// store needs an absolute path, as in file:///mnt/share")
        return StoreUrl("file", (), "/" + unquote(path))
    rest, _, _fragment = rest.partition("#")
    rest, _, query = rest.partition("?")
    netloc, slash, path = rest.partition("/")
    userinfo, _, names = netloc.rpartition("@")
    user, _, password = userinfo.partition(":")
    hosts = tuple(_authority(scheme, name) for name in names.split(","))
    if len(hosts) > 1 and scheme in HTTP_SCHEMES:
        raise UsageError(f"{scheme}:// takes one host; only HDFS URLs name several")
    return StoreUrl(scheme, hosts, unquote(slash + path), unquote(user), unquote(password), query)


def split_object(url: str) -> tuple[str, str]:
    """Split a URL (or plain path) into its folder's URL and its last part, decoded.

    A query stays with the folder. UsageError when there is no last part.
    """
    whole, mark, query = url.partition("?") if "://" in url else (url, "", "")
    scheme, colon, rest = whole.partition("://")
    body = (rest if colon else whole).rstrip("/")
    folder, slash, last = body.rpartition("/")
    if not last or (colon and not slash):
        raise UsageError(f"{safe_url(url)} names no object; add its name after the folder")
    if not colon:
        return (folder or "/") if slash else ".", last
    name = unquote(last)
    if "/" in name:
        raise UsageError(f"{safe_url(url)}: a name cannot hold an encoded slash")
    return f"{scheme}://{folder}/{mark}{query}", name


@functools.lru_cache(maxsize=1024)  # each request asks, as for the next
def quote_path(path: str) -> str:
    """Percent-encode a decoded path for a request line."""
    return quote(path, safe="/~!$&'()*,:@")


@functools.lru_cache(maxsize=1024)
def split_authority(authority: str) -> tuple[str, int]:
    """Split "host:port", or "[::1]:80", whose brackets are removed."""
    host, _, port = authority.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _authority(scheme: str, name: str) -> str:
    """Add its scheme's port to a host; an HDFS name without one may be a nameservice."""
    host, colon, port = name.rpartition(":")
    if not colon or name.endswith("]"):
        host, port = name, ""
    if not host or (port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536)):
        raise UsageError(f"{scheme}:// needs a host and, after a colon, its port's number")
    if port or scheme == "hdfs":
        return name
    return f"{host}:{DEFAULT_PORTS.get(scheme, 0)}"
