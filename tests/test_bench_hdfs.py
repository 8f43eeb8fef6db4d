"""The HDFS benchmark runs to its end and finds the right bytes on every side; nothing is timed."""

from __future__ import annotations

import pytest

from bench import harness, hdfs, hdfs_links


@pytest.mark.root
@pytest.mark.debian("rclone")
@pytest.mark.slow
def test_every_side_reads_and_writes_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdfs, "QUICK_FILE_BYTES", 6 << 20)
    monkeypatch.setattr(hdfs_links, "TCP_SECONDS", 0.2)
    cases = hdfs.run(harness.Options(quick=True, runs=1))
    names = ("striped read r1", "plain read r3", "striped write r1", "mount read")
    for name in names:
        sides = {c.side: c.values for c in cases if c.case == name}
        assert sides[harness.OURS][0] > 0
        assert len(sides) >= 3
    assert {"rclone mount", "fsspec webhdfs"} <= {c.side for c in cases}
