"""A manifest as text with the places of its nodes: what is edited is the text, never a dump.

YAML (JSON is a subset of it) is parsed only to learn where things stand, so comments, key order,
quoting and newlines stay as they are.
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
_KINDS = {
    yaml.ScalarNode: "tag:yaml.org,2002:str",
    yaml.SequenceNode: "tag:yaml.org,2002:seq",
    yaml.MappingNode: "tag:yaml.org,2002:map",
}
_PLAIN = {"<<": _MERGE, **dict.fromkeys(("", "~", "null", "Null", "NULL"), _NULL)}


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Tells null and merge keys from texts, and nothing else: numbers and dates stay texts.

    Looking for these in every scalar is a sixth of the work on a large manifest.
    """

    def resolve(self, kind: type[yaml.Node], value: object, implicit: object) -> str:
        if kind is yaml.ScalarNode and isinstance(implicit, tuple) and implicit[0]:
            return _PLAIN.get(value, _KINDS[kind])  # type: ignore[call-overload, no-any-return]
        return _KINDS[kind]

    def descend_resolver(self, current: object, index: object) -> None:
        pass

    def ascend_resolver(self) -> None:
        pass


_DEPTH = 200
_TEMPLATE = re.compile(r"^[ \t]*(?:- +)*(?:[\w./-]+: +)?(?:\{\{|\{%)", re.M)
"""What a template of Helm or Jinja has in a value's place, unquoted."""
_UNRENDERED = "what a template of Helm or Jinja has; render it first, as by `helm template`"
_LONE_RETURN = re.compile(r"\r(?!\n)")
ODD_BREAKS = re.compile("[\x85\u2028\u2029]")
"""Characters that end a line for YAML 1.1 and for nobody else."""


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """One file: its characters, its name for messages, and the newline its lines end with.

    `written` is `edits`' own: what it has put into this text before, by what that was made of.
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

    def column(self, index: int) -> int:
        """Characters between the start of the line and `index`."""
        return index - self.line_start(index)

    def where(self, node: yaml.Node) -> str:
        """`file, line N` for messages."""
        return f"{self.name}, line {node.start_mark.line + 1}"


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """One YAML document that holds a mapping; `aliased` are nodes reached by more than one way."""

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


def documents(text: Text) -> Iterator[Document]:
    """Parse one document after the other; empty ones and those without a mapping are left out.

    A document's nodes take fifty times the room of its text, so keep none beyond its turn.

    Raises UsageError with file and line for malformed YAML, for a key that is no text, and for one
    given twice in one mapping: readers differ in which of the two they believe.
    """
    lone = _LONE_RETURN.search(text.raw)
    if lone:
        number = text.raw.count("\n", 0, lone.start()) + 1
        raise UsageError(
            f"{text.name}, line {number}: a carriage return without a newline; "
            "save the file with one kind of line ends"
        )
    shift = 1 if text.raw.startswith("\ufeff") else 0
    anchors = "&" in text.raw
    # The mark of a byte order mark would shift every index behind it by one.
    for root in _roots(text, text.raw[shift:]):
        if shift:
            raise UsageError(f"{text.name}: begins with a byte order mark; save it as plain UTF-8")
        if isinstance(root, yaml.MappingNode):
            if anchors:
                yield Document(root, _aliased(text, root))
            else:
                _check_tree(text, root)
                yield Document(root, frozenset())


def _roots(text: Text, raw: str) -> Iterator[yaml.Node]:
    try:
        yield from yaml.compose_all(raw, Loader=_Loader)
    except yaml.YAMLError as error:
        raise UsageError(_fault(text, error)) from error
    except RecursionError as error:
        raise UsageError(f"{text.name}: nested too deeply to be a manifest") from error


def _fault(text: Text, error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.reader.ReaderError):
        number = text.raw.count("\n", 0, error.position) + 1
        return f"{text.name}, line {number}: a control character, not allowed in YAML; remove it"
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or "cannot be read"
    if mark is None:
        return f"{text.name}: not valid YAML: {problem}; correct the file"
    start = text.line_start(min(mark.index, len(text.raw)))
    line = text.raw[start : text.line_end(start)]
    place = _TEMPLATE.search(text.raw)
    hint = f" (line {_line_of(text, place.start())} has {_UNRENDERED})" if place else ""
    if "\t" in line[: len(line) - len(line.lstrip())]:
        hint = " (a tab indents this line; YAML wants spaces)"
    return f"{text.name}, line {mark.line + 1}: not valid YAML: {problem}{hint}; correct the file"


def _aliased(text: Text, root: yaml.Node) -> frozenset[int]:
    """Ids of nodes that stand at more than one place, and of all that is below them."""
    seen: set[int] = set()
    shared: set[int] = set()
    stack: list[tuple[yaml.Node, bool, int]] = [(root, False, 0)]
    while stack:
        node, below, depth = stack.pop()
        again = id(node) in seen
        if again and (id(node) in shared or not (below or again)):
            continue
        seen.add(id(node))
        if depth > _DEPTH:
            raise UsageError(f"{text.where(node)}: nested too deeply to be a manifest")
        below = below or again
        if below:
            shared.add(id(node))
        if isinstance(node, yaml.MappingNode):
            if not again:
                _check_keys(text, node)
            stack += [(child, below, depth + 1) for pair in node.value for child in pair]
        elif isinstance(node, yaml.SequenceNode):
            stack += [(child, below, depth + 1) for child in node.value]
    return frozenset(shared)


def _check_tree(text: Text, root: yaml.Node) -> None:
    """What `_aliased` checks, for a tree in which nothing can stand twice."""
    stack = [(root, 0)]
    while stack:
        node, depth = stack.pop()
        if depth > _DEPTH:
            raise UsageError(f"{text.where(node)}: nested too deeply to be a manifest")
        below = node.value
        if isinstance(node, yaml.MappingNode):
            _check_keys(text, node)
            below = [child for pair in node.value for child in pair]
        stack += [(child, depth + 1) for child in below if type(child) is not yaml.ScalarNode]


def _line_of(text: Text, index: int) -> int:
    return text.raw.count("\n", 0, index) + 1


def _check_keys(text: Text, node: yaml.MappingNode) -> None:
    seen: set[str] = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):  # `{{ name }}` is a mapping as a mapping's key
            raise UsageError(
                f"{text.where(key)}: a key that is no text, which no manifest has: "
                f"a `{{{{` without quotes is {_UNRENDERED}"
            )
        if key.value in seen and key.tag != _MERGE:
            raise UsageError(
                f"{text.where(key)}: the key {key.value!r} is there twice; remove one of the two"
            )
        seen.add(key.value)


def pairs(node: yaml.Node | None) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """(key, key node, value node) of a mapping's own entries; nothing for anything else."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                yield key.value, key, value


