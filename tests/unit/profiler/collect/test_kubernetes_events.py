"""kubectl's pods and events as phases.

`data/k8s_pods_events.json` are 88 real objects of a one-node cluster (Kubernetes 1.20): pods that
succeeded, crashed, ran out of memory, were refused, or had no image. The expected values below were
worked out by hand from event names and messages.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from bootseer.errors import CorruptDataError
from bootseer.profiler.collect import kubernetes_events
from tests.support import paths

DATA = paths.DATA / "k8s_pods_events.json"


@pytest.fixture(scope="module")
def pods() -> dict[str, kubernetes_events.Pod]:
    items = kubernetes_events.parse(DATA.read_text(), "data")
    return {pod.name: pod for pod in kubernetes_events.pods(items)}


def span(pod: kubernetes_events.Pod, name: str) -> kubernetes_events.Span:
    [found] = [one for one in pod.spans if one.name == name]
    return found


def test_a_jobs_pod(pods: dict[str, kubernetes_events.Pod]) -> None:
    pod = pods["t/two-twjn7"]
    pull = span(pod, "image.pull")
    assert pull.end_ns == 0x18EA04CB2D74CD37  # Pulled
    assert pull.end_ns - pull.begin_ns == 265_230_243
    start = span(pod, "container.start")
    assert (start.begin_ns, start.end_ns) == (pull.end_ns, 0x18EA04CB3B5B763B)  # Started
    schedule = span(pod, "schedule")
    assert schedule.begin_ns == 0x18EA04CAE5EAD8A7  # the controller's SuccessfulCreate
    assert schedule.end_ns % 10**9 == 948_618_000  # the scheduler's eventTime
    assert "bootseer.uncertainty_s" not in schedule.attributes
    assert pod.job_uid == "ce84d9b3-7fec-4f81-ae63-de64889c28c0"
    assert pods["t/two-5cxln"].job_uid == pod.job_uid
    assert pod.resource["k8s.node.name"] == "lab-node"
    assert pod.resource["k8s.job.name"] == "two"
    assert pod.not_observed == ["queue"]


def test_a_watch_tells_what_a_list_does(pods: dict[str, kubernetes_events.Pod]) -> None:
    """`kubectl get --watch --output-watch-events -o json`, and the API's own `?watch=1`."""
    items = kubernetes_events.parse(DATA.read_text(), "data")
    waiting = [{**item, "status": {"phase": "Pending"}} for item in items if item["kind"] == "Pod"]
    told: list[dict[str, Any]] = [{"type": "ADDED", "object": item} for item in waiting]
    told += [{"type": "MODIFIED", "object": item} for item in items]
    bookmark = {"kind": "Pod", "apiVersion": "v1", "metadata": {"resourceVersion": "9"}, "spec": {}}
    told.append({"type": "BOOKMARK", "object": bookmark})
    told.append({"type": "ERROR", "object": {"kind": "Status", "metadata": {}, "code": 410}})
    text = "".join(json.dumps(one) + "\n" for one in told)
    assert {
        pod.name: pod for pod in kubernetes_events.pods(kubernetes_events.parse(text, "watch"))
    } == pods


def test_a_pod_placed_before_its_creation_was_told_of_has_a_rough_length() -> None:
    """A busy controller writes its event after the scheduler wrote its own."""
    told_ns = 0x18EA04CAE5EAD8A7
    placed = f"{datetime.fromtimestamp(told_ns // 10**9, UTC):%Y-%m-%dT%H:%M:%S}.000001Z"
    items = kubernetes_events.parse(DATA.read_text(), "data")
    for item in items:
        about = item.get("involvedObject") or item.get("regarding") or {}
        if item.get("reason") == "Scheduled" and about["name"] == "two-twjn7":
            item["eventTime"] = placed
    schedule = span(
        {pod.name: pod for pod in kubernetes_events.pods(items)}["t/two-twjn7"], "schedule"
    )
    assert schedule.end_ns - schedule.begin_ns == 1000
    assert schedule.attributes["bootseer.uncertainty_s"] == 1


def test_a_creation_in_whole_seconds_is_said_to_be_rough(
    pods: dict[str, kubernetes_events.Pod],
) -> None:
    schedule = span(pods["t/oom"], "schedule")
    assert schedule.end_ns - schedule.begin_ns == 17_531_000
    assert schedule.attributes["bootseer.uncertainty_s"] == 1


