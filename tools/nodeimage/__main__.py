"""Build the image of `k8s/snapshotter` and `k8s/agent`: the init container's payload, and more.

    python -m tools.nodeimage [--name HOST/REPOSITORY:TAG] [--output FILE]

The program in it needs nothing of the node but its kernel and, to be kept running, systemd.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import bootseer
from bootseer.errors import BootseerError, NotSupportedError
from tools.initimage import ociimage, payload
from tools.initimage.__main__ import _locked

HERE = Path(__file__).parent
UNITS = (
    payload.ROOT / "k8s/snapshotter/bootseer-snapshotter.service",
    payload.ROOT / "k8s/agent/bootseer-agent.service",
)
DEFAULT_NAME = f"bootseer-snapshotter:{bootseer.__version__}"
WHEELS = ("grpcio", "protobuf")
DEBIAN = "libsqlite3-0"
_MODULE = "lib-dynload/_sqlite3.cpython-311-x86_64-linux-gnu.so"


def build(
    target: Path, name: str, cache: Path | None = None, *, level: int = ociimage.GZIP_LEVEL
) -> ociimage.Written:
    """Write the image. Raises NotSupportedError when a program or package cannot be had."""
    with _locked(cache) as folder, tempfile.TemporaryDirectory() as tmp:
        root = Path(tmp) / "root"
        payload.build(root, folder, payload.ROOT / "bootseer")
        _add(root / "payload", folder)
        run_as = ociimage.RunAs(
            entrypoint=["/payload/bin/busybox", "sh", "/payload/install-node.sh"],
            command=["/host"],
            user="0:0",
            labels={"org.opencontainers.image.version": bootseer.__version__},
        )
        return ociimage.write(target, root, name, run_as, level=level)


def _add(home: Path, cache: Path) -> None:
    python = home / "python"
    unpacked, kept = cache / "unpacked/usr/lib/python3.11", cache / "node"
    kept.mkdir(exist_ok=True)
    shutil.copytree(unpacked / "sqlite3", python / "lib/python3.11/sqlite3")
    shutil.copy2(unpacked / _MODULE, python / "lib/python3.11" / _MODULE)
    shutil.copy2(_sqlite(kept), python / "libs/libsqlite3.so.0")
    for wheel in _wheels(kept / "wheels"):
        shutil.unpack_archive(wheel, python / payload.SITE, "zip")
    for path in sorted((python / payload.SITE / "grpc").rglob("*.so")):
        _call(["strip", "--strip-unneeded", str(path)])
    for unit in UNITS:
        shutil.copy2(unit, home / unit.name)
    shutil.copy2(HERE / "install-node.sh", home / "install-node.sh")
    program = home / "bin/bootseer-snapshotter"
    program.write_text('#!/bin/sh\nexec /opt/bootseer/bin/bootseer snapshotter "$@"\n', "ascii")
    program.chmod(0o755)
    digest = hashlib.sha256((home / "complete").read_bytes())
    for path in sorted(kept.rglob("*.whl")):
        digest.update(path.name.encode())
    for path in (*UNITS, HERE / "install-node.sh"):
        digest.update(path.read_bytes())
    (home / "complete").write_text(digest.hexdigest() + "\n", encoding="ascii")


def _sqlite(kept: Path) -> Path:
    """SQLite's library, of Debian's package."""
    library = kept / "libsqlite3.so.0"
    if not library.is_file():
        with tempfile.TemporaryDirectory(dir=kept) as tmp:
            _call(["apt-get", "-o", "APT::Sandbox::User=root", "download", DEBIAN], Path(tmp))
            (package,) = Path(tmp).glob("*.deb")
            _call(["dpkg-deb", "-x", str(package), f"{tmp}/unpacked"])
            (found,) = Path(tmp, "unpacked").rglob("libsqlite3.so.0.*")
            found.replace(library)
    return library


def _wheels(folder: Path) -> list[Path]:
    if not (folder / "complete").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
        only = ["--only-binary", ":all:", "--python-version", payload.VERSION]
        platforms = ["--platform", "manylinux2014_x86_64", "--platform", "manylinux_2_17_x86_64"]
        constraints = ["-c", str(payload.ROOT / "constraints.txt"), "-d", str(folder)]
        _call([*pip, *only, *platforms, *constraints, *WHEELS])
        (folder / "complete").touch()
    return sorted(folder.glob("*.whl"))


def _call(command: list[str], cwd: Path | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    if done.returncode:
        last = " / ".join(done.stderr.strip().splitlines()[-3:])
        raise NotSupportedError(f"{' '.join(command[:4])} failed: {last}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the snapshotter's image.")
    parser.add_argument("--name", default=DEFAULT_NAME)
    parser.add_argument("--output", type=Path, default=Path("bootseer-snapshotter.tar"))
    options = parser.parse_args()
    try:
        written = build(options.output, options.name)
    except BootseerError as error:
        print(f"bootseer: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{options.output}: {options.name}@{written.digest}, {written.size_bytes} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
