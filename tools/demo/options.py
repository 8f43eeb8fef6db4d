"""What a demonstration is asked to do."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parent.parent.parent
MIN_ROUNDS = 3  # below that the report refuses to claim


@dataclass(frozen=True, slots=True)
class Options:
    """`job` holds `train.py` and `requirements.txt`; `job_arguments` go to the script. `kept`
    is where downloads stay for the next time, `scratch` where everything else lies meanwhile.
    `store` is where the checkpoint lies; `image` is what runs as a container.
    `floor` is the least speedup that counts as success; None: do not judge it."""

    job: Path
    out: Path
    kept: Path
    scratch: Path
    rounds: int = MIN_ROUNDS
    cold: bool = True
    store: Literal["local", "hdfs"] = "local"
    image: Literal["job", "small", "off"] = "job"
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
        "--image", choices=["job", "off"], default="job", help="start a container's image as well"
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
        image=given.image,
    )
