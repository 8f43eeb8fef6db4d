"""Container starts whose checkpoint, or its store, is not what was expected."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from bootseer.blocks.link_turns import HOT, LinkTurns
from bootseer.stripedfs.write.put import put_into
from tests.support.labs.containers import LARGE, WAIT, ContainerLab
from tests.support.labs.registry_proxy import Gate
from tests.support.labs.web_servers import Request, nginx
from tests.support.mounts.checkpoints import content, put_bytes, store_of
from tests.support.waiting import until

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.debian("podman"),
    pytest.mark.debian("docker-registry"),
    pytest.mark.debian("busybox-static"),
]

SILENT_S = 60.0
"""Longer than all that a start may wait for a store."""
NEWER = content(len(LARGE), seed=7)


class Store(Gate):
    """FAKE: the lab's store, at a web server behind a proxy; it counts what it was asked."""

    def __init__(self, upstream: str) -> None:
        super().__init__(upstream)
        self.held: list[float] = []
        self.released = threading.Event()

    def hold(self, is_meant: Callable[[Request], bool], limit_s: float = SILENT_S) -> None:
        """Say nothing to some requests until `released`."""

        def wait(_: socket.socket, request: Request) -> bool | None:
            if is_meant(request) and not self.released.is_set():
                self.held.append(time.monotonic())
                self.released.wait(limit_s)
            return None

        self.rules.append(wait)


@contextlib.contextmanager
def store(lab: ContainerLab) -> Iterator[Store]:
    folder = lab.folder / "store"
    folder.mkdir()
    server = f"listen 127.0.0.1:PORT; root {folder};"
    with nginx(lab.folder / "nginx", server) as port, Store(f"127.0.0.1:{port}") as served:
        try:
            yield served
        finally:
            served.released.set()


def put(lab: ContainerLab, name: str, data: bytes, at_s: int) -> None:
    """Publish a checkpoint that was saved at some time."""
    put_bytes(store_of(lab.folder / "store"), name, data, lab.folder)
    for path in (lab.folder / "store").glob(f"{name}*"):
        os.utime(path, (at_s, at_s))


def configure(lab: ContainerLab, url: str, more: str) -> None:
    lab.configure(f'[checkpoint]\nurl = "{url}"\nto = "/ckpt"\n{more}')


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def is_stripe_of(name: str) -> Callable[[Request], bool]:
    return lambda request: (
        request.method == "GET"
        and f"/{name}.stripes/" in request.target
        and "/stripe-" in request.target
    )


LOAD = 'load = ["sh", "-c", "mkdir -p /ckpt; echo plain > /ckpt/model.pt"]\n'


def count_requests(lab: ContainerLab, ref: str, served: Store) -> int:
    """How many requests a mount of the store's `model.pt` takes."""
    put(lab, "model.pt", LARGE, 100)
    configure(lab, f"http://{served.authority}/model.pt", f'{LOAD}prefetch = ""\n')
    assert lab.run(ref, "echo", "job")[0] == "job\n"
    (end,) = lab.ends("checkpoint.load")
    assert end["attributes"]["bootseer.form"] == "mount"
    return len(served.requests)


def test_a_store_that_falls_silent_while_it_is_mounted_costs_seconds(lab: ContainerLab) -> None:
    """From the last request on by which it is mounted."""
    ref = lab.publish()
    with store(lab) as served:
        answered = 2 * count_requests(lab, ref, served) - 1
        served.hold(lambda _: len(served.requests) > answered)
        out, error = lab.run(ref, "cat", "/ckpt/model.pt")
        took_s = time.monotonic() - served.held[0]
    assert out == "plain\n"
    assert took_s < 5 + 8  # of which the container takes some
    assert "cannot look at" in error
    _, failed, plain = (end["attributes"] for end in lab.ends("checkpoint.load"))
    assert failed["error.type"] == "DeadlineError"
    assert "no answer for" in plain["bootseer.reason"]


