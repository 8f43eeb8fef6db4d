"""Spans, sources and starts, as loading makes them of event files: immutable, in nanoseconds.

A *source* is one writer (one resource line with its events) within one start. Its spans' times
are on a clock of its own (the monotonic one where the events have it); adding `offset_ns` gives
its node's wall clock. All writers of one boot of a node have the same offset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bootseer.profiler.report.model import Problem


class Span(NamedTuple):
    """A phase, or a point where `point` is set (then both times are equal).

    `begin_ns` is None for an end without a begin, `end_ns` for a begin without an end. An end
    that lies before its begin is dropped: `end_ns` is None and `status` is `unknown`.
    `attributes` is None where there are none.
    """

    name: str
    begin_ns: int | None
    end_ns: int | None
    wait: bool
    status: str
    point: bool
    span_id: str | None
    parent_id: str | None
    attributes: Mapping[str, object] | None


class Identity(NamedTuple):
    """The process that wrote a source, from its resource line.

    `pod` is the Kubernetes pod's name; `place` the pod's uid, else the container's id: two starts
    with the same place ran in the same pod or container. `container` is the container's id, if the
    process knows it. With `is_job_name` the job uid is only a
    namespace and a name, which several runs may share, and `place` is the pod's uid; `run_uid` is
    then the uid of the object that created the pod, if the cluster's records have it.
    `makes_container`: it is `bootseer image run`, each of which makes a container for its job.
    """

    node: str
    pod: str | None
    rank: int | None
    local_rank: int | None
    boot_id: str | None
    gpus: int | None
    attempt: int | None
    job_uid: str | None
    kind: str | None
    process_id: int | None
    place: str | None = None
    world_size: int | None = None
    is_job_name: bool = False
    run_uid: str | None = None
    container: str | None = None
    makes_container: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """One writer's part of one start; `file` is the path that it was read from.

    `spans` are `columns.Spans` after loading. `events` counts the events that they were made of.
    """

    file: str
    identity: Identity
    spans: Sequence[Span]
    events: int
    offset_ns: int


@dataclass(frozen=True, slots=True)
class Start:
    """All sources of one trace id, sorted by node, rank and file."""

    trace_id: str
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """Every start found, newest first, and what was wrong with the input as a whole."""

    starts: tuple[Start, ...]
    problems: tuple[Problem, ...]
