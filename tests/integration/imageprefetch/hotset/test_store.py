"""Hot sets made, kept, published at a real registry and chosen again."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import random
from pathlib import Path

import pytest

from bootseer.blockimage import hotset_manifest, pack_format
from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.blocks.trace import trace_file as traces
from bootseer.blocks.trace.trace_file import Touched, Trace, merge
from bootseer.errors import CorruptDataError, UsageError
from bootseer.imageprefetch.hotset import store
from bootseer.imageprefetch.hotset.store import HotSets, PackInput
from bootseer.storage.oci import media_types
from bootseer.storage.oci.manifest import (
    EMPTY_BYTES,
    Descriptor,
    Manifest,
    digest_of,
    manifest_bytes,
)
from bootseer.storage.oci.media_types import OCI_EMPTY, OCI_MANIFEST
from bootseer.storage.oci.open import open_repository
from tests.support.samples.images import Image, file, write_layout
from tests.support.trees.hotsets import PAGE, Tree, unpack_frame

pytestmark = [pytest.mark.slow, pytest.mark.debian("docker-registry")]

BLOCK_IMAGE = digest_of(b"the block image's manifest")
SUBJECT = Descriptor(OCI_MANIFEST, digest_of(b"a stock image"), 13)
FILES = {f"usr/lib/f{n:02}": random.Random(n).randbytes(40 * PAGE - n) for n in range(30)}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return Tree(tmp_path_factory.mktemp("trees") / "tree", FILES)


def parts_of(tree: Tree, subject: Descriptor = SUBJECT) -> PackInput:
    return PackInput(
        meta=tree.meta,
        table=tree.table,
        files=tree.files,
        source=tree.source,
        block_image=BLOCK_IMAGE,
        subject=subject,
    )


def made_of(tree: Tree, folder: Path, trace: Trace, **options):
    with Fetcher() as fetcher:
        return store.pack(
            HotSets(folder), options.pop("parts", parts_of(tree)), trace, fetcher, **options
        )


def contents(made: store.BuiltHotSet) -> tuple[pack_format.Index, dict[str, bytes]]:
    """The index, and path → bytes as the frames have them."""
    data = Path(made.pack_path).read_bytes()
    boot = data[: made.hot.boot_length]
    assert f"sha256:{hashlib.sha256(boot).hexdigest()}" == made.hot.boot_digest
    index = pack_format.parse_boot(boot).index()
    got: dict[str, bytes] = {}
    for frame in index.frames:
        start = made.hot.boot_length + frame.offset
        raw = unpack_frame(frame, data[start : start + frame.stored_length])
        for one in frame.warm:
            path = index.paths[one.path].decode()
            got[path] = got.get(path, b"") + FILES[path][one.offset : one.offset + one.length]
        assert sum(w.length for w in frame.warm) <= len(raw)
    return index, got


def test_what_half_of_the_starts_touched_is_packed_and_the_trace_kept_whole(tree, tmp_path):
    reads = [("usr/lib/f03", 0, 5), ("usr/lib/f01", 8, 2)]
    starts = [reads, [*reads, ("usr/lib/f09", 0, 9)], reads[:1]]
    trace = merge([tree.touched(*some) for some in starts])
    made, info = made_of(tree, tmp_path / "sets", trace)
    _, got = contents(made)
    assert got == {
        "usr/lib/f03": FILES["usr/lib/f03"][: 5 * PAGE],
        "usr/lib/f01": FILES["usr/lib/f01"][8 * PAGE : 10 * PAGE],
    }
    assert info.hot_bytes == 7 * PAGE
    assert made.hot.starts == 3
    assert HotSets(tmp_path / "sets").load("") == made


def test_a_new_one_takes_the_place_of_the_old(tree, tmp_path):
    sets = HotSets(tmp_path)
    made_of(tree, tmp_path, tree.touched(("usr/lib/f03", 0, 5)))
    newer, _ = made_of(tree, tmp_path, tree.touched(("usr/lib/f04", 0, 5)))
    named = dataclasses.replace(tree.touched(("usr/lib/f05", 0, 1)), workload="train")
    made_of(tree, tmp_path, named)
    assert sets.load("") == newer
    assert sets.workloads() == ["", "train"]
    assert len(list((tmp_path / "_default").glob("pack-*"))) == 1
    assert sets.load("other") is None


def test_hot_sets_of_every_kind_are_packed(tree, tmp_path):
    """Empty, random, and all of it; another image's is refused."""
    made, info = made_of(tree, tmp_path, tree.touched())
    assert contents(made)[1] == {}
    assert info.size_bytes == info.boot_length
    order = random.Random(5).sample(sorted(FILES), 10)
    reads = [(path, random.Random(path).randrange(39), 1) for path in order]
    made, info = made_of(tree, tmp_path, tree.touched(*reads))
    assert list(contents(made)[1]) == order
    made, info = made_of(tree, tmp_path, tree.touched(*((path, 0, 40) for path in FILES)))
    index, _ = contents(made)
    assert not index.frames
    assert sum(e.length for e in index.fetch) == tree.source.size_bytes
    foreign = dataclasses.replace(tree.touched(), object="table of another image")
    with pytest.raises(UsageError, match="carry it over"):
        made_of(tree, tmp_path, foreign)


