"""A certificate authority of a cluster's own, and what makes Hadoop serve HTTPS with it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tools.hdfs import settings

PASSWORD = "laboratory"  # guards nothing: the keys live as long as the test
SUBJECT_NAMES = "subjectAltName=IP:127.0.0.1,DNS:localhost"


def make(folder: Path) -> Path:
    """Make an authority and a server's key that it signed; returns the authority's PEM file."""
    folder.mkdir(parents=True)
    new_key = ("-newkey", "rsa:2048", "-nodes", "-days", "30")
    _openssl(
        folder,
        *("req", "-x509", *new_key, "-subj", "/CN=lab authority"),
        *("-keyout", "ca.key", "-out", "ca.pem"),
        # Python 3.13 believes no authority without it.
        *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
    )
    _openssl(
        folder,
        *("req", *new_key[:3], "-subj", "/CN=localhost", "-keyout", "key", "-out", "request"),
    )
    extensions = f"{SUBJECT_NAMES}\nauthorityKeyIdentifier=keyid\n"
    (folder / "names").write_text(extensions, encoding="ascii")
    _openssl(
        folder,
        *("x509", "-req", "-in", "request", "-CA", "ca.pem", "-CAkey", "ca.key", "-days", "30"),
        *("-CAcreateserial", "-extfile", "names", "-out", "server.pem"),
    )
    _openssl(
        folder,
        *("pkcs12", "-export", "-inkey", "key", "-in", "server.pem", "-certfile", "ca.pem"),
        *("-name", "server", "-passout", f"pass:{PASSWORD}", "-out", "keys.p12"),
    )
    _run(
        folder,
        *("keytool", "-importcert", "-noprompt", "-alias", "ca", "-file", "ca.pem"),
        *("-keystore", "trust.p12", "-storetype", "PKCS12", "-storepass", PASSWORD),
    )
    return folder / "ca.pem"


def hdfs_site() -> dict[str, str]:
    """Serve both, so that readiness can be asked for without a certificate."""
    return {
        "dfs.http.policy": "HTTP_AND_HTTPS",
        "hadoop.ssl.enabled.protocols": "TLSv1.2",
        "dfs.client.https.need-auth": "false",
    }


def write_server(folder: Path, keys: Path) -> None:
    """Put ssl-server.xml (and its client twin) into a server's configuration folder."""
    for side in ("server", "client"):
        properties = {
            f"ssl.{side}.keystore.location": f"{keys}/keys.p12",
            f"ssl.{side}.keystore.type": "PKCS12",
            f"ssl.{side}.keystore.password": PASSWORD,
            f"ssl.{side}.keystore.keypassword": PASSWORD,
            f"ssl.{side}.truststore.location": f"{keys}/trust.p12",
            f"ssl.{side}.truststore.type": "PKCS12",
            f"ssl.{side}.truststore.password": PASSWORD,
        }
        settings.write_xml(folder / f"ssl-{side}.xml", properties)


def _openssl(folder: Path, *arguments: str) -> None:
    _run(folder, "openssl", *arguments)


def _run(folder: Path, *command: str) -> None:
    done = subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout.decode()[-2000:]}")
