"""Containers of one image that start at the same moment on a node: each block comes once."""

from __future__ import annotations

import hashlib
import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.storage.oci import media_types
from tests.support.labs.registry_proxy import Gate
from tests.support.mounts.images import Mounts, mounts_below, publish, some_files
from tests.support.paths import ROOT

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.debian("docker-registry")]

TOGETHER = 8
FILES = some_files(24, 400_000)
HOT = sorted(FILES)[:6]
# A slow machine would have requests doubled after a second: none of that here.
CONTAINER = """
import dataclasses, hashlib, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from bootseer.blocks import settings
settings.DEFAULTS = dataclasses.replace(settings.DEFAULTS, hedge_s=0)
from tests.support.mounts.images import Mounts, tree_of
mounted = Mounts(Path(sys.argv[2])).mount(sys.argv[3], directory=sys.argv[4])
tree = repr(sorted(tree_of(sys.argv[4]).items()))
print(mounted.shared, hashlib.sha256(tree.encode()).hexdigest())
"""


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    with mounts_below(tmp_path) as made:
        yield made


def test_no_byte_of_an_image_is_served_twice(mounts: Mounts, registry: Any, tmp_path: Path) -> None:
    """The proxy is a fake that counts: the registry's own log knows no ranges."""
    image = publish(
        registry.reference("together/one", "1"), FILES, tmp_path / "image", hot={"": HOT}
    )
    gate = Gate(registry.host)
    with gate:
        ref = image.ref.replace(registry.host, gate.authority)
        children = []
        for number in range(TOGETHER):
            directory = mounts.folder / f"together{number}"
            directory.mkdir()
            words = [str(ROOT), str(mounts.folder), ref, str(directory)]
            children.append(
                subprocess.Popen(
                    [sys.executable, "-c", CONTAINER, *words], stdout=subprocess.PIPE, text=True
                )
            )
        said = [child.communicate(timeout=240)[0].split() for child in children]
        right = hashlib.sha256(repr(sorted(FILES.items())).encode()).hexdigest()
        assert sorted(said) == [["False", right]] + [["True", right]] * (TOGETHER - 1)
        data = gate.asked(f"/blobs/{image.blobs[media_types.DATA]}")
        ranges = sorted(request.span for request in data)
        assert ranges
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
        assert len(gate.asked(f"/blobs/{image.packs['']}")) == 1
        for number in range(TOGETHER):
            mounts.umount(str(mounts.folder / f"together{number}"))
        assert mounts.gone()
