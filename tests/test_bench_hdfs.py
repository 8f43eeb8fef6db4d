"""The HDFS benchmark runs to its end and finds the right bytes on every side; nothing is timed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import cores, harness, hdfs, hdfs_cases, hdfs_lab, hdfs_links
from tools import netlab
from tools.hdfs import cluster

QUICK = harness.Options(quick=True, runs=1)


@pytest.mark.root
@pytest.mark.debian("rclone")
@pytest.mark.slow
def test_every_side_reads_and_writes_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdfs, "QUICK_FILE_BYTES", 6 << 20)
    monkeypatch.setattr(hdfs_links, "TCP_SECONDS", 0.2)
    # To compile for a throughput that nobody measures takes longer than all else here.
    monkeypatch.setattr(cluster, "FULL_SPEED", cluster.QUICK_START)
    # Those left out differ from others in nothing but the reading program or a size.
    alike = {"mount cat", "mount torch.load", "mount torch.load mapped"}
    alike.add("memory of a file of 2 GiB")
    alike |= {name for name in hdfs_cases.CASES if name.endswith(hdfs_cases.APART)}
    names = [name for name in hdfs_cases.CASES if name not in alike]
    told: list[harness.Case] = []
    cases = hdfs.measure(QUICK, names, told.extend)
    assert sorted(c.case for c in told) == sorted(c.case for c in cases)
    for name in names:
        sides = {c.side: c.values for c in cases if c.case == name}
        assert harness.OURS in sides
        assert len(sides) >= 2
        assert ("rclone mount" in sides) == name.startswith("mount")
    assert "fsspec webhdfs" in {c.side for c in cases}


def test_jars_are_fetched_before_the_network_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without them, what is asked first decides whether they can be had at all."""
    asked = []

    @contextlib.contextmanager
    def empty_network() -> Iterator[None]:
        asked.append("network")
        raise RuntimeError("far enough")
        yield

    monkeypatch.setattr(hdfs.os, "geteuid", lambda: 0)
    monkeypatch.setattr(hdfs.jars, "jars_folder", lambda: asked.append("jars"))
    monkeypatch.setattr(hdfs, "own_network", empty_network)
    with pytest.raises(RuntimeError, match="far enough"):
        hdfs.measure(QUICK, ["striped read r1"])
    assert asked == ["jars", "network"]


@pytest.mark.root
def test_a_network_leaves_no_port_where_its_host_lives_on() -> None:
    """The kernel ends a namespace some time after the last process in it, and its devices then."""
    with netlab.own_network():
        with netlab.Network(2) as first:
            words = [*first.hosts[0].prefix, "sh", "-c", "echo inside; exec sleep 600"]
            living = subprocess.Popen(words, stdout=subprocess.PIPE)
            assert living.stdout is not None
            assert living.stdout.readline() == b"inside\n"
        try:
            with netlab.Network(2) as second:
                assert [host.address for host in second.hosts] == [h.address for h in first.hosts]
        finally:
            living.kill()
            living.communicate()


def test_cores_apart_are_told_apart() -> None:
    before = os.sched_getaffinity(0)
    near, far = cores.halves()
    assert set(near) | set(far) == before
    assert not set(near) & set(far)
    with cores.only_on(far):
        child = subprocess.run(["nproc"], capture_output=True, check=True, text=True)
        assert int(child.stdout) == len(far)
    assert os.sched_getaffinity(0) == before
    kind = hdfs_cases.CASES[f"mount dd{hdfs_cases.APART}"].kind
    assert kind.apart
    assert f"clients on {len(near)} cores, HDFS on {len(far)} others" in kind.conditions(1 << 20)


def test_other_bytes_than_the_source_has_are_an_error() -> None:
    content = hdfs_lab.Content(Path("data"), 1, "5a")
    done = hdfs_lab.Done('{"digest": "5b", "seconds": 1}', "", 1.0, 1.0, 1.0)
    with pytest.raises(RuntimeError, match="wrong bytes"):
        hdfs_lab.checked(done, content)


def test_a_case_measured_alone_takes_the_place_of_its_older_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    names = ["read", "read mapped", "write"]

    def put(*cases: tuple[str, float]) -> list[tuple[str, float]]:
        made = [harness.Case(case, "ours", "s", "lower", [value]) for case, value in cases]
        harness.keep("some", made, names=names, command="c")
        held = json.loads((tmp_path / "some.json").read_text())["cases"]
        return [(case["case"], case["values"][0]) for case in held]

    put(("write", 1.0), ("write CPU", 2.0))
    put(("read mapped", 3.0), ("read mapped CPU", 4.0))
    assert put(("read", 5.0), ("read CPU", 6.0)) == [
        ("read", 5.0),
        ("read CPU", 6.0),
        ("read mapped", 3.0),
        ("read mapped CPU", 4.0),
        ("write", 1.0),
        ("write CPU", 2.0),
    ]
    assert put(("read", 7.0))[:2] == [("read", 7.0), ("read mapped", 3.0)]
