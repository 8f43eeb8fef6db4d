"""`bootseer agent`: one process a node that mounts, counts, sweeps and drains."""

from __future__ import annotations

import os
import sys

import click

import bootseer
from bootseer.agent import server
from bootseer.agent.client_programs import ClientPrograms
from bootseer.agent.drain import drain as drain_agent
from bootseer.agent.fork_server import TaskTable
from bootseer.agent.protocol import DECLINED
from bootseer.agent.sweeper import Sweeper
from bootseer.cli import root
from bootseer.cli.image import direct
from bootseer.cli.image.options import (
    image_cache_option,
    kept_limit_option,
    plain_http_option,
    runtime_option,
)
from bootseer.config import loading
from bootseer.config.paths import default_cache, default_runtime
from bootseer.imageprefetch.mount import mount_task, node_metrics, node_sweep

MODULES = (
    # With what they import, all that a mount and a container's start need; tests compare the list
    # with both.
    "bootseer.cli.image.group",
    "bootseer.cli.image.mount",
    "bootseer.cli.image.outcome",
    "bootseer.cli.image.umount",
    "bootseer.imageprefetch.mount.interrupts",
    "bootseer.imageprefetch.mount.serverless_choice",
    "bootseer.storage.oci.config",
    "bootseer.imageprefetch.hotset.local_packer",
    "bootseer.imageprefetch.run.temporary_mounts",
    "bootseer.imageprefetch.mount.mount_worker",
    "bootseer.imageprefetch.record.first_step",
    "bootseer.imageprefetch.record.start_recording",
    "bootseer.imageprefetch.record.trace_store",
    "bootseer.fuse.serve.handover",
    "bootseer.blockimage.serve.background_fill",
    "bootseer.blockimage.serve.image_server",
    "bootseer.blockimage.serve.page_cache_warmer",
    "bootseer.blocks.cache.sealed_objects",
    "bootseer.blocks.trace.recorder",
    "bootseer.storage.oci.open",
    "bootseer.storage.oci.registry_repository",
    "bootseer.storage.oci.layout_repository",
    "bootseer.entrypoint.container.deps_layer",
    "bootseer.entrypoint.container.start",
    "bootseer.entrypoint.parts.all_parts",
    "bootseer.imageprefetch.mount.complete_mount",
    "bootseer.imageprefetch.run.run_image",
    "bootseer.imageprefetch.run.server_log",
    "bootseer.blockimage.serve.serverless_mount",
    "bootseer.stripedfs.mount.background_log",
    "bootseer.stripedfs.mount.mount",
    "bootseer.stripedfs.mount.prefetch",
    "bootseer.stripedfs.mount.read_tree",
    "bootseer.stripedfs.read.open",
    "bootseer.storage.http.store",
    "bootseer.storage.open",
    "bootseer.storage.webhdfs.store",
    # What these import on first use, which would take a tenth of a mount's time.
    "bootseer.config.loading",
    "bootseer.config.toml_lines",
    "bootseer.depsnap.key.python_probe",
    "bootseer.events.resource",
    "bootseer.storage.token_files",
    "_strptime",
    "bootseer.stripedfs.mount.expected_load",
    "bootseer.system.page_cache",
    "encodings.ascii",
    "encodings.idna",
    "shlex",
    "shutil",
    "tomllib",
)

PUBLISHING = "bootseer.imageprefetch.hotset.publication:publish_recorded"
SWEEPS = (
    f"{node_sweep.__name__}:sweep",
    "bootseer.entrypoint.container.layer_folders:sweep_node",
)
TASKS = TaskTable(
    {
        "image mount": f"{__name__}:mount",
        "image run": f"{__name__}:run",
        "image umount": "bootseer.cli.root:main",
        mount_task.NAME: f"{mount_task.__name__}:main",
    },
    MODULES,
    with_programs=("image run",),
)


def mount(words: list[str]) -> int:
    """Run `image mount` as a task of the agent; return its exit code."""
    exit_code = direct.run_without_click(words, in_agent=True)
    return root.main(words) if exit_code is None else exit_code


