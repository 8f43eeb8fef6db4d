"""The options of pip, uv and virtualenv: their names, and which take a value (pure).

Taken from their documentation; pip takes abbreviated ones too, which are not known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bootseer.depsnap.key.shell_script import Expanded
from bootseer.errors import UsageError

_VALUED_TEXT = """
    -r --requirement --requirements -c --constraint --constraints -t --target --prefix --root -p
    --python -i --index-url --extra-index-url --default-index --index -f --find-links
    --trusted-host --proxy --retries --timeout --cert --client-cert --cache-dir --log --platform
    --python-version --python-platform --implementation --abi --no-binary --only-binary
    --upgrade-strategy --progress-bar --report --src -e --editable -o --override --overrides -b
    --build-constraint --build-constraints --config-setting --config-settings -C --exclude-newer
    --resolution --prerelease --index-strategy --keyring-provider --link-mode
    --allow-insecure-host --project --directory --config-file -P --upgrade-package
    --refresh-package --reinstall-package --extra --group --root-user-action --use-feature
    --global-option --exists-action --color --no-build-package --no-binary-package --excludes
    --config-settings-package --exclude-newer-package --fork-strategy --no-build-isolation-package
    --no-editable-package --no-sources-package --output-format --prerelease-package --torch-backend
    --upgrade-group --use-deprecated --install-option --python-preference --default-timeout
    --resume-retries --preview-features
"""
_FLAGS_TEXT = """
    --no-editable --all-extras --no-deps --require-hashes --no-verify-hashes --require-build-hashes
    --no-require-build-hashes --system --break-system-packages --no-break-system-packages
    --no-build --exact --strict --user --no-index -U --upgrade --no-sources --reinstall
    --compile-bytecode --no-build-isolation -n --no-cache --refresh --managed-python
    --no-managed-python --no-python-downloads -q --quiet -v --verbose --system-certs --native-tls
    --offline --no-progress --no-config --no-dev --only-dev --dev --no-default-groups --all-groups
    --inexact --no-install-project --no-install-workspace --no-install-local --locked --frozen
    --all-packages --no-project --seed -c --clear --force --allow-existing --system-site-packages
    --relocatable --allow-empty-requirements --no-allow-empty-requirements --pre --force-reinstall
    -I --ignore-installed --ignore-requires-python --use-pep517 --no-use-pep517
    --check-build-dependencies --compile --no-compile --no-warn-script-location
    --no-warn-conflicts --prefer-binary --no-clean --debug --require-virtualenv --no-input
    --no-cache-dir --disable-pip-version-check --no-color --no-python-version-warning -y --yes
    --copies --symlinks --without-pip --without-scm-ignore-files --no-pip
    --no-setuptools --no-wheel --download --no-download --never-download --always-copy
    --preview --symlink-app-data --reset-app-data --no-periodic-update --no-vcs-ignore
"""
FLAGS = frozenset(_FLAGS_TEXT.split())
VALUED = frozenset(_VALUED_TEXT.split())
"""Options that take a value as a word of its own."""
_VENV_VALUED_TEXT = """
    --prompt --app-data --discovery --try-first-with --creator --seeder --activators --pip
    --setuptools --wheel --extra-search-dir
"""
_SYNC_VALUED_TEXT = "--no-extra --no-group --only-group --no-install-package --package"
SYNC_VALUED = VALUED.union(_SYNC_VALUED_TEXT.split()) - {"--no-binary"}  # a flag there
_ELSEWHERE = frozenset({"--src", "--report"})
"""Options by which an install writes outside of its roots."""
VENV_VALUED = VALUED.union(_VENV_VALUED_TEXT.split()) - {"-c"}  # `uv venv -c` is `--clear`


def list_options(text: str) -> Iterator[tuple[str, str]]:
    """The options of a requirement file that are in lines of their own, with their values.

    Raises UsageError for one that is not known: pip takes abbreviated ones too.
    """
    for line in text.replace("\\\n", " ").splitlines():
        words = line.strip()
        if words[:1] != "-":
            continue
        parser = OptionParser()
        options, _ = parser.parse(_split(words), VALUED)
        if parser.doubt:
            raise UsageError(f"in a requirement file, {parser.doubt}")
        yield from ((name, value) for name, values in options.items() for value in values)


def _split(words: str) -> list[str]:
    if any(quote in words for quote in "'\"\\"):
        import shlex  # few names need quotes

        try:
            return shlex.split(words)
        except ValueError:
            pass  # pip itself will complain
    return words.split()


class OptionParser:
    """Parses options; `doubt` says which is not known, or decides what cannot be read here."""

    def __init__(self) -> None:
        self.doubt = ""

    def parse(
        self, words: Sequence[str], valued: frozenset[str]
    ) -> tuple[dict[str, list[str]], list[str]]:
        """Split words into options (with their values) and positional words."""
        options: dict[str, list[str]] = {}
        positional: list[str] = []
        rest = list(words)
        while rest:
            word = rest.pop(0)
            if word == "--":
                positional += rest
                break
            if not word.startswith("-") or word == "-":
                positional.append(word)
                continue
            name, equals, value = word.partition("=")
            if not word.startswith("--"):
                name, equals, value = word[:2], "", word[2:]
                if name in valued:
                    equals = "=" if value else ""
                elif value:
                    rest.insert(0, _expanded_like("-" + value, word))
            self._check(name, value if equals else "".join(rest[:1]), valued)
            values = options.setdefault(name, [])
            if equals:
                values.append(_expanded_like(value, word))
            elif name in valued and rest:
                values.append(rest.pop(0))
        return options, positional

    def _check(self, name: str, value: str, valued: frozenset[str]) -> None:
        if name in _ELSEWHERE or (name == "--torch-backend" and value == "auto"):
            self.doubt = f"what comes of {name} is not read from the command"
        elif name not in valued and name not in FLAGS and name != "--no-binary":
            self.doubt = f"the option {name} is not known"


def _expanded_like(text: str, of: str) -> str:
    return Expanded(text) if isinstance(of, Expanded) else text
