# Measure phases of a shell script: . "$(bootseer sh)", then
#   bootseer_phase NAME COMMAND...   run COMMAND (its exit code is returned) as a phase
#   bootseer_begin NAME              a phase begins; commands called later lie below it
#   bootseer_end NAME [EXIT CODE]    it ends; status error unless the code is 0
#   bootseer_point NAME [STATUS]     one moment; status is ok, error or fallback
#
# For bash, dash and busybox; needs no Python. Events go where BOOTSEER_EVENTS points (`bootseer
# run` and `start` set it); where it is unset or cannot be written, nothing happens. Nothing here
# prints, fails, or minds `set -eu`, `pipefail` and `set -x`. In bash an event forks nothing.
# Names of ours begin with _bootseer_; text outside printable ASCII is written as `?`.
# Limits: mono_nano is null (a shell has no such clock); bash alone tells a subshell's spans from
# its parent's; under `set -e` a failing *function* ends the script, and its phase has no end.

_bootseer_now() {
    if [ -n "${EPOCHREALTIME-}" ]; then # bash 5; the locale may write a comma
        _bootseer_time=${EPOCHREALTIME%[.,]*}${EPOCHREALTIME#*[.,]}000
        return 0
    fi
    _bootseer_time=$(date +%s%N) || _bootseer_time=
    case $_bootseer_time in
        '' | *[!0-9]* | ???????????) _bootseer_time=$(date +%s)000000000 || return 1 ;;
    esac
    case $_bootseer_time in
        ??????????) _bootseer_time=${_bootseer_time}000000000 ;; # a date without %N
    esac
}

# Sets _bootseer_text to $1 as the inside of a JSON string.
_bootseer_quote() {
    _bootseer_text=$1
    case $1 in
        *[!ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:/@=,+\ -]*)
            _bootseer_text=$(printf '%s' "$1" | LC_ALL=C tr -c ' -~' '?' |
                sed 's/[\\"]/\\&/g') || _bootseer_text='?'
            ;;
    esac
    if [ ${#_bootseer_text} -gt 512 ]; then
        _bootseer_text='too long'
    fi
}

# The parts of bash that a plain sh cannot even parse.
if [ -n "${BASH_VERSION-}" ]; then
    eval '
    _bootseer_quote() {
        _bootseer_text=${1:0:256}
        case $_bootseer_text in
            *[!ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:/@=,+\ -]*) : ;;
            *) return 0 ;;
        esac
        local LC_ALL=C # slow, but only then is a range of characters one of bytes
        _bootseer_text=${_bootseer_text//[^ -~]/?}
        _bootseer_text=${_bootseer_text//\\/\\\\}
        _bootseer_text=${_bootseer_text//\"/\\\"}
    }
    _bootseer_is_function() { declare -F -- "$1" > /dev/null; }
    _bootseer_number() { printf -v _bootseer_hex "%06x" "$1"; }
    _bootseer_random() {
        printf -v _bootseer_hex "%04x%04x%04x%04x" \
            "$((SRANDOM & 65535))" "$((SRANDOM >> 16 & 65535))" "$((RANDOM * 2 + RANDOM % 2))" \
            "$((RANDOM * 2 + RANDOM % 2))"
    }
    if [ -z "${SRANDOM-}" ]; then # before bash 5.1
        unset -f _bootseer_random
    fi
    '
else
    _bootseer_is_function() {
        case $(command -V "$1" 2> /dev/null) in *function*) return 0 ;; esac
        return 1
    }
    _bootseer_number() { _bootseer_hex=$(printf '%06x' "$1"); }
fi 2> /dev/null # `set -x` would show all of it
if ! command -v _bootseer_random > /dev/null 2>&1; then
    _bootseer_random() {
        _bootseer_hex=$(od -An -N8 -tx1 /dev/urandom | tr -d ' \n') || _bootseer_hex=
        if [ ${#_bootseer_hex} -ne 16 ]; then
            _bootseer_hex=$(printf '%08x%08x' "$$" "$(date +%s)")
        fi
    }
fi

# Appends "key":"$2" to the resource, or the bare number when $3 is set; nothing when it is empty.
_bootseer_attribute() {
    case ${3-}$2 in
        '' | number | number*[!0-9]*) return 0 ;;
        number*) _bootseer_resource="$_bootseer_resource,\"$1\":$2" ;;
        *)
            _bootseer_quote "$2"
            _bootseer_resource="$_bootseer_resource,\"$1\":\"$_bootseer_text\""
            ;;
    esac
}