def test_a_store_that_falls_silent_once_it_is_mounted_keeps_no_job_from_beginning(
    lab: ContainerLab,
) -> None:
    ref = lab.publish()
    with store(lab) as served:
        answered = 2 * count_requests(lab, ref, served)
        configure(lab, f"http://{served.authority}/model.pt", LOAD)
        served.hold(lambda _: len(served.requests) > answered)
        out, _ = lab.run(ref, "echo", "job")
        took_s = time.monotonic() - served.held[0]
    assert out == "job\n"
    assert took_s < 10  # it waits for nothing of it
    forms = [end["attributes"]["bootseer.form"] for end in lab.ends("checkpoint.load")]
    assert forms == ["mount", "mount"]


def test_a_wrong_guess_is_dropped_and_never_waited_for(lab: ContainerLab) -> None:
    """The bytes of what was guessed come only after the job has read all of the other one."""
    ref = lab.publish()
    run = lab.folder / "run"
    run.mkdir()
    (run / "step-1").write_bytes(LARGE)
    (run / "step-2").write_bytes(NEWER)
    with store(lab) as served:
        put_into(store_of(lab.folder / "store"), "run", str(run))
        configure(lab, f"http://{served.authority}/run", 'prefetch = "step-*"\n')
        served.hold(lambda request: request.method == "GET" and "step-2" in request.target)
        with lab.begun(ref, f"{WAIT}sha256sum /ckpt/step-1") as job:
            until(lambda: served.held, "the guess is being fetched", limit_s=60)
            (lab.log / "go").touch()
            assert job.stdout is not None
            assert job.stdout.readline() == f"{digest(LARGE)}  /ckpt/step-1\n"
            assert not served.released.is_set()
            assert job.wait(60) == 0
        (end,) = until(lambda: lab.ends("checkpoint.prefetch"), "the prefetch has ended")
    assert (end["status"], end["attributes"]["bootseer.bytes"]) == ("fallback", 0)
    reason = end["attributes"]["bootseer.reason"]
    assert reason == "the job loads step-1, not what was expected (step-*)"


@pytest.mark.parametrize("how", ["pointer", "pattern", "same name"])
def test_a_checkpoint_published_while_the_last_one_is_fetched_is_read_unmixed(
    lab: ContainerLab, how: str
) -> None:
    """The first one's bytes are held up, as by an image's, until the second one is there."""
    ref = lab.publish()
    prefetch = {"pointer": "@latest", "pattern": "step-*", "same name": "step-1"}[how]
    if how == "pointer":
        find = "name=$(cat /ckpt/latest)"
    else:
        find = "for path in /ckpt/step-*; do name=${path##*/}; done"
    newer = "step-1" if how == "same name" else "step-2"
    folder = lab.folder / "store"
    put(lab, "step-1", LARGE, 100)
    (folder / "latest").write_text("step-1\n")
    configure(lab, f"file://{folder}", f'prefetch = "{prefetch}"\n')
    with (
        LinkTurns.of(str(lab.runtime)) as turns,
        turns.holding(HOT),
        lab.begun(ref, f"{WAIT}{find}; sha256sum /ckpt/$name") as job,
    ):
        until(lambda: is_fetching(lab), "the last one is to be fetched", limit_s=60)
        put(lab, newer, NEWER, 200)
        (folder / "latest").write_text(f"{newer}\n")
        assert lab.ends("checkpoint.prefetch") == []  # it struck
        (lab.log / "go").touch()
        assert job.stdout is not None
        right = (f"{digest(LARGE)}  /ckpt/step-1\n", f"{digest(NEWER)}  /ckpt/{newer}\n")
        assert job.stdout.read() in right
        assert job.wait(60) == 0
    out, _ = lab.run(ref, "sh", "-c", f"{find}; sha256sum /ckpt/$name")
    assert out == f"{digest(NEWER)}  /ckpt/{newer}\n"


def is_fetching(lab: ContainerLab) -> bool:
    begins = [e for e in lab.written() if e["event"] == "begin"]
    return any(event["name"] == "checkpoint.prefetch" for event in begins)
