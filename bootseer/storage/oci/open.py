"""Opening the repository that a reference names."""

from __future__ import annotations

from bootseer.storage.oci.reference import LAYOUT_SCHEME, Reference, parse_reference
from bootseer.storage.options import DEFAULTS, StoreOptions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from bootseer.storage.oci.repository import Repository


def open_repository(
    reference: str,
    options: StoreOptions | None = None,
    *,
    plain_http: bool | None = None,
    push: bool = False,
) -> tuple[Repository, Reference]:
    """Open the repository that a name or URL lies in; nothing is contacted yet.

    `reference` is an image's name, `oci://HOST/NAME`, or `oci-layout:DIR`. `plain_http` says
    whether the registry speaks http; None: on loopback, and where options or environment name
    the host. `push` asks for the right to write when it first logs in. Raises UsageError.
    """
    options = options or DEFAULTS
    parsed = parse_reference(reference)
    if reference.startswith(LAYOUT_SCHEME):
        from bootseer.storage.oci.layout_repository import LayoutRepository

        return LayoutRepository(parsed.repository, writable=push), parsed
    from bootseer.storage.oci.registry_repository import RegistryRepository

    return RegistryRepository.open(parsed, options, plain_http=plain_http, push=push), parsed
