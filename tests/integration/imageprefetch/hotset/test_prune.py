"""Older hot sets leave the registry; all else stays, and who deletes nothing changes nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from bootseer.blockimage import hotset_manifest
from bootseer.errors import NotSupportedError, StoreUnavailableError
from bootseer.imageprefetch.hotset import store
from bootseer.storage.oci import media_types
from bootseer.storage.oci.manifest import Descriptor, digest_of
from bootseer.storage.oci.media_types import OCI_MANIFEST
from bootseer.storage.oci.open import open_repository
from bootseer.storage.oci.referrers_index import ReferrersIndex
from bootseer.storage.oci.registry.registry_client import RegistryClient
from tests.support.mounts.images import publish, some_files

pytestmark = [pytest.mark.slow, pytest.mark.debian("docker-registry")]

FILES = some_files(3, 9_000)


@pytest.fixture(params=["registry", "layout"])
def ref(request: Any, tmp_path: Path) -> str:
    """An image where deleting is allowed."""
    if request.param == "layout":
        return f"oci-layout:{tmp_path}/layout:1"
    place = tmp_path.name.lower().strip("_")
    name: str = request.getfixturevalue("registry").reference(f"prune/{place}", "1")
    return name


def push_hot_sets(ref: str, folder: Path, *workloads: str) -> list[str]:
    """An image with one hot set a name, in this order; returns their digests."""
    image = publish(ref, FILES, folder)
    made = []
    with open_repository(ref, push=True)[0] as repository:
        subject, _ = repository.image("1")
        (block,) = repository.referrers(image.digest, media_types.BLOCK_IMAGE)
        for number, workload in enumerate(workloads):
            pack = Descriptor(media_types.PACK, image.blobs[media_types.TABLE], 1)
            created = f"2026-01-01T00:00:{number:02}Z"
            hot = hotset_manifest.HotSet(
                workload, block.digest, created, 1, pack, 1, pack.digest, None
            )
            raw = hotset_manifest.manifest_of(hot, subject)
            repository.push_blob(b"{}", digest_of(b"{}"), 2)
            made.append(repository.push_manifest(raw, OCI_MANIFEST).digest)
    return made


def push_one(ref: str, workload: str, created: str) -> str:
    """One more hot set of an image that was pushed; returns its digest."""
    with open_repository(ref, push=True)[0] as repository:
        subject, _ = repository.image("1")
        (block,) = repository.referrers(subject.digest, media_types.BLOCK_IMAGE)
        pack = Descriptor(media_types.PACK, digest_of(b"{}"), 2)
        hot = hotset_manifest.HotSet(workload, block.digest, created, 1, pack, 1, pack.digest, None)
        return repository.push_manifest(
            hotset_manifest.manifest_of(hot, subject), OCI_MANIFEST
        ).digest


def delete_alone(ref: str, digest: str) -> None:
    """What a prune that is killed at once has done: the index still names it."""
    host, _, path = ref.removesuffix(":1").partition("/")
    asked = urllib.request.Request(f"http://{host}/v2/{path}/manifests/{digest}", method="DELETE")
    with urllib.request.urlopen(asked) as answer:
        assert answer.status == 202


def listed_at(ref: str) -> set[str]:
    with open_repository(ref)[0] as repository:
        return {each.digest for each in repository.referrers(repository.image("1")[0].digest)}


def left(ref: str) -> list[str]:
    with open_repository(ref)[0] as repository:
        image = repository.image("1")[0].digest
        found = [d.digest for d, _ in store.list_published(repository, image)]
        assert len(repository.referrers(image, media_types.BLOCK_IMAGE)) == 1
    return found


def prune(ref: str, folder: Path, *options: str, code: int = 0) -> Any:
    words = ["image", "hotset", "prune", "--cache", str(folder / "cache"), "--json", *options, ref]
    done = subprocess.run(
        [sys.executable, "-m", "bootseer", *words], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout) if not code else done.stderr


def test_the_newest_of_each_workload_stay(ref: str, tmp_path: Path) -> None:
    made = push_hot_sets(ref, tmp_path / "image", "a", "", "a", "a", "b", "")
    assert prune(ref, tmp_path, "--dry-run")["deleted"] is False
    assert set(left(ref)) == set(made)
    rows = prune(ref, tmp_path)["hot_sets"]
    assert [row["digest"] for row in rows] == [made[0]]
    assert left(ref) == made[:0:-1]
    prune(ref, tmp_path, "--keep", "1")
    assert left(ref) == [made[5], made[4], made[3]]
    assert prune(ref, tmp_path, "--keep", "1")["hot_sets"] == []
    with open_repository(ref, push=True)[0] as repository:
        repository.delete_referrer(repository.image("1")[0].digest, made[0])  # it is gone already


def test_a_registry_that_deletes_nothing_is_left_as_it_was(
    own_registry: Any, tmp_path: Path
) -> None:
    storage = {"filesystem": {"rootdirectory": str(tmp_path / "stored")}}
    registry = own_registry(storage=tmp_path / "stored", settings={"storage": storage})
    ref = registry.reference("prune/kept", "1")
    made = push_hot_sets(ref, tmp_path / "image", "a", "a")
    told = prune(ref, tmp_path, "--keep", "1", code=NotSupportedError.exit_code)
    assert "deletes nothing" in told
    assert left(ref) == made[::-1]


def test_what_others_push_meanwhile_is_not_lost(ref: str, tmp_path: Path) -> None:
    made = push_hot_sets(ref, tmp_path / "image", *["a"] * 5)
    faults: list[BaseException] = []

    def other(number: int) -> None:
        try:
            push_one(ref, "o", f"2026-02-01T00:00:{number:02}Z")
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=other, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    prune(ref, tmp_path, "--keep", "2")
    for thread in threads:
        thread.join()
    assert not faults
    found = left(ref)
    assert set(made) & set(found) == {made[3], made[4]}
    assert len(found) >= 4  # of three pushed meanwhile the oldest may have been one too many


def test_a_prune_that_was_killed_hinders_nobody_who_pushes(registry: Any, tmp_path: Path) -> None:
    ref = registry.reference("prune/killed", "1")
    made = push_hot_sets(ref, tmp_path / "image", "a", "a", "a")
    for digest in made[:2]:
        delete_alone(ref, digest)
    assert set(made) < listed_at(ref)
    pushed = push_one(ref, "b", "2026-03-01T00:00:00Z")
    assert left(ref) == [pushed, made[2]]
    assert not set(made[:2]) & listed_at(ref)
    with open_repository(ref, push=True)[0] as repository:  # as a prune that goes on
        subject, _ = repository.image("1")
        repository.delete_referrer(subject.digest, made[2])
        repository.delete_referrer(subject.digest, made[0])
    assert left(ref) == [pushed]


def test_only_what_is_surely_gone_is_taken_out(
    registry: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registry is real; that it fails for a while when asked for one manifest is a fake."""
    ref = registry.reference("prune/unsure", "1")
    made = push_hot_sets(ref, tmp_path / "image", "a", "a", "a")
    delete_alone(ref, made[0])
    real, looked = RegistryClient.open, []

    def unsure(self: RegistryClient, endpoint: Any, method: str, tail: str, *words: Any) -> Any:
        if made[1] in tail:
            looked.append(method)
            raise StoreUnavailableError("it is away for a moment; try again")
        return real(self, endpoint, method, tail, *words)

    with monkeypatch.context() as patched:
        patched.setattr(RegistryClient, "open", unsure)
        pushed = push_one(ref, "b", "2026-03-01T00:00:00Z")
    assert looked
    listed = listed_at(ref)
    assert {made[1], made[2], pushed} < listed
    assert made[0] not in listed


def test_what_is_deleted_while_it_is_pushed_was_one_too_many(
    registry: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = registry.reference("prune/toomany", "1")
    made = push_hot_sets(ref, tmp_path / "image", "a")
    real = ReferrersIndex.add

    def deleted(self: ReferrersIndex, subject: str, pushed: Descriptor) -> None:
        delete_alone(ref, pushed.digest)
        real(self, subject, pushed)

    with monkeypatch.context() as patched:
        patched.setattr(ReferrersIndex, "add", deleted)
        pushed = push_one(ref, "a", "2026-03-01T00:00:00Z")
    assert pushed not in listed_at(ref)
    assert left(ref) == made
