"""Messages that tell a caller why a task does not progress."""

from __future__ import annotations

from collections.abc import Iterable

NO_LEADER = (
    "No scheduler leads, so no task starts. Start one: orchestrator scheduler; if one is running, it has not renewed "
    "its lease, and its log says why (for example, Redis hangs)"
)
UNHEARD = "The scheduler receives nothing from the workers; its log says why (for example, Redis hangs)"
NONE_CAN_LEAD = "No scheduler leads, so no task starts: the running schedulers cannot use Postgres."


def no_leader(shard: int) -> str:
    """Return the message that no scheduler leads a shard."""
    if not shard:
        return NO_LEADER
    return (
        f"No scheduler leads shard {shard}, so no task starts there. Start one with setting shards above {shard}; if "
        f"one is running with that setting, its log says why it cannot renew its lease"
    )


def is_without_leader(messages: Iterable[str]) -> bool:
    """Return whether a message reports a missing leader."""
    return any(message.startswith("No scheduler leads") for message in messages)


def no_worker(queue: str) -> str:
    """Return the message that no worker serves a queue."""
    return (
        f"Queue {queue!r} has ready tasks and no live worker. Start one: orchestrator worker --app module:app --queues "
        f"{queue}; if one is running, its log says whether its application could be loaded"
    )


def unknown_task(queue: str, what: str) -> str:
    """Return the message that no worker of a queue knows `what`."""
    return f"No live worker of queue {queue!r} knows {what}. Start a worker whose application has it."


def no_database(queue: str, what: str) -> str:
    """Return the message that the workers of a queue lack the database for `what`."""
    return (
        f"No live worker of queue {queue!r} has the database, which ctx.transaction() needs in {what}. "
        f"Start one: orchestrator worker --app module:app --queues {queue} --database"
    )


PAYLOAD_STORE = "@payload-store"
"""Takes the place of a data key's id in a hold for a missing payload store. No key has this id."""


def no_data_key(queue: str, what: str, key: str) -> str:
    """Return the message that the workers of a queue lack the data key or the payload store for `what`."""
    if key == PAYLOAD_STORE:
        return (
            f"No live worker of queue {queue!r} has the payload store (setting payload_store) with large values of "
            f"{what}. Start workers that have it too"
        )
    return (
        f"No live worker of queue {queue!r} has data key {key!r} (setting data_keys) for sealed values of {what}. "
        f"Start workers that have it too"
    )


_NO_KEY = "no data key: "


def hold_for_key(key: str) -> str:
    """Return the stored hold of a task that waits for a worker with a data key."""
    return _NO_KEY + key


def key_of_hold(hold: str) -> str | None:
    """Return the data key that a held task waits for, or None if it waits for something else."""
    return hold[len(_NO_KEY) :] if hold.startswith(_NO_KEY) else None


_NO_EXECUTOR = "no executor: "


def no_executor(queue: str, what: str, wants: str) -> str:
    """Return the message that no worker of a queue has an executor. `wants` is the executor and its requirement."""
    executor, _, need = wants.partition(" ")
    start = f"Start one: orchestrator worker --app module:app --queues {queue}"
    if executor == "process":
        lacks, advice = f"is allowed to run {need!r} and has it installed", f"{start} --allow-command {need}"
    elif executor == "kubernetes":
        cluster = f"knows the context {need!r} of a kubeconfig" if need else "knows a cluster"
        lacks, advice = cluster, f"{start}, in a Pod with a service account, or with KUBECONFIG in its environment"
    elif executor == "cloud_run":
        lacks = "has a Google Cloud account"
        advice = f"{start}, on a Google Cloud machine, or with GOOGLE_APPLICATION_CREDENTIALS in its environment"
    elif need:
        lacks = f"has an address in the variable {need}"
        advice = f"{start}, with {need} in its environment, and the package that the executor needs"
    else:
        lacks, advice = "has it", f"{start}, which has the executor {executor}"
    return f"Executor {executor!r} runs {what}, and no live worker of queue {queue!r} {lacks}. {advice}"


def hold_for_executor(wants: str) -> str:
    """Return the stored hold of a task that waits for a worker with an executor."""
    return _NO_EXECUTOR + wants


def executor_of_hold(hold: str) -> str | None:
    """Return the executor and requirement that a held task waits for, or None if it waits for something else."""
    return hold[len(_NO_EXECUTOR) :] if hold.startswith(_NO_EXECUTOR) else None


def paused(queue: str, what: str = "") -> str:
    """Return the message that a queue is paused."""
    return f"Queue {queue!r} is paused{what}. Resume it: orchestrator queues resume {queue}"


# -- names that are enqueued as tasks, but are workflows or unknown


_WORKFLOWS = {
    "code": ("a workflow as code", "workflows", "runs"),
    "workflow": ("a workflow", "workflows", "runs"),
    "flow": ("a flow", "flows", "flows"),
}


def workflow_as_task(name: str, kind: str | None) -> str | None:
    """Return the message for a caller that enqueues a workflow as a task. None if the name may be a task."""
    if kind not in _WORKFLOWS:
        return None
    what, path, command = _WORKFLOWS[kind]
    routes = f"POST /api/v1/{path}/{name}/runs or `orchestrator {command} start {name}`"
    return f"{name!r} is {what}, not a task. Start a run of it instead: {routes}."


def unregistered(name: str) -> str:
    """Return the message for a caller that enqueues a task that no live worker knows."""
    return (
        f"No live worker has registered a task {name!r}. It waits for such a worker, and fails if the workers of its "
        f"queue run without one for the time of the setting unknown_task_timeout."
    )
