"""Repositories of a real registry and of layouts: one suite, and what each adds."""

from __future__ import annotations

import gzip
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.errors import (
    AccessDeniedError,
    CorruptDataError,
    NotFoundError,
    NotSupportedError,
    UsageError,
)
from bootseer.storage.oci.manifest import (
    Descriptor,
    Index,
    Platform,
    digest_of,
    index_bytes,
    manifest_bytes,
)
from bootseer.storage.oci.media_types import OCI_EMPTY, OCI_INDEX, OCI_MANIFEST
from bootseer.storage.oci.registry.upload import BlobSource, Uploader
from bootseer.storage.oci.registry_repository import RegistryRepository
from bootseer.storage.oci.repository import Repository
from bootseer.storage.open import open_store
from bootseer.storage.request_control import Attempt
from tests.support.labs.registry_proxy import in_threads, isolate, opened, push_image
from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.debian("docker-registry")]

DATA = random.Random(1).randbytes(3_000_000)
DIGEST = digest_of(DATA)
EMPTY = Descriptor(OCI_EMPTY, digest_of(b"{}"), 2)


@pytest.fixture(autouse=True)
def _no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(tmp_path, monkeypatch)


def unpacked(data: bytes) -> bytes:
    """A layer that skopeo may have packed on its way."""
    return gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data


