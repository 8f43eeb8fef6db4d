"""A web server (Debian's nginx) that hands out the files of a folder: an index, checkpoints.

It ends with this process, however that ends.
"""

from __future__ import annotations

import http.client
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tools.servers import Running

READY_TIMEOUT_S = 30.0
_CONFIG = """\
daemon off;
master_process off;
error_log {folder}/error.log;
pid {folder}/pid;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    sendfile on;
    tcp_nopush on;
    keepalive_requests 100000;
    client_body_temp_path {folder}/t1;
    proxy_temp_path {folder}/t2;
    fastcgi_temp_path {folder}/t3;
    uwsgi_temp_path {folder}/t4;
    scgi_temp_path {folder}/t5;
    types {{ text/html html; }}
    default_type application/octet-stream;
    server {{ listen {host}; root {root}; index index.html; }}
}}
"""


class Web(Running):
    """Serves `root` at `host`; `prefix` runs it in another network namespace."""

    def __init__(self, folder: Path, root: Path, host: str, prefix: Sequence[str] = ()) -> None:
        self._folder, self._root, self.host = folder, root, host
        self._prefix = tuple(prefix)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}"

    def start(self) -> Self:
        program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
        if program is None:
            raise RuntimeError("nginx is missing; install Debian's nginx-light")
        self._folder.mkdir(parents=True, exist_ok=True)
        config = self._folder / "nginx.conf"
        text = _CONFIG.format(folder=self._folder, host=self.host, root=self._root)
        config.write_text(text, encoding="utf-8")
        words = [program, "-c", str(config), "-p", str(self._folder)]
        self._process = subprocess.Popen(
            [*self._prefix, "setpriv", "--pdeathsig", "KILL", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until = time.monotonic() + READY_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                self.stop()
                log = self._folder / "error.log"
                said = log.read_text(errors="replace")[-2000:] if log.exists() else ""
                raise RuntimeError(f"nginx does not answer: {said}")
            time.sleep(0.02)
        return self

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection(self.host, timeout=5)
        try:
            connection.request("HEAD", "/")
            connection.getresponse().read()
        except OSError:
            return False
        finally:
            connection.close()
        return True

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
