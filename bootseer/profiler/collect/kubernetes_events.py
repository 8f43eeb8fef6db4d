"""The phases of each pod's start, from pods and events as kubectl prints them (pure).

Sources: Kubernetes API v1 (Pod, Event; also events.k8s.io/v1) and batch/v1 Job; the messages of
kube-scheduler and kubelet (pkg/kubelet/images/image_manager.go): `Successfully pulled image "…" in
1.3s` (to 1.26; waiting in kubelet's queue included) and `… in 1.2s (1.3s including waiting). Image
size: 123 bytes.` (since). Event times are whole seconds, but an event's name ends in the
hexadecimal nanoseconds of its first occurrence, set by the client that recorded it. A repeated
occurrence updates the same event with a later last time (`lastTimestamp`, or
`series.lastObservedTime` of the newer API) and, after ten similar ones, adds a prefix to its
message (client-go, tools/record/events_cache.go and tools/events/event_broadcaster.go).

Phases: `queue` (from the creation of the Job, or else of the pod, until the last FailedScheduling;
with scheduling gates until the pod was scheduled, as no record tells when the last gate was
removed; gates removed before the pod was first read are known by Kueue's label only), `schedule`
(until the scheduler chose the node), `image.pull` for each container (with `image.pull.wait` for
the wait in kubelet's queue where it is reported separately, and `image.pull.retry` from the first
failed pull to the next successful one), `container.init`, `container.start` (image present →
process started), points `container.exit` (failed containers), `container.restart` and `pod.end`
(evicted, preempted, or the node lost). A pod whose containers were restarted has its last attempt
as well, with `container.backoff` (kubelet's wait) and `container.start` (see `pod_attempts`). What
cannot be observed is not written; `Pod.not_observed` lists it.

A job's own processes compute the same trace when their BOOTSEER_JOB_UID is the uid used here: the
pod's own BOOTSEER_JOB_UID variable if its manifest sets one (by value, or by the downward API from
the pod's labels, annotations, uid, name or namespace, with `$(OTHER)` expanded), else the
annotation or label `bootseer.io/job-uid`, else what an operator's labels give (the JobSet's uid,
the group of a LeaderWorkerSet, an MPIJob's namespace and name), else the uid of the controller
(Job, custom job) that owns it, else the pod's uid. Pods of controllers that replace them one by one
(ReplicaSet, StatefulSet, DaemonSet) and of Argo's workflows are starts of their own. Where the uid
is a namespace and a name, the uid of the object that created the pods is kept as well
(`bootseer.run_uid`): by it a report distinguishes runs of the same name. To pass the controller's
uid to the processes, use the downward API:
`fieldPath: metadata.labels['batch.kubernetes.io/controller-uid']`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from bootseer.errors import CorruptDataError
from bootseer.profiler.collect.log_rules import lines as log_lines
from bootseer.profiler.collect.pod_attempts import Restart, find_last_attempt

OBSERVABLE = ("queue", "schedule", "image.pull", "container.start")
"""Phases that every pod's start has; those without a record are named in `not_observed`."""

_IMAGE_ERRORS = ("Error: ErrImagePull", "Error: ImagePullBackOff")
_DISRUPTIONS = ("Evicted", "Preempted")
_EVENT_REASONS = frozenset(
    (
        "FailedScheduling",
        "Scheduled",
        "Pulling",
        "Pulled",
        "Started",
        "Failed",
        "BackOff",
        *_DISRUPTIONS,
    )
)
_JOBSET_UID = "jobset.sigs.k8s.io/jobset-uid"
"""Label of all pods of a JobSet (kubernetes-sigs/jobset, api/jobset/v1alpha2/jobset_types.go)."""
_GROUP_KEY = "leaderworkerset.sigs.k8s.io/group-key"
"""Label of all pods of a group (kubernetes-sigs/lws, pkg/webhooks/pod_webhook.go)."""
_OPERATOR, _JOB_NAME = "training.kubeflow.org/operator-name", "training.kubeflow.org/job-name"
"""Labels of an MPIJob's workers and launcher, which a Job owns
(kubeflow/mpi-operator, pkg/apis/kubeflow/v2beta1/constants.go)."""
_KINDS_KNOWN_BY_NAME = (
    "PyTorchJob",
    "TFJob",
    "XGBoostJob",
    "PaddleJob",
    "JAXJob",
    "MPIJob",
    "RayCluster",
)
"""Kinds that label the pods they own with their name but not their uid, see
`bootseer.kubernetes`."""
_KINDS_REPLACING_ONE_BY_ONE = (
    "ReplicaSet",
    "StatefulSet",
    "DaemonSet",
    "ReplicationController",
    "Workflow",
)
"""Kinds of controllers whose pods do not start together."""
_KUEUE_MANAGED = "kueue.x-k8s.io/managed"
"""Label of pods that Kueue holds by a gate (kubernetes-sigs/kueue, pkg/controller/jobs/pod)."""
_FIRST_PODS_NS = 60 * log_lines.SECOND_NS
"""A pod created longer than this after its Job's start time is not one of the Job's first pods."""
_REPEATED_PREFIX = "(combined from similar events): "

