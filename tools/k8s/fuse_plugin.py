"""A device plugin that gives pods /dev/fuse, as clusters have one.

    python -m tools.k8s.fuse_plugin

Speaks kubelet's device plugin API v1beta1 and runs beside kubelet, in the node's namespaces. Its
messages are a few strings each, written out here rather than compiled.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from threading import Event
from typing import Any

import grpc

FOLDER = Path("/var/lib/kubelet/device-plugins")
"""Fixed by kubelet, whatever its --root-dir."""
RESOURCE = "bootseer.test/fuse"
ENDPOINT = "bootseer-fuse.sock"
DEVICES = 8


def text_field(number: int, value: str | bytes) -> bytes:
    """A field of a protobuf message that holds text, or a message within; below 128 bytes."""
    raw = value.encode() if isinstance(value, str) else value
    if len(raw) > 127:
        raise ValueError("longer than one byte of length says")
    return bytes([number << 3 | 2, len(raw)]) + raw


def _list_and_watch(_: bytes, context: Any) -> Iterator[bytes]:
    """All devices once, then nothing until kubelet goes."""
    about = [text_field(1, f"fuse-{n}") + text_field(2, "Healthy") for n in range(DEVICES)]
    yield b"".join(text_field(1, device) for device in about)
    ended = Event()
    context.add_callback(ended.set)
    ended.wait()


def _allocate(_: bytes, __: Any) -> bytes:
    """/dev/fuse, to read and write, for a pod's one container that asks."""
    path = "/dev/fuse"
    device = text_field(1, path) + text_field(2, path) + text_field(3, "rw")
    return text_field(1, text_field(3, device))


def _nothing(_: bytes, __: Any) -> bytes:
    return b""


def main() -> int:
    handlers = {
        "GetDevicePluginOptions": grpc.unary_unary_rpc_method_handler(_nothing),
        "ListAndWatch": grpc.unary_stream_rpc_method_handler(_list_and_watch),
        "Allocate": grpc.unary_unary_rpc_method_handler(_allocate),
        "PreStartContainer": grpc.unary_unary_rpc_method_handler(_nothing),
        "GetPreferredAllocation": grpc.unary_unary_rpc_method_handler(_nothing),
    }
    server = grpc.server(futures.ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("v1beta1.DevicePlugin", handlers),)
    )
    server.add_insecure_port(f"unix:{FOLDER / ENDPOINT}")
    server.start()
    asked = text_field(1, "v1beta1") + text_field(2, ENDPOINT) + text_field(3, RESOURCE)
    with grpc.insecure_channel(f"unix:{FOLDER}/kubelet.sock") as channel:
        channel.unary_unary("/v1beta1.Registration/Register")(asked, timeout=30)
    sys.stdout.write("registered\n")
    sys.stdout.flush()
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    server.stop(None)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
