"""Tasks for the test cases of Celery's own test suite about tasks and canvases."""

import os
import time
from decimal import Decimal

from redis import Redis

from orchestrator.compat.celery import Celery, Task, signals
from orchestrator.compat.celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded

app = Celery("canvas_tasks")
app.conf.update(task_track_started=True)


def redis():
    return Redis.from_url(os.environ["ORCHESTRATOR_REDIS_URL"], decode_responses=True)


class ExpectedException(Exception):
    """Raised on purpose."""

    def __eq__(self, other):
        return isinstance(other, ExpectedException) and self.args == other.args

    def __hash__(self):
        return hash(self.args)


class UnpicklableError(Exception):
    def __init__(self, foo, bar):
        self.foo = foo
        super().__init__(bar)


@signals.worker_ready.connect
def note_ready(sender, **_):
    redis().set("ready", sender.hostname)


@app.task
def identity(x):
    return x


@app.task
def types_of(*values, annotated: Decimal | None = None):
    """Return the names of the arguments' types, and the arguments."""
    return [[type(one).__name__ for one in (*values, annotated)], list(values)]


@app.task(bind=True, max_retries=1)
def retry_with_decimal(self, value):
    if self.request.retries:
        return [type(value).__name__, value]
    raise self.retry(args=(Decimal("2.50"),), countdown=0)


@app.task
def raise_base(kind):
    if kind == "group":
        raise ExceptionGroup("many", [ValueError("one")])
    if kind == "decimal":
        raise ValueError(Decimal("1.10"), 42)
    raise SystemExit(3)


@app.task
def add(x, y, z=None):
    return x + y if z is None else x + y + z


@app.task(typing=False)
def add_not_typed(x, y):
    return x + y


@app.task(ignore_result=True)
def add_ignore_result(x, y):
    return x + y


@app.task
def fail(*args):
    raise ExpectedException("Task expected to fail", *args)


@app.task
def fail_with_other_arguments():
    raise UnpicklableError("foo", "bar")


@app.task
def add_to_all(numbers, value):
    return [number + value for number in numbers]


@app.task
def tsum(numbers):
    return sum(numbers)


@app.task
def build_tree(value, other):
    return [value, other]


@app.task(bind=True)
def ids(self, previous=None, i=None):
    return [self.request.root_id, self.request.parent_id, i, self.request.id]


@app.task
def sleeping(seconds, **_):
    time.sleep(seconds)


@app.task(soft_time_limit=0.4, time_limit=30)
def soft_limited():
    try:
        while True:
            time.sleep(0.05)
    except SoftTimeLimitExceeded:
        return "cleaned up"


@app.task(bind=True, soft_time_limit=0.4, autoretry_for=(OSError,), retry_kwargs={"countdown": 0})
def soft_limited_for_good(self):
    redis().incr(f"soft-{self.request.id}")
    try:
        while True:
            time.sleep(0.05)
    except OSError:
        return "taken for a failure of the network"


@app.task(time_limit=0.5)
def hard_limited():
    while True:
        time.sleep(0.05)


@app.task(bind=True, max_retries=1)
def retry_once(self, *args, countdown=0.1):
    if self.request.retries:
        return self.request.retries
    raise self.retry(countdown=countdown, max_retries=1)


@app.task(bind=True, max_retries=2)
def retry_with_other_arguments(self, value):
    if self.request.retries == 2:
        return value
    raise self.retry(args=(value + 1,), countdown=0)


@app.task(bind=True, autoretry_for=(ExpectedException,), retry_kwargs={"max_retries": 2, "countdown": 0})
def retry_always(self):
    redis().incr(f"retries-{self.request.id}")
    raise ExpectedException("again", self.request.retries)


@app.task(bind=True, max_retries=1)
def waits_for_retry(self):
    if self.request.retries == 0:
        raise self.retry(exc=ExpectedException("later"), countdown=3)
    return "done"


@app.task(bind=True)
def progress(self, key):
    self.update_state(state="PROGRESS", meta={"current": 3, "total": 10})
    while not redis().get(key):
        time.sleep(0.05)
    return {"current": 10, "total": 10}


@app.task(bind=True)
def failed_by_state(self):
    self.update_state(state="FAILURE", meta={"exc_type": "ValueError", "exc_message": "by state"})
    raise Ignore


