"""Insertions into a manifest's text, written so that `uninject` can find and remove them.

Two ways of writing, by the style of the place:

* in block style as whole lines, between `# bootseer:begin DIGEST` and `# bootseer:end`; the digest
  is of the lines between, so that a change to them is noticed;
* in flow style (which JSON is) inline, directly behind the opening bracket. A key of ours is
  written with two spaces before its colon, which distinguishes it from a key that was there; the
  items of a list that was empty stand two spaces behind its bracket.

A null that is written out becomes a comment (`# bootseer:was null`) before the lines that fill it.
In flow style there is no room for one: a list takes its place, and three or more spaces behind the
bracket say that it was null, and how the null was written.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence

import yaml

from bootseer.errors import NotSupportedError
from bootseer.kubernetes import manifest_text
from bootseer.kubernetes.manifest_text import Text

BEGIN, END = "# bootseer:begin", "# bootseer:end"
OWN_COLON = "  :"
OWN_BRACKET = "[  "
WAS_NULL = "# bootseer:was "
_NULLS = ("null", "~", "Null", "NULL", "")
_INLINE = -1  # in place of a column

Value = str | int | bool | Sequence["Value"] | Mapping[str, "Value"]


@dataclasses.dataclass(frozen=True, slots=True)
class Edit:
    """Characters to insert at an index of the original text; several at one index keep order.

    They replace `replaced`, the text of a null (or nothing).
    """

    at: int
    text: str
    replaced: str = ""


class CannotEditError(NotSupportedError):
    """The place cannot be edited without touching what is there."""


def apply_edits(raw: str, edits: Sequence[Edit]) -> str:
    """Return the text with all insertions made."""
    out, last = [], 0
    for edit in sorted(edits, key=lambda e: e.at):
        out += [raw[last : edit.at], edit.text]
        last = edit.at + len(edit.replaced)
    return "".join([*out, raw[last:]])


def digest_lines(lines: Sequence[str]) -> str:
    """The digest behind `bootseer:begin` for these lines (given without their newlines)."""
    return hashlib.sha256("\n".join(line.strip() for line in lines).encode()).hexdigest()[:12]


def prepend_items(
    text: Text, mapping: yaml.MappingNode, key: str, new: Sequence[Value]
) -> list[Edit]:
    """Put `new` items before those of the list at `key`, which is added where it is missing.

    Null counts as an empty list. Raises CannotEditError where the list is an alias, or no list.
    """
    for name, key_node, value in manifest_text.pairs(mapping):
        if name != key:
            continue
        if isinstance(value, yaml.SequenceNode):
            _check_not_alias(text, key_node, value)
            return [_insert_items(text, value, new)]
        if manifest_text.is_null(value):
            return _replace_null(text, mapping, key_node, value, new)
        raise CannotEditError(
            f"{text.locate(value)}: {key} is not a list; make it one or remove it"
        )
    return [add_keys(text, mapping, {key: new})]


def fill_list(text: Text, mapping: yaml.MappingNode, key: str, new: Sequence[Value]) -> list[Edit]:
    """Put items without names into the empty list at `key`, or in place of its null.

    Raises CannotEditError where the list is an alias.
    """
    key_node, value = next((k, v) for name, k, v in manifest_text.pairs(mapping) if name == key)
    if isinstance(value, yaml.SequenceNode) and not value.value:
        _check_not_alias(text, key_node, value)
        at = find_opening(text, value, "[")
        return [Edit(at, OWN_BRACKET[1:] + ", ".join(map(format_flow, new)))]
    return prepend_items(text, mapping, key, new)


def _replace_null(
    text: Text,
    mapping: yaml.MappingNode,
    key: yaml.Node,
    null: yaml.Node,
    new: Sequence[Value],
) -> list[Edit]:
    written = manifest_text.scalar(null)
    at, column = null.start_mark.index, text.column(key.start_mark.index)
    if at < key.end_mark.index or text.raw[at : at + 1] in ("&", "!"):  # alias or properties
        raise _refuse_null(text, key, null)
    if not mapping.flow_style:
        if not written and _is_explicit_key(text, key):  # the colon is on a line of its own
            raise _refuse_null(text, key, null)
        line = text.line_end(at if written else key.start_mark.index)
        lines = _insert_lines(text, line, new, column)
        return [Edit(at, WAS_NULL), lines] if written else [lines]
    if not written:
        colon = text.raw.find(":", key.end_mark.index)
        if colon < 0 or text.raw[key.end_mark.index : colon].strip():  # `{env}`
            raise _refuse_null(text, key, null)
        at = colon + 1
    _check_colon(text, key)
    blank = " " * (len(OWN_BRACKET) + _NULLS.index(written))
    listed = f"[{blank}{', '.join(map(format_flow, new))}]"
    return [Edit(at, listed if written else f" {listed}", written)]


def _refuse_null(text: Text, key: yaml.Node, null: yaml.Node) -> CannotEditError:
    return CannotEditError(
        f"{text.locate(null)}: {manifest_text.scalar(key)} is null, which cannot be filled here; "
        "remove the key, or write []"
    )


def find_replaced_null(text: Text, value: yaml.SequenceNode) -> tuple[int, str] | None:
    """The index of a flow list of ours that replaced a null, and that null's text; None if none."""
    at = value.start_mark.index
    match = _FILLED_NULL.match(text.raw, at)
    number = len(match[1]) - len(OWN_BRACKET) if match else -1
    if not 0 <= number < len(_NULLS):
        return None
    return (at, _NULLS[number]) if _NULLS[number] else (at - 1, "")


