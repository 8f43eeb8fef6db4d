"""A snapshot's key: sha256 over the inputs that decide the result of an install.

Ingredients are (name, value) pairs; the key is the sha256 of `bootseer-deps-key-2` and their
canonical JSON. No ingredient holds a credential: words, files and addresses are redacted first.
What an index decides is no input: the same inputs give the same key, whatever a clock, a cache or a
network does, and a key's snapshots are distinguished by the lock that each was published with.
`workload` is the same over command, Python and platform only: past times of an install apply to
its next version too. `label` is of command and roots: the newest key of both is kept under it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence

from bootseer import light_dataclasses as dataclasses
from bootseer.depsnap import pins
from bootseer.depsnap.key import pip_settings, uv_config
from bootseer.depsnap.key.input_files import NOT_FOUND, digest_text, label, read_text, try_to_read
from bootseer.depsnap.key.install_command import Install
from bootseer.depsnap.key.install_roots import (
    ALSO,
    Target,
    folder_of,
    project_folder,
    variables_of,
)
from bootseer.depsnap.key.python_probe import Python
from bootseer.depsnap.key.requirements import Inputs, read_inputs, read_listed_inputs
from bootseer.depsnap.key.roots_state import canonical_json, digest_json, top_level
from bootseer.depsnap.key.variables import read_variables
from bootseer.errors import UsageError
from bootseer.events.redaction import redact_command_for_key
from bootseer.system import sha256
from bootseer.system.paths import is_within

FORMAT_VERSION = 2
_BEFORE = "roots before"
_LISTS_OF_UV = ("UV_CONSTRAINT", "UV_OVERRIDE", "UV_BUILD_CONSTRAINT", "UV_EXCLUDE")
_VARIABLE = re.compile(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)")


@dataclasses.dataclass(frozen=True, slots=True)
class Ingredient:
    """One input of the key. `value` is text that is safe to show, or a digest."""

    name: str
    value: str


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """A key, and what it says of the install.

    `closed`: no index decides anything. Else `pinned` are the exact versions that the lists name,
    and `all_exact` says that they name nothing else: they may be the whole lock (`is_lock_of`).
    """

    digest: str
    workload: str
    label: str
    ingredients: tuple[Ingredient, ...]
    closed: bool
    all_exact: bool = False
    pinned: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    wanted: frozenset[str] = frozenset()

    def at(self, state: str) -> Key:
        """The key of the same question for roots that hold `state` before."""
        ingredients = tuple(
            Ingredient(_BEFORE, state) if i.name == _BEFORE else i for i in self.ingredients
        )
        return dataclasses.replace(self, digest=_digest(ingredients), ingredients=ingredients)

    def is_lock_of(self, added: Mapping[str, str]) -> bool:
        """Whether the inputs alone are the lock of an install that added these packages."""
        return self.closed or (self.all_exact and pins.cover(self.pinned, added))

    def explain(self) -> list[dict[str, str]]:
        """The ingredients as JSON objects."""
        return [dataclasses.asdict(i) for i in self.ingredients]


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """The arguments of `make`; `state` is what the roots hold before (`roots_state.base_state`)."""

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
    inputs = read_inputs(q.target.installs, q.cwd, q.environ)
    key_files = {f"file {p}": digest_text(read_text(os.path.join(q.cwd, p))) for p in q.key_files}
    settings = _settings(q)
    _check_clones(inputs.clones or settings.clones, q.target)
    command = Ingredient("command", canonical_json(redact_command_for_key(q.command)))
    roots = Ingredient("roots", canonical_json(q.target.paths))
    ingredients = [*_platform(q), command]
    workload = _digest(ingredients)
    ingredients.append(Ingredient("uid class", "root" if os.geteuid() == 0 else "user"))
    if q.signer:
        ingredients.append(Ingredient("signed by", q.signer))
    if q.exclude:
        ingredients.append(Ingredient("left out", canonical_json(sorted(q.exclude))))
    ingredients += [*_packages_in_reach(q), roots, Ingredient(_BEFORE, q.state)]
    ingredients += [Ingredient(n, d) for n, d in sorted({**inputs.digests, **key_files}.items())]
    named = inputs.variables | settings.variables | _variables_in_words(q.target.installs)
    ingredients += [
        Ingredient(f"variable {name}", value)
        for name, value in read_variables(q.environ, q.key_env, named).items()
    ]
    ingredients += [Ingredient(n, d) for n, d in settings.digests.items()]
    folders = (q.cwd, *_project_folders(q))
    ingredients += dict.fromkeys(i for folder in folders for i in _uv_settings(folder, q))
    return Key(
        digest=_digest(ingredients),
        workload=workload,
        label=_digest([command, roots]),
        ingredients=tuple(ingredients),
        closed=not (inputs.open_ended or settings.open_ended),
        all_exact=inputs.all_exact and not settings.open_ended,
        pinned=inputs.pinned,
        wanted=inputs.wanted,
    )


def _check_clones(clones: bool, target: Target) -> None:
    """Raise UsageError where an editable repository is cloned to where nothing is captured."""
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


def _packages_in_reach(q: Question) -> list[Ingredient]:
    """Distributions outside the roots that an installer sees, and does not install again.

    Those of the system below a virtual environment or `--user`, and on the PYTHONPATH.
    """
    python = q.target.python
    if python is None or _makes_closed_environment(q.target.installs):
        return []
    folders = list(python.search)
    for environ, cwd, _ in _contexts(q):
        given = environ.get("PYTHONPATH", "").split(os.pathsep)
        folders += [os.path.join(cwd, folder) for folder in given if folder]
    if _sees_user_site(python):
        folders.append(python.user_site)
    folders = [os.path.join(q.cwd, f) for f in dict.fromkeys(folders) if f]
    outside = [f for f in folders if not any(is_within(f, root) for root in q.target.paths)]
    names = sorted(
        name
        for folder in outside
        for name in top_level(folder)
        if name.endswith((".dist-info", ".egg-info", ".egg-link"))
    )
    return [Ingredient("packages in reach", digest_json(names))] if names else []


def _makes_closed_environment(installs: Sequence[Install]) -> bool:
    """Whether the command makes an environment that sees no packages of the system."""
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


def _variables_in_words(installs: Sequence[Install]) -> frozenset[str]:
    """Variables that a shell puts into the words of installs."""
    texts = [text for i in installs for text in (*i.words, *(v for _, v in i.variables))]
    return frozenset(name for text in texts for name in _VARIABLE.findall(text))


def _settings(q: Question) -> Inputs:
    """What settings files of pip and uv decide, with the lists that they and variables name.

    Open-ended where they let pip install more than the command's words name.
    """
    digests: dict[str, str] = {}
    variables: frozenset[str] = frozenset()
    adds = clones = False
    prefix = q.target.python.prefix if q.target.python else ""
    for environ, cwd, config_file in _contexts(q):
        of_pip = pip_settings.settings_files(environ, prefix, cwd)
        of_uv = [*uv_config.settings_files(environ), *([config_file] if config_file else [])]
        texts = [_read_settings(path, cwd, q.cwd, digests) for path in of_pip]
        for path in of_uv:
            _read_settings(path, cwd, q.cwd, digests)
        options = pip_settings.input_options(texts, environ)
        lists = [name for v in _LISTS_OF_UV for name in environ.get(v, "").split()]
        lists += pip_settings.input_lists(options)
        editable = options.get("editable", "").split()
        listed = read_listed_inputs(lists, editable, environ, cwd, q.cwd)
        digests |= listed.digests
        clones |= listed.clones
        variables |= listed.variables
        adds |= pip_settings.add_packages(options)
    adds &= any(i.tool == "pip" and not i.removes for i in q.target.installs)
    return Inputs(digests, adds, variables=variables, clones=clones)


def _contexts(q: Question) -> list[tuple[Mapping[str, str], str, str]]:
    """Variables, directory and `--config-file` that a tool may have, those of the start first."""
    contexts = [(q.environ, q.cwd, "")]
    for i in q.target.installs:
        own = (variables_of(i, q.environ), folder_of(i, q.cwd), i.settings_file)
        contexts += [own] if own not in contexts else []
    return contexts


def _read_settings(path: str, folder: str, cwd: str, digests: dict[str, str]) -> str:
    """The text of a settings file, whose digest is added to `digests`."""
    full = os.path.join(folder, path)
    text, why = try_to_read(full)
    if why != NOT_FOUND:
        name = path if os.path.isabs(path) else label(full, cwd)
        digests[f"settings {name}"] = why or digest_text(text)
    return text


def _uv_settings(folder: str, q: Question) -> Iterator[Ingredient]:
    """uv's own settings for a directory, and the versions of Python asked for there."""
    for path in (*uv_config.settings_upwards(folder), *uv_config.user_version_files(q.environ)):
        text, why = try_to_read(path)
        if why != NOT_FOUND:
            yield Ingredient(f"settings {label(path, q.cwd)}", why or digest_text(text))


def _project_folders(q: Question) -> list[str]:
    """Directories other than the working one in which uv looks for settings."""
    uv = [i for i in q.target.installs if i.tool in ("uv", "uv-sync", "venv")]
    folders = [project_folder(i, variables_of(i, q.environ), folder_of(i, q.cwd)) for i in uv]
    return [folder for folder in dict.fromkeys(folders) if folder != q.cwd]


def _digest(ingredients: Sequence[Ingredient]) -> str:
    body = canonical_json([[i.name, i.value] for i in ingredients])
    return sha256.of_text(f"bootseer-deps-key-{FORMAT_VERSION}\n{body}")
