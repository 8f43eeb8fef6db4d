"""Where a manifest describes pods, whatever kind of object describes them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

import yaml

from bootseer.kubernetes.manifest_text import (
    Document,
    child,
    effective_child,
    items,
    labels,
    pairs,
    scalar,
)

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

KINDS_WITHOUT_PODS = ("CustomResourceDefinition", "ConfigMap", "Secret", "ControllerRevision")
"""Kinds whose contents may look like a pod without being one."""

_POD_KINDS = ("", "Pod", "ServingRuntime", "ClusterServingRuntime")
"""Kinds whose own `spec.containers` are a pod's. Elsewhere these are sidecars for the pods of
others (openkruise/kruise, apis/apps/v1beta1/sidecarset_types.go, SidecarSet) or changes to a pod
that the operator makes (prometheus-operator, pkg/apis/monitoring/v1, CommonPrometheusFields)."""

_PATCH = re.compile(r"(?i)(?<!dis)patch(?:es)?(?:\[\d+\])*$")
"""A key whose value is merged over another's; not `dispatch`, nor a role name with it."""

ARGO = "argoproj.io"
ARGO_KINDS = ("Workflow", "WorkflowTemplate", "ClusterWorkflowTemplate", "CronWorkflow")
"""Kinds whose templates hold one container, with init containers and volumes next to it
(argoproj/argo-workflows, pkg/apis/workflow/v1alpha1/workflow_types.go, Template)."""
_ARGO_FORMS = ("container", "script", "containerSet")

