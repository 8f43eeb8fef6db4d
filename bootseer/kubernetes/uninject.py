"""Take bootseer out of a manifest again: exactly what was put in, whatever was edited since.

First whole lines between our marks, then, for flow style and for manifests that a tool wrote
anew without comments, everything that carries one of our names.
"""

from __future__ import annotations

import dataclasses

import yaml

from bootseer.errors import CorruptDataError
from bootseer.kubernetes import edits, pods, yamltext
from bootseer.kubernetes import options as names
from bootseer.kubernetes.pods import Pod
from bootseer.kubernetes.yamltext import Text


@dataclasses.dataclass(frozen=True, slots=True)
class _Cut:
    start: int
    end: int


def uninject(text: Text) -> str:
    """The text without anything of ours.

    Raises CorruptDataError with file and line when lines between our marks were changed, and
    UsageError for text that is no valid YAML.
    """
    if not _names_us(text.raw):
        return text.raw
    injected = [is_injected(pod) for pod in _pods(text)]
    raw = _without_marked_lines(text)
    if not _names_us(raw):
        return raw
    bare = dataclasses.replace(text, raw=raw)
    cuts: list[_Cut] = []
    # Names alone do not make a thing ours: only pods that were injected lose anything.
    for pod, ours in zip(_pods(bare), injected, strict=True):
        if ours:
            _from_mapping(bare, pod.spec, cuts)
            for container in pod.containers():
                _from_mapping(bare, container, cuts)
    for document in yamltext.documents(bare):
        trainer = yamltext.child(document.root, "spec", "trainer")
        if isinstance(trainer, yaml.MappingNode):
            _from_mapping(bare, trainer, cuts)
    return _apply(raw, cuts)


def _names_us(raw: str) -> bool:
    return names.VOLUME in raw or names.MARK_VARIABLE in raw


def _pods(text: Text) -> list[Pod]:
    return [pod for document in yamltext.documents(text) for pod in pods.find(document)]


def is_injected(pod: Pod) -> bool:
    """Whether a pod has our init container, our mark or our wrapper."""
    for entry in yamltext.items(yamltext.child(pod.spec, "initContainers")):
        words = [yamltext.scalar(word) for word in yamltext.items(yamltext.child(entry, "args"))]
        if _name(entry) == names.INIT_CONTAINER and words[:1] == ["install"]:
            return True
    for container in pod.containers():
        command = yamltext.items(yamltext.child(container, "command"))
        if command and yamltext.scalar(command[0]) == names.LAUNCHER:
            return True
        variables = yamltext.items(yamltext.child(container, "env"))
        if names.MARK_VARIABLE in map(_name, variables):
            return True
    return False


def _name(entry: yaml.Node) -> str:
    return yamltext.scalar(yamltext.child(entry, "name"))


def _without_marked_lines(text: Text) -> str:
    if edits.BEGIN not in text.raw:
        return text.raw
    lines = text.raw.splitlines(keepends=True)
    out: list[str] = []
    number = 0
    while number < len(lines):
        if not lines[number].lstrip().startswith(edits.BEGIN + " "):
            out.append(lines[number])
            number += 1
            continue
        end = _end_of(lines, number, text.name)
        wanted = lines[number].split()[2]
        inside = [line.rstrip("\r\n") for line in lines[number + 1 : end]]
        if edits.digest(inside) != wanted:
            raise CorruptDataError(
                f"{text.name}, line {number + 1}: lines between the bootseer marks were changed; "
                "move what is yours out of them, or remove the block by hand"
            )
        if not lines[end].endswith("\n") and out:  # put in behind a last line without newline
            out[-1] = out[-1].rstrip("\r\n")
        number = end + 1
    return "".join(out)


def _end_of(lines: list[str], begin: int, name: str) -> int:
    for number in range(begin + 1, len(lines)):
        bare = lines[number].strip()
        if bare == edits.END:
            return number
        if bare.startswith(edits.BEGIN):
            break
    raise CorruptDataError(
        f"{name}, line {begin + 1}: this bootseer mark has no end; remove the block by hand"
    )