@pytest.mark.parametrize(
    ("name", "phase", "error", "code"),
    [
        ("nosuchimage", "image.pull", "ErrImagePull", None),
        ("nonroot-refused", "container.start", "CreateContainerConfigError", None),
        ("badcmd", "container.start", "StartError", None),
        ("badcmd", "container.exit", "StartError", 128),
        ("oom", "container.exit", "OOMKilled", 137),
        ("fails", "container.exit", "Error", 3),
        ("crash", "container.exit", "Error", 1),
        ("crash", "container.restart", "CrashLoopBackOff", None),
    ],
)
def test_every_failure_has_its_type(
    pods: dict[str, kubernetes_events.Pod], name: str, phase: str, error: str, code: int | None
) -> None:
    one = span(pods[f"t/{name}"], phase)
    assert (one.status, one.attributes["error.type"]) == ("error", error)
    assert one.attributes.get("process.exit.code") == code


def test_a_failed_pull_lasts_from_pulling_to_failed(pods: dict[str, kubernetes_events.Pod]) -> None:
    pod = pods["t/nosuchimage"]
    pull = span(pod, "image.pull")
    assert (pull.begin_ns, pull.end_ns) == (0x18EA04CB1EFFE56F, 0x18EA04CB2F0E33B1)
    assert pod.not_observed == ["queue", "container.start"]


def test_init_and_further_containers(pods: dict[str, kubernetes_events.Pod]) -> None:
    pod = pods["t/staged"]
    starts = [one for one in pod.spans if one.name == "container.start"]
    assert [one.attributes["k8s.container.name"] for one in starts] == ["stage", "main", "side"]
    assert [one.attributes.get("k8s.image.present") for one in starts] == [None, True, True]
    assert [one.end_ns - one.begin_ns for one in starts] == [
        0x18EA04CB466080C0 - 0x18EA04CB3BEE3F5C,
        0x18EA04CB93B30B9D - 0x18EA04CB87B9F4B3,
        0x18EA04CB97FEE6BF - 0x18EA04CB93B997BF,
    ]
    # an init container that ended within the second it began in: its length is not known
    assert "container.init" not in {one.name for one in pod.spans}


def test_a_restart_counts_once_and_the_first_start_is_the_start(
    pods: dict[str, kubernetes_events.Pod],
) -> None:
    pod = pods["t/crash"]
    assert span(pod, "container.start").end_ns == 0x18EA04CB4F4D90F7
    assert span(pod, "container.restart").attributes["k8s.container.restart_count"] == 1
    assert span(pod, "container.exit").begin_ns >= span(pod, "container.start").end_ns


def test_no_span_is_ever_empty_or_backwards(pods: dict[str, kubernetes_events.Pod]) -> None:
    assert len(pods) == 10
    for pod in pods.values():
        for one in pod.spans:
            assert one.point or one.end_ns > one.begin_ns, (pod.name, one)


def make_pod(**more: Any) -> dict[str, Any]:
    return {
        "kind": "Pod",
        "metadata": {
            "name": "p",
            "namespace": "n",
            "uid": "pod-uid",
            "creationTimestamp": "2026-11-21T10:00:00Z",
            **more.pop("metadata", {}),
        },
        "spec": {"containers": [{"name": "a"}], **more.pop("spec", {})},
        "status": {"containerStatuses": [{"name": "a", "image": "i", "state": {}}]},
    }


def make_event(reason: str, message: str, second: int, **more: Any) -> dict[str, Any]:
    return {
        "kind": "Event",
        "metadata": {"name": "p.1"},
        "involvedObject": {
            "kind": "Pod",
            "uid": "pod-uid",
            "fieldPath": "spec.containers{a}",
        },
        "reason": reason,
        "message": message,
        "firstTimestamp": f"2026-11-21T10:00:{second:02d}Z",
        **more,
    }


def test_newer_kubelets_tell_waiting_apart_and_give_the_size() -> None:
    message = 'Successfully pulled image "i" in 1.5s (4s including waiting). Image size: 123 bytes.'
    [pod] = kubernetes_events.pods([make_pod(), make_event("Pulled", message, 10)])
    pull, wait = span(pod, "image.pull"), span(pod, "image.pull.wait")
    assert pull.end_ns - pull.begin_ns == 1_500_000_000
    assert wait.end_ns - wait.begin_ns == 2_500_000_000
    assert wait.end_ns == pull.begin_ns
    assert wait.attributes["bootseer.wait"] is True
    assert pull.attributes["bootseer.bytes"] == 123
    assert pull.attributes["k8s.image.wait_included"] is False


