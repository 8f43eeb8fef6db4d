"""A store in a directory whose file system may hang: other processes make its requests.

A thread that waits for a FUSE server, or for some network file systems, keeps its process from
ending and from becoming the job. A process that waits can be left behind.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator

from bootseer.errors import DeadlineError
from bootseer.storage.local import LocalStore
from bootseer.storage.store import Stat
from bootseer.system.blocking_calls import call_in_process

REST_S = 10.0
"""How long a store is not asked again after a request that it did not answer. Longer than all that
a start asks at its end, shorter than other nodes wait before they consider its lease expired."""


class IsolatedStore(LocalStore):
    """`LocalStore` whose requests are answered within `limit_s` seconds or raise DeadlineError.

    After that each further request raises it at once, for `REST_S`. This holds for the requests
    that snapshots make; `read_range`, `read_scatter`, `writer` and what copies or removes whole
    trees are not isolated.
    """

    def __init__(self, root: str, limit_s: float) -> None:
        super().__init__(root)
        self._plain = LocalStore(root)
        self._limit_s = limit_s
        self._rests_until_s = 0.0

    def stat(self, name: str) -> Stat:
        return _decode_stats(self._ask(lambda: _encode_stats([self._plain.stat(name)])))[0]

    def list(self, folder: str) -> Iterator[Stat]:
        yield from _decode_stats(self._ask(lambda: _encode_stats(self._plain.list(folder))))

    def temporaries(self, folder: str) -> Iterator[Stat]:
        yield from _decode_stats(self._ask(lambda: _encode_stats(self._plain.temporaries(folder))))

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        return self._ask(lambda: self._plain.read(name, limit_bytes=limit_bytes))

    def create(self, name: str, data: bytes, *, durable: bool = True) -> bool:
        # A lease begins with this request and later makes others from a thread of its own, each by
        # a fork. Modules that hook into forks are imported before: imported during such a fork,
        # their hook for afterwards would run without the one for before.
        import concurrent.futures.thread  # noqa: F401 - and logging with it

        return bool(self._ask(lambda: b"y" * self._plain.create(name, data, durable=durable)))

    def replace(self, name: str, data: bytes, *, durable: bool = True) -> None:
        self._do(lambda: self._plain.replace(name, data, durable=durable))

    def rename(self, old: str, new: str) -> None:
        self._do(lambda: self._plain.rename(old, new))

    def delete(self, name: str) -> None:
        self._do(lambda: self._plain.delete(name))

    def mkdir(self, folder: str) -> None:
        self._do(lambda: self._plain.mkdir(folder))

    def _do(self, action: Callable[[], None]) -> None:
        def act() -> bytes:
            action()
            return b""

        self._ask(act)

    def _ask(self, question: Callable[[], bytes]) -> bytes:
        if time.monotonic() < self._rests_until_s:
            raise DeadlineError(f"{self.url} did not answer for {self._limit_s:g} s")
        try:
            return call_in_process(question, self._limit_s, self.url)
        except DeadlineError:
            self._rests_until_s = time.monotonic() + REST_S
            raise


def _encode_stats(stats: Iterator[Stat] | list[Stat]) -> bytes:
    rows = [(s.name, s.size_bytes, s.mtime_s, s.is_folder, s.version) for s in stats]
    return json.dumps(rows).encode()


def _decode_stats(answer: bytes) -> list[Stat]:
    return [Stat(*row) for row in json.loads(answer)]
