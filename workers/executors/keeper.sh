# Keeper of a command: starts it once, and writes its exit code to a file, with or without a watcher.
# Arguments: folder of the execution, working directory, limits (CPU seconds, memory in kB, open files; or -), command.
# Descriptor 3 is closed once the keeper file shows which process keeps the command; the caller waits for that.
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
  # The hard limit is one second more, if the system allows: SIGXCPU shows the cause of death, the SIGKILL would not.
  [ "$cpu" = - ] || { { ulimit -t $((cpu + 1)) 2>/dev/null || ulimit -t "$cpu"; } && ulimit -S -t "$cpu"; } || exit 126
  [ "$memory" = - ] || ulimit -v "$memory" || exit 126
  [ "$files" = - ] || ulimit -n "$files" || exit 126
  exec "$@"
)
echo "$?" >"$folder/end"
# Kill processes that the command has left behind, and this process.
kill -KILL 0
