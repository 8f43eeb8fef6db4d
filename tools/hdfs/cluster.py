"""A NameNode (or two) and DataNodes on this machine, up in seconds and down for certain."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tools.hdfs import class_archive, settings, tls
from tools.hdfs.jars import classpath
from tools.hdfs.kerberos import SUPERUSER, Realm
from tools.hdfs.process import COMMON, FULL_SPEED, HEAP, QUICK_START, Server, wait_until
from tools.servers import Running

NAMENODE = "org.apache.hadoop.hdfs.server.namenode.NameNode"
DATANODE = "org.apache.hadoop.hdfs.server.datanode.DataNode"
ADMIN = "org.apache.hadoop.hdfs.tools.DFSAdmin"
SHELL = "org.apache.hadoop.fs.FsShell"
HA_ADMIN = "org.apache.hadoop.hdfs.tools.DFSHAAdmin"
READY_S = 90.0


class Cluster(Running):
    """A running HDFS below `directory`, which must not be in use; a context manager.

    `hosts` names for each DataNode the address it listens on and the command prefix that enters
    its network namespace; without it all servers are on 127.0.0.1, on ports of their own. `ha`
    makes two NameNodes, the first active; `tls` serves HTTPS too (`https_addresses`, `ca_file`);
    `kerberos` makes a realm (`realm.login("alice")`) and names the servers localhost, and root is
    nobody there: make folders with `shell`. `full_speed` lets Java compile for throughput, not
    for a quick start. `record_classes` names a folder where each Java process lists the classes
    that it loads (`class_archive`). Leaving the block kills every server; so does the end of this
    process, or of the thread that started them, by whatever cause.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        datanodes: int = 3,
        replication: int = 1,
        block_bytes: int = 128 << 20,
        permissions: bool = True,
        full_speed: bool = False,
        ha: bool = False,
        tls: bool = False,
        kerberos: bool = False,
        host: str = "",
        hosts: Sequence[tuple[str, Sequence[str]]] = (),
        extra: dict[str, str] | None = None,
        record_classes: Path | None = None,
    ) -> None:
        self.directory = Path(directory).absolute()
        self.replication = replication
        self._java = (*HEAP, *(FULL_SPEED if full_speed else QUICK_START))
        # Kerberos names services by host.
        host = host or ("localhost" if kerberos else "127.0.0.1")
        self._hosts = list(hosts) or [(host, ())] * datanodes
        self.realm = Realm(self.directory / "kerberos") if kerberos else None
        self._tls = tls
        self._site = settings.site(
            replication=replication, block_bytes=block_bytes, permissions=permissions
        ) | (extra or {})
        self._ha = ha
        names = ("nn1", "nn2") if ha else ("nn1",)
        self.namenode_nodes = [
            settings.NameNode(name, host, settings.free_ports(host)) for name in names
        ]
        self.datanode_ports: list[settings.Ports] = []
        self.namenodes: list[Server] = []
        self.datanodes: list[Server] = []
        self._record_classes = record_classes
        self._classpath = ""
        self._classes: tuple[str, ...] = ()

    # What clients need.

    @property
    def hdfs_url(self) -> str:
        """`hdfs://host:port`, or the name service of an HA cluster."""
        return settings.common(self.namenode_nodes, self.directory)["fs.defaultFS"]

    @property
    def webhdfs_url(self) -> str:
        """`webhdfs://host:port` of the first NameNode."""
        return f"webhdfs://{self.http_addresses[0]}"

    @property
    def http_addresses(self) -> list[str]:
        """`host:port` of each NameNode's WebHDFS."""
        return [f"{n.host}:{n.ports.http}" for n in self.namenode_nodes]

    @property
    def rpc_addresses(self) -> list[str]:
        """`host:port` of each NameNode's RPC."""
        return [f"{n.host}:{n.ports.rpc}" for n in self.namenode_nodes]

    @property
    def datanode_http_addresses(self) -> list[str]:
        """`host:port` of each DataNode's WebHDFS."""
        pairs = zip(self._hosts, self.datanode_ports, strict=True)
        return [f"{host}:{ports.http}" for (host, _), ports in pairs]

    @property
    def conf(self) -> Path:
        """A HADOOP_CONF_DIR for clients."""
        return self.directory / "client"

    @property
    def https_addresses(self) -> list[str]:
        """`host:port` of each NameNode's WebHDFS over TLS."""
        return [f"{n.host}:{n.ports.https}" for n in self.namenode_nodes]

    @property
    def ca_file(self) -> Path:
        """The authority that signed the servers' certificates, where there is TLS."""
        return self.directory / "tls/ca.pem"

    # Life.

    def start(self) -> Self:
        """Start everything and return when all DataNodes serve. Raises RuntimeError."""
        self.directory.mkdir(parents=True, exist_ok=True)
        try:
            self._prepare()
            # DataNodes try until the NameNode is there, so their start overlaps with its own.
            for node in self.datanodes:
                node.start()
            self._format()
            for node in self.namenodes:
                node.start()
            if self._ha:
                self._wait_for_http()
                self._make_active(0)  # both have begun as standby
            self.wait_ready()
        except BaseException:  # no servers stay behind
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Kill every server; twice is safe. The files stay."""
        for server in (*self.datanodes, *self.namenodes):
            server.kill()
        if self.realm is not None:
            self.realm.stop()

    # Faults.

    def kill_datanode(self, number: int) -> None:
        self.datanodes[number].kill()

    def pause_datanode(self, number: int) -> None:
        """Stop it as a hung machine stands still: its connections stay open."""
        self.datanodes[number].pause()

    def resume_datanode(self, number: int) -> None:
        self.datanodes[number].send(signal.SIGCONT)

    def start_datanode(self, number: int) -> None:
        """Start a killed one again, with its blocks, at its address."""
        self.datanodes[number].start()
        host, ports = self._hosts[number][0], self.datanode_ports[number]
        wait_until(
            "the DataNode has registered again",
            lambda: "BP-" in str(_jmx(host, ports.http, "DataNode", "DataNodeInfo")),
            READY_S,
            [self.datanodes[number]],
        )

    def restart_namenode(self, number: int = 0) -> None:
        """Kill a NameNode and start it again; returns when it is out of safe mode."""
        self.namenodes[number].kill()
        self.namenodes[number].start()
        self._wait_for([self.namenode_nodes[number]], READY_S)

    def restore(self) -> None:
        """Undo what the calls above did: all servers run, and writes are accepted."""
        for number in range(len(self.datanodes)):
            self.resume_datanode(number)
        # Without its DataNodes a NameNode that knows blocks stays in safe mode: all start first.
        for node in self.namenodes:
            if not node.running():
                node.start()
        for number, node in enumerate(self.datanodes):
            if not node.running():
                self.start_datanode(number)
        if not self._ha and self._safe(self.namenode_nodes[0]):
            self.safe_mode(False)
        self.wait_ready()

    def active(self) -> int:
        """The number of the NameNode that is active; -1 while none is."""
        for number, node in enumerate(self.namenode_nodes):
            state = _jmx(node.host, node.ports.http, "NameNode", "NameNodeStatus")
            if state.get("State") == "active":
                return number
        return -1

    def make_active(self, number: int) -> None:
        """Fail over to this NameNode; the other one becomes (or is) standby or dead."""
        other = 1 - number
        if self.namenodes[other].running():
            self.run(HA_ADMIN, "-transitionToStandby", self.namenode_nodes[other].id)
        self._make_active(number)

    def safe_mode(self, on: bool) -> None:
        self.run(ADMIN, "-safemode", "enter" if on else "leave")

    def admin(self, *arguments: str) -> str:
        """Run `hdfs dfsadmin` with these arguments; its output. RuntimeError when it fails."""
        return self.run(ADMIN, *arguments)

    def shell(self, *arguments: str) -> str:
        """Run `hdfs dfs` with these arguments as the superuser; its output."""
        return self.run(SHELL, *arguments)

    def run(self, main: str, *arguments: str) -> str:
        """Run one of Hadoop's command-line tools as the superuser."""
        command = ["java", *COMMON, *QUICK_START, *self._classes]
        environ = None
        if self.realm is not None:
            command += self.realm.java_options()
            self.realm.login(SUPERUSER)
            environ = self.realm.environ(SUPERUSER)
        command += ["-cp", f"{self._classpath}:{self.conf}", main]
        done = subprocess.run(
            [*command, *arguments],
            env=environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=READY_S,
        )
        if done.returncode:
            raise RuntimeError(f"{main} {' '.join(arguments)}: {done.stdout}{done.stderr[-2000:]}")
        return done.stdout

    def block_files(self, number: int) -> list[Path]:
        """The block files that one DataNode stores (each has a `.meta` of checksums beside it)."""
        found = (self.datanodes[number].folder / "data").rglob("blk_*")
        return sorted(p for p in found if p.suffix != ".meta")

    # State.

    def wait_ready(self, timeout_s: float = READY_S) -> None:
        """Return when every running DataNode has registered everywhere and writes are accepted."""
        self._wait_for(self.namenode_nodes, timeout_s)

    def _wait_for(self, nodes: Sequence[settings.NameNode], timeout_s: float) -> None:
        running = [s for s in (*self.namenodes, *self.datanodes) if s.running()]
        wanted = sum(s.running() for s in self.datanodes)
        wait_until(
            f"{wanted} DataNodes serve",
            lambda: all(self._live(n) >= wanted and not self._safe(n) for n in nodes),
            timeout_s,
            running,
        )

    def _live(self, node: settings.NameNode) -> int:
        """How many DataNodes a NameNode counts as alive; -1 while it does not answer."""
        count = _jmx(node.host, node.ports.http, "NameNode", "FSNamesystemState")
        return int(str(count.get("NumLiveDataNodes", -1)))

    def _safe(self, node: settings.NameNode) -> bool:
        """Whether a NameNode is in safe mode."""
        info = _jmx(node.host, node.ports.http, "NameNode", "NameNodeInfo")
        return info.get("Safemode") != ""

    def _wait_for_http(self) -> None:
        wait_until(
            "the NameNodes answer",
            lambda: all(self._live(n) >= 0 for n in self.namenode_nodes),
            READY_S,
            self.namenodes,
        )

    def _make_active(self, number: int) -> None:
        active = self.namenode_nodes[number].id
        self.run(HA_ADMIN, "-transitionToActive", "--forceactive", active)

    # Making.

    def _prepare(self) -> None:
        self._classpath = classpath()
        folder = self._record_classes
        self._classes = class_archive.recording(folder) if folder else class_archive.options()
        self._java = (*self._java, *self._classes)
        core = settings.common(self.namenode_nodes, self.directory)
        self._secure(core)
        names = settings.name_addresses(self.namenode_nodes)
        settings.write(self.conf, core, names | self._site)
        self.datanode_ports = [settings.free_ports_here() for _ in self._hosts]
        for node in self.namenode_nodes:
            folder = self.directory / node.id
            own = {"dfs.namenode.name.dir": f"file://{folder}/name"}
            if self._ha:
                own["dfs.ha.namenode.id"] = node.id
                own["dfs.namenode.shared.edits.dir"] = f"file://{self.directory}/edits"
                own["dfs.ha.fencing.methods"] = "shell(true)"
                own["dfs.ha.tail-edits.period"] = "1"
            settings.write(folder, core, names | self._site | own)
            self.namenodes.append(self._server(node.id, NAMENODE, folder))
        for number, (host, prefix) in enumerate(self._hosts):
            folder = self.directory / f"dn{number}"
            ports = self.datanode_ports[number]
            own = {
                "dfs.datanode.data.dir": f"file://{folder}/data",
                "dfs.datanode.address": f"{host}:{ports.data}",
                "dfs.datanode.http.address": f"{host}:{ports.http}",
                "dfs.datanode.https.address": f"{host}:{ports.https}",
                "dfs.datanode.ipc.address": f"{host}:{ports.rpc}",
                "dfs.datanode.hostname": host,
            }
            settings.write(folder, core, names | self._site | own)
            self.datanodes.append(self._server(f"dn{number}", DATANODE, folder, prefix))

    def _secure(self, core: dict[str, str]) -> None:
        if self.realm is not None:
            self.realm.start()
            core |= self.realm.core_site()
            self._site |= self.realm.hdfs_site()
            self._java = (*self._java, *self.realm.java_options())
        if self._tls:
            tls.make(self.directory / "tls")
            core["hadoop.ssl.enabled.protocols"] = "TLSv1.2"
            self._site |= tls.hdfs_site()

    def _server(self, name: str, main: str, folder: Path, prefix: Sequence[str] = ()) -> Server:
        if self._tls:
            tls.write_server(folder, self.directory / "tls")
        return Server(name, main, folder, self._classpath, options=self._java, prefix=prefix)

    def _format(self) -> None:
        first = self.namenodes[0]
        if (first.folder / "name/current").exists():
            return
        if self._ha:
            (self.directory / "edits").mkdir(exist_ok=True)
        formatter = Server(
            "format",
            NAMENODE,
            first.folder,
            self._classpath,
            options=self._java,
            arguments=("-format", "-force", "-nonInteractive"),
        )
        formatter.start()
        if formatter.wait(READY_S):
            raise RuntimeError(f"formatting failed; {formatter.tail()}")
        for other in self.namenodes[1:]:
            shutil.copytree(first.folder / "name", other.folder / "name")


def _jmx(host: str, port: int, service: str, bean: str) -> dict[str, object]:
    """One bean of a server's /jmx page; empty while it does not answer."""
    url = f"http://{host}:{port}/jmx?qry=Hadoop:service={service},name={bean}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=5) as answer:
            beans = json.load(answer)["beans"]
    except (OSError, ValueError, KeyError):
        return {}
    return dict(beans[0]) if beans else {}
