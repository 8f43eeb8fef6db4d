"""Ask `uv pip compile` what an index decides now, in a process that runs while a start goes on."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping, Sequence

from bootseer.depsnap import pins
from bootseer.depsnap.key import pip_settings
from bootseer.depsnap.key.install_command import Install
from bootseer.depsnap.key.install_roots import folder_of, variables_of, which
from bootseer.depsnap.key.tool_options import VALUED, OptionParser
from bootseer.events.redaction import redact_for_key
from bootseer.light_dataclasses import dataclass, field
from bootseer.system import sha256

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess

NO_RESOLVER = "`uv`, which would resolve them, is not installed"
_RETRYING_LIMIT_S = 10.0
"""A start that waits less asks an index that refuses only once: uv tries again after 2 s, then
later, and without a network there is nothing to wait for."""
_REPOSITORY = r"\b(?:git|hg|svn|bzr)\+"
_RESOLVING_TEXT = """
    --index-url --extra-index-url --default-index --index --find-links --constraints --overrides
    --excludes --build-constraints --extra --group --prerelease --resolution --exclude-newer
    --exclude-newer-package --index-strategy --only-binary --no-binary --python-version
    --python-platform --torch-backend --keyring-provider --fork-strategy --config-setting
    --config-settings-package --prerelease-package --upgrade-package --upgrade-group
    --no-build-isolation-package --no-sources-package --no-index --no-deps --all-extras --no-build
    --no-sources --no-build-isolation --require-build-hashes --no-config --refresh
    --refresh-package
"""
_RESOLVING = frozenset(_RESOLVING_TEXT.split())
"""Options of installs that say where to look, and what to accept; uv's resolver has the same."""
_RESOLVER_NAMES = {
    "-i": "--index-url",
    "-f": "--find-links",
    "-c": "--constraints",
    "--constraint": "--constraints",
    "--override": "--overrides",
    "-P": "--upgrade-package",
    "--reinstall": "--refresh",  # which it implies
    "--reinstall-package": "--refresh-package",
    "-b": "--build-constraints",
    "--build-constraint": "--build-constraints",
    "-C": "--config-setting",
    "--config-settings": "--config-setting",
}
_UNRELATED_TEXT = """
    -r --requirement --requirements -e --editable -t --target --prefix --root -p --python --user
    --system --break-system-packages -q --quiet -v --verbose -U --upgrade --upgrade-strategy
    --force-reinstall -I --ignore-installed --compile --no-compile --compile-bytecode
    --no-warn-script-location --no-warn-conflicts --no-clean --debug --no-input --no-cache-dir
    --disable-pip-version-check --no-color --no-python-version-warning --timeout --retries
    --default-timeout --resume-retries --proxy --cert --client-cert --trusted-host --cache-dir
    --log --root-user-action --progress-bar -n --no-cache --offline --no-progress
    --color --link-mode --strict --exact --require-virtualenv --directory --project --config-file
    --use-feature --use-deprecated --exists-action --use-pep517 --prefer-binary
    --allow-insecure-host --native-tls --system-certs --require-hashes --no-verify-hashes
    --check-build-dependencies --ignore-requires-python --no-editable --no-editable-package
    --no-break-system-packages --managed-python
    --no-managed-python --no-python-downloads --python-preference --preview --preview-features
    --output-format --allow-empty-requirements --no-allow-empty-requirements
"""
_UNRELATED = frozenset(_UNRELATED_TEXT.split())
"""Options that choose no package of an index, or whose choice the resolver is given otherwise."""


@dataclass(frozen=True, slots=True)
class Lock:
    """What an index decides: sha256 of the resolved list without credentials, and its pins.

    `moves`: it also names commits of repositories, which no version distinguishes.
    """

    digest: str
    pinned: Mapping[str, str]
    moves: bool = False

    def contradicts(self, packages: Mapping[str, str]) -> bool:
        """Whether these installed packages are, or may be, others than those that it names.

        A package that it does not name came from a path or an address, which are inputs, or with a
        new environment.
        """
        return any(
            not pins.same_version(self.pinned[name], version)
            if name in self.pinned
            else self.moves and name not in pins.SEEDS
            for name, version in packages.items()
        )


