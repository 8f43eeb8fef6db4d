#!/payload/bin/busybox sh
# Puts bootseer onto the node whose root is mounted at $1, and has the node's systemd run the units
# that are named behind it. Where they serve images, kubelet cannot start them: it needs them itself
# to start pods. Does nothing where all is there already.
here=${0%/*}
bb=$here/bin/busybox
host=$1
[ $# -gt 1 ] || set -- "$1" bootseer-snapshotter.service
shift
home=$host/opt/bootseer
units=$host/etc/systemd/system
[ -n "$host" ] && [ -d "$host/etc" ] || { echo 'usage: install-node ROOT [UNIT...]' >&2; exit 2; }
for unit; do
    [ -f "$here/$unit" ] || { echo "there is no unit $unit in this image" >&2; exit 2; }
done
on_host() { $bb nsenter -t "${HOST_PID:-1}" -m -- "$@"; }
if ! [ -d "$host/run/systemd/system" ]; then
    echo "this node was not booted with systemd: have its own init run the command of $1" >&2
    exit 7
fi
again=
if ! $bb cmp -s "$here/complete" "$home/complete"; then
    $bb rm -rf "$home.new" # what an interrupted run copied may be of another version
    $bb mkdir -p "$home.new" && $bb cp -a "$here/." "$home.new/" || {
        echo "cannot write to $home.new on the node; free space there" >&2
        exit 8
    }
    $bb rm -rf "$home.old"
    if [ -e "$home" ]; then $bb mv "$home" "$home.old"; fi
    $bb mv "$home.new" "$home" && $bb rm -rf "$home.old"
    # Others that run the older version's program go over to the new one as well.
    for path in "$units"/bootseer-*.service; do
        unit=${path##*/}
        if [ -f "$path" ] && [ -f "$here/$unit" ]; then again="$again $unit"; fi
    done
fi
$bb mkdir -p "$units"
for unit; do
    case " $again " in
    *" $unit "*) ;;
    *) if ! $bb cmp -s "$here/$unit" "$units/$unit"; then again="$again $unit"; fi ;;
    esac
done
if [ -n "$again" ]; then
    for unit in $again; do $bb cp "$here/$unit" "$units/$unit" || exit 8; done
    on_host systemctl daemon-reload || exit 1
    for unit in $again; do on_host systemctl restart "$unit" || exit 1; done
    echo "installed on the node"
fi
for unit; do on_host systemctl enable --now "$unit" || exit 1; done
