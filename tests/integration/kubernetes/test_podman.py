"""`podman kube play` of injected pod templates: all that this podman can take, the rest by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from bootseer.kubernetes import inject, manifest_text
from bootseer.kubernetes.options import Options, Place
from tests.integration.kubernetes.test_manifests import EXAMPLES, ROOT, injected, pod_specs

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.debian("podman")]

IMAGE, BARE = "localhost/bootseer-init:1", "localhost/lab/bare:1"
NOT_RUN = {  # said in docs/kubernetes.md too
    "TrainingRuntime": "its pods have no command of their own; each TrainJob brings one",
    "TrainJob": "it has no pod template",
}
NODE = [{"name": "K8S_NAMESPACE", "value": "here"}, {"name": "K8S_NODE_NAME", "value": "laptop"}]
"""Fields that podman 4.3 cannot fill in; where a manifest sets them itself, ours are left out."""


@pytest.fixture(scope="module")
def player(
    podman: Any, init_image: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    from tools.k8s import images

    work = tmp_path_factory.mktemp("podman")
    images.bare_image(work / "bare.tar", work)
    for archive, name in ((init_image, IMAGE), (work / "bare.tar", BARE)):
        podman("tag", podman.pull(f"oci-archive:{archive}"), name)
    yield podman
    podman("rmi", "--force", IMAGE, BARE)


def templates() -> dict[str, Any]:
    """Every pod template of the examples, by the object it stands in."""
    found = {}
    for path in EXAMPLES:
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            for number, spec in enumerate(pod_specs(document)):
                found[f"{path.stem}-{document['kind'].lower()}-{number}"] = (document, spec)
    return found


def as_pod(name: str, spec: Any, script: str) -> Any:
    """The template as a pod: what podman can play of it. The program is ours."""
    (container,) = spec["containers"]
    container |= {"name": "main", "image": BARE, "command": ["sh", "-c", script], "env": list(NODE)}
    container.pop("args", None)
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}}
    return {**pod, "spec": {**spec, "restartPolicy": "Never"}}


def test_templates_run_as_pods(player: Any, tmp_path: Path) -> None:
    events = tmp_path / "events"
    events.mkdir()
    chosen = {n: spec for n, (d, spec) in templates().items() if d["kind"] not in NOT_RUN}
    assert len(chosen) >= 5
    options = Options(image=IMAGE, events=Place("host", str(events)))
    pods = []
    for number, (name, spec) in enumerate(chosen.items()):
        raw = json.dumps(as_pod(name, spec, f"echo ran in {name}; exit {number}"))
        pods.append(inject.inject(manifest_text.decode(raw.encode(), name), options).raw)
    played = tmp_path / "pods.yaml"
    played.write_text("\n---\n".join(pods), encoding="utf-8")
    try:
        player("kube", "play", "--network", "none", str(played))
        for number, name in enumerate(chosen):
            assert player("wait", f"{name}-main").stdout.strip() == str(number)
            assert player("logs", f"{name}-main").stdout.strip() == f"ran in {name}"
    finally:
        player("pod", "rm", "--all", "--force", "--time", "0")
    lines = [
        json.loads(line)
        for path in events.rglob("*.jsonl")
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    told = [e["attributes"] for e in lines if e["event"] == "resource"]
    assert {a["k8s.pod.name"] for a in told} == set(chosen)
    assert {a["k8s.node.name"] for a in told} == {"laptop"}
    starts = [e for e in lines if e["name"] == "start"]
    assert len(starts) == len(chosen)


def test_what_is_not_run_is_named(player: Any, tmp_path: Path) -> None:
    kinds = {d["kind"] for d, _ in templates().values()} | {"TrainJob"}
    assert set(NOT_RUN) <= kinds
    page = (ROOT.parent / "docs/kubernetes.md").read_text(encoding="utf-8")
    assert all(name in page.partition("podman kube play")[2] for name in NOT_RUN)
    whole = tmp_path / "job.yaml"  # a Job as it stands: its template is played as a pod instead
    whole.write_text(injected(ROOT / "examples/job.yaml"), encoding="utf-8")
    done = player("kube", "play", str(whole), check=False)
    assert done.returncode != 0
    assert "supported" in done.stderr