def _check_not_alias(text: Text, key: yaml.Node, value: yaml.SequenceNode) -> None:
    if value.start_mark.index < key.start_mark.index:
        raise CannotEditError(
            f"{text.locate(key)}: the value is an alias of what stands at line "
            f"{value.start_mark.line + 1}; write it out here"
        )
    if value.flow_style:
        _check_colon(text, key)


def _check_colon(text: Text, key: yaml.Node) -> None:
    if text.raw.startswith(OWN_COLON, key.end_mark.index):
        raise CannotEditError(f"{text.locate(key)}: remove the spaces before the colon")


def _is_explicit_key(text: Text, key: yaml.Node) -> bool:
    """Whether a key in block style is written `? key`, with its colon on a line below, or none."""
    end = key.end_mark.index
    return not text.raw[end : text.line_end(end)].lstrip(" \t").startswith(":")


def check_flow_key(text: Text, mapping: yaml.MappingNode, name: str) -> None:
    """Raise CannotEditError where a key of a flow mapping is written the way that ours are."""
    for key, key_node, _ in manifest_text.pairs(mapping):
        if key == name and mapping.flow_style:
            _check_colon(text, key_node)


def find_opening(text: Text, node: yaml.Node, bracket: str) -> int:
    """Index behind a flow collection's opening bracket, which an anchor or a tag may precede."""
    at = node.start_mark.index
    before = _PROPERTIES.match(text.raw, at)
    at = before.end() if before else at
    if not text.raw.startswith(bracket, at):
        raise CannotEditError(f"{text.locate(node)}: no {bracket} found where it should begin")
    return at + 1


def _insert_items(text: Text, sequence: yaml.SequenceNode, new: Sequence[Value]) -> Edit:
    if sequence.flow_style:
        inline = _write_once(text, _INLINE, list(new), lambda: ", ".join(map(format_flow, new)))
        at = find_opening(text, sequence, "[")
        return Edit(at, inline + (", " if sequence.value else ""))
    first = sequence.value[0].start_mark.index
    dash = text.raw.rfind("-", 0, first)
    start = text.line_start(dash)
    between = text.raw[dash + 1 : first]
    if text.raw[start:dash].strip(" ") or between.strip(" \t\r\n") or sequence.tag != _SEQUENCE:
        raise CannotEditError(
            f"{text.locate(sequence)}: the first item of the list is not alone behind its dash"
        )
    return _insert_lines(text, start, new, dash - start)


