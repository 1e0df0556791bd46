"""The conformance suite of clients that pull work, in any language. docs/pull-protocol.md says what it expects.

    python -m orchestrator.testing.pull_conformance -- node worker.js

The suite starts a scheduler, a worker and the API on its own servers (extra `embedded`), and the command with
`ORCHESTRATOR_API_URL` and `ORCHESTRATOR_API_KEY` in its environment. The URL is that of a proxy that records the
client's requests, drops responses, and refuses requests.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from orchestrator.errors import TaskCancelled
from orchestrator.testing.executor_stage import SETTINGS, eventually, local_services
from orchestrator.testing.pull_trial import LEASE, SERVICE, SOON, Body, Fault, Trial, expect, kill, pass_time

# -- the checks, in order. Each begins with a running client, and leaves one or none.


def a_result_arrives_unchanged(trial: Trial) -> None:
    tree = {"text": 'grüße 🎉\n\t"', "list": [1, 2.5, None, True, -7], "": {}}
    values: list[Any] = [tree, None, [], 0, "", "\u2028", 2**53 - 1]
    for value in values:
        expect(trial.enqueue("return", value=value).result(), value, "the result")


def large_input_and_output_arrive(trial: Trial) -> None:
    value = "é" * 400_000
    expect(trial.enqueue("return", value=value, lease=60).result() == value, True, "800 kB come back unchanged")


def a_result_that_the_api_refuses_becomes_a_failure(trial: Trial) -> None:
    work = trial.enqueue("large", bytes=3_000_000, lease=60)
    work.failure()
    work.wait_for("complete", status=200)
    expect([call.status for call in work.all("complete")], [413, 200], "completions")


def a_failure_has_kind_and_message(trial: Trial) -> None:
    work = trial.enqueue("fail", kind="OutOfStock", message="no tea: 茶", retryable=False, task_retries=[0.1])
    failure = work.failure()
    expect(failure.kind, "OutOfStock", "kind")
    expect("no tea: 茶" in str(failure), True, f"the message is in {str(failure)!r}")
    expect(len(work.all("poll")), 1, "tries of work that is not retryable")


def a_failure_is_tried_again(trial: Trial) -> None:
    work = trial.enqueue("fail", kind="Busy", message="not now", task_retries=[0.1, 0.1])
    work.failure()
    expect(len({call.response["request_id"] for call in work.all("poll")}), 3, "tries, each with its own request_id")


def a_failure_says_when_to_try_again(trial: Trial) -> None:
    work = trial.enqueue("fail", kind="Busy", message="later", retry_after=2.5, task_retries=[0.01])
    work.failure()
    first, second = (call.answered_at for call in work.all("poll"))
    expect(second - first >= 2.5, True, f"two tries at least 2.5 s apart ({second - first:.1f} s)")


def log_lines_arrive_in_order(trial: Trial) -> None:
    lines = [f"line {number} ü" for number in range(30)]
    work = trial.enqueue("log", lines=lines)
    work.result()
    logged = eventually(
        lambda: [line.text for line in work.handle.logs() if line.text in lines], "the lines are in the log", SOON
    )
    expect(logged, lines, "lines of the log")


def progress_is_shown(trial: Trial) -> None:
    work = trial.enqueue_and_start("progress", fraction=0.5, text="half", seconds=60)
    found = eventually(work.handle.progress, "progress is shown", SOON)
    expect((found.fraction, found.text), (0.5, "half"), "progress")
    work.handle.cancel()


def heartbeats_keep_work_past_its_lease(trial: Trial) -> None:
    work = trial.enqueue("sleep", seconds=3 * LEASE)
    expect(work.result(), 1, "the lease that has done it")
    polled, *_ = work.all("poll")
    times = [polled.answered_at, *(call.at for call in work.all("heartbeat")), work.wait_for("complete").at]
    longest = max(after - before for before, after in pairwise(times))
    expect(longest < LEASE * 2 / 3, True, f"heartbeats every {LEASE / 3:g} s, or somewhat later; found {longest:.1f} s")
    pass_time(LEASE)
    expect(work.all("heartbeat")[-1].at <= work.all("complete")[-1].at + 1, True, "no heartbeat after the completion")


def several_run_at_once(trial: Trial) -> None:
    trial.stop()
    client = trial.start(CONFORMANCE_CONCURRENCY="4")
    works = [trial.enqueue_and_start("sleep", seconds=600) for _ in range(4)]
    pass_time(2 * LEASE)
    expect([len(work.all("poll")) for work in works], [1, 1, 1, 1], "leases, all kept")
    kill(client)
    for work in works:
        work.handle.cancel()


def cancelled_work_is_stopped(trial: Trial) -> None:
    work = trial.enqueue_and_start("sleep", seconds=600)
    work.handle.cancel()
    try:
        raise AssertionError(f"expected cancelled work, found {work.result()!r}")
    except TaskCancelled:
        refused = work.wait_for("heartbeat", status=409)
    expect(trial.enqueue("return", value=1).result(), 1, "the next result")
    pass_time(LEASE)
    later = [call.action for call in (*work.all("heartbeat"), *work.all("complete")) if call.at > refused.at + 1]
    expect(later, [], "requests about it afterwards")


def work_whose_lease_is_lost_is_stopped(trial: Trial) -> None:
    with trial.faults(lambda action, _: Fault() if action == "heartbeat" else None):
        work = trial.enqueue_and_start("sleep", seconds=600)
        status, other = trial.ask("poll", worker_id="another", services=[SERVICE], wait=60)
        expect((status, other.get("attempt")), (200, 2), "status and number of its second lease")
    refused = work.wait_for("heartbeat", status=409)
    status, _ = trial.ask("complete", queue_id=other["queue_id"], result="of another")
    expect(status, 200, "status of the other holder's completion")
    expect(work.result(), "of another", "the result")
    pass_time(LEASE)
    expect([call for call in work.all("heartbeat") if call.at > refused.at + 1], [], "heartbeats afterwards")


def a_completion_without_an_answer_is_sent_again(trial: Trial) -> None:
    lost: list[Body] = []

    def fault(action: str, request: Body) -> Fault | None:
        if action != "complete" or len(lost) == 2:
            return None
        lost.append(request)
        return Fault(reaches_api=True) if len(lost) == 1 else Fault(status=503, reaches_api=True)

    with trial.faults(fault):
        work = trial.enqueue("return", value="once", lease=60)
        expect(work.result(), "once", "the result")
        last = work.wait_for("complete", 3)
    expect((last.status, last.request), (200, lost[0]), "the third completion, which is the same")


def refused_heartbeats_do_not_stop_the_work(trial: Trial) -> None:
    refusals = iter([Fault(status=503), Fault(), Fault(status=429)])
    with trial.faults(lambda action, _: next(refusals, None) if action == "heartbeat" else None):
        work = trial.enqueue("sleep", seconds=12, lease=9)
        expect(work.result(), 1, "the lease that has done it")


def a_busy_api_is_left_alone_for_retry_after(trial: Trial) -> None:
    with trial.faults(lambda action, _: Fault(status=429, retry_after=3) if action == "poll" else None):
        start, began = len(trial.proxy.exchanges), time.monotonic()
        work = trial.enqueue("return", value=1)  # this ends a pending poll
        pass_time(9)
        polls = [call for call in trial.proxy.exchanges[start:] if call.status == 429 and call.at > began]
    expect(len(polls) <= 4, True, f"at most 4 polls in 9 s with Retry-After: 3 ({len(polls)})")
    expect(work.result(), 1, "the result")


def work_of_other_services_is_left_alone(trial: Trial) -> None:
    other = trial.enqueue("return", value=1, service="conformance.other")
    expect(trial.enqueue("return", value=2).result(), 2, "the result")
    expect(other.all("poll"), [], "polls that gave it work of another service")
    other.handle.cancel()


def a_restart_of_the_api_is_survived(trial: Trial) -> None:
    work = trial.enqueue_and_start("sleep", seconds=4, lease=60)
    trial.stop_api()
    pass_time(5)
    trial.start_api()
    expect(work.result(), 1, "the lease that has done it")
    expect(trial.enqueue("return", value=3).result(), 3, "the next result")


def killed_work_goes_to_the_next_holder(trial: Trial) -> None:
    work = trial.enqueue_and_start("sleep", seconds=4)
    kill(trial.client())
    trial.client()
    expect(work.result(), 2, "the lease that has done it")
    first, second = (call.response for call in work.all("poll"))
    expect(second["request_id"], first["request_id"], "its request_id")


def sigterm_lets_work_end(trial: Trial) -> None:
    work, client = trial.enqueue_and_start("sleep", seconds=4), trial.client()
    work.wait_for("heartbeat")  # so the client has read the response to its poll
    client.send_signal(signal.SIGTERM)
    stopped_at = time.monotonic()
    expect(client.wait(SOON), 0, "exit code")
    expect(work.result(), 1, "the lease that has done it")
    late = [call for call in trial.proxy.exchanges if call.action == "poll" and call.at > stopped_at + 1]
    expect(late, [], "polls after SIGTERM")


def sigterm_gives_work_back_that_does_not_end(trial: Trial) -> None:
    trial.stop()
    client = trial.start(CONFORMANCE_DRAIN="1")
    work = trial.enqueue_and_start("sleep", seconds=5, lease=600)
    client.send_signal(signal.SIGTERM)
    expect(client.wait(SOON), 0, "exit code")
    expect(work.wait_for("return").status, 200, "status of the return")
    trial.client()
    expect(work.result(), 1, "the number of its lease, as if the first had not been")


def sigterm_ends_an_idle_client(trial: Trial) -> None:
    client, start = trial.client(), len(trial.proxy.exchanges)
    expect(trial.enqueue("return", value=1).result(), 1, "the result")
    client.send_signal(signal.SIGTERM)
    expect(client.wait(SOON), 0, "exit code")
    expect(
        [call.status for call in trial.proxy.exchanges[start:] if call.action == "return"].count(200),
        0,
        "work returned",
    )


def a_wrong_key_ends_the_client(trial: Trial) -> None:
    trial.stop()
    start = len(trial.proxy.exchanges)
    client = trial.start(ORCHESTRATOR_API_KEY="orc_wrong")
    expect(client.wait(SOON) != 0, True, "it ends with an exit code that is not 0")
    expect(len(trial.proxy.exchanges) - start <= 5, True, "at most 5 requests")


CHECKS: tuple[Callable[[Trial], None], ...] = (
    a_result_arrives_unchanged,
    large_input_and_output_arrive,
    a_result_that_the_api_refuses_becomes_a_failure,
    a_failure_has_kind_and_message,
    a_failure_is_tried_again,
    a_failure_says_when_to_try_again,
    log_lines_arrive_in_order,
    progress_is_shown,
    heartbeats_keep_work_past_its_lease,
    several_run_at_once,
    cancelled_work_is_stopped,
    work_whose_lease_is_lost_is_stopped,
    a_completion_without_an_answer_is_sent_again,
    refused_heartbeats_do_not_stop_the_work,
    a_busy_api_is_left_alone_for_retry_after,
    work_of_other_services_is_left_alone,
    a_restart_of_the_api_is_survived,
    killed_work_goes_to_the_next_holder,
    sigterm_lets_work_end,
    sigterm_gives_work_back_that_does_not_end,
    sigterm_ends_an_idle_client,
    a_wrong_key_ends_the_client,
)


def run(command: Sequence[str], only: str = "") -> int:
    """Run the checks against a client and print their results; return the number of failures."""
    failed = 0
    with TemporaryDirectory() as name, local_services(Path(name), **SETTINGS) as services:
        trial = Trial(services, command, Path(name))
        try:
            for check in (candidate for candidate in CHECKS if only in candidate.__name__):
                began, problem = time.monotonic(), ""
                try:
                    trial.client()
                    check(trial)
                except Exception as error:  # noqa: BLE001  # the other checks follow in any case
                    failed += 1
                    problem = f"{type(error).__name__}: {error}"
                    trial.stop()
                words = check.__name__.replace("_", " ")
                print(f"{'FAIL' if problem else 'ok  '} {words} ({time.monotonic() - began:.1f} s)", flush=True)
                if problem:
                    print(f"     {problem}\n     The client wrote last:\n{trial.log_end()}", flush=True)
        finally:
            trial.close()
    return failed


def main() -> None:
    """Run the suite from the command line."""
    parser = argparse.ArgumentParser(prog="python -m orchestrator.testing.pull_conformance", description=__doc__)
    parser.add_argument("--only", default="", help="run only checks whose names contain this, such as sigterm")
    parser.add_argument("command", nargs="+", help="the client: a program that does what docs/pull-protocol.md says")
    arguments = parser.parse_args()
    sys.exit(1 if run(arguments.command, arguments.only.replace(" ", "_")) else 0)


if __name__ == "__main__":
    main()
