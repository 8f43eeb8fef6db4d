"""`image run --config` on a node that has the image and its layer whole: no server comes up."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from bootseer.imageprefetch.image_cache import FRESH_S, ImageCache
from bootseer.imageprefetch.mount.complete_mount import KEEPER
from bootseer.storage.oci.open import open_repository
from tests.support.labs.containers import WAIT, ContainerLab, checkpoint, deps, times
from tests.support.labs.registry_proxy import Gate
from tests.support.labs.web_servers import Request
from tests.support.mounts.images import begun_with
from tests.support.processes import command_name
from tests.support.samples.images import file
from tests.support.waiting import until

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.debian("podman"),
    pytest.mark.debian("docker-registry"),
    pytest.mark.debian("busybox-static"),
]

SHOW = "cat /opt/new /opt/old/y"
SILENCE_S = 5.0 + 3.0
"""How long a job waits for a registry that says nothing: 5 s, and what a busy machine adds."""


@contextlib.contextmanager
def complete(lab: ContainerLab) -> Iterator[tuple[str, Gate]]:
    """A node that is warm, and the gate through which it asks the registry."""
    ref = lab.publish()
    lab.configure(checkpoint(lab) + deps(lab))
    with Gate(urlsplit(f"//{ref}").netloc) as gate:
        ref = f"{gate.authority}/{ref.partition('/')[2]}"
        warm = [sys.executable, "-m", "bootseer", "warm", "--config", str(lab.settings)]
        # The checkpoint has no cache here, and is not kept.
        subprocess.run(
            [*warm, "--image", ref, "--", "--volume", f"{lab.log}:/log"],
            env=lab.environment,
            check=False,
            timeout=180,
            capture_output=True,
        )
        lab.run(ref, "sh", "-c", SHOW)  # is recorded, as nothing is known of what starts read
        until(lambda: not begun_with(f"BOOTSEER_RUNTIME={lab.runtime}"), "all servers have ended")
        yield ref, gate


def modes(lab: ContainerLab) -> list[str]:
    return [event["attributes"]["bootseer.image.mode"] for event in lab.ends("image.mount")]


def ours(gate: Gate, begun: int) -> list[str]:
    """What bootseer has asked for since the request `begun`."""
    requests = gate.requests[begun:]
    mine = [r for r in requests if r.headers.get("user-agent", "").startswith("bootseer")]
    return [r.target.partition("/manifests/")[2] or r.target for r in mine]


def keepers(lab: ContainerLab) -> list[int]:
    return [
        pid
        for pid in begun_with(f"BOOTSEER_RUNTIME={lab.runtime}")
        if command_name(pid) == KEEPER.decode()
    ]


def states(lab: ContainerLab) -> list[Path]:
    """The folders of mounted images."""
    return [path for path in (lab.runtime / "images").iterdir() if path.is_dir()]


def test_the_registry_is_asked_for_the_name_alone(lab: ContainerLab) -> None:
    with complete(lab) as (ref, gate):
        before, begun = len(modes(lab)), len(gate.requests)
        out, error = lab.run(ref, "sh", "-c", SHOW)
        assert (out, times(lab)) == ("new\ny\n", 1)
        assert modes(lab)[before:] == ["complete", "complete"]
        assert ours(gate, begun) == ["1"]
        (line,) = error.splitlines()
        assert line.endswith("all of it is on this node's disk")
    install = lab.ends("deps.install")[-1]
    assert (install["status"], install["attributes"]["bootseer.form"]) == ("ok", "layer")


def test_a_name_that_stands_for_another_image_is_followed(lab: ContainerLab) -> None:
    with complete(lab) as (ref, _):
        lab.run(ref, "sh", "-c", SHOW)
        lab.publish(file("opt/base2", b"another image"))
        out, _ = lab.run(ref, "cat", "/opt/base2")
        assert out == "another image"


def asked_files(lab: ContainerLab) -> list[Path]:
    """What remembers when the registry was asked, of the image and of the layer."""
    return list(lab.cache.glob("images/sha256-*/asked-*"))


def test_what_the_registry_said_long_ago_is_asked_again(lab: ContainerLab) -> None:
    with complete(lab) as (ref, gate):
        files = asked_files(lab)
        assert len(files) == 2
        old_s = time.time() - FRESH_S - 1
        for path in files:
            os.utime(path, (old_s, old_s))
        begun = len(gate.requests)
        assert lab.run(ref, "sh", "-c", SHOW)[0] == "new\ny\n"
        assert any("referrers" in target for target in ours(gate, begun))
        until(lambda: all(path.stat().st_mtime > old_s + 1 for path in files), "both are asked for")


def test_a_layer_that_has_grown_old_is_asked_for(lab: ContainerLab) -> None:
    with complete(lab) as (ref, gate):
        begun = len(gate.requests)
        lab.configure(checkpoint(lab) + deps(lab) + "max_age_days = 0.0\n")
        assert lab.run(ref, "sh", "-c", SHOW)[0] == "new\ny\n"
        assert any("bootseer-deps-" in target for target in ours(gate, begun))
        assert times(lab) == 2
        lab.await_layers(ref)
        until(lambda: len(lab.ends("deps.publish")) == 1, "its publisher has ended")


def test_what_is_not_whole_is_asked_for_once(lab: ContainerLab) -> None:
    """The helper's answer is left to the server, which would ask once more."""
    with complete(lab) as (ref, gate):
        for mark in lab.cache.glob("blocks/*/sealed"):
            mark.unlink()
        begun = len(gate.requests)
        assert lab.run(ref, "sh", "-c", SHOW)[0] == "new\ny\n"
        assert modes(lab)[-2:] == ["lazy", "lazy"]
        assert ours(gate, begun).count("1") == 1


