"""Ask an interpreter what it is and where it installs, by running it once (some 20 ms)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence

from bootseer import light_dataclasses as dataclasses
from bootseer.errors import DeadlineError
from bootseer.system.readiness import readable

PROBE_TIMEOUT_S = 10.0
"""After it the install runs plainly: without the interpreter's answer there is another key."""
PROBE = """
import os, site, sys, sysconfig
try:
    libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
except (AttributeError, OSError, ValueError):
    libc = ""
if not libc:
    import platform
    libc = " ".join(platform.libc_ver())
values = [
    "", sys.executable, sys.implementation.cache_tag or "", sysconfig.get_config_var("SOABI") or "",
    sys.version.split()[0], sys.prefix, sys.base_prefix, sysconfig.get_platform(), libc,
    site.getuserbase() or "", site.getusersitepackages() or ""]
paths = sysconfig.get_paths()
values += [str(len(paths)), *paths, *paths.values(), *sys.path, ""]
sys.stdout.buffer.write(os.fsencode(chr(0).join(values)))
"""
"""Without `json` and `platform`: a start waits for it, and they take half of its time. Each value
is between two NULs; what is outside of them is another's output: a `sitecustomize`'s, say."""


@dataclasses.dataclass(frozen=True, slots=True)
class Python:
    """The interpreter that packages are installed for, as it describes itself.

    `search` is its `sys.path` without the user's directory and PYTHONPATH.
    """

    executable: str
    tag: str
    abi: str
    version: str
    prefix: str
    base_prefix: str
    platform: str
    libc: str
    paths: Mapping[str, str]
    user_base: str
    user_site: str
    search: Sequence[str]


def ask(interpreter: str, environ: Mapping[str, str]) -> Python | None:
    """Let an interpreter describe itself; None when it cannot.

    Raises DeadlineError where it does not answer in time: it may be able to later.
    """
    try:
        probe = _STARTED.pop(interpreter, None) or _Probe.start(interpreter, environ)
        answer = probe.answer(PROBE_TIMEOUT_S)
        return None if answer is None else _parse(answer)
    except TimeoutError as error:
        raise DeadlineError(
            f"{interpreter} was asked what it is; {error}, so nothing is restored or kept"
        ) from error
    except (OSError, ValueError):
        return None


def begin_to_ask(interpreter: str, environ: Mapping[str, str]) -> None:
    """Start an interpreter now, so that `ask` need not wait for it as long."""
    try:
        _STARTED[interpreter] = _Probe.start(interpreter, environ)
    except (OSError, ValueError):
        pass  # it does not exist yet


def _parse(answer: bytes) -> Python:
    """The answer of PROBE. Raises ValueError for the output of something else."""
    before, *values = os.fsdecode(answer).split("\0")
    count = int(values[10]) if len(values) > 10 else 0
    names, end = values[11 : 11 + count], 11 + 2 * count
    if before or count < 1 or len(values) <= end or values[-1]:
        raise ValueError("this is not what a Python tells")
    executable, tag, abi, version, prefix, base_prefix, platform, libc, base, site = values[:10]
    return Python(
        executable=executable,
        tag=tag,
        abi=abi,
        version=version,
        prefix=prefix,
        base_prefix=base_prefix,
        platform=platform,
        libc=libc,
        paths=dict(zip(names, values[11 + count : end], strict=True)),
        user_base=base,
        user_site=site,
        search=values[end:-1],
    )


class _Probe:
    """An interpreter that was started to describe itself.

    Not by `subprocess`: importing it takes longer than all the rest here.
    """

    def __init__(self, process: int, output: int) -> None:
        self._process, self._output = process, output

    @classmethod
    def start(cls, interpreter: str, environ: Mapping[str, str]) -> _Probe:
        """Start an interpreter. Raises OSError where it cannot be started."""
        if "/" not in interpreter:
            raise FileNotFoundError(f"no {interpreter} on the search path")
        clean = {k: v for k, v in environ.items() if not k.startswith("PYTHON")}
        output, theirs = os.pipe()
        try:
            process = os.posix_spawn(
                interpreter,
                [interpreter, "-I", "-c", PROBE],
                clean,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, theirs, 1),
                    (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                ],
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
            )
        except BaseException:  # an interrupt too: nothing will read it
            os.close(output)
            raise
        finally:
            os.close(theirs)
        return cls(process, output)

    def answer(self, limit_s: float) -> bytes | None:
        """Its whole output; None where it failed. Raises TimeoutError when it is late."""
        end_s = time.monotonic() + limit_s
        answer = b""
        try:
            while True:
                if not readable(self._output, timeout_s=end_s - time.monotonic()):
                    raise TimeoutError(f"it did not answer within {limit_s:g} s")
                part = os.read(self._output, 1 << 16)
                if not part:
                    break
                answer += part
            while (status := self._wait_status()) is None:
                if time.monotonic() > end_s:
                    raise TimeoutError(f"it did not end within {limit_s:g} s")
                time.sleep(0.001)
        except BaseException:  # it is late, or a signal ends us: nothing waits for it any more
            self._kill()
            raise
        finally:
            os.close(self._output)
        return None if status else answer

    def _wait_status(self) -> int | None:
        """The wait status of the process; None while it runs."""
        try:
            process, status = os.waitpid(self._process, os.WNOHANG)
        except ChildProcessError:  # another part of this process waited for it
            return 0
        return status if process else None

    def _kill(self) -> None:
        if self._wait_status() is None:
            os.kill(self._process, signal.SIGKILL)
            os.waitpid(self._process, 0)


_STARTED: dict[str, _Probe] = {}
"""Interpreters that `begin_to_ask` has started and `ask` will read."""
