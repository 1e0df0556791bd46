// Client and worker for the HTTP API: enqueue tasks, start runs, wait for them, and run workers.
import { ApiError, Connection, type ConnectionOptions } from "./connection.js";
import { Worker, type Handler, type WorkerOptions } from "./worker.js";

export { ApiError, Unreachable, type ConnectionOptions } from "./connection.js";
export { Failure, Worker, type Context, type Handler, type Work, type WorkerOptions } from "./worker.js";

export type TaskStatus =
  | "pending" | "dispatched" | "running" | "success" | "failed" | "cancelled" | "skipped"; // prettier-ignore

/** Options of a task: those of `POST /api/v1/tasks`. Times are seconds, or a Date. */
export interface EnqueueOptions {
  args?: unknown[];
  kwargs?: Record<string, unknown>;
  queue?: string;
  priority?: number;
  delay?: number;
  eta?: Date;
  expires?: number | Date;
  retries?: number;
  timeout?: number;
  /** Only one open task may have this key. */
  uniqueKey?: string;
  onDuplicate?: "return" | "replace" | "raise";
  /** Prevents duplicates if a request is repeated; default: a random key. */
  idempotencyKey?: string;
  concurrencyKey?: string;
  storeResult?: boolean;
  redact?: string[];
  headers?: Record<string, string>;
}

/** Options of a run: those of `POST /api/v1/workflows/{name}/runs`. */
export interface StartOptions {
  params?: Record<string, unknown>;
  args?: unknown[];
  kwargs?: Record<string, unknown>;
  /** Prevents a second run if a request is repeated; default: a random key. */
  key?: string;
  tags?: string[];
  queue?: string;
  timeout?: number;
  pinned?: boolean;
}

export interface Problem {
  kind: string;
  message: string;
  traceback: string;
  data: Record<string, unknown>;
}

/** The task or run ended without a result: failed, cancelled or skipped. */
export class Ended extends Error {
  override readonly name = "Ended";
  constructor(
    readonly id: string,
    readonly status: string,
    readonly problem: Problem | undefined,
  ) {
    super(problem ? `${id} is ${status}: ${problem.kind}: ${problem.message}` : `${id} is ${status}`);
  }
}

/** The task or run did not end in time; it continues. */
export class ResultTimeout extends Error {
  override readonly name = "ResultTimeout";
}

interface Stored {
  path: string;
}

interface TaskAnswer {
  task: { status: TaskStatus };
  result: any;
  result_stored: Stored | null;
  error: Problem | null;
  progress: { fraction: number; text: string } | null;
}

interface RunAnswer {
  run: { status: string };
  code: { result: any; result_stored: Stored | null; error: Problem | null } | null;
}

const OPEN = new Set(["pending", "dispatched", "running"]);
const LONGEST_WAIT = 30;

/** Long-poll, each time for up to half a minute, until the status is final. */
async function ended<T>(connection: Connection, path: string, timeout: number, status: (answer: T) => string): Promise<T> {
  const until = Date.now() + timeout * 1_000;
  for (;;) {
    const wait = Math.max(0, Math.min(LONGEST_WAIT, (until - Date.now()) / 1_000));
    const answer = await connection.get<T>(`${path}?wait=${wait}`, { seconds: wait + 30 });
    if (!OPEN.has(status(answer))) return answer;
    if (Date.now() >= until) throw new ResultTimeout(`${path} has not ended within ${timeout} s`);
  }
}

export class TaskHandle<Result = any> {
  readonly #path: string;
  constructor(
    private readonly connection: Connection,
    readonly id: string,
    /** Why the task may not run: no live worker knows its name. */
    readonly warning = "",
  ) {
    this.#path = `/api/v1/tasks/${encodeURIComponent(id)}`;
  }

