"""A Kerberos realm of a cluster's own: MIT's KDC on a free port, principals and keytabs."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tools.hdfs import settings

REALM = "LAB.TEST"
SUPERUSER = "hdfs/localhost"
"""Both kinds of server: the NameNode believes only its own kind of name."""
SERVICES = (SUPERUSER, "HTTP/localhost")
# Java's own Kerberos classes are closed to Hadoop's reflection since Java 16.
JAVA_OPTIONS = (
    "--add-exports=java.security.jgss/sun.security.krb5=ALL-UNNAMED",
    "--add-exports=java.security.jgss/sun.security.jgss=ALL-UNNAMED",
    "--add-opens=java.security.jgss/sun.security.krb5=ALL-UNNAMED",
)
READY_S = 20.0


class Realm:
    """A running KDC; `start` and `stop` bracket it. Keytabs hold a principal's key, see `keytab`.

    The kernel kills the KDC when the thread that started it ends.
    """

    def __init__(self, folder: Path, users: Sequence[str] = ("alice", "bob")) -> None:
        self.folder = folder
        self.conf = folder / "krb5.conf"
        self._users = tuple(users)
        self._process: subprocess.Popen[bytes] | None = None
        self._ports: settings.Ports | None = None

    def start(self) -> None:
        self.folder.mkdir(parents=True)
        self._ports = settings.free_ports("127.0.0.1")
        self._write(self._ports.rpc)
        self._run("kdb5_util", "create", "-s", "-P", "laboratory", "-r", REALM)
        for principal in (*SERVICES, *self._users):
            self._run("kadmin.local", "-q", f"addprinc -randkey {principal}")
            self._run("kadmin.local", "-q", f"ktadd -k {self.keytab(principal)} {principal}")
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "krb5kdc", "-n"],
                env=self.environ(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._wait()

    def stop(self) -> None:
        """Kill the KDC; twice is safe."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def environ(self, principal: str = "") -> dict[str, str]:
        """The environment in which Kerberos programs use this realm, as `principal` if given."""
        out = {
            **os.environ,
            "KRB5_CONFIG": str(self.conf),
            "KRB5_KDC_PROFILE": str(self.folder / "kdc.conf"),
            "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin",
        }
        if principal:
            out["KRB5CCNAME"] = f"FILE:{self.tickets(principal)}"
        return out

    def keytab(self, principal: str) -> Path:
        return self.folder / f"{principal.replace('/', '_')}.keytab"

    def tickets(self, principal: str) -> Path:
        return self.folder / f"{principal.replace('/', '_')}.tickets"

    def login(self, principal: str) -> Path:
        """Get tickets for a principal; returns the credential cache's file (for KRB5CCNAME)."""
        keytab = str(self.keytab(principal))
        self._run("kinit", "-k", "-t", keytab, principal, environ=self.environ(principal))
        return self.tickets(principal)

    def core_site(self) -> dict[str, str]:
        return {
            "hadoop.security.authentication": "kerberos",
            "hadoop.security.authorization": "true",
            # Users of the realm are none of this machine.
            "hadoop.user.group.static.mapping.overrides": "dr.who=;hdfs=supergroup;"
            + ";".join(f"{user}=users" for user in self._users),
        }

    def hdfs_site(self) -> dict[str, str]:
        out = {
            "dfs.block.access.token.enable": "true",
            # The usual alternatives are ports below 1024 or SASL with HTTPS alone.
            "ignore.secure.ports.for.testing": "true",
            "dfs.web.authentication.kerberos.principal": f"HTTP/localhost@{REALM}",
            "dfs.web.authentication.kerberos.keytab": str(self.keytab("HTTP/localhost")),
        }
        for role in ("namenode", "datanode"):
            out[f"dfs.{role}.kerberos.principal"] = f"{SUPERUSER}@{REALM}"
            out[f"dfs.{role}.keytab.file"] = str(self.keytab(SUPERUSER))
        out["dfs.namenode.kerberos.internal.spnego.principal"] = f"HTTP/localhost@{REALM}"
        return out

    def java_options(self) -> tuple[str, ...]:
        return (*JAVA_OPTIONS, f"-Djava.security.krb5.conf={self.conf}")

    def _write(self, port: int) -> None:
        types = "aes256-cts-hmac-sha1-96 aes128-cts-hmac-sha1-96"
        self.conf.write_text(
            f"[libdefaults]\n default_realm = {REALM}\n dns_lookup_kdc = false\n"
            f" dns_lookup_realm = false\n rdns = false\n udp_preference_limit = 1\n"
            f" default_tkt_enctypes = {types}\n default_tgs_enctypes = {types}\n"
            f" permitted_enctypes = {types}\n forwardable = true\n"
            f"[realms]\n {REALM} = {{\n  kdc = 127.0.0.1:{port}\n }}\n"
            f"[domain_realm]\n localhost = {REALM}\n",
            encoding="ascii",
        )
        (self.folder / "kdc.conf").write_text(
            f"[kdcdefaults]\n kdc_ports = {port}\n kdc_tcp_ports = {port}\n"
            f"[realms]\n {REALM} = {{\n  database_name = {self.folder}/principal\n"
            f"  key_stash_file = {self.folder}/stash\n  acl_file = {self.folder}/acl\n"
            f"  supported_enctypes = aes256-cts-hmac-sha1-96:normal\n }}\n"
            f"[logging]\n kdc = FILE:{self.folder}/kdc.log\n",
            encoding="ascii",
        )

    def _wait(self) -> None:
        """A KDC that has just begun may not listen yet: getting a ticket tells."""
        end = time.monotonic() + READY_S
        while True:
            try:
                self.login(SERVICES[0])
                return
            except RuntimeError:
                if time.monotonic() > end:
                    raise
            time.sleep(0.05)

    def _run(self, *command: str, environ: dict[str, str] | None = None) -> None:
        done = subprocess.run(
            command,
            env=environ or self.environ(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout.decode()[-2000:]}")
