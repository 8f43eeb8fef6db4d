"""Where in a manifest pods are described, whatever kind of object describes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import yaml

from bootseer.kubernetes.yamltext import Document, child, items, labels, merged, pairs, scalar

JOB_CONTAINERS = ("pytorch", "node", "trainer", "tensorflow", "mpi", "worker")
"""Names that training operators demand of the container that trains."""

DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"

_NO_PODS = ("CustomResourceDefinition", "ConfigMap", "Secret")
"""Kinds whose text may look like a pod's without being one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pod:
    """One pod description: `template` has metadata and spec, `owner` is the object it stands in.

    `path` is the keys from the object to the pod's spec, for messages and `--explain`; `aliased`
    are the ids of all nodes of the document that stand at more than one place.
    """

    owner: yaml.MappingNode
    owner_kind: str
    owner_name: str
    path: str
    template: yaml.MappingNode
    spec: yaml.MappingNode
    aliased: frozenset[int]

    @property
    def title(self) -> str:
        """The object in words: `Job/train`."""
        return f"{self.owner_kind or 'object'}/{self.owner_name or '(unnamed)'}"

    def containers(self) -> list[yaml.MappingNode]:
        """The pod's containers, init containers not among them."""
        found = items(merged(self.spec, "containers"))
        return [node for node in found if isinstance(node, yaml.MappingNode)]

    def annotation(self, name: str) -> str:
        """One annotation of the pod, "" when it is not there."""
        return labels(child(self.template, "metadata", "annotations")).get(name, "")


def is_of(pod: Pod, group: str, kinds: Sequence[str]) -> bool:
    """Whether the object is of one of these kinds; without an apiVersion the kind decides."""
    if pod.owner_kind not in kinds:
        return False
    version = scalar(child(pod.owner, "apiVersion"))
    return not version or version.rpartition("/")[0] == group


def find(document: Document) -> Iterator[Pod]:
    """All pods of a document, in the order of the text."""
    yield from _objects(document, document.root)


def _objects(document: Document, root: yaml.MappingNode) -> Iterator[Pod]:
    kind = scalar(child(root, "kind"))
    if kind in _NO_PODS:
        return
    members = child(root, "items")
    if kind.endswith("List") and isinstance(members, yaml.SequenceNode):
        for member in members.value:
            if isinstance(member, yaml.MappingNode):
                yield from _objects(document, member)
        return
    name = scalar(child(root, "metadata", "name"))
    name = name or scalar(child(root, "metadata", "generateName"))
    yield from _below(document, root, root, name, [], set())


def _below(
    document: Document,
    node: yaml.Node,
    owner: yaml.MappingNode,
    name: str,
    path: list[str],
    seen: set[int],
) -> Iterator[Pod]:
    if id(node) in document.aliased:  # once: aliases may multiply without end, or in a circle
        if id(node) in seen:
            return
        seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        spec = child(node, "spec")
        if isinstance(spec, yaml.MappingNode) and _is_pod_spec(spec):
            where = ".".join([*path, "spec"])
            yield Pod(
                owner, scalar(child(owner, "kind")), name, where, node, spec, document.aliased
            )
            return
        for key, _, value in pairs(node):
            yield from _below(document, value, owner, name, [*path, key], seen)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            inner = [*path[:-1], f"{path[-1]}[{number}]"]
            yield from _below(document, value, owner, name, inner, seen)


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
