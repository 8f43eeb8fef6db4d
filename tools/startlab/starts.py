"""The starts of one job: plainly, through bootseer, and with everything in memory."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from bootseer import events
from bootseer.agent import sweeper
from bootseer.agent.client import socket_path
from bootseer.agent.drain import CREDENTIALS
from bootseer.system.processes import children_of
from bootseer.system.readiness import readable
from tools.machine import remove
from tools.podman import Podman, mounts_below
from tools.startlab import host_memory
from tools.startlab.job_image import PYTHON
from tools.startlab.lab import (
    INSIDE_CHECKPOINT,
    INSIDE_JOB,
    INSIDE_MEASURE,
    REQUIREMENTS,
    WORKLOAD,
    StartLab,
    call,
)

Part = Literal["hot set", "layer", "checkpoint", "prefetch"]
"""What can be switched off: then the image is read on demand, the dependencies are installed in the
container, the checkpoint is fetched there before the job, or read on demand.
"""
FIRST_LINE = "step "
"""How the job's first line begins: it prints it when its first step is done."""
LIMIT_S = 600.0
AGENT_KEEP_S = 600.0
"""How long a start's agent stays without another start, where the node's settings ask for one."""
AGENT_LIMIT_S = 30.0
_AGAIN = "the job runs again"
_PLAIN = "plain"
"""The name of the last plain start's container."""
_DIGEST = (
    PYTHON,
    "-c",
    "import hashlib, os, sys\n"
    "digest = hashlib.sha256()\n"
    "for place in ('/usr/local', '/usr/lib/python3'):\n"
    "    for folder, folders, names in os.walk(place):\n"
    "        folders.sort()\n"
    "        for name in sorted(names):\n"
    "            path = os.path.join(folder, name)\n"
    "            if not name.endswith('.pyc') and os.path.isfile(path):\n"
    "                about = f'{path} {os.lstat(path).st_mode}\\0'\n"
    "                digest.update(about.encode() + open(path, 'rb').read())\n"
    "print(digest.hexdigest())\n",
)
"""Prints a digest of all that Debian's Python takes packages from."""
_FETCH = (
    "import os, shutil, sys, urllib.request\n"
    "os.makedirs(os.path.dirname(sys.argv[2]), exist_ok=True)\n"
    "with urllib.request.urlopen(sys.argv[1]) as source, open(sys.argv[2], 'wb') as target:\n"
    "    shutil.copyfileobj(source, target, 1 << 20)\n"
)


@dataclass(frozen=True, slots=True)
class Start:
    """A start that ended: seconds and bytes over the link until its first step was done.

    `output` is what the job printed, `errors` what was said beside it, `events` the folder of its
    events.
    """

    seconds: float
    received_bytes: int
    output: str
    errors: str
    events: Path
    images: Mapping[str, Any] = field(default_factory=dict)

    def written(self) -> list[dict[str, Any]]:
        """Its events."""
        files = sorted(self.events.glob("*.jsonl"))
        texts = (path.read_text(encoding="utf-8") for path in files)
        return [json.loads(line) for text in texts for line in text.splitlines()]

    def fallbacks(self) -> list[str]:
        """Reasons of everything that fell back."""
        fallen = [event for event in self.written() if event["status"] == "fallback"]
        reasons = (e["attributes"].get("bootseer.reason") for e in fallen)
        return [str(reason or event) for reason, event in zip(reasons, fallen, strict=True)]

    def attributes(self, name: str) -> list[dict[str, Any]]:
        """Those of every end and point of a name."""
        kinds = ("end", "point")
        return [
            e["attributes"] for e in self.written() if e["name"] == name and e["event"] in kinds
        ]

    def ended(self, name: str) -> bool:
        """Whether a phase has ended."""
        return any(e["name"] == name and e["event"] == "end" for e in self.written())

    def span_s(self, name: str) -> float:
        """Seconds of a phase; 0 where there is none."""
        times: dict[str, float] = {}
        for event in self.written():
            if event["name"] == name and event["event"] in ("begin", "end"):
                times.setdefault(event["event"], event["time_unix_nano"] / 1e9)
        return times["end"] - times["begin"] if len(times) == 2 else 0.0


