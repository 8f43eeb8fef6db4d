"""Whether a pod may run on nodes on which the wrapper cannot run.

Sources: Kubernetes' well-known labels, and `MatchNodeSelectorTerms` of its component-helpers
(terms are alternatives, the expressions of one term hold together).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import yaml

from bootseer.kubernetes.manifest_text import child, effective_child, items, pairs, scalar

_LABELS = {
    "linux": ("kubernetes.io/os", "beta.kubernetes.io/os"),
    "amd64": ("kubernetes.io/arch", "beta.kubernetes.io/arch"),
}
_WINDOWS_BUILD = "node.kubernetes.io/windows-build"


def find_unfit_nodes(spec: yaml.MappingNode) -> str:
    """Name the nodes that a pod may run on and that are not Linux on amd64 ("arm64"), "" for none.

    A pod that asks for no nodes in particular counts as one for Linux on amd64.
    """
    if scalar(child(spec, "os", "name")) == "windows" or _has_windows_options(spec):
        return "windows"
    selector = effective_child(spec, "nodeSelector")
    if any(key == _WINDOWS_BUILD for key, _, _ in pairs(selector)):
        return "windows"
    for supported, labels in _LABELS.items():
        chosen = [scalar(effective_child(selector, label)) for label in labels]
        chosen = [value for value in chosen if value]
        unfit = [value for value in chosen if value != supported]
        if not chosen:
            unfit = [
                value
                for term in _iterate_terms(spec)
                for value in _find_unfit_values(term, labels, supported)
            ]
        if unfit:
            return unfit[0]
    return ""


def _has_windows_options(spec: yaml.MappingNode) -> bool:
    containers = [*items(child(spec, "initContainers")), *items(child(spec, "containers"))]
    return any(
        any(True for _ in pairs(child(node, "securityContext", "windowsOptions")))
        for node in (spec, *containers)
    )


def _iterate_terms(spec: yaml.MappingNode) -> Iterator[Sequence[yaml.Node]]:
    """The label expressions of each term of the pod's node affinity, preferences last."""
    affinity = child(effective_child(spec, "affinity"), "nodeAffinity")
    required = child(affinity, "requiredDuringSchedulingIgnoredDuringExecution")
    for term in items(child(required, "nodeSelectorTerms")):
        yield items(child(term, "matchExpressions"))
    for preference in items(child(affinity, "preferredDuringSchedulingIgnoredDuringExecution")):
        yield items(child(preference, "preference", "matchExpressions"))


def _find_unfit_values(
    term: Sequence[yaml.Node], labels: Sequence[str], supported: str
) -> Iterator[str]:
    """The values except `supported` that a term names and allows.

    "other than ..." if the term only forbids `supported`.
    """
    wanted: list[set[str]] = []
    forbidden: set[str] = set()
    for expression in term:
        if scalar(child(expression, "key")) not in labels:
            continue
        values = {scalar(value) for value in items(child(expression, "values"))}
        operator = scalar(child(expression, "operator"))
        if operator == "In":
            wanted.append(values)
        elif operator == "NotIn":
            forbidden |= values
    if wanted:
        yield from sorted(set.intersection(*wanted) - forbidden - {supported})
    elif supported in forbidden:
        yield f"other than {supported}"
