"""An opt-in hook that times imports and writes the heaviest as sub-phases of `imports`.

Python 3.9, standard library only. `environment` returns the variables that put `inject/` at the
head of PYTHONPATH, where its `sitecustomize` calls `install` in each Python process of a job and
then runs the sitecustomize that would have run without the hook.

How: importlib's `_find_and_load`, which the interpreter calls for a module that is not loaded yet,
is wrapped. Statements whose module is already loaded never reach it and cost nothing. The wrapper
carries importlib's own file name, so that a failing import statement's traceback is trimmed exactly
as without it (one through `importlib.import_module` shows one frame more).

What is written, for an import statement that took MIN_NS or more: a span `imports`, and in it one
`imports.<package>` for each top-level package that took as long (nested ones below the package that
imported them, at most PACKAGES_MAX), with `import.self_s` (its own modules, without other
packages), `import.cumulative_s` and `import.modules`. Shorter statements are gathered until
together they reach MIN_NS. All is written when the statement ends, so that nothing is lost to
`os._exit`, exec or a kill afterwards; the span's begin is written once it has lasted BEGIN_NS, so
that a process killed during it shows it. Nothing is ever written to the job's standard streams.
"""

from __future__ import annotations

import os
import sys
import time

TYPE_CHECKING = False  # importing typing would cost each process of a job 3 ms
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Mapping, Optional

ENABLE_VARIABLE = "BOOTSEER_IMPORTS"
INJECT_DIRECTORY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "inject")

MIN_NS = 50_000_000
BEGIN_NS = 250_000_000
PACKAGES_MAX = 20
SPANS_MAX = 200
"""`imports` spans of one process; the hook removes itself afterwards."""

_IMPORTLIB = "<frozen importlib._bootstrap>"
_mono_ns = time.monotonic_ns


def environment(environ: Mapping[str, str]) -> Dict[str, str]:
    """Return variables to add to a job's environment so that its Python processes time imports."""
    entries = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    others = [entry for entry in entries if entry != INJECT_DIRECTORY]
    return {ENABLE_VARIABLE: "1", "PYTHONPATH": os.pathsep.join([INJECT_DIRECTORY, *others])}


class _Package:
    """The time that one top-level package has taken within one outermost import."""

    __slots__ = ("begin_ns", "cumulative_ns", "end_ns", "modules", "parent", "self_ns")

    def __init__(self, begin_ns: int, parent: Optional[str]) -> None:
        self.begin_ns, self.end_ns = begin_ns, begin_ns
        self.parent = parent
        self.self_ns = self.cumulative_ns = self.modules = 0


