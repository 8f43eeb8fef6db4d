"""Whether to wait for the node that is installing the same (pure).

Terms, all in seconds: the holder has held the lease for `held_s`; past installs took `install_s`,
publications `publish_s`, restores `restore_s`; we have waited for `waited_s`.

`auto` waits only while the holder's expected finish plus our restore is no later than our own
plain install would be. Without past times it never waits. The bound holds for the whole wait as
well: we install at the latest when a plain install begun at our start would leave no time to
restore; so a holder that is late costs at most the time of one install.
"""

from __future__ import annotations

from bootseer.depsnap.store.records import Times

TYPE_CHECKING = False
if TYPE_CHECKING:
    from bootseer.depsnap.settings import Wait

_OVERDUE = 1.25
"""A holder this much over its expected time is not expected to finish."""


def keep_waiting(
    policy: Wait, past: Times | None, held_s: float, waited_s: float, limit_s: float
) -> bool:
    """True to look again later, False to install plainly now."""
    if policy == "never" or waited_s >= limit_s:
        return False
    if policy == "always":
        return True
    if past is None:
        return False
    whole_s = past.install_s + past.publish_s
    if held_s > whole_s * _OVERDUE:
        return False
    remaining_s = max(0.0, whole_s - held_s)
    if remaining_s + past.restore_s > past.install_s:
        return False
    return waited_s + past.restore_s <= past.install_s


def poll_s(waited_s: float) -> float:
    """How long to sleep before looking again: 0.1 s at first, 1 s at most."""
    return min(1.0, 0.1 + waited_s / 20)