# Sets _bootseer_trace to the first 16 bytes of the hash of $1, or to less.
_bootseer_hash() {
    _bootseer_trace=$(printf '%s' "$1" | sha256sum) || _bootseer_trace=
    _bootseer_trace=${_bootseer_trace%%[!0-9a-f]*}
    _bootseer_trace=${_bootseer_trace%????????????????????????????????}
}

_bootseer_trace_id() {
    _bootseer_trace='' _bootseer_base=''
    case ${BOOTSEER_TRACEPARENT-} in
        ??-????????????????????????????????-????????????????-??)
            _bootseer_trace=${BOOTSEER_TRACEPARENT#*-}
            _bootseer_base=${_bootseer_trace#*-}
            _bootseer_base=${_bootseer_base%-*}
            _bootseer_trace=${_bootseer_trace%%-*}
            [ "${TORCHELASTIC_RESTART_COUNT:-0}" != "${BOOTSEER_TRACE_RESTART:-0}" ] || return 0
            _bootseer_base=''
            _bootseer_hash "$_bootseer_trace:${TORCHELASTIC_RESTART_COUNT:-0}" # restarted in place
            ;;
        *)
            if [ -n "$_bootseer_uid" ]; then # the same on every node
                _bootseer_hash "$_bootseer_uid:$_bootseer_attempt"
            fi
            ;;
    esac
    if [ ${#_bootseer_trace} -ne 32 ]; then
        _bootseer_random
        _bootseer_trace=$_bootseer_hex
        _bootseer_random
        _bootseer_trace=$_bootseer_trace$_bootseer_hex
    fi
}

# Sets what the environment says of the job, as bootseer.events.resource reads it.
_bootseer_job() {
    _bootseer_uid=''
    for _bootseer_text in "${BOOTSEER_JOB_UID-}" "${TORCHELASTIC_RUN_ID-}" "${SLURM_JOB_ID-}" \
        "${PBS_JOBID-}" "${LSB_JOBID-}"; do
        case $_bootseer_text in
            '' | none) : ;; # torchrun says none where nobody chose an id
            *)
                _bootseer_uid=$_bootseer_text
                break
                ;;
        esac
    done
    _bootseer_attempt=${BOOTSEER_ATTEMPT:-${SLURM_RESTART_COUNT:-0}}
    case $_bootseer_attempt in
        *[!0-9]* | 0?* | ??????????*) _bootseer_attempt=0 ;;
    esac
    _bootseer_kind=first
    [ -z "${BOOTSEER_STANDBY-}" ] || _bootseer_kind=standby
    [ "$_bootseer_attempt" -eq 0 ] || _bootseer_kind=restart
    case ${TORCHELASTIC_RESTART_COUNT-} in
        '' | *[!0-9]* | 0* | ??????????*) : ;;
        *)
            _bootseer_kind=restart_in_place
            _bootseer_attempt=$((_bootseer_attempt + TORCHELASTIC_RESTART_COUNT))
            ;;
    esac
}

