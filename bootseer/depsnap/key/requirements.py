"""What an install command reads: requirement files, local sources; and who resolves the rest.

Requirement files follow pip's format: `-r` and `-c` include others, relative to the including
file; `--hash` on every requirement, or `--no-deps` with nothing but exact versions, means that
nothing is left to resolve.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from bootseer import light_dataclasses as dataclasses
from bootseer.depsnap.key import pins, redact
from bootseer.depsnap.key.input_files import look, read_text
from bootseer.depsnap.key.install_command import Install, filled_in
from bootseer.depsnap.key.install_roots import place_of, project_folder, variables_of
from bootseer.depsnap.key.tool_options import list_options
from bootseer.depsnap.key.uv_config import (
    joined,
    members_of,
    path_of,
    sources_of,
    upwards,
    wanted_python,
    workspace_of,
)
from bootseer.errors import UsageError, from_os_error
from bootseer.system import sha256
from bootseer.system.regular_files import opener

SOURCE_LIMIT_BYTES = 512 << 20
NOT_SOURCE = frozenset(
    (".git", ".hg", ".venv", "__pycache__", "build", "dist", "node_modules", ".mypy_cache")
)
_FIXED = r"[a-z]\+https?:|#.*sha\d+=|\.whl\b"
"""In an address: what says that it holds the same tomorrow, or that its commit is looked at."""
_VERSIONED = r"\d\.\d[^/]*(?:/[^/]*)?$|[0-9a-f]{40}"
"""In a path: a version near its end, or a commit; a tag without dots (`v2`, `nightly`) may move."""
_BUILT = frozenset(("build", "dist"))
"""What builds leave beside a package's description; deeper, it is a package's own."""
_INCLUDING = frozenset({"-r", "--requirement", "-c", "--constraint"})
_EDITABLE = frozenset({"-e", "--editable"})
_DESCRIPTIONS = frozenset(
    (
        *("pyproject.toml", "setup.py", "setup.cfg", "hatch.toml"),
        *("VERSION", "VERSION.txt", "version.txt"),
    )
)
_VERSION_FILES = ("__init__.py", "_version.py", "version.py", "__version__.py", "__about__.py")
_VERSION = re.compile(r"^_{0,2}version(?:_info)?_{0,2}\s*[:=].*", re.IGNORECASE | re.MULTILINE)
_LISTS = r".*requirements.*\.(?:txt|in)"
_COMMENT = re.compile(r"(?:^|\s)#.*$", re.MULTILINE)
_NAME = re.compile(r"([A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?)\s*(?:\[[^\]]*\])?\s*(?:[<>=!~][^;@]*)?")
_LIST_ENDS = (".txt", ".in")
_ARCHIVES = (".whl", ".zip", ".gz", ".bz2", ".xz", ".tgz", ".tar", ".tbz", ".txz", ".lzma", ".lz")
_ADDRESSED = re.compile(r"[\w.-]+\s*(?:\[[^\]]*\])?\s*@\s*(\S.*)")
_MOVED = frozenset(
    (
        *("-U", "--upgrade", "-P", "--upgrade-package", "--upgrade-group", "--resolution"),
        *("--prerelease", "--prerelease-package", "--fork-strategy", "--exclude-newer"),
        "--exclude-newer-package",
    )
)
"""Options by which uv makes a lock anew."""
_OF_LOCK = r'source = \{ (editable|virtual|directory|path) = "([^"]+)"'
_VARIABLE = r"\$\{([A-Z0-9_]+)\}"


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """Everything local that decides what is installed: label -> sha256 of redacted content.

    `open_ended` tells that an index decides too; `pinned` are the exact versions that lists and
    constraints name: where these cover all that an install brought, an index had no say after all.
    `variables` are those that a list is filled in from, by name. `wanted` are the packages that
    must stand there afterwards, on any machine, by their normal names. `clones`: an editable
    repository is among what is installed.
    """

    digests: Mapping[str, str]
    open_ended: bool
    pinned: Mapping[str, str] = dataclasses.field(default_factory=dict)
    all_exact: bool = False
    variables: frozenset[str] = frozenset()
    wanted: frozenset[str] = frozenset()
    clones: bool = False


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
    pending = [joined(cwd, path) for path in paths]
    while pending:
        path = pending.pop()
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
        pending += [joined(here, name) for name in _included(texts[path], environ)]
    return texts


def _included(text: str, environ: Mapping[str, str]) -> Iterator[str]:
    """Paths of the files that a list includes (pip: _internal/req/req_file.py, preprocess)."""
    for option, name in list_options(_plain(text, environ)):
        path = path_of(name) if option in _INCLUDING else None
        if path is not None:
            yield path


def _plain(text: str, environ: Mapping[str, str]) -> str:
    return _filled_in(_COMMENT.sub("", text).replace("\\\n", " "), environ)


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
    plain = [_plain(text, environ) for text in texts.values()]
    for path in _local((), plain, place):
        found[f"source {short(path, cwd)}"] = source_digest(path)
    named = [*editable, *_editable_of(plain)]
    found |= _editable(named, place)
    clones = any(_folder(word, place) is None for word in named)
    return Inputs(found, open_ended=False, variables=_variables(texts.values()), clones=clones)


def inputs(
    installs: Sequence[Install], cwd: str, environ: Mapping[str, str] | None = None
) -> Inputs:
    """Read what the installs of a command name. Raises NotFoundError for a missing file."""
    found: dict[str, str] = {}
    pinned: dict[str, str] = {}
    variables: frozenset[str] = frozenset()
    names: set[str] = set()
    open_ended, all_exact, clones = False, True, False
    for install in installs:
        here, its = place_of(install, cwd), variables_of(install, environ or {})
        open_ended |= bool(install.doubt)
        all_exact &= not install.doubt
        if install.tool == "uv-sync":
            project = _project(install, project_folder(install, its, here), its, cwd)
            found |= project
            open_ended |= not any(label.endswith("uv.lock") for label in project)
            open_ended |= any(
                word.partition("=")[0] in _MOVED or (word[:2] in _MOVED and word[:2] != "--")
                for word in install.words
            )
        if install.tool not in ("pip", "uv"):
            open_ended |= install.tool == "other" or _is_seeded(install, its)
            if install.tool == "venv" and os.path.basename(install.program) == "uv":
                wish = wanted_python(project_folder(install, its, here))
                found |= {"requires-python": wish} if wish else {}
            all_exact &= install.tool in ("venv", "mkdir")
            continue
        files = [p for f in install.requirement_files if f != "-" and (p := path_of(f)) is not None]
        limiting = [path for f in install.constraint_files if (path := path_of(f)) is not None]
        open_ended |= len(files) != len(install.requirement_files)
        texts, others = closure(files, here, its), closure(limiting, here, its)
        found |= {f"file {short(p, cwd)}": digest_text(t) for p, t in (texts | others).items()}
        variables |= _variables((texts | others).values())
        plain = [_COMMENT.sub("", text) for text in texts.values()]
        words = filled_in(install, its)
        filled = {"PROJECT_ROOT": here, **its} if install.tool == "uv" else its
        whole = [
            _plain(text, filled) for path, text in (texts | others).items() if not _is_toml(path)
        ]
        local = _local(words, whole, here)
        for path in local:
            found[f"source {short(path, cwd)}"] = source_digest(path)
        named = [*install.editable, *_editable_of(whole)]
        editable = [path for word in named if (path := _folder(word, here))]
        clones |= len(editable) != len(named)
        found |= _editable(named, here)
        described = [os.path.dirname(path) for path in (*texts, *others) if _is_toml(path)]
        found |= _named_sources((*described, *local, *editable), cwd)
        _refuse_secrets(_wanted((), texts.values()))
        _refuse_moving((*words, *_wanted((), whole)))
        open_ended |= not _closed(install, words, plain, here)
        wanted = _wanted((*words, *install.editable), plain)
        named = [joined(here, f) for f in files if f.endswith(_LIST_ENDS)]
        lines = [_COMMENT.sub("", texts[path]) for path in named]
        names |= _names(_wanted(words, lines))
        exact = [pin for word in wanted if (pin := pins.exact(word))]
        all_exact &= len(files) == len(install.requirement_files) and len(exact) == len(wanted)
        limits = _wanted((), [_COMMENT.sub("", text) for text in others.values()])
        pinned |= dict(pin for word in limits if (pin := pins.exact(word)))
        pinned |= dict(exact)
    exact_alone = all_exact and open_ended
    left = frozenset() if any(install.removes for install in installs) else frozenset(names)
    return Inputs(found, open_ended, pinned, exact_alone, variables, left, clones)


def locks_of(installs: Sequence[Install], cwd: str, environ: Mapping[str, str]) -> dict[str, str]:
    """What `inputs` tells of the `uv.lock`s of projects, read again."""
    out = {}
    for install in installs:
        if install.tool == "uv-sync":
            its, here = variables_of(install, environ), place_of(install, cwd)
            _, root = _project_and_workspace(project_folder(install, its, here))
            path = os.path.join(root, "uv.lock")
            if os.path.exists(path):
                out[f"file {short(path, cwd)}"] = digest_text(read_text(path))
    return out


def _is_toml(path: str) -> bool:
    return path.endswith(".toml")


def _refuse_secrets(words: Iterable[str]) -> None:
    """Raise UsageError where a variable that no key may hold says what is installed."""
    for word in words:
        names = re.findall(_VARIABLE, word) if "://" not in word else ()
        if any(map(redact.is_secret_variable, names)):
            raise UsageError(
                f"a variable in {word} is named like a credential, which no key may hold; "
                "name the install's directories with --also"
            )


def _refuse_moving(words: Iterable[str]) -> None:
    """Raise UsageError for an address that may hold another archive tomorrow."""
    for word in words:
        address = re.search(r"https?://[^/\s;]*([^\s;?#]*)", word)
        if address is None or re.search(_FIXED, word):
            continue
        if not re.search(_VERSIONED, address[1]):
            raise UsageError(
                f"what {redact.text(address[0])} holds is not told by its name; add #sha256=…, or "
                "name the install's directories with --also"
            )


def _closed(install: Install, words: Sequence[str], texts: Sequence[str], cwd: str) -> bool:
    """Whether no index has a say in what is installed."""
    if install.removes or "--require-hashes" in install.words:
        return True
    lines = _lines(texts)
    # pip demands a hash of all that it installs where it is told one; uv checks those it is told.
    exact = install.tool == "pip" or "sync" in install.words
    exact &= not (words or install.editable or _editable_of(texts))
    if texts and exact and all("--hash=" in line for line in lines):
        return True
    wanted = _wanted((*words, *install.editable), texts)
    return "--no-deps" in install.words and all(
        pins.exact(w) or _local_path(w, cwd) or (w in install.editable and _folder(w, cwd))
        for w in wanted
    )


def _wanted(words: Sequence[str], texts: Iterable[str]) -> list[str]:
    """The requirements of a command line and of files, options left out."""
    lines = _lines(texts)
    found = (word.partition(" --")[0].strip() for word in (*words, *lines))
    return [word for word in found if word and not word.startswith("-")]


def _lines(texts: Iterable[str]) -> list[str]:
    """The lines of lists that are not options."""
    lines = (line.strip() for t in texts for line in t.replace("\\\n", " ").splitlines())
    return [line for line in lines if line and line[0] != "-"]


def _names(wanted: Iterable[str]) -> set[str]:
    """Normal names of the packages that requirements name for every machine."""
    names = {os.path.basename(w).partition("-")[0] for w in wanted if w.endswith(".whl")}
    found = (_NAME.fullmatch(word) for word in wanted if not word.endswith(_ARCHIVES))
    return {pins.normal_name(name) for name in names | {match[1] for match in found if match}}


def _project(install: Install, folder: str, environ: Mapping[str, str], cwd: str) -> dict[str, str]:
    """What decides in uv's project: its own description and its workspace's, the lock, and the
    local packages that these name."""
    project, root = _project_and_workspace(folder)
    places = dict.fromkeys((project, root))
    paths = [f"{place}/pyproject.toml" for place in places] + [f"{root}/uv.lock"]
    texts = {p: read_text(p) for p in paths if os.path.exists(p)}
    found = {f"file {short(p, cwd)}": digest_text(text) for p, text in texts.items()}
    whole = bool(environ.get("UV_NO_EDITABLE")) or any(
        word.startswith("--no-editable") for word in install.words
    )
    named = [
        (joined(os.path.dirname(path), name), kind in ("editable", "virtual"))
        for path, text in texts.items()
        if path.endswith("uv.lock")
        for kind, name in re.findall(_OF_LOCK, text)
    ]
    known = {path for path, _ in named}
    named += [(path, True) for path in (project, *members_of(root)) if path not in known]
    for path, editable in named:
        found |= _source(path, cwd, editable=editable and not whole)
    return found | _named_sources(places, cwd)


def _is_seeded(install: Install, environ: Mapping[str, str]) -> bool:
    """Whether an index says what a new environment begins with."""
    told = "--seed" in install.words or "--download" in install.words
    return install.tool == "venv" and (told or bool(environ.get("UV_VENV_SEED")))


def _project_and_workspace(folder: str) -> tuple[str, str]:
    """Where the project is that uv finds from a directory, and its workspace with the lock."""
    project = upwards(folder, "pyproject.toml") or folder
    return project, workspace_of(project)


def _source(path: str, cwd: str, *, editable: bool) -> dict[str, str]:
    if not os.path.exists(path):
        return {}
    if editable and os.path.isdir(path):
        return {_editable_label(path): editable_digest(path)}
    return {f"source {short(path, cwd)}": source_digest(path)}


def _named_sources(folders: Iterable[str], cwd: str) -> dict[str, str]:
    """The local packages that projects name to uv as sources, and those that these name."""
    found: dict[str, str] = {}
    pending, seen = list(folders), set()
    while pending:
        folder = pending.pop()
        if folder in seen or not os.path.isdir(folder):
            continue
        seen.add(folder)
        pending.append(workspace_of(folder))  # whose sources are its members' too
        for path, editable in sources_of(folder):
            found |= _source(path, cwd, editable=editable)
            pending.append(path)
    return found


def _local(words: Sequence[str], texts: Sequence[str], cwd: str) -> list[str]:
    """Packages given as a path, on the command line or in a requirement file."""
    return [path for word in _wanted(words, texts) if (path := _local_path(word, cwd))]


def _editable_of(texts: Iterable[str]) -> list[str]:
    """What lists name with `-e`."""
    return [v for text in texts for o, v in list_options(text) if o in _EDITABLE]


def _local_path(word: str, cwd: str) -> str | None:
    """The path of a requirement that is one, extras and the like cut off (pip:
    _internal/req/constructors.py, _get_url_from_path)."""
    addressed = _ADDRESSED.fullmatch(word)
    path = (addressed[1] if addressed else word).split(" ;")[0].strip()
    if path[:5].lower() == "file:":
        named = path_of(path.partition("[")[0])
        full = joined(cwd, named) if named else ""
        return full if full and os.path.exists(full) else None
    if "://" in path or "\0" in path:
        return None
    forms = (path, path.partition("[")[0], re.split(r"[#\s;]", path.partition("[")[0])[0])
    for form in filter(None, forms):
        is_path = os.sep in form or form.startswith(".") or form.lower().endswith(_ARCHIVES)
        full = joined(cwd, form)
        if is_path and os.path.exists(full):
            return full
    return None


def _folder(word: str, cwd: str) -> str | None:
    """The directory that an `--editable` names, extras and the like cut off.

    None for a repository. Raises UsageError for what is neither.
    """
    addressed = _ADDRESSED.fullmatch(word)
    path = (addressed[1] if addressed else word).partition("[")[0].split(" ;")[0].strip()
    if re.match(r"\w+\+\w+:", path):
        return None
    for form in (path_of(path), path_of(path.partition("#")[0])):
        if form and os.path.isdir(full := joined(cwd, form)):
            return full
    raise UsageError(f"cannot tell which directory `-e {word}` names; see that it is there")


def _editable(words: Iterable[str], place: str) -> dict[str, str]:
    paths = [path for word in words if (path := _folder(word, place))]
    return {_editable_label(path): editable_digest(path) for path in paths}


def _editable_label(path: str) -> str:
    """With all of its path, which the environment will hold: not that of another checkout."""
    return f"editable {os.path.realpath(path)}"


def editable_digest(path: str) -> str:
    """sha256 of what an editable install takes from its source: its description, its names and
    versions, and what its build may read of its repository.

    What lies in its modules is read where it is, and may change without another install.
    """
    from bootseer.depsnap.key import git_repository  # few starts have a local package

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
                lists = sorted(n for n in os.listdir(full) if n.endswith(_LIST_ENDS))
                parts += [f"{n} {digest_text(read_text(os.path.join(full, n)))}" for n in lists]
            elif (name in _DESCRIPTIONS and os.path.isfile(full)) or re.fullmatch(_LISTS, name):
                parts.append(f"{folder == path} {name} {digest_text(read_text(full))}")
            elif name.endswith(".py") or os.path.isfile(os.path.join(full, "__init__.py")):
                parts.append(f"{folder == path} {name} {_versions(full)}")
    return sha256.of_text("\n".join(parts))


def _versions(path: str) -> list[str]:
    """Lines in which a module or package gives its version: builds may take it from there."""
    is_module = path.endswith(".py")
    files = [path] if is_module else [os.path.join(path, name) for name in _VERSION_FILES]
    return [line for file in files for line in _VERSION.findall(look(file)[0])]


def source_digest(path: str) -> str:
    """sha256 over a local package: one file's bytes, or names and bytes below a directory."""
    import hashlib  # OpenSSL's: sources are megabytes

    from bootseer.depsnap.key import git_repository  # few starts have a local package

    digest = hashlib.sha256(git_repository.state_of(path))
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
    """Files below a local package, those behind linked folders too, without what builds leave."""
    if not os.path.isdir(path):
        return [""]
    names, seen = [], set()
    for folder, below, files in os.walk(path, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            below.clear()
            continue
        seen.add(real)
        left_out = NOT_SOURCE if folder == path else NOT_SOURCE - _BUILT
        below[:] = [d for d in below if not _is_environment(os.path.join(folder, d))]
        below[:] = [d for d in below if d not in left_out and not d.endswith(".egg-info")]
        names += [os.path.relpath(os.path.join(folder, f), path) for f in files if f != ".git"]
    return sorted(n for n in names if os.path.isfile(os.path.join(path, n)))


def _is_environment(path: str) -> bool:
    """Whether a directory is a virtual environment, which no package holds."""
    marked = os.path.exists(os.path.join(path, "pyvenv.cfg"))
    return marked and any(os.path.isdir(os.path.join(path, d)) for d in ("bin", "Scripts", "lib"))


def short(path: str, cwd: str) -> str:
    """Relative below the working directory, so that two checkouts have one label."""
    relative = os.path.relpath(path, cwd)
    return path if relative.startswith("..") else relative
