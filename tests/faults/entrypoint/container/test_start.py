"""Container starts to which something happens in the middle."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.labs.containers import (
    INSTALL,
    LARGE,
    SUM,
    ContainerLab,
    checkpoint,
    deps,
    times,
)
from tests.support.labs.cut_link import CutLink
from tests.support.labs.registry_proxy import Gate
from tests.support.labs.web_servers import Request, nginx
from tests.support.mounts.checkpoints import content, put_bytes, store_of
from tests.support.mounts.images import begun_with
from tests.support.mounts.tmpfs import tmpfs
from tests.support.samples.images import file, symlink
from tests.support.waiting import until

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.debian("podman"),
    pytest.mark.debian("docker-registry"),
    pytest.mark.debian("busybox-static"),
]

BIG = content(8_000_000, seed=1)
BIG_SUM = f"{hashlib.sha256(BIG).hexdigest()}  /opt/big\n"
SHOW = "cat /opt/new /opt/old/y; sha256sum /ckpt/model.pt"
SHOWN = f"new\ny\n{SUM}"


def through(ref: str, address: str) -> str:
    """The same image, asked for at another address."""
    return f"{address}/{ref.partition('/')[2]}"


def test_a_link_that_is_cut_in_the_middle_is_waited_for(lab: ContainerLab) -> None:
    ref = lab.publish(file("opt/big", BIG))
    upstream = urlsplit(f"//{ref}").netloc
    lab.configure(checkpoint(lab) + deps(lab))
    with CutLink(upstream, cut_after_bytes=2_000_000, cut_s=3.0) as link:
        ours = through(ref, link.address)
        out, _ = lab.run(ours, "sh", "-c", f"{SHOW}; sha256sum /opt/big")
        assert out == SHOWN + BIG_SUM
        assert link.cuts > 0
        lab.await_layers(ref)
        assert times(lab) == 1


SILENCE_S = 9.0
"""What a silent registry may cost: 5 s, and what the plain way takes. Its client's own limits, and
what the fake here says nothing for, are far longer."""


@contextlib.contextmanager
def served_checkpoint(
    lab: ContainerLab, *, cut_after_bytes: int, cut_s: float
) -> Iterator[CutLink]:
    """The lab's checkpoint at a web server behind a link that is cut; the settings name it."""
    text = checkpoint(lab, 'load = ["sh", "-c", "mkdir /ckpt; echo plain > /ckpt/model.pt"]\n')
    server = f"listen 127.0.0.1:PORT; root {lab.folder}/store; autoindex on;"
    with (
        nginx(lab.folder / "nginx", server) as port,
        CutLink(f"127.0.0.1:{port}", cut_after_bytes=cut_after_bytes, cut_s=cut_s) as link,
    ):
        lab.configure(text.replace(f"file://{lab.folder}/store", f"http://{link.address}"))
        yield link


def test_a_checkpoint_whose_link_is_cut_in_the_middle_is_waited_for(lab: ContainerLab) -> None:
    ref = lab.publish()
    with served_checkpoint(lab, cut_after_bytes=1_500_000, cut_s=3.0) as link:
        out, _ = lab.run(ref, "sha256sum", "/ckpt/model.pt")
        assert out == SUM
        assert link.cuts > 0
    (load,) = lab.ends("checkpoint.load")
    assert (load["status"], load["attributes"]["bootseer.form"]) == ("ok", "mount")
    (ahead,) = lab.ends("checkpoint.prefetch")
    assert (ahead["status"], ahead["attributes"]["bootseer.bytes"]) == ("ok", len(LARGE))


def test_a_checkpoint_whose_link_is_cut_for_good_is_loaded_plainly(lab: ContainerLab) -> None:
    """Before any of it has come: then its own command loads it."""
    ref = lab.publish()
    with served_checkpoint(lab, cut_after_bytes=1, cut_s=3600.0) as link:
        out, error = lab.run(ref, "cat", "/ckpt/model.pt")
        assert out == "plain\n"
        assert link.cuts > 0
    reason = f"cannot look at http://{link.address}/model.pt"
    assert f"checkpoint: {reason}" in error
    (fallback,) = [e for e in lab.ends("checkpoint.load") if e["status"] == "fallback"]
    assert reason in fallback["attributes"]["bootseer.reason"]


