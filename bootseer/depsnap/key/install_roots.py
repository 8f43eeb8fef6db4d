"""Where an install command will put its files, and into which Python.

A root is an absolute directory that is scanned before and after. uv's environment is searched as
its documents say: `--python`, `--system`, `VIRTUAL_ENV`, `CONDA_PREFIX`, a `.venv` in the working
directory or above it.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping, Sequence

from bootseer import light_dataclasses as dataclasses
from bootseer.depsnap.key import pip_settings, uv_settings
from bootseer.depsnap.key.install_command import Install, plan
from bootseer.depsnap.key.uv_config import joined, upwards, workspace_of
from bootseer.errors import DeadlineError, UsageError
from bootseer.system.paths import is_within
from bootseer.system.readiness import readable
from bootseer.system.regular_files import opener

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

PROBE_TIMEOUT_S = 10.0
"""After it the install runs plainly: a key without what the interpreter tells is another key."""
ALSO, NAMED = "--also", "--target, --prefix or --root"
"""Why of a root that the user named."""
PROBE = """
import os, site, sys, sysconfig
try:
    libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
except (AttributeError, OSError, ValueError):
    libc = ""
if not libc:
    import platform
    libc = " ".join(platform.libc_ver())
told = [
    "", sys.executable, sys.implementation.cache_tag or "", sysconfig.get_config_var("SOABI") or "",
    sys.version.split()[0], sys.prefix, sys.base_prefix, sysconfig.get_platform(), libc,
    site.getuserbase() or "", site.getusersitepackages() or ""]
paths = sysconfig.get_paths()
told += [str(len(paths)), *paths, *paths.values(), *sys.path, ""]
sys.stdout.buffer.write(os.fsencode(chr(0).join(told)))
"""
"""Without `json` and `platform`: a start waits for it, and they are half of its time. Each of what
it tells is between two NULs; whatever is outside them, another wrote: a `sitecustomize`, say."""
_WHOLE_PREFIX_REFUSED = frozenset({"/", "/usr"})


@dataclasses.dataclass(frozen=True, slots=True)
class Python:
    """The interpreter that packages are installed for, as it describes itself.

    `search` is its `sys.path` without the user's directory and PYTHONPATH.
    """

    executable: str
    tag: str
    abi: str
    version: str
    prefix: str
    base_prefix: str
    platform: str
    libc: str
    paths: Mapping[str, str]
    user_base: str
    user_site: str
    search: Sequence[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Root:
    """A directory to capture and why it is one."""

    path: str
    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """What a command installs into. `python` is None where no interpreter could be asked.

    `folders` are directories that it makes by `mkdir`: they are made, not captured. `late` says
    which interpreter did not answer in time; the roots are then a guess, and no key is made.
    """

    installs: tuple[Install, ...]
    roots: tuple[Root, ...]
    python: Python | None
    folders: tuple[str, ...] = ()
    late: str = ""

    @property
    def paths(self) -> list[str]:
        return [root.path for root in self.roots]


def find(
    command: Sequence[str], environ: Mapping[str, str], cwd: str, also: Sequence[str] = ()
) -> Target:
    """The roots of a command and the Python it installs for.

    Runs that Python once (some 20 ms). Raises UsageError for a command that runs a program whose
    writes nobody can tell, unless `also` says where it writes.
    """
    installs = [_placed(install, environ) for install in plan(command)]
    if not also:
        _check_variables(command, environ)
    roots: list[Root] = []
    folders: list[str] = []
    late: list[str] = []
    python: Python | None = None
    heard: dict[str, Python | None] = {}

    def asked_of(interpreter: str) -> Python | None:
        if interpreter not in heard:
            try:
                heard[interpreter] = ask(interpreter, environ)
            except DeadlineError as error:
                late.append(str(error))
                heard[interpreter] = None
        return heard[interpreter]

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
            folders += [_absolute(folder, place_of(install, cwd)) for folder in install.folders]
            continue
        its = variables_of(install, environ)
        if install.tool == "uv" and not also and _is_sent_elsewhere(install, its, cwd):
            raise UsageError("uv's settings say where it writes; name its directories with --also")
        found, asked = _destinations(install, its, place_of(install, cwd), roots, asked_of)
        roots += found
        python = asked or python
    if all(install.tool == "other" for install in installs):
        python = asked_of(_interpreter(Install("other", ""), environ, cwd))
    roots += [Root(_absolute(path, cwd), ALSO) for path in also]
    every = tuple(_outermost(roots))
    return Target(tuple(installs), every, python, tuple(folders), late[0] if late else "")


def _check_variables(command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Raise UsageError for those that let a command do what neither its words nor files tell."""
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


def place_of(install: Install, cwd: str) -> str:
    """The directory that an install runs in."""
    return _absolute(install.folder, cwd) if install.folder else cwd


