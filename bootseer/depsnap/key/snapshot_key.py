"""A snapshot's key: sha256 over the inputs that decide what an install leaves behind.

Ingredients are (name, value) pairs; the key is the sha256 of `bootseer-deps-key-2` and their
canonical JSON. No ingredient holds a credential: words, files and addresses are redacted first.
What an index decides is no input: one set of inputs is one key, whatever a clock, a cache or a
network does, and a key's snapshots are told apart by the lock that each is published with.
`workload` is the same over command, Python and platform alone: past times of an install carry
over to its next version. `label` is of command and roots: where the newest key of them is noted.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from bootseer import light_dataclasses as dataclasses
from bootseer.depsnap.key import pins, pip_settings, redact, requirements, uv_settings
from bootseer.depsnap.key.input_files import NOT_FOUND, look, read_text
from bootseer.depsnap.key.install_command import BUILDING, BUILT_AS, Install
from bootseer.depsnap.key.install_roots import (
    ALSO,
    Python,
    Target,
    place_of,
    project_folder,
    variables_of,
)
from bootseer.depsnap.types import WORK_PREFIX
from bootseer.errors import UsageError
from bootseer.system import sha256
from bootseer.system.paths import is_within
from bootseer.system.regular_files import opener

TYPE_CHECKING = False
if TYPE_CHECKING:
    from bootseer.depsnap.capture.entries import Entry

FORMAT_VERSION = 2
_BEFORE = "roots before"
# Variables of pip and uv that change how an install runs, not what it leaves behind.
_NEUTRAL = frozenset(
    f"{tool}_{name}"
    for tool in ("PIP", "UV")
    for name in (
        *("CACHE_DIR", "NO_CACHE", "NO_CACHE_DIR", "LOG", "LOG_FILE", "TIMEOUT", "RETRIES"),
        *("DEFAULT_TIMEOUT", "PROGRESS_BAR", "NO_PROGRESS", "QUIET", "VERBOSE", "NO_COLOR"),
        *("DISABLE_PIP_VERSION_CHECK", "ROOT_USER_ACTION", "NO_INPUT", "LINK_MODE", "PROXY"),
        *("CONCURRENT_DOWNLOADS", "CONCURRENT_BUILDS", "CONCURRENT_INSTALLS", "HTTP_TIMEOUT"),
        *("HTTP_RETRIES", "CERT", "CLIENT_CERT", "TRUSTED_HOST", "NATIVE_TLS", "OFFLINE"),
        *("INSECURE_HOST", "RUN_RECURSION_DEPTH", "NO_WARN_SCRIPT_LOCATION", "NO_WARN_CONFLICTS"),
    )
)
_LISTS_OF_UV = ("UV_CONSTRAINT", "UV_OVERRIDE", "UV_BUILD_CONSTRAINT", "UV_EXCLUDE")
_IN_WORDS = re.compile(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)")


@dataclasses.dataclass(frozen=True, slots=True)
class Ingredient:
    """One thing the key depends on. `value` is text that is safe to show, or a digest."""

    name: str
    value: str


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """`closed`: no index has a say. Else `pinned` are the exact versions that the lists name, and
    `all_exact` says that they name nothing else: then they may be the whole lock (`owns`)."""

    digest: str
    workload: str
    label: str
    ingredients: tuple[Ingredient, ...]
    closed: bool
    all_exact: bool = False
    pinned: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    wanted: frozenset[str] = frozenset()

    def at(self, state: str) -> Key:
        """The same question's key for roots that hold `state` before."""
        found = tuple(
            Ingredient(_BEFORE, state) if i.name == _BEFORE else i for i in self.ingredients
        )
        return dataclasses.replace(self, digest=_digest(found), ingredients=found)

    def owns(self, brought: Mapping[str, str]) -> bool:
        """Whether the inputs alone are the lock of an install that brought these packages."""
        return self.closed or (self.all_exact and pins.cover(self.pinned, brought))

    def explain(self) -> list[dict[str, str]]:
        """The ingredients as JSON objects."""
        return [dataclasses.asdict(i) for i in self.ingredients]


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """What `make` needs to know; `state` is what the roots hold before (see `base_state`)."""

    command: Sequence[str]
    key_files: Sequence[str]
    target: Target
    state: str
    environ: Mapping[str, str]
    cwd: str
    image_digest: str = ""
    signer: str = ""
    key_env: Sequence[str] = ()
    exclude: Sequence[str] = ()


