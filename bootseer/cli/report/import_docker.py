"""`bootseer import docker`: pull an image through Docker or Podman and time each layer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from bootseer import events
from bootseer.cli.report.import_ import (
    events_option,
    job_uid_option,
    open_checked_writer,
    print_summary,
    summary_json_option,
    trace_id_of,
    write_spans,
)
from bootseer.errors import NotSupportedError, StoreUnavailableError
from bootseer.profiler.collect import docker_pull

if TYPE_CHECKING:
    import docker

TIMEOUT_S = 3600


@click.command("docker")
@click.argument("image", metavar="IMAGE")
@click.option(
    "--socket",
    "where",
    envvar=["BOOTSEER_IMPORT_DOCKER_SOCKET", "DOCKER_HOST"],
    metavar="PATH|URL",
    help="Where Docker or Podman listens; default: Docker's socket, else Podman's.",
)
@click.option("--platform", metavar="OS/ARCH", help="The image of an index that is pulled.")
@click.option(
    "--anew", is_flag=True, help="Remove this image first, so that its layers are pulled again."
)
@job_uid_option
@events_option
@summary_json_option
def docker_command(
    image: str,
    where: str | None,
    platform: str | None,
    anew: bool,
    job_uid: str | None,
    directory: str | None,
    as_json: bool,
) -> None:
    """Pull IMAGE through Docker's or Podman's API and time each layer.

    Writes one event file: image.pull over all, and for each layer image.pull.download and
    image.pull.extract as far as the program tells of them. What a container waits for in a plain
    start, to be compared with `bootseer image mount`.
    """
    from bootseer.imageprefetch.image_build.docker_daemon import socket_path

    url = f"unix://{socket_path(where or '')}" if "://" not in (where or "") else str(where)
    times, end_ns = _pull_image(image, url, platform, anew)
    resource: dict[str, Any] = {
        "service.name": "bootseer-import",
        "bootseer.source": docker_pull.SOURCE,
        "container.image.name": image,
    }
    if job_uid:
        resource["bootseer.job_uid"] = job_uid
    spans = times.spans(end_ns)
    marker = {"bootseer.source": "docker", "bootseer.not_observed": times.not_observed}
    with open_checked_writer(directory, resource, trace_id_of(job_uid, 0)) as (writer, counts):
        write_spans(writer, spans)
        counts["events"] = 2 * len(spans)
        if times.not_observed:
            writer.point("import.docker", "ok", marker, None, end_ns, None)
            counts["marker"] = 1
    if times.error is not None:
        raise times.error
    _print_pull(times, end_ns, directory, as_json)


def _pull_image(
    image: str, url: str, platform: str | None, anew: bool
) -> tuple[docker_pull.PullTimes, int]:
    """Pull an image; return the times of its layers, and of the pull's end in nanoseconds."""
    try:
        import docker
        import docker.errors
        import requests
    except ImportError as error:
        raise NotSupportedError(
            "pulling through Docker's API needs the `docker` package; install bootseer[docker]"
        ) from error
    name, version = _split_reference(image)
    client = None
    try:
        client = docker.APIClient(base_url=url, version="auto", timeout=TIMEOUT_S)
        if anew:
            _remove_image(client, image)
        times = docker_pull.PullTimes(image, time.time_ns())
        for message in _read_pull_messages(client, name, version, platform):
            times.take(message, time.time_ns())
        end_ns = time.time_ns()
        if times.error is None:
            times.digest = times.digest or _read_digest(client, image)
        return times, end_ns
    except docker.errors.APIError as error:
        raise docker_pull.pull_error(str(error.explanation or error), image) from error
    except (docker.errors.DockerException, requests.RequestException) as error:
        raise StoreUnavailableError(
            f"no container program answers at {url} ({type(error).__name__}); start it, or name"
            " its socket by --socket"
        ) from error
    finally:
        if client is not None:
            client.close()


def _read_pull_messages(
    client: docker.APIClient, name: str, version: str, platform: str | None
) -> Iterator[dict[str, Any]]:
    """Pull an image and yield the API's progress messages."""
    for message in client.pull(name, version, stream=True, decode=True, platform=platform):
        if isinstance(message, dict):
            yield message


def _split_reference(image: str) -> tuple[str, str]:
    """Return an image's name and its tag or digest. Raises UsageError for an invalid reference."""
    from bootseer.storage.oci.reference import parse_reference

    reference = parse_reference(image)
    return reference.place, reference.version


def _remove_image(client: docker.APIClient, image: str) -> None:
    """Remove an image if it exists."""
    import docker.errors

    try:
        client.remove_image(image)
    except docker.errors.APIError as error:
        # Podman answers 500 for an image that does not exist.
        if error.status_code != 404 and "not known" not in str(error.explanation):
            raise


def _read_digest(client: docker.APIClient, image: str) -> str:
    """Return the digest that the container program has for an image; "" if it has none."""
    import docker.errors

    try:
        names = client.inspect_image(image).get("RepoDigests") or [""]
    except docker.errors.APIError:
        return ""
    return str(names[0]).partition("@")[2]


def _print_pull(
    times: docker_pull.PullTimes, end_ns: int, directory: str | None, as_json: bool
) -> None:
    seconds = (end_ns - times.begin_ns) / 1e9
    layers = [
        {
            "layer": layer.name,
            "bytes": layer.size_bytes or None,
            "download_s": layer.download_s,
            "extract_s": layer.extract_s,
            "present": layer.present,
        }
        for layer in times.layers.values()
    ]
    summary = {
        "image": times.image,
        "digest": times.digest,
        "seconds": seconds,
        "layers": layers,
        "not_observed": times.not_observed,
        "events": directory or events.default_directory(),
    }
    lines = [f"{times.image}: pulled in {seconds:.2f} s"]
    for layer in times.layers.values():
        parts = ["there already"] if layer.present else []
        parts += [f"download {layer.download_s:.2f} s"] if layer.download_s is not None else []
        parts += [f"extract {layer.extract_s:.2f} s"] if layer.extract_s is not None else []
        lines.append(f"  {layer.name}: {', '.join(parts) or 'nothing told'}")
    if times.not_observed:
        lines.append(f"not observed: {', '.join(times.not_observed)}")
    print_summary(summary, "\n".join(lines), as_json)
