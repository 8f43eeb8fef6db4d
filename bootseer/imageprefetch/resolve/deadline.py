"""One time limit for all that a mount asks of a registry while a job waits: the *first look*.

A registry that hangs, or sends a byte a second, is given up when the time of the whole look is
over, whichever request is under way, DNS look-ups included. A registry that is slow but alive is
not: a request made late still has `ANSWER_S`, up to `EXTRA_S` after the look's end, and a body may
take long as long as it brings `LEAST_BYTES_S` on average.

Calls that are given up go on in threads of their own, for which nothing waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

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
    """The time of one first look at the repository `place`; any number of threads may use it.

    It began at `begun_s` of the monotonic clock, or (0) begins now. `give_up` is called when a call
    is given up; `given_up` says whether one was.
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
        """What `call` returns; raises what it raises, and DeadlineError when the time is over."""
        now_s = time.monotonic()
        late_s = min(now_s + ANSWER_S, self._end_s + EXTRA_S)
        limit_s = max(self._end_s, late_s) - now_s

        def limited() -> T:
            # A registry that refuses must be the error reported, instead of the look's end.
            with retry.limited(limit_s):
                return call()

        return self._until(limited, lambda: max(self._end_s, late_s), what)

    def read(self, stream: BlobStream, size_bytes: int, what: str, *, whole: bool) -> bytearray:
        """The first `size_bytes` of a stream; with `whole` it must have no others.

        Raises DeadlineError when they come too slowly, and cancels the stream then.
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
    """A repository whose calls are within a first look, except for reads of `store`.

    `open_repository` gives the repository itself.
    """

    def __init__(self, open_repository: Callable[[], RepositoryReader], look: FirstLook) -> None:
        self._open, self._look = open_repository, look

    @property
    def store(self) -> Store:
        """As `RepositoryReader.store`."""
        return self._open().store

    def image(self, version: str, platform: Platform | None = None) -> tuple[Descriptor, Manifest]:
        """As `RepositoryReader.image`."""
        what = f"find the image {version}"
        return self._look.ask(lambda: self._open().image(version, platform), what)

    def referrers(self, digest: str, artifact_type: str = "") -> list[Descriptor]:
        """As `RepositoryReader.referrers`."""
        what = f"list the referrers of {digest}"
        return self._look.ask(lambda: self._open().referrers(digest, artifact_type), what)

    def manifest(self, descriptor: Descriptor | str) -> Manifest | Index:
        """As `RepositoryReader.manifest`."""
        digest = descriptor if isinstance(descriptor, str) else descriptor.digest
        what = f"read the manifest {digest}"
        return self._look.ask(lambda: self._open().manifest(descriptor), what)

    def blob(self, descriptor: Descriptor, *, limit_bytes: int) -> bytes:
        """As `RepositoryReader.blob`."""
        what = f"read {descriptor.digest}"
        if descriptor.size_bytes <= limit_bytes:
            try:
                with self.stream(descriptor.digest) as stream:
                    return bytes(self._look.read(stream, descriptor.size_bytes, what, whole=True))
            except CorruptDataError:
                pass  # another mirror may have the right bytes: ask each of them
        return self._look.ask(lambda: self._open().blob(descriptor, limit_bytes=limit_bytes), what)

    def stream(self, digest: str, offset: int = 0, *, verify: bool = True) -> BlobStream:
        """As `RepositoryReader.stream`; reading it is not bounded."""
        what = f"read {digest}"
        return self._look.ask(lambda: self._open().stream(digest, offset, verify=verify), what)

    def close(self) -> None:
        """Close the repository itself."""
        self._open().close()


class BackgroundCall(Generic[T]):
    """A call in a thread of its own; `start` begins it."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="image-ask", daemon=True)

    @classmethod
    def start(cls, call: Callable[[], T]) -> BackgroundCall[T]:
        """Begin a call."""
        background = cls(call)
        background._thread.start()
        return background

    def _run(self) -> None:
        try:
            self._results.append(self._call())
        except BaseException as error:  # it is raised in the thread that waits
            self._error = error

    def result(self, wait_s: float | None = None) -> T:
        """What the call returned; raises what it raised, DeadlineError when it takes longer."""
        self._thread.join(wait_s)
        if self._thread.is_alive():
            raise DeadlineError(f"no answer within {wait_s:g} s")
        if self._error is not None:
            raise self._error
        return self._results[0]