def add_keys(text: Text, mapping: yaml.MappingNode, new: Mapping[str, Value]) -> Edit:
    """Put new keys into a mapping that has none of them."""
    if mapping.flow_style:
        inline = ", ".join(
            f"{json.dumps(key)}{OWN_COLON} {format_flow(value)}" for key, value in new.items()
        )
        at = find_opening(text, mapping, "{")
        return Edit(at, inline + (", " if mapping.value else ""))
    start = mapping.value[0][0].start_mark.index
    if _is_explicit_key(text, mapping.value[0][0]):
        raise CannotEditError(
            f"{text.locate(mapping)}: write the first key without a question mark"
        )
    column = text.column(start)
    if not text.raw[text.line_start(start) : start].strip():
        return _insert_lines(text, text.line_start(start), new, column)
    # `- name: x`: the first key shares its line with the dash, so go behind a one-line value.
    for _, key, value in manifest_text.pairs(mapping):
        is_one_line = key.start_mark.line == value.end_mark.line
        is_no_alias = value.start_mark.index >= key.start_mark.index
        is_inline = isinstance(value, yaml.ScalarNode) and value.style not in ("|", ">")
        if is_one_line and is_no_alias and is_inline:
            at = text.line_end(value.end_mark.index)
            return _insert_lines(text, at, new, column)
    raise CannotEditError(
        f"{text.locate(mapping)}: no key with a value on one line to write behind"
    )


def _insert_lines(
    text: Text, at: int, new: Sequence[Value] | Mapping[str, Value], column: int
) -> Edit:
    inserted = _format_marked_lines(text, new, column)
    if at and text.raw[at - 1] != "\n":  # behind a last line without its newline
        inserted = text.newline + inserted[: -len(text.newline)]
    return Edit(at, inserted)


def _format_marked_lines(
    text: Text, new: Sequence[Value] | Mapping[str, Value], column: int
) -> str:
    """Items or entries as lines between our marks."""

    def write() -> str:
        if isinstance(new, Mapping):
            lines = format_block_keys(new, column)
        else:
            lines = format_block_items(new, column)
        indent = " " * column
        marked = [f"{indent}{BEGIN} {digest_lines(lines)}", *lines, f"{indent}{END}"]
        return "".join(line + text.newline for line in marked)

    parts = [*new, *new.values()] if isinstance(new, Mapping) else list(new)
    return _write_once(text, column, parts, write)


def _write_once(text: Text, column: int, parts: list[Value], write: Callable[[], str]) -> str:
    """The result of `write` for `parts`, kept: most pods of one text get the same."""
    key = (column, *map(id, parts))  # `parts` are kept with it, so the ids stay theirs
    if key not in text.written:
        text.written[key] = (parts, write())
    return text.written[key][1]


def format_block_items(values: Sequence[Value], column: int) -> list[str]:
    """Lines of the items of a block list whose dashes stand at `column`."""
    out: list[str] = []
    for value in values:
        if isinstance(value, Mapping) and value:
            lines = format_block_keys(value, column + 2)
            out += [" " * column + "- " + lines[0].lstrip(), *lines[1:]]
        else:
            out.append(" " * column + "- " + _format_on_one_line(value))
    return out


def format_block_keys(values: Mapping[str, Value], column: int) -> list[str]:
    """Lines of the entries of a block mapping at `column`."""
    out: list[str] = []
    for key, value in values.items():
        head = f"{' ' * column}{key}:"
        if isinstance(value, Mapping) and value:
            out += [head, *format_block_keys(value, column + 2)]
        elif isinstance(value, Sequence) and not isinstance(value, str) and value:
            out += [head, *format_block_items(value, column)]
        else:
            out.append(f"{head} {_format_on_one_line(value)}")
    return out


def _format_on_one_line(value: Value) -> str:
    """A value on one line; a text that YAML cannot take for anything else is not quoted."""
    if isinstance(value, str) and _UNQUOTED.fullmatch(value) and value.lower() not in _AMBIGUOUS:
        return value
    return format_flow(value)


_SEQUENCE = "tag:yaml.org,2002:seq"
_FILLED_NULL = re.compile(r'\[( {3,})[{"]')
_PROPERTIES = re.compile(r"(?:[&!]\S*(?:\s+#[^\n]*\n)?\s+)+(?:#[^\n]*\n\s*)*")
_UNQUOTED = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*(?::[A-Za-z0-9_./-]+)*")
_UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
_AMBIGUOUS = ("y", "n", "yes", "no", "on", "off", "true", "false", "null")


def format_flow(value: Value) -> str:
    """One value on one line, as JSON, which is valid YAML."""
    written = json.dumps(value, ensure_ascii=False)
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", written)
