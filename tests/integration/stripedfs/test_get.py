"""Gets to places that only root can make."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from bootseer.blocks.fetch.fetcher import Fetcher, FetchSettings
from bootseer.errors import UsageError
from bootseer.storage.local import LocalStore
from bootseer.stripedfs.read.get import GetReport, get_from_store
from bootseer.stripedfs.read.namespace import look_up
from bootseer.stripedfs.write.stripe_stream import StripedWriter
from bootseer.stripedfs.write.write_settings import WriteSettings
from tests.support.samples.stripes import CHUNK, opened, sample

ONE_BY_ONE = WriteSettings(chunk_bytes=CHUNK, width=4, jobs=1, keep_bytes=0)

QUICK = FetchSettings(tries=1, backoff_s=0.001)


def _get(store: LocalStore, name: str, to: Path, **more: bool) -> GetReport:
    with Fetcher(QUICK) as fetcher:
        return get_from_store(store, look_up(store, name), str(to), fetcher, **more)


def _stored(tmp_path: Path, size: int = 40 * CHUNK + 1) -> bytes:
    data = sample(size, 3)
    with StripedWriter.begin(opened(tmp_path / "s"), "f", ONE_BY_ONE) as out:
        out.write(data)
    (tmp_path / "s/plain").write_bytes(data)
    return data


@pytest.mark.root
def test_a_device_is_never_replaced(tmp_path: Path) -> None:
    _stored(tmp_path)
    os.mknod(tmp_path / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    with pytest.raises(UsageError, match="no ordinary file"):
        _get(LocalStore(str(tmp_path / "s")), "plain", tmp_path / "null")
    assert stat.S_ISCHR(os.lstat(tmp_path / "null").st_mode)
