"""Remove bootseer from a manifest: exactly what `inject` put in, whatever was edited since.

Whole lines between our marks go first, then, for flow style and for manifests that a tool has
rewritten without comments, everything with one of our names.
"""

from __future__ import annotations

import dataclasses

import yaml

from bootseer.errors import CorruptDataError
from bootseer.kubernetes import insertions, pods
from bootseer.kubernetes import options as names
from bootseer.kubernetes.manifest_text import Text, child, items, pairs, parse_documents, scalar
from bootseer.kubernetes.pods import Pod


@dataclasses.dataclass(frozen=True, slots=True)
class _Cut:
    start: int
    end: int
    null: str = ""
    """The null that the cut text had replaced."""


def uninject(text: Text) -> str:
    """Return the text without anything of ours.

    Raises CorruptDataError with file and line when lines between our marks were changed, and
    UsageError for text that is no valid YAML.
    """
    if not _mentions_bootseer(text.raw):
        return text.raw
    survey = _survey(text)
    raw = _remove_marked_lines(text, survey.lines_in_scalars)
    if not _mentions_bootseer(raw):
        return raw
    bare = dataclasses.replace(text, raw=raw)
    cuts: list[_Cut] = []
    injected = iter(survey.tiers)
    for document in parse_documents(bare):
        for obj in pods.find_objects(document):
            for pod in obj.pods:
                # A name of ours is not proof: only pods that were injected lose anything.
                tiers = next(injected)
                if tiers is not None:
                    _add_mapping_cuts(bare, pod.spec, cuts)
                    for container, tier in zip(pod.containers(), tiers, strict=True):
                        _add_mapping_cuts(bare, container, cuts)
                        _add_tier_cut(bare, container, tier, cuts)
            trainer = child(obj.node, "spec", "trainer")
            if isinstance(trainer, yaml.MappingNode):
                _add_mapping_cuts(bare, trainer, cuts)
    return _apply_cuts(raw, cuts)


@dataclasses.dataclass(frozen=True, slots=True)
class _Survey:
    """What a first look at the whole text found.

    `tiers` has for each pod the tiers of its containers, None for a pod that is not injected.
    `lines_in_scalars` has the numbers of the lines inside scalars of several lines, in which our
    marks are no comments: a ConfigMap may hold an injected manifest.
    """

    tiers: list[list[list[str]] | None]
    lines_in_scalars: set[int]


def _survey(text: Text) -> _Survey:
    survey = _Survey([], set())
    has_marks = insertions.BEGIN in text.raw
    for document in parse_documents(text):
        survey.tiers.extend(
            _read_tiers(pod) if is_injected(pod) else None for pod in pods.find_pods(document)
        )
        if has_marks:
            _add_lines_in_scalars(document.root, survey.lines_in_scalars)
    return survey


def _mentions_bootseer(raw: str) -> bool:
    return names.VOLUME in raw or names.MARK_VARIABLE in raw


def is_injected(pod: Pod) -> bool:
    """Whether a pod has our init container, our mark or our wrapper."""
    for entry in items(child(pod.spec, "initContainers")):
        words = [scalar(word) for word in items(child(entry, "args"))]
        if _read_name(entry) == names.INIT_CONTAINER and words[:1] == ["install"]:
            return True
    for container in pod.containers():
        command = items(child(container, "command"))
        if command and scalar(command[0]) == names.LAUNCHER:
            return True
        variables = items(child(container, "env"))
        if names.MARK_VARIABLE in map(_read_name, variables):
            return True
    return False


def _read_name(entry: yaml.Node) -> str:
    return scalar(child(entry, "name"))


