"""What the image holds: a static busybox as its shell, and an interpreter that needs no image.

The interpreter is Debian's, with the libraries it needs beside it and its program interpreter and
library path rewritten to the fixed place where pods mount it. So it runs in images of any C
library, or of none, and the wheels beside it need only fit this one Python.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
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
WHEELS = ("click", "xxhash", "zstandard", "requests", "fsspec")
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
NEEDLESS_MODULES = (
    *("_sqlite3", "_curses", "_curses_panel", "_dbm", "_tkinter", "nis", "readline"),
    *("_test*", "_ctypes_test", "_xx*", "xxlimited*", "audioop", "ossaudiodev"),
)
NEEDLESS_FILES = ("turtle.py", "doctest.py", "pydoc.py", "_pydecimal.py", "_pyio.py")
NEEDLESS_IN_WHEELS = ("zstandard/_cffi.*.so",)
"""What a wheel brings besides the one implementation that is used."""
PROGRAM_LIBRARIES = "lib/x86_64-linux-gnu"
SITE = "lib/python3/dist-packages"
LOADER = "ld-linux-x86-64.so.2"


def build(root: Path, cache: Path, sources: Path) -> None:
    """Lay out the payload below `root`, with our package from the folder `sources`.

    Debian's packages and the wheels are kept in `cache`.
    Raises NotSupportedError when a program or a package cannot be had.
    """
    programs = {"apt-get": "apt", "dpkg-deb": "dpkg", "patchelf": "patchelf", "strip": "binutils"}
    for program, debian in programs.items():
        if shutil.which(program) is None:
            raise NotSupportedError(f"{program} is missing; install Debian's package {debian}")
    payload = root / "payload"
    shutil.rmtree(root, ignore_errors=True)
    (payload / "bin").mkdir(parents=True)
    unpacked = unpack(cache)
    shutil.copytree(base(cache), payload / "python", symlinks=True)
    package = payload / f"python/{SITE}/bootseer"
    shutil.copytree(sources, package, ignore=shutil.ignore_patterns("__pycache__"))
    compile_tree(payload / "python", package, unpacked, f"{HOME}/python")
    _drop_sources(package)
    shutil.copy2(_first(unpacked, "bin/busybox", "usr/bin/busybox"), payload / "bin/busybox")
    shutil.copy2(HERE / "launch.sh", payload / "bin/bootseer")
    shutil.copy2(HERE / "install.sh", payload / "install.sh")
    shutil.copy2(HERE / "start.py", payload / "python/start.py")
    for name in ("bin/busybox", "bin/bootseer", "install.sh", "python/start.py"):
        (payload / name).chmod(0o755)
    (payload / "complete").write_text(_fingerprint(payload) + "\n", encoding="ascii")


def _drop_sources(package: Path) -> None:
    """Byte code instead of sources, for half the files to copy at each pod's start.

    Not below `profiler`: a job's own Python, of any version, imports from there too.
    """
    for path in sorted(package.rglob("*.py")):
        within = path.relative_to(package)
        if within.parts[0] == "profiler" or path.name == "__init__.py":
            continue
        made = path.parent / f"__pycache__/{path.stem}.cpython-{VERSION.replace('.', '')}.pyc"
        made.replace(path.with_suffix(".pyc"))
        path.unlink()
    for folder in list(package.rglob("__pycache__")):
        if not any(folder.iterdir()):
            folder.rmdir()


def base(cache: Path) -> Path:
    """The interpreter and the wheels, compiled: what does not change with our own sources.

    Kept in `cache`, since compiling takes most of a build; the caller holds the cache's lock.
    """
    unpacked, wheels = unpack(cache), _wheels(cache / "wheels")
    parts = [Path(__file__).read_text(encoding="utf-8"), *sorted(p.name for p in wheels)]
    parts.append((unpacked / ".complete").read_text(encoding="ascii"))
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    done = cache / f"base-{key}"
    if done.is_dir():
        return done
    for old in cache.glob("base-*"):
        shutil.rmtree(old)
    work = cache / "base-unfinished"
    _interpreter(unpacked, work)
    _libraries(work / SITE, wheels)
    for folder in (work / f"lib/python{VERSION}", work / SITE):
        compile_tree(work, folder, unpacked, f"{HOME}/python", "-b")
        for path in folder.rglob("*.pyc"):  # half of what each pod's start would have to copy
            path.with_suffix(".py").unlink(missing_ok=True)
    work.replace(done)
    return done


def unpack(cache: Path, wanted: Sequence[str] = DEBIAN) -> Path:
    """The folder in `cache` with Debian's packages unpacked, made anew where it is not whole."""
    unpacked, done = cache / "unpacked", cache / "unpacked/.complete"
    packages = _debian_packages(cache / "debian", wanted)
    names = "\n".join(package.name for package in packages)
    if not done.is_file() or done.read_text(encoding="ascii") != names:
        shutil.rmtree(unpacked, ignore_errors=True)
        for package in packages:
            _call(["dpkg-deb", "-x", str(package), str(unpacked)], f"unpack {package.name}")
        done.write_text(names, encoding="ascii")
    return unpacked


