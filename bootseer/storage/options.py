"""How stores are opened: all options and their defaults."""

from __future__ import annotations

from collections.abc import Mapping

from bootseer import light_dataclasses as dataclasses
from bootseer.errors import UsageError
from bootseer.storage.request_control import STALL_S

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    Authentication = Literal["auto", "simple", "token", "kerberos"]
    HdfsBackend = Literal["native", "arrow"]
    Redirects = Literal["same-host", "outward", "any"]

REDIRECTS: tuple[Redirects, ...] = ("same-host", "outward", "any")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """What a URL does not say. 0 and "" mean the store's own default.

    `auth` is "simple" (a user name that the server does not check), "token" (an HDFS delegation
    token, or a bearer token for HTTP) or "kerberos"; "auto" takes a token where there is one, else
    simple. `token_file` holds the token: its text, or Hadoop's own token file. `ca_file` is the
    only authority trusted for TLS when it is given. `hosts` are further NameNodes, each
    "host:port", of the cluster that the URL names.
    """

    user: str = ""
    token_file: str = ""
    auth: Authentication = "auto"
    ca_file: str = ""
    hosts: tuple[str, ...] = ()
    hdfs_backend: HdfsBackend = "native"
    redirects: Redirects = "outward"
    """Where an http(s) store may redirect to: its own host alone; also wherever can be reached by
    as many as the redirecting server can (never from a public address into a private network, nor
    from another machine to this one); or anywhere. Link-local addresses are for stores whose URL
    names one."""
    plain_http: tuple[str, ...] = ()
    """Registries, "host" or "host:port", that are asked by http; those on loopback always are."""
    streams: int = 0
    """Requests at a time; see `PreferredReads`."""
    range_bytes: int = 0
    """The most bytes of one request; see `PreferredReads`."""
    connect_s: float = 5.0
    """The longest wait for a connection."""
    stall_s: float = STALL_S
    """The longest wait for the next byte, where no `Attempt` says otherwise."""
    retry_s: float = 30.0
    """How long calls without data (stat, list, rename, …) are retried."""


DEFAULTS = StoreOptions()


def options_from_environment(environ: Mapping[str, str]) -> StoreOptions:
    """The options of a program that passes none, such as `bootseer deps`.

    BOOTSEER_STORE_REDIRECTS says where redirects may lead; UsageError for an unknown value.
    """
    given = environ.get("BOOTSEER_STORE_REDIRECTS") or DEFAULTS.redirects
    for redirects in REDIRECTS:
        if given == redirects:
            return dataclasses.replace(DEFAULTS, redirects=redirects)
    raise UsageError(f"BOOTSEER_STORE_REDIRECTS is {given[:40]!r}; give {', '.join(REDIRECTS)}")
