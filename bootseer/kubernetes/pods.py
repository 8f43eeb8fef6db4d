"""Where in a manifest pods are described, whatever kind of object describes them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

import yaml

from bootseer.kubernetes.manifest_text import Document, child, items, labels, merged, pairs, scalar

JOB_CONTAINERS = (
    "pytorch",
    "node",
    "trainer",
    "tensorflow",
    "xgboost",
    "paddle",
    "jax",
    "mpi",
    "worker",
)
"""Names that training operators demand of the container that trains (kubeflow/training-operator,
release 1.9, pkg/apis/kubeflow.org/v1: JobDefaultContainerName of each kind)."""

DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"

NO_PODS = ("CustomResourceDefinition", "ConfigMap", "Secret", "ControllerRevision")
"""Kinds whose text may look like a pod's without being one."""

_ARE_PODS = ("", "Pod", "ServingRuntime", "ClusterServingRuntime")
"""Kinds whose own `spec.containers` are a pod's. Elsewhere these are sidecars for the pods of
others (openkruise/kruise, apis/apps/v1beta1/sidecarset_types.go, SidecarSet) or changes to a pod
that the operator makes (prometheus-operator, pkg/apis/monitoring/v1, CommonPrometheusFields)."""

_PATCH = re.compile(r"(?i)(?<!dis)patch(?:es)?(?:\[\d+\])*$")
"""A key whose value is merged over another's: no `dispatch`, and no role's name that has it."""

ARGO = "argoproj.io"
ARGO_KINDS = ("Workflow", "WorkflowTemplate", "ClusterWorkflowTemplate", "CronWorkflow")
"""Kinds whose templates hold one container, with init containers and volumes beside it
(argoproj/argo-workflows, pkg/apis/workflow/v1alpha1/workflow_types.go, Template)."""
_ARGO_FORMS = ("container", "script", "containerSet")

ANOTHERS_PODS: Sequence[tuple[str, tuple[str, ...], str]] = (
    # kubeflow/trainer, pkg/apis/trainer/v1alpha1/trainjob_types.go: podTemplateOverrides and
    # runtimePatches change the pods of the runtime.
    ("trainer.kubeflow.org", ("TrainJob",), ""),
    # knative/serving, pkg/apis/config/features.go: podspec-init-containers, disabled by default.
    (
        "serving.knative.dev",
        ("Service", "Configuration", "Revision"),
        "Knative takes init containers only where its feature podspec-init-containers is on, so "
        "nothing brings the wrapper into its pods",
    ),
    # kserve/kserve, pkg/apis/serving/v1beta1/podspec.go and
    # v1alpha1/llm_inference_service_types.go.
    (
        "serving.kserve.io",
        ("InferenceService", "LLMInferenceService", "LLMInferenceServiceConfig"),
        "KServe merges its containers with those of a runtime or of presets, which bring the "
        "command",
    ),
)
"""Kinds that run containers of which the manifest has no whole template, and why these are left as
they are (a TrainJob's command is wrapped)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pod:
    """One pod description: `template` has metadata and spec, `owner` is the object it stands in.

    `path` is the keys from the object to the pod's spec, for messages and `--explain`; `aliased`
    are the ids of all nodes of the document that stand at more than one place. `form` is the key
    of the one container of an Argo template, which is both template and spec; "" for `containers`.
    """

    owner: yaml.MappingNode
    owner_kind: str
    owner_name: str
    path: str
    template: yaml.MappingNode
    spec: yaml.MappingNode
    aliased: frozenset[int]
    form: str = ""

    @property
    def title(self) -> str:
        """The object in words: `Job/train`."""
        return f"{self.owner_kind or 'object'}/{self.owner_name or '(unnamed)'}"

    def containers(self) -> list[yaml.MappingNode]:
        """The pod's containers, init containers not among them."""
        found = (
            [child(self.spec, self.form)] if self.form else items(merged(self.spec, "containers"))
        )
        return [node for node in found if isinstance(node, yaml.MappingNode)]

    def container_name(self, container: yaml.MappingNode) -> str:
        """A container's name; that of an Argo template is the template's."""
        if self.form:
            return scalar(child(self.spec, "name")) or "main"
        return container_name(container)

    def annotation(self, name: str) -> str:
        """One annotation of the pod, "" when it is not there."""
        return labels(child(self.template, "metadata", "annotations")).get(name, "")


@dataclasses.dataclass(frozen=True, slots=True)
class Described:
    """One object of a manifest, with the pods that it describes; those of objects within it are
    theirs. `patches` are the paths of what is merged over a pod's template and names a command."""

    node: yaml.MappingNode
    kind: str
    name: str
    pods: list[Pod]
    patches: list[str] = dataclasses.field(default_factory=list)

    @property
    def title(self) -> str:
        """The object in words: `Job/train`."""
        return f"{self.kind or 'object'}/{self.name or '(unnamed)'}"


def is_of(pod: Pod, group: str, kinds: Sequence[str]) -> bool:
    """Whether the object is of one of these kinds; without an apiVersion the kind decides."""
    return is_object_of(pod.owner, group, kinds)


def is_object_of(node: yaml.Node, group: str, kinds: Sequence[str]) -> bool:
    """`is_of` for the object itself."""
    if scalar(child(node, "kind")) not in kinds:
        return False
    version = scalar(child(node, "apiVersion"))
    return not version or version.rpartition("/")[0] == group


