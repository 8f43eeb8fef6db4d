"""An opt-in hook that times imports and writes the heaviest as sub-phases of `imports`.

Python 3.9, standard library only. `environment` gives the variables that put `inject/` at the head
of PYTHONPATH, where its `sitecustomize` calls `install` in each Python process of a job and then
runs the sitecustomize that would have run without us.

How: importlib's `_find_and_load`, which the interpreter calls for a module that is not loaded yet,
is wrapped. Statements that find their module loaded never come here and cost nothing. The wrapper
carries importlib's own file name, so that a failing import statement's traceback is trimmed exactly
as without it (one through `importlib.import_module` shows one frame more).

What is written, for an import statement that took MIN_NS or more: a span `imports`, and in it one
`imports.<package>` for each top-level package that took as long (nested ones below the package that
imported them, at most TOP), with `import.self_s` (its own modules, without other packages),
`import.cumulative_s` and `import.modules`. Smaller statements are gathered until together they
reach MIN_NS. All is written when the statement ends, so that `os._exit`, exec or a kill afterwards
lose nothing; the span's begin is written once it has lasted BEGIN_NS, so that a process killed in
the midst of it shows it. Nothing is ever written to the job's standard streams.
"""

from __future__ import annotations

import os
import sys
import time

TYPE_CHECKING = False  # typing itself would cost each process of a job 3 ms
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Mapping, Optional

ENABLE = "BOOTSEER_IMPORTS"
INJECT_DIRECTORY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "inject")

MIN_NS = 50_000_000
BEGIN_NS = 250_000_000
TOP = 20
SPANS_MAX = 200
"""`imports` spans of one process; the hook takes itself out afterwards."""

_IMPORTLIB = "<frozen importlib._bootstrap>"
_mono_ns = time.monotonic_ns


