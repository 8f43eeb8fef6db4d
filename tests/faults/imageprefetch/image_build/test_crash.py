"""Builds that are killed, cut and begun again: what is there is used, the result is the same."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bootseer.imageprefetch.image_build.builder import BuildReport, BuildSettings, build_image
from bootseer.storage.oci import media_types
from bootseer.storage.oci.open import open_repository
from tests.support.labs.registry_proxy import Gate, Halves, isolate
from tests.support.labs.web_servers import head
from tests.support.samples.images import Image, Layer, file, write_layout

pytestmark = [pytest.mark.slow, pytest.mark.debian("docker-registry")]


def pushed(registry: Any, folder: Path, name: str, image: Image) -> str:
    made = write_layout(folder / "layout", image, tag="1")
    options = "--preserve-digests"  # skopeo compresses layers otherwise
    return str(registry.push(made.source, f"imagebuild/{name}", "1", options=options))


def build(ref: str, folder: Path, **settings: Any) -> BuildReport:
    return build_image(BuildSettings(ref=ref, cache_dir=str(folder / "cache"), **settings))


@contextlib.contextmanager
def start_build(ref: str, folder: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A build's command at work, over the same cache as `build`; ended at the end."""
    command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "bootseer", "image", "build"]
    environment = {**os.environ, "BOOTSEER_CACHE": str(folder / "cache")}
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([*command, *words, ref], env=environment, **silent)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def halfway(
    registry: Any, ref: str, folder: Path
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A build's command that waits for the other half of a layer, and where the first half is."""
    with Gate(registry.host) as gate:
        halves = Halves(gate, "/blobs/", least_bytes=1 << 20)
        gate.rules = [halves.rule]
        with start_build(ref.replace(registry.host, gate.authority), folder) as process:
            assert halves.is_halfway()
            part = wait_for_part(folder / "cache/images/build")
            assert process.poll() is None
            yield process, part
        halves.cut()


def test_a_killed_build_goes_on_with_the_layers_it_has(
    own_registry: Callable[..., Any], tmp_path: Path
) -> None:
    registry = own_registry()
    large = [file("large", os.urandom(48 << 20))]
    ref = pushed(registry, tmp_path, "killed", Image([Layer(large, compression="none")]))
    with halfway(registry, ref, tmp_path) as (process, part):
        process.kill()
        assert process.wait() == -signal.SIGKILL
    kept = part.stat().st_size
    asked = len(registry.requests())
    report = build(ref, tmp_path)
    assert report.built
    assert 1 << 20 <= kept <= report.layers_bytes // 2
    sent = [r.sent_bytes for r in registry.requests()[asked:] if "/blobs/" in r.path]
    assert 0 < max(sent) <= report.layers_bytes - kept


def test_a_registry_that_restarts_meanwhile_holds_no_build_up(
    own_registry: Callable[..., Any], tmp_path: Path
) -> None:
    """Half of a layer has come when it dies; the build asks in vain until it is back."""
    registry = own_registry()
    large = [file("large", os.urandom(32 << 20))]
    ref = pushed(registry, tmp_path, "restarted", Image([Layer(large, compression="none")]))
    refused = threading.Event()

    def told(sock: Any, request: Any) -> bool:
        try:
            return gate.forward(sock, request)
        except OSError:
            refused.set()
            raise

    with Gate(registry.host) as gate, ThreadPoolExecutor(1) as pool:
        halves = Halves(gate, "/blobs/", least_bytes=1 << 20)
        gate.rules = [halves.rule, told]
        under_way = pool.submit(build, ref.replace(registry.host, gate.authority), tmp_path)
        try:
            assert halves.is_halfway()
            registry.stop()
            halves.cut()
            assert refused.wait(60), "the registry was asked for nothing while it was away"
            assert not under_way.done()
        finally:
            registry.restart()
        assert under_way.result().built


def test_who_interrupts_a_build_need_not_wait_for_a_registry_that_hangs(
    own_registry: Callable[..., Any], tmp_path: Path
) -> None:
    registry = own_registry()
    large = [file("large", os.urandom(48 << 20))]
    ref = pushed(registry, tmp_path, "hanging", Image([Layer(large, compression="none")]))
    with halfway(registry, ref, tmp_path) as (process, part):
        size = -1
        while size != (size := part.stat().st_size):
            time.sleep(0.3)  # until what was on its way has arrived
        assert process.poll() is None
        assert size < 25 << 20  # the other half is waited for
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130


@pytest.mark.parametrize("compression", ["gzip", "zstd", "none"])
def test_a_layer_that_a_mirror_spoils_comes_from_the_registry(
    registry: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str
) -> None:
    isolate(tmp_path, monkeypatch)
    members = [file(f"f{n}", os.urandom(100_000)) for n in range(20)]
    name = f"spoilt-{compression}"
    ref = pushed(registry, tmp_path, name, Image([Layer(members, compression=compression)]))
    with Gate(registry.host) as mirror, Gate(registry.host) as origin:
        hosts = tmp_path / "certs.d" / origin.authority / "hosts.toml"
        hosts.parent.mkdir(parents=True)
        hosts.write_text(f'[host."http://{mirror.authority}"]\n')

        def flip(sock: Any, request: Any) -> bool | None:
            if "/blobs/" not in request.target or request.method != "GET":
                return None
            status, reason, headers, body = mirror.ask(request)
            spoiled = bytearray(body)
            if len(body) > 1_000_000:  # the layer, and nothing that is checked at once
                spoiled[len(spoiled) // 2] ^= 1
                flipped.append(request.target)
            sock.sendall(head(f"{status} {reason}", **headers) + spoiled)
            return True

        flipped: list[str] = []
        mirror.rules = [flip]
        report = build(ref.replace(registry.host, origin.authority), tmp_path)
        assert report.built
        assert flipped
    assert build(ref, tmp_path / "other", rebuild=True).block_image == report.block_image


def wait_for_part(folder: Path) -> Path:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            for part in folder.glob("sha256-*/sha256-*"):
                if part.stat().st_size >= 1 << 20:
                    return part
        time.sleep(0.002)
    raise AssertionError("the build did not begin to fetch")


def written(folder: Path) -> list[tuple[int, int]]:
    """What builds have written: each data file's size and time."""
    found = []
    for path in sorted(folder.glob("*/data")):
        with contextlib.suppress(FileNotFoundError):
            found.append((path.stat().st_size, path.stat().st_mtime_ns))
    return found


def kill_and_build(registry: Any, folder: Path, kills: int) -> None:
    """Kill so many builds at work; the next one after all of them gives the right block image."""
    rng = random.Random(5)
    members = [file(f"f{n}", rng.randbytes(rng.randrange(1 << 20))) for n in range(24)]
    image = Image([members[:12], members[12:]])
    wanted = build(pushed(registry, folder, "reference", image), folder / "reference")
    ref = pushed(registry, folder, "crashed", image)
    begun, killed = folder / "cache/images/build", 0
    for _ in range(20 * kills):
        if killed == kills:
            break
        left = written(begun)
        with start_build(ref, folder, "--rebuild") as process:
            while written(begun) == left:
                assert process.poll() is None, "the build ended before it began"
                time.sleep(0.002)
            time.sleep(rng.random() * 0.6)
        assert process.returncode in (0, -signal.SIGKILL)
        killed += process.returncode == -signal.SIGKILL
    assert killed == kills, "builds end too early to be killed"
    assert build(ref, folder).block_image == wanted.block_image
    with open_repository(ref)[0] as repository:
        found = repository.referrers(wanted.subject, media_types.BLOCK_IMAGE)
        assert [one.digest for one in found] == [wanted.block_image]
        for layer in repository.manifest(wanted.block_image).layers:
            with repository.stream(layer.digest) as stream:  # which checks its digest
                while stream.read(1 << 20):
                    pass


def test_builds_killed_at_any_moment(registry: Any, tmp_path: Path) -> None:
    kill_and_build(registry, tmp_path, 3)


@pytest.mark.soak
def test_many_builds_killed_at_any_moment(registry: Any, tmp_path: Path) -> None:
    kill_and_build(registry, tmp_path, 60)
