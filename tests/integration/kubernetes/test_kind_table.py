"""Every kind of the table in docs/kubernetes.md, by a manifest as it is really written.

The manifests are those of tests/support/data/kinds; containers called `logs` stand beside the
job's there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from bootseer.kubernetes import inject, kinds, pods
from bootseer.kubernetes.options import LAUNCHER, Options
from tests.integration.kubernetes.test_commands import bootseer
from tests.support.paths import DATA, ROOT
from tests.support.samples.manifests import taken_out, text

pytestmark = pytest.mark.slow


def read_manifests() -> dict[str, str]:
    """The text of each manifest of tests/support/data/kinds by its object, as messages call it."""
    found = {}
    for path in sorted((DATA / "kinds").glob("*.yaml")):
        for raw in path.read_text(encoding="utf-8").split("---\n"):
            one = yaml.safe_load(raw)
            name = one["metadata"].get("name") or one["metadata"]["generateName"]
            found[f"{one['kind']}/{name}"] = raw
    return found


MANIFESTS = read_manifests()
UID = "metadata.uid"
JOB = "metadata.labels['controller-uid']"
JOBSET = "metadata.labels['jobset.sigs.k8s.io/jobset-uid']"
VOLCANO = "metadata.annotations['scheduling.k8s.io/group-name']"
KUBEFLOW = "metadata.labels['training.kubeflow.org/job-name']"
RAY_NAME = "metadata.labels['ray.io/cluster']"
GROUP = "metadata.labels['leaderworkerset.sigs.k8s.io/group-key']"
INJECTED = {  # and what names the start
    "Pod/notebook": {UID},
    "PodTemplate/spawned": {UID},
    "ReplicationController/parameter-server": {UID},
    "Deployment/embed": {UID},
    "StatefulSet/cache": {UID},
    "DaemonSet/gpu-check": {UID},
    "ReplicaSet/frontend": {UID},
    "Job/tokenize-": {JOB},
    "CronJob/nightly-eval": {JOB},
    "JobSet/pretrain": {JOBSET},
    "LeaderWorkerSet/vllm": {GROUP},
    "DisaggregatedSet/serve": {GROUP},
    "Job/horovod": {VOLCANO},
    "JobTemplate/prepare": {VOLCANO},
    "PyTorchJob/mnist": {KUBEFLOW},
    "TFJob/criteo": {KUBEFLOW},
    "XGBoostJob/iris": {KUBEFLOW},
    "PaddleJob/collective": {KUBEFLOW},
    "JAXJob/flax": {KUBEFLOW},
    "MPIJob/nccl": {KUBEFLOW},
    "ClusterTrainingRuntime/torch-distributed": {JOBSET},
    "TrainingRuntime/deepspeed": {JOBSET},
    "TrainJob/finetune": set(),  # its runtime's pods say it
    "RayCluster/shared": {RAY_NAME},
    "RayJob/tune": {RAY_NAME, JOB},  # the submitter is a Job's
    "RayService/text-ml": {RAY_NAME},
    "RayCronJob/retrain": {RAY_NAME, JOB},
    "Workflow/pipeline-": {UID},
    "WorkflowTemplate/pipeline": {UID},
    "ClusterWorkflowTemplate/evaluate": {UID},
    "CronWorkflow/hourly": {UID},
}
UNKNOWN = {  # likewise, with a word
    "RayClusterFleet/qwen": "",
    "RoleBasedGroup/sglang": "left as it is: its patch at spec.roles[0].standalonePattern",
}
KSERVE = "KServe merges its containers with those of a runtime or of presets"
KNATIVE = "Knative takes init containers only where its feature podspec-init-containers is on"
NO_TEMPLATE = "it has containers at spec.{}, but no pod's template, and the kind {} is unknown here"
LEFT = {
    "TrainJob/as-the-runtime-says": "it has no command: what its runtime torch-distributed starts",
    "Workflow/from-template-": "its templates are those of pipeline; inject that one",
    "InferenceService/summarize": KSERVE,
    "InferenceService/iris": KSERVE,
    "LLMInferenceService/qwen": KSERVE,
    "LLMInferenceServiceConfig/decode-preset": KSERVE,
    "Service/hello": KNATIVE,
    "Configuration/classify": KNATIVE,
    "Revision/classify-00001": KNATIVE,
    "Task/build": NO_TEMPLATE.format("steps", "Task (tekton.dev/v1)"),
    "SidecarSet/shippers": NO_TEMPLATE.format("containers", "SidecarSet (apps.kruise.io/v1beta1)"),
    "Prometheus/main": NO_TEMPLATE.format("containers", "Prometheus (monitoring.coreos.com/v1)"),
}
NO_INIT = "a serving runtime of KServe has no init containers"
BEFORE_RAY = "KubeRay runs the command before a `ray start` of its own"
SUBMITS = "a submitter without a command is given one by KubeRay (ray job submit)"
OVERWRITES = f" +{kinds.RAY_ANNOTATION}: .*\n"
REFUSED = [  # object, what its manifest has not, reason
    ("ServingRuntime/triton", "", NO_INIT),
    ("ClusterServingRuntime/huggingface", "", NO_INIT),
    ("RayCluster/shared", OVERWRITES, BEFORE_RAY),
    ("RayJob/tune", OVERWRITES, BEFORE_RAY),
    ("RayService/text-ml", OVERWRITES, BEFORE_RAY),
    ("RayCronJob/retrain", OVERWRITES, BEFORE_RAY),
    ("RayClusterFleet/qwen", OVERWRITES, BEFORE_RAY),
    ("RayJob/tune", r" +command: \[ray, job.*\n", SUBMITS),
    ("RayCronJob/retrain", r" +command: \[ray, job.*\n", SUBMITS),
    (
        "MPIJob/nccl",
        r" +command: \[/usr/sbin/sshd\]\n +args: .*\n",
        "given one by the MPI operator",
    ),
]


def mappings_of(node: Any) -> Iterator[dict[str, Any]]:
    """All mappings of a manifest in their order, init containers not among them."""
    if isinstance(node, dict):
        yield node
    values = [v for k, v in node.items() if k != "initContainers"] if isinstance(node, dict) else []
    for value in node if isinstance(node, list) else values:
        yield from mappings_of(value)


def containers_of(mappings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that have a command; of a TrainJob, what has it there."""
    return [each for each in mappings if {"image", "command"} <= each.keys()]


