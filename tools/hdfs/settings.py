"""Hadoop's configuration files for a small cluster on one machine."""

from __future__ import annotations

import dataclasses
import random
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from xml.sax.saxutils import escape

NAME_SERVICE = "lab"
WEB_APPLICATIONS = ("hdfs", "datanode", "secondary", "journal")
LOGGING = """log4j.rootLogger=INFO,console
log4j.appender.console=org.apache.log4j.ConsoleAppender
log4j.appender.console.target=System.err
log4j.appender.console.layout=org.apache.log4j.PatternLayout
log4j.appender.console.layout.ConversionPattern=%d %p %c{1}: %m%n
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Ports:
    """Where one server listens. A NameNode has no `data` port. They are its own for as long as
    this object lives."""

    rpc: int
    http: int
    https: int
    data: int
    held: Held = dataclasses.field(repr=False, compare=False)


class Held:
    """Sockets that are closed when nobody has this object any more."""

    def __init__(self, sockets: Iterable[socket.socket]) -> None:
        self._sockets = list(sockets)

    def __del__(self) -> None:
        for each in self._sockets:
            each.close()


def free_ports(address: str) -> Ports:
    """Four ports that nobody has, below those the kernel gives to outgoing connections."""
    held: dict[int, socket.socket] = {}
    while len(held) < 4:
        port = random.randrange(12_000, 32_000)
        probe = socket.socket()
        try:
            probe.bind((address, port))
        except OSError:
            probe.close()
            continue
        # Nobody else had the port, and who looks for one now finds it taken; a server, which sets
        # this option as well, may listen there all the same.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held[port] = probe
    rpc, http, https, data = held
    return Ports(rpc, http, https, data, Held(held.values()))


def free_ports_here() -> Ports:
    return free_ports("127.0.0.1")


@dataclasses.dataclass(frozen=True, slots=True)
class NameNode:
    """One NameNode's address; `id` is its name within the name service."""

    id: str
    host: str
    ports: Ports


def common(namenodes: list[NameNode], folder: Path) -> dict[str, str]:
    """core-site.xml of servers and clients."""
    first = namenodes[0]
    if len(namenodes) > 1:
        name = f"hdfs://{NAME_SERVICE}"
    else:
        name = f"hdfs://{first.host}:{first.ports.rpc}"
    return {
        "fs.defaultFS": name,
        "hadoop.tmp.dir": str(folder / "tmp"),
        "hadoop.http.staticuser.user": "root",
        # A DataNode that starts before its NameNode tries again at once, not each second; of two
        # NameNodes, the other one is asked after a second.
        "ipc.client.connect.retry.interval": "100",
        "ipc.client.connect.max.retries": "10" if len(namenodes) > 1 else "100",
        "ipc.client.connect.max.retries.on.timeouts": "3",
        "ipc.client.connect.timeout": "2000",
    }


def name_addresses(namenodes: list[NameNode]) -> dict[str, str]:
    """The part of hdfs-site.xml that clients need too."""
    if len(namenodes) == 1:
        [only] = namenodes
        return {
            "dfs.namenode.rpc-address": f"{only.host}:{only.ports.rpc}",
            "dfs.namenode.http-address": f"{only.host}:{only.ports.http}",
            "dfs.namenode.https-address": f"{only.host}:{only.ports.https}",
        }
    out = {
        "dfs.nameservices": NAME_SERVICE,
        f"dfs.ha.namenodes.{NAME_SERVICE}": ",".join(n.id for n in namenodes),
        f"dfs.client.failover.proxy.provider.{NAME_SERVICE}": "org.apache.hadoop.hdfs.server"
        ".namenode.ha.ConfiguredFailoverProxyProvider",
        # Hadoop's clients, which a DataNode is too when it serves HTTP, look for the active one
        # often: their pauses would grow to 15 s.
        "dfs.client.failover.sleep.base.millis": "100",
        "dfs.client.failover.sleep.max.millis": "1000",
        "dfs.client.failover.max.attempts": "150",
    }
    for node in namenodes:
        end = f"{NAME_SERVICE}.{node.id}"
        out[f"dfs.namenode.rpc-address.{end}"] = f"{node.host}:{node.ports.rpc}"
        out[f"dfs.namenode.http-address.{end}"] = f"{node.host}:{node.ports.http}"
        out[f"dfs.namenode.https-address.{end}"] = f"{node.host}:{node.ports.https}"
    return out


def site(*, replication: int, block_bytes: int, permissions: bool) -> dict[str, str]:
    """hdfs-site.xml's settings that every server shares."""
    return {
        "dfs.webhdfs.enabled": "true",
        "dfs.replication": str(replication),
        "dfs.blocksize": str(block_bytes),
        "dfs.namenode.fs-limits.min-block-size": "4096",
        "dfs.namenode.safemode.extension": "0",
        "dfs.permissions.enabled": "true" if permissions else "false",
        # root is whoever starts the servers; others must pass the permission checks.
        "dfs.namenode.acls.enabled": "true",
        "dfs.client.block.write.replace-datanode-on-failure.policy": "NEVER",
        "dfs.namenode.datanode.registration.ip-hostname-check": "false",
        "dfs.heartbeat.interval": "1",
        # A killed DataNode is dead to the NameNode after 2 x this + 10 heartbeats.
        "dfs.namenode.heartbeat.recheck-interval": "5000",
        "dfs.blockreport.initialDelay": "0",
        "dfs.namenode.handler.count": "10",
        "dfs.datanode.handler.count": "4",
        "dfs.datanode.max.transfer.threads": "1024",
        "dfs.namenode.num.checkpoints.retained": "1",
        "dfs.datanode.du.reserved": "0",
        # These would need sockets and libraries of Hadoop's own.
        "dfs.client.read.shortcircuit": "false",
        "dfs.image.transfer.timeout": "5000",
    }


def write(folder: Path, core: Mapping[str, str], hdfs: Mapping[str, str]) -> None:
    """Make a configuration folder that a server or a client can use."""
    folder.mkdir(parents=True, exist_ok=True)
    for application in WEB_APPLICATIONS:
        (folder / "webapps" / application / "WEB-INF").mkdir(parents=True, exist_ok=True)
    (folder / "log4j.properties").write_text(LOGGING, encoding="ascii")
    write_xml(folder / "core-site.xml", core)
    write_xml(folder / "hdfs-site.xml", hdfs)


def write_xml(path: Path, properties: Mapping[str, str]) -> None:
    lines = [
        f"<property><name>{escape(k)}</name><value>{escape(v)}</value></property>"
        for k, v in properties.items()
    ]
    body = "\n".join(["<configuration>", *lines, "</configuration>", ""])
    path.write_text(body, encoding="utf-8")
