"""A repository whose first answers come from a helper process that has asked already."""

from __future__ import annotations

import contextlib
import marshal
import sys
import threading
import time
from _socket import MSG_PEEK
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bootseer.context_managers import Closing
from bootseer.errors import CorruptDataError, StoreUnavailableError
from bootseer.imageprefetch.resolve import registry_helper
from bootseer.imageprefetch.resolve.registry_helper import (
    CONFIG,
    IMAGE,
    MANIFEST,
    READY,
    REFERRERS,
    STREAM,
)
from bootseer.storage.oci.manifest import (
    Descriptor,
    Index,
    Manifest,
    Platform,
    check_bytes,
    digest_of,
    parse_manifest,
)

if TYPE_CHECKING:
    from _socket import socket

    from bootseer.storage.oci.repository import BlobStream, Repository
    from bootseer.storage.store import Store

PATIENCE_S = 3.5
"""The longest wait for the helper's next message or byte; then this process asks the registry.

Longer than the helper itself waits for a byte, so a helper that is alive gives up first."""
MOST_MESSAGE_BYTES = 64 << 20
_MOST_PEEKED_BYTES, _PEEK_POLL_S = 256 << 10, 0.001


class HelpedRepository(Closing):
    """A `RepositoryReader` that a helper answers where it can.

    `open_repository` opens the repository itself, for everything that the helper does not know;
    before that nothing is imported for it. Any number of threads may use it.
    """

    def __init__(self, link: socket, open_repository: Callable[[], Repository]) -> None:
        self._link, self._open = link, open_repository
        self._link.settimeout(PATIENCE_S)
        self._lock = threading.Lock()
        self._repository: Repository | None = None
        self._answers: dict[tuple[str, str], tuple[Any, ...]] = {}
        self._link_lock = threading.Lock()
        self._is_listening = True  # more answers may come
        self._is_ready = self._is_streaming = False

    @property
    def repository(self) -> Repository:
        """The repository itself; opened at its first use."""
        with self._lock:
            if self._repository is None:
                self._repository = self._open()
            return self._repository

    @property
    def store(self) -> Store:
        """Its blobs, which are not the helper's."""
        return self.repository.store

    def image(self, version: str, platform: Platform | None = None) -> tuple[Descriptor, Manifest]:
        """As `Repository.image`."""
        answer = self._answer(IMAGE, version) if platform is None else None
        if answer is None:
            return self.repository.image(version, platform)
        fields, raw, media_type = answer
        descriptor = Descriptor.parse(fields)
        manifest = _parse(raw, media_type, descriptor)
        if not isinstance(manifest, Manifest):
            return self.repository.image(version)
        return descriptor, manifest

    def referrers(self, digest: str, artifact_type: str = "") -> list[Descriptor]:
        """As `Repository.referrers`."""
        answer = self._answer(REFERRERS, digest) if not artifact_type else None
        if answer is None:
            return self.repository.referrers(digest, artifact_type)
        return [Descriptor.parse(fields) for fields in answer[0]]

    def manifest(self, descriptor: Descriptor | str) -> Manifest | Index:
        """As `Repository.manifest`."""
        digest = descriptor if isinstance(descriptor, str) else descriptor.digest
        answer = self._answer(MANIFEST, digest)
        if answer is None:
            return self.repository.manifest(descriptor)
        raw, media_type = answer
        size_bytes = len(raw) if isinstance(descriptor, str) else descriptor.size_bytes
        return _parse(raw, media_type, Descriptor(media_type, digest, size_bytes))

    @property
    def answers(self) -> bool:
        """Whether the helper still answers, or has answered everything that it knows."""
        return self._is_listening or self._is_ready

    def config(self, digest: str) -> bytes | None:
        """An image's config with this digest, if the helper has it in time."""
        answer = self._answer(CONFIG, digest)
        if answer is None or digest_of(answer[0]) != digest:
            return None
        raw: bytes = answer[0]
        return raw

    def blob(self, descriptor: Descriptor, *, limit_bytes: int) -> bytes:
        """As `Repository.blob`."""
        return self.repository.blob(descriptor, limit_bytes=limit_bytes)

    def stream(self, digest: str, offset: int = 0, *, verify: bool = True) -> BlobStream:
        """As `Repository.stream`; the helper gives the first unverified one from a blob's start."""
        size_bytes = self._request_stream(digest) if not offset and not verify else -1
        if size_bytes < 0:
            return self.repository.stream(digest, offset, verify=verify)
        return HelpedStream(self._link, digest, size_bytes, lambda: self.repository)

    def dismiss(self) -> None:
        """Ask the helper for nothing more, and end it unless it streams. Twice is safe."""
        with self._link_lock:
            self._is_listening = False
            if not self._is_streaming:
                registry_helper.end(self._link)

    def cut(self) -> None:
        """End the helper, also for threads that wait for it: they ask the registry then."""
        registry_helper.shut(self._link)

    def close(self) -> None:
        """Close the repository and the helper; a stream is closed by its owner."""
        self.dismiss()
        with self._lock:
            if self._repository is not None:
                self._repository.close()

    # --- the link --------------------------------------------------------------------------

    def _answer(self, kind: str, name: str) -> tuple[Any, ...] | None:
        """The helper's answer about `name`; None where it does not know, or takes long."""
        with self._link_lock:
            while self._is_listening and (kind, name) not in self._answers:
                self._receive_message()
            return self._answers.get((kind, name))

    def _receive_message(self) -> None:
        try:
            message = _receive(self._link)
        except (OSError, ValueError, EOFError):  # it was killed, or is stuck
            self._is_listening = False
            registry_helper.end(self._link)
            return
        if message[0] == READY:
            self._is_listening, self._is_ready = False, True
        else:
            self._answers[message[0], message[1]] = message[2:]

    def _request_stream(self, digest: str) -> int:
        """Ask the helper for a blob; its size, or -1 where the helper cannot stream it."""
        with self._link_lock:
            while self._is_listening:
                self._receive_message()
            if not self._is_ready or self._is_streaming:
                return -1
            self._is_ready = False
            try:
                self._link.sendall(f"{digest}\n".encode())
                kind, name, size_bytes = _receive(self._link)
            except (OSError, ValueError, EOFError):
                registry_helper.end(self._link)
                return -1
            if (kind, name) != (STREAM, digest) or not isinstance(size_bytes, int):
                registry_helper.end(self._link)
                return -1
            self._is_streaming = True
            return size_bytes


