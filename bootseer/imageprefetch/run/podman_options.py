"""What the options of `podman run` say of a container, and which of them fit another one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from bootseer import light_dataclasses as dataclasses
from bootseer.errors import NotSupportedError, UsageError
from bootseer.imageprefetch.run.command import DEFAULT_PATH
from bootseer.system.paths import is_within
from bootseer.system.regular_files import open_to_read

_PLATFORM = ("--platform", "--os", "--arch", "--variant")
_OF_PULLS = ("--authfile", "--creds", "--cert-dir", "--decryption-key", "--signature-policy")
_ENTRYPOINT = "--entrypoint"
_WORKDIR = ("--workdir", "-w")
_SHORT = ("-v", "-e", "-w", "-u", "-p")
"""Short options to which a value may be glued, of those that matter here."""
_WRITABLE_FIELDS = ("ro", "readonly", "rw")
_PLACING = ("--volume", "-v", "--mount", "--tmpfs")
_TARGET_FIELDS = ("target", "dst", "destination")
_SOURCE_FIELDS = ("source", "src")
_OF_ONE_CONTAINER = (
    "--name",
    "--publish",
    "-p",
    "--cidfile",
    "--pidfile",
    "--conmon-pidfile",
    "--ip",
)
_FLAGS_OF_ONE_CONTAINER = ("--replace",)
_OF_THE_TERMINAL = ("--interactive", "-i", "--tty", "-t", "-it", "-ti", "--sig-proxy")
_CONTAINER_MARK = "container=podman"
_DEFAULT_VARIABLES = {
    "PATH": DEFAULT_PATH,
    "TERM": "xterm",
}
"""The variables that podman sets in a container whose image does not."""
_TRUE = ("1", "t", "T", "TRUE", "true", "True")
_DETACHED = re.compile(r"-[itPq]*d.*|--detach(=true)?")


def check_options(options: Sequence[str], *, instead: str, ours: Sequence[str] = ()) -> None:
    """Raise UsageError for options that are none, that detach, or that we give ourselves.

    `instead` ends the error about a container in the background; `ours` are the options, besides
    --rootfs, that we give ourselves.
    """
    if options and not options[0].startswith("-"):
        raise UsageError(
            f"{options[0]!r} is no option of podman; put -- before the command to be run"
        )
    for word in options:
        if _DETACHED.fullmatch(word):
            raise UsageError(
                f"the image is mounted for as long as the container runs in front; leave {word} "
                f"out{instead}"
            )
        name = word.partition("=")[0]
        if name in ("--rootfs", *ours):
            raise UsageError(f"{name} is ours to give; leave it out")


def check_platform(options: Sequence[str], *, instead: str = "") -> None:
    """Raise NotSupportedError for options that choose an image of another platform than ours.

    Podman applies them when it chooses from an index, and ignores them for a tree that is mounted
    already. `instead` ends the error.
    """
    asked = {name: value for name, value in _values(options, _PLATFORM) if value}
    if not asked:
        return
    from bootseer.storage.oci.platforms import parse_platform, this_platform

    here = this_platform()
    wanted = parse_platform(asked["--platform"]) if "--platform" in asked else here
    wanted = dataclasses.replace(
        wanted,
        os=asked.get("--os", wanted.os),
        architecture=asked.get("--arch", wanted.architecture),
        variant=asked.get("--variant", wanted.variant),
    )
    if wanted != here:
        raise NotSupportedError(
            f"the image is asked for as {wanted}, and what is mounted here is of {here}{instead}"
        )


def pull_options(options: Sequence[str]) -> list[str]:
    """Those of a container's options that say which image is pulled, and how."""
    given = _values(options, (*_PLATFORM, *_OF_PULLS))
    flags = [word for word in options if word.partition("=")[0] == "--tls-verify"]
    return [*flags, *(word for pair in given for word in pair)]


def always_pulls(options: Sequence[str]) -> bool:
    """Whether podman is to ask the registry although it has the image."""
    given = [value for _, value in _values(options, ("--pull",))]
    return bool(given) and given[-1] in ("always", "newer", "true")


