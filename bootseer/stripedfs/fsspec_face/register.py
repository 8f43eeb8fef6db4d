"""Replacing fsspec's own `hdfs://`, `webhdfs://` and `http://`, for programs that ask for it."""

from __future__ import annotations

from typing import Any

import fsspec
from fsspec.utils import infer_storage_options

from bootseer.stripedfs.fsspec_face import chained_urls
from bootseer.stripedfs.fsspec_face.filesystem import StripedFileSystem


def register(*, hdfs: bool = True, webhdfs: bool = True, http: bool = True) -> None:
    """Make fsspec's own `hdfs://` and `webhdfs://` read and write through us, in this process.

    `http(s)://` is read through us only where fsspec's own implementation lacks what it needs
    (aiohttp). Without this call only `striped::…` URLs come to us.
    """
    for wanted, cls in ((hdfs, StripedHdfs), (webhdfs, StripedWebHdfs)):
        if wanted:
            for protocol in cls.replaces:
                fsspec.register_implementation(protocol, cls, clobber=True)
    for protocol in chained_urls.WEB if http else ():
        try:
            fsspec.get_filesystem_class(protocol)
        except ImportError:  # so nothing that works is replaced
            fsspec.register_implementation(protocol, StripedHttp, clobber=True)


class _Unchained(StripedFileSystem):
    """Stands for a protocol without a chain: the host is in the URL itself."""

    replaces: tuple[str, ...] = ()
    target = ""

    def __init__(self, host: str = "", port: int | None = None, **storage_options: Any) -> None:
        given = {"host": host, "port": port, "user": storage_options.pop("user", None)}
        given["use_https"] = storage_options.pop("use_https", False)
        super().__init__("", self.target, given, **storage_options)

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        parts = infer_storage_options(path)
        names = {"host": "host", "port": "port", "username": "user"}
        return {name: parts[key] for key, name in names.items() if parts.get(key)}


class StripedWebHdfs(_Unchained):
    """`webhdfs://` after `register()`."""

    protocol = ("webhdfs", "webHDFS")
    replaces = ("webhdfs", "webHDFS")
    target = "webhdfs"


class StripedHdfs(_Unchained):
    """`hdfs://` after `register()`."""

    protocol = "hdfs"
    replaces = ("hdfs",)
    target = "hdfs"


class StripedHttp(StripedFileSystem):
    """`http://` and `https://` after `register()`, where fsspec's own cannot be used."""

    protocol = chained_urls.WEB

    def __init__(self, **storage_options: Any) -> None:
        super().__init__("", "http", **storage_options)