class HelpedStream(Closing):
    """The helper's stream of a blob, continued from the repository where it ends early.

    One thread reads; any thread may cancel.
    """

    def __init__(
        self, link: socket, digest: str, size_bytes: int, repository: Callable[[], Repository]
    ) -> None:
        self._link, self._digest, self._size_bytes = link, digest, size_bytes
        self._repository = repository
        self._at = 0
        self._rest: BlobStream | None = None
        self._lock = threading.Lock()
        self._is_closed = self._is_cancelled = False

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole blob."""
        return self._size_bytes

    def readinto(self, view: memoryview, /) -> int:
        """Put the next bytes into `view`; how many, 0 at the end."""
        if self._is_closed or not view or self._at == self._size_bytes:
            return 0
        if self._rest is None:
            # Never more than the blob: the helper is not trusted, only the frames' digests are.
            count = self._receive(view[: self._size_bytes - self._at])
            if count:
                self._at += count
                return count
            self._read_on()
        assert self._rest is not None
        return self._rest.readinto(view)

    def _receive(self, view: memoryview) -> int:
        try:
            return self._link.recv_into(view)
        except OSError:  # the helper takes long, or was cancelled
            return 0

    def _read_on(self) -> None:
        """Continue without the helper. Raises StoreUnavailableError when cancelled."""
        registry_helper.end(self._link)
        with self._lock:
            if self._is_cancelled or self._is_closed:
                raise StoreUnavailableError(f"reading {self._digest} was cancelled")
        rest = self._repository().stream(self._digest, self._at, verify=False)
        with self._lock:
            self._rest = rest
            is_cancelled = self._is_cancelled
        if is_cancelled:
            rest.cancel()

    def read(self, size: int = -1, /) -> bytes:
        """The next `size` bytes, fewer at the end only; all that are left when negative."""
        left = self._size_bytes - self._at if size < 0 else size
        data = bytearray(left)
        done = 0
        while done < left and (count := self.readinto(memoryview(data)[done:])):
            done += count
        return bytes(data[:done])

    def cancel(self) -> None:
        """Make the thread that reads fail soon; for another thread."""
        with self._lock:
            self._is_cancelled = True
            rest = self._rest
        if rest is not None:
            rest.cancel()
        else:
            registry_helper.shut(self._link)

    def close(self) -> None:
        """Close the connection; twice is safe."""
        with self._lock:
            self._is_closed = True
            rest = self._rest
        registry_helper.end(self._link)
        if rest is not None:
            rest.close()


def peek_digest(link: socket, version: str, limit_s: float) -> str:
    """The digest of the image that a name stands for, if the helper's first message has it in time.

    "" otherwise. The message stays, for whoever reads the link next.
    """
    end_s = time.monotonic() + limit_s
    link.settimeout(limit_s)
    with contextlib.suppress(OSError, ValueError, CorruptDataError):
        while time.monotonic() < end_s:
            data = link.recv(_MOST_PEEKED_BYTES, MSG_PEEK)
            length = int.from_bytes(data[: registry_helper.LENGTH_BYTES], sys.byteorder)
            body = data[registry_helper.LENGTH_BYTES :][:length]
            if not data or length > _MOST_PEEKED_BYTES - registry_helper.LENGTH_BYTES:
                return ""
            if len(data) > registry_helper.LENGTH_BYTES and len(body) == length:
                kind, name, fields, raw, media_type = marshal.loads(body)
                descriptor = Descriptor.parse(fields)
                _parse(raw, media_type, descriptor)
                return descriptor.digest if (kind, name) == (IMAGE, version) else ""
            time.sleep(_PEEK_POLL_S)  # the rest of it is on its way
    return ""


def _receive(link: socket) -> tuple[Any, ...]:
    """The helper's next message. Raises EOFError at the link's end, ValueError for no message."""
    length = int.from_bytes(_receive_exactly(link, registry_helper.LENGTH_BYTES), sys.byteorder)
    if length > MOST_MESSAGE_BYTES:
        raise ValueError("a message that has no end")
    message = marshal.loads(_receive_exactly(link, length))
    if not isinstance(message, tuple) or not message:
        raise ValueError("no message")
    return message


def _receive_exactly(link: socket, count: int) -> bytearray:
    data = bytearray(count)
    done = 0
    while done < count:
        received = link.recv_into(memoryview(data)[done:])
        if not received:
            raise EOFError
        done += received
    return data


def _parse(raw: bytes, media_type: str, descriptor: Descriptor) -> Manifest | Index:
    """A manifest, checked as the repository itself checks it."""
    what = f"the manifest {descriptor.digest}"
    if len(raw) != descriptor.size_bytes:
        raise CorruptDataError(f"{what} has {len(raw)} bytes, not {descriptor.size_bytes}")
    check_bytes(raw, descriptor.digest, what)
    return parse_manifest(raw, media_type, what)
