"""Put bootseer into the pods of a manifest: by insertions into its text, and in place of nulls.

A pod that cannot be injected safely is refused with the reason and the line, and its text is left
as it is. Injecting again removes the earlier injection first, so it changes nothing, or updates an
older one.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence

import yaml

from bootseer.errors import BootseerError
from bootseer.kubernetes import insertions, kinds, pods, uninject
from bootseer.kubernetes import options as names
from bootseer.kubernetes.additions import Additions, build_prefix, decide_additions
from bootseer.kubernetes.identity import identify
from bootseer.kubernetes.insertions import CannotEditError, Edit
from bootseer.kubernetes.job_command import CommandChoice, format_command_name
from bootseer.kubernetes.manifest_text import (
    ODD_BREAKS,
    Text,
    child,
    has_merge_key,
    is_absent,
    items,
    parse_documents,
    scalar,
)
from bootseer.kubernetes.nodes import find_unfit_nodes
from bootseer.kubernetes.options import Options
from bootseer.kubernetes.pods import ManifestObject, Pod
from bootseer.storage.oci.config import ImageConfig

Resolve = Callable[[str], ImageConfig]
"""Returns what an image runs, by the image's name; raises a BootseerError with the reason."""

RUNTIME_KINDS = ("TrainingRuntime", "ClusterTrainingRuntime")


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """One insertion, for `--explain`."""

    line: int
    pod: str
    what: str
    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """One pod or object that was left as it is (or has to be looked at), and the reason."""

    line: int
    pod: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Injected:
    """The new text, what was changed in it, and what was left.

    `passed_over`: pods left as they are because they do not have the container asked for.
    `unmeasured`: objects that run containers, but have no pod to inject, and why. `unknown`: pods
    that were injected although what runs them is unknown, and what to look at. `kinds`: those of
    all objects.
    """

    raw: str
    changes: tuple[Change, ...]
    refusals: tuple[Refusal, ...]
    passed_over: tuple[Refusal, ...] = ()
    unmeasured: tuple[Refusal, ...] = ()
    kinds: tuple[str, ...] = ()
    unknown: tuple[Refusal, ...] = ()


def inject(text: Text, options: Options, resolve: Resolve | None = None) -> Injected:
    """Inject every pod of a manifest that can be injected safely.

    Raises UsageError for text that is no valid YAML and for a command given to a container that
    is not there, and CorruptDataError where an earlier injection was changed by hand.
    """
    clean = Text(uninject.uninject(text), text.name, text.newline)
    all_edits: list[Edit] = []
    changes: list[Change] = []
    refusals: list[Refusal] = []
    decided: dict[object, Additions] = {}
    commands = _collect_given_commands(clean, options)
    passed_over: list[Refusal] = []
    may_pass_over = bool(options.container) and _has_container(clean, options.container)
    wrapped = _WrappedTrainJobs()
    unmeasured: list[Refusal] = []
    unknown: dict[str, Refusal] = {}
    all_kinds: list[str] = []
    for document in parse_documents(clean):
        objects = pods.find_objects(document)
        for obj in objects:
            all_kinds.append(obj.kind)
            if kinds.is_train_job(obj.node):
                try:
                    _wrap_train_job(clean, obj, options, all_edits, changes, wrapped)
                except CannotEditError as error:
                    refusals.append(Refusal(obj.line, obj.title, str(error)))
            else:
                reasons = [kinds.explain_patches(obj)]
                if not obj.pods:
                    reasons.append(kinds.explain_containers_left(obj))
                unmeasured += [Refusal(obj.line, obj.title, reason) for reason in reasons if reason]
        for pod in (pod for obj in objects for pod in obj.pods):
            if may_pass_over and not has_wanted_container(pod, options):
                reason = f"it has no container {options.container!r}"
                passed_over.append(Refusal(pod.line, pod.full_title, reason))
                continue
            try:
                injection = _Injection(clean, pod, options, resolve, decided, commands)
                pod_edits, pod_changes = injection.run()
            except BootseerError as error:
                refusals.append(Refusal(pod.line, pod.full_title, str(error)))
                continue
            all_edits += pod_edits
            changes += pod_changes
            wrapped.add_runtime(pod, pod_changes)
            note = kinds.describe_unknown_kind(pod)
            if note:
                unknown.setdefault(note, Refusal(pod.line, pod.full_title, note))
    unmeasured += wrapped.find_unmeasured()
    new = insertions.apply_edits(clean.raw, all_edits)
    return Injected(
        new,
        tuple(changes),
        tuple(refusals),
        tuple(passed_over),
        tuple(unmeasured),
        tuple(dict.fromkeys(filter(None, all_kinds))),
        tuple(unknown.values()),
    )