@pytest.mark.parametrize("what", ["manifests/bootseer-deps-", "manifests/1"])
def test_a_registry_that_says_nothing_is_not_waited_for(lab: ContainerLab, what: str) -> None:
    """Of the layer: then the install runs. Of the image, to us: then it is pulled."""
    ref = lab.publish()
    lab.configure(deps(lab))
    silent: list[float] = []
    speaks = threading.Event()
    with Gate(urlsplit(f"//{ref}").netloc) as gate:

        def say_nothing(_: socket.socket, request: Request) -> bool | None:
            is_ours = request.headers.get("user-agent", "").startswith("bootseer")
            if what not in request.target or not is_ours or speaks.is_set():
                return None
            silent.append(time.monotonic())
            speaks.wait(120)
            return False

        gate.rules.append(say_nothing)
        words = lab.words(through(ref, gate.authority), "cat", "/opt/new")
        with subprocess.Popen(
            words, env=lab.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as start:
            assert start.stdout is not None
            line = start.stdout.readline()
            runs_s = time.monotonic()
            speaks.set()
            _, error = start.communicate(timeout=120)
        assert (start.returncode, line) == (0, "new\n"), error
        if "deps" in what:  # what was installed is published all the same
            lab.await_layers(ref)
    assert silent
    assert runs_s - silent[0] < SILENCE_S
    hangs = "its registry hangs"
    if "deps" in what:
        (install,) = lab.ends("deps.install")
        assert install["status"] == "fallback"
        assert hangs in install["attributes"]["bootseer.reason"]
        assert "going on the plain way" in error
    else:
        (mount,), (fault,) = lab.ends("image.mount"), lab.ends("image.fault")
        assert (mount["status"], fault["status"]) == ("error", "fallback")
        assert hangs in fault["attributes"]["error.message"]
        assert "podman pulls the image" in error
    assert times(lab) == 1


def test_two_starts_at_once_on_one_node(lab: ContainerLab) -> None:
    ref = lab.publish()
    lab.configure(checkpoint(lab, f'cache = "{lab.cache}/checkpoints"\n') + deps(lab))
    words = lab.words(ref, "sh", "-c", SHOW)

    def both() -> None:
        started = [
            subprocess.Popen(words, env=lab.environment, stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        for process in started:
            out, _ = process.communicate(timeout=180)
            assert (process.returncode, out) == (0, SHOWN)

    both()
    lab.await_layers(ref)
    installs = times(lab)
    assert 1 <= installs <= 2
    until(lambda: len(lab.ends("deps.publish")) == installs, "all publishers have ended")
    both()
    assert times(lab) == installs
    assert [event for event in lab.written() if event["status"] != "ok"] == []
    # The mounts of each are seen in the other's container, which may keep files from being removed.
    until(lambda: lab.run(ref, "echo", "sweep") and not lab.left(), "all is swept")


def test_two_jobs_at_once_on_one_node(lab: ContainerLab) -> None:
    """Of other images and with other settings: each gets its own, and neither falls back."""
    ref = lab.publish()
    lab.configure(checkpoint(lab, f'cache = "{lab.cache}/checkpoints"\n') + deps(lab))
    both = [(lab.words(ref, "sh", "-c", SHOW), SHOWN)]
    lab.name, lab.settings = f"{lab.name}-b", lab.folder / "other.toml"
    other = lab.publish(file("opt/of-b", b"image b\n"))
    lab.configure(deps(lab, "echo installed >> /log/times; echo other > /opt/new"))
    both.append((lab.words(other, "cat", "/opt/new", "/opt/of-b"), "other\nimage b\n"))
    for _ in range(2):  # each installs, and then finds its layer
        started = [
            (subprocess.Popen(words, env=lab.environment, stdout=subprocess.PIPE, text=True), shown)
            for words, shown in both
        ]
        for process, shown in started:
            out, _ = process.communicate(timeout=180)
            assert (process.returncode, out) == (0, shown)
        for image in (ref, other):
            until(lambda image=image: len(lab.tags(image)) == 1, "its layer is published")
        until(lambda: len(lab.ends("deps.publish")) == 2, "both publishers have ended")
    assert times(lab) == 2
    assert [event for event in lab.written() if event["status"] != "ok"] == []
    until(lambda: lab.run(other, "echo", "sweep") and not lab.left(), "all is swept")


def test_a_checkpoint_that_is_published_anew_meanwhile_is_never_mixed(lab: ContainerLab) -> None:
    ref = lab.publish()
    newer = content(len(LARGE), seed=7)
    newer_sum = f"{hashlib.sha256(newer).hexdigest()}  /ckpt/model.pt\n"
    lab.configure(checkpoint(lab, f'cache = "{lab.cache}/checkpoints"\n'))
    job = "echo ready; while ! cat /log/go >/dev/null 2>&1; do sleep 0.1; done; "
    job += "sha256sum /ckpt/model.pt"
    words = lab.words(ref, "sh", "-c", job)
    with subprocess.Popen(words, env=lab.environment, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "ready\n"
        put_bytes(store_of(lab.folder / "store"), "model.pt", newer, lab.folder)
        (lab.log / "go").touch()
        assert first.stdout.read() in (SUM, newer_sum)
        assert first.wait(60) == 0
    out, _ = lab.run(ref, "sha256sum", "/ckpt/model.pt")
    assert out == newer_sum


@pytest.mark.parametrize("delay_s", [0.0, 0.2, 0.5])
def test_a_start_while_the_last_ones_processes_die(lab: ContainerLab, delay_s: float) -> None:
    ref = lab.publish()
    lab.configure(checkpoint(lab) + deps(lab))
    lab.run(ref, "echo", "so that there is a layer")
    lab.await_layers(ref)
    job = "echo ready; while ! cat /log/end >/dev/null 2>&1; do sleep 0.1; done"
    words = lab.words(ref, "sh", "-c", job)
    with subprocess.Popen(words, env=lab.environment, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "ready\n"
        dying = begun_with(f"BOOTSEER_RUNTIME={lab.runtime}")
        assert len(dying) > 3  # the command, the image's servers, the checkpoint's
        again = lab.words(ref, "sh", "-c", SHOW)
        with subprocess.Popen(
            again, env=lab.environment, stdout=subprocess.PIPE, text=True
        ) as second:
            time.sleep(delay_s)
            for process in dying:
                os.kill(process, signal.SIGKILL)
            out, _ = second.communicate(timeout=120)
            assert (second.returncode, out) == (0, SHOWN)
    (lab.log / "end").touch()  # the first one's container has nobody left to end it
    until(lambda: lab.run(ref, "echo", "sweep") and not lab.left(), "all is swept")


def test_a_full_cache_starts_the_plain_way(lab: ContainerLab) -> None:
    ref = lab.publish()
    with tmpfs(lab.cache, "4m"):
        lab.configure(checkpoint(lab, f'cache = "{lab.cache}/checkpoints"\n') + deps(lab))
        out, error = lab.run(ref, "sh", "-c", SHOW)
        assert out == SHOWN
        assert "MiB left" in error
        *_, event = lab.ends("deps.install")
        assert event["status"] == "fallback"
        assert "make room there" in event["attributes"]["bootseer.reason"]
        until(lambda: not begun_with(f"BOOTSEER_RUNTIME={lab.runtime}"), "its servers have ended")
    assert times(lab) == 1


@contextlib.contextmanager
def small_disk(folder: Path, image: Path) -> Iterator[None]:
    """An ext4 on a loop device at a new folder, just large enough for a layer to be tried."""
    with open(image, "wb") as file:
        file.truncate(1300 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
    folder.mkdir()
    subprocess.run(["mount", "-o", "loop", image, folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)
        image.unlink()


FILLS = "busybox fallocate -l 1100M /opt/most && head -c 200000000 /dev/zero > /opt/rest || exit 28"


def test_a_disk_that_fills_up_in_the_middle_of_an_install(lab: ContainerLab) -> None:
    """It runs again plainly, in a container that does not write to that disk."""
    ref = lab.publish(symlink("bin/head", "busybox"))
    with small_disk(lab.cache, lab.folder / "disk"):
        lab.configure(deps(lab, f"echo run >> /log/times; {FILLS}; echo new > /opt/new"))
        out, error = lab.run(ref, "cat", "/opt/new")
        assert out == "new\n"
        assert error.count("head: ") == 1  # its fault struck once
        reason = "the install for the layer ended with exit code 28 (the disk of its cache has "
        assert f"deps: {reason}" in error
        first, second = lab.ends("deps.install")
        assert (first["status"], first["attributes"]["process.exit.code"]) == ("error", 28)
        assert second["status"] == "fallback"
        assert second["attributes"]["bootseer.reason"].startswith(reason)
        assert times(lab) == 2
        assert lab.tags(ref) == []
        until(lambda: not begun_with(f"BOOTSEER_RUNTIME={lab.runtime}"), "its servers have ended")
        (disk,) = lab.left()  # nothing but its own mount
        assert f" {lab.cache} " in disk


def test_a_disk_that_fills_up_while_a_layer_is_published(lab: ContainerLab) -> None:
    """The job has its dependencies, and the next start makes the layer."""
    begun, goes_on = threading.Event(), threading.Event()
    ref = lab.publish(symlink("bin/head", "busybox"))
    lab.configure(deps(lab, f"{INSTALL}; head -c 3000000 /dev/urandom > /opt/large"))

    def hold(_: socket.socket, request: Request) -> None:
        if request.method == "PUT" and "/manifests/" in request.target:
            begun.set()
            goes_on.wait(60)

    with small_disk(lab.cache, lab.folder / "disk"), Gate(lab.registry.host) as gate:
        gate.rules = [hold]
        ours = through(ref, gate.authority)
        out, _ = lab.run(ours, "cat", "/opt/new", "/opt/old/y")
        assert out == "new\ny\n"
        assert begun.wait(60)
        with contextlib.suppress(OSError), (lab.cache / "most").open("wb", 0) as file:
            while True:  # the layer is on the disk, and its block image is not
                file.write(bytes(1 << 20))
        disk = os.statvfs(lab.cache)
        assert disk.f_bavail * disk.f_frsize < 1 << 20
        goes_on.set()
        until(lambda: not begun_with(f"BOOTSEER_RUNTIME={lab.runtime}"), "its publisher has ended")
        (end, fault) = lab.ends("deps.publish")
        assert (end["status"], fault["status"]) == ("error", "fallback")
        assert "No space left" in fault["attributes"]["bootseer.reason"]
        assert lab.tags(ref) == []
        (lab.cache / "most").unlink()
        out, _ = lab.run(ours, "cat", "/opt/new", "/opt/old/y")
        assert (out, times(lab)) == ("new\ny\n", 2)
        until(lambda: lab.tags(ref), "the layer is published")
        until(lambda: not begun_with(f"BOOTSEER_RUNTIME={lab.runtime}"), "its servers have ended")
