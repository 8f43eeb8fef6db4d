"""Who a job is: its pods and what kubectl says of them name the same start."""

from __future__ import annotations

import re
from typing import Any

import pytest

from bootseer import events
from bootseer.kubernetes import check
from bootseer.kubernetes.options import Options
from bootseer.profiler.collect import kubernetes_events
from tests.support.samples.manifests import done, pods_of, taken_out, text

CONTAINERS = "containers: [{name: main, image: i, command: [x]}]"
TEMPLATE = f"template: {{metadata: {{labels: {{app: a}}}}, spec: {{{CONTAINERS}}}}}"
PARALLEL = f"podManagementPolicy: Parallel, {TEMPLATE}"
OVERWRITE = 'ray.io/overwrite-container-cmd: "true"'
GROUPS = f"leaderWorkerTemplate: {{workerTemplate: {{spec: {{{CONTAINERS}}}}}}}"
RAY_SPEC = f"headGroupSpec: {{{TEMPLATE}}}"
JOBSET_LABELS = {
    "jobset.sigs.k8s.io/jobset-uid": "set-uid",
    "jobset.sigs.k8s.io/restart-attempt": "2",
    "controller-uid": "child-uid",
}
VOLCANO = {
    "scheduling.k8s.io/group-name": "train-volcano-uid",
    "volcano.sh/job-retry-count": "1",
}
KUBEFLOW = {"training.kubeflow.org/job-name": "train"}
MPI = {**KUBEFLOW, "training.kubeflow.org/operator-name": "mpi-operator"}


def manifest(version: str, kind: str, spec: str) -> str:
    annotations = f"annotations: {{{OVERWRITE}}}"
    return (
        f"apiVersion: {version}\nkind: {kind}\nmetadata: {{name: train, {annotations}}}\n"
        f"spec: {{{spec}}}\n"
    )


def make_pod(spec: dict[str, Any], marks: dict[str, Any], owner: str = "") -> dict[str, Any]:
    """The pod that an operator makes of a template, with the labels and annotations it sets."""
    owners = [{"kind": owner, "name": "o", "uid": "owner-uid", "controller": True}]
    return {
        "kind": "Pod",
        "metadata": {
            "name": "train-0",
            "namespace": "team",
            "uid": "pod-uid",
            "creationTimestamp": "2026-08-02T18:39:00Z",
            "ownerReferences": owners if owner else [],
            **marks,
        },
        "spec": spec,
        "status": {},
    }


def environment_of(pod: dict[str, Any]) -> dict[str, str]:
    """The variables of the pod's first container, as kubelet fills them in."""
    metadata = pod["metadata"]
    out: dict[str, str] = {}
    for one in pod["spec"]["containers"][0].get("env", []):
        if "value" in one:
            reference = re.compile(r"\$\$|\$\((\w+)\)")
            out[one["name"]] = reference.sub(
                lambda found: "$" if found[0] == "$$" else out.get(found[1], found[0]),
                one["value"],
            )
            continue
        path = one["valueFrom"]["fieldRef"]["fieldPath"]
        keyed = re.fullmatch(r"metadata\.(labels|annotations)\['(.*)'\]", path)
        if keyed:
            out[one["name"]] = metadata.get(keyed[1], {}).get(keyed[2], "")
        else:
            out[one["name"]] = metadata.get(path.removeprefix("metadata."), "")
    return out


def check_both_sides(pod: dict[str, Any], uid: str, attempt: int = 0) -> None:
    environment = environment_of(pod)
    assert environment["BOOTSEER_JOB_UID"] == uid
    (found,) = kubernetes_events.pods([pod])
    assert (found.job_uid, found.attempt) == (uid, attempt)
    imported = {"BOOTSEER_JOB_UID": found.job_uid, "BOOTSEER_ATTEMPT": str(found.attempt)}
    assert events.trace_from_environment(environment) == events.trace_from_environment(imported)


