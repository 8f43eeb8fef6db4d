"""What a container of an image that podman pulls would run."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence

from bootseer.errors import NotSupportedError, StoreUnavailableError, from_os_error
from bootseer.imageprefetch.run import podman, podman_options
from bootseer.imageprefetch.run.command import run_foreground

_WITHOUT_OUTPUT = ("sh", "-c", 'exec "$@" >/dev/null', "sh")


def pull_program(
    ref: str,
    insecure: Sequence[str],
    options: Sequence[str],
    words: Sequence[str],
    run_pull: Callable[[Sequence[str]], int] = run_foreground,
) -> list[str]:
    """Have podman pull an image that it has not, and return the program of its container.

    `insecure` are podman's options for a registry without TLS, `options` those of the container,
    `words` replace the image's command. `run_pull` runs the pull. Raises StoreUnavailableError
    where podman cannot pull, as it has said itself.
    """
    inspect = ["podman", "image", "inspect", "--format", "{{json .Config}}", ref]
    try:
        shown = None
        if not podman_options.always_pulls(options):
            shown = subprocess.run(inspect, capture_output=True, check=False)
        if shown is None or shown.returncode:
            pull = [
                *_WITHOUT_OUTPUT,
                "podman",
                "pull",
                "--quiet",
                *insecure,
                *podman_options.pull_options(options),
                ref,
            ]
            if run_pull(pull):
                raise StoreUnavailableError(f"podman cannot pull {ref}; it says why above")
            shown = subprocess.run(inspect, stdout=subprocess.PIPE, check=False)
    except OSError as error:
        raise from_os_error(error, "run podman") from error
    try:
        config = json.loads(shown.stdout)
        entrypoint, cmd = config.get("Entrypoint") or [], config.get("Cmd") or []
    except (ValueError, AttributeError) as error:
        raise NotSupportedError(f"podman does not tell what {ref} runs: give a command") from error
    return podman.program_of(entrypoint, cmd, options, words)