_HEX_NS = re.compile(r"\.([0-9a-f]{15,16})$")
_PULLED = re.compile(
    r'Successfully pulled image "(?P<image>[^"]*)" in (?P<pull>[\dhmsnuµ.]+)'
    r"(?: \((?P<whole>[\dhmsnuµ.]+) including waiting\))?(?:\. Image size: (?P<size>\d+) bytes)?"
)
_CONTAINER_PATH = re.compile(r"spec\.(initContainers|containers|ephemeralContainers)\{([^}]*)\}")
_CREATED_POD = re.compile(r"Created pod: (\S+)")
_FIELD_PATH = re.compile(r"metadata\.(?:(uid|namespace|name)|(labels|annotations)\['([^']+)'\])")
_REFERENCE = re.compile(r"\$(\$|\(([^()]*)\))")
_LOG_SECTION = re.compile(
    r"^==== START logs for container .*?^==== END logs for container [^\n]*$", re.M | re.S
)
"""Logs between the objects of `kubectl cluster-info dump` (pkg/cmd/clusterinfo)."""

Item = Mapping[str, Any]
"""A Kubernetes object as decoded from JSON."""


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """One phase, or a point where `point` is set and `begin_ns` equals `end_ns`.

    Times are Unix nanoseconds.
    """

    name: str
    begin_ns: int
    end_ns: int
    status: str
    attributes: dict[str, Any]
    point: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Pod:
    """One pod's start: the pod, the job and attempt it belongs to, and its observed phases."""

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
    """When a Job was created, when its controller began to create pods, and the Job's owner."""

    created_ns: int
    started_ns: int | None
    owner: Item


def parse(text: str, name: str) -> list[Item]:
    """Return the objects of kubectl's output: a List, single objects, or a sequence of these.

    `name` is the file's, for errors. Raises CorruptDataError.
    """
    decoder = json.JSONDecoder()
    items: list[Item] = []
    position = 0
    text = _LOG_SECTION.sub(lambda match: "\n" * match[0].count("\n"), text.removeprefix("\ufeff"))
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
        items.extend(_flatten_document(document, name))
    if not items:
        raise CorruptDataError(f"{name}: holds no Kubernetes object")
    return items


def _flatten_document(document: object, name: str, kind: str = "") -> Iterator[Item]:
    """Yield the objects of a document; items of a typed list (`EventList`) get the list's kind.

    A watch (`kubectl get --watch --output-watch-events`, the API's `?watch=1`) wraps each version
    of an object in an object of its own; its bookmarks and errors hold no version of any.
    """
    if isinstance(document, dict) and isinstance(document.get("object"), dict):
        if document.get("type") not in ("BOOKMARK", "ERROR"):
            yield from _flatten_document(document["object"], name)
        return
    if isinstance(document, dict) and "items" in document:
        kind = str(document.get("kind") or "").removesuffix("List")
        document = document["items"] or []  # Go writes an empty list as null
    if isinstance(document, list):
        for item in document:
            yield from _flatten_document(item, name, kind)
    elif isinstance(document, dict) and "metadata" in document:
        yield document if "kind" in document or not kind else {**document, "kind": kind}
    else:
        raise CorruptDataError(f"{name}: holds something that is no Kubernetes object")


def pods(items: Iterable[Item], job_uid: str | None = None) -> list[Pod]:
    """Return the start of each pod in `items`; `job_uid` overrides the uid that the objects give.

    Raises CorruptDataError for an object that has not the shape that the API gives it.
    """
    try:
        return list(_build_pods(list(items), job_uid))
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise CorruptDataError(
            f"an object is not of the Kubernetes API's shape ({type(error).__name__}: {error}); "
            "make it with `kubectl get pods,events,jobs -o json`"
        ) from error


