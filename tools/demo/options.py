"""What a demonstration is asked to do."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tools.startlab.lab import Link

DEFAULT_LINK = Link()
ROOT = Path(__file__).parent.parent.parent
MIN_ROUNDS = 3  # below that the report refuses to claim


@dataclass(frozen=True, slots=True)
class Options:
    """`job` holds `train.py` and `requirements.txt`; `job_arguments` go to the script. `kept`
    is where downloads stay for the next time, `scratch` where everything else lies meanwhile.
    `store` is where the checkpoint lies. With `containers` the job runs in its container, behind
    `link`, where this machine can do that.
    `floor` is the least speedup that counts as success; None: do not judge it."""

    job: Path
    out: Path
    kept: Path
    scratch: Path
    rounds: int = MIN_ROUNDS
    cold: bool = True
    store: Literal["local", "hdfs"] = "local"
    containers: bool = False
    link: Link = DEFAULT_LINK
    floor: float | None = 1.5
    job_arguments: tuple[str, ...] = ("--steps", "2")
    checkpoint_arguments: tuple[str, ...] = ()


def parse(arguments: list[str] | None = None) -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo", description=__doc__)
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help="starts of each kind")
    parser.add_argument("--out", type=Path, default=ROOT / "demo-out", help="for the reports")
    parser.add_argument("--scratch", type=Path, help="needs 4 GB for a while; default: in OUT")
    parser.add_argument("--warm", action="store_true", help="keep the page cache between starts")
    parser.add_argument(
        "--store", choices=["local", "hdfs"], default="local", help="where the checkpoint lies"
    )
    parser.add_argument(
        "--no-containers",
        action="store_true",
        help="run the job on this machine's files, as where it cannot run in a container",
    )
    parser.add_argument(
        "--link",
        type=_parse_link,
        default=DEFAULT_LINK,
        metavar="MBIT/MS",
        help="the emulated link of a job in its container: Mbit/s (0: any) and round trip in ms",
    )
    given = parser.parse_args(arguments)
    if given.rounds < MIN_ROUNDS:
        parser.error(f"--rounds must be at least {MIN_ROUNDS}: fewer starts prove nothing")
    out = given.out.resolve()
    return Options(
        job=ROOT / "examples" / "train",
        out=out,
        kept=ROOT / ".setup" / "demo",
        # A place of our own below it, for it is emptied before and after.
        scratch=(given.scratch or out).resolve() / "bootseer-demo-scratch",
        rounds=given.rounds,
        cold=not given.warm,
        store=given.store,
        containers=not given.no_containers,
        link=given.link,
    )


def _parse_link(text: str) -> Link:
    mbit, slash, rtt_ms = text.partition("/")
    try:
        link = Link(float(mbit), float(rtt_ms) if slash else 0.0)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: write MBIT/MS, such as 1000/1") from None
    if link.mbit < 0 or link.rtt_ms < 0:
        raise argparse.ArgumentTypeError(f"{text}: neither may be negative")
    return link
