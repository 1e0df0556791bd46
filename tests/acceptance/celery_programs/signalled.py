"""A program that uses signals, headers, routes and remote control."""

import os
import time

import redis

from orchestrator.compat.celery import Celery, current_task, shared_task, signals
from orchestrator.compat.celery.result import AsyncResult

app = Celery("signalled", broker=os.environ["REDIS_URL"], backend=os.environ["REDIS_URL"])
app.conf.task_routes = {"signalled.mail_*": {"queue": "mail"}}
store = redis.Redis.from_url(os.environ["REDIS_URL"], decode_responses=True)


def note(key, *words):
    store.rpush(f"signals-{key}", " ".join(map(str, words)))


@signals.worker_process_init.connect
def on_process(**kwargs):
    store.incr("signals-processes")


@signals.before_task_publish.connect
def on_publish(sender=None, headers=None, body=None, **kwargs):
    headers["tenant"] = "acme"


@signals.after_task_publish.connect
def on_published(sender=None, headers=None, **kwargs):
    store.incr(f"signals-published-{sender}")


@signals.task_prerun.connect
def on_start(sender=None, task_id=None, task=None, args=None, **kwargs):
    note(task_id, "prerun", task.name, list(args))


@signals.task_postrun.connect
def on_end(sender=None, task_id=None, retval=None, state=None, **kwargs):
    note(task_id, "postrun", state)


@signals.task_success.connect
def on_success(sender=None, result=None, **kwargs):
    note(sender.request.id, "success", result)


@signals.task_failure.connect
def on_failure(sender=None, task_id=None, exception=None, einfo=None, **kwargs):
    note(task_id, "failure", repr(exception))


@signals.task_retry.connect
def on_retry(sender=None, request=None, reason=None, **kwargs):
    note(request.id, "retry", request.retries)


@signals.task_revoked.connect
def on_revoked(sender=None, request=None, **kwargs):
    note(request.id, "revoked", sender.name)


@app.task(bind=True)
def whose(self):
    return [
        self.request.headers["tenant"] if "tenant" in (self.request.headers or {}) else self.request.tenant,
        self.name,
    ]


@shared_task
def mail_welcome(to):
    return f"welcome, {to}, by {current_task.request.delivery_info['routing_key']}"


@app.task(bind=True, max_retries=1)
def shaky(self):
    if not self.request.retries:
        raise self.retry(countdown=1)
    return "steady"


@app.task
def broken():
    raise KeyError("x")


@app.task
def sleepy(seconds):
    time.sleep(seconds)


def signals_of(task_id, number):
    for _ in range(200):
        if store.llen(f"signals-{task_id}") >= number:
            break
        time.sleep(0.05)
    return store.lrange(f"signals-{task_id}", 0, -1)


def main():
    print(whose.delay().get(timeout=30))
    result = mail_welcome.delay("ann")
    print(result.get(timeout=30), signals_of(result.id, 3))
    print("published:", store.get("signals-published-signalled.mail_welcome"))
    retried = shaky.delay()
    print(retried.get(timeout=30), signals_of(retried.id, 6))
    failed = broken.delay()
    print(repr(failed.get(timeout=30, propagate=False)), signals_of(failed.id, 3))
    print("processes:", int(store.get("signals-processes")) >= 1)
    later = sleepy.apply_async((1,), countdown=60)
    later.revoke()
    blocked = sleepy.delay(60)
    signals_of(blocked.id, 1)
    blocked.revoke(terminate=True)
    print("revoked:", signals_of(blocked.id, 2)[1:])
    ping = app.control.ping(timeout=2)
    print("pong:", [list(one.values()) for one in ping])
    print("registered:", "signalled.whose" in next(iter(app.control.inspect().registered().values())))
    again = AsyncResult(result.id, app=app)
    print("again:", again.get(timeout=30), again.status)
    print("by name:", app.send_task("signalled.mail_welcome", args=["bob"]).get(timeout=30))


if __name__ == "__main__":
    main()
