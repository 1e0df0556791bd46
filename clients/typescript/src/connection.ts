// Requests to the API, their errors and their retries.

export interface ConnectionOptions {
  /** The address of the API; default: ORCHESTRATOR_API_URL, or http://127.0.0.1:8000. */
  url?: string;
  /** Default: ORCHESTRATOR_API_KEY. */
  key?: string;
  /** Seconds for which a repeatable request is retried; default 30. */
  retrySeconds?: number;
}

/** The API rejected a request; `type` is stable, such as `urn:orchestrator:error:WrongState`. */
export class ApiError extends Error {
  override readonly name = "ApiError";
  constructor(
    readonly status: number,
    readonly type: string,
    readonly detail: string,
    readonly data: Record<string, any>,
    readonly retryAfter: number | undefined,
  ) {
    super(`${status}: ${detail}`);
  }
}

/** No answer arrived: the API may or may not have processed the request. */
export class Unreachable extends Error {
  override readonly name = "Unreachable";
}

export interface RequestOptions {
  /** Seconds until the request times out. */
  seconds?: number;
  /** Send the request again if no answer arrived. */
  repeat?: boolean;
  headers?: Record<string, string>;
}

export class Connection {
  readonly #url: string;
  readonly #key: string | undefined;
  readonly #retrySeconds: number;

  constructor(options: ConnectionOptions = {}) {
    const environment: Record<string, string | undefined> = globalThis.process?.env ?? {};
    this.#url = (options.url ?? environment["ORCHESTRATOR_API_URL"] ?? "http://127.0.0.1:8000").replace(/\/+$/, "");
    this.#key = options.key ?? environment["ORCHESTRATOR_API_KEY"];
    this.#retrySeconds = options.retrySeconds ?? 30;
  }

  get<T>(path: string, options: RequestOptions = {}): Promise<T> {
    return this.#repeated("GET", path, undefined, { repeat: true, ...options });
  }

  /** Send the request once, or with `repeat` until an answer arrives. */
  post<T>(path: string, body: unknown, options: RequestOptions = {}): Promise<T> {
    return options.repeat ? this.#repeated("POST", path, body, options) : this.#send("POST", path, body, options);
  }

  async #repeated<T>(method: string, path: string, body: unknown, options: RequestOptions): Promise<T> {
    const until = Date.now() + this.#retrySeconds * 1_000;
    for (let failures = 0; ; failures++) {
      try {
        return await this.#send(method, path, body, options);
      } catch (error) {
        const again = error instanceof Unreachable || (error instanceof ApiError && [429, 502, 503, 504].includes(error.status));
        const pause = (error instanceof ApiError && error.retryAfter) || Math.min(5, 0.2 * 2 ** failures);
        if (!again || Date.now() + pause * 1_000 > until) throw error;
        await sleep(pause);
      }
    }
  }

  async #send<T>(method: string, path: string, body: unknown, options: RequestOptions): Promise<T> {
    const headers: Record<string, string> = { ...options.headers };
    if (body !== undefined) headers["Content-Type"] = "application/json";
    if (this.#key) headers["Authorization"] = `Bearer ${this.#key}`;
    const text = body === undefined ? null : JSON.stringify(body);
    let answer: Response;
    let read: string;
    try {
      const signal = AbortSignal.timeout((options.seconds ?? 30) * 1_000);
      answer = await fetch(this.#url + path, { method, headers, body: text, signal });
      read = await answer.text();
    } catch (error) {
      const cause = error instanceof Error && error.cause ? ` (${error.cause})` : "";
      throw new Unreachable(`${method} ${path}: ${error}${cause}`);
    }
    if (answer.ok) return (read ? JSON.parse(read) : null) as T;
    let problem: Record<string, any> = {};
    try {
      problem = JSON.parse(read);
    } catch {
      problem = { detail: read.slice(0, 200) }; // not the API's JSON: a proxy answered
    }
    const after = Number(answer.headers.get("Retry-After") ?? NaN);
    const detail = problem["detail"] || problem["title"] || answer.statusText;
    throw new ApiError(answer.status, problem["type"] ?? "", detail, problem["data"] ?? {}, after >= 0 ? after : undefined);
  }
}

/** Wait for a number of seconds, or until the signal aborts. */
export function sleep(seconds: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    if (signal?.aborted) return resolve();
    const end = (): void => {
      clearTimeout(timer);
      signal?.removeEventListener("abort", end);
      resolve();
    };
    const timer = setTimeout(end, seconds * 1_000);
    signal?.addEventListener("abort", end);
  });
}