def variables_of(install: Install, environ: Mapping[str, str]) -> Mapping[str, str]:
    """The variables that an install runs with."""
    return {**environ, **dict(install.variables)} if install.variables else environ


def _is_sent_elsewhere(install: Install, environ: Mapping[str, str], cwd: str) -> bool:
    """Whether a settings file of uv says where it installs, and its words do not."""
    if install.target or install.prefix:
        return False
    place = place_of(install, cwd)
    paths = [*uv_settings.files(environ), install.settings_file]
    named = [os.path.join(place, path) for path in paths if path]
    return uv_settings.name_place((*named, *uv_settings.above(place)))


def _placed(install: Install, environ: Mapping[str, str]) -> Install:
    """The install where uv's variable lets it run."""
    environ = variables_of(install, environ)
    named = environ.get("UV_WORKING_DIR") or environ.get("UV_WORKING_DIRECTORY")
    told = any(word.partition("=")[0] == "--directory" for word in install.words)
    if not named or told or os.path.basename(install.program) != "uv":
        return install
    return dataclasses.replace(install, folder=os.path.join(install.folder, named))


def _destinations(
    install: Install,
    environ: Mapping[str, str],
    cwd: str,
    made: Sequence[Root],
    asked_of: Callable[[str], Python | None],
) -> tuple[list[Root], Python | None]:
    if install.tool == "venv":
        assert install.target is not None
        if environ.get("UV_PROJECT_ENVIRONMENT") and not _is_named(install):
            raise UsageError(
                "UV_PROJECT_ENVIRONMENT may say where the environment is made; name it with --also"
            )
        python = asked_of(_interpreter(install, environ, cwd))
        return [Root(_absolute(install.target, cwd), "the virtual environment it makes")], python
    interpreter = _interpreter(install, environ, cwd)
    in_made = any(is_within(interpreter, root.path) for root in made)
    told: Mapping[str, str] = {}
    if install.tool == "pip":
        asked = None if in_made else asked_of(interpreter)
        told = pip_settings.placing(environ, asked.prefix if asked else "", cwd)
        if told.get("python") and install.python in (None, install.program):
            interpreter = _named_python(told["python"], environ.get("PATH", os.defpath), cwd)
            in_made = any(is_within(interpreter, root.path) for root in made)
        clones = install.editable or install.requirement_files  # or may
        if (told.get("src") and clones) or told.get("report"):
            raise UsageError(
                "settings of pip name a `src` or a `report`; name what is written with --also"
            )
        told = {} if install.removes else told  # `uninstall` has none of the others
    # A `--prefix` is below a `--root`.
    fixed = install.target or install.root or told.get("root") or install.prefix
    fixed = fixed or told.get("target") or told.get("prefix")
    if fixed:
        return [Root(_absolute(fixed, cwd), NAMED)], asked_of(interpreter)
    if in_made:
        return [], None  # the environment that an earlier command of the line makes
    if install.tool == "uv-sync":
        place = _project_environment(install, environ, cwd)
        return [Root(place, "the project's environment")], asked_of(interpreter)
    python = asked_of(interpreter)
    if python is None:
        return _environment_of(interpreter), None
    user = install.user or pip_settings.is_on(told, "user")
    return _prefix_roots(install, python, environ, cwd, user=user), python


def _is_named(install: Install) -> bool:
    """Whether words say where an environment is made, not uv's own choice."""
    if os.path.basename(install.program) != "uv" or install.target != ".venv":
        return True
    pairs = zip(install.words, install.words[1:], strict=False)
    return any(word == ".venv" and before[:1] != "-" for before, word in pairs)


def _environment_of(interpreter: str) -> list[Root]:
    """DIR for a DIR/bin/python that is not there yet."""
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
    here = upwards(cwd, "pyproject.toml")
    return _absolute(given or ".venv", workspace_of(here) if here else cwd)


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
    if data not in _WHOLE_PREFIX_REFUSED:
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
        above = upwards(cwd, ".venv")
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
    """The interpreter in a pip script's first lines, else a `python` beside the script."""
    path = _absolute(program, cwd) if "/" in program else which(program, search)
    if path is None:
        return _named_python("python3", search, cwd)
    try:
        with open(path, "rb", opener=opener) as file:
            head = file.read(512).decode("utf-8", "surrogateescape")
    except OSError:
        head = ""
    found = re.match(r"#!\s*(\S*python\S*)\s", head) or re.match(
        r"#!/bin/sh\n'''exec' \"?([^\"\n]*?python[^\"\s]*)\"? ", head
    )
    if found and os.path.exists(found[1]):
        return found[1]
    for name in ("python3", "python"):
        beside = os.path.join(os.path.dirname(path), name)
        if os.path.exists(beside) or not os.path.exists(path):
            return beside
    return _named_python("python3", search, cwd)


