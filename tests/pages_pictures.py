"""Takes the screenshots of the dashboard: a shop with an hour of work, in a real browser."""

from __future__ import annotations

import math
import random
import sys
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import psycopg2
from PIL import Image

from tests.acceptance.browser import browsing
from tests.acceptance.pages import COMMAND, dev, run
from tests.waiting import eventually

SHOP = '''
from __future__ import annotations

import random
import time

from orchestrator import Orchestrator, TaskContext, WorkflowContext

app = Orchestrator()


class CardDeclined(Exception):
    """The bank said no."""


@app.task(queue="mail", retries=1)
def send_receipt(customer: str, order: int) -> dict:
    time.sleep(random.uniform(0.01, 0.1))
    if order % 17 == 0:
        raise ConnectionError("smtp.example.com: connection refused")
    return {"to": f"{customer}@example.com", "message_id": f"<{order}@shop>"}


@app.task(queue="images")
def thumbnail(file: str, width: int = 320) -> str:
    time.sleep(random.uniform(0.05, 0.2))
    return f"thumbnails/{file}?width={width}"


@app.task(queue="billing")
def charge(order: int, cents: int) -> dict:
    time.sleep(random.uniform(0.02, 0.1))
    if order % 13 == 0:
        raise CardDeclined(f"order {order}: insufficient funds")
    return {"order": order, "cents": cents, "paid": True}


@app.task(queue="etl")
def regions(day: str) -> list[str]:
    time.sleep(0.4)
    return [f"region-{number:02d}" for number in range(24)]


@app.task(queue="etl")
def load(region: str, day: str) -> int:
    time.sleep(random.uniform(0.2, 0.9))
    return random.randint(1_000, 9_000)


@app.task(queue="etl")
def part(day: str, seconds: float) -> int:
    time.sleep(seconds)
    return 98_231


@app.task(queue="etl", retries=1)
def audit(day: str) -> None:
    raise ValueError("column 'amount' has 14 empty rows")


@app.task(queue="search")
def reindex(ctx: TaskContext, pages: int) -> int:
    for page in range(pages):
        ctx.progress(page / pages, f"page {page:,} of {pages:,}")
        ctx.log(f"indexed page {page}")
        time.sleep(0.5)
    return pages


@app.task(queue="billing")
def check(input: str) -> dict:
    return {"verdict": "returned" if random.random() < 0.5 else "on its way"}


@app.task(queue="billing")
def pay_back(input: str) -> str:
    time.sleep(0.2)
    return f"paid back {input}"


@app.task(queue="mail")
def explain(input: str) -> str:
    return f"mail to the customer of {input}"


@app.workflow(queue="orders")
async def order(ctx: WorkflowContext, order_id: str, cents: int) -> str:
    await charge.schedule(1, cents)
    ctx.set("stage", "paid, waits for approval")
    answer = await ctx.promise("approval")
    ctx.set("stage", "approved")
    await send_receipt.schedule("ada", 5)
    return f"{order_id}: {answer}"
'''
FILES = {
    "nightly.yaml": """
name: nightly-sales
description: Loads the sales of every region, joins them with the rates, and publishes the report
params: {day: {type: string, default: "2026-11-15"}}
schedule: {cron: "0 3 * * *", timezone: Europe/Berlin}
defaults: {queue: etl}
tasks:
  regions: {task: shop.regions, input: {day: "${params.day}"}}
  rates: {task: shop.part, input: {day: "${params.day}", seconds: 0.9}}
  load:
    {task: shop.load, depends_on: [regions], foreach: regions, concurrency: 6,
     input: {region: "${item}", day: "${params.day}"}}
  clean: {task: shop.part, depends_on: [load], input: {day: "${params.day}", seconds: 0.5}}
  check: {task: shop.part, depends_on: [load], input: {day: "${params.day}", seconds: 0.3}}
  join: {task: shop.part, depends_on: [clean, rates], input: {day: "${params.day}", seconds: 0.6}}
  report: {task: shop.part, depends_on: [join, check], input: {day: "${params.day}", seconds: 0.4}}
  publish: {task: shop.part, depends_on: [report], input: {day: "${params.day}", seconds: 0.2}}
""",
    "stock.yaml": """
name: stock-levels
schedule: {every: 2h}
tasks:
  fetch: {task: shop.part, input: {day: today, seconds: 0.1}}
  audit: {task: shop.audit, depends_on: [fetch], input: {day: today}}
  notify: {task: shop.part, depends_on: [audit], input: {day: today, seconds: 0.1}}
""",
    "prices.yaml": """
name: prices
description: Fetches what the suppliers ask for
schedule: {every: 5m}
tasks:
  fetch: {task: shop.part, input: {day: today, seconds: 0.1}}
""",
    "report.yaml": """
name: morning-report
description: Mails the numbers of yesterday to everybody
schedule: {cron: "30 7 * * MON-FRI", timezone: America/New_York}
tasks:
  collect: {task: shop.part, input: {day: today, seconds: 0.2}}
  mail: {task: shop.part, depends_on: [collect], input: {day: today, seconds: 0.1}}
""",
    "archive.yaml": """
name: archive
description: Moves last year's orders to cheaper storage
schedule: {cron: "0 5 1 * *", timezone: Europe/Berlin, paused: true}
tasks:
  move: {task: shop.part, input: {day: today, seconds: 0.3}}
""",
}
REFUND = {
    "start": "check",
    "description": "Pays money back, and asks somebody about large sums",
    "nodes": {
        "check": {
            "exec_type": "local_func",
            "func": "shop.check",
            "post": {"output_key": "check", "action_key": "verdict"},
            "prep": {"input_key": "$params.order"},
        },
        "wait": {"kind": "timer", "params": {"delay_ms": 400}},
        "large": {"kind": "choice", "choice_cases": [{"action": "ask", "expr": {"gt": ["$params.cents", 10_000]}}]},
        "approve": {
            "kind": "approval",
            "description": "A refund of more than 100 €: is the claim in order?",
            "prep": {"input_map": {"order": "$params.order", "cents": "$params.cents", "customer": "$params.customer"}},
            "params": {"timeout_ms": 172_800_000},
        },
        "pay": {"exec_type": "local_func", "func": "shop.pay_back", "prep": {"input_key": "$params.order"}},
        "explain": {"exec_type": "local_func", "func": "shop.explain", "prep": {"input_key": "$params.order"}},
    },
    "edges": [
        {"from": "check", "action": "returned", "to": "large"},
        {"from": "check", "action": "on its way", "to": "wait"},
        {"from": "wait", "to": "check"},
        {"from": "large", "action": "ask", "to": "approve"},
        {"from": "large", "to": "pay"},
        {"from": "approve", "action": "approved", "to": "pay"},
        {"from": "approve", "to": "explain"},
    ],
}
SMALL = {"width": 390, "height": 844}
LARGE = {"width": 1280, "height": 860}


