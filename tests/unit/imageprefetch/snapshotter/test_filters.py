"""The filters of lists, and the messages on the wire."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bootseer.errors import UsageError
from bootseer.imageprefetch.snapshotter import filters, messages
from bootseer.imageprefetch.snapshotter.types import Kind, Snapshot

LABELS = {"plain": "yes", "containerd.io/snapshot.ref": "sha256:ab", "empty.dots.x": "1"}
ROW = Snapshot("a/1/it", "a/1/base", Kind.ACTIVE, 1, 2, "f", LABELS)


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("", True),
        ("name==a/1/it", True),
        ("name==a/1/other", False),
        ("name!=a/1/other", True),
        ("name~=^a/[0-9]+/", True),
        ("name~=/^a.1.it$/", True),
        ("name~=|^a/1|", True),
        ("name~=^b", False),
        ("kind==active", True),
        ("kind==committed", False),
        ("parent==a/1/base , kind==active", True),
        ("parent==a/1/base,kind==view", False),
        ('parent=="a/1/base"', True),
        (r'name=="\x61/1/\u0069t"', True),
        ("labels.plain", True),
        ("labels.absent", False),
        ("labels.plain==yes", True),
        ('labels."containerd.io/snapshot.ref"==sha256:ab,parent=="a/1/base"', True),
        ('labels."containerd.io/snapshot.ref"==sha256:cd', False),
        ("labels.empty.dots.x==1", True),
        ("labels.absent!=x", True),
        ("nothing.known", False),
    ],
)
def test_a_filter_matches(text: str, matches: bool) -> None:
    assert filters.parse_all([text])(ROW) is matches


def test_of_several_filters_one_must_match() -> None:
    assert filters.parse_all(["kind==view", "name==a/1/it"])(ROW)
    assert not filters.parse_all(["kind==view", "name==b"])(ROW)
    assert filters.parse_all([])(ROW)


@pytest.mark.parametrize(
    "text",
    [
        *("==x", "name=", "name==", "name=x", "name===x", "name==a b", "name,", ".name", "name."),
        *('name=="open', r'name=="\q"', r'name=="\400"', "name~=(", "name==/x/", "-"),
    ],
)
def test_what_is_no_filter_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(UsageError, match="at character"):
        filters.parse_all([text])


def test_messages_keep_their_values() -> None:
    types = messages.messages()
    info = types.Info(name="n", parent="p", kind=3, labels={"a": "b"})
    info.created_at.FromNanoseconds(1_700_000_000_123_456_789)
    raw = types.ListSnapshotsResponse(info=[info, info]).SerializeToString()
    back = types.ListSnapshotsResponse.FromString(raw).info[1]
    assert (back.name, back.kind, dict(back.labels)) == ("n", 3, {"a": "b"})
    assert back.created_at.ToNanoseconds() == 1_700_000_000_123_456_789


def test_importing_loads_neither_grpc_nor_protobuf() -> None:
    code = (
        "import sys, bootseer.imageprefetch.snapshotter.process, bootseer.cli.snapshotter\n"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('grpc', 'google')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_program_is_the_command() -> None:
    code = (
        "import sys; from bootseer.cli.snapshotter import main; sys.argv[1:] = ['--help']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Serve containerd" in done.stdout
