"""Store URLs: parts, HA spelling, and that nothing secret is shown."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import UsageError
from bootseer.events.redaction import plain_query, redact_message, safe_url
from bootseer.storage import urls
from bootseer.storage.open import open_object, open_store
from bootseer.storage.options import StoreOptions


@pytest.mark.parametrize(
    ("url", "scheme", "hosts", "path", "shown"),
    [
        ("/a/b", "file", (), "/a/b", "file:///a/b"),
        ("file:///a%20b", "file", (), "/a b", "file:///a b"),
        ("http://h", "http", ("h:80",), "", "http://h/"),
        ("HTTPS://h:444/a%20b/", "https", ("h:444",), "/a b/", "https://h:444/a b"),
        ("webhdfs://nn/a", "webhdfs", ("nn:9870",), "/a", "webhdfs://nn:9870/a"),
        ("swebhdfs://nn/a", "webhdfss", ("nn:9871",), "/a", "webhdfss://nn:9871/a"),
        ("webhdfs://a:1,b:2/x", "webhdfs", ("a:1", "b:2"), "/x", "webhdfs://a:1,b:2/x"),
        ("hdfs://ns/x", "hdfs", ("ns",), "/x", "hdfs://ns/x"),
        ("http://[::1]:8080/x", "http", ("[::1]:8080",), "/x", "http://[::1]:8080/x"),
        (
            "webhdfs://nn/a%23%3Fb%2541",
            "webhdfs",
            ("nn:9870",),
            "/a#?b%41",
            "webhdfs://nn:9870/a%23%3Fb%2541",
        ),
        ("http://[::1]/x", "http", ("[::1]:80",), "/x", "http://[::1]/x"),
    ],
)
def test_parts(url: str, scheme: str, hosts: tuple[str, ...], path: str, shown: str) -> None:
    parsed = urls.parse_url(url)
    assert (parsed.scheme, parsed.hosts, parsed.path, parsed.shown) == (scheme, hosts, path, shown)


@pytest.mark.parametrize(
    "bad",
    ["", "file://", "file://host/x", "http://", "http:///x", "http://h:/x", "http://h:x/",
     "http://h:70000/", "http://a,b/x", "webhdfs://a,,b/x", "hdfs:///x"],
)  # fmt: skip
def test_urls_that_cannot_be_used(bad: str) -> None:
    if bad == "http://h:/x":
        assert urls.parse_url(bad).hosts == ("h:80",)
        return
    with pytest.raises(UsageError):
        urls.parse_url(bad)


def test_an_unusable_url_is_refused_without_its_password() -> None:
    for url in ("http://u:S3CRET@h:port/x", "nn://u:S3CRET@h/x", "http://u:S3CRET@h"):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - whichever of ours it is
            open_object(url)
        assert "S3CRET" not in str(caught.value)


@given(st.text(min_size=8, max_size=20, alphabet="abcdefXYZ0123456789_-"))
def test_secrets_are_never_shown(secret: str) -> None:
    secret = f"q9{secret}"
    for url in (
        f"webhdfs://nn:1/x?delegation={secret}",
        f"https://user:{secret}@h/x?X-Amz-Signature={secret}&sig={secret}",
        f"http://h/x?anything={secret}",
    ):
        parsed = urls.parse_url(url)
        assert secret not in parsed.shown
        assert secret not in repr(parsed)
        assert secret not in safe_url(url)
        assert secret not in safe_url(url.replace("user:", "user:a@"))
        assert secret not in redact_message(
            f"cannot get {url.replace('anything', 'token')}: refused"
        )
    assert secret not in redact_message(f"Authorization: Bearer {secret}")
    assert secret not in redact_message(f"Location: http://dn:2/p?op=OPEN&delegation={secret}&o=1")
    assert secret not in redact_message(f"http://dn:2/p?op=OPEN%26delegation%3D{secret}")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://h/x?api_key=s3c&a=1", "http://h/x?api_key=…&a=1"),
        ("api-key=s3c, AccessKey=s3c, private_key=s3c", "api-key=…, AccessKey=…, private_key=…"),
        ("passwd=s3c GITHUB_PAT=s3c secret-key=s3c", "passwd=… GITHUB_PAT=… secret-key=…"),
        ("cannot get https://user:s3c@s3c@h/x", "cannot get https://h/x"),
        (f"it says ghp_{'a1B2' * 6}: bad", "it says …: bad"),
        ("no xoxb-12345678901", "no …"),
    ],
)
def test_messages_hide_what_commands_hide(text: str, shown: str) -> None:
    assert redact_message(text) == shown


def test_redaction_keeps_the_rest() -> None:
    text = "http://u:p@dn:2/p?op=OPEN&delegation=abc&offset=5 refused"
    assert redact_message(text) == "http://dn:2/p?op=OPEN&delegation=…&offset=5 refused"
    assert redact_message("a plain message about tokens") == "a plain message about tokens"
    for kept in ("tokenizer=gpt2, compat=2, path=/x", "http://h/a?mail=b@c", "http://h, 'x@y'"):
        assert redact_message(kept) == kept


def test_signatures_do_not_tell_objects_apart() -> None:
    assert plain_query("versionId=3&X-Amz-Signature=a&Expires=4") == "versionId=3"
    assert plain_query("file=a") != plain_query("file=b")


@pytest.mark.parametrize(
    ("url", "folder", "name"),
    [
        ("/a/b", "/a", "b"),
        ("/b", "/", "b"),
        ("b", ".", "b"),
        ("file:///a/b%20c", "file:///a/", "b c"),
        ("http://h/b?sig=1", "http://h/?sig=1", "b"),
        ("webhdfs://nn/a/b/", "webhdfs://nn/a/", "b"),
    ],
)
def test_splitting_an_object_off(url: str, folder: str, name: str) -> None:
    assert urls.split_object(url) == (folder, name)


def test_nothing_to_split_off() -> None:
    for url in ("http://h", "http://h/", "/", "http://h/a%2Fb"):
        with pytest.raises(UsageError):
            urls.split_object(url)


def test_options_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        StoreOptions().user = "x"  # type: ignore[misc]


@pytest.mark.parametrize("url", ["hdfs:/a/b", "HTTP:h/a", "file:a", "webhdfs:/u:word@h/a", "s3:b"])
def test_a_url_without_its_slashes_is_no_directory(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=rf"not with {url.partition(':')[0].lower()}://") as told:
        open_store(url)
    assert "word" not in str(told.value)


@pytest.mark.parametrize("path", ["hdfs", "./hdfs:/a", "http", "a:b", "data/file:x"])
def test_a_directory_may_have_colons_and_the_name_of_a_scheme(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    open_store(path).mkdir("x")
    assert (tmp_path / path / "x").is_dir()
