"""A program for type checkers: lines that end in `# wrong` must be rejected, all others accepted."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator import Orchestrator, WorkflowContext, WorkflowHandle, workflow
from orchestrator.testing import WorkflowTest

app = Orchestrator()


@dataclass
class Item:
    name: str
    price: float


@app.workflow(version=2)
@dataclass
class Order:
    ctx: WorkflowContext
    items: list[Item] = field(default_factory=list)
    paid: int = 0

    @workflow.run
    async def run(self, owner: str, limit: float = 100) -> list[str]:
        await self.ctx.wait_condition(lambda: self.paid)
        print(owner)
        if self.total() > limit:
            await self.add(Item("fee", 1))
            self.add(Item("fee", "1"))  # wrong
        return [item.name for item in self.items]

    @workflow.signal
    def pay(self, amount: int) -> None:
        self.paid += amount

    @workflow.signal
    def close(self) -> None: ...

    @workflow.update
    def cut(self, name: str, parts: int = 2) -> Item:
        return Item(name, parts)

    @workflow.update
    def count(self) -> int:
        return len(self.items)

    @workflow.query
    def total(self, currency: str = "EUR") -> float:
        print(currency)
        return sum(item.price for item in self.items)

    @workflow.update
    async def add(self, item: Item) -> float:
        self.items.append(item)
        return self.total()

    @add.validator
    def check_item(self, item: Item) -> None: ...

    @add.validator  # wrong
    def check_number(self, item: int) -> None: ...

    @workflow.update
    def rename(self, old: str, new: str) -> Item:
        return Item(old + new, 0)

    @workflow.run  # wrong
    def not_async(self) -> None: ...


@app.workflow
class Parent:
    def __init__(self, ctx: WorkflowContext) -> None: ...

    @workflow.run
    async def main(self) -> int:
        child = Order.run.schedule("Ann")
        child.handle.signal(Order.pay, 5)
        child.handle.signal(Refund.pay, 5)  # wrong
        names = await child
        await Order.run.schedule(7)  # wrong
        return len(names) + len(names[0])


class Audited:
    @workflow.query
    def audit(self) -> str:
        return ""


@app.workflow
class Refund(Audited):
    def __init__(self, ctx: WorkflowContext) -> None: ...

    @workflow.run
    async def run(self) -> None: ...

    @workflow.query
    def total(self) -> float:
        return 0

    @workflow.signal
    def pay(self, amount: int) -> None: ...

    @workflow.update
    def add(self, item: Item) -> float:
        return item.price


@app.workflow
async def plain(ctx: WorkflowContext) -> str:
    return ""


def talks_to_the_wrong_class(run: str, any_run: WorkflowHandle[float]) -> None:
    order, refund, function = Order.run.start("Ann"), Refund.run.start(), plain.start()
    order.query(Refund.total)  # wrong
    order.signal(Refund.pay, 5)  # wrong
    order.update(Refund.add, Item("tea", 3))  # wrong
    order.start_update(Refund.add, Item("tea", 3))  # wrong
    order.update_handle("a", Refund.add)  # wrong
    order.options(id="a").update(Refund.add, Item("tea", 3))  # wrong
    function.query(Order.total)  # wrong
    text: str = refund.query(Refund.audit)
    text = refund.query(Audited.audit)
    order.query(Audited.audit)  # wrong
    app.workflow_run(run).query(Order.total)
    app.workflow_run(run, Order.run).query(Order.total)
    app.workflow_run(run, Order.run).query(Refund.total)  # wrong
    Order.run.find("o-1").query(Refund.total)  # wrong
    any_run.query(Order.total)
    audited: WorkflowHandle[None, Audited] = refund
    text = audited.query(Audited.audit)
    Order.run.starting(id="o-1", signal=(Refund.pay, 7))  # wrong
    Order.run.starting(id="o-1", update=(Refund.add, Item("tea", 3)))  # wrong
    total: float = Order.run.starting(id="o-1", update=(Order.add, Item("tea", 3))).execute("Ann")
    total = plain.starting(id="o-1", update=("add", Item("tea", 3))).execute()
    Order.run.starting(id="o-1", update=(Order.add, Item("tea", 3))).execute(7)  # wrong
    text = Order.run.starting(id="o-1", update=(Order.add, Item("tea", 3))).execute("Ann")  # wrong
    item: Item = Order.run.starting(id="o-1", update=(Order.rename, "tea", "milk"), update_id="a").execute("Ann")
    item = Order.run.starting(id="o-1", update=(Order.cut, "tea")).execute("Ann")
    item = Order.run.starting(id="o-1", update=(Order.cut, "tea", 3)).execute("Ann")
    number: int = Order.run.starting(id="o-1", update=(Order.count,), tags=["a"]).execute("Ann")
    Order.run.starting(id="o-1", update=(Order.add, "tea"))  # wrong
    Order.run.starting(id="o-1", update=(Order.add,))  # wrong
    Order.run.starting(id="o-1", update=(Order.add, Item("tea", 3), 7))  # wrong
    Order.run.starting(id="o-1", update=(Order.rename, "tea", 7))  # wrong
    Order.run.starting(id="o-1", update=(Order.total,))  # wrong
    Order.run.starting(id="o-1", signal=(Order.pay, "five"))  # wrong
    Order.run.starting(id="o-1", signal=(Order.pay, None))  # wrong
    Order.run.starting(id="o-1", signal=(Order.close, None)).start("Ann")
    Order.run.starting(id="o-1", signal=(Order.add, Item("tea", 3)))  # wrong
    Order.run.starting(id="o-1", signal=("pay", "five")).start("Ann")
    Order.run.starting(ids="o-1")  # wrong
    Order.run.signal_many(Order.pay, [(order, 5), (run, 6)])
    Order.run.signal_many(Order.close, [(order, None)])
    Order.run.signal_many("pay", [(order, "five")])
    Order.run.signal_many(Refund.pay, [(order, 5)])  # wrong
    Order.run.signal_many(Order.pay, [(order, "five")])  # wrong
    Order.run.signal_many(Order.add, [(order, 5)])  # wrong
    missed: list[str] = Order.run.signal_many(Order.pay, [(order, 5)]).unknown
    names: list[str] = app.workflow_run(run, Order.run).result()
    print(text, total, names, item, number, missed)


def talks() -> None:
    handle = Order.run.start("Ann", limit=7)
    Order.run.start("Ann", limits=7)  # wrong
    Order.run.starting(id="o-1", signal=(Order.pay, 7)).start("Ann")
    handle.signal(Order.pay, 5)
    handle.signal(Order.pay, amount=5)
    handle.signal(Order.pay, "five")  # wrong
    handle.signal(Order.pay)  # wrong
    handle.signal(Order.total)  # wrong
    handle.signal("pay", 5)
    total: float = handle.query(Order.total)
    total = handle.query(Order.total, currency="USD")
    text: str = handle.query(Order.total)  # wrong
    handle.query(Order.total, 7)  # wrong
    handle.query(Order.add, Item("tea", 3))  # wrong
    total = handle.update(Order.add, Item("tea", 3))
    handle.update(Order.add, "tea")  # wrong
    item: Item = handle.update(Order.rename, "tea", new="milk")
    text = handle.update(Order.rename, "tea", new="milk")  # wrong
    handle.update("add", 7)
    total = handle.options(id="a", timeout=5).start_update(Order.add, Item("tea", 3)).result(timeout=3)
    handle.start_update(Order.add, "tea")  # wrong
    total = handle.update_handle("a", Order.add).result()
    text = handle.update_handle("a", Order.add).result()  # wrong
    handle.options(ids="a")  # wrong
    names: list[str] = handle.result()
    number: int = handle.result()  # wrong
    print(total, text, item, names, number)


async def talks_async() -> None:
    handle = await Order.run.astart("Ann")
    await handle.asignal(Order.pay, 5)
    await handle.asignal(Order.pay, "five")  # wrong
    total: float = await handle.aquery(Order.total)
    total += await handle.aupdate(Order.add, Item("tea", 3))
    await handle.aupdate(Order.add, 3)  # wrong
    total = await (await handle.astart_update(Order.add, Item("tea", 3))).aresult()
    await handle.astart_update(Order.add, 3)  # wrong
    await Order.run.asignal_many(Order.pay, [(handle, 5)])
    await Order.run.asignal_many(Order.pay, [(handle, "five")])  # wrong
    total = await Order.run.starting(id="o-1", update=(Order.add, Item("tea", 3))).aexecute("Ann")
    name: str = await Order.run.starting(id="o-1", update=(Order.add, Item("tea", 3))).aexecute("Ann")  # wrong
    await handle.asignal(Refund.pay, 5)  # wrong
    await handle.aquery(Refund.total)  # wrong
    await handle.aupdate(Refund.add, Item("tea", 3))  # wrong
    await handle.astart_update(Refund.add, Item("tea", 3))  # wrong
    async with WorkflowTest() as test:
        run = await test.start(Order.run, "Ann")
        await run.signal(Order.pay, "five")  # wrong
        text: str = await run.query(Order.total)  # wrong
        await run.query(Refund.total)  # wrong
        await run.signal(Refund.pay, 5)  # wrong
        await run.update(Refund.add, Item("tea", 3))  # wrong
        item: Item = await run.update(Order.rename, "tea", "milk")
        names: list[str] = await run.result()
    print(total, text, item, names, name)
