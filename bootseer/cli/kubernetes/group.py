"""`bootseer k8s`: commands about manifests other than inject and uninject."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from bootseer.cli.kubernetes.inject import (
    file_option,
    injection_options,
    make_resolver,
    parse_injection_options,
    read_manifest,
)
from bootseer.cli.shared.options import echo_json
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
def check_command(**parameters: Any) -> int:
    from bootseer.kubernetes import check, manifest_text

    data, name = read_manifest(parameters["path"])
    manifest = manifest_text.decode(data, name)
    findings = check.check(manifest, parse_injection_options(parameters), make_resolver(parameters))
    if parameters["as_json"]:
        echo_json([dataclasses.asdict(finding) for finding in findings])
    else:
        for finding in findings:
            _print_finding(finding, check.ALLOWED[finding.tier])
    return NotSupportedError.exit_code if any(finding.refusal for finding in findings) else 0


def _print_finding(finding: Any, allowed: str) -> None:
    click.echo(f"line {finding.line}: {finding.pod}, container {finding.container or '?'}")
    if finding.refusal:
        click.echo(f"    refused: {finding.refusal}")
        return
    if finding.passed_over:
        click.echo(f"    passed over: {finding.passed_over}")
        return
    state = "injected already" if finding.injected else "can be injected"
    click.echo(f"    {state}; tier {finding.tier}: {finding.why}; {allowed}")
    for note in finding.notes:
        click.echo(f"    note: {note}")
