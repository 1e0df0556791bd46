#!/bin/sh
# A worker in shell for tasks with the executor `pull`: it polls for work of the service `count`, and counts words.
#
#     API=http://localhost:8000 KEY=orc_… ./pull.sh
#
# It needs curl and jq. A heartbeat keeps the lease during the work. The worker sends the result until the API has stored
# it (200) or no longer needs it (404, 409). If the API rejects the result (too large, or more than 1,000 lines of
# `logs`), the worker sends an error instead, so that the attempt fails at once.
api=${API:-http://localhost:8000}

ask() {
    curl -sS -w '\n%{http_code}' -H 'Content-Type: application/json' ${KEY:+-H "Authorization: Bearer $KEY"} \
        -d "$2" "$api/queue/$1"
}

while true; do
    answer=$(ask poll '{"worker_id": "shell-'$$'", "services": ["count"]}')
    case ${answer##*
} in
        200) ;;
        204) continue ;;
        *) echo "poll: $answer" >&2; sleep 2; continue ;;
    esac
    work=$(printf '%s' "$answer" | sed '$d')
    id=$(printf '%s' "$work" | jq .queue_id)
    (while sleep 15; do ask heartbeat "{\"queue_id\": $id}" >/dev/null; done) &
    beats=$!
    words=$(printf '%s' "$work" | jq -r .input.text | wc -w)
    outcome="{\"queue_id\": $id, \"result\": $((words)), \"error\": \"\"}"
    until code=$(ask complete "$outcome" | tail -1); [ "$code" = 200 ] || [ "$code" = 404 ] || [ "$code" = 409 ]; do
        case $code in
            400 | 413 | 422) outcome="{\"queue_id\": $id, \"error\": \"The API refused the result: $code\"}" ;;
        esac
        sleep 2
    done
    kill $beats
    [ "${ONCE:-}" ] && exit
done
