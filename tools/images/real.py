"""Real images of a training job's kind: Debian, Python and large packages, made without a daemon.

`debian` is the smallest system with Python, one layer; `python` holds numpy and pyarrow above it;
`torch` holds pandas, scipy and torch as well, in a further layer. Each is made once (a minute, the
last some) below `~/.cache/bootseer/lab-images` and reused.

    python -m tools.images.real [debian|python|torch]
"""

from __future__ import annotations

import concurrent.futures
import fcntl
import os
import shutil
import stat
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tools import debian
from tools.images.layout import Image, Layer, Written, open_layout, write_layout
from tools.images.members import Member, directory

REVISION = 2
"""Raised when the images change, so that older ones are not taken for these."""
SUITE = "bookworm"
PACKAGES: dict[str, tuple[str, ...]] = {
    "debian": (),
    "python": ("numpy", "pyarrow"),
    "torch": ("numpy", "pyarrow", "pandas", "scipy", "torch==2.13.0"),
}
SITE = "usr/local/lib/python3.11/dist-packages"
GZIP_LEVEL = 6  # what registries are full of
_ROOT = Path(__file__).parents[2]
_LEFT_OUT = ("dev", "proc", "sys", "run", "tmp", "var/cache/apt", "var/lib/apt/lists", "var/log")
"""Folders of the base that stay empty: made by the runtime, or caches."""


def image(name: str) -> Written:
    """The image `name` in an OCI layout; made first where this machine has none yet.

    Needs root (debootstrap). Raises RuntimeError with the end of a failed step's output.
    """
    if name not in PACKAGES:
        raise ValueError(f"no image {name!r}; there are {', '.join(PACKAGES)}")
    folder = cache() / f"{name}-{REVISION}"
    with (cache() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            _make(name, folder)
    return open_layout(folder, name)


def cache() -> Path:
    """Where images are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base) / "bootseer/lab-images"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _make(name: str, folder: Path) -> None:
    work = cache() / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        layers = [Layer(list(tree_members(_base(), "")))]
        if name != "debian":
            small = _site(work, PACKAGES["python"])
            layers.append(Layer(list(tree_members(small, SITE))))
        if name not in ("debian", "python"):
            large = _site(work, PACKAGES[name])
            _take_away(large, small)
            layers.append(Layer(list(tree_members(large, SITE))))
        config = {"Cmd": ["python3"], "Env": ["PATH=/usr/local/bin:/usr/bin:/bin", "LANG=C.UTF-8"]}
        _write(work / "layout", name, layers, config)
        (work / "layout").replace(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write(folder: Path, name: str, layers: Sequence[Layer], config: Mapping[str, object]) -> None:
    """Compress the layers side by side, then put them together."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        packed = list(pool.map(lambda n: _packed(folder.parent, n, layers[n]), range(len(layers))))
    write_layout(folder, Image(packed, config), tag=name)


def _packed(work: Path, number: int, layer: Layer) -> Layer:
    made = write_layout(work / f"layer{number}", Image([Layer(layer.members, level=GZIP_LEVEL)]))
    return Layer(stored=made.layers()[0])


def _base() -> Path:
    """Debian's smallest system with Python; kept for the next image."""
    base = cache() / f"base-{SUITE}"
    if not base.is_dir():
        part = cache() / "base.part"
        shutil.rmtree(part, ignore_errors=True)
        debs = cache() / "debs"
        debs.mkdir(exist_ok=True)
        words = ["debootstrap", "--variant=minbase", "--include=python3,ca-certificates"]
        _call([*words, f"--cache-dir={debs}", SUITE, str(part), debian.mirror()])
        part.replace(base)
        shutil.rmtree(debs)
    return base


def _site(work: Path, packages: Sequence[str]) -> Path:
    """Packages as pip installs them, with their compiled modules."""
    target = work / "-".join(p.partition("=")[0] for p in packages)
    words = [sys.executable, "-m", "pip", "install", "-q", "--no-input", "--target", str(target)]
    _call([*words, "-c", str(_ROOT / "constraints.txt"), *packages])
    return target


def _take_away(large: Path, small: Path) -> None:
    """Remove from one tree what another holds as well, compiled modules included."""
    for path in sorted(small.rglob("*"), reverse=True):
        twin = large / path.relative_to(small)
        if twin.is_dir() and not twin.is_symlink():
            if not any(twin.iterdir()):
                twin.rmdir()
        else:
            twin.unlink(missing_ok=True)


def tree_members(root: Path, prefix: str) -> Iterator[Member]:
    """A folder's content as members, in the order of its names, its own parents first."""
    parents = [prefix.rsplit("/", n)[0] for n in range(prefix.count("/"), -1, -1) if prefix]
    for parent in parents:
        yield directory(parent)
    links: dict[int, str] = {}
    for folder, folders, files in os.walk(root):
        folders.sort()
        inside = os.path.relpath(folder, root)
        inside = "" if inside == "." else inside
        if not prefix and inside in _LEFT_OUT:
            folders.clear()
            files.clear()
        for name in sorted(files + [f for f in folders if os.path.islink(f"{folder}/{f}")]):
            yield _file(Path(folder) / name, os.path.join(prefix, inside, name), links)
        for name in folders:
            if not os.path.islink(f"{folder}/{name}"):
                yield _info(Path(folder) / name, os.path.join(prefix, inside, name))


def _file(path: Path, name: str, links: dict[int, str]) -> Member:
    about = path.lstat()
    if about.st_nlink > 1 and about.st_ino in links:
        member = _info(path, name)
        member.info.type, member.info.linkname = tarfile.LNKTYPE, links[about.st_ino]
        member.info.size = 0
        return member
    links[about.st_ino] = name
    member = _info(path, name)
    if stat.S_ISLNK(about.st_mode):
        member.info.type, member.info.linkname = tarfile.SYMTYPE, os.readlink(path)
        return member
    member.info.size = about.st_size
    return Member(member.info, path)


def _info(path: Path, name: str) -> Member:
    about = path.lstat()
    info = tarfile.TarInfo(name)
    info.mode, info.uid, info.gid = stat.S_IMODE(about.st_mode), about.st_uid, about.st_gid
    info.mtime = int(about.st_mtime)
    info.type = tarfile.DIRTYPE if stat.S_ISDIR(about.st_mode) else tarfile.REGTYPE
    return Member(info)


def _call(command: Sequence[str]) -> None:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed ({done.returncode}): {done.stdout[-2000:]}")


if __name__ == "__main__":
    made = image(sys.argv[1] if sys.argv[1:] else "torch")
    sizes = [layer.size_bytes for layer in made.layers()]
    sys.stdout.write(f"{made.source} {made.digest} {sum(sizes) / 1e6:.0f} MB {sizes}\n")
