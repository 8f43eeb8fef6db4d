"""Containers of a small image that are started with their inputs: `bootseer image run --config`."""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.imageprefetch.image_build.builder import BuildSettings, build_image
from bootseer.storage.oci.open import open_repository
from tests.support.mounts.checkpoints import content, put_bytes, store_of
from tests.support.mounts.images import begun_with
from tests.support.samples.images import Image, directory, file, symlink, write_layout
from tests.support.waiting import until

TOOLS = ("sh", "cat", "echo", "sleep", "sha256sum", "rm", "mkdir", "touch", "ls", "id", "cp", "env")
LARGE = content(3_000_000)
WAIT = "echo ready; while ! cat /log/go >/dev/null 2>&1; do sleep 0.1; done; "
"""The beginning of a job that says that it runs, and goes on when `go` is in the log's folder."""


def members() -> list[Any]:
    tools = [file("bin/busybox", Path("/bin/busybox").read_bytes(), mode=0o755)]
    tools += [symlink(f"bin/{tool}", "busybox") for tool in TOOLS]
    users = file("etc/passwd", b"root:x:0:0::/:/bin/sh\nbob:x:1234:55::/:/bin/sh\n")
    places = [directory(n) for n in ("bin", "etc", "opt", "proc", "dev", "sys", "run", "lib")]
    own = [file("opt/base", b"of the image"), file("opt/old/x", b"old")]
    return [*places, directory("tmp", mode=0o1777), *tools, users, *own]


class ContainerLab:
    """A registry, an image with a block image, a node of its own, and a shared folder `log`."""

    def __init__(self, folder: Path, registry: Any, podman: Any, name: str) -> None:
        self.folder, self.registry, self.name = folder, registry, name
        self.runtime, self.cache = folder / "run", folder / "cache"
        self.events, self.log = folder / "events", folder / "log"
        self.log.mkdir()
        self.settings = folder / "bootseer.toml"
        self.environment = {
            **podman.environment,
            "BOOTSEER_CACHE": str(self.cache),
            "BOOTSEER_RUNTIME": str(self.runtime),
            "BOOTSEER_EVENTS": str(self.events),
        }

    def publish(
        self,
        *more: Any,
        block_image: bool = True,
        config: dict[str, Any] | None = None,
    ) -> str:
        """Push the image, with `more` files in it, and its block image; returns its name."""
        layout = self.folder / "layout"
        image = Image(
            [[*members(), *more]], config={"Env": ["PATH=/bin"], "Cmd": ["sh"], **(config or {})}
        )
        made = write_layout(layout, image, tag="1")
        ref: str = self.registry.push(made.source, f"start/{self.name}", "1")
        if block_image:
            build_image(BuildSettings(ref=ref, cache_dir=str(self.folder / "build")))
        return ref

    def configure(self, text: str) -> None:
        self.settings.write_text(text)

    def words(self, ref: str, *job: str, options: tuple[str, ...] = ()) -> list[str]:
        shown = ("--volume", f"{self.log}:/log")
        run = [sys.executable, "-m", "bootseer", "image", "run", "--config", str(self.settings)]
        return [*run, ref, *shown, *options, "--", *job]

    def run(
        self, ref: str, *job: str, code: int = 0, options: tuple[str, ...] = ()
    ) -> tuple[str, str]:
        done = self.execute(self.words(ref, *job, options=options))
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout, done.stderr

    def execute(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        """A command on this node, to its end."""
        return subprocess.run(
            words,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )

    def written(self) -> list[dict[str, Any]]:
        """All events of this lab's starts."""
        texts = [path.read_text() for path in self.events.glob("*.jsonl")]
        return [json.loads(line) for text in texts for line in text.splitlines()]

    def ends(self, name: str) -> list[dict[str, Any]]:
        """Ends and points of a phase, in order."""
        mine = [e for e in self.written() if e["name"] == name and e["event"] in ("end", "point")]
        return sorted(mine, key=lambda event: event["time_unix_nano"])

    def tags(self, ref: str) -> list[str]:
        with open_repository(ref)[0] as repository:
            return [tag for tag in repository.tags() if tag.startswith("bootseer-deps-")]

    @contextlib.contextmanager
    def begun(self, ref: str, job: str) -> Iterator[subprocess.Popen[str]]:
        """A container whose job, which begins with WAIT, runs; it ends in any case."""
        words = self.words(ref, "sh", "-c", job)
        with subprocess.Popen(
            words, env=self.environment, stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
                yield process
            finally:
                (self.log / "go").touch()

    def await_layers(self, ref: str, count: int = 1) -> None:
        until(lambda: len(self.tags(ref)) == count, "the layer is published")
        until(lambda: len(self.ends("deps.publish")) >= count, "its publisher has ended")

    def left(self) -> list[str]:
        """What ended starts have left: mounts, and folders of containers and layers."""
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        held = [line for line in mounts if str(self.folder) in line]
        places = (self.runtime / "containers", self.cache / "containers", self.cache / "layers")
        return held + [str(p) for place in places if place.is_dir() for p in place.iterdir()]


SUM = f"{hashlib.sha256(LARGE).hexdigest()}  /ckpt/model.pt\n"
INSTALL = (
    "echo installed >> /log/times; echo new > /opt/new; rm /opt/base; rm -r /opt/old; "
    "mkdir /opt/old; echo y > /opt/old/y; mkdir -p /tmp/x /root/.cache; touch /root/.cache/z"
)


def checkpoint(lab: ContainerLab, more: str = "") -> str:
    put_bytes(store_of(lab.folder / "store"), "model.pt", LARGE, lab.folder)
    url = f"file://{lab.folder}/store/model.pt"
    return f'[checkpoint]\nurl = "{url}"\nto = "/ckpt"\n{more}'


def deps(lab: ContainerLab, install: str = INSTALL) -> str:
    (lab.log / "list.txt").write_text("x==1\n")
    words = json.dumps(["sh", "-c", install])
    return f'[deps]\ninstall = {words}\nkey_files = ["/log/list.txt"]\nexclude = ["/log"]\n'


def times(lab: ContainerLab) -> int:
    return len((lab.log / "times").read_text().splitlines())


@pytest.fixture
def lab(
    tmp_path: Path, registry: Any, podman: Any, request: pytest.FixtureRequest
) -> Iterator[ContainerLab]:
    name = hashlib.sha256(request.node.name.encode()).hexdigest()[:12]
    made = ContainerLab(tmp_path, registry, podman, name)
    yield made
    until(lambda: not begun_with(f"BOOTSEER_RUNTIME={made.runtime}"), "all servers have ended")
    left = made.left()
    assert not left, left
