"""What an install command reads: requirement files, constraints, local packages, projects.

Requirement files follow pip's format: `-r` and `-c` include others, relative to the including
file; `--hash` on every requirement, or `--no-deps` with nothing but exact versions, means that
nothing is left to resolve.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from bootseer import light_dataclasses as dataclasses
from bootseer.depsnap import pins
from bootseer.depsnap.key.input_files import (
    digest_text,
    find_upwards,
    join,
    label,
    local_path,
    read_text,
    try_to_read,
)
from bootseer.depsnap.key.install_command import Install, expand_requirements
from bootseer.depsnap.key.install_roots import folder_of, project_folder, variables_of
from bootseer.depsnap.key.tool_options import list_options
from bootseer.depsnap.key.uv_config import members_of, required_python, sources_of, workspace_of
from bootseer.errors import UsageError
from bootseer.events.redaction import is_secret_variable, redact_for_key

_FIXED = r"[a-z]\+https?:|#.*sha\d+=|\.whl\b"
"""In an address: what shows that its content never changes, or that its commit is looked at."""
_VERSIONED = r"\d\.\d[^/]*(?:/[^/]*)?$|[0-9a-f]{40}"
"""In a path: a version near its end, or a commit; a tag without dots (`v2`, `nightly`) may move."""
_INCLUDING = frozenset({"-r", "--requirement", "-c", "--constraint"})
_EDITABLE = frozenset({"-e", "--editable"})
_COMMENT = re.compile(r"(?:^|\s)#.*$", re.MULTILINE)
_NAME = re.compile(r"([A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?)\s*(?:\[[^\]]*\])?\s*(?:[<>=!~][^;@]*)?")
_LIST_ENDINGS = (".txt", ".in")
_ARCHIVES = (".whl", ".zip", ".gz", ".bz2", ".xz", ".tgz", ".tar", ".tbz", ".txz", ".lzma", ".lz")
_ADDRESSED = re.compile(r"[\w.-]+\s*(?:\[[^\]]*\])?\s*@\s*(\S.*)")
_RELOCKING = frozenset(
    (
        *("-U", "--upgrade", "-P", "--upgrade-package", "--upgrade-group", "--resolution"),
        *("--prerelease", "--prerelease-package", "--fork-strategy", "--exclude-newer"),
        "--exclude-newer-package",
    )
)
"""Options by which uv makes a new lock."""
_LOCKED_SOURCE = r'source = \{ (editable|virtual|directory|path) = "([^"]+)"'
_VARIABLE = r"\$\{([A-Z0-9_]+)\}"


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """Everything local that decides what is installed: label -> sha256 of redacted content.

    `open_ended`: an index decides too. `pinned` are the exact versions that lists and constraints
    name: where these cover all that an install added, an index decided nothing after all
    (`all_exact`: they name nothing else). `variables` are the names of those that lists refer to.
    `wanted` are the normal names of the packages that must be installed afterwards on any machine.
    `clones`: an editable repository is among what is installed.
    """

    digests: Mapping[str, str]
    open_ended: bool
    pinned: Mapping[str, str] = dataclasses.field(default_factory=dict)
    all_exact: bool = False
    variables: frozenset[str] = frozenset()
    wanted: frozenset[str] = frozenset()
    clones: bool = False


def read_inputs(
    installs: Sequence[Install], cwd: str, environ: Mapping[str, str] | None = None
) -> Inputs:
    """Read what the installs of a command name. Raises NotFoundError for a missing file."""
    reader = _Reader(cwd)
    for install in installs:
        reader.add(install, environ or {})
    return Inputs(
        reader.digests,
        reader.open_ended,
        reader.pinned,
        reader.all_exact and reader.open_ended,
        reader.variables,
        frozenset() if any(install.removes for install in installs) else frozenset(reader.names),
        reader.clones,
    )


def read_listed_inputs(
    lists: Iterable[str],
    editable: Iterable[str],
    environ: Mapping[str, str],
    folder: str,
    cwd: str,
) -> Inputs:
    """Read the lists and packages that settings name, for a tool that runs in `folder`.

    Which tool reads which of them is not known here: one that cannot be read is noted, no error.
    """
    unread: dict[str, str] = {}
    paths = [path for name in lists if (path := local_path(name)) is not None]
    texts = _read_lists(paths, folder, environ, unread)
    digests = {f"settings {label(p, cwd)}": digest_text(t) for p, t in texts.items()}
    digests |= {f"settings {label(p, cwd)}": why for p, why in unread.items()}
    lines = [_normalise(text, environ) for text in texts.values()]
    for path in _local_requirements((), lines, folder):
        digests |= _source_digest(path, cwd)
    named = [*editable, *_editable_options(lines)]
    folders = _editable_folders(named, folder)
    for path in folders:
        digests |= _editable_digest(path)
    variables, clones = _variables_in(texts.values()), len(folders) != len(named)
    return Inputs(digests, open_ended=False, variables=variables, clones=clones)


def read_uv_locks(
    installs: Sequence[Install], cwd: str, environ: Mapping[str, str]
) -> dict[str, str]:
    """The digests of projects' `uv.lock`s, as `read_inputs` has them, read again."""
    out = {}
    for install in installs:
        if install.tool == "uv-sync":
            variables, folder = variables_of(install, environ), folder_of(install, cwd)
            _, root = _project_and_workspace(project_folder(install, variables, folder))
            path = os.path.join(root, "uv.lock")
            if os.path.exists(path):
                out[f"file {label(path, cwd)}"] = digest_text(read_text(path))
    return out