class RepositoryContract:
    """`place` is a name under which nothing is stored yet."""

    @pytest.fixture
    def place(self) -> str:
        raise NotImplementedError

    @pytest.fixture
    def repository(self, place: str) -> Iterator[Repository]:
        with opened(place, push=True) as repository:
            yield repository

    def test_an_image_is_found_by_tag_and_digest(self, place: str) -> None:
        made, layer = push_image(place, DATA)
        with opened(place) as repository:
            assert repository.resolve("v1") == repository.resolve(made.digest) == made
            descriptor, manifest = repository.image("v1")
            assert (descriptor.digest, manifest.layers) == (made.digest, (layer,))
            assert digest_of(manifest.raw) == made.digest
            assert repository.tags() == ["v1"]
            config = repository.blob(manifest.config, limit_bytes=1000)
            assert digest_of(config) == manifest.config.digest

    def test_blobs_are_read_by_ranges(self, place: str) -> None:
        push_image(place, DATA)
        with opened(place) as repository:
            store = repository.store
            assert store.stat(DIGEST).size_bytes == len(DATA)
            assert store.stat(DIGEST).version == DIGEST
            buffer = bytearray(70_000)
            store.read_range(DIGEST, 1_234_567, buffer)
            assert buffer == DATA[1_234_567:][:70_000]
            parts = [memoryview(bytearray(n)) for n in (10, 0, 100_000, 7)]
            told: list[int] = []
            store.read_scatter(DIGEST, 99, parts, Attempt(), told.append)
            assert b"".join(parts) == DATA[99:][:100_017]
            assert told == [0, 1, 2, 3]
            assert store.read(DIGEST, limit_bytes=len(DATA)) == DATA
            with pytest.raises(CorruptDataError, match="more than"):
                store.read(DIGEST, limit_bytes=len(DATA) - 1)
            for offset, size in ((len(DATA) - 1, 2), (len(DATA), 1), (10**9, 1)):
                with pytest.raises(CorruptDataError, match="truncated"):
                    store.read_range(DIGEST, offset, bytearray(size))
            with pytest.raises(UsageError, match="digest"):
                store.stat("../../etc/passwd")
            with pytest.raises(NotSupportedError, match="read-only"):
                store.create(DIGEST, b"")

    @pytest.mark.parametrize("offset", [0, 1, 1_500_000, len(DATA) - 1, len(DATA)])
    def test_a_stream_goes_from_an_offset_to_the_end(self, place: str, offset: int) -> None:
        push_image(place, DATA)
        with opened(place) as repository, repository.stream(DIGEST, offset) as stream:
            assert stream.read(10) == DATA[offset:][:10]
            assert stream.read() == DATA[offset + 10 :]
            assert stream.read() == b""
            assert stream.size_bytes == len(DATA)
            stream.close()
            stream.close()

    def test_what_is_missing_is_not_found(self, place: str) -> None:
        push_image(place, DATA)
        absent = digest_of(b"absent")
        with opened(place) as repository:
            for call in (
                lambda: repository.resolve("other"),
                lambda: repository.resolve(absent),
                lambda: repository.store.stat(absent),
                lambda: repository.store.read(absent, limit_bytes=10),
                lambda: repository.stream(absent).read(),
            ):
                with pytest.raises(NotFoundError):
                    call()
            assert not repository.has_blob(absent)
            assert repository.has_blob(DIGEST)
            with pytest.raises((UsageError, NotFoundError)):
                repository.resolve("../x")

    def test_an_index_gives_the_platform_that_was_asked_for(self, repository: Repository) -> None:
        repository.push_blob(b"{}", EMPTY.digest, 2)
        entries = []
        for arch in ("amd64", "arm64"):
            raw = manifest_bytes(config=EMPTY, layers=[], annotations={"arch": arch})
            made = repository.push_manifest(raw, OCI_MANIFEST)
            entries.append(
                Descriptor(
                    OCI_MANIFEST, made.digest, made.size_bytes, {}, "", Platform("linux", arch)
                )
            )
        index = repository.push_manifest(index_bytes(entries), OCI_INDEX, "multi")
        found, manifest = repository.image("multi", Platform("linux", "arm64"))
        assert (found, manifest.annotations["arch"]) == (entries[1], "arm64")
        assert isinstance(repository.manifest(index), Index)
        with pytest.raises(NotSupportedError, match=r"linux/s390x; there are linux/amd64, linux/a"):
            repository.image("multi", Platform("linux", "s390x"))

    def test_referrers_are_found_by_subject_and_type(self, place: str) -> None:
        subject, _ = push_image(place, DATA)
        other, _ = push_image(place, DATA[:100], "v2")
        with opened(place, push=True) as repository:
            repository.push_blob(b"{}", EMPTY.digest, 2)
            assert repository.referrers(subject.digest) == []
            made = []
            for kind in ("application/a", "application/b"):
                raw = manifest_bytes(
                    config=EMPTY,
                    layers=[EMPTY],
                    subject=subject,
                    artifact_type=kind,
                    annotations={"note": kind},
                )
                made.append(repository.push_manifest(raw, OCI_MANIFEST))
                repository.push_manifest(raw, OCI_MANIFEST)  # twice is once
        with opened(place) as repository:
            assert sorted(made, key=str) == sorted(repository.referrers(subject.digest), key=str)
            (found,) = repository.referrers(subject.digest, "application/b")
            assert (found.artifact_type, found.annotations) == (
                "application/b",
                {"note": "application/b"},
            )
            assert repository.referrers(other.digest) == []
            assert {"v1", "v2"} <= set(repository.tags())

    def test_many_referrers_at_once_are_all_kept(self, place: str) -> None:
        subject, _ = push_image(place, DATA[:100])

        def push(number: int) -> None:
            with opened(place, push=True, retry_s=20.0) as repository:
                repository.push_blob(b"{}", EMPTY.digest, 2)
                raw = manifest_bytes(
                    config=EMPTY, layers=[], subject=subject, artifact_type=f"application/{number}"
                )
                repository.push_manifest(raw, OCI_MANIFEST)

        in_threads(6, push)
        with opened(place) as repository:
            kinds = {one.artifact_type for one in repository.referrers(subject.digest)}
        assert kinds == {f"application/{n}" for n in range(6)}

    def test_a_blob_is_pushed_once_and_counted_once(self, repository: Repository) -> None:
        told: list[int] = []
        assert repository.push_blob(DATA, DIGEST, len(DATA), progress=told.append)
        assert sum(told) == len(DATA)
        assert not repository.push_blob(DATA, DIGEST, len(DATA), progress=told.append)
        assert sum(told) == 2 * len(DATA)

    def test_a_source_that_is_not_its_digest_is_not_pushed(
        self, repository: Repository, tmp_path: Path
    ) -> None:
        path = tmp_path / "blob"
        path.write_bytes(DATA)
        for digest, size in ((DIGEST, len(DATA) - 1), (digest_of(b"x"), len(DATA))):
            with pytest.raises(CorruptDataError, match="not pushed"):
                repository.push_blob(str(path), digest, size)
        assert not repository.has_blob(digest_of(b"x"))
        assert repository.push_blob(str(path), DIGEST, len(DATA))


