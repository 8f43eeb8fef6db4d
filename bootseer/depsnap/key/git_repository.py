"""What the build of a local package may read of its git repository: its version, mostly.

setuptools-scm, hatch-vcs and many like them derive a version from the checked-out commit and the
tags; a build script may do the same. Only packages whose build is known not to read there are
treated as independent of it: another commit keeps their key. Which files a build leaves out,
because git ignores them, depends on where the repository begins and on the `.gitignore`s above the
package.
"""

from __future__ import annotations

import json
import os
import re
import sys

from bootseer.depsnap.key.input_files import find_upwards, try_to_read
from bootseer.depsnap.key.uv_config import parse_toml, table
from bootseer.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ast

_INDEPENDENT_TEXT = """
    setuptools wheel hatchling flit flit_core poetry poetry_core uv_build pdm_backend packaging
    cython numpy pybind11 cffi ninja cmake torch tomli
"""
_INDEPENDENT = frozenset(_INDEPENDENT_TEXT.split())
"""Build requirements that read no repository unless a description says so."""
_READING = re.compile(
    r"(?<![\w-])git(?![\w+:@-])|subprocess|popen|scm|(?<!ignore-)vcs|versioneer|dulwich|pygit2"
    r"|dunamai|\bpbr\b|cmdclass|\bhooks?\b|\bsource\W+(?:code|env|call)\b",
    re.IGNORECASE,
)
"""In a build's description: words of what may read a repository, or run a program that does."""
_ADDRESS = re.compile(r"\b[a-z][a-z+]{0,15}://[^\s\"'<>]+")
_COMMENT = re.compile(r"^\s*[#;].*$", re.MULTILINE)
_LOADING = frozenset(("subprocess", "runpy", "importlib", "imp", "pkgutil", "zipimport", "ctypes"))
_HARMLESS = (sys.stdlib_module_names | _INDEPENDENT | {"Cython"}) - _LOADING
_RUNNING = frozenset(("exec", "eval", "compile", "__import__"))
_RUNNING_IN = frozenset(("system", "load_module", "exec_module"))
"""Functions that run code from outside of a script: names, and attributes of modules."""
_BUILD_TABLES = (
    ("build-system",),
    *(("tool", name) for name in ("setuptools", "flit", "distutils")),
    *(("tool", "hatch", name) for name in ("version", "build", "metadata")),
    *(("tool", "pdm", name) for name in ("version", "build")),
)
_BUILD_SCRIPTS = ("pdm_build.py", "hatch_build.py", "build.py")
_ATTRIBUTE = r"[\"']?attr[\"']?\W+([\w.]+)\.(\w+)"
"""In a description: the module and the name whose value is the version."""
_NO_SCRIPT = (SyntaxError, ValueError, RecursionError, MemoryError)
_MOST_LINKS = 5


def state_of(package: str) -> bytes:
    """The commit and the tags that the build of a package's directory may read, and the settings
    of git that it may follow.

    Empty where there is no repository. Raises UsageError for one of Mercurial.
    """
    if not os.path.isdir(package):
        return b""
    package = os.path.realpath(package)
    git, mercurial = find_upwards(package, ".git"), find_upwards(package, ".hg")
    if git is None and mercurial is None:
        return b""
    independent = _is_independent(package)
    if mercurial is not None and not independent and len(mercurial) > len(git or ""):
        raise UsageError(
            f"the version of {package} may be told by a repository of Mercurial, which is not "
            "read; name the install's directories with --also"
        )
    if git is None:
        return b""
    folder = _git_folder(os.path.join(git, ".git"))
    common = os.path.normpath(os.path.join(folder, _text(folder, "commondir").strip()))
    texts = [
        "in a repository",
        *_gitignores_above(package, git),
        _COMMENT.sub("", _text(common, "info/exclude")).strip(),
    ]
    if not independent:
        texts += _commit_and_tags(folder, common)
    return "\n".join(texts).encode("utf-8", "surrogateescape")


def _gitignores_above(package: str, top: str) -> list[str]:
    """The `.gitignore`s between a package's directory, its own left out, and the repository's."""
    out = []
    while package != top:
        package = os.path.dirname(package)
        out.append(_text(package, ".gitignore"))
    return out