def ask(interpreter: str, environ: Mapping[str, str]) -> Python | None:
    """Let an interpreter describe itself; None when it cannot.

    Raises DeadlineError where it does not answer in time: it may yet be able to.
    """
    try:
        asked = _ASKED.pop(interpreter, None) or _Asked(interpreter, environ)
        answer = asked.answer(PROBE_TIMEOUT_S)
        return None if answer is None else _described_by(answer)
    except TimeoutError as error:
        raise DeadlineError(
            f"{interpreter} was asked what it is; {error}, so nothing is restored or kept"
        ) from error
    except (OSError, ValueError):
        return None


def _described_by(answer: bytes) -> Python:
    """What PROBE told. Raises ValueError where something else did."""
    before, *told = os.fsdecode(answer).split("\0")
    count = int(told[10]) if len(told) > 10 else 0
    names, end = told[11 : 11 + count], 11 + 2 * count
    if before or count < 1 or len(told) <= end or told[-1]:
        raise ValueError("this is not what a Python tells")
    executable, tag, abi, version, prefix, base_prefix, platform, libc, base, site = told[:10]
    return Python(
        executable=executable,
        tag=tag,
        abi=abi,
        version=version,
        prefix=prefix,
        base_prefix=base_prefix,
        platform=platform,
        libc=libc,
        paths=dict(zip(names, told[11 + count : end], strict=True)),
        user_base=base,
        user_site=site,
        search=told[end:-1],
    )


class _Asked:
    """An interpreter that was started to describe itself. Raises OSError where it cannot be.

    Not `subprocess`: importing it takes longer than the rest of what happens here.
    """

    def __init__(self, interpreter: str, environ: Mapping[str, str]) -> None:
        if "/" not in interpreter:
            raise FileNotFoundError(f"no {interpreter} on the search path")
        clean = {k: v for k, v in environ.items() if not k.startswith("PYTHON")}
        self._output, theirs = os.pipe()
        try:
            self._process = os.posix_spawn(
                interpreter,
                [interpreter, "-I", "-c", PROBE],
                clean,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, theirs, 1),
                    (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                ],
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
            )
        except BaseException:  # an interrupt too: nobody will read it
            os.close(self._output)
            raise
        finally:
            os.close(theirs)

    def answer(self, limit_s: float) -> bytes | None:
        """What it wrote until it ended; None where it failed. Raises TimeoutError when late."""
        end_s = time.monotonic() + limit_s
        answer = b""
        try:
            while True:
                if not readable(self._output, timeout_s=end_s - time.monotonic()):
                    raise TimeoutError(f"it did not answer within {limit_s:g} s")
                part = os.read(self._output, 1 << 16)
                if not part:
                    break
                answer += part
            while (ended := self._ended()) is None:
                if time.monotonic() > end_s:
                    raise TimeoutError(f"it did not end within {limit_s:g} s")
                time.sleep(0.001)
        except BaseException:  # it is late, or a signal ends us: nobody waits for it any more
            self._kill()
            raise
        finally:
            os.close(self._output)
        return None if ended else answer

    def _ended(self) -> int | None:
        """Its wait status; None while it runs."""
        try:
            process, status = os.waitpid(self._process, os.WNOHANG)
        except ChildProcessError:  # somebody else waited for it
            return 0
        return status if process else None

    def _kill(self) -> None:
        if self._ended() is None:
            os.kill(self._process, signal.SIGKILL)
            os.waitpid(self._process, 0)


_ASKED: dict[str, _Asked] = {}
"""Interpreters that `begin_asking` has started and `ask` will hear."""


def begin_asking(command: Sequence[str], environ: Mapping[str, str], cwd: str) -> None:
    """Start the interpreter of a plain install now, so that `find` need not wait for it.

    For a caller who has something else to do before; without it, `find` is as right.
    """
    installs = [_placed(install, environ) for install in plan(command)]
    if len(installs) != 1 or installs[0].tool not in ("pip", "uv"):
        return
    its = variables_of(installs[0], environ)
    interpreter = _interpreter(installs[0], its, place_of(installs[0], cwd))
    try:
        _ASKED[interpreter] = _Asked(interpreter, environ)
    except (OSError, ValueError):
        pass  # not there yet


def which(program: str, search: str | None) -> str | None:
    """Where a program is found on a search path."""
    import shutil  # brings compressors along, and most commands name their Python

    return shutil.which(program, path=search)


def _absolute(path: str, cwd: str) -> str:
    return joined(cwd, os.path.expanduser(path))


def _outermost(roots: Sequence[Root]) -> list[Root]:
    """Drop doubles and roots that lie in another one; keep the order, and what the user named."""
    kept: dict[str, Root] = {}
    for root in roots:
        covered = any(is_within(root.path, r.path) and r.path != root.path for r in roots)
        if not covered and (root.path not in kept or root.why == ALSO):
            kept[root.path] = root
    return list(kept.values())
