"""Times of an image pull through the Docker API, layer by layer, from its progress messages (pure).

Source: the Docker Engine API's `POST /images/create`, a stream of JSON objects with `status`, `id`
and `progressDetail`; Podman's compatible API sends the same without extraction. Docker announces
all layers at once and lets most of them wait; it downloads a few at a time and extracts them one
after the other. Podman lists an image's configuration among the layers.

Spans: `image.pull` over all, and per layer `image.pull.download` and `image.pull.extract`. Times
are those at which the messages arrived. What a program does not report is not written;
`not_observed` lists it.
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
_ERROR_CLASSES: tuple[tuple[str, type[BootseerError], str], ...] = (
    (r"no space left", NoSpaceError, "free space in its storage"),
    (r"unauthorized|denied|authentication required", AccessDeniedError, "log that program in"),
    (r"unknown|not found|does not exist", NotFoundError, "check the name"),
)
"""(pattern of the program's message, class of our error, advice)"""


@dataclasses.dataclass(slots=True)
class Layer:
    """What was observed of one layer; times in Unix nanoseconds, 0 = not observed.

    `present` says that the program had the layer before the pull.
    """

    name: str
    announced_ns: int = 0
    download_began_ns: int = 0
    downloaded_ns: int = 0
    extraction_began_ns: int = 0
    extracted_ns: int = 0
    size_bytes: int = 0
    present: bool = False

    @property
    def download_s(self) -> float | None:
        """Seconds of its download; None when it was not observed."""
        began_ns = self.download_began_ns or self.announced_ns
        return (self.downloaded_ns - began_ns) / 1e9 if self.downloaded_ns and began_ns else None

    @property
    def extract_s(self) -> float | None:
        """Seconds of its extraction; None when it was not observed."""
        if not (self.extracted_ns and self.extraction_began_ns):
            return None
        return (self.extracted_ns - self.extraction_began_ns) / 1e9


class PullTimes:
    """Collects the times of one pull from its progress messages as they arrive."""

    def __init__(self, image: str, begin_ns: int) -> None:
        self.image, self.begin_ns = image, begin_ns
        self.digest = ""
        self.layers: dict[str, Layer] = {}
        self.error: BootseerError | None = None
        self._last_extracted_ns = 0

    def take(self, message: Mapping[str, Any], now_ns: int) -> None:
        """Record one progress message that arrived at `now_ns` (Unix nanoseconds)."""
        fault = message.get("error")
        if fault:
            self.error = pull_error(str(fault), self.image)
            return
        status = str(message.get("status") or "")
        digest = _DIGEST.fullmatch(status)
        if digest:
            self.digest = digest[1]
        name = message.get("id")
        if isinstance(name, str) and not status.startswith("Pulling from"):
            layer = self.layers.setdefault(name, Layer(name))
            detail = message.get("progressDetail")
            self._update_layer(layer, status, detail if isinstance(detail, dict) else {}, now_ns)

    def _update_layer(
        self, layer: Layer, status: str, detail: Mapping[str, Any], now_ns: int
    ) -> None:
        layer.announced_ns = layer.announced_ns or now_ns
        if status == "Already exists":
            layer.present = True
        elif status == "Waiting":
            layer.announced_ns = 0  # not begun yet: it begins with its first bytes
        elif status == "Downloading":
            layer.download_began_ns = layer.download_began_ns or now_ns
            layer.size_bytes = max(layer.size_bytes, _parse_size(detail.get("total")))
        elif status in ("Verifying Checksum", "Download complete"):
            layer.downloaded_ns = layer.downloaded_ns or now_ns
        elif status == "Extracting":
            layer.downloaded_ns = layer.downloaded_ns or now_ns
            layer.extraction_began_ns = layer.extraction_began_ns or now_ns
        elif status == "Pull complete":
            layer.extracted_ns = now_ns
            # No extraction is reported of a small layer: it began as soon as it could.
            earliest_ns = max(layer.downloaded_ns, self._last_extracted_ns)
            layer.extraction_began_ns = layer.extraction_began_ns or earliest_ns
            self._last_extracted_ns = now_ns

    @property
    def not_observed(self) -> list[str]:
        """Phases that must have taken place and were not reported."""
        pulled = [layer for layer in self.layers.values() if not layer.present]
        phases = []
        if not any(layer.download_s is not None for layer in pulled):
            phases.append("image.pull.download")
        if not any(layer.extract_s is not None for layer in pulled):
            phases.append("image.pull.extract")
        return phases

    def spans(self, end_ns: int) -> list[Span]:
        """Return the span of the pull, then those of its layers in the order of their begins."""
        base = {"bootseer.source": SOURCE, "container.image.name": self.image}
        attributes = {**base, "bootseer.layers": len(self.layers)}
        attributes["bootseer.layers.present"] = sum(layer.present for layer in self.layers.values())
        if self.digest:
            attributes["container.image.repo_digests"] = [self.digest]
        size_bytes = sum(layer.size_bytes for layer in self.layers.values())
        if size_bytes:
            attributes["bootseer.bytes"] = size_bytes
        if self.error is not None:
            attributes["error.type"] = type(self.error).__name__
        status = "ok" if self.error is None else "error"
        layer_spans = [
            span for layer in self.layers.values() for span in _build_layer_spans(layer, base)
        ]
        layer_spans.sort(key=lambda span: (span.begin_ns, span.end_ns))
        return [Span("image.pull", self.begin_ns, end_ns, status, attributes), *layer_spans]


def pull_error(message: str, image: str) -> BootseerError:
    """Return our error for a container program's message about a failed pull."""
    # The whole query is removed: each blob store names the parameter of its signature differently.
    text = " ".join(redact_message(_QUERY.sub(r"\1?…", message)).split())[:300]
    for pattern, error_class, advice in _ERROR_CLASSES:
        if re.search(pattern, text, re.IGNORECASE):
            return error_class(f"cannot pull {image}: {text}; {advice}")
    return StoreUnavailableError(f"cannot pull {image}: {text}")


def _build_layer_spans(layer: Layer, base: Mapping[str, Any]) -> list[Span]:
    attributes: dict[str, Any] = {**base, "container.image.layer": layer.name}
    sized = {**attributes, "bootseer.bytes": layer.size_bytes} if layer.size_bytes else attributes
    spans = []
    if layer.download_s is not None:
        began_ns = layer.download_began_ns or layer.announced_ns
        spans.append(Span("image.pull.download", began_ns, layer.downloaded_ns, "ok", dict(sized)))
    if layer.extract_s is not None:
        began_ns = layer.extraction_began_ns
        spans.append(Span("image.pull.extract", began_ns, layer.extracted_ns, "ok", attributes))
    return spans


def _parse_size(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
