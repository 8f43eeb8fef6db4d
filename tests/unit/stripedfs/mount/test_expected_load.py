"""Which checkpoint a job is expected to load."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.errors import CorruptDataError, NotFoundError
from bootseer.stripedfs.mount.expected_load import SMALL_BYTES, find_expected
from bootseer.stripedfs.mount.read_tree import StripedTree
from bootseer.stripedfs.write.put import put_into
from tests.support.mounts.checkpoints import content, put_bytes, store_of, tree_at


@pytest.fixture
def fetcher() -> Iterator[Fetcher]:
    with Fetcher() as made:
        yield made


def expected(root: Path, fetcher: Fetcher, wanted: str, name: str = "") -> list[str]:
    tree = tree_at(StripedTree, store_of(root), name, fetcher)
    return [node.path for node in find_expected(tree, wanted)]


def write(path: Path, data: bytes = b"x", *, at_s: int = 1_000_000) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    os.utime(path, (at_s, at_s))


def folder(path: Path, *names: str, at_s: int = 1_000_000) -> None:
    for name in names:
        write(path / name)
    os.utime(path, (at_s, at_s))


def test_a_file_that_is_mounted_is_loaded(tmp_path: Path, fetcher: Fetcher) -> None:
    put_bytes(store_of(tmp_path / "s"), "model.pt", content(9000), tmp_path)
    assert expected(tmp_path / "s", fetcher, "", "model.pt") == ["model.pt"]


def test_of_a_directory_checkpoint_small_files_come_first(tmp_path: Path, fetcher: Fetcher) -> None:
    source = tmp_path / "source"
    for name in ("__10_0.distcp", "__2_0.distcp"):
        write(source / name, bytes(SMALL_BYTES + 1))
    write(source / ".metadata")
    write(source / "optimizer" / "state.json")
    put_into(store_of(tmp_path / "s"), "run", str(source))
    small = [".metadata", "optimizer/state.json"]
    assert expected(tmp_path / "s", fetcher, "", "run") == [
        *small,
        "__2_0.distcp",
        "__10_0.distcp",
    ]


def test_a_plain_folder_of_files_is_one_checkpoint(tmp_path: Path, fetcher: Fetcher) -> None:
    folder(tmp_path / "s" / "m", "a.safetensors", "config.json")
    assert expected(tmp_path / "s", fetcher, "", "m") == ["a.safetensors", "config.json"]


def test_of_a_folder_of_checkpoints_nothing_is_expected(tmp_path: Path, fetcher: Fetcher) -> None:
    folder(tmp_path / "s" / "step-1", "model.pt")
    write(tmp_path / "s" / "readme")
    assert expected(tmp_path / "s", fetcher, "") == []


def test_a_name_and_a_path(tmp_path: Path, fetcher: Fetcher) -> None:
    folder(tmp_path / "s" / "runs" / "step-1", "model.pt")
    write(tmp_path / "s" / "other.pt")
    assert expected(tmp_path / "s", fetcher, "runs/step-1") == ["runs/step-1/model.pt"]
    assert expected(tmp_path / "s", fetcher, "other.pt") == ["other.pt"]
    for wanted in ("runs/step-2", "../other.pt", "other.pt/x"):
        with pytest.raises(NotFoundError):
            expected(tmp_path / "s", fetcher, wanted)


def test_what_a_command_prints(tmp_path: Path, fetcher: Fetcher) -> None:
    folder(tmp_path / "s" / "step-1", "model.pt")
    assert expected(tmp_path / "s", fetcher, "!echo step-1; echo more") == ["step-1/model.pt"]
    for command, error in (
        ("!exit 3", NotFoundError),
        ("!true", CorruptDataError),
        ("!echo gone", NotFoundError),
    ):
        with pytest.raises(error):
            expected(tmp_path / "s", fetcher, command)


def test_the_newest_of_a_pattern(tmp_path: Path, fetcher: Fetcher) -> None:
    for number, at_s in ((9, 300), (10, 200), (8, 100)):
        folder(tmp_path / "s" / f"step-{number}", "model.pt", at_s=at_s)
    folder(tmp_path / "s" / "final", "model.pt", at_s=400)
    assert expected(tmp_path / "s", fetcher, "step-*") == ["step-9/model.pt"]
    assert expected(tmp_path / "s", fetcher, "epoch-*") == []


def test_of_the_same_time_the_higher_number_is_newer(tmp_path: Path, fetcher: Fetcher) -> None:
    for number in (9, 10, 8):
        folder(tmp_path / "s" / "all" / f"step-{number}", "model.pt", at_s=100)
    assert expected(tmp_path / "s", fetcher, "all/step-*") == ["all/step-10/model.pt"]


@pytest.mark.parametrize(
    "names",
    [
        ("model.pt.tmp",),
        ("__0_0.distcp",),
        (),
        ("model-00001-of-00002.safetensors", "model.safetensors.index.json"),
    ],
)
def test_what_is_not_finished_is_not_expected(
    tmp_path: Path, fetcher: Fetcher, names: tuple[str, ...]
) -> None:
    folder(tmp_path / "s" / "step-1", "model.pt", at_s=100)
    newer = tmp_path / "s" / "step-2"
    newer.mkdir(parents=True)
    folder(newer, *names, at_s=200)
    index = newer / "model.safetensors.index.json"
    if index.exists():
        shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
        index.write_text(json.dumps({"weight_map": dict(zip("ab", shards, strict=True))}))
        os.utime(newer, (200, 200))
    assert expected(tmp_path / "s", fetcher, "step-*") == ["step-1/model.pt"]


def test_a_whole_one_of_several_shards_is_expected(tmp_path: Path, fetcher: Fetcher) -> None:
    place = tmp_path / "s" / "step-2"
    names = ["model-1.safetensors", "model-2.safetensors"]
    write(
        place / "model.safetensors.index.json", json.dumps({"weight_map": {"a": names[1]}}).encode()
    )
    folder(place, *names)
    folder(tmp_path / "s" / "step-3.tmp", "model.pt", at_s=2_000_000)
    assert expected(tmp_path / "s", fetcher, "step-*") == [
        f"step-2/{name}" for name in (*names, "model.safetensors.index.json")
    ]


def test_what_a_pointer_file_names(tmp_path: Path, fetcher: Fetcher) -> None:
    """As DeepSpeed's `latest`, and Megatron's number of an iteration."""
    folder(tmp_path / "s" / "global_step100", "model.pt")
    folder(tmp_path / "s" / "iter_0000200", "model.pt")
    write(tmp_path / "s" / "latest", b"global_step100\n")
    write(tmp_path / "s" / "latest_checkpointed_iteration.txt", b"200")
    assert expected(tmp_path / "s", fetcher, "@latest") == ["global_step100/model.pt"]
    megatron = "@latest_checkpointed_iteration.txt:iter_{:07}"
    assert expected(tmp_path / "s", fetcher, megatron) == ["iter_0000200/model.pt"]
    folder(tmp_path / "s" / "release", "model.pt")
    write(tmp_path / "s" / "latest_checkpointed_iteration.txt", b"release")
    assert expected(tmp_path / "s", fetcher, megatron) == ["release/model.pt"]


@pytest.mark.parametrize(
    ("data", "wanted", "error"),
    [
        (b"", "@latest", CorruptDataError),
        (b"\xff\xfe", "@latest", CorruptDataError),
        (b"\0\1", "@latest", CorruptDataError),
        (b"gone", "@latest", NotFoundError),
        (b"1", "@latest:{0.real}{x}", CorruptDataError),
        (b"1", "@nowhere", NotFoundError),
        (b"1", "@some", NotFoundError),
    ],
)
def test_a_pointer_that_leads_nowhere(
    tmp_path: Path, fetcher: Fetcher, data: bytes, wanted: str, error: type[Exception]
) -> None:
    write(tmp_path / "s" / "latest", data)
    folder(tmp_path / "s" / "some", "model.pt")
    with pytest.raises(error):
        expected(tmp_path / "s", fetcher, wanted)