class _Reader:
    """The inputs of some installs, read one after the other; see `Inputs`."""

    def __init__(self, cwd: str) -> None:
        self._cwd = cwd
        self.digests: dict[str, str] = {}
        self.pinned: dict[str, str] = {}
        self.variables: frozenset[str] = frozenset()
        self.names: set[str] = set()
        self.open_ended, self.all_exact, self.clones = False, True, False

    def add(self, install: Install, environ: Mapping[str, str]) -> None:
        folder, variables = folder_of(install, self._cwd), variables_of(install, environ)
        self.open_ended |= bool(install.doubt)
        self.all_exact &= not install.doubt
        if install.tool in ("pip", "uv"):
            self._add_requirements(install, folder, variables)
            return
        self.all_exact &= install.tool in ("venv", "mkdir")
        self.open_ended |= install.tool == "other" or _is_seeded(install, variables)
        project = project_folder(install, variables, folder)
        if install.tool == "uv-sync":
            digests = _project_digests(install, project, variables, self._cwd)
            self.digests |= digests
            self.open_ended |= not any(name.endswith("uv.lock") for name in digests)
            self.open_ended |= any(map(_makes_lock, install.words))
        elif install.tool == "venv" and os.path.basename(install.program) == "uv":
            required = required_python(project)
            self.digests |= {"requires-python": required} if required else {}

    def _add_requirements(
        self, install: Install, folder: str, variables: Mapping[str, str]
    ) -> None:
        if install.tool == "uv" and "-" in install.constraint_files:
            raise UsageError("constraints that come by standard input are unknown; name a file")
        files = _local_files(install.requirement_files)
        lists = _read_lists(files, folder, variables)
        paths = map(local_path, install.constraint_files)
        limiting = [path for path in paths if path is not None]
        limits = _read_lists(limiting, folder, variables)
        texts = lists | limits
        self.digests |= {f"file {label(p, self._cwd)}": digest_text(t) for p, t in texts.items()}
        self.variables |= _variables_in(texts.values())
        words = expand_requirements(install, variables)
        filled = {"PROJECT_ROOT": folder, **variables} if install.tool == "uv" else variables
        lines = [_normalise(text, filled) for path, text in texts.items() if not _is_toml(path)]
        self._add_local_packages(install, words, lines, folder, texts)
        _refuse_secrets(_requirements_in((), lists.values()))
        _refuse_moving((*words, *_requirements_in((), lines)))
        plain = {path: _COMMENT.sub("", text) for path, text in lists.items()}
        all_read = len(files) == len(install.requirement_files)
        self.open_ended |= not all_read
        self.open_ended |= not _is_closed(install, words, list(plain.values()), folder)
        requirements = _requirements_in((*words, *install.editable), plain.values())
        named = [plain[join(folder, file)] for file in files if file.endswith(_LIST_ENDINGS)]
        self.names |= _package_names(_requirements_in(words, named))
        exact = _pins(requirements)
        self.all_exact &= all_read and len(exact) == len(requirements)
        constraints = _requirements_in((), [_COMMENT.sub("", text) for text in limits.values()])
        self.pinned |= dict(_pins(constraints)) | dict(exact)

    def _add_local_packages(
        self,
        install: Install,
        words: Sequence[str],
        lines: Sequence[str],
        folder: str,
        texts: Iterable[str],
    ) -> None:
        local = _local_requirements(words, lines, folder)
        for path in local:
            self.digests |= _source_digest(path, self._cwd)
        named = [*install.editable, *_editable_options(lines)]
        editable = _editable_folders(named, folder)
        self.clones |= len(editable) != len(named)
        for path in editable:
            self.digests |= _editable_digest(path)
        described = [os.path.dirname(path) for path in texts if _is_toml(path)]
        self.digests |= _digests_of_sources((*described, *local, *editable), self._cwd)


