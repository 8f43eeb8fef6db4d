"""A store in HDFS over WebHDFS: `webhdfs://namenode:port[,namenode:port]/folder`, or `webhdfss://`.

The NameNode says where data is; the bytes come from and go to DataNodes on connections of our
own, whose addresses hold tokens and are never shown. Hadoop spends some milliseconds of CPU on
every GET and then closes the connection, so few long ranges, each within one block, are best.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from io import FileIO

from bootseer.errors import NotFoundError, from_os_error
from bootseer.storage.options import StoreOptions
from bootseer.storage.request_control import Attempt
from bootseer.storage.retry import retrying
from bootseer.storage.store import NO_HINTS, Placed, Preferred, Stat, WriteHints, check_name
from bootseer.storage.urls import parse_url
from bootseer.storage.webhdfs.namespace import HIDDEN, TEMPORARY, Folder
from bootseer.storage.webhdfs.protocol import stretches
from bootseer.storage.webhdfs.reader import Reader
from bootseer.storage.webhdfs.writer import WebHdfsWriter

RANGE_BYTES = 32 << 20
STREAMS = 8
COPY_BYTES = 4 << 20


class WebHdfsStore:
    """`Store` over a folder of HDFS; any number of threads may use it."""

    def __init__(self, url: str, options: StoreOptions) -> None:
        self._folder = Folder(parse_url(url), options)
        self._reader = Reader(self._folder)
        self._preferred = Preferred(options.range_bytes or RANGE_BYTES, options.streams or STREAMS)

    @property
    def url(self) -> str:
        return self._folder.url

    def __repr__(self) -> str:
        return f"WebHdfsStore({self.url!r})"

    @property
    def preferred(self) -> Preferred:
        return self._preferred

    def close(self) -> None:
        self._folder.close()

    def local_path(self, name: str) -> str | None:
        return None

    def temporary(self, folder: str) -> str:
        return f"{check_name(folder)}/{TEMPORARY}{uuid.uuid4().hex}"

    def stat(self, name: str) -> Stat:
        return self._folder.stat(name)

    def places(self, name: str) -> list[Placed]:
        size = self.stat(name).size_bytes
        return stretches(self._folder.blocks(name), size)

    def write_places(self) -> list[str]:
        return self._folder.datanodes()

    def list(self, folder: str) -> Iterator[Stat]:
        return (s for s in self._folder.children(folder) if not _is_hidden(s))

    def temporaries(self, folder: str) -> Iterator[Stat]:
        return (s for s in self._folder.children(folder) if _is_hidden(s))

    def read_range(self, name: str, offset: int, buffer: bytearray | memoryview) -> None:
        view = memoryview(buffer).cast("B")
        retrying(
            lambda: self._reader.scatter(name, offset, [view], self._folder.attempt()),
            retry_s=self._folder.options.retry_s,
        )

    def read_scatter(
        self,
        name: str,
        offset: int,
        buffers: Sequence[memoryview],
        attempt: Attempt,
        filled: Callable[[int], None] | None = None,
    ) -> None:
        self._reader.scatter(name, offset, buffers, attempt, filled)

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        return self._reader.whole(name, limit_bytes=limit_bytes)

    def create(self, name: str, data: bytes, *, lasting: bool = True) -> bool:
        return self._create(name, iter([data]))

    def create_from_file(self, name: str, path: str) -> bool:
        try:
            file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed below
        except OSError as error:
            raise from_os_error(error, f"read {path}") from error
        with file:
            return self._create(name, _pieces(file, path))

    def _create(self, name: str, pieces: Iterator[bytes]) -> bool:
        try:
            self.stat(name)
            return False
        except NotFoundError:
            pass
        with WebHdfsWriter(self._folder, name, keep_existing=True) as writer:
            for piece in pieces:
                writer.write(piece)
        return writer.won

    def replace(self, name: str, data: bytes, *, lasting: bool = True) -> None:
        with WebHdfsWriter(self._folder, name) as writer:
            writer.write(data)

    def writer(self, name: str, hints: WriteHints = NO_HINTS) -> WebHdfsWriter:
        return WebHdfsWriter(self._folder, name, hints)

    def rename(self, old: str, new: str) -> None:
        self._folder.data_path(new)
        found = self.stat(old)
        self._folder.move(old, new, replace=not found.is_folder, version=found.version)

    def delete(self, name: str) -> None:
        self._folder.delete(name, recursive="false")

    def delete_tree(self, folder: str) -> None:
        self._folder.delete(folder, recursive="true")

    def mkdir(self, folder: str) -> None:
        self._folder.mkdir(folder)


def _is_hidden(found: Stat) -> bool:
    return found.name.rpartition("/")[2].startswith(HIDDEN)


def _pieces(file: FileIO, path: str) -> Iterator[bytes]:
    try:
        while piece := file.read(COPY_BYTES):
            yield piece
    except OSError as error:
        raise from_os_error(error, f"read {path}") from error
