"""Logins for registries, as container tools keep them.

Sources: Docker's `config.json` (auths, credsStore, credHelpers) and the credential helpers'
protocol; the `auth.json` of containers(5), whose keys may name a namespace or repository. Every
call reads its source again, since other programs renew the tokens there.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from bootseer import light_dataclasses as dataclasses
from bootseer.storage.oci.reference import DEFAULT_HOST

HUB_KEY = "https://index.docker.io/v1/"
IDENTITY_USER = "<token>"
HELPER_TIMEOUT_S = 30.0
FILE_LIMIT_BYTES = 4 << 20
_HELPER = re.compile(r"[A-Za-z0-9._-]+")


@dataclasses.dataclass(frozen=True, slots=True)
class Login:
    """Credentials for a registry; all empty for anonymous access.

    `trouble` says why a login that is configured could not be obtained, without its secrets.
    """

    user: str = ""
    password: str = dataclasses.field(default="", repr=False)
    identity_token: str = dataclasses.field(default="", repr=False)
    registry_token: str = dataclasses.field(default="", repr=False)
    trouble: str = ""

    def __bool__(self) -> bool:
        return bool(self.user or self.password or self.identity_token or self.registry_token)

    @property
    def basic(self) -> str:
        """The value of a Basic Authorization header; "" without user and password."""
        if not (self.user or self.password) or self.user == IDENTITY_USER:
            return ""
        return basic_header(self.user, self.password)


ANONYMOUS = Login()


def basic_header(user: str, password: str) -> str:
    """The value of a Basic Authorization header."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode("ascii")


def find_login(files: list[str], host: str, repository: str) -> Login:
    """The login for a repository: the first file's that has one, there the longest key's.

    A helper for the host comes before a file's general helper, and that before the logins in the
    file itself. Files that are missing hold no login; of files that cannot be read and helpers
    that fail, the first is reported by `trouble`.
    """
    trouble = ""
    for path in files:
        settings = _read(path)
        if settings is None:
            continue
        if isinstance(settings, str):
            trouble = trouble or settings
            continue
        helped = _from_helpers(settings, host, repository)
        login = helped or _from_auths(settings, host, repository)
        if login:
            return login
        trouble = trouble or helped.trouble
    return Login(trouble=trouble)


def keys(host: str, repository: str) -> Iterator[str]:
    """The keys that a login may be stored under, the most specific first."""
    parts = repository.split("/") if repository else []
    for count in range(len(parts), 0, -1):
        yield "/".join((host, *parts[:count]))
    yield host
    yield from (f"https://{host}", f"https://{host}/", f"https://{host}/v1/", f"https://{host}/v2/")
    yield from (f"http://{host}", f"http://{host}/", f"http://{host}/v1/")
    if host == DEFAULT_HOST:
        yield from (HUB_KEY, "index.docker.io", "registry-1.docker.io")


def _read(path: str) -> dict[str, Any] | str | None:
    """A file's settings; None when there is no file, a text that says what is wrong with it."""
    try:
        with open(path, "rb") as file:
            value = json.loads(file.read(FILE_LIMIT_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        return f"{path} cannot be read ({type(error).__name__})"
    return value if isinstance(value, dict) else f"{path} holds no JSON object"


def _from_helpers(settings: Mapping[str, Any], host: str, repository: str) -> Login:
    helpers = settings.get("credHelpers")
    trouble = ""
    if isinstance(helpers, dict):
        for key in keys(host, repository):
            if isinstance(helpers.get(key), str):
                login = ask_helper(helpers[key], key)
                if login:
                    return login
                trouble = trouble or login.trouble
    general = settings.get("credsStore")
    if isinstance(general, str) and general:
        login = ask_helper(general, HUB_KEY if host == DEFAULT_HOST else host)
        if login:
            return login
        trouble = trouble or login.trouble
    return Login(trouble=trouble)


def _from_auths(settings: Mapping[str, Any], host: str, repository: str) -> Login:
    auths = settings.get("auths")
    if isinstance(auths, dict):
        for key in keys(host, repository):
            entry = auths.get(key)
            if isinstance(entry, dict) and (login := _entry(entry)):
                return login
    return ANONYMOUS


def _entry(entry: Mapping[str, Any]) -> Login:
    def text(key: str) -> str:
        value = entry.get(key)
        return value if isinstance(value, str) else ""

    user, password = text("username"), text("password")
    if text("auth"):
        try:
            pair = base64.b64decode(text("auth")).decode()
        except ValueError:
            pair = ""
        head, colon, rest = pair.partition(":")
        if colon:
            user, password = head, rest.rstrip("\0")
    return Login(user, password, text("identitytoken"), text("registrytoken"))


def ask_helper(name: str, server: str) -> Login:
    """The login that `docker-credential-NAME get` has for a server."""
    import subprocess

    program = f"docker-credential-{name}"
    if not _HELPER.fullmatch(name):
        return Login(trouble="the credential helper has a name that no program can have")
    try:
        helper = subprocess.run(
            [program, "get"],
            input=server.encode(),
            capture_output=True,
            timeout=HELPER_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        return Login(trouble=f"the credential helper {program} is not installed")
    except (OSError, subprocess.TimeoutExpired) as error:
        return Login(trouble=f"the credential helper {program} failed ({type(error).__name__})")
    if helper.returncode:
        if b"not found" in helper.stdout + helper.stderr:
            return ANONYMOUS
        return Login(trouble=f"the credential helper {program} ended with {helper.returncode}")
    try:
        value = json.loads(helper.stdout)
        user, secret = str(value["Username"]), str(value["Secret"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return Login(trouble=f"the credential helper {program} answered no login")
    if user == IDENTITY_USER:
        return Login(user, identity_token=secret)
    return Login(user, secret)
