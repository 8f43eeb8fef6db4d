"""Read an install command's words: which tool, for which Python, into which place (pure).

Which tool writes where follows pip's documented `--target`, `--prefix`, `--root`, `--user` and
uv's `--python`, `--system`. A command that is none of pip, uv or venv is `other`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from bootseer import light_dataclasses as dataclasses
from bootseer.depsnap.key import redact
from bootseer.depsnap.key import shell_script as scripts
from bootseer.depsnap.key.shell_script import Opened, Part
from bootseer.depsnap.key.tool_options import SYNC_VALUED, VALUED, VENV_VALUED, Options
from bootseer.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    Tool = Literal["pip", "uv", "uv-sync", "venv", "mkdir", "other"]

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_EXPORTED = r"(?s)[A-Za-z_][A-Za-z0-9_]*(?:=.*)?"
_UNKNOWN = "$"  # no value that a shell assigns as it stands
_CONDITIONS = re.compile(r"\(|\|\||&&[^;\n]*\bexport\b[^;\n]*[;\n]")
"""In a script: what lets its variables be those of some of its commands alone."""
_PIP = re.compile(r"pip[0-9.]*")
_PYTHON = re.compile(r"python[0-9.]*")
_UNSURE = re.compile(r"[$`*?\[{~]")
"""What a shell makes something else of."""
_NAMED = r"\$(?:(?=\w)|\{(?=\w+\}))([A-Za-z_]\w*)\}?"
"""A variable in a word, whose value is looked at when it is known."""
_SILENT = frozenset({"echo", "printf", "set", "export", "true", ":", "sleep", "umask", "pwd"})
"""Commands that change nothing for others, and do not fail by what is on a machine."""
_EVER = frozenset({"echo", "set", "export", "true", ":"})
"""Those among them that no word makes fail."""
_LEADING = frozenset({"cd", "exit"})
"""Those that change nothing else, as long as a script ends where they fail."""
_FILTERS = frozenset({"tee", "cat", "head", "tail", "ts"})
"""What may take the output of an install."""
_QUESTIONS = frozenset(
    (
        *("list", "freeze", "show", "check", "debug", "inspect", "index", "help", "hash", "tree"),
        "cache",
    )
)
"""Commands of pip and `uv pip` that install nothing and write nothing that an install reads."""
_WRITING = frozenset({"--log", "--report", "-o", "--output-file", "--output"})
"""Their options that write a file all the same."""
_QUESTIONS_OF_UV = (
    *(["version"], ["self", "version"], ["help"]),
    *(["cache", "dir"], ["cache", "clean"]),
)
_REQUIREMENT = ("-r", "--requirement", "--requirements")
_CONSTRAINT = (
    *("-c", "--constraint", "--constraints", "--override", "--overrides"),
    *("-b", "--build-constraint", "--build-constraints", "--excludes"),
)
_NAMING = (
    *("CONSTRAINT", "REQUIREMENT", "OVERRIDE", "EXCLUDE", "EDITABLE", "GROUP", "CONFIG_FILE"),
    *("TARGET", "PREFIX", "ROOT", "PROJECT", "ENVIRONMENT", "WORKING_DIR", "WORKING_DIRECTORY"),
)
"""Ends of the variables of pip and uv that name what they read, or where they write."""
BUILDING = frozenset(
    (
        *("CC", "CXX", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CMAKE_ARGS", "CUDA_HOME"),
        *("FORCE_CUDA", "TORCH_CUDA_ARCH_LIST"),
    )
)
BUILT_AS = ("SETUPTOOLS_SCM_", "PBR_", "PDM_BUILD_", "HATCH_BUILD_", "POETRY_DYNAMIC_VERSIONING")
"""Beginnings of the variables that say which version is built, or how."""
_NAMING_ALL = frozenset(
    (
        *("VIRTUAL_ENV", "CONDA_PREFIX", "HOME", "XDG_CONFIG_HOME", "XDG_CONFIG_DIRS"),
        *("PYTHONUSERBASE", "PYTHONPATH"),
    )
)


@dataclasses.dataclass(frozen=True, slots=True)
class Install:
    """One simple command as far as its destination is concerned. Paths are as written.

    `removes`: it only uninstalls. `folders` are the directories that a `mkdir` makes, `project`
    is what uv's `--project` names, `folder` where a `cd` or uv's `--directory` lets it run,
    `settings_file` what its `--config-file` names; `variables` are those that the line gives it.
    `doubt` says why something else may come of the line than what is read from it.
    """

    tool: Tool
    program: str
    python: str | None = None
    target: str | None = None
    prefix: str | None = None
    root: str | None = None
    user: bool = False
    system: bool = False
    requirement_files: tuple[str, ...] = ()
    constraint_files: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()
    editable: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    removes: bool = False
    folders: tuple[str, ...] = ()
    project: str | None = None
    folder: str = ""
    settings_file: str = ""
    variables: tuple[tuple[str, str], ...] = ()
    doubt: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Simple:
    """A simple command: the variables that are assigned for it, its words, and the script's part.

    `plain` as in `Script`; a command that is no script's shows its own failure.
    """

    variables: Mapping[str, str]
    words: list[str]
    part: Part
    plain: bool = True


def simple_commands(command: Sequence[str], given: Mapping[str, str] | None = None) -> list[Simple]:
    """Split `sh -c 'a && b'` into its simple commands; another command is one of itself.

    Each comes with the variables that are assigned for it, on top of those `given`.
    """
    variables, words = _assigned(command)
    variables = {**(given or {}), **variables}
    if not words:
        return []
    name = os.path.basename(words[0])
    if name in ("sh", "bash", "dash", "ash"):  # a zsh reads files of its own before
        options, script = _shell_script(words[1:])
        if script is not None:
            found = scripts.read(script, options, bash=name == "bash")
            if isinstance(script, Opened) or "BASH_ENV" in variables:
                found = dataclasses.replace(found, plain=False)
            return _of_script(found, script, variables)
    return [Simple(variables, words, Part(tuple(words), shows=True))]


def _of_script(script: scripts.Script, text: str, variables: Mapping[str, str]) -> list[Simple]:
    found: list[Simple] = []
    values: dict[str, str] = {}
    exported = dict(variables)
    for part in script.parts:
        assigned, words = _assigned(part.words)
        if words and words[0] != "export":
            inside = simple_commands(part.words, exported)
            moves = any(i.words[0] == "cd" and i.words != words for i in inside)
            leaves = moves or "exec" in part.words[: len(part.words) - len(words)]
            for inner in inside:
                shows = inner.part.shows and part.shows
                own = dataclasses.replace(inner.part, shows=shows)
                if inner.words == words:
                    own = dataclasses.replace(part, words=inner.part.words)
                plain = inner.plain and script.plain and not (leaves and part != script.parts[-1])
                found.append(Simple(inner.variables, inner.words, own, plain))
            continue
        names_alone = all(re.fullmatch(_EXPORTED, word) for word in words[1:])
        if part.writes or part.reads or not names_alone:
            found.append(Simple({}, [":"], part, script.plain and names_alone))
        named = [word.partition("=") for word in words[1:]]
        values |= assigned | {name: value for name, equals, value in named if equals}
        names = exported.keys() | {name for name, _, _ in named}
        exported |= {name: value for name, value in values.items() if name in names}
        # Whether the start exports it already, words do not tell, nor for which commands it is.
        exported |= {name: _UNKNOWN for name in assigned if name not in exported}
        if _CONDITIONS.search(text):
            exported |= dict.fromkeys(values, _UNKNOWN)
    return found


def _assigned(command: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The variables that a simple command is given in front of its words, and these."""
    words = list(command)
    variables: dict[str, str] = {}
    while words:
        if _ASSIGNMENT.match(words[0]):
            name, _, value = words[0].partition("=")
            variables[name] = value
        elif os.path.basename(words[0]) not in ("env", "exec", "command"):
            break
        words = words[1:]
    return variables, words


