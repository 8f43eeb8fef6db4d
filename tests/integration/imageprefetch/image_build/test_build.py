"""`bootseer image build` with a real registry: once, resumed, the same everywhere, or refused."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bootseer.blockimage import artifact, filemap
from bootseer.blockimage.filemap import FileMap
from bootseer.cli import root
from bootseer.errors import (
    BusyError,
    CorruptDataError,
    NoSpaceError,
    NotFoundError,
    NotSupportedError,
    UsageError,
)
from bootseer.imageprefetch.image_build.builder import BuildReport, BuildSettings, build_image
from bootseer.imageprefetch.image_build.flatten import Limits
from bootseer.storage.oci import media_types
from bootseer.storage.oci.open import open_repository
from tests.support.mounts.tmpfs import tmpfs
from tests.support.samples.images import (
    Image,
    Layer,
    device,
    directory,
    file,
    whiteout,
    write_docker_archive,
    write_layout,
)

pytestmark = [pytest.mark.slow, pytest.mark.debian("docker-registry")]

LAYERS = [
    [directory("app"), file("app/run", b"run" * 5000, mode=0o755), file("app/old", b"1")],
    [whiteout("app/old"), file("app/new", os.urandom(300_000))],
]


def pushed(registry: Any, folder: Path, name: str, image: Image | None = None) -> str:
    made = write_layout(folder / "layout", image or Image(LAYERS), tag="1")
    options = "--preserve-digests"  # skopeo compresses layers otherwise
    return str(registry.push(made.source, f"imagebuild/{name}", "1", options=options))


def build(ref: str, folder: Path, **settings: Any) -> BuildReport:
    return build_image(BuildSettings(ref=ref, cache_dir=str(folder / "cache"), **settings))


def test_a_block_image_refers_to_its_image_and_is_built_once(registry: Any, tmp_path: Path) -> None:
    ref = pushed(registry, tmp_path, "once")
    with open_repository(ref)[0] as repository:
        before = repository.resolve("1")
        first = build(ref, tmp_path)
        again = build(ref, tmp_path / "another node")
        assert repository.resolve("1") == before
        assert first.subject == before.digest
        assert (first.built, again.built) == (True, False)
        assert again.block_image == first.block_image
        found = repository.referrers(before.digest, media_types.BLOCK_IMAGE)
        assert [one.digest for one in found] == [first.block_image]
        manifest = repository.manifest(first.block_image)
        kinds = [layer.media_type for layer in manifest.layers]
        assert kinds == [media_types.META, media_types.TABLE, media_types.DATA, media_types.FILES]
        about = json.loads(repository.blob(manifest.config, limit_bytes=1 << 20))
        files = files_of(repository, manifest)
    assert about["entries"] == first.entries == 4
    assert [file.path for file in files.files] == [b"app/new", b"app/run"]
    held = os.listdir(tmp_path / "cache/images/build")
    assert all(name.endswith(".lock") for name in held)  # nothing is left of a finished build


def test_a_block_image_that_lacks_parts_is_built_again(
    own_registry: Callable[..., Any], tmp_path: Path
) -> None:
    registry = own_registry()
    ref = pushed(registry, tmp_path, "parts")
    first = build(ref, tmp_path)
    with open_repository(ref)[0] as repository:
        data = repository.manifest(first.block_image).layers[2].digest
    stored = registry.blob_path(data)
    stored.unlink()  # what a registry's own garbage collection may do
    registry.restart()  # it remembers which blobs it has
    again = build(ref, tmp_path)
    assert (again.built, again.block_image) == (True, first.block_image)
    assert stored.exists()


def files_of(repository: Any, manifest: Any) -> FileMap:
    layer = manifest.layer(media_types.FILES)
    return filemap.parse(repository.blob(layer, limit_bytes=1 << 20))


def test_the_same_image_gives_the_same_block_image_everywhere(
    registry: Any, tmp_path: Path
) -> None:
    ref = pushed(registry, tmp_path, "same")
    with ThreadPoolExecutor(3) as pool:
        reports = list(
            pool.map(lambda n: build(ref, tmp_path / str(n), rebuild=True, threads=n), (1, 2, 4))
        )
    assert len({report.block_image for report in reports}) == 1
    with open_repository(ref)[0] as repository:
        assert len(repository.referrers(reports[0].subject, media_types.BLOCK_IMAGE)) == 1


def test_two_builds_on_a_node_do_the_work_once(registry: Any, tmp_path: Path) -> None:
    ref = pushed(registry, tmp_path, "two")
    with ThreadPoolExecutor(4) as pool:
        reports = list(pool.map(lambda _: build(ref, tmp_path), range(4)))
    assert sorted(report.built for report in reports) == [False, False, False, True]
    assert len({report.block_image for report in reports}) == 1


def test_of_several_nodes_that_share_a_lease_one_builds(registry: Any, tmp_path: Path) -> None:
    ref = pushed(registry, tmp_path, "lease")
    lease = str(tmp_path / "shared")
    with ThreadPoolExecutor(3) as pool:
        reports = list(pool.map(lambda n: build(ref, tmp_path / str(n), lease=lease), range(3)))
    assert sorted(report.built for report in reports) == [False, False, True]
    with pytest.raises(UsageError, match="--to"):
        build(ref, tmp_path, to=ref)


def test_what_old_builds_left_goes(tmp_path: Path) -> None:
    write_layout(tmp_path / "layout", Image(LAYERS), tag="1")
    folder = tmp_path / "cache/images/build"
    for name, age_s in (("sha256-old", 8 * 86_400), ("sha256-new", 60)):
        (folder / name).mkdir(parents=True)
        (folder / name / "layer").write_bytes(b"1")
        then = time.time() - age_s
        os.utime(folder / name, (then, then))
    assert build(f"oci-layout:{tmp_path}/layout:1", tmp_path).built
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"sha256-new"}


def test_a_build_that_another_holds_up_says_so(registry: Any, tmp_path: Path) -> None:
    import fcntl

    ref = pushed(registry, tmp_path, "held")
    with open_repository(ref)[0] as repository:
        digest = repository.resolve("1").digest.replace(":", "-")
    folder = tmp_path / "cache/images/build"
    folder.mkdir(parents=True)
    heard: list[str] = []
    with (folder / f"{digest}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        settings = BuildSettings(ref=ref, cache_dir=str(tmp_path / "cache"), wait_s=0.2)
        with pytest.raises(BusyError):
            build_image(settings, note=heard.append)
    assert len(heard) == 1


AS_NOBODY = """
import os, sys
from bootseer.imageprefetch.image_build.builder import BuildSettings, build_image
settings = BuildSettings(ref=sys.argv[1], cache_dir=sys.argv[2], rebuild=True)
print(build_image(settings).block_image)  # as root, which loads all modules
os.setgroups([]); os.setgid(65534); os.setuid(65534)
settings = BuildSettings(ref=sys.argv[1], cache_dir=sys.argv[3], rebuild=True)
print(build_image(settings).block_image)
"""


@pytest.mark.root
def test_a_plain_user_builds_the_same() -> None:
    folder = Path(tempfile.mkdtemp(prefix="plain-"))
    try:
        members = [file("a", b"1", uid=5, mode=0o4755), device("null", "char", 1, 3)]
        write_layout(folder / "layout", Image([members]), tag="1")
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o777)
        words = [f"oci-layout:{folder}/layout:1", str(folder / "ours"), str(folder / "theirs")]
        command = [sys.executable, "-c", AS_NOBODY, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert len(set(done.stdout.split())) == 1
    finally:
        shutil.rmtree(folder)


def test_a_finished_artifact_that_was_not_pushed_is_pushed_later(
    own_registry: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = own_registry()
    ref = pushed(registry, tmp_path, "unpushed")

    def cut(*_: object, **__: object) -> None:  # a fault that stands for a registry that is gone
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(artifact, "push", cut)
        with pytest.raises(KeyboardInterrupt):
            build(ref, tmp_path)
    asked = len(registry.requests())
    assert build(ref, tmp_path).built
    with open_repository(ref)[0] as repository:
        layers = {layer.digest for layer in repository.image("1")[1].layers}
    later = registry.requests()[asked:]
    assert not [r for r in later if r.method == "GET" and r.path.rpartition("/")[2] in layers]


def test_a_finished_artifact_that_was_damaged_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_layout(tmp_path / "layout", Image(LAYERS), tag="1")
    ref = f"oci-layout:{tmp_path}/layout:1"

    def cut(*_: object, **__: object) -> None:  # a fault that stands for a full disk, say
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(artifact, "push", cut)
        with pytest.raises(KeyboardInterrupt):
            build(ref, tmp_path)
    (data,) = (tmp_path / "cache/images/build").glob("*/data")
    spoiled = bytearray(data.read_bytes())
    spoiled[len(spoiled) // 2] ^= 1
    data.write_bytes(spoiled)
    with pytest.raises(CorruptDataError, match="not pushed"):
        build(ref, tmp_path)
    again = build(ref, tmp_path)
    assert again.built
    assert again.block_image == build(ref, tmp_path / "elsewhere", rebuild=True).block_image


def test_a_damaged_layer_is_refused_and_nothing_is_pushed(
    own_registry: Callable[..., Any], tmp_path: Path
) -> None:
    registry = own_registry()
    members = [file("a", b"right content" * 1000)]
    ref = pushed(registry, tmp_path, "damaged", Image([Layer(members, compression="none")]))
    with open_repository(ref)[0] as repository:
        subject, manifest = repository.image("1")
    path = registry.blob_path(manifest.layers[0].digest)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"right content", b"wrong content", 1))  # still a sound tar file
    with pytest.raises(CorruptDataError, match="digest"):
        build(ref, tmp_path)
    with open_repository(ref)[0] as repository:
        assert repository.referrers(subject.digest) == []
    path.write_bytes(whole)
    assert build(ref, tmp_path).built  # what arrived damaged is not kept


def test_damaged_layers_of_a_layout_are_refused(tmp_path: Path) -> None:
    made = write_layout(tmp_path, Image([[file("a", b"x" * 5000)]]), tag="1")
    ref = f"oci-layout:{tmp_path}:1"
    with open_repository(ref)[0] as repository:
        layer = repository.image("1")[1].layers[0]
    path = made.folder / "blobs/sha256" / layer.digest[7:]
    whole = path.read_bytes()
    path.write_bytes(gzip.compress(gzip.decompress(whole).replace(b"xxxxx", b"xxxxy", 1)))
    with pytest.raises(CorruptDataError, match="digest"):
        build(ref, tmp_path)


def test_limits_and_platforms(registry: Any, tmp_path: Path) -> None:
    images = [Image(LAYERS, architecture="arm64"), Image(LAYERS, architecture="s390x")]
    made = write_layout(tmp_path / "layout", images, tag="2")
    ref = registry.push(made.source, "imagebuild/platforms", "2")
    with pytest.raises(NotSupportedError, match="arm64"):
        build(ref, tmp_path)
    from bootseer.storage.oci.platforms import parse_platform

    report = build(ref, tmp_path, platform=parse_platform("linux/arm64"))
    assert report.subject == made.manifest_digests[0]
    plain = pushed(registry, tmp_path, "limits")
    for _ in range(2):  # without and with a block image of its own
        with pytest.raises(NotSupportedError, match=r"no image for linux/arm64; .* linux/amd64"):
            build(plain, tmp_path, platform=parse_platform("linux/arm64"))
        build(plain, tmp_path, platform=parse_platform("linux/amd64"))
    plain = pushed(registry, tmp_path, "limited")
    with pytest.raises(CorruptDataError, match="more than 3 entries"):
        build(plain, tmp_path, limits=Limits(entries=3))
    with pytest.raises(CorruptDataError, match="unpacks to more"):
        build(plain, tmp_path, limits=Limits(unpacked_bytes=100_000))
    with pytest.raises(CorruptDataError, match="unpacks to more"):
        build(plain, tmp_path, data_limit_bytes=100_000)
    with pytest.raises(NotFoundError):
        build(f"{plain}-not-there", tmp_path)


def test_layers_that_are_too_large_are_not_fetched(registry: Any, tmp_path: Path) -> None:
    ref = pushed(registry, tmp_path, "large")
    with pytest.raises(CorruptDataError, match="layers alone"):
        build(ref, tmp_path, limits=Limits(unpacked_bytes=100_000))
    assert not list((tmp_path / "cache/images/build").glob("*/sha256-*"))


@pytest.mark.root
def test_a_full_cache_is_said_and_nothing_is_pushed(registry: Any, tmp_path: Path) -> None:
    large = [file("large", os.urandom(6 << 20))]
    ref = pushed(registry, tmp_path, "full", Image([large]))
    with tmpfs(tmp_path / "small", "4m") as small, pytest.raises(NoSpaceError):
        build(ref, small)
    with open_repository(ref)[0] as repository:
        assert repository.referrers(repository.resolve("1").digest) == []


@pytest.mark.parametrize("packed", [False, True])
def test_a_docker_archive_of_an_image(registry: Any, tmp_path: Path, packed: bool) -> None:
    ref = pushed(registry, tmp_path, f"archive{packed:d}")
    path = tmp_path / "saved.tar"
    write_docker_archive(path, Image(LAYERS), name="lab/app:1")
    if packed:
        path.write_bytes(gzip.compress(path.read_bytes()))
    whole = build(ref, tmp_path)
    report = build(f"docker-archive:{path}:lab/app:1", tmp_path, to=ref, rebuild=True)
    assert report.subject == whole.subject
    assert tree_of(ref, report) == tree_of(ref, whole)
    with pytest.raises(UsageError, match="--to"):
        build(f"docker-archive:{path}", tmp_path)
    with pytest.raises(NotFoundError, match="lab/app:1"):
        build(f"docker-archive:{path}:other", tmp_path, to=ref, rebuild=True)
    other = tmp_path / "other.tar"
    write_docker_archive(other, Image(LAYERS[:1]))
    with pytest.raises(UsageError, match="different images"):
        build(f"docker-archive:{other}", tmp_path, to=ref, rebuild=True)
    path.write_bytes(b"no archive" * 100)
    with pytest.raises(CorruptDataError):
        build(f"docker-archive:{path}", tmp_path, to=ref, rebuild=True)


def tree_of(ref: str, report: BuildReport) -> list[str]:
    """The digests of what a tree is made of; the config tells where it came from as well."""
    with open_repository(ref)[0] as repository:
        return [layer.digest for layer in repository.manifest(report.block_image).layers]


@pytest.mark.root
@pytest.mark.debian("podman")
def test_an_image_that_podman_holds(registry: Any, podman: Any, tmp_path: Path) -> None:
    ref = pushed(registry, tmp_path, "daemon")
    whole = build(ref, tmp_path)
    podman.pull(ref)
    with podman.service() as url:
        source = f"docker-daemon:{ref}"
        report = build(source, tmp_path, to=ref, socket=url, rebuild=True)
        assert tree_of(ref, report) == tree_of(ref, whole)
        with pytest.raises(NotFoundError, match="no image"):
            build("docker-daemon:no/such", tmp_path, to=ref, socket=url, rebuild=True)
    with pytest.raises(NotFoundError):
        build(source, tmp_path, to=ref, socket=str(tmp_path / "none"), rebuild=True)


@pytest.fixture
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOTSEER_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("_cache")
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_layout(tmp_path / "layout", Image(LAYERS), tag="1")
    ref = f"oci-layout:{tmp_path}/layout:1"
    assert root.main(["image", "build", "--json", ref]) == 0
    said = capsys.readouterr()
    told = json.loads(said.out)
    assert told["built"] is True
    assert told["entries"] == 4
    layers = [rf"layer {n} of {len(LAYERS)} read in [\d.]+ s" for n in range(len(LAYERS), 0, -1)]
    made = [r"block image made in [\d.]+ s: \d+ files in [\d.]+ MiB", r"pushed to .+ in [\d.]+ s"]
    for line, wanted in zip(said.err.splitlines(), [*layers, *made], strict=True):
        assert re.fullmatch(f"bootseer: {wanted}", line)
    assert root.main(["image", "build", ref]) == 0
    again = capsys.readouterr()
    assert "there already" in again.out
    assert not again.err
    assert root.main(["image", "build", "--rebuild", "--max-entries", "2", ref]) == 6
    assert "more than 2 entries" in capsys.readouterr().err
