"""What the image holds: a static busybox as its shell, and an interpreter that needs no image.

The interpreter is Debian's, with the libraries it needs beside it and its program interpreter and
library path rewritten to the fixed place where pods mount it. So it runs in images of any C
library, or of none, and the wheels beside it need only fit this one Python.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bootseer.errors import NotSupportedError
from bootseer.kubernetes.options import HOME

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
VERSION = "3.11"

DEBIAN = (
    "busybox-static",
    "libbz2-1.0",
    "libc6",
    "libexpat1",
    "libffi8",
    "libgcc-s1",
    "liblzma5",
    f"libpython{VERSION}-minimal",
    f"libpython{VERSION}-stdlib",
    "libssl3",
    "libuuid1",
    f"python{VERSION}-minimal",
    "zlib1g",
)
WHEELS = ("click", "xxhash", "zstandard", "requests")
NEEDLESS = (
    "__pycache__",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "sqlite3",
    "test",
    "tkinter",
    "turtledemo",
    "unittest",
    "curses",
    "dbm",
    "distutils",
)
NEEDLESS_MODULES = ("_sqlite3", "_curses", "_curses_panel", "_dbm", "_tkinter", "nis", "readline")
PROGRAM_LIBRARIES = "lib/x86_64-linux-gnu"
LOADER = "ld-linux-x86-64.so.2"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of the parts of the payload, unpacked."""

    wrapper: int
    interpreter: int


def build(root: Path, cache: Path) -> Sizes:
    """Lay out the payload below `root`; Debian's packages and the wheels are kept in `cache`.

    Raises NotSupportedError when a program or a package cannot be had.
    """
    for program in ("apt-get", "dpkg-deb", "patchelf"):
        if shutil.which(program) is None:
            raise NotSupportedError(f"{program} is missing; install Debian's package of that name")
    unpacked = unpack(cache)
    payload = root / "payload"
    shutil.rmtree(root, ignore_errors=True)
    (payload / "bin").mkdir(parents=True)
    _interpreter(unpacked, payload / "python")
    interpreter = _bytes_of(payload / "python")
    _wrapper(payload, cache / "wheels")
    _compile(payload / "python")
    shutil.copy2(_first(unpacked, "bin/busybox", "usr/bin/busybox"), payload / "bin/busybox")
    shutil.copy2(HERE / "launch.sh", payload / "bin/bootseer")
    shutil.copy2(HERE / "install.sh", payload / "install.sh")
    shutil.copy2(HERE / "start.py", payload / "python/start.py")
    for name in ("bin/busybox", "bin/bootseer", "install.sh"):
        (payload / name).chmod(0o755)
    (payload / "complete").write_text(_fingerprint(payload) + "\n", encoding="ascii")
    return Sizes(_bytes_of(payload) - interpreter, interpreter)


def unpack(cache: Path) -> Path:
    """The folder in `cache` with Debian's packages unpacked, made anew where it is not whole."""
    unpacked, done = cache / "unpacked", cache / "unpacked/.complete"
    packages = _debian_packages(cache / "debian")
    names = "\n".join(package.name for package in packages)
    if not done.is_file() or done.read_text(encoding="ascii") != names:
        shutil.rmtree(unpacked, ignore_errors=True)
        for package in packages:
            _call(["dpkg-deb", "-x", str(package), str(unpacked)], f"unpack {package.name}")
        done.write_text(names, encoding="ascii")
    return unpacked


def _debian_packages(folder: Path) -> list[Path]:
    """The packages' files, downloaded once; the newest of each name that this Debian has."""
    done = folder / "complete"
    if not done.is_file() or done.read_text(encoding="ascii") != "\n".join(DEBIAN):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        # As root apt would drop its privileges to a user that cannot write here.
        as_root = ["-o", "APT::Sandbox::User=root"]
        _call(["apt-get", *as_root, "download", *DEBIAN], "download Debian's packages", folder)
        done.write_text("\n".join(DEBIAN), encoding="ascii")
    return sorted(folder.glob("*.deb"))


