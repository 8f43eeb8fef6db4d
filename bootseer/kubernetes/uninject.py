"""Take bootseer out of a manifest again: exactly what was put in, whatever was edited since.

First whole lines between our marks, then, for flow style and for manifests that a tool wrote
anew without comments, everything that carries one of our names.
"""

from __future__ import annotations

import dataclasses

import yaml

from bootseer.errors import CorruptDataError
from bootseer.kubernetes import insertions, manifest_text, pods
from bootseer.kubernetes import options as names
from bootseer.kubernetes.manifest_text import Text
from bootseer.kubernetes.pods import Pod


@dataclasses.dataclass(frozen=True, slots=True)
class _Cut:
    start: int
    end: int
    null: str = ""
    """What stood in its place."""


def uninject(text: Text) -> str:
    """The text without anything of ours.

    Raises CorruptDataError with file and line when lines between our marks were changed, and
    UsageError for text that is no valid YAML.
    """
    if not _names_us(text.raw):
        return text.raw
    seen = _look(text)
    raw = _without_marked_lines(text, seen.lines_of_texts)
    if not _names_us(raw):
        return raw
    bare = dataclasses.replace(text, raw=raw)
    cuts: list[_Cut] = []
    injected = iter(seen.tiers)
    for document in manifest_text.documents(bare):
        for one in pods.find_objects(document):
            for pod in one.pods:
                # Names alone do not make a thing ours: only pods that were injected lose anything.
                tiers = next(injected)
                if tiers is not None:
                    _from_mapping(bare, pod.spec, cuts)
                    for container, tier in zip(pod.containers(), tiers, strict=True):
                        _from_mapping(bare, container, cuts)
                        _cut_tier(bare, container, tier, cuts)
            trainer = manifest_text.child(one.node, "spec", "trainer")
            if isinstance(trainer, yaml.MappingNode):
                _from_mapping(bare, trainer, cuts)
    return _apply(raw, cuts)


@dataclasses.dataclass(frozen=True, slots=True)
class _Seen:
    """Per pod the tiers of its containers, None where it is not injected; and the numbers of the
    lines inside texts of several lines, where our marks are no comments: a ConfigMap may well
    hold an injected manifest."""

    tiers: list[list[list[str]] | None]
    lines_of_texts: set[int]


def _look(text: Text) -> _Seen:
    out = _Seen([], set())
    marked = insertions.BEGIN in text.raw
    for document in manifest_text.documents(text):
        found = pods.find(document)
        out.tiers.extend(_tiers(pod) if is_injected(pod) else None for pod in found)
        if marked:
            _add_lines_of_texts(document.root, out.lines_of_texts)
    return out


def _names_us(raw: str) -> bool:
    return names.VOLUME in raw or names.MARK_VARIABLE in raw


def is_injected(pod: Pod) -> bool:
    """Whether a pod has our init container, our mark or our wrapper."""
    for entry in manifest_text.items(manifest_text.child(pod.spec, "initContainers")):
        words = [
            manifest_text.scalar(word)
            for word in manifest_text.items(manifest_text.child(entry, "args"))
        ]
        if _name(entry) == names.INIT_CONTAINER and words[:1] == ["install"]:
            return True
    for container in pod.containers():
        command = manifest_text.items(manifest_text.child(container, "command"))
        if command and manifest_text.scalar(command[0]) == names.LAUNCHER:
            return True
        variables = manifest_text.items(manifest_text.child(container, "env"))
        if names.MARK_VARIABLE in map(_name, variables):
            return True
    return False


def _name(entry: yaml.Node) -> str:
    return manifest_text.scalar(manifest_text.child(entry, "name"))


