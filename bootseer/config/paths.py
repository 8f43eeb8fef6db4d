"""What of this node's settings programs need that must start at once: places, and registries."""

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


def registry_auth_files(environ: Mapping[str, str] | None = None) -> list[str]:
    """Where container tools keep registry logins, in the order in which they are tried."""
    env = os.environ if environ is None else environ
    base = env.get("HOME") or home()
    named = [env["REGISTRY_AUTH_FILE"]] if env.get("REGISTRY_AUTH_FILE") else []
    if env.get("XDG_RUNTIME_DIR"):
        named.append(f"{env['XDG_RUNTIME_DIR']}/containers/auth.json")
    docker = env.get("DOCKER_CONFIG") or f"{base}/.docker"
    return [*named, f"{base}/.config/containers/auth.json", f"{docker}/config.json"]


def plain_http_hosts(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Registries that `BOOTSEER_PLAIN_HTTP` allows to be asked by http: "host" or "host:port"."""
    env = os.environ if environ is None else environ
    names = env.get("BOOTSEER_PLAIN_HTTP", "").split(",")
    return tuple(name.strip().lower() for name in names if name.strip())


def registry_hosts_directories(environ: Mapping[str, str] | None = None) -> list[str]:
    """Where `HOST/hosts.toml` stands, as containerd has it, and `HOST/*.crt`, as Docker has it."""
    env = os.environ if environ is None else environ
    if env.get("BOOTSEER_REGISTRY_HOSTS"):
        return env["BOOTSEER_REGISTRY_HOSTS"].split(":")
    return ["/etc/containerd/certs.d", "/etc/docker/certs.d", "/etc/containers/certs.d"]


def registries_conf_files(environ: Mapping[str, str] | None = None) -> list[str]:
    """Podman's `registries.conf` files that count, the later over the earlier."""
    env = os.environ if environ is None else environ
    if env.get("CONTAINERS_REGISTRIES_CONF"):
        return [env["CONTAINERS_REGISTRIES_CONF"]]
    base = env.get("HOME") or home()
    first = f"{base}/.config/containers/registries.conf"
    if not os.path.exists(first):
        first = "/etc/containers/registries.conf"
    found = [first]
    for folder in ("/etc/containers/registries.conf.d", f"{first}.d"):
        try:
            names = sorted(n for n in os.listdir(folder) if n.endswith(".conf"))
        except OSError:
            continue
        found += [path for n in names if (path := os.path.join(folder, n)) not in found]
    return found


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
