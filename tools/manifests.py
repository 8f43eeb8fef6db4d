"""Writes `k8s/components/*/additions` from the plan that `bootseer inject` follows.

    python -m tools.manifests

So the component and the command put in the same things; a test holds the files to this. A JSON
patch can only add to lists that are there, and a strategic merge has to name the container. So
the pod's lists come by a merge, the container's by replacements, which make what is missing, and
the words before the command by a JSON patch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bootseer.kubernetes import insertions
from bootseer.kubernetes.additions import Additions, decide_additions
from bootseer.kubernetes.identity import BATCH_JOB
from bootseer.kubernetes.options import Options, Place

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "k8s/components/job/additions"
MAIN = "spec.template.spec.containers.0"
OPTIONS = Options(
    events=Place("claim", "bootseer-events"),
    store=Place("claim", "bootseer-store"),
    config_map="bootseer-config",
)
HEADER = "# Made by `python -m tools.manifests`: "
TARGET = {
    "group": "batch",
    "version": "v1",
    "kind": "Job",
    "labelSelector": "bootseer.io/inject!=false",
}
SOURCE = {"group": "bootseer.io", "kind": "Additions", "name": "bootseer-additions"}


def files() -> dict[Path, str]:
    """Every generated file and its text."""
    new = decide_additions(OPTIONS, BATCH_JOB, [])
    return {
        FOLDER / "kustomization.yaml": _write("the order of the parts.", _kustomization()),
        FOLDER / "additions.yaml": _write("what is copied into each Job.", _additions(new)),
        FOLDER / "pod.yaml": _write("a strategic merge into the pod.", _pod(new)),
        FOLDER / "replacements.yaml": _write("copies into the container.", _replacements(new)),
        FOLDER / "command.yaml": _write("the words before the command.", _words(new.prefix)),
    }


def _write(what: str, content: Mapping[str, insertions.Value] | Sequence[insertions.Value]) -> str:
    if isinstance(content, Mapping):
        lines = insertions.format_block_keys(content, 0)
    else:
        lines = insertions.format_block_items(content, 0)
    return "\n".join([HEADER + what, *lines]) + "\n"


def _kustomization() -> dict[str, insertions.Value]:
    return {
        "apiVersion": "kustomize.config.k8s.io/v1alpha1",
        "kind": "Component",
        "resources": ["additions.yaml"],
        "patches": [
            {"path": "pod.yaml", "target": TARGET},
            {"path": "command.yaml", "target": TARGET},
        ],
        "replacements": [{"path": "replacements.yaml"}],
    }


def _additions(new: Additions) -> dict[str, insertions.Value]:
    return {
        "apiVersion": "bootseer.io/v1",
        "kind": "Additions",
        "metadata": {
            "name": "bootseer-additions",
            "annotations": {"config.kubernetes.io/local-config": "true"},
        },
        "env": _by_name(new.environment),
        "volumeMounts": _by_name(new.mounts),
    }


def _by_name(entries: Sequence[Mapping[str, insertions.Value]]) -> dict[str, insertions.Value]:
    return {str(entry["name"]): dict(entry) for entry in entries}


def _pod(new: Additions) -> dict[str, insertions.Value]:
    pod = {"initContainers": new.init_containers, "volumes": new.volumes}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "any"},
        "spec": {"template": {"spec": pod}},
    }


def _replacements(new: Additions) -> list[insertions.Value]:
    """One for each entry, whole, or `value` and `valueFrom` would stand together where the Job has
    the other; `create` makes the lists and entries that are missing."""
    return [
        {
            "source": {**SOURCE, "fieldPath": f"{group}.{entry['name']}"},
            "targets": [
                {
                    "select": TARGET,
                    "fieldPaths": [f"{MAIN}.{group}.[name={entry['name']}]"],
                    "options": {"create": True},
                }
            ],
        }
        for group, entries in (("env", new.environment), ("volumeMounts", new.mounts))
        for entry in entries
    ]


def _words(prefix: Sequence[str]) -> list[insertions.Value]:
    """The last word first, each before the command as it then is."""
    path = f"/{MAIN.replace('.', '/')}/command/0"
    return [{"op": "add", "path": path, "value": word} for word in reversed(prefix)]


def main() -> None:
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
