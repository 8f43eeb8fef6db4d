#!/payload/bin/busybox sh
# Puts the snapshotter onto the node whose root is mounted at $1, and has systemd keep it running:
# kubelet cannot start what it needs itself to start pods. Does nothing where it is there already.
here=${0%/*}
bb=$here/bin/busybox
host=$1
home=$host/opt/bootseer
unit=bootseer-snapshotter.service
[ -n "$host" ] && [ -d "$host/etc" ] || { echo 'usage: install-node ROOT' >&2; exit 2; }
on_host() { $bb nsenter -t "${HOST_PID:-1}" -m -- "$@"; }
if ! [ -d "$host/run/systemd/system" ]; then
    echo "this node was not booted with systemd: have its own init run $unit's command" >&2
    exit 7
fi
if ! $bb cmp -s "$here/complete" "$home/complete"; then
    $bb rm -rf "$home.new" # what an interrupted run copied may be of another version
    $bb mkdir -p "$home.new" && $bb cp -a "$here/." "$home.new/" || {
        echo "cannot write to $home.new on the node; free space there" >&2
        exit 8
    }
    $bb rm -rf "$home.old"
    if [ -e "$home" ]; then $bb mv "$home" "$home.old"; fi
    $bb mv "$home.new" "$home" && $bb rm -rf "$home.old"
    $bb mkdir -p "$host/etc/systemd/system"
    $bb cp "$here/$unit" "$host/etc/systemd/system/$unit"
    on_host systemctl daemon-reload || exit 1
    on_host systemctl restart "$unit" || exit 1
    echo "installed on the node"
fi
on_host systemctl enable --now "$unit" || exit 1