  async status(): Promise<TaskStatus> {
    return (await this.connection.get<TaskAnswer>(this.#path)).task.status;
  }

  async progress(): Promise<{ fraction: number; text: string } | null> {
    return (await this.connection.get<TaskAnswer>(this.#path)).progress;
  }

  /** Wait for the end; throws `Ended` if there is no result, and `ResultTimeout` after the given seconds. */
  async result(timeout = Infinity): Promise<Result> {
    const found = await ended<TaskAnswer>(this.connection, this.#path, timeout, (answer) => answer.task.status);
    if (found.task.status !== "success") throw new Ended(this.id, found.task.status, found.error ?? undefined);
    return found.result_stored ? await this.connection.get(found.result_stored.path) : found.result;
  }

  async cancel(): Promise<void> {
    await this.connection.post(`${this.#path}/cancel`, {}, { repeat: true });
  }
}

export class RunHandle<Result = any> {
  readonly #path: string;
  constructor(
    private readonly connection: Connection,
    readonly id: string,
  ) {
    this.#path = `/api/v1/runs/${encodeURIComponent(id)}`;
  }

  async status(): Promise<string> {
    return (await this.connection.get<RunAnswer>(this.#path)).run.status;
  }

  /** Wait for the end; return the result of a workflow as code, or the outputs of a DAG by step. */
  async result(timeout = Infinity): Promise<Result> {
    const { run, code } = await ended<RunAnswer>(this.connection, this.#path, timeout, (answer) => answer.run.status);
    if (run.status !== "success") throw new Ended(this.id, run.status, code?.error ?? undefined);
    if (code) return code.result_stored ? await this.connection.get(code.result_stored.path) : code.result;
    return (await this.connection.get<{ outputs: Result }>(`${this.#path}/outputs`)).outputs;
  }

  /** Send a signal without retries: after `Unreachable` the signal may have arrived. */
  async signal(name: string, value: unknown = null): Promise<void> {
    await this.connection.post(`${this.#path}/signals/${encodeURIComponent(name)}`, { value });
  }

  async resolve(promise: string, value: unknown = null): Promise<void> {
    await this.connection.post(`${this.#path}/promises/${encodeURIComponent(promise)}/resolve`, { value });
  }

  /** Call a query of the workflow's code. */
  query<Answer = any>(name: string, args: unknown[] = [], kwargs: Record<string, unknown> = {}): Promise<Answer> {
    return this.#ask("queries", name, args, kwargs, true);
  }

  /** Call an update of the workflow's code, and wait for its answer. Sent without retries, like a signal. */
  update<Answer = any>(name: string, args: unknown[] = [], kwargs: Record<string, unknown> = {}): Promise<Answer> {
    return this.#ask("updates", name, args, kwargs, false);
  }

  async cancel(): Promise<void> {
    await this.connection.post(`${this.#path}/cancel`, {}, { repeat: true });
  }

  async #ask(kind: string, name: string, args: unknown[], kwargs: object, repeat: boolean): Promise<any> {
    const path = `${this.#path}/${kind}/${encodeURIComponent(name)}`;
    return (await this.connection.post<{ result: any }>(path, { args, kwargs }, { repeat, seconds: 60 })).result;
  }
}

export class Orchestrator {
  readonly #connection: Connection;

  constructor(options: ConnectionOptions = {}) {
    this.#connection = new Connection(options);
  }

  /** Enqueue a task. The task is durable when the promise resolves. */
  async enqueue<Result = any>(name: string, options: EnqueueOptions = {}): Promise<TaskHandle<Result>> {
    const body: Record<string, unknown> = { name };
    for (const [key, value] of Object.entries(options)) body[key.replace(/[A-Z]/g, (found) => `_${found.toLowerCase()}`)] = value;
    if (options.uniqueKey === undefined) body["idempotency_key"] ??= globalThis.crypto.randomUUID();
    const repeat = options.uniqueKey === undefined || options.onDuplicate === "return";
    const { id, warning } = await this.#connection.post<{ id: string; warning?: string }>("/api/v1/tasks", body, { repeat });
    return new TaskHandle<Result>(this.#connection, id, warning);
  }

  /** Return the handle of an existing task. */
  task<Result = any>(id: string): TaskHandle<Result> {
    return new TaskHandle<Result>(this.#connection, id);
  }

  /** Start a run of a workflow: a DAG, or code. */
  async start<Result = any>(workflow: string, options: StartOptions = {}): Promise<RunHandle<Result>> {
    const body = { key: globalThis.crypto.randomUUID(), ...options };
    const path = `/api/v1/workflows/${encodeURIComponent(workflow)}/runs`;
    const { id } = await this.#connection.post<{ id: string }>(path, body, { repeat: true });
    return new RunHandle<Result>(this.#connection, id);
  }

  /** Return the handle of an existing run. */
  run<Result = any>(id: string): RunHandle<Result> {
    return new RunHandle<Result>(this.#connection, id);
  }

  /** Return a worker for tasks with the executor `pull`; `handlers` has a function for each service. */
  worker(handlers: Record<string, Handler>, options: WorkerOptions = {}): Worker {
    return new Worker(this.#connection, handlers, options);
  }
}
