"""Which process wrote an event file: its node, pod and rank, from its resource line (pure)."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from bootseer.profiler.report.load.spans import Identity

_PROGRAMS = frozenset(("bootseer", "bootseer-python"))
"""Our program, and what it goes on as where it is installed."""


def identity_of(attributes: Mapping[str, object], path: str) -> Identity:
    """Read a resource line's attributes; without a node in them, the file's name gives it.

    The event writer names its file `<host>-<pid>-<start time>.jsonl`.
    """

    def text(key: str) -> str | None:
        value = attributes.get(key)
        return sys.intern(value) if type(value) is str and value else None

    def number(key: str) -> int | None:
        value = attributes.get(key)
        return value if type(value) is int and 0 <= value < 1 << 40 else None

    namespace, job_uid = text("k8s.namespace.name"), text("bootseer.job_uid")
    host = os.path.basename(path).removesuffix(".jsonl").rsplit("-", 2)[0]
    return Identity(
        node=text("k8s.node.name") or text("host.name") or sys.intern(host or "unknown"),
        pod=text("k8s.pod.name"),
        rank=number("bootseer.rank"),
        local_rank=number("bootseer.local_rank"),
        boot_id=text("bootseer.boot_id"),
        gpus=number("bootseer.gpu.count"),
        attempt=number("bootseer.attempt"),
        job_uid=job_uid,
        kind=text("bootseer.start.kind"),
        process_id=number("process.pid"),
        place=text("k8s.pod.uid") or text("container.id"),
        world_size=number("bootseer.world_size"),
        is_job_name=bool(
            text("k8s.pod.uid") and namespace and job_uid and job_uid.startswith(f"{namespace}/")
        ),
        run_uid=text("bootseer.run_uid"),
        container=text("container.id") or text("bootseer.container"),
        makes_container=_is_image_run(attributes.get("process.command_args")),
    )


def _is_image_run(words: object) -> bool:
    """Whether a command is `bootseer image run`."""
    if type(words) is not list or "image" not in words:
        return False
    at = words.index("image")
    before, after = words[at - 1 : at], words[at + 1 : at + 2]
    return after == ["run"] and any(os.path.basename(str(word)) in _PROGRAMS for word in before)


def resolve_nodes(identities: Sequence[Identity]) -> list[Identity]:
    """Replace pod names that stand for nodes by the node's name, where another source has both.

    Without the downward API a pod does not know its node, and its host name is the pod's name;
    events imported from the cluster have both.
    """
    nodes = {i.pod: i.node for i in identities if i.pod and i.pod != i.node}
    if not nodes:
        return list(identities)
    resolved = []
    for identity in identities:
        node = nodes.get(identity.node) or nodes.get(identity.pod or "") or identity.node
        resolved.append(identity if node == identity.node else identity._replace(node=node))
    return resolved