CASES = [
    ("batch/v1", "Job", TEMPLATE, {"labels": {"controller-uid": "job-uid"}}, "job-uid", 0),
    ("jobset.x-k8s.io/v1alpha2", "JobSet", TEMPLATE, {"labels": JOBSET_LABELS}, "set-uid", 2),
    (
        "trainer.kubeflow.org/v1alpha1",
        "TrainingRuntime",
        TEMPLATE,
        {"labels": JOBSET_LABELS},
        "set-uid",
        2,
    ),
    (
        "batch.volcano.sh/v1alpha1",
        "Job",
        f"tasks: [{{{TEMPLATE}}}]",
        {"annotations": VOLCANO},
        "train-volcano-uid",
        1,
    ),
    (
        "flow.volcano.sh/v1alpha1",
        "JobTemplate",
        f"tasks: [{{{TEMPLATE}}}]",
        {"annotations": VOLCANO},
        "train-volcano-uid",
        1,
    ),
    ("kubeflow.org/v1", "PyTorchJob", TEMPLATE, {"labels": KUBEFLOW}, "team/train", 0),
    ("kubeflow.org/v1", "TFJob", TEMPLATE, {"labels": KUBEFLOW}, "team/train", 0),
    ("kubeflow.org/v1", "XGBoostJob", TEMPLATE, {"labels": KUBEFLOW}, "team/train", 0),
    ("kubeflow.org/v1", "PaddleJob", TEMPLATE, {"labels": KUBEFLOW}, "team/train", 0),
    ("kubeflow.org/v1", "JAXJob", TEMPLATE, {"labels": KUBEFLOW}, "team/train", 0),
    (
        "kubeflow.org/v2beta1",
        "MPIJob",
        f"mpiReplicaSpecs: {{Launcher: {{{TEMPLATE}}}}}",
        {"labels": MPI},
        "team/train",
        0,
    ),
    (
        "ray.io/v1",
        "RayJob",
        f"rayClusterSpec: {{{RAY_SPEC}}}",
        {"labels": {"ray.io/cluster": "train-x7f2k"}},
        "train-x7f2k",
        0,
    ),
    (
        "ray.io/v1",
        "RayService",
        f"rayClusterConfig: {{{RAY_SPEC}}}",
        {"labels": {"ray.io/cluster": "train-x7f2k"}},
        "train-x7f2k",
        0,
    ),
    (
        "ray.io/v1",
        "RayCronJob",
        f"jobTemplate: {{rayClusterSpec: {{{RAY_SPEC}}}}}",
        {"labels": {"ray.io/cluster": "train-x7f2k"}},
        "train-x7f2k",
        0,
    ),
    (
        "ray.io/v1",
        "RayJob",
        f"submitterPodTemplate: {{spec: {{{CONTAINERS}}}}}",
        {"labels": {"controller-uid": "submit-uid"}},
        "submit-uid",
        0,
    ),
    (
        "ray.io/v1",
        "RayCluster",
        RAY_SPEC,
        {"labels": {"ray.io/cluster": "train"}},
        "team/train",
        0,
    ),
    (
        "leaderworkerset.x-k8s.io/v1",
        "LeaderWorkerSet",
        GROUPS,
        {"labels": {"leaderworkerset.sigs.k8s.io/group-key": "2a1b"}},
        "team/2a1b",
        0,
    ),
    (
        "disaggregatedset.x-k8s.io/v1",
        "DisaggregatedSet",
        f"roles: [{{spec: {{{GROUPS}}}}}]",
        {"labels": {"leaderworkerset.sigs.k8s.io/group-key": "2a1b"}},
        "team/2a1b",
        0,
    ),
    ("v1", "ReplicationController", TEMPLATE, {"labels": {"app": "a"}}, "pod-uid", 0),
    ("apps/v1", "Deployment", TEMPLATE, {"labels": {"pod-template-hash": "h"}}, "pod-uid", 0),
    ("apps/v1", "StatefulSet", TEMPLATE, {"labels": {"app": "a"}}, "pod-uid", 0),
    (
        "apps/v1",
        "StatefulSet",
        f"podManagementPolicy: OrderedReady, {TEMPLATE}",
        {"labels": {"app": "a"}},
        "pod-uid",
        0,
    ),
    ("apps/v1", "StatefulSet", PARALLEL, {"labels": {"app": "a"}}, "team/train", 0),
    ("example.com/v1", "StatefulSet", PARALLEL, {"labels": {"app": "a"}}, "pod-uid", 0),
]


@pytest.mark.parametrize(
    ("version", "kind", "spec", "marks", "uid", "attempt"), CASES, ids=lambda v: str(v)[:24]
)
def test_a_pod_and_the_import_name_the_same_start(
    version: str, kind: str, spec: str, marks: dict[str, Any], uid: str, attempt: int
) -> None:
    raw = manifest(version, kind, spec)
    new = done(raw)
    (pod_spec,) = pods_of(new)
    check_both_sides(make_pod(pod_spec, marks, "Owner"), uid, attempt)
    assert taken_out(new) == raw


