"""Event files written by hand, second by second, for tests whose results are known by heart."""

from __future__ import annotations

import json
from pathlib import Path

TRACE = "a" * 32
WALL_NS = 1_700_000_000 * 10**9


class EventFile:
    """One writer's file. Times are true seconds of the start; the file shows the node's clocks:
    the wall `ahead_s` ahead, the monotonic one `mono_zero_s` seconds up at the start's zero."""

    count = 0

    def __init__(
        self,
        node: str,
        rank: int | None = None,
        *,
        trace: str = TRACE,
        ahead_s: float = 0.0,
        mono_zero_s: float = 1000.0,
        **attributes: object,
    ) -> None:
        EventFile.count += 1
        self.prefix = f"{EventFile.count:010x}"
        self.trace, self.ahead_s, self.mono_zero_s = trace, ahead_s, mono_zero_s
        self.lines: list[str] = []
        self.spans = 0
        about: dict[str, object] = {
            "host.name": node,
            "process.pid": EventFile.count,
            "bootseer.boot_id": f"boot-of-{node}",
        }
        if rank is not None:
            about["bootseer.rank"] = rank
        about.update({key.replace("__", "."): value for key, value in attributes.items()})
        self.name = f"{node}-{EventFile.count}-abc.jsonl"
        self.line("resource", 0, "resource", 0.0, "ok", about)

    def line(
        self,
        kind: str,
        span: int,
        name: str,
        at_s: float,
        status: str = "ok",
        attributes: dict[str, object] | None = None,
        **changed: object,
    ) -> None:
        wall_ns = WALL_NS + round((at_s + self.ahead_s) * 1e9)
        event: dict[str, object] = {
            "v": 1,
            "event": kind,
            "trace_id": self.trace,
            "span_id": f"{self.prefix}{span:06x}",
            "parent_span_id": None,
            "name": name,
            "time_unix_nano": wall_ns,
            "mono_nano": round((self.mono_zero_s + at_s) * 1e9),
            "status": status,
            "attributes": attributes or {},
        }
        self.lines.append(json.dumps({**event, **changed}) + "\n")

    def span(
        self,
        name: str,
        begin_s: float,
        end_s: float | None,
        *,
        wait: bool = False,
        status: str = "ok",
        within: str | None = None,
        **attributes: object,
    ) -> EventFile:
        """A phase; `end_s` None leaves it open. Attributes (`__` for a dot) go on its end.
        `within` is the id of the span that it is a part of, such as `last`."""
        self.spans += 1
        number = self.spans
        about: dict[str, object] = {"bootseer.wait": True} if wait else {}
        self.line("begin", number, name, begin_s, "ok", about, parent_span_id=within)
        if end_s is not None:
            found = {key.replace("__", "."): value for key, value in attributes.items()}
            self.line("end", number, name, end_s, status, found)
        return self

    @property
    def last(self) -> str:
        """The id of the last span."""
        return f"{self.prefix}{self.spans:06x}"

    def point(self, name: str, at_s: float, status: str = "ok", **attributes: object) -> EventFile:
        self.spans += 1
        found = {key.replace("__", "."): value for key, value in attributes.items()}
        self.line("point", self.spans, name, at_s, status, found)
        return self

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / self.name
        path.write_text("".join(self.lines), encoding="utf-8")
        return path


def two_nodes(folder: Path, *, ahead_s: float = 0.0, trace: str = TRACE) -> None:
    """Two single-rank nodes with one barrier and a known critical path.

    a: imports 0-10, rendezvous (waits) 10-30, model.init 30-35, first step at 50 (compile 35-50)
    b: imports 0-30, rendezvous 30-30, model.init 30-40, unobserved 40-42, first step at 42
    """
    a = EventFile("a", 0, trace=trace, bootseer__gpu__count=1)
    a.span("imports", 0, 10).span("rendezvous", 10, 30, wait=True).span("model.init", 30, 35)
    a.span("compile", 35, 50).point("first_step", 50).write(folder)
    b = EventFile("b", 1, trace=trace, ahead_s=ahead_s, mono_zero_s=5.0, bootseer__gpu__count=1)
    b.span("imports", 0, 30).span("rendezvous", 30, 30, wait=True).span("model.init", 30, 40)
    b.point("first_step", 42).write(folder)
