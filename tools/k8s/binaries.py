"""Kubernetes' programs, built once from Debian's source package and kept outside the clone.

Debian ships no server packages of it, but the sources of 1.20.2 with everything vendored. They
build with Debian's Go 1.19 in GOPATH mode in about three minutes on two cores.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.archives import extract_all

VERSION = "1.20.2"
PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl")
GO = Path("/usr/lib/go-1.19/bin/go")
SOURCES = Path("/etc/apt/sources.list.d/debian.sources")
REFLECT2 = "golang-github-modern-go-reflect2-dev"
REVISION = 2
"""Raised when the build changes, so that older programs are not taken for these."""
_IMPORT = "k8s.io/kubernetes"


def folder() -> Path:
    """Where the programs are; built first where this machine has none yet.

    Raises RuntimeError with the end of a failed step's output.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    place = Path(base) / f"bootseer/kubernetes-{VERSION}-{REVISION}"
    place.mkdir(parents=True, exist_ok=True)
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = place / "bin"
        if not all((done / name).is_file() for name in PROGRAMS):
            _build(place)
    return done


def _build(place: Path) -> None:
    if not GO.is_file():
        raise RuntimeError("Go 1.19 is missing; install Debian's golang-1.19-go")
    work = place / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        source = _source(work)
        environ = _environment(work, source)
        _openapi(source, work, environ)
        built = work / "bin"
        built.mkdir()
        for name in PROGRAMS:
            _go_build(f"{_IMPORT}/cmd/{name}", built / name, environ)
        (place / "bin").mkdir(exist_ok=True)
        for name in PROGRAMS:
            (built / name).replace(place / "bin" / name)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _source(work: Path) -> Path:
    """The unpacked source tree. The machine's own apt settings have no sources: a private set."""
    apt = work / "apt"
    for name in ("lists/partial", "cache/archives/partial", "parts"):
        (apt / name).mkdir(parents=True)
    text = SOURCES.read_text(encoding="utf-8")
    (apt / "parts/src.sources").write_text(
        re.sub(r"^Types: deb$", "Types: deb-src", text, flags=re.MULTILINE), encoding="utf-8"
    )
    settings = {
        "Dir::Etc::SourceList": "/dev/null",
        "Dir::Etc::SourceParts": f"{apt}/parts",
        "Dir::State::Lists": f"{apt}/lists",
        "Dir::Cache": f"{apt}/cache",
        "APT::Sandbox::User": "root",
    }
    options = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
    _call(["apt-get", *options, "-qq", "update"], work)
    _call(["apt-get", *options, "-qq", "source", "--download-only", "kubernetes"], work)
    (archive,) = work.glob("kubernetes_*.orig.tar.gz")
    with tarfile.open(archive) as packed:
        extract_all(packed, work)
    (source,) = work.glob("kubernetes-*/")
    _newer_reflect2(source, work)
    return source


def _newer_reflect2(source: Path, work: Path) -> None:
    """The vendored one predates Go 1.18's maps: the API server dies of the first custom object."""
    as_root = ["-o", "APT::Sandbox::User=root"]
    _call(["apt-get", *as_root, "download", REFLECT2], work)
    (package,) = work.glob(f"{REFLECT2}_*.deb")
    _call(["dpkg-deb", "-x", str(package), str(work / "reflect2")], work)
    (newer,) = (work / "reflect2").rglob("modern-go/reflect2")
    vendored = source / "vendor/github.com/modern-go/reflect2"
    shutil.rmtree(vendored)
    shutil.copytree(newer, vendored)


def _environment(work: Path, source: Path) -> dict[str, str]:
    path = work / "go/src/k8s.io"
    path.mkdir(parents=True)
    (path / "kubernetes").symlink_to(source)
    (work / "tmp").mkdir()
    return {
        **os.environ,
        "PATH": f"{GO.parent}:{os.environ['PATH']}",
        "HOME": str(work),
        "GOPATH": str(work / "go"),
        "GOCACHE": str(work / "gocache"),
        "GOTMPDIR": str(work / "tmp"),
        "GO111MODULE": "off",
        "GOFLAGS": "",
        "GOPROXY": "off",
        "CGO_ENABLED": "0",
        "PWD": str(path / "kubernetes"),
    }


def _openapi(source: Path, work: Path, environ: Mapping[str, str]) -> None:
    """The generated file that the API server needs and the package lacks."""
    generator = work / "openapi-gen"
    package = f"{_IMPORT}/vendor/k8s.io/kube-openapi/cmd/openapi-gen"
    _go_build(package, generator, environ, plain=True)
    found = sorted(_openapi_packages(source))
    header = "vendor/k8s.io/code-generator/hack/boilerplate.go.txt"
    _call(
        [
            str(generator),
            *("--logtostderr", "-i", ",".join(f"{_IMPORT}/{name}" for name in found)),
            *("-p", f"{_IMPORT}/pkg/generated/openapi", "-O", "zz_generated.openapi"),
            *("-h", header, "-r", str(work / "violations"), "--output-base", f"{work}/go/src"),
        ],
        Path(environ["PWD"]),
        environ,
    )


def _openapi_packages(source: Path) -> set[str]:
    staged = source / "staging/src/k8s.io"
    roots = {name: source / name for name in ("cmd", "pkg", "plugin")}
    skip = ("code-generator", "sample-apiserver")
    roots |= {f"vendor/k8s.io/{p.name}": p for p in staged.iterdir() if p.name not in skip}
    out = set()
    for name, root in roots.items():
        for path in root.rglob("*.go"):
            inside = path.relative_to(root)
            if path.name.endswith("_test.go") or {"testdata", "test", "example", "examples"} & set(
                inside.parts[:-1]
            ):
                continue
            if b"+k8s:openapi-gen=" in path.read_bytes():
                out.add(str(Path(name) / inside.parent))
    return out


def _go_build(
    package: str, target: Path, environ: Mapping[str, str], *, plain: bool = False
) -> None:
    version = {
        "gitVersion": f"v{VERSION}",
        "gitMajor": VERSION.split(".")[0],
        "gitMinor": VERSION.split(".")[1],
        "gitTreeState": "archive",
    }
    where = ("component-base/version", "client-go/pkg/version")
    flags = " ".join(
        f"-X {_IMPORT}/vendor/k8s.io/{place}.{key}={value}"
        for place in where
        for key, value in version.items()
    )
    more = [] if plain else ["-trimpath", "-tags", "dockerless providerless"]
    command = [str(GO), "build", *more, "-ldflags", f"-s -w {flags}", "-o", str(target), package]
    _call(command, Path(environ["PWD"]), environ)


def _call(command: Sequence[str], cwd: Path, environ: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed ({done.returncode}): {done.stdout[-2000:]}")


if __name__ == "__main__":
    sys.stdout.write(f"{folder()}\n")
