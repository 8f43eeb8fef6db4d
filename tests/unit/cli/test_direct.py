"""What `image run` tells of how its images were mounted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bootseer.agent.client import LOST_TEXT
from bootseer.cli.image import direct
from bootseer.imageprefetch.image_cache import BLOCKS
from bootseer.imageprefetch.mount import complete_mount
from bootseer.imageprefetch.mount.mount import MountedImage
from bootseer.imageprefetch.mount.settings import MountSettings


@pytest.mark.parametrize(("is_lost", "notes"), [(True, (LOST_TEXT, "own")), (False, ("own",))])
def test_that_the_agent_was_lost_is_told_of_a_complete_image_too(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_lost: bool,
    notes: tuple[str, ...],
) -> None:
    """Injected: an agent that is lost while it mounts, and a mount that needs no privilege."""
    (tmp_path / BLOCKS).mkdir()
    made = MountedImage("/tree", "sha256:x", "", False, False, "", 0, False, True, ("own",))
    kept: list[Any] = []
    monkeypatch.setattr(direct, "_mount_by_agent", lambda _: (None, is_lost))
    monkeypatch.setattr(complete_mount, "mount_complete", lambda *_, **__: (made, "kept"))
    settings = MountSettings(ref="r.example/x:1", directory="/tree", cache=str(tmp_path))
    assert direct._mount(settings, None, kept).notes == notes
    assert kept == ["kept"]
