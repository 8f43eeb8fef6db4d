"""Read the words of an install command: which tool, for which Python, into which place (pure).

Which tool writes where follows pip's documented `--target`, `--prefix`, `--root`, `--user` and
uv's `--python`, `--system`. A command that is none of pip, uv or venv is `other`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from bootseer import light_dataclasses as dataclasses
from bootseer.depsnap.key.shell_script import UNREAD, Expanded, SimpleCommand, simple_commands
from bootseer.depsnap.key.tool_options import SYNC_VALUED, VALUED, VENV_VALUED, OptionParser
from bootseer.depsnap.key.variables import decides_result
from bootseer.errors import UsageError
from bootseer.events.redaction import is_secret_variable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    Tool = Literal["pip", "uv", "uv-sync", "venv", "mkdir", "other"]

_PIP = re.compile(r"pip[0-9.]*")
_PYTHON = re.compile(r"python[0-9.]*")
_EXPANSION = re.compile(r"[$`*?\[{~]")
"""What a shell expands."""
_VARIABLE = r"\$(?:(?=\w)|\{(?=\w+\}))([A-Za-z_]\w*)\}?"
"""A variable in a word."""
_HARMLESS = frozenset({"echo", "printf", "set", "export", "true", ":", "sleep", "umask", "pwd"})
"""Commands that change nothing for others, and whose failure depends on no machine."""
_NEVER_FAILING = frozenset({"echo", "set", "export", "true", ":"})
"""Those among them that fail for no argument."""
_LEADING = frozenset({"cd", "exit"})
"""Commands that change nothing else, as long as a script ends where they fail."""
_FILTERS = frozenset({"tee", "cat", "head", "tail", "ts"})
"""Commands that may read the output of an install."""
_QUESTIONS = frozenset(
    (
        *("list", "freeze", "show", "check", "debug", "inspect", "index", "help", "hash", "tree"),
        "cache",
    )
)
"""Commands of pip and `uv pip` that install nothing and write nothing that an install reads."""
_WRITING = frozenset({"--log", "--report", "-o", "--output-file", "--output"})
"""Their options that do write a file."""
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
_NAMING_OTHERS = frozenset(
    (
        *("VIRTUAL_ENV", "CONDA_PREFIX", "HOME", "XDG_CONFIG_HOME", "XDG_CONFIG_DIRS"),
        *("PYTHONUSERBASE", "PYTHONPATH"),
    )
)


@dataclasses.dataclass(frozen=True, slots=True)
class Install:
    """What one simple command installs, and where. Paths are as written.

    `removes`: it only uninstalls. `folders` are the directories that a `mkdir` makes, `project`
    is what uv's `--project` names, `folder` where a `cd` or uv's `--directory` makes it run,
    `settings_file` what its `--config-file` names; `variables` are those that the line assigns.
    `doubt` says why the line may do something else than what is read from it.
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


def plan(command: Sequence[str]) -> list[Install]:
    """Every install that a command line is seen to make, in order; never raises."""
    here: str | None = ""
    out: list[Install] = []
    doubts: list[str] = []
    before: Install | None = None
    for simple in simple_commands(command):
        words, variables = simple.words, simple.variables
        if words[0] == "cd":
            here = _folder_after_cd(here, words[1:], command)
        parser = OptionParser()
        install = _read_install(words, parser)
        doubts += filter(None, (_doubt(simple, install, before), parser.doubt))
        before = install
        if install is None:
            continue
        naming = {n: v for n, v in variables.items() if _names_files(n)}
        plain = all(map(_is_literal, naming.values()))
        plain = plain and _is_literal(_search_path(install, variables))
        unknown = install.tool not in ("venv", "mkdir") and not plain
        unknown = unknown or _depends_on_expansion(install, words, variables)
        if unknown or (here is None and _depends_on_folder(install, naming)):
            install = Install("other", install.program)
        elif here:
            install = dataclasses.replace(install, folder=os.path.join(here, install.folder))
        known = tuple((name, value) for name, value in variables.items() if _is_literal(value))
        out.append(dataclasses.replace(install, words=tuple(words), variables=known))
    if not doubts:
        return out
    out = out or [Install("other", command[0])]
    return [dataclasses.replace(install, doubt=doubts[0]) for install in out]


