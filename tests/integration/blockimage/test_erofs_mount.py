"""How EROFS is mounted where the kernel cannot do it by files. FAKE refusals of mount(2)."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bootseer.blockimage import erofs_mount
from bootseer.blockimage.build import build
from bootseer.errors import BootseerError, NotSupportedError
from bootseer.system.mountinfo import all_mounts
from tests.support.mounts.fuse import own_mounts
from tests.support.mounts.images import entries_of, some_files, tree_of
from tests.support.trees.block_images import unpack

pytestmark = [pytest.mark.root, pytest.mark.slow]

FILES = some_files(4, 50_000)


def refusing(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> list[str]:
    """FAKE: mount(2) answers with these errors, one each time, and then as the kernel does."""
    asked: list[str] = []
    really = erofs_mount.mount

    def mount(source: str, target: str, kind: str, flags: int, data: str) -> None:
        asked.append(source)
        if len(asked) <= len(numbers):
            raise OSError(numbers[len(asked) - 1], "as an old kernel says")
        really(source, target, kind, flags, data)

    monkeypatch.setattr(erofs_mount, "mount", mount)
    return asked


def image(folder: Path) -> tuple[str, str, str]:
    folder.mkdir(exist_ok=True)
    built = build(entries_of(FILES), str(folder))
    raw = folder / "raw"
    unpack(built.table, Path(built.data_path).read_bytes(), raw)
    target = folder / "tree"
    target.mkdir()
    return built.meta_path, str(raw), str(target)


@pytest.mark.parametrize("number", [errno.ENOTBLK, errno.EINVAL, errno.EOPNOTSUPP])
def test_a_kernel_without_file_backed_mounts_gets_loop_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    meta, data, target = image(tmp_path)
    asked = refusing(monkeypatch, number)
    made: Any = erofs_mount.mount_erofs(meta, data, target)
    try:
        assert made.loop
        assert [asked[0], asked[1].startswith("/dev/loop")] == [meta, True]
        assert tree_of(target) == FILES
    finally:
        ctypes.CDLL(None).umount2(os.fsencode(target), 2)
    loops = subprocess.run(["losetup", "-l"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in loops


@pytest.mark.parametrize(
    ("numbers", "kind"),
    [
        ((errno.ENODEV, errno.ENODEV), NotSupportedError),  # no EROFS at all
        ((errno.EPERM,), BootseerError),  # what no loop device mends
    ],
)
def test_what_loop_devices_do_not_mend_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    numbers: tuple[int, ...],
    kind: type[BootseerError],
) -> None:
    meta, data, target = image(tmp_path)
    asked = refusing(monkeypatch, *numbers)
    with pytest.raises(kind):
        erofs_mount.mount_erofs(meta, data, target)
    assert len(asked) == len(numbers)
    assert not os.listdir(target)
    loops = subprocess.run(["losetup", "-l"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in loops


@pytest.mark.parametrize("loop", [False, True])
def test_what_was_mounted_is_not_mistaken_for_what_lies_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: bool
) -> None:
    """FAKE: somebody mounts an image of their own at the same place, at the unluckiest moment."""
    meta, data, target = image(tmp_path / "ours")
    other, other_data, _ = image(tmp_path / "other")
    really = erofs_mount.mount

    def mount(source: str, target: str, kind: str, flags: int, words: str) -> None:
        really(source, target, kind, flags, words)
        really(other, target, kind, flags, f"device={other_data}")

    monkeypatch.setattr(erofs_mount, "mount", mount)
    with own_mounts():
        made = erofs_mount.mount_erofs(meta, data, target, loop=loop)
        above, below = reversed(all_mounts()[-2:])
        assert (above.target, below.target) == (target, target)
        assert (made.device, made.source) == (below.device, below.source)
        for _ in range(2):
            assert ctypes.CDLL(None).umount2(os.fsencode(target), 2) == 0
