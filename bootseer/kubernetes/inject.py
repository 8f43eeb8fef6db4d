"""Put bootseer into the pods of a manifest, by insertions into its text (and over nulls) alone.

A pod that cannot be injected safely is refused with the reason and the line; nothing of its text
is touched then. Injecting again takes the first injection out before, so it changes nothing, or
brings an older one up to date.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence

import yaml

from bootseer.errors import BootseerError
from bootseer.kubernetes import insertions, kinds, manifest_text, pods, uninject
from bootseer.kubernetes import options as names
from bootseer.kubernetes.additions import Additions, additions, prefix
from bootseer.kubernetes.identity import identify
from bootseer.kubernetes.insertions import CannotEditError, Edit
from bootseer.kubernetes.job_command import CommandChoice, name_to_give
from bootseer.kubernetes.manifest_text import Text
from bootseer.kubernetes.nodes import find_unfit_nodes
from bootseer.kubernetes.options import Options
from bootseer.kubernetes.pods import Described, Pod
from bootseer.storage.oci.config import ImageConfig

Resolve = Callable[[str], ImageConfig]
"""An image's name to its entrypoint and command; raises a BootseerError that says why not."""

RUNTIME_KINDS = ("TrainingRuntime", "ClusterTrainingRuntime")


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """One thing that was put in, for `--explain`."""

    line: int
    pod: str
    what: str
    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """One pod that was left as it is, and why."""

    line: int
    pod: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Injected:
    """The new text, and what was done and not done.

    `passed_over`: pods left as they are because another container than theirs was asked for.
    `unmeasured`: objects that run containers, but have no pod to inject, and why. `unknown`: pods
    that were injected though nobody here knows what runs them, and what to look at. `kinds`: those
    of all objects.
    """

    raw: str
    changes: tuple[Change, ...]
    refusals: tuple[Refusal, ...]
    passed_over: tuple[Refusal, ...] = ()
    unmeasured: tuple[Refusal, ...] = ()
    kinds: tuple[str, ...] = ()
    unknown: tuple[Refusal, ...] = ()


def inject(text: Text, options: Options, resolve: Resolve | None = None) -> Injected:
    """Inject every pod of a manifest that can be.

    Raises UsageError for text that is no valid YAML and for a command given to a container that
    is not there, and CorruptDataError where an earlier injection was changed by hand.
    """
    clean = Text(uninject.uninject(text), text.name, text.newline)
    all_edits: list[Edit] = []
    changes: list[Change] = []
    refusals: list[Refusal] = []
    decided: dict[object, Additions] = {}
    commands = _given_commands(clean, options)
    passed_over: list[Refusal] = []
    may_pass_over = bool(options.container) and _has_container(clean, options.container)
    wrapped = _WrappedTrainJobs()
    unmeasured: list[Refusal] = []
    unknown: dict[str, Refusal] = {}
    kinds_there: list[str] = []
    for document in manifest_text.documents(clean):
        objects = pods.find_objects(document)
        for one in objects:
            kinds_there.append(one.kind)
            if kinds.is_train_job(one.node):
                try:
                    _train_job(clean, one, options, all_edits, changes, wrapped)
                except CannotEditError as error:
                    refusals.append(_refusal_of(one, str(error)))
            else:
                reasons = [kinds.find_patches(one)]
                if not one.pods:
                    reasons.append(kinds.find_containers_left(one))
                unmeasured += [_refusal_of(one, reason) for reason in reasons if reason]
        for pod in (pod for one in objects for pod in one.pods):
            if may_pass_over and not is_asked_for(pod, options):
                line, title = pod.spec.start_mark.line + 1, f"{pod.title} {pod.path}"
                reason = f"it has no container {options.container!r}"
                passed_over.append(Refusal(line, title, reason))
                continue
            try:
                made, told = _Injection(clean, pod, options, resolve, decided, commands).run()
            except BootseerError as error:
                line = pod.spec.start_mark.line + 1
                refusals.append(Refusal(line, f"{pod.title} {pod.path}", str(error)))
                continue
            all_edits += made
            changes += told
            wrapped.add_runtime(pod, told)
            note = kinds.note_unknown(pod)
            if note:
                line, title = pod.spec.start_mark.line + 1, f"{pod.title} {pod.path}"
                unknown.setdefault(note, Refusal(line, title, note))
    unmeasured += wrapped.find_unmeasured()
    new = insertions.apply(clean.raw, all_edits)
    return Injected(
        new,
        tuple(changes),
        tuple(refusals),
        tuple(passed_over),
        tuple(unmeasured),
        tuple(dict.fromkeys(filter(None, kinds_there))),
        tuple(unknown.values()),
    )


