"""The protobuf messages of containerd's snapshots API, made when first needed.

The names, numbers and types are those of `containerd.services.snapshots.v1` and of
`containerd.types.Mount`. Generated code would be bound to one version of protobuf. Needs the extra
`snapshotter`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from bootseer.errors import NotSupportedError

PACKAGE = "containerd.services.snapshots.v1"
SERVICE = f"{PACKAGE}.Snapshots"

# message -> field -> (number, type); "*" marks a repeated one, "map" is string to string.
_MESSAGES: Mapping[str, Mapping[str, tuple[int, str]]] = {
    "Info": {
        "name": (1, "string"),
        "parent": (2, "string"),
        "kind": (3, "Kind"),
        "created_at": (4, ".google.protobuf.Timestamp"),
        "updated_at": (5, ".google.protobuf.Timestamp"),
        "labels": (6, "map"),
    },
    "PrepareSnapshotRequest": {
        "snapshotter": (1, "string"),
        "key": (2, "string"),
        "parent": (3, "string"),
        "labels": (4, "map"),
    },
    "PrepareSnapshotResponse": {"mounts": (1, "*.containerd.types.Mount")},
    "ViewSnapshotRequest": {
        "snapshotter": (1, "string"),
        "key": (2, "string"),
        "parent": (3, "string"),
        "labels": (4, "map"),
    },
    "ViewSnapshotResponse": {"mounts": (1, "*.containerd.types.Mount")},
    "MountsRequest": {"snapshotter": (1, "string"), "key": (2, "string")},
    "MountsResponse": {"mounts": (1, "*.containerd.types.Mount")},
    "RemoveSnapshotRequest": {"snapshotter": (1, "string"), "key": (2, "string")},
    "CommitSnapshotRequest": {
        "snapshotter": (1, "string"),
        "name": (2, "string"),
        "key": (3, "string"),
        "labels": (4, "map"),
    },
    "StatSnapshotRequest": {"snapshotter": (1, "string"), "key": (2, "string")},
    "StatSnapshotResponse": {"info": (1, "Info")},
    "UpdateSnapshotRequest": {
        "snapshotter": (1, "string"),
        "info": (2, "Info"),
        "update_mask": (3, ".google.protobuf.FieldMask"),
    },
    "UpdateSnapshotResponse": {"info": (1, "Info")},
    "ListSnapshotsRequest": {"snapshotter": (1, "string"), "filters": (2, "*string")},
    "ListSnapshotsResponse": {"info": (1, "*Info")},
    "UsageRequest": {"snapshotter": (1, "string"), "key": (2, "string")},
    "UsageResponse": {"size": (1, "int64"), "inodes": (2, "int64")},
    "CleanupRequest": {"snapshotter": (1, "string")},
}
_KINDS = {"UNKNOWN": 0, "VIEW": 1, "ACTIVE": 2, "COMMITTED": 3}
_MOUNT = {
    "type": (1, "string"),
    "source": (2, "string"),
    "target": (3, "string"),
    "options": (4, "*string"),
}

# call -> (request, response, whether the response is a stream)
CALLS: Mapping[str, tuple[str, str, bool]] = {
    "Prepare": ("PrepareSnapshotRequest", "PrepareSnapshotResponse", False),
    "View": ("ViewSnapshotRequest", "ViewSnapshotResponse", False),
    "Mounts": ("MountsRequest", "MountsResponse", False),
    "Commit": ("CommitSnapshotRequest", "Empty", False),
    "Remove": ("RemoveSnapshotRequest", "Empty", False),
    "Stat": ("StatSnapshotRequest", "StatSnapshotResponse", False),
    "Update": ("UpdateSnapshotRequest", "UpdateSnapshotResponse", False),
    "List": ("ListSnapshotsRequest", "ListSnapshotsResponse", True),
    "Usage": ("UsageRequest", "UsageResponse", False),
    "Cleanup": ("CleanupRequest", "Empty", False),
}


@functools.cache
def messages() -> Any:
    """A namespace of message classes by their short names: `Info`, `Mount`, `Empty`, …

    Raises NotSupportedError where protobuf is not installed.
    """
    try:
        from google.protobuf import (
            descriptor_pb2,
            descriptor_pool,
            empty_pb2,
            field_mask_pb2,
            message_factory,
            timestamp_pb2,
        )
    except ImportError as error:
        raise NotSupportedError(
            "the snapshotter needs protobuf and grpcio; pip install 'bootseer[snapshotter]'"
        ) from error
    known = (empty_pb2, field_mask_pb2, timestamp_pb2)
    pool = descriptor_pool.DescriptorPool()  # the default one may have the generated messages
    for module in known:
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    types = descriptor_pb2.FileDescriptorProto(
        name="bootseer/containerd/types.proto", package="containerd.types", syntax="proto3"
    )
    _add_message(types, "Mount", _MOUNT)
    service = descriptor_pb2.FileDescriptorProto(
        name="bootseer/containerd/snapshots.proto", package=PACKAGE, syntax="proto3"
    )
    service.dependency.extend([types.name, *(module.DESCRIPTOR.name for module in known)])
    kind = service.enum_type.add(name="Kind")
    for name, number in _KINDS.items():
        kind.value.add(name=name, number=number)
    for name, fields in _MESSAGES.items():
        _add_message(service, name, fields)
    for file in (types, service):
        pool.AddSerializedFile(file.SerializeToString())
    full = {name: f"{PACKAGE}.{name}" for name in _MESSAGES}
    full |= {"Mount": "containerd.types.Mount", "Empty": "google.protobuf.Empty"}
    classes = {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(path))
        for name, path in full.items()
    }
    return SimpleNamespace(**classes)


def _add_message(file: Any, name: str, fields: Mapping[str, tuple[int, str]]) -> None:
    message = file.message_type.add(name=name)
    for field, (number, kind) in fields.items():
        added = message.field.add(name=field, number=number)
        repeated = kind.startswith("*") or kind == "map"
        added.label = added.LABEL_REPEATED if repeated else added.LABEL_OPTIONAL
        plain = kind.removeprefix("*")
        if plain == "map":
            added.type, added.type_name = added.TYPE_MESSAGE, _add_entry(message, file, field)
        elif plain in ("string", "int64"):
            added.type = getattr(added, f"TYPE_{plain.upper()}")
        else:
            added.type = added.TYPE_ENUM if plain == "Kind" else added.TYPE_MESSAGE
            added.type_name = plain if plain.startswith(".") else f".{file.package}.{plain}"


def _add_entry(message: Any, file: Any, field: str) -> str:
    """Describe the message of a map's entries: on the wire it is a repeated key and value."""
    entry = message.nested_type.add(name=f"{field.title()}Entry")
    entry.options.map_entry = True
    for number, name in enumerate(("key", "value"), 1):
        part = entry.field.add(name=name, number=number)
        part.label, part.type = part.LABEL_OPTIONAL, part.TYPE_STRING
    return f".{file.package}.{message.name}.{entry.name}"
