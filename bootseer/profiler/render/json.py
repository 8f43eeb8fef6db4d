"""The report as JSON, in the format of report/report.schema.json (docs/report-schema.md)."""

from __future__ import annotations

import json
from importlib import resources

from bootseer.profiler.report.model import Json, Report


def render(report: Report, *, indent: int | None = None) -> str:
    """One JSON document, ended by a newline; no NaN or infinity, which JSON does not know."""
    return json.dumps(report.to_json(), indent=indent, allow_nan=False) + "\n"


def schema() -> Json:
    """The JSON Schema (2020-12) that every report document matches."""
    text = (resources.files("bootseer.profiler.report") / "report.schema.json").read_text("utf-8")
    document = json.loads(text)
    assert isinstance(document, dict)
    return document
