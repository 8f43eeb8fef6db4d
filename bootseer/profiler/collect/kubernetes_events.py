"""kubectl's pods and events, turned into the phases of each pod's start; pure.

Sources: Kubernetes API v1 (Pod, Event; also events.k8s.io/v1) and batch/v1 Job; the messages of
kube-scheduler and kubelet (pkg/kubelet/images/image_manager.go): `Successfully pulled image "…" in
1.3s` (to 1.26; waiting in kubelet's queue included) and `… in 1.2s (1.3s including waiting). Image
size: 123 bytes.` (since). Event times are whole seconds, but an event's name ends in the
hexadecimal nanoseconds of its first occurrence, made by the client that saw it. What happens again
is the same event with a later last time (`lastTimestamp`, or `series.lastObservedTime` of the newer
API) and, after ten alike, with a prefix to its message (client-go, tools/record/events_cache.go and
tools/events/event_broadcaster.go).

Phases: `queue` (from the Job's creation, or the first FailedScheduling, until the last one; with
scheduling gates until the pod was placed, as nothing tells when the last gate went; of gates that
were gone when it was read first nothing tells but Kueue's label), `schedule`
(until the scheduler chose the node), `image.pull` for each container (with `image.pull.wait` for
the wait in kubelet's queue where that is told apart, and `image.pull.retry` from the first failed
pull to the next good one), `container.init`, `container.start` (image there → process started),
points `container.exit` (failed containers), `container.restart` and `pod.end` (evicted, preempted,
or the node lost). What cannot be seen is not written; `Pod.not_observed` names it.

A job's own processes find the same trace when their BOOTSEER_JOB_UID is the uid used here: the
pod's own BOOTSEER_JOB_UID variable if its manifest sets one (by value, or by the downward API from
the pod's labels, annotations, uid, name or namespace, with `$(OTHER)` filled in), else the
annotation or label `bootseer.io/job-uid`, else what an operator's labels say (the JobSet's uid, the
group of a LeaderWorkerSet, an MPIJob's namespace and name), else the uid of the controller (Job,
custom job) that owns it, else the pod's uid. Pods of controllers that replace them one by one
(ReplicaSet, StatefulSet, DaemonSet) and of Argo's workflows are starts of their own. Where that
is a namespace and a name, the uid of the object that made the pods is kept besides
(`bootseer.run_uid`): a report tells runs of one name apart by it. To hand the
controller's uid to the processes, use the downward API:
`fieldPath: metadata.labels['batch.kubernetes.io/controller-uid']`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from bootseer.errors import CorruptDataError
from bootseer.profiler.collect.log_rules import lines

OBSERVABLE = ("queue", "schedule", "image.pull", "container.start")
_NO_IMAGE = ("Error: ErrImagePull", "Error: ImagePullBackOff")
_ENDS = ("Evicted", "Preempted")
EVENT_REASONS = frozenset(
    ("FailedScheduling", "Scheduled", "Pulling", "Pulled", "Started", "Failed", "BackOff", *_ENDS)
)
JOBSET_UID = "jobset.sigs.k8s.io/jobset-uid"
"""Label of all pods of a JobSet (kubernetes-sigs/jobset, api/jobset/v1alpha2/jobset_types.go)."""
_GROUP_KEY = "leaderworkerset.sigs.k8s.io/group-key"
"""Label of all pods of a group (kubernetes-sigs/lws, pkg/webhooks/pod_webhook.go)."""
_OPERATOR, _JOB_NAME = "training.kubeflow.org/operator-name", "training.kubeflow.org/job-name"
"""Labels of an MPIJob's workers and launcher, which a Job owns
(kubeflow/mpi-operator, pkg/apis/kubeflow/v2beta1/constants.go)."""
_MAKERS = ("PyTorchJob", "TFJob", "XGBoostJob", "PaddleJob", "JAXJob", "MPIJob", "RayCluster")
"""Kinds that own their pods and give them nothing but their name, see `bootseer.kubernetes`."""
_REPLACED_ONE_BY_ONE = (
    "ReplicaSet",
    "StatefulSet",
    "DaemonSet",
    "ReplicationController",
    "Workflow",
)
"""Kinds of controllers whose pods do not start together."""
_KUEUE = "kueue.x-k8s.io/managed"
"""Label of pods that Kueue holds by a gate (kubernetes-sigs/kueue, pkg/controller/jobs/pod)."""
_LATER_NS = 60 * lines.SECOND_NS
"""A pod that is made so long after its Job began is none of its first ones."""
_AGAIN = "(combined from similar events): "

_HEX_NS = re.compile(r"\.([0-9a-f]{15,16})$")
_PULLED = re.compile(
    r'Successfully pulled image "(?P<image>[^"]*)" in (?P<pull>[\dhmsnuµ.]+)'
    r"(?: \((?P<whole>[\dhmsnuµ.]+) including waiting\))?(?:\. Image size: (?P<size>\d+) bytes)?"
)
_CONTAINER = re.compile(r"spec\.(initContainers|containers|ephemeralContainers)\{([^}]*)\}")
_CREATED_POD = re.compile(r"Created pod: (\S+)")
_FIELD = re.compile(r"metadata\.(?:(uid|namespace|name)|(labels|annotations)\['([^']+)'\])")
_REFERENCE = re.compile(r"\$(\$|\(([^()]*)\))")
_LOGS = re.compile(
    r"^==== START logs for container .*?^==== END logs for container [^\n]*$", re.M | re.S
)
"""Logs between the objects of `kubectl cluster-info dump` (pkg/cmd/clusterinfo)."""

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
    last_ns: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    """When a Job was made, when its controller began to make pods, and what made the Job."""

    made_ns: int
    began_ns: int | None
    owner: Item


def parse(text: str, name: str) -> list[Item]:
    """Objects of kubectl's output: a List, single objects, or any of these one after the other.

    `name` is the file's, for errors. Raises CorruptDataError.
    """
    decoder = json.JSONDecoder()
    items: list[Item] = []
    position = 0
    text = _LOGS.sub(lambda found: "\n" * found[0].count("\n"), text.removeprefix("\ufeff"))
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


def _flatten(document: object, name: str, kind: str = "") -> Iterator[Item]:
    """Objects of a document; items of a typed list (`EventList`) have no kind of their own.

    A watch (`kubectl get --watch --output-watch-events`, the API's `?watch=1`) puts each object as
    it became into one of its own; bookmarks and errors hold none that ever was.
    """
    if isinstance(document, dict) and isinstance(document.get("object"), dict):
        if document.get("type") not in ("BOOKMARK", "ERROR"):
            yield from _flatten(document["object"], name)
        return
    if isinstance(document, dict) and "items" in document:
        kind = str(document.get("kind") or "").removesuffix("List")
        document = document["items"] or []  # Go writes an empty list as null
    if isinstance(document, list):
        for one in document:
            yield from _flatten(one, name, kind)
    elif isinstance(document, dict) and "metadata" in document:
        yield document if "kind" in document or not kind else {**document, "kind": kind}
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
    jobs: dict[str, _Job] = {}
    gated = {
        item["metadata"].get("uid") for item in items if _kind(item) == "Pod" and _is_gated(item)
    }
    items = _newest(items)
    for item in items:
        if _kind(item) == "Event":
            _take_event(item, events, created)
        elif _kind(item) == "Job":
            made_ns = _time_ns(item["metadata"]["creationTimestamp"]) or 0
            began_ns = _time_ns((item.get("status") or {}).get("startTime"))
            jobs[item["metadata"]["uid"]] = _Job(made_ns, began_ns, _owner(item["metadata"]))
    for item in items:
        if _kind(item) == "Pod":
            seen = sorted(events.get(item["metadata"]["uid"], []), key=lambda e: e.first_ns)
            was_gated = item["metadata"]["uid"] in gated
            yield _pod(item, seen, created, jobs, job_uid, was_gated=was_gated)


def _is_gated(item: Item) -> bool:
    """Whether a pod, as it was read, is held by a scheduling gate, or was made to be by Kueue.

    A gate that is gone leaves nothing in a pod: only what was read before, as by a watch, tells of
    it (kubernetes/kubernetes, pkg/registry/core/pod/strategy.go, applySchedulingGatedCondition).
    """
    conditions = (item.get("status") or {}).get("conditions") or []
    return (
        (item["metadata"].get("labels") or {}).get(_KUEUE) == "true"
        or bool(item["spec"].get("schedulingGates"))
        or any(one.get("reason") == "SchedulingGated" for one in conditions)
    )


def _newest(items: list[Item]) -> list[Item]:
    """Each object once, as it was read last: two dumps of one cluster hold many in common."""
    found: dict[object, Item] = {}
    for number, item in enumerate(items):
        uid = item["metadata"].get("uid")
        found[(_kind(item), uid) if uid else number] = item
    return list(found.values())


def _kind(item: Item) -> str:
    """The object's kind; kubectl leaves it out of objects within a typed list."""
    kind = item.get("kind")
    if kind is None:
        if "involvedObject" in item or "regarding" in item:
            return "Event"
        return "Pod" if "containers" in item.get("spec", {}) else ""
    return str(kind)


def _take_event(item: Item, events: dict[str, list[_Event]], created: dict[str, int]) -> None:
    about = item.get("involvedObject") or item.get("regarding") or {}
    reason = str(item.get("reason"))
    message = str(item.get("message") or item.get("note") or "").removeprefix(_AGAIN)
    first_ns = _event_ns(item)
    if first_ns is None:
        return
    made = _CREATED_POD.match(message)
    if reason == "SuccessfulCreate" and made:
        created[f"{about.get('namespace')}/{made.group(1)}"] = first_ns
    if about.get("kind") == "Pod" and reason in EVENT_REASONS:
        found = _CONTAINER.match(about.get("fieldPath") or "")
        last_ns = max(first_ns, _last_ns(item) or first_ns)
        one = _Event(reason, message, found.group(2) if found else "", first_ns, last_ns)
        events.setdefault(about.get("uid", ""), []).append(one)


def _event_ns(item: Item) -> int | None:
    """An event's first time: eventTime (microseconds), else name, if it agrees, else seconds."""
    if item.get("eventTime"):
        return _time_ns(item["eventTime"])
    stamp = item.get("firstTimestamp") or item.get("deprecatedFirstTimestamp")
    whole = _time_ns(stamp or item["metadata"].get("creationTimestamp"))
    found = _HEX_NS.search(item["metadata"]["name"])
    fine = int(found.group(1), 16) if found else None
    if fine is not None and (whole is None or abs(fine - whole) <= 2 * lines.SECOND_NS):
        return fine
    return whole


def _last_ns(item: Item) -> int | None:
    """When the event was last seen, where it happened more than once."""
    series = item.get("series") or {}
    count = series.get("count") or item.get("count") or item.get("deprecatedCount") or 1
    last = item.get("lastTimestamp") or item.get("deprecatedLastTimestamp")
    return _time_ns(series.get("lastObservedTime") or last) if count > 1 else None


def _time_ns(text: str | None) -> int | None:
    found = lines.parse_time_ns(text, "iso", 0, 0) if text else None
    return found if found else None  # a container never started says 1970-01-01T00:00:00Z


def _pod(
    item: Item,
    events: list[_Event],
    created: dict[str, int],
    jobs: dict[str, _Job],
    job_uid: str | None,
    *,
    was_gated: bool,
) -> Pod:
    metadata = item["metadata"]
    owner = _owner(metadata)
    environment = _environment(item)
    uid = job_uid or _job_uid(metadata, owner, environment)
    job = jobs.get(owner.get("uid", ""))
    spans = [
        *_placing(item, events, created, job, was_gated=was_gated),
        *_containers(item, events),
        *_pod_end(item, events),
    ]
    seen = {span.name for span in spans}
    attempt = environment.get("BOOTSEER_ATTEMPT", "")
    resource = _resource(item, owner, uid)
    maker = job.owner if job and job.owner else owner  # a Job makes an MPIJob's launcher
    if uid.startswith(f"{metadata.get('namespace', 'default')}/") and maker.get("kind") in _MAKERS:
        resource["bootseer.run_uid"] = maker["uid"]
    return Pod(
        name=f"{metadata.get('namespace', 'default')}/{metadata['name']}",
        job_uid=uid,
        attempt=_whole_number(attempt) or 0,
        resource=resource,
        spans=sorted(spans, key=lambda span: (span.begin_ns, -span.end_ns)),
        not_observed=[name for name in OBSERVABLE if name not in seen],
    )


def _owner(metadata: Item) -> Item:
    owners = metadata.get("ownerReferences") or [{}]
    return next((one for one in owners if one.get("controller")), owners[0])


def _environment(item: Item) -> dict[str, str]:
    """Variables of the pod's containers, by value or from the pod's metadata; the first container
    wins."""
    out: dict[str, str] = {}
    for container in item["spec"].get("containers", []):
        own: dict[str, str] = {}
        for one in container.get("env") or []:
            field = ((one.get("valueFrom") or {}).get("fieldRef") or {}).get("fieldPath", "")
            value = _fill_in(str(one.get("value") or ""), own) or _field(item["metadata"], field)
            if value:
                own[one["name"]] = value
        out = {**own, **out}
    return out


def _fill_in(value: str, known: Mapping[str, str]) -> str:
    """A variable's value with `$(OTHER)` filled in from what stands before it in the container.

    Kubernetes leaves references to what it does not know as they are, and makes `$` of `$$`.
    """

    def fill(found: re.Match[str]) -> str:
        return "$" if found[1] == "$" else known.get(found[2], found[0])

    return _REFERENCE.sub(fill, value)


def _field(metadata: Item, path: str) -> str:
    """What the downward API puts in for `path`; "" where the pod has no such field."""
    found = _FIELD.fullmatch(path)
    if found is None:
        return ""
    plain, group, key = found.groups()
    return str((metadata.get(plain) if plain else (metadata.get(group) or {}).get(key)) or "")


def _job_uid(metadata: Item, owner: Item, environment: Mapping[str, str]) -> str:
    marks = {**(metadata.get("labels") or {}), **(metadata.get("annotations") or {})}
    named = environment.get("BOOTSEER_JOB_UID") or marks.get("bootseer.io/job-uid")
    named = named or marks.get(JOBSET_UID)
    if named:
        return str(named)
    name = marks.get(_GROUP_KEY)
    if not name and marks.get(_OPERATOR) == "mpi-operator":
        name = marks.get(_JOB_NAME)
    if name:
        return f"{metadata.get('namespace', 'default')}/{name}"
    is_alone = owner.get("kind") in _REPLACED_ONE_BY_ONE
    return str(metadata["uid"] if is_alone else owner.get("uid") or metadata["uid"])


def _whole_number(text: str) -> int | None:
    """A count from a cluster's records; None where it is none, or longer than any count is."""
    return int(text) if text.isdecimal() and len(text) <= 18 else None


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
        gpus += sum(_whole_number(str(v)) or 0 for k, v in limits.items() if k.endswith("/gpu"))
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
        "bootseer.node_rank": _whole_number(rank or ""),
    }
    return {key: value for key, value in resource.items() if value is not None}