def test_a_silent_registry_costs_seconds(lab: ContainerLab) -> None:
    silent: list[float] = []
    speaks = threading.Event()

    def say_nothing(_: object, request: Request) -> bool | None:
        silent.append(time.monotonic())
        speaks.wait(60)
        return False

    with complete(lab) as (ref, gate):
        gate.rules.append(say_nothing)
        try:
            out, error = lab.run(ref, "sh", "-c", "cat /proc/uptime /opt/new")
        finally:
            speaks.set()
    assert silent
    up_s = float(out.split()[0])
    began_s = silent[0] - time.monotonic() + float(Path("/proc/uptime").read_text().split()[0])
    assert up_s - began_s < SILENCE_S
    assert out.endswith("new\n")
    assert "mounted from this node's cache" in error


def test_wrong_bytes_at_their_source_are_not_mounted_again(lab: ContainerLab) -> None:
    with complete(lab) as (ref, _):
        cache = ImageCache(str(lab.cache))
        with open_repository(ref)[0] as repository:
            digest = repository.image("1")[0].digest
        kept = cache.image(digest)
        assert kept is not None
        cache.condemn(digest, kept.block_image)
        out, error = lab.run(ref, "cat", "/opt/old/y")
        assert out == "y\n"
        assert "podman pulls the image" in error


def test_a_container_needs_no_keeper(lab: ContainerLab) -> None:
    with complete(lab) as (ref, _):
        with lab.begun(ref, WAIT + SHOW) as first:
            (keeper,) = keepers(lab)
            os.kill(keeper, signal.SIGKILL)
            (lab.log / "go").touch()
            out, _ = first.communicate(timeout=60)
            assert (first.returncode, out) == (0, "new\ny\n")
        assert lab.left() == []
        assert states(lab) == []
        (lab.log / "go").unlink()
        assert lab.run(ref, "sh", "-c", SHOW)[0] == "new\ny\n"


