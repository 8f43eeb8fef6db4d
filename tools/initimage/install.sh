#!/payload/bin/busybox sh
# Copies the payload to the volume given. The door comes first and is enough for a plain start;
# a fault after it is told to the door and does not fail the container, which would keep the
# job from starting.
PATH=/payload/bin
bb=/payload/bin/busybox
[ "$1" = install ] && [ -n "$2" ] || { echo 'usage: install DIRECTORY' >&2; exit 2; }
home=$2
if [ -e "$home/complete" ] && $bb cmp -s /payload/complete "$home/complete"; then exit 0; fi
$bb rm -f "$home/complete" "$home/why"
if ! { $bb mkdir -p "$home/bin" && $bb cp -a /payload/bin/. "$home/bin/"; }; then
    echo "bootseer-init: cannot write to $home; give the volume space and write access" >&2
    exit 8
fi
if $bb cp -a /payload/python "$home/" && $bb cp -a /payload/complete "$home/complete"; then
    # Now the interpreter itself can be the door: a shell would drop variables that it has no
    # name for (`my.key`) and add its own, and takes a millisecond of each start.
    $bb cp -a /payload/python/start.py "$home/bin/.bootseer" &&
        $bb mv -f "$home/bin/.bootseer" "$home/bin/bootseer"
    exit 0
fi
echo 'bootseer-init: cannot copy everything; the job will start the plain way' >&2
$bb rm -rf "$home/python" "$home/complete"
echo "the volume at $home had no room for the wrapper" > "$home/why"
exit 0
