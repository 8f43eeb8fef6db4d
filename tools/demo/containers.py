"""The demonstration as root: the job in its container, everything it needs behind one link.

The image lies in a registry, its dependencies in a package index, its checkpoint on a web server.
Plainly the image is pulled, the dependencies installed and the checkpoint fetched, one after the
other, before the job runs; through bootseer all is one command, `bootseer image run --config`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bootseer.errors import NotSupportedError
from bootseer.fuse.mount.mount_point import can_mount
from bootseer.profiler.report.model import PartUse, StartKind
from tools import netdelay
from tools.demo import outcome
from tools.demo.options import Options
from tools.netlab import own_network
from tools.startlab.lab import Job, StartLab, download
from tools.startlab.starts import AGENT_KEEP_S, Start, Starts

PROGRAMS = ("docker-registry", "skopeo", "podman", "runc", "gcc", "ip", "iptables")
LABELS = {
    "plain": "plain: pull, install, fetch, then the job",
    "record": "bootseer, nothing published yet",
    "fresh": "bootseer, fresh node",
    "standby": "bootseer, on a node that `warm` made ready",
    "second": "bootseer, second start on a node",
    "again": "bootseer, again in the same container",
}


def missing() -> str:
    """Why this machine cannot run the job in a container; "" where it can."""
    if not can_mount():
        return "mounting an image and running containers needs root with CAP_SYS_ADMIN"
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if shutil.which("nginx") is None and shutil.which("nginx", path="/usr/sbin") is None:
        absent.append("nginx")
    if absent:
        return f"{', '.join(absent)} not installed (Debian's packages of these names)"
    if not os.path.exists("/dev/fuse"):
        return "this machine has no /dev/fuse"
    try:
        netdelay.program()
    except (RuntimeError, OSError) as error:
        first_line = str(error).splitlines()[0]
        return f"the link's round trip cannot be emulated: {first_line}"
    return ""


@dataclass(frozen=True, slots=True)
class Ran:
    """A start of a kind, as `outcome` takes it."""

    kind: str
    start: Start

    @property
    def events(self) -> Path:
        return self.start.events

    @property
    def wall_s(self) -> float | None:
        return self.start.seconds


def run(chosen: Options, say: Callable[[str], None]) -> outcome.Result:
    """All starts, and what they show. Raises NotSupportedError where the job fails."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # it would have programs compiled each time
    say("preparing: the job's image and packages, which a first run downloads and makes ...")
    job = Job.of_example(chosen.job)
    download(job, chosen.kept)
    with (
        own_network(),
        StartLab(job, chosen.kept, chosen.scratch, chosen.link) as lab,
        Starts(lab, chosen.job_arguments, keeps_agent=True) as starts,
    ):
        say("preparing: a first start, which installs and publishes, and one that is recorded ...")
        try:
            record = starts.record()
        except RuntimeError as error:
            raise NotSupportedError(str(error)) from error
        faults: list[str] = []
        done = [Ran("record", record)]
        for number in range(chosen.rounds):
            for kind, start in _round(starts, number):
                done.append(Ran(kind, start))
                faults += _faults(kind, start, done[0].start)
                received = start.received_bytes / 1e6
                say(f"{LABELS[kind]}: {start.seconds:.2f} s, {received:.1f} MB over the link")
        if not starts.installs_alike():
            faults.append("the installed files are not a plain install's")
        emulated = [
            f"one link ({chosen.link}) to registry, package index and checkpoint, on this machine",
            "fresh node: this machine without anything of the job's; its programs and the servers' "
            "files are in memory",
            f"each start leaves an agent behind (BOOTSEER_AGENT_KEEP={AGENT_KEEP_S:g}), which the "
            "later ones on the node find; on a fresh node there is none",
        ]
        again: dict[str, StartKind] = {"again": "restart_in_place"}
        return outcome.evaluate(done, _parts(done), faults, emulated, LABELS, again)


def _round(starts: Starts, number: int) -> Iterator[tuple[str, Start]]:
    """One start of each kind; the two sides take turns at being first.

    The second start follows that of a node made ready, which has all of the job, as a node has
    whose job has run for a while: so the node is filled once a round.
    """
    if number % 2 == 0:
        yield "plain", starts.plain()
    yield "fresh", starts.fresh()
    yield "standby", starts.warmed()
    yield "second", starts.second()
    yield "again", starts.again()
    if number % 2:
        yield "plain", starts.plain()


def _faults(kind: str, start: Start, first: Start) -> list[str]:
    """Why a start was not right; empty when it was."""
    out = [f"fell back: {reason}" for reason in start.fallbacks()]
    if start.output != first.output:
        out.append(f"the job printed {start.output!r}, not {first.output!r}")
    if kind in ("fresh", "second", "standby"):
        ends = start.attributes("deps.install")
        forms = [end.get("bootseer.form") for end in ends]
        if forms != ["layer"]:
            out.append(f"the dependencies came by {forms}, not by the layer")
    if kind in ("second", "again", "standby") and start.received_bytes > _FEW_BYTES:
        out.append(f"{start.received_bytes} bytes came over the link, which were there already")
    return [f"{kind}: {text}" for text in out]


_FEW_BYTES = 1_000_000
"""More than asking for names takes."""


def _parts(done: Sequence[Ran]) -> Mapping[str, PartUse]:
    """What the fresh starts made of each part."""
    fresh = [ran.start for ran in done if ran.kind == "fresh"]
    mounts = [end for start in fresh for end in start.attributes("image.replay")]
    hot_mb = max((int(end["bootseer.bytes"]) for end in mounts), default=0) / 1e6
    loads = {
        end.get("bootseer.form") for start in fresh for end in start.attributes("checkpoint.load")
    }
    ahead = [end for start in fresh for end in start.attributes("checkpoint.prefetch")]
    return {
        "image": PartUse(bool(hot_mb), f"mounted as it arrives, with a hot set of {hot_mb:.1f} MB"),
        "deps": PartUse(True, "a layer above the image, which the first start made"),
        "checkpoint": PartUse("mount" in loads, f"mounted; {len(ahead)} of {len(fresh)} ahead"),
    }
