"""The first look at a registry, which a job waits for: bounded as a whole, not request by request.

A registry that hangs, or sends a byte a second, is given up when the time of the whole look is
over, whichever request it is at, names that are looked up included. A registry that is slow but
alive is not: an answer that is asked for late still has `ANSWER_S`, up to `EXTRA_S` after the
look's end, and a body may take as long as `LEAST_BYTES_S` come in the mean.

Calls that are given up stay behind in threads of their own, and nothing waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from bootseer.context_managers import Closing
from bootseer.errors import CorruptDataError, DeadlineError
from bootseer.storage import retry
from bootseer.storage.bounded_calls import call_until

if TYPE_CHECKING:
    from bootseer.storage.oci.manifest import Descriptor, Index, Manifest, Platform
    from bootseer.storage.oci.repository import BlobStream, RepositoryReader
    from bootseer.storage.store import Store

ANSWER_S = 1.5
EXTRA_S = 6.0
LEAST_BYTES_S = 32 << 10

T = TypeVar("T")


class FirstLook:
    """The time of one first look at `place`; any number of threads may use it.

    It began at `begun_s` of the monotonic clock, or (0) begins now. `give_up` is called when a call
    is left behind; `given_up` tells whether one was.
    """

    def __init__(
        self,
        place: str,
        limit_s: float,
        give_up: Callable[[], None],
        *,
        begun_s: float = 0.0,
    ) -> None:
        self._place, self.limit_s, self._give_up = place, limit_s, give_up
        self._end_s = (begun_s or time.monotonic()) + limit_s
        self.given_up = False

    def restart(self) -> None:
        """Begin another look with the whole time."""
        self._end_s = time.monotonic() + self.limit_s
        self.given_up = False

    def ask(self, call: Callable[[], T], what: str) -> T:
        """What `call` returns. Raises DeadlineError when its time is over, and what it raises."""
        now_s = time.monotonic()
        late_s = min(now_s + ANSWER_S, self._end_s + EXTRA_S)
        limit_s = max(self._end_s, late_s) - now_s

        def tried() -> T:
            # So that the error of a registry that refuses is the cause, and not the look's end.
            with retry.limited(limit_s):
                return call()

        return self._until(tried, lambda: max(self._end_s, late_s), what)

    def read(self, stream: BlobStream, size_bytes: int, what: str, *, whole: bool) -> bytearray:
        """The first bytes of a stream; all that it has, checked to their end, when `whole`.

        Raises DeadlineError when they come too slowly: the stream is cancelled then.
        """
        data, received = bytearray(size_bytes), 0
        begun_s = time.monotonic()

        def receive() -> None:
            nonlocal received
            view = memoryview(data)
            while received < size_bytes:
                count = stream.readinto(view[received:])
                if not count:
                    raise CorruptDataError(
                        f"cannot {what}: it has {received} bytes instead of {size_bytes}"
                    )
                received += count
            if whole and stream.readinto(memoryview(bytearray(1))):
                raise CorruptDataError(f"cannot {what}: it has more than {size_bytes} bytes")

        def end_s() -> float:
            return max(self._end_s, begun_s + ANSWER_S + received / LEAST_BYTES_S)

        try:
            self._until(receive, end_s, what)
        except DeadlineError:
            stream.cancel()
            raise
        return data

    def _until(self, call: Callable[[], T], end_s: Callable[[], float], what: str) -> T:
        late = (
            f"cannot {what}: {self._place} has not given all that a mount asks for within "
            f"{self.limit_s:g} s; its registry hangs or is too slow"
        )
        try:
            return call_until(call, end_s, late)
        except DeadlineError:
            if time.monotonic() >= end_s():
                self.given_up = True
                self._give_up()
            raise


class BoundedRepository(Closing):
    """What a mount asks of a repository, within a first look; `store` alone is not bounded.

    `opened` gives the repository itself.
    """

    def __init__(self, opened: Callable[[], RepositoryReader], look: FirstLook) -> None:
        self._opened, self._look = opened, look

    @property
    def store(self) -> Store:
        """As `RepositoryReader.store`, for as long as a reader may wait."""
        return self._opened().store

    def image(self, version: str, platform: Platform | None = None) -> tuple[Descriptor, Manifest]:
        """As `RepositoryReader.image`."""
        what = f"find the image {version}"
        return self._look.ask(lambda: self._opened().image(version, platform), what)

    def referrers(self, digest: str, artifact_type: str = "") -> list[Descriptor]:
        """As `RepositoryReader.referrers`."""
        what = f"list the referrers of {digest}"
        return self._look.ask(lambda: self._opened().referrers(digest, artifact_type), what)

    def manifest(self, descriptor: Descriptor | str) -> Manifest | Index:
        """As `RepositoryReader.manifest`."""
        digest = descriptor if isinstance(descriptor, str) else descriptor.digest
        what = f"read the manifest {digest}"
        return self._look.ask(lambda: self._opened().manifest(descriptor), what)

    def blob(self, descriptor: Descriptor, *, limit_bytes: int) -> bytes:
        """As `RepositoryReader.blob`."""
        what = f"read {descriptor.digest}"
        if descriptor.size_bytes <= limit_bytes:
            try:
                with self.stream(descriptor.digest) as stream:
                    return bytes(self._look.read(stream, descriptor.size_bytes, what, whole=True))
            except CorruptDataError:
                pass  # another mirror may have the right bytes: ask each of them
        return self._look.ask(
            lambda: self._opened().blob(descriptor, limit_bytes=limit_bytes), what
        )

    def stream(self, digest: str, offset: int = 0, *, verify: bool = True) -> BlobStream:
        """As `RepositoryReader.stream`; what is read of it is not bounded here."""
        what = f"read {digest}"
        return self._look.ask(lambda: self._opened().stream(digest, offset, verify=verify), what)

    def close(self) -> None:
        """Close the repository itself."""
        self._opened().close()
