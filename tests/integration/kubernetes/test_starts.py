"""Whole starts on a real node: dependencies restored, stores that fail, the cluster's own times."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bootseer.profiler.report import analysis
from bootseer.profiler.report.load.load import load
from bootseer.profiler.report.model import StartSummary
from tests.support import page_cache
from tests.support.commands.filemode import PAGE, cold, evict
from tests.support.labs.kubernetes import BARE, PYTHON
from tests.support.labs.pods import Lab, pod
from tests.support.samples.wheels import make_wheel

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.debian("etcd-server")]

WANTED = ["alpha", "beta", "gamma"]
INSTALL = "python3 -m pip install -q --no-index --find-links /wheels --target /scratch/site"
SETTINGS = f"""
[deps]
install = "{INSTALL} {" ".join(WANTED)}"
also = ["/scratch/site"]
publish = "inline"
"""
IMAGE_SETTINGS = """
[image]
traces = "/bootseer/store/traces"
image = "lab-python"
paths = ["/files"]
"""
FIRST_STEP = """
import glob, subprocess, time
subprocess.run(['/opt/bootseer/bin/bootseer', 'event', 'point', 'first_step'])
until = time.monotonic() + 30
while time.monotonic() < until:  # goes on until so many starts have kept what they recorded
    texts = [open(p).read() for p in glob.glob('/bootseer/events/**/*.jsonl', recursive=True)]
    if sum(text.count('"image.record"') for text in texts) >= {number}:
        break
    time.sleep(0.1)
