"""A real registry for tests. Ask for these fixtures by name; every test module has them.

`registry`      One registry (`tools.registry.Registry`) of this test process, shared by all its
                tests: use repository names of your own, never harm it.
                `registry.push(f"oci:{layout}:TAG", "my/app", "1")` -> "127.0.0.1:PORT/my/app:1".
`own_registry`  A function that starts a registry of the test's own to break, with the options of
                `Registry` (`users={"bob": "secret"}`, `tls=True`): `.stop()`, `.restart()`,
                `.pause()`, `.resume()`, `.blob_path(digest)`, `.requests()`, `.auth_json()`.

Images to push are made by `samples.images`. A registry that cannot start fails the test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from tools.registry import Registry

    with Registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture
def own_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    from tools.registry import Registry

    started: list[Registry] = []

    def start(**options: Any) -> Registry:
        made = Registry(tmp_path_factory.mktemp("registry"), **options)
        started.append(made)
        return made.start()

    yield start
    for made in started:
        made.stop()
