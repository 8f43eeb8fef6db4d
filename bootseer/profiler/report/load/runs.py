"""Runs of a job that have only its name in common, told apart by their pods (pure).

Some operators set nothing on a job's pods but its name, and a pod cannot read more. The events of
a job that was deleted and created again under that name then have the trace id of the run before.
What differs is each pod's uid, which its own events and imported ones both have, and the uid of
the object that made the pods (`bootseer.run_uid`), which imported ones have.

A run begins with the pod that another object made. Where that is unknown, it begins with a pod
that has the name of an earlier one, if most of the earlier run's pods are made again from then on
and were over by then: fewer, and those whose earlier ones were still there, are pods of the same
run that were replaced, see `tries`. Pods whose names are new belong to the run whose pods they
began closest to.

A pod also begins a start of its own where all before it are sure to be at work without it: each
had its first step well before, and began nothing after that. So do pods that are added later, or
replaced one by one, where none waits for the others. Ranks that wait for a pod have no step yet,
and those that a new pod starts again begin something.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

from bootseer.profiler.report.lanes import FIRST_STEP
from bootseer.profiler.report.load.columns import extent_of
from bootseer.profiler.report.load.spans import Source, Start

_SETTLED_NS = 120 * 10**9
"""So long before a pod the others had their first step: clocks, raw here, may be a minute apart."""


class _Pod:
    """One pod of a job, from its first to its last event; `run_uid` is that of the object that made
    it, None where unknown."""

    __slots__ = ("_settled_ns", "begin_ns", "end_ns", "name", "run_uid", "sources", "uid")

    def __init__(self, uid: str, source: Source) -> None:
        self.uid, self.name, self.run_uid = uid, source.identity.pod or "", source.identity.run_uid
        self.begin_ns, self.end_ns = _extent(source)
        self.sources = [source]
        self._settled_ns: float | None = None

    def settled_ns(self) -> float:
        """When the last first step of its ranks was, behind which it began nothing; else never."""
        if self._settled_ns is None:
            self._settled_ns = _settled_ns(self.sources)
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
    runs = _find_runs(sorted(_pods_of(start.sources), key=lambda pod: (pod.begin_ns, pod.uid)))
    if len(runs) < 2:
        return [start]
    number_of = {pod.uid: number for number, run in enumerate(runs) for pod in run.pods}
    begins_ns = [min(pod.begin_ns for pod in run.pods) for run in runs]
    shares: list[list[Source]] = [[] for _ in runs]
    for source in start.sources:
        place = source.identity.place if source.identity.pod else None
        number = number_of.get(place or "")
        if number is None:  # of no pod
            begun = sum(begin_ns <= _extent(source)[0] for begin_ns in begins_ns)
            number = max(0, begun - 1)
        shares[number].append(source)
    return [
        Start(start.trace_id if not number else _derive(start.trace_id, run), tuple(share))
        for number, (run, share) in enumerate(zip(runs, shares, strict=True))
    ]


def _pods_of(sources: Iterable[Source]) -> list[_Pod]:
    found: dict[str, _Pod] = {}
    for source in sources:
        who = source.identity
        if not who.pod or not who.place or not who.is_job_name:
            continue
        pod = found.get(who.place)
        if pod is None:
            found[who.place] = _Pod(who.place, source)
        else:
            begin_ns, end_ns = _extent(source)
            pod.begin_ns, pod.end_ns = min(pod.begin_ns, begin_ns), max(pod.end_ns, end_ns)
            pod.sources.append(source)
            pod.run_uid = pod.run_uid or who.run_uid
    return list(found.values())


def _find_runs(pods: Sequence[_Pod]) -> list[_Run]:
    runs = [_Run()]
    known: dict[str, _Run] = {}
    for number, pod in enumerate(pods):
        run = known.get(pod.run_uid or "")
        if run is None:
            run = runs[-1]
            is_other = bool(pod.run_uid and run.run_uid)
            if is_other or pod.name in run.names:
                forward = _count_forward(run, pods, number)
                if is_other or _is_made_again(run, pods, number, forward):
                    run = _begin_run(runs, forward)
            if run.pods and _is_settled(run, pod.begin_ns):
                run = _begin_run(runs, 0)
        run.add(pod)
        if run.run_uid:
            known[run.run_uid] = run
    return runs


def _count_forward(run: _Run, pods: Sequence[_Pod], number: int) -> int:
    """How many of the run's latest pods, if another run began with this one, would belong to that:
    they have names that do not come again, no known owner, and began closer to it."""
    mine, names, count = run.pods, {pod.name for pod in pods[number:]}, 0
    for previous, pod in zip(mine[-2::-1], mine[:0:-1], strict=True):
        is_free = pod.run_uid is None and pod.name not in names
        if not is_free or pods[number].begin_ns - pod.begin_ns >= pod.begin_ns - previous.begin_ns:
            break
        count += 1
    return count


def _is_made_again(run: _Run, pods: Sequence[_Pod], number: int, forward: int) -> bool:
    """Whether as many pods as make up most of the run follow from this one on, before one of them
    is made once more; those of the object that made the run do not count, nor do those whose
    earlier ones were still there when this one began, as where one is replaced after the other."""
    ahead: set[str] = set()
    there = {pod.name for pod in run.pods if pod.end_ns > pods[number].begin_ns}
    for pod in pods[number:]:
        if pod.name in ahead:
            break
        if pod.name in there:
            continue
        if run.run_uid is None or pod.run_uid != run.run_uid:
            ahead.add(pod.name)
    return (len(ahead) + forward) * 2 > len(run.names) - forward


def _is_settled(run: _Run, begin_ns: int) -> bool:
    """Whether all pods of a run were at work when another one began."""
    before_ns = begin_ns - _SETTLED_NS
    is_late = run.pods[-1].begin_ns <= before_ns  # the least that it takes, and quickly known
    return is_late and all(pod.settled_ns() <= before_ns for pod in run.pods)


def _settled_ns(sources: Sequence[Source]) -> float:
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


def _begin_run(runs: list[_Run], forward: int) -> _Run:
    """A new run, with that many pods from the end of the one before."""
    before, new = runs[-1], _Run()
    for pod in before.pods[len(before.pods) - forward :]:
        before.names.discard(pod.name)
        new.add(pod)
    del before.pods[len(before.pods) - forward :]
    runs.append(new)
    return new


def _derive(trace_id: str, run: _Run) -> str:
    """A trace id for a further run, the same whatever else is read with it."""
    first = run.run_uid or min(run.pods, key=lambda pod: pod.name).uid
    return hashlib.sha256(f"{trace_id} {first}".encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _extent(source: Source) -> tuple[int, int]:
    low_ns, high_ns = extent_of(source.spans)
    return low_ns + source.offset_ns, high_ns + source.offset_ns
