"""Saving an image of a running Docker or Podman as a docker-archive, through its socket.

Source: Docker Engine API 1.41, `GET /images/{name}/get`, which Podman serves as well.
"""

from __future__ import annotations

import http.client
import os
import socket
import urllib.parse

from bootseer.errors import (
    AccessDeniedError,
    NotFoundError,
    StoreUnavailableError,
    UsageError,
    from_os_error,
)

SOCKETS = ("/var/run/docker.sock", "/run/podman/podman.sock")
STALL_S = 300.0  # a container program packs the whole image before its first byte
_API = "/v1.41"
_PIECE_BYTES = 1 << 20


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(self.timeout)
        try:
            connection.connect(self._path)
        except BaseException:  # the caller does not have it yet
            connection.close()
            raise
        self.sock = connection


def save_image(name: str, path: str, *, socket: str = "") -> None:
    """Write an image to `path` as a docker-archive.

    `socket` is a path, or a URL as DOCKER_HOST has it; "" tries the usual places. Raises
    NotFoundError for an unknown image or when no container program runs, StoreUnavailableError
    when it fails.
    """
    server = socket_path(socket)
    connection = _UnixConnection(server, STALL_S)
    try:
        quoted = urllib.parse.quote(name, safe="/:@")
        connection.request("GET", f"{_API}/images/{quoted}/get")
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            raise _error(answer.status, name, server)
        with open(path, "wb") as out:
            while piece := answer.read(_PIECE_BYTES):
                out.write(piece)
    except (http.client.HTTPException, TimeoutError, ConnectionError) as error:
        raise StoreUnavailableError(
            f"the container program at {server} did not give {name}: {error or 'no answer'}"
        ) from error
    except OSError as error:
        raise from_os_error(error, f"get {name} from {server}") from error
    finally:
        connection.close()


def socket_path(given: str) -> str:
    """The socket of a container program. Raises NotFoundError when there is none."""
    if given:
        scheme, mark, rest = given.partition("://")
        if mark and scheme != "unix":
            raise UsageError(f"{given} is no local socket; use unix:///path or a path")
        return rest if mark else given
    for path in SOCKETS:
        if os.path.exists(path):
            return path
    raise NotFoundError(
        f"no container program listens at {' or '.join(SOCKETS)}; start one, or name its socket"
    )


def _error(status: int, name: str, where: str) -> Exception:
    if status == http.client.NOT_FOUND:
        return NotFoundError(f"the container program at {where} has no image {name}")
    if status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
        return AccessDeniedError(f"the container program at {where} refused to give {name}")
    return StoreUnavailableError(f"the container program at {where} answered {status} for {name}")
