"""What a repository of git tells the build of a local package: its version, mostly.

setuptools-scm, hatch-vcs and many like them make a version of the checked-out commit and the
tags; a build of one's own may do the same. Only packages whose build is known not to look there
are taken for independent of it: another commit keeps their key. Which files a build leaves out,
because git ignores them, is told by where a repository ends and by what lies above the package.
"""

from __future__ import annotations

import json
import os
import re
import sys

from bootseer.depsnap.key.input_files import look
from bootseer.depsnap.key.uv_config import parsed, table, upwards
from bootseer.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ast

_INDEPENDENT_TEXT = """
    setuptools wheel hatchling flit flit_core poetry poetry_core uv_build pdm_backend packaging
    cython numpy pybind11 cffi ninja cmake torch tomli
"""
_INDEPENDENT = frozenset(_INDEPENDENT_TEXT.split())
"""What builds require that looks at no repository unless a description says so."""
_LOOKING = re.compile(
    r"(?<![\w-])git(?![\w+:@-])|subprocess|popen|scm|(?<!ignore-)vcs|versioneer|dulwich|pygit2"
    r"|dunamai|\bpbr\b|cmdclass|\bhooks?\b|\bsource\W+(?:code|env|call)\b",
    re.IGNORECASE,
)
"""In what says how a package is built: what may look at a repository, or run what does."""
_ADDRESS = re.compile(r"\b[a-z][a-z+]{0,15}://[^\s\"'<>]+")
_COMMENT = re.compile(r"^\s*[#;].*$", re.MULTILINE)
_LOADING = frozenset(("subprocess", "runpy", "importlib", "imp", "pkgutil", "zipimport", "ctypes"))
_HARMLESS = (sys.stdlib_module_names | _INDEPENDENT | {"Cython"}) - _LOADING
_RUNNING = frozenset(("exec", "eval", "compile", "__import__"))
_RUNNING_IN = frozenset(("system", "load_module", "exec_module"))
"""Names of what runs what a script does not hold, as they stand and as attributes."""
_BUILD_TABLES = (
    ("build-system",),
    *(("tool", name) for name in ("setuptools", "flit", "distutils")),
    *(("tool", "hatch", name) for name in ("version", "build", "metadata")),
    *(("tool", "pdm", name) for name in ("version", "build")),
)
_BUILD_SCRIPTS = ("pdm_build.py", "hatch_build.py", "build.py")
_MODULE_OF = r"[\"']?attr[\"']?\W+([\w.]+)\.(\w+)"
_NO_SCRIPT = (SyntaxError, ValueError, RecursionError, MemoryError)
_MOST_LINKS = 5


def state_of(package: str) -> bytes:
    """The commit and the tags that the build of a package's directory may look at, and what of
    git's settings it may heed.

    Empty where there is no repository. Raises UsageError for one that is not git's.
    """
    if not os.path.isdir(package):
        return b""
    package = os.path.realpath(package)
    git, other = upwards(package, ".git"), upwards(package, ".hg")
    if git is None and other is None:
        return b""
    independent = _is_independent(package)
    if other is not None and not independent and len(other) > len(git or ""):
        raise UsageError(
            f"the version of {package} may be told by a repository of Mercurial, which is not "
            "read; name the install's directories with --also"
        )
    if git is None:
        return b""
    folder = _folder_of(os.path.join(git, ".git"))
    common = os.path.normpath(os.path.join(folder, _text(folder, "commondir").strip()))
    texts = [
        "in a repository",
        *_ignored_above(package, git),
        _COMMENT.sub("", _text(common, "info/exclude")).strip(),
    ]
    if not independent:
        texts += _commit_and_tags(folder, common)
    return "\n".join(texts).encode("utf-8", "surrogateescape")


def _ignored_above(package: str, top: str) -> list[str]:
    """The `.gitignore`s from a repository's top down to a package's directory, not its own."""
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
        head = _commit(common, packed, head[5:])
        texts.append(head)
    tags = re.findall(r"^([0-9a-f]+) (refs/tags/.+)$", packed, re.MULTILINE)
    told = {name: commit for commit, name in tags}
    for place, _, names in os.walk(os.path.join(common, "refs/tags")):
        loose = [os.path.relpath(os.path.join(place, name), common) for name in names]
        told |= {name: _text(common, name).strip() for name in loose}
    return texts + [f"{name} {told[name]}" for name in sorted(told)]


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
    """Whether the build of a package is known to look at no repository's commits."""
    described, hatch = (parsed(_text(package, name)) for name in ("pyproject.toml", "hatch.toml"))
    if described is None or hatch is None:
        return False
    build = table(described, "build-system")
    required = build.get("requires", [])
    if "backend-path" in build or not isinstance(required, list):
        return False
    names = (re.split(r"[^\w.-]", word.strip())[0] for word in required if isinstance(word, str))
    if not all(re.sub(r"[-_.]+", "_", name).lower() in _INDEPENDENT for name in names):
        return False
    if any(os.path.exists(os.path.join(package, name)) for name in _BUILD_SCRIPTS):
        return False
    tables = [table(described, *path[:-1]).get(path[-1]) for path in _BUILD_TABLES]
    told = json.dumps([*tables, hatch], default=str)
    settings = _COMMENT.sub("", _text(package, "setup.cfg"))
    if "build" in table(described, "tool", "poetry") or _is_looking(told + settings):
        return False
    computed = re.findall(_MODULE_OF, told + settings)
    if str(build.get("build-backend")).startswith("flit"):
        module = table(described, "tool", "flit", "module").get("name")
        module = module or str(table(described, "project").get("name")).replace("-", "_")
        computed.append((str(module), "__version__"))
    script = _text(package, "setup.py")
    return (not script or _is_plain_script(script)) and all(
        _is_literal(package, *found) for found in computed
    )


def _is_looking(text: str) -> bool:
    return _LOOKING.search(_ADDRESS.sub("", text)) is not None


def _parsed(script: str) -> ast.Module | None:
    import ast  # few packages have a script
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the script's own escapes
            return ast.parse(script)
    except _NO_SCRIPT:
        return None


def _is_plain_script(script: str) -> bool:
    """Whether a `setup.py` is known to run nothing but itself and what looks at no repository."""
    tree = _parsed(script)
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
    return imported <= _HARMLESS and not any(map(_is_looking, words))


def _is_literal(package: str, module: str, name: str) -> bool:
    """Whether a module gives a name its value in so many words: then builds run nothing for it."""
    import ast

    path = module.replace(".", "/")
    texts = [
        _text(package, f"{above}{path}{end}")
        for above in ("", "src/")
        for end in (".py", "/__init__.py")
    ]
    tree = _parsed(next(filter(None, texts), ""))
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
