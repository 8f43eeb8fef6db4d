"""The reply to a read and its bytes, in whichever order they come."""

from __future__ import annotations

import threading

import pytest

from bootseer.fuse.operations import Data, Reply
from bootseer.fuse.serve.pending_replies import PendingRead


class Sent:
    """A reply that keeps what was sent; each is sent once."""

    interrupted = False

    def __init__(self) -> None:
        self.got: list[object] = []

    def data(self, data: Data) -> None:
        self.got.append(b"".join(data.views))

    def error(self, number: int) -> None:
        self.got.append(number)


class Read(PendingRead):
    """Collects these in turn: bytes, None, or an error."""

    def __init__(self, *outcomes: bytes | Exception | None) -> None:
        super().__init__()
        self.outcomes = iter(outcomes)

    def collect(self) -> Data | None:
        outcome = next(self.outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return None if outcome is None else Data((outcome,))

    def fail(self, reply: Reply, error: Exception) -> None:
        reply.error(int(str(error)))


@pytest.mark.parametrize("first", ["reply", "bytes"])
@pytest.mark.parametrize(("outcome", "got"), [(b"x", b"x"), (ValueError("5"), 5)])
def test_the_reply_is_sent_once_both_are_there(
    first: str, outcome: bytes | Exception, got: object
) -> None:
    read, reply = Read(outcome), Sent()
    steps = [lambda: read.reply_by(reply), read.resume]
    for step in steps if first == "reply" else reversed(steps):
        assert reply.got == []
        step()
    assert reply.got == [got]


def test_it_waits_on_where_the_bytes_are_not_all_there() -> None:
    read, reply = Read(None, None, b"x"), Sent()
    read.resume()
    read.reply_by(reply)  # collects, as something came before it
    read.resume()
    assert reply.got == []
    read.resume()
    assert reply.got == [b"x"]


def test_of_two_threads_one_replies() -> None:
    for _ in range(300):
        read, reply = Read(b"x"), Sent()
        thread = threading.Thread(target=read.resume)
        thread.start()
        read.reply_by(reply)
        thread.join()
        assert reply.got == [b"x"]