# --- requirement files ----------------------------------------------------------------------------


def _local_files(names: Sequence[str]) -> list[str]:
    """The paths among the names of lists, standard input left out."""
    return [path for name in names if name != "-" and (path := local_path(name)) is not None]


def _read_lists(
    paths: Iterable[str],
    folder: str,
    environ: Mapping[str, str],
    unread: dict[str, str] | None = None,
) -> dict[str, str]:
    """Absolute path -> text of the given requirement files and all that they include.

    A file that cannot be read raises; where `unread` is given, it is noted there with its reason.
    """
    texts: dict[str, str] = {}
    pending = [join(folder, path) for path in paths]
    while pending:
        path = pending.pop()
        if path in texts or (unread and path in unread):
            continue
        if unread is None:
            texts[path] = read_text(path)
        else:
            text, why = try_to_read(path)
            if why:
                unread[path] = why
                continue
            texts[path] = text
        here = os.path.dirname(path)
        pending += [join(here, name) for name in _find_included(texts[path], environ)]
    return texts


def _find_included(text: str, environ: Mapping[str, str]) -> Iterator[str]:
    """Paths of the files that a list includes (pip: _internal/req/req_file.py, preprocess)."""
    for option, name in list_options(_normalise(text, environ)):
        path = local_path(name) if option in _INCLUDING else None
        if path is not None:
            yield path


def _normalise(text: str, environ: Mapping[str, str]) -> str:
    """A list without comments and continued lines, and with the variables that are set filled in
    (pip: req_file.py, expand_env_variables)."""
    plain = _COMMENT.sub("", text).replace("\\\n", " ")
    return re.sub(_VARIABLE, lambda match: environ.get(match[1]) or match[0], plain)


def _variables_in(texts: Iterable[str]) -> frozenset[str]:
    """Names of the variables in lists, those of credentials in addresses left out."""
    redacted = [redact_for_key(text) for text in texts if "${" in text]
    return frozenset(name for text in redacted for name in re.findall(_VARIABLE, text))


def _is_toml(path: str) -> bool:
    return path.endswith(".toml")


def _refuse_secrets(words: Iterable[str]) -> None:
    """Raise UsageError where a variable that no key may hold says what is installed."""
    for word in words:
        names = re.findall(_VARIABLE, word) if "://" not in word else ()
        if any(map(is_secret_variable, names)):
            raise UsageError(
                f"a variable in {word} is named like a credential, which no key may hold; "
                "name the install's directories with --also"
            )