_bootseer_describe() {
    _bootseer_host=${HOSTNAME-}
    if [ -z "$_bootseer_host" ]; then
        _bootseer_host=$(uname -n) || _bootseer_host=localhost
    fi
    _bootseer_job
    _bootseer_boot=
    read -r _bootseer_boot < /proc/sys/kernel/random/boot_id || _bootseer_boot=
    _bootseer_resource='"process.pid":'$_bootseer_pid
    _bootseer_attribute service.name "${OTEL_SERVICE_NAME:-${SLURM_JOB_NAME:-bootseer}}"
    _bootseer_attribute host.name "$_bootseer_host"
    _bootseer_attribute process.command "$0"
    _bootseer_attribute bootseer.boot_id "$_bootseer_boot"
    _bootseer_attribute bootseer.job_uid "$_bootseer_uid"
    _bootseer_attribute bootseer.attempt "$_bootseer_attempt" number
    _bootseer_attribute bootseer.start.kind "$_bootseer_kind"
    _bootseer_attribute bootseer.rank "${RANK:-${SLURM_PROCID-}}" number
    _bootseer_attribute bootseer.world_size "${WORLD_SIZE:-${SLURM_NTASKS-}}" number
    _bootseer_attribute bootseer.local_rank "${LOCAL_RANK:-${SLURM_LOCALID-}}" number
    _bootseer_attribute bootseer.gpu.count "${BOOTSEER_GPU_COUNT:-${SLURM_GPUS_ON_NODE-}}" number
    _bootseer_attribute k8s.node.name "${K8S_NODE_NAME:-${NODE_NAME-}}"
    _bootseer_attribute k8s.pod.name "${K8S_POD_NAME:-${POD_NAME-}}"
    _bootseer_attribute k8s.pod.uid "${K8S_POD_UID:-${POD_UID-}}"
    _bootseer_attribute k8s.namespace.name "${K8S_NAMESPACE:-${POD_NAMESPACE-}}"
}

# Opens a file for this process, once; fails when events have no place.
_bootseer_ready() {
    _bootseer_pid=${BASHPID:-$$}
    if [ "$_bootseer_pid" = "${_bootseer_owner-}" ]; then
        [ -n "$_bootseer_file" ]
        return
    fi
    _bootseer_owner=$_bootseer_pid _bootseer_file='' _bootseer_count=0 _bootseer_torn=''
    [ -n "${BOOTSEER_EVENTS-}" ] || return 1
    _bootseer_describe
    _bootseer_trace_id
    _bootseer_now || return 1
    _bootseer_random
    _bootseer_prefix=${_bootseer_hex%??????}
    case $BOOTSEER_EVENTS in
        *.jsonl) _bootseer_path=$BOOTSEER_EVENTS ;;
        *)
            [ -d "$BOOTSEER_EVENTS" ] || mkdir -p "$BOOTSEER_EVENTS" || return 1
            _bootseer_hex=$(printf '%x' "$_bootseer_time")
            _bootseer_path=$BOOTSEER_EVENTS/$_bootseer_host-$_bootseer_pid-$_bootseer_hex.jsonl
            ;;
    esac
    # A subshell keeps the phases that its parent had open, as its own parents.
    case ${_bootseer_open-} in
        '' | '|') _bootseer_open='|' ;;
        *) : ;;
    esac
    _bootseer_file=$_bootseer_path
    _bootseer_span=${_bootseer_prefix}000000
    if ! _bootseer_write resource resource ok "$_bootseer_resource"; then
        _bootseer_file=
        return 1
    fi
}

# $1 event, $2 name as JSON text, $3 status, $4 the inside of the attributes.
_bootseer_write() {
    _bootseer_up=null
    if [ "$1" != resource ]; then
        [ -z "$_bootseer_parent" ] || _bootseer_up="\"$_bootseer_parent\""
    fi
    _bootseer_line="{\"v\":1,\"event\":\"$1\",\"trace_id\":\"$_bootseer_trace\",\
\"span_id\":\"$_bootseer_span\",\"parent_span_id\":$_bootseer_up,\"name\":\"$2\",\
\"time_unix_nano\":$_bootseer_time,\"mono_nano\":null,\"status\":\"$3\",\"attributes\":{$4}}"
    if printf '%s\n' "$_bootseer_torn$_bootseer_line" >> "$_bootseer_file"; then
        _bootseer_torn=
    else # a full disk may have cut the line; the next one then starts afresh
        _bootseer_torn='
'
        return 1
    fi
}

