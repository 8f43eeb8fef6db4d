"""A store in HDFS over WebHDFS: `webhdfs://namenode:port[,namenode:port]/folder`, or `webhdfss://`.

The NameNode says where data is; the bytes come from and go to DataNodes on connections of our
own, whose addresses hold tokens and are never shown. Hadoop spends some milliseconds of CPU on
every GET and then closes the connection, so few long ranges, each within one block, are best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from bootseer.storage.options import StoreOptions
from bootseer.storage.request_control import Attempt
from bootseer.storage.retry import retry_call
from bootseer.storage.store import BlockLocation, Stat, WriteHints
from bootseer.storage.temporary_name_store import TemporaryNameStore
from bootseer.storage.urls import parse_url
from bootseer.storage.webhdfs.client import Client
from bootseer.storage.webhdfs.namespace import Namespace
from bootseer.storage.webhdfs.protocol import locations_of
from bootseer.storage.webhdfs.reader import Reader
from bootseer.storage.webhdfs.writer import WebHdfsWriter


class WebHdfsStore(TemporaryNameStore):
    """`Store` over a folder of HDFS; any number of threads may use it."""

    def __init__(self, url: str, options: StoreOptions) -> None:
        at = parse_url(url)
        super().__init__(at, options)
        self._client = Client(at, options)
        self._namespace = Namespace(self._client)
        self._reader = Reader(self._client, self._namespace)

    def close(self) -> None:
        self._client.close()

    def stat(self, name: str) -> Stat:
        return self._namespace.stat(name)

    def locations(self, name: str) -> list[BlockLocation]:
        size = self.stat(name).size_bytes
        return locations_of(self._namespace.blocks(name), size)

    def write_nodes(self) -> list[str]:
        return self._namespace.datanodes()

    def read_range(self, name: str, offset: int, buffer: bytearray | memoryview) -> None:
        view = memoryview(buffer).cast("B")
        retry_call(
            lambda: self._reader.read_scatter(name, offset, [view], self._client.attempt()),
            retry_s=self._options.retry_s,
        )

    def read_scatter(
        self,
        name: str,
        offset: int,
        buffers: Sequence[memoryview],
        attempt: Attempt,
        filled: Callable[[int], None] | None = None,
    ) -> None:
        self._reader.read_scatter(name, offset, buffers, attempt, filled)

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        return self._reader.read(name, limit_bytes=limit_bytes)

    def rename(self, old: str, new: str) -> None:
        self._client.data_path(new)  # raises for a name that could not be read again
        stat = self.stat(old)
        self._namespace.move(old, new, replace=not stat.is_folder, version=stat.version)

    def delete(self, name: str) -> None:
        self._namespace.delete(name, recursive="false")

    def delete_tree(self, folder: str) -> None:
        self._namespace.delete(folder, recursive="true")

    def mkdir(self, folder: str) -> None:
        self._namespace.mkdir(folder)

    def _new_writer(self, name: str, hints: WriteHints, *, keep_existing: bool) -> WebHdfsWriter:
        return WebHdfsWriter(
            self._client, self._namespace, name, hints, keep_existing=keep_existing
        )

    def _children(self, folder: str) -> Iterable[Stat]:
        return self._namespace.children(folder)