def _placing(
    item: Item,
    events: list[_Event],
    created: dict[str, int],
    job: _Job | None,
    *,
    was_gated: bool,
) -> Iterator[Span]:
    """`queue` and `schedule`."""
    metadata = item["metadata"]
    made_ns = _time_ns(metadata["creationTimestamp"])
    fine_ns = created.get(f"{metadata.get('namespace')}/{metadata['name']}")
    if made_ns is None:
        return
    bound = [event.first_ns for event in events if event.reason == "Scheduled"]
    # The controller tells of a pod after it made it, and may do so after it was placed.
    known_ns = min([made_ns + lines.SECOND_NS, *bound])
    if fine_ns and made_ns <= fine_ns < known_ns:
        made_ns = fine_ns
    job_ns = job.made_ns if job else None
    if job and job.began_ns and made_ns > job.began_ns + _LATER_NS:
        job_ns = None  # it replaces or follows another pod, and waited for nothing before that
    failed = [event for event in events if event.reason == "FailedScheduling"]
    if not bound:
        conditions = (item.get("status") or {}).get("conditions") or []
        times = [c for c in conditions if c["type"] == "PodScheduled" and c["status"] == "True"]
        bound = [ns for ns in (_time_ns(c["lastTransitionTime"]) for c in times) if ns]
    ready_ns = max([made_ns, *(event.last_ns for event in failed)])
    if bound:  # last times are whole seconds, and may be later than the placing that they precede
        first_ns = max([made_ns, *(event.first_ns for event in failed)])
        ready_ns = max(first_ns, min(ready_ns, bound[0]))
    if was_gated and bound:
        ready_ns = max(ready_ns, bound[0])
    attributes = {"bootseer.source": "k8s", "bootseer.wait": True}
    begin_ns = min(job_ns or made_ns, made_ns)
    held = was_gated and ready_ns > begin_ns
    if failed or held or (job_ns and job_ns + lines.SECOND_NS <= made_ns):
        last = max(failed, key=lambda event: event.last_ns, default=None)
        why = last.message[:300] if last else "scheduling gates" if held else ""
        reason = {"bootseer.reason": why} if why else {}
        yield Span("queue", begin_ns, ready_ns, "ok", {**attributes, **reason})
    if bound and not was_gated:
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
        own_ns = lines.parse_duration_ns(found["pull"]) or 0
        attributes: dict[str, Any] = {**base, "k8s.image.wait_included": found["whole"] is None}
        size_bytes = _whole_number(found["size"] or "")
        if size_bytes is not None:
            attributes["bootseer.bytes"] = size_bytes
        begin_ns = event.first_ns - own_ns
        whole_ns = lines.parse_duration_ns(found["whole"]) if found["whole"] else None
        if whole_ns and whole_ns > own_ns:
            waited = {**base, "bootseer.wait": True}
            wait_ns = event.first_ns - whole_ns
            yield Span("image.pull.wait", wait_ns, begin_ns, "ok", waited)
        yield Span("image.pull", begin_ns, event.first_ns, "ok", attributes)
    failed = [e for e in events if e.reason == "Failed" and "pull image" in e.message]
    if failed:
        pulling = [ns for e in events if e.reason == "Pulling" for ns in (e.first_ns, e.last_ns)]
        before = [ns for ns in pulling if ns <= failed[0].first_ns]
        begin_ns = max(before, default=failed[0].first_ns)
        failure = {
            **base,
            "error.type": "ErrImagePull",
            "bootseer.reason": failed[0].message[:300],
        }
        yield Span("image.pull", begin_ns, failed[0].first_ns, "error", failure)
        yield from _pull_again(events, failed, base)