class Starts:
    """Starts of the job of a lab, each with events of its own; a context manager.

    With `same_memory` free memory is taken back from the machine's host before each start, and what
    was written before it (a new checkpoint, say) is on the disk. With `keeps_agent` the node's
    settings ask each start to leave an agent behind, which those after it on the node find.
    """

    def __init__(
        self,
        lab: StartLab,
        job_arguments: Sequence[str] = ("--steps", "2"),
        *,
        same_memory: bool = False,
        keeps_agent: bool = False,
    ) -> None:
        self._lab, self._same_memory, self._keeps_agent = lab, same_memory, keeps_agent
        self._arguments = tuple(job_arguments)
        self._number = 0
        self.node, self._runtime = lab.scratch / "node", lab.short / "r"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing running or mounted on the node."""
        self.end_agent()
        self.end_servers()

    # --- the job --------------------------------------------------------------------------------

    def _job(self, checkpoint: str) -> list[str]:
        return [PYTHON, f"{INSIDE_JOB}/train.py", "--checkpoint", checkpoint, *self._arguments]

    def _options(self) -> list[str]:
        """Podman's options on both sides."""
        lab = self._lab
        given = {
            "PIP_INDEX_URL": f"{lab.web.url}/simple",
            "PIP_TRUSTED_HOST": lab.web.host.partition(":")[0],
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_ROOT_USER_ACTION": "ignore",
            "PIP_BREAK_SYSTEM_PACKAGES": "1",
            "PYTHONPATH": INSIDE_MEASURE,
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
        }
        variables = [word for pair in given.items() for word in ("--env", "=".join(pair))]
        volumes = [f"{lab.shown}:{INSIDE_JOB}:ro", f"{lab.modules}:{INSIDE_MEASURE}:ro"]
        shown = [word for volume in volumes for word in ("--volume", volume)]
        return ["--network", "host", *variables, *shown]

    @property
    def _install(self) -> list[str]:
        return [PYTHON, "-m", "pip", "install", "-q", "-r", f"{INSIDE_JOB}/{REQUIREMENTS}"]

    def _fetch(self, target: str) -> list[str]:
        """The stock client of the checkpoint's store."""
        return [PYTHON, "-c", _FETCH, self._lab.plain_checkpoint, target]

    # --- plainly --------------------------------------------------------------------------------

    def plain(self) -> Start:
        """Pull, install, fetch the checkpoint by its stock client, run; nothing local before."""
        lab = self._lab
        lab.podman.forget_images()
        target = f"/tmp/{lab.job.checkpoint}"
        steps = [
            (*_phase("deps.install"), *self._install),
            (*_phase("checkpoint.load"), *self._fetch(target)),
        ]
        script = " && ".join(shlex.join(step) for step in steps) + ' && exec "$@"'
        words = ["sh", "-c", script, "sh", *self._job(target)]
        ours = [sys.executable, "-m", "bootseer", "run", "--phase", "image.pull", "--"]
        pull = [*ours, *lab.podman.command("pull", "--quiet", lab.ref)]

        def run(environ: Mapping[str, str]) -> list[str]:
            shown = _events_options(environ)
            named = ["--name", _PLAIN, *self._options(), *shown]
            return lab.podman.command("run", "--quiet", *named, lab.ref, *words)

        return self._measure([lambda _: pull], run)

    def install_warm(self) -> None:
        """Make what `warm_plain` runs: the image with its dependencies, and a local checkpoint."""
        lab = self._lab
        lab.warm_podman.pull(lab.ref)
        name = "warm"
        lab.warm_podman("run", "--name", name, *self._options(), lab.ref, *self._install)
        lab.warm_podman("commit", "--quiet", name, "localhost/warm:1")
        lab.warm_podman("rm", name)

    def warm_plain(self) -> Start:
        """The job by podman: all on the local disk, and in memory since the start before."""
        lab = self._lab
        shown = ["--volume", f"{lab.www}/checkpoints:{INSIDE_CHECKPOINT}:ro"]
        words = self._job(self._checkpoint)

        def run(environ: Mapping[str, str]) -> list[str]:
            options = [*self._options(), *shown, *_events_options(environ)]
            return lab.warm_podman.command("run", "--rm", *options, "localhost/warm:1", *words)

        return self._measure([], run, lab.warm_podman)

    def installs_alike(self) -> bool:
        """Whether the last plain start's install left the same files as the layer has, to the byte.

        Its container is there until the next one.
        """
        lab = self._lab
        tree = lab.podman("mount", _PLAIN).stdout.strip()
        environ = self._environment(lab.scratch / "events/alike", lab.podman)
        layered = [*self._command(), *self._options(), "--", *_DIGEST]
        try:
            digests = [
                subprocess.run(
                    words, env=environ, stdout=subprocess.PIPE, text=True, check=True
                ).stdout.splitlines()[-1]
                for words in (["chroot", tree, *_DIGEST], layered)
            ]
        finally:
            lab.podman("unmount", _PLAIN)
        return digests[0] == digests[1]

    # --- through bootseer -----------------------------------------------------------------------

    def settings(self, without: Part | None = None) -> Path:
        """The settings file of our side, with one part switched off."""
        deps: dict[str, Any] = {"install": self._install}
        checkpoint: dict[str, Any] = {
            "url": self._lab.striped_checkpoint,
            "to": INSIDE_CHECKPOINT,
            "cache": f"{self.node}/checkpoints",
            "load": self._fetch(self._checkpoint),
        }
        if without == "layer":
            deps["enabled"] = False
        if without == "checkpoint":
            checkpoint["enabled"] = False
        if without == "prefetch":
            checkpoint["prefetch"] = ""
        text = "".join(
            f"[{section}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in values.items())
            for section, values in (("deps", deps), ("checkpoint", checkpoint))
        )
        path = self._lab.scratch / "bootseer.toml"
        path.write_text(text, encoding="utf-8")
        return path

    def empty_node(self) -> None:
        """A node that has nothing of the job, and none of our processes."""
        self.end_servers()  # an agent that the last start has just left does not answer yet
        self.end_agent()
        self.end_servers()
        for folder in (self.node, self._runtime):
            remove(folder)
            folder.mkdir()

    @property
    def _agent(self) -> int:
        """The process of the node's agent; 0 for none."""
        with socket.socket(socket.AF_UNIX) as link:
            try:
                link.connect(socket_path(str(self._runtime)))
            except OSError:
                return 0
            given = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        return int(CREDENTIALS.unpack(given)[0])

    def _await_agent(self) -> None:
        """Wait for the agent that the last start was to leave behind."""
        until = time.monotonic() + AGENT_LIMIT_S
        while self._keeps_agent and not self._agent:
            if time.monotonic() > until:
                raise RuntimeError("the start left no agent behind")
            time.sleep(0.02)

    def end_agent(self) -> None:
        """End the agent that a start has left on the node."""
        agent = self._agent
        if agent:
            process = os.pidfd_open(agent)
            try:
                signal.pidfd_send_signal(process, signal.SIGTERM)
                if not readable(process, timeout_s=AGENT_LIMIT_S):
                    raise RuntimeError("the agent does not end")
            finally:
                os.close(process)

    def end_servers(self) -> None:
        """Wait until what the last start left running on the node has ended, but for an agent."""
        until = time.monotonic() + LIMIT_S
        while self._is_serving() and time.monotonic() < until:
            time.sleep(0.02)
        for path in self._mounts():
            subprocess.run(["umount", "-l", path], check=False)

    def _is_serving(self) -> bool:
        running = {pid for place in (self.node, self._runtime) for pid in _processes_of(place)}
        agent = self._agent if running else 0
        if agent in running:
            running -= {agent, *filter(_is_sweeper, children_of(agent))}
        return bool(running or self._mounts())

    def _mounts(self) -> list[str]:
        return mounts_below(self.node) + mounts_below(self._runtime)

    @property
    def _checkpoint(self) -> str:
        """Where the job finds its checkpoint."""
        return f"{INSIDE_CHECKPOINT}/{self._lab.job.checkpoint}"

    def ours(self, without: Part | None = None) -> Start:
        """One command, on the node as it is, with one part switched off."""
        job = self._job(self._checkpoint)
        command = [*self._command(without), *self._options(), "--", *job]
        return self._measure([], lambda _: command)

    def _command(self, without: Part | None = None) -> list[str]:
        """Our command, up to podman's options."""
        places = ["--cache", str(self.node / "cache"), "--runtime", str(self._runtime)]
        words = ["run", "--config", str(self.settings(without)), "--workload", WORKLOAD]
        words += ["--plain-http", *(["--no-hot"] if without == "hot set" else [])]
        program = str(Path(sys.executable).with_name("bootseer"))
        return [program, "image", *words, *places, self._lab.ref]

    def again(self) -> Start:
        """The job once more in the container of a start that has run it, on the node as it is.

        Seconds and bytes are those of the second run.
        """
        self.end_servers()
        self._await_agent()
        job = self._job(self._checkpoint)
        words = ["sh", "-c", f'"$@" > /dev/null && echo {_AGAIN} && exec "$@"', "sh", *job]
        command = [*self._command(), *self._options(), "--", *words]
        return self._measure([], lambda _: command, begins_with=_AGAIN)

    def fresh(self, without: Part | None = None) -> Start:
        """On a node that has nothing of the job."""
        self.empty_node()
        return self.ours(without)

    def second(self, without: Part | None = None) -> Start:
        """Again on the node of the last start."""
        self.end_servers()
        self._await_agent()
        return self.ours(without)

    def second_alone(self) -> Start:
        """As `second`, where the last start has left no agent behind, and this one leaves none."""
        keeps_agent, self._keeps_agent = self._keeps_agent, False
        try:
            self.end_agent()
            return self.second()
        finally:
            self._keeps_agent = keeps_agent

    def newer(self) -> Start:
        """Again on the node of the last start, but for a new version of the checkpoint."""
        self.end_servers()
        self._await_agent()
        self._lab.publish_checkpoint()
        return self.ours()

    def record(self) -> Start:
        """The first starts there are: one installs and publishes, the next is recorded.

        Returns the first.
        """
        first = self.fresh()
        if first.fallbacks():
            raise RuntimeError(f"the first start fell back: {first.fallbacks()[0]}")
        until = time.monotonic() + LIMIT_S
        while not first.ended("deps.publish"):
            if time.monotonic() > until:
                raise RuntimeError("the dependencies' layer was not published")
            time.sleep(0.1)
        self.fresh()
        self.end_servers()
        self.publish_hot_sets()
        return first

    def warm(self) -> None:
        """Have all of the job on the node, as after the time that a job runs."""
        self.end_servers()
        settings = self.settings()
        places = ["--cache", str(self.node / "cache"), "--runtime", str(self._runtime)]
        words = ["--config", str(settings), "--workload", WORKLOAD, "--plain-http", *places]
        ours = [sys.executable, "-m", "bootseer", "warm", "--image", self._lab.ref]
        call(
            [*ours, *words, "--", *self._options()],
            env=self._environment(self.node / "events", self._lab.podman),
        )
        self.end_servers()

    def warmed(self) -> Start:
        """On a node that was made ready before, and had nothing of the job until then."""
        self.warm_empty()
        return self.second()

    def warm_empty(self) -> None:
        """Have all of the job on a node that has run nothing of it."""
        self.empty_node()
        self.warm()

    def refs(self) -> list[str]:
        """The job's image, and the layers of its dependencies."""
        from bootseer.storage.oci.open import open_repository

        with open_repository(self._lab.ref, plain_http=True)[0] as repository:
            layers = [tag for tag in repository.tags() if tag.startswith("bootseer-deps-")]
        place = self._lab.ref.rpartition(":")[0]
        return [self._lab.ref, *(f"{place}:{tag}" for tag in layers)]

    @property
    def checkpoint_bytes(self) -> int:
        """The checkpoint as stored."""
        return self._lab.sizes.checkpoint

    def needed_bytes(self) -> int:
        """What a start needs over the link: the image's hot pack, the wheels, the checkpoint."""
        from bootseer.imageprefetch.image_cache import ImageCache
        from bootseer.storage.oci.open import open_repository

        with open_repository(self._lab.ref, plain_http=True)[0] as repository:
            image, _ = repository.image(self._lab.ref.rpartition(":")[2])
        folder = Path(ImageCache(str(self.node / "cache")).folder_of(image.digest))
        pack = sum(path.stat().st_size for path in folder.glob("pack-*"))
        return pack + self._lab.sizes.wheels + self._lab.sizes.checkpoint

    def publish_hot_sets(self) -> None:
        """Publish what the starts on this node have read, of the image and of the layer at once."""
        words = [sys.executable, "-m", "bootseer", "image", "hotset", "build"]
        words += ["--workload", WORKLOAD, "--push", "--plain-http"]
        words += ["--cache", str(self.node / "cache")]

        def publish(ref: str) -> None:
            call([*words, ref], env=self._lab.podman.environment)

        with ThreadPoolExecutor() as pool:
            list(pool.map(publish, self.refs()))

    # --- measuring ------------------------------------------------------------------------------

    def _measure(
        self,
        before: Sequence[Any],
        last: Any,
        podman: Podman | None = None,
        *,
        begins_with: str = "",
    ) -> Start:
        """Run commands one after the other until the last one's first step.

        With `begins_with` what counts begins with that line of its output.
        """
        self._number += 1
        folder = self._lab.scratch / "events" / str(self._number)
        environ = self._environment(folder, podman or self._lab.podman)
        if self._same_memory:
            os.sync()
            host_memory.take_back()
        received, began = self._lab.received_bytes(), time.perf_counter()
        with events.open_writer(None, environ) as writer:
            writer.point("launch")
            environ |= events.child_environment(writer, None, environ)
        errors = ""
        for make in before:
            errors += call(make(environ), env=environ)
        with _watched(last(environ), environ) as process:
            lines = []
            assert process.stdout is not None
            for line in process.stdout:
                if begins_with and line.rstrip() == begins_with:
                    received, began = self._lab.received_bytes(), time.perf_counter()
                    continue
                lines.append(line)
                if line.startswith(FIRST_LINE):
                    break
            seconds = time.perf_counter() - began
            received = self._lab.received_bytes() - received
            output, said = process.communicate(timeout=LIMIT_S)
        errors += said
        if process.returncode or not lines:
            raise RuntimeError(f"the job failed ({process.returncode}): {errors[-2000:]}")
        return Start(seconds, received, "".join(lines) + output, errors, folder)

    def _environment(self, folder: Path, podman: Podman) -> dict[str, str]:
        """Neither the caller's settings nor an unusual Python shall decide what is measured."""
        given = podman.environment
        ours = {k: v for k, v in given.items() if not k.startswith(("BOOTSEER_", "PYTHON"))}
        job = f"start-{self._number}"
        if self._keeps_agent:
            ours["BOOTSEER_AGENT_KEEP"] = f"{AGENT_KEEP_S:g}"
        return {**ours, "BOOTSEER_EVENTS": str(folder), "BOOTSEER_JOB_UID": job}


@contextlib.contextmanager
def _watched(command: Sequence[str], environ: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        command,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        except BaseException:  # no container goes on without us
            process.terminate()
            raise


def _phase(name: str) -> tuple[str, ...]:
    """The words before a command in the container that measure it as a phase."""
    return (PYTHON, "-m", "bootseer", "run", "--phase", name, "--")


def _events_options(environ: Mapping[str, str]) -> list[str]:
    """Podman's options by which a container writes its events into this start's."""
    folder = environ["BOOTSEER_EVENTS"]
    os.makedirs(folder, exist_ok=True)
    given = {"BOOTSEER_EVENTS": "/events", **{n: environ[n] for n in _HANDED if n in environ}}
    variables = [word for pair in given.items() for word in ("--env", "=".join(pair))]
    return ["--volume", f"{folder}:/events", *variables]


_HANDED = ("BOOTSEER_TRACEPARENT", "BOOTSEER_JOB_UID")


def _is_sweeper(process: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/comm").read_bytes() == sweeper.NAME + b"\n"
    return False


def _processes_of(folder: Path) -> Iterator[int]:
    """The processes that have a place in a folder in their command line."""
    inside = os.fsencode(folder)
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if inside in (process / "cmdline").read_bytes():
                yield int(process.name)
