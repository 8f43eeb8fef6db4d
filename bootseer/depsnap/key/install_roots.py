"""The directories that an install command writes to, and the Python that it installs for.

A root is an absolute directory that is scanned before and after. uv's environment is found as its
documentation says: `--python`, `--system`, `VIRTUAL_ENV`, `CONDA_PREFIX`, a `.venv` in the working
directory or above it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from bootseer import light_dataclasses as dataclasses
from bootseer.depsnap.key import pip_settings, python_probe, uv_config
from bootseer.depsnap.key.input_files import find_upwards, join
from bootseer.depsnap.key.install_command import Install, plan
from bootseer.depsnap.key.python_probe import Python
from bootseer.errors import DeadlineError, UsageError
from bootseer.system.paths import is_within
from bootseer.system.regular_files import opener

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

ALSO, NAMED = "--also", "--target, --prefix or --root"
"""`Root.why` of directories that the user named."""
_SYSTEM_PREFIXES = frozenset({"/", "/usr"})
"""Prefixes of which only the directories for packages are captured."""


@dataclasses.dataclass(frozen=True, slots=True)
class Root:
    """A directory to capture, and why."""

    path: str
    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """What a command installs into. `python` is None where no interpreter could be asked.

    `folders` are directories that it makes by `mkdir`: they are made, not captured. `late` says
    which interpreter did not answer in time; the roots are then a guess, and there is no key.
    """

    installs: tuple[Install, ...]
    roots: tuple[Root, ...]
    python: Python | None
    folders: tuple[str, ...] = ()
    late: str = ""

    @property
    def paths(self) -> list[str]:
        """The paths of the roots."""
        return [root.path for root in self.roots]


def find(
    command: Sequence[str], environ: Mapping[str, str], cwd: str, also: Sequence[str] = ()
) -> Target:
    """The roots of a command and the Python it installs for, which is run once (`python_probe`).

    Raises UsageError for a command that runs a program of which it is not known where it writes,
    unless `also` says so.
    """
    installs = [_with_uv_folder(install, environ) for install in plan(command)]
    if not also:
        _check_variables(command, environ)
    roots: list[Root] = []
    folders: list[str] = []
    late: list[str] = []
    python: Python | None = None
    answers: dict[str, Python | None] = {}

    def ask(interpreter: str) -> Python | None:
        if interpreter not in answers:
            try:
                answers[interpreter] = python_probe.ask(interpreter, environ)
            except DeadlineError as error:
                late.append(str(error))
                answers[interpreter] = None
        return answers[interpreter]

    for install in installs:
        if install.doubt and not also:
            raise UsageError(f"{install.doubt}; or name what to keep with --also")
        if install.tool == "other":
            if not also:
                raise UsageError(
                    f"cannot tell where {install.program} writes; name its directories with --also"
                )
            continue
        if install.tool == "mkdir":
            folders += [_absolute(folder, folder_of(install, cwd)) for folder in install.folders]
            continue
        variables = variables_of(install, environ)
        if install.tool == "uv" and not also and _is_placed_by_settings(install, variables, cwd):
            raise UsageError("uv's settings say where it writes; name its directories with --also")
        destinations, answer = _destinations(
            install, variables, folder_of(install, cwd), roots, ask
        )
        roots += destinations
        python = answer or python
    if all(install.tool == "other" for install in installs):
        python = ask(_interpreter(Install("other", ""), environ, cwd))
    roots += [Root(_absolute(path, cwd), ALSO) for path in also]
    outermost = tuple(_outermost(roots))
    return Target(tuple(installs), outermost, python, tuple(folders), late[0] if late else "")


def _check_variables(command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Raise UsageError for variables that make a command do what is not read here."""
    if environ.get("BASH_ENV") and any("bash" in word for word in command):
        raise UsageError("BASH_ENV is run before a script; name what is written with --also")
    script = next((word for word in command if " " in word), "")
    if environ.get("CDPATH") and re.search(r"\bcd\b", script):
        raise UsageError("CDPATH says where a script goes; name what is written with --also")
    functions = (n[10:].rstrip("%()") for n in environ if n.startswith("BASH_FUNC_"))
    options = script and (environ.get("SHELLOPTS") or environ.get("BASHOPTS"))
    if options or any(name in script for name in functions):
        raise UsageError(
            "options or functions of a shell that the environment holds change what a script "
            "does; name what is written with --also"
        )
    if environ.get("UV_TORCH_BACKEND") == "auto" and any("uv" in word for word in command):
        raise UsageError("UV_TORCH_BACKEND=auto goes by the GPU; name a backend, or use --also")


def folder_of(install: Install, cwd: str) -> str:
    """The directory that an install runs in."""
    return _absolute(install.folder, cwd) if install.folder else cwd


