"""kubectl's pods and events, turned into the phases of each pod's start; pure.

Sources: Kubernetes API v1 (Pod, Event; also events.k8s.io/v1) and batch/v1 Job; the messages of
kube-scheduler and kubelet (pkg/kubelet/images/image_manager.go): `Successfully pulled image "…" in
1.3s` (to 1.26; waiting in kubelet's queue included) and `… in 1.2s (1.3s including waiting). Image
size: 123 bytes.` (since). Event times are whole seconds, but an event's name ends in the
hexadecimal nanoseconds of its first occurrence, made by the client that saw it.

Phases: `queue` (from the Job's creation, or the first FailedScheduling, until the pod could be
scheduled), `schedule` (until the scheduler chose the node), `image.pull` for each container (with
`image.pull.wait` for the wait in kubelet's queue where that is told apart), `container.init`,
`container.start` (image there → process started), points `container.exit` (failed containers) and
`container.restart`. What cannot be seen is not written; `Pod.not_observed` names it.

A job's own processes find the same trace when their BOOTSEER_JOB_UID is the uid used here: the
pod's own BOOTSEER_JOB_UID variable if its manifest sets one, else the annotation or label
`bootseer.io/job-uid`, else the uid of the controller (Job, DaemonSet, custom job) that owns it,
else the pod's uid. To hand the controller's uid to the processes, use the downward API: `fieldPath:
metadata.labels['batch.kubernetes.io/controller-uid']`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from bootseer.errors import CorruptDataError
from bootseer.profiler.collect import loglines

OBSERVABLE = ("queue", "schedule", "image.pull", "container.start")
EVENT_REASONS = frozenset(
    ("FailedScheduling", "Scheduled", "Pulling", "Pulled", "Started", "Failed")
)

_HEX_NS = re.compile(r"\.([0-9a-f]{15,16})$")
_PULLED = re.compile(
    r'Successfully pulled image "(?P<image>[^"]*)" in (?P<pull>[\dhmsnuµ.]+)'
    r"(?: \((?P<whole>[\dhmsnuµ.]+) including waiting\))?(?:\. Image size: (?P<size>\d+) bytes)?"
)
_CONTAINER = re.compile(r"spec\.(initContainers|containers|ephemeralContainers)\{([^}]*)\}")
_CREATED_POD = re.compile(r"Created pod: (\S+)")

Item = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """One phase; a point where `begin_ns` equals `end_ns` and `point` is set. Unix nanoseconds."""

    name: str
    begin_ns: int
    end_ns: int
    status: str
    attributes: dict[str, Any]
    point: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Pod:
    """One pod's start: who it is, which job and attempt it belongs to, what was seen of it."""

    name: str
    job_uid: str
    attempt: int
    resource: dict[str, Any]
    spans: list[Span]
    not_observed: list[str]


@dataclasses.dataclass(frozen=True, slots=True)
class _Event:
    reason: str
    message: str
    container: str
    first_ns: int


def parse(text: str, name: str) -> list[Item]:
    """Objects of kubectl's output: a List, single objects, or any of these one after the other.

    `name` is the file's, for errors. Raises CorruptDataError.
    """
    decoder = json.JSONDecoder()
    items: list[Item] = []
    position = 0
    text = text.removeprefix("\ufeff")
    while True:
        while position < len(text) and text[position].isspace():
            position += 1
        if position == len(text):
            break
        try:
            document, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            line = text.count("\n", 0, getattr(error, "pos", position)) + 1
            raise CorruptDataError(
                f"{name}:{line}: is not JSON; make it with `kubectl get pods,events -o json`"
            ) from error
        items.extend(_flatten(document, name))
    if not items:
        raise CorruptDataError(f"{name}: holds no Kubernetes object")
    return items


def _flatten(document: object, name: str) -> Iterator[Item]:
    if isinstance(document, dict) and "items" in document:
        document = document["items"]
    if isinstance(document, list):
        for one in document:
            yield from _flatten(one, name)
    elif isinstance(document, dict) and "metadata" in document:
        yield document
    else:
        raise CorruptDataError(f"{name}: holds something that is no Kubernetes object")