def _remove_marked_lines(text: Text, lines_in_scalars: set[int]) -> str:
    if insertions.BEGIN not in text.raw:
        return text.raw
    lines = text.raw.split("\n")
    lines = [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    out: list[str] = []
    number = 0
    while number < len(lines):
        is_mark = lines[number].lstrip().startswith(insertions.BEGIN + " ")
        if not is_mark or number in lines_in_scalars:
            out.append(lines[number])
            number += 1
            continue
        end = _find_end_mark(lines, number, text.name)
        digest = lines[number].split()[2]
        inside = [line.rstrip("\r\n") for line in lines[number + 1 : end]]
        if insertions.digest_lines(inside) != digest:
            raise CorruptDataError(
                f"{text.name}, line {number + 1}: lines between the bootseer marks were changed; "
                "move what is yours out of them, or remove the block by hand"
            )
        if out and insertions.WAS_NULL in out[-1]:
            out[-1] = out[-1].replace(insertions.WAS_NULL, "", 1)
        if not lines[end].endswith("\n") and out:  # inserted behind a last line without newline
            out[-1] = out[-1].rstrip("\r\n")
        number = end + 1
    return "".join(out)


def _add_lines_in_scalars(root: yaml.Node, out: set[int]) -> None:
    seen: set[int] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if isinstance(node, yaml.ScalarNode):
            if node.end_mark.line > node.start_mark.line:
                out.update(range(node.start_mark.line + 1, _find_line_behind(node)))
        elif id(node) not in seen:
            seen.add(id(node))
            if isinstance(node, yaml.MappingNode):
                stack += [entry for pair in node.value for entry in pair]
            else:
                stack += node.value


def _find_line_behind(node: yaml.ScalarNode) -> int:
    """Number of the line behind a scalar's last one, where the end mark of a block scalar is."""
    return int(node.end_mark.line) + (node.end_mark.column > 0)


def _find_end_mark(lines: list[str], begin: int, name: str) -> int:
    for number in range(begin + 1, len(lines)):
        bare = lines[number].strip()
        if bare == insertions.END:
            return number
        if bare.startswith(insertions.BEGIN):
            break
    raise CorruptDataError(
        f"{name}, line {begin + 1}: this bootseer mark has no end; remove the block by hand"
    )


def _add_mapping_cuts(text: Text, node: yaml.MappingNode, cuts: list[_Cut]) -> None:
    has_wrapper = False
    for key in ("initContainers", "volumes", "volumeMounts", "env", "command"):
        value = child(node, key)
        if not isinstance(value, yaml.SequenceNode):
            continue
        ours = _find_our_items(key, value)
        if ours:
            _add_item_cuts(text, node, key, value, ours, cuts)
            has_wrapper = has_wrapper or key == "command"
    if has_wrapper:  # then we may have written out the image's arguments too
        for name, key_node, value in pairs(node):
            if name == "args" and _is_key_ours(text, key_node, value):
                cuts.append(_make_pair_cut(text, key_node, value))


def _read_tiers(pod: Pod) -> list[list[str]]:
    """The tier that each container was given, which our mark names behind the version."""
    tiers = []
    for container in pod.containers():
        entries = items(child(container, "env"))
        ours = [entry for entry in entries if _read_name(entry) == names.MARK_VARIABLE]
        value = child(ours[0], "value") if ours else None
        tiers.append(scalar(value).split()[1:])
    return tiers


def _add_tier_cut(
    text: Text, container: yaml.MappingNode, tier: list[str], cuts: list[_Cut]
) -> None:
    """Cut what a tier put in, if it is still there: in flow style, or rewritten by a tool."""
    if not tier:
        return
    path = ("resources", "limits", tier[-1]) if tier[0] == "fuse" else _PRIVILEGED
    node: yaml.Node | None = container
    for depth, name in enumerate(path):
        if not isinstance(node, yaml.MappingNode):
            return
        for key, key_node, value in pairs(node):
            is_ours = text.raw.startswith(insertions.OWN_COLON, key_node.end_mark.index)
            if key == name and ((is_ours and node.flow_style) or depth == len(path) - 1):
                cuts.append(_make_tier_cut(text, node, key_node, value))
                return
        node = child(node, name)


_PRIVILEGED = ("securityContext", "privileged")


def _make_tier_cut(
    text: Text, mapping: yaml.MappingNode, key_node: yaml.Node, value: yaml.Node
) -> _Cut:
    """Cut one pair, which may be anywhere in its mapping, as tools sort keys."""
    at, end = key_node.start_mark.index, value.end_mark.index
    if not mapping.flow_style:
        return _Cut(text.line_start(at), text.line_end(end - 1))
    all_pairs = list(pairs(mapping))
    number = next(n for n, (_, key, _) in enumerate(all_pairs) if key is key_node)
    if text.raw.startswith(", ", end) or len(all_pairs) == 1:
        return _make_pair_cut(text, key_node, value)
    if number:
        return _Cut(all_pairs[number - 1][2].end_mark.index, end)
    return _Cut(at, all_pairs[1][1].start_mark.index)


def _find_our_items(key: str, value: yaml.SequenceNode) -> list[int]:
    """Numbers of the items of a list that are ours."""
    if key == "command":
        words = [scalar(item) for item in value.value]
        is_wrapped = words[:1] == [names.LAUNCHER] and "--" in words
        return list(range(words.index("--") + 1)) if is_wrapped else []
    item_names = [_read_name(item) for item in value.value]
    if key == "env":  # the manifest may set variables of the same names: ours precede our mark
        if names.MARK_VARIABLE not in item_names:
            return []
        mark = item_names.index(names.MARK_VARIABLE)
        return [n for n in range(mark) if item_names[n] in names.VARIABLES] + [mark]
    return [n for n, name in enumerate(item_names) if name in names.NAMES]


def _add_item_cuts(
    text: Text,
    mapping: yaml.MappingNode,
    key: str,
    value: yaml.SequenceNode,
    ours: list[int],
    cuts: list[_Cut],
) -> None:
    key_node = next(k for name, k, _ in pairs(mapping) if name == key)
    if key == "command" and _is_filled_by_us(text, value):
        cuts.append(_Cut(insertions.find_opening(text, value, "["), value.value[-1].end_mark.index))
        return
    is_all_ours = len(ours) == len(value.value)
    null = insertions.find_replaced_null(text, value) if value.flow_style and not ours[0] else None
    if null is not None and (is_all_ours or key == "command"):
        cuts.append(_Cut(null[0], value.end_mark.index, null[1]))
        return
    # A command that we wrote ends in the words of the image.
    if (is_all_ours or key == "command") and _is_key_ours(text, key_node, value):
        cuts.append(_make_pair_cut(text, key_node, value))
    elif is_all_ours and not value.flow_style:
        cuts.append(_make_block_key_cut(text, mapping, key_node, value))
    else:
        make_cut = _make_flow_cut if value.flow_style else _make_block_cut
        cuts += [make_cut(text, value, first, behind) for first, behind in _group_runs(ours)]


def _group_runs(numbers: list[int]) -> list[tuple[int, int]]:
    """The range `[first, behind)` of each run of consecutive numbers."""
    out: list[tuple[int, int]] = []
    for number in numbers:
        if out and out[-1][1] == number:
            out[-1] = (out[-1][0], number + 1)
        else:
            out.append((number, number + 1))
    return out


def _make_block_key_cut(
    text: Text, mapping: yaml.MappingNode, key_node: yaml.Node, value: yaml.SequenceNode
) -> _Cut:
    """Cut a key with its list; the dash of the item that is the mapping may precede it."""
    at = key_node.start_mark.index
    start = text.line_start(at)
    starts = [key.start_mark.index for _, key, _ in pairs(mapping)]
    behind = [index for index in starts if index > at]
    if text.raw[start:at].strip() and behind:
        return _Cut(at, min(behind))
    return _Cut(start, _find_block_end(text, value))


def _find_block_end(text: Text, value: yaml.SequenceNode) -> int:
    node: yaml.Node = value
    while isinstance(node, yaml.CollectionNode) and node.value and not node.flow_style:
        node = node.value[-1][1] if isinstance(node, yaml.MappingNode) else node.value[-1]
    last = node.end_mark.index  # a collection's own end mark is behind the comments that follow
    while text.raw[last - 1].isspace():
        last -= 1
    return text.line_end(last - 1)


def _make_block_cut(text: Text, value: yaml.SequenceNode, first: int, behind: int) -> _Cut:
    """Cut the whole lines of the items `[first, behind)`."""

    def find_start(number: int) -> int:
        return text.line_start(text.raw.rfind("-", 0, value.value[number].start_mark.index))

    end = find_start(behind) if behind < len(value.value) else _find_block_end(text, value)
    return _Cut(find_start(first), end)


def _make_flow_cut(text: Text, value: yaml.SequenceNode, first: int, behind: int) -> _Cut:
    """Cut the items `[first, behind)` with their commas."""
    if first:
        start = value.value[first - 1].end_mark.index
        return _Cut(start, value.value[behind - 1].end_mark.index)
    start = insertions.find_opening(text, value, "[")
    end = value.value[behind - 1].end_mark.index
    if behind < len(value.value):
        is_as_inserted = text.raw.startswith(", ", end)
        end = end + 2 if is_as_inserted else value.value[behind].start_mark.index
    return _Cut(start, end)


def _is_filled_by_us(text: Text, value: yaml.SequenceNode) -> bool:
    """Whether the list was in the manifest, empty, before we filled it."""
    if not value.flow_style:
        return False
    return text.raw.startswith(
        insertions.OWN_BRACKET + '"', insertions.find_opening(text, value, "[") - 1
    )


def _is_key_ours(text: Text, key_node: yaml.Node, value: yaml.Node) -> bool:
    """Whether we added the key of this list too, in flow style."""
    if not isinstance(value, yaml.SequenceNode) or not value.flow_style:
        return False
    return text.raw.startswith(insertions.OWN_COLON, key_node.end_mark.index)


def _make_pair_cut(text: Text, key_node: yaml.Node, value: yaml.Node) -> _Cut:
    end = value.end_mark.index
    return _Cut(key_node.start_mark.index, end + 2 if text.raw.startswith(", ", end) else end)


def _apply_cuts(raw: str, cuts: list[_Cut]) -> str:
    out, last = [], 0
    for cut in sorted(cuts, key=lambda c: c.start):
        out += [raw[last : cut.start], cut.null]
        last = max(last, cut.end)
    return "".join([*out, raw[last:]])
