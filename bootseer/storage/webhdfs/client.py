"""What all requests to one folder of HDFS share: paths, NameNodes, connections to DataNodes."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from bootseer.errors import NotSupportedError
from bootseer.storage.http.pool import Pool
from bootseer.storage.options import StoreOptions
from bootseer.storage.request_control import Attempt
from bootseer.storage.store import check_name
from bootseer.storage.urls import StoreUrl
from bootseer.storage.webhdfs.namenodes import NameNodes
from bootseer.storage.webhdfs.protocol import Datanode


class Client:
    """The folder that a store's URL names, on one cluster; any number of threads may use it.

    `namenodes` are its NameNodes, `pool` the connections to its DataNodes.
    """

    def __init__(self, at: StoreUrl, options: StoreOptions) -> None:
        self.url = at.shown
        self.options = options
        self.namenodes = NameNodes(at, options)
        self.pool = Pool(connect_s=options.connect_s, ca_file=options.ca_file)
        self.root = "/" + at.path.strip("/")
        self._lock = threading.Lock()
        self._data_addresses: dict[str, str] = {}

    def close(self) -> None:
        """Close idle connections; using the client again opens new ones."""
        self.pool.close()
        self.namenodes.close()

    def path(self, name: str) -> str:
        """The absolute path of a name; UsageError for a name that cannot be used."""
        return f"{self.root.rstrip('/')}/{check_name(name)}"

    def data_path(self, name: str) -> str:
        """The path of an object that is read from or written to DataNodes.

        Those of Hadoop 2 decode a path twice, so "a%41" would silently be the object "aA"; and
        a "+" makes them lose letters beyond ASCII.
        """
        path = self.path(name)
        if "%" in path or ("+" in path and not path.isascii()):
            raise NotSupportedError(
                f"{name} in {self.url} has a % (or a + beside letters beyond ASCII) in its path,"
                " which DataNodes misread over WebHDFS; use hdfs:// or another name"
            )
        return path

    def attempt(self) -> Attempt:
        """An attempt of our own, which no other thread cancels."""
        return Attempt(stall_s=self.options.stall_s)

    def learn_addresses(self, datanodes: Iterable[Datanode]) -> None:
        """Remember where DataNodes serve blocks, for `data_address`."""
        with self._lock:
            self._data_addresses.update(datanodes)

    def data_address(self, web: str) -> str:
        """Where a DataNode serves blocks, as `excludedatanodes` names it."""
        return self._data_addresses.get(web, web)
