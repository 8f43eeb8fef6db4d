"""Where redirects may lead, by how widely the address at their end can be reached."""

from __future__ import annotations

import enum

from bootseer.errors import AccessDeniedError
from bootseer.storage.http.responses import Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from bootseer.storage.options import Redirects


class Reach(enum.IntEnum):
    """From where an address can be connected to; the wider, the greater."""

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

    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour
        if ip.packed[:12] == _NAT64:
            inner = ipaddress.IPv4Address(ip.packed[12:])
        if inner is not None:
            return reach_of(str(inner))
    if ip.is_link_local or str(ip) == _METADATA_V6:
        return Reach.LINK
    if ip.is_loopback or ip.is_unspecified:
        return Reach.MACHINE
    return Reach.PUBLIC if ip.is_global else Reach.NETWORK


def check_host(rule: Redirects, base: Target, target: Target, what: str) -> None:
    """Raise AccessDeniedError where the rule "same-host" forbids a redirect to `target`."""
    if rule == "same-host" and target.origin.host != base.origin.host:
        raise AccessDeniedError(
            f"cannot {what}: {base.origin.authority} redirects to another host,"
            f" {target.origin.host}; allow it by --redirects outward (BOOTSEER_STORE_REDIRECTS)"
        )


def least_reach(rule: Redirects, peer: str) -> Reach:
    """The reach that the target of a redirect must have at least; `peer` sent the redirect."""
    reach = reach_of(peer) if peer else Reach.PUBLIC
    return min(reach, Reach.MACHINE) if rule == "any" else reach


def check_reach(least: Reach, peer: str, base: Target, target: Target, what: str) -> None:
    """Raise AccessDeniedError where `target`, connected as `peer`, has less reach than `least`.

    Checked on the connection, before anything is sent: a name may resolve to any address.
    """
    reach = reach_of(peer)
    if reach >= least:
        return
    advice = (
        "name that address in the store's URL if it is meant"
        if reach is Reach.LINK
        else "allow it by --redirects any (BOOTSEER_STORE_REDIRECTS) if it is meant"
    )
    shown = peer if peer == target.origin.host else f"{target.origin.host} ({peer})"
    raise AccessDeniedError(
        f"cannot {what}: {base.origin.authority} redirects to {shown}, {_PLACES[reach]}; {advice}"
    )
