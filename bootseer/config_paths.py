"""Where things of this node lie when nobody named a place; for programs that must start at once."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


def default_runtime(environ: Mapping[str, str] | None = None) -> str:
    """Where this node's servers keep what lives as long as they do."""
    env = os.environ if environ is None else environ
    if env.get("BOOTSEER_RUNTIME"):
        return env["BOOTSEER_RUNTIME"]
    if os.geteuid() == 0:
        return "/run/bootseer"
    return user_directory("XDG_RUNTIME_DIR", ".cache", env)


def default_cache(environ: Mapping[str, str] | None = None) -> str:
    """This node's directory when nobody named one."""
    return user_directory("XDG_CACHE_HOME", ".cache", environ)


def default_store(environ: Mapping[str, str] | None = None) -> str:
    """Where snapshots go when nobody named a store."""
    return user_directory("XDG_DATA_HOME", ".local/share", environ) + "/store"


def user_directory(variable: str, below_home: str, environ: Mapping[str, str] | None) -> str:
    """A directory of ours below what the variable names, or below this user's home."""
    env = os.environ if environ is None else environ
    base = env.get(variable) or os.path.join(env.get("HOME") or home(), below_home)
    return os.path.join(base, "bootseer")


def home() -> str:
    """This user's home by the user database; `/`, as container runtimes have it, for one unknown.

    Never a directory that others may write: what they put there would be restored.
    """
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_dir or "/"
    except KeyError:
        return "/"
