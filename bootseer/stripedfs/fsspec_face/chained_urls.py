"""fsspec's chained URLs: the store that a `striped::…` URL means, and the path within it. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from bootseer.errors import NotSupportedError, UsageError
from bootseer.storage.urls import split_object

PREFIXES = ("striped::", "striped://")
WEB = ("http", "https")
SAME = {"local": "file", "swebhdfs": "webhdfss", "webHDFS": "webhdfs"}
SCHEMES = ("file", "hdfs", "webhdfs", "webhdfss")


def strip_prefixes(path: str) -> str:
    """The path after the prefixes: `/dir/name`, or a whole URL for http(s)."""
    if path.startswith("striped://") and "://" not in path[len("striped://") :]:
        # A URL's path is absolute; `datasets` makes two slashes of three.
        path = "/" + path.removeprefix("striped://").lstrip("/")
    for prefix in PREFIXES:
        path = path.removeprefix(prefix)
    scheme, mark, rest = path.partition("://")
    if mark and scheme not in WEB:
        _, slash, path = rest.partition("/") if scheme not in ("file", "local") else ("", "", rest)
        path = slash + path
    elif mark:
        return path.rstrip("/")
    return path.rstrip("/") or "/"


def base_url(protocol: str, options: Mapping[str, Any]) -> str:
    """The root of the store that fsspec's `target_protocol` and `target_options` name.

    Raises NotSupportedError for a protocol that no store here has, UsageError without a host.
    """
    scheme = SAME.get(protocol, protocol)
    if scheme == "webhdfs" and options.get("use_https"):
        scheme = "webhdfss"
    if scheme not in SCHEMES:
        raise NotSupportedError(
            f"striped:: cannot stand before {protocol}://; it can before file, hdfs, webhdfs, "
            "http and https"
        )
    if scheme == "file":
        return "file:///"
    host, port = options.get("host"), options.get("port")
    if not host:
        raise UsageError(f"striped::{protocol}:// needs a host; give it in the URL")
    return f"{scheme}://{host}{f':{port}' if port else ''}/"


def split_path(base: str, path: str) -> tuple[str, str]:
    """The store's URL and the name within it of a stripped path; "" is the store's root.

    A web object's store is its folder, as the web has no common root to list from.
    """
    scheme, mark, _ = path.partition("://")
    if mark and scheme in WEB:
        return split_object(path)
    if not path.startswith("/") and base == "file:///":
        path = os.path.abspath(path)
    return base, "/".join(part for part in path.split("/") if part)


def split_at_top(path: str) -> tuple[str, str]:
    """The root URL of a web address's server, and the name from there.

    Raises UsageError for an address that names nothing below the root.
    """
    folder, name = split_object(path)
    while True:
        try:
            above, part = split_object(folder)
        except UsageError:
            return folder, name
        if part in (".", ".."):
            return folder, name
        folder, name = above, f"{part}/{name}"
