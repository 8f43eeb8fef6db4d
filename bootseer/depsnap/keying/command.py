"""Read an install command's words: which tool, for which Python, into which place (pure).

Which tool writes where follows pip's documented `--target`, `--prefix`, `--root`, `--user` and
uv's `--python`, `--system`. A command that is none of pip, uv or venv is `other`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from bootseer import light_dataclasses as dataclasses

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    Tool = Literal["pip", "uv", "uv-sync", "venv", "mkdir", "other"]

_OPERATORS = frozenset({"&&", "||", ";", "|", "&", "(", ")", "{", "}"})
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_UNKNOWN = "$"  # no value that a shell assigns as it stands
_CONDITIONS = re.compile(r"\(|\|\||&&[^;\n]*\bexport\b[^;\n]*[;\n]")
"""In a script: what lets its variables be those of some of its commands alone."""
_PIP = re.compile(r"pip[0-9.]*")
_PYTHON = re.compile(r"python[0-9.]*")
# Words of a script that install nothing.
_UNSURE = re.compile(r"[$`*?\[{~]")
"""What a shell makes something else of."""
_HARMLESS = frozenset({"echo", "printf", "set", "cd", "export", "true", ":", "sleep", "umask", "["})
# Options that take a value as a word of its own, after the documents of pip and uv.
_VALUED_TEXT = """
    -r --requirement --requirements -c --constraint --constraints -t --target --prefix --root -p
    --python -i --index-url --extra-index-url --default-index --index -f --find-links
    --trusted-host --proxy --retries --timeout --cert --client-cert --cache-dir --log --platform
    --python-version --python-platform --implementation --abi --no-binary --only-binary
    --upgrade-strategy --progress-bar --report --src -e --editable -o --override --overrides -b
    --build-constraint --build-constraints --config-setting --config-settings -C --exclude-newer
    --resolution --prerelease --index-strategy --keyring-provider --link-mode
    --allow-insecure-host --project --directory --config-file -P --upgrade-package
    --refresh-package --reinstall-package --extra --group --root-user-action --use-feature
    --global-option --exists-action --color --no-build-package --no-binary-package --excludes
    --config-settings-package --exclude-newer-package --fork-strategy --no-build-isolation-package
    --no-editable-package --no-sources-package --output-format --prerelease-package --torch-backend
    --upgrade-group --use-deprecated --install-option
"""
_VALUED = frozenset(_VALUED_TEXT.split())
_VENV_VALUED_TEXT = """
    --prompt --app-data --discovery --try-first-with --creator --seeder --activators --pip
    --setuptools --wheel --extra-search-dir
"""
_VENV_VALUED = _VALUED.union(_VENV_VALUED_TEXT.split()) - {"-c"}  # `uv venv -c` is `--clear`
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


@dataclasses.dataclass(frozen=True, slots=True)
class Install:
    """One simple command as far as its destination is concerned. Paths are as written.

    `removes`: it only uninstalls. `folders` are the directories that a `mkdir` makes, `project`
    is what uv's `--project` names, `folder` where a `cd` or uv's `--directory` lets it run,
    `settings_file` what its `--config-file` names; `variables` are those that the line gives it.
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


def simple_commands(
    command: Sequence[str], given: Mapping[str, str] | None = None
) -> list[tuple[dict[str, str], list[str]]]:
    """Split `sh -c 'a && b'` into its simple commands; another command is one of itself.

    Each comes with the variables that are assigned for it, on top of those `given`.
    """
    variables, words = _assigned(command)
    variables = {**(given or {}), **variables}
    if not words:
        return []
    name = os.path.basename(words[0])
    if name in ("sh", "bash", "dash", "zsh", "ash"):
        script = _shell_script(words[1:])
        if script is not None:
            return _of_script(script, variables)
    return [(variables, words)]


