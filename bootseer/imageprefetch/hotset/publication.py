"""Publishing what this node's starts have read, so that all other nodes have it ahead of need."""

from __future__ import annotations

import sys

from bootseer.errors import BootseerError, describe
from bootseer.imageprefetch.hotset import store
from bootseer.imageprefetch.hotset.image_hotsets import open_fetcher, open_image
from bootseer.imageprefetch.image_cache import ImageCache
from bootseer.imageprefetch.record.trace_store import TraceStore

LEAST_SHARE = 0.02
"""Of what its starts have read: a node that has read less than that beyond what others have
published publishes nothing, or every start of every node would."""


def publish_recorded(cache: str, plain_http: bool) -> None:
    """Publish hot sets of all workloads whose starts were recorded in a node's cache.

    Nothing raises; what cannot be published is told on standard error.
    """
    images = ImageCache(cache)
    for name, digest in images.list_pins():
        traces = TraceStore(images.trace_folder(digest))
        try:
            for workload in traces.workloads():
                _publish(name, digest, workload, cache, plain_http=plain_http)
        except (BootseerError, OSError) as error:
            sys.stderr.write(f"bootseer: no hot set of {name} is published: {describe(error)}\n")
            sys.stderr.flush()


def _publish(name: str, digest: str, workload: str, cache: str, *, plain_http: bool) -> None:
    with open_image(name, cache, plain_http=plain_http or None, push=True) as image:
        if image.digest != digest or image.find_unpublished_share(workload) < LEAST_SHARE:
            return
        trace, own = image.trace(workload), image.own_trace(workload)
        assert trace is not None
        with open_fetcher(cache) as fetcher:
            hot_set, _ = store.pack(image.hot_sets, image.parts, trace, fetcher, own=own)
        image.publish(hot_set)
