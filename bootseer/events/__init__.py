"""Events of a start, one JSON object a line.

Standard library only, Python 3.9, and nothing else of bootseer: this folder can be copied alone,
under any name, into a foreign image.
"""

from .encoding import MAX_ITEMS, MAX_LINE_BYTES, MAX_NAME_CHARS, MAX_TEXT_CHARS
from .redaction import redact_command as redact
from .redaction import redact_url
from .writer import (
    NullWriter,
    Writer,
    child_environment,
    default_directory,
    event,
    fault,
    open_writer,
    phase,
    resource_from_environment,
    trace_from_environment,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .writer import AnyWriter as AnyWriter

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
