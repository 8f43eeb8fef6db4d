"""`bootseer import`: turn kept logs and cluster records into events."""

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
from bootseer.profiler.collect.log_rules import engine as logengine
from bootseer.profiler.collect.log_rules import lines as loglines
from bootseer.profiler.collect.log_rules import matcher_process
from bootseer.profiler.collect.log_rules import rules as logrules

READ_BYTES = 1 << 20

events_option = click.option(
    "--events",
    "directory",
    envvar="BOOTSEER_EVENTS",
    help="Directory of event files (default: bootseer's own under the XDG state directory).",
)
summary_json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print a summary as JSON."
)
job_uid_option = click.option(
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


def _open_writer(
    directory: str | None, resource: dict[str, Any], trace_id: str | None
) -> events.Writer:
    """Open an event writer. Raises BootseerError if the events cannot be written."""
    target = directory or events.default_directory()
    try:
        return events.Writer(target, resource, trace_id)
    except OSError as error:
        raise from_os_error(error, f"write events to {target}") from error


@contextlib.contextmanager
def open_checked_writer(
    directory: str | None, resource: dict[str, Any], trace_id: str | None
) -> Iterator[tuple[events.Writer, Counter[str]]]:
    """Open an event writer, and yield it with a count that the block adds its events to.

    The writer ignores write errors, so as not to disturb jobs. So at the end the count is compared
    with the lines of the file; NoSpaceError is raised if some are missing.
    """
    counts: Counter[str] = Counter()
    with _open_writer(directory, resource, trace_id) as writer:
        yield writer, counts
    with open(writer.path, "rb") as stream:
        lines = sum(1 for _ in stream)
    if lines < counts.total() + 1 and not writer.target.endswith(".jsonl"):
        raise NoSpaceError(
            f"only {lines} of {counts.total() + 1} lines fit into {writer.path}; "
            "free space, delete that file and import again"
        )


def trace_id_of(job_uid: str | None, attempt: int) -> str | None:
    """Return the trace id under which a job's processes write events; None without a job uid."""
    if not job_uid:
        return None
    environ = {"BOOTSEER_JOB_UID": job_uid, "BOOTSEER_ATTEMPT": str(attempt)}
    return events.trace_from_environment(environ)[0]


def print_summary(summary: dict[str, Any], text: str, as_json: bool) -> None:
    """Print `summary` as JSON, or else `text`."""
    click.echo(json.dumps(summary, indent=1) if as_json else text)


@click.command(name="k8s")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@job_uid_option
@events_option
@summary_json_option
def k8s_command(
    files: tuple[str, ...], job_uid: str | None, directory: str | None, as_json: bool
) -> None:
    """Import pods and events as `kubectl get pods,events,jobs -o json` prints them; - is stdin.

    Writes one event file a pod: queue, schedule, image.pull, container.start. What the records
    do not show is marked as not observed.
    """
    items = [item for name in files for item in kubernetes_events.parse(_read_text(name), name)]
    pods = kubernetes_events.pods(items, job_uid)
    if not pods:
        raise UsageError(
            f"{', '.join(files)}: no pod in it; use `kubectl get pods,events,jobs -o json`"
        )
    for pod in pods:
        trace_id = trace_id_of(pod.job_uid, pod.attempt)
        with open_checked_writer(directory, pod.resource, trace_id) as (writer, counts):
            _write_pod(writer, pod)
            counts["events"] = sum(1 if span.point else 2 for span in pod.spans)
            counts["marker"] = 1 if pod.not_observed else 0
    summary = {
        "pods": [
            {
                "pod": pod.name,
                "job_uid": pod.job_uid,
                "trace_id": trace_id_of(pod.job_uid, pod.attempt),
                "phases": dict(Counter(span.name for span in pod.spans)),
                "errors": sorted({span.attributes["error.type"] for span in _failed_spans(pod)}),
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


def _failed_spans(pod: kubernetes_events.Pod) -> list[kubernetes_events.Span]:
    return [span for span in pod.spans if span.status == "error"]


def _read_text(name: str) -> str:
    """Read a file, or standard input for `-`. Raises UsageError if it is not UTF-8."""
    try:
        with contextlib.ExitStack() as stack:
            stdin = inputs.standard_input() if name == "-" else None
            stream = stdin or stack.enter_context(open(name, "rb", opener=inputs.open_input))
            return stream.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name}: is not UTF-8 text; kubectl's JSON output is") from error
    except OSError as error:
        raise from_os_error(error, f"read {name}") from error


def write_spans(writer: events.Writer, spans: Iterable[kubernetes_events.Span]) -> None:
    """Write phases and points that are over, with the times that they carry."""
    for span in spans:
        if span.point:
            writer.point(span.name, span.status, span.attributes, None, span.begin_ns, None)
        else:
            span_id = writer.begin(span.name, span.attributes, None, span.begin_ns, None)
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
@job_uid_option
@click.option("--attempt", type=click.IntRange(min=0), default=0, help="The job's attempt.")
@click.option("--node", help="Name of the node that the logs are from.")
@click.option("--rank", type=click.IntRange(min=0), help="Rank of the process that wrote them.")
@events_option
@summary_json_option
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
    trace_id = trace_id_of(job_uid, attempt) or os.urandom(16).hex()
    resource: dict[str, Any] = {"service.name": "bootseer-import", "bootseer.attempt": attempt}
    optional = {"bootseer.job_uid": job_uid, "host.name": node, "k8s.node.name": node}
    resource.update({key: value for key, value in optional.items() if value})
    if rank is not None:
        resource["bootseer.rank"] = rank
    results = []
    with matcher_process.SearchLimit() as limit:
        for name in logs:
            with _open_log(name) as stream:
                engine = logengine.Engine(
                    rules, live=False, near_ns=_modified_ns(stream), search=limit.search
                )
                matches = _match_lines(stream, engine)
                first = next(matches, None)
                counts: Counter[str] = Counter()
                if first is not None:  # a log without a match gets no event file
                    with open_checked_writer(directory, resource, trace_id) as (writer, counts):
                        sink = matcher_process.Sink(writer)
                        for match in itertools.chain([first], matches):
                            counts[f"{match.name} {match.kind}"] += 1
                            sink.write([match])
            result = {"log": name, "found": dict(counts), "undated": engine.undated}
            results.append({**result, "lines": engine.lines, "matched": engine.matched})
    _print_log_summary(results, trace_id, directory, as_json)


def _print_log_summary(
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
    """Load the rules of all files or shipped sets, in order.

    Raises NotFoundError, and UsageError that names file, section, key and line.
    """
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
        stream = open(name, "rb", buffering=0, opener=inputs.open_input)  # noqa: SIM115 - see below
    except OSError as error:
        raise from_os_error(error, f"read {name}") from error
    with stream:
        yield stream


def _modified_ns(stream: IO[bytes]) -> int:
    """Return a log's modification time in nanoseconds; the current time if it has none."""
    try:
        return os.fstat(stream.fileno()).st_mtime_ns or time.time_ns()
    except OSError:
        return time.time_ns()


def _match_lines(stream: IO[bytes], engine: logengine.Engine) -> Iterator[logengine.PhaseEvent]:
    """Pass a log's lines through the rules and yield what they match."""
    splitter = loglines.LineSplitter()
    read = getattr(stream, "read1", stream.read)  # does not wait for a pipe to fill the buffer
    while True:
        data = read(READ_BYTES)
        for line in splitter.feed(data) if data else splitter.flush():
            yield from engine.match_line(line, 0, None)
        if not data:
            break
    yield from engine.close()
