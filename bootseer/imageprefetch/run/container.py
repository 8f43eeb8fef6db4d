"""Running a command on a mounted image's tree: by podman, or in a chroot of our own.

Both ways the tree stays as it is: what the command writes goes to an overlay that is thrown away.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from bootseer import light_dataclasses as dataclasses
from bootseer.errors import (
    CorruptDataError,
    NotFoundError,
    NotSupportedError,
    UsageError,
    from_os_error,
)
from bootseer.imageprefetch.run.podman_options import (
    EVENTS_INSIDE,
    container_variables,
    names_network,
    places_anything_at,
)
from bootseer.system.fork import end_with_parent
from bootseer.system.libc import last_error, libc
from bootseer.system.mount_calls import (
    IN_ROOT,
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_REC,
    mount,
    open_in,
)

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
GRACE_S = 10.0
_POLL_S = 0.05
_CLONE_NEWNS, _CLONE_NEWPID = 0x00020000, 0x20000000
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# What would change podman itself, were it in its environment; none of it is a secret.
_PODMANS_OWN = re.compile(
    r"PATH|HOME|USER|TMPDIR|TERM|LANG|TZ|(LC|LD|XDG|DBUS|_?CONTAINERS|PODMAN)_.*"
    r"|CONTAINER_(HOST|CONNECTION|SSHKEY)|DOCKER_(HOST|CONFIG)|STORAGE_(DRIVER|OPTS)"
    r"|REGISTRY_AUTH_FILE|NOTIFY_SOCKET|LISTEN_(FDS|PID|FDNAMES)|GO(DEBUG|GC|MAXPROCS|MEMLIMIT)"
)


@dataclasses.dataclass(frozen=True, slots=True)
class ImageConfig:
    """What an image says of how its programs are run."""

    env: tuple[str, ...] = ()
    working_dir: str = ""
    user: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    stop_signal: str = ""


def parse_config(raw: bytes) -> ImageConfig:
    """Read an image's config. Raises CorruptDataError when it is none."""
    try:
        told = json.loads(raw).get("config") or {}
        lists = [told.get(name) or [] for name in ("Env", "Entrypoint", "Cmd")]
        texts = [told.get(name) or "" for name in ("WorkingDir", "User", "StopSignal")]
        if not all(isinstance(word, str) for word in itertools.chain(*lists, texts)):
            raise TypeError("a value that is no text")
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise CorruptDataError(f"the image's config is damaged: {error}") from error
    env, entrypoint, cmd = map(tuple, lists)
    return ImageConfig(env, texts[0], texts[1], entrypoint, cmd, texts[2])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command to be run on the tree at `tree`; `events_dir` is shown to it for its events.

    `options` are podman's own, for a command that runs by podman.
    """

    tree: str
    words: Sequence[str]
    config: ImageConfig = ImageConfig()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    events_dir: str = ""
    options: Sequence[str] = ()

    def variables(self, of_image: Sequence[str] | None = None) -> dict[str, str]:
        """The image's own, then ours, then those asked for.

        Podman has a PATH of its own, and is given `of_image` in place of the image's.
        """
        pairs = [f"PATH={DEFAULT_PATH}", *self.config.env] if of_image is None else of_image
        own = dict(pair.partition("=")[::2] for pair in pairs)
        events = {"BOOTSEER_EVENTS": EVENTS_INSIDE} if self.events_dir else {}
        return {**own, **events, **self.environment}


def choose_runner(wanted: str = "auto") -> str:
    """`podman` or `chroot`; raises NotSupportedError when neither can be."""
    if wanted != "chroot" and shutil.which("podman"):
        return "podman"
    if wanted == "podman":
        raise NotSupportedError("podman is not installed; install it, or use --with chroot")
    if os.geteuid() != 0:
        raise NotSupportedError("a chroot needs root; run as root, or install podman")
    return "chroot"


def podman_words(command: Command, name: str) -> list[str]:
    """What runs the command by podman under a throw-away overlay.

    Other users of the machine can read a command line, so of the variables that were asked for
    it has the names alone: podman takes the values from its own environment, `podman_variables`.
    """
    words = ["podman", "run", "--rm", "--name", name, "--log-driver", "none"]
    if not names_network(command.options):
        words += ["--network", "host"]
    hidden = podman_variables(command)
    of_image = container_variables(command.config.env, command.options)
    for variable, value in command.variables(of_image).items():
        words += ["--env", variable if variable in hidden else f"{variable}={value}"]
    words += _as_the_image_says(command.tree, command.config, command.options)
    if command.events_dir:
        words += ["--volume", f"{command.events_dir}:{EVENTS_INSIDE}"]
    if sys.stdin is not None and sys.stdin.isatty():
        words += ["--interactive", "--tty"]
    return [*words, *command.options, "--rootfs", f"{command.tree}:O", *command.words]


def podman_variables(command: Command) -> dict[str, str]:
    """Variables for podman's environment: those that were asked for, unless podman heeds them."""
    given = command.environment.items()
    return {name: value for name, value in given if not _PODMANS_OWN.fullmatch(name)}


