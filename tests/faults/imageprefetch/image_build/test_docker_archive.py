"""docker-archives that no program wrote: refused by errors of ours, and none fills memory."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from bootseer.errors import BootseerError, CorruptDataError
from bootseer.imageprefetch.image_build.docker_archive import DockerArchive

LIMIT = 8 << 20
END = bytes(1024)
LISTED = [{"Config": "c", "Layers": ["l"], "RepoTags": ["a:1"]}]


def tar_of(**members: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name.replace("_", "."))
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def header(kind: bytes, **fields: object) -> bytes:
    info = tarfile.TarInfo("x")
    info.type = kind
    for key, value in fields.items():
        setattr(info, key, value)
    return info.tobuf(tarfile.PAX_FORMAT)


def listing(document: object) -> bytes:
    return tar_of(manifest_json=json.dumps(document).encode(), c=b"{}", l=b"layer")


SPARSE = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "x"}
SPARSE["GNU.sparse.realsize"] = "5"
HOSTILE = {
    "a number for a list": listing(5),
    "no list": listing({"a": 1}),
    "an image that is none": listing([5]),
    "no layers": listing([{"Config": "c"}]),
    "a layer that is not there": listing([{"Config": "c", "Layers": ["../../etc/passwd"]}]),
    "a layer without a name": listing([{"Config": "c", "Layers": [{}]}]),
    "no manifest": tar_of(c=b"{}"),
    "nothing": END,
    "headers upon headers": header(b"x", size=0) * 5000 + END,
    "a sparse map without end": header(b"0", size=512, pax_headers=SPARSE) + b"99999\n" + END,
    "a negative size": header(b"0", size=-(1 << 40)) + END,
}


def opened(path: Path, data: bytes) -> tuple[bytes, list[tuple[int, int]]]:
    path.write_bytes(data)
    return DockerArchive.open(str(path), str(path.parent), LIMIT).image("")


def test_what_is_listed_is_found(tmp_path: Path) -> None:
    data = listing(LISTED)
    config, layers = opened(tmp_path / "a", data)
    assert config == b"{}"
    assert [data[at : at + length] for at, length in layers] == [b"layer"]


@pytest.mark.parametrize("what", HOSTILE)
def test_what_makes_no_sense_is_refused(tmp_path: Path, what: str) -> None:
    with pytest.raises(BootseerError):
        opened(tmp_path / "a", HOSTILE[what])


def test_a_header_takes_no_memory(tmp_path: Path) -> None:
    size = 64 << 20
    with (tmp_path / "a").open("wb") as out:
        out.write(header(b"x", size=size))
        out.truncate(size + 4096)
    tracemalloc.start()
    with pytest.raises(CorruptDataError, match="larger than any"):
        DockerArchive.open(str(tmp_path / "a"), str(tmp_path), LIMIT)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_a_packed_archive_does_not_fill_the_disk(tmp_path: Path) -> None:
    bomb = gzip.compress(tar_of(manifest_json=json.dumps(LISTED).encode(), c=b"{}", l=bytes(LIMIT)))
    with pytest.raises(CorruptDataError, match="unpacks to more"):
        opened(tmp_path / "a", bomb)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 1 << 20
