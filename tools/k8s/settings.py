"""The configuration files of one cluster, and the words its programs are started with."""

from __future__ import annotations

import json
import sys
from pathlib import Path

NODE_IP, SERVICE_IP = "10.88.0.1", "10.89.0.1"
PODS, SERVICES = "10.88.0.0/16", "10.89.0.0/24"
REGISTRY = "127.0.0.1:5055"
API = "https://127.0.0.1:6443"
USERS = {  # file -> (user, groups)
    "admin": ("admin", "system:masters"),
    "controllers": ("system:kube-controller-manager", ""),
    "scheduler": ("system:kube-scheduler", ""),
    "kubelet": ("system:node:lab-node", "system:nodes"),
}


def write_all(run: Path, state: Path, cgroup: str, *, lazy: bool = False) -> None:
    """Write containerd's, kubelet's, the network's and the registry's files below `run`.

    With `lazy`, the node runs our snapshotter and kubelet's images are its own.
    """
    (run / "containerd.toml").write_text(_containerd(run, state, lazy=lazy), encoding="utf-8")
    if lazy:
        words = json.dumps(_snapshotter(run, state))
        (run / "snapshotter.json").write_text(words, encoding="utf-8")
    (run / "kubelet.yaml").write_text(json.dumps(_kubelet(run, state, cgroup)), encoding="utf-8")
    network = run / "cni/net.d"
    network.mkdir(parents=True)
    (network / "10-bridge.conflist").write_text(json.dumps(_network(run)), encoding="utf-8")
    (run / "resolv.conf").write_text("nameserver 127.0.0.1\n", encoding="utf-8")
    hosts = run / f"hosts/{REGISTRY}"
    hosts.mkdir(parents=True)
    (hosts / "hosts.toml").write_text(
        f'server = "http://{REGISTRY}"\n[host."http://{REGISTRY}"]\n'
        '  capabilities = ["pull", "resolve"]\n',
        encoding="utf-8",
    )
    registry = {
        "version": "0.1",
        "log": {"level": "warn"},
        "storage": {"filesystem": {"rootdirectory": f"{state}/registry"}},
        "http": {"addr": REGISTRY},
    }
    (run / "registry.yml").write_text(json.dumps(registry), encoding="utf-8")


_LAZY = """
    snapshotter = "bootseer"
    disable_snapshot_annotations = false"""
_PLUGIN = "io.containerd.snapshotter.v1.bootseer"
_PROXY = """\
[proxy_plugins.bootseer]
  type = "snapshot"
  address = "{run}/snapshotter.sock"
"""


def _snapshotter(run: Path, state: Path) -> list[str]:
    places = ["--root", f"{state}/containerd/{_PLUGIN}", "--address", f"{run}/snapshotter.sock"]
    kept = ["--cache", f"{state}/images", "--runtime", f"{run}/bootseer"]
    return [sys.executable, "-m", "bootseer", "snapshotter", *places, *kept]


def _containerd(run: Path, state: Path, *, lazy: bool) -> str:
    # Nobody here may lower a process's oom_score_adj, which runc would otherwise try.
    return f"""version = 2
root = "{state}/containerd"
state = "{run}/containerd"
disabled_plugins = [
  "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs",
  "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.internal.v1.opt",
]
[grpc]
  address = "{run}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{REGISTRY}/lab/pause:1"
  stream_server_address = "127.0.0.1"
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{run}/cni/net.d"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    default_runtime_name = "runc"{_LAZY if lazy else ""}
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".registry]
    config_path = "{run}/hosts"
{_PROXY.format(run=run) if lazy else ""}"""


def _kubelet(run: Path, state: Path, cgroup: str) -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": NODE_IP,
        "readOnlyPort": 0,
        "healthzBindAddress": "127.0.0.1",
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cgroup}",
        "enforceNodeAllocatable": ["pods"],
        "failSwapOn": False,
        "resolvConf": f"{run}/resolv.conf",
        "nodeStatusUpdateFrequency": "1s",
        "nodeStatusReportFrequency": "1m",
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1Gi"},
        "volumePluginDir": f"{state}/plugins",
        # The defaults let a pod's status lag by seconds when several start at once.
        "kubeAPIQPS": 200,
        "kubeAPIBurst": 400,
        "eventRecordQPS": 0,
        "registryPullQPS": 0,
    }