def container_words(
    tree: str, config: ImageConfig, options: Sequence[str], words: Sequence[str]
) -> list[str]:
    """`podman run` of an image's tree, to be run as the image itself would be.

    `options` are podman's own; `words` take the place of the image's own command, if there are
    any. Raises UsageError where neither names a program.
    """
    made = ["podman", "run", "--rm"]
    for pair in container_variables(config.env, options):
        made += ["--env", pair]
    made += _as_the_image_says(tree, config, options)
    # Podman knows no image here; an entry point of its own takes the place of the image's.
    own = any(word.partition("=")[0] == "--entrypoint" for word in options)
    run = list(words) if own else [*config.entrypoint, *(words or config.cmd)]
    if not run and not own:
        raise UsageError("the image names no command to run; give one after --")
    return [*made, *options, "--rootfs", f"{tree}:O", *run]


def _as_the_image_says(tree: str, config: ImageConfig, options: Sequence[str]) -> list[str]:
    """Podman's options for an image's directory, user and signal to stop by."""
    words = _workdir(tree, config.working_dir, options)
    if config.user:
        words += ["--user", config.user]
    if config.stop_signal:
        words += ["--stop-signal", config.stop_signal]
    return words


def _workdir(tree: str, directory: str, options: Sequence[str]) -> list[str]:
    """Podman's options for the image's working directory; makes it where no layer has it.

    Podman creates the working directory of its own images only, never below --rootfs. A volume
    without a name is its nearest means: created, the user's own, and removed with the container.
    """
    if not directory:
        return []
    words = ["--workdir", directory]
    if _is_missing(tree, directory) and not places_anything_at(directory, options):
        words += ["--volume", directory]
    return words


def _is_missing(tree: str, path: str) -> bool:
    """Whether nothing is at a path of the tree, whose links lead where the container finds them."""
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


def run_foreground(words: Sequence[str], asked: Callable[[], None] = lambda: None) -> int:
    """Run a program to its end, with our terminal and streams; returns as `run` does.

    `asked` is called, any number of times, when it is asked to end (SIGTERM).
    """
    try:
        process = subprocess.Popen(list(words))
    except OSError as error:
        raise from_os_error(error, f"run {words[0]}") from error
    return _await(process.pid, None, lambda: None, asked)


def run(command: Command, runner: str, until: Callable[[], bool] | None = None) -> int:
    """Run to the end; returns the exit code as a shell has it.

    Once `until` says True, the command is asked to end, and killed when it does not. The terminal
    and its signals are the command's. Raises NotFoundError when it cannot be started.
    """
    if runner == "podman":
        return _by_podman(command, until)
    import tempfile

    with tempfile.TemporaryDirectory(prefix="bootseer-root-") as work:
        pid = _in_chroot(command, work)
        return _await(pid, until, lambda: os.kill(pid, signal.SIGKILL))


def _by_podman(command: Command, until: Callable[[], bool] | None) -> int:
    name = f"bootseer-{os.urandom(6).hex()}"

    def kill() -> None:
        # Killing podman itself would leave the container behind, on a tree that is in use then.
        quiet = subprocess.DEVNULL
        subprocess.run(["podman", "kill", name], stdout=quiet, stderr=quiet, check=False)

    try:
        process = subprocess.Popen(
            podman_words(command, name), env={**os.environ, **podman_variables(command)}
        )
    except OSError as error:
        raise from_os_error(error, "run podman") from error
    return _await(process.pid, until, kill)


def _await(
    pid: int,
    until: Callable[[], bool] | None,
    kill: Callable[[], None],
    asked: Callable[[], None] = lambda: None,
) -> int:
    asked_s = 0.0

    def pass_on(got: int, _: object) -> None:
        os.kill(pid, got)
        if got == signal.SIGTERM:
            asked()

    old = {
        number: signal.signal(number, pass_on)
        for number in _PASSED_ON
        if signal.getsignal(number) is not signal.SIG_IGN  # nohup's wish is for the command too
    }
    try:
        while True:
            found, status = os.waitpid(pid, os.WNOHANG if until is not None else 0)
            if found:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
            if until is not None and not asked_s and until():
                os.kill(pid, signal.SIGTERM)
                asked_s = time.monotonic()
            if asked_s and time.monotonic() - asked_s > GRACE_S:
                kill()
            time.sleep(_POLL_S)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