def _build_pods(items: list[Item], job_uid: str | None) -> Iterator[Pod]:
    events_by_uid: dict[str, list[_Event]] = {}
    created_ns_by_name: dict[str, int] = {}
    jobs: dict[str, _Job] = {}
    gated_uids = {
        item["metadata"].get("uid")
        for item in items
        if _get_kind(item) == "Pod" and _is_gated(item)
    }
    items = _keep_last_versions(items)
    for item in items:
        if _get_kind(item) == "Event":
            _collect_event(item, events_by_uid, created_ns_by_name)
        elif _get_kind(item) == "Job":
            created_ns = _parse_time_ns(item["metadata"]["creationTimestamp"]) or 0
            started_ns = _parse_time_ns((item.get("status") or {}).get("startTime"))
            owner = _get_owner(item["metadata"])
            jobs[item["metadata"]["uid"]] = _Job(created_ns, started_ns, owner)
    for item in items:
        if _get_kind(item) == "Pod":
            uid = item["metadata"]["uid"]
            events = sorted(events_by_uid.get(uid, []), key=lambda event: event.first_ns)
            was_gated = uid in gated_uids
            pod = _build_pod(item, events, created_ns_by_name, jobs, job_uid, was_gated=was_gated)
            yield pod
            yield from _build_last_attempt(item, pod)


def _is_gated(item: Item) -> bool:
    """Whether this version of a pod has a scheduling gate, or Kueue created it with one.

    A gate that was removed leaves nothing in a pod: only an earlier version, as from a watch, shows
    it (kubernetes/kubernetes, pkg/registry/core/pod/strategy.go, applySchedulingGatedCondition).
    """
    conditions = (item.get("status") or {}).get("conditions") or []
    return (
        (item["metadata"].get("labels") or {}).get(_KUEUE_MANAGED) == "true"
        or bool(item["spec"].get("schedulingGates"))
        or any(condition.get("reason") == "SchedulingGated" for condition in conditions)
    )


def _keep_last_versions(items: list[Item]) -> list[Item]:
    """Return each object once, as it was read last: dumps of one cluster overlap."""
    last_versions: dict[object, Item] = {}
    for number, item in enumerate(items):
        uid = item["metadata"].get("uid")
        last_versions[(_get_kind(item), uid) if uid else number] = item
    return list(last_versions.values())


def _get_kind(item: Item) -> str:
    """Return the object's kind; kubectl leaves it out of objects within a typed list."""
    kind = item.get("kind")
    if kind is None:
        if "involvedObject" in item or "regarding" in item:
            return "Event"
        return "Pod" if "containers" in item.get("spec", {}) else ""
    return str(kind)


def _collect_event(
    item: Item, events_by_uid: dict[str, list[_Event]], created_ns_by_name: dict[str, int]
) -> None:
    regarding = item.get("involvedObject") or item.get("regarding") or {}
    reason = str(item.get("reason"))
    message = str(item.get("message") or item.get("note") or "").removeprefix(_REPEATED_PREFIX)
    first_ns = _get_first_time_ns(item)
    if first_ns is None:
        return
    created_pod = _CREATED_POD.match(message)
    if reason == "SuccessfulCreate" and created_pod:
        created_ns_by_name[f"{regarding.get('namespace')}/{created_pod.group(1)}"] = first_ns
    if regarding.get("kind") == "Pod" and reason in _EVENT_REASONS:
        path = _CONTAINER_PATH.match(regarding.get("fieldPath") or "")
        last_ns = max(first_ns, _get_last_time_ns(item) or first_ns)
        event = _Event(reason, message, path.group(2) if path else "", first_ns, last_ns)
        events_by_uid.setdefault(regarding.get("uid", ""), []).append(event)


