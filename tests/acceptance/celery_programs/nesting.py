"""A crawler: groups of chains, chords in chords, callbacks, and what happens when one part fails."""

import os

from orchestrator.compat.celery import Celery, chain, chord, group, signature

app = Celery("nesting", broker=os.environ["REDIS_URL"], backend=os.environ["REDIS_URL"])
app.conf.update(task_serializer="json", result_serializer="json", accept_content=["json"], timezone="UTC")


class NoSuchPage(Exception):
    """A page that is not there."""


@app.task
def fetch(url):
    if url.endswith("missing"):
        raise NoSuchPage(url, 404)
    return f"text of {url}"


@app.task
def count(text, letter):
    return text.count(letter)


@app.task
def total(numbers):
    return sum(numbers)


@app.task
def pages_of(site):
    return [f"{site}/{number}" for number in range(3)]


@app.task(bind=True)
def crawl(self, site):
    """Go on as a chord that is made at run time."""
    header = [fetch.s(url) | count.s("t") for url in pages_of(site)]
    raise self.replace(chord(header, total.s()))


@app.task(ignore_result=True)
def note(value, key):
    import redis

    redis.Redis.from_url(os.environ["REDIS_URL"]).rpush(key, str(value))


@app.task
def complain(request, exc, traceback, key):
    note(f"{request.task} {type(exc).__name__} {exc.args[0]}", key)


def noted(key):
    import time

    import redis

    client = redis.Redis.from_url(os.environ["REDIS_URL"], decode_responses=True)
    for _ in range(200):
        if client.llen(key):
            break
        time.sleep(0.1)
    words = client.lrange(key, 0, -1)
    client.delete(key)
    return words


def main():
    print("chain:", chain(fetch.s("a.org"), count.s("t")).delay().get(timeout=30))
    print("group:", group(fetch.s("a.org") | count.s("o"), count.s("xoxo", "o"))().get(timeout=30))
    print("chord:", chord([count.s("banana", "a"), count.s("apple", "p")])(total.s()).get(timeout=30))
    nested = group(chord([count.s("aa", "a"), count.s("b", "b")], total.s()), total.s([1, 2]))
    print("chord in a group:", nested.apply_async().join(timeout=30))
    upgraded = fetch.s("a.org") | group(count.s("a"), count.s("t")) | total.s()
    print("group in a chain:", upgraded.apply_async().get(timeout=30))
    print("replaced:", crawl.delay("b.org").get(timeout=30))
    print("map:", list(total.map([[1, 2], [3]]).apply_async().get(timeout=30)))
    print("starmap:", count.starmap([("aa", "a"), ("b", "c")]).apply_async().get(timeout=30))
    print("chunks:", count.chunks([("a", "a"), ("bb", "b"), ("c", "d")], 2).apply_async().get(timeout=30))
    partial = signature("nesting.count", args=("x",))
    print("partial:", partial.clone(("xxx",)).delay().get(timeout=30))
    print("immutable:", (fetch.s("a.org") | count.si("zzz", "z")).delay().get(timeout=30))
    result = count.apply_async(("aaa", "a"), link=note.s(key="nesting-links"))
    print("linked:", result.get(timeout=30), noted("nesting-links"))
    failing = fetch.apply_async(("c.org/missing",), link_error=complain.s(key="nesting-errors"))
    try:
        failing.get(timeout=30)
    except NoSuchPage as error:
        print("failed:", error.args, failing.state, noted("nesting-errors"))
    broken = chain(fetch.s("c.org/missing"), count.s("t")).on_error(complain.s(key="nesting-chain")).delay()
    print("broken chain:", repr(broken.get(timeout=30, propagate=False)), noted("nesting-chain"))
    many = group(fetch.s(url) for url in ("a.org", "missing")).delay()
    print("broken group:", [str(one) for one in many.join(timeout=30, propagate=False)], many.completed_count())


if __name__ == "__main__":
    main()
