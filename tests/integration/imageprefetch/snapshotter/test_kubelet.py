"""A real kubelet runs pods that name their stock images, through the snapshotter."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

REGISTRY = "127.0.0.1:5055"
LAZY, PLAIN = f"{REGISTRY}/lab/lazy:1", f"{REGISTRY}/lab/plain:1"
pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.debian("etcd-server")]
PODS = (
    ("lazy", LAZY, "busybox sha256sum /bin/busybox; cat /etc/passwd"),
    ("plain", PLAIN, "echo plain"),
    ("long", LAZY, "until [ -e /tmp/go ]; do sleep 0.1; done; ls -R /etc; cat /etc/group"),
)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from tools.initimage import ociimage
    from tools.k8s import images
    from tools.k8s.cluster import Cluster

    work = tmp_path_factory.mktemp("k8s")
    lazy, plain = work / "lazy.tar", work / "plain.tar"
    images.bare_image(lazy, work)
    (work / "bare-root/plain").touch()
    ociimage.write(plain, work / "bare-root", PLAIN, ociimage.RunAs([]), level=1)
    held = {"lab/lazy:1": lazy, "lab/plain:1": plain}
    try:
        with Cluster(work / "cluster", images=held, lazy=True) as cluster:
            command = [sys.executable, "-m", "bootseer", "image", "build", LAZY]
            cluster.call_inside("env", f"BOOTSEER_CACHE={work}/build", *command)
            for name, image, script in PODS:
                start(cluster, name, image, script)
            yield cluster
    finally:
        shutil.rmtree(work, ignore_errors=True)


def start(node: Any, name: str, image: str, script: str) -> None:
    main = {"name": "main", "image": image, "command": ["sh", "-c", script]}
    spec = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "containers": [main]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
    node.kubectl("apply", "-f", "-", data=json.dumps(pod))


def phase(node: Any, name: str) -> str:
    return str(node.get("pod", name)["status"].get("phase"))


def log_of(node: Any) -> str:
    return str((node.run / "snapshotter.log").read_text(encoding="utf-8"))


def layers_fetched(node: Any, image: str) -> bool:
    """Whether containerd holds the image's layers as files."""
    ctr = ["ctr", "-a", f"{node.run}/containerd.sock", "-n", "k8s.io"]
    done = subprocess.run(
        node.inside([*ctr, "images", "check", f"name=={image}"]),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return "incomplete" not in done.stdout


def a_pod_names_its_stock_image_and_nothing_is_pulled(node: Any) -> None:
    node.wait_for(lambda: phase(node, "lazy") == "Succeeded", "the pod")
    said = node.kubectl("logs", "lazy")
    expected = subprocess.run(["sha256sum", "/bin/busybox"], capture_output=True, text=True)
    assert said.split() == [
        expected.stdout.split()[0],
        "/bin/busybox",
        "root:x:0:0:root:/root:/bin/sh",
    ]
    assert f"{LAZY}: mounted" in log_of(node)
    assert not layers_fetched(node, LAZY)


def a_pod_whose_image_has_no_block_image_runs_as_ever(node: Any) -> None:
    node.wait_for(lambda: phase(node, "plain") == "Succeeded", "the pod")
    assert node.kubectl("logs", "plain") == "plain\n"


def a_pod_goes_on_while_the_snapshotter_is_killed_and_comes_back(node: Any) -> None:
    node.wait_for(lambda: phase(node, "long") == "Running", "the pod")
    node.call_inside("kill", "-9", (node.run / "snapshotter.pid").read_text())
    node.kubectl("exec", "long", "--", "touch", "/tmp/go")
    node.wait_for(lambda: phase(node, "long") == "Succeeded", "the pod")
    assert node.kubectl("logs", "long").endswith("root:x:0:\n")
    command = json.loads((node.run / "snapshotter.json").read_text(encoding="utf-8"))
    again = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *node.inside(command)])
    try:
        node.wait_for(lambda: connected(node), "containerd to find it again")
        start(node, "after", LAZY, "echo after")
        node.wait_for(lambda: phase(node, "after") == "Succeeded", "the pod")
    finally:
        again.terminate()
        again.wait()


def kubelet_knows_the_disk_that_images_fill(node: Any) -> None:
    wrong = "Failed to get the info of the filesystem"
    assert wrong not in (node.run / "kubelet.log").read_text(encoding="utf-8")


def connected(node: Any) -> bool:
    ctr = ["ctr", "-a", f"{node.run}/containerd.sock", "-n", "k8s.io", "snapshots"]
    words = node.inside([*ctr, "--snapshotter", "bootseer", "ls"])
    return not subprocess.run(words, capture_output=True).returncode


def test_pods_name_their_stock_images(node: Any) -> None:
    """One test, so that one node serves it however tests are spread over workers."""
    a_pod_names_its_stock_image_and_nothing_is_pulled(node)
    a_pod_whose_image_has_no_block_image_runs_as_ever(node)
    a_pod_goes_on_while_the_snapshotter_is_killed_and_comes_back(node)
    kubelet_knows_the_disk_that_images_fill(node)