def _get_first_time_ns(item: Item) -> int | None:
    """Return an event's first time, as finely as it is known.

    eventTime (microseconds), else the time in the name if it agrees with the timestamp, else the
    timestamp (whole seconds).
    """
    if item.get("eventTime"):
        return _parse_time_ns(item["eventTime"])
    timestamp = item.get("firstTimestamp") or item.get("deprecatedFirstTimestamp")
    whole_ns = _parse_time_ns(timestamp or item["metadata"].get("creationTimestamp"))
    suffix = _HEX_NS.search(item["metadata"]["name"])
    name_ns = int(suffix.group(1), 16) if suffix else None
    if name_ns is not None and (
        whole_ns is None or abs(name_ns - whole_ns) <= 2 * log_lines.SECOND_NS
    ):
        return name_ns
    return whole_ns


def _get_last_time_ns(item: Item) -> int | None:
    """Return when the event last occurred; None if it occurred once."""
    series = item.get("series") or {}
    count = series.get("count") or item.get("count") or item.get("deprecatedCount") or 1
    last = item.get("lastTimestamp") or item.get("deprecatedLastTimestamp")
    return _parse_time_ns(series.get("lastObservedTime") or last) if count > 1 else None


def _parse_time_ns(text: str | None) -> int | None:
    time_ns = log_lines.parse_time_ns(text, "iso", 0, 0) if text else None
    return time_ns or None  # a container that never started says 1970-01-01T00:00:00Z


def _build_pod(
    item: Item,
    events: list[_Event],
    created_ns_by_name: dict[str, int],
    jobs: dict[str, _Job],
    job_uid: str | None,
    *,
    was_gated: bool,
) -> Pod:
    metadata = item["metadata"]
    owner = _get_owner(metadata)
    environment = _get_environment(item)
    uid = job_uid or _choose_job_uid(metadata, owner, environment)
    job = jobs.get(owner.get("uid", ""))
    spans = [
        *_build_scheduling_spans(item, events, created_ns_by_name, job, was_gated=was_gated),
        *_build_container_spans(item, events),
        *_build_pod_end(item, events),
    ]
    observed = {span.name for span in spans}
    attempt = environment.get("BOOTSEER_ATTEMPT", "")
    resource = _build_resource(item, owner, uid)
    creator = job.owner if job and job.owner else owner  # a Job creates an MPIJob's launcher
    is_name = uid.startswith(f"{metadata.get('namespace', 'default')}/")
    if is_name and creator.get("kind") in _KINDS_KNOWN_BY_NAME:
        resource["bootseer.run_uid"] = creator["uid"]
    return Pod(
        name=f"{metadata.get('namespace', 'default')}/{metadata['name']}",
        job_uid=uid,
        attempt=_whole_number(attempt) or 0,
        resource=resource,
        spans=sorted(spans, key=lambda span: (span.begin_ns, -span.end_ns)),
        not_observed=[name for name in OBSERVABLE if name not in observed],
    )


def _build_last_attempt(item: Item, first: Pod) -> Iterator[Pod]:
    """Yield the last attempt of a pod whose containers were restarted."""
    attempt = find_last_attempt(item, _parse_time_ns)
    if not attempt.number or not attempt.restarts:
        return
    spans = [span for restart in attempt.restarts for span in _build_restart_spans(restart)]
    resource = {**first.resource, "bootseer.start.kind": "restart"}
    yield dataclasses.replace(
        first,
        attempt=first.attempt + attempt.number,
        resource={**resource, "bootseer.attempt": first.attempt + attempt.number},
        spans=sorted(spans, key=lambda span: (span.begin_ns, -span.end_ns)),
        not_observed=[],
    )


def _build_restart_spans(restart: Restart) -> Iterator[Span]:
    """Yield kubelet's wait before it restarts a container, and the moment when it did."""
    attributes = {
        "bootseer.source": "k8s",
        "k8s.container.name": restart.container,
        "container.image.name": restart.image,
        "bootseer.uncertainty_s": 1,
    }
    begin_ns, end_ns = restart.ended_ns, restart.started_ns
    if begin_ns is not None and begin_ns < end_ns:
        wait = {**attributes, "bootseer.wait": True}
        yield Span("container.backoff", begin_ns, end_ns, "ok", wait)
    yield Span("container.start", end_ns, end_ns, "ok", attributes, point=True)


def _get_owner(metadata: Item) -> Item:
    owners = metadata.get("ownerReferences") or [{}]
    return next((owner for owner in owners if owner.get("controller")), owners[0])