def _refusal_of(one: Described, reason: str) -> Refusal:
    return Refusal(one.node.start_mark.line + 1, one.title, reason)


@dataclasses.dataclass(slots=True)
class _WrappedTrainJobs:
    """Which TrainJobs leave their command to their runtime, and which runtimes have one."""

    _without: list[tuple[str, Refusal]] = dataclasses.field(default_factory=list)
    _runtimes: set[str] = dataclasses.field(default_factory=set)

    def add_job(self, one: Described) -> None:
        """Count a TrainJob without a command."""
        runtime = manifest_text.scalar(manifest_text.child(one.node, "spec", "runtimeRef", "name"))
        reason = (
            f"it has no command: what its runtime {runtime or '(unnamed)'} starts is measured only "
            "where that has a command and is injected too"
        )
        self._without.append((runtime, _refusal_of(one, reason)))

    def add_runtime(self, pod: Pod, changes: Sequence[Change]) -> None:
        """Count a runtime that was injected, if the wrapper stands before its command."""
        if any(change.what.startswith("command: ") for change in changes):
            self._runtimes.add(pod.owner_name)

    def find_unmeasured(self) -> list[Refusal]:
        """TrainJobs whose runtime is not among those that were wrapped."""
        return [left for runtime, left in self._without if runtime not in self._runtimes]


def is_asked_for(pod: Pod, options: Options) -> bool:
    """Whether a pod has the container that was asked for, if one was."""
    names_there = map(pod.container_name, pod.containers())
    return not options.container or options.container in names_there


def _has_container(text: Text, name: str) -> bool:
    """Whether any pod has a container of this name."""
    return any(
        pod.container_name(container) == name
        for document in manifest_text.documents(text)
        for pod in pods.find(document)
        for container in pod.containers()
    )


def _given_commands(text: Text, options: Options) -> CommandChoice:
    """The given commands, with the images of all containers that would take one."""
    commands = CommandChoice(options)
    if not options.command and not options.commands:
        return commands
    for document in manifest_text.documents(text):
        for pod in pods.find(document):
            try:
                container = choose_container(pod, options)
            except CannotEditError:
                continue  # it is refused for this
            if not manifest_text.items(manifest_text.child(container, "command")):
                commands.add(pod, container)
    commands.check_used()
    return commands


def _train_job(
    text: Text,
    one: Described,
    options: Options,
    all_edits: list[Edit],
    changes: list[Change],
    wrapped: _WrappedTrainJobs,
) -> None:
    """A TrainJob has no pod of its own: only its command is wrapped, its runtime has the rest."""
    trainer = manifest_text.child(one.node, "spec", "trainer")
    command = manifest_text.child(trainer, "command")
    if not isinstance(trainer, yaml.MappingNode) or not manifest_text.items(command):
        wrapped.add_job(one)
        return
    if (
        tuple(manifest_text.scalar(word) for word in manifest_text.items(command))
        == kinds.TORCHTUNE
    ):
        raise CannotEditError(kinds.TORCHTUNE_REASON)
    all_edits += insertions.prepend(text, trainer, "command", prefix(options))
    assert command is not None
    changes.append(
        Change(
            command.start_mark.line + 1,
            one.title,
            f"command: {' '.join(prefix(options))}",
            "the wrapper measures the job and starts it; inject the TrainingRuntime that this "
            "job names as well, it brings the wrapper into the pods",
        )
    )


