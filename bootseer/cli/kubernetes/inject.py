"""`bootseer inject`, and what it shares with `uninject` and `k8s check`."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

import click

from bootseer.cli.shared import inputs
from bootseer.cli.shared.options import combine_options, echo_json
from bootseer.cli.shared.outputs import resolve_output
from bootseer.errors import NotSupportedError, UsageError, from_os_error
from bootseer.system.atomic import replace_file

if TYPE_CHECKING:
    from bootseer.kubernetes.inject import Injected, Resolve
    from bootseer.kubernetes.options import Options, Place

NAME_LIMIT = 253
"""The most characters of an object's name, which Kubernetes requires to be a DNS subdomain."""
_OBJECT_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")

file_option = click.option(
    "-f", "--filename", "path", required=True, metavar="FILE", help="The manifest; - = stdin."
)
output_option = click.option(
    "-o", "--output", metavar="FILE", help="Where to write; default: stdout. May be FILE itself."
)


class _LineListType(click.types.StringParamType):
    """Texts that may contain blanks; an environment variable holds one on each line."""

    def split_envvar_value(self, rv: str) -> list[str]:
        return rv.splitlines()


injection_options = combine_options(
    click.option(
        "--parts",
        default="events,image,deps,checkpoint",
        show_default=True,
        metavar="LIST",
        help="What the wrapper does besides starting the job, separated by commas.",
    ),
    click.option(
        "--tier",
        type=click.Choice(["none", "fuse", "privileged"]),
        default="none",
        show_default=True,
        help="Privilege to ask for: none, a device plugin's /dev/fuse, or a privileged container.",
    ),
    click.option(
        "--fuse-resource", metavar="NAME", help="The device plugin's resource, for --tier fuse."
    ),
    click.option("--image", metavar="REF", help="The init container's image."),
    click.option(
        "--image-pull-policy",
        type=click.Choice(["Always", "IfNotPresent", "Never"]),
        help="Its imagePullPolicy.",
    ),
    click.option(
        "--container",
        metavar="NAME",
        help="The container that is the job; pods without it are passed over.",
    ),
    click.option(
        "--command",
        "job",
        type=_LineListType(),
        multiple=True,
        metavar="[POD/CONTAINER=]WORDS",
        help="The job's command, as a shell splits it, where the manifest leaves it to the image. "
        "Without POD/CONTAINER it is for all such containers, which then have to have one image.",
    ),
    click.option(
        "--events",
        metavar="PLACE",
        help="Where events go: pvc:CLAIM or host:/DIR, for all pods; default: the pod itself.",
    ),
    click.option("--store", metavar="PLACE", help="Snapshots: pvc:CLAIM, host:/DIR or a URL."),
    click.option("--cache", metavar="PLACE", help="The node's cache: host:/DIR or pvc:CLAIM."),
    click.option("--config-map", metavar="NAME", help="ConfigMap that holds bootseer.toml."),
    click.option(
        "--job-uid",
        metavar="TEXT",
        help="What names the start that all pods belong to; default: what their operator sets.",
    ),
    click.option("--offline", is_flag=True, help="Never ask a registry for an image's command."),
    click.option("--plain-http", is_flag=True, help="Ask registries over http, without TLS."),
)
"""What is injected; `parse_injection_options` turns their values into `Options`."""


def read_manifest(path: str) -> tuple[bytes, str]:
    """Return a manifest's bytes, and its name in messages; `-` is standard input."""
    if path == "-":
        return inputs.standard_input().read(), "standard input"
    try:
        with open(path, "rb", opener=inputs.open_input) as file:
            return file.read(), path
    except OSError as error:
        raise from_os_error(error, f"read the manifest {path}") from error


def write_manifest(text: str, output: str | None) -> None:
    """Write to standard output, or replace a file and keep its permission bits."""
    data = text.encode()
    if output is None or output == "-":
        if sys.stdout is None:
            raise UsageError("standard output is closed; name a file with --output")
        sys.stdout.buffer.write(data)
        return
    try:
        path, mode = resolve_output(output)
        bits = 0o644 if mode is None else mode & 0o777
        replace_file(path, data, mode=bits, exact_mode=True, prefix=".bootseer-")
    except OSError as error:
        raise from_os_error(error, f"write the manifest {output}") from error


@click.command(
    help="""Put bootseer into every pod of a manifest, and write the manifest.

    Only lines are put in: comments, order and quoting of the rest stay. Injecting again changes
    nothing; `bootseer uninject` gives the original back to the byte. A pod that cannot be
    injected safely is named with the reason, and nothing is written unless --skip-refused.
    """
)
@file_option
@output_option
@injection_options
@click.option("--skip-refused", is_flag=True, help="Write the rest though pods were refused.")
@click.option(
    "--require", is_flag=True, help="Fail where anything that runs containers stays as it is."
)
@click.option("--explain", is_flag=True, help="List each change and its reason instead of writing.")
@click.option("--json", "as_json", is_flag=True, help="With --explain: as JSON.")
def command(**parameters: Any) -> int:
    from bootseer.kubernetes import inject, manifest_text

    data, name = read_manifest(parameters["path"])
    manifest = manifest_text.decode(data, name)
    result = inject.inject(manifest, parse_injection_options(parameters), make_resolver(parameters))
    if parameters["explain"]:
        _print_explanation(result, as_json=parameters["as_json"])
        fails = result.refusals or (parameters["require"] and not _is_all_measured(result))
        return NotSupportedError.exit_code if fails else 0
    for passed in result.passed_over:
        click.echo(f"bootseer: {name}: {passed.pod}: passed over: {passed.reason}", err=True)
    for left in result.unmeasured:
        click.echo(f"bootseer: {name}: {left.pod}: left as it is: {left.reason}", err=True)
    for noted in result.unknown:
        click.echo(f"bootseer: {name}: {noted.pod}: {noted.reason}", err=True)
    for refusal in result.refusals:
        click.echo(f"bootseer: {name}: {refusal.pod}: {refusal.reason}", err=True)
    if result.refusals and not parameters["skip_refused"]:
        raise NotSupportedError(
            f"{name}: {len(result.refusals)} of its pods cannot be injected, nothing was written; "
            "mend them, or leave them out by --skip-refused"
        )
    if parameters["require"] and not _is_all_measured(result):
        raise NotSupportedError(
            f"{name}: --require, and not everything in it that runs containers is injected, "
            f"nothing was written; {_describe_objects(result)}"
        )
    if not result.changes and not result.refusals and not result.unmeasured:
        kinds = _describe_objects(result)
        click.echo(f"bootseer: {name}: there is no pod in it; {kinds}; written as it was", err=True)
    write_manifest(result.raw, parameters["output"])
    return 0


