"""`bootseer k8s`: what concerns manifests besides injecting them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import click

from bootseer.cli.kubernetes.inject import (
    file_option,
    injection_options,
    options_of,
    read,
    resolver_of,
)
from bootseer.errors import NotSupportedError


@click.group(help="Look at manifests for bootseer.")
def command() -> None:
    pass


@command.command(
    "check",
    help="""Say for each pod of a manifest which tier it gets and why.

    Takes the options of `bootseer inject`, and exits with code 7 when a pod would be refused.
    """,
)
@file_option
@injection_options
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
def check_command(**given: Any) -> int:
    from bootseer.kubernetes import check, manifest_text

    data, name = read(given["path"])
    findings = check.check(manifest_text.decode(data, name), options_of(given), resolver_of(given))
    if given["as_json"]:
        click.echo(json.dumps([dataclasses.asdict(found) for found in findings], indent=1))
    else:
        for found in findings:
            _show(found, check.ALLOWED[found.tier])
    return NotSupportedError.exit_code if any(found.refusal for found in findings) else 0


def _show(found: Any, allowed: str) -> None:
    click.echo(f"line {found.line}: {found.pod}, container {found.container or '?'}")
    if found.refusal:
        click.echo(f"    refused: {found.refusal}")
        return
    if found.passed_over:
        click.echo(f"    passed over: {found.passed_over}")
        return
    state = "injected already" if found.injected else "can be injected"
    click.echo(f"    {state}; tier {found.tier}: {found.why}; {allowed}")
    for note in found.notes:
        click.echo(f"    note: {note}")
