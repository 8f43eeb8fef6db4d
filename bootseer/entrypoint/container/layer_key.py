"""The key of a dependency layer: what an install in a container of an image depends on.

Ingredients are (name, value) pairs: the image's digest, the command, the files that it reads, the
variables that it heeds, the user. The image stands for the Python, the platform and all that is
installed there before. No ingredient holds a credential.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from bootseer.config.sections import DepsSettings
from bootseer.depsnap import pins
from bootseer.depsnap.key import pip_settings, uv_config
from bootseer.depsnap.key.input_files import digest_text, local_path
from bootseer.depsnap.key.install_command import Install, expand_requirements, plan
from bootseer.depsnap.key.roots_state import canonical_json
from bootseer.depsnap.key.tool_options import list_options
from bootseer.depsnap.key.variables import read_variables
from bootseer.entrypoint.container.container_files import ContainerFiles
from bootseer.errors import NotFoundError, UsageError
from bootseer.events.redaction import redact_command_for_key
from bootseer.light_dataclasses import dataclass
from bootseer.system import sha256

EXACT_NOTE = "dev.bootseer.layer.exact"
"""A label of a layer's image, where the inputs name the version of all that was installed."""
FORMAT = "bootseer-layer-key-1"
_INCLUDING = frozenset(("-r", "--requirement", "-c", "--constraint"))
_EDITABLE = frozenset(("-e", "--editable"))
_COMMENT = re.compile(r"(?:^|\s)#.*$", re.MULTILINE)
_FINDING = frozenset(("-f", "--find-links"))
_LINKS = ("PIP_FIND_LINKS", "UV_FIND_LINKS")
_UV_LISTS = ("UV_CONSTRAINT", "UV_OVERRIDE", "UV_BUILD_CONSTRAINT")
_FILE_ADDRESS = re.compile(r"\bfile:")
_LOCAL = re.compile(r"^[.~/]|/|\.(?:whl|zip|tar|t?gz|t?bz2?|t?xz)$")
_TOOLS = ("pip", "uv")
_ADVICE = "name the files that decide what it installs in [deps] key_files"


@dataclass(frozen=True, slots=True)
class LayerKey:
    """`digest` is in hex. `pins` are the versions of packages that the inputs name.

    They are empty where the inputs name a package without its version, or are not known.
    """

    digest: str
    pins: Mapping[str, str]

    @property
    def tag(self) -> str:
        """The tag under which the layer lies in the image's repository."""
        return f"bootseer-deps-{self.digest[:40]}"


def make_key(
    deps: DepsSettings,
    image: str,
    files: ContainerFiles,
    environ: Mapping[str, str],
    user: str,
) -> LayerKey:
    """The key of `deps.install` in a container of the image with this digest.

    `environ` are the variables that the command will have, `user` who runs it. Raises UsageError
    for a command whose inputs are not known, NotFoundError for a file that is not there.
    """
    texts = {name: _read(files, name) for name in deps.key_files}
    environ = {"HOME": _home_of(files, user), **environ}
    settings = dict(_read_settings(files, environ))
    lists = _Lists(files, environ, is_whole=not deps.key_files)
    installs = plan(deps.install)
    if not deps.key_files:
        _check_known(installs)
    for install in installs:
        if install.tool in _TOOLS:
            lists.add(install, settings.values())
    ingredients = [
        ("image", image),
        ("command", canonical_json(redact_command_for_key(deps.install))),
        ("directory", files.directory),
        ("user", user),
        ("left out", canonical_json(sorted(deps.exclude))),
        *((f"settings {n}", digest_text(t)) for n, t in sorted(settings.items())),
        *((f"file {n}", digest_text(t)) for n, t in sorted({**texts, **lists.texts}.items())),
        *(
            (f"variable {name}", value)
            for name, value in read_variables(environ, deps.key_env, ()).items()
        ),
    ]
    body = canonical_json([list(pair) for pair in ingredients])
    are_known = bool(installs) and all(install.tool in _TOOLS for install in installs)
    pinned = lists.pins if are_known and lists.names_versions else {}
    return LayerKey(sha256.of_text(f"{FORMAT}\n{body}"), pinned)