def _shell_script(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """A shell's own options, and the script that follows its `-c`."""
    options: list[str] = []
    rest = list(arguments)
    while rest and rest[0][:1] == "-" and rest[0] not in ("-", "--"):
        word = rest.pop(0)
        if word.startswith("--"):
            options.append(word)
            continue
        if word != "-c":
            options.append(word.replace("c", ""))
        if "o" in word and rest:
            options.append(rest.pop(0))
        if "c" in word:
            return options, rest[0] if rest else None
    return options, None


def plan(command: Sequence[str]) -> list[Install]:
    """Every install that a command line visibly makes, in order; never raises."""
    here: str | None = ""
    out: list[Install] = []
    doubts: list[str] = []
    before: Install | None = None
    for simple in simple_commands(command):
        words, variables = simple.words, simple.variables
        if words[0] == "cd":
            here = _moved(here, words[1:], command)
        options = Options()
        found = _plan_one(words, options)
        doubts += filter(None, (_doubt(simple, found, before), options.doubt))
        before = found
        if found is None:
            continue
        named = {n: v for n, v in variables.items() if _is_naming(n)}
        plain = all(map(_is_plain, named.values())) and _is_plain(_searched(found, variables))
        unknown = found.tool not in ("venv", "mkdir") and not plain
        unknown = unknown or _is_open(found, words, variables)
        if unknown or (here is None and _depends_on_place(found, named)):
            found = Install("other", found.program)
        elif here:
            found = dataclasses.replace(found, folder=os.path.join(here, found.folder))
        told = tuple((name, value) for name, value in variables.items() if _is_plain(value))
        out.append(dataclasses.replace(found, words=tuple(words), variables=told))
    if not doubts:
        return out
    out = out or [Install("other", command[0])]
    return [dataclasses.replace(install, doubt=doubts[0]) for install in out]


def _doubt(simple: Simple, found: Install | None, before: Install | None) -> str:
    """Why a command of a line may do something else than what is kept of it; "" where it cannot.

    `before` is the install just before it, whose output it may take.
    """
    part, program = simple.part, simple.words[0]
    if not simple.plain:
        return scripts.UNREAD
    if part.reads:
        return f"{program} reads a file in place of its input"
    installs = found is not None and found.tool not in ("other", "mkdir")
    if part.writes and not installs:
        return f"{program} writes a file"
    words = simple.words[1:]
    if program in _SILENT:
        fixed = program in _EVER or not any(isinstance(word, Opened) for word in words)
        fixed &= program != "printf" or words[:1] != ["-v"]
        return "" if fixed else f"what {program} does is not read from the script"
    if program == "cd" and "CDPATH" in simple.variables:
        return "CDPATH says where a script goes"
    if program in _FILTERS:
        plain = program == "tee" or all(word[:1] == "-" or word.isdigit() for word in words)
        behind = part.piped and before is not None and plain
        return "" if behind else f"what {program} tells or writes is not read from the script"
    if found is not None and (part.piped or "-" in found.requirement_files):
        return f"{program} reads what another command writes"
    if not part.shows:
        return (
            f"where {program} fails, the script goes on; begin it with `set -e`, or put `&&` "
            "between its commands"
        )
    return ""


def _is_naming(variable: str) -> bool:
    ours = variable.startswith(("PIP_", "UV_")) and variable.upper().endswith(_NAMING)
    return ours or variable in _NAMING_ALL


def _searched(install: Install, variables: Mapping[str, str]) -> str:
    """The PATH that decides which Python it is for; "" where its words do, or it is the start's."""
    by_word = any("/" in word for word in (install.program, install.python or ""))
    return "" if by_word else variables.get("PATH", "")


def _is_open(found: Install, words: Sequence[str], variables: Mapping[str, str]) -> bool:
    """Whether its shell decides by what it is run, what it reads, or where it writes."""
    named = [found.program, found.python, found.target, found.prefix, found.root, found.project]
    named += [found.folder, found.settings_file, *found.folders, *found.editable]
    named += [*found.requirement_files, *found.constraint_files]
    if any(isinstance(word, Opened) for word in named):
        return True
    opened = [word for word in words if isinstance(word, Opened)]
    if any(_UNSURE.search(re.sub(_NAMED, "", word)) for word in opened):
        return True
    if any(not _is_plain(variables.get(n, "")) for w in opened for n in re.findall(_NAMED, w)):
        return True
    return any(not _is_plain(v) for name, v in variables.items() if _is_deciding(name))


def _is_deciding(variable: str) -> bool:
    """Whether a variable's value says what is installed, or how it is built."""
    said = variable.startswith(("PIP_", "UV_", "VIRTUALENV_", *BUILT_AS))
    return said or variable in BUILDING


def filled_in(install: Install, environ: Mapping[str, str]) -> list[str]:
    """The requirements of a command line as the variables that it runs with make them.

    Raises UsageError where they make options or paths of them.
    """
    out: list[str] = []
    for word in install.requirements:
        if not isinstance(word, Opened):
            out.append(word)
            continue
        if any(map(redact.is_secret_variable, re.findall(_NAMED, word))):
            raise UsageError(
                f"a variable in {word} is named like a credential, which no key may hold; "
                "name the install's directories with --also"
            )
        words = re.sub(_NAMED, lambda found: environ.get(found[1], ""), word).split()
        if any(w[:1] in "-.~" or re.search(r"[/$`*?\\{]|\.(?:whl|zip|t?gz)$", w) for w in words):
            raise UsageError(
                f"what the variables in {word} name is read by the command alone; "
                "name its directories with --also"
            )
        out += words
    return out


def _is_plain(value: str) -> bool:
    """Whether a shell assigns these very characters."""
    return not value.startswith("~") and "$" not in value and "`" not in value


def _moved(here: str | None, to: Sequence[str], command: Sequence[str]) -> str | None:
    """Where a `cd` leads; None where words alone do not tell, or for how long."""
    plain = len(to) == 1 and to[0][:1] != "-" and not _UNSURE.search(to[0])
    plain = plain and ".." not in to[0].split("/")  # by the words of where it is, or by its links
    if here is None or not plain or any("(" in word for word in command):
        return None
    return os.path.join(here, to[0])


def _depends_on_place(found: Install, variables: Mapping[str, str]) -> bool:
    """Whether it does something else in another directory, as far as words and variables tell."""
    named = [*found.requirement_files, *found.constraint_files, *found.folders]
    named += [word for value in variables.values() for word in value.split()]
    named += [p for p in (found.target, found.prefix, found.root, found.project) if p]
    named += [found.settings_file] if found.settings_file else []
    named += [p for p in (found.python, found.program, *found.requirements) if p and "/" in p]
    named += [p for p in found.requirements if p[:1] == "." or p.endswith(".whl")]
    named += found.editable
    if any(not os.path.isabs(p) and "://" not in p and p != "-" for p in named):
        return True
    if found.tool == "uv-sync":
        return found.project is None
    return found.tool == "uv" and found.python is None and not found.system


def _plan_one(words: Sequence[str], options: Options) -> Install | None:
    program, name = words[0], os.path.basename(words[0])
    rest = list(words[1:])
    if isinstance(program, Opened):
        return Install("other", program)
    if program in _SILENT or program in _LEADING or program in _FILTERS:
        return None
    if _PYTHON.fullmatch(name):
        while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
            valued = rest.pop(0) in ("-W", "-X")
            rest = rest[1:] if valued else rest
        if rest[:2] == ["-m", "pip"]:
            return _pip(program, rest[2:], python=program, options=options)
        if rest[:1] == ["-m"] and rest[1:2] in (["venv"], ["virtualenv"]):
            return _venv(program, rest[2:], options)
        return Install("other", program)
    if _PIP.fullmatch(name):
        return _pip(program, rest, python=None, options=options)
    if name == "mkdir":
        return _mkdir(program, rest)
    if name == "virtualenv":
        return _venv(program, rest, options)
    if name == "uv":
        return _uv(program, rest, options)
    return Install("other", program)


def _venv(program: str, rest: Sequence[str], told: Options) -> Install | None:
    options, positional = told.read(rest, VENV_VALUED)
    where = positional[0] if positional else (".venv" if os.path.basename(program) == "uv" else "")
    if not where:
        return None
    if len(positional) > 1:
        return Install("other", program)
    return Install("venv", program, python=_last(options, "-p", "--python"), target=where)


def _pip(
    program: str, rest: Sequence[str], *, python: str | None, options: Options
) -> Install | None:
    found, positional = options.read(rest, VALUED)
    if positional[:1] == ["uninstall"]:
        return _removal("pip", program, found, python)
    if positional[:1] == ["install"]:
        return _install("pip", program, found, positional[1:], python)
    if positional and (positional[0] not in _QUESTIONS or not _WRITING.isdisjoint(found)):
        return Install("other", program)
    options.doubt = ""  # it only asks, whatever its options are
    return None


def _uv(program: str, rest: Sequence[str], told: Options) -> Install | None:
    syncs = "sync" in rest and "pip" not in rest
    options, positional = told.read(rest, SYNC_VALUED if syncs else VALUED)
    found = _uv_alone(program, rest, options, positional, told)
    folder, file = (_last(options, name) or "" for name in ("--directory", "--config-file"))
    return dataclasses.replace(found, folder=folder, settings_file=file) if found else None


def _uv_alone(
    program: str,
    rest: Sequence[str],
    options: Mapping[str, list[str]],
    positional: Sequence[str],
    told: Options,
) -> Install | None:
    """What uv does in the directory that it runs in."""
    python = _last(options, "-p", "--python")
    project = _last(options, "--project")
    if positional == ["sync"]:
        return Install("uv-sync", program, python=python, project=project)
    if positional[:1] == ["venv"]:
        again = Options()
        before, after = rest[: rest.index("venv")], rest[rest.index("venv") + 1 :]
        found = _venv(program, [*before, *after], again)
        told.doubt = again.doubt
        return found
    if positional[:2] == ["pip", "install"]:
        return _install("uv", program, options, positional[2:], python)
    if positional[:2] == ["pip", "uninstall"]:
        return _removal("uv", program, options, python)
    if positional[:2] == ["pip", "sync"]:
        found = _install("uv", program, options, (), python)
        return dataclasses.replace(found, requirement_files=tuple(positional[2:]))
    asks = positional[:1] == ["pip"] and positional[1:2] and positional[1] in _QUESTIONS
    writes = not _WRITING.isdisjoint(options)
    if positional and (writes or not (asks or list(positional) in _QUESTIONS_OF_UV)):
        return Install("other", program)
    told.doubt = ""  # as of pip
    return None


def _removal(
    tool: Tool, program: str, options: Mapping[str, list[str]], python: str | None
) -> Install:
    found = _install(tool, program, options, (), python)
    return dataclasses.replace(found, removes=True)


def _mkdir(program: str, rest: Sequence[str]) -> Install:
    """The directories that a `mkdir` makes; `other` where words alone do not tell them."""
    plain = all(w in ("-p", "--parents", "-v", "--verbose", "-pv") for w in rest if w[:1] == "-")
    folders = tuple(w for w in rest if w[:1] != "-")
    if not plain or not folders or any(_UNSURE.search(w) for w in folders):
        return Install("other", program)
    return Install("mkdir", program, folders=folders)


def _install(
    tool: Tool,
    program: str,
    options: Mapping[str, list[str]],
    names: Sequence[str],
    python: str | None,
) -> Install:
    return Install(
        tool,
        program,
        python=_last(options, "--python", "-p") or python,
        target=_last(options, "-t", "--target"),
        prefix=_last(options, "--prefix"),
        root=_last(options, "--root"),
        user="--user" in options,
        system="--system" in options,
        requirement_files=tuple(f for o in _REQUIREMENT for f in options.get(o, [])),
        constraint_files=(
            *(f for o in _CONSTRAINT for f in options.get(o, [])),
            *map(group_file, options.get("--group", [])),
        ),
        requirements=tuple(names),
        editable=(*options.get("-e", []), *options.get("--editable", [])),
    )


def group_file(group: str) -> str:
    """The project file that describes a dependency group, as `--group` names it."""
    path, colon, _ = group.rpartition(":")
    named = path if colon else "pyproject.toml"
    return Opened(named) if colon and isinstance(group, Opened) else named


def _last(options: Mapping[str, list[str]], *names: str) -> str | None:
    found = [value for name in names for value in options.get(name, [])]
    return found[-1] if found else None
