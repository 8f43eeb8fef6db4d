"""One cluster as a context manager: a real node, or its API server alone.

Everything lives in own mount, network, PID and UTS namespaces below one process; when that one
ends, the kernel ends all the rest, so a killed test leaves nothing running.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tools.initimage import ociimage
from tools.k8s import binaries, settings
from tools.servers import Running

ROOT = Path(__file__).parents[2]
READY_S = 90.0


class Cluster(Running):
    """Started by `start` or `with`; `kubectl` talks to it.

    `images` maps a repository name below the node's registry (`lab/x:1`) to an image's tar file
    (an OCI layout). `directory` must not lie on an overlay file system. With `lazy`, kubelet's
    images come through our snapshotter.
    """

    def __init__(
        self,
        directory: Path,
        *,
        images: Mapping[str, Path] | None = None,
        api_only: bool = False,
        lazy: bool = False,
    ) -> None:
        self.directory = directory
        self.run, self.state = directory / "run", directory / "state"
        self.shared = directory / "shared"
        self._images = dict(images or {})
        self._api_only, self._lazy = api_only, lazy
        self._cgroup = f"bootseer-{os.getpid()}-{secrets.token_hex(3)}"
        self._process: subprocess.Popen[bytes] | None = None
        self._init = 0

    # --- life -------------------------------------------------------------------------------

    def start(self) -> Self:
        """Return when the node is Ready (7 to 20 s); RuntimeError with logs when it never is."""
        self._programs = binaries.folder()
        for place in (self.run, self.state, self.run / "images", self.run / "pki", self.shared):
            place.mkdir(parents=True)
        self.shared.chmod(0o777)
        settings.write_all(self.run, self.state, self._cgroup, lazy=self._lazy)
        _make_certificates(self.run / "pki")
        self._write_users()
        if not self._api_only:
            self._write_images()
        mode = "api" if self._api_only else "all"
        places = [str(self.run), str(self.state), str(self._programs), self._cgroup, mode]
        with (self.run / "node.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "KILL"),
                    *("unshare", "-m", "-n", "-p", "-u", "-f", "--mount-proc", "--kill-child"),
                    *("--propagation", "private"),
                    *(sys.executable, "-m", "tools.k8s.node", *places),
                ],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            self._wait_ready()
        except BaseException:  # no servers stay behind
            self.stop()
            raise
        return self

    def _wait_ready(self) -> None:
        end = time.monotonic() + READY_S
        while not (self._find_init() and self._try(["get", "--raw", "/readyz"]) == "ok"):
            self._check(end, "the API server")
        if self._api_only:
            return
        (self.run / "api-ready").touch()
        path = 'jsonpath={.status.conditions[?(@.type=="Ready")].status}'
        while self._try(["get", "node", "lab-node", "-o", path]) != "True":
            self._check(end, "the node")
        while not self._try(["get", "serviceaccount", "default", "-o", "name"]):
            self._check(end, "the default service account")

    def _check(self, end: float, what: str) -> None:
        assert self._process is not None
        if self._process.poll() is not None:
            said = (self.run / "node.log").read_text(encoding="utf-8", errors="replace")
            *_, last = said.strip().splitlines() or ["it said nothing"]
            raise RuntimeError(f"the node ended: {last}\n{self.logs()}")
        if time.monotonic() > end:
            raise RuntimeError(f"{what} did not become ready;\n{self.logs()}")
        time.sleep(0.1)

    def _find_init(self) -> bool:
        """The first process inside; our own child is `unshare`, once it has exec'ed that."""
        assert self._process is not None
        pid = self._process.pid
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        except OSError:
            return False
        self._init = int(children[0]) if children else 0
        return self._init > 0

    def stop(self) -> None:
        """End everything and remove its cgroups; twice is safe."""
        if self._process is None:
            return
        if self._init and self._process.poll() is None:
            os.kill(self._init, signal.SIGTERM)
        try:
            self._process.wait(3)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its child, process 1 of the rest, is killed with it
            self._process.wait()
        self._process = None
        for root in Path("/sys/fs/cgroup").glob(f"*/{self._cgroup}"):
            folders = [Path(folder) for folder, _, _ in os.walk(root, topdown=False)]
            for folder in folders:
                _remove_cgroup(folder)
        shutil.rmtree(self.state, ignore_errors=True)

    def logs(self) -> str:
        """The ends of all programs' logs."""
        out = []
        for path in sorted(self.run.glob("*.log")):
            text = path.read_text(encoding="utf-8", errors="replace")
            out.append(f"--- {path.name}\n{text[-1500:]}")
        return "\n".join(out)

    # --- set-up -----------------------------------------------------------------------------

    def _write_users(self) -> None:
        lines = []
        for name, (user, groups) in settings.USERS.items():
            token = secrets.token_hex(16)
            lines.append(f"{token},{user},{name}" + (f',"{groups}"' if groups else ""))
            path = self.run / f"{name}.kubeconfig"
            path.write_text(settings.kubeconfig(self.run, user, token), encoding="utf-8")
            path.chmod(0o600)
        (self.run / "tokens.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def _write_images(self) -> None:
        images = {**self._images, "lab/pause:1": _pause_image(self.run)}
        for name, source in images.items():
            target = self.run / "images" / f"{name.replace('/', '_').replace(':', '_')}.tar"
            ociimage.renamed(source, target, f"{settings.REGISTRY}/{name}")
            target.with_suffix(".name").write_text(f"{settings.REGISTRY}/{name}", encoding="ascii")

    # --- use --------------------------------------------------------------------------------

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` in the node's namespaces."""
        return ["nsenter", "-t", str(self._init), "-m", "-n", "-p", "-u", "--", *command]

    def call_inside(self, *command: str) -> None:
        """Run a command in the node's namespaces; CalledProcessError when it fails."""
        subprocess.run(self.inside(command), check=True, stdin=subprocess.DEVNULL)

    def kubectl_command(self, *words: str) -> list[str]:
        """kubectl's command line; it sees this machine's files and the node's network."""
        return [
            *("nsenter", "-t", str(self._init), "-n", "--"),
            *(f"{self._programs}/kubectl", "--cache-dir", f"{self.run}/kubectl-cache"),
            *("--kubeconfig", f"{self.run}/admin.kubeconfig", *words),
        ]

    def kubectl(self, *words: str, data: str | None = None, timeout_s: float = 120.0) -> str:
        """kubectl's output; RuntimeError with what it said when it fails."""
        done = subprocess.run(
            self.kubectl_command(*words),
            input=data,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
        if done.returncode:
            raise RuntimeError(f"kubectl {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    def get(self, *words: str) -> Any:
        """Parsed JSON of `kubectl get`."""
        return json.loads(self.kubectl("get", *words, "-o", "json"))

    def wait_for(self, found: Callable[[], Any], what: str, timeout_s: float = 90.0) -> Any:
        """Poll until `found()` is true, return it; RuntimeError with `what` when time is up."""
        end = time.monotonic() + timeout_s
        while not (value := found()):
            if time.monotonic() > end:
                raise RuntimeError(f"{timeout_s:.0f} s were not enough for {what}")
            time.sleep(0.2)
        return value

    def _try(self, words: Sequence[str]) -> str:
        try:
            return self.kubectl(*words, timeout_s=10.0).strip()
        except (RuntimeError, subprocess.TimeoutExpired):
            return ""


def _remove_cgroup(folder: Path) -> None:
    for _ in range(50):
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.05)  # its last processes are still being reaped


def _make_certificates(place: Path) -> None:
    names = f"IP:127.0.0.1,IP:{settings.NODE_IP},IP:{settings.SERVICE_IP},DNS:localhost"
    (place / "names").write_text(
        f"subjectAltName={names},DNS:kubernetes.default.svc\nextendedKeyUsage=serverAuth\n",
        encoding="ascii",
    )
    curve = "ecparam -name prime256v1 -genkey -noout -out"
    signed = "-CA ca.crt -CAkey ca.key -CAcreateserial -days 30 -extfile names"
    for words in (
        f"{curve} ca.key",
        "req -x509 -new -key ca.key -subj /CN=lab -days 30 -out ca.crt",
        f"{curve} apiserver.key",
        "req -new -key apiserver.key -subj /CN=kube-apiserver -out api.csr",
        f"x509 -req -in api.csr {signed} -out apiserver.crt",
        "genrsa -out sa.key 2048",
        "rsa -in sa.key -pubout -out sa.pub",
    ):
        command = ["openssl", *words.split()]
        subprocess.run(command, cwd=place, check=True, capture_output=True)


def _pause_image(run: Path) -> Path:
    """The container that holds a pod's namespaces: busybox asleep, reaping as process 1."""
    root = run / "pause"
    (root / "bin").mkdir(parents=True)
    shutil.copy2("/bin/busybox", root / "bin/busybox")
    words = [
        "/bin/busybox",
        "sh",
        "-c",
        "trap 'exit 0' TERM INT; while :; do sleep 9999 & wait; done",
    ]
    target = run / "pause.tar"
    ociimage.write(target, root, "lab/pause:1", ociimage.RunAs(words))
    return target