def _network(run: Path) -> dict[str, object]:
    addresses = [{"subnet": PODS, "rangeStart": "10.88.1.2", "gateway": NODE_IP}]
    ipam = {
        "type": "host-local",
        "dataDir": f"{run}/cni/ipam",
        "ranges": [addresses],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "ipMasq": False, "ipam": ipam}
    return {"cniVersion": "0.4.0", "name": "lab", "plugins": [bridge]}


def kubeconfig(run: Path, user: str, token: str) -> str:
    """A client's configuration, as JSON."""
    cluster = {"server": API, "certificate-authority": f"{run}/pki/ca.crt"}
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "lab", "cluster": cluster}],
            "users": [{"name": user, "user": {"token": token}}],
            "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": user}}],
            "current-context": "lab",
        }
    )


def etcd(state: Path) -> list[str]:
    client, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
    return [
        *("etcd", "--data-dir", f"{state}/etcd", "--name", "lab", "--unsafe-no-fsync=true"),
        *("--listen-client-urls", client, "--advertise-client-urls", client),
        *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
        *("--initial-cluster", f"lab={peer}", "--logger", "zap", "--log-level", "warn"),
    ]


def apiserver(programs: Path, run: Path, *, api_only: bool) -> list[str]:
    pki = run / "pki"
    # Without controllers nobody makes service accounts' tokens.
    admission = "--disable-admission-plugins=ServiceAccount"
    return [
        f"{programs}/kube-apiserver",
        "--etcd-servers=http://127.0.0.1:2379",
        "--secure-port=6443",
        "--bind-address=0.0.0.0",
        f"--advertise-address={NODE_IP}",
        f"--service-cluster-ip-range={SERVICES}",
        f"--tls-cert-file={pki}/apiserver.crt",
        f"--tls-private-key-file={pki}/apiserver.key",
        f"--client-ca-file={pki}/ca.crt",
        f"--service-account-key-file={pki}/sa.pub",
        f"--service-account-signing-key-file={pki}/sa.key",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        "--authorization-mode=Node,RBAC",
        admission if api_only else "--enable-admission-plugins=NodeRestriction",
        f"--token-auth-file={run}/tokens.csv",
        "--allow-privileged=true",
        "--event-ttl=24h",
        "--kubelet-preferred-address-types=InternalIP",
        "--v=1",
    ]


def controllers(programs: Path, run: Path) -> list[str]:
    config = f"{run}/controllers.kubeconfig"
    return [
        f"{programs}/kube-controller-manager",
        *(f"--kubeconfig={config}", f"--authentication-kubeconfig={config}"),
        f"--authorization-kubeconfig={config}",
        f"--service-account-private-key-file={run}/pki/sa.key",
        f"--root-ca-file={run}/pki/ca.crt",
        f"--cluster-signing-cert-file={run}/pki/ca.crt",
        f"--cluster-signing-key-file={run}/pki/ca.key",
        "--use-service-account-credentials=true",
        *("--leader-elect=false", "--kube-api-qps=200", "--kube-api-burst=400"),
        *("--bind-address=127.0.0.1", "--port=0", "--v=1"),
    ]


def scheduler(programs: Path, run: Path) -> list[str]:
    config = f"{run}/scheduler.kubeconfig"
    return [
        f"{programs}/kube-scheduler",
        *(f"--kubeconfig={config}", f"--authentication-kubeconfig={config}"),
        f"--authorization-kubeconfig={config}",
        *("--leader-elect=false", "--kube-api-qps=200", "--kube-api-burst=400"),
        *("--bind-address=127.0.0.1", "--port=0", "--v=1"),
    ]


def kubelet(programs: Path, run: Path, state: Path) -> list[str]:
    return [
        f"{programs}/kubelet",
        *(f"--config={run}/kubelet.yaml", f"--kubeconfig={run}/kubelet.kubeconfig"),
        *(f"--root-dir={state}/kubelet", f"--cert-dir={state}/kubelet-pki"),
        *("--hostname-override=lab-node", f"--node-ip={NODE_IP}", "--container-runtime=remote"),
        f"--container-runtime-endpoint=unix://{run}/containerd.sock",
        f"--image-service-endpoint=unix://{run}/containerd.sock",
        "--v=2",
    ]
