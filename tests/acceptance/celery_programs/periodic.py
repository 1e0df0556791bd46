"""A program with periodic tasks."""

import os
import time
from datetime import timedelta

import redis

from orchestrator.compat.celery import Celery
from orchestrator.compat.celery.schedules import crontab

app = Celery("periodic", broker=os.environ["REDIS_URL"], backend=os.environ["REDIS_URL"])
app.conf.timezone = "Europe/Berlin"
app.conf.beat_schedule = {
    "every-second": {"task": "periodic.tick", "schedule": 1.0, "args": ("a",), "kwargs": {"step": 2}},
    "by timedelta": {
        "task": "periodic.tick",
        "schedule": timedelta(seconds=1),
        "args": ("b",),
        "options": {"expires": 30},
    },
    "retries-late": {"task": "periodic.retries_late", "schedule": 1.0},
    "nightly": {
        "task": "periodic.tick",
        "schedule": crontab(hour=3, minute="*/15", day_of_week="mon-fri"),
        "args": ("c",),
    },
}
store = redis.Redis.from_url(os.environ["REDIS_URL"], decode_responses=True)


@app.task
def tick(name, step=1):
    return store.incr(f"ticks-{name}", step)


@app.task(bind=True)
def retries_late(self):
    store.incr("ticks-late")
    raise self.retry(countdown=3600)


@app.on_after_configure.connect
def setup_periodic_tasks(sender, **kwargs):
    sender.add_periodic_task(1.0, tick.s("d"), name="added")
    sender.add_periodic_task(crontab(hour=7, minute=30, day_of_week=1), tick.s("e"))


def main():
    for _ in range(600):
        counted = [int(store.get(f"ticks-{name}") or 0) for name in ("a", "b", "d", "late")]
        if counted[0] >= 4 and min(counted) >= 2:
            break
        time.sleep(0.1)
    print("ticked:", [number >= 2 for number in counted], counted[0] % 2, store.get("ticks-c"), store.get("ticks-e"))


if __name__ == "__main__":
    main()