def test_a_pod_that_found_no_room_was_queued() -> None:
    items = [
        make_pod(),
        make_event("FailedScheduling", "0/4 nodes are available", 1),
        make_event("FailedScheduling", "0/4 nodes are available: GPU", 30),
        make_event("Scheduled", "assigned", 31),
    ]
    [pod] = kubernetes_events.pods(items)
    assert [(one.name, (one.end_ns - one.begin_ns) / 1e9) for one in pod.spans] == [
        ("queue", 30.0),
        ("schedule", 1.0),
    ]
    assert "GPU" in span(pod, "queue").attributes["bootseer.reason"]


def test_a_jobs_creation_begins_the_queue() -> None:
    owner = {"kind": "Job", "name": "j", "uid": "job-uid", "controller": True}
    job = {
        "kind": "Job",
        "metadata": {"uid": "job-uid", "creationTimestamp": "2026-11-21T09:59:00Z"},
    }
    [pod] = kubernetes_events.pods([make_pod(metadata={"ownerReferences": [owner]}), job])
    queue = span(pod, "queue")
    assert (queue.end_ns - queue.begin_ns) / 1e9 == 60
    assert pod.job_uid == "job-uid"


def test_a_pod_alone_shows_only_what_it_shows() -> None:
    [pod] = kubernetes_events.pods([make_pod()])
    assert pod.spans == []
    assert pod.not_observed == list(kubernetes_events.OBSERVABLE)


@pytest.mark.parametrize(
    ("pod", "given", "uid"),
    [
        (make_pod(), "mine", "mine"),
        (make_pod(), None, "pod-uid"),
        (make_pod(metadata={"labels": {"bootseer.io/job-uid": "labelled"}}), None, "labelled"),
        (
            make_pod(
                spec={
                    "containers": [
                        {"name": "a", "env": [{"name": "BOOTSEER_JOB_UID", "value": "env"}]}
                    ]
                }
            ),
            None,
            "env",
        ),
    ],
)
def test_where_the_job_uid_comes_from(pod: dict[str, Any], given: str | None, uid: str) -> None:
    assert kubernetes_events.pods([pod], given)[0].job_uid == uid


def test_an_event_whose_name_disagrees_with_its_time_is_not_believed() -> None:
    event = make_event("Scheduled", "", 5)
    event["metadata"]["name"] = "p.18ea04cae5f6c0e9"
    [pod] = kubernetes_events.pods([make_pod(), event])
    schedule = span(pod, "schedule")
    assert (schedule.end_ns - schedule.begin_ns) / 1e9 == 5


def test_lists_single_objects_and_concatenations_are_read() -> None:
    pod, event = make_pod(), make_event("Scheduled", "", 5)
    together = kubernetes_events.parse(json.dumps({"kind": "List", "items": [pod, event]}), "f")
    apart = kubernetes_events.parse(json.dumps(pod, indent=2) + "\n" + json.dumps(event), "f")
    assert together == apart == [pod, event]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no"),
        ('{"items": []}', "holds no"),
        ("NAME READY\n", "f:1: is not JSON"),
        ('{"a": 1,\n', "f:2: is not JSON"),
        ("[1]", "no Kubernetes object"),
        ('"x"', "no Kubernetes object"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_foreign_text_is_one_clear_error(text: str, words: str) -> None:
    with pytest.raises(CorruptDataError, match=words) as caught:
        kubernetes_events.parse(text, "f")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "item",
    [
        {"kind": "Pod", "metadata": {}},
        {"kind": "Pod", "metadata": 5},
        {**make_pod(), "spec": None},
        {**make_pod(), "status": {"containerStatuses": [{}]}},
        {**make_pod(), "status": {"conditions": ["x"]}},
        {"kind": "Event", "metadata": {"name": None}},
        {"kind": "Job", "metadata": {}},
    ],
)
def test_objects_of_another_shape_are_one_clear_error(item: dict[str, Any]) -> None:
    with pytest.raises(CorruptDataError, match="not of the Kubernetes API's shape"):
        kubernetes_events.pods([item])


def clock(minute: int, second: int = 0) -> str:
    return f"2026-11-21T10:{minute:02d}:{second:02d}Z"


def lengths(pod: kubernetes_events.Pod) -> dict[str, float]:
    return {one.name: (one.end_ns - one.begin_ns) / 1e9 for one in pod.spans}