@dataclasses.dataclass(slots=True)
class _WrappedTrainJobs:
    """The TrainJobs that leave their command to their runtime, and the runtimes with a command."""

    _jobs_without_command: list[tuple[str, Refusal]] = dataclasses.field(default_factory=list)
    _runtimes: set[str] = dataclasses.field(default_factory=set)

    def add_job(self, obj: ManifestObject) -> None:
        """Count a TrainJob without a command."""
        runtime = scalar(child(obj.node, "spec", "runtimeRef", "name"))
        reason = (
            f"it has no command: what its runtime {runtime or '(unnamed)'} starts is measured only "
            "where that has a command and is injected too"
        )
        self._jobs_without_command.append((runtime, Refusal(obj.line, obj.title, reason)))

    def add_runtime(self, pod: Pod, changes: Sequence[Change]) -> None:
        """Count a runtime that was injected, if the wrapper stands before its command."""
        if any(change.what.startswith("command: ") for change in changes):
            self._runtimes.add(pod.owner_name)

    def find_unmeasured(self) -> list[Refusal]:
        """The TrainJobs whose runtime is not among those counted."""
        jobs = self._jobs_without_command
        return [refusal for runtime, refusal in jobs if runtime not in self._runtimes]


def has_wanted_container(pod: Pod, options: Options) -> bool:
    """Whether a pod has the container asked for; true if none was."""
    container_names = map(pod.container_name, pod.containers())
    return not options.container or options.container in container_names


def _has_container(text: Text, name: str) -> bool:
    """Whether any pod has a container of this name."""
    return any(
        pod.container_name(container) == name
        for document in parse_documents(text)
        for pod in pods.find_pods(document)
        for container in pod.containers()
    )


def _collect_given_commands(text: Text, options: Options) -> CommandChoice:
    """The commands given by options, and the containers that would take one."""
    commands = CommandChoice(options)
    if not options.command and not options.commands:
        return commands
    for document in parse_documents(text):
        for pod in pods.find_pods(document):
            try:
                container = choose_container(pod, options)
            except CannotEditError:
                continue  # this is a refusal later
            if not items(child(container, "command")):
                commands.add(pod, container)
    commands.check_used()
    return commands


def _wrap_train_job(
    text: Text,
    obj: ManifestObject,
    options: Options,
    all_edits: list[Edit],
    changes: list[Change],
    wrapped: _WrappedTrainJobs,
) -> None:
    """Wrap a TrainJob's command, which is all it has: the pods are described by its runtime."""
    trainer = child(obj.node, "spec", "trainer")
    command = child(trainer, "command")
    if not isinstance(trainer, yaml.MappingNode) or not items(command):
        wrapped.add_job(obj)
        return
    if tuple(scalar(word) for word in items(command)) == kinds.TORCHTUNE:
        raise CannotEditError(kinds.TORCHTUNE_REASON)
    all_edits += insertions.prepend_items(text, trainer, "command", build_prefix(options))
    assert command is not None
    changes.append(
        Change(
            command.start_mark.line + 1,
            obj.title,
            f"command: {' '.join(build_prefix(options))}",
            "the wrapper measures the job and starts it; inject the TrainingRuntime that this "
            "job names as well, it brings the wrapper into the pods",
        )
    )