def _of_script(script: str, variables: Mapping[str, str]) -> list[tuple[dict[str, str], list[str]]]:
    found = []
    values: dict[str, str] = {}
    exported = dict(variables)
    for part in _split_script(script):
        assigned, words = _assigned(part)
        if words and words[0] != "export":
            found += simple_commands(part, exported)
            continue
        named = [word.partition("=") for word in words[1:]]
        values |= assigned | {name: value for name, equals, value in named if equals}
        names = exported.keys() | {name for name, _, _ in named}
        exported |= {name: value for name, value in values.items() if name in names}
        # Whether the start exports it already, words do not tell, nor for which commands it is.
        exported |= {name: _UNKNOWN for name in assigned if name not in exported}
        if _CONDITIONS.search(script):
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


def _shell_script(arguments: Sequence[str]) -> str | None:
    for index, word in enumerate(arguments):
        if word.startswith("-") and not word.startswith("--") and "c" in word[1:]:
            return arguments[index + 1] if index + 1 < len(arguments) else None
        if not word.startswith("-"):
            return None
    return None


def _without_comments(script: str) -> str:
    """The script without comments and continued lines, as a shell reads it (POSIX, 2.2 and 2.3)."""
    import re  # scripts alone need it

    quoted = r"""'[^']*'|"(?:[^"\\]|\\.)*"|\\[^\n]"""
    word = rf"(?:{quoted}|[^\s;&|()'\"\\#])(?:{quoted}|[^\s;&|()'\"\\])*"
    skipped = r"\\\n|#[^\n]*"
    return re.sub(rf"({word})|{skipped}", lambda found: found[1] or "", script, flags=re.DOTALL)