def check_injected(title: str, new: str, named_by: set[str]) -> None:
    """Each job's container is wrapped, no other, and its pod has all that this needs."""
    raw = MANIFESTS[title]
    before, after = (list(mappings_of(yaml.safe_load(each))) for each in (raw, new))
    jobs = 0
    for was, now in zip(containers_of(before), containers_of(after), strict=True):
        words = [] if was.get("name") == "logs" else [LAUNCHER, "start", "--"]
        assert now["command"] == [*words, *was["command"]]
        jobs += bool(words)
    assert jobs
    first = [each["initContainers"][0]["name"] for each in after if "initContainers" in each]
    assert first == (["bootseer-init"] * jobs if named_by else [])
    names = ("BOOTSEER_JOB_NAME", "BOOTSEER_JOB_UID")
    sources = [each.get("valueFrom") for each in after if each.get("name") in names]
    assert {each["fieldRef"]["fieldPath"] for each in sources if each} == named_by
    assert taken_out(new) == raw


@pytest.mark.parametrize("title", INJECTED)
def test_every_pod_of_a_kind_is_injected(title: str) -> None:
    done = bootseer("inject", "-f", "-", "--offline", "--require", data=MANIFESTS[title].encode())
    assert (done.returncode, done.stderr) == (0, b"")
    check_injected(title, done.stdout.decode(), INJECTED[title])


@pytest.mark.parametrize("title", UNKNOWN)
def test_a_kind_that_is_unknown_is_injected_with_a_word(title: str) -> None:
    done = bootseer("inject", "-f", "-", "--offline", data=MANIFESTS[title].encode())
    assert done.returncode == 0
    said = done.stderr.decode()
    assert f"the kind {title.partition('/')[0]} (" in said
    assert UNKNOWN[title] in said
    check_injected(title, done.stdout.decode(), {UID})


@pytest.mark.parametrize("title", LEFT)
def test_what_has_no_pod_to_inject_is_left_and_named(title: str) -> None:
    raw = MANIFESTS[title].encode()
    done = bootseer("inject", "-f", "-", "--offline", data=raw)
    assert (done.returncode, done.stdout) == (0, raw)
    assert f"{title}: left as it is: " in done.stderr.decode()
    assert LEFT[title] in done.stderr.decode()
    done = bootseer("inject", "-f", "-", "--offline", "--require", data=raw)
    assert (done.returncode, done.stdout) == (7, b"")


def test_what_only_changes_its_operators_container_is_not_named() -> None:
    raw = MANIFESTS["Prometheus/main"].partition("  - name: proxy")[0]
    result = inject.inject(text(raw), Options())
    assert (result.raw, result.refusals, result.unmeasured) == (raw, (), ())


@pytest.mark.parametrize(("title", "without", "reason"), REFUSED)
def test_what_an_operator_would_change_is_refused(title: str, without: str, reason: str) -> None:
    raw = re.sub(without, "", MANIFESTS[title])
    done = bootseer("inject", "-f", "-", "--offline", data=raw.encode())
    assert (done.returncode, done.stdout) == (7, b"")
    assert f"{title} spec" in done.stderr.decode()
    assert reason in done.stderr.decode()


def test_each_kind_of_the_table_is_tried() -> None:
    """The table of docs/kubernetes.md, what the code knows, and the manifests name the same."""
    tried = {title.partition("/")[0] for title in MANIFESTS}
    known = {kind for _, names in kinds.VERBATIM_KINDS for kind in names}
    known |= {kind for operator in kinds.OPERATORS for kind in operator.kinds}
    known |= {kind for _, names, _ in pods.KINDS_WITHOUT_TEMPLATE for kind in names}
    assert known <= tried
    table = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")
    table = table.partition("### Kinds\n")[2].partition("###")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ")]
    words = set(re.findall(r"\b[A-Z]\w+", re.sub("`.*?`", "", " ".join(rows))))
    makers = {"Argo", "Workflows", "KServe", "Knative", "Kubeflow", "Trainer", "Tekton", "Volcano"}
    assert words - makers == tried
    titles = {*INJECTED, *UNKNOWN, *LEFT, *(title for title, *_ in REFUSED)}
    assert titles == set(MANIFESTS)