def _get_environment(item: Item) -> dict[str, str]:
    """Return the variables of the pod's containers, given by value or from the pod's metadata.

    Where several containers set a variable, the first container's value counts.
    """
    environment: dict[str, str] = {}
    for container in item["spec"].get("containers", []):
        own: dict[str, str] = {}
        for variable in container.get("env") or []:
            reference = (variable.get("valueFrom") or {}).get("fieldRef") or {}
            value = _expand_references(str(variable.get("value") or ""), own)
            value = value or _get_field(item["metadata"], reference.get("fieldPath", ""))
            if value:
                own[variable["name"]] = value
        environment = {**own, **environment}
    return environment


def _expand_references(value: str, variables: Mapping[str, str]) -> str:
    """Expand each `$(NAME)` from the variables that precede it in the container.

    Kubernetes leaves references to unknown variables as they are, and turns `$$` into `$`.
    """

    def expand(match: re.Match[str]) -> str:
        return "$" if match[1] == "$" else variables.get(match[2], match[0])

    return _REFERENCE.sub(expand, value)


def _get_field(metadata: Item, path: str) -> str:
    """Return the value that the downward API gives for `path`; "" where the pod has none."""
    match = _FIELD_PATH.fullmatch(path)
    if match is None:
        return ""
    plain, group, key = match.groups()
    return str((metadata.get(plain) if plain else (metadata.get(group) or {}).get(key)) or "")


def _choose_job_uid(metadata: Item, owner: Item, environment: Mapping[str, str]) -> str:
    marks = {**(metadata.get("labels") or {}), **(metadata.get("annotations") or {})}
    explicit = environment.get("BOOTSEER_JOB_UID") or marks.get("bootseer.io/job-uid")
    explicit = explicit or marks.get(_JOBSET_UID)
    if explicit:
        return str(explicit)
    name = marks.get(_GROUP_KEY)
    if not name and marks.get(_OPERATOR) == "mpi-operator":
        name = marks.get(_JOB_NAME)
    if name:
        return f"{metadata.get('namespace', 'default')}/{name}"
    is_alone = owner.get("kind") in _KINDS_REPLACING_ONE_BY_ONE
    return str(metadata["uid"] if is_alone else owner.get("uid") or metadata["uid"])


def _whole_number(text: str) -> int | None:
    """A count from a cluster's records; None where it is none, or longer than any count is."""
    return int(text) if text.isdecimal() and len(text) <= 18 else None


def _build_resource(item: Item, owner: Item, uid: str) -> dict[str, Any]:
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


def _build_scheduling_spans(
    item: Item,
    events: list[_Event],
    created_ns_by_name: dict[str, int],
    job: _Job | None,
    *,
    was_gated: bool,
) -> Iterator[Span]:
    """Yield `queue` and `schedule`."""
    metadata = item["metadata"]
    created_ns = _parse_time_ns(metadata["creationTimestamp"])
    reported_ns = created_ns_by_name.get(f"{metadata.get('namespace')}/{metadata['name']}")
    if created_ns is None:
        return
    scheduled_ns = [event.first_ns for event in events if event.reason == "Scheduled"]
    # The controller reports a pod after it created it, possibly after the pod was scheduled.
    latest_ns = min([created_ns + log_lines.SECOND_NS, *scheduled_ns])
    if reported_ns and created_ns <= reported_ns < latest_ns:
        created_ns = reported_ns
    job_ns = job.created_ns if job else None
    if job and job.started_ns and created_ns > job.started_ns + _FIRST_PODS_NS:
        job_ns = None  # it replaces or follows another pod, and waited for nothing before that
    failed = [event for event in events if event.reason == "FailedScheduling"]
    if not scheduled_ns:
        conditions = (item.get("status") or {}).get("conditions") or []
        times_ns = [
            _parse_time_ns(condition["lastTransitionTime"])
            for condition in conditions
            if condition["type"] == "PodScheduled" and condition["status"] == "True"
        ]
        scheduled_ns = [time_ns for time_ns in times_ns if time_ns]
    ready_ns = max([created_ns, *(event.last_ns for event in failed)])
    if scheduled_ns:
        # Last times are whole seconds, and may lie after the scheduling that they precede.
        first_ns = max([created_ns, *(event.first_ns for event in failed)])
        ready_ns = max(first_ns, min(ready_ns, scheduled_ns[0]))
    if was_gated and scheduled_ns:
        ready_ns = max(ready_ns, scheduled_ns[0])
    attributes = {"bootseer.source": "k8s", "bootseer.wait": True}
    begin_ns = min(job_ns or created_ns, created_ns)
    was_held = was_gated and ready_ns > begin_ns
    if failed or was_held or (job_ns and job_ns + log_lines.SECOND_NS <= created_ns):
        last = max(failed, key=lambda event: event.last_ns, default=None)
        text = last.message[:300] if last else "scheduling gates" if was_held else ""
        reason = {"bootseer.reason": text} if text else {}
        yield Span("queue", begin_ns, ready_ns, "ok", {**attributes, **reason})
    if scheduled_ns and not was_gated:
        # An object's own creation time is truncated to whole seconds.
        is_exact = bool(failed) or created_ns == reported_ns
        uncertainty = {} if is_exact else {"bootseer.uncertainty_s": 1}
        end_ns = max(scheduled_ns[0], ready_ns)
        yield Span("schedule", ready_ns, end_ns, "ok", {"bootseer.source": "k8s", **uncertainty})


