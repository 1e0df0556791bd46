"""Payments that fail for a while: retries by hand and by exception, hooks, states and time limits."""

import os
import time

import redis

from orchestrator.compat.celery import Celery, Task, states
from orchestrator.compat.celery.exceptions import Ignore, MaxRetriesExceededError, SoftTimeLimitExceeded
from orchestrator.compat.celery.utils.log import get_task_logger

logger = get_task_logger(__name__)
app = Celery("retries", broker=os.environ["REDIS_URL"], backend=os.environ["REDIS_URL"])
app.conf.task_annotations = {"retries.annotated": {"max_retries": 1}}
store = redis.Redis.from_url(os.environ["REDIS_URL"], decode_responses=True)


class Declined(Exception):
    """A payment that was refused."""


class Noting(Task):
    """Notes what happens to a task."""

    def on_retry(self, exc, task_id, args, kwargs, einfo):
        store.rpush(f"notes-{task_id}", f"retry {exc!r}")

    def on_failure(self, exc, task_id, args, kwargs, einfo):
        store.rpush(f"notes-{task_id}", f"failure {exc!r}")

    def on_success(self, retval, task_id, args, kwargs):
        store.rpush(f"notes-{task_id}", f"success {retval!r}")

    def after_return(self, status, retval, task_id, args, kwargs, einfo):
        store.rpush(f"notes-{task_id}", f"after {status}")


@app.task(bind=True, base=Noting, max_retries=3, default_retry_delay=0)
def charge(self, order, failures):
    logger.info("charging %s, attempt %d", order, self.request.retries)
    try:
        if self.request.retries < failures:
            raise ConnectionError(f"bank away, {self.request.retries}")
        return f"{order} charged after {self.request.retries}"
    except ConnectionError as error:
        raise self.retry(exc=error, countdown=0.1)


@app.task(
    bind=True,
    autoretry_for=(ConnectionError,),
    dont_autoretry_for=(ConnectionRefusedError,),
    retry_backoff=0.01,
    retry_backoff_max=1,
    retry_jitter=False,
    retry_kwargs={"max_retries": 2},
)
def fetch(self, how):
    if how == "refused":
        raise ConnectionRefusedError("never")
    if how == "always" or self.request.retries < 1:
        raise ConnectionError(how)
    return f"{how} after {self.request.retries}"


@app.task(bind=True)
def annotated(self):
    try:
        raise self.retry(countdown=0)
    except MaxRetriesExceededError:
        return f"gave up after {self.request.retries}"


@app.task(soft_time_limit=1, time_limit=20)
def slow():
    try:
        while True:
            time.sleep(0.05)
    except SoftTimeLimitExceeded:
        return "stopped in time"


@app.task(bind=True)
def upload(self, name):
    self.update_state(state="PROGRESS", meta={"current": 1, "total": 4})
    while not store.get(f"upload-{name}"):
        time.sleep(0.05)
    return {"current": 4, "total": 4}


@app.task(bind=True)
def custom_failure(self):
    self.update_state(
        state=states.FAILURE, meta={"exc_type": "Declined", "exc_message": "by hand", "exc_module": __name__}
    )
    raise Ignore


@app.task
def decline():
    raise Declined("no money", 51)


class Receipt(Task):
    """A task that is a class."""

    name = "retries.receipt"
    ignore_result = False

    def run(self, order, *, copies=1):
        return f"{copies} for {order}"


receipt = app.register_task(Receipt())


def until(condition):
    for _ in range(200):
        if value := condition():
            return value
        time.sleep(0.05)
    raise SystemExit("it did not come to that")


def main():
    result = charge.delay("order 1", 2)
    print(result.get(timeout=30))
    print(until(lambda: store.llen(f"notes-{result.id}") >= 4 and sorted(store.lrange(f"notes-{result.id}", 0, -1))))
    failing = charge.delay("order 2", 9)
    try:
        failing.get(timeout=30)
    except ConnectionError as error:
        print("failed:", error, failing.state, failing.failed(), failing.ready())
    print(fetch.delay("once").get(timeout=30))
    for how in ("always", "refused"):
        print(how, repr(fetch.delay(how).get(timeout=30, propagate=False)))
    print(annotated.delay().get(timeout=30))
    print(slow.delay().get(timeout=30))
    going = upload.delay("file")
    print(until(lambda: going.state == "PROGRESS" and going.info))
    store.set("upload-file", "go")
    print(going.get(timeout=30), going.state)
    by_hand = custom_failure.delay()
    print(until(lambda: by_hand.state == "FAILURE" and type(by_hand.result).__name__))
    declined = decline.delay()
    try:
        declined.get(timeout=30)
    except Declined as error:
        print("declined:", error.args, "Traceback" in declined.traceback)
    print(receipt.delay("order 1", copies=2).get(timeout=30))
    eager = charge.apply(("order 3", 1))
    print("here:", eager.get(), eager.state)
    store.delete("upload-file", f"notes-{result.id}", f"notes-{failing.id}")


if __name__ == "__main__":
    main()