def make(question: Question) -> Key:
    """Read the inputs and compute the key.

    Raises NotFoundError for a missing key file and UsageError for one that is too large.
    """
    q = question
    files = requirements.inputs(q.target.installs, q.cwd, q.environ)
    named = {
        f"file {p}": requirements.digest_text(read_text(os.path.join(q.cwd, p)))
        for p in q.key_files
    }
    stable = _platform(q)
    stable_command = Ingredient("command", _json(redact.words(q.command)))
    stable.append(stable_command)
    workload = _digest(stable)
    stable += [Ingredient("uid class", "root" if os.geteuid() == 0 else "user")]
    stable += [Ingredient("signed by", q.signer)] if q.signer else []
    stable += [Ingredient("left out", _json(sorted(q.exclude)))] if q.exclude else []
    stable += _in_reach(q)
    stable += [Ingredient("roots", _json(q.target.paths)), Ingredient(_BEFORE, q.state)]
    stable += [Ingredient(n, d) for n, d in sorted({**files.digests, **named}.items())]
    told = _settings(q)
    _check_clones(files.clones or told.clones, q.target)
    in_words = _named_in(q.target.installs)
    stable += _variables(q.environ, q.key_env, files.variables | told.variables | in_words)
    stable += [Ingredient(n, d) for n, d in told.digests.items()]
    by_uv = [
        setting for place in (q.cwd, *_elsewhere(q)) for setting in _project_settings(place, q)
    ]
    stable += dict.fromkeys(by_uv)
    return Key(
        digest=_digest(stable),
        workload=workload,
        label=_digest([stable_command, Ingredient("roots", _json(q.target.paths))]),
        ingredients=tuple(stable),
        closed=not (files.open_ended or told.open_ended),
        all_exact=files.all_exact and not told.open_ended,
        pinned=files.pinned,
        wanted=files.wanted,
    )


def _check_clones(clones: bool, target: Target) -> None:
    """An editable repository is cloned into an environment, or beside what is kept."""
    python = target.python
    if not clones or any(root.why == ALSO for root in target.roots):
        return
    kept = python is not None and any(is_within(python.prefix, root) for root in target.paths)
    if python is None or python.prefix == python.base_prefix or not kept:
        raise UsageError(
            "an editable repository is cloned beside what is kept; name where with --also"
        )


def _platform(q: Question) -> list[Ingredient]:
    python = q.target.python
    out = [Ingredient("format", str(FORMAT_VERSION))]
    if python is not None:
        out += [
            Ingredient("python", f"{python.tag} {python.abi} {python.version}"),
            Ingredient("python prefix", python.prefix),
            Ingredient("platform", f"{python.platform} {python.libc}"),
        ]
    else:
        out.append(Ingredient("platform", " ".join(os.uname()[i] for i in (0, 4))))
    if q.image_digest:
        out.append(Ingredient("image", q.image_digest))
    else:
        out.append(Ingredient("distribution", _distribution()))
    return out


def _in_reach(q: Question) -> list[Ingredient]:
    """Distributions outside the roots that an installer sees: it installs none of them again.

    Those of the system below a virtual environment or `--user`, and on the PYTHONPATH.
    """
    python = q.target.python
    if python is None or _makes_closed_environment(q.target.installs):
        return []
    folders = list(python.search)
    for environ, place, _ in _whereabouts(q):
        given = environ.get("PYTHONPATH", "").split(os.pathsep)
        folders += [os.path.join(place, folder) for folder in given if folder]
    if _sees_user_site(python):
        folders.append(python.user_site)
    folders = [os.path.join(q.cwd, f) for f in dict.fromkeys(folders) if f]
    outside = [f for f in folders if not any(is_within(f, root) for root in q.target.paths)]
    names = sorted(
        name
        for folder in outside
        for name in _top_level(folder)
        if name.endswith((".dist-info", ".egg-info", ".egg-link"))
    )
    return [Ingredient("packages in reach", _sha256(names))] if names else []


def seen_outside(target: Target, environ: Mapping[str, str]) -> set[str]:
    """Names of the packages that an installer may find satisfied outside of the roots."""
    folders = [*target.python.search, target.python.user_site] if target.python else []
    for variables in (environ, *(variables_of(i, environ) for i in target.installs)):
        folders += [f for f in variables.get("PYTHONPATH", "").split(os.pathsep) if f]
    names = (n for f in dict.fromkeys(folders) for n in _top_level(f))
    return set(pins.of_distributions(n for n in names if n.endswith((".dist-info", ".egg-info"))))


def _makes_closed_environment(installs: Sequence[Install]) -> bool:
    """Whether the command makes an environment from which nothing of the system is seen."""
    made = [i for i in installs if i.tool in ("venv", "uv-sync")]
    return bool(made) and not any("--system-site-packages" in i.words for i in made)