def variables_of(install: Install, environ: Mapping[str, str]) -> Mapping[str, str]:
    """The variables that an install runs with."""
    return {**environ, **dict(install.variables)} if install.variables else environ


def _is_placed_by_settings(install: Install, environ: Mapping[str, str], cwd: str) -> bool:
    """Whether a settings file of uv says where it installs, and its words do not."""
    if install.target or install.prefix:
        return False
    folder = folder_of(install, cwd)
    paths = [*uv_config.settings_files(environ), install.settings_file]
    named = [os.path.join(folder, path) for path in paths if path]
    return uv_config.any_sets_place((*named, *uv_config.settings_upwards(folder)))


def _with_uv_folder(install: Install, environ: Mapping[str, str]) -> Install:
    """The install, run in the directory that uv's variable names."""
    environ = variables_of(install, environ)
    named = environ.get("UV_WORKING_DIR") or environ.get("UV_WORKING_DIRECTORY")
    by_option = any(word.partition("=")[0] == "--directory" for word in install.words)
    if not named or by_option or os.path.basename(install.program) != "uv":
        return install
    return dataclasses.replace(install, folder=os.path.join(install.folder, named))


def _destinations(
    install: Install,
    environ: Mapping[str, str],
    cwd: str,
    made: Sequence[Root],
    ask: Callable[[str], Python | None],
) -> tuple[list[Root], Python | None]:
    """The roots of one install, and its Python; `made` are those of the installs before it."""
    if install.tool == "venv":
        assert install.target is not None
        if environ.get("UV_PROJECT_ENVIRONMENT") and not _names_environment(install):
            raise UsageError(
                "UV_PROJECT_ENVIRONMENT may say where the environment is made; name it with --also"
            )
        python = ask(_interpreter(install, environ, cwd))
        return [Root(_absolute(install.target, cwd), "the virtual environment it makes")], python
    interpreter = _interpreter(install, environ, cwd)
    in_made = any(is_within(interpreter, root.path) for root in made)
    settings: Mapping[str, str] = {}
    if install.tool == "pip":
        python = None if in_made else ask(interpreter)
        settings = pip_settings.place_options(environ, python.prefix if python else "", cwd)
        if settings.get("python") and install.python in (None, install.program):
            interpreter = _named_python(settings["python"], environ.get("PATH", os.defpath), cwd)
            in_made = any(is_within(interpreter, root.path) for root in made)
        may_clone = install.editable or install.requirement_files
        if (settings.get("src") and may_clone) or settings.get("report"):
            raise UsageError(
                "settings of pip name a `src` or a `report`; name what is written with --also"
            )
        settings = {} if install.removes else settings  # `uninstall` has none of the others
    # A `--prefix` is below a `--root`.
    fixed = install.target or install.root or settings.get("root") or install.prefix
    fixed = fixed or settings.get("target") or settings.get("prefix")
    if fixed:
        return [Root(_absolute(fixed, cwd), NAMED)], ask(interpreter)
    if in_made:
        return [], None  # the environment that an earlier command of the line makes
    if install.tool == "uv-sync":
        place = _project_environment(install, environ, cwd)
        return [Root(place, "the project's environment")], ask(interpreter)
    python = ask(interpreter)
    if python is None:
        return _environment_of(interpreter), None
    user = install.user or pip_settings.is_on(settings, "user")
    return _prefix_roots(install, python, environ, cwd, user=user), python


def _names_environment(install: Install) -> bool:
    """Whether words say where an environment is made: it is not uv's own choice."""
    if os.path.basename(install.program) != "uv" or install.target != ".venv":
        return True
    pairs = zip(install.words, install.words[1:], strict=False)
    return any(word == ".venv" and before[:1] != "-" for before, word in pairs)


def _environment_of(interpreter: str) -> list[Root]:
    """DIR for a DIR/bin/python that does not exist yet."""
    head = os.path.dirname(interpreter)
    if os.path.basename(head) == "bin" and os.path.isabs(head):
        return [Root(os.path.dirname(head), "the environment of " + interpreter)]
    return []


def project_folder(install: Install, environ: Mapping[str, str], cwd: str) -> str:
    """Where uv looks for a project: `--project`, else the directory `cwd` that it runs in."""
    named = install.project or environ.get("UV_PROJECT")
    return _absolute(named, cwd) if named else cwd


def _project_environment(install: Install, environ: Mapping[str, str], cwd: str) -> str:
    given = environ.get("UV_PROJECT_ENVIRONMENT")
    cwd = project_folder(install, environ, cwd)
    project = find_upwards(cwd, "pyproject.toml")
    return _absolute(given or ".venv", uv_config.workspace_of(project) if project else cwd)