def _doubt(simple: SimpleCommand, install: Install | None, before: Install | None) -> str:
    """Why a command of a line may do something else than what is read from it; "" if it cannot.

    `before` is the install just before it, whose output it may read.
    """
    part, program = simple.part, simple.words[0]
    if not simple.plain:
        return UNREAD
    if part.reads:
        return f"{program} reads a file in place of its input"
    installs = install is not None and install.tool not in ("other", "mkdir")
    if part.writes and not installs:
        return f"{program} writes a file"
    words = simple.words[1:]
    if program in _HARMLESS:
        fixed = program in _NEVER_FAILING or not any(isinstance(word, Expanded) for word in words)
        fixed &= program != "printf" or words[:1] != ["-v"]
        return "" if fixed else f"what {program} does is not read from the script"
    if program == "cd" and "CDPATH" in simple.variables:
        return "CDPATH says where a script goes"
    if program in _FILTERS:
        plain = program == "tee" or all(word[:1] == "-" or word.isdigit() for word in words)
        follows = part.piped and before is not None and plain
        return "" if follows else f"what {program} tells or writes is not read from the script"
    if install is not None and (part.piped or "-" in install.requirement_files):
        return f"{program} reads what another command writes"
    if not part.failure_shows:
        return (
            f"where {program} fails, the script goes on; begin it with `set -e`, or put `&&` "
            "between its commands"
        )
    return ""


def _names_files(variable: str) -> bool:
    """Whether a variable names what an install reads, or where it writes."""
    of_tool = variable.startswith(("PIP_", "UV_")) and variable.upper().endswith(_NAMING)
    return of_tool or variable in _NAMING_OTHERS


def _search_path(install: Install, variables: Mapping[str, str]) -> str:
    """The PATH that decides which Python it is for; "" where its words do, or it is the start's."""
    by_word = any("/" in word for word in (install.program, install.python or ""))
    return "" if by_word else variables.get("PATH", "")


def _depends_on_expansion(
    install: Install, words: Sequence[str], variables: Mapping[str, str]
) -> bool:
    """Whether its shell decides by what it is run, what it reads, or where it writes."""
    named = [install.program, install.python, install.target, install.prefix, install.root]
    named += [install.project, install.folder, install.settings_file, *install.folders]
    named += [*install.editable, *install.requirement_files, *install.constraint_files]
    if any(isinstance(word, Expanded) for word in named):
        return True
    expanded = [word for word in words if isinstance(word, Expanded)]
    if any(_EXPANSION.search(re.sub(_VARIABLE, "", word)) for word in expanded):
        return True
    names = [name for word in expanded for name in re.findall(_VARIABLE, word)]
    if not all(_is_literal(variables.get(name, "")) for name in names):
        return True
    return any(not _is_literal(v) for name, v in variables.items() if decides_result(name))


def expand_requirements(install: Install, environ: Mapping[str, str]) -> list[str]:
    """The requirements of a command line with the variables that it runs with filled in.

    Raises UsageError where they become options or paths.
    """
    out: list[str] = []
    for word in install.requirements:
        if not isinstance(word, Expanded):
            out.append(word)
            continue
        if any(map(is_secret_variable, re.findall(_VARIABLE, word))):
            raise UsageError(
                f"a variable in {word} is named like a credential, which no key may hold; "
                "name the install's directories with --also"
            )
        words = re.sub(_VARIABLE, lambda match: environ.get(match[1], ""), word).split()
        if any(w[:1] in "-.~" or re.search(r"[/$`*?\\{]|\.(?:whl|zip|t?gz)$", w) for w in words):
            raise UsageError(
                f"what the variables in {word} name is read by the command alone; "
                "name its directories with --also"
            )
        out += words
    return out


def _is_literal(value: str) -> bool:
    """Whether a shell assigns exactly these characters."""
    return not value.startswith("~") and "$" not in value and "`" not in value


def _folder_after_cd(here: str | None, to: Sequence[str], command: Sequence[str]) -> str | None:
    """Where a `cd` leads; None where the words do not show that, or for which commands."""
    plain = len(to) == 1 and to[0][:1] != "-" and not _EXPANSION.search(to[0])
    plain = plain and ".." not in to[0].split("/")  # it may go up by name, or by links
    if here is None or not plain or any("(" in word for word in command):
        return None
    return os.path.join(here, to[0])


def _depends_on_folder(install: Install, variables: Mapping[str, str]) -> bool:
    """Whether it does something else in another directory, by its words and variables."""
    named = [*install.requirement_files, *install.constraint_files, *install.folders]
    named += [word for value in variables.values() for word in value.split()]
    named += [p for p in (install.target, install.prefix, install.root, install.project) if p]
    named += [install.settings_file] if install.settings_file else []
    named += [p for p in (install.python, install.program, *install.requirements) if p and "/" in p]
    named += [p for p in install.requirements if p[:1] == "." or p.endswith(".whl")]
    named += install.editable
    if any(not os.path.isabs(p) and "://" not in p and p != "-" for p in named):
        return True
    if install.tool == "uv-sync":
        return install.project is None
    return install.tool == "uv" and install.python is None and not install.system