KINDS_WITHOUT_TEMPLATE: Sequence[tuple[str, tuple[str, ...], str]] = (
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
    """The description of a pod: `template` has metadata and spec, `owner` is the object around it.

    `path` has the keys from the object to the pod's spec, for messages and `--explain`; `aliased`
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

    @property
    def full_title(self) -> str:
        """The object and the path of the pod in it: `Job/train spec.template.spec`."""
        return f"{self.title} {self.path}"

    @property
    def line(self) -> int:
        """Number of the first line of the pod's spec, from 1."""
        return int(self.spec.start_mark.line) + 1

    def containers(self) -> list[yaml.MappingNode]:
        """The pod's containers without its init containers."""
        nodes = (
            [child(self.spec, self.form)]
            if self.form
            else items(effective_child(self.spec, "containers"))
        )
        return [node for node in nodes if isinstance(node, yaml.MappingNode)]

    def container_name(self, container: yaml.MappingNode) -> str:
        """A container's name; that of an Argo template is the template's."""
        if self.form:
            return scalar(child(self.spec, "name")) or "main"
        return scalar(effective_child(container, "name"))

    def annotation(self, name: str) -> str:
        """The value of an annotation of the pod, "" where there is none."""
        return labels(child(self.template, "metadata", "annotations")).get(name, "")


@dataclasses.dataclass(frozen=True, slots=True)
class ManifestObject:
    """An object of a manifest, with the pods that it describes itself, not in objects within it.

    `patches` are the paths of values that are merged over a pod's template and name a command.
    """

    node: yaml.MappingNode
    kind: str
    name: str
    pods: list[Pod]
    patches: list[str] = dataclasses.field(default_factory=list)

    @property
    def title(self) -> str:
        """The object in words: `Job/train`."""
        return f"{self.kind or 'object'}/{self.name or '(unnamed)'}"

    @property
    def line(self) -> int:
        """Number of the first line of the object, from 1."""
        return int(self.node.start_mark.line) + 1


def is_pod_of_kind(pod: Pod, group: str, kinds: Sequence[str]) -> bool:
    """Whether a pod's object is of one of these kinds of an API group."""
    return is_object_of_kind(pod.owner, group, kinds)


def is_object_of_kind(node: yaml.Node, group: str, kinds: Sequence[str]) -> bool:
    """Whether an object is of one of these kinds of an API group.

    Without an apiVersion the kind alone decides.
    """
    if scalar(child(node, "kind")) not in kinds:
        return False
    version = scalar(child(node, "apiVersion"))
    return not version or version.rpartition("/")[0] == group


def find_reason_to_leave(node: yaml.Node) -> str | None:
    """Why an object without a whole pod template is left as it is; None for other objects.

    The core kinds have a Service too, so this goes by the apiVersion.
    """
    group = scalar(child(node, "apiVersion")).rpartition("/")[0]
    kind = scalar(child(node, "kind"))
    for of_group, kinds, reason in KINDS_WITHOUT_TEMPLATE:
        if of_group == group and kind in kinds:
            return reason
    return None


def find_pods(document: Document) -> Iterator[Pod]:
    """All pods of a document, object by object."""
    for obj in find_objects(document):
        yield from obj.pods


def find_objects(document: Document) -> list[ManifestObject]:
    """All objects of a document: its root or a List's items, each followed by those within it."""
    objects: list[ManifestObject] = []
    _add_object(document, document.root, set(), objects)
    return objects


def _add_object(
    document: Document, root: yaml.MappingNode, seen: set[int], objects: list[ManifestObject]
) -> None:
    kind = scalar(child(root, "kind"))
    members = child(root, "items")
    if kind.endswith("List") and isinstance(members, yaml.SequenceNode):
        for member in members.value:
            if isinstance(member, yaml.MappingNode):
                _add_object(document, member, set(), objects)
        return
    name = scalar(child(root, "metadata", "name"))
    name = name or scalar(child(root, "metadata", "generateName"))
    obj = ManifestObject(root, kind, name, [])
    objects.append(obj)
    if kind not in KINDS_WITHOUT_PODS and find_reason_to_leave(root) is None:
        is_argo = is_object_of_kind(root, ARGO, ARGO_KINDS)
        _Search(document, obj, is_argo, seen, objects).visit(root, [])


@dataclasses.dataclass(frozen=True, slots=True)
class _Search:
    """The search for pods in one object.

    Nodes that aliases refer to are visited once: aliases may multiply without end, or in a circle.
    """

    document: Document
    obj: ManifestObject
    is_argo: bool
    seen: set[int]
    objects: list[ManifestObject]

    def visit(self, node: yaml.Node, path: list[str]) -> None:
        if id(node) in self.document.aliased:
            if path and id(node) in self.seen:
                return
            self.seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            if path and _is_embedded_object(node, path[-1]):
                _add_object(self.document, node, self.seen, self.objects)
            elif not self._add_pod(node, path):
                for key, _, value in pairs(node):
                    if not self.is_argo or key != "templateDefaults":
                        self.visit(value, [*path, key])
        elif isinstance(node, yaml.SequenceNode):
            for number, value in enumerate(node.value):
                self.visit(value, [*path[:-1], f"{path[-1]}[{number}]"])

    def _add_pod(self, node: yaml.MappingNode, path: list[str]) -> bool:
        """Add the pod of a node, if it is a template of one; returns whether it is."""
        form = ""
        if self.is_argo:
            form = next((key for key in _ARGO_FORMS if _has_entries(child(node, key))), "")
            spec: yaml.Node | None = node if form else None
            spec_path = ".".join(path)
        else:
            spec = child(node, "spec")
            spec_path = ".".join([*path, "spec"])
        if not isinstance(spec, yaml.MappingNode) or not (form or _is_pod_spec(spec)):
            return False
        obj, aliased = self.obj, self.document.aliased
        if not path and obj.kind not in _POD_KINDS:
            return False
        if any(_PATCH.search(key) for key in path):
            containers = items(effective_child(spec, "containers"))
            if any(items(child(container, "command")) for container in containers):
                obj.patches.append(spec_path)
            return True
        pod = Pod(obj.node, obj.kind, obj.name, spec_path, node, spec, aliased, form)
        obj.pods.append(pod)
        return True


def _is_embedded_object(node: yaml.MappingNode, key: str) -> bool:
    """Whether a mapping within an object is itself an object, as in a Template or an AppWrapper.

    A pod's template with `kind: Pod` still belongs to the object around it.
    """
    kind = scalar(child(node, "kind"))
    if not kind or not scalar(child(node, "apiVersion")):
        return False
    is_template = kind == "Pod" and key.lower().endswith("template")
    return not is_template and isinstance(child(node, "spec"), yaml.MappingNode)


def _has_entries(node: yaml.Node | None) -> bool:
    return isinstance(node, yaml.MappingNode) and bool(node.value)


def _is_pod_spec(spec: yaml.MappingNode) -> bool:
    containers = effective_child(spec, "containers")
    if not isinstance(containers, yaml.SequenceNode) or not containers.value:
        return False
    return all(
        isinstance(container, yaml.MappingNode) and effective_child(container, "name")
        for container in containers.value
    )


def find_guaranteed_resources(pod: Pod, job: yaml.MappingNode) -> dict[str, str]:
    """CPU and memory of the job's container in a pod of quality of service "Guaranteed".

    Empty for any other pod: one in which a container requests less than its limits, or has none.
    """
    if pod.form:  # Argo adds containers of its own
        return {}
    for container in [*items(child(pod.spec, "initContainers")), *pod.containers()]:
        limits = labels(child(container, "resources", "limits"))
        requests = labels(child(container, "resources", "requests"))
        for name in ("cpu", "memory"):
            if not limits.get(name) or requests.get(name, limits[name]) != limits[name]:
                return {}
    job_limits = labels(child(job, "resources", "limits"))
    return {name: job_limits[name] for name in ("cpu", "memory")}


def asks_for_accelerator(node: yaml.MappingNode) -> bool:
    """Whether a container asks for a GPU or another device of a vendor."""
    limits = labels(child(node, "resources", "limits"))
    return any("/" in key and not key.startswith(("kubernetes.io/", "bootseer")) for key in limits)
