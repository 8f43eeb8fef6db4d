"""What of an install's changes is published, and how it is described."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bootseer.entrypoint.container import publish_layer
from bootseer.entrypoint.container.left_out import LeftOut
from bootseer.entrypoint.container.publish_layer import make_image
from bootseer.errors import NoSpaceError
from bootseer.imageprefetch.image_build.overlay_layer import LayerFile
from bootseer.storage.oci.manifest import digest_of, parse_manifest


@pytest.mark.parametrize(
    ("path", "is_left_out"),
    [
        ("/run/x", True),
        ("/runx", False),
        ("/tmp/x", False),
        ("/etc/hosts", True),
        ("/var/cache/apt/archives", True),
        ("/data", True),
        ("/usr/lib/python3/site-packages/numpy", False),
        ("/root/.cache/pip", True),
        ("/root/.cache", False),
        ("/root/.cache/huggingface", False),
        ("/usr/x.pyc", True),
        ("/opt/secret", True),
        ("/opt/secrets", False),
    ],
)
def test_caches_volumes_and_patterns_are_left_out(path: str, is_left_out: bool) -> None:
    assert LeftOut(["/data"], ["*.pyc", "/opt/secret"])(path) is is_left_out


@pytest.mark.parametrize(
    ("pins", "is_exact"),
    [
        ({"numpy": "2.0", "six": "1"}, True),
        ({"numpy": "2.0"}, False),  # six came with it, in whatever version was the newest
        ({"numpy": "2.1", "six": "1"}, False),
        ({}, False),
    ],
)
def test_a_layer_is_exact_where_all_that_came_was_named(
    tmp_path: Path, pins: dict[str, str], is_exact: bool
) -> None:
    for name in ("numpy-2.0", "six-1.0", "pip-23"):
        (tmp_path / f"usr/lib/{name}.dist-info").mkdir(parents=True)
    assert publish_layer._is_exact(str(tmp_path), pins) is is_exact


def test_a_layer_that_does_not_fit_beside_the_job_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"x")
    publish_layer._check_room(str(tmp_path), str(tmp_path))
    monkeypatch.setattr(publish_layer, "SPARE_BYTES", 1 << 60)
    with pytest.raises(NoSpaceError, match="make room there"):
        publish_layer._check_room(str(tmp_path), str(tmp_path))


def test_a_layer_is_an_image_of_its_base_images_platform() -> None:
    layer = LayerFile("/f", "sha256:" + "a" * 64, "sha256:" + "b" * 64, 123, 4)
    base = {"os": "linux", "architecture": "arm64", "variant": "v8", "config": {"User": "x"}}
    raw_config, raw = make_image(layer, base, "sha256:" + "c" * 64, ["pip", "install", "x"])
    config, manifest = json.loads(raw_config), parse_manifest(raw)
    assert (config["architecture"], config["variant"], config["config"]) == ("arm64", "v8", {})
    assert config["rootfs"] == {"type": "layers", "diff_ids": [layer.diff_id]}
    assert config["history"][0]["created_by"] == "pip install x"
    assert [one.digest for one in manifest.layers] == [layer.digest]
    assert manifest.config.digest == digest_of(raw_config)
