# Keeps one command: starts it once, and writes down how it ended, with or without a watcher.
# Arguments: the folder of the execution, where to run, limits (CPU seconds, memory in kB, open files; or -), the command.
# The caller waits for the end of descriptor 3, which comes when it is known which process keeps the command.
folder=$1 place=$2 cpu=$3 memory=$4 files=$5
shift 5
trap : TERM INT HUP
set -C
own=$$
read -r own </proc/$$/stat 2>/dev/null
echo "$own" 2>/dev/null >"$folder/keeper" || exit 0
set +C
exec 3>&-
(
  trap - TERM INT HUP
  cd "$place" || exit 126
  unset OLDPWD
  # A second more until SIGKILL, where the system allows it: SIGXCPU tells what it died of, and SIGKILL does not.
  [ "$cpu" = - ] || { { ulimit -t $((cpu + 1)) 2>/dev/null || ulimit -t "$cpu"; } && ulimit -S -t "$cpu"; } || exit 126
  [ "$memory" = - ] || ulimit -v "$memory" || exit 126
  [ "$files" = - ] || ulimit -n "$files" || exit 126
  exec "$@"
)
echo "$?" >"$folder/end"
# Whatever the command has left behind ends with it, and this process too.
kill -KILL 0
