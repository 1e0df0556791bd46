// A worker in JavaScript, for tasks with the executor `pull`: it asks for work of the service `count`, and counts words.
//
//     API=http://localhost:8000 KEY=orc_… node pull.js
//
// A heartbeat keeps the lease while the work takes; what was handed in is sent again until it is known to be safe (200),
// or not wanted any more (404, 409). If the API refuses what is handed in (a result that is too large, more than 1,000
// lines of `logs`), an error is handed in instead, so that the attempt fails at once.
const api = process.env.API ?? "http://localhost:8000";
const headers = { "Content-Type": "application/json" };
if (process.env.KEY) headers.Authorization = `Bearer ${process.env.KEY}`;
const sleep = (seconds) => new Promise((resolve) => setTimeout(resolve, seconds * 1000));

async function ask(what, body) {
  try {
    return await fetch(`${api}/queue/${what}`, { method: "POST", headers, body: JSON.stringify(body) });
  } catch (error) {
    return new Response(String(error), { status: 503 });
  }
}

const count = async ({ text }) => text.split(/\s+/).filter(Boolean).length;

for (;;) {
  const answer = await ask("poll", { worker_id: `node-${process.pid}`, services: ["count"] });
  if (answer.status === 204) continue;
  if (answer.status !== 200) { console.error("poll:", await answer.text()); await sleep(2); continue; }
  const { queue_id, input, lease } = await answer.json();
  const beats = setInterval(() => ask("heartbeat", { queue_id }), (lease * 1000) / 4);
  let said = await count(input).then((result) => ({ result }), (error) => ({ error: String(error) }));
  for (;;) {
    const { status } = await ask("complete", { queue_id, ...said });
    if ([200, 404, 409].includes(status)) break;
    if ([400, 413, 422].includes(status)) said = { error: `The API refused the result: ${status}` };
    await sleep(2);
  }
  clearInterval(beats);
  if (process.env.ONCE) break;
}