def _sees_user_site(python: Python) -> bool:
    """As Python's `site`: not from a virtual environment without the system's packages."""
    return python.prefix == python.base_prefix or any(
        f.endswith("-packages") and not is_within(f, python.prefix) for f in python.search
    )


def _distribution() -> str:
    try:
        with open("/etc/os-release", encoding="utf-8", errors="replace") as file:
            pairs = dict(line.rstrip().split("=", 1) for line in file if "=" in line)
    except OSError:
        return "unknown"
    return " ".join(pairs.get(k, "").strip('"') for k in ("ID", "VERSION_ID")).strip()


def _variables(
    environ: Mapping[str, str], extra: Sequence[str], in_lists: frozenset[str]
) -> list[Ingredient]:
    """The variables that decide what is installed; those `in_lists` may hold anything."""
    out = []
    for name in sorted(environ):
        chosen = name.startswith(("PIP_", "UV_", "VIRTUALENV_")) and name not in _NEUTRAL
        chosen = chosen or name in BUILDING or name in extra or name.startswith(BUILT_AS)
        if not chosen and name not in in_lists:
            continue
        if redact.is_secret_variable(name):
            if name in extra:
                raise UsageError(
                    f"--key-env {name} is named like a credential, which no key may hold; "
                    "copy what decides the install into a variable of another name"
                )
            continue
        value = redact.text(environ[name])
        out.append(Ingredient(f"variable {name}", value if chosen else sha256.of_text(value)))
    return out


def _named_in(installs: Sequence[Install]) -> frozenset[str]:
    """Variables that a shell puts into the words of installs."""
    texts = [text for i in installs for text in (*i.words, *(v for _, v in i.variables))]
    return frozenset(name for text in texts for name in _IN_WORDS.findall(text))


def _settings(q: Question) -> requirements.Inputs:
    """What settings files of pip and uv say, with the lists that they and variables name.

    Open where they let pip install more than the command's words tell.
    """
    found: dict[str, str] = {}
    filled_in: frozenset[str] = frozenset()
    adds = clones = False
    prefix = q.target.python.prefix if q.target.python else ""
    for environ, place, own in _whereabouts(q):
        of_pip = pip_settings.files(environ, prefix, place)
        of_uv = [*uv_settings.files(environ), *([own] if own else [])]
        texts = [_settings_file(path, place, q.cwd, found) for path in of_pip]
        for path in of_uv:
            _settings_file(path, place, q.cwd, found)
        options = pip_settings.naming(texts, environ)
        names = [name for v in _LISTS_OF_UV for name in environ.get(v, "").split()]
        names += pip_settings.lists(options)
        editable = options.get("editable", "").split()
        named = requirements.listed(names, editable, environ, place, q.cwd)
        found |= named.digests
        clones |= named.clones
        filled_in |= named.variables
        adds |= pip_settings.adds(options)
    adds &= any(i.tool == "pip" and not i.removes for i in q.target.installs)
    return requirements.Inputs(found, adds, variables=filled_in, clones=clones)


def _whereabouts(q: Question) -> list[tuple[Mapping[str, str], str, str]]:
    """Variables, directory and `--config-file` that a tool may have, those of the start first."""
    found = [(q.environ, q.cwd, "")]
    for i in q.target.installs:
        its = (variables_of(i, q.environ), place_of(i, q.cwd), i.settings_file)
        found += [its] if its not in found else []
    return found


def _settings_file(path: str, place: str, cwd: str, found: dict[str, str]) -> str:
    """The text of a settings file, which is noted in `found`."""
    full = os.path.join(place, path)
    text, why = look(full)
    if why != NOT_FOUND:
        label = path if os.path.isabs(path) else requirements.short(full, cwd)
        found[f"settings {label}"] = why or requirements.digest_text(text)
    return text


def _project_settings(place: str, q: Question) -> Iterator[Ingredient]:
    """uv's own settings for a directory, and which Python is wished there, by whatever file."""
    for path in (*uv_settings.above(place), *uv_settings.versions(q.environ)):
        text, why = look(path)
        if why != NOT_FOUND:
            told = why or requirements.digest_text(text)
            yield Ingredient(f"settings {requirements.short(path, q.cwd)}", told)


def _elsewhere(q: Question) -> list[str]:
    """Directories other than the working one in which uv looks for settings."""
    uv = [i for i in q.target.installs if i.tool in ("uv", "uv-sync", "venv")]
    found = [project_folder(i, variables_of(i, q.environ), place_of(i, q.cwd)) for i in uv]
    return [place for place in dict.fromkeys(found) if place != q.cwd]


