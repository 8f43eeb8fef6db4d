"""The event writer on a full disk."""

from __future__ import annotations

import json

import pytest

from bootseer import events
from tests.support.mounts.tmpfs import tmpfs


@pytest.mark.root
@pytest.mark.parametrize("shared", [False, True])
def test_a_full_disk_cuts_one_event_and_harms_no_other(tmp_path, shared):
    with tmpfs(tmp_path / "disk", "64k") as disk:
        target = str(disk / "all.jsonl") if shared else str(disk)
        with events.open_writer(target, {}) as writer:
            ballast = disk / "ballast"
            writer.point("before")
            size = 4096 * 12
            with ballast.open("wb", buffering=0) as file:
                file.write(b"x" * size)
            for number in range(200):
                writer.point("filling", attributes={"number": number, "text": "y" * 300})
            ballast.unlink()
            other = events.open_writer(target, {})
            other.point("other")
            writer.point("after")
            other.close()
        torn, good = 0, []
        for path in disk.glob("*.jsonl"):
            for line in path.read_bytes().splitlines():
                try:
                    good.append(json.loads(line)["name"])
                except ValueError:
                    torn += 1
        assert torn <= 1
        assert {"before", "filling", "other", "after"} <= set(good)
        assert good.count("filling") < 200