def find_reason_for_none(node: yaml.Node) -> str | None:
    """Why a kind that describes another's pods is left as it is; None for other kinds.

    The core kinds have a Service too, so this goes by the apiVersion.
    """
    group = scalar(child(node, "apiVersion")).rpartition("/")[0]
    kind = scalar(child(node, "kind"))
    return next((why for of, kinds, why in ANOTHERS_PODS if of == group and kind in kinds), None)


def find(document: Document) -> Iterator[Pod]:
    """All pods of a document, object by object."""
    for one in find_objects(document):
        yield from one.pods


def find_objects(document: Document) -> list[Described]:
    """All objects of a document: its root or a List's items, each followed by those within it."""
    out: list[Described] = []
    _add_object(document, document.root, set(), out)
    return out


def _add_object(
    document: Document, root: yaml.MappingNode, seen: set[int], out: list[Described]
) -> None:
    kind = scalar(child(root, "kind"))
    members = child(root, "items")
    if kind.endswith("List") and isinstance(members, yaml.SequenceNode):
        for member in members.value:
            if isinstance(member, yaml.MappingNode):
                _add_object(document, member, set(), out)
        return
    name = scalar(child(root, "metadata", "name"))
    name = name or scalar(child(root, "metadata", "generateName"))
    one = Described(root, kind, name, [])
    out.append(one)
    if kind not in NO_PODS and find_reason_for_none(root) is None:
        _Search(document, one, is_object_of(root, ARGO, ARGO_KINDS), seen, out).visit(root, [])


@dataclasses.dataclass(frozen=True, slots=True)
class _Search:
    """Looks through one object. Nodes that aliases lead to are looked at once: aliases may multiply
    without end, or in a circle."""

    document: Document
    owner: Described
    is_argo: bool
    seen: set[int]
    out: list[Described]

    def visit(self, node: yaml.Node, path: list[str]) -> None:
        if id(node) in self.document.aliased:
            if path and id(node) in self.seen:
                return
            self.seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            if path and _is_object(node, path[-1]):
                _add_object(self.document, node, self.seen, self.out)
            elif not self._add_pod(node, path):
                for key, _, value in pairs(node):
                    if not self.is_argo or key != "templateDefaults":
                        self.visit(value, [*path, key])
        elif isinstance(node, yaml.SequenceNode):
            for number, value in enumerate(node.value):
                self.visit(value, [*path[:-1], f"{path[-1]}[{number}]"])

    def _add_pod(self, node: yaml.MappingNode, path: list[str]) -> bool:
        """Keep what is a pod's template; whether it was."""
        form = ""
        if self.is_argo:
            form = next((key for key in _ARGO_FORMS if _has_entries(child(node, key))), "")
            spec: yaml.Node | None = node if form else None
            where = ".".join(path)
        else:
            spec = child(node, "spec")
            where = ".".join([*path, "spec"])
        if not isinstance(spec, yaml.MappingNode) or not (form or _is_pod_spec(spec)):
            return False
        one, aliased = self.owner, self.document.aliased
        if not path and one.kind not in _ARE_PODS:
            return False
        if any(_PATCH.search(key) for key in path):
            if any(items(child(entry, "command")) for entry in items(merged(spec, "containers"))):
                one.patches.append(where)
            return True
        one.pods.append(Pod(one.node, one.kind, one.name, where, node, spec, aliased, form))
        return True


def _is_object(node: yaml.MappingNode, key: str) -> bool:
    """Whether a mapping within an object is an object too, as in a Template or an AppWrapper.

    A pod's template may bear `kind: Pod` and belongs to the object around it all the same.
    """
    kind = scalar(child(node, "kind"))
    if not kind or not scalar(child(node, "apiVersion")):
        return False
    is_template = kind == "Pod" and key.lower().endswith("template")
    return not is_template and isinstance(child(node, "spec"), yaml.MappingNode)


def _has_entries(node: yaml.Node | None) -> bool:
    return isinstance(node, yaml.MappingNode) and bool(node.value)


def _is_pod_spec(spec: yaml.MappingNode) -> bool:
    found = merged(spec, "containers")
    if not isinstance(found, yaml.SequenceNode) or not found.value:
        return False
    return all(isinstance(c, yaml.MappingNode) and merged(c, "name") for c in found.value)


def container_name(node: yaml.MappingNode) -> str:
    """A container's name."""
    return scalar(merged(node, "name"))


def guaranteed(pod: Pod, job: yaml.MappingNode) -> dict[str, str]:
    """CPU and memory of the job's container where all of the pod asks for just what it may use.

    Nothing for any other pod; Kubernetes calls the quality of such pods "Guaranteed".
    """
    if pod.form:  # Argo adds containers of its own
        return {}
    for container in [*items(child(pod.spec, "initContainers")), *pod.containers()]:
        limits = labels(child(container, "resources", "limits"))
        requests = labels(child(container, "resources", "requests"))
        for name in ("cpu", "memory"):
            if not limits.get(name) or requests.get(name, limits[name]) != limits[name]:
                return {}
    found = labels(child(job, "resources", "limits"))
    return {name: found[name] for name in ("cpu", "memory")}


def asks_for_accelerator(node: yaml.MappingNode) -> bool:
    """Whether a container asks for a GPU or another device of a vendor."""
    limits = labels(child(node, "resources", "limits"))
    return any("/" in key and not key.startswith(("kubernetes.io/", "bootseer")) for key in limits)
