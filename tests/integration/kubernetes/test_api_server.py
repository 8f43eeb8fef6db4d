"""Manifests asked of a real API server: every one is accepted, and the component really runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.kubernetes.test_manifests import EXAMPLES, ROOT, documents, injected
from tests.support.labs.kubernetes import BARE, IMAGE
from tests.support.labs.pods import Lab
from tools.k8s.cluster import Cluster

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.debian("etcd-server")]

KINDS = {  # of the examples; minimal definitions of our own
    "JobSet": ("jobset.x-k8s.io", "v1alpha2", "jobsets"),
    "PyTorchJob": ("kubeflow.org", "v1", "pytorchjobs"),
    "TrainJob": ("trainer.kubeflow.org", "v1alpha1", "trainjobs"),
    "TrainingRuntime": ("trainer.kubeflow.org", "v1alpha1", "trainingruntimes"),
}


def definition(kind: str) -> dict[str, Any]:
    group, version, plural = KINDS[kind]
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    served = {"name": version, "served": True, "storage": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{group}",
            # *.k8s.io names are the project's own; this says that ours is for a test
            "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
        },
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"plural": plural, "singular": kind.lower(), "kind": kind},
            "versions": [{**served, "schema": {"openAPIV3Schema": schema}}],
        },
    }


@pytest.fixture(scope="module")
def kinds(api: Any) -> Any:
    for kind in KINDS:
        api.kubectl("apply", "-f", "-", data=json.dumps(definition(kind)))
    for kind, (group, _, plural) in KINDS.items():
        api.kubectl("wait", "--for=condition=established", f"crd/{plural}.{group}")
        assert kind
    return api


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_the_server_accepts_every_example(kinds: Any, path: Path) -> None:
    for raw in (path.read_text(encoding="utf-8"), injected(path)):
        # 1.20 does not know completionMode yet: its client would refuse the field.
        old = yaml.safe_dump_all(_without_newer(documents(raw)))
        said = kinds.kubectl("apply", "--dry-run=server", "-f", "-", data=old)
        assert said.count("(server dry run)") == len(documents(raw))


def _without_newer(found: list[Any]) -> list[Any]:
    for document in found:
        if document["kind"] == "Job":
            document["spec"].pop("completionMode", None)
    return found


def test_the_server_would_refuse_a_wrong_one(kinds: Any) -> None:
    (job,) = documents(injected(EXAMPLES[1]))
    job["spec"].pop("completionMode", None)
    job["spec"]["template"]["spec"]["containers"][0]["volumeMounts"][0]["name"] = "lost"
    with pytest.raises(RuntimeError, match="lost"):
        kinds.kubectl("apply", "--dry-run=server", "-f", "-", data=json.dumps(job))


def test_the_component_is_applied_and_the_job_runs(k8s: Any, namespace: str) -> None:
    lab = Lab(k8s, namespace)
    copy = lab.folder / "k8s"
    shutil.copytree(ROOT, copy)
    (copy / "examples/job.yaml").write_text(
        (ROOT / "examples/job.yaml")
        .read_text(encoding="utf-8")
        .replace("registry.example/train:1", BARE)
        .replace("[python3, train.py]", "[sh, -c, 'echo trained']")
        .replace("            nvidia.com/gpu: 8", "            cpu: 1"),
        encoding="utf-8",
    )
    kustomization = copy / "examples/kustomization.yaml"
    name, _, tag = IMAGE.rpartition(":")
    text = kustomization.read_text(encoding="utf-8")
    text = text.replace("registry.example/bootseer-init", name).replace("0.1.0", f'"{tag}"')
    kustomization.write_text(f"namespace: {namespace}\n{text}", encoding="utf-8")
    for claim in ("events", "store"):
        volume = {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"{namespace}-{claim}"},
            "spec": {
                "capacity": {"storage": "100Gi"},
                "accessModes": ["ReadWriteMany"],
                "hostPath": {"path": str(lab.folder / claim)},
                "claimRef": {"namespace": namespace, "name": f"bootseer-{claim}"},
            },
        }
        k8s.kubectl("apply", "-f", "-", data=json.dumps(volume))
    try:
        newer = str(Path(sys.executable).parent / "kubectl")  # 1.20's own knows no components
        command = k8s.kubectl_command("apply", "-k", str(copy / "examples"), "--validate=false")
        command[command.index(next(w for w in command if w.endswith("/kubectl")))] = newer
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found = lambda: k8s.get("job", "train", "-n", namespace)["status"]  # noqa: E731
        k8s.wait_for(lambda: found().get("succeeded") == 1, "the job")
        assert k8s.kubectl("logs", "job/train", "-n", namespace).strip() == "trained"
        assert {e["name"] for e in lab.lines()} >= {"start", "container.start"}
        assert not [e for e in lab.lines() if e["status"] == "fallback"]
    finally:
        for claim in ("events", "store"):
            k8s.kubectl("delete", "pv", f"{namespace}-{claim}", "--wait=false")


def test_a_machine_without_cgroup_v1_is_told_so(tmp_path: Path) -> None:
    """Fault injection: a controller that no kernel has."""
    code = "from tools.k8s import node; node.CONTROLLERS = ('none',); node._cgroups('x')"
    words = ["unshare", "-m", "--propagation", "private", sys.executable, "-c", code]
    cluster = Cluster(tmp_path)
    cluster.run.mkdir()
    with (cluster.run / "node.log").open("wb") as log:
        cluster._process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log)
    assert cluster._process.wait() == 1
    said = "^the node ended: the Kubernetes node needs cgroup v1, and its none is not to be had"
    with pytest.raises(RuntimeError, match=said):
        cluster._wait_ready()