def container_variables(of_image: Iterable[str], options: Sequence[str]) -> list[str]:
    """The variables (`NAME=VALUE`) that podman would set in a container of the image itself.

    For a tree that is not one of its images, podman knows none of the image's variables, and does
    not add the one by which programs recognise a container. Variables that an --env-file sets are
    left out: given by --env they would override the file, as an image's own do not. --env-merge
    changes variables before --unsetenv removes some.
    """
    unset_all = False
    for word in options:
        name, _, value = word.partition("=")
        if name == "--unsetenv-all":
            unset_all = not value or value in _TRUE
    if unset_all:
        return []
    left_out = {name for _, name in _values(options, ("--unsetenv",))}
    for _, file in _values(options, ("--env-file",)):
        left_out |= _names_in_file(file)
    given = dict(_split(pair) for pair in (_CONTAINER_MARK, *of_image))
    merged = _merge(given, [value for _, value in _values(options, ("--env-merge",))])
    return [f"{name}={value}" for name, value in merged.items() if name not in left_out]


def _split(pair: str) -> tuple[str, str]:
    name, _, value = pair.partition("=")
    return name, value


def _merge(given: Mapping[str, str], words: Sequence[str]) -> dict[str, str]:
    """Variables after --env-merge; unchanged where podman will refuse its words.

    As podman does, other names than known ones are ignored, and what follows a second `=` in a
    result is dropped (containers/podman, pkg/specgen/generate/container.go).
    """
    if not words:
        return dict(given)
    from bootseer.imageprefetch.run.word_expansion import expand_word

    known = {**_DEFAULT_VARIABLES, **given}
    changed: set[str] = set()
    for word in words:
        try:
            name, value, *_ = expand_word(word, known).split("=")
        except (ValueError, RecursionError):  # the latter: nested some hundred times
            return dict(given)
        if name in known:
            known[name] = value
            changed.add(name)
    return {name: known[name] for name in (*given, *sorted(changed - set(given)))}


def _names_in_file(path: str) -> set[str]:
    """The variables that a file of podman's --env-file sets; none where podman will refuse it.

    Only regular files are read: a pipe, say, can be read only once, by podman.
    """
    try:
        with open(open_to_read(path), "rb") as file:
            lines = file.read().decode(errors="surrogateescape").split("\n")
    except OSError:
        return set()
    names = set()
    for line in lines:
        name, equals, _ = line.lstrip().removesuffix("\r").partition("=")
        if name.startswith("#"):
            continue
        if equals:
            names.add(name)
        elif name.endswith("*"):  # all variables of our environment with this prefix
            names.update(own for own in os.environ if own.startswith(name[:-1]))
        elif name in os.environ:
            names.add(name)
    return names


def places_anything_at(directory: str, options: Sequence[str]) -> bool:
    """Whether options name another working directory, or mount something at or above this one."""
    for word in options:
        if word.startswith(_WORKDIR):
            return True
    return any(is_within(directory, target) for target in list_targets(options))


def list_targets(options: Sequence[str]) -> list[str]:
    """Where in the container options mount something."""
    return [_target(name, value) for name, value in _values(_split_glued(options), _PLACING)]


def _target(option: str, value: str) -> str:
    """Where in the container an option mounts something (podman-run(1))."""
    if option == "--mount":
        fields = (field.partition("=") for field in value.split(","))
        return next((text for name, _, text in fields if name in _TARGET_FIELDS), "")
    first, *rest = value.split(":")
    return rest[0] if rest and option != "--tmpfs" else first


def bind_mounts(options: Sequence[str]) -> list[tuple[str, str]]:
    """Paths in the container, and the paths of this machine that options show there."""
    out = []
    for name, value in _values(_split_glued(options), _PLACING):
        source = _bound_source(name, value)
        if source:
            out.append((_target(name, value), os.path.abspath(source)))
    return out


def _bound_source(option: str, value: str) -> str:
    """The path of this machine that an option shows; "" where it mounts something else."""
    if option == "--mount":
        fields = dict(_split(field) for field in value.split(","))
        source = next((fields[key] for key in _SOURCE_FIELDS if key in fields), "")
        source = source if fields.get("type", "bind") == "bind" else ""
    else:
        source = value.split(":")[0] if option != "--tmpfs" and ":" in value else ""
    return source if source.startswith(("/", ".")) else ""  # else the name of a volume of podman's


def find_unknown(options: Sequence[str], is_passing: Callable[[str], bool]) -> str:
    """The first option by which programs see, or write to, what is not known here; "" for none.

    Volumes of podman's own and of other containers, file systems in memory, the caller's whole
    environment. `is_passing` says of a place in the container whether what is written there counts
    for nothing.
    """
    for name, value in _values(_split_glued(options), _PLACING):
        if not _bound_source(name, value) and not is_passing(_target(name, value)):
            return f"{name} {value}"
    for word in options:
        name = word.partition("=")[0]
        if name in ("--volumes-from", "--env-host", "--http-proxy"):
            return word
    for name, value in _values(_split_glued(options), ("--env", "-e")):
        if "=" not in value and value.endswith("*"):
            return f"{name} {value}"
    return ""


