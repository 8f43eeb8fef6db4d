"""Writes `k8s/components/*/patch.yaml` from the plan that `bootseer inject` follows.

    python -m tools.manifests

So the component and the command put in the same things; a test holds the files to this.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bootseer.kubernetes import edits
from bootseer.kubernetes.identity import BATCH_JOB
from bootseer.kubernetes.options import Options, Place
from bootseer.kubernetes.plan import additions

ROOT = Path(__file__).parents[1]
POD, MAIN = "/spec/template/spec", "/spec/template/spec/containers/0"
OPTIONS = Options(
    events=Place("claim", "bootseer-events"),
    store=Place("claim", "bootseer-store"),
    config_map="bootseer-config",
)
HEADER = """\
# Made by `python -m tools.manifests`: what `bootseer inject` puts into a Job, as JSON patches
# (RFC 6902). Each entry says below which path it puts something.
"""


def job_patch() -> str:
    """The patch of the component for Jobs."""
    new = additions(OPTIONS, BATCH_JOB, [])
    operations: list[edits.Value] = [_add(f"{POD}/initContainers/0", new.init_containers[0])]
    operations += [_add(f"{POD}/volumes/-", volume) for volume in new.volumes]
    operations += [_add(f"{MAIN}/env/-", variable) for variable in new.environment]
    operations += [_add(f"{MAIN}/volumeMounts/-", mount) for mount in new.mounts]
    operations += _words(new.prefix)
    return HEADER + "\n".join(edits.block_items(operations, 0)) + "\n"


def _words(prefix: Sequence[str]) -> list[edits.Value]:
    """The last word first, each before the command as it then is."""
    return [_add(f"{MAIN}/command/0", word) for word in reversed(prefix)]


def _add(path: str, value: edits.Value) -> dict[str, edits.Value]:
    return {"op": "add", "path": path, "value": value}


def files() -> dict[Path, str]:
    """Every generated file and its text."""
    return {ROOT / "k8s/components/job/patch.yaml": job_patch()}


def main() -> None:
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