# --- the chroot ---------------------------------------------------------------------------------


def _in_chroot(command: Command, work: str) -> int:
    """Start the command in namespaces of its own; returns the process to be waited for.

    That process ends with the command and by its code; killing it kills the command and all that
    it started. Call it in a process that has one thread.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        for number in _PASSED_ON:
            if callable(signal.getsignal(number)):  # what our caller would do with it
                signal.signal(number, signal.SIG_DFL)
        _outer(command, work)
    except BaseException as error:  # a border: this process must end here
        _say_and_exit(error)


def _say_and_exit(error: BaseException) -> NoReturn:
    code = 127 if isinstance(error, (NotFoundError, FileNotFoundError)) else 126
    os.write(2, f"bootseer: cannot run the command: {error}\n".encode(errors="replace"))
    os._exit(code)


def _outer(command: Command, work: str) -> NoReturn:
    """Make the namespaces, and pass on signals and exit code of the process within."""
    end_with_parent(signal.SIGKILL)
    if libc().unshare(_CLONE_NEWNS | _CLONE_NEWPID):
        raise OSError(last_error().errno, "no namespaces of our own")
    inner = os.fork()
    if not inner:
        try:
            end_with_parent(signal.SIGKILL)
            _inner(command, work)
        except BaseException as error:  # a border, as above
            _say_and_exit(error)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda got, _: os.kill(inner, got))
    _, status = os.waitpid(inner, 0)
    _leave(status)


def _leave(status: int) -> NoReturn:
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _inner(command: Command, work: str) -> NoReturn:
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    mount("bootseer", work, "tmpfs", 0)
    places = [os.path.join(work, name) for name in ("upper", "work", "root")]
    for place in places:
        os.mkdir(place)
    options = f"lowerdir={command.tree},upperdir={places[0]},workdir={places[1]}"
    mount("overlay", places[2], "overlay", 0, options)
    host = {name: os.open(name, os.O_PATH | os.O_CLOEXEC) for name in ("/dev", "/sys")}
    if command.events_dir:
        host[EVENTS_INSIDE] = os.open(command.events_dir, os.O_PATH | os.O_CLOEXEC)
    os.chroot(places[2])
    os.chdir("/")
    # From here on no link of the image can lead out of its tree.
    os.makedirs("/proc", exist_ok=True)
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for target, fd in host.items():
        os.makedirs(target, exist_ok=True)
        mount(f"/proc/self/fd/{fd}", target, "", MS_BIND | MS_REC)
    # The first process of a namespace hears only signals that it handles: be that for the command.
    pid = os.fork()
    if pid:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda got, _: os.kill(pid, got))
        while True:
            ended, status = os.wait()  # of the command, or of what it left behind
            if ended == pid:
                _leave(status)
    end_with_parent(signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    directory = command.config.working_dir or "/"
    is_new = not os.path.isdir(directory)
    os.makedirs(directory, exist_ok=True)
    identity = _identity(command.config.user)
    if identity is not None:
        if is_new:  # as podman makes it
            os.chown(directory, *identity)
        os.setgroups([])
        os.setgid(identity[1])
        os.setuid(identity[0])
    os.chdir(directory)
    variables = command.variables()
    os.execvpe(command.words[0], list(command.words), variables)


def _identity(user: str) -> tuple[int, int] | None:
    """The user and group that the image names (`name`, `uid`, or either with `:group`), if any."""
    if not user:
        return None
    name, _, group = user.partition(":")
    uid, gid = _looked_up("/etc/passwd", name, (2, 3))
    if group:
        gid = _looked_up("/etc/group", group, (2, 2))[0]
    return uid, gid


def _looked_up(path: str, name: str, columns: tuple[int, int]) -> tuple[int, int]:
    """Two numbers of a line of passwd or group, by name or number."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                words = line.rstrip("\n").split(":")
                if len(words) > max(columns) and name in (words[0], words[2]):
                    return int(words[columns[0]]), int(words[columns[1]])
    except (OSError, ValueError):
        pass
    if name.isdigit():
        return int(name), 0
    raise NotFoundError(f"the image has no user or group {name!r}; name another one")