def _from_mapping(text: Text, node: yaml.MappingNode, cuts: list[_Cut]) -> None:
    wrapped = False
    for key in ("initContainers", "volumes", "volumeMounts", "env", "command"):
        value = yamltext.child(node, key)
        if not isinstance(value, yaml.SequenceNode):
            continue
        first, count = _ours(key, value)
        if count:
            _cut_items(text, node, key, value, (first, count), cuts)
            wrapped = wrapped or key == "command"
    if wrapped:  # then the image's own arguments may have been written out by us
        for name, key_node, value in yamltext.pairs(node):
            if name == "args" and _written_by_us(text, key_node, value):
                cuts.append(_pair(text, key_node, value))


def _ours(key: str, value: yaml.SequenceNode) -> tuple[int, int]:
    """Which items of a list are ours: the first one's number, and how many."""
    if key == "command":
        words = [yamltext.scalar(item) for item in value.value]
        wrapped = words[:1] == [names.LAUNCHER] and "--" in words
        return 0, words.index("--") + 1 if wrapped else 0
    found = [_name(item) for item in value.value]
    if key == "env":  # what the manifest sets itself may bear the same names: only before our mark
        if names.MARK_VARIABLE not in found:
            return 0, 0
        last = first = found.index(names.MARK_VARIABLE)
        while first and found[first - 1] in names.VARIABLES:
            first -= 1
        return first, last + 1 - first
    numbers = [n for n, name in enumerate(found) if name in names.NAMES]
    return (numbers[0], numbers[-1] + 1 - numbers[0]) if numbers else (0, 0)


def _cut_items(
    text: Text,
    mapping: yaml.MappingNode,
    key: str,
    value: yaml.SequenceNode,
    ours: tuple[int, int],
    cuts: list[_Cut],
) -> None:
    key_node = next(k for name, k, _ in yamltext.pairs(mapping) if name == key)
    if _written_by_us(text, key_node, value):
        cuts.append(_pair(text, key_node, value))
        return
    first, behind = ours[0], ours[0] + ours[1]
    if value.flow_style:
        cuts.append(_flow_cut(text, value, first, behind))
        return
    everything = ours[1] == len(value.value)
    start = text.line_start((key_node if everything else value.value[first]).start_mark.index)
    if behind == len(value.value):
        end = text.line_end(len(text.raw[: value.end_mark.index].rstrip()) - 1)
    else:
        end = text.line_start(value.value[behind].start_mark.index)
    cuts.append(_Cut(start, end))


def _flow_cut(text: Text, value: yaml.SequenceNode, first: int, behind: int) -> _Cut:
    """Items `[first, behind)` with the commas that belong to them."""
    if first:
        start = value.value[first - 1].end_mark.index
        return _Cut(start, value.value[behind - 1].end_mark.index)
    start = text.raw.index("[", value.start_mark.index) + 1
    end = value.value[behind - 1].end_mark.index
    if behind < len(value.value):
        as_written = text.raw.startswith(", ", end)
        end = end + 2 if as_written else value.value[behind].start_mark.index
    return _Cut(start, end)


def _written_by_us(text: Text, key_node: yaml.Node, value: yaml.Node) -> bool:
    """Whether we wrote the key too, in flow style."""
    if not isinstance(value, yaml.SequenceNode) or not value.flow_style:
        return False
    return text.raw.startswith(edits.OWN_COLON, key_node.end_mark.index)


def _pair(text: Text, key_node: yaml.Node, value: yaml.Node) -> _Cut:
    end = value.end_mark.index
    return _Cut(key_node.start_mark.index, end + 2 if text.raw.startswith(", ", end) else end)


def _apply(raw: str, cuts: list[_Cut]) -> str:
    out, last = [], 0
    for cut in sorted(cuts, key=lambda c: c.start):
        out.append(raw[last : cut.start])
        last = max(last, cut.end)
    return "".join([*out, raw[last:]])
