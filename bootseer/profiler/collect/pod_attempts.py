"""Attempts of a pod whose containers were restarted, from what the cluster keeps of it (pure).

Sources: Kubernetes API v1, ContainerStatus (`restartCount`, `lastState`): kubelet keeps the last
run but one alone. A restart of all containers by a rule (`RestartAllContainers`, KEP-5532) counts
in each container's `restartCount`; so does JobSet's in-place restart, whose agent also writes the
pod's annotation `jobset.sigs.k8s.io/in-place-restart-attempt`
(kubernetes-sigs/jobset, api/jobset/v1alpha2/jobset_types.go).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

IN_PLACE_ATTEMPT = "jobset.sigs.k8s.io/in-place-restart-attempt"
_MOST_ATTEMPTS = 10**9

Item = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Restart:
    """A container's last start after its first one, in Unix nanoseconds.

    `ended_ns` is when the run before it ended; None where that is not kept.
    """

    container: str
    image: str
    ended_ns: int | None
    started_ns: int


@dataclass(frozen=True, slots=True)
class PodAttempt:
    """A pod's last attempt, counted from 0, with the containers that it restarted."""

    number: int
    restarts: tuple[Restart, ...]


def find_last_attempt(item: Item, parse_time_ns: Callable[[str | None], int | None]) -> PodAttempt:
    """The last attempt of a pod, as the API has it; 0 for one that was not restarted.

    Containers that wait for their restart are not in it yet.
    """
    status = item.get("status") or {}
    containers = status.get("containerStatuses") or []
    marks = item["metadata"].get("annotations") or {}
    counts = [_count(container.get("restartCount")) for container in containers]
    number = max([0, _count(marks.get(IN_PLACE_ATTEMPT)), *counts])
    restarts = []
    for container, count in zip(containers, counts, strict=True):
        state = container.get("state") or {}
        run = state.get("running") or state.get("terminated") or {}
        before = (container.get("lastState") or {}).get("terminated") or {}
        started_ns = parse_time_ns(run.get("startedAt"))
        if count and started_ns is not None:
            image = str(container.get("image") or "")
            ended_ns = parse_time_ns(before.get("finishedAt"))
            restarts.append(Restart(str(container["name"]), image, ended_ns, started_ns))
    return PodAttempt(number, tuple(restarts))


def _count(value: object) -> int:
    """A count of the cluster's; 0 for what is none."""
    text = str(value)
    return min(int(text), _MOST_ATTEMPTS) if text.isdecimal() and len(text) < 19 else 0