@pytest.mark.parametrize(
    "again",
    [
        {"count": 61, "lastTimestamp": clock(50)},
        {"firstTimestamp": None, "eventTime": "2026-11-21T10:00:01.000001Z", "lastTimestamp": None}
        | {"series": {"count": 61, "lastObservedTime": "2026-11-21T10:50:00.000000Z"}},
        {"deprecatedCount": 61, "deprecatedLastTimestamp": clock(50)},
    ],
)
def test_waiting_for_room_lasts_until_the_event_was_last_seen(again: dict[str, Any]) -> None:
    items = [
        make_pod(),
        make_event("FailedScheduling", "0/4 nodes are available: GPU", 1, **again),
        make_event("Scheduled", "assigned", 0, firstTimestamp=clock(50, 2)),
    ]
    [pod] = kubernetes_events.pods(items)
    assert lengths(pod) == {"queue": 3000.0, "schedule": 2.0}


def test_a_last_time_after_the_placing_is_cut_there() -> None:
    items = [
        make_pod(),
        make_event("FailedScheduling", "no room", 1, count=3, lastTimestamp=clock(0, 31)),
        make_event("Scheduled", "assigned", 30),
    ]
    [pod] = kubernetes_events.pods(items)
    assert lengths(pod) == {"queue": 30.0, "schedule": 0.0}


def pull_events(last: str) -> list[dict[str, Any]]:
    """As kubelet writes them: four pulls, three of them refused, with a growing pause between."""
    refused = 'Failed to pull image "i": rpc error: code = Unknown desc = 503 Service Unavailable'
    return [
        make_event("Pulling", 'Pulling image "i"', 1, count=4, lastTimestamp=last),
        make_event("Failed", refused, 2, count=3, lastTimestamp=clock(2, 30)),
        make_event("Failed", "Error: ErrImagePull", 2, count=3, lastTimestamp=clock(2, 30)),
        make_event("BackOff", 'Back-off pulling image "i"', 3, count=9, lastTimestamp=clock(3, 50)),
        make_event("Failed", "Error: ImagePullBackOff", 3, count=6, lastTimestamp=clock(3, 50)),
    ]


def test_pulls_tried_again_last_until_the_one_that_succeeded() -> None:
    done = "(combined from similar events): " + 'Successfully pulled image "i" in 1s'
    items = [
        make_pod(),
        *pull_events(clock(4)),
        make_event("Pulled", done, 0, firstTimestamp=clock(4, 1)),
    ]
    [pod] = kubernetes_events.pods(items)
    found = [(one.name, one.status, (one.end_ns - one.begin_ns) / 1e9) for one in pod.spans]
    assert found == [
        ("image.pull", "error", 1.0),
        ("image.pull.retry", "ok", 238.0),
        ("image.pull", "ok", 1.0),
    ]
    assert "503" in span(pod, "image.pull.retry").attributes["bootseer.reason"]


def test_a_pull_that_fails_after_a_good_one_began_with_its_own_pulling() -> None:
    """As after a restart of the container, with `imagePullPolicy: Always`."""
    refused = 'Failed to pull image "i": rpc error: code = Unknown desc = 503 Service Unavailable'
    items = [
        make_pod(),
        make_event("Pulling", 'Pulling image "i"', 1, count=2, lastTimestamp=clock(40)),
        make_event("Pulled", 'Successfully pulled image "i" in 2s', 3),
        make_event("Failed", refused, 0, firstTimestamp=clock(40, 5)),
    ]
    [pod] = kubernetes_events.pods(items)
    found = [(one.status, (one.end_ns - one.begin_ns) / 1e9) for one in pod.spans]
    assert found == [("ok", 2.0), ("error", 5.0)]


def test_a_pod_that_replaces_another_did_not_wait_since_the_jobs_creation() -> None:
    owner = {"kind": "Job", "name": "j", "uid": "job-uid", "controller": True}
    for began, queued in (("2026-11-21T07:00:01Z", None), ("2026-11-21T09:59:59Z", 10800.0)):
        job = {
            "kind": "Job",
            "metadata": {"uid": "job-uid", "creationTimestamp": "2026-11-21T07:00:00Z"},
            "status": {"startTime": began},
        }
        [pod] = kubernetes_events.pods([make_pod(metadata={"ownerReferences": [owner]}), job])
        assert lengths(pod).get("queue") == queued


