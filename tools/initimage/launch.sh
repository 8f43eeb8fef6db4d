#!/opt/bootseer/bin/busybox sh
# The wrapper's door until the wrapper is here as a whole: the job the plain way. (With the
# interpreter, but without the room for another door: through it.)
home=/opt/bootseer
if [ -e "$home/complete" ]; then
    exec "$home/python/bin/python3" -I "$home/python/start.py" "$@"
fi
why='the wrapper was not copied whole into this pod'
if [ -r "$home/why" ]; then why=$("$home/bin/busybox" cat "$home/why"); fi
echo "bootseer: warning: $why; starting the plain way" >&2
while [ $# -gt 0 ] && [ "$1" != -- ]; do shift; done
[ $# -gt 1 ] || { echo 'bootseer: no job given; write it after --' >&2; exit 2; }
shift
exec "$@"
