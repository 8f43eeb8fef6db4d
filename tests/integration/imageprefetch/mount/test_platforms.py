"""An image that has nothing for this machine's platform."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bootseer.errors import NotSupportedError
from bootseer.events.writer import NullWriter
from bootseer.imageprefetch.snapshotter.lazy_mounter import BlockImageMounter, LazySettings
from bootseer.imageprefetch.snapshotter.types import StockImage
from bootseer.storage.oci.manifest import Descriptor, Platform, index_bytes
from bootseer.storage.oci.media_types import OCI_INDEX, OCI_MANIFEST
from bootseer.storage.oci.open import open_repository
from tests.support.labs.snapshotter_client import Running, remote_labels
from tests.support.mounts.images import publish

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.debian("docker-registry")]


@pytest.fixture
def foreign(registry: Any, tmp_path: Path) -> str:
    """A tag of an index whose one image is another machine's."""
    ref: str = registry.reference("foreign/image", "1")
    made = publish(ref, {"a": b"a"}, tmp_path / "made", block_image=False)
    repository, _ = open_repository(ref, push=True)
    with repository:
        size_bytes = len(repository.image(made.digest)[1].raw)
        one = Descriptor(OCI_MANIFEST, made.digest, size_bytes)
        other = dataclasses.replace(one, platform=Platform("linux", "riscv64"))
        repository.push_manifest(index_bytes([other]), OCI_INDEX, "1")
    return ref


def test_a_mount_names_the_platforms_there_are(foreign: str, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    places = ["--cache", str(tmp_path / "cache"), "--runtime", str(tmp_path / "runtime")]
    words = ["image", "mount", foreign, str(tmp_path / "tree"), *places]
    command = [sys.executable, "-m", "bootseer", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == NotSupportedError.exit_code, done.stderr
    assert "linux/riscv64" in done.stderr


def test_the_snapshotter_hands_it_to_the_plain_way(foreign: str, tmp_path: Path) -> None:
    settings = LazySettings(cache=str(tmp_path / "cache"), runtime=str(tmp_path / "runtime"))
    with BlockImageMounter(settings) as mounter:
        running = Running(tmp_path, mounter, NullWriter())
        try:
            labels = remote_labels("chain", StockImage("", foreign, ("sha256:" + "0" * 64,)), 0)
            assert running.client.prepare("extract", "", labels)
            (said,) = [line for line in running.said if "handed to the plain way" in line]
            assert "linux/riscv64" in said
        finally:
            running.close()