def _prefix_roots(
    install: Install, python: Python, environ: Mapping[str, str], cwd: str, *, user: bool
) -> list[Root]:
    purelib = python.paths.get("purelib", "")
    virtual = python.prefix != python.base_prefix
    unwritable = not virtual and not os.access(purelib, os.W_OK) and os.path.isdir(purelib)
    if user or (unwritable and install.tool == "pip"):
        base = environ.get("PYTHONUSERBASE") or python.user_base
        return [Root(_absolute(base, cwd), "the user's base directory")]
    if virtual:
        return [Root(python.prefix, "the virtual environment of " + python.executable)]
    data = python.paths.get("data", "/")
    if data not in _SYSTEM_PREFIXES:
        return [Root(data, "the prefix that " + python.executable + " installs into")]
    names = ("purelib", "platlib", "scripts", "include")
    paths = dict.fromkeys(python.paths[n] for n in names if n in python.paths)
    return [Root(p, "an installation path of " + python.executable) for p in paths]


def _interpreter(install: Install, environ: Mapping[str, str], cwd: str) -> str:
    """The path of the interpreter an install is for; it may not exist yet."""
    search = environ.get("PATH", os.defpath)
    named = install.python or (environ.get("UV_PYTHON") if install.tool == "uv" else None)
    # A version alone lets uv choose among environments before it looks for a Python.
    if named and (install.tool != "uv" or "/" in named or os.path.isdir(os.path.join(cwd, named))):
        return _named_python(named, search, cwd)
    if install.tool == "pip":
        return _python_of_script(install.program, search, cwd)
    if install.tool == "uv-sync":
        inside = os.path.join(_project_environment(install, environ, cwd), "bin/python")
        return inside if os.path.exists(inside) else _named_python("python3", search, cwd)
    system = install.system or pip_settings.is_on(environ, "UV_SYSTEM_PYTHON")
    if install.tool == "uv" and not system:
        environment = environ.get("VIRTUAL_ENV") or environ.get("CONDA_PREFIX")
        above = find_upwards(cwd, ".venv")
        environment = environment or (above and os.path.join(above, ".venv"))
        if environment:
            return os.path.join(_absolute(environment, cwd), "bin", "python")
    if install.tool == "other" and environ.get("VIRTUAL_ENV"):
        return os.path.join(_absolute(environ["VIRTUAL_ENV"], cwd), "bin", "python")
    return _named_python(named or "python3", search, cwd)


def _named_python(name: str, search: str, cwd: str) -> str:
    if "/" in name or os.path.isdir(os.path.join(cwd, name)):
        path = _absolute(name, cwd)
        return os.path.join(path, "bin", "python") if os.path.isdir(path) else path
    if name[:1].isdigit():
        name = "python" + ".".join(name.split(".")[:2])
    return which(name, search) or which("python", search) or name


def _python_of_script(program: str, search: str, cwd: str) -> str:
    """The interpreter in a pip script's first lines, else a `python` next to the script."""
    path = _absolute(program, cwd) if "/" in program else which(program, search)
    if path is None:
        return _named_python("python3", search, cwd)
    try:
        with open(path, "rb", opener=opener) as file:
            head = file.read(512).decode("utf-8", "surrogateescape")
    except OSError:
        head = ""
    match = re.match(r"#!\s*(\S*python\S*)\s", head) or re.match(
        r"#!/bin/sh\n'''exec' \"?([^\"\n]*?python[^\"\s]*)\"? ", head
    )
    if match and os.path.exists(match[1]):
        return match[1]
    for name in ("python3", "python"):
        python = os.path.join(os.path.dirname(path), name)
        if os.path.exists(python) or not os.path.exists(path):
            return python
    return _named_python("python3", search, cwd)


def begin_to_ask(command: Sequence[str], environ: Mapping[str, str], cwd: str) -> None:
    """Start the interpreter of a plain install now, so that `find` need not wait for it.

    For a caller that has other work first; without it `find` gives the same answer.
    """
    installs = [_with_uv_folder(install, environ) for install in plan(command)]
    if len(installs) != 1 or installs[0].tool not in ("pip", "uv"):
        return
    variables = variables_of(installs[0], environ)
    interpreter = _interpreter(installs[0], variables, folder_of(installs[0], cwd))
    python_probe.begin_to_ask(interpreter, environ)


def which(program: str, search: str | None) -> str | None:
    """Where a program is on a search path."""
    import shutil  # it imports compressors, and most commands name their Python

    return shutil.which(program, path=search)


def _absolute(path: str, cwd: str) -> str:
    return join(cwd, os.path.expanduser(path))


def _outermost(roots: Sequence[Root]) -> list[Root]:
    """The roots without duplicates and those within another one, in order; of two equal ones the
    one that the user named."""
    kept: dict[str, Root] = {}
    for root in roots:
        covered = any(is_within(root.path, r.path) and r.path != root.path for r in roots)
        if not covered and (root.path not in kept or root.why == ALSO):
            kept[root.path] = root
    return list(kept.values())
