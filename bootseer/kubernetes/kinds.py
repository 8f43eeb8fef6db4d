"""Kinds of objects whose operators read or replace a pod's command, and what `inject` does then.

Any other kind is injected where it has a pod template; what its operator does is not known here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import yaml

from bootseer.kubernetes.job_command import format_command_name
from bootseer.kubernetes.manifest_text import child, items, labels, pairs, scalar
from bootseer.kubernetes.pods import (
    ARGO,
    ARGO_KINDS,
    KINDS_WITHOUT_PODS,
    ManifestObject,
    Pod,
    find_reason_to_leave,
    is_object_of_kind,
    is_pod_of_kind,
)

TORCHTUNE = ("tune", "run")
"""The command by which Kubeflow Trainer knows torchtune."""

TORCHTUNE_REASON = (
    "Kubeflow Trainer adds torchtune's arguments only where the command is [tune, run] and nothing "
    "else, so it cannot be wrapped; leave it out, or write the whole command, as in "
    "[tune, run, RECIPE, --config, CONFIG]"
)

RAY_ANNOTATION = "ray.io/overwrite-container-cmd"


@dataclasses.dataclass(frozen=True, slots=True)
class Operator:
    """What one operator does to the command of the pods of some kinds.

    `paths`: prefixes of the paths of the pods that it concerns (() = all).
    `fills_empty`: it concerns only containers without a command; `args_count`: and without
    arguments; `first_only`: only a pod's first container. `annotation`: set to "true" on the
    object or the pod, it makes the operator leave the command. `within`: keys by which its objects
    are recognised within unknown kinds. `reason` says why the pod is refused otherwise;
    `{name}` is the container's.
    """

    group: str
    kinds: tuple[str, ...]
    paths: tuple[str, ...]
    fills_empty: bool
    first_only: bool
    reason: str
    annotation: str = ""
    args_count: bool = False
    within: tuple[str, ...] = ()


OPERATORS: Sequence[Operator] = (
    # kubeflow/mpi-operator, pkg/controller/mpi_job_controller.go, newWorker. kubeflow.org/v1 (the
    # training operator, pkg/controller.v1/mpi/mpijob_controller.go) fills in `sleep` likewise.
    Operator(
        group="kubeflow.org",
        kinds=("MPIJob",),
        paths=("spec.mpiReplicaSpecs.Worker.",),
        fills_empty=True,
        args_count=True,
        first_only=True,
        reason="workers without a command are given one by the MPI operator (sshd; sleep in "
        "kubeflow.org/v1), which one of ours would keep it from; write it out, as command: "
        "[/usr/sbin/sshd, -De], or give it by --command '{name}/usr/sbin/sshd -De'",
    ),
    # ray-project/kuberay, ray-operator/controllers/ray/common/pod.go, BuildPod.
    Operator(
        group="ray.io",
        kinds=("RayCluster", "RayJob", "RayService", "RayCronJob"),
        paths=(
            "spec.headGroupSpec.",
            "spec.workerGroupSpecs[",
            "spec.rayClusterSpec.",
            "spec.rayClusterConfig.",
            "spec.jobTemplate.rayClusterSpec.",
        ),
        fills_empty=False,
        first_only=True,
        annotation=RAY_ANNOTATION,
        # vllm-project/aibrix, api/orchestration/v1alpha1/rayclusterfleet_types.go.
        within=(".headGroupSpec.", ".workerGroupSpecs["),
        reason="KubeRay runs the command before a `ray start` of its own, which would run outside "
        f'of the wrapper; set the annotation {RAY_ANNOTATION}: "true" and write the command '
        "that starts Ray, as command: [/bin/bash, -lc, --, $KUBERAY_GEN_RAY_START_CMD]",
    ),
    # The same operator, controllers/ray/rayjob_controller.go, getSubmitterTemplate.
    Operator(
        group="ray.io",
        kinds=("RayJob", "RayCronJob"),
        paths=("spec.submitterPodTemplate.", "spec.jobTemplate.submitterPodTemplate."),
        fills_empty=True,
        first_only=True,
        reason="a submitter without a command is given one by KubeRay (ray job submit), which one "
        "of ours would keep it from; write it out, or give it by --command '{name}WORDS'",
    ),
    # kserve/kserve, pkg/apis/serving/v1alpha1/servingruntime_types.go, ServingRuntimePodSpec.
    Operator(
        group="serving.kserve.io",
        kinds=("ClusterServingRuntime", "ServingRuntime"),
        paths=(),
        fills_empty=False,
        first_only=False,
        reason="a serving runtime of KServe has no init containers, so the wrapper cannot be "
        "brought into its pods; leave it out",
    ),
)

ARGO_SET_REASON = (
    "the containers of a containerSet start one after the other in one pod, so that none of them "
    "is the job; make the one to be measured a template of its own"
)

VERBATIM_KINDS: Sequence[tuple[str, tuple[str, ...]]] = (
    ("", ("Pod", "PodTemplate", "ReplicationController")),
    ("apps", ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet")),
    ("batch", ("Job", "CronJob")),
    ("batch.volcano.sh", ("Job",)),
    ("flow.volcano.sh", ("JobTemplate",)),
    ("jobset.x-k8s.io", ("JobSet",)),
    ("leaderworkerset.x-k8s.io", ("LeaderWorkerSet",)),
    ("disaggregatedset.x-k8s.io", ("DisaggregatedSet",)),
    ("kubeflow.org", ("PyTorchJob", "TFJob", "XGBoostJob", "PaddleJob", "JAXJob")),
    ("trainer.kubeflow.org", ("TrainingRuntime", "ClusterTrainingRuntime", "TrainJob")),
    # argoproj/argo-workflows, workflow/controller/workflowpod.go: its emissary starts the command.
    (ARGO, ARGO_KINDS),
)
"""Kinds whose controllers start a pod's command as it is written."""