def pods(items: Iterable[Item], job_uid: str | None = None) -> list[Pod]:
    """The start of each pod in `items`; `job_uid` overrides what the objects say.

    Raises CorruptDataError where an object has not the shape that the API gives it.
    """
    try:
        return list(_pods(list(items), job_uid))
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise CorruptDataError(
            f"an object is not of the Kubernetes API's shape ({type(error).__name__}: {error}); "
            "make it with `kubectl get pods,events,jobs -o json`"
        ) from error


def _pods(items: list[Item], job_uid: str | None) -> Iterator[Pod]:
    events: dict[str, list[_Event]] = {}
    created: dict[str, int] = {}
    jobs: dict[str, int] = {}
    for item in items:
        if _kind(item) == "Event":
            _take_event(item, events, created)
        elif _kind(item) == "Job":
            jobs[item["metadata"]["uid"]] = _time_ns(item["metadata"]["creationTimestamp"]) or 0
    for item in items:
        if _kind(item) == "Pod":
            seen = sorted(events.get(item["metadata"]["uid"], []), key=lambda e: e.first_ns)
            yield _pod(item, seen, created, jobs, job_uid)


def _kind(item: Item) -> str:
    """The object's kind; kubectl leaves it out of objects within a typed list."""
    kind = item.get("kind")
    if kind is None:
        return "Pod" if "containers" in item.get("spec", {}) else ""
    return str(kind)


def _take_event(item: Item, events: dict[str, list[_Event]], created: dict[str, int]) -> None:
    about = item.get("involvedObject") or item.get("regarding") or {}
    reason = str(item.get("reason"))
    message = str(item.get("message") or item.get("note") or "")
    first_ns = _event_ns(item)
    if first_ns is None:
        return
    made = _CREATED_POD.match(message)
    if reason == "SuccessfulCreate" and made:
        created[f"{about.get('namespace')}/{made.group(1)}"] = first_ns
    if about.get("kind") == "Pod" and reason in EVENT_REASONS:
        found = _CONTAINER.match(about.get("fieldPath") or "")
        one = _Event(reason, message, found.group(2) if found else "", first_ns)
        events.setdefault(about.get("uid", ""), []).append(one)


def _event_ns(item: Item) -> int | None:
    """An event's first time: eventTime (microseconds), else name, if it agrees, else seconds."""
    if item.get("eventTime"):
        return _time_ns(item["eventTime"])
    stamp = item.get("firstTimestamp") or item.get("deprecatedFirstTimestamp")
    whole = _time_ns(stamp or item["metadata"].get("creationTimestamp"))
    found = _HEX_NS.search(item["metadata"]["name"])
    fine = int(found.group(1), 16) if found else None
    if fine is not None and (whole is None or abs(fine - whole) <= 2 * loglines.SECOND_NS):
        return fine
    return whole


def _time_ns(text: str | None) -> int | None:
    found = loglines.parse_time_ns(text, "iso", 0, 0) if text else None
    return found if found else None  # a container never started says 1970-01-01T00:00:00Z


def _pod(
    item: Item,
    events: list[_Event],
    created: dict[str, int],
    jobs: dict[str, int],
    job_uid: str | None,
) -> Pod:
    metadata = item["metadata"]
    owner = _owner(metadata)
    environment = _environment(item)
    uid = job_uid or _job_uid(metadata, owner, environment)
    spans = [
        *_placing(item, events, created, jobs.get(owner.get("uid", ""))),
        *_containers(item, events),
    ]
    seen = {span.name for span in spans}
    attempt = environment.get("BOOTSEER_ATTEMPT", "")
    return Pod(
        name=f"{metadata.get('namespace', 'default')}/{metadata['name']}",
        job_uid=uid,
        attempt=int(attempt) if attempt.isdecimal() else 0,
        resource=_resource(item, owner, uid),
        spans=sorted(spans, key=lambda span: (span.begin_ns, -span.end_ns)),
        not_observed=[name for name in OBSERVABLE if name not in seen],
    )


def _owner(metadata: Item) -> Item:
    owners = metadata.get("ownerReferences") or [{}]
    return next((one for one in owners if one.get("controller")), owners[0])