@pytest.mark.parametrize("where", ["labels", "annotations"])
def test_a_manifest_may_name_the_start_itself(where: str) -> None:
    template = TEMPLATE.replace("labels: {app: a}", f"{where}: {{bootseer.io/job-uid: mine}}")
    (pod_spec,) = pods_of(done(manifest("apps/v1", "StatefulSet", template)))
    check_both_sides(make_pod(pod_spec, {where: {"bootseer.io/job-uid": "mine"}}), "mine")


def test_the_caller_may_name_the_start_of_all_pods() -> None:
    raw = manifest("kubeflow.org/v1", "PyTorchJob", TEMPLATE)
    new = done(raw, job_uid="run-7/$(A)")
    (pod_spec,) = pods_of(new)
    check_both_sides(make_pod(pod_spec, {"labels": KUBEFLOW}), "run-7/$(A)")
    assert taken_out(new) == raw
    assert done(new, job_uid="run-7/$(A)") == new


def test_a_manifests_own_name_and_attempt_stay() -> None:
    own = "env: [{name: BOOTSEER_JOB_UID, value: mine}, {name: BOOTSEER_ATTEMPT, value: '3'}]"
    template = TEMPLATE.replace("command: [x]", f"command: [x], {own}")
    raw = manifest("jobset.x-k8s.io/v1alpha2", "JobSet", template)
    new = done(raw)
    (pod_spec,) = pods_of(new)
    check_both_sides(make_pod(pod_spec, {"labels": JOBSET_LABELS}), "mine", 3)
    assert taken_out(new) == raw


@pytest.mark.parametrize(
    ("marks", "owner", "uid"),
    [
        ({"labels": MPI}, "MPIJob", "team/train"),
        ({"labels": MPI}, "Job", "team/train"),
        ({"labels": KUBEFLOW}, "PyTorchJob", "owner-uid"),
        ({"labels": {"leaderworkerset.sigs.k8s.io/group-key": "2a1b"}}, "StatefulSet", "team/2a1b"),
        ({}, "RayCluster", "owner-uid"),
        ({}, "ReplicaSet", "pod-uid"),
        ({}, "StatefulSet", "pod-uid"),
        ({}, "DaemonSet", "pod-uid"),
        ({}, "Workflow", "pod-uid"),
    ],
)
def test_pods_that_were_not_injected_are_told_apart_likewise(
    marks: dict[str, Any], owner: str, uid: str
) -> None:
    pod = make_pod({"containers": [{"name": "main"}]}, marks, owner)
    assert kubernetes_events.pods([pod])[0].job_uid == uid


def test_a_stateful_sets_pods_made_at_once_are_one_start() -> None:
    """Each was a start of its own, though a job's ranks are made like that to find each other."""
    new = done(manifest("apps/v1", "StatefulSet", PARALLEL))
    (spec,) = pods_of(new)
    marks = {"labels": {"app": "a", "statefulset.kubernetes.io/pod-name": "train-0"}}
    ranks = []
    for number in range(2):
        pod = make_pod(spec, marks, "StatefulSet")
        pod["metadata"] |= {"name": f"train-{number}", "uid": f"uid-{number}"}
        check_both_sides(pod, "team/train")
        ranks += kubernetes_events.pods([pod])
    assert len({rank.job_uid for rank in ranks}) == 1
    # Its uid stays when all its pods are made anew, so it is no run's.
    assert all("bootseer.run_uid" not in rank.resource for rank in ranks)
    nameless = done(manifest("apps/v1", "StatefulSet", PARALLEL).replace("name: train, ", ""))
    check_both_sides(make_pod(pods_of(nameless)[0], marks, "StatefulSet"), "pod-uid")


def test_who_has_but_a_name_is_told_so() -> None:
    for version, kind, spec, *_ in CASES:
        (found,) = check.check(text(manifest(version, kind, spec)), Options())
        has_name = version.startswith("kubeflow.org/") or (version, spec) == ("apps/v1", PARALLEL)
        has_name = has_name or kind in ("RayCluster", "LeaderWorkerSet", "DisaggregatedSet")
        assert any("made again under its name" in note for note in found.notes) is has_name
    (found,) = check.check(text(manifest("example.com/v1", "Other", TEMPLATE)), Options())
    assert any("each pod is a start of its own" in note for note in found.notes)
    (found,) = check.check(
        text(manifest("kubeflow.org/v1", "TFJob", TEMPLATE)), Options(job_uid="run-7")
    )
    assert not any("made again" in note for note in found.notes)
