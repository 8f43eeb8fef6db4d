"""The laboratory of images itself: hand-made images, a real registry, a podman of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.samples.images import (
    Image,
    Layer,
    Repeated,
    directory,
    file,
    hardlink,
    opaque,
    symlink,
    whiteout,
    write_docker_archive,
    write_layout,
)
from tools.podman import Podman, mounts_below

pytestmark = [pytest.mark.slow]
CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")
BUSYBOX = Path("/bin/busybox")


def layers() -> list[Layer]:
    """Two layers with what is hard to unpack."""
    below = [
        directory("bin"),
        file("bin/busybox", BUSYBOX, mode=0o755),
        symlink("bin/sh", "busybox"),
        directory("gone"),
        file("gone/a", b"a"),
        directory("hidden"),
        file("hidden/old", b"old"),
        file("capable", b"c", mode=0o4755, xattrs={"security.capability": CAPABILITY}),
        file(b"caf\xe9", b"latin", uid=12, gid=34, mtime_s=1_600_000_000.25),
    ]
    above = [
        whiteout("gone/a"),
        opaque("hidden"),
        file("hidden/new", Repeated(b"new ", 3_000_001)),
        hardlink("hidden/same", "hidden/new"),
    ]
    return [Layer(below), Layer(above, compression="zstd")]


@pytest.mark.debian("skopeo")
def test_a_layout_is_pushed_as_it_is(tmp_path: Path, registry: Any) -> None:
    made = write_layout(tmp_path, [Image(layers()), Image([[]], architecture="arm64")], tag="1")
    name = registry.push(made.source, "lab/layout", "1")
    assert name == f"{registry.host}/lab/layout:1"
    assert json.loads(registry.blob_path(made.digest).read_bytes())["manifests"][1]["platform"] == {
        "os": "linux",
        "architecture": "arm64",
    }
    for digest in made.manifest_digests:
        for layer in json.loads(registry.blob_path(digest).read_bytes())["layers"]:
            stored = registry.blob_path(layer["digest"]).read_bytes()
            assert stored == (tmp_path / "blobs/sha256" / layer["digest"][7:]).read_bytes()
    assert any(r.method == "PUT" and r.status == 201 for r in registry.requests())


@pytest.mark.root
@pytest.mark.debian("podman")
def test_podman_unpacks_and_runs_what_is_pushed(tmp_path: Path, registry: Any, podman: Any) -> None:
    made = write_layout(tmp_path, Image(layers(), config={"Cmd": ["/bin/sh"]}))
    name = registry.push(made.source, "lab/run")
    podman.pull(name)
    assert podman.run(name, "/bin/sh", "-c", "echo said").strip() == "said"
    with podman.mounted(name) as tree:
        assert not (tree / "gone/a").exists()
        assert [p.name for p in sorted((tree / "hidden").iterdir())] == ["new", "same"]
        assert (tree / "hidden/new").stat().st_nlink == 2
        assert (tree / "hidden/new").read_bytes() == b"".join(Repeated(b"new ", 3_000_001).pieces())
        latin = os.stat(os.fsencode(tree) + b"/caf\xe9")
        assert (latin.st_uid, latin.st_gid, latin.st_mtime_ns) == (
            12,
            34,
            1_600_000_000_250_000_000,
        )
        assert os.getxattr(tree / "capable", "security.capability") == CAPABILITY
        assert (tree / "capable").stat().st_mode & 0o7777 == 0o4755
        assert podman.run_rootfs(tree, "/bin/sh", "-c", "echo x > /y; cat /y").strip() == "x"
    assert not (tree / "y").exists()
    with podman.service() as url:
        import docker

        client = docker.DockerClient(base_url=url)
        try:
            assert client.ping()
            assert name in [tag for image in client.images.list() for tag in image.tags]
        finally:
            client.close()


@pytest.mark.root
@pytest.mark.debian("podman")
def test_podman_leaves_nothing(tmp_path: Path, registry: Any) -> None:
    made = write_layout(tmp_path / "layout", Image(layers()))
    registry.push(made.source, "lab/clean")
    folder = Path(tempfile.mkdtemp(prefix="podman-"))
    with Podman(folder, trusted=[registry.host]) as podman:
        image = podman.pull(f"{registry.host}/lab/clean:latest")
        podman("run", "--detach", image, "/bin/sh", "-c", "sleep 1000")
        podman("image", "mount", image)
        assert mounts_below(folder)
    assert not folder.exists()
    assert not mounts_below(folder)


@pytest.mark.debian("docker-registry")
def test_a_registry_with_login_and_certificate(tmp_path: Path, own_registry: Any) -> None:
    made = write_layout(tmp_path, Image(layers()))
    registry = own_registry(users={"bob": "open-sesame"}, tls=True)
    registry.push(made.source, "private")
    assert registry.auth_json()["auths"][registry.host]["auth"] == "Ym9iOm9wZW4tc2VzYW1l"
    registry.users["bob"] = "wrong"
    with pytest.raises(RuntimeError, match=r"401|unauthorized|authentication required"):
        registry.push(made.source, "private")


@pytest.mark.debian("docker-registry")
def test_a_registry_takes_no_settings_from_container_tools(
    own_registry: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """docs/registries.md recommends this variable; a registry took it for a way to log in."""
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))
    with contextlib.closing(urllib.request.urlopen(f"http://{own_registry().host}/v2/")) as answer:
        assert answer.status == 200


def test_a_registry_comes_back_at_its_address(tmp_path: Path, own_registry: Any) -> None:
    registry = own_registry()
    made = write_layout(tmp_path, Image(layers()))
    registry.push(made.source, "stays")
    host = registry.host
    registry.restart()
    assert registry.host == host
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{registry.url}/v2/stays/tags/list", timeout=30) as answer:
        assert json.load(answer)["tags"] == ["latest"]
    registry.stop()
    with pytest.raises(OSError, match="refused"):
        opener.open(f"{registry.url}/v2/", timeout=30)


@pytest.mark.debian("skopeo")
def test_a_docker_archive_is_one(tmp_path: Path) -> None:
    path = tmp_path / "saved.tar"
    image = write_docker_archive(path, Image(layers(), config={"Cmd": ["/bin/sh"]}))
    done = subprocess.run(
        ["skopeo", "--insecure-policy", "inspect", "--config", f"docker-archive:{path}"],
        capture_output=True,
        check=True,
    )
    assert json.loads(done.stdout)["config"]["Cmd"] == ["/bin/sh"]
    assert len(json.loads(done.stdout)["rootfs"]["diff_ids"]) == 2
    assert image.startswith("sha256:")
