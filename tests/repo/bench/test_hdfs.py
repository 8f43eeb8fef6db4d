"""The HDFS benchmark runs to its end and finds the right bytes on every side; nothing is timed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import cores, harness
from bench.hdfs import benchmark as hdfs
from bench.hdfs import cases as hdfs_cases
from bench.hdfs import lab as hdfs_lab
from bench.hdfs import links as hdfs_links
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


def cores_of_a_child() -> str:
    """The processors of what is started now, in the form of our conditions."""
    told = subprocess.run(["grep", "Cpus_allowed_list", "/proc/self/status"], capture_output=True)
    listed = told.stdout.decode().split()[1].replace(",", ", ")
    return f"core{'' if listed.isdigit() else 's'} {listed}"


@pytest.mark.parametrize("apart", [True, False])
def test_cores_are_told_as_they_are_given(monkeypatch: pytest.MonkeyPatch, apart: bool) -> None:
    """By the bench's own way through a case; a fake in the servers' place sees where they run."""
    servers: list[str] = []

    def no_cluster(*_: object, **__: object) -> contextlib.nullcontext[None]:
        servers.append(cores_of_a_child())
        return contextlib.nullcontext()

    clients: list[str] = []

    def turn() -> hdfs_lab.Run:
        clients.append(cores_of_a_child())
        return hdfs_lab.Run(1.0)

    name = f"mount dd{hdfs_cases.APART}" if apart else "mount dd"
    no_network = contextlib.nullcontext(types.SimpleNamespace(hosts=[]))
    monkeypatch.setattr(hdfs_lab, "Network", lambda *_, **__: no_network)
    monkeypatch.setattr(hdfs_lab, "Cluster", no_cluster)
    monkeypatch.setattr(hdfs_lab, "senders", lambda _: contextlib.nullcontext())
    spec = dataclasses.replace(hdfs_cases.CASES[name], sides=lambda _: {harness.OURS: turn})
    monkeypatch.setitem(hdfs_cases.CASES, name, spec)
    before = os.sched_getaffinity(0)
    (case, *_) = hdfs._together(spec.kind, [name], QUICK, None)
    assert os.sched_getaffinity(0) == before
    split = f"clients on {clients[0]}, HDFS on {servers[0]}"
    split = split if apart and len(before) > 1 else "cores shared"
    links = "4 DataNodes; links 830 Mbit/s each; file 512 MiB"
    assert case.conditions == f"{links}; {split}; no agent"
    near, far = cores.halves()
    assert set(near) | set(far) == before
    assert not set(near) & set(far)


def test_each_case_tells_the_size_of_its_file() -> None:
    cases = hdfs_cases.CASES
    told = {name: spec.file_bytes(spec.kind.size_bytes) >> 20 for name, spec in cases.items()}
    assert told["mount plain file of one block"] == 128
    assert told["memory of a file of 0.5 GiB"] == 512
    assert told["memory of a file of 2 GiB"] == 2048
    assert told["mount read"] == 512


def test_cores_are_named_in_ranges() -> None:
    told = [hdfs_lab._cores(cpus) for cpus in ([3], [0, 1], [8, 0, 2, 1])]
    assert told == ["core 3", "cores 0-1", "cores 0-2, 8"]


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
