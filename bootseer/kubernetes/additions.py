"""What an injected pod gets, as plain data: no text, no file, no network."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from bootseer import __version__
from bootseer.kubernetes import options as names
from bootseer.kubernetes.identity import Identity
from bootseer.kubernetes.insertions import Value
from bootseer.kubernetes.options import Options, Place

NOBODY_UID = 65534


@dataclasses.dataclass(frozen=True, slots=True)
class Additions:
    """What is put into one pod; `prefix` are the words put before the job's own command."""

    init_containers: Sequence[Mapping[str, Value]]
    volumes: Sequence[Mapping[str, Value]]
    mounts: Sequence[Mapping[str, Value]]
    environment: Sequence[Mapping[str, Value]]
    prefix: Sequence[str]


def decide_additions(
    options: Options,
    identity: Identity,
    existing_variables: Sequence[str],
    guaranteed: Mapping[str, str] | None = None,
) -> Additions:
    """Decide what one pod gets; a variable in `existing_variables` keeps the manifest's value.

    `guaranteed` is the CPU and memory of a pod of quality of service "Guaranteed". Unless the init
    container's requests equal its limits, the pod would lose that class and its exclusive CPUs.
    """
    guaranteed = guaranteed or {}
    volumes, mounts = _build_volumes(options)
    environment = [
        entry
        for entry in _build_environment(options, identity)
        if entry["name"] not in existing_variables or entry["name"] == names.MARK_VARIABLE
    ]
    init_containers = [_build_init_container(options, guaranteed)]
    return Additions(init_containers, volumes, mounts, environment, build_prefix(options))


def build_prefix(options: Options) -> list[str]:
    """The words of the wrapper before the job's command."""
    words = [names.LAUNCHER]
    if not _prepares_inputs(options):
        return [*words, "run", "--"]
    if options.config_map:
        return [*words, "start", "-c", f"{names.CONFIG_PATH}/bootseer.toml", "--"]
    return [*words, "start", "--"]


def _prepares_inputs(options: Options) -> bool:
    """Whether the wrapper does more than measure the job."""
    return bool({"image", "deps", "checkpoint"}.intersection(options.parts))


def _build_init_container(options: Options, guaranteed: Mapping[str, str]) -> dict[str, Value]:
    """The container that copies the wrapper into the pod, allowed by pod security "restricted"."""
    container: dict[str, Value] = {"name": names.INIT_CONTAINER, "image": options.image}
    if options.pull_policy:
        container["imagePullPolicy"] = options.pull_policy
    container["args"] = ["install", names.HOME]
    container["resources"] = {
        "requests": dict(guaranteed) or {"cpu": "10m", "memory": "32Mi"},
        "limits": dict(guaranteed) or {"cpu": "1", "memory": "128Mi"},
    }
    container["securityContext"] = {
        "runAsNonRoot": True,
        "runAsUser": NOBODY_UID,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    container["volumeMounts"] = [{"name": names.VOLUME, "mountPath": names.HOME}]
    return container


def _build_volumes(options: Options) -> tuple[list[Mapping[str, Value]], list[Mapping[str, Value]]]:
    volumes: list[Mapping[str, Value]] = [{"name": names.VOLUME, "emptyDir": {}}]
    mounts: list[Mapping[str, Value]] = [
        {"name": names.VOLUME, "mountPath": names.HOME, "readOnly": True}
    ]

    def add(name: str, place: Place, path: str) -> None:
        volumes.append({"name": name, **_build_volume_source(place)})
        mounts.append({"name": name, "mountPath": path})

    if "events" in options.parts:
        add(names.EVENTS_VOLUME, options.events, names.EVENTS_PATH)
    if _prepares_inputs(options):
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


def _build_volume_source(place: Place) -> dict[str, Value]:
    if place.kind == "claim":
        return {"persistentVolumeClaim": {"claimName": place.name}}
    if place.kind == "host":
        return {"hostPath": {"path": place.name, "type": "DirectoryOrCreate"}}
    return {"emptyDir": {}}


def _build_environment(options: Options, identity: Identity) -> list[Mapping[str, Value]]:
    variables: list[Mapping[str, Value]] = []
    if "events" in options.parts:
        variables.append(_make_variable("BOOTSEER_EVENTS", names.EVENTS_PATH))
    variables += [
        *_build_job_uid(identity),
        _make_field_variable("K8S_POD_NAME", "metadata.name"),
        _make_field_variable("K8S_POD_UID", "metadata.uid"),
        _make_field_variable("K8S_NAMESPACE", "metadata.namespace"),
        _make_field_variable("K8S_NODE_NAME", "spec.nodeName"),
    ]
    if "deps" in options.parts:
        if options.store is not None or options.store_url:
            store = options.store_url or names.STORE_PATH
            variables.append(_make_variable("BOOTSEER_STORE", store))
        if options.cache is not None:
            variables.append(_make_variable("BOOTSEER_CACHE", names.CACHE_PATH))
    # Last: `uninject` takes it for the end of our variables.
    mark = " ".join([__version__, *_format_tier(options)])
    return [*variables, _make_variable(names.MARK_VARIABLE, mark)]


def _build_job_uid(identity: Identity) -> list[Mapping[str, Value]]:
    """The variables for the start's name, and for its attempt where the operator counts them."""
    if identity.text:
        return [_make_variable("BOOTSEER_JOB_UID", identity.text.replace("$", "$$"))]
    if identity.is_name:
        name = _make_field_variable("BOOTSEER_JOB_NAME", identity.field)
        if identity.name:
            name = _make_variable("BOOTSEER_JOB_NAME", identity.name.replace("$", "$$"))
        return [
            _make_field_variable("BOOTSEER_JOB_NAMESPACE", "metadata.namespace"),
            name,
            # Kubernetes expands variables that stand before this one in the list.
            _make_variable("BOOTSEER_JOB_UID", "$(BOOTSEER_JOB_NAMESPACE)/$(BOOTSEER_JOB_NAME)"),
        ]
    uid = _make_field_variable("BOOTSEER_JOB_UID", identity.field)
    if not identity.attempt:
        return [uid]
    return [uid, _make_field_variable("BOOTSEER_ATTEMPT", identity.attempt)]


def _format_tier(options: Options) -> list[str]:
    """The words by which `uninject` knows the privilege that was requested."""
    if options.tier == "none":
        return []
    return ["fuse", options.fuse_resource] if options.tier == "fuse" else [options.tier]


def _make_variable(name: str, value: str) -> dict[str, Value]:
    return {"name": name, "value": value}


def _make_field_variable(name: str, path: str) -> dict[str, Value]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