def _commit_and_tags(folder: str, common: str) -> list[str]:
    packed = _text(common, "packed-refs")
    head = _text(folder, "HEAD").strip()
    texts = [head, _text(common, "shallow")]
    texts += [_text(place, "reftable/tables.list") for place in dict.fromkeys((folder, common))]
    for _ in range(_MOST_LINKS):
        if not head.startswith("ref: "):
            break
        head = _commit_of(common, packed, head[5:])
        texts.append(head)
    packed_tags = re.findall(r"^([0-9a-f]+) (refs/tags/.+)$", packed, re.MULTILINE)
    tags = {name: commit for commit, name in packed_tags}
    for place, _, names in os.walk(os.path.join(common, "refs/tags")):
        loose = [os.path.relpath(os.path.join(place, name), common) for name in names]
        tags |= {name: _text(common, name).strip() for name in loose}
    return texts + [f"{name} {tags[name]}" for name in sorted(tags)]


def _git_folder(path: str) -> str:
    """The directory that `.git` is, or that the `.git` of a worktree or submodule names."""
    if os.path.isdir(path):
        return path
    named = try_to_read(path)[0].partition("gitdir:")[2].strip()
    return os.path.join(os.path.dirname(path), named)


def _commit_of(common: str, packed: str, branch: str) -> str:
    loose = _text(common, branch).strip()
    match = re.search(rf"^([0-9a-f]+) {re.escape(branch)}$", packed, re.MULTILINE)
    return loose or (match[1] if match else "")


def _text(folder: str, name: str) -> str:
    return try_to_read(os.path.join(folder, name))[0]


def _is_independent(package: str) -> bool:
    """Whether the build of a package is known to read no repository's commits."""
    project, hatch = (parse_toml(_text(package, n)) for n in ("pyproject.toml", "hatch.toml"))
    if project is None or hatch is None:
        return False
    build = table(project, "build-system")
    required = build.get("requires", [])
    if "backend-path" in build or not isinstance(required, list):
        return False
    names = (re.split(r"[^\w.-]", word.strip())[0] for word in required if isinstance(word, str))
    if not all(re.sub(r"[-_.]+", "_", name).lower() in _INDEPENDENT for name in names):
        return False
    if any(os.path.exists(os.path.join(package, name)) for name in _BUILD_SCRIPTS):
        return False
    tables = [table(project, *path[:-1]).get(path[-1]) for path in _BUILD_TABLES]
    description = json.dumps([*tables, hatch], default=str)
    description += _COMMENT.sub("", _text(package, "setup.cfg"))
    if "build" in table(project, "tool", "poetry") or _may_read_repository(description):
        return False
    attributes = re.findall(_ATTRIBUTE, description)
    if str(build.get("build-backend")).startswith("flit"):
        module = table(project, "tool", "flit", "module").get("name")
        module = module or str(table(project, "project").get("name")).replace("-", "_")
        attributes.append((str(module), "__version__"))
    script = _text(package, "setup.py")
    return (not script or _is_plain_script(script)) and all(
        _is_literal(package, module, name) for module, name in attributes
    )


def _may_read_repository(text: str) -> bool:
    return _READING.search(_ADDRESS.sub("", text)) is not None


def _parse_script(script: str) -> ast.Module | None:
    import ast  # few packages have a script
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the script's own escapes
            return ast.parse(script)
    except _NO_SCRIPT:
        return None


def _is_plain_script(script: str) -> bool:
    """Whether a `setup.py` is known to run only itself and modules that read no repository."""
    tree = _parse_script(script)
    if tree is None:
        return False
    import ast

    imported: set[str] = set()
    words: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add("" if node.level else (node.module or "").partition(".")[0])
            words += [alias.name for alias in node.names]
        elif isinstance(node, ast.Name) and node.id not in _RUNNING:
            words.append(node.id)
        elif isinstance(node, ast.Attribute) and node.attr not in _RUNNING_IN:
            words.append(node.attr)
        elif isinstance(node, ast.keyword):
            words.append(node.arg or "")
        elif isinstance(node, ast.Constant):
            words += [node.value] if isinstance(node.value, str) else []
        elif isinstance(node, ast.Name | ast.Attribute):
            return False
    return imported <= _HARMLESS and not any(map(_may_read_repository, words))


def _is_literal(package: str, module: str, name: str) -> bool:
    """Whether a module assigns a name a literal: then builds run nothing to read it."""
    import ast

    path = module.replace(".", "/")
    texts = [
        _text(package, f"{above}{path}{end}")
        for above in ("", "src/")
        for end in (".py", "/__init__.py")
    ]
    tree = _parse_script(next(filter(None, texts), ""))
    for node in tree.body if tree is not None else ():
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
        else:
            continue
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return _is_constant(node.value)
    return False


def _is_constant(value: ast.expr | None) -> bool:
    import ast

    try:
        ast.literal_eval(value or "")
    except (*_NO_SCRIPT, TypeError):
        return False
    return True
