"""Runs of a job that have only its name in common, distinguished by their pods (pure).

Some operators set nothing on a job's pods but its name, and a pod cannot read more. The events of
a job that was deleted and created again under that name then have the trace id of the run before.
What differs is each pod's uid, which the pod's own events and imported ones both have, and the uid
of the object that created the pods (`bootseer.run_uid`), which imported ones have.

A run begins with the first pod that another object created. Where that is unknown, it begins with a
pod that has the name of an earlier one, if most of the earlier run's pods are created again from
then on and were over by then. If only few are, or the earlier ones were still there, they are
replaced pods of the same run (see `tries`). Pods whose names are new belong to the run whose pods
they began closest to.

A pod also begins a start of its own where all pods before it are certain to work without it: each
had its first step well before, and began nothing after that. This is the case for pods that are
added later, or replaced one by one, where none waits for the others. Ranks that wait for a pod have
no step yet, and ranks that a new pod restarts begin something.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

from bootseer.profiler.report.load.columns import wall_extent_of
from bootseer.profiler.report.load.spans import Source, Start
from bootseer.profiler.report.model import FIRST_STEP

_SETTLED_NS = 120 * 10**9
"""How long before a pod the others had their first step: clocks, raw here, may be a minute off."""


class _Pod:
    """One pod of a job, from its first to its last event.

    `run_uid` is that of the object that created it, None where unknown.
    """

    __slots__ = ("_settled_ns", "begin_ns", "end_ns", "name", "run_uid", "sources", "uid")

    def __init__(self, uid: str, source: Source) -> None:
        self.uid, self.name, self.run_uid = uid, source.identity.pod or "", source.identity.run_uid
        self.begin_ns, self.end_ns = wall_extent_of(source)
        self.sources = [source]
        self._settled_ns: float | None = None

    def settled_ns(self) -> float:
        """When all its ranks had their first step, if nothing began after it; else infinity."""
        if self._settled_ns is None:
            self._settled_ns = _find_settled_ns(self.sources)
        return self._settled_ns


class _Run:
    """The pods of one run, by begin, and their names."""

    __slots__ = ("names", "pods", "run_uid")

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.pods: list[_Pod] = []
        self.run_uid: str | None = None

    def add(self, pod: _Pod) -> None:
        self.names.add(pod.name)
        self.pods.append(pod)
        self.run_uid = self.run_uid or pod.run_uid


def split_runs(start: Start) -> list[Start]:
    """One start for each run of a job that is known by its name; the first keeps the trace id."""
    if not any(source.identity.is_job_name for source in start.sources):
        return [start]
    runs = _find_runs(sorted(_group_pods(start.sources), key=lambda pod: (pod.begin_ns, pod.uid)))
    if len(runs) < 2:
        return [start]
    number_of = {pod.uid: number for number, run in enumerate(runs) for pod in run.pods}
    begins_ns = [min(pod.begin_ns for pod in run.pods) for run in runs]
    shares: list[list[Source]] = [[] for _ in runs]
    for source in start.sources:
        place = source.identity.place if source.identity.pod else None
        number = number_of.get(place or "")
        if number is None:  # of no pod
            begun = sum(begin_ns <= wall_extent_of(source)[0] for begin_ns in begins_ns)
            number = max(0, begun - 1)
        shares[number].append(source)
    return [
        Start(start.trace_id if not number else _derive_trace_id(start.trace_id, run), tuple(share))
        for number, (run, share) in enumerate(zip(runs, shares, strict=True))
    ]


def _group_pods(sources: Iterable[Source]) -> list[_Pod]:
    pods: dict[str, _Pod] = {}
    for source in sources:
        identity = source.identity
        if not identity.pod or not identity.place or not identity.is_job_name:
            continue
        pod = pods.get(identity.place)
        if pod is None:
            pods[identity.place] = _Pod(identity.place, source)
        else:
            begin_ns, end_ns = wall_extent_of(source)
            pod.begin_ns, pod.end_ns = min(pod.begin_ns, begin_ns), max(pod.end_ns, end_ns)
            pod.sources.append(source)
            pod.run_uid = pod.run_uid or identity.run_uid
    return list(pods.values())


def _find_runs(pods: Sequence[_Pod]) -> list[_Run]:
    runs = [_Run()]
    run_of_uid: dict[str, _Run] = {}
    for number, pod in enumerate(pods):
        run = run_of_uid.get(pod.run_uid or "")
        if run is None:
            run = runs[-1]
            is_other = bool(pod.run_uid and run.run_uid)
            if is_other or pod.name in run.names:
                moved = _count_moved(run, pods, number)
                if is_other or _is_created_again(run, pods, number, moved):
                    run = _begin_run(runs, moved)
            if run.pods and _is_settled(run, pod.begin_ns):
                run = _begin_run(runs, 0)
        run.add(pod)
        if run.run_uid:
            run_of_uid[run.run_uid] = run
    return runs


def _count_moved(run: _Run, pods: Sequence[_Pod], number: int) -> int:
    """How many of the run's latest pods would belong to a run that began with pod `number`.

    They have names that do not come again, no known owner, and began closer to that pod.
    """
    mine, names, count = run.pods, {pod.name for pod in pods[number:]}, 0
    for previous, pod in zip(mine[-2::-1], mine[:0:-1], strict=True):
        is_free = pod.run_uid is None and pod.name not in names
        if not is_free or pods[number].begin_ns - pod.begin_ns >= pod.begin_ns - previous.begin_ns:
            break
        count += 1
    return count


def _is_created_again(run: _Run, pods: Sequence[_Pod], number: int, moved: int) -> bool:
    """Whether most of the run's pods are created again from pod `number` on.

    Counted up to the first pod that is created a second time. Pods of the object that created the
    run do not count, nor do those whose earlier ones were still there when pod `number` began, as
    where one is replaced after the other.
    """
    again: set[str] = set()
    still_there = {pod.name for pod in run.pods if pod.end_ns > pods[number].begin_ns}
    for pod in pods[number:]:
        if pod.name in again:
            break
        if pod.name in still_there:
            continue
        if run.run_uid is None or pod.run_uid != run.run_uid:
            again.add(pod.name)
    return (len(again) + moved) * 2 > len(run.names) - moved


def _is_settled(run: _Run, begin_ns: int) -> bool:
    """Whether all pods of a run were at work when another one began."""
    before_ns = begin_ns - _SETTLED_NS
    is_late = run.pods[-1].begin_ns <= before_ns  # the least that it takes, and cheap to know
    return is_late and all(pod.settled_ns() <= before_ns for pod in run.pods)


def _find_settled_ns(sources: Sequence[Source]) -> float:
    step_ns = last_ns = -math.inf
    waiting = {source.identity.rank for source in sources} - {None}
    for source in sources:
        for span in source.spans:
            if span.name == FIRST_STEP:
                if span.end_ns is not None and span.status != "error":
                    step_ns = max(step_ns, span.end_ns + source.offset_ns)
                    waiting.discard(source.identity.rank)
            elif span.begin_ns is not None and not span.point:
                last_ns = max(last_ns, span.begin_ns + source.offset_ns)
    return math.inf if waiting or step_ns == -math.inf or last_ns > step_ns else step_ns


def _begin_run(runs: list[_Run], moved: int) -> _Run:
    """Begin a new run with the last `moved` pods of the one before."""
    before, new = runs[-1], _Run()
    for pod in before.pods[len(before.pods) - moved :]:
        before.names.discard(pod.name)
        new.add(pod)
    del before.pods[len(before.pods) - moved :]
    runs.append(new)
    return new


def _derive_trace_id(trace_id: str, run: _Run) -> str:
    """A trace id for a further run, the same whatever other events are read with it."""
    first = run.run_uid or min(run.pods, key=lambda pod: pod.name).uid
    return hashlib.sha256(f"{trace_id} {first}".encode("utf-8", "surrogatepass")).hexdigest()[:32]