def _read_install(words: Sequence[str], parser: OptionParser) -> Install | None:
    """What a simple command installs; None where it installs nothing."""
    program, name = words[0], os.path.basename(words[0])
    rest = list(words[1:])
    if isinstance(program, Expanded):
        return Install("other", program)
    if program in _HARMLESS or program in _LEADING or program in _FILTERS:
        return None
    if _PYTHON.fullmatch(name):
        while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
            valued = rest.pop(0) in ("-W", "-X")
            rest = rest[1:] if valued else rest
        if rest[:2] == ["-m", "pip"]:
            return _read_pip(program, rest[2:], parser, python=program)
        if rest[:1] == ["-m"] and rest[1:2] in (["venv"], ["virtualenv"]):
            return _read_venv(program, rest[2:], parser)
        return Install("other", program)
    if _PIP.fullmatch(name):
        return _read_pip(program, rest, parser, python=None)
    if name == "mkdir":
        return _read_mkdir(program, rest)
    if name == "virtualenv":
        return _read_venv(program, rest, parser)
    if name == "uv":
        return _read_uv(program, rest, parser)
    return Install("other", program)


def _read_venv(program: str, rest: Sequence[str], parser: OptionParser) -> Install | None:
    options, positional = parser.parse(rest, VENV_VALUED)
    where = positional[0] if positional else (".venv" if os.path.basename(program) == "uv" else "")
    if not where:
        return None
    if len(positional) > 1:
        return Install("other", program)
    return Install("venv", program, python=_last(options, "-p", "--python"), target=where)


def _read_pip(
    program: str, rest: Sequence[str], parser: OptionParser, *, python: str | None
) -> Install | None:
    options, positional = parser.parse(rest, VALUED)
    if positional[:1] == ["uninstall"]:
        return _removal("pip", program, options, python)
    if positional[:1] == ["install"]:
        return _install("pip", program, options, positional[1:], python)
    if positional and (positional[0] not in _QUESTIONS or not _WRITING.isdisjoint(options)):
        return Install("other", program)
    parser.doubt = ""  # it only asks, whatever its options are
    return None


def _read_uv(program: str, rest: Sequence[str], parser: OptionParser) -> Install | None:
    syncs = "sync" in rest and "pip" not in rest
    options, positional = parser.parse(rest, SYNC_VALUED if syncs else VALUED)
    install = _read_uv_command(program, rest, options, positional, parser)
    folder, file = (_last(options, name) or "" for name in ("--directory", "--config-file"))
    return dataclasses.replace(install, folder=folder, settings_file=file) if install else None


def _read_uv_command(
    program: str,
    rest: Sequence[str],
    options: Mapping[str, list[str]],
    positional: Sequence[str],
    parser: OptionParser,
) -> Install | None:
    """What uv installs from the directory that it runs in."""
    python = _last(options, "-p", "--python")
    project = _last(options, "--project")
    if positional == ["sync"]:
        return Install("uv-sync", program, python=python, project=project)
    if positional[:1] == ["venv"]:
        of_venv = OptionParser()
        before, after = rest[: rest.index("venv")], rest[rest.index("venv") + 1 :]
        install = _read_venv(program, [*before, *after], of_venv)
        parser.doubt = of_venv.doubt
        return install
    if positional[:2] == ["pip", "install"]:
        return _install("uv", program, options, positional[2:], python)
    if positional[:2] == ["pip", "uninstall"]:
        return _removal("uv", program, options, python)
    if positional[:2] == ["pip", "sync"]:
        install = _install("uv", program, options, (), python)
        return dataclasses.replace(install, requirement_files=tuple(positional[2:]))
    asks = positional[:1] == ["pip"] and positional[1:2] and positional[1] in _QUESTIONS
    writes = not _WRITING.isdisjoint(options)
    if positional and (writes or not (asks or list(positional) in _QUESTIONS_OF_UV)):
        return Install("other", program)
    parser.doubt = ""  # as for pip
    return None


def _removal(
    tool: Tool, program: str, options: Mapping[str, list[str]], python: str | None
) -> Install:
    install = _install(tool, program, options, (), python)
    return dataclasses.replace(install, removes=True)


def _read_mkdir(program: str, rest: Sequence[str]) -> Install:
    """The directories that a `mkdir` makes; `other` where its words do not show them."""
    plain = all(w in ("-p", "--parents", "-v", "--verbose", "-pv") for w in rest if w[:1] == "-")
    folders = tuple(w for w in rest if w[:1] != "-")
    if not plain or not folders or any(_EXPANSION.search(w) for w in folders):
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
            *map(_group_file, options.get("--group", [])),
        ),
        requirements=tuple(names),
        editable=(*options.get("-e", []), *options.get("--editable", [])),
    )


def _group_file(group: str) -> str:
    """The project file that describes a dependency group, as `--group` names it."""
    path, colon, _ = group.rpartition(":")
    named = path if colon else "pyproject.toml"
    return Expanded(named) if colon and isinstance(group, Expanded) else named


def _last(options: Mapping[str, list[str]], *names: str) -> str | None:
    values = [value for name in names for value in options.get(name, [])]
    return values[-1] if values else None
