"""`bootseer import`: logs and cluster records that were kept, turned into events."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import IO, Any

import click

from bootseer import events
from bootseer.cli.shared import inputs
from bootseer.cli.shared.lazy_group import LazyGroup
from bootseer.errors import NoSpaceError, NotFoundError, UsageError, from_os_error
from bootseer.profiler.collect import kubernetes_events
from bootseer.profiler.collect.log_rules import (
    engine as logengine,
)
from bootseer.profiler.collect.log_rules import (
    lines as loglines,
)
from bootseer.profiler.collect.log_rules import (
    matcher_process,
)
from bootseer.profiler.collect.log_rules import (
    rules as logrules,
)

READ_BYTES = 1 << 20

events_option = click.option(
    "--events",
    "directory",
    envvar="BOOTSEER_EVENTS",
    help="Directory of event files (default: bootseer's own under the XDG state directory).",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print a summary as JSON.")
uid_option = click.option(
    "--job-uid", help="The job's uid; events join those that its processes wrote under it."
)


COMMANDS: dict[str, tuple[str, str]] = {
    "k8s": ("report.import_", "Import pods and events as kubectl prints them."),
    "log": ("report.import_", "Import kept logs by rules."),
    "docker": (
        "report.import_docker",
        "Pull an image through Docker or Podman and time each layer.",
    ),
}


@click.group(cls=LazyGroup, commands_in=COMMANDS, attribute="{}_command")
def command() -> None:
    """Turn logs and cluster records into events."""


def _open(directory: str | None, resource: dict[str, Any], trace_id: str | None) -> events.Writer:
    """A writer that must work: an import has no other purpose."""
    target = directory or events.default_directory()
    try:
        return events.Writer(target, resource, trace_id)
    except OSError as error:
        raise from_os_error(error, f"write events to {target}") from error


@contextlib.contextmanager
def writing(
    directory: str | None, resource: dict[str, Any], trace_id: str | None
) -> Iterator[tuple[events.Writer, Counter[str]]]:
    """A writer and a count of what is written, checked against the file at the end.

    The writer itself swallows every fault, for the sake of jobs; an import must not.
    """
    counts: Counter[str] = Counter()
    with _open(directory, resource, trace_id) as writer:
        yield writer, counts
    with open(writer.path, "rb") as stream:
        lines = sum(1 for _ in stream)
    if lines < counts.total() + 1 and not writer.target.endswith(".jsonl"):
        raise NoSpaceError(
            f"only {lines} of {counts.total() + 1} lines fit into {writer.path}; "
            "free space, delete that file and import again"
        )


def trace_of(job_uid: str | None, attempt: int) -> str | None:
    if not job_uid:
        return None
    environ = {"BOOTSEER_JOB_UID": job_uid, "BOOTSEER_ATTEMPT": str(attempt)}
    return events.trace_from_environment(environ)[0]


def print_summary(summary: dict[str, Any], text: str, as_json: bool) -> None:
    click.echo(json.dumps(summary, indent=1) if as_json else text)


@click.command(name="k8s")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@uid_option
@events_option
@json_option
def k8s_command(
    files: tuple[str, ...], job_uid: str | None, directory: str | None, as_json: bool
) -> None:
    """Import pods and events as `kubectl get pods,events,jobs -o json` prints them; - is stdin.

    Writes one event file a pod: queue, schedule, image.pull, container.start. What the records
    do not show is marked as not observed.
    """
    items = [item for name in files for item in kubernetes_events.parse(_read(name), name)]
    pods = kubernetes_events.pods(items, job_uid)
    if not pods:
        raise UsageError(
            f"{', '.join(files)}: no pod in it; use `kubectl get pods,events,jobs -o json`"
        )
    for pod in pods:
        trace_id = trace_of(pod.job_uid, pod.attempt)
        with writing(directory, pod.resource, trace_id) as (writer, counts):
            _write_pod(writer, pod)
            counts["events"] = sum(1 if span.point else 2 for span in pod.spans)
            counts["marker"] = 1 if pod.not_observed else 0
    summary = {
        "pods": [
            {
                "pod": pod.name,
                "job_uid": pod.job_uid,
                "trace_id": trace_of(pod.job_uid, pod.attempt),
                "phases": dict(Counter(span.name for span in pod.spans)),
                "errors": sorted({span.attributes["error.type"] for span in _failed(pod)}),
                "not_observed": pod.not_observed,
            }
            for pod in pods
        ],
        "events": directory or events.default_directory(),
    }
    lines = [
        f"{pod.name}: {len(pod.spans)} phases and points"
        + (f"; not observed: {', '.join(pod.not_observed)}" if pod.not_observed else "")
        for pod in pods
    ]
    print_summary(summary, "\n".join(lines), as_json)


def _failed(pod: kubernetes_events.Pod) -> list[kubernetes_events.Span]:
    return [span for span in pod.spans if span.status == "error"]


def _read(name: str) -> str:
    try:
        with contextlib.ExitStack() as stack:
            given = inputs.standard_input() if name == "-" else None
            stream = given or stack.enter_context(open(name, "rb", opener=inputs.opener))
            return stream.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name}: is not UTF-8 text; kubectl's JSON output is") from error
    except OSError as error:
        raise from_os_error(error, f"read {name}") from error


def write_spans(writer: events.Writer, spans: Iterable[kubernetes_events.Span]) -> None:
    """Write phases and points that are over, with their own times."""
    for span in spans:
        if span.point:
            writer.point(span.name, span.status, span.attributes, None, span.begin_ns, None)
        else:
            begin = span.attributes
            span_id = writer.begin(span.name, begin, None, span.begin_ns, None)
            writer.end(span_id, span.name, span.status, span.attributes, span.end_ns, None)


def _write_pod(writer: events.Writer, pod: kubernetes_events.Pod) -> None:
    write_spans(writer, pod.spans)
    last_ns = max((span.end_ns for span in pod.spans), default=time.time_ns())
    if pod.not_observed:
        attributes = {"bootseer.source": "k8s", "bootseer.not_observed": pod.not_observed}
        writer.point("import.k8s", "ok", attributes, None, last_ns, None)


@click.command(name="log")
@click.argument("logs", nargs=-1, required=True, metavar="LOG...")
@click.option(
    "--rules",
    "rule_files",
    multiple=True,
    required=True,
    metavar="FILE|NAME",
    help="A rule file, or a shipped set by its name; may be repeated.",
)
@uid_option
@click.option("--attempt", type=click.IntRange(min=0), default=0, help="The job's attempt.")
@click.option("--node", help="Name of the node that the logs are from.")
@click.option("--rank", type=click.IntRange(min=0), help="Rank of the process that wrote them.")
@events_option
@json_option
def log_command(
    logs: tuple[str, ...],
    rule_files: tuple[str, ...],
    job_uid: str | None,
    attempt: int,
    node: str | None,
    rank: int | None,
    directory: str | None,
    as_json: bool,
) -> None:
    """Import kept logs by rules; - is standard input. Lines must carry timestamps.

    Each log becomes one event file. Without --job-uid all logs of one call share a new trace.
    """
    rules = load_rules(rule_files)
    trace_id = trace_of(job_uid, attempt) or os.urandom(16).hex()
    resource: dict[str, Any] = {"service.name": "bootseer-import", "bootseer.attempt": attempt}
    given = {"bootseer.job_uid": job_uid, "host.name": node, "k8s.node.name": node}
    resource.update({key: value for key, value in given.items() if value})
    if rank is not None:
        resource["bootseer.rank"] = rank
    results = []
    with matcher_process.SearchLimit() as limit:
        for name in logs:
            with _open_log(name) as stream:
                engine = logengine.Engine(
                    rules, live=False, near_ns=_changed_ns(stream), search=limit.search
                )
                found = _found(stream, engine)
                first = next(found, None)
                counts: Counter[str] = Counter()
                if first is not None:
                    with writing(directory, resource, trace_id) as (writer, counts):
                        sink = matcher_process.Sink(writer)
                        for one in itertools.chain([first], found):
                            counts[f"{one.name} {one.kind}"] += 1
                            sink.write([one])
            result = {"log": name, "found": dict(counts), "undated": engine.undated}
            results.append({**result, "lines": engine.lines, "matched": engine.matched})
    _report(results, trace_id, directory, as_json)


def _report(
    results: list[dict[str, Any]], trace_id: str, directory: str | None, as_json: bool
) -> None:
    undated = sum(result["undated"] for result in results)
    if undated and not any(result["found"] for result in results):
        raise UsageError(
            f"{undated} lines matched, but none has a timestamp the rules know; add `time` and "
            "`time_format` to the rules, or see the job live with `bootseer run --log-rules`"
        )
    target = directory or events.default_directory()
    lines = []
    for result in results:
        counts = ", ".join(f"{count} {name}" for name, count in result["found"].items())
        left_out = f"; {result['undated']} left out without a time" if result["undated"] else ""
        matched = f" ({result['matched']:,} of {result['lines']:,} lines matched)"
        nothing = f"nothing matched in {result['lines']:,} lines"
        lines.append(f"{result['log']}: {counts + matched if counts else nothing}{left_out}")
    summary = {"logs": results, "trace_id": trace_id, "events": target}
    print_summary(summary, "\n".join(lines), as_json)


def load_rules(names: Iterable[str]) -> list[logrules.Rule]:
    """Rules of all files, in order; raises UsageError, naming file, section, key and line."""
    rules: list[logrules.Rule] = []
    for name in names:
        try:
            rules += logrules.load(name)
        except logrules.RuleFileError as error:
            raise UsageError(str(error)) from error
        except FileNotFoundError as error:
            shipped = ", ".join(logrules.list_shipped())
            raise NotFoundError(
                f"the rule file {name} does not exist; shipped: {shipped}"
            ) from error
        except OSError as error:
            raise from_os_error(error, f"read the rule file {name}") from error
    return rules


@contextlib.contextmanager
def _open_log(name: str) -> Iterator[IO[bytes]]:
    if name == "-":
        yield inputs.standard_input()
        return
    try:
        stream = open(name, "rb", buffering=0, opener=inputs.opener)  # noqa: SIM115 - closed below
    except OSError as error:
        raise from_os_error(error, f"read {name}") from error
    with stream:
        yield stream


def _changed_ns(stream: IO[bytes]) -> int:
    try:
        return os.fstat(stream.fileno()).st_mtime_ns or time.time_ns()
    except OSError:
        return time.time_ns()


def _found(stream: IO[bytes], engine: logengine.Engine) -> Iterator[logengine.PhaseEvent]:
    splitter = loglines.LineSplitter()
    read = getattr(stream, "read1", stream.read)  # a pipe's lines as they come
    while True:
        data = read(READ_BYTES)
        for line in splitter.feed(data) if data else splitter.flush():
            yield from engine.match_line(line, 0, None)
        if not data:
            break
    yield from engine.close()
