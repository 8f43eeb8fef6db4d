"""The benchmark of file mode still runs: a container of one program, its wrapper the pods' own."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bench import harness
from bench.image.lab import MARK
from bench.image_files import benchmark as image_files
from tools.images import real
from tools.images.layout import Image, Layer, write_layout
from tools.images.members import directory, file

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.debian("busybox-static")]


def test_a_container_reads_ahead_and_is_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    members = [
        *(directory(name) for name in ("bin", "dev", "etc", "opt", "proc", "run", "sys", "tmp")),
        file("bin/busybox", Path("/bin/busybox"), mode=0o755),
    ]
    made = write_layout(tmp_path / "layout", Image([Layer(members)]), tag="tiny")
    monkeypatch.setattr(real, "image", lambda name: made)
    box, nap_s = "/bin/busybox", 0.3
    script = f"{box} sleep {nap_s}; echo {MARK.decode()}; {box} sleep {nap_s}"
    words = [box, "sh", "-c", script]
    monkeypatch.setattr(image_files, "_program", lambda work: words)
    # Dropping the page cache would slow down every test beside this one.
    monkeypatch.setattr(image_files, "cold", lambda here: None)
    began = time.perf_counter()
    cases = image_files.run(harness.Options(quick=True, runs=1))
    wall_s = time.perf_counter() - began
    assert {(case.case, case.side): len(case.values) for case in cases} == {
        ("numpy+pyarrow cold overlayfs", "ours"): 1,
        ("numpy+pyarrow cold overlayfs", "plain"): 1,
        ("numpy+pyarrow cold overlayfs", "start alone"): 1,
        ("numpy+pyarrow cold overlayfs", "warm"): 1,
        ("numpy+pyarrow recording", "ours"): 3,
        ("numpy+pyarrow recording", "not recording"): 3,
    }
    values = [value for case in cases for value in case.values]
    assert min(values) > nap_s
    assert sum(value + nap_s for value in values) < wall_s  # the second nap is none of theirs