def _interpreter(unpacked: Path, python: Path) -> None:
    (python / "bin").mkdir(parents=True)
    libraries = python / "libs"
    libraries.mkdir()
    program = python / "bin/python3"
    shutil.copy2(unpacked / f"usr/bin/python{VERSION}", program)
    for folder in (f"usr/{PROGRAM_LIBRARIES}", PROGRAM_LIBRARIES, "lib64"):
        for path in sorted((unpacked / folder).glob("*.so*")):
            if _is_needed(path.name):
                shutil.copy2(path, libraries / path.name, follow_symlinks=True)
    where = f"{HOME}/python/libs"
    _call(
        [
            "patchelf",
            "--set-interpreter",
            f"{where}/{LOADER}",
            "--force-rpath",
            "--set-rpath",
            where,
            str(program),
        ],
        "set the interpreter's paths",
    )
    skip = shutil.ignore_patterns(*NEEDLESS, "config-*", *(f"{m}.*.so" for m in NEEDLESS_MODULES))
    library = python / f"lib/python{VERSION}"
    shutil.copytree(unpacked / f"usr/lib/python{VERSION}", library, symlinks=True, ignore=skip)


def _is_needed(name: str) -> bool:
    stems = ("libc", "libm", "libdl", "libpthread", "librt", "libutil", "libresolv", "libnss_dns")
    more = ("libnss_files", "libexpat", "libz", "libffi", "libssl", "libcrypto", "libbz2")
    last = ("liblzma", "libuuid", "libgcc_s", "ld-linux-x86-64")
    stem = name.split(".so")[0]
    return ".so." in name and stem in (*stems, *more, *last)


def _wrapper(payload: Path, cache: Path) -> None:
    """The package and the wheels, where Debian's interpreter looks by itself."""
    site = payload / "python/lib/python3/dist-packages"
    site.mkdir(parents=True)
    if not (cache / "complete").is_file():
        shutil.rmtree(cache, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
        only = ["--only-binary", ":all:", "--python-version", VERSION, "-d", str(cache)]
        platforms = ["--platform", "manylinux2014_x86_64", "--platform", "manylinux_2_28_x86_64"]
        constraints = ["-c", str(ROOT / "constraints.txt")]
        _call([*pip, *only, *platforms, *constraints, *WHEELS], "download the wheels")
        (cache / "complete").touch()
    for wheel in sorted(cache.glob("*.whl")):
        shutil.unpack_archive(wheel, site, "zip")
    shutil.copytree(
        ROOT / "bootseer", site / "bootseer", ignore=shutil.ignore_patterns("__pycache__")
    )


def _compile(python: Path) -> None:
    """Byte code that is valid without a look at the source: copies change times."""
    for folder in (python / f"lib/python{VERSION}", python / "lib/python3/dist-packages"):
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "compileall",
                "-q",
                "--invalidation-mode",
                "unchecked-hash",
                "-s",
                str(python),
                "-p",
                f"{HOME}/python",
                str(folder),
            ],
            check=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        if done.returncode not in (0, 1):  # 1: files that are not meant to compile
            raise NotSupportedError(f"cannot compile the modules in {folder}")


def _fingerprint(payload: Path) -> str:
    import xxhash

    digest = xxhash.xxh3_128()
    for path in sorted(p for p in payload.rglob("*") if p.is_file() and not p.is_symlink()):
        digest.update(str(path.relative_to(payload)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _first(root: Path, *names: str) -> Path:
    return next(root / name for name in names if (root / name).is_file())


def _bytes_of(root: Path) -> int:
    files: Iterable[Path] = (p for p in root.rglob("*") if p.is_file() and not p.is_symlink())
    return sum(os.lstat(path).st_size for path in files)


def _call(command: Sequence[str], action: str, cwd: Path | None = None) -> None:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, cwd=cwd
    )
    if done.returncode:
        last = " / ".join(done.stdout.strip().splitlines()[-3:])
        raise NotSupportedError(f"cannot {action}: {last}")
