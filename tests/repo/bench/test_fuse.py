"""The FUSE servers' benchmark still runs, on a small file and untimed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import harness
from bench.fuse import benchmark as fuse
from tests.support.mounts.fuse import own_mounts

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.debian("libfuse3-dev")]

C = {"ours", "C pread", "C mmap"}
SERVERS = C | {"pyfuse3", "mfusepy", "fusepy"}
BUFFERED, DIRECT = ["buffered 1", "buffered 4"], ["direct 1", "direct 4"]
RANDOM = ["random 4k x1", "random 4k x4"]


@pytest.fixture(autouse=True)
def mounted_apart() -> Iterator[None]:
    """A namespace that another test begins meanwhile would keep an image's server from ending."""
    with own_mounts():
        before = mounts()  # a bench that was killed leaves its own behind
        yield
        assert mounts() == before


def mounts() -> list[str]:
    lines = Path("/proc/thread-self/mounts").read_text().splitlines()
    return [line for line in lines if "bootseer-bench-" in line]


def test_every_case_has_every_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse, "QUICK_FILE_BYTES", 4 << 20)
    monkeypatch.setattr(fuse, "QUICK_READS", 50)
    found: dict[str, set[str]] = {}
    for case in fuse.run(harness.Options(quick=True, runs=1)):
        assert len(case.values) == 1
        found.setdefault(case.case, set()).add(case.side)
    for case in (*BUFFERED, *DIRECT, *RANDOM):
        servers = SERVERS | ({"rclone"} if case in BUFFERED else set())
        for suffix in ("", " CPU"):
            assert found[f"stripe mount {case}{suffix}"] == servers
            assert found[f"stripe mount plain file {case}{suffix}"] == C
    for case in (*BUFFERED, *RANDOM):
        for kind in ("image mount", "image mount served"):
            assert found[f"{kind} {case}"] == {"ours", "EROFS over C"}
    assert found["passthrough"] == {"ours", "raw file"}
    assert {case.removesuffix(" CPU") for case in found} == set(fuse.CASES)


def test_one_case_is_measured_alone_and_kept_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse, "QUICK_FILE_BYTES", 4 << 20)
    monkeypatch.setattr(fuse, "QUICK_READS", 50)
    kept: list[list[harness.Case]] = []
    case = "stripe mount plain file random 4k x4"
    found = fuse.measure(harness.Options(quick=True, runs=1), [case], kept.append)
    assert {each.case for each in found} == {case, f"{case} CPU"}
    assert kept == [found]


def test_a_server_that_does_not_mount_is_told(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="the server broken does not mount: no such tree"),
        fuse.served(tmp_path, "broken", ["sh", "-c", "echo no such tree; exit 1"]),
    ):
        pass


def test_the_reader_reads_each_share_once(tmp_path: Path) -> None:
    fuse.compile_programs(tmp_path)
    path = tmp_path / "file"
    path.write_bytes(bytes(3 << 20))
    for words in (["seq", "2", path], ["rand", "3", path, "7"]):
        done = subprocess.run([tmp_path / "reader", *words], capture_output=True, check=True)
        total, reads, _ = done.stdout.split()
        assert (int(total), int(reads)) == ((3 << 20, 3) if words[0] == "seq" else (21 * 4096, 21))
    assert subprocess.run([tmp_path / "reader", "seq", "1", tmp_path / "none"]).returncode == 1
