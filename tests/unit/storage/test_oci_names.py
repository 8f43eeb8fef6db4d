"""References, descriptors, manifests, platforms and challenges, without any server."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import BootseerError, CorruptDataError, NotSupportedError, UsageError
from bootseer.storage.oci import platforms
from bootseer.storage.oci.manifest import (
    Descriptor,
    Index,
    Manifest,
    Platform,
    digest_of,
    index_bytes,
    manifest_bytes,
    parse_manifest,
)
from bootseer.storage.oci.media_types import DOCKER_INDEX, OCI_INDEX, OCI_MANIFEST
from bootseer.storage.oci.platforms import choose_platform, parse_platform, this_platform
from bootseer.storage.oci.reference import Reference, parse_reference
from bootseer.storage.oci.referrers import filter_referrers, referrers_tag
from bootseer.storage.oci.referrers_index import with_referrer
from bootseer.storage.oci.registry.challenge import (
    Challenge,
    merge_scopes,
    parse_challenges,
    token_life_s,
    use_until_s,
)

D = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "host", "repository", "tag", "digest"),
    [
        ("debian", "docker.io", "library/debian", "latest", ""),
        ("debian:12", "docker.io", "library/debian", "12", ""),
        ("user/app", "docker.io", "user/app", "latest", ""),
        ("docker.io/debian", "docker.io", "library/debian", "latest", ""),
        ("index.docker.io/library/debian:12", "docker.io", "library/debian", "12", ""),
        (f"debian@{D}", "docker.io", "library/debian", "", D),
        (f"debian:12@{D}", "docker.io", "library/debian", "12", D),
        ("localhost/app", "localhost", "app", "latest", ""),
        ("localhost:5000/a/b:x", "localhost:5000", "a/b", "x", ""),
        ("[::1]:5000/a:x", "[::1]:5000", "a", "x", ""),
        ("Reg.Example.COM/a.b/c__d-e:T_1", "reg.example.com", "a.b/c__d-e", "T_1", ""),
        ("oci://reg:5000/a/b", "reg:5000", "a/b", "latest", ""),
        ("docker://reg.io/a/b:1", "reg.io", "a/b", "1", ""),
    ],
)
def test_names_are_read_as_container_runtimes_do(
    text: str, host: str, repository: str, tag: str, digest: str
) -> None:
    parsed = parse_reference(text)
    assert parsed == Reference(host, repository, tag, digest)
    assert parse_reference(parsed.name) == parsed
    assert parsed.version == (digest or tag)


@pytest.mark.parametrize(
    "text",
    [
        "", ":", "a:", "a@sha256:12", f"a@{D}x", "UPPER/x", "reg.io/", "reg.io/A", "a//b", "a/../b",
        "reg.io:x/a", "-a", "a:-t", "a b", "http://reg.io/a", f"reg.io/{'a' * 256}",
        "a:" + "t" * 129,
        "reg..io/a", "-reg.io/a", "reg.io:123456/a",
        "user:secret@reg.io/a", "reg.io/a?x=y", "reg.io/a#f", "a\n",
    ],
)  # fmt: skip
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_reference(text)


def test_a_layout_is_named_by_its_folder(tmp_path: Path) -> None:
    plain = tmp_path / "layout"
    colon = tmp_path / "with:colon"
    colon.mkdir()
    assert parse_reference(f"oci-layout:{plain}") == Reference("", str(plain))
    assert parse_reference(f"oci-layout:{plain}:v1") == Reference("", str(plain), "v1")
    assert parse_reference(f"oci-layout:{colon}") == Reference("", str(colon))
    assert parse_reference(f"oci-layout:{plain}@{D}").digest == D
    relative = os.path.relpath(plain)
    assert parse_reference(f"oci-layout:{relative}:v1").repository == str(plain)
    with pytest.raises(UsageError):
        parse_reference("oci-layout:")


@given(st.text(max_size=60))
def test_any_text_is_a_name_or_a_usage_error(text: str) -> None:
    try:
        parsed = parse_reference(text)
    except UsageError:
        return
    if parsed.host:
        assert parse_reference(parsed.name) == parsed


def config_of(data: bytes = b"{}") -> Descriptor:
    return Descriptor("application/vnd.oci.image.config.v1+json", digest_of(data), len(data))


def test_a_manifest_reads_back_and_is_the_same_bytes_each_time() -> None:
    layer = Descriptor("application/x", D, 7, {"b": "2", "a": "1"})
    subject = Descriptor(OCI_MANIFEST, D, 9, {"not": "kept"}, "", Platform("linux", "amd64"))
    made = [
        manifest_bytes(
            config=config_of(),
            layers=[layer],
            subject=subject,
            artifact_type="application/t",
            annotations={"k": "v"},
        )
        for _ in range(2)
    ]
    assert made[0] == made[1]
    parsed = parse_manifest(made[0])
    assert isinstance(parsed, Manifest)
    assert parsed.layers == (layer,)
    assert parsed.raw == made[0]
    assert parsed.subject == Descriptor(OCI_MANIFEST, D, 9)
    assert (parsed.artifact_type, parsed.annotations) == ("application/t", {"k": "v"})
    assert parsed.layer("application/x") == layer
    assert parsed.layer("application/y") is None


def test_an_index_reads_back_under_any_media_type_said_by_the_server() -> None:
    entry = Descriptor(OCI_MANIFEST, D, 5, {}, "t", Platform("linux", "arm", "v7"))
    raw = index_bytes([entry])
    for kind in ("", OCI_INDEX, "application/json", "text/plain; charset=utf-8"):
        parsed = parse_manifest(raw, kind)
        assert isinstance(parsed, Index)
        assert parsed.manifests == (entry,)


def broken_manifests() -> dict[str, bytes]:
    good = json.loads(manifest_bytes(config=config_of(), layers=[config_of()]))

    def with_(**changes: object) -> bytes:
        return json.dumps({**good, **changes}).encode()

    def layer(**changes: object) -> bytes:
        return with_(layers=[{**good["layers"][0], **changes}])

    return {
        "no JSON": b"\xff{",
        "no object": b"[1]",
        "deep": b"[" * 100_000,
        "schema 1": with_(schemaVersion=1),
        "no config": with_(config=None),
        "layers no list": with_(layers={}),
        "digest of another kind": layer(digest="md5:" + "0" * 32),
        "digest with a path": layer(digest="sha256:../../etc/passwd"),
        "negative size": layer(size=-1),
        "size no number": layer(size="7"),
        "size true": layer(size=True),
        "size without end": layer(size=10**30),
        "too many layers": with_(layers=[good["layers"][0]] * 10_001),
        "subject no descriptor": with_(subject={"digest": 3}),
        "an index that says it is none": with_(mediaType=DOCKER_INDEX),
        "too large": b" " * (4 << 20) + b"{}",
    }


@pytest.mark.parametrize("name", list(broken_manifests()))
def test_broken_manifests_are_refused_by_our_errors(name: str) -> None:
    with pytest.raises((CorruptDataError, NotSupportedError), match="manifest"):
        parse_manifest(broken_manifests()[name], OCI_MANIFEST)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_manifest_or_an_error_of_ours(data: bytes) -> None:
    with pytest.raises(BootseerError):
        parse_manifest(data)


def offers(*texts: str) -> list[Descriptor]:
    return [
        Descriptor(OCI_MANIFEST, f"sha256:{number:064x}", 1, {}, "", parse_platform(text))
        for number, text in enumerate(texts)
    ]


@pytest.mark.parametrize(
    ("wanted_text", "there", "chosen"),
    [
        ("linux/amd64", ["linux/arm64", "linux/amd64"], "linux/amd64"),
        ("linux/arm64", ["linux/arm64/v8", "linux/arm64/v9"], "linux/arm64/v8"),
        ("linux/arm64/v8", ["linux/arm64"], "linux/arm64"),
        ("linux/arm/v7", ["linux/arm/v5", "linux/arm/v6"], "linux/arm/v6"),
        ("linux/arm/v6", ["linux/arm/v7", "linux/arm/v5"], "linux/arm/v5"),
        ("linux/amd64/v3", ["linux/amd64", "linux/amd64/v2", "linux/amd64/v4"], "linux/amd64/v2"),
        ("linux/amd64", ["unknown/unknown", "windows/amd64", "linux/amd64"], "linux/amd64"),
    ],
)
def test_the_platform_that_the_machine_runs_is_chosen(
    wanted_text: str, there: list[str], chosen: str
) -> None:
    found = choose_platform(offers(*there), parse_platform(wanted_text), "x")
    assert str(found.platform) == chosen


def test_without_this_platform_the_error_names_those_there_are() -> None:
    with pytest.raises(NotSupportedError, match=r"linux/riscv64; there are linux/arm64, windows"):
        choose_platform(
            offers("linux/arm64", "windows/amd64", "unknown/unknown"),
            parse_platform("linux/riscv64"),
            "the image",
        )
    assert this_platform().os == "linux"


@pytest.mark.parametrize(
    ("here", "offered", "fits"),
    [
        ("amd64", "linux/amd64", True),
        ("amd64", "Linux/X86_64", True),
        ("amd64", "linux/", True),
        ("amd64", "/AMD64", True),
        ("amd64", "unknown/unknown", True),
        ("amd64", "linux/noarch", True),
        ("amd64", "linux/All", True),
        ("amd64", "linux/386", True),
        ("amd64", "linux/i686", True),
        ("amd64", "linux/arm64", False),
        ("amd64", "linux/arm", False),
        ("amd64", "windows/amd64", False),
        ("386", "linux/amd64", False),
        ("arm64", "linux/AArch64", True),
        ("arm64", "linux/arm", True),
        ("arm64", "linux/amd64", False),
        ("arm64", "linux/386", False),
        ("riscv64", "linux/riscv64", True),
        ("riscv64", "linux/arm64", False),
    ],
)
def test_an_image_alone_is_refused_where_it_surely_cannot_run(
    here: str, offered: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platforms, "this_platform", lambda: Platform("linux", here))
    refused = pytest.raises(NotSupportedError, match=f"has no image for linux/{here}; it is one")
    with contextlib.nullcontext() if fits else refused:
        platforms.check_alone(Platform(*offered.split("/")), "x:1")


def test_challenges_are_taken_apart_with_their_quoted_commas() -> None:
    header = (
        'Basic realm="a \\"quoted\\" one", Bearer realm="https://auth/t?x=1,2",service="a,b",'
        'scope="repository:x:pull,push", error=invalid'
    )
    assert parse_challenges([header, "Negotiate"]) == [
        Challenge("basic", {"realm": 'a "quoted" one'}),
        Challenge(
            "bearer",
            {
                "realm": "https://auth/t?x=1,2",
                "service": "a,b",
                "scope": "repository:x:pull,push",
                "error": "invalid",
            },
        ),
        Challenge("negotiate", {}),
    ]


@given(st.text(max_size=80))
def test_any_text_can_be_a_challenge(text: str) -> None:
    parse_challenges([text])


def test_scopes_of_one_resource_are_one() -> None:
    assert merge_scopes(("repository:a:pull", "repository:a:push,pull repository:b:pull")) == (
        "repository:a:pull,push",
        "repository:b:pull",
    )


def test_a_token_lives_as_long_as_it_says_and_is_renewed_before() -> None:
    assert token_life_s({"expires_in": 300}) == 300
    assert token_life_s({}) == 60  # as the specification has it
    assert token_life_s({"expires_in": True}) == 60
    assert token_life_s({"expires_in": -5}) == 60
    assert use_until_s(1000, 300) == 1290
    assert use_until_s(1000, 4) == 1003


def test_referrers_are_kept_once_and_under_a_tag() -> None:
    one, other = Descriptor(OCI_MANIFEST, D, 1, {}, "t1"), Descriptor(OCI_MANIFEST, D, 1, {}, "t1")
    assert referrers_tag(D) == "sha256-" + "a" * 64
    assert len(referrers_tag("sha512:" + "b" * 128)) == 128
    assert filter_referrers([one, other], "t1") == [one]
    assert filter_referrers([one], "t2") == []
    raw = with_referrer([], one)
    assert raw is not None
    parsed = parse_manifest(raw)
    assert isinstance(parsed, Index)
    assert with_referrer(parsed.manifests, other) is None
