"""Events of a start, one JSON object a line: a folder that can be copied alone (Python 3.9)."""

from bootseer.events.writer import (
    MAX_ITEMS,
    MAX_LINE_BYTES,
    MAX_NAME_CHARS,
    MAX_TEXT_CHARS,
    NullWriter,
    Writer,
    child_environment,
    default_directory,
    event,
    fault,
    open_writer,
    phase,
    redact,
    redact_url,
    resource_from_environment,
    trace_from_environment,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from bootseer.events.writer import AnyWriter as AnyWriter

__all__ = [
    "MAX_ITEMS",
    "MAX_LINE_BYTES",
    "MAX_NAME_CHARS",
    "MAX_TEXT_CHARS",
    "NullWriter",
    "Writer",
    "child_environment",
    "default_directory",
    "event",
    "fault",
    "open_writer",
    "phase",
    "redact",
    "redact_url",
    "resource_from_environment",
    "trace_from_environment",
]
