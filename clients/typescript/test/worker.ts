// The program of the conformance suite: npm run conformance.
import { Failure, Orchestrator, type Context } from "../src/index.js";

const given = process.env;

/** Wait for a number of seconds, or until the work must stop. */
function wait(seconds: number, { signal }: Context): Promise<void> {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, seconds * 1_000);
    signal.addEventListener("abort", () => (clearTimeout(timer), reject(signal.reason)));
  });
}

async function conformance(input: any, context: Context): Promise<unknown> {
  switch (input.do) {
    case "return":
      return input.value;
    case "large":
      return "x".repeat(input.bytes);
    case "fail":
      throw new Failure(input.message, { kind: input.kind, retryable: input.retryable, retryAfter: input.retry_after });
    case "log":
      for (const line of input.lines) context.log(line);
      return null;
    case "progress":
      context.progress(input.fraction, input.text);
      await wait(input.seconds, context);
      return null;
    case "sleep":
      await wait(input.seconds, context);
      return context.work.attempt;
    default:
      throw new Failure(`Expected another word than ${input.do}`, { retryable: false });
  }
}

const worker = new Orchestrator().worker(
  { conformance },
  { concurrency: Number(given["CONFORMANCE_CONCURRENCY"]), drainSeconds: Number(given["CONFORMANCE_DRAIN"]) },
);
process.once("SIGTERM", () => worker.stop());
await worker.run();
process.exit(0);