class _Injection:
    """The injection of one pod: all edits, or an error with the reason for its refusal."""

    def __init__(
        self,
        text: Text,
        pod: Pod,
        options: Options,
        resolve: Resolve | None,
        decided: dict[object, Additions],
        commands: CommandChoice,
    ) -> None:
        self._text, self._pod, self._options, self._resolve = text, pod, options, resolve
        self._decided, self._commands = decided, commands
        self._edits: list[Edit] = []
        self._changes: list[Change] = []

    def run(self) -> tuple[list[Edit], list[Change]]:
        """Return all edits; raises a BootseerError with the reason for a refusal."""
        if self._pod.form == "containerSet":
            raise CannotEditError(kinds.ARGO_SET_REASON)
        self._check_pod()
        container = choose_container(self._pod, self._options)
        is_command_given = self._commands.is_named(self._pod, container)
        reason = kinds.find_refusal(self._pod, container, is_command_given=is_command_given)
        if reason:
            raise CannotEditError(reason)
        self._check_not_aliased(container, "this container")
        self._check_mounts(container)
        self._check_not_merged(container, ("command", "args", "env", "volumeMounts"))
        env = items(child(container, "env"))
        existing_variables = [scalar(child(entry, "name")) for entry in env]
        guaranteed = pods.find_guaranteed_resources(self._pod, container)
        new = self._choose_additions(existing_variables, guaranteed)
        self._edit_pod(new)
        self._edit_container(container, new)
        return self._edits, self._changes

    def _choose_additions(
        self, existing_variables: Sequence[str], guaranteed: Mapping[str, str]
    ) -> Additions:
        """What this pod gets: one object for all pods that get the same."""
        identity = identify(self._pod, self._options.job_uid)
        key = (identity, *existing_variables, *guaranteed.items())
        if key not in self._decided:
            self._decided[key] = decide_additions(
                self._options, identity, existing_variables, guaranteed
            )
        return self._decided[key]

    def _check_pod(self) -> None:
        pod = self._pod
        self._check_not_aliased(pod.spec, "this pod")
        first, last = pod.template.start_mark.index, pod.template.end_mark.index
        odd = ODD_BREAKS.search(self._text.raw, first, last)
        if odd and not pod.template.flow_style:
            raise CannotEditError(
                f"it holds the character U+{ord(odd[0]):04X}, which ends a line for some readers "
                "of YAML only; write it as an escape in double quotes"
            )
        unfit = find_unfit_nodes(pod.spec)
        if pod.form and not unfit:
            unfit = find_unfit_nodes(kinds.find_workflow(pod.owner))
        if unfit:
            raise CannotEditError(
                f"it may run on {unfit} nodes, and the wrapper is for linux on amd64; leave it "
                "out, or ask for kubernetes.io/os: linux and kubernetes.io/arch: amd64"
            )
        self._check_not_merged(pod.spec, ("initContainers", "containers", "volumes"))
        for key in ("initContainers", "containers", "volumes"):
            for entry in items(child(pod.spec, key)):
                name = scalar(child(entry, "name"))
                if name in names.NAMES:
                    raise CannotEditError(
                        f"{self._text.locate(entry)}: {key} has one named {name!r} that is not "
                        "ours; rename it"
                    )

    def _check_not_aliased(self, node: yaml.Node, what: str) -> None:
        if id(node) in self._pod.aliased:
            raise CannotEditError(
                f"{self._text.locate(node)}: {what} is written once and used at several places by "
                "an alias; write it out at each of them"
            )

    def _check_mounts(self, container: yaml.MappingNode) -> None:
        for entry in items(child(container, "volumeMounts")):
            path = scalar(child(entry, "mountPath")).rstrip("/")
            if path in names.PATHS:
                raise CannotEditError(
                    f"{self._text.locate(entry)}: {path} is where a volume of ours goes; "
                    "mount that one elsewhere"
                )

    def _check_not_merged(self, node: yaml.MappingNode, keys: Sequence[str]) -> None:
        if has_merge_key(node):
            for key in keys:
                if child(node, key) is None:
                    raise CannotEditError(
                        f"{self._text.locate(node)}: {key} may come from what is merged in by "
                        "`<<`; write it out"
                    )

    def _prepend_items(
        self, node: yaml.MappingNode, key: str, new: Sequence[insertions.Value], why: str
    ) -> None:
        value = child(node, key)
        if value is not None:
            self._check_not_aliased(value, key)
        self._edits += insertions.prepend_items(self._text, node, key, new)
        self._record_items(node, key, new, why)

    def _record_items(
        self, node: yaml.Node, key: str, new: Sequence[insertions.Value], why: str
    ) -> None:
        titles = [str(v["name"]) for v in new if isinstance(v, dict)] or [str(v) for v in new]
        self._record_change(node, f"{key}: {', '.join(titles)}", why)

    def _record_change(self, node: yaml.Node, what: str, why: str) -> None:
        self._changes.append(Change(node.start_mark.line + 1, self._pod.full_title, what, why))

    def _fill_lists(
        self,
        node: yaml.MappingNode,
        wanted: Mapping[str, tuple[Sequence[insertions.Value], str]],
    ) -> dict[str, insertions.Value]:
        """Put items into the lists that `node` has; returns the keys to add, with their lists.

        `wanted` has the items and the reason for each key.
        """
        missing: dict[str, insertions.Value] = {}
        for key, (values, why) in wanted.items():
            if child(node, key) is None:
                missing[key] = values
                self._record_items(node, key, values, why)
            else:
                self._prepend_items(node, key, values, why)
        return missing

    def _edit_pod(self, new: Additions) -> None:
        spec = self._pod.spec
        missing = self._fill_lists(
            spec,
            {
                "initContainers": (
                    new.init_containers,
                    "copies the wrapper into the pod, before every other init container",
                ),
                "volumes": (new.volumes, "hold the wrapper, the events and what the parts keep"),
            },
        )
        if missing:
            self._edits.append(insertions.add_keys(self._text, spec, missing))

    def _edit_container(self, container: yaml.MappingNode, new: Additions) -> None:
        missing = self._fill_lists(
            container,
            {
                "env": (
                    new.environment,
                    "tells the wrapper whose start this is and where events go",
                ),
                "volumeMounts": (
                    new.mounts,
                    "the wrapper, the events and what the parts keep",
                ),
            },
        )
        missing |= self._grant_tier(container)
        words = new.prefix
        why = "the wrapper measures the start, makes the inputs ready and becomes the job"
        if items(child(container, "command")):
            self._prepend_items(container, "command", words, why)
        elif self._pod.owner_kind in RUNTIME_KINDS and not self._commands.choose(
            self._pod, container
        ):
            why = "each TrainJob brings its own; inject these too"
            self._record_change(container, "no command", why)
        else:
            missing |= self._write_command(container, words, why)
        if missing:
            self._edits.append(insertions.add_keys(self._text, container, missing))

    def _grant_tier(self, container: yaml.MappingNode) -> dict[str, insertions.Value]:
        """Give the container the privilege of the tier; keys to add to it are returned."""
        options = self._options
        if options.tier == "none":
            return {}
        if options.tier == "fuse":
            resource = options.fuse_resource
            self._record_change(container, f"limits: {resource}", "brings /dev/fuse to the job")
            return self._add_nested_keys(container, ("resources", "limits"), {resource: 1})
        context = child(container, "securityContext")
        if scalar(child(context, "allowPrivilegeEscalation")) == "false":
            raise CannotEditError(
                f"{self._text.locate(container)}: allowPrivilegeEscalation is false, which forbids "
                "--tier privileged; remove it or take another tier"
            )
        why = "lets the wrapper mount in the container"
        self._record_change(container, "privileged: true", why)
        return self._add_nested_keys(container, ("securityContext",), {"privileged": True})

    def _add_nested_keys(
        self,
        container: yaml.MappingNode,
        path: tuple[str, ...],
        new: Mapping[str, insertions.Value],
    ) -> dict[str, insertions.Value]:
        """Put keys into the mapping at `path` below the container.

        Returns the keys to add to the container itself, where the path's first key is missing.
        """
        node, wanted = container, new
        for depth, key in enumerate(path):
            below = child(node, key)
            if below is None:
                for name in reversed(path[depth + 1 :]):
                    wanted = {name: wanted}
                if node is container:
                    return {key: wanted}
                self._edits.append(insertions.add_keys(self._text, node, {key: wanted}))
                return {}
            if not isinstance(below, yaml.MappingNode):
                raise CannotEditError(f"{self._text.locate(below)}: {key} holds no keys; remove it")
            self._check_not_aliased(below, key)
            insertions.check_flow_key(self._text, node, key)
            self._check_not_merged(below, list(new))
            node = below
        for key in new:
            if child(node, key) is not None:
                raise CannotEditError(f"{self._text.locate(node)}: {key} is set there already")
        self._edits.append(insertions.add_keys(self._text, node, new))
        return {}

    def _write_command(
        self, container: yaml.MappingNode, words: Sequence[str], why: str
    ) -> dict[str, insertions.Value]:
        """Write out a command that the manifest leaves to the image; keys to add are returned.

        Kubernetes drops the image's CMD as soon as a command is given, so that is written too.
        """
        command = child(container, "command")
        if command is not None and not is_absent(command):
            raise CannotEditError(
                f"{self._text.locate(command)}: command is not a list; make it one"
            )
        own_command = self._find_own_command(container)
        full = [*words, *own_command.pop("command")]
        self._record_change(container, f"command: {shlex.join(full)}", why)
        if "args" in own_command:
            change = f"args: {shlex.join(own_command['args'])}"
            self._record_change(container, change, "the image's CMD, which a command would drop")
        if command is None:
            return {"command": full, **own_command}
        self._check_not_aliased(command, "command")
        self._edits += insertions.fill_list(self._text, container, "command", full)
        return dict(own_command)

    def _find_own_command(self, container: yaml.MappingNode) -> dict[str, list[str]]:
        """The job's own `command`, and its `args` if they have to be added."""
        args = child(container, "args")
        has_args = args is not None and not is_absent(args)
        has_args = has_args or self._pod.form == "script"  # Argo gives the script's path as one
        given = self._commands.choose(self._pod, container)
        if given:
            return {"command": list(given)}
        image = scalar(child(container, "image"))
        name = self._pod.container_name(container)
        hint = f"give it by --command '{format_command_name(self._pod, container)}WORDS'"
        if self._resolve is None or not image:
            raise CannotEditError(f"the command of container {name} is its image's; {hint}")
        try:
            config = self._resolve(image)
        except BootseerError as error:
            raise CannotEditError(
                f"the command of container {name} is its image's, and {error}; {hint}"
            ) from error
        entrypoint = [_escape(word) for word in config.entrypoint]
        if has_args:
            return {"command": entrypoint}
        if not config.entrypoint and not config.cmd:
            raise CannotEditError(f"the image {image} names no command either; {hint}")
        arguments = [_escape(word) for word in config.cmd]
        if args is not None:  # there and empty: what was put in could not be found again
            return {"command": [*entrypoint, *arguments]}
        return {"command": entrypoint, "args": arguments} if arguments else {"command": entrypoint}


def _escape(word: str) -> str:
    """Write a word of an image as a manifest has it.

    In a manifest's command and args Kubernetes makes `$` of `$$` and expands `$(NAME)`; words that
    come from the image itself it leaves as they are.
    """
    return word.replace("$", "$$")


def choose_container(pod: Pod, options: Options) -> yaml.MappingNode:
    """The container of a pod that is the job; raises CannotEditError if that is not clear."""
    containers = {pod.container_name(c): c for c in pod.containers()}
    annotated = "" if pod.form else pod.annotation(pods.DEFAULT_CONTAINER)
    wanted = options.container or annotated
    if wanted:
        if wanted not in containers:
            raise CannotEditError(f"it has no container {wanted!r}; it has {', '.join(containers)}")
        return containers[wanted]
    if len(containers) == 1:
        return next(iter(containers.values()))
    with_accelerator = [c for c in containers.values() if pods.asks_for_accelerator(c)]
    if len(with_accelerator) == 1:
        return with_accelerator[0]
    for name in pods.JOB_CONTAINERS:
        if name in containers:
            return containers[name]
    raise CannotEditError(
        f"it has several containers ({', '.join(containers)}); name the job's by --container, "
        f"or by the annotation {pods.DEFAULT_CONTAINER}"
    )