def _environment(item: Item) -> dict[str, str]:
    """Literal variables of the pod's containers; the first container wins."""
    out: dict[str, str] = {}
    for container in item["spec"].get("containers", []):
        for one in container.get("env") or []:
            if one.get("value"):
                out.setdefault(one["name"], str(one["value"]))
    return out


def _job_uid(metadata: Item, owner: Item, environment: Mapping[str, str]) -> str:
    marks = {**(metadata.get("labels") or {}), **(metadata.get("annotations") or {})}
    named = environment.get("BOOTSEER_JOB_UID") or marks.get("bootseer.io/job-uid")
    return str(named or owner.get("uid") or metadata["uid"])


def _resource(item: Item, owner: Item, uid: str) -> dict[str, Any]:
    metadata, spec = item["metadata"], item["spec"]
    marks = {**(metadata.get("labels") or {}), **(metadata.get("annotations") or {})}
    kind = str(owner.get("kind", "")).lower()
    rank = marks.get("batch.kubernetes.io/job-completion-index") or marks.get(
        "training.kubeflow.org/replica-index"
    )
    gpus = 0
    for container in spec.get("containers", []):
        limits = (container.get("resources") or {}).get("limits") or {}
        gpus += sum(int(v) for k, v in limits.items() if k.endswith("/gpu") and str(v).isdecimal())
    resource = {
        "service.name": owner.get("name") or metadata["name"],
        "bootseer.job_uid": uid,
        "bootseer.source": "k8s",
        "k8s.namespace.name": metadata.get("namespace"),
        "k8s.pod.name": metadata["name"],
        "k8s.pod.uid": metadata["uid"],
        "k8s.node.name": spec.get("nodeName"),
        f"k8s.{kind}.name": owner.get("name") if kind else None,
        "bootseer.gpu.count": gpus or None,
        "bootseer.node_rank": int(rank) if rank and rank.isdecimal() else None,
    }
    return {key: value for key, value in resource.items() if value is not None}


def _placing(
    item: Item, events: list[_Event], created: dict[str, int], job_ns: int | None
) -> Iterator[Span]:
    """`queue` and `schedule`."""
    metadata = item["metadata"]
    made_ns = _time_ns(metadata["creationTimestamp"])
    fine_ns = created.get(f"{metadata.get('namespace')}/{metadata['name']}")
    if made_ns is not None and fine_ns and 0 <= fine_ns - made_ns < loglines.SECOND_NS:
        made_ns = fine_ns
    if made_ns is None:
        return
    failed = [event for event in events if event.reason == "FailedScheduling"]
    bound = [event.first_ns for event in events if event.reason == "Scheduled"]
    ready_ns = max([made_ns, *(event.first_ns for event in failed)])
    attributes = {"bootseer.source": "k8s", "bootseer.wait": True}
    begin_ns = min(job_ns or made_ns, made_ns)
    if failed or (job_ns and job_ns + loglines.SECOND_NS <= made_ns):
        reason = {"bootseer.reason": failed[-1].message[:300]} if failed else {}
        yield Span("queue", begin_ns, ready_ns, "ok", {**attributes, **reason})
    if not bound:
        conditions = (item.get("status") or {}).get("conditions") or []
        times = [c for c in conditions if c["type"] == "PodScheduled" and c["status"] == "True"]
        bound = [ns for ns in (_time_ns(c["lastTransitionTime"]) for c in times) if ns]
    if bound:
        # An object's own creation time is cut to whole seconds.
        rough = {} if failed or made_ns == fine_ns else {"bootseer.uncertainty_s": 1}
        end_ns = max(bound[0], ready_ns)
        yield Span("schedule", ready_ns, end_ns, "ok", {"bootseer.source": "k8s", **rough})


def _containers(item: Item, events: list[_Event]) -> Iterator[Span]:
    status = item.get("status") or {}
    for key, init in (("initContainerStatuses", True), ("containerStatuses", False)):
        for container in status.get(key) or []:
            mine = [event for event in events if event.container == container["name"]]
            yield from _container(container, mine, init)


