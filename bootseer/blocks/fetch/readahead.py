"""What to fetch before it is asked for: pure bookkeeping of one open handle's reads.

Three ways of reading are distinguished, in any mixture on one handle:

* forward streams, several at once (threads, ranks), with small gaps and reads slightly out of
  order: each gets a window ahead of it that grows fourfold as it is used up; a second read makes
  a stream, or the first one where it is long and begins at the first byte;
* visits near a stream (an archive's reader looks at the tail of an item, then goes back to its
  head, within `NEAR_BYTES`): they neither advance the stream nor end it;
* anything else is random and fetches nothing ahead.

All windows of all handles together stay within one `Share` of the fetcher's memory, since bytes
that are fetched ahead and evicted before they are read are fetched twice.
"""

from __future__ import annotations

import threading

NEAR_BYTES = 32 << 20
FOLLOWED_GAP_BYTES = 256 << 10
NEW_GAP_READS = 4  # of a stream seen once: what looks like its next read may be a coincidence
FIRST_READS = 32
FIRST_BYTES = (128 << 10, 2 << 20)
GROWTH = 4
# A reader that begins at an object's first byte with a read this long will read all of it.
WHOLE_BYTES = 1 << 20
STREAMS = 16

Span = tuple[int, int]


class Share:
    """The memory that all handles' windows have together; thread-safe."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._lock = threading.Lock()
        self._streams = 0

    @property
    def each_bytes(self) -> int:
        """What one stream may fetch ahead now."""
        return self.total_bytes // max(1, self._streams)

    def add(self, streams: int) -> None:
        """So many more (or fewer) streams are being followed."""
        with self._lock:
            self._streams += streams


class _Stream:
    __slots__ = ("ahead", "hits", "next", "start", "turn", "window")

    def __init__(self, start: int, end: int, turn: int) -> None:
        self.start = start
        self.next = end  # reads went up to here
        self.ahead = end  # fetching was asked for up to here
        self.window = 0
        self.hits = 0
        self.turn = turn  # when it was used last


class ReadAhead:
    """Follows the reads of one open handle; thread-safe. Close it to give its share back."""

    def __init__(self, size_bytes: int, share: Share, *, block_bytes: int = 1) -> None:
        self._size_bytes = size_bytes
        self._share = share
        self._block_bytes = block_bytes
        self._lock = threading.Lock()
        self._streams: list[_Stream] = []
        self._turn = 0

    def note(self, offset: int, length: int) -> list[Span]:
        """A read happens; returns the (offset, length) to prefetch at HOT priority, often none.

        Ranges end at block borders and are never asked for twice while their stream lives.
        """
        end = min(offset + length, self._size_bytes)
        if offset < 0 or end <= offset:
            return []
        with self._lock:
            return self._note(offset, end)

    def _note(self, offset: int, end: int) -> list[Span]:
        self._turn += 1
        stream = self._find(offset, end)
        if stream is None:
            stream = self._begin(offset, end)
            if offset or end < WHOLE_BYTES:
                return []
            stream.hits = 1
            return self._extend(stream, 2 * end)
        stream.turn = self._turn
        if end <= stream.next:
            return []
        read_bytes = end - stream.next
        stream.next = end
        stream.ahead = max(stream.ahead, end)
        stream.hits += 1
        return self._extend(stream, read_bytes)

    def _find(self, offset: int, end: int) -> _Stream | None:
        """The stream that this read continues or visits; None when it starts another."""
        visited = None
        for stream in self._streams:
            if stream.hits:
                gap = max(FOLLOWED_GAP_BYTES, stream.window // 4)
            else:
                gap = NEW_GAP_READS * (end - offset)
            if offset <= stream.next + gap and end > stream.next and offset >= stream.start:
                return stream
            low = max(stream.start, stream.next - NEAR_BYTES)
            if stream.hits and low <= offset and end <= stream.next:
                visited = stream
        return visited

    def _begin(self, offset: int, end: int) -> _Stream:
        stream = _Stream(offset, end, self._turn)
        self._streams.append(stream)
        if len(self._streams) > STREAMS:
            # A stream that was followed outlives many reads that led nowhere.
            self._drop(min(self._streams, key=lambda s: s.turn + 4 * STREAMS * min(s.hits, 8)))
        return stream

    def _drop(self, stream: _Stream) -> None:
        self._streams.remove(stream)
        if stream.window:
            self._share.add(-1)

    def _extend(self, stream: _Stream, read_bytes: int) -> list[Span]:
        if not stream.window:
            self._share.add(1)
            least, most = FIRST_BYTES
            stream.window = max(least, min(most, FIRST_READS * read_bytes), 2 * read_bytes)
        elif stream.ahead - stream.next > stream.window // 2:
            return []
        else:
            stream.window *= GROWTH
        stream.window = max(1, min(stream.window, self._share.each_bytes))
        goal = min(self._size_bytes, self._round_up(stream.next + stream.window))
        first = self._round_up(stream.ahead)
        stream.ahead = max(stream.ahead, goal)
        for other in sorted(self._streams, key=lambda s: s.start):
            if other is not stream and other.start <= first < other.ahead:
                first = self._round_up(other.ahead)  # it has that already
        if goal <= first:
            return []
        return [(first, goal - first)]

    def _round_up(self, position: int) -> int:
        return -(-position // self._block_bytes) * self._block_bytes

    def close(self) -> None:
        """Give the share back; twice is safe."""
        with self._lock:
            for stream in list(self._streams):
                self._drop(stream)