def find_refusal(pod: Pod, container: yaml.MappingNode, *, is_command_given: bool) -> str:
    """Say why a container's command must stay as it is, "" where it may be wrapped.

    `is_command_given`: the caller named this container and gave its command.
    """
    command = [scalar(word) for word in items(child(container, "command"))]
    if pod.form:
        return _find_argo_refusal(pod, has_command=bool(command))
    if pod.owner_kind.endswith("TrainingRuntime") and tuple(command[:2]) == TORCHTUNE:
        return TORCHTUNE_REASON
    is_first = pod.containers()[0] is container
    has_args = bool(items(child(container, "args")))
    for operator in OPERATORS:
        if (
            not _applies_to(operator, pod)
            or (operator.first_only and not is_first)
            or (operator.fills_empty and (command or is_command_given))
            or (operator.args_count and has_args)
            or (operator.annotation and _is_annotated(pod, operator.annotation))
        ):
            continue
        return operator.reason.replace("{name}", format_command_name(pod, container))
    return ""


def _applies_to(operator: Operator, pod: Pod) -> bool:
    """Whether an operator makes this pod, judged by the kind of its object and its path."""
    if is_pod_of_kind(pod, operator.group, operator.kinds):
        return not operator.paths or pod.path.startswith(operator.paths)
    return any(key in pod.path for key in operator.within)


def _find_argo_refusal(pod: Pod, *, has_command: bool) -> str:
    """Say what overrides the command of an Argo template's own container, "" for nothing.

    Source: argoproj/argo-workflows, workflow/controller/workflowpod.go (podSpecPatch comes last)
    and operator.go, mergedTemplateDefaultsInto.
    """
    workflow = find_workflow(pod.owner)
    for place in (pod.spec, workflow):
        if "command" in scalar(child(place, "podSpecPatch")):
            return "podSpecPatch names a command, which would take the place of ours; leave it out"
    defaults = child(workflow, "templateDefaults", pod.form)
    if not has_command and child(defaults, "command") is not None:
        return "its command comes from templateDefaults; write it into the template"
    return ""


