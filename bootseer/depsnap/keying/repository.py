"""What a repository of git tells the build of a local package: its version, mostly.

setuptools-scm, hatch-vcs and many like them make a version of the checked-out commit and the
tags; a build of one's own may do the same. Only packages whose build is known not to look there
are taken for independent of it: another commit keeps their key.
"""

from __future__ import annotations

import os
import re

from bootseer.depsnap.keying.project import parsed, table, upwards
from bootseer.depsnap.keying.text_files import look
from bootseer.errors import UsageError

_INDEPENDENT_TEXT = """
    setuptools wheel hatchling flit flit_core poetry poetry_core uv_build pdm_backend packaging
    cython numpy pybind11 cffi ninja cmake torch tomli
"""
_INDEPENDENT = frozenset(_INDEPENDENT_TEXT.split())
"""What builds require that looks at no repository unless a description says so."""
_LOOKING = re.compile(
    r"(?<![./\w-])git(?![\w.+/:@-]|\s*=)|subprocess|popen|scm|vcs|versioneer|dulwich|pygit2|dunamai"
    r"|pbr\b|\bhooks?\b|\bbuild\.py|source *= *[\"'](?:code|env)",
    re.IGNORECASE,
)
"""In a description: what may look at a repository, or run what does."""
_IMPORTED = re.compile(r"^\s*(?:from|import)\s+([\w.]+)", re.MULTILINE)
_HARMLESS_TEXT = """
    setuptools distutils os sys re io pathlib codecs glob platform warnings typing ast json shutil
    collections sysconfig wheel numpy Cython pybind11 torch __future__
"""
_HARMLESS = frozenset(_HARMLESS_TEXT.split())
_DESCRIPTIONS = ("pyproject.toml", "setup.py", "setup.cfg")


def state_of(package: str) -> bytes:
    """The commit and the tags that the build of a package's directory may look at.

    Empty where there are none, and where the build is known not to look. Raises UsageError for a
    repository that is not git's.
    """
    if not os.path.isdir(package):
        return b""
    git, other = upwards(package, ".git"), upwards(package, ".hg")
    if (git is None and other is None) or _is_independent(package):
        return b""
    if git is None:
        raise UsageError(
            f"the version of {package} may be told by a repository of Mercurial, which is not "
            "read; name the install's directories with --also"
        )
    folder = _folder_of(os.path.join(git, ".git"))
    common = os.path.normpath(os.path.join(folder, _text(folder, "commondir").strip()))
    head = _text(folder, "HEAD").strip()
    packed = _text(common, "packed-refs")
    texts = [head, _text(common, "reftable/tables.list")]
    if head.startswith("ref: "):
        texts.append(_commit(common, packed, head[5:]))
    tags = dict(re.findall(r"^([0-9a-f]+) (refs/tags/.+)$", packed, re.MULTILINE))
    told = {name: commit for commit, name in tags.items()}
    for place, _, names in os.walk(os.path.join(common, "refs/tags")):
        loose = [os.path.relpath(os.path.join(place, name), common) for name in names]
        told |= {name: _text(common, name).strip() for name in loose}
    texts += [f"{name} {told[name]}" for name in sorted(told)]
    return "\n".join(texts).encode("utf-8", "surrogateescape")


def _folder_of(path: str) -> str:
    """Where a worktree or submodule keeps what others keep in `.git`."""
    if os.path.isdir(path):
        return path
    named = look(path)[0].partition("gitdir:")[2].strip()
    return os.path.join(os.path.dirname(path), named)


def _commit(common: str, packed: str, branch: str) -> str:
    loose = _text(common, branch).strip()
    found = re.search(rf"^([0-9a-f]+) {re.escape(branch)}$", packed, re.MULTILINE)
    return loose or (found[1] if found else "")


def _text(folder: str, name: str) -> str:
    return look(os.path.join(folder, name))[0]


def _is_independent(package: str) -> bool:
    """Whether the build of a package is known to look at no repository."""
    texts = {name: look(os.path.join(package, name))[0] for name in _DESCRIPTIONS}
    if any(_LOOKING.search(text) for text in texts.values()):
        return False
    imported = {name.partition(".")[0] for name in _IMPORTED.findall(texts["setup.py"])}
    if not imported <= _HARMLESS:
        return False
    described = parsed(texts["pyproject.toml"])
    build = table(described, "build-system")
    required = build.get("requires", [])
    if described is None or "backend-path" in build or not isinstance(required, list):
        return False
    names = (re.split(r"[^\w.-]", word.strip())[0] for word in required if isinstance(word, str))
    return all(re.sub(r"[-_.]+", "_", name).lower() in _INDEPENDENT for name in names)
