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
    """Run the tasks that producers of Celery send, while they move.

    \b
    Example:
      orchestrator bridge celery --broker redis://old/0 --app shop.tasks:app --dry-run
    """


@command.command("celery")
@click.option("--broker", metavar="URL", help="Celery's broker, a Redis. Default: CELERY_BROKER_URL, or --config.")
@click.option("--results", metavar="URL", help="Celery's result backend: results are written there, too.")
@click.option("--config", metavar="MODULE", help="Celery's settings, such as `celeryconfig` or `proj.settings:Celery`.")
@click.option("--namespace", metavar="PREFIX", help="What these settings begin with, such as CELERY in Django.")
@click.option("--queue", "queues", multiple=True, metavar="NAME", help="A queue of Celery.  [default: celery]")
@click.option("--to", "target", metavar="QUEUE", help="The queue here.  [default: the task's own, or `default`]")
@click.option("--task", "names", multiple=True, metavar="CELERY=TASK", help="Which task does the work of Celery's.")
@click.option(
    "--restore-after",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Take messages, too, that a worker of Celery reserved so long ago. At least its visibility_timeout, unless no "
    "worker of Celery runs.",
)
@click.option("--once", is_flag=True, help="End when no message waits.")
@click.option("--back", is_flag=True, help="Give messages back whose tasks have not started, and end with the others.")
@click.option("--dry-run", is_flag=True, help="Say what waits, and what would be moved.")
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
    """Make tasks of the messages in Celery's queues, each once, and write their results where Celery's clients look.

    Workers of Celery may run meanwhile: a message is theirs or ours. A message whose task is unknown, or that is
    pickled, is put aside: the next bridge tries it again, and --back gives it back. Several bridges may run. After a
    kill, the next one goes on within ten seconds.

    \b
    Example:
      orchestrator bridge celery --broker redis://old/0 --results redis://old/1 --app shop.tasks:app
      orchestrator bridge celery --broker redis://old/0 --results redis://old/1 --back
    """
    settings = load_settings(app=app, log_level=log_level, log_format=log_format)
    configure_logging(settings.log_level, settings.log_format)
    broker = broker or os.environ.get("CELERY_BROKER_URL")
    application = load_app(settings.app) if settings.app else Orchestrator(settings)
    calls = Calls(application, renamed(names), target, is_checked=bool(settings.app))
    with (
        closing(application),
        _celery_queues(queues, calls, broker, results, config, namespace, restore_after) as source,
    ):
        transits = source.transits()
        bridge = Bridge(application, source, transits, calls)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: bridge.stop())
        if dry_run:
            _tell(bridge, source, transits, as_json=as_json)
        elif back:
            given = bridge.give_back()
            echo(f"{counted(given, 'message')} given back to Celery.")
            if left := sum(transit.counts()["open"] for transit in transits):
                echo(f"Waiting for the end of {counted(left, 'task')} that had started.", err=True)
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
    """Yield Celery's queues, or say what is missing."""
    try:
        from orchestrator.compat.bridge.celery import CeleryQueues
    except ModuleNotFoundError:
        raise ConfigurationError("This needs Celery: pip install 'celery[redis]'.") from None
    away: tuple[type[Exception], ...] = (RedisError, OSError, *CeleryQueues.unreachable)
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
    except away as error:
        raise ConfigurationError(
            f"The Redis of Celery: {sentence(str(error))} Nothing is lost: run this again."
        ) from error


def renamed(names: Sequence[str]) -> dict[str, str]:
    """Return by function of another queue which task does its work."""
    pairs = [name.partition("=") for name in names]
    for function, _, task in pairs:
        if not function or not task:
            raise click.UsageError("Give --task as FUNCTION=TASK, e.g. --task shop.mail.send=send_mail.")
    return {function: task for function, _, task in pairs}


def _tell(bridge: Bridge, source: CeleryQueues, transits: Sequence[Transit], *, as_json: bool) -> None:
    """Say where messages are, and what a bridge would do with those that wait."""
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
    for queue, found in document["queues"].items():
        echo(
            f"Queue {queue}: {counted(found['waiting'], 'message')} waiting, {found['would_move']} would be moved; "
            f"{found['open']} are open here, {found['aside']} aside."
        )
        for reason, count in found["would_stay"].items():
            echo(f"  {counted(count, 'message')} would be put aside: {reason}.", err=True)
        for reason, count in found["would_fail"].items():
            echo(f"  {counted(count, 'message')} would be answered with an error: {reason}", err=True)
    echo(f"{counted(document['reserved_by_celery'], 'message')} reserved by workers of Celery.")