class _Frame:
    """One module's import in progress; `outermost` of those of its top-level package."""

    __slots__ = ("begin_ns", "inner_ns", "outermost", "package")

    def __init__(self, package: str, begin_ns: int, outermost: bool) -> None:
        self.package, self.begin_ns, self.outermost = package, begin_ns, outermost
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
        self._spans = 0
        self._short_ns = 0
        self._short_begin_ns = 0
        self._short_modules = 0
        self.exhausted = False

    def get_thread(self) -> _Thread:
        """Return the record of the calling thread."""
        import _thread

        ident = _thread.get_ident()
        thread = self._threads.get(ident)
        if thread is None:
            thread = self._threads[ident] = _Thread()
        return thread

    def enter(self, thread: _Thread, name: str) -> None:
        """Begin the import of the module `name`."""
        package = name.partition(".")[0]
        now = _mono_ns()
        outermost = all(frame.package != package for frame in thread.stack)
        if outermost and package not in thread.packages:
            parent = thread.stack[-1].package if thread.stack else None
            thread.packages[package] = _Package(now, parent)
        thread.stack.append(_Frame(package, now, outermost))

    def leave(self, thread: _Thread) -> None:
        """End the import that was entered last."""
        frame = thread.stack.pop()
        now = _mono_ns()
        took_ns = now - frame.begin_ns
        package = thread.packages[frame.package]
        package.self_ns += took_ns - frame.inner_ns
        package.modules += 1
        if frame.outermost:
            package.cumulative_ns += took_ns
            package.end_ns = now
        if thread.stack:
            thread.stack[-1].inner_ns += took_ns
            begin_ns = thread.stack[0].begin_ns
            if thread.span is None and now - begin_ns >= BEGIN_NS:
                self._run_guarded(thread, lambda: self._begin_span(thread, begin_ns))
            return
        packages, thread.packages = thread.packages, {}
        self._run_guarded(
            thread, lambda: self._finish_statement(thread, frame.begin_ns, now, packages)
        )

    def _run_guarded(self, thread: _Thread, action: Callable[[], None]) -> None:
        thread.writing = True
        try:
            action()
        except Exception:  # fall-back border: the job's import must succeed whatever we do
            self.exhausted = True
        finally:
            thread.writing = False

    def _get_writer(self) -> Any:
        if self._writer is None:
            self._writer = self._open_writer()
        return self._writer

    def _begin_span(self, thread: _Thread, begin_ns: int) -> None:
        thread.shift_ns = time.time_ns() - _mono_ns()
        attributes = {"bootseer.source": "import"}
        unix_ns = begin_ns + thread.shift_ns
        thread.span = self._get_writer().begin("imports", attributes, None, unix_ns, begin_ns)

    def _finish_statement(
        self, thread: _Thread, begin_ns: int, end_ns: int, packages: Dict[str, _Package]
    ) -> None:
        """Write an import statement that ended, or add it to the short ones."""
        if end_ns - begin_ns < MIN_NS:
            modules = sum(package.modules for package in packages.values())
            self._gather_short(begin_ns, end_ns, modules)
            return
        if thread.span is None:
            self._begin_span(thread, begin_ns)
        writer, span = self._get_writer(), thread.span
        thread.span, shift_ns = None, thread.shift_ns
        heavy = [name for name, package in packages.items() if package.cumulative_ns >= MIN_NS]
        heavy = sorted(heavy, key=lambda name: -packages[name].cumulative_ns)[:PACKAGES_MAX]
        spans: Dict[Optional[str], Any] = {None: span}
        for name in sorted(heavy, key=lambda name: packages[name].begin_ns):
            package = packages[name]
            parent = package.parent
            while parent is not None and parent not in spans:
                parent = packages[parent].parent
            spans[name] = self._write_package(writer, name, package, spans[parent], shift_ns)
        modules = sum(package.modules for package in packages.values())
        attributes = {"bootseer.source": "import", "import.modules": modules}
        writer.end(span, "imports", "ok", attributes, end_ns + shift_ns, end_ns)
        self._count_span()

    def _write_package(
        self, writer: Any, name: str, package: _Package, parent: Any, shift_ns: int
    ) -> Any:
        """Write one package's span below `parent` and return its id."""
        attributes = {
            "bootseer.source": "import",
            "import.self_s": round(package.self_ns / 1e9, 6),
            "import.cumulative_s": round(package.cumulative_ns / 1e9, 6),
            "import.modules": package.modules,
        }
        phase = f"imports.{name}"
        begin_ns, end_ns = package.begin_ns, package.end_ns
        span = writer.begin(phase, attributes, parent, begin_ns + shift_ns, begin_ns)
        writer.end(span, phase, "ok", attributes, end_ns + shift_ns, end_ns)
        return span

    def _gather_short(self, begin_ns: int, end_ns: int, modules: int) -> None:
        """Add up short imports; write them as one span where they fill most of its time."""
        if self._short_ns * 2 < begin_ns - self._short_begin_ns:
            self._short_ns = self._short_modules = 0
        if not self._short_ns:
            self._short_begin_ns = begin_ns
        self._short_ns += end_ns - begin_ns
        self._short_modules += modules
        if self._short_ns < MIN_NS:
            return
        shift_ns = time.time_ns() - _mono_ns()
        first_ns = self._short_begin_ns
        attributes: Dict[str, Any] = {
            "bootseer.source": "import",
            "import.modules": self._short_modules,
        }
        writer = self._get_writer()
        span = writer.begin("imports", attributes, None, first_ns + shift_ns, first_ns)
        attributes["import.cumulative_s"] = round(self._short_ns / 1e9, 6)
        writer.end(span, "imports", "ok", attributes, end_ns + shift_ns, end_ns)
        self._short_ns = self._short_modules = 0
        self._count_span()

    def _count_span(self) -> None:
        self._spans += 1
        self.exhausted = self._spans >= SPANS_MAX


def install(open_writer: Optional[Callable[[], Any]] = None) -> Optional[Recorder]:
    """Time this process's imports from now on; None where this Python has no `_find_and_load`.

    Also None where the hook is installed already. `open_writer` opens the event writer when there
    is something to write.
    """
    bootstrap: Any = sys.modules.get("_frozen_importlib")
    original = getattr(bootstrap, "_find_and_load", None)
    if original is None or getattr(original, "bootseer", False):
        return None
    recorder = Recorder(open_writer or _open_default_writer)
    loaded = sys.modules

    def _find_and_load(name: str, import_: Any) -> Any:
        thread = recorder.get_thread()
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


def _open_default_writer() -> Any:
    from bootseer import events

    return events.open_writer()
