"""`bootseer image run`: containers of images that are mounted while they run, by a real podman."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from bootseer.cli import root
from bootseer.entrypoint import job_process
from bootseer.errors import CorruptDataError, NotSupportedError, UsageError
from bootseer.imageprefetch.image_build.builder import BuildSettings, build_image
from bootseer.imageprefetch.mount.settings import MountSettings
from bootseer.imageprefetch.run import run_image, server_log
from bootseer.imageprefetch.run.command import Command
from bootseer.imageprefetch.run.podman import (
    container_words,
    environment_variables,
    recording_words,
)
from bootseer.imageprefetch.run.podman_options import check_platform, container_variables
from bootseer.imageprefetch.run.record_image import RecordSettings, record
from bootseer.storage.oci import media_types
from bootseer.storage.oci.config import ImageConfig, parse_config
from bootseer.storage.oci.manifest import Manifest
from bootseer.storage.oci.open import open_repository
from bootseer.storage.oci.platforms import this_platform
from tests.support.labs.registry_proxy import Gate
from tests.support.labs.web_servers import Request, head
from tests.support.mounts.images import Mounts, begun_with, mounts_below, noise, unread_bytes
from tests.support.samples.images import Image, directory, file, symlink, write_layout
from tests.support.waiting import until

TOOLS = ("sh", "cat", "echo", "sleep", "id", "env", "pwd")
CONFIG = {
    "StopSignal": "SIGRTMIN+3",
    "Env": ["PATH=/bin", "GREETING=hello"],
    "WorkingDir": "/data",
    "User": "bob",
    "Entrypoint": ["echo", "from"],
    "Cmd": ["cmd"],
}
needs_podman = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.debian("podman"),
    pytest.mark.debian("docker-registry"),
    pytest.mark.debian("busybox-static"),
]


MERGES = [
    *(
        [("--env-merge", word)]
        for word in (
            *("GREETING=${GREETING} you", "PATH=$PATH:/x", "NEW=${GREETING}", "TERM=${TERM}2"),
            *("TERM=$GREETING", "container=${container}2", "GREETING=$PATH-$container-$TERM"),
            *("GREETING=\"a $PATH\" '$PATH' \\$PATH", 'GREETING="\\a\\"\\$"', "GREETING='a\\b'"),
            *("GREETING=${NONE:-def} ${PATH:+alt} ${NONE:+no}", "GREETING=${NONE:-${PATH}}"),
            *("GREETING=$", "GREETING=x$", "GREETING=$1 $@ ${1} x$-y", "GREETING=$#$*$9z"),
            *("GREETING=a=b", "GREETING=${}", "GREETING=\\", "GREETING=a\\ b", "$GREETING=1"),
            *("GREETING=$PATH_B$PATH-x", "GREETING=${_x}é$é", "HOME=$HOME/x", "=x"),
            *("GREETING=${PATH", "GREETING=${PATH:?x}", "GREETING='open", 'GREETING="a\\'),
        )
    ),
    [],
    [("--env-merge=GREETING=a",), ("--env-merge", "PATH=${GREETING}2")],
    [("--env-merge", "GREETING=1"), ("--unsetenv", "GREETING")],
    [("--unsetenv", "GREETING"), ("--env-merge", "PATH=${GREETING}")],
    [("--unsetenv-all",), ("--env-merge", "GREETING=1")],
    [("-e", "GREETING=mine"), ("--env-merge", "GREETING=${GREETING}2")],
]
"""Options whose outcome podman shows for an image, and is to be the same for its tree."""


def layers(name: str) -> list[list[Any]]:
    tools = [file("bin/busybox", Path("/bin/busybox").read_bytes(), mode=0o755)]
    tools += [symlink(f"bin/{tool}", "busybox") for tool in TOOLS]
    users = file("etc/passwd", b"root:x:0:0::/:/bin/sh\nbob:x:1234:55::/:/bin/sh\n")
    places = [directory("bin"), directory("etc"), directory("tmp", mode=0o1777), directory("data")]
    return [[*places, *tools, users, file("data/name", name.encode())]]


OLDER = {"amd64": "386", "arm64": "arm"}
"""What kernels usually run besides."""
FAULTS = ("401", "500", "circle", "flipped", "truncated")


class Spoiler:
    """FAKE, for fault injection: a gate's rule that spoils each answer about some blobs."""

    def __init__(self, gate: Gate, blobs: set[str], fault: str) -> None:
        self._gate, self._blobs, self._fault = gate, blobs, fault
        self.struck = 0

    def __call__(self, sock: Any, request: Request) -> bool | None:
        if request.method != "GET" or request.target.rpartition("/")[2] not in self._blobs:
            return None
        self.struck += 1
        if self._fault in ("401", "500", "circle"):
            status = {"401": "401 No", "500": "500 Oh", "circle": "307 There"}[self._fault]
            to = {"Location": request.target} if self._fault == "circle" else {}
            sock.sendall(head(status, Content_Length=2, **to) + b"{}")
            return True
        status_code, reason, headers, body = self._gate.ask(request)
        spoiled = bytearray(body)
        spoiled[len(spoiled) // 2] ^= 1
        part = spoiled if self._fault == "flipped" else body[: len(body) // 2]
        sock.sendall(head(f"{status_code} {reason}", **headers) + part)
        return self._fault == "flipped"


def parts_of(name: str) -> dict[str, str]:
    """The digests of the parts of an image's block image, by their kinds."""
    repository, reference = open_repository(name)
    with repository:
        image, _ = repository.image(reference.version)
        (block,) = repository.referrers(image.digest, media_types.BLOCK_IMAGE)
        manifest = repository.manifest(block.digest)
    assert isinstance(manifest, Manifest)
    return {layer.media_type: layer.digest for layer in manifest.layers}


class Lab:
    """`bootseer image run` with a cache, a podman and servers of a test's own."""

    def __init__(self, folder: Path, podman: Any) -> None:
        self.folder, self.runtime = folder, folder / "runtime"
        self.environment = {
            **podman.environment,
            "BOOTSEER_CACHE": str(folder / "cache"),
            "BOOTSEER_RUNTIME": str(self.runtime),
        }

    def start(self, *words: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "bootseer", "image", "run", *words],
            env=self.environment,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def published(self, registry: Any, name: str, files: int) -> str:
        """An image with a block image, and with that many files `fN` in its working directory."""
        many = [file(f"data/f{n}", noise(3_000_000, n)) for n in range(files)]
        image = Image([*layers(name), many], config=CONFIG)
        made = write_layout(self.folder / "l", image, tag="1")
        ref: str = registry.push(made.source, f"run/{name}", "1")
        build_image(BuildSettings(ref=ref, cache_dir=str(self.folder / "build")))
        return ref

    @contextlib.contextmanager
    def waiting(
        self, registry: Any, name: str, files: int, script: str, *words: str
    ) -> Iterator[tuple[str, subprocess.Popen[str]]]:
        """An image with that many files, and a shell on it that said "ready"; ended at the end.

        The files are so large that neither the kernel nor a neighbour's block brings what is read.
        """
        ref = self.published(registry, name, files)
        # It reads once before that: a page of its own that it lacks later is SIGBUS by then.
        script = f"read begin; echo ready; {script}"
        shell = ["--interactive", "--entrypoint", "sh", "--", "-c", script]
        words = ("--no-fill", "--no-record", *words, ref, *shell)
        with self.start(*words, stdin=subprocess.PIPE) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write("begin\n")
            child.stdin.flush()
            assert child.stdout.readline() == "ready\n"
            yield ref, child

    def run(self, *words: str, code: int = 0) -> tuple[str, str]:
        child = self.start(*words)
        out, error = child.communicate(timeout=120)
        assert child.returncode == code, out + error
        return out, error


@pytest.fixture(scope="module")
def ref(registry: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("stock")
    made = write_layout(folder / "layout", Image(layers("lazy"), config=CONFIG), tag="1")
    name: str = registry.push(made.source, "run/lazy", "1")
    build_image(BuildSettings(ref=name, cache_dir=str(folder / "build")))
    return name


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    with mounts_below(tmp_path) as made:
        yield made


@pytest.fixture
def lab(tmp_path: Path, podman: Any, mounts: Mounts) -> Lab:
    return Lab(tmp_path, podman)


class TestContainers:
    pytestmark = needs_podman

    def test_it_runs_as_the_image_says_and_leaves_nothing(
        self, lab: Lab, ref: str, mounts: Mounts
    ) -> None:
        out, error = lab.run(ref)
        assert out == "from cmd\n"
        assert "bootseer: mounted sha256:" in error
        assert lab.run(ref, "--", "words", "--rm")[0] == "from words --rm\n"
        script = "cat name; echo; id -u; pwd; echo $GREETING $MORE; echo x > /tmp/new; exit 7"
        out, _ = lab.run(ref, "--entrypoint", "sh", "-e", "MORE=a b", "--", "-c", script, code=7)
        assert out.split("\n") == ["lazy", "1234", "/data", "hello a b", ""]
        show = ("--", "-c", "echo $GREETING $container")
        assert lab.run(ref, "--entrypoint", "sh", *show)[0] == "hello podman\n"
        out, _ = lab.run(ref, "--entrypoint", "sh", "--unsetenv", "GREETING", *show)
        assert out == "podman\n"
        file = lab.runtime.parent / "variables"
        file.write_text("GREETING=file\n", encoding="utf-8")
        out, _ = lab.run(ref, "--entrypoint", "sh", "--env-file", str(file), *show)
        assert out == "file podman\n"
        assert mounts.gone()
        assert list((lab.runtime / "containers").iterdir()) == []

    def test_it_leaves_no_agent_behind(self, lab: Lab, ref: str, mounts: Mounts) -> None:
        mark = f"BEGUN_BY={lab.folder}"
        lab.environment["BEGUN_BY"] = str(lab.folder)
        script = ["--interactive", "--entrypoint", "sh", "--", "-c", "echo ready; read word"]
        with lab.start(ref, *script, stdin=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            assert {child.pid, mounts.server().supervisor} <= set(begun_with(mark))
            assert not list(lab.runtime.rglob("agent*"))
            child.communicate("go\n", timeout=60)
        until(lambda: not begun_with(mark), "the end of all that the command began")
        assert mounts.gone()
        assert not list(lab.runtime.rglob("agent*"))

    def test_an_agent_that_is_to_be_kept_serves_the_next_start_and_ends_by_itself(
        self, lab: Lab, ref: str, mounts: Mounts
    ) -> None:
        mark = f"BEGUN_BY={lab.folder}"
        lab.environment["BEGUN_BY"] = str(lab.folder)
        socket = lab.runtime / "images/agent.sock"
        lab.environment["BOOTSEER_AGENT_KEEP"] = "5"
        lab.run(ref)
        until(socket.exists, "the agent that was left behind")
        del lab.environment["BOOTSEER_AGENT_KEEP"]
        script = [
            "--interactive",
            "--entrypoint",
            "sh",
            "--",
            "-c",
            "echo ready; read go; cat name",
        ]
        with lab.start("--no-fill", ref, *script, stdin=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            server = mounts.server().supervisor
            command = Path(f"/proc/{server}/cmdline").read_bytes().split(b"\0")
            assert {b"agent", b"--idle-exit"} <= set(command)
            until(lambda: not socket.exists(), "the end of the idle agent")
            assert mounts.server().supervisor == server
            assert child.communicate("go\n", timeout=60)[0] == "lazy"
        assert child.returncode == 0
        until(lambda: not begun_with(mark), "the end of all that the commands began")
        assert mounts.gone()

    def test_variables_are_merged_as_podman_merges_an_images_own(
        self, lab: Lab, ref: str, mounts: Mounts
    ) -> None:
        """Containers are made, not run: of the image by podman itself, and of its tree by ours."""

        def ask(*words: str) -> list[str]:
            command = ["podman", *words]
            done = subprocess.run(command, env=lab.environment, capture_output=True, check=False)
            return done.stdout.decode().splitlines() if done.returncode == 0 else []

        def variables(every: list[list[str]]) -> list[list[str]]:
            """Of a container for each list of words; none where it was refused."""
            made = [ask("create", "--network", "host", *words, "sh") for words in every]
            ids = [one for found in made for one in found]
            lines = iter(ask("inspect", "--format", "{{json .Config.Env}}", *ids))
            out = [sorted(json.loads(next(lines))) if found else [] for found in made]
            ask("rm", "-f", *ids)
            return out

        tree = lab.folder / "tree"
        tree.mkdir()
        config = ImageConfig(env=tuple(CONFIG["Env"]))
        assert ask("pull", "-q", "--tls-verify=false", ref)
        given = [[word for merge in merges for word in merge] for merges in MERGES]
        of_tree = []
        for options in given:
            mine = container_words(str(tree), config, options, ("sh",))
            assert mine[:3] == ["podman", "run", "--rm"]
            of_tree.append([*mine[3 : mine.index("--rootfs")], "--rootfs", str(tree)])
        by_us = variables(of_tree)
        by_podman = variables([[*options, ref] for options in given])
        assert list(zip(given, by_us, strict=True)) == list(zip(given, by_podman, strict=True))
        assert sum(not found for found in by_us) == 4 + 1  # four refused, and --unsetenv-all
        assert mounts.gone()

    def test_a_killed_server_is_said_once_and_nothing_is_left(
        self, lab: Lab, registry: Any, mounts: Mounts
    ) -> None:
        script = "read word; cat f0 f1 > /dev/null && echo whole"
        with lab.waiting(registry, "killed", 2, script) as (ref, child):
            server = mounts.server()
            os.kill(server.supervisor, signal.SIGSTOP)  # or it would start another worker
            os.kill(mounts.worker(server), signal.SIGKILL)
            os.kill(server.supervisor, signal.SIGKILL)
            until(lambda: not mounts.processes(), "their end")
            assert child.poll() is None
            out, error = child.communicate("go\n", timeout=60)
        assert child.returncode != 0
        assert "whole" not in out
        said = [line for line in error.splitlines() if line.startswith("bootseer: ")]
        assert len(said) == 2
        assert said[0].startswith("bootseer: mounted sha256:")
        assert said[1].startswith(f"bootseer: the server of {ref} was killed while")
        assert mounts.gone()
        assert list((lab.runtime / "containers").iterdir()) == []

    def test_a_command_without_dashes_is_hinted_at(
        self, lab: Lab, ref: str, mounts: Mounts
    ) -> None:
        _, error = lab.run(ref, "-i", "no-image-at-all", code=125)
        assert "if 'no-image-at-all' is of the command to be run, put -- before" in error
        _, error = lab.run(ref, "--no-such-option", code=125)
        assert "put -- before" not in error
        assert mounts.gone()

    def test_the_nodes_agent_mounts(self, lab: Lab, ref: str, mounts: Mounts) -> None:
        command = [sys.executable, "-m", "bootseer", "image", "agent"]
        with subprocess.Popen(command, env=lab.environment) as agent:
            try:
                while not (lab.runtime / "images/agent.sock").exists():
                    assert agent.poll() is None
                script = "trap 'exit 9' TERM; echo ready; while :; do sleep 0.1; done"
                child = lab.start(ref, "--entrypoint", "sh", "--", "-c", script)
                assert child.stdout is not None
                assert child.stdout.readline() == "ready\n"
                server = mounts.server().supervisor
                assert b"agent" in Path(f"/proc/{server}/cmdline").read_bytes().split(b"\0")
                child.send_signal(signal.SIGTERM)
                _, error = child.communicate(timeout=60)
                assert "bootseer: mounted sha256:" in error
                _, error = lab.run(f"{ref}.none", code=125)  # podman pulls it in vain
                assert "podman pulls the image" in error
            finally:
                agent.terminate()
        assert mounts.gone()

    @pytest.mark.parametrize("by", ["environment", "option"])
    def test_the_first_step_ends_its_recording(
        self, lab: Lab, ref: str, mounts: Mounts, by: str
    ) -> None:
        events = lab.folder / "events"
        events.mkdir()
        events.chmod(0o777)
        lab.environment.pop("BOOTSEER_EVENTS", None)
        option = ["--events", str(events)] if by == "option" else []
        if not option:
            lab.environment["BOOTSEER_EVENTS"] = str(events)
        line = '{"v":1,"event":"point","name":"first_step"}'
        script = f"cat name; echo '{line}' > $BOOTSEER_EVENTS/rank.jsonl; sleep 2"
        lab.run(ref, "--workload", "steps", *option, "--entrypoint", "sh", "--", "-c", script)
        assert mounts.gone()
        told = "".join(path.read_text() for path in events.iterdir())
        assert '"bootseer.image.ended_by":"first step"' in told
        assert '"bootseer.image.workload":"steps"' in told

    def test_an_image_without_a_block_image_is_pulled(
        self, lab: Lab, registry: Any, mounts: Mounts
    ) -> None:
        made = write_layout(lab.folder / "l", Image(layers("plain"), config=CONFIG), tag="1")
        name = registry.push(made.source, "run/plain", "1")
        out, error = lab.run(name, "--entrypoint", "cat", "--", "/data/name")
        assert out == "plain"
        assert "podman pulls the image" in error
        assert "has no block image yet" in error
        assert mounts.gone()

    def test_without_its_registry_it_runs_from_what_is_kept(
        self, lab: Lab, own_registry: Any, mounts: Mounts
    ) -> None:
        registry = own_registry()
        made = write_layout(lab.folder / "l", Image(layers("kept"), config=CONFIG), tag="1")
        name = registry.push(made.source, "run/kept", "1")
        build_image(BuildSettings(ref=name, cache_dir=str(lab.folder / "build")))
        assert lab.run(name)[0] == "from cmd\n"
        assert mounts.gone()
        registry.stop()
        out, error = lab.run(name)
        assert (out, "mounted sha256:" in error) == ("from cmd\n", True)

    @pytest.mark.parametrize("user", ["bob", ""])
    def test_a_working_directory_that_no_layer_has_is_made(
        self, lab: Lab, registry: Any, mounts: Mounts, user: str
    ) -> None:
        """As podman makes it for images of its own: for the image's user, and no other place."""
        made = write_layout(
            lab.folder / "l",
            Image(layers("nowhere"), config={**CONFIG, "User": user, "WorkingDir": "/app/work"}),
            tag="1",
        )
        name = registry.push(made.source, f"run/nowhere{user}", "1")
        script = "pwd; id -u; echo x > new; cat new"
        words = [name, "--entrypoint", "sh", "--", "-c", script]
        pulled, error = lab.run(*words)
        assert "podman pulls the image" in error  # the plain way, to compare with
        build_image(BuildSettings(ref=name, cache_dir=str(lab.folder / "build")))
        out, error = lab.run(*words)
        assert "bootseer: mounted sha256:" in error
        assert out == pulled == f"/app/work\n{1234 if user else 0}\nx\n"
        (lab.folder / "given").mkdir(mode=0o777)
        (lab.folder / "given").chmod(0o777)
        lab.folder.chmod(0o755)
        lab.run(name, "-v", f"{lab.folder}/given:/app/work", *words[1:])
        assert (lab.folder / "given/new").read_text() == "x\n"
        assert mounts.gone()
        for runner in ("podman", "chroot"):
            recorded = [name, "--with", runner, "--", "sh", "-c", script]
            done = subprocess.run(
                [sys.executable, "-m", "bootseer", "image", "record", *recorded],
                env=lab.environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert (done.returncode, done.stdout) == (0, pulled), (runner, done.stderr)

    def test_a_command_that_never_began_is_no_start(
        self, lab: Lab, ref: str, mounts: Mounts
    ) -> None:
        traces = lambda: list((lab.folder / "cache").rglob("*.trace*"))  # noqa: E731
        lab.run(ref, "--entrypoint", "no-such-program", code=127)
        assert mounts.gone()
        assert traces() == []
        lab.run(ref)
        assert mounts.gone()
        assert len(traces()) == 1

    def test_why_reads_fail_is_said_once_and_the_rest_fails_soon(
        self, lab: Lab, own_registry: Any, mounts: Mounts
    ) -> None:
        registry = own_registry()
        script = "read go; cat f0 f1 > /dev/null; exit 3"
        words = ["--deadline", "1", "--log-file", f"{lab.folder}/log"]
        with lab.waiting(registry, "lost", 2, script, *words) as (name, child):
            registry.stop()
            _, error = child.communicate("go\n", timeout=120)
        assert child.returncode == 3, error
        assert "Input/output error" in error, "no read failed"
        causes = [line for line in error.splitlines() if line.startswith(f"bootseer: {name}: ")]
        assert len(causes) == 1, error
        assert registry.host in causes[0].removeprefix(f"bootseer: {name}")
        assert "a read at" in (lab.folder / "log").read_text()
        assert mounts.gone()

    def test_every_container_of_a_server_hears_of_every_outage_once(
        self, lab: Lab, own_registry: Any, mounts: Mounts
    ) -> None:
        """Their server was begun by a mount that had no log, and serves on after an outage."""
        registry = own_registry()
        name = lab.published(registry, "shared", 10)
        mounted = mounts.mount(name, deadline_s=1.0, log_file="", cache=f"{lab.folder}/cache")
        server = mounts.server()
        shell = ["--interactive", "--entrypoint", "sh", "--", "-c"]
        script = (
            "echo ready; while read n; do cat f$n > /dev/null && echo read || echo failed; done"
        )

        def container(stack: contextlib.ExitStack) -> subprocess.Popen[str]:
            child = stack.enter_context(lab.start(name, *shell, script, stdin=subprocess.PIPE))
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            return child

        def reads(child: subprocess.Popen[str], number: int) -> str:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(f"{number}\n")
            child.stdin.flush()
            return child.stdout.readline().strip()

        def heard(child: subprocess.Popen[str]) -> list[str]:
            _, error = child.communicate(timeout=60)
            assert "another mount of this node serves it" in error
            return [line for line in error.splitlines() if line.startswith(f"bootseer: {name}: ")]

        with contextlib.ExitStack() as stack:
            one, two = container(stack), container(stack)
            registry.stop()
            assert [reads(one, 0), reads(one, 0)] == ["failed", "failed"]
            registry.start()
            while reads(one, 3) != "read":
                pass
            late = container(stack)
            assert reads(late, 3) == "read"
            assert heard(late) == []
            registry.stop()
            assert [reads(two, 6), reads(two, 9)] == ["failed", "failed"]
            causes = [heard(one), heard(two)]
        assert causes[0] == causes[1]
        assert len(causes[0]) == 2, causes
        assert all(registry.host in line.removeprefix(f"bootseer: {name}") for line in causes[0])
        assert os.path.getsize(f"{server.state}/faults") < 100_000
        mounts.umount(mounted)
        assert mounts.gone()
        assert list((lab.runtime / "containers").iterdir()) == []

    def test_why_reads_of_a_recorded_command_fail_is_said(
        self, lab: Lab, own_registry: Any, mounts: Mounts
    ) -> None:
        registry = own_registry()
        name = lab.published(registry, "recorded", 2)
        script = "echo ready; read go; cat f0 > /dev/null; exit 3"
        words = ["record", "--deadline", "1", "--log-file", f"{lab.folder}/log", name]
        words += ["--with", "podman", "--interactive", "--", "sh", "-c", script]
        with subprocess.Popen(
            [sys.executable, "-m", "bootseer", "image", *words],
            env=lab.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            registry.stop()
            _, error = child.communicate("go\n", timeout=60)
        assert child.returncode == 3
        assert "Input/output error" in error, "no read failed"
        causes = [line for line in error.splitlines() if line.startswith(f"bootseer: {name}: ")]
        assert len(causes) == 1, error
        assert registry.host in causes[0].removeprefix(f"bootseer: {name}")
        assert "a read at" in (lab.folder / "log").read_text()
        assert mounts.gone()

    @pytest.mark.parametrize("agent", [False, True])
    def test_an_image_alone_of_another_platform_is_not_mounted(
        self, lab: Lab, registry: Any, mounts: Mounts, agent: bool
    ) -> None:
        """No index names it, so its config alone tells: podman is left to do as it does."""
        other = "arm64" if this_platform().architecture != "arm64" else "amd64"
        image = Image(layers("other"), config=CONFIG, architecture=other)
        made = write_layout(lab.folder / "l", image, tag="1")
        name = registry.push(made.source, f"run/other{agent}".lower(), "1")
        report = build_image(BuildSettings(ref=name, cache_dir=str(lab.folder / "build")))
        assert report.block_image
        why = f"{name} has no image for {this_platform()}; it is one for linux/{other}"
        bootseer = [sys.executable, "-m", "bootseer", "image"]
        (lab.folder / "mnt").mkdir()
        with contextlib.ExitStack() as stack:
            if agent:
                command = [*bootseer, "agent"]
                started = stack.enter_context(subprocess.Popen(command, env=lab.environment))
                stack.callback(started.terminate)
                until(lambda: (lab.runtime / "images/agent.sock").exists(), "an agent")
            for words in (
                ["mount", name, f"{lab.folder}/mnt"],
                ["mount", "--deadline", "9", name, f"{lab.folder}/mnt"],
                ["record", name, "--with", "chroot", "--", "echo", "ran"],
            ):
                done = subprocess.run(
                    [*bootseer, *words],
                    env=lab.environment,
                    capture_output=True,
                    text=True,
                    check=False,
                )
                assert done.returncode == NotSupportedError.exit_code, (words, done)
                assert done.stderr.splitlines()[-1].endswith(why), words
                assert (done.stdout, done.stderr.count("\n")) == ("", 1), words
                assert mounts.gone()
            out, error = lab.run(name)
            assert out == "from cmd\n"  # by podman, whose image it is
            assert f"bootseer: podman pulls the image: {why}\n" in error
            assert "mounted" not in error
        assert mounts.gone()

    @pytest.mark.parametrize("said", ["", "unknown", "upper", "older"])
    def test_an_image_alone_that_may_run_here_is_mounted(
        self, lab: Lab, registry: Any, mounts: Mounts, said: str
    ) -> None:
        here = this_platform().architecture
        said = {"upper": here.upper(), "older": OLDER.get(here, "")}.get(said, said)
        image = Image(layers("fits"), config=CONFIG, architecture=said)
        made = write_layout(lab.folder / "l", image, tag="1")
        name = registry.push(made.source, f"run/fits{said}".lower(), "1")
        build_image(BuildSettings(ref=name, cache_dir=str(lab.folder / "build")))
        mounts.umount(mounts.mount(name))
        out, error = lab.run(name)
        assert out == "from cmd\n"
        assert "bootseer: mounted sha256:" in error
        assert mounts.gone()

    @pytest.mark.parametrize(("said", "fits"), [("", True), ("riscv64", False)])
    def test_what_a_layout_says_of_an_image_alone_is_heeded(
        self, lab: Lab, mounts: Mounts, said: str, fits: bool
    ) -> None:
        write_layout(lab.folder / "l", Image(layers("laid"), config=CONFIG), tag="1")
        name = f"oci-layout:{lab.folder}/l:1"
        build_image(BuildSettings(ref=name, cache_dir=str(lab.folder / "build")))
        index = lab.folder / "l/index.json"
        listed = json.loads(index.read_text())
        for one in listed["manifests"]:
            one["platform"] = {"os": "linux", "architecture": said}
        index.write_text(json.dumps(listed))
        refused = pytest.raises(NotSupportedError, match="it is one for linux/riscv64")
        with contextlib.nullcontext() if fits else refused:
            mounts.umount(mounts.mount(name))
        assert mounts.gone()

    @pytest.mark.parametrize("command", ["mount", "run"])
    def test_what_platform_an_image_alone_is_for_is_asked_once(
        self, lab: Lab, own_registry: Any, mounts: Mounts, command: str
    ) -> None:
        registry = own_registry()
        made = write_layout(lab.folder / "l", Image(layers("mine"), config=CONFIG), tag="1")
        name = registry.push(made.source, "run/mine", "1")
        build_image(BuildSettings(ref=name, cache_dir=str(lab.folder / "build")))
        with open_repository(name)[0] as repository:
            config = repository.image("1")[1].config.digest
        before = len(registry.requests())
        if command == "run":
            assert lab.run(name)[0] == "from cmd\n"
        else:
            (lab.folder / "mnt").mkdir()
            words = [sys.executable, "-m", "bootseer", "image", "mount", name, f"{lab.folder}/mnt"]
            subprocess.run(words, env=lab.environment, check=True)
            mounts.umount(f"{lab.folder}/mnt")
        asked = [one for one in registry.requests()[before:] if config in one.path]
        assert len(asked) == 1, asked
        assert mounts.gone()

    @pytest.mark.parametrize("fault", FAULTS)
    def test_a_registry_that_spoils_the_mount_costs_a_line_and_podman_pulls(
        self, lab: Lab, own_registry: Any, mounts: Mounts, fault: str
    ) -> None:
        registry = own_registry()
        name = lab.published(registry, "spoiled", 0)
        blobs = parts_of(name)
        with Gate(registry.host) as gate:
            spoil = Spoiler(
                gate, {blobs[kind] for kind in (media_types.META, media_types.TABLE)}, fault
            )
            gate.rules.append(spoil)
            begun_s = time.monotonic()
            through = name.replace(registry.host, gate.authority)
            child = lab.start(through, "--entrypoint", "cat", "--", "/data/name")
            assert child.stderr is not None
            line = child.stderr.readline()
            passed_s = time.monotonic() - begun_s
            out, error = child.communicate(timeout=120)
            assert spoil.struck
        assert line.startswith("bootseer: podman pulls the image: "), line
        assert len(line) > len("bootseer: podman pulls the image: \n")
        assert passed_s < 5.0 + 6.0, "longer than a first look may take"
        assert (child.returncode, out) == (0, "spoiled"), error
        assert "bootseer: " not in error
        assert mounts.gone()

    @pytest.mark.parametrize("fault", FAULTS)
    def test_a_registry_that_spoils_what_is_read_is_one_cause(
        self, lab: Lab, own_registry: Any, mounts: Mounts, fault: str
    ) -> None:
        registry = own_registry()
        name = lab.published(registry, "spoils", 2)
        script = "echo ready; read go; cat f0 f1 > /dev/null; exit 3"
        with Gate(registry.host) as gate:
            through = name.replace(registry.host, gate.authority)
            words = ["--no-fill", "--no-record", "--deadline", "2", through, "--interactive"]
            words += ["--entrypoint", "sh", "--", "-c", script]
            with lab.start(*words, stdin=subprocess.PIPE) as child:
                assert child.stdout is not None
                assert child.stdout.readline() == "ready\n"
                spoil = Spoiler(gate, {parts_of(name)[media_types.DATA]}, fault)
                gate.rules.append(spoil)
                begun_s = time.monotonic()
                _, error = child.communicate("go\n", timeout=120)
                passed_s = time.monotonic() - begun_s
            assert spoil.struck
        assert child.returncode == 3, error
        assert "Input/output error" in error, "no read failed"
        causes = [line for line in error.splitlines() if line.startswith(f"bootseer: {through}: ")]
        assert len(causes) == 1, error
        assert "a read at " in causes[0]
        assert passed_s < 60, "each read waited anew"
        assert mounts.gone()

    def test_a_program_that_waits_for_its_bytes_can_be_ended(
        self, lab: Lab, own_registry: Any, mounts: Mounts
    ) -> None:
        registry = own_registry()
        script = "trap 'exit 9' TERM; read go; cat f0 > /dev/null & wait"
        with lab.waiting(registry, "hangs", 2, script, "--deadline", "3600") as (_, child):
            assert child.stdin is not None
            registry.pause()
            try:
                child.stdin.write("go\n")
                child.stdin.flush()
                while not unread_bytes(registry.host):  # the read is under way, and hangs
                    assert child.poll() is None
                    time.sleep(0.01)
                child.send_signal(signal.SIGTERM)
                child.communicate(timeout=100)
            finally:
                registry.resume()
        assert child.returncode == 9
        assert mounts.gone()

    def test_a_first_process_that_waits_for_its_bytes_can_be_ended(
        self, lab: Lab, own_registry: Any, mounts: Mounts
    ) -> None:
        """It has no handler, so the kernel keeps TERM from it; and could not run one now."""
        registry = own_registry()
        script = "read go; exec cat f0"
        with lab.waiting(registry, "first", 2, script, "--deadline", "3600") as (name, child):
            assert child.stdin is not None
            registry.pause()
            try:
                child.stdin.write("go\n")
                child.stdin.flush()
                while not unread_bytes(registry.host):  # the read is under way, and hangs
                    assert child.poll() is None
                    time.sleep(0.01)
                child.send_signal(signal.SIGTERM)
                _, error = child.communicate(timeout=100)
            finally:
                registry.resume()
        assert child.returncode == 1
        assert "Input/output error" in error
        causes = [line for line in error.splitlines() if line.startswith(f"bootseer: {name}: ")]
        assert len(causes) == 1, error
        assert "was asked to end" in causes[0]
        assert mounts.gone()

    def test_a_signal_is_the_containers_and_the_tree_goes_with_it(
        self, lab: Lab, ref: str, mounts: Mounts
    ) -> None:
        script = "trap 'exit 9' TERM; echo ready; while :; do sleep 0.1; done"
        child = lab.start(ref, "--entrypoint", "sh", "--", "-c", script)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=60)
        assert child.returncode == 9
        assert mounts.gone()

    def test_what_a_killed_one_left_is_unmounted_by_the_next(
        self, lab: Lab, ref: str, mounts: Mounts
    ) -> None:
        # The container lives until its input ends, which no slow machine brings about too soon.
        shell = ["--interactive", "--entrypoint", "sh", "--", "-c", "echo ready; read go"]
        child = lab.start(ref, *shell, stdin=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        assert len(list((lab.runtime / "containers").iterdir())) == 1
        child.kill()
        child.communicate()  # podman, which has our streams, goes on to the container's end
        lab.run(ref)
        assert list((lab.runtime / "containers").iterdir()) == []
        assert mounts.gone()

    @pytest.mark.parametrize("agent", [False, True])
    def test_what_a_killed_one_left_goes_with_its_container(
        self, lab: Lab, ref: str, mounts: Mounts, agent: bool
    ) -> None:
        """Without another command in that runtime folder."""
        with contextlib.ExitStack() as stack:
            if agent:
                started = stack.enter_context(
                    subprocess.Popen(
                        [sys.executable, "-m", "bootseer", "image", "agent"], env=lab.environment
                    )
                )
                stack.callback(started.terminate)
                while not (lab.runtime / "images/agent.sock").exists():
                    assert started.poll() is None
            script = "echo ready; read go; cat name; exit 0"
            words = [ref, "--interactive", "--entrypoint", "sh", "--", "-c", script]
            child = subprocess.Popen(
                [sys.executable, "-m", "bootseer", "image", "run", *words],
                env=lab.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            assert len(list((lab.runtime / "containers").iterdir())) == 1
            child.kill()
            while list((lab.runtime / "containers").iterdir()):  # its container still runs
                time.sleep(0.02)
            out, _ = child.communicate("go\n", timeout=60)
            assert out == "lazy"  # a container keeps the tree that it runs on
            while list((lab.runtime / "images").glob("*/server.json")):
                time.sleep(0.02)
        assert mounts.gone()

    def test_a_recorded_commands_variables_are_in_no_command_line(self, lab: Lab, ref: str) -> None:
        lab.environment["TOKEN"] = secret = "said-to-nobody-else"
        script = "echo $TOKEN; echo ready; sleep 2"
        words = ["record", ref, "--with", "podman", "-e", "TOKEN", "--", "sh", "-c", script]
        child = subprocess.Popen(
            [sys.executable, "-m", "bootseer", "image", *words],
            env=lab.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        assert [child.stdout.readline() for _ in range(2)] == [f"{secret}\n", "ready\n"]
        assert command_lines(b"podman")
        assert not command_lines(secret.encode())
        child.communicate(timeout=60)
        assert child.returncode == 0

    def test_a_recorded_command_has_podmans_options(
        self, lab: Lab, ref: str, mounts: Mounts
    ) -> None:
        (lab.folder / "extra").mkdir()
        (lab.folder / "extra" / "word").write_text("from outside")
        lab.folder.chmod(0o755)
        options = ["--volume", f"{lab.folder}/extra:/extra", "--network=none", "--hostname", "h1"]
        script = "cat /extra/word; hostname"
        words = ["record", ref, "--with", "podman", *options, "--", "sh", "-c", script]
        done = subprocess.run(
            [sys.executable, "-m", "bootseer", "image", *words],
            env=lab.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout) == (0, "from outsideh1\n"), done.stderr
        assert mounts.gone()


def command_lines(part: bytes) -> list[bytes]:
    """All that hold it, of whatever process runs now."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes())
        except OSError:
            continue
    return [line for line in found if part in line]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-it", "a:1"), "before podman's options"),
        (("a:1", "-itd"), "leave -itd out"),
        (("a:1", "--detach"), "leave --detach out"),
        (("a:1", "--rootfs"), "ours to give"),
        (("a:1", "sh", "-c", "x"), "put -- before"),
        (("A/B:1",), "A/B:1"),
        (("record", "-it", "a:1", "--", "x"), "before podman's options"),
        (("record", "a:1", "-itd", "--", "x"), "leave -itd out"),
        (("record", "a:1", "--rootfs=x", "--", "x"), "--rootfs is ours to give"),
        (("record", "a:1", "--name", "n", "--", "x"), "--name is ours to give"),
        (("record", "a:1", "sh", "--", "x"), "put -- before"),
        (("record", "a:1", "sh", "-c", "x"), "behind --"),
        (("record", "a:1", "-v", "/a:/a", "--"), "behind --"),
        (("record", "a:1"), "behind --"),
        (("record", "a:1", "--with", "chroot", "-v", "/a:/a", "--", "x"), "need podman"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_done(
    words: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    podman = tmp_path / "podman"  # it is looked for, and must not be run
    podman.write_text(f"#!/bin/sh\ntouch {tmp_path}/was-run\n")
    podman.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("BOOTSEER_RUNTIME", str(tmp_path / "runtime"))
    command = [sys.executable, "-m", "bootseer", "image", *([] if "record" in words else ["run"])]
    command += words
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, said in done.stderr) == (UsageError.exit_code, True), done.stderr
    assert not (tmp_path / "was-run").exists()


def parsed(*words: str) -> dict[str, Any]:
    """What `image record` makes of its words, and the words of its command."""
    from bootseer.cli.image.options import words_after_dashes
    from bootseer.cli.image.record import command

    context = command.make_context("record", list(words))
    return {**context.params, "words": words_after_dashes(context)}


@pytest.mark.parametrize("word", ["-lteam=x", "-v/data:/extra", "-w/workspace", "-it", "-p8080:80"])
def test_short_options_of_podmans_stay_whole(word: str) -> None:
    found = parsed("a:1", "-e", "A=b", word, "--gpus", "all", "-eC=d", "--push", "--", "x", "-e")
    assert found["ref"] == "a:1"
    assert found["variables"] == ("A=b", "C=d")
    assert found["options"] == (word, "--gpus", "all")
    assert (found["push"], found["words"]) == (True, ("x", "-e"))


def test_values_of_our_options_stay_ours() -> None:
    found = parsed("--workload", "-foo", "a:1", "-w/e", "--cache", "-dir", "--", "x")
    assert (found["workload"], found["cache"]) == ("-foo", "-dir")
    assert (found["ref"], found["options"]) == ("a:1", ("-w/e",))


def test_h_alone_asks_for_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(click.exceptions.Exit):
        parsed("-h")
    assert "--window SECONDS" in capsys.readouterr().out


def test_a_command_without_options_needs_no_dashes() -> None:
    from bootseer.cli.image.record import _split_words

    found = parsed("a:1", "cat", "-")
    assert _split_words(found["options"], found["words"]) == ((), ("cat", "-"))


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("--platform", "linux/s390x"), "linux/s390x"),
        (("--platform=linux/arm/v6", "--plain-http"), "linux/arm/v6"),
        (("-v", "/a:/a", "--arch", "ppc64le"), "linux/ppc64le"),
        (("-v", "/a:/a", "--platform=linux/arm/v6"), "linux/arm/v6"),
        (("--os=windows",), "windows/"),
        (("--variant", "v5"), "/v5"),
    ],
)
def test_an_image_of_another_platform_is_left_to_podman(
    options: tuple[str, ...], wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tree that is mounted is of this machine's, and podman would run it all the same."""
    podman = tmp_path / "podman"
    podman.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n')
    podman.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("BOOTSEER_RUNTIME", str(tmp_path / "runtime"))
    ref = "127.0.0.1:1/a/b:1"
    ours = options[0].startswith("--platform")  # which may stand where options of ours do
    words = ["image", "run", *((*options, ref) if ours else (ref, *options)), "--", "true"]
    done = subprocess.run(
        [sys.executable, "-m", "bootseer", *words], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert f"asked for as {wanted}" in done.stderr or wanted in done.stderr
    assert "podman pulls the image" in done.stderr
    asked = (tmp_path / "asked").read_text().split()
    assert asked[:2] == ["run", "--rm"]
    assert "--rootfs" not in asked
    podmans = " ".join(options).replace("platform=", "platform ").replace("--plain-http", "")
    assert set(podmans.split()) <= set(asked)


def test_what_breaks_inside_us_is_named_by_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    podman = tmp_path / "podman"
    podman.write_text("#!/bin/sh\nexit 7\n")
    podman.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    code = """
import sys
from bootseer.cli.image.outcome import print_plan
from bootseer.imageprefetch.run import run_image as lazyrun
from bootseer.imageprefetch.mount.settings import MountSettings
def broken(_):
    raise KeyError("x")
mount = MountSettings(ref="127.0.0.1:1/a/b:1", directory="", runtime=sys.argv[1])
sys.exit(lazyrun.run(lazyrun.RunSettings(mount=mount), print_plan, broken))
"""
    command = [sys.executable, "-c", code, str(tmp_path / "runtime")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (7, ""), done.stderr
    assert done.stderr == "bootseer: podman pulls the image: KeyError: 'x'\n"


BESIDE = """
import sys
from bootseer.cli.image.outcome import print_plan
from bootseer.entrypoint import job_process
from bootseer.imageprefetch.run import run_image
from bootseer.imageprefetch.mount.settings import MountSettings
def broken(_):
    raise KeyError("x")
class Beside:
    def begin(self, folder): pass
    def finish(self, image): return run_image.Inputs(before=sys.argv[2])
    def settle(self): raise KeyError("y")
    def mounts(self): return ()
    def leave_image(self): pass
    def close(self): pass
mount = MountSettings(ref="127.0.0.1:1/a/b:1", directory="", runtime=sys.argv[1], plain_http=True)
settings = run_image.RunSettings(mount=mount, beside=Beside())
sys.exit(run_image.run(settings, print_plan, broken, job_process.say))
"""
"""A container that podman pulls, with something beside it that breaks while podman runs."""


def run_beside(folder: Path, podman: str, before: str) -> tuple[int, list[str], list[str]]:
    """By a fake podman: the exit code, what podman was to do, and the lines that were said."""
    program = folder / "podman"
    program.write_text(f'#!/bin/sh\necho "$1" >> {folder}/asked\n{podman}\n')
    program.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", BESIDE, str(folder / "runtime"), before],
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == ""
    said = done.stderr.splitlines()
    assert said.pop(0) == "bootseer: podman pulls the image: KeyError: 'x'"
    return done.returncode, (folder / "asked").read_text().split(), said


def test_what_breaks_while_podman_runs_leaves_the_container_alone(tmp_path: Path) -> None:
    said = "bootseer: 127.0.0.1:1/a/b:1: KeyError: 'y'; the container goes on"
    assert run_beside(tmp_path, "sleep 0.5; exit 7", "") == (7, ["run"], [said])


def test_faults_are_followed_though_those_of_another_image_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    followed: list[str] = []

    @contextlib.contextmanager
    def follow(state: str, *_: object) -> Iterator[None]:
        if state == "first":
            raise RuntimeError("can't start new thread")
        followed.append(state)
        yield

    monkeypatch.setattr(server_log, "follow_faults", follow)
    mounts = [("/", SimpleNamespace(state=state)) for state in ("first", "second")]
    container: Any = SimpleNamespace(mounts=mounts)
    settings = run_image.RunSettings(mount=MountSettings(ref="a:1", directory=""))
    said: list[str] = []
    with contextlib.ExitStack() as stack:
        run_image._watch_mounts(settings, container, stack, said.append)
    assert followed == ["second"]
    assert said == ["a:1: RuntimeError: can't start new thread; the container goes on"]


@pytest.mark.parametrize("ending", ["exit 0", "exit 143"])
def test_a_signal_while_podman_pulls_ends_the_start(tmp_path: Path, ending: str) -> None:
    """Whether the pull heeds it or not."""
    podman = f'test "$1" = pull || exit 1; trap "" TERM; kill -TERM $PPID; sleep 0.3; {ending}'
    code = 128 + signal.SIGTERM
    assert run_beside(tmp_path, podman, "true") == (code, ["image", "pull"], [])


@pytest.mark.parametrize("way", ["full", "closed", "none"])
def test_what_cannot_be_said_ends_nothing(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount that is there is none the less, and a container's faults are still followed."""
    stream = open("/dev/full", "w")  # noqa: SIM115 - closing it fails
    monkeypatch.setattr(sys, "stderr", None if way == "none" else stream)
    with contextlib.suppress(OSError):
        if way == "closed":
            stream.close()
    job_process.say("a read failed")
    with contextlib.suppress(OSError):
        stream.close()


@pytest.mark.parametrize("options", [(), ("-t",), ("--platform", str(this_platform()))])
def test_an_image_of_this_platform_is_ours_to_mount(options: tuple[str, ...]) -> None:
    check_platform(options)


def test_a_start_on_another_platform_is_not_recorded() -> None:
    settings = RecordSettings(ref="a:1", podman_options=("--arch", "s390x"), words=("true",))
    with pytest.raises(NotSupportedError, match="s390x"):
        record(settings)


@pytest.mark.parametrize("command", ["mount", "record"])
def test_a_mount_of_another_platform_is_refused_before_anything_is_asked(
    command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    behind = [str(tmp_path)] if command == "mount" else ["--", "true"]
    words = ["image", command, "--platform", "linux/s390x", "127.0.0.1:1/a/b:1", *behind]
    assert root.main(words) == NotSupportedError.exit_code
    told = capfd.readouterr().err
    assert "asked for as linux/s390x, and what is mounted here is of " in told
    assert told.count("\n") == 1


def test_an_entry_point_of_podmans_takes_the_place_of_the_images() -> None:
    config = ImageConfig(entrypoint=("in",), cmd=("cmd",), working_dir="/w", user="bob")
    own = container_words("/t", config, (), ())
    assert own[:5] == ["podman", "run", "--rm", "--env", "container=podman"]
    assert " ".join(own[5:]) == "--workdir /w --user bob --rootfs /t:O in cmd"
    assert container_words("/t", config, (), ("x",))[-2:] == ["in", "x"]
    assert container_words("/t", config, ("--entrypoint=e",), ())[-1] == "/t:O"
    assert container_words("/t", config, ("--entrypoint", "e"), ("x",))[-2:] == ["/t:O", "x"]
    with pytest.raises(UsageError, match="names no command"):
        container_words("/t", ImageConfig(), ("-i",), ())


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ((), ["container=podman", "A=b", "C=d"]),
        (("--unsetenv", "A"), ["container=podman", "C=d"]),
        (("--unsetenv=container", "--unsetenv=C"), ["A=b"]),
        (("--unsetenv-all",), []),
        (("--unsetenv-all=false",), ["container=podman", "A=b", "C=d"]),
        (("--unsetenv-all=1",), []),
        (("--unsetenv-all", "--unsetenv-all=0"), ["container=podman", "A=b", "C=d"]),
    ],
)
def test_variables_are_an_images_less_those_that_podman_is_to_unset(
    options: tuple[str, ...], left: list[str]
) -> None:
    config = ImageConfig(env=("A=b", "C=d"))
    given = container_words("/t", config, options, ("x",))
    assert [after for word, after in itertools.pairwise(given) if word == "--env"] == left
    command = Command(tree="/t", words=("x",), config=config, options=options)
    given = recording_words(command, "name")
    after = [after for word, after in itertools.pairwise(given) if word == "--env"]
    assert after == left


def test_a_file_of_variables_wins_over_the_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OURS_1", "1")
    names = ("SET", "LED", "OURS_1", "NOT_OURS", "NOTED", "KEPT")
    config = ImageConfig(env=tuple(f"{name}=image" for name in names))
    file = tmp_path / "variables"
    file.write_text("SET=file\n  LED=\r\n\nOURS_*\nNOT_OURS\n #NOTED=x\n", encoding="utf-8")
    kept = ["container=podman", "NOT_OURS=image", "NOTED=image", "KEPT=image"]
    for options in (("--env-file", str(file)), (f"--env-file={file}",)):
        given = container_words("/t", config, options, ("x",))
        assert [after for word, after in itertools.pairwise(given) if word == "--env"] == kept
    given = container_words("/t", config, ("--env-file", str(tmp_path / "none")), ("x",))
    assert given.count("--env") == len(names) + 1


def test_words_nested_too_deep_to_merge_change_nothing() -> None:
    deep = "A=" + "${B:-" * 50_000 + "}" * 50_000
    given = container_variables(["A=1"], ["--env-merge", deep])
    assert "A=1" in given


def test_an_env_file_that_can_be_read_only_once_is_left_to_podman(tmp_path: Path) -> None:
    file, pipe = tmp_path / "file", tmp_path / "pipe"
    file.write_text("A=file\n")
    os.mkfifo(pipe)
    config = ImageConfig(env=("A=image",))
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(pipe, os.O_WRONLY)
    try:
        os.write(writer, b"A=pipe\n")
        words = container_words("/t", config, ("--env-file", str(pipe)), ("x",))
        assert os.read(reader, 100) == b"A=pipe\n"  # nobody took it
    finally:
        os.close(writer)
        os.close(reader)
    assert "A=image" in words
    assert "A=image" not in container_words("/t", config, ("--env-file", str(file)), ("x",))


def test_a_container_is_stopped_by_the_images_own_signal() -> None:
    config = parse_config(b'{"config": {"Cmd": ["c"], "StopSignal": "SIGRTMIN+3"}}')
    for words in (
        container_words("/t", config, (), ()),
        recording_words(Command(tree="/t", words=("c",), config=config), "name"),
    ):
        assert ("--stop-signal", "SIGRTMIN+3") in itertools.pairwise(words)
        assert words[-2:] == ["/t:O", "c"]


@pytest.mark.parametrize("name", ["Env", "Entrypoint", "Cmd"])
@pytest.mark.parametrize("value", ["A=b", {"A": "b"}])
def test_what_should_be_a_list_is_not_taken_apart(name: str, value: object) -> None:
    with pytest.raises(CorruptDataError, match="config is damaged"):
        parse_config(json.dumps({"config": {name: value}}).encode())
    assert parse_config(json.dumps({"config": {name: None}}).encode()) == ImageConfig()


def test_podman_gets_values_by_its_environment_but_none_that_it_heeds() -> None:
    given = {"TOKEN": "t", "PATH": "/own", "LD_PRELOAD": "x", "DOCKER_PASSWORD": "d"}
    config = ImageConfig(env=("A=b", "TOKEN=images"))
    command = Command(tree="/t", words=("x",), config=config, environment=given)
    words = recording_words(command, "name")
    assert environment_variables(command) == {"TOKEN": "t", "DOCKER_PASSWORD": "d"}
    assert {"A=b", "TOKEN", "DOCKER_PASSWORD", "PATH=/own", "LD_PRELOAD=x"} <= set(words)


def test_first_steps_are_looked_for_where_events_go(monkeypatch: pytest.MonkeyPatch) -> None:
    from bootseer.cli.image.mount import command

    def events(*words: str) -> str:
        found: str = command.make_context("mount", [*words, "a:1", "/tree"]).params["events_dir"]
        return found

    monkeypatch.delenv("BOOTSEER_EVENTS", raising=False)
    assert events() == ""
    monkeypatch.setenv("BOOTSEER_EVENTS", "/shared/events")
    assert events() == "/shared/events"
    assert events("--events", "/own") == "/own"
    monkeypatch.setenv("BOOTSEER_IMAGE_EVENTS", "/images")
    assert events() == "/images"
    monkeypatch.delenv("BOOTSEER_IMAGE_EVENTS")
    monkeypatch.setenv("BOOTSEER_EVENTS", "/one/file.jsonl")
    assert events() == ""
    with pytest.raises(click.BadParameter, match="directory"):
        events("--events", "/one/file.jsonl")


@pytest.mark.parametrize(
    ("ref", "plain_http", "wanted"),
    [
        ("127.0.0.1:5/a/b:1", None, True),
        ("127.0.0.1:5/a/b:1", False, False),
        ("named.example:5000/a/b:1", None, True),
        ("other.example:5000/a/b:1", None, False),
        ("other.example:5000/a/b:1", True, True),
        ("no reference", None, False),
    ],
)
def test_podman_pulls_by_the_protocol_that_we_use(
    monkeypatch: pytest.MonkeyPatch, ref: str, plain_http: bool | None, wanted: bool
) -> None:
    monkeypatch.setenv("BOOTSEER_PLAIN_HTTP", "named.example:5000")
    mount = MountSettings(ref=ref, directory="", plain_http=plain_http)
    settings = run_image.RunSettings(mount=mount, words=("true",))
    words = run_image._words_to_pull(settings, (), run_image.Inputs())
    assert ("--tls-verify=false" in words) == wanted
