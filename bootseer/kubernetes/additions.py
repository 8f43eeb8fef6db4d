"""What an injected pod gets, as plain data: no text, no file, no network."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from bootseer import __version__
from bootseer.kubernetes import options as names
from bootseer.kubernetes.identity import Identity
from bootseer.kubernetes.insertions import Value
from bootseer.kubernetes.options import Options, Place

NOBODY = 65534


@dataclasses.dataclass(frozen=True, slots=True)
class Additions:
    """What is put into one pod; `prefix` are the words before the job's own command."""

    init_containers: Sequence[Mapping[str, Value]]
    volumes: Sequence[Mapping[str, Value]]
    mounts: Sequence[Mapping[str, Value]]
    environment: Sequence[Mapping[str, Value]]
    prefix: Sequence[str]


def additions(
    options: Options,
    identity: Identity,
    environment_there: Sequence[str],
    guaranteed: Mapping[str, str] | None = None,
) -> Additions:
    """Decide for one pod. Variables that the manifest sets itself are left as they are.

    `guaranteed` is the CPU and memory of a pod of quality of service "Guaranteed": unless ours
    asks for the same as it may use, the pod would lose that quality, and CPUs of its own with it.
    """
    guaranteed = guaranteed or {}
    volumes, mounts = _volumes(options)
    environment = [
        entry
        for entry in _environment(options, identity)
        if entry["name"] not in environment_there or entry["name"] == names.MARK_VARIABLE
    ]
    return Additions(
        [_init_container(options, guaranteed)], volumes, mounts, environment, prefix(options)
    )


def prefix(options: Options) -> list[str]:
    """The words that stand before the job's command."""
    words = [names.LAUNCHER]
    if not _makes_ready(options):
        return [*words, "run", "--"]
    if options.config_map:
        return [*words, "start", "-c", f"{names.CONFIG_PATH}/bootseer.toml", "--"]
    return [*words, "start", "--"]


def _makes_ready(options: Options) -> bool:
    """Whether the wrapper does more than measure."""
    return bool({"image", "deps", "checkpoint"}.intersection(options.parts))


def _init_container(options: Options, guaranteed: Mapping[str, str]) -> dict[str, Value]:
    """Copies the wrapper into the pod. It fits the strictest pod security, "restricted"."""
    out: dict[str, Value] = {"name": names.INIT_CONTAINER, "image": options.image}
    if options.pull_policy:
        out["imagePullPolicy"] = options.pull_policy
    out["args"] = ["install", names.HOME]
    out["resources"] = {
        "requests": dict(guaranteed) or {"cpu": "10m", "memory": "32Mi"},
        "limits": dict(guaranteed) or {"cpu": "1", "memory": "128Mi"},
    }
    out["securityContext"] = {
        "runAsNonRoot": True,
        "runAsUser": NOBODY,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    out["volumeMounts"] = [{"name": names.VOLUME, "mountPath": names.HOME}]
    return out


def _volumes(options: Options) -> tuple[list[Mapping[str, Value]], list[Mapping[str, Value]]]:
    volumes: list[Mapping[str, Value]] = [{"name": names.VOLUME, "emptyDir": {}}]
    mounts: list[Mapping[str, Value]] = [
        {"name": names.VOLUME, "mountPath": names.HOME, "readOnly": True}
    ]

    def add(name: str, place: Place, path: str) -> None:
        volumes.append({"name": name, **_source(place)})
        mounts.append({"name": name, "mountPath": path})

    if "events" in options.parts:
        add(names.EVENTS_VOLUME, options.events, names.EVENTS_PATH)
    if _makes_ready(options):
        if options.store is not None:
            add(names.STORE_VOLUME, options.store, names.STORE_PATH)
        if options.cache is not None:
            add(names.CACHE_VOLUME, options.cache, names.CACHE_PATH)
    if options.config_map:
        volumes.append({"name": names.CONFIG_VOLUME, "configMap": {"name": options.config_map}})
        mounts.append(
            {"name": names.CONFIG_VOLUME, "mountPath": names.CONFIG_PATH, "readOnly": True}
        )
    return volumes, mounts


def _source(place: Place) -> dict[str, Value]:
    if place.kind == "claim":
        return {"persistentVolumeClaim": {"claimName": place.name}}
    if place.kind == "host":
        return {"hostPath": {"path": place.name, "type": "DirectoryOrCreate"}}
    return {"emptyDir": {}}


def _environment(options: Options, identity: Identity) -> list[Mapping[str, Value]]:
    out: list[Mapping[str, Value]] = []
    if "events" in options.parts:
        out.append(_text("BOOTSEER_EVENTS", names.EVENTS_PATH))
    out += [
        *_job_uid(identity),
        _field("K8S_POD_NAME", "metadata.name"),
        _field("K8S_POD_UID", "metadata.uid"),
        _field("K8S_NAMESPACE", "metadata.namespace"),
        _field("K8S_NODE_NAME", "spec.nodeName"),
    ]
    if "deps" in options.parts:
        if options.store is not None or options.store_url:
            out.append(_text("BOOTSEER_STORE", options.store_url or names.STORE_PATH))
        if options.cache is not None:
            out.append(_text("BOOTSEER_CACHE", names.CACHE_PATH))
    # Last: it ends what is ours in the list.
    return [*out, _text(names.MARK_VARIABLE, " ".join([__version__, *_tier(options)]))]


def _job_uid(identity: Identity) -> list[Mapping[str, Value]]:
    """What names the start, and the number of its attempt where the operator counts them."""
    if identity.text:
        return [_text("BOOTSEER_JOB_UID", identity.text.replace("$", "$$"))]
    if identity.is_name:
        name = _field("BOOTSEER_JOB_NAME", identity.field)
        if identity.name:
            name = _text("BOOTSEER_JOB_NAME", identity.name.replace("$", "$$"))
        return [
            _field("BOOTSEER_JOB_NAMESPACE", "metadata.namespace"),
            name,
            # Kubernetes puts in what stands before it in the list.
            _text("BOOTSEER_JOB_UID", "$(BOOTSEER_JOB_NAMESPACE)/$(BOOTSEER_JOB_NAME)"),
        ]
    uid = _field("BOOTSEER_JOB_UID", identity.field)
    return [uid, _field("BOOTSEER_ATTEMPT", identity.attempt)] if identity.attempt else [uid]


def _tier(options: Options) -> list[str]:
    """What `uninject` has to know of a privilege that was asked for."""
    if options.tier == "none":
        return []
    return ["fuse", options.fuse_resource] if options.tier == "fuse" else [options.tier]


def _text(name: str, value: str) -> dict[str, Value]:
    return {"name": name, "value": value}


def _field(name: str, path: str) -> dict[str, Value]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
