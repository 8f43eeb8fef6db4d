"""The install that is part of `uv run`: the `uv sync` of the same project.

`uv run COMMAND` first updates the project's environment and then runs a program that may take days
and write anything. Only the first is an install.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from bootseer.depsnap.key.input_files import find_upwards, read_text
from bootseer.depsnap.key.install_command import plan
from bootseer.depsnap.key.install_roots import folder_of, project_folder
from bootseer.errors import BootseerError

_OF_RUN = frozenset({"-m", "--module", "--no-env-file"})
_OF_RUN_VALUED = frozenset({"-w", "--with", "--with-editable", "--with-requirements", "--env-file"})
_SHARED = frozenset(
    (
        *("-q", "--quiet", "-v", "--verbose", "--all-extras", "--no-dev", "--only-dev", "--dev"),
        *("--no-default-groups", "--all-groups", "--no-editable", "--locked", "--frozen"),
        *("--all-packages", "--no-index", "--no-sources", "--compile-bytecode", "--no-build"),
        *("--no-build-isolation", "--no-binary", "-n", "--no-cache", "--managed-python"),
        *("--no-managed-python", "--no-python-downloads", "--system-certs", "--native-tls"),
        *("--offline", "--no-progress", "--no-config", "--exact"),
    )
)
_SHARED_VALUED = frozenset(
    (
        *("--extra", "--no-extra", "--group", "--no-group", "--only-group", "--package"),
        *("--no-editable-package", "--python-platform", "--index", "--default-index", "-i"),
        *("--index-url", "--extra-index-url", "-f", "--find-links", "--index-strategy"),
        *("--keyring-provider", "--resolution", "--prerelease", "--prerelease-package"),
        *("--fork-strategy", "--exclude-newer", "--exclude-newer-package", "--link-mode", "-C"),
        *("--no-sources-package", "--config-setting", "--config-settings-package"),
        *("--no-build-isolation-package", "--no-build-package", "--no-binary-package"),
        *("--cache-dir", "-p", "--python", "--color", "--allow-insecure-host", "--directory"),
        *("--project", "--config-file"),
    )
)
_BEFORE = frozenset(
    (
        *("-q", "--quiet", "-v", "--verbose", "-n", "--no-cache", "--managed-python", "--offline"),
        *("--no-managed-python", "--no-python-downloads", "--system-certs", "--native-tls"),
        *("--no-progress", "--no-config", "--cache-dir", "--color", "--allow-insecure-host"),
        *("--directory", "--project", "--config-file"),
    )
)
"""Options that may precede the command's name."""
_OTHERWISE = (
    *("UV_NO_SYNC", "UV_NO_PROJECT", "UV_ISOLATED", "UV_WORKING_DIR", "UV_WORKING_DIRECTORY"),
)
"""Variables by which `uv run` does not begin with a plain `uv sync`."""
_UNMANAGED = r"(?m)^\s*managed\s*=\s*false"
_SCRIPT_BYTES = 1 << 20


def sync_of(command: Sequence[str], environ: Mapping[str, str], cwd: str) -> list[str] | None:
    """The words of the `uv sync` that a `uv run` begins with.

    None for any other command, and where words and variables do not show for certain that it runs
    in the project's environment.
    """
    if not command or os.path.basename(command[0]) != "uv" or any(map(environ.get, _OTHERWISE)):
        return None
    before, verb = _options(command[1:])
    if before is None or verb[:1] != ["run"]:
        return None
    if any(word[:1] == "-" and word.partition("=")[0] not in _BEFORE for word in before):
        return None
    own, rest = _options(verb[1:])
    if own is None or not rest:
        return None
    kept = [word for word in own if word != "--exact"]
    words = [command[0], *before, "sync", *kept]
    if len(kept) == len(own):
        words.append("--inexact")  # `uv run` removes no packages, `uv sync` does
    installs = plan(words)
    if [install.tool for install in installs] != ["uv-sync"]:
        return None
    here = folder_of(installs[0], cwd)
    folder = project_folder(installs[0], environ, here)
    project = find_upwards(folder, "pyproject.toml")
    if project is None or _is_unmanaged(project) or _is_script(rest[0], here):
        return None
    return words


def _options(words: Sequence[str]) -> tuple[list[str] | None, Sequence[str]]:
    """The leading options that `uv sync` has too, those of `uv run` left out, and what follows.

    No options where one belongs to neither.
    """
    kept: list[str] = []
    index = 0
    while index < len(words) and words[index].startswith("-"):
        word = words[index]
        if word in ("--", "-"):
            break
        name, equals, _ = word.partition("=")
        if not word.startswith("--") and word[:2] in _SHARED_VALUED and len(word) > 2:
            name, equals = word[:2], "="
        valued = name in _SHARED_VALUED | _OF_RUN_VALUED
        if not valued and (equals or name not in _SHARED | _OF_RUN):
            return None, ()
        length = 2 if valued and not equals else 1
        if name in _SHARED | _SHARED_VALUED:
            kept += words[index : index + length]
        index += length
    rest = words[index:]
    return kept, rest[1:] if rest[:1] == ["--"] else rest


def _is_unmanaged(project: str) -> bool:
    """Whether uv does not manage a project's environment, or that cannot be read."""
    try:
        return bool(re.search(_UNMANAGED, read_text(os.path.join(project, "pyproject.toml"))))
    except BootseerError:
        return True


def _is_script(word: str, here: str) -> bool:
    """Whether uv runs this in an environment that the file itself describes."""
    if word == "-" or "://" in word:
        return True
    path = os.path.join(here, word)
    if not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as file:
            return b"# /// script" in file.read(_SCRIPT_BYTES)
    except OSError:
        return True
