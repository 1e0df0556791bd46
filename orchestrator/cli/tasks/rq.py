"""`orchestrator rq`."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import click
import msgspec
from redis import Redis
from redis.exceptions import RedisError

from orchestrator.cli.tasks.bridge import task_names
from orchestrator.cli.terminal.options import app_option, json_option
from orchestrator.cli.terminal.output import counted, counting_bar, echo, on_terminal, print_json
from orchestrator.compat.bridge.calls import Call, Calls
from orchestrator.domain.tasks.task import NewTask
from orchestrator.errors import ConfigurationError, OrchestratorError
from orchestrator.sdk.app import Orchestrator
from orchestrator.settings import load_settings
from orchestrator.terminal_safe import sentence, without_password
from orchestrator.workers.functions import load_app

if TYPE_CHECKING:
    from orchestrator.plugins.executors.rq.waiting_jobs import WaitingJob, WaitingJobs

_Ready = tuple["WaitingJob", NewTask]
_URL = "RQ_REDIS_URL"
_MAX_SHOWN = 20


@click.group("rq")
def command() -> None:
    """Run programs written for RQ, and import the waiting jobs of an RQ fleet.

    \b
    Example:
      orchestrator rq worker --allow shop high default
      orchestrator rq import --queue mail --dry-run
    """


@command.command("worker")
@click.argument("queues", nargs=-1)
@click.option(
    "--allow",
    multiple=True,
    required=True,
    metavar="MODULE|FOLDER",
    help="Where the functions of jobs are defined. Jobs can name nothing else. May be repeated.",
)
@click.option("--processes", type=click.IntRange(1), default=1, show_default=True, help="How many jobs run at once.")
@click.option("--burst", is_flag=True, help="Work until the queues are empty, then exit.")
@click.pass_context
def worker(
    context: click.Context, queues: tuple[str, ...], allow: tuple[str, ...], processes: int, burst: bool
) -> None:
    """Run jobs of orchestrator.compat.rq, one at a time in each process.

    The same as `orchestrator worker --app orchestrator.compat.rq:app --concurrency 1`, which has further options.

    \b
    Example:
      orchestrator rq worker --allow shop high default
    """
    from orchestrator.cli.fleet.worker import command as run_worker

    options = [word for path in allow for word in ("--allow", path)] + (["--burst"] if burst else [])
    options += ["--queues", ",".join(queues or ("default",)), "--processes", str(processes), "--concurrency", "1"]
    run_worker.main(["--app", "orchestrator.compat.rq:app", *options], parent=context, standalone_mode=False)


@command.command("import")
@click.option("--queue", "source", required=True, metavar="NAME", help="The queue in RQ.")
@click.option("--url", metavar="URL", help=f"The Redis of RQ. Default: {_URL} in the environment.")
@click.option("--to", "target", metavar="QUEUE", help="The queue here.  [default: the task's own, or `default`]")
@click.option("--task", "names", multiple=True, metavar="RQ=TASK", help="The task that replaces an RQ function.")
@click.option("--serializer", type=click.Choice(["pickle", "json"]), default="pickle", help="RQ's serializer.")
@click.option("--dry-run", is_flag=True, help="Only report what would be imported.")
@app_option
@json_option
def import_jobs(
    source: str,
    url: str | None,
    target: str | None,
    names: tuple[str, ...],
    serializer: str,
    dry_run: bool,
    app: str | None,
    as_json: bool,
) -> None:
    """Enqueue the waiting jobs of an RQ queue here, each once, and remove them from RQ.

    RQ workers may keep running: each job goes to one side only. If an import is interrupted, the next one continues
    with the jobs it had taken; run it within the setting idempotency_period. Jobs that cannot be converted stay in RQ
    and are reported. A job becomes the task with the name of its function, or the one that --task names, with that
    task's own options. With an application, calls are checked.

    \b
    Example:
      orchestrator rq import --queue mail --dry-run
      orchestrator rq import --queue mail --task shop.mail.send=send_mail --app shop.tasks:app
      orchestrator rq import --queue mail --app orchestrator.compat.rq:app
    """
    settings = load_settings(app=app)
    application = load_app(settings.app) if settings.app else Orchestrator(settings)
    with closing(application), _jobs(url, source, serializer) as jobs, _bar(source, len(jobs), as_json) as advance:
        of_rq = getattr(sys.modules.get("orchestrator.compat.rq"), "app", None) is application
        calls = Calls(application, task_names(names), target, is_checked=bool(settings.app) and not of_rq)
        count: Counter[str] = Counter()
        refusals: dict[str, str] = {}
        for page in jobs.pages():
            ready, refused = _prepare(calls, page, of_rq=of_rq)
            refusals |= refused
            if dry_run:
                count["would_move"] += len(ready)
            elif ready:
                _move(application, jobs, ready, count)
            advance(len(page))
    _report(source, count, refusals, dry_run=dry_run, as_json=as_json)


def _move(application: Orchestrator, jobs: WaitingJobs, ready: Sequence[_Ready], count: Counter[str]) -> None:
    taken = jobs.take([job for job, _ in ready])
    by_job = {job.id: task for job, task in ready}
    tasks = [by_job[job.id] for job in taken]
    created = application._client.backend.tasks.enqueue_many(tasks) if tasks else []
    jobs.forget(taken)
    moved = sum(task.id == identifier for task, identifier in zip(tasks, created, strict=True))
    count["moved"] += moved
    count["had_been_moved"] += len(taken) - moved
    count["begun_by_rq"] += len(ready) - len(taken)


def _prepare(calls: Calls, jobs: Sequence[WaitingJob], *, of_rq: bool) -> tuple[list[_Ready], dict[str, str]]:
    """Return the jobs with their tasks, and the reasons why other jobs cannot become one.

    `of_rq`: the tasks are for `orchestrator.compat.rq`, whose tasks are named `module:function`.
    """
    ready: list[_Ready] = []
    refused: dict[str, str] = {}
    for job in jobs:
        try:
            if job.refusal:
                refused[job.id] = job.refusal
            else:
                once = {"idempotency_key": f"rq:{job.id}"}
                task = calls.task(Call(job.function, job.arguments, job.keywords, once))
                if of_rq and ":" not in task.name:
                    task = msgspec.structs.replace(task, name=":".join(task.name.rsplit(".", 1)))
                ready.append((job, task))
        except OrchestratorError as error:
            refused[job.id] = str(error)
    return ready, refused


@contextmanager
def _jobs(url: str | None, queue: str, serializer: str) -> Iterator[WaitingJobs]:
    """Yield the waiting jobs of an RQ queue; raise ConfigurationError if RQ or its Redis is not available."""
    try:
        from orchestrator.plugins.executors.rq.waiting_jobs import WaitingJobs
    except ModuleNotFoundError:
        raise ConfigurationError("This needs RQ: pip install 'durable-orchestrator[rq]'.") from None
    address = url or os.environ.get(_URL)
    if not address:
        raise ConfigurationError(f"The Redis of RQ is not given: use --url, or set {_URL} in the environment.")
    try:
        redis = Redis.from_url(address)
    except ValueError as error:
        raise ConfigurationError(f"The address of RQ's Redis cannot be read: {sentence(str(error))}") from None
    try:
        yield WaitingJobs(redis, queue, serializer)
    except (RedisError, OSError, UnicodeError) as error:  # UnicodeError: the host cannot be a name
        raise ConfigurationError(
            f"The Redis of RQ, {without_password(address)}: {sentence(str(error))} The jobs imported so far are "
            "kept: run this command again."
        ) from error
    finally:
        redis.close()


@contextmanager
def _bar(queue: str, total: int, as_json: bool) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal; yield the function that advances it."""
    if as_json or not on_terminal():
        yield lambda _: None
        return
    with counting_bar() as progress:
        bar = progress.add_task(queue, total=total)
        yield lambda more: progress.advance(bar, more)


def _report(queue: str, count: Counter[str], refusals: Mapping[str, str], *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        kinds = ("would_move",) if dry_run else ("moved", "had_been_moved", "begun_by_rq")
        print_json({"queue": queue, **{kind: count[kind] for kind in kinds}, "stay": dict(refusals)})
        return
    for job, reason in list(refusals.items())[:_MAX_SHOWN]:
        echo(f"Job {job} stays: {reason}.", err=True)
    if len(refusals) > _MAX_SHOWN:
        echo(f"{counted(len(refusals) - _MAX_SHOWN, 'more job')} stay; --json has all of them.", err=True)
    if dry_run:
        echo(f"{counted(count['would_move'], 'job')} of queue {queue} would be enqueued here; {len(refusals)} stay.")
        return
    remarks = [f"{len(refusals)} stay"] if refusals else []
    if count["had_been_moved"]:
        remarks.append(f"{count['had_been_moved']} had been enqueued by an import that was stopped")
    if count["begun_by_rq"]:
        remarks.append(f"{count['begun_by_rq']} were begun by RQ meanwhile")
    echo("; ".join([f"{counted(count['moved'], 'job')} of queue {queue} enqueued here", *remarks]) + ".")
