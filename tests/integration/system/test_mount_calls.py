"""System calls on mounts, made for real."""

from __future__ import annotations

import errno
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.imageprefetch.filemode.roots import FileOpener
from bootseer.system.mount_calls import (
    BENEATH,
    IN_ROOT,
    MS_BIND,
    MS_RDONLY,
    MS_REMOUNT,
    make_mount,
    mount,
    open_in,
    unmount,
)

needs_root = pytest.mark.root


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """An empty tmpfs."""
    path = tmp_path / "a place"
    path.mkdir()
    mount("tmpfs", str(path), "tmpfs", 0, "mode=0750,size=1m")
    yield path
    unmount(str(path), lazily=True)


@needs_root
def test_data_and_flags_reach_the_file_system(place: Path) -> None:
    assert place.stat().st_mode & 0o777 == 0o750
    (place / "before").touch()
    mount("none", str(place), "none", MS_REMOUNT | MS_BIND | MS_RDONLY)
    with pytest.raises(OSError, match="Read-only"):
        (place / "after").touch()


@needs_root
def test_what_is_in_use_is_unmounted_lazily_alone(tmp_path: Path, place: Path) -> None:
    folder = tmp_path / "bound"
    folder.mkdir()
    mount(str(place), str(folder), "none", MS_BIND)
    with open(folder / "held", "w", encoding="ascii"):
        with pytest.raises(OSError, match=os.strerror(errno.EBUSY)) as caught:
            unmount(str(folder))
        assert caught.value.filename == str(folder)
        unmount(str(folder), lazily=True)
    assert (list(folder.iterdir()), [p.name for p in place.iterdir()]) == ([], ["held"])


@needs_root
def test_no_link_is_followed_to_what_is_unmounted(tmp_path: Path, place: Path) -> None:
    (tmp_path / "link").symlink_to(place)
    with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
        unmount(str(tmp_path / "link"))
    assert place.is_mount()


def test_an_error_names_the_target(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no such place") as caught:
        mount("none", str(tmp_path / "no such place"), "tmpfs")
    assert caught.value.errno in (errno.ENOENT, errno.EPERM)


@needs_root
def test_a_mount_without_a_place() -> None:
    mounted = make_mount("tmpfs")
    os.close(os.open("file", os.O_RDWR | os.O_CREAT, dir_fd=mounted))
    folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=mounted)
    assert os.listdir(folder) == ["file"]
    for fd in (folder, mounted):
        os.close(fd)
    with pytest.raises(OSError, match=os.strerror(errno.ENODEV)):
        make_mount("nosuchfs")


def test_a_path_is_opened_within_bounds(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root/inside").write_text("inside", encoding="ascii")
    (tmp_path / "root/link").symlink_to("/inside")
    root = os.open(tmp_path / "root", os.O_RDONLY)
    fd = open_in(root, b"link", os.O_RDONLY, IN_ROOT)
    assert os.read(fd, 10) == b"inside"
    for path in (b"link", b"../root/inside"):
        with pytest.raises(OSError, match=os.strerror(errno.EXDEV)):
            open_in(root, path, os.O_RDONLY, BENEATH)
    for one in (fd, root):
        os.close(one)


def test_the_kernel_bounds_paths_on_every_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File mode once asked it on two alone: elsewhere a link could be put in between its steps."""
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    monkeypatch.setattr(os.path, "realpath", lambda path, **_: path)  # as if it saw no link
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/file").touch()
    (tmp_path / "link").symlink_to("folder")
    with FileOpener([str(tmp_path)]) as opener:
        os.close(opener.open(str(tmp_path / "folder/file"))[0])
        with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
            opener.open(str(tmp_path / "link/file"))