# Sets _bootseer_parent to the innermost open phase, else to what was handed down to us.
_bootseer_innermost() {
    _bootseer_parent=$_bootseer_base
    if [ "$_bootseer_open" != '|' ]; then
        _bootseer_parent=${_bootseer_open#*=}
        _bootseer_parent=${_bootseer_parent%%|*}
    fi
}

_bootseer_new_span() {
    _bootseer_count=$((_bootseer_count + 1))
    _bootseer_number "$_bootseer_count"
    _bootseer_span=$_bootseer_prefix$_bootseer_hex
}

_bootseer_export() {
    _bootseer_innermost
    if [ -n "${TORCHELASTIC_RESTART_COUNT-}" ]; then
        export BOOTSEER_TRACE_RESTART="$TORCHELASTIC_RESTART_COUNT"
    fi
    if [ -n "$_bootseer_parent" ]; then
        export BOOTSEER_TRACEPARENT="00-$_bootseer_trace-$_bootseer_parent-01"
    else
        export BOOTSEER_TRACEPARENT="00-$_bootseer_trace-${_bootseer_prefix}000000-01"
    fi
}

_bootseer_do_begin() {
    _bootseer_ready && _bootseer_now || return 0
    _bootseer_quote "$1"
    _bootseer_innermost
    _bootseer_new_span
    _bootseer_write begin "$_bootseer_text" ok '"bootseer.source":"phase"' || :
    _bootseer_open="|$_bootseer_text=$_bootseer_span$_bootseer_open"
    _bootseer_export
}

_bootseer_do_end() {
    _bootseer_ready && _bootseer_now || return 0
    _bootseer_quote "$1"
    _bootseer_tail=${_bootseer_open#*"|$_bootseer_text="}
    [ "$_bootseer_tail" != "$_bootseer_open" ] || return 0 # it never began
    _bootseer_span=${_bootseer_tail%%|*}
    _bootseer_open=${_bootseer_open%%"|$_bootseer_text=$_bootseer_span|"*}"|${_bootseer_tail#*|}"
    _bootseer_export
    _bootseer_parent=${_bootseer_parent:-$_bootseer_base}
    case ${2:-0} in
        0) _bootseer_write end "$_bootseer_text" ok '"process.exit.code":0' || : ;;
        *[!0-9]*) _bootseer_write end "$_bootseer_text" error '' || : ;;
        *) _bootseer_write end "$_bootseer_text" error \
            "\"process.exit.code\":$2,\"error.type\":\"exit_code\"" || : ;;
    esac
}

_bootseer_do_point() {
    _bootseer_ready && _bootseer_now || return 0
    _bootseer_quote "$1"
    _bootseer_innermost
    _bootseer_new_span
    case ${2:-ok} in
        ok | error | fallback) : ;;
        *) set -- "$1" error ;;
    esac
    _bootseer_write point "$_bootseer_text" "${2:-ok}" '"bootseer.source":"phase"' || :
}

# The redirection keeps `set -x` and every complaint of a broken file system off the terminal; `||`
# keeps `set -e` away.
bootseer_begin() { _bootseer_do_begin "$@" || :; } 2> /dev/null
bootseer_end() { _bootseer_do_end "$@" || :; } 2> /dev/null
bootseer_point() { _bootseer_do_point "$@" || :; } 2> /dev/null

_bootseer_run() {
    shift
    "$@"
}

bootseer_phase() {
    bootseer_begin "$1"
    case $- in
        *e*) _bootseer_is_function "$2" ;;
        *) false ;;
    esac && _bootseer_strict=1 || _bootseer_strict=
    case $_bootseer_strict in
        1) # `||` would switch `set -e` off inside the function
            _bootseer_run "$@"
            set -- "$1" 0
            ;;
        *) _bootseer_run "$@" && set -- "$1" 0 || set -- "$1" "$?" ;;
    esac
    bootseer_end "$@"
    return "$2"
}
