"""The job's command as the caller gives it, for containers that leave theirs to the image."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence

import yaml

from bootseer.errors import UsageError
from bootseer.kubernetes import manifest_text
from bootseer.kubernetes.insertions import CannotEditError
from bootseer.kubernetes.options import Options
from bootseer.kubernetes.pods import Pod

_NAMED = re.compile(r"((?:[A-Za-z0-9.-]+/){1,2}[A-Za-z0-9_-]+)=(.*)", re.DOTALL)


def parse_commands(
    texts: Sequence[str],
) -> tuple[tuple[str, ...], Mapping[str, tuple[str, ...]]]:
    """Parse `WORDS` and `POD/CONTAINER=WORDS`; returns the command for all, and those by name.

    POD is the name of the object that describes the pod, with or without its kind before it
    (`Job/train`). Raises UsageError for an unclosed quote, for no words, and for a name given
    twice.
    """
    for_all: tuple[str, ...] = ()
    by_name: dict[str, tuple[str, ...]] = {}
    for text in texts:
        named = _NAMED.fullmatch(text)
        name, words_text = (named[1], named[2]) if named else ("", text)
        try:
            words = tuple(shlex.split(words_text))
        except ValueError as error:
            problem = str(error)[:1].lower() + str(error)[1:]
            raise UsageError(
                f"--command {text}: {problem}; quote it as a shell takes it"
            ) from error
        if not words:
            raise UsageError(f"--command {text!r}: it has no words; name the program to start")
        if name in by_name or (not name and for_all):
            raise UsageError(
                f"--command is given twice for {name or 'all containers'}; "
                "write POD/CONTAINER=WORDS to give each container its own"
            )
        if name:
            by_name[name] = words
        else:
            for_all = words
    return for_all, by_name


@dataclasses.dataclass(slots=True)
class CommandChoice:
    """Which of the given commands goes into which container.

    A command fits one image: it is refused where containers of several images would take it.
    `add` has to be called for every container without a command before `choose` is called.
    """

    options: Options
    _images: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)

    def add(self, pod: Pod, container: yaml.MappingNode) -> None:
        """Count a container that leaves its command to its image."""
        key = self._find_key(pod, container)
        if key is not None:
            image = manifest_text.scalar(manifest_text.child(container, "image"))
            self._images.setdefault(key, {}).setdefault(image, _format_name(pod, container))

    def check_used(self) -> None:
        """Raise UsageError where a name that is given belongs to no container without a command."""
        unused = [name for name in self.options.commands if name not in self._images]
        if unused:
            raise UsageError(
                f"--command {unused[0]}=...: no container without a command has this name; "
                "it is the object's name and the container's, as in train/main or Job/train/main"
            )

    def is_named(self, pod: Pod, container: yaml.MappingNode) -> bool:
        """Whether the caller gave a command to just this container."""
        return bool(self._find_key(pod, container))

    def choose(self, pod: Pod, container: yaml.MappingNode) -> tuple[str, ...]:
        """Return the words for a container, () where none are given.

        Raises CannotEditError where they would go into containers of several images.
        """
        key = self._find_key(pod, container)
        if key is None:
            return ()
        images = self._images.get(key, {})
        if len(images) > 1:
            others = ", ".join(f"{name} ({image or 'no image'})" for image, name in images.items())
            hint = "" if key else "; give each its own by --command POD/CONTAINER=WORDS"
            given = f"{key}=" if key else ""
            raise CannotEditError(
                f"--command {given}{shlex.join(self._get_words(key))} would go into "
                f"containers of {len(images)} images: {others}{hint}"
            )
        return self._get_words(key)

    def _find_key(self, pod: Pod, container: yaml.MappingNode) -> str | None:
        """The name by which a command was given, "" for the one for all, None if there is none."""
        name = _format_name(pod, container)
        for key in (name, name.partition("/")[2]):
            if key in self.options.commands:
                return key
        return "" if self.options.command else None

    def _get_words(self, key: str) -> tuple[str, ...]:
        return self.options.commands[key] if key else self.options.command


def format_command_name(pod: Pod, container: yaml.MappingNode) -> str:
    """`KIND/POD/CONTAINER=` for a hint at --command; "" for an object without a name of its own."""
    text = f"{_format_name(pod, container)}="
    return text if _NAMED.fullmatch(text) else ""


def _format_name(pod: Pod, container: yaml.MappingNode) -> str:
    return f"{pod.title}/{pod.container_name(container)}"