def run(words: list[str], programs: ClientPrograms) -> int:
    """Run `image run` as a task of the agent, with podman in the client; return its exit code."""
    exit_code = direct.run_without_click(words, in_agent=True, programs=programs)
    return DECLINED if exit_code is None else exit_code


@click.command(
    "agent",
    help="""Stand ready on this node, so that `bootseer image mount` and `run` begin at once.

    Importing what a mount needs takes longer than mounting. The agent has it imported, and runs
    each mount that is asked for, and what a container needs before and after it, in a fork of
    itself, with the caller's environment, streams and working directory. Mounts outlive it; without
    it they begin by themselves. Only root may ask, and only from the agent's own namespaces.

    With --listen it answers over HTTP at that address: /healthz, /readyz, and /metrics in
    Prometheus' text format, with the image servers of this node among them.
    """,
)
@runtime_option
@click.option(
    "--listen",
    envvar="BOOTSEER_AGENT_LISTEN",
    default="",
    metavar="HOST:PORT",
    help="Where health and metrics are served; default: nowhere.",
)
@click.option(
    "--pods/--no-pods",
    "for_pods",
    envvar="BOOTSEER_AGENT_PODS",
    default=False,
    show_default=True,
    help="Mount for processes without privilege that reach the socket pods/fuse.sock of --runtime.",
)
@click.option(
    "--drain",
    is_flag=True,
    help="Have the running agent take on nothing more, and end once no image is mounted and no pod "
    "has a mount of its making.",
)
@click.option(
    "--drain-limit",
    "limit_s",
    envvar="BOOTSEER_AGENT_DRAIN_LIMIT",
    type=click.FloatRange(min=0),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long --drain waits; then the agent goes on, and the exit code is 10.",
)
@click.option(
    "--sweep-every",
    "sweep_every_s",
    envvar="BOOTSEER_AGENT_SWEEP_EVERY",
    type=click.FloatRange(min=0),
    default=3600.0,
    show_default=True,
    metavar="SECONDS",
    help="How often what killed commands left, and what has not been used for long, is removed "
    "from --runtime and --cache; 0: never.",
)
@image_cache_option
@kept_limit_option
@click.option(
    "--publish-every",
    "publish_every_s",
    envvar="BOOTSEER_AGENT_PUBLISH_EVERY",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    metavar="SECONDS",
    help="How often hot sets are published of what starts on this node have read and no other "
    "node has published; needs the right to push. 0: never.",
)
@plain_http_option
@click.option(
    "--idle-exit",
    "idle_exit_s",
    envvar="BOOTSEER_AGENT_IDLE_EXIT",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    metavar="SECONDS",
    help="End after so long without a request that was granted; 0: never.",
)
@click.option(server.LOADED_VERSION, "loaded_version", is_flag=True, hidden=True)
def command(
    runtime: str,
    listen: str,
    for_pods: bool,
    drain: bool,
    limit_s: float,
    sweep_every_s: float,
    cache: str,
    kept_limit_bytes: int,
    publish_every_s: float,
    plain_http: bool,
    idle_exit_s: float,
    loaded_version: bool,
) -> None:
    if loaded_version:
        TASKS.load()
        click.echo(bootseer.__version__)
        return
    runtime = os.path.abspath(runtime or default_runtime())
    if drain:
        drain_agent(runtime, lambda: node_metrics.count_mounts(runtime) > 0, limit_s)
        return
    collect = f"{node_metrics.__name__}:collect"
    cache = os.path.abspath(cache or default_cache())
    sweepers = [
        Sweeper(SWEEPS, (runtime, cache, kept_limit_bytes), sweep_every_s),
        Sweeper((PUBLISHING,), (cache, plain_http), publish_every_s, idle=True),
    ]
    loading.list_settings()  # kept, for each task that reads settings
    program = [sys.executable, *sys.orig_argv[1:]]
    server.serve(
        runtime,
        TASKS,
        listen=listen,
        collect=collect,
        for_pods=for_pods,
        sweepers=[sweeper for sweeper in sweepers if sweeper.interval_s],
        idle_exit_s=idle_exit_s,
        program=program,
    )
