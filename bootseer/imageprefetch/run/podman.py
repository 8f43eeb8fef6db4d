"""Podman's command lines for a mounted image's tree.

What the container writes goes to an overlay that podman throws away.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from bootseer.errors import UsageError, from_os_error
from bootseer.imageprefetch.run import podman_options
from bootseer.imageprefetch.run.command import EVENTS_INSIDE, Command, await_end, signals_passed_on
from bootseer.system.mount_calls import IN_ROOT, open_in

if TYPE_CHECKING:
    from bootseer.storage.oci.config import ImageConfig

_NO_COMMAND = "the image names no command to run; give one after --"
# Variables that would change podman itself if they were in its environment; none is a secret.
_HEEDED_BY_PODMAN = (
    r"PATH|HOME|USER|TMPDIR|TERM|LANG|TZ|(LC|LD|XDG|DBUS|_?CONTAINERS|PODMAN)_.*"
    r"|CONTAINER_(HOST|CONNECTION|SSHKEY)|DOCKER_(HOST|CONFIG)|STORAGE_(DRIVER|OPTS)"
    r"|REGISTRY_AUTH_FILE|NOTIFY_SOCKET|LISTEN_(FDS|PID|FDNAMES)|GO(DEBUG|GC|MAXPROCS|MEMLIMIT)"
)


def recording_words(command: Command, name: str) -> list[str]:
    """The command line that runs a command to be recorded.

    Other users of the machine can read it, so it has only the names of the variables that the
    user gave: podman takes their values from its own environment (`environment_variables`).
    """
    words = ["podman", "run", "--rm", "--name", name, "--log-driver", "none"]
    if not podman_options.names_network(command.options):
        words += ["--network", "host"]
    hidden = environment_variables(command)
    of_image = podman_options.container_variables(command.config.env, command.options)
    for variable, value in command.variables(of_image).items():
        words += ["--env", variable if variable in hidden else f"{variable}={value}"]
    words += _options_of_image(command.tree, command.config, command.options)
    if command.events_dir:
        words += ["--volume", f"{command.events_dir}:{EVENTS_INSIDE}"]
    if sys.stdin is not None and sys.stdin.isatty():
        words += ["--interactive", "--tty"]
    return [*words, *command.options, "--rootfs", f"{command.tree}:O", *command.words]


def environment_variables(command: Command) -> dict[str, str]:
    """The user's variables for podman's own environment, without those that change podman."""
    given = command.environment.items()
    return {name: value for name, value in given if not re.fullmatch(_HEEDED_BY_PODMAN, name)}


def container_words(
    tree: str,
    config: ImageConfig,
    options: Sequence[str],
    words: Sequence[str],
    *,
    before: str = "",
    root: str = "",
) -> list[str]:
    """The command line that runs an image's tree as `podman run` would run the image.

    `options` are podman's own; `words`, if there are any, replace the image's command. `before` is
    a line of a shell that runs in the container first, `root` a directory that is its root ("": the
    tree, below a layer that is thrown away). Raises UsageError where nothing names a program.
    """
    line = ["podman", "run", "--rm"]
    for pair in podman_options.container_variables(config.env, options):
        line += ["--env", pair]
    line += _options_of_image(tree, config, options)
    # With --rootfs podman knows no entry point of the image that one of the options could replace.
    has_entrypoint = podman_options.entrypoint(options) is not None
    program = list(words) if has_entrypoint else [*config.entrypoint, *(words or config.cmd)]
    if before:
        program = words_after(before, program_of(config.entrypoint, config.cmd, options, words))
        options = podman_options.without_entrypoint(options)
    elif not program and not has_entrypoint:
        raise UsageError(_NO_COMMAND)
    return [*line, *options, "--rootfs", root or f"{tree}:O", *program]


def program_of(
    entrypoint: Sequence[str], cmd: Sequence[str], options: Sequence[str], words: Sequence[str]
) -> list[str]:
    """The program of a container with its arguments, as podman puts it together.

    Raises UsageError where nothing names one.
    """
    given = podman_options.entrypoint(options)
    program = [*entrypoint, *(words or cmd)]
    if given is not None:  # the image's command is not an argument of another entry point
        program = [*_parse_entrypoint(given), *words]
    if not program:
        raise UsageError(_NO_COMMAND)
    return program


def _parse_entrypoint(text: str) -> list[str]:
    """The words of an --entrypoint: a JSON array, or one program (podman-run(1))."""
    import json

    try:
        words = json.loads(text)
    except ValueError:
        words = None
    if isinstance(words, list) and all(isinstance(word, str) for word in words):
        return words
    return [text] if text else []


def words_after(before: str, program: Sequence[str]) -> list[str]:
    """A command that runs a line of a shell and, if that succeeds, becomes the program."""
    return ["/bin/sh", "-c", f'{before} && exec "$@"', "sh", *program]


def _options_of_image(tree: str, config: ImageConfig, options: Sequence[str]) -> list[str]:
    """Podman's options for an image's working directory, user and stop signal."""
    words = _workdir(tree, config.working_dir, options)
    if config.user:
        words += ["--user", config.user]
    if config.stop_signal:
        words += ["--stop-signal", config.stop_signal]
    return words


def _workdir(tree: str, directory: str, options: Sequence[str]) -> list[str]:
    """Podman's options for the image's working directory, which is created if no layer has it.

    Podman creates the working directory of its own images, but never below --rootfs. An unnamed
    volume comes nearest: it is created, belongs to the user, and is removed with the container.
    """
    if not directory:
        return []
    words = ["--workdir", directory]
    if lacks_working_directory(tree, directory, options):
        words += ["--volume", directory]
    return words


def lacks_working_directory(tree: str, directory: str, options: Sequence[str]) -> bool:
    """Whether a container's working directory is to be created with it."""
    is_named = bool(directory) and not podman_options.places_anything_at(directory, options)
    return is_named and _is_missing(tree, directory)


def _is_missing(tree: str, path: str) -> bool:
    """Whether nothing is at a path of the tree, with links resolved as in the container."""
    try:
        root = os.open(tree, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.close(open_in(root, os.fsencode(path), os.O_PATH | os.O_CLOEXEC, IN_ROOT))
    except OSError as error:
        return error.errno == errno.ENOENT
    finally:
        os.close(root)
    return False


def run(command: Command, until: Callable[[], bool] | None) -> int:
    """Run a command to its end, or until `until`; returns as `await_end`."""
    import subprocess

    name = f"bootseer-{os.urandom(6).hex()}"

    def kill() -> None:
        # Killing podman itself would leave the container behind, and the tree in use.
        quiet = subprocess.DEVNULL
        subprocess.run(["podman", "kill", name], stdout=quiet, stderr=quiet, check=False)

    words = recording_words(command, name)
    environ = {**os.environ, **environment_variables(command)}
    with signals_passed_on() as pass_on_to:
        try:
            process = subprocess.Popen(words, env=environ)
        except OSError as error:
            raise from_os_error(error, "run podman") from error
        pass_on_to(process.pid)
        return await_end(process.pid, until, kill)
