"""A manifest as text, and the nodes of its YAML with their places in the text.

Edits are made to the text, never to a dump. YAML (JSON is a subset of it) is parsed only to learn
where things stand, so comments, key order, quoting and newlines stay as they are.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

import yaml
import yaml.reader

from bootseer.errors import UsageError

_MERGE = "tag:yaml.org,2002:merge"
_NULL = "tag:yaml.org,2002:null"
_NODE_TAGS = {
    yaml.ScalarNode: "tag:yaml.org,2002:str",
    yaml.SequenceNode: "tag:yaml.org,2002:seq",
    yaml.MappingNode: "tag:yaml.org,2002:map",
}
_IMPLICIT_TAGS = {"<<": _MERGE, **dict.fromkeys(("", "~", "null", "Null", "NULL"), _NULL)}


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A loader that recognises nulls and merge keys, and takes all other scalars for texts.

    Looking for numbers and dates in every scalar is a sixth of the work on a large manifest.
    """

    def resolve(self, kind: type[yaml.Node], value: object, implicit: object) -> str:
        if kind is yaml.ScalarNode and isinstance(implicit, tuple) and implicit[0]:
            tag: str = _IMPLICIT_TAGS.get(value, _NODE_TAGS[kind])  # type: ignore[call-overload]
            return tag
        return _NODE_TAGS[kind]

    def descend_resolver(self, current: object, index: object) -> None:
        pass

    def ascend_resolver(self) -> None:
        pass


_MAX_DEPTH = 200
_TEMPLATE_TAG = re.compile(r"^[ \t]*(?:- +)*(?:[\w./-]+: +)?(?:\{\{|\{%)", re.M)
"""An unquoted tag of Helm or Jinja in place of a value."""
_UNRENDERED = "what a template of Helm or Jinja has; render it first, as by `helm template`"
_LONE_RETURN = re.compile(r"\r(?!\n)")
ODD_BREAKS = re.compile("[\x85\u2028\u2029]")
"""Characters that end a line in YAML 1.1 alone."""


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """One file: its characters, its name in messages, and the newline that ends its lines.

    `written` belongs to `insertions`: the texts that it has formatted, by the ids of their parts.
    """

    raw: str
    name: str
    newline: str
    written: dict[tuple[int, ...], tuple[Sequence[object], str]] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )

    def line_start(self, index: int) -> int:
        """Index of the first character of the line that holds `index`."""
        return self.raw.rfind("\n", 0, index) + 1

    def line_end(self, index: int) -> int:
        """Index behind the newline that ends the line of `index` (or the end of the text)."""
        end = self.raw.find("\n", index)
        return len(self.raw) if end < 0 else end + 1

    def line_number(self, index: int) -> int:
        """Number of the line that holds `index`, from 1."""
        return self.raw.count("\n", 0, index) + 1

    def column(self, index: int) -> int:
        """Characters between the start of the line and `index`."""
        return index - self.line_start(index)

    def locate(self, node: yaml.Node) -> str:
        """Format the place of a node for messages: `file, line N`."""
        return f"{self.name}, line {node.start_mark.line + 1}"


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """A YAML document that is a mapping; `aliased` has the ids of nodes with more than one path."""

    root: yaml.MappingNode
    aliased: frozenset[int]


def decode(data: bytes, name: str) -> Text:
    """Decode a manifest; UsageError when it is not UTF-8 text."""
    try:
        raw = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{name}, line {line}: not UTF-8 text; save the file as UTF-8") from error
    first = raw.find("\n")
    newline = "\r\n" if first > 0 and raw[first - 1] == "\r" else "\n"
    return Text(raw, name, newline)


def parse_documents(text: Text) -> Iterator[Document]:
    """Parse one document after the other; leaves out empty ones and those without a mapping.

    A document's nodes take fifty times the memory of its text, so keep none beyond its turn.

    Raises UsageError with file and line for malformed YAML, for a key that is no text, and for one
    given twice in one mapping, as YAML readers differ in which of the two counts.
    """
    lone = _LONE_RETURN.search(text.raw)
    if lone:
        number = text.line_number(lone.start())
        raise UsageError(
            f"{text.name}, line {number}: a carriage return without a newline; "
            "save the file with one kind of line ends"
        )
    skipped = 1 if text.raw.startswith("\ufeff") else 0
    has_anchors = "&" in text.raw
    # The indices of nodes would be off by one behind a byte order mark, so such a text is refused.
    for root in _compose(text, text.raw[skipped:]):
        if skipped:
            raise UsageError(f"{text.name}: begins with a byte order mark; save it as plain UTF-8")
        if isinstance(root, yaml.MappingNode):
            if has_anchors:
                yield Document(root, _find_aliased(text, root))
            else:
                _check_tree(text, root)
                yield Document(root, frozenset())


def _compose(text: Text, raw: str) -> Iterator[yaml.Node]:
    try:
        yield from yaml.compose_all(raw, Loader=_Loader)
    except yaml.YAMLError as error:
        raise UsageError(_describe_yaml_error(text, error)) from error
    except RecursionError as error:
        raise UsageError(f"{text.name}: nested too deeply to be a manifest") from error


