"""The tier of privilege that each pod of a manifest has, what it allows, and what prevents more.

Tiers: `none` (any pod: restore by copy, checkpoints through fsspec or copied), `fuse` (a device
plugin gives /dev/fuse: with SYS_ADMIN, checkpoints mounted), `privileged` (mounts of every kind).
"""

from __future__ import annotations

import dataclasses

import yaml

from bootseer.errors import BootseerError
from bootseer.kubernetes import inject, kinds, manifest_text, pods, uninject
from bootseer.kubernetes.identity import OWN_UID, identify
from bootseer.kubernetes.manifest_text import Text, child, items, labels, scalar
from bootseer.kubernetes.options import Options, Tier
from bootseer.kubernetes.pods import Pod

ALLOWED: dict[Tier, str] = {
    "none": "the image's files are read ahead, dependencies restored by copy, checkpoints read "
    "through fsspec or copied",
    "fuse": "as none, and checkpoints are mounted through the device plugin's /dev/fuse where the "
    "container has the capability SYS_ADMIN",
    "privileged": "as none, and dependencies and checkpoints are mounted",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One pod: its tier and the reason, notes on what will or will not work, and any refusal.

    `passed_over` says why the pod, or an object without one, is left as it is but not refused.
    """

    line: int
    pod: str
    container: str
    injected: bool
    tier: Tier
    why: str
    notes: tuple[str, ...]
    refusal: str
    passed_over: str = ""


def check(text: Text, options: Options, resolve: inject.Resolve | None = None) -> list[Finding]:
    """Examine every pod of a manifest; raises the errors of `inject`."""
    result = inject.inject(text, options, resolve)
    refused = {(refusal.line, refusal.pod): refusal.reason for refusal in result.refusals}
    passed_over = {(passed.line, passed.pod): passed.reason for passed in result.passed_over}
    # By position: names may occur twice, and lines change once our additions are removed.
    were_injected = [
        uninject.is_injected(pod)
        for document in manifest_text.parse_documents(text)
        for pod in pods.find_pods(document)
    ]
    bare = dataclasses.replace(text, raw=uninject.uninject(text))
    findings: list[Finding] = []
    for document in manifest_text.parse_documents(bare):
        for pod in pods.find_pods(document):
            place = (pod.line, pod.full_title)
            injected = were_injected[len(findings)]
            if place in passed_over:
                why, reason = "it is passed over", passed_over[place]
                findings.append(Finding(*place, "", injected, "none", why, (), "", reason))
            else:
                findings.append(_examine_pod(pod, options, injected, refused.pop(place, "")))
    for left in result.unmeasured:
        why = "it has no pod that can be injected"
        findings.append(Finding(left.line, left.pod, "", False, "none", why, (), "", left.reason))
    # Refused objects without a pod: a TrainJob has only a command.
    for (line, title), reason in refused.items():
        why = "it has no pod of its own"
        findings.append(Finding(line, title, "", False, "none", why, (), reason))
    return findings


def _examine_pod(pod: Pod, options: Options, injected: bool, refusal: str) -> Finding:
    try:
        container = inject.choose_container(pod, options)
    except BootseerError as error:
        reason = refusal or str(error)
        why = "its container is not known"
        return Finding(pod.line, pod.full_title, "", injected, "none", why, (), reason)
    tier, why = _find_tier(container, options)
    return Finding(
        line=container.start_mark.line + 1,
        pod=pod.full_title,
        container=pod.container_name(container),
        injected=injected,
        tier=tier,
        why=why,
        notes=tuple(_collect_notes(pod, container, options, tier)),
        refusal=refusal,
    )


def _find_tier(container: yaml.MappingNode, options: Options) -> tuple[Tier, str]:
    if scalar(child(container, "securityContext", "privileged")) == "true":
        return "privileged", "the container is privileged"
    if options.tier == "privileged":
        return "privileged", "--tier privileged makes the container privileged"
    limits = labels(child(container, "resources", "limits"))
    device = next((key for key in limits if "fuse" in key), "")
    if device:
        return "fuse", f"the container asks for the device {device}"
    if options.tier == "fuse":
        return "fuse", f"--tier fuse asks for the device {options.fuse_resource}"
    return "none", "the container is not privileged and asks for no FUSE device"


def _collect_notes(
    pod: Pod, container: yaml.MappingNode, options: Options, tier: Tier
) -> list[str]:
    notes = []
    unknown = kinds.describe_unknown_kind(pod)
    if unknown:
        notes.append(unknown)
    notes += _collect_identity_notes(pod, options)
    context = child(container, "securityContext")
    if scalar(child(context, "readOnlyRootFilesystem")) == "true":
        notes.append(
            "its root file system is read-only: dependencies need a writable target, such as a "
            "virtual environment on an emptyDir"
        )
    capabilities = {scalar(name) for name in items(child(context, "capabilities", "add"))}
    if tier == "fuse" and not capabilities & {"SYS_ADMIN", "CAP_SYS_ADMIN", "ALL"}:
        notes.append(
            "without the capability SYS_ADMIN nothing can be mounted, so checkpoints are copied; "
            "add it to the container's securityContext.capabilities.add"
        )
    if "events" in options.parts and options.events.kind == "pod":
        notes.append("events lie in the pod and go with it; keep them by --events pvc:CLAIM")
    places = (options.events, options.store, options.cache)
    if any(place is not None and place.kind == "host" for place in places):
        notes.append("host:/DIR is refused in namespaces of pod security baseline or restricted")
    if options.tier == "privileged":
        notes.append("a privileged container is refused in such namespaces too")
    if scalar(child(pod.spec, "hostPID")) == "true":
        notes.append("it shares the node's processes, so the wrapper is not process 1")
    if scalar(child(pod.spec, "shareProcessNamespace")) == "true":
        notes.append("its containers share one process tree, so the wrapper is not process 1")
    return notes


def _collect_identity_notes(pod: Pod, options: Options) -> list[str]:
    identity = identify(pod, options.job_uid)
    if identity.is_name:
        return [
            "its operator sets no uid on its pods: a job made again under its name has the trace "
            "id of the one before, and a report tells the two apart by their pods' uids; give each "
            "run its own --job-uid, or the next BOOTSEER_ATTEMPT, to know them apart from the "
            "first event on"
        ]
    if identity == OWN_UID and not kinds.is_known(pod):
        return [
            "each pod is a start of its own; where they start together, name that start by "
            "--job-uid or the pod's annotation bootseer.io/job-uid"
        ]
    return []