def child(node: yaml.Node | None, *path: str) -> yaml.Node | None:
    """The node at a path of keys, None when any of them is missing."""
    for name in path:
        if not isinstance(node, yaml.MappingNode):
            return None
        found = None
        for key, value in node.value:  # by hand: this is most of the work on a large manifest
            if key.value == name and isinstance(key, yaml.ScalarNode):
                found = value
        if found is None:
            return None
        node = found
    return node


def merged(node: yaml.Node | None, key: str) -> yaml.Node | None:
    """The value of a key, its own or one merged in by `<<` (one step deep, as written)."""
    own = child(node, key)
    if own is not None or not isinstance(node, yaml.MappingNode):
        return own
    for name, value in node.value:
        if name.tag == _MERGE:
            for source in (value, *items(value)):
                found = child(source, key)
                if found is not None:
                    return found
    return None


def merges(node: yaml.MappingNode) -> bool:
    """Whether entries of another mapping are merged into this one (`<<: *base`)."""
    return any(key.tag == _MERGE for key, _ in node.value)


def is_null(node: yaml.Node) -> bool:
    """Whether a value is null, written out or left empty."""
    return isinstance(node, yaml.ScalarNode) and node.tag == _NULL


def is_absent(node: yaml.Node) -> bool:
    """Whether a list is null or empty, which the API takes as if it were not given."""
    return is_null(node) or (isinstance(node, yaml.SequenceNode) and not node.value)


def scalar(node: yaml.Node | None) -> str:
    """A scalar's text, "" for anything else."""
    return node.value if isinstance(node, yaml.ScalarNode) else ""


def items(node: yaml.Node | None) -> Sequence[yaml.Node]:
    """A sequence's items, none for anything else."""
    return node.value if isinstance(node, yaml.SequenceNode) else ()


def plain(node: yaml.Node | None) -> object:
    """The value as Python data, every scalar as its text; for looking at, never for writing."""
    if isinstance(node, yaml.MappingNode):
        return {key: plain(value) for key, _, value in pairs(node)}
    if isinstance(node, yaml.SequenceNode):
        return [plain(value) for value in node.value]
    return None if node is None or is_null(node) else scalar(node)


def labels(node: yaml.Node | None) -> Mapping[str, str]:
    """A mapping of texts, as labels and annotations are."""
    return {key: scalar(value) for key, _, value in pairs(node)}