def _refuse_moving(words: Iterable[str]) -> None:
    """Raise UsageError for an address that may have other content tomorrow."""
    for word in words:
        address = re.search(r"https?://[^/\s;]*([^\s;?#]*)", word)
        if address is None or re.search(_FIXED, word):
            continue
        if not re.search(_VERSIONED, address[1]):
            raise UsageError(
                f"what {redact_for_key(address[0])} holds is not told by its name; "
                "add #sha256=…, or name the install's directories with --also"
            )


def _is_closed(install: Install, words: Sequence[str], texts: Sequence[str], folder: str) -> bool:
    """Whether no index decides anything of what is installed."""
    if install.removes or "--require-hashes" in install.words:
        return True
    # pip demands a hash of all that it installs where one is given; uv checks those that are given.
    exact = install.tool == "pip" or "sync" in install.words
    exact &= not (words or install.editable or _editable_options(texts))
    if texts and exact and all("--hash=" in line for line in _requirement_lines(texts)):
        return True
    requirements = _requirements_in((*words, *install.editable), texts)
    return "--no-deps" in install.words and all(
        pins.parse_pin(word)
        or _local_requirement(word, folder)
        or (word in install.editable and _editable_folder(word, folder))
        for word in requirements
    )


def _requirements_in(words: Sequence[str], texts: Iterable[str]) -> list[str]:
    """The requirements of a command line and of files, options left out."""
    plain = (word.partition(" --")[0].strip() for word in (*words, *_requirement_lines(texts)))
    return [word for word in plain if word and not word.startswith("-")]


def _requirement_lines(texts: Iterable[str]) -> list[str]:
    """The lines of lists that are not options."""
    lines = (line.strip() for t in texts for line in t.replace("\\\n", " ").splitlines())
    return [line for line in lines if line and line[0] != "-"]


def _pins(requirements: Iterable[str]) -> list[tuple[str, str]]:
    return [pin for word in requirements if (pin := pins.parse_pin(word))]


def _package_names(requirements: Sequence[str]) -> set[str]:
    """Normal names of the packages that requirements name for every machine."""
    names = {os.path.basename(w).partition("-")[0] for w in requirements if w.endswith(".whl")}
    matches = (_NAME.fullmatch(word) for word in requirements if not word.endswith(_ARCHIVES))
    return {pins.normal_name(name) for name in names | {match[1] for match in matches if match}}


# --- local packages -------------------------------------------------------------------------------


def _local_requirements(words: Sequence[str], texts: Sequence[str], folder: str) -> list[str]:
    """Packages given as a path, on the command line or in a requirement file."""
    return [p for word in _requirements_in(words, texts) if (p := _local_requirement(word, folder))]


def _local_requirement(word: str, folder: str) -> str | None:
    """The path of a requirement that is one, without extras and the like (pip:
    _internal/req/constructors.py, _get_url_from_path)."""
    addressed = _ADDRESSED.fullmatch(word)
    path = (addressed[1] if addressed else word).split(" ;")[0].strip()
    if path[:5].lower() == "file:":
        named = local_path(path.partition("[")[0])
        full = join(folder, named) if named else ""
        return full if full and os.path.exists(full) else None
    if "://" in path or "\0" in path:
        return None
    forms = (path, path.partition("[")[0], re.split(r"[#\s;]", path.partition("[")[0])[0])
    for form in filter(None, forms):
        is_path = os.sep in form or form.startswith(".") or form.lower().endswith(_ARCHIVES)
        full = join(folder, form)
        if is_path and os.path.exists(full):
            return full
    return None


def _editable_options(texts: Iterable[str]) -> list[str]:
    """What lists name with `-e`."""
    return [v for text in texts for option, v in list_options(text) if option in _EDITABLE]


