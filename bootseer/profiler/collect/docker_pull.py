"""A pull through the Docker API, timed layer by layer; pure.

Source: the Docker Engine API's `POST /images/create`, a stream of JSON objects with `status`, `id`
and `progressDetail`; Podman's compatible API sends the same without extraction. Docker announces
all layers at once and lets most of them wait; it downloads a few at a time and extracts them one
after the other. Podman names an image's configuration among the layers.

Spans: `image.pull` over all, and per layer `image.pull.download` and `image.pull.extract`. Times
are those of the lines' arrival. What a program does not tell is not written; `not_observed` names
it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from bootseer.errors import (
    AccessDeniedError,
    BootseerError,
    NoSpaceError,
    NotFoundError,
    StoreUnavailableError,
)
from bootseer.events.redaction import redact_message
from bootseer.profiler.collect.kubernetes_events import Span

SOURCE = "docker"
_QUERY = re.compile(r"(\bhttps?://[^\s?\"'<>]*)\?[^\s\"'<>]*", re.IGNORECASE)
_DIGEST = re.compile(r"Digest: (sha256:[0-9a-f]{64})")
_KINDS: tuple[tuple[str, type[BootseerError], str], ...] = (
    (r"no space left", NoSpaceError, "free space in its storage"),
    (r"unauthorized|denied|authentication required", AccessDeniedError, "log that program in"),
    (r"unknown|not found|does not exist", NotFoundError, "check the name"),
)


@dataclasses.dataclass(slots=True)
class Layer:
    """What was seen of one layer; times in Unix nanoseconds, 0 = not seen."""

    name: str
    announced_ns: int = 0
    download_ns: int = 0
    downloaded_ns: int = 0
    extract_ns: int = 0
    done_ns: int = 0
    size_bytes: int = 0
    there: bool = False

    @property
    def download_s(self) -> float | None:
        """Seconds of its download; None when it was not seen."""
        begin = self.download_ns or self.announced_ns
        return (self.downloaded_ns - begin) / 1e9 if self.downloaded_ns and begin else None

    @property
    def extract_s(self) -> float | None:
        """Seconds of its extraction; None when it was not seen."""
        return (self.done_ns - self.extract_ns) / 1e9 if self.done_ns and self.extract_ns else None


class PullTimes:
    """Takes in a pull's lines as they arrive."""

    def __init__(self, image: str, begin_ns: int) -> None:
        self.image, self.begin_ns = image, begin_ns
        self.digest = ""
        self.layers: dict[str, Layer] = {}
        self.error: BootseerError | None = None
        self._extracted_ns = 0

    def take(self, line: Mapping[str, Any], now_ns: int) -> None:
        """One object of the stream, and when it came."""
        fault = line.get("error")
        if fault:
            self.error = pull_error(str(fault), self.image)
            return
        status = str(line.get("status") or "")
        found = _DIGEST.fullmatch(status)
        if found:
            self.digest = found[1]
        name = line.get("id")
        if isinstance(name, str) and not status.startswith("Pulling from"):
            layer = self.layers.setdefault(name, Layer(name))
            detail = line.get("progressDetail")
            self._take_layer(layer, status, detail if isinstance(detail, dict) else {}, now_ns)

    def _take_layer(
        self, layer: Layer, status: str, detail: Mapping[str, Any], now_ns: int
    ) -> None:
        layer.announced_ns = layer.announced_ns or now_ns
        if status == "Already exists":
            layer.there = True
        elif status == "Waiting":
            layer.announced_ns = 0  # it was not begun: the first bytes will tell
        elif status == "Downloading":
            layer.download_ns = layer.download_ns or now_ns
            layer.size_bytes = max(layer.size_bytes, _size(detail.get("total")))
        elif status in ("Verifying Checksum", "Download complete"):
            layer.downloaded_ns = layer.downloaded_ns or now_ns
        elif status == "Extracting":
            layer.downloaded_ns = layer.downloaded_ns or now_ns
            layer.extract_ns = layer.extract_ns or now_ns
        elif status == "Pull complete":
            layer.done_ns = now_ns
            # Of a small layer no extraction is told: it began when it could.
            layer.extract_ns = layer.extract_ns or max(layer.downloaded_ns, self._extracted_ns)
            self._extracted_ns = now_ns

    @property
    def not_observed(self) -> list[str]:
        """Phases that must have been and were not told of."""
        moved = [layer for layer in self.layers.values() if not layer.there]
        out = []
        if not moved or not any(layer.download_s is not None for layer in moved):
            out.append("image.pull.download")
        if not any(layer.extract_s is not None for layer in moved):
            out.append("image.pull.extract")
        return out

    def spans(self, end_ns: int) -> list[Span]:
        """What was seen, in the order of its begin, after the pull itself."""
        base = {"bootseer.source": SOURCE, "container.image.name": self.image}
        whole = {**base, "bootseer.layers": len(self.layers)}
        whole["bootseer.layers.present"] = sum(layer.there for layer in self.layers.values())
        if self.digest:
            whole["container.image.repo_digests"] = [self.digest]
        size = sum(layer.size_bytes for layer in self.layers.values())
        if size:
            whole["bootseer.bytes"] = size
        if self.error is not None:
            whole["error.type"] = type(self.error).__name__
        status = "ok" if self.error is None else "error"
        parts = [span for layer in self.layers.values() for span in _spans(layer, base)]
        parts.sort(key=lambda span: (span.begin_ns, span.end_ns))
        return [Span("image.pull", self.begin_ns, end_ns, status, whole), *parts]


def pull_error(said: str, image: str) -> BootseerError:
    """Our error for what a container program says of a pull that failed."""
    # The whole query goes: each blob store has a name of its own for its signature.
    text = " ".join(redact_message(_QUERY.sub(r"\1?…", said)).split())[:300]
    for pattern, kind, advice in _KINDS:
        if re.search(pattern, text, re.IGNORECASE):
            return kind(f"cannot pull {image}: {text}; {advice}")
    return StoreUnavailableError(f"cannot pull {image}: {text}")


def _spans(layer: Layer, base: Mapping[str, Any]) -> list[Span]:
    attributes: dict[str, Any] = {**base, "container.image.layer": layer.name}
    sized = {**attributes, "bootseer.bytes": layer.size_bytes} if layer.size_bytes else attributes
    out = []
    if layer.download_s is not None:
        begin = layer.download_ns or layer.announced_ns
        out.append(Span("image.pull.download", begin, layer.downloaded_ns, "ok", dict(sized)))
    if layer.extract_s is not None:
        out.append(Span("image.pull.extract", layer.extract_ns, layer.done_ns, "ok", attributes))
    return out


def _size(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
