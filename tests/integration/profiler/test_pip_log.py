"""pip's log file and uv's output as sub-phases, from kept logs and from real runs."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.profiler.collect import pip_log
from tests.support.paths import DATA

pytestmark = pytest.mark.slow

LOG = DATA / "logs" / "pip.log"


def seconds(phases: list[pip_log.SubPhase], name: str) -> float:
    return sum(end - begin for one, begin, end, _ in phases if one.endswith(name)) / 1e9


def test_a_real_log_with_a_source_distribution() -> None:
    phases = pip_log.sub_phases(str(LOG))
    # 17.345 to 19.547, 19.549 to 19.774, 19.777 to 19.999, and the wheel 20.067 to 20.322
    assert seconds(phases, "build") == pytest.approx(2.904, abs=0.001)
    assert seconds(phases, "install") == pytest.approx(0.115, abs=0.001)
    downloads = [attributes for name, _, _, attributes in phases if name.endswith("download")]
    assert [one["bootseer.bytes"] for one in downloads] == [11_000, 25_000, 126_000]
    assert phases[-1][3]["log.packages"] == 3
    whole = phases[-1][2] - phases[0][1]
    assert sum(end - begin for _, begin, end, _ in phases) == whole


def test_phases_neither_overlap_nor_leave_gaps() -> None:
    phases = pip_log.sub_phases(str(LOG))
    for former, latter in itertools.pairwise(phases):
        assert former[2] == latter[1]
        assert former[0] != latter[0] or former[3] != latter[3]


@given(cut=st.integers(0, 109), drop=st.integers(1, 7))
def test_any_part_of_a_log_gives_sane_phases(cut: int, drop: int) -> None:
    lines = LOG.read_text().splitlines()
    for part in (lines[:cut], lines[cut:], lines[::drop]):
        phases = pip_log.parse_log(part)
        assert all(begin <= end for _, begin, end, _ in phases)
        assert all(a[2] <= b[1] for a, b in itertools.pairwise(phases))


def test_torn_binary_and_empty_logs(tmp_path: Path) -> None:
    path = tmp_path / "pip.log"
    for data in (b"", b"\x00\xff\n" * 50, LOG.read_bytes()[:777], b"no stamps\n"):
        path.write_bytes(data)
        assert isinstance(pip_log.sub_phases(str(path)), list)
    with pytest.raises(FileNotFoundError):
        pip_log.sub_phases(str(tmp_path / "none"))


def test_errors_are_on_the_phase_that_failed() -> None:
    phases = pip_log.parse_log(
        [
            "2026-01-01T00:00:00,000 Collecting nosuch",
            "2026-01-01T00:00:02,000 ERROR: No matching distribution found for nosuch",
            "2026-01-01T00:00:02,100 Exception information:",
        ]
    )
    [(name, begin, end, attributes)] = phases
    assert name == "deps.install.resolve"
    assert end - begin == 2_100_000_000
    assert attributes["error.type"] == "pip"
    assert "nosuch" in attributes["log.message"]


def test_metadata_is_resolving_and_wheels_are_downloads() -> None:
    phases = pip_log.parse_log(
        [
            "2026-01-01T00:00:00,000 Collecting torch",
            "2026-01-01T00:00:01,000   Downloading torch-2-py3-none-any.whl.metadata (26 kB)",
            "2026-01-01T00:00:02,000 Downloading torch-2-py3-none-any.whl (797.2 MB)",
            "2026-01-01T00:00:09,000    ━━━━━━━━━━━━━━━━━━━━ 797.2/797.2 MB 99.9 MB/s",
            "2026-01-01T00:00:09,500 Installing collected packages: torch",
            "2026-01-01T00:00:12,500 Successfully installed torch-2",
            "2026-01-01T00:00:19,500 Remote version of pip: 26",
        ]
    )
    assert [(name[13:], (end - begin) / 1e9) for name, begin, end, _ in phases] == [
        ("resolve", 2.0),
        ("download", 7.5),
        ("install", 3.0),
    ]
    assert phases[1][3]["bootseer.bytes"] == 797_200_000


@pytest.mark.parametrize("size", ["1.2.3 MB", "." + " MB", "9" * 5000 + " kB"])
def test_a_size_that_is_none_costs_no_phase(size: str) -> None:
    phases = pip_log.parse_log(
        [
            "2026-01-01T00:00:00,000 Collecting x",
            f"2026-01-01T00:00:02,000 Downloading x-1-py3-none-any.whl ({size})",
            "2026-01-01T00:00:09,500 Installing collected packages: x",
            "2026-01-01T00:00:12,500 Successfully installed x-1",
        ]
    )
    assert [name[13:] for name, *_ in phases] == ["resolve", "install"]


def make_project(root: Path) -> Path:
    project = root / "tiny"
    project.mkdir()
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "tiny"\nversion = "1"\n'
    )
    (project / "backend.py").write_text(
        "import os, time, zipfile\n"
        "def build_wheel(directory, config_settings=None, metadata_directory=None):\n"
        "    time.sleep(0.3)\n"
        "    name = 'tiny-1-py3-none-any.whl'\n"
        "    with zipfile.ZipFile(os.path.join(directory, name), 'w') as z:\n"
        "        z.writestr('tiny.py', '')\n"
        "        z.writestr('tiny-1.dist-info/METADATA', 'Metadata-Version: 2.1\\nName: tiny\\n'\n"
        "                   'Version: 1\\n')\n"
        "        z.writestr('tiny-1.dist-info/WHEEL', 'Wheel-Version: 1.0\\n'\n"
        "                   'Generator: t\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')\n"
        "        z.writestr('tiny-1.dist-info/RECORD', '')\n"
        "    return name\n"
    )
    return project


def test_a_real_pip_run(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    log = tmp_path / "pip.log"
    began = time.time_ns()
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--no-index", "--no-deps"),
            *("--target", str(tmp_path / "out"), str(project)),
        ],
        env={**os.environ, "PIP_LOG": str(log), "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        check=True,
        capture_output=True,
    )
    ended = time.time_ns()
    phases = pip_log.sub_phases(str(log))
    names = {name[13:] for name, _, _, _ in phases}
    assert {"resolve", "build", "install"} <= names
    assert seconds(phases, "build") >= 0.3
    slack = 2_000_000  # pip writes milliseconds
    assert began - slack <= phases[0][1]
    assert phases[-1][2] <= ended + slack