class _Injection:
    """One pod's injection: all edits, or one refusal."""

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
        is_given = self._commands.is_named(self._pod, container)
        reason = kinds.find_refusal(self._pod, container, is_given=is_given)
        if reason:
            raise CannotEditError(reason)
        self._check_own(container, "this container")
        self._check_mounts(container)
        self._check_merges(container, ("command", "args", "env", "volumeMounts"))
        there = [
            manifest_text.scalar(manifest_text.child(entry, "name"))
            for entry in manifest_text.items(manifest_text.child(container, "env"))
        ]
        own = pods.guaranteed(self._pod, container)
        new = self._additions(there, own)
        self._pod_level(new)
        self._container_level(container, new)
        return self._edits, self._changes

    def _additions(self, there: Sequence[str], guaranteed: Mapping[str, str]) -> Additions:
        """What this pod gets: the same object for all pods that get the same."""
        identity = identify(self._pod, self._options.job_uid)
        key = (identity, *there, *guaranteed.items())
        if key not in self._decided:
            self._decided[key] = additions(self._options, identity, there, guaranteed)
        return self._decided[key]

    def _check_pod(self) -> None:
        pod = self._pod
        self._check_own(pod.spec, "this pod")
        first, last = pod.template.start_mark.index, pod.template.end_mark.index
        odd = manifest_text.ODD_BREAKS.search(self._text.raw, first, last)
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
        self._check_merges(pod.spec, ("initContainers", "containers", "volumes"))
        for key in ("initContainers", "containers", "volumes"):
            for entry in manifest_text.items(manifest_text.child(pod.spec, key)):
                name = manifest_text.scalar(manifest_text.child(entry, "name"))
                if name in names.NAMES:
                    raise CannotEditError(
                        f"{self._text.where(entry)}: {key} has one named {name!r} that is not "
                        "ours; rename it"
                    )

    def _check_own(self, node: yaml.Node, what: str) -> None:
        if id(node) in self._pod.aliased:
            raise CannotEditError(
                f"{self._text.where(node)}: {what} is written once and used at several places by "
                "an alias; write it out at each of them"
            )

    def _check_mounts(self, container: yaml.MappingNode) -> None:
        for entry in manifest_text.items(manifest_text.child(container, "volumeMounts")):
            path = manifest_text.scalar(manifest_text.child(entry, "mountPath")).rstrip("/")
            if path in names.PATHS:
                raise CannotEditError(
                    f"{self._text.where(entry)}: {path} is where a volume of ours goes; "
                    "mount that one elsewhere"
                )

    def _check_merges(self, node: yaml.MappingNode, keys: Sequence[str]) -> None:
        if manifest_text.merges(node):
            for key in keys:
                if manifest_text.child(node, key) is None:
                    raise CannotEditError(
                        f"{self._text.where(node)}: {key} may come from what is merged in by "
                        "`<<`; write it out"
                    )

    def _add(
        self, node: yaml.MappingNode, key: str, new: Sequence[insertions.Value], why: str
    ) -> None:
        value = manifest_text.child(node, key)
        if value is not None:
            self._check_own(value, key)
        self._edits += insertions.prepend(self._text, node, key, new)
        titles = [str(v["name"]) for v in new if isinstance(v, dict)] or [str(v) for v in new]
        self._tell(node, f"{key}: {', '.join(titles)}", why)

    def _tell(self, node: yaml.Node, what: str, why: str) -> None:
        title = f"{self._pod.title} {self._pod.path}"
        self._changes.append(Change(node.start_mark.line + 1, title, what, why))

    def _pod_level(self, new: Additions) -> None:
        spec = self._pod.spec
        wanted = {
            "initContainers": (
                new.init_containers,
                "copies the wrapper into the pod, before every other init container",
            ),
            "volumes": (new.volumes, "hold the wrapper, the events and what the parts keep"),
        }
        missing: dict[str, insertions.Value] = {}
        for key, (values, why) in wanted.items():
            if manifest_text.child(spec, key) is None:
                missing[key] = values
                self._tell(spec, f"{key}: {', '.join(str(v['name']) for v in values)}", why)
            else:
                self._add(spec, key, values, why)
        if missing:
            self._edits.append(insertions.add_keys(self._text, spec, missing))

    def _container_level(self, container: yaml.MappingNode, new: Additions) -> None:
        missing: dict[str, insertions.Value] = {}
        wanted = {
            "env": (new.environment, "tells the wrapper whose start this is and where events go"),
            "volumeMounts": (new.mounts, "the wrapper, the events and what the parts keep"),
        }
        for key, (values, why) in wanted.items():
            if manifest_text.child(container, key) is None:
                missing[key] = values
                self._tell(container, f"{key}: {', '.join(str(v['name']) for v in values)}", why)
            else:
                self._add(container, key, values, why)
        missing |= self._tier(container)
        words = new.prefix
        why = "the wrapper measures the start, makes the inputs ready and becomes the job"
        if manifest_text.items(manifest_text.child(container, "command")):
            self._add(container, "command", words, why)
        elif self._pod.owner_kind in RUNTIME_KINDS and not self._commands.choose(
            self._pod, container
        ):
            self._tell(container, "no command", "each TrainJob brings its own; inject these too")
        else:
            missing |= self._write_command(container, words, why)
        if missing:
            self._edits.append(insertions.add_keys(self._text, container, missing))

    def _tier(self, container: yaml.MappingNode) -> dict[str, insertions.Value]:
        """What the asked privilege needs; keys to add to the container are returned."""
        options = self._options
        if options.tier == "none":
            return {}
        if options.tier == "fuse":
            self._tell(container, f"limits: {options.fuse_resource}", "brings /dev/fuse to the job")
            return self._nested(container, ("resources", "limits"), {options.fuse_resource: 1})
        context = manifest_text.child(container, "securityContext")
        if (
            manifest_text.scalar(manifest_text.child(context, "allowPrivilegeEscalation"))
            == "false"
        ):
            raise CannotEditError(
                f"{self._text.where(container)}: allowPrivilegeEscalation is false, which forbids "
                "--tier privileged; remove it or take another tier"
            )
        self._tell(container, "privileged: true", "lets the wrapper mount in the container")
        return self._nested(container, ("securityContext",), {"privileged": True})

    def _nested(
        self,
        container: yaml.MappingNode,
        path: tuple[str, ...],
        new: Mapping[str, insertions.Value],
    ) -> dict[str, insertions.Value]:
        """Put keys into a mapping below the container; what is missing above it is returned."""
        node, wanted = container, new
        for depth, key in enumerate(path):
            below = manifest_text.child(node, key)
            if below is None:
                for name in reversed(path[depth + 1 :]):
                    wanted = {name: wanted}
                if node is container:
                    return {key: wanted}
                self._edits.append(insertions.add_keys(self._text, node, {key: wanted}))
                return {}
            if not isinstance(below, yaml.MappingNode):
                raise CannotEditError(f"{self._text.where(below)}: {key} holds no keys; remove it")
            self._check_own(below, key)
            insertions.check_key(self._text, node, key)
            self._check_merges(below, list(new))
            node = below
        for key in new:
            if manifest_text.child(node, key) is not None:
                raise CannotEditError(f"{self._text.where(node)}: {key} is set there already")
        self._edits.append(insertions.add_keys(self._text, node, new))
        return {}

    def _write_command(
        self, container: yaml.MappingNode, words: Sequence[str], why: str
    ) -> dict[str, insertions.Value]:
        """Write out a command that the manifest leaves to the image; keys to add are returned.

        Kubernetes drops the image's CMD as soon as a command is given, so that is written too.
        """
        command = manifest_text.child(container, "command")
        if command is not None and not manifest_text.is_absent(command):
            raise CannotEditError(
                f"{self._text.where(command)}: command is not a list; make it one"
            )
        written = self._command_of_image(container)
        full = [*words, *written.pop("command")]
        self._tell(container, f"command: {shlex.join(full)}", why)
        if "args" in written:
            told = f"args: {shlex.join(written['args'])}"
            self._tell(container, told, "the image's CMD, which a command would drop")
        if command is None:
            return {"command": full, **written}
        self._check_own(command, "command")
        self._edits += insertions.fill(self._text, container, "command", full)
        return dict(written)

    def _command_of_image(self, container: yaml.MappingNode) -> dict[str, list[str]]:
        """The job's own `command`, and `args` where they have to be added."""
        args = manifest_text.child(container, "args")
        has_args = args is not None and not manifest_text.is_absent(args)
        has_args = has_args or self._pod.form == "script"  # Argo gives the script's path as one
        given = self._commands.choose(self._pod, container)
        if given:
            return {"command": list(given)}
        image = manifest_text.scalar(manifest_text.child(container, "image"))
        name = self._pod.container_name(container)
        hint = f"give it by --command '{name_to_give(self._pod, container)}WORDS'"
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
        if args is not None:  # there and empty: what is put into it could not be told from others
            return {"command": [*entrypoint, *arguments]}
        return {"command": entrypoint, "args": arguments} if arguments else {"command": entrypoint}


def _escape(word: str) -> str:
    """A word of an image as a manifest says it.

    In a manifest's command and args Kubernetes makes `$` of `$$` and expands `$(NAME)`; words that
    come from the image itself it leaves as they are.
    """
    return word.replace("$", "$$")


def choose_container(pod: Pod, options: Options) -> yaml.MappingNode:
    """Which container of a pod is the job; raises CannotEditError when nobody can tell."""
    found = {pod.container_name(c): c for c in pod.containers()}
    named = "" if pod.form else pod.annotation(pods.DEFAULT_CONTAINER)
    wanted = options.container or named
    if wanted:
        if wanted not in found:
            raise CannotEditError(f"it has no container {wanted!r}; it has {', '.join(found)}")
        return found[wanted]
    if len(found) == 1:
        return next(iter(found.values()))
    with_device = [c for c in found.values() if pods.asks_for_accelerator(c)]
    if len(with_device) == 1:
        return with_device[0]
    for name in pods.JOB_CONTAINERS:
        if name in found:
            return found[name]
    raise CannotEditError(
        f"it has several containers ({', '.join(found)}); name the job's by --container, or by "
        f"the annotation {pods.DEFAULT_CONTAINER}"
    )
