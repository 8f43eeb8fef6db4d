"""Gets that only root can put to the test, and one of the command, bound by modes."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.errors import UsageError
from bootseer.storage.local import LocalStore
from bootseer.stripedfs.read import partial_download
from bootseer.stripedfs.write.put import put_into
from tests.support.samples.stripes import (
    ONE_BY_ONE,
    get_quickly,
    local_tree,
    make_tree,
    store_sample,
)


@pytest.mark.root
def test_a_device_is_never_replaced(tmp_path: Path) -> None:
    store_sample(tmp_path)
    os.mknod(tmp_path / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    with pytest.raises(UsageError, match="no ordinary file"):
        get_quickly(LocalStore(str(tmp_path / "s")), "plain", tmp_path / "null")
    assert stat.S_ISCHR(os.lstat(tmp_path / "null").st_mode)


@pytest.mark.parametrize("more", [[], ["--no-resume"]])
def test_a_get_goes_on_though_the_modes_were_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    source = make_tree(tmp_path / "src")
    for path in sorted(source.rglob("*"), reverse=True):
        if not path.is_symlink():
            path.chmod(0o555 if path.is_dir() else 0o444)
    source.chmod(0o555)
    put_into(LocalStore(str(tmp_path / "s")), "ck", str(source), settings=ONE_BY_ONE)

    def interrupted(_: partial_download.PartialDownload) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(partial_download.PartialDownload, "publish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            get_quickly(LocalStore(str(tmp_path / "s")), "ck", tmp_path / "out")
    words = [sys.executable, "-m", "bootseer", "stripe", "get", *more]
    words += ["--json", str(tmp_path / "s/ck"), str(tmp_path / "out")]
    if os.geteuid() == 0:  # modes bind root as well without its capabilities
        words = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", *words]
    done = subprocess.run(words, capture_output=True, check=True)
    assert (json.loads(done.stdout)["kept_bytes"] > 0) == (not more)
    assert local_tree(tmp_path / "out") == local_tree(source)
    assert stat.S_IMODE((tmp_path / "out/sub").stat().st_mode) == 0o555
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "s", "src"]
