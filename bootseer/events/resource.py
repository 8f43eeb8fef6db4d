"""What a process can tell about itself: OpenTelemetry's resource attributes, and its trace.

Imported when a writer is opened, and not before.
"""

from __future__ import annotations

import os
import sys

from .redaction import redact_command

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    Environ = Mapping[str, str]

_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of linux/proc_ns.h
_RANKS = {
    "bootseer.rank": ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"),
    "bootseer.world_size": ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    "bootseer.local_rank": ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "bootseer.gpu.count": ("BOOTSEER_GPU_COUNT", "SLURM_GPUS_ON_NODE"),
}
_ATTEMPT = ("BOOTSEER_ATTEMPT", "SLURM_RESTART_COUNT")
_JOB_UID = ("BOOTSEER_JOB_UID", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
_K8S = {
    "k8s.pod.name": ("K8S_POD_NAME", "POD_NAME", "MY_POD_NAME"),
    "k8s.pod.uid": ("K8S_POD_UID", "POD_UID", "MY_POD_UID"),
    "k8s.namespace.name": ("K8S_NAMESPACE", "POD_NAMESPACE", "MY_POD_NAMESPACE"),
    "k8s.node.name": ("K8S_NODE_NAME", "NODE_NAME", "MY_NODE_NAME"),
    "k8s.container.name": ("K8S_CONTAINER_NAME", "CONTAINER_NAME"),
    "k8s.cluster.name": ("K8S_CLUSTER_NAME", "CLUSTER_NAME"),
}


def _first(environ: Environ, names: Iterable[str]) -> str:
    for name in names:
        value = environ.get(name, "")
        if value and value != "none":  # torchrun's run id where none was given
            return value
    return ""


def job_uid(environ: Environ) -> str:
    """Return what the scheduler calls this job, or nothing."""
    return _first(environ, _JOB_UID)


def _number(environ: Environ, names: Iterable[str]) -> int | None:
    for name in names:
        value = environ.get(name, "")
        if value.isdecimal() and len(value) < 10:
            return int(value)
    return None


def _read(path: str, limit: int = 65536) -> str:
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            return os.read(fd, limit).decode("utf-8", "replace").strip()
        finally:
            os.close(fd)
    except OSError:
        return ""


def boot_id() -> str:
    """Return the kernel's random name of this boot of this machine."""
    return _read("/proc/sys/kernel/random/boot_id")


def in_container() -> bool:
    """Tell whether this process lives in a pid namespace of its own."""
    try:
        return os.readlink("/proc/self/ns/pid") != _INITIAL_PID_NAMESPACE
    except OSError:
        return False


def _describe_container() -> dict[str, str]:
    """The container's id; in a pod of kubelet, where only the pod's own is seen, kubelet's name.

    `bootseer.container` is NAME/RUN, of the file that kubelet makes for each run's last message
    (`terminationMessagePath`): PODS/UID/containers/NAME/RUN.
    """
    if not in_container():
        return {}
    found = _find_id(_read("/proc/self/cgroup"))  # only outside a cgroup namespace
    if found:
        return {"container.id": found}
    mounts = _read("/proc/self/mountinfo")
    for line in mounts.splitlines():
        parts = "".join(line.split()[3:4]).split("/")
        if parts[-5:-4] == ["pods"] and parts[-3] == "containers":
            return {"bootseer.container": "/".join(parts[-2:])}
    # The runtime's directory of hostname, hosts or resolv.conf; in a pod they are the pod's.
    return {"container.id": _find_id(mounts)}


def _find_id(text: str) -> str:
    """The first word of 64 hexadecimal digits."""
    for word in text.replace("-", "/").replace(".", "/").split("/"):
        if len(word) == 64 and not word.strip("0123456789abcdef"):
            return word
    return ""


def _gpu_count(environ: Environ) -> int | None:
    visible = environ.get("CUDA_VISIBLE_DEVICES", environ.get("NVIDIA_VISIBLE_DEVICES", "all"))
    if visible not in ("", "all", "void", "none"):
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    if not os.path.exists("/dev/nvidiactl"):
        return None
    try:
        names = os.listdir("/dev")
    except OSError:
        return None
    devices = sum(name.startswith("nvidia") and name[6:].isdecimal() for name in names)
    return devices or None


def _otel_attributes(environ: Environ) -> dict[str, str]:
    out = {}
    for pair in environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(","):
        key, equals, value = pair.partition("=")
        if equals and key.strip():
            if "%" in value:
                from urllib.parse import unquote

                value = unquote(value)
            out[key.strip()] = value.strip()
    return out


def _kubernetes(environ: Environ) -> dict[str, str]:
    if "KUBERNETES_SERVICE_HOST" not in environ and "BOOTSEER_INJECTED" not in environ:
        return {}  # an injected pod may also be played without a cluster
    out = {"k8s.pod.name": environ.get("HOSTNAME") or os.uname().nodename}
    namespace = _read("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
    if namespace:
        out["k8s.namespace.name"] = namespace
    for key, names in _K8S.items():
        value = _first(environ, names)
        if value:
            out[key] = value
    return out


def describe(env: Environ) -> dict[str, Any]:
    """Describe this process: OpenTelemetry's resource names and ours; unknown keys are absent.

    `bootseer.gpu.count` counts the GPUs this process may see. Attributes given in
    OTEL_RESOURCE_ATTRIBUTES win over what is found here.
    """
    attempt = _number(env, _ATTEMPT) or 0
    in_place = _number(env, ("TORCHELASTIC_RESTART_COUNT",)) or 0
    argv = list(getattr(sys, "orig_argv", None) or sys.argv)
    out: dict[str, Any] = {
        "service.name": env.get("OTEL_SERVICE_NAME") or env.get("SLURM_JOB_NAME") or "bootseer",
        "host.name": os.uname().nodename,
        "process.pid": os.getpid(),
        "process.command": argv[0] if argv else "",
        "process.command_args": redact_command(argv[:32]),
        "bootseer.boot_id": boot_id(),
        "bootseer.attempt": attempt + in_place,
        "bootseer.start.kind": (
            "restart_in_place"
            if in_place
            else "restart"
            if attempt
            else "standby"
            if env.get("BOOTSEER_STANDBY")
            else "first"
        ),
        "bootseer.job_uid": job_uid(env),
        **_describe_container(),
    }
    out.update(_kubernetes(env))
    for key, names in _RANKS.items():
        out[key] = _number(env, names)
    if out["bootseer.gpu.count"] is None:
        out["bootseer.gpu.count"] = _gpu_count(env)
    out.update(_otel_attributes(env))
    return {key: value for key, value in out.items() if value is not None and value != ""}


def _is_hex(text: str, digits: int) -> bool:
    return len(text) == digits and not text.strip("0123456789abcdef") and bool(text.strip("0"))


def digest(text: str) -> str:
    """Return the first 32 hex digits of the text's SHA-256."""
    try:
        from _sha2 import sha256  # type: ignore[import-not-found]  # 3.12 and newer
    except ImportError:
        try:
            from _sha256 import sha256  # type: ignore[import-not-found]
        except ImportError:
            from hashlib import sha256
    return str(sha256(text.encode("utf-8", "replace")).hexdigest()[:32])


def trace(env: Environ) -> tuple[str, str | None]:
    """Return (trace id, parent span id or None) for this process.

    The trace handed down in BOOTSEER_TRACEPARENT; else the hash of job uid and attempt, which is
    the same on every node; else a random one. A worker that torchrun restarted in place starts a
    trace of its own, derived so that all its peers find the same one.
    """
    restart = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    parts = env.get("BOOTSEER_TRACEPARENT", "").split("-")
    if len(parts) == 4 and _is_hex(parts[1], 32) and _is_hex(parts[2], 16):
        if restart == env.get("BOOTSEER_TRACE_RESTART", "0"):
            return parts[1], parts[2]
        return digest(f"{parts[1]}:{restart}"), None
    uid = job_uid(env)
    if uid:
        attempt = (_number(env, _ATTEMPT) or 0) + (int(restart) if restart.isdecimal() else 0)
        return digest(f"{uid}:{attempt}"), None
    return os.urandom(16).hex(), None
