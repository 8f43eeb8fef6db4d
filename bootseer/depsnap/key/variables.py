"""Environment variables that decide what an install makes."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from bootseer.errors import UsageError
from bootseer.events.redaction import is_secret_variable, redact_for_key
from bootseer.system import sha256

_TOOL_PREFIXES = ("PIP_", "UV_", "VIRTUALENV_")
_BUILD_VARIABLES = frozenset(
    (
        *("CC", "CXX", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CMAKE_ARGS", "CUDA_HOME"),
        *("FORCE_CUDA", "TORCH_CUDA_ARCH_LIST"),
    )
)
_BUILD_PREFIXES = (
    "SETUPTOOLS_SCM_",
    "PBR_",
    "PDM_BUILD_",
    "HATCH_BUILD_",
    "POETRY_DYNAMIC_VERSIONING",
)
"""Beginnings of the variables that say which version is built, or how."""
# Variables of pip and uv that change how an install runs, not its result.
_NEUTRAL = frozenset(
    f"{tool}_{name}"
    for tool in ("PIP", "UV")
    for name in (
        *("CACHE_DIR", "NO_CACHE", "NO_CACHE_DIR", "LOG", "LOG_FILE", "TIMEOUT", "RETRIES"),
        *("DEFAULT_TIMEOUT", "PROGRESS_BAR", "NO_PROGRESS", "QUIET", "VERBOSE", "NO_COLOR"),
        *("DISABLE_PIP_VERSION_CHECK", "ROOT_USER_ACTION", "NO_INPUT", "LINK_MODE", "PROXY"),
        *("CONCURRENT_DOWNLOADS", "CONCURRENT_BUILDS", "CONCURRENT_INSTALLS", "HTTP_TIMEOUT"),
        *("HTTP_RETRIES", "CERT", "CLIENT_CERT", "TRUSTED_HOST", "NATIVE_TLS", "OFFLINE"),
        *("INSECURE_HOST", "RUN_RECURSION_DEPTH", "NO_WARN_SCRIPT_LOCATION", "NO_WARN_CONFLICTS"),
    )
)


def decides_result(variable: str) -> bool:
    """Whether a variable is one of the tools', or says which version is built, or how."""
    return variable in _BUILD_VARIABLES or variable.startswith((*_TOOL_PREFIXES, *_BUILD_PREFIXES))


def read_variables(
    environ: Mapping[str, str], extra: Collection[str], named: Collection[str]
) -> dict[str, str]:
    """The variables that count in a key, by name: a value that is safe to show, or its digest.

    Counted are those that decide the result, the `extra` ones of --key-env, and, as digests, those
    `named` in lists and commands, which may hold anything. Raises UsageError for a secret in
    `extra`; other secrets are left out.
    """
    values = {}
    for name in sorted(environ):
        chosen = name in extra or (decides_result(name) and name not in _NEUTRAL)
        if not chosen and name not in named:
            continue
        if is_secret_variable(name):
            if name in extra:
                raise UsageError(
                    f"--key-env {name} is named like a credential, which no key may hold; "
                    "copy what decides the install into a variable of another name"
                )
            continue
        value = redact_for_key(environ[name])
        values[name] = value if chosen else sha256.of_text(value)
    return values
