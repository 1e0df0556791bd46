// The client's test program: it uses everything except the worker, and exits with 0 if all of it works.
import assert from "node:assert/strict";
import { ApiError, Ended, Orchestrator, ResultTimeout } from "../src/index.js";

const client = new Orchestrator();
const args = [1, 2];
const added = await client.enqueue<number>("project.add", { args });
assert.equal(await added.result(60), 3);
assert.equal(await client.task(added.id).status(), "success");

const once = { args, idempotencyKey: "ts-1" };
assert.equal((await client.enqueue("project.add", once)).id, (await client.enqueue("project.add", once)).id);

const unique = { args, uniqueKey: "ts-2", delay: 600 } as const;
const waiting = await client.enqueue("project.add", { ...unique, onDuplicate: "return" });
assert.equal((await client.enqueue("project.add", { ...unique, onDuplicate: "return" })).id, waiting.id);
await assert.rejects(
  client.enqueue("project.add", { ...unique, onDuplicate: "raise" }),
  (error) => error instanceof ApiError && error.status === 409,
);
await assert.rejects(waiting.result(0.5), ResultTimeout);
await waiting.cancel();
await assert.rejects(waiting.result(60), (error) => error instanceof Ended && error.status === "cancelled");

const failing = await client.enqueue("project.add", { args: ["a", 1], retries: 0 });
await assert.rejects(failing.result(60), (error) => error instanceof Ended && Boolean(error.problem?.kind));

const run = await client.start<string[]>("project.basket", { key: "ts-3" });
assert.equal((await client.start("project.basket", { key: "ts-3" })).id, run.id);
await run.signal("add", "tea ☕");
while ((await run.query<string[]>("items")).length === 0);
assert.equal(await run.update<string>("rename", [0, "coffee ☕"]), "tea ☕");
await run.signal("add", "pay");
assert.deepEqual(await run.result(60), ["coffee ☕"]);
