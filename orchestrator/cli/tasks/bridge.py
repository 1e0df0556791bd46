"""`orchestrator bridge`."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import click
from redis.exceptions import RedisError

from orchestrator.cli.terminal.options import app_option, json_option, log_options
from orchestrator.cli.terminal.output import counted, echo, print_json
from orchestrator.compat.bridge.bridge import Bridge
from orchestrator.compat.bridge.calls import Calls
from orchestrator.compat.bridge.transit import Taken, Transit
from orchestrator.errors import ConfigurationError
from orchestrator.sdk.app import Orchestrator
from orchestrator.sdk.ids import new_ids
from orchestrator.settings import load_settings
from orchestrator.telemetry import configure_logging, get_logger
from orchestrator.terminal_safe import sentence
from orchestrator.workers.functions import load_app

if TYPE_CHECKING:
    from orchestrator.compat.bridge.celery import CeleryQueues

log = get_logger("bridge")


@click.group("bridge")
def command() -> None:
    """Run the tasks that Celery producers send, while the producers migrate.

    \b
    Example:
      orchestrator bridge celery --broker redis://old/0 --app shop.tasks:app --dry-run
    """


@command.command("celery")
@click.option("--broker", metavar="URL", help="Celery's broker, a Redis. Default: CELERY_BROKER_URL, or --config.")
@click.option("--results", metavar="URL", help="Celery's result backend, to which results are also written.")
@click.option("--config", metavar="MODULE", help="Celery's settings, such as `celeryconfig` or `proj.settings:Celery`.")
@click.option("--namespace", metavar="PREFIX", help="The prefix of these settings, such as CELERY in Django.")
@click.option("--queue", "queues", multiple=True, metavar="NAME", help="A queue of Celery.  [default: celery]")
@click.option("--to", "target", metavar="QUEUE", help="The queue here.  [default: the task's own, or `default`]")
@click.option("--task", "names", multiple=True, metavar="CELERY=TASK", help="The task that replaces a Celery task.")
@click.option(
    "--restore-after",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Also take messages that a Celery worker reserved this long ago. At least its visibility_timeout, unless no "
    "worker of Celery runs.",
)
@click.option("--once", is_flag=True, help="Exit when no messages are waiting.")
@click.option("--back", is_flag=True, help="Return messages of tasks that have not started, and wait for the others.")
@click.option("--dry-run", is_flag=True, help="Only report what is waiting, and what would be moved.")
@app_option
@json_option
@log_options
def celery(
    broker: str | None,
    results: str | None,
    config: str | None,
    namespace: str | None,
    queues: tuple[str, ...],
    target: str | None,
    names: tuple[str, ...],
    restore_after: float | None,
    once: bool,
    back: bool,
    dry_run: bool,
    app: str | None,
    as_json: bool,
    log_level: str | None,
    log_format: str | None,
) -> None:
    """Turn each message of Celery's queues into one task, and write the results to Celery's result backend.

    Celery workers may keep running: each message goes to one side only. Messages with unknown tasks or pickled bodies
    are set aside: the next bridge tries them again, and --back returns them. Several bridges may run. After a kill, the
    next bridge resumes within ten seconds.

    \b
    Example:
      orchestrator bridge celery --broker redis://old/0 --results redis://old/1 --app shop.tasks:app
      orchestrator bridge celery --broker redis://old/0 --results redis://old/1 --back
    """
    settings = load_settings(app=app, log_level=log_level, log_format=log_format)
    configure_logging(settings.log_level, settings.log_format)
    broker = broker or os.environ.get("CELERY_BROKER_URL")
    application = load_app(settings.app) if settings.app else Orchestrator(settings)
    calls = Calls(application, task_names(names), target, is_checked=bool(settings.app))
    with (
        closing(application),
        _celery_queues(queues, calls, broker, results, config, namespace, restore_after) as source,
    ):
        transits = source.transits()
        bridge = Bridge(application, source, transits, calls)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: bridge.stop())
        if dry_run:
            _print_preview(bridge, source, transits, as_json=as_json)
        elif back:
            returned = bridge.give_back()
            echo(f"{counted(returned, 'message')} returned to Celery.")
            if remaining := sum(transit.counts()["open"] for transit in transits):
                echo(f"Waiting for the end of {counted(remaining, 'task')} that had started.", err=True)
                bridge.follow_to_the_end()
        else:
            log.info(
                "bridge.ready queues=%s results=%s reserved=%d",
                ",".join(transit.queue for transit in transits),
                source.writes_results,
                source.reserved(),
            )
            bridge.run(once=once)
            log.info("bridge.stopped moved=%d", bridge.moved)


@contextmanager
def _celery_queues(
    queues: Sequence[str],
    calls: Calls,
    broker: str | None,
    results: str | None,
    config: str | None,
    namespace: str | None,
    restore_after: float | None,
) -> Iterator[CeleryQueues]:
    """Yield Celery's queues; raise ConfigurationError if Celery is not installed or its Redis is unreachable."""
    try:
        from orchestrator.compat.bridge.celery import CeleryQueues
    except ModuleNotFoundError:
        raise ConfigurationError("This needs Celery: pip install 'celery[redis]'.") from None
    unreachable: tuple[type[Exception], ...] = (RedisError, OSError, *CeleryQueues.unreachable)
    try:
        source = CeleryQueues(
            queues,
            calls.errbacks(),
            broker=broker,
            results=results,
            config=config,
            namespace=namespace,
            restore_after=restore_after,
        )
        with closing(source):
            yield source
    except unreachable as error:
        raise ConfigurationError(
            f"The Redis of Celery: {sentence(str(error))} Nothing is lost: run this command again."
        ) from error


def task_names(names: Sequence[str]) -> dict[str, str]:
    """Return task names by the function names of another queue, from `FUNCTION=TASK` arguments."""
    pairs = [name.partition("=") for name in names]
    for function, _, task in pairs:
        if not function or not task:
            raise click.UsageError("Give --task as FUNCTION=TASK, e.g. --task shop.mail.send=send_mail.")
    return {function: task for function, _, task in pairs}


def _print_preview(bridge: Bridge, source: CeleryQueues, transits: Sequence[Transit], *, as_json: bool) -> None:
    """Print the state of the queues, and what a bridge would do with the waiting messages."""
    document: dict[str, Any] = {"reserved_by_celery": source.reserved(), "queues": {}}
    for transit in transits:
        waiting = map(Taken, new_ids(), transit.messages())
        would_move = 0
        stay: Counter[str] = Counter()
        fail: Counter[str] = Counter()
        while page := list(islice(waiting, 1_000)):
            tasks, refused, answered = bridge.prepare(page)
            would_move += len(tasks)
            stay.update(refused.values())
            fail.update(answered.values())
        would = {"would_move": would_move, "would_stay": dict(stay), "would_fail": dict(fail)}
        document["queues"][transit.queue] = {**transit.counts(), **would}
    if as_json:
        print_json(document)
        return
    for queue, counts in document["queues"].items():
        echo(
            f"Queue {queue}: {counted(counts['waiting'], 'message')} waiting, {counts['would_move']} would be moved; "
            f"{counts['open']} are open here, {counts['aside']} aside."
        )
        for reason, count in counts["would_stay"].items():
            echo(f"  {counted(count, 'message')} would be put aside: {reason}.", err=True)
        for reason, count in counts["would_fail"].items():
            echo(f"  {counted(count, 'message')} would be answered with an error: {reason}", err=True)
    echo(f"{counted(document['reserved_by_celery'], 'message')} reserved by workers of Celery.")
