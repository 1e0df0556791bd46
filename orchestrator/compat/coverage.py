"""Migration rules for programs of other queues: the table behind `orchestrator migrate check` and the guide.

A name that no table lists moves if its module does: the compatibility layer raises NotCovered for the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple


class Verdict(StrEnum):
    """The verdict on one use of another library."""

    MOVES = "moves"
    """Works unchanged after a change of the import."""
    CHANGES = "changes"
    """Works, but behaves differently in some respect."""
    STAYS = "stays"
    """Is refused or missing: it must be rewritten."""


class Rule(NamedTuple):
    """The verdict on a use, with an advice."""

    verdict: Verdict
    note: str = ""


MOVES = Rule(Verdict.MOVES)


def _moving(names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), MOVES)


def _changes(**notes: str) -> dict[str, Rule]:
    return {name: Rule(Verdict.CHANGES, note) for name, note in notes.items()}


def _stays(**notes: str) -> dict[str, Rule]:
    return {name: Rule(Verdict.STAYS, note) for name, note in notes.items()}


class Library(NamedTuple):
    """One library, and the rules for what it exports."""

    name: str
    modules: Mapping[str, str]
    """Modules that have a counterpart here, mapped to that counterpart."""
    names: Mapping[str, Mapping[str, Rule]]
    """Rules for the names that a program may import, by module."""
    calls: Mapping[str, Mapping[str, Rule]]
    """Rules for options that behave differently, by the name of the decorator or method. The call itself moves."""
    attributes: Mapping[str, Rule]
    """Rules for methods and attributes that behave differently. `get(option=…)` is one option of a method."""
    anywhere: frozenset[str] = frozenset()
    """Names of `calls` that are counted also in files that do not import the library."""
    settings: Mapping[str, Rule] = {}
    """Rules for settings that behave differently."""
    prefix: str = ""
    """Prefix of settings' names in a module that also has other settings, such as Django's."""
    otherwise: Rule = Rule(Verdict.STAYS, "not covered")
    """The rule for all other imports from the library."""


_LOCATION = "not used: ORCHESTRATOR_DATABASE_URL and ORCHESTRATOR_REDIS_URL decide"
_FALLBACK = "used for Redis or Postgres where ORCHESTRATOR_REDIS_URL or ORCHESTRATOR_DATABASE_URL is not set"
_NO_BROKER = "there is no broker or result backend to configure: delete it"
_FLEET = "holds for the whole fleet, not for each worker"
_SAFE = "True is the default: a task of a dead worker runs again. False lets it fail: at most once"
_LOST = "nothing to set: a task of a dead worker runs again, if acks_late is not False"
_HARD = "raised in the task; its process is not killed at once"
_SOFT = "raised at the next Python instruction, never inside a blocking call: give that a timeout of its own"
_DATA = "arguments and results are data; pickle is refused"
_EVENTS = "no events are sent: use metrics, server-sent events of the HTTP API, middleware or the dashboard"
_NO_JOIN = "a task cannot wait for another: link it, or use self.replace(…)"
_OWN_APPLY = "not called for parts of a chain, group or chord: connect the signal before_task_publish"
_OF_CALL = ["exchange", "expires", "headers", "link", "link_error", "priority", "queue", "routing_key"]
_OF_CALL += ["soft_time_limit", "time_limit"]
_RETRY = "refused, and so the task fails: a retry keeps the options of its call. Or enqueue the task again, and return"
_RETENTION = "has no effect: the settings retention_success and retention_failed decide"

_TASK_OPTIONS = {
    **_changes(
        rate_limit=_FLEET, acks_late=_SAFE, reject_on_worker_lost=_LOST, serializer=_DATA, compression=_NO_BROKER
    ),
    **_changes(time_limit=_HARD, soft_time_limit=_SOFT, send_events=_EVENTS),
}
_CALL_OPTIONS = {
    **_changes(time_limit=_HARD, soft_time_limit=_SOFT),
    **_changes(serializer=_DATA, compression=_NO_BROKER, exchange=_NO_BROKER, routing_key=_NO_BROKER),
    **_changes(retry_policy=_NO_BROKER, connection=_NO_BROKER, producer=_NO_BROKER),
}

_CELERY_MODULES = ["", ".app", ".app.task", ".canvas", ".exceptions", ".result", ".schedules", ".signals", ".states"]
_CELERY_MODULES += [".utils", ".utils.log"]

CELERY = Library(
    name="Celery",
    modules={f"celery{part}": f"orchestrator.compat.celery{part}" for part in _CELERY_MODULES},
    names={
        "celery": {
            **_moving("Celery Signature Task chain chord chunks group maybe_signature shared_task signature subtask"),
            **_moving("current_app current_task uuid xmap xstarmap"),
            **_stays(bootsteps="parts of Celery's worker: use signals, or app.orchestrator.lifespan"),
        },
        "celery.app": _moving("Celery Task app_or_default current_app current_task shared_task"),
        "celery.app.task": _moving("Context Task"),
        "celery.canvas": _moving("Signature chain chord chunks group maybe_signature signature xmap xstarmap"),
        "celery.events": _stays(EventDispatcher=_EVENTS, EventReceiver=_EVENTS),
        "celery.exceptions": _moving(
            "AlreadyRegistered CeleryError ChordError Ignore ImproperlyConfigured InvalidTaskError "
            "MaxRetriesExceededError NotRegistered OperationalError QueueNotFound Reject Retry SoftTimeLimitExceeded "
            "TaskError TaskPredicate TaskRevokedError TimeLimitExceeded TimeoutError WorkerLostError"
        ),
        "celery.result": {
            **_moving("AsyncResult EagerResult GroupResult ResultSet result_from_tuple"),
            **_stays(allow_join_result=_NO_JOIN),
        },
        "celery.schedules": {
            **_moving("crontab maybe_schedule schedule"),
            **_stays(solar="compute the times, and enqueue with eta"),
        },
        "celery.signals": {
            **_moving("before_task_publish after_task_publish task_prerun task_postrun task_success task_retry"),
            **_moving("task_failure task_revoked worker_init worker_process_init worker_ready worker_shutdown"),
            **_moving("worker_process_shutdown worker_shutting_down beat_init beat_embedded_init celeryd_init"),
            **_moving("celeryd_after_setup import_modules setup_logging after_setup_logger after_setup_task_logger"),
            **_changes(task_received="never sent: connect task_prerun", task_unknown="never sent: such a task is held"),
            **_changes(
                task_internal_error="never sent", heartbeat_sent="never sent", user_preload_options="never sent"
            ),
            **_changes(worker_before_create_process="never sent: connect worker_process_init"),
        },
        "celery.states": _moving("PENDING RECEIVED STARTED SUCCESS FAILURE REVOKED RETRY IGNORED READY_STATES"),
        "celery.utils": _moving("uuid"),
        "celery.utils.log": _moving("get_logger get_task_logger"),
    },
    calls={
        "task": _TASK_OPTIONS,
        "shared_task": _TASK_OPTIONS,
        "apply_async": _CALL_OPTIONS,
        "send_task": _CALL_OPTIONS,
        "delay": {},
        "autodiscover_tasks": {},
        "config_from_object": {},
        "add_periodic_task": {},
        "Celery": _changes(broker=_FALLBACK, backend=_FALLBACK),
    },
    attributes={
        **_stays(
            add_consumer="start a worker with -Q, or `orchestrator worker --queues`",
            cancel_consumer="pause the queue: `orchestrator queues pause NAME`",
            broadcast="there are no commands of your own",
            pool_grow="start workers with --autoscale MIN,MAX",
            pool_shrink="start workers with --autoscale MIN,MAX",
            pool_restart="`orchestrator workers drain NAME` ends a worker; a service manager starts another",
            enable_events=_EVENTS,
            events=_EVENTS,
            worker_main="run `orchestrator celery -A module worker`",
            connection_for_write="there is no broker connection",
            connection_for_read="there is no broker connection",
            add_to_chord="start the chord when all of its tasks are known, or write a workflow as code",
            setup_security="the setting signing_keys signs messages",
            backend="there is no result backend: AsyncResult(id) and `orchestrator tasks` find results",
            build_graph="`orchestrator runs show ID` draws the graph of a run",
            graph="`orchestrator runs show ID` draws the graph of a run",
        ),
        **_changes(forget=f"forgets in this program; elsewhere it {_RETENTION}"),
        "def apply_async(…)": Rule(Verdict.CHANGES, _OWN_APPLY),
        "get(on_message=…)": Rule(Verdict.STAYS, "look at .state and .info while you wait"),
        "get(disable_sync_subtasks=…)": Rule(Verdict.STAYS, _NO_JOIN),
        "get() in a task": Rule(Verdict.STAYS, f"refused, as in Celery: {_NO_JOIN}"),
        **dict.fromkeys((f"retry({option}=…)" for option in _OF_CALL), Rule(Verdict.STAYS, _RETRY)),
        "update_state(task_id=…)": Rule(Verdict.STAYS, "a task sets its own state only"),
    },
    anywhere=frozenset(["apply_async", "delay", "send_task"]),
    settings={
        **_changes(broker_url=_FALLBACK, result_backend=_FALLBACK, broker_transport_options=_NO_BROKER),
        **_changes(broker_use_ssl=_NO_BROKER, broker_pool_limit=_NO_BROKER, broker_heartbeat=_NO_BROKER),
        **_changes(broker_connection_retry_on_startup=_NO_BROKER, task_default_exchange=_NO_BROKER),
        **_changes(task_acks_late=_SAFE, task_reject_on_worker_lost=_LOST, worker_prefetch_multiplier=_NO_BROKER),
        **_changes(task_time_limit=_HARD, task_soft_time_limit=_SOFT),
        **_changes(enable_utc="without timezone, crontabs are in UTC; times without a zone are UTC, as in Celery"),
        **_changes(task_serializer=_DATA, result_serializer=_DATA, accept_content=_DATA),
        **_changes(result_expires=_RETENTION, task_default_rate_limit=_FLEET, worker_send_task_events=_EVENTS),
        **_changes(task_send_sent_event=_EVENTS),
        **_changes(worker_pool="prefork and threads are the same here; gevent and eventlet are refused"),
        **_stays(beat_scheduler="schedules are stored in Postgres: app.orchestrator.schedules.set(…) changes them"),
    },
    prefix="CELERY_",
)

_PICKLE = (
    "not used: data, `bytes`, `tuple`, `set`, dates, times, `timedelta`, `Decimal` and `UUID` keep their types; other "
    "arguments keep those of annotations, and all else is refused with `PayloadError`"
)
_RQ_OPTIONS = {
    **_changes(
        result_ttl=f"0 keeps no result; else {_RETENTION}",
        failure_ttl=_RETENTION,
        job_id="an id can be used again when its last job is no longer kept",
        depends_on="a dependency that failed fails the job; workers need the database or the API to check it",
        at_front="a priority of 1",
        meta="JSON; a running job saves up to 1,000 characters, kept for an hour",
        connection=_LOCATION,
        serializer=_PICKLE,
    ),
    **_stays(pipeline="enqueue_many stores all or none", webhooks="post from the job", job_class="there is one Job"),
}
_RQ_CALLS = ["enqueue", "enqueue_call", "enqueue_at", "enqueue_in", "enqueue_many", "prepare_data", "job"]
_WORKER = "run `orchestrator rq worker --allow MODULE QUEUE…`"
_RQ_WORKERS = _stays(Worker=_WORKER, SimpleWorker=_WORKER, SpawnWorker=_WORKER)
_RQ_MODULES = ["rq", "rq.job", "rq.queue", "rq.registry", "rq.decorators", "rq.exceptions", "rq.command"]
_RQ_MODULES += ["rq.dependency", "rq.repeat", "rq.results", "rq.timeouts"]
_GROUP = "use orchestrator.group"
_DRAIN = "run `orchestrator workers drain NAME`"

RQ = Library(
    name="RQ",
    modules={
        **{module: f"orchestrator.compat.{module}" for module in _RQ_MODULES},
        "rq_scheduler": "orchestrator.compat.rq.scheduler",
        "rq_scheduler.scheduler": "orchestrator.compat.rq.scheduler",
    },
    names={
        "rq": {
            **_moving("Callback Queue Repeat Retry cancel_job get_current_job requeue_job"),
            **_RQ_WORKERS,
            **_stays(Connection="leave the block out", Webhook="post from the job", Group=_GROUP),
        },
        "rq.job": _moving(
            "Callback Dependency Job JobStatus Repeat Result Retry cancel_job get_current_job requeue_job"
        ),
        "rq.queue": _moving("Queue"),
        "rq.registry": _moving(
            "CanceledJobRegistry DeferredJobRegistry FailedJobRegistry FinishedJobRegistry ScheduledJobRegistry "
            "StartedJobRegistry"
        ),
        "rq.decorators": _moving("job"),
        "rq.exceptions": _moving(
            "DuplicateJobError InvalidJobDependency InvalidJobOperation InvalidJobOperationError NoSuchJobError "
            "TimeoutFormatError"
        ),
        "rq.command": {
            **_changes(send_stop_job_command="the same as job.cancel()"),
            **_stays(send_kill_horse_command="job.cancel() stops a job that runs", send_shutdown_command=_DRAIN),
        },
        "rq.dependency": _moving("Dependency"),
        "rq.repeat": _moving("Repeat"),
        "rq.results": _moving("Result"),
        "rq.timeouts": _moving("JobTimeoutException"),
        "rq.group": _stays(Group=_GROUP),
        "rq.worker": _RQ_WORKERS,
        "rq.serializers": _stays(DefaultSerializer=_PICKLE, JSONSerializer=_PICKLE),
        "rq_scheduler": _moving("Scheduler"),
        "rq_scheduler.scheduler": _moving("Scheduler"),
    },
    calls={
        **dict.fromkeys(_RQ_CALLS, _RQ_OPTIONS),
        "Queue": {**_RQ_OPTIONS, **_changes(is_async="False runs the job at once, without a trace of it in Postgres")},
        "Scheduler": _RQ_OPTIONS,
        "cron": {
            **_changes(meta="has no effect"),
            **_stays(repeat="a schedule has start= and end=", use_local_timezone="a schedule has timezone="),
        },
    },
    attributes={
        **_stays(
            dependent_ids="keep the ids that you enqueue with depends_on",
            delete_dependents="cancel the dependent jobs by their ids",
            set_status="use cancel() and requeue()",
            get_position="see `orchestrator queues`",
            perform="call the function",
        ),
        **_changes(delete="cancels an open job; an ended one stays"),
    },
    anywhere=frozenset(["enqueue", "enqueue_at", "enqueue_call", "enqueue_in"]),
)

_DRAMATIQ_BROKER = "there is no broker, and settings say where Postgres and Redis are: delete it"
_DRAMATIQ_OPTIONS = {
    **_changes(
        store_results="results are always kept",
        priority="the opposite: here, higher goes first; the layer inverts it",
        time_limit="ends the attempt, whatever it does",
    ),
    **_stays(
        retry_when="raise orchestrator.GiveUp, or name exceptions with throws",
        on_success="add a message to a pipeline",
        on_failure="use a task with on_failure=",
        on_retry_exhausted="use a task with on_failure=",
        notify_shutdown="a worker that drains lets actors finish",
        broker=_DRAMATIQ_BROKER,
    ),
}

DRAMATIQ = Library(
    name="Dramatiq",
    modules={
        "dramatiq": "orchestrator.compat.dramatiq",
        "dramatiq.errors": "orchestrator.compat.dramatiq.errors",
        "dramatiq.results": "orchestrator.compat.dramatiq.results",
    },
    names={
        "dramatiq": {
            **_moving("Actor DramatiqError Message Retry actor group pipeline"),
            **_stays(
                Broker=_DRAMATIQ_BROKER,
                GenericActor="write an actor as a function",
                Middleware="use orchestrator.Middleware",
                Worker="run `orchestrator worker --app MODULE`",
                get_broker=_DRAMATIQ_BROKER,
                set_broker=_DRAMATIQ_BROKER,
                set_encoder="arguments are data, and need no encoder",
            ),
        },
        "dramatiq.errors": _moving("DramatiqError Retry"),
        "dramatiq.results": {
            **_moving("ResultError ResultFailure ResultMissing ResultTimeout"),
            **_stays(Results="results are kept without it: delete it"),
        },
    },
    calls={
        "actor": _DRAMATIQ_OPTIONS,
        "send_with_options": _DRAMATIQ_OPTIONS,
        "message_with_options": _DRAMATIQ_OPTIONS,
        "pipeline": {},
    },
    attributes=_stays(
        declare_actor=_DRAMATIQ_BROKER, declare_queue=_DRAMATIQ_BROKER, add_middleware="use app.middleware.add"
    ),
    anywhere=frozenset(["send_with_options", "message_with_options"]),
)

PREFORK = Rule(
    Verdict.CHANGES,
    "`orchestrator celery worker` has one task in a process at a time, in a thread: signal.signal is refused. "
    "`orchestrator worker` and `dev` run 10 at once in each process, which share its globals: --concurrency 1",
)
DELIVERY = Rule(
    Verdict.CHANGES,
    "Celery's default is at most once: a task whose worker dies is lost. Here it runs again. acks_late=False, or the "
    "setting task_acks_late=False, lets it fail instead",
)
NO_EFFECT = Rule(Verdict.CHANGES, "has no effect: delete it")
PER_PROJECT: Mapping[str, Rule] = {"prefork": PREFORK, "early acknowledgement": DELIVERY}
"""Rules that apply once to each project with Celery's defaults."""
_DASHBOARD = "the dashboard and `orchestrator top` show queues, tasks and workers"
_COMPANIONS = {
    **_stays(
        django_celery_beat="schedules are in Postgres: app.orchestrator.schedules.set(…), `orchestrator schedules`",
        django_celery_results="results are in Postgres: `orchestrator tasks`, the dashboard, AsyncResult(id)",
        django_rq="use orchestrator.compat.rq with orchestrator.contrib.django, or its tasks",
        flask_rq2="use orchestrator.compat.rq",
        django_dramatiq="use orchestrator.compat.dramatiq with orchestrator.contrib.django",
        billiard="exceptions are in orchestrator.compat.celery.exceptions; for processes, use multiprocessing",
        celery_once="a task has unique_key=",
        celery_singleton="a task has unique_key=",
        flower=_DASHBOARD,
        rq_dashboard=_DASHBOARD,
    ),
    **_changes(kombu="queues need no declaration; their names count"),
}
"""Libraries built on these queues, by their module."""

LIBRARIES: Mapping[str, Library] = {
    "celery": CELERY,
    "rq": RQ,
    "rq_scheduler": RQ,
    "dramatiq": DRAMATIQ,
    **{name: Library(name, {}, {}, {}, {}, otherwise=rule) for name, rule in _COMPANIONS.items()},
}
"""Libraries by top-level module."""


def refused(rules: Mapping[str, Rule]) -> dict[str, str]:
    """Return the refused names, each with the alternative."""
    return {name: rule.note for name, rule in rules.items() if rule.verdict is Verdict.STAYS}


def rule_of_name(module: str, name: str) -> Rule:
    """Return the rule for a name imported from a module of one of the libraries."""
    library = LIBRARIES[module.partition(".")[0]]
    rule = library.names.get(module, {}).get(name)
    if rule is not None:
        return rule
    if f"{module}.{name}" in library.modules:
        return MOVES
    names: Iterable[str] = library.names.get(module, {})
    hint = f"; {module} has {', '.join(sorted(names)[:5])}, …" if names else ""
    return Rule(library.otherwise.verdict, library.otherwise.note + hint)
