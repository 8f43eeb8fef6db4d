"""Write the report's JSON Schema and docs/report-schema.md from the report's own records.

    python -m tools.report_schema

A test holds the two files to what this makes.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path

from bootseer.profiler.report import model as report_model

ROOT = Path(__file__).parent.parent
SCHEMA = ROOT / "bootseer" / "profiler" / "report" / "report.schema.json"
PAGE = ROOT / "docs" / "report-schema.md"
Schema = dict[str, typing.Any]

_PLAIN: dict[object, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    types.NoneType: "null",
}
_HEAD = """# The report's JSON

`bootseer report --json` prints one document in this format. Its JSON Schema (2020-12) is
`bootseer/profiler/report/report.schema.json`; both are made by `python -m tools.report_schema`.

Fields ending in `_s` are seconds, to the microsecond. Moments are on the start's clock: zero is the
start's first event, and the differences between the nodes' clocks are corrected. `began_unix_s`
alone is Unix time. `null` (`None` in the descriptions) means not known or not present, never zero.
Within one `schema_version`, fields are added but neither renamed nor given another meaning.

Terms: *own work* is time in spans that are not marked as waiting, *waiting* time in those that are.
A *process* is one rank, or a node (with pods, a pod) without ranks. See [terms](terms.md).
"""


def schema_of(hint: object, found: dict[str, Schema]) -> Schema:
    """The schema of one type; records are added to `found` and referred to."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        each = [schema_of(argument, found) for argument in arguments]
        if all(set(one) == {"type"} for one in each):
            return {"type": [one["type"] for one in each]}
        return {"anyOf": each}
    if origin is tuple:
        return {"type": "array", "items": schema_of(arguments[0], found)}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": schema_of(arguments[1], found)}
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _record(hint, found)
    return {"type": _PLAIN[hint]}


def _record(record: type, found: dict[str, Schema]) -> Schema:
    name = record.__name__
    if name not in found:
        found[name] = {}  # keeps the order of first use
        hints = typing.get_type_hints(record)
        properties = {
            field.name: schema_of(hints[field.name], found) for field in dataclasses.fields(record)
        }
        # Derived figures are null where the divisor is zero.
        for derived in report_model.DERIVED.get(record, ()):
            properties[derived] = {"type": ["number", "null"]}
        found[name] = {
            "description": " ".join((inspect.getdoc(record) or "").split()),
            "type": "object",
            "required": list(properties),
            "properties": properties,
            "additionalProperties": False,
        }
    return {"$ref": f"#/$defs/{name}"}


def document() -> Schema:
    """The whole schema, starting from `Report`."""
    found: dict[str, Schema] = {}
    _record(report_model.Report, found)
    top = found.pop("Report")
    version = {"schema_version": {"const": report_model.SCHEMA_VERSION}}
    top["properties"] = {**version, **top["properties"]}
    top["required"] = list(top["properties"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:bootseer:report:{report_model.SCHEMA_VERSION}",
        "title": "bootseer report",
        **top,
        "$defs": found,
    }


def _words(schema: Schema) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[-1]
        return f"[{name}](#{name.lower()})"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "anyOf" in schema:
        return " or ".join(_words(one) for one in schema["anyOf"])
    kind = schema["type"]
    if kind == "array":
        return f"list of {_words(schema['items'])}"
    if kind == "object":
        return f"object with values {_words(schema['additionalProperties'])}"
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def _table(properties: Mapping[str, Schema]) -> list[str]:
    rows = [f"| `{name}` | {_words(schema)} |" for name, schema in properties.items()]
    return ["| field | type |", "|---|---|", *rows, ""]


def page(schema: Schema) -> str:
    """The schema as a document for people."""
    lines = [_HEAD, "## Document", "", schema["description"], ""]
    lines += _table(schema["properties"])
    for name, definition in schema["$defs"].items():
        lines += [f"## {name}", "", definition["description"], ""]
        lines += _table(definition["properties"])
    return "\n".join(lines)


def files() -> dict[Path, str]:
    """What the two files should hold."""
    schema = document()
    return {SCHEMA: json.dumps(schema, indent=1) + "\n", PAGE: page(schema)}


def main() -> int:
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
