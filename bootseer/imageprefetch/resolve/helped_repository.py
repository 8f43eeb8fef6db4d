"""A repository whose first answers a helper process has asked for already."""

from __future__ import annotations

import marshal
import sys
import threading
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
"""The longest wait for the helper's next message or byte; then the registry is asked from here.

Longer than a helper waits for a byte: one that is alive knows sooner than we do what is slow."""
MOST_MESSAGE_BYTES = 64 << 20


class HelpedRepository(Closing):
    """What a mount's server asks of a `Repository`, answered by a helper where that can.

    `open_repository` opens the repository itself, for all that the helper does not know; nothing
    is imported for it, nor asked, before that. Any number of threads may use it.
    """

    def __init__(self, link: socket, open_repository: Callable[[], Repository]) -> None:
        self._link, self._open = link, open_repository
        self._link.settimeout(PATIENCE_S)
        self._lock = threading.Lock()
        self._repository: Repository | None = None
        self._answers: dict[tuple[str, str], tuple[Any, ...]] = {}
        self._link_lock = threading.Lock()
        self._listening = True  # more answers may come
        self._ready = self._streams = False

    @property
    def repository(self) -> Repository:
        """The repository itself; opened at its first use."""
        with self._lock:
            if self._repository is None:
                self._repository = self._open()
            return self._repository

    @property
    def store(self) -> Store:
        """Its blobs, which the helper knows nothing of."""
        return self.repository.store

    def image(self, version: str, platform: Platform | None = None) -> tuple[Descriptor, Manifest]:
        """As `Repository.image`."""
        answer = self._answer(IMAGE, version) if platform is None else None
        if answer is None:
            return self.repository.image(version, platform)
        told, raw, media_type = answer
        descriptor = Descriptor.parse(told)
        manifest = _parsed(raw, media_type, descriptor)
        if not isinstance(manifest, Manifest):
            return self.repository.image(version)
        return descriptor, manifest

    def referrers(self, digest: str, artifact_type: str = "") -> list[Descriptor]:
        """As `Repository.referrers`."""
        answer = self._answer(REFERRERS, digest) if not artifact_type else None
        if answer is None:
            return self.repository.referrers(digest, artifact_type)
        return [Descriptor.parse(one) for one in answer[0]]

    def manifest(self, descriptor: Descriptor | str) -> Manifest | Index:
        """As `Repository.manifest`."""
        digest = descriptor if isinstance(descriptor, str) else descriptor.digest
        answer = self._answer(MANIFEST, digest)
        if answer is None:
            return self.repository.manifest(descriptor)
        raw, media_type = answer
        size_bytes = len(raw) if isinstance(descriptor, str) else descriptor.size_bytes
        return _parsed(raw, media_type, Descriptor(media_type, digest, size_bytes))

    @property
    def answers(self) -> bool:
        """Whether the helper is there still, or has said all that it knows."""
        return self._listening or self._ready

    def config(self, digest: str) -> bytes | None:
        """An image's config with this digest, where the helper has it in time."""
        answer = self._answer(CONFIG, digest)
        if answer is None or digest_of(answer[0]) != digest:
            return None
        raw: bytes = answer[0]
        return raw

    def blob(self, descriptor: Descriptor, *, limit_bytes: int) -> bytes:
        """As `Repository.blob`."""
        return self.repository.blob(descriptor, limit_bytes=limit_bytes)

    def stream(self, digest: str, offset: int = 0, *, verify: bool = True) -> BlobStream:
        """As `Repository.stream`; the first unverified one from a blob's start is the helper's."""
        size_bytes = self._asked_for(digest) if not offset and not verify else -1
        if size_bytes < 0:
            return self.repository.stream(digest, offset, verify=verify)
        return HelpedStream(self._link, digest, size_bytes, lambda: self.repository)

    def dismiss(self) -> None:
        """End the helper unless it streams: nothing more is asked of it. Twice is safe."""
        with self._link_lock:
            self._listening = False
            if not self._streams:
                registry_helper.end(self._link)

    def cut(self) -> None:
        """End the helper, whichever thread waits for it; the registry is asked from here then."""
        registry_helper.shut(self._link)

    def close(self) -> None:
        """Let go of the repository and of the helper; the stream is closed by who has it."""
        self.dismiss()
        with self._lock:
            if self._repository is not None:
                self._repository.close()

    # --- the link --------------------------------------------------------------------------

    def _answer(self, kind: str, name: str) -> tuple[Any, ...] | None:
        """What the helper says of something; None where it does not know, or takes long."""
        with self._link_lock:
            while self._listening and (kind, name) not in self._answers:
                self._hear()
            return self._answers.get((kind, name))

    def _hear(self) -> None:
        """Take the helper's next message."""
        try:
            message = _received(self._link)
        except (OSError, ValueError, EOFError):  # it was killed, or is stuck
            self._listening = False
            registry_helper.end(self._link)
            return
        if message[0] == READY:
            self._listening, self._ready = False, True
        else:
            self._answers[message[0], message[1]] = message[2:]

    def _asked_for(self, digest: str) -> int:
        """Ask the helper for a blob; its size, or -1 where the helper cannot stream it."""
        with self._link_lock:
            while self._listening:
                self._hear()
            if not self._ready or self._streams:
                return -1
            self._ready = False
            try:
                self._link.sendall(f"{digest}\n".encode())
                kind, name, size_bytes = _received(self._link)
            except (OSError, ValueError, EOFError):
                registry_helper.end(self._link)
                return -1
            if (kind, name) != (STREAM, digest) or not isinstance(size_bytes, int):
                registry_helper.end(self._link)
                return -1
            self._streams = True
            return size_bytes


