"""Hadoop's jars, fetched once from package registries and kept outside the clone.

No registry carries Hadoop itself. The `pyspark` 2.4.8 sdist ships Hadoop 2.7.3's jars with what
they need, but for Jersey 1 and the daemon library, which Debian packages.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

SDIST = "pyspark==2.4.8"
BUILD_TOOLS = ("setuptools<70", "wheel")  # newer setuptools cannot read that sdist
FROM_SDIST = (
    "activation-1.1.1",
    "apacheds-i18n-2.0.0-M15",
    "apacheds-kerberos-codec-2.0.0-M15",
    "api-asn1-api-1.0.0-M20",
    "api-util-1.0.0-M20",
    "commons-beanutils-1.9.4",
    "commons-cli-1.2",
    "commons-codec-1.10",
    "commons-collections-3.2.2",
    "commons-configuration-1.6",
    "commons-digester-1.8",
    "commons-io-2.4",
    "commons-lang-2.6",
    "commons-logging-1.1.3",
    "commons-net-3.1",
    "gson-2.2.4",
    "guava-14.0.1",
    "hadoop-annotations-2.7.3",
    "hadoop-auth-2.7.3",
    "hadoop-common-2.7.3",
    "hadoop-hdfs-2.7.3",
    "htrace-core-3.1.0-incubating",
    "httpclient-4.5.6",
    "httpcore-4.4.10",
    "jackson-core-asl-1.9.13",
    "jackson-mapper-asl-1.9.13",
    "javax.servlet-api-3.1.0",
    "jaxb-api-2.2.2",
    "jetty-6.1.26",
    "jetty-util-6.1.26",
    "jsp-api-2.1",
    "jsr305-1.3.9",
    "leveldbjni-all-1.8",
    "log4j-1.2.17",
    "netty-3.9.9.Final",
    "netty-all-4.1.47.Final",
    "protobuf-java-2.5.0",
    "slf4j-api-1.7.16",
    "slf4j-log4j12-1.7.16",
    "xercesImpl-2.9.1",
    "xmlenc-0.52",
)
FROM_DEBIAN = {
    "libcommons-daemon-java": "commons-daemon",
    "libjersey1-core-java": "jersey1-core",
    "libjersey1-server-java": "jersey1-server",
    "libjersey1-servlet-java": "jersey1-servlet",
    "libjsr311-api-java": "jsr311-api",
}
LISTING = "SIZES"


def classpath() -> str:
    """The jars as a Java class path; fetched first where this machine has none yet."""
    folder = jars_folder()
    return ":".join(str(p) for p in sorted(folder.glob("*.jar")))


def jars_folder() -> Path:
    """The folder with all jars and nothing else, made on first use (a minute, 220 MB fetched).

    Raises RuntimeError with the failed command's output when a registry cannot be reached.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bootseer"
    folder = cache / "hdfs-2.7.3"
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / "hdfs-2.7.3.lock"):
        if not _is_whole(folder):
            shutil.rmtree(folder, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix="hdfs-", dir=cache) as scratch:
                made = _build(Path(scratch))
                os.rename(made, folder)
    return folder


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _is_whole(folder: Path) -> bool:
    try:
        lines = (folder / LISTING).read_text(encoding="ascii").splitlines()
        sizes = {name: int(size) for name, size in (line.split() for line in lines)}
    except (OSError, ValueError):
        return False
    there = {p.name: p.stat().st_size for p in folder.glob("*.jar")}
    wanted = {f"{name}.jar" for name in (*FROM_SDIST, *FROM_DEBIAN.values())}
    return sizes == there and sizes.keys() == wanted


def _build(scratch: Path) -> Path:
    out = scratch / "jars"
    out.mkdir()
    _from_sdist(scratch, out)
    _from_debian(scratch, out)
    sizes = sorted((p.name, p.stat().st_size) for p in out.iterdir())
    listing = "".join(f"{name} {size}\n" for name, size in sizes)
    (out / LISTING).write_text(listing, encoding="ascii")
    if not _is_whole(out):
        raise RuntimeError(f"the packages lack jars of Hadoop; got {[name for name, _ in sizes]}")
    return out


def _from_sdist(scratch: Path, out: Path) -> None:
    _run(sys.executable, "-m", "venv", str(scratch / "venv"))
    pip = str(scratch / "venv/bin/pip")
    _run(pip, "-q", "install", *BUILD_TOOLS)
    only_sdist = ("--no-deps", "--no-build-isolation", "--no-binary", ":all:")
    _run(pip, "-q", "download", *only_sdist, "-d", str(scratch / "sdist"), SDIST)
    [archive] = (scratch / "sdist").iterdir()
    wanted = {f"{name}.jar" for name in FROM_SDIST}
    with tarfile.open(archive) as tar:
        for member in tar:
            name = os.path.basename(member.name)
            if name in wanted and member.isfile() and "/jars/" in member.name:
                source = tar.extractfile(member)
                assert source is not None
                with source, (out / name).open("wb") as target:
                    shutil.copyfileobj(source, target)


def _from_debian(scratch: Path, out: Path) -> None:
    folder = scratch / "debian"
    folder.mkdir()
    # apt drops to a user of its own, who must be able to write here.
    scratch.chmod(0o755)
    folder.chmod(0o777)
    _run("apt-get", "-q", "download", *FROM_DEBIAN, cwd=folder)
    for package in folder.glob("*.deb"):
        _run("dpkg", "-x", str(package), str(folder / "root"))
    for name in FROM_DEBIAN.values():
        # Some carry a version in the file's name, some in a link's.
        found = sorted((folder / "root/usr/share/java").glob(f"{name}*.jar"))
        plain = [p for p in found if p.is_file() and not p.is_symlink()]
        shutil.copyfile(plain[0], out / f"{name}.jar")


def _run(*command: str, cwd: Path | None = None) -> None:
    done = subprocess.run(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}")