def test_what_two_dumps_have_in_common_counts_once() -> None:
    message = 'Successfully pulled image "i" in 2s. Image size: 5 bytes.'
    about = {"metadata": {"name": "p.1", "uid": "event-uid"}}
    items = [make_pod(), make_event("Pulled", message, 10, **about)]
    [pod] = kubernetes_events.pods([*items, *items])
    assert [one.name for one in pod.spans] == ["image.pull"]


def test_pulls_that_never_succeeded_last_until_the_last_that_was_seen() -> None:
    [pod] = kubernetes_events.pods([make_pod(), *pull_events(clock(2, 20))])
    retry = span(pod, "image.pull.retry")
    assert (retry.status, (retry.end_ns - retry.begin_ns) / 1e9) == ("error", 228.0)


def test_a_pod_held_by_a_gate_waited_until_it_was_placed() -> None:
    labels = {"kueue.x-k8s.io/managed": "true", "kueue.x-k8s.io/queue-name": "q"}
    placed = make_event("Scheduled", "assigned", 0, firstTimestamp=clock(40))
    [pod] = kubernetes_events.pods([make_pod(metadata={"labels": labels}), placed])
    assert lengths(pod) == {"queue": 2400.0}
    assert span(pod, "queue").attributes["bootseer.wait"] is True


@pytest.mark.parametrize(
    "held",
    [
        {"spec": {"schedulingGates": [{"name": "example.com/quota"}]}},
        {"status": {"conditions": [{"type": "PodScheduled", "status": "False"}
                                   | {"reason": "SchedulingGated", "lastTransitionTime": None}]}},
    ],
    ids=["gates", "condition"],
)  # fmt: skip
@pytest.mark.parametrize("watched", [True, False])
def test_a_gate_that_was_seen_counts_when_it_is_gone(
    held: dict[str, Any], *, watched: bool
) -> None:
    """The newest form of the pod alone was looked at, and has no gate: an hour of own work."""
    before, after = make_pod(), make_pod()
    for key, value in held.items():
        before[key] = {**before.get(key, {}), **value}
    placed = make_event("Scheduled", "assigned", 0, firstTimestamp=clock(40))
    documents = [before, placed, after]
    if watched:
        documents = [{"type": "MODIFIED", "object": one} for one in documents]
    read = kubernetes_events.parse("\n".join(map(json.dumps, documents)), "watch")
    [pod] = kubernetes_events.pods(read)
    assert lengths(pod) == {"queue": 2400.0}
    [pod] = kubernetes_events.pods([placed, after])  # nothing tells of it
    assert lengths(pod) == {"schedule": 2400.0}


@pytest.mark.parametrize(
    ("status", "event", "named"),
    [
        ({"reason": "Evicted", "message": "low on memory"}, "Evicted", "Evicted"),
        ({"conditions": [{"type": "DisruptionTarget", "status": "True", "message": "preempting"}
          | {"reason": "PreemptionByScheduler", "lastTransitionTime": clock(5)}]},
         "", "PreemptionByScheduler"),
        ({}, "Preempted", "Preempted"),
    ],
)  # fmt: skip
def test_evicted_and_preempted_pods_end_as_such(
    status: dict[str, Any], event: str, named: str
) -> None:
    items = [{**make_pod(), "status": status}]
    if event:
        items.append(make_event(event, "by other", 0, firstTimestamp=clock(5)))
    [pod] = kubernetes_events.pods(items)
    end = span(pod, "pod.end")
    assert (end.point, end.status, end.attributes["error.type"]) == (True, "error", named)
    assert (
        end.begin_ns
        == kubernetes_events.pods([make_pod(), make_event("Scheduled", "", 0)])[0].spans[0].end_ns
        + 300 * 10**9
    )


def test_items_of_typed_lists_have_their_lists_kind() -> None:
    pod, event = make_pod(), make_event("FailedScheduling", "no room", 30)
    for one in (pod, event):
        del one["kind"]
    raw = json.dumps({"kind": "PodList", "apiVersion": "v1", "items": [pod]})
    raw += "\n==== START logs for container a of pod n/p ====\n{ not JSON\n"
    raw += "==== END logs for container a of pod n/p ====\n"
    raw += json.dumps({"kind": "EventList", "apiVersion": "v1", "items": [event]})
    raw += json.dumps({"kind": "JobList", "apiVersion": "batch/v1", "items": None})
    [found] = kubernetes_events.pods(kubernetes_events.parse(raw, "dump"))
    assert lengths(found) == {"queue": 30.0}


