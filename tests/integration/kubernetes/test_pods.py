"""Injected pods on a real node: what the wrapper does in them, and that the job never suffers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.labs.kubernetes import BARE
from tests.support.labs.pods import Lab, pod

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.debian("etcd-server")]


@pytest.fixture
def lab(k8s: Any, namespace: str) -> Lab:
    return Lab(k8s, namespace)


def test_the_wrapper_is_process_1_and_records_the_job(lab: Lab) -> None:
    code = "print(open('/proc/1/cmdline').read().split(chr(0))[-4:-1], open('/proc/1/comm').read())"
    lab.apply(pod("p", ["python3", "-c", code]), lab.options())
    assert lab.ended("p")["exitCode"] == 0
    assert lab.logs("p").startswith("['python3', '-c'")
    (resource,) = [e for e in lab.lines() if e["event"] == "resource"]
    attributes = resource["attributes"]
    assert attributes["k8s.pod.name"] == "p"
    assert attributes["k8s.node.name"] == "lab-node"
    assert attributes["bootseer.job_uid"] == lab.pod("p")["metadata"]["uid"]
    ends = {e["name"]: e["status"] for e in lab.lines() if e["event"] == "end"}
    assert ends == {"container.start": "ok", "job": "ok"}


def test_the_strictest_pod_in_an_image_without_python(lab: Lab) -> None:
    script = "id -u; grep -E 'NoNewPrivs|CapEff' /proc/self/status; touch /x 2>&1; exit 3"
    security = {
        "runAsNonRoot": True,
        "runAsUser": 65534,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    manifest = pod("p", ["sh", "-c", script], BARE, securityContext=security)
    lab.apply(manifest, lab.options("deps", "checkpoint"))
    assert lab.ended("p")["exitCode"] == 3
    said = lab.logs("p")
    assert "65534" in said
    assert "NoNewPrivs:\t1" in said
    assert "CapEff:\t0000000000000000" in said
    assert "Read-only file system" in said
    assert "bootseer" not in said
    assert any(e["name"] == "start" for e in lab.lines())


def test_a_deleted_pod_hears_the_signal_and_its_events_stay(lab: Lab) -> None:
    script = f"trap 'echo heard > {lab.events}/signal; exit 0' TERM; echo up; sleep 100 & wait"
    lab.apply(
        pod("p", ["sh", "-c", script.replace(str(lab.events), "/bootseer/events")], BARE),
        lab.options(),
    )
    lab.k8s.wait_for(lambda: lab.phase("p") == "Running" and "up" in lab.logs("p"), "the job")
    # The object itself goes ten seconds later, when kubelet next looks at what is left of it.
    lab.k8s.kubectl("delete", "pod", "p", "-n", lab.namespace, "--wait=false")
    found = lambda: [e for e in lab.lines() if e["event"] == "end" and e["name"] == "job"]  # noqa: E731
    (end,) = lab.k8s.wait_for(found, "the job's end")
    assert (lab.events / "signal").read_text(encoding="ascii") == "heard\n"
    assert end["attributes"]["process.exit.code"] == 0


def test_a_job_killed_for_memory_is_seen_as_such(lab: Lab) -> None:
    limits = {"limits": {"memory": "64Mi"}}
    code = "x = bytearray(200 << 20); print(len(x))"
    lab.apply(pod("p", ["python3", "-c", code], resources=limits), lab.options())
    state = lab.ended("p")
    assert (state["exitCode"], state["reason"]) == (137, "OOMKilled")
    assert [e["event"] for e in lab.lines() if e["name"] == "job"][:1] == ["begin"]


def test_a_command_that_is_not_there_has_the_plain_code(lab: Lab) -> None:
    lab.apply(pod("p", ["/no/such/program"], BARE), lab.options())
    assert lab.ended("p")["exitCode"] == 127


def test_a_volume_without_room_leaves_a_plain_start(lab: Lab) -> None:
    small = lab.folder / "small"
    lab.k8s.call_inside("mkdir", "-p", str(small))
    lab.k8s.call_inside("mount", "-t", "tmpfs", "-o", "size=3m,mode=777", "small", str(small))

    def use_small(document: Any) -> None:
        (volume,) = [v for v in document["spec"]["volumes"] if v["name"] == "bootseer"]
        del volume["emptyDir"]
        volume["hostPath"] = {"path": str(small)}

    try:
        lab.apply(pod("p", ["sh", "-c", "echo started"], BARE), lab.options(), use_small)
        assert lab.ended("p")["exitCode"] == 0
        said = lab.logs("p")
        assert "started" in said
        assert "had no room for the wrapper; starting the plain way" in said
    finally:
        lab.k8s.call_inside("umount", "-l", str(small))


def test_a_volume_that_cannot_be_written_is_one_clear_line(lab: Lab) -> None:
    def read_only(document: Any) -> None:
        (init,) = document["spec"]["initContainers"]
        init["volumeMounts"][0]["readOnly"] = True

    lab.apply(pod("p", ["true"], BARE), lab.options(), read_only)

    def failed() -> Any:
        (status,) = lab.pod("p")["status"].get("initContainerStatuses") or [{}]
        return status.get("state", {}).get("terminated")

    state = lab.k8s.wait_for(failed, "the init container to fail")
    assert state["exitCode"] == 8
    said = lab.k8s.kubectl("logs", "p", "-n", lab.namespace, "-c", "bootseer-init")
    assert "bootseer-init: cannot write to /opt/bootseer; give the volume space" in said


def test_two_pods_of_a_job_meet_at_a_barrier_in_one_report(lab: Lab) -> None:
    wait = (
        "touch /bootseer/events/here-$HOSTNAME; "
        "while [ $(ls /bootseer/events | grep -c here-) -lt 2 ]; do sleep 0.1; done"
    )
    main = {"name": "main", "image": BARE, "command": ["sh", "-c", wait]}
    template = {"spec": {"restartPolicy": "Never", "containers": [main]}}
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "two"},
        "spec": {"completions": 2, "parallelism": 2, "template": template},
    }
    lab.apply(job, lab.options())
    found = lambda: lab.k8s.get("job", "two", "-n", lab.namespace)  # noqa: E731
    lab.k8s.wait_for(lambda: found()["status"].get("succeeded") == 2, "both pods")
    uids = {e["attributes"]["bootseer.job_uid"] for e in lab.lines() if e["event"] == "resource"}
    assert uids == {found()["metadata"]["uid"]}
    report = lab.report()
    assert len({e["trace_id"] for e in lab.lines()}) == 1
    assert (report["start"]["processes"], report["start"]["nodes"]) == (2, 1)
    assert [p["processes"] for p in report["phases"] if p["name"] == "job"] == [2]