"""
IN_MEMORY = """
look = "import os; from bootseer.imageprefetch.filemode.mincore import ResidencyProbe; "
look += "fd = os.open('/files/read', os.O_RDONLY); size = os.fstat(fd).st_size"
look += "; found = ResidencyProbe().resident(fd, size)"
look += "; print('in memory:', sum(extent.length for extent in found))"
subprocess.run(['/opt/bootseer/python/bin/python3', '-I', '-c', look])
"""
JOB = (
    "import sys; sys.path.insert(0, '/scratch/site'); "
    "import alpha, beta, gamma; print(alpha.VERSION)"
)


@pytest.fixture
def lab(k8s: Any, namespace: str) -> Lab:
    return Lab(k8s, namespace)


def training_pod(lab: Lab, name: str, job: str = JOB) -> dict[str, Any]:
    """A pod whose dependencies come from a folder of wheels."""
    wheels = lab.folder / "wheels"
    for package in WANTED:
        make_wheel(wheels, package, "1.0")
    manifest = pod(name, ["python3", "-c", job])
    spec = manifest["spec"]
    spec["volumes"] = [
        {"name": "wheels", "hostPath": {"path": str(wheels)}},
        {"name": "scratch", "emptyDir": {}},
    ]
    spec["containers"][0]["volumeMounts"] = [
        {"name": "wheels", "mountPath": "/wheels"},
        {"name": "scratch", "mountPath": "/scratch"},
    ]
    return manifest


def settings(lab: Lab, text: str = SETTINGS) -> None:
    path = lab.folder / "bootseer.toml"
    path.write_text(text, encoding="utf-8")
    words = ["configmap", "settings", "-n", lab.namespace, f"--from-file={path}"]
    lab.k8s.kubectl("create", *words)


def traces(lab: Lab, pod_name: str) -> set[str]:
    """The starts that the processes of one pod belong to."""
    found = [e for e in lab.lines() if e["event"] == "resource"]
    return {e["trace_id"] for e in found if e["attributes"].get("k8s.pod.name") == pod_name}


def spans(lab: Lab, pod_name: str) -> dict[str, Any]:
    """Ends of phases by name, of the processes of one pod."""
    mine = traces(lab, pod_name)
    return {e["name"]: e for e in lab.lines() if e["event"] == "end" and e["trace_id"] in mine}


def test_the_second_start_restores_what_the_first_one_installed(lab: Lab) -> None:
    """And reads ahead the files that the first one read.

    The cluster's images lie in memory, where nothing is ever cold, so the files are a volume's.
    """
    settings(lab, SETTINGS + IMAGE_SETTINGS)
    (lab.folder / "files").mkdir()
    file = cold(lab.folder / "files/read", 64 * PAGE)
    for number, name in enumerate(("first", "second"), 1):
        evict(file)
        # The second job does not read it, and finds it in memory all the same.
        reads = "open('/files/read', 'rb').read()" if number == 1 else ""
        manifest = training_pod(
            lab, name, f"{reads}{FIRST_STEP.format(number=number)}{IN_MEMORY}{JOB}"
        )
        spec = manifest["spec"]
        spec["volumes"].append({"name": "files", "hostPath": {"path": str(file.parent)}})
        mount = {"name": "files", "mountPath": "/files", "readOnly": True}
        spec["containers"][0]["volumeMounts"].append(mount)
        with page_cache.staying():
            lab.apply(manifest, lab.options("image", "deps", config_map="settings"))
            assert lab.ended(name)["exitCode"] == 0, lab.logs(name)
        assert lab.logs(name).strip().endswith("1.0")
    first, second = spans(lab, "first"), spans(lab, "second")
    assert "deps.install.restore" not in first
    assert second["deps.install.restore"]["status"] == "ok"
    assert not [e for e in lab.lines() if e["status"] == "fallback"]
    check_files_were_read_ahead(lab)
    assert f"in memory: {64 * PAGE}\n" in lab.logs("second")


def check_files_were_read_ahead(lab: Lab) -> None:
    told = {
        (name, point["name"]): point["attributes"]
        for name in ("first", "second")
        for point in lab.lines()
        if point["event"] == "point" and point["trace_id"] in traces(lab, name)
    }
    assert ("first", "image.replay") not in told
    recorded, replayed = told["first", "image.record"], told["second", "image.replay"]
    assert recorded["bootseer.image.ended_by"] == "first step"
    assert recorded["bootseer.image.files"] == replayed["bootseer.image.files"] == 1
    assert recorded["bootseer.bytes"] == replayed["bootseer.bytes"] == 64 * PAGE
    (use,) = [use for use in lab.report()["images"] if use["replay_bytes"]]
    assert use["mode"] == "files"


def test_a_store_that_is_down_leaves_a_plain_start_with_the_reason(lab: Lab) -> None:
    settings(lab)
    stores = {"away": "webhdfs://127.0.0.1:1/snapshots", "wrong": "nonsense://x"}
    for name, url in stores.items():
        options = lab.options("deps", config_map="settings", store=None, store_url=url)
        lab.apply(training_pod(lab, name), options)
    for name, word in (("away", "snapshots"), ("wrong", "nonsense")):
        assert lab.ended(name)["exitCode"] == 0, lab.logs(name)
        assert lab.logs(name).strip().endswith("1.0")
        mine = traces(lab, name)
        attributes = [e["attributes"] for e in lab.lines() if e["trace_id"] in mine]
        reasons = [a["bootseer.reason"] for a in attributes if "bootseer.reason" in a]
        assert any(word in reason for reason in reasons), reasons
    assert "fallback" in json.dumps(lab.report())


def test_an_injected_job_whose_init_image_is_gone_is_the_clusters_to_tell(lab: Lab) -> None:
    options = lab.options()
    lab.apply(pod("p", ["true"], BARE), dataclasses.replace(options, image="127.0.0.1:5055/no:1"))

    def waiting() -> str:
        (status,) = lab.pod("p")["status"].get("initContainerStatuses") or [{}]
        return str(status.get("state", {}).get("waiting", {}).get("reason", ""))

    lab.k8s.wait_for(lambda: waiting() in ("ErrImagePull", "ImagePullBackOff"), "the pull to fail")


HOLD = """
import os, time
print(time.time(), flush=True)
while not os.path.exists("/hold/go"):
    time.sleep(0.01)