def find_workflow(node: yaml.MappingNode) -> yaml.MappingNode:
    """The node with the settings for all templates of an Argo object; else the object itself."""
    spec = child(node, "spec")
    workflow = child(spec, "workflowSpec") or spec
    return workflow if isinstance(workflow, yaml.MappingNode) else node


def explain_containers_left(obj: ManifestObject) -> str:
    """Say why an object's containers stay as they are though it describes no pod, "" for none.

    A TrainJob is not among them: its command is wrapped.
    """
    reason = find_reason_to_leave(obj.node)
    if reason is not None:
        return reason
    if is_object_of_kind(obj.node, ARGO, ARGO_KINDS):
        named = scalar(child(find_workflow(obj.node), "workflowTemplateRef", "name"))
        return f"its templates are those of {named}; inject that one" if named else ""
    version, spec = scalar(child(obj.node, "apiVersion")), child(obj.node, "spec")
    if obj.kind in KINDS_WITHOUT_PODS or not obj.kind or not version or spec is None:
        return ""
    if obj.patches:
        return ""
    path = _find_containers(spec, ["spec"], set())
    if not path:
        return ""
    return (
        f"it has containers at {path}, but no pod's template, and the kind {obj.kind} ({version}) "
        "is unknown here"
    )


def _find_containers(node: yaml.Node, path: list[str], seen: set[int]) -> str:
    """The path of containers below a node, "" if there are none; skips embedded objects."""
    if id(node) in seen:
        return ""
    seen.add(id(node))
    for key, _, value in pairs(node):
        below = [*path, key]
        entries = items(value) if isinstance(value, yaml.SequenceNode) else [value]
        if key.lower().endswith(("container", "containers", "steps")) and any(
            scalar(child(entry, "image")) for entry in entries
        ):
            return ".".join(below)
        if child(value, "apiVersion") is not None and child(value, "kind") is not None:
            continue
        deeper_path = _find_containers(value, below, seen)
        if deeper_path:
            return deeper_path
    for number, value in enumerate(items(node)):
        if child(value, "apiVersion") is None:
            deeper_path = _find_containers(value, [*path[:-1], f"{path[-1]}[{number}]"], seen)
            if deeper_path:
                return deeper_path
    return ""


def explain_patches(obj: ManifestObject) -> str:
    """Say which commands are merged over those of the object's pods, "" for none."""
    if not obj.patches:
        return ""
    return (
        f"its patch at {obj.patches[0]} names a command, which takes the place of the one in the "
        "pod's template, and of the wrapper's with it; write it into the template"
    )


def is_train_job(node: yaml.Node) -> bool:
    """Whether an object is a TrainJob of Kubeflow Trainer, which has a command and no pod."""
    return is_object_of_kind(node, "trainer.kubeflow.org", ("TrainJob",))


def is_known(pod: Pod) -> bool:
    """Whether it is known what becomes of a command in pods of this kind."""
    known = [*VERBATIM_KINDS, *((operator.group, operator.kinds) for operator in OPERATORS)]
    return any(is_pod_of_kind(pod, group, kinds) for group, kinds in known)


def describe_unknown_kind(pod: Pod) -> str:
    """Say what to check for a pod of an unknown kind, "" for a known one."""
    if is_known(pod):
        return ""
    version = scalar(child(pod.owner, "apiVersion")) or "no apiVersion"
    return (
        f"the kind {pod.owner_kind or '(none)'} ({version}) is unknown here: see that what runs "
        "its pods takes their init containers and starts the command as it is written"
    )


def _is_annotated(pod: Pod, annotation: str) -> bool:
    on_object = labels(child(pod.owner, "metadata", "annotations")).get(annotation, "")
    return "true" in (on_object.lower(), pod.annotation(annotation).lower())
