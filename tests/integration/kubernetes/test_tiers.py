"""Pods of the tiers `fuse` and `privileged` on a real node: what they may mount, and what not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.labs.kubernetes import BARE, PYTHON
from tests.support.labs.pods import Lab, pod
from tools.k8s import fuse_plugin

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.debian("etcd-server")]

SIZE = 12 << 20
READ = f"""
import re
data = open('/scratch/checkpoint/model.pt', 'rb').read()
print('whole:', data == bytes(range(256)) * ({SIZE} >> 8))
mounts = open('/proc/self/mountinfo').read()
print('mounts:', re.findall(r' (/scratch\\S*) .* - (fuse\\S*) ', mounts))
caps = re.search(r'CapEff:\\s+(\\w+)', open('/proc/self/status').read()).group(1)
print('may mount:', bool(int(caps, 16) >> 21 & 1))
"""
MOUNTED = "mounts: [('/scratch/checkpoint', 'fuse"


@pytest.fixture
def lab(k8s: Any, namespace: str) -> Lab:
    return Lab(k8s, namespace)


@pytest.fixture
def fuse_resource(k8s: Any) -> Iterator[str]:
    """The resource of a device plugin that gives /dev/fuse, once the node offers it."""
    mortal = ["setpriv", "--pdeathsig", "KILL"]  # twice: nsenter stays between us and it
    command = k8s.inside([*mortal, sys.executable, "-m", "tools.k8s.fuse_plugin"])
    plugin = subprocess.Popen([*mortal, *command], stdout=subprocess.PIPE, text=True)
    try:
        assert plugin.stdout is not None
        assert plugin.stdout.readline() == "registered\n"
        offered = lambda: int(  # noqa: E731
            k8s.get("node", "lab-node")["status"]["allocatable"].get(fuse_plugin.RESOURCE, "0")
        )
        assert k8s.wait_for(offered, "the node to offer it") == fuse_plugin.DEVICES
        yield fuse_plugin.RESOURCE
    finally:
        plugin.terminate()
        plugin.communicate()


def start_reader(lab: Lab, tmp_path: Path, form: str, edit: Any = None, **tier: Any) -> None:
    """A pod that reads a striped checkpoint of the store, as its tier makes it readable."""
    source = tmp_path / "model.pt"
    source.write_bytes(bytes(range(256)) * (SIZE >> 8))
    url = str(lab.store / "models/model.pt")
    put = ["stripe", "put", str(source), url, "--width", "3"]
    subprocess.run([sys.executable, "-m", "bootseer", *put], check=True, capture_output=True)
    settings = lab.folder / "bootseer.toml"
    settings.write_text(
        '[checkpoint]\nurl = "/bootseer/store/models/model.pt"\nto = "/scratch/checkpoint"\n'
        f'form = "{form}"\n',
        encoding="utf-8",
    )
    words = ["configmap", "settings", "-n", lab.namespace, f"--from-file={settings}"]
    lab.k8s.kubectl("create", *words)
    manifest = pod("p", ["python3", "-c", READ], PYTHON)
    manifest["spec"]["volumes"] = [{"name": "scratch", "emptyDir": {}}]
    mount = {"name": "scratch", "mountPath": "/scratch"}
    manifest["spec"]["containers"][0]["volumeMounts"] = [mount]
    options = lab.options("deps", "checkpoint", config_map="settings", **tier)
    lab.apply(manifest, options, edit)


def checkpoint_end(lab: Lab) -> dict[str, Any]:
    (end,) = [e for e in lab.lines() if e["event"] == "end" and e["name"] == "checkpoint.load"]
    return dict(end["attributes"])


def allow_mounts(document: Any) -> None:
    """What the documents ask for beside the device: the capability that mount(2) needs."""
    (main,) = document["spec"]["containers"]
    main["securityContext"] = {"capabilities": {"add": ["SYS_ADMIN"]}}


@pytest.mark.parametrize("form", ["auto", "mount"])
def test_a_checkpoint_is_mounted_by_the_device_and_the_capability(
    lab: Lab, tmp_path: Path, fuse_resource: str, form: str
) -> None:
    tier = {"tier": "fuse", "fuse_resource": fuse_resource}
    start_reader(lab, tmp_path, form, allow_mounts, **tier)
    assert lab.ended("p")["exitCode"] == 0, lab.logs("p")
    said = lab.logs("p")
    assert "whole: True" in said
    assert MOUNTED in said
    assert checkpoint_end(lab)["bootseer.form"] == "mount"
    assert not [e for e in lab.lines() if e["status"] == "fallback"]


def test_without_the_capability_the_checkpoint_is_copied_with_the_reason(
    lab: Lab, tmp_path: Path, fuse_resource: str
) -> None:
    start_reader(lab, tmp_path, "auto", tier="fuse", fuse_resource=fuse_resource)
    assert lab.ended("p")["exitCode"] == 0, lab.logs("p")
    said = lab.logs("p")
    assert "whole: True" in said
    assert "may mount: False" in said
    assert "mounts: []" in said
    told = checkpoint_end(lab)
    assert told["bootseer.form"] == "copy"
    assert "no mount here" in told["bootseer.why"]


def test_the_device_alone_is_of_no_use_as_a_host_path(lab: Lab, tmp_path: Path) -> None:
    """The container's device rules refuse to open it, even where mounting is allowed."""

    def bind_device(document: Any) -> None:
        allow_mounts(document)
        device = {"path": "/dev/fuse", "type": "CharDevice"}
        document["spec"]["volumes"].append({"name": "fuse", "hostPath": device})
        (main,) = document["spec"]["containers"]
        main["volumeMounts"].append({"name": "fuse", "mountPath": "/dev/fuse"})

    start_reader(lab, tmp_path, "auto", bind_device)
    assert lab.ended("p")["exitCode"] == 0, lab.logs("p")
    assert "whole: True" in lab.logs("p")
    told = checkpoint_end(lab)
    assert told["bootseer.form"] == "copy"
    assert "/dev/fuse may not be opened here" in told["bootseer.why"]


def test_a_privileged_pod_mounts_checkpoints_and_images(lab: Lab, tmp_path: Path) -> None:
    built = [sys.executable, "-m", "bootseer", "image", "build", BARE]
    lab.k8s.call_inside(*built, "--cache", str(tmp_path / "build"))
    start_reader(lab, tmp_path, "mount", use_images, tier="privileged")
    assert lab.ended("p")["exitCode"] == 0, lab.logs("p")
    said = lab.logs("p")
    assert "whole: True" in said
    assert MOUNTED in said
    assert checkpoint_end(lab)["bootseer.form"] == "mount"
    assert "image: root:x:0:0:root:/root:/bin/sh erofs" in said


def use_images(document: Any) -> None:
    """Let the job mount an image as well; the node's registry is on its loopback."""
    document["spec"]["hostNetwork"] = True
    (main,) = document["spec"]["containers"]
    main["command"][-1] += f"""
import os, subprocess
os.makedirs('/scratch/image')
bootseer = ['/opt/bootseer/bin/bootseer', 'image']
words = ['mount', '--cache', '/scratch/cache', '{BARE}', '/scratch/image']
subprocess.run([*bootseer, *words], check=True)
kind = re.search(r' /scratch/image .* - (\\S+) ', open('/proc/self/mountinfo').read()).group(1)
print('image:', open('/scratch/image/etc/passwd').read().strip(), kind)
subprocess.run([*bootseer, 'umount', '/scratch/image'], check=True)
"""
