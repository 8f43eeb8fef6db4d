"""What an install command reads: requirement files, local sources; and who resolves the rest.

Requirement files follow pip's format: `-r` and `-c` include others, relative to the including
file; `--hash` on every requirement, or `--no-deps` with nothing but exact versions, means that
nothing is left to resolve.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from bootseer import light_dataclasses as dataclasses
from bootseer import sha256
from bootseer.depsnap.keying import pins, redact
from bootseer.depsnap.keying.command import Install
from bootseer.depsnap.keying.roots import place_of, project_folder, upwards, variables_of
from bootseer.errors import UsageError, from_os_error
from bootseer.regular_files import opener

FILE_LIMIT_BYTES = 64 << 20
SOURCE_LIMIT_BYTES = 512 << 20
NOT_SOURCE = frozenset(
    (".git", ".hg", ".venv", "__pycache__", "build", "dist", "node_modules", ".mypy_cache")
)
_INCLUDE = re.compile(r"^\s*(?:-r|--requirement|-c|--constraint)[= \t]*(\S.*)", re.MULTILINE)
_EDITABLE = r"(?m)^\s*(?:-e|--editable)[=\s]*(\S+)"
_DESCRIPTIONS = frozenset({"pyproject.toml", "setup.py", "setup.cfg"})
_LISTS = r".*requirements.*\.(?:txt|in)"
_COMMENT = re.compile(r"(?:^|\s)#.*$", re.MULTILINE)
_NAME = re.compile(r"([A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?)\s*(?:\[[^\]]*\])?\s*(?:[<>=!~][^;@]*)?")
_LIST_ENDS = (".txt", ".in")
_ARCHIVES = (".whl", ".zip", ".gz", ".bz2", ".xz", ".tgz")
_VARIABLE = r"\$\{([A-Z0-9_]+)\}"
NOT_FOUND = "not found"
_UNREADABLE = "unreadable"
_REFUSED = frozenset((errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP))


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """Everything local that decides what is installed: label -> sha256 of redacted content.

    `open_ended` tells that an index decides too; `pinned` are the exact versions that lists and
    constraints name: where these cover all that an install brought, an index had no say after all.
    `variables` are those that a list is filled in from, by name. `wanted` are the packages that
    must stand there afterwards, on any machine, by their normal names.
    """

    digests: Mapping[str, str]
    open_ended: bool
    pinned: Mapping[str, str] = dataclasses.field(default_factory=dict)
    all_exact: bool = False
    variables: frozenset[str] = frozenset()
    wanted: frozenset[str] = frozenset()


def read_text(path: str) -> str:
    """A small text file; NotFoundError or AccessDeniedError when it cannot be read."""
    try:
        return _text(path)
    except OSError as error:
        raise from_os_error(error, f"read the key file {path}") from error


def look(path: str) -> tuple[str, str]:
    """The text of a file that a tool reads if it can, else "" and why it cannot.

    Raises for a FIFO, whose text nobody knows ahead, and for faults that may pass.
    """
    try:
        return _text(path), ""
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return "", NOT_FOUND
        if error.errno in _REFUSED:
            return "", _UNREADABLE
        raise from_os_error(error, f"read the key file {path}") from error


def _text(path: str) -> str:
    if path == os.devnull:
        return ""
    if os.path.getsize(path) > FILE_LIMIT_BYTES:
        raise UsageError(f"key file {path} is larger than 64 MiB; name a lock file instead")
    with open(path, encoding="utf-8", errors="surrogateescape", opener=opener) as file:
        return file.read()


def digest_text(text: str) -> str:
    """sha256 of a text without its credentials."""
    return sha256.of_text(redact.text(text))


def closure(
    paths: Iterable[str],
    cwd: str,
    environ: Mapping[str, str],
    unread: dict[str, str] | None = None,
) -> dict[str, str]:
    """Absolute path -> text of the given requirement files and all that they include.

    A file that cannot be read raises; where `unread` is given, it is noted there with its reason.
    """
    texts: dict[str, str] = {}
    pending = [os.path.join(cwd, path) for path in paths]
    while pending:
        path = os.path.normpath(pending.pop())
        if path in texts or (unread and path in unread):
            continue
        if unread is None:
            texts[path] = read_text(path)
        else:
            text, why = look(path)
            if why:
                unread[path] = why
                continue
            texts[path] = text
        here = os.path.dirname(path)
        pending += [os.path.join(here, name) for name in _included(texts[path], environ)]
    return texts


def _included(text: str, environ: Mapping[str, str]) -> Iterator[str]:
    """Paths of the files that a list includes (pip: _internal/req/req_file.py, preprocess)."""
    plain = _filled_in(_COMMENT.sub("", text).replace("\\\n", ""), environ)
    for words in _INCLUDE.findall(plain):
        path = path_of(_first(words))
        if path is not None:
            yield path


def _first(words: str) -> str:
    if any(sign in words for sign in "'\"\\"):
        import shlex  # few names need quotes

        try:
            return (shlex.split(words) or [""])[0]
        except ValueError:
            pass  # pip itself will complain
    return words.split()[0]


def path_of(name: str) -> str | None:
    """The path of a list that is named by it or by a `file:` URL; None for what is elsewhere."""
    if "\0" in name:
        return None  # names no file
    if name[:5].lower() != "file:":
        return None if "://" in name else name
    path = re.split("[?#]", name[5:])[0]
    if path.startswith("//"):
        host, slash, rest = path[2:].partition("/")
        if host not in ("", "localhost"):
            return None
        path = slash + rest
    if "%" in path:
        from urllib.parse import unquote  # few names are quoted

        path = unquote(path)
    return path


def _filled_in(text: str, environ: Mapping[str, str]) -> str:
    """A list with the variables that are set (pip: req_file.py, expand_env_variables)."""
    return re.sub(_VARIABLE, lambda found: environ.get(found[1]) or found[0], text)


def _variables(texts: Iterable[str]) -> frozenset[str]:
    """Names of the variables in lists, those of credentials in addresses left out."""
    held = [redact.text(text) for text in texts if "${" in text]
    return frozenset(name for text in held for name in re.findall(_VARIABLE, text))


def listed(
    names: Iterable[str],
    editable: Iterable[str],
    environ: Mapping[str, str],
    place: str,
    cwd: str,
) -> Inputs:
    """What lists and packages that settings name decide, for a tool in `place`.

    Which tool reads which of them is not known here: what cannot be read is told, no error.
    """
    unread: dict[str, str] = {}
    paths = [path for name in names if (path := path_of(name)) is not None]
    texts = closure(paths, place, environ, unread)
    found = {f"settings {short(p, cwd)}": digest_text(t) for p, t in texts.items()}
    found |= {f"settings {short(p, cwd)}": why for p, why in unread.items()}
    plain = [_filled_in(_COMMENT.sub("", text), environ) for text in texts.values()]
    for path in _local((), plain, place):
        found[f"source {short(path, cwd)}"] = source_digest(path)
    found |= _editable(editable, place, cwd)
    return Inputs(found, open_ended=False, variables=_variables(texts.values()))


def inputs(
    installs: Sequence[Install], cwd: str, environ: Mapping[str, str] | None = None
) -> Inputs:
    """Read what the installs of a command name. Raises NotFoundError for a missing file."""
    found: dict[str, str] = {}
    pinned: dict[str, str] = {}
    variables: frozenset[str] = frozenset()
    names: set[str] = set()
    open_ended, all_exact = False, True
    for install in installs:
        here, its = place_of(install, cwd), variables_of(install, environ or {})
        if install.tool == "uv-sync":
            project = _project(project_folder(install, its, here), cwd)
            found |= project
            open_ended |= not any(label.endswith("uv.lock") for label in project)
        if install.tool not in ("pip", "uv"):
            open_ended |= install.tool == "other"
            all_exact &= install.tool in ("venv", "mkdir")
            continue
        files = [p for f in install.requirement_files if f != "-" and (p := path_of(f)) is not None]
        limiting = [path for f in install.constraint_files if (path := path_of(f)) is not None]
        open_ended |= len(files) != len(install.requirement_files)
        texts, others = closure(files, here, its), closure(limiting, here, its)
        found |= {f"file {short(p, cwd)}": digest_text(t) for p, t in (texts | others).items()}
        variables |= _variables((texts | others).values())
        plain = [_COMMENT.sub("", text) for text in texts.values()]
        for word in _local(install.requirements, [_filled_in(t, its) for t in plain], here):
            found[f"source {short(word, cwd)}"] = source_digest(word)
        found |= _editable(install.editable, here, cwd)
        open_ended |= not _closed(install, plain, here)
        wanted = _wanted((*install.requirements, *install.editable), plain)
        named = [os.path.normpath(os.path.join(here, f)) for f in files if f.endswith(_LIST_ENDS)]
        lines = [_COMMENT.sub("", texts[path]) for path in named]
        names |= _names(_wanted(install.requirements, lines))
        exact = [pin for word in wanted if (pin := pins.exact(word))]
        all_exact &= len(files) == len(install.requirement_files) and len(exact) == len(wanted)
        limits = _wanted((), [_COMMENT.sub("", text) for text in others.values()])
        pinned |= dict(pin for word in limits if (pin := pins.exact(word)))
        pinned |= dict(exact)
    exact_alone = all_exact and open_ended
    left = frozenset() if any(install.removes for install in installs) else frozenset(names)
    return Inputs(found, open_ended, pinned, exact_alone, variables, left)


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


def _names(wanted: Iterable[str]) -> set[str]:
    """Normal names of the packages that requirements name for every machine."""
    names = {os.path.basename(w).partition("-")[0] for w in wanted if w.endswith(".whl")}
    found = (_NAME.fullmatch(word) for word in wanted if not word.endswith(_ARCHIVES))
    return {pins.normal_name(name) for name in names | {match[1] for match in found if match}}


def _project(folder: str, cwd: str) -> dict[str, str]:
    """What decides in uv's project: its own description and its workspace's, and the lock."""
    places = {upwards(folder, "pyproject.toml"), upwards(folder, "uv.lock")} - {None}
    paths = [f"{place}/{name}" for place in places for name in ("pyproject.toml", "uv.lock")]
    return {f"file {short(p, cwd)}": digest_text(read_text(p)) for p in paths if os.path.exists(p)}


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


def _editable(words: Iterable[str], place: str, cwd: str) -> dict[str, str]:
    paths = [path for word in words if (path := _folder(word, place))]
    return {f"editable {short(path, cwd)}": editable_digest(path) for path in paths}


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


def short(path: str, cwd: str) -> str:
    """Relative below the working directory, so that two checkouts have one label."""
    relative = os.path.relpath(path, cwd)
    return path if relative.startswith("..") else relative