def _build_container_spans(item: Item, events: list[_Event]) -> Iterator[Span]:
    status = item.get("status") or {}
    for key, init in (("initContainerStatuses", True), ("containerStatuses", False)):
        for container in status.get(key) or []:
            own = [event for event in events if event.container == container["name"]]
            base = {
                "bootseer.source": "k8s",
                "k8s.container.name": container["name"],
                "container.image.name": container.get("image", ""),
            }
            yield from _build_pull_spans(own, base)
            yield from _build_start_spans(container, own, base, init)
            yield from _build_exit_points(container, own, base)


def _build_pull_spans(events: list[_Event], base: dict[str, Any]) -> Iterator[Span]:
    """Yield successful pulls with their waits, the first failed one and its retries."""
    for event in events:
        match = _PULLED.match(event.message) if event.reason == "Pulled" else None
        if not match:
            continue
        pull_ns = log_lines.parse_duration_ns(match["pull"]) or 0
        attributes: dict[str, Any] = {**base, "k8s.image.wait_included": match["whole"] is None}
        size_bytes = _whole_number(match["size"] or "")
        if size_bytes is not None:
            attributes["bootseer.bytes"] = size_bytes
        begin_ns = event.first_ns - pull_ns
        whole_ns = log_lines.parse_duration_ns(match["whole"]) if match["whole"] else None
        if whole_ns and whole_ns > pull_ns:
            wait_ns = event.first_ns - whole_ns
            yield Span("image.pull.wait", wait_ns, begin_ns, "ok", {**base, "bootseer.wait": True})
        yield Span("image.pull", begin_ns, event.first_ns, "ok", attributes)
    failed = [e for e in events if e.reason == "Failed" and "pull image" in e.message]
    if failed:
        pulling_ns = [
            time_ns
            for event in events
            if event.reason == "Pulling"
            for time_ns in (event.first_ns, event.last_ns)
        ]
        before_ns = [time_ns for time_ns in pulling_ns if time_ns <= failed[0].first_ns]
        begin_ns = max(before_ns, default=failed[0].first_ns)
        attributes = {
            **base,
            "error.type": "ErrImagePull",
            "bootseer.reason": failed[0].message[:300],
        }
        yield Span("image.pull", begin_ns, failed[0].first_ns, "error", attributes)
        yield from _build_retry_span(events, failed, base)


def _build_retry_span(
    events: list[_Event], failed: list[_Event], base: dict[str, Any]
) -> Iterator[Span]:
    """Yield the time from the first failed pull to the next successful one's begin.

    Without a successful one, to the last try that was observed.
    """
    begin_ns = failed[0].first_ns
    tries = [e for e in events if e.reason == "Pulling" or "ulling image" in e.message]
    pulled = [e for e in events if e.reason == "Pulled" and e.first_ns >= begin_ns]
    if pulled:
        match = _PULLED.match(pulled[0].message)
        took_ns = log_lines.parse_duration_ns(match["whole"] or match["pull"]) if match else 0
        end_ns = pulled[0].first_ns - (took_ns or 0)
    else:
        end_ns = max(event.last_ns for event in (*failed, *tries))
    if end_ns > begin_ns:
        attributes = {
            **base,
            "error.type": "ImagePullBackOff",
            "bootseer.reason": failed[-1].message[:300],
        }
        status = "ok" if pulled else "error"
        yield Span("image.pull.retry", begin_ns, end_ns, status, attributes)


