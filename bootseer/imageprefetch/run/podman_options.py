"""Which of podman's own options may stand in a command line of ours."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from bootseer import light_dataclasses as dataclasses
from bootseer.errors import NotSupportedError, UsageError
from bootseer.imageprefetch.run.word_expansion import expand_word
from bootseer.system.paths import is_within
from bootseer.system.regular_files import open_to_read

EVENTS_INSIDE = "/.bootseer-events"
"""Where a container sees its job's events: in the root, where no link of the image can stand in
the way."""
_PLATFORM = ("--platform", "--os", "--arch", "--variant")
_WORKDIR = ("--workdir", "-w")
_PLACING = ("--volume", "-v", "--mount", "--tmpfs")
_OF_ITS_OWN = "container=podman"
_PODMANS_DEFAULTS = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "TERM": "xterm",
}
"""What podman gives each container whose image names none."""
_TRUE = ("1", "t", "T", "TRUE", "true", "True")
_DETACHED = re.compile(r"-[itPq]*d.*|--detach(=true)?")


def check_options(options: Sequence[str], *, instead: str, ours: Sequence[str] = ()) -> None:
    """Raise UsageError for what is no option, would detach, or is ours to give.

    `instead` says what to do where a container is to run in the background; `ours` are options
    beside --rootfs that we give ourselves.
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

    Podman heeds them when it chooses from an index, and not for a tree that is there already.
    `instead` says what to do, where nobody does it by themselves.
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


def container_variables(of_image: Iterable[str], options: Sequence[str]) -> list[str]:
    """The variables (`NAME=VALUE`) that podman gives a container of an image, less its --unsetenv.

    For a tree that is not an image of its own, podman knows neither the image's variables nor adds
    the one by which programs tell that they run in a container. Those that an --env-file sets are
    left to it: what is given by --env would win over the file, where an image's own does not. Each
    --env-merge changes a variable that is there, before others are unset.
    """
    unset_all = False
    for word in options:
        name, _, value = word.partition("=")
        if name == "--unsetenv-all":
            unset_all = not value or value in _TRUE
    if unset_all:
        return []
    replaced = {name for _, name in _values(options, ("--unsetenv",))}
    for _, file in _values(options, ("--env-file",)):
        replaced |= _names_in_file(file)
    given = dict(_split(pair) for pair in (_OF_ITS_OWN, *of_image))
    merged = _merge(given, [value for _, value in _values(options, ("--env-merge",))])
    return [f"{name}={value}" for name, value in merged.items() if name not in replaced]


def _split(pair: str) -> tuple[str, str]:
    name, _, value = pair.partition("=")
    return name, value


def _merge(given: Mapping[str, str], words: Sequence[str]) -> dict[str, str]:
    """Variables after --env-merge; as they were where podman will refuse its words.

    Podman does this to what it knows itself, and leaves out other names; what follows a second
    `=` in the outcome is dropped (containers/podman, pkg/specgen/generate/container.go).
    """
    known = {**_PODMANS_DEFAULTS, **given}
    changed: set[str] = set()
    for word in words:
        try:
            name, value, *_ = expand_word(word, known).split("=")
        except (ValueError, RecursionError):  # the latter: some hundred within each other
            return dict(given)
        if name in known:
            known[name] = value
            changed.add(name)
    return {name: known[name] for name in (*given, *sorted(changed - set(given)))}


def _names_in_file(path: str) -> set[str]:
    """The variables that a file of podman's --env-file sets; none where podman will refuse it.

    What is no regular file, a pipe say, is podman's alone to read: it can be read only once.
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
        elif name.endswith("*"):  # all of ours that begin so
            names.update(each for each in os.environ if each.startswith(name[:-1]))
        elif name in os.environ:
            names.add(name)
    return names


def places_anything_at(directory: str, options: Sequence[str]) -> bool:
    """Whether they name another working directory, or mount something at this one or above it."""
    for word in options:
        if word.startswith(_WORKDIR):
            return True
    for _, value in _values(_apart(options), _PLACING):
        places = (part for part in re.split("[:,=]", value) if part[:1] == "/")
        if any(is_within(directory, place) for place in places):
            return True
    return False


def _apart(options: Sequence[str]) -> Iterator[str]:
    """The words, with the value of `-vVALUE` as a word of its own."""
    for word in options:
        if word.startswith("-v") and len(word) > 2:
            yield from ("-v", word[2:].removeprefix("="))
        else:
            yield word


def _values(options: Iterable[str], names: Collection[str]) -> Iterator[tuple[str, str]]:
    """The options of some names with their values, given as one word or as two."""
    following = iter(options)
    for word in following:
        name, equals, value = word.partition("=")
        if name in names:
            yield name, value if equals else next(following, "")


def names_network(options: Sequence[str]) -> bool:
    """Whether they choose the container's network."""
    return any(word.partition("=")[0] in ("--network", "--net") for word in options)