def _pull_again(events: list[_Event], failed: list[_Event], base: dict[str, Any]) -> Iterator[Span]:
    """From the first failed pull to the next good one's begin, or to the last that was seen."""
    begin_ns = failed[0].first_ns
    tried = [e for e in events if e.reason == "Pulling" or "ulling image" in e.message]
    good = [e for e in events if e.reason == "Pulled" and e.first_ns >= begin_ns]
    if good:
        found = _PULLED.match(good[0].message)
        took = lines.parse_duration_ns(found["whole"] or found["pull"]) if found else 0
        end_ns = good[0].first_ns - (took or 0)
    else:
        end_ns = max(e.last_ns for e in (*failed, *tried))
    if end_ns > begin_ns:
        again = {
            **base,
            "error.type": "ImagePullBackOff",
            "bootseer.reason": failed[-1].message[:300],
        }
        yield Span("image.pull.retry", begin_ns, end_ns, "ok" if good else "error", again)


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
        if event.message not in _NO_IMAGE
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


def _pod_end(item: Item, events: list[_Event]) -> Iterator[Span]:
    """The pod's end by another hand: evicted, preempted, its node lost.

    The API server keeps it as the condition DisruptionTarget (since 1.26), kubelet and the
    scheduler as `status.reason` (Evicted, Preempting) and events (Evicted, Preempted).
    """
    status = item.get("status") or {}
    found = [
        (_time_ns(one.get("lastTransitionTime")), one.get("reason"), one.get("message"))
        for one in status.get("conditions") or []
        if one["type"] == "DisruptionTarget" and one["status"] == "True"
    ]
    found += [(e.first_ns, e.reason, e.message) for e in events if e.reason in _ENDS]
    moments = [ns for ns, _, _ in found if ns]
    if not moments:
        return
    named = status.get("reason") or next((e for _, e, _ in found if e in _ENDS), found[0][1])
    message = status.get("message") or next((m for _, _, m in found if m), "")
    failure = {
        "bootseer.source": "k8s",
        "error.type": str(named),
        "bootseer.reason": str(message)[:300],
    }
    yield Span("pod.end", min(moments), min(moments), "error", failure, point=True)


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
            finished = max([finished, *(ns for ns in known if ns < finished + lines.SECOND_NS)])
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