def _container(container: Item, events: list[_Event], init: bool) -> Iterator[Span]:
    base = {
        "bootseer.source": "k8s",
        "k8s.container.name": container["name"],
        "container.image.name": container.get("image", ""),
    }
    yield from _pull(events, base)
    yield from _started(container, events, base, init)
    yield from _exits(container, events, base)


def _pull(events: list[_Event], base: dict[str, Any]) -> Iterator[Span]:
    for event in events:
        found = _PULLED.match(event.message) if event.reason == "Pulled" else None
        if not found:
            continue
        own_ns = loglines.parse_duration_ns(found["pull"]) or 0
        attributes: dict[str, Any] = {**base, "k8s.image.wait_included": found["whole"] is None}
        if found["size"]:
            attributes["bootseer.bytes"] = int(found["size"])
        begin_ns = event.first_ns - own_ns
        whole_ns = loglines.parse_duration_ns(found["whole"]) if found["whole"] else None
        if whole_ns and whole_ns > own_ns:
            waited = {**base, "bootseer.wait": True}
            wait_ns = event.first_ns - whole_ns
            yield Span("image.pull.wait", wait_ns, begin_ns, "ok", waited)
        yield Span("image.pull", begin_ns, event.first_ns, "ok", attributes)
    failed = [e for e in events if e.reason == "Failed" and "pull image" in e.message]
    if failed:
        pulling = [e.first_ns for e in events if e.reason == "Pulling"]
        begin_ns = min([*pulling, failed[0].first_ns])
        failure = {
            **base,
            "error.type": "ErrImagePull",
            "bootseer.reason": failed[0].message[:300],
        }
        yield Span("image.pull", begin_ns, failed[0].first_ns, "error", failure)


def _started(
    container: Item, events: list[_Event], base: dict[str, Any], init: bool
) -> Iterator[Span]:
    """Image there → process started (or refused); an init container's whole run besides."""
    there = [event.first_ns for event in events if event.reason == "Pulled"]
    started = [event.first_ns for event in events if event.reason == "Started"]
    refused = [
        event
        for event in events
        if event.reason == "Failed" and event.message.startswith("Error: ") and there
    ]
    if not there:
        return
    if any("already present" in e.message for e in events if e.first_ns == there[0]):
        base = {**base, "k8s.image.present": True}
    if started:
        yield Span("container.start", there[0], max(started[0], there[0]), "ok", base)
    elif refused:
        failure = {
            **base,
            "error.type": _reason(container),
            "bootseer.reason": refused[0].message[:300],
        }
        end_ns = max(refused[0].first_ns, there[0])
        yield Span("container.start", there[0], end_ns, "error", failure)
    finished = _time_ns((container["state"].get("terminated") or {}).get("finishedAt"))
    if init and started and finished and finished > started[0]:  # whole seconds: else unknown
        rough = {**base, "bootseer.uncertainty_s": 1}
        yield Span("container.init", started[0], finished, "ok", rough)


def _reason(container: Item) -> str:
    state = container["state"]
    found = state.get("waiting") or state.get("terminated") or {}
    return str(found.get("reason") or "Error")


def _exits(container: Item, events: list[_Event], base: dict[str, Any]) -> Iterator[Span]:
    """Failed ends of the container, this one and the one before, and its restarts."""
    known = [event.first_ns for event in events if event.reason in ("Started", "Failed")]
    for state in (container.get("lastState") or {}, container["state"]):
        ended = state.get("terminated") or {}
        finished = _time_ns(ended.get("finishedAt"))
        if finished and ended.get("exitCode"):
            # Whole seconds: not before the start, nor the refusal, that an event dates better.
            finished = max([finished, *(ns for ns in known if ns < finished + loglines.SECOND_NS)])
            failure = {
                **base,
                "error.type": ended.get("reason") or "Error",
                "process.exit.code": ended["exitCode"],
            }
            yield Span("container.exit", finished, finished, "error", failure, point=True)
            if state is not container["state"]:
                restart = {
                    **base,
                    "error.type": _reason(container),
                    "k8s.container.restart_count": container["restartCount"],
                }
                yield Span("container.restart", finished, finished, "error", restart, point=True)