def with_fixed_volumes(options: Sequence[str], is_passing: Callable[[str], bool]) -> list[str]:
    """The options, with the paths of this machine shown read-only unless `is_passing`."""
    out, following = [], iter(_split_glued(options))
    for word in following:
        name, equals, value = word.partition("=")
        if name not in _PLACING:
            out.append(word)
            continue
        value = value if equals else next(following, "")
        if _bound_source(name, value) and not is_passing(_target(name, value)):
            value = _read_only(name, value)
        out += [name, value]
    return out


def _read_only(option: str, value: str) -> str:
    if option == "--mount":
        kept = [f for f in value.split(",") if f.partition("=")[0] not in _WRITABLE_FIELDS]
        return ",".join([*kept, "ro=true"])
    source, target, *rest = value.split(":")
    flags = [flag for flag in ",".join(rest).split(",") if flag and flag not in ("rw", "ro")]
    return f"{source}:{target}:{','.join([*flags, 'ro'])}"


def working_directory(options: Sequence[str]) -> str:
    """The working directory that options name; "" where they name none."""
    given = [value for _, value in _values(_split_glued(options), _WORKDIR)]
    return given[-1] if given else ""


def user(options: Sequence[str]) -> str:
    """The user that options name; "" where they name none."""
    given = [value for _, value in _values(_split_glued(options), ("--user", "-u"))]
    return given[-1] if given else ""


def given_variables(options: Sequence[str]) -> dict[str, str]:
    """The variables that --env and --env-file set, with their values, as podman reads them."""
    out: dict[str, str] = {}
    for _, path in _values(options, ("--env-file",)):
        try:
            with open(open_to_read(path), "rb") as file:
                lines = file.read().decode(errors="surrogateescape").split("\n")
        except OSError:
            continue
        pairs = (line.lstrip().removesuffix("\r") for line in lines)
        out |= dict(_split(pair) for pair in pairs if "=" in pair and not pair.startswith("#"))
    for _, pair in _values(_split_glued(options), ("--env", "-e")):
        name, equals, value = pair.partition("=")
        if equals:
            out[name] = value
        elif name in os.environ:
            out[name] = os.environ[name]
    return out


def helper_options(options: Sequence[str]) -> list[str]:
    """The options for a container that runs ahead of another one on the same root.

    Without those that only one of the two can have: its name, its ports, its files of ids, the
    terminal and standard input.
    """
    left, following = [], iter(_split_glued(options))
    for word in following:
        name, equals, _ = word.partition("=")
        if name in _OF_ONE_CONTAINER:
            if not equals:
                next(following, None)
        elif name not in (*_OF_THE_TERMINAL, *_FLAGS_OF_ONE_CONTAINER):
            left.append(word)
    return left


def _split_glued(options: Sequence[str]) -> Iterator[str]:
    """The options, with the value of `-vVALUE` and the like as a word of its own."""
    for word in options:
        if word[:2] in _SHORT and len(word) > 2:
            yield from (word[:2], word[2:].removeprefix("="))
        else:
            yield word


def _values(options: Iterable[str], names: Collection[str]) -> Iterator[tuple[str, str]]:
    """The options of some names with their values, given as one word or as two."""
    following = iter(options)
    for word in following:
        name, equals, value = word.partition("=")
        if name in names:
            yield name, value if equals else next(following, "")


def has(options: Sequence[str], name: str) -> bool:
    """Whether an option of this name is among the options."""
    return any(word.partition("=")[0] == name for word in options)


def names_network(options: Sequence[str]) -> bool:
    """Whether options choose the container's network."""
    return any(word.partition("=")[0] in ("--network", "--net") for word in options)


def entrypoint(options: Sequence[str]) -> str | None:
    """The value of the last --entrypoint; None where there is none."""
    given = [value for _, value in _values(options, (_ENTRYPOINT,))]
    return given[-1] if given else None


def without_entrypoint(options: Sequence[str]) -> list[str]:
    """The options less every --entrypoint with its value."""
    left, following = [], iter(options)
    for word in following:
        name, equals, _ = word.partition("=")
        if name != _ENTRYPOINT:
            left.append(word)
        elif not equals:
            next(following, None)
    return left