def _split_script(script: str) -> list[list[str]]:
    import shlex  # scripts alone need it

    lines = _without_comments(script).replace("\n", " ; ")
    lexer = shlex.shlex(lines, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""  # which it sees within words, too
    parts: list[list[str]] = [[]]
    try:
        for token in lexer:
            if token in _OPERATORS:
                parts.append([])
            elif ">" in token and not token.strip("<>&|"):
                next(lexer, None)  # where the output goes
                if parts[-1][-1:] and parts[-1][-1].isdigit():
                    parts[-1].pop()  # which of them
            else:
                parts[-1].append(token)
    except ValueError:
        return []  # an unclosed quote: the shell will say so
    return [part for part in parts if part]


def plan(command: Sequence[str]) -> list[Install]:
    """Every install that a command line visibly makes, in order; never raises."""
    here: str | None = ""
    out = []
    for variables, words in simple_commands(command):
        if words[0] == "cd":
            here = _moved(here, words[1:], command)
        found = _plan_one(words)
        if found is None:
            continue
        named = {n: v for n, v in variables.items() if _is_naming(n)}
        plain = all(map(_is_plain, named.values())) and _is_plain(_searched(found, variables))
        unknown = any(map(_is_open, words)) or (found.tool not in ("venv", "mkdir") and not plain)
        if unknown or (here is None and _depends_on_place(found, named)):
            found = Install("other", found.program)
        elif here:
            found = dataclasses.replace(found, folder=os.path.join(here, found.folder))
        told = tuple((name, value) for name, value in variables.items() if _is_plain(value))
        out.append(dataclasses.replace(found, words=tuple(words), variables=told))
    return out


def _is_naming(variable: str) -> bool:
    ours = variable.startswith(("PIP_", "UV_")) and variable.upper().endswith(_NAMING)
    return ours or variable in ("VIRTUAL_ENV", "CONDA_PREFIX")


def _searched(install: Install, variables: Mapping[str, str]) -> str:
    """The PATH that decides which Python it is for; "" where its words do, or it is the start's."""
    by_word = any("/" in word for word in (install.program, install.python or ""))
    return "" if by_word else variables.get("PATH", "")


def _is_open(word: str) -> bool:
    """Whether other things decide what a word is, or what is read in its place."""
    pattern = word.endswith(".whl") and _UNSURE.search(word)
    return "`" in word or word.startswith("<") or bool(pattern)


def _is_plain(value: str) -> bool:
    """Whether a shell assigns these very characters."""
    return not value.startswith("~") and "$" not in value and "`" not in value


def _moved(here: str | None, to: Sequence[str], command: Sequence[str]) -> str | None:
    """Where a `cd` leads; None where words alone do not tell, or for how long."""
    plain = len(to) == 1 and to[0][:1] != "-" and not _UNSURE.search(to[0])
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


def _plan_one(words: Sequence[str]) -> Install | None:
    program, name = words[0], os.path.basename(words[0])
    rest = list(words[1:])
    if name in _HARMLESS:
        return None
    if _PYTHON.fullmatch(name):
        while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
            rest.pop(0)
        if rest[:2] == ["-m", "pip"]:
            return _pip(program, rest[2:], python=program)
        if rest[:1] == ["-m"] and rest[1:2] in (["venv"], ["virtualenv"]):
            return _venv(program, rest[2:])
        return Install("other", program)
    if _PIP.fullmatch(name):
        return _pip(program, rest, python=None)
    if name == "mkdir":
        return _mkdir(program, rest)
    if name == "virtualenv":
        return _venv(program, rest)
    if name == "uv":
        return _uv(program, rest)
    return Install("other", program)


def _venv(program: str, rest: Sequence[str]) -> Install | None:
    options, positional = _options(rest, _VENV_VALUED)
    where = positional[0] if positional else (".venv" if os.path.basename(program) == "uv" else "")
    if not where:
        return None
    return Install("venv", program, python=_last(options, "-p", "--python"), target=where)


def _pip(program: str, rest: Sequence[str], python: str | None) -> Install | None:
    options, positional = _options(rest, _VALUED)
    if positional[:1] == ["uninstall"]:
        return _removal("pip", program, options, python)
    if positional[:1] != ["install"]:
        return None
    return _install("pip", program, options, positional[1:], python)


def _uv(program: str, rest: Sequence[str]) -> Install | None:
    options, positional = _options(rest, _VALUED)
    found = _uv_alone(program, rest, options, positional)
    folder, file = (_last(options, name) or "" for name in ("--directory", "--config-file"))
    return dataclasses.replace(found, folder=folder, settings_file=file) if found else None


def _uv_alone(
    program: str,
    rest: Sequence[str],
    options: Mapping[str, list[str]],
    positional: Sequence[str],
) -> Install | None:
    """What uv does in the directory that it runs in."""
    python = _last(options, "-p", "--python")
    project = _last(options, "--project")
    if positional[:1] == ["sync"]:
        return Install("uv-sync", program, python=python, project=project)
    if positional[:1] == ["run"]:
        return Install("other", program)  # what it runs may write anywhere; see `uvrun`
    if positional[:1] == ["venv"]:
        return _venv(program, rest[rest.index("venv") + 1 :])
    if positional[:2] == ["pip", "install"]:
        return _install("uv", program, options, positional[2:], python)
    if positional[:2] == ["pip", "uninstall"]:
        return _removal("uv", program, options, python)
    if positional[:2] == ["pip", "sync"]:
        found = _install("uv", program, options, (), python)
        return dataclasses.replace(found, requirement_files=tuple(positional[2:]))
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
        constraint_files=tuple(f for o in _CONSTRAINT for f in options.get(o, [])),
        requirements=tuple(names),
        editable=(*options.get("-e", []), *options.get("--editable", [])),
    )


def _options(
    words: Sequence[str], valued: frozenset[str]
) -> tuple[dict[str, list[str]], list[str]]:
    """Split words into options (with their values) and positional words."""
    options: dict[str, list[str]] = {}
    positional: list[str] = []
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if word == "--":
            positional += words[index:]
            break
        if not word.startswith("-") or word == "-":
            positional.append(word)
            continue
        name, equals, value = word.partition("=")
        if not equals and not word.startswith("--") and len(word) > 2 and word[:2] in valued:
            name, equals, value = word[:2], "=", word[2:]
        values = options.setdefault(name, [])
        if equals:
            values.append(value)
        elif name in valued and index < len(words):
            values.append(words[index])
            index += 1
    return options, positional


def _last(options: Mapping[str, list[str]], *names: str) -> str | None:
    found = [value for name in names for value in options.get(name, [])]
    return found[-1] if found else None
