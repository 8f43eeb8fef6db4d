"""What an install command reads: requirement files, local sources; and who resolves the rest.

Requirement files follow pip's format: `-r` and `-c` include others, relative to the including
file; `--hash` on every requirement, or `--no-deps` with nothing but exact versions, means that
nothing is left to resolve.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence

from bootseer import light_dataclasses as dataclasses
from bootseer import sha256
from bootseer.depsnap.keying import pins, redact
from bootseer.depsnap.keying.command import Install
from bootseer.depsnap.keying.roots import place_of, project_folder, upwards
from bootseer.errors import UsageError, from_os_error
from bootseer.regular_files import opener

FILE_LIMIT_BYTES = 64 << 20
SOURCE_LIMIT_BYTES = 512 << 20
NOT_SOURCE = frozenset(
    (".git", ".hg", ".venv", "__pycache__", "build", "dist", "node_modules", ".mypy_cache")
)
_INCLUDE = re.compile(r"^\s*(?:-r|--requirement|-c|--constraint)[=\s]*(\S+)", re.MULTILINE)
_EDITABLE = r"(?m)^\s*(?:-e|--editable)[=\s]*(\S+)"
_DESCRIPTIONS = frozenset({"pyproject.toml", "setup.py", "setup.cfg"})
_LISTS = r".*requirements.*\.(?:txt|in)"
_COMMENT = re.compile(r"(?:^|\s)#.*$", re.MULTILINE)


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """Everything local that decides what is installed: label -> sha256 of redacted content.

    `open_ended` tells that an index decides too; `pinned` are the exact versions that lists and
    constraints name: where these cover all that an install brought, an index had no say after all.
    """

    digests: Mapping[str, str]
    open_ended: bool
    pinned: Mapping[str, str] = dataclasses.field(default_factory=dict)
    all_exact: bool = False


def read_text(path: str) -> str:
    """A small text file; NotFoundError or AccessDeniedError when it cannot be read."""
    try:
        if os.path.getsize(path) > FILE_LIMIT_BYTES:
            raise UsageError(f"key file {path} is larger than 64 MiB; name a lock file instead")
        with open(path, encoding="utf-8", errors="surrogateescape", opener=opener) as file:
            return file.read()
    except OSError as error:
        raise from_os_error(error, f"read the key file {path}") from error


def digest_text(text: str) -> str:
    """sha256 of a text without its credentials."""
    return sha256.of_text(redact.text(text))


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


def inputs(
    installs: Sequence[Install], cwd: str, environ: Mapping[str, str] | None = None
) -> Inputs:
    """Read what the installs of a command name. Raises NotFoundError for a missing file."""
    found: dict[str, str] = {}
    pinned: dict[str, str] = {}
    open_ended, all_exact = False, True
    for install in installs:
        here = place_of(install, cwd)
        if install.tool == "uv-sync":
            project = _project(project_folder(install, environ or {}, here), cwd)
            found |= project
            open_ended |= not any(label.endswith("uv.lock") for label in project)
        if install.tool not in ("pip", "uv"):
            open_ended |= install.tool == "other"
            all_exact &= install.tool in ("venv", "mkdir")
            continue
        files = [f for f in install.requirement_files if "://" not in f and f != "-"]
        open_ended |= len(files) != len(install.requirement_files)
        texts = closure(files, here)
        others = closure([f for f in install.constraint_files if "://" not in f], here)
        found |= {f"file {_short(p, cwd)}": digest_text(t) for p, t in (texts | others).items()}
        plain = [_COMMENT.sub("", text) for text in texts.values()]
        for word in _local(install.requirements, plain, here):
            found[f"source {_short(word, cwd)}"] = source_digest(word)
        for word in install.editable:
            if path := _folder(word, here):
                found[f"editable {_short(path, cwd)}"] = editable_digest(path)
        open_ended |= not _closed(install, plain, here)
        wanted = _wanted((*install.requirements, *install.editable), plain)
        exact = [pin for word in wanted if (pin := pins.exact(word))]
        all_exact &= len(files) == len(install.requirement_files) and len(exact) == len(wanted)
        limits = _wanted((), [_COMMENT.sub("", text) for text in others.values()])
        pinned |= dict(pin for word in limits if (pin := pins.exact(word)))
        pinned |= dict(exact)
    return Inputs(found, open_ended, pinned, all_exact and open_ended)


def _closed(install: Install, texts: Sequence[str], cwd: str) -> bool:
    """Whether no index has a say in what is installed."""
    if install.removes or "--require-hashes" in install.words:
        return True
    if texts and not install.requirements and all("--hash=" in text for text in texts):
        return True
    wanted = _wanted((*install.requirements, *install.editable), texts)
    return "--no-deps" in install.words and all(
        pins.exact(w) or _local_path(w, cwd) or (w in install.editable and _folder(w, cwd))
        for w in wanted
    )


def _wanted(words: Sequence[str], texts: Sequence[str]) -> list[str]:
    """The requirements of a command line and of files, options left out."""
    lines = [line for t in texts for line in t.replace("\\\n", " ").splitlines()]
    found = (word.partition(" --")[0].strip() for word in (*words, *lines))
    return [word for word in found if word and not word.startswith("-")]


def _project(folder: str, cwd: str) -> dict[str, str]:
    """What decides in uv's project: its own description and its workspace's, and the lock."""
    places = {upwards(folder, "pyproject.toml"), upwards(folder, "uv.lock")} - {None}
    paths = [f"{place}/{name}" for place in places for name in ("pyproject.toml", "uv.lock")]
    return {f"file {_short(p, cwd)}": digest_text(read_text(p)) for p in paths if os.path.exists(p)}


def _local(words: Sequence[str], texts: Sequence[str], cwd: str) -> list[str]:
    """Packages given as a path, on the command line or in a requirement file."""
    lines = [line.strip() for text in texts for line in text.splitlines()]
    editable = [path for text in texts for path in re.findall(_EDITABLE, text)]
    candidates = [*words, *editable, *(ln for ln in lines if ln.startswith((".", "/", "file:")))]
    return [path for word in candidates if (path := _local_path(word, cwd))]


def _local_path(word: str, cwd: str) -> str | None:
    """The path of a requirement that is one, extras and the like cut off."""
    path = word.partition("[")[0].removeprefix("file://").removeprefix("file:")
    path = os.path.normpath(os.path.join(cwd, path.split(" ")[0]))
    named = "/" in word or word.startswith(".") or word.endswith(".whl")
    return path if named and os.path.exists(path) else None


def _folder(word: str, cwd: str) -> str | None:
    """The directory that an `--editable` names, extras cut off."""
    path = word.partition("[")[0].removeprefix("file://").removeprefix("file:")
    path = os.path.normpath(os.path.join(cwd, path))
    return path if os.path.isdir(path) else None


def editable_digest(path: str) -> str:
    """sha256 of what an editable install takes from its source: its description and its names.

    What lies in its modules is read where it is, and may change without another install.
    """
    parts = []
    for folder in (path, os.path.join(path, "src")):
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            continue
        for name in names:
            full = os.path.join(folder, name)
            if name in _DESCRIPTIONS or re.fullmatch(_LISTS, name):
                parts.append(f"{folder == path} {name} {digest_text(read_text(full))}")
            elif name.endswith(".py") or os.path.isfile(os.path.join(full, "__init__.py")):
                parts.append(f"{folder == path} {name}")
    return sha256.of_text("\n".join(parts))


def source_digest(path: str) -> str:
    """sha256 over a local package: one file's bytes, or names and bytes below a directory."""
    import hashlib  # OpenSSL's: sources are megabytes

    digest = hashlib.sha256()
    budget = SOURCE_LIMIT_BYTES
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