def _without_marked_lines(text: Text, texts: set[int]) -> str:
    if insertions.BEGIN not in text.raw:
        return text.raw
    lines = text.raw.split("\n")
    lines = [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    out: list[str] = []
    number = 0
    while number < len(lines):
        is_mark = lines[number].lstrip().startswith(insertions.BEGIN + " ")
        if not is_mark or number in texts:
            out.append(lines[number])
            number += 1
            continue
        end = _end_of(lines, number, text.name)
        wanted = lines[number].split()[2]
        inside = [line.rstrip("\r\n") for line in lines[number + 1 : end]]
        if insertions.digest(inside) != wanted:
            raise CorruptDataError(
                f"{text.name}, line {number + 1}: lines between the bootseer marks were changed; "
                "move what is yours out of them, or remove the block by hand"
            )
        if out and insertions.WAS_NULL in out[-1]:
            out[-1] = out[-1].replace(insertions.WAS_NULL, "", 1)
        if not lines[end].endswith("\n") and out:  # put in behind a last line without newline
            out[-1] = out[-1].rstrip("\r\n")
        number = end + 1
    return "".join(out)


def _add_lines_of_texts(root: yaml.Node, out: set[int]) -> None:
    seen: set[int] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if isinstance(node, yaml.ScalarNode):
            if node.end_mark.line > node.start_mark.line:
                out.update(range(node.start_mark.line + 1, _last_line(node)))
        elif id(node) not in seen:
            seen.add(id(node))
            if isinstance(node, yaml.MappingNode):
                stack += [child for pair in node.value for child in pair]
            else:
                stack += node.value


def _last_line(node: yaml.ScalarNode) -> int:
    """Number of the line behind a text's last one; a block's end mark stands there already."""
    return int(node.end_mark.line) + (node.end_mark.column > 0)


def _end_of(lines: list[str], begin: int, name: str) -> int:
    for number in range(begin + 1, len(lines)):
        bare = lines[number].strip()
        if bare == insertions.END:
            return number
        if bare.startswith(insertions.BEGIN):
            break
    raise CorruptDataError(
        f"{name}, line {begin + 1}: this bootseer mark has no end; remove the block by hand"
    )


def _from_mapping(text: Text, node: yaml.MappingNode, cuts: list[_Cut]) -> None:
    wrapped = False
    for key in ("initContainers", "volumes", "volumeMounts", "env", "command"):
        value = manifest_text.child(node, key)
        if not isinstance(value, yaml.SequenceNode):
            continue
        ours = _ours(key, value)
        if ours:
            _cut_items(text, node, key, value, ours, cuts)
            wrapped = wrapped or key == "command"
    if wrapped:  # then the image's own arguments may have been written out by us
        for name, key_node, value in manifest_text.pairs(node):
            if name == "args" and _written_by_us(text, key_node, value):
                cuts.append(_pair(text, key_node, value))


def _tiers(pod: Pod) -> list[list[str]]:
    """The tier each container was given; our mark's value names it behind the version."""
    out = []
    for container in pod.containers():
        entries = manifest_text.items(manifest_text.child(container, "env"))
        ours = [entry for entry in entries if _name(entry) == names.MARK_VARIABLE]
        value = manifest_text.child(ours[0], "value") if ours else None
        out.append(manifest_text.scalar(value).split()[1:])
    return out


def _cut_tier(text: Text, container: yaml.MappingNode, tier: list[str], cuts: list[_Cut]) -> None:
    """What a tier put in, where it is still there: in flow style, or written anew by a tool."""
    if not tier:
        return
    path = ("resources", "limits", tier[-1]) if tier[0] == "fuse" else _PRIVILEGED
    node: yaml.Node | None = container
    for depth, name in enumerate(path):
        if not isinstance(node, yaml.MappingNode):
            return
        for key, key_node, value in manifest_text.pairs(node):
            own = text.raw.startswith(insertions.OWN_COLON, key_node.end_mark.index)
            if key == name and ((own and node.flow_style) or depth == len(path) - 1):
                cuts.append(_tier_pair(text, node, key_node, value))
                return
        node = manifest_text.child(node, name)


_PRIVILEGED = ("securityContext", "privileged")


def _tier_pair(
    text: Text, mapping: yaml.MappingNode, key_node: yaml.Node, value: yaml.Node
) -> _Cut:
    """One pair that others may stand before or behind, as tools sort keys."""
    at, end = key_node.start_mark.index, value.end_mark.index
    if not mapping.flow_style:
        return _Cut(text.line_start(at), text.line_end(end - 1))
    pairs = list(manifest_text.pairs(mapping))
    number = next(n for n, (_, key, _) in enumerate(pairs) if key is key_node)
    if text.raw.startswith(", ", end) or len(pairs) == 1:
        return _pair(text, key_node, value)
    if number:
        return _Cut(pairs[number - 1][2].end_mark.index, end)
    return _Cut(at, pairs[1][1].start_mark.index)


def _ours(key: str, value: yaml.SequenceNode) -> list[int]:
    """Numbers of the items of a list that are ours."""
    if key == "command":
        words = [manifest_text.scalar(item) for item in value.value]
        wrapped = words[:1] == [names.LAUNCHER] and "--" in words
        return list(range(words.index("--") + 1)) if wrapped else []
    found = [_name(item) for item in value.value]
    if key == "env":  # what the manifest sets itself may bear the same names: only before our mark
        if names.MARK_VARIABLE not in found:
            return []
        mark = found.index(names.MARK_VARIABLE)
        return [n for n in range(mark) if found[n] in names.VARIABLES] + [mark]
    return [n for n, name in enumerate(found) if name in names.NAMES]


def _cut_items(
    text: Text,
    mapping: yaml.MappingNode,
    key: str,
    value: yaml.SequenceNode,
    ours: list[int],
    cuts: list[_Cut],
) -> None:
    key_node = next(k for name, k, _ in manifest_text.pairs(mapping) if name == key)
    if key == "command" and _filled_by_us(text, value):
        cuts.append(_Cut(insertions.opening(text, value, "["), value.value[-1].end_mark.index))
        return
    everything = len(ours) == len(value.value)
    null = insertions.find_null(text, value) if value.flow_style and not ours[0] else None
    if null is not None and (everything or key == "command"):
        cuts.append(_Cut(null[0], value.end_mark.index, null[1]))
        return
    # A command that we wrote ends in the words of the image.
    if (everything or key == "command") and _written_by_us(text, key_node, value):
        cuts.append(_pair(text, key_node, value))
    elif everything and not value.flow_style:
        cuts.append(_block_key(text, mapping, key_node, value))
    else:
        cut = _flow_cut if value.flow_style else _block_cut
        cuts += [cut(text, value, first, behind) for first, behind in _runs(ours)]


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    """`[first, behind)` of each run of neighbours."""
    out: list[tuple[int, int]] = []
    for number in numbers:
        if out and out[-1][1] == number:
            out[-1] = (out[-1][0], number + 1)
        else:
            out.append((number, number + 1))
    return out


def _block_key(
    text: Text, mapping: yaml.MappingNode, key_node: yaml.Node, value: yaml.SequenceNode
) -> _Cut:
    """A key with its list; its line may begin with the dash of the item that the mapping is."""
    at = key_node.start_mark.index
    start = text.line_start(at)
    followers = [key.start_mark.index for _, key, _ in manifest_text.pairs(mapping)]
    behind = [index for index in followers if index > at]
    if text.raw[start:at].strip() and behind:
        return _Cut(at, min(behind))
    return _Cut(start, _block_end(text, value))


def _block_end(text: Text, value: yaml.SequenceNode) -> int:
    node: yaml.Node = value
    while isinstance(node, yaml.CollectionNode) and node.value and not node.flow_style:
        node = node.value[-1][1] if isinstance(node, yaml.MappingNode) else node.value[-1]
    last = node.end_mark.index  # a collection's own would be behind the comments that follow
    while text.raw[last - 1].isspace():
        last -= 1
    return text.line_end(last - 1)


def _block_cut(text: Text, value: yaml.SequenceNode, first: int, behind: int) -> _Cut:
    """Whole lines of the items `[first, behind)`."""

    def begin(number: int) -> int:
        return text.line_start(text.raw.rfind("-", 0, value.value[number].start_mark.index))

    end = begin(behind) if behind < len(value.value) else _block_end(text, value)
    return _Cut(begin(first), end)


def _flow_cut(text: Text, value: yaml.SequenceNode, first: int, behind: int) -> _Cut:
    """Items `[first, behind)` with the commas that belong to them."""
    if first:
        start = value.value[first - 1].end_mark.index
        return _Cut(start, value.value[behind - 1].end_mark.index)
    start = insertions.opening(text, value, "[")
    end = value.value[behind - 1].end_mark.index
    if behind < len(value.value):
        as_written = text.raw.startswith(", ", end)
        end = end + 2 if as_written else value.value[behind].start_mark.index
    return _Cut(start, end)


def _filled_by_us(text: Text, value: yaml.SequenceNode) -> bool:
    """Whether the list was there, and empty."""
    if not value.flow_style:
        return False
    return text.raw.startswith(
        insertions.OWN_BRACKET + '"', insertions.opening(text, value, "[") - 1
    )


def _written_by_us(text: Text, key_node: yaml.Node, value: yaml.Node) -> bool:
    """Whether we wrote the key too, in flow style."""
    if not isinstance(value, yaml.SequenceNode) or not value.flow_style:
        return False
    return text.raw.startswith(insertions.OWN_COLON, key_node.end_mark.index)


def _pair(text: Text, key_node: yaml.Node, value: yaml.Node) -> _Cut:
    end = value.end_mark.index
    return _Cut(key_node.start_mark.index, end + 2 if text.raw.startswith(", ", end) else end)


def _apply(raw: str, cuts: list[_Cut]) -> str:
    out, last = [], 0
    for cut in sorted(cuts, key=lambda c: c.start):
        out += [raw[last : cut.start], cut.null]
        last = max(last, cut.end)
    return "".join([*out, raw[last:]])