@dataclass(slots=True)
class Resolution:
    """A resolver process. `limit_s` counts from `begin`; `why` says why there is no lock.

    Nothing is started where the limit is 0, there is no uv, or the command is not a single one of
    pip or uv.
    """

    installs: Sequence[Install]
    python: str | None
    environ: Mapping[str, str]
    cwd: str
    limit_s: float
    why: str = ""
    _child: subprocess.Popen[bytes] | None = None
    _output: int = -1
    _begun_s: float = 0.0
    _lock: Lock | None = field(default=None)

    def begin(self) -> None:
        """Start the resolver unless it runs or has ended."""
        if self._child is not None or self.why or self._lock is not None:
            return
        import subprocess

        self._begun_s = time.monotonic()
        words, names = self._words()
        if not words:
            return
        try:
            self._output = os.memfd_create("lock")
            requirements = os.memfd_create("requirements")
            try:
                os.write(requirements, names)
                os.lseek(requirements, 0, os.SEEK_SET)
                self._child = subprocess.Popen(
                    words,
                    stdin=requirements,
                    stdout=self._output,
                    stderr=subprocess.DEVNULL,
                    cwd=folder_of(self._install(), self.cwd),
                    env=self._environment(),
                )
            finally:
                os.close(requirements)
        except OSError as error:
            self._end(f"the resolver did not start: {error.strerror}")

    def lock(self) -> Lock | None:
        """Wait for the lock, at most until the limit; None when it cannot be had, see `why`."""
        self.begin()
        if self._child is None:
            return self._lock
        from subprocess import TimeoutExpired

        try:
            code = self._child.wait(max(0.0, self._begun_s + self.limit_s - time.monotonic()))
        except TimeoutExpired:
            self.close()
            self.why = f"they were not resolved within {self.limit_s:g} s"
            return None
        if code:
            self._end("`uv pip compile` could not resolve them")
            return None
        text = redact_for_key(_read(self._output).decode("utf-8", "replace"))
        self._end("")
        digest = sha256.of_text(text)
        self._lock = Lock(digest, pins.of_lock(text), bool(re.search(_REPOSITORY, text)))
        return self._lock

    @property
    def ended(self) -> bool:
        """Whether the lock is known."""
        return self._lock is not None

    @property
    def running(self) -> bool:
        """Whether `lock` would wait now."""
        return self._child is not None and self._child.poll() is None

    def settle(self) -> None:
        """Take the lock of a resolver that has ended meanwhile; else kill it."""
        if self._child is not None and self._child.poll() is not None:
            self.lock()
        self.close()

    def close(self) -> None:
        """Kill a resolver that still runs."""
        if self._child is not None:
            if self._child.poll() is None:
                self._child.kill()
            self._child.wait()
            self._end("the resolver was ended")

    def _end(self, why: str) -> None:
        self._child, self.why = None, why
        if self._output >= 0:
            os.close(self._output)
            self._output = -1

    def _environment(self) -> dict[str, str]:
        install = self._install()
        environ = dict(variables_of(install, self.environ))
        if install.settings_file:
            environ["UV_CONFIG_FILE"] = install.settings_file
        if install.tool == "pip":
            environ = pip_settings.environment_for_uv(environ, self._pip_options())
        if self.limit_s < _RETRYING_LIMIT_S:
            environ.setdefault("UV_HTTP_RETRIES", "0")
        return environ

    def _pip_options(self) -> dict[str, str]:
        """The options that pip's settings set, where it is pip that installs."""
        install = self._install()
        if install.tool != "pip" or self.python is None:
            return {}
        prefix = os.path.dirname(os.path.dirname(self.python))
        environ = variables_of(install, self.environ)
        return pip_settings.read(environ, prefix, folder_of(install, self.cwd))

    def _resolvable(self) -> list[Install]:
        return [install for install in self.installs if install.tool in ("pip", "uv")]

    def _install(self) -> Install:
        """The install that is resolved: where there are others, nothing is started."""
        return self._resolvable()[0]

    def _words(self) -> tuple[list[str], bytes]:
        """uv's command and its standard input; no words, and `why`, where none can be made."""
        resolvable = self._resolvable()
        if self.limit_s <= 0:
            self.why = "--resolve-timeout is 0"
        elif len(resolvable) != 1 or any(i.tool in ("other", "uv-sync") for i in self.installs):
            self.why = "no resolver knows this command"
        elif self.python is None:
            self.why = "the environment's Python could not be asked"
        program = which("uv", self.environ.get("PATH"))
        program = program or which("uv", os.path.dirname(sys.executable))
        if program is None and not self.why:
            self.why = NO_RESOLVER
        if self.why:
            return [], b""
        install = resolvable[0]
        resolver_words, unknown = _resolver_words(install)
        if unknown:
            self.why = f"no resolver knows what {unknown} makes of them"
            return [], b""
        assert program is not None
        assert self.python is not None
        words = [program, "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
        # The interpreter itself: uv caches what it learns of a path, and would take an environment
        # that is being recreated meanwhile for its base, in the install's uv as well.
        words += ["--python", os.path.realpath(self.python), *resolver_words]
        options = {option: value.split() for option, value in self._pip_options().items()}
        words += [*install.requirement_files, *options.get("requirement", ())]
        words += [f"--group={group}" for group in options.get("group", ())]
        editable = [*install.editable, *options.get("editable", ())]
        lines = [*install.requirements, *(f"-e {path}" for path in editable)]
        names = "".join(line + "\n" for line in lines)
        if names:
            words.append("-")
        return words, names.encode("utf-8", "surrogateescape")


def _read(descriptor: int) -> bytes:
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, size, 0)


def _resolver_words(install: Install) -> tuple[list[str], str]:
    """An install's options as those of uv's resolver, and the first that the resolver lacks."""
    words = list(install.words[1:])
    if os.path.basename(install.words[0]).startswith("python"):
        words = words[words.index("-m") + 1 :]  # the options before are Python's own
    options, _ = OptionParser().parse(words, VALUED)
    out: list[str] = []
    for option, values in options.items():
        name = _RESOLVER_NAMES.get(option, option)
        if name == "--pre":
            out += ["--prerelease", "allow"]
        elif name in _RESOLVING and option in VALUED:
            out += [word for value in values for word in (name, value)]
        elif name in _RESOLVING:
            out.append(name)
        elif name not in _UNRELATED:
            return [], name
    return out, ""
