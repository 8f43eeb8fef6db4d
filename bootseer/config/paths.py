"""Default directories of this node, and the registry configuration files of container tools.

Serves programs that must start at once, so it loads no settings and no `typing`.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


def default_runtime(environ: Mapping[str, str] | None = None) -> str:
    """The directory of sockets and records that live as long as this node's servers."""
    env = os.environ if environ is None else environ
    if env.get("BOOTSEER_RUNTIME"):
        return env["BOOTSEER_RUNTIME"]
    if os.geteuid() == 0:
        return "/run/bootseer"
    return user_directory("XDG_RUNTIME_DIR", ".cache", env)


def default_cache(environ: Mapping[str, str] | None = None) -> str:
    """The directory of this node's caches where none is configured."""
    return user_directory("XDG_CACHE_HOME", ".cache", environ)


def default_store(environ: Mapping[str, str] | None = None) -> str:
    """The directory of dependency snapshots where no store is configured."""
    return user_directory("XDG_DATA_HOME", ".local/share", environ) + "/store"


def registry_auth_files(environ: Mapping[str, str] | None = None) -> list[str]:
    """The files in which container tools keep registry logins, in the order of the search."""
    env = os.environ if environ is None else environ
    base = env.get("HOME") or find_home()
    named = [env["REGISTRY_AUTH_FILE"]] if env.get("REGISTRY_AUTH_FILE") else []
    if env.get("XDG_RUNTIME_DIR"):
        named.append(f"{env['XDG_RUNTIME_DIR']}/containers/auth.json")
    docker = env.get("DOCKER_CONFIG") or f"{base}/.docker"
    return [*named, f"{base}/.config/containers/auth.json", f"{docker}/config.json"]


def plain_http_hosts(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Registries that `BOOTSEER_PLAIN_HTTP` lets be reached by http: "host" or "host:port"."""
    env = os.environ if environ is None else environ
    names = env.get("BOOTSEER_PLAIN_HTTP", "").split(",")
    return tuple(name.strip().lower() for name in names if name.strip())


def registry_hosts_directories(environ: Mapping[str, str] | None = None) -> list[str]:
    """The directories of `HOST/hosts.toml` (containerd) and `HOST/*.crt` (Docker)."""
    env = os.environ if environ is None else environ
    if env.get("BOOTSEER_REGISTRY_HOSTS"):
        return env["BOOTSEER_REGISTRY_HOSTS"].split(":")
    return ["/etc/containerd/certs.d", "/etc/docker/certs.d", "/etc/containers/certs.d"]


def registries_conf_files(environ: Mapping[str, str] | None = None) -> list[str]:
    """Podman's effective `registries.conf` files; a later one overrides an earlier one."""
    env = os.environ if environ is None else environ
    if env.get("CONTAINERS_REGISTRIES_CONF"):
        return [env["CONTAINERS_REGISTRIES_CONF"]]
    base = env.get("HOME") or find_home()
    first = f"{base}/.config/containers/registries.conf"
    if not os.path.exists(first):
        first = "/etc/containers/registries.conf"
    files = [first]
    for folder in ("/etc/containers/registries.conf.d", f"{first}.d"):
        try:
            names = sorted(n for n in os.listdir(folder) if n.endswith(".conf"))
        except OSError:
            continue
        files += [path for n in names if (path := os.path.join(folder, n)) not in files]
    return files


def user_directory(variable: str, below_home: str, environ: Mapping[str, str] | None) -> str:
    """`bootseer` below the directory that `variable` names, else below `below_home` of the home."""
    env = os.environ if environ is None else environ
    base = env.get(variable) or os.path.join(env.get("HOME") or find_home(), below_home)
    return os.path.join(base, "bootseer")


def find_home() -> str:
    """The user's home directory in the user database; `/` for an unknown user, as in containers.

    Never a directory that others may write to: what they put there would be restored.
    """
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_dir or "/"
    except KeyError:
        return "/"
