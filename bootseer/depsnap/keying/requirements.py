"""What an install command reads: requirement files, local sources; and their resolved lock.

Requirement files follow pip's format: `-r` and `-c` include others, relative to the including
file; `--hash` on every requirement, or `--no-deps` with nothing but exact versions, means that
nothing is left to resolve.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence

from bootseer.depsnap.keying import redact
from bootseer.depsnap.keying.command import Install
from bootseer.depsnap.keying.roots import upwards
from bootseer.errors import UsageError, from_os_error

FILE_LIMIT_BYTES = 64 << 20
SOURCE_LIMIT_BYTES = 512 << 20
NOT_SOURCE = frozenset(
    (".git", ".hg", ".venv", "__pycache__", "build", "dist", "node_modules", ".mypy_cache")
)
_INCLUDE = re.compile(r"^\s*(?:-r|--requirement|-c|--constraint)[=\s]*(\S+)", re.MULTILINE)
_EDITABLE = re.compile(r"^\s*(?:-e|--editable)[=\s]*(\S+)", re.MULTILINE)
_COMMENT = re.compile(r"(?:^|\s)#.*$", re.MULTILINE)
_INDEX_OPTIONS = ("--index-url", "-i", "--extra-index-url", "--find-links", "-f")
_EXACT = re.compile(r"[\w.-]+\s*(?:\[[^\]]*\])?\s*===?\s*[^\s*,;]+\s*(?:;.*)?")


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """Everything local that decides what is installed: label -> sha256 of redacted content.

    `open_ended` tells that an index decides too.
    """

    digests: Mapping[str, str]
    open_ended: bool


def read_text(path: str) -> str:
    """A small text file; NotFoundError or AccessDeniedError when it cannot be read."""
    try:
        if os.path.getsize(path) > FILE_LIMIT_BYTES:
            raise UsageError(f"key file {path} is larger than 64 MiB; name a lock file instead")
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError as error:
        raise from_os_error(error, f"read the key file {path}") from error


def digest_text(text: str) -> str:
    """sha256 of a text without its credentials."""
    return hashlib.sha256(redact.text(text).encode("utf-8", "surrogateescape")).hexdigest()


def closure(paths: Iterable[str], cwd: str) -> dict[str, str]:
    """Absolute path -> text of the given requirement files and all that they include."""
    texts: dict[str, str] = {}
    pending = [os.path.join(cwd, path) for path in paths]
    while pending:
        path = os.path.normpath(pending.pop())
        if path in texts:
            continue
        texts[path] = read_text(path)
        included = _INCLUDE.findall(_COMMENT.sub("", texts[path]))
        here = os.path.dirname(path)
        pending += [os.path.join(here, name) for name in included if "://" not in name]
    return texts


def inputs(installs: Sequence[Install], cwd: str) -> Inputs:
    """Read what the installs of a command name. Raises NotFoundError for a missing file."""
    found: dict[str, str] = {}
    open_ended = False
    for install in installs:
        if install.tool == "uv-sync":
            project = _project(cwd)
            found |= project
            open_ended |= not any(label.endswith("uv.lock") for label in project)
        if install.tool not in ("pip", "uv"):
            open_ended |= install.tool == "other"
            continue
        files = [f for f in install.requirement_files if "://" not in f and f != "-"]
        open_ended |= len(files) != len(install.requirement_files)
        texts = closure(files, cwd)
        others = closure([f for f in install.constraint_files if "://" not in f], cwd)
        found |= {f"file {_short(p, cwd)}": digest_text(t) for p, t in (texts | others).items()}
        plain = [_COMMENT.sub("", text) for text in texts.values()]
        for word in _local(install.requirements, plain, cwd):
            found[f"source {_short(word, cwd)}"] = source_digest(word)
        open_ended |= not _closed(install, plain, cwd)
    return Inputs(found, open_ended)


def _closed(install: Install, texts: Sequence[str], cwd: str) -> bool:
    """Whether no index has a say in what is installed."""
    if "--require-hashes" in install.words:
        return True
    if texts and not install.requirements and all("--hash=" in text for text in texts):
        return True
    lines = [line for t in texts for line in t.replace("\\\n", " ").splitlines()]
    wanted = [w.partition(" --")[0].strip() for w in (*install.requirements, *lines)]
    return "--no-deps" in install.words and all(
        not word or word.startswith("-") or _EXACT.fullmatch(word) or _local_path(word, cwd)
        for word in wanted
    )


def _project(cwd: str) -> dict[str, str]:
    """What decides in uv's project: its own description and its workspace's, and the lock."""
    places = {upwards(cwd, "pyproject.toml"), upwards(cwd, "uv.lock")} - {None}
    paths = [f"{place}/{name}" for place in places for name in ("pyproject.toml", "uv.lock")]
    return {f"file {_short(p, cwd)}": digest_text(read_text(p)) for p in paths if os.path.exists(p)}


def _local(words: Sequence[str], texts: Sequence[str], cwd: str) -> list[str]:
    """Packages given as a path, on the command line or in a requirement file."""
    lines = [line.strip() for text in texts for line in text.splitlines()]
    editable = [path for text in texts for path in _EDITABLE.findall(text)]
    candidates = [*words, *editable, *(ln for ln in lines if ln.startswith((".", "/", "file:")))]
    return [path for word in candidates if (path := _local_path(word, cwd))]


def _local_path(word: str, cwd: str) -> str | None:
    """The path of a requirement that is one, extras and the like cut off."""
    path = word.partition("[")[0].removeprefix("file://").removeprefix("file:")
    path = os.path.normpath(os.path.join(cwd, path.split(" ")[0]))
    named = "/" in word or word.startswith(".") or word.endswith(".whl")
    return path if named and os.path.exists(path) else None


def source_digest(path: str) -> str:
    """sha256 over a local package: one file's bytes, or names and bytes below a directory."""
    digest = hashlib.sha256()
    budget = SOURCE_LIMIT_BYTES
    for name in _source_files(path):
        full = os.path.join(path, name) if name else path
        try:
            with open(full, "rb") as file:
                budget -= os.fstat(file.fileno()).st_size
                if budget < 0:
                    raise UsageError(f"the local package {path} is larger than 512 MiB")
                content = hashlib.file_digest(file, "sha256").digest()
        except OSError as error:
            raise from_os_error(error, f"read the local package {full}") from error
        digest.update(name.encode("utf-8", "surrogateescape") + b"\0" + content)
    return digest.hexdigest()