def _describe_yaml_error(text: Text, error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.reader.ReaderError):
        number = text.line_number(error.position)
        return f"{text.name}, line {number}: a control character, not allowed in YAML; remove it"
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or "cannot be read"
    if mark is None:
        return f"{text.name}: not valid YAML: {problem}; correct the file"
    start = text.line_start(min(mark.index, len(text.raw)))
    line = text.raw[start : text.line_end(start)]
    place = _TEMPLATE_TAG.search(text.raw)
    hint = f" (line {text.line_number(place.start())} has {_UNRENDERED})" if place else ""
    if "\t" in line[: len(line) - len(line.lstrip())]:
        hint = " (a tab indents this line; YAML wants spaces)"
    return f"{text.name}, line {mark.line + 1}: not valid YAML: {problem}{hint}; correct the file"


def _find_aliased(text: Text, root: yaml.Node) -> frozenset[int]:
    """Ids of nodes that stand at more than one place, and of all nodes below them."""
    seen: set[int] = set()
    shared: set[int] = set()
    stack: list[tuple[yaml.Node, bool, int]] = [(root, False, 0)]
    while stack:
        node, is_below_shared, depth = stack.pop()
        if id(node) in shared:
            continue
        is_seen = id(node) in seen
        seen.add(id(node))
        if depth > _MAX_DEPTH:
            raise UsageError(f"{text.locate(node)}: nested too deeply to be a manifest")
        is_shared = is_below_shared or is_seen
        if is_shared:
            shared.add(id(node))
        if isinstance(node, yaml.MappingNode):
            if not is_seen:
                _check_keys(text, node)
            stack += [(entry, is_shared, depth + 1) for pair in node.value for entry in pair]
        elif isinstance(node, yaml.SequenceNode):
            stack += [(entry, is_shared, depth + 1) for entry in node.value]
    return frozenset(shared)


def _check_tree(text: Text, root: yaml.Node) -> None:
    """Make the checks of `_find_aliased` for a document without anchors."""
    stack = [(root, 0)]
    while stack:
        node, depth = stack.pop()
        if depth > _MAX_DEPTH:
            raise UsageError(f"{text.locate(node)}: nested too deeply to be a manifest")
        entries = node.value
        if isinstance(node, yaml.MappingNode):
            _check_keys(text, node)
            entries = [entry for pair in node.value for entry in pair]
        stack += [(entry, depth + 1) for entry in entries if type(entry) is not yaml.ScalarNode]


def _check_keys(text: Text, node: yaml.MappingNode) -> None:
    seen: set[str] = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):  # `{{ name }}` is a mapping as a mapping's key
            raise UsageError(
                f"{text.locate(key)}: a key that is no text, which no manifest has: "
                f"a `{{{{` without quotes is {_UNRENDERED}"
            )
        if key.value in seen and key.tag != _MERGE:
            raise UsageError(
                f"{text.locate(key)}: the key {key.value!r} is there twice; remove one of the two"
            )
        seen.add(key.value)


def pairs(node: yaml.Node | None) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """(key, key node, value node) of a mapping's own entries; empty for any other node."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                yield key.value, key, value


def child(node: yaml.Node | None, *path: str) -> yaml.Node | None:
    """The node at a path of keys, None if any of them is missing."""
    for name in path:
        if not isinstance(node, yaml.MappingNode):
            return None
        value_node = None
        for key, value in node.value:  # without `pairs`: the most frequent loop
            if key.value == name and isinstance(key, yaml.ScalarNode):
                value_node = value
        if value_node is None:
            return None
        node = value_node
    return node


def effective_child(node: yaml.Node | None, key: str) -> yaml.Node | None:
    """The value of a key, the mapping's own or one merged in by `<<` (one level deep)."""
    own = child(node, key)
    if own is not None or not isinstance(node, yaml.MappingNode):
        return own
    for name, value in node.value:
        if name.tag == _MERGE:
            for source in (value, *items(value)):
                inherited = child(source, key)
                if inherited is not None:
                    return inherited
    return None


def has_merge_key(node: yaml.MappingNode) -> bool:
    """Whether entries of another mapping are merged into this one (`<<: *base`)."""
    return any(key.tag == _MERGE for key, _ in node.value)


def is_null(node: yaml.Node) -> bool:
    """Whether a value is null, written out or empty."""
    return isinstance(node, yaml.ScalarNode) and node.tag == _NULL


def is_absent(node: yaml.Node) -> bool:
    """Whether a list is null or empty, which the Kubernetes API takes for an absent one."""
    return is_null(node) or (isinstance(node, yaml.SequenceNode) and not node.value)


def scalar(node: yaml.Node | None) -> str:
    """The text of a scalar, "" for any other node."""
    return node.value if isinstance(node, yaml.ScalarNode) else ""


def items(node: yaml.Node | None) -> Sequence[yaml.Node]:
    """The items of a sequence, none for any other node."""
    return node.value if isinstance(node, yaml.SequenceNode) else ()


def labels(node: yaml.Node | None) -> Mapping[str, str]:
    """A mapping of texts, such as labels or annotations, as Python data."""
    return {key: scalar(value) for key, _, value in pairs(node)}