class HelpedStream(Closing):
    """`BlobStream` of what the helper passes on; where that ends early, read from the repository.

    One thread reads; any may cancel.
    """

    def __init__(
        self, link: socket, digest: str, size_bytes: int, repository: Callable[[], Repository]
    ) -> None:
        self._link, self._digest, self._size_bytes = link, digest, size_bytes
        self._repository = repository
        self._at = 0
        self._rest: BlobStream | None = None
        self._lock = threading.Lock()
        self._over = self._cancelled = False

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole blob."""
        return self._size_bytes

    def readinto(self, view: memoryview, /) -> int:
        """Put the next bytes into `view`; how many, 0 at the end."""
        if self._over or not view or self._at == self._size_bytes:
            return 0
        if self._rest is None:
            # Never more than the blob: the link may be at anybody's mercy, the frames' digests not.
            count = self._passed_on(view[: self._size_bytes - self._at])
            if count:
                self._at += count
                return count
            self._go_on()
        assert self._rest is not None
        return self._rest.readinto(view)

    def _passed_on(self, view: memoryview) -> int:
        try:
            return self._link.recv_into(view)
        except OSError:  # it takes long, or was cancelled
            return 0

    def _go_on(self) -> None:
        """Read on without the helper. Raises StoreUnavailableError when cancelled."""
        registry_helper.end(self._link)
        with self._lock:
            if self._cancelled or self._over:
                raise StoreUnavailableError(f"reading {self._digest} was cancelled")
        rest = self._repository().stream(self._digest, self._at, verify=False)
        with self._lock:
            self._rest = rest
            cancelled = self._cancelled
        if cancelled:
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
        """Make whoever reads fail soon; for another thread."""
        with self._lock:
            self._cancelled = True
            rest = self._rest
        if rest is not None:
            rest.cancel()
        else:
            registry_helper.shut(self._link)

    def close(self) -> None:
        """Let go of the connection; twice is safe."""
        with self._lock:
            self._over = True
            rest = self._rest
        registry_helper.end(self._link)
        if rest is not None:
            rest.close()


def _received(link: socket) -> tuple[Any, ...]:
    """The helper's next message. Raises EOFError at the link's end, ValueError for no message."""
    length = int.from_bytes(_exactly(link, registry_helper.LENGTH_BYTES), sys.byteorder)
    if length > MOST_MESSAGE_BYTES:
        raise ValueError("a message that has no end")
    message = marshal.loads(_exactly(link, length))
    if not isinstance(message, tuple) or not message:
        raise ValueError("no message")
    return message


def _exactly(link: socket, count: int) -> bytearray:
    data = bytearray(count)
    done = 0
    while done < count:
        more = link.recv_into(memoryview(data)[done:])
        if not more:
            raise EOFError
        done += more
    return data


def _parsed(raw: bytes, media_type: str, descriptor: Descriptor) -> Manifest | Index:
    """A manifest, checked as the repository itself does."""
    what = f"the manifest {descriptor.digest}"
    if len(raw) != descriptor.size_bytes:
        raise CorruptDataError(f"{what} has {len(raw)} bytes, not {descriptor.size_bytes}")
    check_bytes(raw, descriptor.digest, what)
    return parse_manifest(raw, media_type, what)