def _debian_packages(folder: Path, wanted: Sequence[str]) -> list[Path]:
    """The packages' files, downloaded once; the newest of each name that this Debian has."""
    done = folder / "complete"
    if not done.is_file() or done.read_text(encoding="ascii") != "\n".join(wanted):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        # As root apt would drop its privileges to a user that cannot write here.
        as_root = ["-o", "APT::Sandbox::User=root"]
        _call(["apt-get", *as_root, "download", *wanted], "download Debian's packages", folder)
        done.write_text("\n".join(wanted), encoding="ascii")
    return sorted(folder.glob("*.deb"))


def _interpreter(unpacked: Path, python: Path) -> None:
    (python / "bin").mkdir(parents=True)
    libraries = python / "libs"
    libraries.mkdir()
    program = python / "bin/python3"
    shutil.copy2(unpacked / f"usr/bin/python{VERSION}", program)
    for folder in (f"usr/{PROGRAM_LIBRARIES}", PROGRAM_LIBRARIES):
        for path in sorted((unpacked / folder).glob("*.so*")):
            # Links lead to the same folder; one that does not would lead out of the packages.
            leads_out = path.is_symlink() and "/" in os.readlink(path)
            if _is_needed(path.name) and not leads_out:
                shutil.copy2(path, libraries / path.name, follow_symlinks=False)
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
    skip = shutil.ignore_patterns(
        *NEEDLESS, *NEEDLESS_FILES, "config-*", *(f"{m}.*.so" for m in NEEDLESS_MODULES)
    )
    library = python / f"lib/python{VERSION}"
    shutil.copytree(unpacked / f"usr/lib/python{VERSION}", library, symlinks=True, ignore=skip)


def _is_needed(name: str) -> bool:
    stems = ("libc", "libm", "libdl", "libpthread", "librt", "libutil", "libresolv", "libnss_dns")
    more = ("libnss_files", "libexpat", "libz", "libffi", "libssl", "libcrypto", "libbz2")
    last = ("liblzma", "libuuid", "libgcc_s", "ld-linux-x86-64")
    stem = name.split(".so")[0]
    return ".so." in name and stem in (*stems, *more, *last)


def _wheels(folder: Path) -> list[Path]:
    """The wheels' files, downloaded once, and again when the list has changed."""
    done = folder / "complete"
    if not done.is_file() or done.read_text(encoding="ascii") != "\n".join(WHEELS):
        shutil.rmtree(folder, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
        only = ["--only-binary", ":all:", "--python-version", VERSION, "-d", str(folder)]
        platforms = ["--platform", "manylinux2014_x86_64", "--platform", "manylinux_2_28_x86_64"]
        constraints = ["-c", str(ROOT / "constraints.txt")]
        _call([*pip, *only, *platforms, *constraints, *WHEELS], "download the wheels")
        done.write_text("\n".join(WHEELS), encoding="ascii")
    return sorted(folder.glob("*.whl"))


def _libraries(site: Path, wheels: Iterable[Path]) -> None:
    """Unpack the wheels where Debian's interpreter looks by itself."""
    site.mkdir(parents=True)
    for wheel in wheels:
        shutil.unpack_archive(wheel, site, "zip")
    for pattern in NEEDLESS_IN_WHEELS:
        for path in site.glob(pattern):
            path.unlink()
    for path in sorted(site.rglob("*.so")):  # most of a wheel's library is for debuggers
        _call(["strip", "--strip-unneeded", str(path)], f"strip {path.name}")


def compile_tree(root: Path, folder: Path, unpacked: Path, place: str, *more: str) -> None:
    """Byte code that is valid without a look at the source: copies change times.

    `root` will stand at `place`; `folder` is the part of it to compile. By Debian's own
    interpreter: that of this machine may be of another version.
    """
    libraries = [unpacked / f"usr/{PROGRAM_LIBRARIES}", unpacked / PROGRAM_LIBRARIES]
    loader = next((unpacked / PROGRAM_LIBRARIES).glob("ld-linux*"))
    program = [str(loader), "--library-path", ":".join(map(str, libraries))]
    program += [
        str(unpacked / f"usr/bin/python{VERSION}"),
        "-s",
        "-S",
        "-m",
        "compileall",
        "-q",
        *more,
    ]
    how = ["--invalidation-mode", "unchecked-hash", "-s", str(root), "-p", place]
    done = subprocess.run(
        [*program, *how, str(folder)],
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={"PYTHONHOME": str(unpacked / "usr"), "PYTHONHASHSEED": "0"},
    )
    if done.returncode not in (0, 1):  # 1: files that are not meant to compile
        raise NotSupportedError(f"cannot compile the modules in {folder}: {done.stdout.strip()}")


def _fingerprint(payload: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(p for p in payload.rglob("*") if p.is_file() and not p.is_symlink()):
        digest.update(str(path.relative_to(payload)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _first(root: Path, *names: str) -> Path:
    return next(root / name for name in names if (root / name).is_file())


def _call(command: Sequence[str], action: str, cwd: Path | None = None) -> None:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, cwd=cwd
    )
    if done.returncode:
        last = " / ".join(done.stdout.strip().splitlines()[-3:])
        raise NotSupportedError(f"cannot {action}: {last}")