def test_a_pack_is_kept_where_no_hard_links_are(tree, tmp_path, monkeypatch):
    """Fault injected: a file system without hard links."""
    refused = []

    def link(source, target):
        refused.append(target)
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", link)
    made, _ = made_of(tree, tmp_path, tree.touched(("usr/lib/f03", 0, 5)))
    assert made.pack_path in refused
    assert Path(made.pack_path).stat().st_mode & 0o777 == 0o644
    assert not list(Path(made.pack_path).parent.glob(".*"))


def test_a_damaged_one_on_disk_is_told(tree, tmp_path):
    made, _ = made_of(tree, tmp_path, tree.touched(("usr/lib/f03", 0, 5)))
    place = tmp_path / "_default"
    with open(made.pack_path, "ab") as out:
        out.write(b"x")
    with pytest.raises(CorruptDataError, match="another size"):
        HotSets(tmp_path).load("")
    (place / store.MANIFEST_NAME).write_text("{}")
    with pytest.raises(Exception, match="hot set"):
        HotSets(tmp_path).load("")


# --- published ------------------------------------------------------------------------------------


@pytest.fixture(params=["registry", "layout"])
def image(request, tmp_path, registry):
    """An open repository that holds a stock image, and that image's descriptor."""
    written = write_layout(tmp_path / "layout", Image([[file("a", b"x")]]), tag="1")
    name = f"oci-layout:{tmp_path / 'layout'}:1"
    if request.param == "registry":
        name = registry.push(written.source, f"hotset/{tmp_path.name.lower()}", "1")
    repository, reference = open_repository(name, push=True)
    with repository:
        subject, _ = repository.image(reference.tag or "1")
        yield repository, subject


def test_a_published_hot_set_is_found_by_its_image_and_workload(tree, tmp_path, image):
    repository, subject = image
    parts = parts_of(tree, subject)
    trace = tree.touched(("usr/lib/f03", 0, 5))
    for workload in ("", "train"):
        one = dataclasses.replace(trace, workload=workload)
        made, _ = made_of(tree, tmp_path / "sets", one, parts=parts)
        store.push(repository, made)
    listed = repository.referrers(subject.digest, media_types.HOT_SET)
    assert len(listed) == 2
    found = hotset_manifest.choose(repository, listed, BLOCK_IMAGE, "train")
    assert found is not None
    descriptor, hot = found
    assert descriptor.digest == made.digest
    assert hot.workload == "train"
    assert (hot.pack.digest, hot.boot_length) == (made.hot.pack.digest, made.hot.boot_length)
    stored = repository.blob(hot.pack, limit_bytes=1 << 30)
    assert stored == Path(made.pack_path).read_bytes()
    assert store.fetch_trace(repository, hot) == one
    fallback = hotset_manifest.choose(repository, listed, BLOCK_IMAGE, "unheard of")
    assert fallback is not None
    assert fallback[1].workload == ""
    assert (
        hotset_manifest.choose(repository, listed, digest_of(b"another block image"), "train")
        is None
    )


