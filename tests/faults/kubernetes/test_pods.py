"""What goes wrong in a cluster: too little memory, kills, full volumes, pods that tell nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bootseer.kubernetes import options as names
from tests.support.labs.kubernetes import BARE, PYTHON
from tests.support.labs.pods import Lab, pod
from tools.k8s import example

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.debian("etcd-server")]

STRICT = {
    "runAsNonRoot": True,
    "runAsUser": 65534,
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


@pytest.fixture
def lab(k8s: Any, namespace: str) -> Lab:
    return Lab(k8s, namespace)


def test_an_init_container_out_of_memory_is_the_clusters_to_tell(lab: Lab) -> None:
    """Ours, with its own command: the volume that it copies to lies in the pod's memory."""

    def small(document: Any) -> None:
        (init,) = document["spec"]["initContainers"]
        init["resources"]["limits"]["memory"] = init["resources"]["requests"]["memory"] = "24Mi"
        (volume,) = [v for v in document["spec"]["volumes"] if v["name"] == names.VOLUME]
        volume["emptyDir"] = {"medium": "Memory"}
        document["spec"]["restartPolicy"] = "OnFailure"

    lab.apply(pod("p", ["sh", "-c", "echo ran"], BARE), lab.options(), small)

    def killed() -> Any:
        (status,) = lab.pod("p")["status"].get("initContainerStatuses") or [{}]
        last = status.get("lastState", {}).get("terminated") or {}
        return last.get("reason") == "OOMKilled" and status["restartCount"]

    assert lab.k8s.wait_for(killed, "the init container to be killed and started again") >= 1
    (init,) = lab.pod("p")["spec"]["initContainers"]
    assert (init.get("command"), init["args"]) == (None, ["install", names.HOME])
    assert not lab.lines()


def test_a_job_killed_during_its_start_leaves_its_phases_open(lab: Lab) -> None:
    script = "/opt/bootseer/bin/bootseer event begin model.load; echo begun; sleep 100"
    lab.apply(pod("p", ["sh", "-c", f"{script} # {lab.namespace}"], BARE), lab.options())
    lab.k8s.wait_for(lambda: lab.phase("p") == "Running" and "begun" in lab.logs("p"), "the job")
    os.kill(wrapper_of(lab), signal.SIGKILL)  # as the node would, without a word before
    assert lab.ended("p")["exitCode"] == 137
    assert "Began and never ended" in said(lab)
    assert {killed["phase"] for killed in lab.report()["killed"]} == {"job", "model.load"}


def test_a_report_with_half_of_the_pods_missing(lab: Lab) -> None:
    whole = example.report(lab.k8s, lab.namespace, lab.events)
    for name in ("data.prepare", "rendezvous", "schedule"):
        assert name in whole
    assert processes(lab, "data.prepare") == [2]
    pods = {pod_of(path) for path in inside(lab)}
    assert len(pods) == 2
    for path in inside(lab):
        if pod_of(path) == min(pods):
            path.unlink()
    assert processes(lab, "data.prepare") == [1]
    assert processes(lab, "schedule") == [2]  # the cluster still tells of both
    assert "The start took" in said(lab)


def test_events_that_cannot_be_written_never_stop_the_job(lab: Lab) -> None:
    def read_only(document: Any) -> None:
        (main,) = document["spec"]["containers"]
        (mount,) = [m for m in main["volumeMounts"] if m["name"] == "bootseer-events"]
        mount["readOnly"] = True

    lab.apply(pod("p", ["sh", "-c", "echo ran; exit 4"], BARE), lab.options("deps"), read_only)
    assert lab.ended("p")["exitCode"] == 4
    assert "ran" in lab.logs("p").splitlines()
    assert not lab.lines()


def test_a_volume_full_of_other_things_never_stops_the_job(lab: Lab) -> None:
    full = lab.folder / "full"
    lab.k8s.call_inside("mkdir", "-p", str(full))
    lab.k8s.call_inside("mount", "-t", "tmpfs", "-o", "size=64k,mode=777", "full", str(full))
    fill = f"dd if=/dev/zero of={full}/x bs=4k 2> /dev/null || true"
    lab.k8s.call_inside("sh", "-c", fill)

    def use_full(document: Any) -> None:
        (volume,) = [v for v in document["spec"]["volumes"] if v["name"] == "bootseer-events"]
        volume["hostPath"] = {"path": str(full)}

    try:
        lab.apply(pod("p", ["sh", "-c", "echo ran; exit 4"], BARE), lab.options("deps"), use_full)
        assert lab.ended("p")["exitCode"] == 4
        assert "ran" in lab.logs("p").splitlines()
    finally:
        lab.k8s.call_inside("umount", "-l", str(full))


def test_a_striped_checkpoint_is_copied_into_the_strictest_pod(lab: Lab, tmp_path: Path) -> None:
    data = bytes(range(256)) * (48 << 10)  # 12 MiB
    source = tmp_path / "model.pt"
    source.write_bytes(data)
    put = ["stripe", "put", str(source), str(lab.store / "model.pt"), "--width", "3"]
    subprocess.run([sys.executable, "-m", "bootseer", *put], check=True, capture_output=True)
    settings = lab.folder / "bootseer.toml"
    settings.write_text(
        '[checkpoint]\nurl = "/bootseer/store/model.pt"\nto = "/scratch"\nform = "copy"\n',
        encoding="utf-8",
    )
    words = ["configmap", "settings", "-n", lab.namespace, f"--from-file={settings}"]
    lab.k8s.kubectl("create", *words)
    code = "d = open('/scratch/model.pt', 'rb').read(); "
    code += "print(len(d), d == bytes(range(256)) * (48 << 10))"
    manifest = pod("p", ["python3", "-c", code], PYTHON, securityContext=STRICT)
    manifest["spec"]["volumes"] = [{"name": "scratch", "emptyDir": {}}]
    mount = {"name": "scratch", "mountPath": "/scratch"}
    manifest["spec"]["containers"][0]["volumeMounts"] = [mount]
    lab.apply(manifest, lab.options("deps", "checkpoint", config_map="settings"))
    assert lab.ended("p")["exitCode"] == 0, lab.logs("p")
    assert lab.logs("p").split()[-2:] == [str(len(data)), "True"]
    assert not [e for e in lab.lines() if e["status"] == "fallback"]
    assert any(e["name"].startswith("checkpoint") and e["event"] == "end" for e in lab.lines())


def wrapper_of(lab: Lab) -> int:
    """Process 1 of the test's pod, by its number here."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(w.endswith(b"/bin/bootseer") for w in words[:4]) and lab.namespace in str(words):
            return int(place.name)
    raise AssertionError("no wrapper runs")


def inside(lab: Lab) -> list[Path]:
    """The files that pods wrote themselves; what the cluster said of them is in others."""
    found = sorted(lab.events.rglob("*.jsonl"))
    return [path for path in found if '"schedule"' not in path.read_text("utf-8")]


def processes(lab: Lab, phase: str) -> list[int]:
    return [p["processes"] for p in lab.report()["phases"] if p["name"] == phase]


def pod_of(path: Path) -> str:
    return path.read_text("utf-8").split('"k8s.pod.name":')[1].split('"')[1]


def said(lab: Lab) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "bootseer", "report", str(lab.events)],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout
