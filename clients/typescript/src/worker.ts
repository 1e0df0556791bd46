// The worker of docs/pull-protocol.md: it pulls work over HTTP.
import { ApiError, Connection, Unreachable, sleep } from "./connection.js";

/** Leased work, as the API returns it. */
export interface Work<Input = any> {
  readonly queue_id: string;
  readonly task_id: string;
  readonly task: string;
  readonly service: string;
  /** The same for every lease of the work: use it to recognize a repetition. */
  readonly request_id: string;
  /** Counts the leases of this try, from 1. */
  readonly attempt: number;
  readonly lease: number;
  readonly input: Input;
  readonly params: Record<string, unknown>;
}

export interface Context<Input = any> {
  readonly work: Work<Input>;
  /** Aborts when the work is cancelled, its lease is lost, or the worker's drain time is over: stop then. */
  readonly signal: AbortSignal;
  /** Add a line to the log of the task. The lines are sent with the result. */
  log(line: string): void;
  /** Report the progress of the work, from 0 to 1, with the next heartbeat. */
  progress(fraction: number, text?: string): void;
}

export type Handler<Input = any, Result = unknown> = (input: Input, context: Context<Input>) => Result | Promise<Result>;

/** Describes the failure of the work, thrown by a handler. Any other error is retryable, and its name is the kind. */
export class Failure extends Error {
  constructor(
    message: string,
    readonly options: { kind?: string; retryable?: boolean; retryAfter?: number; detail?: string } = {},
  ) {
    super(message);
    this.name = options.kind ?? "Failure";
  }
}

export interface WorkerOptions {
  /** Number of handlers that run at the same time; default 1. */
  concurrency?: number;
  /** Name of the worker in the dashboard; default: a random name. */
  workerId?: string;
  /** Seconds for running work after `stop`; then the work is returned. Default 30. */
  drainSeconds?: number;
  /** Seconds that a poll waits for work; `stop` waits for the poll, too. Default 5. */
  pollSeconds?: number;
  /** Called with warnings; default: console.warn. */
  onWarning?: (text: string) => void;
}

const MOST_LINES = 1_000;
const FINAL = new Set([400, 401, 403, 422]);

/** Work that a handler processes. */
class Job implements Context {
  readonly #stopping = new AbortController();
  readonly signal = this.#stopping.signal;
  readonly lines: string[] = [];
  dropped = 0;
  /** The handler has returned: now only the answer to the completion counts. */
  isDone = false;
  said: { fraction: number; text: string } | undefined;

  constructor(readonly work: Work) {}

  log(line: string): void {
    if (this.lines.length < MOST_LINES - 1) this.lines.push(line);
    else this.dropped += 1;
  }

  progress(fraction: number, text = ""): void {
    this.said = { fraction: Math.min(1, Math.max(0, fraction)), text: text.slice(0, MOST_LINES) };
  }

  stop(reason: string): void {
    this.#stopping.abort(new Error(reason));
  }
}

export class Worker {
  readonly #connection: Connection;
  readonly #handlers: ReadonlyMap<string, Handler>;
  readonly #options: Required<WorkerOptions>;
  readonly #stopping = new AbortController();
  readonly #jobs = new Map<Job, Promise<void>>();

  constructor(connection: Connection, handlers: Record<string, Handler>, options: WorkerOptions = {}) {
    this.#connection = connection;
    this.#handlers = new Map(Object.entries(handlers));
    this.#options = {
      concurrency: 1,
      workerId: `node-${globalThis.crypto.randomUUID().slice(0, 8)}`,
      drainSeconds: 30,
      pollSeconds: 5,
      onWarning: (text) => console.warn(text),
      ...options,
    };
  }

  /** Stop polling, and let `run` return when running work has ended or was returned. */
  stop(): void {
    this.#stopping.abort();
  }

  /** Work until `stop`. Throws if the API permanently refuses polls, for example because of a wrong key. */
  async run(): Promise<void> {
    const ended = new AbortController();
    const slots = Array.from({ length: this.#options.concurrency }, () => this.#slot());
    const drained = this.#drained(ended.signal);
    try {
      await Promise.race([Promise.all(slots), drained]);
    } catch (error) {
      this.stop();
      await Promise.race([Promise.allSettled(slots), drained]);
      throw error;
    } finally {
      ended.abort();
      await drained;
    }
  }

  async #slot(): Promise<void> {
    let failures = 0;
    while (!this.#stopping.signal.aborted) {
      const { workerId, pollSeconds } = this.#options;
      const asked = { worker_id: workerId, services: [...this.#handlers.keys()], wait: pollSeconds };
      let work: Work | null;
      try {
        work = await this.#connection.post<Work | null>("/queue/poll", asked, { seconds: pollSeconds + 30 });
        failures = 0;
      } catch (error) {
        if (error instanceof ApiError && FINAL.has(error.status)) throw error;
        this.#options.onWarning(`poll: ${error}`);
        await this.#pause(error, failures++, this.#stopping.signal);
        continue;
      }
      if (work === null) continue;
      if (this.#stopping.signal.aborted) await this.#giveBack(work);
      else await this.#perform(new Job(work));
    }
  }

  async #perform(job: Job): Promise<void> {
    const ended = new AbortController();
    const beating = this.#beat(job, ended.signal);
    const performing = this.#outcome(job).then((outcome) => {
      job.isDone = true;
      return this.#complete(job, outcome, ended.signal);
    });
    this.#jobs.set(job, performing);
    try {
      await performing;
    } finally {
      this.#jobs.delete(job);
      ended.abort();
      await beating;
    }
  }

  /** Run the handler and return the body of the completion. */
  async #outcome(job: Job): Promise<Record<string, unknown>> {
    const { work } = job;
    try {
      const handler = this.#handlers.get(work.service)!;
      const result = (await handler(work.input, job)) ?? null;
      JSON.stringify(result); // throws for invalid results before anything is sent
      return { result };
    } catch (error) {
      return { error: described(error) };
    }
  }

  async #complete(job: Job, outcome: Record<string, unknown>, ended: AbortSignal): Promise<void> {
    const lines = job.dropped ? [...job.lines, `${job.dropped} more lines were dropped`] : job.lines;
    let body: Record<string, unknown> = { queue_id: job.work.queue_id, ...outcome, logs: lines };
    for (let failures = 0; !job.signal.aborted && !ended.aborted; failures++) {
      try {
        await this.#connection.post("/queue/complete", body, { seconds: 60 });
        return;
      } catch (error) {
        const status = error instanceof ApiError ? error.status : 0;
        if (status === 404 || status === 409) return; // the API no longer needs the outcome
        this.#options.onWarning(`complete ${job.work.queue_id}: ${error}`);
        if ((status === 400 || status === 413 || status === 422) && !("refused" in outcome)) {
          outcome = { refused: true };
          const message = `The API refused the result: ${error}`;
          body = { queue_id: job.work.queue_id, error: { kind: "ResultRefused", message, retryable: false } };
          continue;
        }
        await this.#pause(error, failures, job.signal);
      }
    }
  }

  /** Renew the lease until the work has ended; stop the handler if the lease is lost or the work is cancelled. */
  async #beat(job: Job, ended: AbortSignal): Promise<void> {
    const { queue_id, lease } = job.work;
    let shown: unknown;
    while (!ended.aborted && !job.signal.aborted) {
      await sleep(lease / 3, ended);
      if (ended.aborted || job.signal.aborted) return;
      const progress = job.said !== shown ? job.said : undefined;
      try {
        await this.#connection.post("/queue/heartbeat", { queue_id, ...(progress && { progress }) }, { seconds: lease / 3 });
        shown = progress ?? shown;
      } catch (error) {
        const status = error instanceof ApiError ? error.status : 0;
        if (!job.isDone && (status === 404 || status === 409)) job.stop(String(error));
      }
    }
  }

  /** Resolve when the drain time after `stop` is over: the worker then stops and returns running work. */
  async #drained(ended: AbortSignal): Promise<void> {
    await new Promise((resolve) => this.#stopping.signal.addEventListener("abort", resolve, { once: true }));
    await sleep(this.#options.drainSeconds, ended);
    const giving = [...this.#jobs].map(async ([job, performing]) => {
      if (job.signal.aborted) return;
      job.stop("The worker stops");
      await Promise.race([performing.catch(() => undefined), sleep(1)]);
      await this.#giveBack(job.work);
    });
    await Promise.all(giving);
  }

  async #giveBack(work: Work): Promise<void> {
    try {
      await this.#connection.post("/queue/return", { queue_id: work.queue_id }, { seconds: 10 });
    } catch (error) {
      this.#options.onWarning(`return ${work.queue_id}: ${error}`); // the lease will expire
    }
  }

  async #pause(error: unknown, failures: number, signal: AbortSignal): Promise<void> {
    const asked = error instanceof ApiError ? error.retryAfter : undefined;
    const known = error instanceof ApiError || error instanceof Unreachable;
    if (!known) throw error;
    await sleep(asked ?? Math.min(10, 0.5 * 2 ** failures) * (0.75 + Math.random() / 2), signal);
  }
}

function described(error: unknown): Record<string, unknown> {
  if (!(error instanceof Error)) return { kind: "Error", message: String(error) };
  const { retryable, retryAfter, detail } = error instanceof Failure ? error.options : {};
  return {
    kind: error.name,
    message: error.message,
    detail: detail ?? error.stack ?? "",
    ...(retryable !== undefined && { retryable }),
    ...(retryAfter !== undefined && { retry_after: retryAfter }),
  };
}
