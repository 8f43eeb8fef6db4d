"""Digests of local packages: of all their source, or of what an editable install takes from it."""

from __future__ import annotations

import hashlib
import os
import re

from bootseer.depsnap.key import git_repository
from bootseer.depsnap.key.input_files import digest_text, read_text, try_to_read
from bootseer.errors import UsageError, from_os_error
from bootseer.system import sha256
from bootseer.system.regular_files import opener

_LIMIT_BYTES = 512 << 20
_NOT_SOURCE = frozenset(
    (".git", ".hg", ".venv", "__pycache__", "build", "dist", "node_modules", ".mypy_cache")
)
_BUILT = frozenset(("build", "dist"))
"""What builds leave next to a package's description; deeper, it is a package's own."""
_DESCRIPTIONS = frozenset(
    (
        *("pyproject.toml", "setup.py", "setup.cfg", "hatch.toml"),
        *("VERSION", "VERSION.txt", "version.txt"),
    )
)
_VERSION_FILES = ("__init__.py", "_version.py", "version.py", "__version__.py", "__about__.py")
_VERSION = re.compile(r"^_{0,2}version(?:_info)?_{0,2}\s*[:=].*", re.IGNORECASE | re.MULTILINE)
_LISTS = r".*requirements.*\.(?:txt|in)"
_LIST_ENDINGS = (".txt", ".in")


def source_digest(path: str) -> str:
    """sha256 over a local package: one file's bytes, or names and bytes below a directory."""
    digest = hashlib.sha256(git_repository.state_of(path))
    budget = _LIMIT_BYTES
    for name in _source_files(path):
        full = os.path.join(path, name) if name else path
        try:
            with open(full, "rb", opener=opener) as file:
                budget -= os.fstat(file.fileno()).st_size
                if budget < 0:
                    raise UsageError(f"the local package {path} is larger than 512 MiB")
                content = hashlib.file_digest(file, "sha256").digest()
        except OSError as error:
            raise from_os_error(error, f"read the local package {full}") from error
        digest.update(name.encode("utf-8", "surrogateescape") + b"\0" + content)
    return digest.hexdigest()


def editable_digest(path: str) -> str:
    """sha256 of what an editable install takes from its source: its description, its names and
    versions, and what its build may read of its repository.

    Its modules are read where they are, and may change without another install.
    """
    state = git_repository.state_of(path).decode("utf-8", "surrogateescape")
    parts = [state] if state else []
    for folder in (path, os.path.join(path, "src")):
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            continue
        for name in names:
            full = os.path.join(folder, name)
            if name == "requirements" and os.path.isdir(full):
                lists = sorted(n for n in os.listdir(full) if n.endswith(_LIST_ENDINGS))
                parts += [f"{n} {digest_text(read_text(os.path.join(full, n)))}" for n in lists]
            elif (name in _DESCRIPTIONS and os.path.isfile(full)) or re.fullmatch(_LISTS, name):
                parts.append(f"{folder == path} {name} {digest_text(read_text(full))}")
            elif name.endswith(".py") or os.path.isfile(os.path.join(full, "__init__.py")):
                parts.append(f"{folder == path} {name} {_version_lines(full)}")
    return sha256.of_text("\n".join(parts))


def _version_lines(path: str) -> list[str]:
    """Lines in which a module or package gives its version: builds may take it from there."""
    is_module = path.endswith(".py")
    files = [path] if is_module else [os.path.join(path, name) for name in _VERSION_FILES]
    return [line for file in files for line in _VERSION.findall(try_to_read(file)[0])]


def _source_files(path: str) -> list[str]:
    """Files below a local package, also those behind linked folders, without what builds leave."""
    if not os.path.isdir(path):
        return [""]
    names, seen = [], set()
    for folder, below, files in os.walk(path, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            below.clear()
            continue
        seen.add(real)
        left_out = _NOT_SOURCE if folder == path else _NOT_SOURCE - _BUILT
        below[:] = [d for d in below if not _is_environment(os.path.join(folder, d))]
        below[:] = [d for d in below if d not in left_out and not d.endswith(".egg-info")]
        names += [os.path.relpath(os.path.join(folder, f), path) for f in files if f != ".git"]
    return sorted(n for n in names if os.path.isfile(os.path.join(path, n)))


def _is_environment(path: str) -> bool:
    """Whether a directory is a virtual environment, which belongs to no package."""
    marked = os.path.exists(os.path.join(path, "pyvenv.cfg"))
    return marked and any(os.path.isdir(os.path.join(path, d)) for d in ("bin", "Scripts", "lib"))