def _is_all_measured(result: Injected) -> bool:
    """Whether anything was injected, and nothing left out but pods that --container passes over."""
    return bool(result.changes) and not result.refusals and not result.unmeasured


def _describe_objects(result: Injected) -> str:
    return f"its objects are of kind {', '.join(result.kinds)}" if result.kinds else "it is empty"


def make_resolver(parameters: dict[str, Any]) -> Resolve | None:
    """Return what asks registries for an image's command; None with --offline."""
    from bootseer.kubernetes import image_config

    if parameters["offline"]:
        return None
    return image_config.make_resolver(plain_http=parameters["plain_http"])


def parse_injection_options(parameters: dict[str, Any]) -> Options:
    """Return the values of `injection_options` as `Options`. Raises UsageError."""
    from bootseer.kubernetes import options
    from bootseer.kubernetes.job_command import parse_commands

    parts = [part.strip() for part in parameters["parts"].split(",") if part.strip()]
    unknown = [part for part in parts if part not in options.PARTS]
    if unknown:
        raise UsageError(f"--parts: unknown {unknown[0]!r}; there are {', '.join(options.PARTS)}")
    if parameters["tier"] == "fuse" and not parameters["fuse_resource"]:
        raise UsageError("--tier fuse needs --fuse-resource, the name that the device plugin gives")
    store = parameters["store"] or ""
    is_url = "://" in store
    config_map = parameters["config_map"] or ""
    if config_map:
        _check_object_name("--config-map", config_map, config_map)
    command, commands = parse_commands(parameters["job"])
    image = {"image": parameters["image"]} if parameters["image"] else {}
    return options.Options(
        parts=tuple(parts),
        tier=parameters["tier"],
        container=parameters["container"] or "",
        command=command,
        commands=commands,
        events=_parse_place("--events", parameters["events"]) or options.Place(),
        store=None if is_url else _parse_place("--store", store),
        store_url=store if is_url else "",
        cache=_parse_place("--cache", parameters["cache"]),
        config_map=config_map,
        fuse_resource=parameters["fuse_resource"] or "",
        pull_policy=parameters["image_pull_policy"] or "",
        job_uid=parameters["job_uid"] or "",
        **image,
    )


def _parse_place(option: str, text: str | None) -> Place | None:
    """Parse pvc:CLAIM or host:/DIRECTORY, the value of `option`. Raises UsageError."""
    from bootseer.kubernetes.options import Place

    if not text:
        return None
    kind, colon, name = text.partition(":")
    if kind == "pvc" and colon and name:
        _check_object_name(option, text, name)
        return Place("claim", name)
    if kind == "host" and name.startswith("/"):
        if ".." in name.split("/"):
            raise UsageError(
                f"{option} {text}: Kubernetes takes no '..' in it; write the real path"
            )
        return Place("host", name)
    raise UsageError(f"{option} {text}: not a place; write pvc:CLAIM or host:/DIRECTORY")


def _check_object_name(option: str, text: str, name: str) -> None:
    if len(name) > NAME_LIMIT or not _OBJECT_NAME.fullmatch(name):
        raise UsageError(
            f"{option} {text}: {name!r} cannot be an object's name; it has at most {NAME_LIMIT} "
            "characters: a-z, 0-9, - and ., and a letter or digit at each end"
        )


def _print_explanation(result: Injected, *, as_json: bool) -> None:
    import dataclasses

    if as_json:
        echo_json(
            {
                "changes": [dataclasses.asdict(change) for change in result.changes],
                "refusals": [dataclasses.asdict(refusal) for refusal in result.refusals],
                "passed_over": [dataclasses.asdict(passed) for passed in result.passed_over],
                "unmeasured": [dataclasses.asdict(left) for left in result.unmeasured],
                "unknown": [dataclasses.asdict(noted) for noted in result.unknown],
            }
        )
        return
    for change in result.changes:
        click.echo(f"line {change.line}: {change.pod}: {change.what}\n    {change.why}")
    for passed in result.passed_over:
        click.echo(f"line {passed.line}: {passed.pod}: passed over\n    {passed.reason}")
    for left in result.unmeasured:
        click.echo(f"line {left.line}: {left.pod}: left as it is\n    {left.reason}")
    for noted in result.unknown:
        click.echo(f"line {noted.line}: {noted.pod}: injected\n    {noted.reason}")
    for refusal in result.refusals:
        click.echo(f"line {refusal.line}: {refusal.pod}: not injected\n    {refusal.reason}")