def _check_known(installs: list[Install]) -> None:
    """Raise UsageError where the command's words do not say what it reads."""
    for install in installs:
        if install.tool not in _TOOLS or install.doubt:
            raise UsageError(f"what {install.program} reads is not known: {_ADVICE}")
        local = [word for word in install.requirements if _LOCAL.search(word)]
        if install.editable or local:
            raise UsageError(f"{[*install.editable, *local][0]} is installed from files: {_ADVICE}")
    if not installs:
        raise UsageError(f"the command installs nothing that is known: {_ADVICE}")


def _read(files: ContainerFiles, path: str) -> str:
    data = files.read(path)
    if data is None:
        raise NotFoundError(f"there is no {path} in the container (from {files.directory})")
    return data.decode("utf-8", "surrogateescape")


def _home_of(files: ContainerFiles, user: str) -> str:
    """The home of a container's user, by its list of users; "/" where that has none."""
    name = user.partition(":")[0] or "0"
    users = (files.read("/etc/passwd") or b"").decode("utf-8", "surrogateescape")
    for line in users.splitlines():
        fields = line.split(":")
        if len(fields) > 5 and name in (fields[0], fields[2]):
            return fields[5] or "/"
    return "/root" if name in ("0", "root") else "/"


def _read_settings(files: ContainerFiles, environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Pip's and uv's settings files that the container has, by their paths."""
    paths = [*pip_settings.settings_files(environ, "", files.directory)]
    paths += uv_config.settings_files(environ)
    folder = files.directory
    while folder not in ("", "/"):
        paths.append(f"{folder}/uv.toml")
        folder = folder.rpartition("/")[0]
    for path in paths:
        data = files.read(path)
        if data:
            yield files.join(path), data.decode("utf-8", "surrogateescape")


class _Lists:
    """The requirement files of installs, with those that they include.

    `is_whole`: nothing else tells what is installed, and they must.
    """

    def __init__(
        self, files: ContainerFiles, environ: Mapping[str, str], *, is_whole: bool
    ) -> None:
        self._files, self._environ, self._is_whole = files, environ, is_whole
        self.texts: dict[str, str] = {}
        self.pins: dict[str, str] = {}
        self.names_versions = True

    def add(self, install: Install, settings: Collection[str]) -> None:
        """Read the files that an install names, and those that settings and variables name."""
        for word in expand_requirements(install, self._environ):
            self._pin(word)
        options = pip_settings.input_options(settings, self._environ)
        if install.tool == "pip":
            named = pip_settings.input_lists(options)
        else:
            named = [name for key in _UV_LISTS for name in self._environ.get(key, "").split()]
        links = [text for text in settings if "find-links" in text or "find_links" in text]
        if links or any(self._environ.get(name) for name in _LINKS) or options.get("editable"):
            self._refuse_local("a package of --find-links, or of an editable project,")
        for word in install.words:
            if word.partition("=")[0] in _FINDING:
                self._refuse_local(word)
        named += [*install.requirement_files, *install.constraint_files]
        pending = [self._files.join(self._path(name), folder=install.folder) for name in named]
        while pending:
            path = pending.pop()
            if path in self.texts:
                continue
            text = self.texts[path] = _read(self._files, path)
            plain = _COMMENT.sub("", text)
            here = path.rpartition("/")[0] or "/"
            for option, name in list_options(plain):
                if option in _INCLUDING:
                    pending.append(self._files.join(self._path(name), folder=here))
                elif option in (*_EDITABLE, *_FINDING):
                    self._refuse_local(name)
            self._count(plain, is_list=path.endswith((".txt", ".in")))

    def _path(self, name: str) -> str:
        path = local_path(name)
        if path is None or name == "-":
            raise UsageError(f"what {name} holds is not known before it is installed; name a file")
        return path

    def _refuse_local(self, word: str) -> None:
        if self._is_whole:
            raise UsageError(f"{word} is installed from files: {_ADVICE}")
        self.names_versions = False

    def _count(self, text: str, *, is_list: bool) -> None:
        lines = (line.strip() for line in text.replace("\\\n", " ").splitlines())
        requirements = [line for line in lines if line and not line.startswith("-")]
        for line in requirements:
            is_address = "://" in line and _FILE_ADDRESS.search(line) is None
            if not is_address and (_LOCAL.search(line.partition(" ")[0]) or "file:" in line):
                self._refuse_local(line)
            if is_list:
                self._pin(line)
        self.names_versions &= is_list

    def _pin(self, requirement: str) -> None:
        pin = pins.parse_pin(requirement)
        if pin is None:
            self.names_versions = False
        else:
            self.pins[pin[0]] = pin[1]
