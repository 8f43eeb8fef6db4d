"""What bootseer adds to a pod, and how fast manifests are injected.

The payload of the init container's image is unpacked below an empty root, and everything runs
there by chroot: no Python, no C library but ours, as in a bare image. `wrapper` is the time from
exec to the end of a program that does nothing; `init` the copy into an emptyDir (on tmpfs, and on
an ext4 of its own, whose journal nobody else's syncs hold up) with the page cache warm. Needs
root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench import harness
from tools.archives import extract_all

MEASURES = ("bootseer", "scripts", "tools/initimage", "bench/k8s.py")  # all of it is in the image
POD = """\
apiVersion: v1
kind: Pod
metadata:
  name: pod-{number}
  labels: {{app: train, index: "{number}"}}
spec:
  containers:
  # the job
  - name: main
    image: registry.example/train:1
    command: [torchrun, --nnodes=4, train.py]
    env:
    - name: A
      value: "1"
    resources:
      limits:
        nvidia.com/gpu: 8
  volumes: []
"""
MANIFEST_BYTES = 5_000_000


def run(options: harness.Options) -> list[harness.Case]:
    """Measure image size, wrapper, init container and injection."""
    from tools.initimage.__main__ import build, interpreter_bytes

    with tempfile.TemporaryDirectory(prefix="bench-k8s-") as place:
        image = Path(place) / "init.tar"
        written = build(image, "bootseer-init:bench")
        root = Path(place) / "root"
        _unpack(image, root)
        cases = [
            harness.Case("init image", "ours", "MB", "lower", [written.size_bytes / 1e6]),
            harness.Case(
                "init image without interpreter",
                "ours",
                "MB",
                "lower",
                [(written.size_bytes - interpreter_bytes()) / 1e6],
            ),
        ]
        cases += _init(root, Path(place), options)
        cases += _wrapper(root, options)
    cases = harness.under("no cluster: an unpacked root, entered by chroot", cases)
    return cases + _inject(options)


def _unpack(image: Path, root: Path) -> None:
    root.mkdir()
    with tarfile.open(image) as archive:
        for member in archive.getmembers():
            file = archive.extractfile(member)
            if file is not None and file.read(2) == b"\x1f\x8b":
                file.seek(0)
                with tarfile.open(fileobj=file, mode="r:gz") as layer:
                    extract_all(layer, root)
    for name in ("opt/bootseer", "proc", "dev", "tmp"):
        (root / name).mkdir(parents=True, exist_ok=True)


def _seconds(root: Path, *command: str) -> float:
    begun = time.perf_counter()
    pid = os.posix_spawn("/usr/sbin/chroot", ["chroot", str(root), *command], {"HOME": "/tmp"})
    _, status = os.waitpid(pid, 0)
    spent_s = time.perf_counter() - begun
    if status:
        raise RuntimeError(f"{command} failed with status {status}")
    return spent_s


def _init(root: Path, place: Path, options: harness.Options) -> list[harness.Case]:
    words = ("/payload/bin/busybox", "sh", "/payload/install.sh", "install", "/opt/bootseer")
    home = root / "opt/bootseer"

    def copy() -> float:
        return _seconds(root, *words)

    disk = place / "disk"
    with disk.open("wb") as file:
        file.truncate(512 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-E", "lazy_itable_init=0", str(disk)], check=True)

    def on(*mount: str) -> float:
        subprocess.run(["mount", *mount, str(home)], check=True)
        try:
            for path in home.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            subprocess.run(["sync", "-f", str(home)], check=True)
            return copy()
        finally:
            subprocess.run(["umount", str(home)], check=True)

    def on_disk() -> float:
        return on("-o", "loop", str(disk))

    def on_tmpfs() -> float:
        return on("-t", "tmpfs", "none")

    sides: dict[str, Callable[[], float]] = {"ours": on_disk, "ours on tmpfs": on_tmpfs}
    values = harness.interleave(sides, rounds=options.runs)
    copy()  # the wrapper is measured from here
    assert place.is_dir()
    conditions = "page cache warm"
    return harness.cases_of("init container", values, unit="s", conditions=conditions)


def _wrapper(root: Path, options: harness.Options) -> list[harness.Case]:
    true = ("/payload/bin/busybox", "true")
    launcher = "/opt/bootseer/bin/bootseer"
    sides: dict[str, Callable[[], float]] = {
        "ours": lambda: _seconds(root, launcher, "run", "--", *true),
        "ours start": lambda: _seconds(root, launcher, "start", "--", *true),
        "plain exec": lambda: _seconds(root, *true),
    }
    values = harness.interleave(sides, rounds=options.runs * 4)
    conditions = "page cache warm"
    cases = harness.cases_of("wrapper in a pod", values, unit="s", conditions=conditions)
    for side in ("ours", "ours start"):
        pairs = zip(values[side], values["plain exec"], strict=True)
        added = [(ours - plain) * 1e3 for ours, plain in pairs]
        cases.append(harness.Case("added before exec", side, "ms", "lower", added))
    return cases


def _inject(options: harness.Options) -> list[harness.Case]:
    from bootseer.kubernetes import inject, manifest_text, uninject
    from bootseer.kubernetes.options import Options

    size = MANIFEST_BYTES // (10 if options.quick else 1)
    count = size // len(POD)
    raw = "---\n".join(POD.format(number=number) for number in range(count))
    text = manifest_text.decode(raw.encode(), "bench")
    done = inject.inject(text, Options())
    assert not done.refusals
    injected = manifest_text.decode(done.raw.encode(), "bench")
    assert uninject.uninject(injected) == raw

    def timed(call: Callable[[], object]) -> float:
        begun = time.perf_counter()
        call()
        return time.perf_counter() - begun

    values = harness.interleave(
        {
            "ours": lambda: timed(lambda: inject.inject(text, Options())),
            "ours, uninject": lambda: timed(lambda: uninject.uninject(injected)),
        },
        rounds=options.runs,
    )
    conditions = "called in this process, which is warm"
    name = f"inject {len(raw) / 1e6:.1f} MB"
    return harness.cases_of(name, values, unit="s", conditions=conditions)