def base_state(target: Target, exclude: Sequence[str] = ()) -> str:
    """What the roots hold before the install, as far as an installer looks.

    Names of distributions; for a directory named by `--also`, every path with its size; for the
    whole root, the package databases of the system too. Times do not count: nodes differ there.
    """
    parts: list[object] = []
    for root in target.roots:
        names = sorted(os.path.basename(p) for p in distributions(root.path))
        held: object = names or ("something" if _top_level(root.path) else "")
        if root.path == "/":
            held = [names, [_content(path) for path in _PACKAGE_DATABASES]]
        elif root.why == ALSO:
            held = [[e.path, e.kind, e.size] for e in _entries(root.path, exclude) if e.path]
        parts.append([root.path, held])
    return _sha256(parts)


def fingerprint(target: Target, exclude: Sequence[str] = ()) -> str | None:
    """A check that roots still hold what an install or restore left there; None: not checkable.

    Covers each distribution's RECORD by size and mtime, which a restore keeps to the nanosecond,
    and the metadata of every entry below a directory named by `--also`. The whole root is too
    much to look at in each start.
    """
    parts: list[object] = []
    for root in target.roots:
        if root.path == "/":
            return None
        if root.why == ALSO:
            entries = _entries(root.path, exclude)
            parts.append([[e.path, e.kind, e.mode, e.size, e.mtime_ns, e.target] for e in entries])
        for path in sorted(distributions(root.path)):
            try:
                found = os.stat(os.path.join(path, "RECORD"))
                parts.append([path, found.st_size, found.st_mtime_ns])
            except OSError:
                parts.append([path])
        parts.append([root.path, _top_level(root.path)])
    return _sha256(parts)


def _entries(root: str, exclude: Sequence[str]) -> Iterable[Entry]:
    """What stands in a root; a shared tree may have been placed there by a symlink."""
    from bootseer.depsnap.capture.scan import scan  # few roots are named by hand

    place = os.path.realpath(root) if os.path.islink(root) else root
    return scan(place, exclude=exclude).entries.values()


def _content(path: str) -> str:
    try:
        with open(path, "rb", opener=opener) as file:
            return sha256.of_file(file)
    except OSError:
        return ""


def _sha256(value: object) -> str:
    return sha256.of_text(_json(value))


_PACKAGE_DATABASES = ("/var/lib/dpkg/status", "/lib/apk/db/installed", "/var/lib/rpm/rpmdb.sqlite")
_PLACES = (
    ".",
    "lib/python3*/site-packages",
    "lib64/python3*/site-packages",
    "lib/python3*/dist-packages",
    "usr/local/lib/python3*/*-packages",
)


def packages(target: Target) -> dict[str, str]:
    """Name -> version of every distribution that stands in the roots now."""
    found = (os.path.basename(p) for root in target.roots for p in distributions(root.path))
    return pins.of_distributions(found)


def distributions(root: str) -> list[str]:
    """Paths of the `.dist-info` and `.egg-info` entries an installer finds below a root."""
    found: list[str] = []
    for place in _PLACES:
        folders = [root]
        for part in place.split("/"):
            folders = [path for folder in folders for path in _matching(folder, part)]
        held = [(f, _names(f)) for f in folders if place == "." or not os.path.islink(f)]
        for kind in (".dist-info", ".egg-info"):
            for folder, names in held:
                found += [os.path.join(folder, name) for name in names if name.endswith(kind)]
    return found


def _matching(folder: str, part: str) -> list[str]:
    """Paths in a folder that a part of a place stands for: without `*`, there or not."""
    begin, star, end = part.partition("*")
    if not star:
        return [os.path.normpath(f"{folder}/{part}")]
    names = (n for n in _names(folder) if n.startswith(begin) and n[len(begin) :].endswith(end))
    return [os.path.normpath(f"{folder}/{name}") for name in names]


def _names(folder: str) -> list[str]:
    """What is in a folder and not hidden; nothing where it cannot be listed."""
    try:
        return [name for name in os.listdir(folder) if not name.startswith(".")]
    except OSError:
        return []


def _top_level(path: str) -> list[str]:
    try:
        names = os.listdir(path)
    except OSError:
        return []
    return sorted(n for n in names if not n.startswith(WORK_PREFIX) and n != "__pycache__")


def _digest(ingredients: Sequence[Ingredient]) -> str:
    body = _json([[i.name, i.value] for i in ingredients])
    text = f"bootseer-deps-key-{FORMAT_VERSION}\n{body}"
    return sha256.of_text(text)


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