def _source_files(path: str) -> list[str]:
    if not os.path.isdir(path):
        return [""]
    names = []
    for folder, below, files in os.walk(path):
        below[:] = [d for d in below if d not in NOT_SOURCE and not d.endswith(".egg-info")]
        names += [os.path.relpath(os.path.join(folder, f), path) for f in files]
    return sorted(n for n in names if os.path.isfile(os.path.join(path, n)))


def _short(path: str, cwd: str) -> str:
    """Relative below the working directory, so that two checkouts have one label."""
    relative = os.path.relpath(path, cwd)
    return path if relative.startswith("..") else relative


def resolve(
    installs: Sequence[Install],
    python: str,
    environ: Mapping[str, str],
    cwd: str,
    *,
    timeout_s: float,
) -> str | None:
    """The lock that `uv pip compile` finds now, without credentials; None when it cannot tell."""
    program = shutil.which("uv", path=environ.get("PATH"))
    program = program or shutil.which("uv", path=os.path.dirname(sys.executable))
    asked = [i for i in installs if i.tool in ("pip", "uv")]
    if program is None or len(asked) != 1 or any(i.tool == "other" for i in installs):
        return None
    files = list(asked[0].requirement_files)
    words = [program, "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
    words += ["--python", python, *_index_words(asked[0].words), *files]
    names = "".join(name + "\n" for name in asked[0].requirements)
    if names:
        words.append("-")
    try:
        done = subprocess.run(
            words,
            input=names.encode("utf-8", "surrogateescape"),
            capture_output=True,
            cwd=cwd,
            env=_uv_environment(environ),
            timeout=timeout_s,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return redact.text(done.stdout.decode("utf-8", "replace"))


def _index_words(command: Sequence[str]) -> list[str]:
    """The options of an install command that say where to look and what to accept."""
    words: list[str] = []
    for index, word in enumerate(command):
        name, equals, _ = word.partition("=")
        if name in (*_INDEX_OPTIONS, "-c", "--constraint") and equals:
            words.append(word)
        elif word in (*_INDEX_OPTIONS, "-c", "--constraint") and index + 1 < len(command):
            words += [word, command[index + 1]]
        elif word in ("--no-index", "--no-deps"):
            words.append(word)
        elif word == "--pre":
            words += ["--prerelease", "allow"]
    return words


_PIP_AS_UV = (
    ("PIP_INDEX_URL", "UV_DEFAULT_INDEX"),
    ("PIP_EXTRA_INDEX_URL", "UV_INDEX"),
    ("PIP_FIND_LINKS", "UV_FIND_LINKS"),
    ("PIP_CONSTRAINT", "UV_CONSTRAINT"),
    ("PIP_NO_INDEX", "UV_NO_INDEX"),
)


def _uv_environment(environ: Mapping[str, str]) -> dict[str, str]:
    out = dict(environ)
    for pip, uv in _PIP_AS_UV:
        if pip in out and uv not in out:
            out[uv] = out[pip]
    return out
