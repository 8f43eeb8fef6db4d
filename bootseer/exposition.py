"""Metrics in Prometheus' text exposition format.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/ (text format 0.0.4). Names get
the prefix `bootseer_`; values are in base units (seconds, bytes).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Kind = Literal["gauge", "counter"]
Sample = tuple[Mapping[str, str], float | int | None]


def format_metric(
    name: str, help_text: str, samples: Iterable[Sample], *, kind: Kind = "gauge"
) -> str:
    """One metric with its samples; "" where no value is known, as those of None are left out."""
    full = f"bootseer_{name}"
    lines = [
        f"{full}{_format_labels(labels)} {float(value)!r}\n"
        for labels, value in samples
        if value is not None
    ]
    if not lines:
        return ""
    return f"# HELP {full} {help_text}.\n# TYPE {full} {kind}\n" + "".join(lines)


def _format_labels(labels: Mapping[str, str]) -> str:
    """Label values with backslash, quote and newline escaped as the format asks."""
    pairs = []
    for key, value in labels.items():
        text = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        pairs.append(f'{key}="{text}"')
    return "{" + ",".join(pairs) + "}" if pairs else ""