print(time.time(), flush=True)
time.sleep(1.5)
print(time.time(), flush=True)
"""


def test_the_clusters_own_times_agree_with_a_clock_outside(lab: Lab) -> None:
    """`import k8s` of the kubelet's events against clocks that the pod's programs print.

    Whatever causes something else must come before it, by whosever clock. A program that waits
    until its `Started` is seen, and then for a while more, gives its phase a length.
    """
    manifest = pod("p", ["python3", "-c", "import time; print(time.time())"])
    spec = manifest["spec"]
    spec["volumes"] = [{"name": "hold", "hostPath": {"path": str(lab.folder)}}]
    mounts = [{"name": "hold", "mountPath": "/hold"}]
    hold = {"name": "hold", "image": PYTHON, "command": ["python3", "-c", HOLD]}
    spec["initContainers"] = [{**hold, "volumeMounts": mounts}]
    asked = time.time()
    lab.apply(manifest, lab.options())

    def are_scheduled_and_started() -> bool:
        events = lab.k8s.get("events", "-n", lab.namespace)["items"]
        found = {(e["reason"], e["involvedObject"].get("fieldPath")) for e in events}
        return {("Scheduled", None), ("Started", "spec.initContainers{hold}")} <= found

    lab.k8s.wait_for(are_scheduled_and_started, "the container that holds the pod to be started")
    seen = time.time()
    (lab.folder / "go").touch()
    assert lab.ended("p")["exitCode"] == 0
    ended = time.time()
    held = lab.k8s.kubectl("logs", "p", "-n", lab.namespace, "-c", "hold")
    hold_began, hold_went_on, hold_ended = map(float, held.split())
    main_began = float(lab.logs("p"))
    spans = imported(lab)
    schedule, init = spans["schedule", None], spans["container.init", "hold"]
    started, main = spans["container.start", "hold"], spans["container.start", "main"]
    (own,) = [
        e["time_unix_nano"] / 1e9
        for e in lab.lines()
        if e["event"] == "end" and e["name"] == "container.start"
    ]
    # What Kubernetes cuts to whole seconds says so.
    assert_in_order(asked, schedule.begin + schedule.uncertainty_s)
    assert_in_order(asked, schedule.end, seen)
    assert_in_order(asked, started.begin, hold_began)
    assert_in_order(started.begin, started.end, seen, hold_went_on, hold_ended, main.begin)
    assert_in_order(hold_ended, init.end + init.uncertainty_s)
    assert_in_order(started.end, init.begin, seen)
    assert_in_order(init.end, main.begin, own, main_began, ended)
    assert_in_order(main.begin, main.end, ended)


TWICE = """
import os, subprocess, sys
ran_before = os.path.exists("/hold/ran")
open("/hold/ran", "w").close()
if ran_before:
    subprocess.run(["/opt/bootseer/bin/bootseer", "event", "point", "first_step"])
sys.exit(not ran_before)
"""


def test_a_container_that_kubelet_restarts_is_another_attempt(lab: Lab) -> None:
    """By the job's own events, and by the cluster's records, each for itself and both together."""
    manifest = pod("p", ["python3", "-c", TWICE])
    spec = manifest["spec"]
    spec["restartPolicy"] = "OnFailure"
    spec["volumes"] = [{"name": "hold", "hostPath": {"path": str(lab.folder)}}]
    spec["containers"][0]["volumeMounts"] = [{"name": "hold", "mountPath": "/hold"}]
    lab.apply(manifest, lab.options())
    assert lab.ended("p")["exitCode"] == 0
    (status,) = lab.pod("p")["status"]["containerStatuses"]
    assert status["restartCount"] == 1
    runs = {e["attributes"]["bootseer.container"] for e in lab.lines() if e["event"] == "resource"}
    assert [name.partition("/")[0] for name in runs] == ["main", "main"]
    imported(lab)
    records = starts_of(lab.folder / "imported")
    assert [(each.attempt, each.kind) for each in records] == [(None, "unknown"), (1, "restart")]
    attempts = [(0, "first", False), (1, "restart", True)]
    own = starts_of(lab.events)
    assert [(each.attempt, each.kind, each.complete) for each in own] == attempts
    both = starts_of(lab.events, lab.folder / "imported")
    assert [(each.attempt, each.kind, each.complete) for each in both] == attempts
    assert [each.trace_id for each in both] == [each.trace_id for each in own]


def starts_of(*folders: Path) -> list[StartSummary]:
    """The starts of some events, in order of time."""
    return [*analysis.analyse(load([str(folder) for folder in folders])).starts[::-1]]


def assert_in_order(*times: float) -> None:
    assert list(times) == sorted(times)


class Span(NamedTuple):
    """A phase in seconds since 1970."""

    begin: float
    end: float
    uncertainty_s: float


def imported(lab: Lab) -> dict[tuple[str, str | None], Span]:
    """What `import k8s` makes of the pod, by phase and container."""
    records = lab.k8s.kubectl("get", "pods,events", "-n", lab.namespace, "-o", "json")
    place = lab.folder / "imported"
    subprocess.run(
        [sys.executable, "-m", "bootseer", "import", "k8s", "--events", str(place), "-"],
        input=records,
        text=True,
        check=True,
        capture_output=True,
    )
    lines = [
        json.loads(line)
        for path in Path(place).rglob("*.jsonl")
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    begins = {e["span_id"]: e for e in lines if e["event"] == "begin"}
    found = {}
    for end in lines:
        if end["event"] == "end":
            begin = begins[end["span_id"]]
            attributes = {**begin["attributes"], **end["attributes"]}
            found[end["name"], attributes.get("k8s.container.name")] = Span(
                begin["time_unix_nano"] / 1e9,
                end["time_unix_nano"] / 1e9,
                attributes.get("bootseer.uncertainty_s", 0),
            )
    return found
