"""How far from outside an address can be reached, and where a redirect may lead by that."""

from __future__ import annotations

import enum

from bootseer.errors import AccessDeniedError
from bootseer.storage.http.responses import Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from bootseer.storage.options import Redirects


class Reach(enum.IntEnum):
    """Who can connect to an address; the more, the greater."""

    LINK = 0  # 169.254.0.0/16 and the like, where clouds keep their metadata services
    MACHINE = 1
    NETWORK = 2
    PUBLIC = 3


_PLACES = {
    Reach.LINK: "where machines have services for themselves alone",
    Reach.MACHINE: "which is this machine itself",
    Reach.NETWORK: "which is in a private network",
    Reach.PUBLIC: "which is public",
}
_NAT64 = bytes.fromhex("0064ff9b0000000000000000")
_METADATA_V6 = "fd00:ec2::254"


def reach_of(address: str) -> Reach:
    """The reach of a numeric IPv4 or IPv6 address, also of an IPv4 address within an IPv6 one."""
    import ipaddress  # three milliseconds, which a start without redirects saves

    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour
        if found.packed[:12] == _NAT64:
            inner = ipaddress.IPv4Address(found.packed[12:])
        if inner is not None:
            return reach_of(str(inner))
    if found.is_link_local or str(found) == _METADATA_V6:
        return Reach.LINK
    if found.is_loopback or found.is_unspecified:
        return Reach.MACHINE
    return Reach.PUBLIC if found.is_global else Reach.NETWORK


def check_host(rule: Redirects, base: Target, target: Target, what: str) -> None:
    """Raise AccessDeniedError where a rule of "same-host" forbids that `base` leads to `target`."""
    if rule == "same-host" and target.origin.host != base.origin.host:
        raise AccessDeniedError(
            f"cannot {what}: {base.origin.authority} redirects to another host,"
            f" {target.origin.host}; allow it by --redirects outward (BOOTSEER_STORE_REDIRECTS)"
        )


def least_reach(rule: Redirects, peer: str) -> Reach:
    """What the address that a redirect leads to must have, where `peer` answered with it."""
    found = reach_of(peer) if peer else Reach.PUBLIC
    return min(found, Reach.MACHINE) if rule == "any" else found


def check_reach(least: Reach, peer: str, base: Target, target: Target, what: str) -> None:
    """Raise AccessDeniedError where `target`'s own address, `peer`, has less reach than it must.

    Looked at once connected, before anything is sent: a name may resolve to whatever it likes.
    """
    found = reach_of(peer)
    if found >= least:
        return
    advice = (
        "name that address in the store's URL if it is meant"
        if found is Reach.LINK
        else "allow it by --redirects any (BOOTSEER_STORE_REDIRECTS) if it is meant"
    )
    shown = peer if peer == target.origin.host else f"{target.origin.host} ({peer})"
    raise AccessDeniedError(
        f"cannot {what}: {base.origin.authority} redirects to {shown}, {_PLACES[found]}; {advice}"
    )