@app.task(bind=True)
def requested(self, *args, **kwargs):
    request = self.request
    return {
        "id": request.id,
        "args": list(request.args),
        "kwargs": request.kwargs,
        "headers": dict(request.headers),
        "retries": request.retries,
        "parent_id": request.parent_id,
        "root_id": request.root_id,
        "hostname": request.hostname,
        "called_directly": request.called_directly,
        "is_eager": request.is_eager,
        "delivery_info": request.delivery_info,
        "task": request.task,
    }


@app.task(bind=True)
def enqueues_child(self):
    return requested.delay("child").id


@app.task
def redis_echo(message, redis_key="redis-echo"):
    redis().rpush(redis_key, str(message))
    return message


@app.task
def errback_new_style(request, exc, tb, key="errbacks"):
    redis().rpush(key, f"{request.task} {type(exc).__name__} {exc.args[0]}")


@app.task
def errback_old_style(task_id):
    redis().rpush(f"old-errback-{task_id}", task_id)


@app.task(bind=True)
def second_order_replace1(self, state=False):
    redis().rpush("replace", "In A")
    if not state:
        redis().rpush("replace", "Entering/Exiting")
        raise self.replace(second_order_replace1.si(state=True) | redis_echo.si("Out A", redis_key="replace"))
    return None


@app.task
def waits_for_other():
    return add.delay(1, 1).get(timeout=1)


class ClassBased(Task):
    """A class-based task."""

    name = "canvas_tasks.ClassBased"

    def __init__(self):
        self.number = 10

    def run(self, x):
        return self.add(x)

    def add(self, x):
        return x + self.number


class_based = app.register_task(ClassBased())


class Hooked(Task):
    """A task class that records its hooks."""

    abstract = True

    def before_start(self, task_id, args, kwargs):
        redis().rpush(f"hooks-{task_id}", "before_start")

    def on_success(self, retval, task_id, args, kwargs):
        redis().rpush(f"hooks-{task_id}", f"on_success {retval}")

    def on_failure(self, exc, task_id, args, kwargs, einfo):
        redis().rpush(f"hooks-{task_id}", f"on_failure {exc!r} {'Traceback' in str(einfo)}")

    def on_retry(self, exc, task_id, args, kwargs, einfo):
        redis().rpush(f"hooks-{task_id}", f"on_retry {exc!r}")

    def after_return(self, status, retval, task_id, args, kwargs, einfo):
        redis().rpush(f"hooks-{task_id}", f"after_return {status}")


@app.task(base=Hooked, bind=True, max_retries=1)
def hooked(self, how):
    if how == "fail":
        raise ValueError("no")
    if how == "retry" and not self.request.retries:
        raise self.retry(exc=KeyError("x"), countdown=0)
    return how


@app.task(base=Hooked, time_limit=0.5)
def hooked_limit(seconds):
    """Exceed the hard time limit: sleep `seconds` in one C call, then loop in Python."""
    time.sleep(seconds)
    while True:
        time.sleep(0.05)


@signals.task_failure.connect(sender=hooked_limit)
def note_failure(task_id, exception, **_):
    redis().rpush(f"hooks-{task_id}", f"task_failure {type(exception).__name__}")


@app.task
def reject_without_requeue():
    raise Reject("no", requeue=False)


@app.task(bind=True)
def reject_then_succeed(self):
    if not self.request.delivery_info["redelivered"]:
        raise Reject("first pass", requeue=True)
    return "second-pass"


@app.task(bind=True, time_limit=60, soft_time_limit=45)
def declared_limits(self):
    return [self.request.time_limit, self.request.soft_time_limit]


@app.task(bind=True)
def limits(self):
    return [self.request.time_limit, self.request.soft_time_limit]


@app.task(bind=True, max_retries=1)
def retry_keeps(self):
    if not self.request.retries:
        raise self.retry(countdown=0)
    return [self.request.delivery_info["priority"], dict(self.request.headers)]


@app.task(bind=True)
def times(self):
    return [self.request.eta, self.request.expires, self.request.timelimit]


@app.task(bind=True)
def properties(self):
    return self.request.properties


class AutoRetry(Task):
    """A class-based task with autoretry."""

    name = "canvas_tasks.AutoRetry"
    autoretry_for = (ValueError,)
    retry_kwargs = {"max_retries": 1, "countdown": 0}

    def run(self):
        if self.request.retries:
            return self.request.retries
        raise ValueError


auto_retry = app.register_task(AutoRetry())
