"""A real registry (Debian's docker-registry) with a port and a folder of its own.

It ends with this process, however that ends. Blobs and manifests lie in plain files below
`storage`, so a test can flip their bits.
"""

from __future__ import annotations

import base64
import ctypes
import http.client
import json
import os
import re
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from tools.servers import Running

READY_TIMEOUT_S = 30.0
_LINE = re.compile(r'"([A-Z]+) (\S+) HTTP/[\d.]+" (\d+) (\d+)')


class Request(NamedTuple):
    """One line of the registry's access log; `sent_bytes` counts the answer's body."""

    method: str
    path: str
    status: int
    sent_bytes: int


def _without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables without those that a registry takes for settings.

    REGISTRY_AUTH_FILE is one: container tools have it for their logins.
    """
    return {name: value for name, value in environ.items() if not name.startswith("REGISTRY_")}


class Registry(Running):
    """A registry that runs from `start` to `stop`; a context manager that does both.

    `users` (name -> password) asks for basic authentication, `tls` for HTTPS under a certificate
    of its own (`ca_path`). `prefix` is put before the command, to run it in another network
    namespace, where `address` must then be. The port stays the same over restarts.
    """

    def __init__(
        self,
        folder: Path,
        *,
        address: str = "127.0.0.1",
        port: int = 0,
        users: Mapping[str, str] | None = None,
        tls: bool = False,
        prefix: Sequence[str] = (),
        storage: Path | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        self.folder = folder
        self.storage = storage or folder / "data"
        self.users = dict(users or {})
        self.ca_path = folder / "registry.pem" if tls else None
        self.host = f"{address}:{port or _free_port(address, prefix)}"
        self._prefix = tuple(prefix)
        self._settings = dict(settings or {})
        self._log = folder / "registry.log"
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        """`http://HOST:PORT` or `https://HOST:PORT`."""
        return f"{'https' if self.ca_path else 'http'}://{self.host}"

    @property
    def pid(self) -> int:
        """The server's process; RuntimeError when it does not run."""
        if self._process is None:
            raise RuntimeError("the registry is not running")
        return self._process.pid

    def start(self) -> Self:
        """Start it and wait until it answers; RuntimeError with its log when it does not."""
        program = shutil.which("docker-registry")
        if program is None:
            raise RuntimeError("docker-registry is missing; install Debian's docker-registry")
        config = self.folder / "registry.yml"
        config.write_text(json.dumps(self._config()), encoding="utf-8")
        command = ["setpriv", "--pdeathsig", "KILL", program, "serve", str(config)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._prefix, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_without_settings(os.environ),
            )
        until = time.monotonic() + READY_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                self.stop()
                said = self._log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"docker-registry does not answer: {said}")
            time.sleep(0.02)
        return self

    def stop(self) -> None:
        """End it at once, as a crash would; what it stored stays. Safe to call twice."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()

    kill = stop

    def restart(self) -> Self:
        """Kill it and start it again at the same address over the same storage."""
        self.stop()
        return self.start()

    def pause(self) -> None:
        """Let it hang: connections are taken by the kernel, nothing is answered."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)
            # Until each of its threads stands still, or it has ended.
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """End `pause`."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def reference(self, repository: str, tag: str = "latest") -> str:
        """The image's name as container runtimes write it."""
        return f"{self.host}/{repository}:{tag}"

    def push(self, source: str, repository: str, tag: str = "latest", *, options: str = "") -> str:
        """Copy an image here by skopeo; return its reference.

        `source` is a skopeo name (`oci:DIR:TAG`, `docker-archive:FILE`); every platform of an
        index comes along. Raises RuntimeError with skopeo's words.
        """
        command = ["skopeo", "--insecure-policy", "copy", "--quiet", "--all", *options.split()]
        command += ["--dest-tls-verify=false"]
        for name, password in list(self.users.items())[:1]:
            command += ["--dest-creds", f"{name}:{password}"]
        target = f"docker://{self.reference(repository, tag)}"
        done = subprocess.run(
            [*self._prefix, *command, source, target], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"skopeo copy {source} {target}: {done.stderr.strip()}")
        return self.reference(repository, tag)

    def blob_path(self, digest: str) -> Path:
        """The file that holds a blob or a manifest."""
        kind, _, hexadecimal = digest.partition(":")
        blobs = self.storage / "docker/registry/v2/blobs"
        return blobs / kind / hexadecimal[:2] / hexadecimal / "data"

    def requests(self) -> list[Request]:
        """What has been asked of it since it was made, restarts included."""
        text = self._log.read_text(encoding="utf-8", errors="replace")
        return [Request(m[1], m[2], int(m[3]), int(m[4])) for m in _LINE.finditer(text)]

    def auth_json(self) -> dict[str, object]:
        """A `config.json` that holds the first user's login."""
        name, password = next(iter(self.users.items()))
        auth = base64.b64encode(f"{name}:{password}".encode()).decode()
        return {"auths": {self.host: {"auth": auth}}}

    def _config(self) -> dict[str, object]:
        http_part: dict[str, object] = {"addr": self.host, "secret": secrets.token_hex(16)}
        config: dict[str, object] = {
            "version": "0.1",
            "log": {"level": "error", "accesslog": {"disabled": False}},
            "storage": {
                "filesystem": {"rootdirectory": str(self.storage)},
                "delete": {"enabled": True},
                "maintenance": {"uploadpurging": {"enabled": False}},
            },
            "http": http_part,
        }
        if self.ca_path:
            key = _certificate(self.ca_path, self.host.partition(":")[0])
            http_part["tls"] = {"certificate": str(self.ca_path), "key": str(key)}
        if self.users:
            path = self.folder / "htpasswd"
            lines = [f"{name}:{_bcrypt(password)}\n" for name, password in self.users.items()]
            path.write_text("".join(lines), encoding="utf-8")
            config["auth"] = {"htpasswd": {"realm": "lab", "path": str(path)}}
        return {**config, **self._settings}

    def _answers(self) -> bool:
        connection: http.client.HTTPConnection
        if self.ca_path:
            context = ssl.create_default_context(cafile=str(self.ca_path))
            connection = http.client.HTTPSConnection(self.host, timeout=5, context=context)
        else:
            connection = http.client.HTTPConnection(self.host, timeout=5)
        try:
            connection.request("GET", "/v2/")
            return connection.getresponse().status in (200, 401)
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def _free_port(address: str, prefix: Sequence[str]) -> int:
    if prefix:
        return 5000  # nothing else is in that namespace
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def _certificate(path: Path, address: str) -> Path:
    """Make a self-signed certificate at `path` once; return its key's path."""
    key = path.with_suffix(".key")
    if not path.exists():
        words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30"]
        words += ["-subj", "/CN=lab registry", "-addext", f"subjectAltName=IP:{address}"]
        # Without it Python 3.13 believes none that signs itself.
        words += ["-addext", "keyUsage=critical,keyCertSign,digitalSignature"]
        words += ["-keyout", str(key), "-out", str(path)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"openssl req: {done.stderr.strip()}")
    return key


def _bcrypt(password: str) -> str:
    """The only kind of hash that the registry takes; Debian's C library offers it."""
    crypt = ctypes.CDLL("libcrypt.so.1").crypt
    crypt.restype = ctypes.c_char_p
    letters = "./ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
    salt = "".join(secrets.choice(letters) for _ in range(21)) + "."
    made = crypt(password.encode(), f"$2a$04${salt}".encode())
    if not made or not made.startswith(b"$2a$"):
        raise RuntimeError("this machine's libcrypt has no bcrypt")
    return bytes(made).decode()