def test_the_job_uid_is_what_the_downward_api_gives_the_processes() -> None:
    def uid_of(path: str, labels: dict[str, str]) -> str:
        env = [{"name": "BOOTSEER_JOB_UID", "valueFrom": {"fieldRef": {"fieldPath": path}}}]
        owner = {"kind": "Job", "name": "j", "uid": "child-job", "controller": True}
        pod = make_pod(
            metadata={"labels": labels, "ownerReferences": [owner]},
            spec={"containers": [{"name": "a", "env": env if path else []}]},
        )
        return kubernetes_events.pods([pod])[0].job_uid

    jobset = {"jobset.sigs.k8s.io/jobset-uid": "set", "job-name": "j"}
    assert uid_of("metadata.labels['jobset.sigs.k8s.io/jobset-uid']", jobset) == "set"
    assert uid_of("metadata.labels['job-name']", jobset) == "j"
    assert uid_of("metadata.uid", jobset) == "pod-uid"
    assert uid_of("", jobset) == "set"
    assert uid_of("metadata.labels['nothing']", {}) == "child-job"


def test_numbers_longer_than_any_count_are_none() -> None:
    """As found: ValueError of `int`, from 4,301 digits on."""
    long = "9" * 5000
    created = "2026-01-01T00:00:00Z"
    metadata = {"name": "p", "namespace": "t", "uid": "u", "creationTimestamp": created}
    container = {
        "name": "c",
        "image": "i",
        "env": [{"name": "BOOTSEER_ATTEMPT", "value": long}],
        "resources": {"limits": {"nvidia.com/gpu": long}},
    }
    spec = {"containers": [container]}
    (pod,) = kubernetes_events.pods(
        [{"kind": "Pod", "metadata": metadata, "spec": spec, "status": {}}]
    )
    assert pod.attempt == 0
    assert "bootseer.gpu.count" not in pod.resource


def restarted(count: int, *, annotations: dict[str, str] | None = None) -> dict[str, Any]:
    """A pod whose container was killed at 10:01:00 and runs again since 10:01:12."""
    pod = make_pod(metadata={"annotations": annotations or {}})
    pod["status"]["containerStatuses"] = [
        {
            "name": "a",
            "image": "i",
            "restartCount": count,
            "state": {"running": {"startedAt": "2026-11-21T10:01:12Z"}},
            "lastState": {
                "terminated": {"exitCode": 1, "finishedAt": "2026-11-21T10:01:00Z"},
            },
        }
    ]
    return pod


@pytest.mark.parametrize(
    ("count", "annotations", "attempt"),
    [
        (1, {}, 1),
        (3, {}, 3),
        (1, {"jobset.sigs.k8s.io/in-place-restart-attempt": "4"}, 4),
        (1, {"jobset.sigs.k8s.io/in-place-restart-attempt": "some"}, 1),
    ],
)
def test_a_restarted_container_is_the_pods_next_attempt(
    count: int, annotations: dict[str, str], attempt: int
) -> None:
    first, last = kubernetes_events.pods([restarted(count, annotations=annotations)])
    assert (first.attempt, last.attempt) == (0, attempt)
    assert (last.resource["bootseer.attempt"], last.resource["bootseer.start.kind"]) == (
        attempt,
        "restart",
    )
    assert last.job_uid == first.job_uid
    assert [(s.name, (s.end_ns - s.begin_ns) / 1e9, s.point) for s in last.spans] == [
        ("container.backoff", 12.0, False),
        ("container.start", 0.0, True),
    ]
    assert "container.restart" in {s.name for s in first.spans}


def test_a_container_that_waits_for_its_restart_has_no_attempt_yet(
    pods: dict[str, kubernetes_events.Pod],
) -> None:
    """Of the real records: one in CrashLoopBackOff."""
    items = kubernetes_events.parse(DATA.read_text(), "data")
    assert len(kubernetes_events.pods(items)) == len(pods)


def test_containers_that_were_all_restarted_are_one_attempt() -> None:
    """By a rule of the pod: each counts, and each has its own times."""
    pod = restarted(2)
    (one,) = pod["status"]["containerStatuses"]
    later = {"running": {"startedAt": "2026-11-21T10:01:20Z"}}
    pod["status"]["containerStatuses"] += [{**one, "name": "b", "state": later}]
    _, last = kubernetes_events.pods([pod])
    starts = [s for s in last.spans if s.name == "container.start"]
    assert [s.attributes["k8s.container.name"] for s in starts] == ["a", "b"]
    assert last.attempt == 2