class TestRegistry(RepositoryContract):
    @pytest.fixture
    def place(self, registry: Any, tmp_path: Path) -> str:
        return f"{registry.host}/oci/{tmp_path.name.lower().strip('_')}"

    def test_skopeo_reads_what_we_pushed_and_we_what_it_pushed(
        self, place: str, tmp_path: Path
    ) -> None:
        push_image(place, DATA)
        layout = f"oci:{tmp_path}/copy:v1"
        skopeo = ["skopeo", "--insecure-policy", "copy", "-q"]
        subprocess.run(
            [*skopeo, "--src-tls-verify=false", f"docker://{place}:v1", layout], check=True
        )
        subprocess.run(
            [*skopeo, "--dest-tls-verify=false", "--format", "v2s2", layout, f"docker://{place}:d"],
            check=True,
        )
        with opened(place) as repository:
            _, manifest = repository.image("d")
            assert manifest.media_type.startswith("application/vnd.docker.distribution.manifest")
            packed = repository.stream(manifest.layers[0].digest).read()
            assert unpacked(packed) == DATA
        with opened(f"oci-layout:{tmp_path}/copy") as repository:
            _, manifest = repository.image("v1")
            packed = repository.stream(manifest.layers[0].digest).read()
            assert unpacked(packed) == DATA

    def test_a_large_blob_goes_in_chunks(self, registry: Any, place: str, tmp_path: Path) -> None:
        path = tmp_path / "blob"
        path.write_bytes(DATA)
        with opened(place, push=True) as repository:
            assert isinstance(repository, RegistryRepository)
            before, told = len(registry.requests()), list[int]()
            uploads = Uploader(repository._client, chunk_bytes=1_000_000)
            assert uploads.push(BlobSource(str(path), DIGEST, len(DATA)), told.append)
            methods = [r.method for r in registry.requests()[before:]]
            assert methods.count("PATCH") == 3
            assert sum(told) == len(DATA)
            assert repository.store.read(DIGEST, limit_bytes=len(DATA)) == DATA

    def test_resolving_and_reading_the_manifest_is_one_request(
        self, registry: Any, place: str
    ) -> None:
        push_image(place, DATA)
        before = len(registry.requests())
        with opened(place) as repository:
            repository.manifest(repository.resolve("v1"))
            repository.image("v1")
        # The tag is asked for each time it is named, its manifest's bytes never again.
        assert [r.method for r in registry.requests()[before:]] == ["GET", "GET"]

    def test_open_store_reads_blobs(self, place: str) -> None:
        push_image(place, DATA)
        store = open_store(f"oci://{place}")
        assert store.url == f"oci://{place}"
        assert store.read(DIGEST, limit_bytes=len(DATA)) == DATA
        store.close()
        store.close()

    def test_tls_and_a_login_by_basic(self, own_registry: Any, tmp_path: Path) -> None:
        import json

        server = own_registry(users={"bob": "se:cret"}, tls=True)
        place, ca = f"{server.host}/a/b", str(server.ca_path)
        with opened(place, ca_file=ca) as stranger, pytest.raises(AccessDeniedError, match="login"):
            stranger.resolve("v1")
        (tmp_path / "docker").mkdir()
        (tmp_path / "docker/config.json").write_text(json.dumps(server.auth_json()))
        certificates = tmp_path / "certs.d" / server.host
        certificates.mkdir(parents=True)
        (certificates / "ca.crt").write_bytes(server.ca_path.read_bytes())
        made, _ = push_image(place, DATA)
        with opened(place) as known:
            assert known.resolve("v1") == made
            assert known.store.read(DIGEST, limit_bytes=len(DATA)) == DATA
        os.unlink(certificates / "ca.crt")
        with opened(place, ca_file=str(certificates)) as wrong, pytest.raises(UsageError):
            wrong.resolve("v1")
        unchecked = f'server = "https://{server.host}"\nskip_verify = true\n'
        (certificates / "hosts.toml").write_text(unchecked)
        with opened(place) as known:
            assert known.resolve("v1") == made


class TestLayout(RepositoryContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> str:
        return f"oci-layout:{tmp_path}/layout"

    def test_a_flipped_byte_is_found(self, place: str, tmp_path: Path) -> None:
        made, layer = push_image(place, DATA)
        for digest in (layer.digest, made.digest):
            path = tmp_path / "layout/blobs/sha256" / digest[7:]
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        with opened(place) as repository:
            with pytest.raises(CorruptDataError, match="other bytes"):
                repository.image("v1")
            with pytest.raises(CorruptDataError, match="other bytes"):
                repository.store.read(DIGEST, limit_bytes=len(DATA))
            with pytest.raises(CorruptDataError, match="not what its name says"):
                repository.stream(DIGEST).read()

    def test_nothing_is_written_without_being_asked_to(self, place: str, tmp_path: Path) -> None:
        with opened(place) as repository:
            with pytest.raises(NotFoundError, match="no image layout"):
                repository.resolve("v1")
            with pytest.raises(AccessDeniedError):
                repository.push_blob(b"x", digest_of(b"x"), 1)
        assert not (tmp_path / "layout").exists()

    def test_a_tag_moves_and_podman_reads_the_layout(self, place: str, tmp_path: Path) -> None:
        push_image(place, DATA)
        second, _ = push_image(place, DATA[:1000])
        with opened(place) as repository:
            assert repository.resolve("v1").digest == second.digest
            assert repository.tags() == ["v1"]
        done = subprocess.run(
            ["skopeo", "inspect", "--raw", f"oci:{tmp_path}/layout:v1"],
            capture_output=True,
            check=True,
        )
        assert digest_of(done.stdout) == second.digest

    def test_the_example_of_the_docs_runs(self, tmp_path: Path) -> None:
        page = (ROOT / "docs/registries.md").read_text()
        (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        code = example.replace("/tmp/a-layout", str(tmp_path / "a-layout"))
        subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