STRUCK = "/struck"
_STRIKE = f"""
import errno, os, signal, sys
from pathlib import Path
from bootseer.__main__ import main
from bootseer.imageprefetch.mount.server_registry import ServerFolder
struck, register = Path(os.environ["BOOTSEER_RUNTIME"] + "{STRUCK}"), ServerFolder.register
def strike(folder, record):
    if struck.exists():
        return register(folder, record)
    struck.write_text(Path("/proc/self/mountinfo").read_text())
    FAULT
ServerFolder.register = strike
sys.exit(main())
"""
FULL_DISK = 'raise OSError(errno.ENOSPC, "No space left on device")'
KILL = "os.kill(os.getpid(), signal.SIGKILL)"


def struck(lab: ContainerLab, fault: str, words: list[str]) -> subprocess.CompletedProcess[str]:
    """Fault injection: a command that `fault` strikes once, when it has mounted its image and is
    about to note that."""
    assert words[1:3] == ["-m", "bootseer"]
    done = lab.execute([words[0], "-c", _STRIKE.replace("FAULT", fault), *words[3:]])
    mounts = Path(f"{lab.runtime}{STRUCK}").read_text().splitlines()
    assert any(str(lab.runtime / "containers") in line and "erofs" in line for line in mounts)
    return done


def test_a_mount_that_cannot_be_noted_is_made_by_a_server(lab: ContainerLab) -> None:
    with complete(lab) as (ref, _):
        done = struck(lab, FULL_DISK, lab.words(ref, "sh", "-c", SHOW))
        assert (done.returncode, done.stdout) == (0, "new\ny\n"), done.stderr
        assert lab.left() == []
        until(lambda: states(lab) == [], "the image's state is removed")


def test_what_was_mounted_and_not_noted_is_swept(lab: ContainerLab) -> None:
    with complete(lab) as (ref, _):
        done = struck(lab, KILL, lab.words(ref, "sh", "-c", SHOW))
        assert done.returncode == -signal.SIGKILL
        assert lab.left() != []
        assert lab.run(ref, "sh", "-c", SHOW)[0] == "new\ny\n"
        until(lambda: lab.run(ref, "echo", "sweep") and not lab.left(), "all is swept")
        until(lambda: states(lab) == [], "its state is removed")


def test_two_starts_at_once_mount_the_image_each(lab: ContainerLab) -> None:
    with complete(lab) as (ref, gate):
        before, begun = len(modes(lab)), len(gate.requests)
        words = lab.words(ref, "sh", "-c", WAIT + SHOW)
        with contextlib.ExitStack() as stack:
            starts = [
                stack.enter_context(
                    subprocess.Popen(words, env=lab.environment, stdout=subprocess.PIPE, text=True)
                )
                for _ in range(2)
            ]
            stack.callback((lab.log / "go").touch)
            for start in starts:
                assert start.stdout is not None
                assert start.stdout.readline() == "ready\n"
            assert len(states(lab)) == 4  # an image and a layer each
            (lab.log / "go").touch()
            for start in starts:
                assert start.communicate(timeout=60)[0] == "new\ny\n"
                assert start.returncode == 0
        assert modes(lab)[before:] == ["complete"] * 4
        assert ours(gate, begun) == ["1", "1"]
        assert lab.left() == []
        until(lambda: states(lab) == [], "their states are removed")


def test_the_keeper_sweeps_what_a_killed_command_left(lab: ContainerLab) -> None:
    with complete(lab) as (ref, _):
        job = WAIT + SHOW + " > /log/seen"
        words = lab.words(ref, "sh", "-c", job)
        with subprocess.Popen(
            words, env=lab.environment, stdout=subprocess.PIPE, text=True
        ) as first:
            assert first.stdout is not None
            try:
                assert first.stdout.readline() == "ready\n"
                assert len(keepers(lab)) == 1
            finally:
                first.kill()
        (lab.log / "go").touch()
        seen = lab.log / "seen"
        until(lambda: seen.exists() and seen.read_text() == "new\ny\n", "the container went on")
        until(lambda: not any("tree" in line for line in lab.left()), "its tree is swept")
        until(lambda: not keepers(lab), "the keeper has ended")
        assert states(lab) == []
        until(lambda: lab.run(ref, "echo", "sweep") and not lab.left(), "all is swept")