def main(target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="orchestrator-pages-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "shop.py").write_text(SHOP)
        for file, text in FILES.items():
            (folder / file).write_text(text)
        with dev(folder, "shop:app"):
            eventually(lambda: "dashboard=http" in (folder / "dev.log").read_text(), "the dashboard is served")
            base = (folder / "dev.log").read_text().partition("dashboard=")[2].split("/ui")[0]
            pages = fill(folder, base)
            write_an_hour(folder)
            take(base, pages, target)


def fill(folder: Path, base: str) -> dict[str, str]:
    """Create tasks, runs and schedules for the pages; return the path of each page."""
    api = f"{base}/api/v1"

    def post(path: str, body: object) -> str:
        return str(httpx.post(f"{api}{path}", json=body).raise_for_status().json().get("id", ""))

    for file in FILES:
        run(folder, COMMAND, "workflows", "apply", file)
    calls = [{"name": "shop.send_receipt", "args": [f"customer-{n}", n], "queue": "mail"} for n in range(1, 150)]
    calls += [{"name": "shop.charge", "args": [n, 1_999 + 10 * n], "queue": "billing"} for n in range(1, 90)]
    calls += [{"name": "shop.thumbnail", "args": [f"photo-{n}.jpg"], "queue": "images"} for n in range(40)]
    post("/tasks/bulk", {"tasks": calls})
    for _ in range(4):
        post("/workflows/stock-levels/runs", {})
    for _ in range(12):
        post("/workflows/prices/runs", {})
    for workflow in ("morning-report", "morning-report", "morning-report", "archive"):
        post(f"/workflows/{workflow}/runs", {})
    for number in range(5):
        started = ("/workflows/nightly-sales/runs", {"params": {"day": f"2026-11-{10 + number}"}})
        nightly = post(*started) if number < 4 else post("/schedules/nightly-sales/default/trigger", None)
        eventually(lambda: state(api, nightly) == "success", "the night is over", 120)  # noqa: B023
    reindex = post("/tasks", {"name": "shop.reindex", "args": [400], "queue": "search"})
    order = post("/workflows/shop.order/runs", {"kwargs": {"order_id": "o-7", "cents": 25_000}, "key": "o-7"})
    post("/flows/refund", {"definition": REFUND})
    for number, cents in enumerate((4_900, 2_500, 25_900, 7_900, 129_900, 18_000)):
        params = {"order": f"o-{1207 + number}", "cents": cents, "customer": f"customer-{40 + number}"}
        refund = post("/flows/refund/runs", {"params": params, "tags": ["refund"]})
    eventually(lambda: httpx.get(f"{api}/approvals").text.count('"approve"') == 3, "three wait for somebody")
    eventually(lambda: httpx.get(f"{api}/tasks/{reindex}/logs").json()["lines"], "it speaks")
    run(folder, COMMAND, "queues", "limit", "images", "--concurrency", "4")
    return {
        "overview": "/ui",
        "run-page": f"/ui/runs/{nightly}",
        "code-page": f"/ui/runs/{order}",
        "flow-page": f"/ui/runs/{refund}",
        "approvals-page": "/ui/approvals",
        "task-page": f"/ui/tasks/{reindex}",
        "tasks-page": "/ui/tasks",
        "runs-page": "/ui/runs",
        "workflow-page": "/ui/workflows/nightly-sales",
        "backfill-page": "/ui/schedules/morning-report/default/backfills?start=2026-10-01&end=2026-11-01",
        "audit-page": "/ui/audit",
        "failures-page": "/ui/failures",
        "queues-page": "/ui/queues",
        "schedules-page": "/ui/schedules",
        "workers-page": "/ui/workers",
    }


def state(api: str, run: str) -> str:
    """Return the state of a run."""
    return str(httpx.get(f"{api}/runs/{run}").json()["run"]["status"])


def write_an_hour(folder: Path) -> None:
    """Insert an hour of throughput statistics with a wave, and a mail server that was down for a while."""
    random.seed(7)
    url = f"postgresql://postgres@/orchestrator?host={folder}/.orchestrator/postgres/socket"
    connection = psycopg2.connect(url)
    connection.autocommit = True
    base = datetime.now(UTC).timestamp() // 10 * 10
    with connection.cursor() as cursor:
        for age in range(4, 360):
            is_away = 120 < age < 160
            for queue, mean in (("mail", 40), ("images", 14), ("billing", 22), ("etl", 6)):
                total = max(0, int(mean * (1 + 0.4 * math.sin(age / 50) + random.gauss(0, 0.12))))
                failed = sum(random.random() < (0.25 if is_away and queue == "mail" else 0.008) for _ in range(total))
                waits, runs = [0] * 19, [0] * 19
                for _ in range(total):
                    waits[min(18, max(0, int(random.gauss(5 + 3 * is_away, 1.2))))] += 1
                    runs[min(18, max(0, int(random.gauss(7, 1.4))))] += 1
                cursor.execute(
                    "INSERT INTO orchestrator.throughput (bucket, queue, term, success, failed, cancelled, skipped,"
                    " dispatched, retried, lost, waits, runs) VALUES (%s, %s, 1, %s, %s, 0, 0, %s, %s, 0, %s, %s)"
                    " ON CONFLICT DO NOTHING",
                    (
                        datetime.fromtimestamp(base, UTC) - timedelta(seconds=10 * age),
                        queue,
                        total - failed,
                        failed,
                        total,
                        failed,
                        waits,
                        runs,
                    ),
                )
    connection.close()


def start_backfill(api: str) -> None:
    """Start a backfill and wait until runs of it have ended."""
    response = httpx.post(f"{api}/schedules/nightly-sales/default/backfills", json={"start": "2026-11-01"})
    path = f"{api}/backfills/{response.raise_for_status().json()['id']}"
    eventually(lambda: httpx.get(path).json()["started"] - httpx.get(path).json()["open"] >= 3, "it is under way", 120)


def take(base: str, pages: dict[str, str], target: Path) -> None:
    """Take a screenshot of each page in the light theme, the dark theme and at phone size."""
    variants = [("", "light", LARGE), ("-dark", "dark", LARGE), ("-phone", "light", SMALL)]
    with browsing() as browser:
        for name, path in pages.items():
            for suffix, scheme, size in variants:
                file = target / f"{name}{suffix}.png"
                if file.name == "schedules-page.png":
                    start_backfill(f"{base}/api/v1")
                context = browser.new_context(viewport=size, color_scheme=scheme, base_url=base)
                page = context.new_page()
                page.goto(path)
                page.locator("main").wait_for()
                page.screenshot(path=file)
                context.close()
                with Image.open(file) as picture:
                    picture.convert("RGB").quantize(256, kmeans=2).save(file, optimize=True)
                print(f"{name}{suffix}.png: {path}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if sys.argv[1:] else "docs/images"))