def _editable_folder(word: str, folder: str) -> str | None:
    """The directory that an `--editable` names, without extras and the like.

    None for a repository. Raises UsageError for what is neither.
    """
    addressed = _ADDRESSED.fullmatch(word)
    path = (addressed[1] if addressed else word).partition("[")[0].split(" ;")[0].strip()
    if re.match(r"\w+\+\w+:", path):
        return None
    for form in (local_path(path), local_path(path.partition("#")[0])):
        if form and os.path.isdir(full := join(folder, form)):
            return full
    raise UsageError(f"cannot tell which directory `-e {word}` names; see that it is there")


def _editable_folders(words: Iterable[str], folder: str) -> list[str]:
    """The directories that some `--editable` name, repositories left out."""
    return [path for word in words if (path := _editable_folder(word, folder))]


def _editable_digest(path: str) -> dict[str, str]:
    from bootseer.depsnap.key import local_packages  # few starts have any

    # By its whole path, which the environment will contain: not that of another checkout.
    return {f"editable {os.path.realpath(path)}": local_packages.editable_digest(path)}


def _source_digest(path: str, cwd: str) -> dict[str, str]:
    from bootseer.depsnap.key import local_packages

    return {f"source {label(path, cwd)}": local_packages.source_digest(path)}


def _package_digest(path: str, cwd: str, *, editable: bool) -> dict[str, str]:
    if not os.path.exists(path):
        return {}
    if editable and os.path.isdir(path):
        return _editable_digest(path)
    return _source_digest(path, cwd)


def _digests_of_sources(folders: Iterable[str], cwd: str) -> dict[str, str]:
    """The local packages that projects name to uv as sources, and those that these name."""
    digests: dict[str, str] = {}
    pending, seen = list(folders), set()
    while pending:
        folder = pending.pop()
        if folder in seen or not os.path.isdir(folder):
            continue
        seen.add(folder)
        pending.append(workspace_of(folder))  # whose sources are its members' too
        for path, editable in sources_of(folder):
            digests |= _package_digest(path, cwd, editable=editable)
            pending.append(path)
    return digests


# --- uv's projects --------------------------------------------------------------------------------


def _project_digests(
    install: Install, folder: str, environ: Mapping[str, str], cwd: str
) -> dict[str, str]:
    """What decides in uv's project: its own description and its workspace's, the lock, and the
    local packages that these name."""
    project, root = _project_and_workspace(folder)
    places = dict.fromkeys((project, root))
    paths = [f"{place}/pyproject.toml" for place in places] + [f"{root}/uv.lock"]
    texts = {p: read_text(p) for p in paths if os.path.exists(p)}
    digests = {f"file {label(p, cwd)}": digest_text(text) for p, text in texts.items()}
    all_built = bool(environ.get("UV_NO_EDITABLE")) or any(
        word.startswith("--no-editable") for word in install.words
    )
    packages = [
        (join(os.path.dirname(path), name), kind in ("editable", "virtual"))
        for path, text in texts.items()
        if path.endswith("uv.lock")
        for kind, name in re.findall(_LOCKED_SOURCE, text)
    ]
    known = {path for path, _ in packages}
    packages += [(path, True) for path in (project, *members_of(root)) if path not in known]
    for path, editable in packages:
        digests |= _package_digest(path, cwd, editable=editable and not all_built)
    return digests | _digests_of_sources(places, cwd)


def _project_and_workspace(folder: str) -> tuple[str, str]:
    """The project that uv finds from a directory, and its workspace, which has the lock."""
    project = find_upwards(folder, "pyproject.toml") or folder
    return project, workspace_of(project)


def _makes_lock(word: str) -> bool:
    """Whether a word of a `uv sync` is an option that makes a new lock."""
    short = word[:2]
    return word.partition("=")[0] in _RELOCKING or (short in _RELOCKING and short != "--")


def _is_seeded(install: Install, environ: Mapping[str, str]) -> bool:
    """Whether an index decides what a new environment contains at first."""
    by_option = "--seed" in install.words or "--download" in install.words
    return install.tool == "venv" and (by_option or bool(environ.get("UV_VENV_SEED")))