def test_the_newest_counts_and_rubbish_beside_it_does_not(tree, tmp_path, image):
    repository, subject = image
    parts = parts_of(tree, subject)
    for pages in (3, 9, 6):
        made, _ = made_of(
            tree, tmp_path / "sets", tree.touched(("usr/lib/f03", 0, pages)), parts=parts
        )
        store.push(repository, made)
    told = {
        media_types.BLOCK_IMAGE_NOTE: BLOCK_IMAGE,
        media_types.WORKLOAD_NOTE: "",
        media_types.CREATED_NOTE: "9999",
    }
    empty = Descriptor(OCI_EMPTY, digest_of(EMPTY_BYTES), len(EMPTY_BYTES))
    forged = manifest_bytes(
        config=empty,
        layers=[],
        subject=subject,
        artifact_type=media_types.HOT_SET,
        annotations=told,
    )
    repository.push_manifest(forged, OCI_MANIFEST)
    listed = repository.referrers(subject.digest, media_types.HOT_SET)
    bare = [dataclasses.replace(one, annotations={}, artifact_type="") for one in listed]
    for some in (listed, bare):  # some registries list no annotations
        found = hotset_manifest.choose(repository, some, BLOCK_IMAGE)
        assert found is not None
        assert found[0].digest == made.digest
    published = store.list_published(repository, subject.digest, BLOCK_IMAGE)
    assert len(published) == 3
    assert published[0][0].digest == made.digest


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (pack_format.BOOT_LENGTH, "0"),
        (pack_format.BOOT_LENGTH, "-5"),
        (pack_format.BOOT_LENGTH, "99999999999"),
        (pack_format.BOOT_LENGTH, "9" * 40),
        (pack_format.BOOT_LENGTH, ""),
        (pack_format.BOOT_DIGEST, "sha256:12"),
        (pack_format.BOOT_DIGEST, ""),
    ],
)
def test_a_manifest_that_lies_about_its_pack_is_refused(name, value):
    about = {pack_format.BOOT_LENGTH: "10", pack_format.BOOT_DIGEST: digest_of(b"boot")}
    empty = Descriptor(OCI_EMPTY, digest_of(EMPTY_BYTES), len(EMPTY_BYTES))

    def read(annotations: dict[str, str]) -> hotset_manifest.HotSet:
        layer = Descriptor(media_types.PACK, digest_of(b"pack"), 100, annotations)
        return hotset_manifest.parse_manifest(
            Manifest(b"", OCI_MANIFEST, empty, (layer,), artifact_type=media_types.HOT_SET)
        )

    assert read(about).boot_length == 10
    with pytest.raises(CorruptDataError):
        read({**about, name: value})


def test_a_hot_set_of_another_kind_of_artifact_is_refused():
    empty = Descriptor(OCI_EMPTY, digest_of(EMPTY_BYTES), len(EMPTY_BYTES))
    with pytest.raises(CorruptDataError, match="hot set"):
        hotset_manifest.parse_manifest(
            Manifest(b"", OCI_MANIFEST, empty, (), artifact_type="other")
        )


def test_a_mount_waits_for_few_damaged_hot_sets():
    """The repository is a fake that has nothing but damage."""
    asked = []

    class Damaged:
        def manifest(self, descriptor):
            asked.append(descriptor)
            raise CorruptDataError("damaged")

    told = {media_types.BLOCK_IMAGE_NOTE: BLOCK_IMAGE, media_types.WORKLOAD_NOTE: ""}
    listed = [
        Descriptor(OCI_MANIFEST, digest_of(b"%d" % n), 1, told, media_types.HOT_SET)
        for n in range(1000)
    ]
    assert hotset_manifest.choose(Damaged(), listed, BLOCK_IMAGE) is None
    assert len(asked) < 20


def test_merging_is_what_the_trace_store_does(tree):
    one, other = tree.touched(("usr/lib/f03", 0, 5)), tree.touched(("usr/lib/f04", 0, 5))
    together = traces.merge([one, other])
    assert together.starts == 2
    assert traces.merge([one, other], 0.6).extents == ()
    part = Trace(one.object, one.size_bytes, "", 0, (Touched(0, PAGE, 0, 1),))
    assert traces.merge([one, part]).starts == 1