def _build_start_spans(
    container: Item, events: list[_Event], base: dict[str, Any], init: bool
) -> Iterator[Span]:
    """Yield image present → process started or refused, and an init container's whole run."""
    pulled_ns = [event.first_ns for event in events if event.reason == "Pulled"]
    started_ns = [event.first_ns for event in events if event.reason == "Started"]
    if not pulled_ns:
        return
    refused = [
        event
        for event in events
        if event.reason == "Failed"
        and event.message.startswith("Error: ")
        and event.message not in _IMAGE_ERRORS
    ]
    if any("already present" in e.message for e in events if e.first_ns == pulled_ns[0]):
        base = {**base, "k8s.image.present": True}
    if started_ns:
        end_ns = max(started_ns[0], pulled_ns[0])
        yield Span("container.start", pulled_ns[0], end_ns, "ok", base)
    elif refused:
        attributes = {
            **base,
            "error.type": _get_state_reason(container),
            "bootseer.reason": refused[0].message[:300],
        }
        end_ns = max(refused[0].first_ns, pulled_ns[0])
        yield Span("container.start", pulled_ns[0], end_ns, "error", attributes)
    finished_ns = _parse_time_ns((container["state"].get("terminated") or {}).get("finishedAt"))
    # The end is in whole seconds: one that is not after the begin is unknown.
    if init and started_ns and finished_ns and finished_ns > started_ns[0]:
        attributes = {**base, "bootseer.uncertainty_s": 1}
        yield Span("container.init", started_ns[0], finished_ns, "ok", attributes)


def _build_pod_end(item: Item, events: list[_Event]) -> Iterator[Span]:
    """Yield the pod's end by another's decision: evicted, preempted, its node lost.

    The API server keeps it as the condition DisruptionTarget (since 1.26), kubelet and the
    scheduler as `status.reason` (Evicted, Preempting) and events (Evicted, Preempted).
    """
    status = item.get("status") or {}
    disruptions = [
        (
            _parse_time_ns(condition.get("lastTransitionTime")),
            condition.get("reason"),
            condition.get("message"),
        )
        for condition in status.get("conditions") or []
        if condition["type"] == "DisruptionTarget" and condition["status"] == "True"
    ]
    disruptions += [(e.first_ns, e.reason, e.message) for e in events if e.reason in _DISRUPTIONS]
    times_ns = [time_ns for time_ns, _, _ in disruptions if time_ns]
    if not times_ns:
        return
    reasons = [reason for _, reason, _ in disruptions]
    error_type = status.get("reason") or next(
        (reason for reason in reasons if reason in _DISRUPTIONS), reasons[0]
    )
    message = status.get("message") or next((text for _, _, text in disruptions if text), "")
    attributes = {
        "bootseer.source": "k8s",
        "error.type": str(error_type),
        "bootseer.reason": str(message)[:300],
    }
    yield Span("pod.end", min(times_ns), min(times_ns), "error", attributes, point=True)


def _get_state_reason(container: Item) -> str:
    state = container["state"]
    details = state.get("waiting") or state.get("terminated") or {}
    return str(details.get("reason") or "Error")


def _build_exit_points(
    container: Item, events: list[_Event], base: dict[str, Any]
) -> Iterator[Span]:
    """Yield failed ends of the container, this one and the one before, and its restart."""
    event_times_ns = [event.first_ns for event in events if event.reason in ("Started", "Failed")]
    for state in (container.get("lastState") or {}, container["state"]):
        terminated = state.get("terminated") or {}
        finished_ns = _parse_time_ns(terminated.get("finishedAt"))
        if finished_ns and terminated.get("exitCode"):
            # Whole seconds: not before the start or the refusal, which an event dates better.
            latest_ns = finished_ns + log_lines.SECOND_NS
            finished_ns = max([finished_ns, *(ns for ns in event_times_ns if ns < latest_ns)])
            attributes = {
                **base,
                "error.type": terminated.get("reason") or "Error",
                "process.exit.code": terminated["exitCode"],
            }
            yield Span("container.exit", finished_ns, finished_ns, "error", attributes, point=True)
            if state is not container["state"]:
                restart = {
                    **base,
                    "error.type": _get_state_reason(container),
                    "k8s.container.restart_count": container["restartCount"],
                }
                yield Span(
                    "container.restart", finished_ns, finished_ns, "error", restart, point=True
                )