def environment(environ: Mapping[str, str]) -> Dict[str, str]:
    """Variables to add to a job's environment so that its Python processes time their imports."""
    former = [part for part in environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    rest = [part for part in former if part != INJECT_DIRECTORY]
    return {ENABLE: "1", "PYTHONPATH": os.pathsep.join([INJECT_DIRECTORY, *rest])}


class _Package:
    """What one top-level package has taken within one outermost import."""

    __slots__ = ("begin_ns", "cumulative_ns", "end_ns", "modules", "parent", "self_ns")

    def __init__(self, begin_ns: int, parent: Optional[str]) -> None:
        self.begin_ns, self.end_ns = begin_ns, begin_ns
        self.parent = parent
        self.self_ns = self.cumulative_ns = self.modules = 0


class _Frame:
    """One import under way."""

    __slots__ = ("begin_ns", "inner_ns", "outermost", "top")

    def __init__(self, top: str, begin_ns: int, outermost: bool) -> None:
        self.top, self.begin_ns, self.outermost = top, begin_ns, outermost
        self.inner_ns = 0


class _Thread:
    """The imports of one thread, which nest."""

    def __init__(self) -> None:
        self.stack: List[_Frame] = []
        self.packages: Dict[str, _Package] = {}
        self.writing = False
        self.span: Optional[str] = None
        self.shift_ns = 0  # Unix time less monotonic time, as of the span's begin


class Recorder:
    """Collects import times by thread and hands finished statements to a writer."""

    def __init__(self, open_writer: Callable[[], Any]) -> None:
        self._open_writer = open_writer
        self._writer: Any = None
        self._threads: Dict[int, _Thread] = {}
        self._pid = os.getpid()
        self._spans = 0
        self._small_ns = 0
        self._small_begin_ns = 0
        self._small_modules = 0
        self.exhausted = False

    def thread(self) -> _Thread:
        import _thread

        ident = _thread.get_ident()
        found = self._threads.get(ident)
        if found is None:
            found = self._threads[ident] = _Thread()
        return found

    def enter(self, thread: _Thread, name: str) -> None:
        top = name.partition(".")[0]
        now = _mono_ns()
        outermost = all(frame.top != top for frame in thread.stack)
        if outermost and top not in thread.packages:
            parent = thread.stack[-1].top if thread.stack else None
            thread.packages[top] = _Package(now, parent)
        thread.stack.append(_Frame(top, now, outermost))

    def leave(self, thread: _Thread) -> None:
        frame = thread.stack.pop()
        now = _mono_ns()
        took_ns = now - frame.begin_ns
        package = thread.packages[frame.top]
        package.self_ns += took_ns - frame.inner_ns
        package.modules += 1
        if frame.outermost:
            package.cumulative_ns += took_ns
            package.end_ns = now
        if thread.stack:
            thread.stack[-1].inner_ns += took_ns
            begin_ns = thread.stack[0].begin_ns
            if thread.span is None and now - begin_ns >= BEGIN_NS:
                self._guarded(thread, lambda: self._begin(thread, begin_ns))
            return
        packages, thread.packages = thread.packages, {}
        self._guarded(thread, lambda: self._finish(thread, frame.begin_ns, now, packages))

    def _guarded(self, thread: _Thread, action: Callable[[], None]) -> None:
        thread.writing = True
        try:
            action()
        except Exception:  # fall-back border: the job's import must succeed whatever we do
            self.exhausted = True
        finally:
            thread.writing = False

    def _open(self) -> Any:
        if self._writer is None:
            self._writer = self._open_writer()
        return self._writer

    def _begin(self, thread: _Thread, begin_ns: int) -> None:
        thread.shift_ns = time.time_ns() - _mono_ns()
        attributes = {"bootseer.source": "import"}
        unix_ns = begin_ns + thread.shift_ns
        thread.span = self._open().begin("imports", attributes, None, unix_ns, begin_ns)

    def _finish(
        self, thread: _Thread, begin_ns: int, end_ns: int, packages: Dict[str, _Package]
    ) -> None:
        """An outermost import ended: write it, or add it to the small ones."""
        if end_ns - begin_ns < MIN_NS:
            self._small(begin_ns, end_ns, sum(package.modules for package in packages.values()))
            return
        if thread.span is None:
            self._begin(thread, begin_ns)
        writer, span = self._open(), thread.span
        thread.span, shift_ns = None, thread.shift_ns
        heavy = [name for name, one in packages.items() if one.cumulative_ns >= MIN_NS]
        heavy = sorted(heavy, key=lambda name: -packages[name].cumulative_ns)[:TOP]
        spans: Dict[Optional[str], Any] = {None: span}
        for name in sorted(heavy, key=lambda name: packages[name].begin_ns):
            package = packages[name]
            parent = package.parent
            while parent is not None and parent not in spans:
                parent = packages[parent].parent
            self._write(writer, name, package, spans, spans[parent], shift_ns)
        modules = sum(package.modules for package in packages.values())
        attributes = {"bootseer.source": "import", "import.modules": modules}
        writer.end(span, "imports", "ok", attributes, end_ns + shift_ns, end_ns)
        self._count()

    def _write(
        self,
        writer: Any,
        name: str,
        package: _Package,
        spans: Dict[Optional[str], Any],
        parent: Any,
        shift_ns: int,
    ) -> None:
        attributes = {
            "bootseer.source": "import",
            "import.self_s": round(package.self_ns / 1e9, 6),
            "import.cumulative_s": round(package.cumulative_ns / 1e9, 6),
            "import.modules": package.modules,
        }
        phase = f"imports.{name}"
        begin_ns, end_ns = package.begin_ns, package.end_ns
        spans[name] = writer.begin(phase, attributes, parent, begin_ns + shift_ns, begin_ns)
        writer.end(spans[name], phase, "ok", attributes, end_ns + shift_ns, end_ns)

    def _small(self, begin_ns: int, end_ns: int, modules: int) -> None:
        """Gather small imports; write them as one span where they are most of what passed."""
        if self._small_ns * 2 < begin_ns - self._small_begin_ns:
            self._small_ns = self._small_modules = 0
        if not self._small_ns:
            self._small_begin_ns = begin_ns
        self._small_ns += end_ns - begin_ns
        self._small_modules += modules
        if self._small_ns < MIN_NS:
            return
        shift_ns = time.time_ns() - _mono_ns()
        first_ns = self._small_begin_ns
        attributes: Dict[str, Any] = {
            "bootseer.source": "import",
            "import.modules": self._small_modules,
        }
        writer = self._open()
        span = writer.begin("imports", attributes, None, first_ns + shift_ns, first_ns)
        attributes["import.cumulative_s"] = round(self._small_ns / 1e9, 6)
        writer.end(span, "imports", "ok", attributes, end_ns + shift_ns, end_ns)
        self._small_ns = self._small_modules = 0
        self._count()

    def _count(self) -> None:
        self._spans += 1
        self.exhausted = self._spans >= SPANS_MAX


def install(open_writer: Optional[Callable[[], Any]] = None) -> Optional[Recorder]:
    """Time this process's imports from now on; None where this Python has no such entry."""
    bootstrap: Any = sys.modules.get("_frozen_importlib")
    original = getattr(bootstrap, "_find_and_load", None)
    if original is None or getattr(original, "bootseer", False):
        return None
    recorder = Recorder(open_writer or _default_writer)
    loaded = sys.modules

    def _find_and_load(name: str, import_: Any) -> Any:
        thread = recorder.thread()
        if name in loaded or thread.writing or recorder.exhausted:
            if recorder.exhausted and not thread.stack:
                bootstrap._find_and_load = original
            return original(name, import_)
        recorder.enter(thread, name)
        try:
            return original(name, import_)
        finally:
            recorder.leave(thread)

    code = _find_and_load.__code__.replace(co_filename=_IMPORTLIB)
    _find_and_load.__code__ = code
    _find_and_load.bootseer = True  # type: ignore[attr-defined]
    bootstrap._find_and_load = _find_and_load
    return recorder


def _default_writer() -> Any:
    from bootseer import events

    return events.open_writer()
