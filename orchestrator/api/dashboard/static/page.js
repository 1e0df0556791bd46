// What a page does beyond its HTML: it stays up to date, shows times in the reader's zone, copies ids, knows keys.
"use strict";
(() => {
  const content = () => document.getElementById("content");
  const HEARD = 5000; // milliseconds after which what was announced is no longer found there
  let silence = null;
  function announce(text) {
    document.getElementById("announced").textContent = text;
    clearTimeout(silence);
    silence = setTimeout(() => { document.getElementById("announced").textContent = ""; }, HEARD);
  }

  // -- times

  const UNITS = [[86400, "d"], [3600, "h"], [60, "m"], [1, "s"]];
  const TIMES = { ago: "ago", local: "local", utc: "UTC" }; // how times are shown: ages, or moments in a zone
  let times = "ago", exact, clock, precise, hour, moment;
  try { times = localStorage.getItem("orchestrator-times") in TIMES ? localStorage.getItem("orchestrator-times") : "ago"; } catch (error) { /* not kept */ }

  const zone = () => TIMES[times === "utc" ? "utc" : "local"];

  function makeFormats() {
    const inZone = times === "utc" ? { timeZone: "UTC" } : {};
    const minute = { hour: "2-digit", minute: "2-digit", hour12: false, ...inZone };
    exact = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "long", ...inZone });
    clock = new Intl.DateTimeFormat(undefined, { second: "2-digit", ...minute });
    precise = new Intl.DateTimeFormat("sv", { second: "2-digit", fractionalSecondDigits: 3, ...minute });
    hour = new Intl.DateTimeFormat(undefined, minute);
    moment = new Intl.DateTimeFormat("sv", { year: "numeric", month: "2-digit", day: "2-digit", second: "2-digit", ...minute });
    for (const button of document.querySelectorAll("[data-times]")) button.textContent = `Times: ${TIMES[times]}`;
    for (const field of document.querySelectorAll("[data-zone]")) {
      const zoneNow = zone();
      if (field.value && field.dataset.zone !== zoneNow) field.value = shifted(field.value, zoneNow === "UTC");
      field.dataset.zone = field.previousElementSibling.textContent = zoneNow;
    }
  }

  // The value of a field for times in the other zone: in UTC, or by the reader's clock.
  function shifted(text, isToUtc) {
    const at = new Date(isToUtc ? text : `${text}Z`);
    return isToUtc ? at.toISOString().slice(0, 16) : new Date(at - at.getTimezoneOffset() * 60000).toISOString().slice(0, 16);
  }

  let submitter = null; // the button that sends a form

  // The server takes times of a form as UTC.
  document.addEventListener("formdata", (event) => {
    for (const field of event.target.querySelectorAll("[data-zone=local]")) {
      if (field.value) event.formData.set(field.name, shifted(field.value, true));
    }
    if ("params" in event.target.dataset) gatherParams(event.target, event.formData);
    if (event.target.getAttribute("id") === "chosen") { // its own id is hidden by fields of that name
      const boxes = [...document.querySelectorAll("input[name=id][form=chosen]:checked")];
      event.formData.delete("id");
      for (const box of boxes.filter((one) => isFor(one, submitter))) event.formData.append("id", box.value);
    }
  });

  // A filter that was refused stays as it was typed.
  for (const [name, value] of document.querySelector("[data-refused]") ? new URLSearchParams(location.search) : []) {
    for (const field of document.querySelectorAll(`form[role=search] [name="${CSS.escape(name)}"]`)) {
      if (field.type === "checkbox") field.checked ||= field.value === value;
      else field.value = value;
    }
  }

  makeFormats();

  let ahead = 0; // milliseconds by which the server's clock is ahead of the reader's, if that is wrong
  const WRONG = 5000; // milliseconds; what is less may be the way of the answer
  const serverNow = () => Date.now() + ahead;

  function setClock(answer) {
    const found = Date.parse(answer.headers.get("Date")) - Date.now();
    ahead = Math.abs(found) > WRONG ? found + 999 : 0; // the server's time has whole seconds: nothing that was is to come
  }

  function age(moment) {
    const seconds = (serverNow() - moment) / 1000;
    const [unit, name] = UNITS.find(([size]) => Math.abs(seconds) >= size) || [1, "s"];
    return seconds < 0 ? `in ${Math.round(-seconds / unit)}${name}` : `${Math.floor(seconds / unit)}${name} ago`;
  }

  // How long something has lasted that goes on, as the server says it.
  function lasting(start) {
    const seconds = Math.max(0, (serverNow() - start) / 1000);
    if (seconds < 59.95) return `${seconds.toFixed(1)}s`;
    const whole = Math.round(seconds);
    const place = UNITS.findIndex(([size]) => whole >= size);
    const [large, high] = UNITS[place], [small, low] = UNITS[place + 1];
    const rest = Math.floor((whole % large) / small);
    return rest ? `${Math.floor(whole / large)}${high} ${rest}${low}` : `${Math.floor(whole / large)}${high}`;
  }

  function showTimes() {
    for (const one of document.querySelectorAll("[data-title]")) {
      const at = new Date(one.dataset.at), inChart = one.nodeName === "title";
      const wanted = one.dataset.title.replace("%", inChart ? `${moment.format(at).slice(0, 16)} ${zone()}` : exact.format(at));
      const property = inChart ? "textContent" : "title";
      if (one[property] !== wanted) one[property] = wanted;
    }
    for (const time of document.querySelectorAll("time[datetime]")) {
      const at = new Date(time.dateTime);
      if (time.dataset.shown !== `${times} ${time.dateTime}`) {
        time.title = exact.format(at);
        time.dataset.shown = `${times} ${time.dateTime}`;
        if ("clock" in time.dataset) time.textContent = time.dataset.clock ? precise.format(at).replace(",", ".") : clock.format(at);
        if ("hour" in time.dataset) time.textContent = hour.format(at);
      }
      if ("clock" in time.dataset || "hour" in time.dataset || "zoned" in time.dataset) continue;
      const text = "lasts" in time.dataset ? lasting(at.getTime()) : "moment" in time.dataset ? `${moment.format(at)} ${zone()}` : times === "ago" ? age(at.getTime()) : moment.format(at);
      if (time.textContent !== text) time.textContent = text;
    }
  }

  // -- live

  const main = content();
  const light = document.querySelector(".live");
  const LIGHT = light?.title; // while all is well
  const REST = 1000; // milliseconds between two reads of a page
  const STALE = 2000; // milliseconds without the server after which the page says how old it is
  const AGAIN = 5000; // milliseconds until a stream that the server did not give is asked for again
  const PULSE = 4000; // milliseconds between two questions whether the system works: an outage sends no events
  const MOST_LINES = 2000; // of a log that are shown
  let version = "none"; // of the page that is shown
  let last = 0, timer = null, isReading = false, isAgain = false, isAsking = false;
  let knownAt = Date.now(), stale = null;
  let wire = "off"; // the stream of events: "on", "off" (nothing is to come), or "lost"
  let isAnswered = true; // what was asked for last could be read
  let awaits = false; // what was done does not show yet
  let isSending = false; // a form was sent, and the next page comes
  let outage = ""; // why nothing moves, though the server answers
  const isAway = () => wire === "lost" || !isAnswered;

  // What the light says: "on", "off" (its stream begins), "still" (it has none), "lost" (the page grows old), or "stopped"
  // (the page is new, and nothing moves).
  function lightUp() {
    if (!light) return;
    const before = light.dataset.state;
    light.dataset.state = isAway() ? "lost" : outage ? "stopped" : wire === "on" ? "on" : main.dataset.live ? "off" : "still";
    if (isAway()) {
      if (stale === null) { light.lastElementChild.textContent = "not connected"; stale = setTimeout(sayAge, STALE); }
      return;
    }
    clearTimeout(stale);
    stale = null;
    for (const one of document.querySelectorAll(".unsent")) one.remove();
    const still = main.dataset.poll ? `${"ended" in main.dataset ? "ended, " : ""}looked at every ${main.dataset.poll} s` : "not updated";
    const text = outage || (light.dataset.state === "still" ? still : "live");
    if (light.lastElementChild.textContent === text) return;
    light.lastElementChild.textContent = text;
    if (outage) announce(text);
    else if (["lost", "stopped"].includes(before)) announce(`Connected again: ${text}`);
  }

  function say(state) { wire = state; lightUp(); }
  function answered(is) { isAnswered = is; lightUp(); }

  function sayAge() {
    const at = hour.format(knownAt);
    light.lastElementChild.textContent = `not connected, showing what was known at ${at}`;
    announce(light.lastElementChild.textContent);
    for (const one of main.querySelectorAll("[data-stale]")) one.textContent = one.dataset.stale.replace("%", at);
  }

  // Shows a newer page, which lacks what the version has that was shown before.
  function update(text, newer) {
    const found = new DOMParser().parseFromString(text, "text/html");
    const said = main.querySelector(".said");
    const next = found.getElementById("content");
    if (said && !next.querySelector(".said")) next.prepend(document.importNode(said, true));
    holdAsked(next);
    const fresh = holdMarked(next);
    morph.isTorn = false;
    morph(main, next);
    sayFresh(fresh);
    version = morph.isTorn || fresh !== null || !newer ? "none" : newer;
    if (morph.isTorn) isAgain = true; // a row has gone to another table: read all of the page
    scaleGraphs();
    focusOpened();
    settle();
    if (document.title !== found.title) document.title = found.title;
    showTimes();
    countChosen();
  }

  async function refresh() {
    timer = null;
    if (isReading) { isAgain = true; return; }
    if (document.hidden) { isAgain = true; return; }
    if (isSending) return;
    isReading = true;
    try {
      const answer = await fetch(location.href, { headers: { Accept: "text/html", "If-None-Match": version, ...(awaits && { "Orchestrator-Awaits": "1" }) }, redirect: "manual" });
      // Who is no longer known is asked to log in, and who may no longer look is told so.
      if (answer.type === "opaqueredirect" || [401, 403].includes(answer.status)) { location.reload(); return; }
      if (answer.status >= 500) answered(false);
      if (!answer.ok && answer.status !== 304) return;
      if (answer.ok && !isSending) update(await answer.text(), answer.headers.get("ETag"));
      knownAt = Date.now();
      if (!stream && wire === "lost") wire = "off";
      listen(); // what had ended may have been begun again
      answered(true);
    } catch (error) { answered(false); } finally {
      isReading = false;
      last = Date.now();
      if (isAgain && !document.hidden) { isAgain = false; soon(); }
    }
  }

  function soon() {
    if (timer === null) timer = setTimeout(refresh, Math.max(50, last + REST - Date.now()));
  }

  // Asks whether the system works at all, whatever the events say; the page is read again when that has changed.
  async function ask() {
    if (!main.dataset.pulse || document.hidden || isAsking) return;
    isAsking = true;
    try {
      const answer = await fetch(main.dataset.pulse, { redirect: "manual", signal: AbortSignal.timeout(2 * PULSE) });
      if (answer.status >= 500) answered(false);
      setClock(answer);
      const isLive = main.dataset.live || main.dataset.poll; // others, such as forms, stay as they are
      if (isLive && (answer.type === "opaqueredirect" || answer.status === 401)) soon();
      if (!answer.ok) return;
      const said = await answer.json();
      const isNews = outage !== said.outage || (main.dataset.troubles ?? said.troubles) !== said.troubles;
      if (isLive && (isNews || !isAnswered)) soon();
      if (wire === "on") knownAt = Date.now();
      outage = said.outage;
      if (light) light.title = said.message || LIGHT;
      answered(true);
    } catch (error) { answered(false); } finally { isAsking = false; }
  }

  // -- the log of a task or a run: new lines are added at its end, older ones at its beginning, as the server renders them

  const logBox = document.getElementById("log");
  const chip = document.getElementById("log-end");
  const HEAR = 300; // milliseconds for which new lines are gathered
  let isFollowing = true, hearing = null, isAdding = false, added = 0;
  const { compare } = new Intl.Collator("en", { numeric: true });
  // Rows as they are stored, which those of several tasks are not in the order of time.
  const asStored = () => [...logBox.children].sort((one, other) => compare(one.dataset.entry, other.dataset.entry));

  function toEnd() {
    logBox.scrollTop = logBox.scrollHeight;
    isFollowing = true;
    added = 0;
    chip.hidden = true;
  }

  async function readLog(address) {
    const answer = await fetch(address, { headers: { Accept: "text/html" }, redirect: "manual" });
    if (!answer.ok) return null;
    const found = new DOMParser().parseFromString(await answer.text(), "text/html");
    return { box: found.getElementById("log"), before: found.getElementById("log-before"), silent: found.getElementById("silent") };
  }

  function wanted(more) {
    const query = new URLSearchParams(new FormData(document.getElementById("log-filter")));
    for (const [name, value] of Object.entries(more)) query.set(name, value);
    return `${logBox.dataset.after}?${query}`;
  }

  function hear() { if (logBox) hearing ??= setTimeout(addNew, HEAR); }

  async function addNew() {
    hearing = null;
    if (isAdding) { hear(); return; }
    isAdding = true;
    const last = logBox.dataset.last;
    let part = null;
    try { part = await readLog(wanted(last ? { after: last, ...(isFollowing && { tail: "true" }) } : {})); } catch (error) { hear(); } finally { isAdding = false; }
    if (!part || logBox.dataset.last !== last) return; // another search has been made meanwhile
    const rows = [...part.box.children];
    const before = logBox.querySelector("p:last-of-type")?.dataset.attempt;
    if (before && rows[0]?.nodeName === "DIV" && rows[1]?.dataset.attempt === before) rows.shift();
    const skipped = Number(part.before.dataset.earlier), shown = [...logBox.children]; // of very many, the last ones come
    if (part.box.dataset.last !== logBox.dataset.last) logBox.append(...rows);
    logBox.dataset.last = part.box.dataset.last;
    const lines = rows.filter((row) => row.nodeName === "P").length;
    if (!lines) return;
    hear(); // an answer need not have all of them
    document.getElementById("silent")?.remove();
    const gone = skipped ? shown : isFollowing ? asStored().slice(0, -MOST_LINES) : [];
    for (const row of gone) row.remove();
    const notices = [...gone.map((row) => row.matches(".l-dropped") && row.lastElementChild), ...part.before.querySelectorAll(".l-dropped")];
    if (gone.length || skipped) sayEarlier(gone.filter((row) => row.nodeName === "P").length + skipped, notices.filter(Boolean));
    showTimes();
    if (isFollowing) { toEnd(); return; }
    added += lines;
    chip.textContent = `↓ ${added} new ${added === 1 ? "line" : "lines"}`;
    chip.hidden = false;
  }

  const countedLines = (count) => `${count.toLocaleString("en")} ${count === 1 ? "line" : "lines"}`;

  // Lines have left the page at its beginning: they count among the older ones. What is missing there is still said.
  function sayEarlier(gone, notices) {
    const box = document.getElementById("log-before");
    box.dataset.earlier = Number(box.dataset.earlier) + gone;
    const older = box.querySelector("[data-older]") ?? Object.assign(document.createElement("a"), { className: "button", textContent: "Show older lines" });
    older.dataset.older = "";
    older.href = wanted({ before: asStored()[0].dataset.entry });
    const text = document.createElement("p");
    text.append(`${countedLines(Number(box.dataset.earlier))} before these. `, older);
    const dropped = notices.map((one) => Object.assign(document.createElement("p"), { className: "l-dropped", textContent: one.textContent }));
    box.replaceChildren(text, ...box.querySelectorAll(".l-dropped"), ...dropped);
  }

  async function addOlder(link) {
    const part = await readLog(link.href);
    if (!part) return;
    const height = logBox.scrollHeight - logBox.scrollTop;
    isFollowing = false;
    logBox.prepend(...part.box.children);
    document.getElementById("log-before").replaceWith(part.before);
    document.getElementById("silent")?.remove();
    showTimes();
    logBox.scrollTop = logBox.scrollHeight - height;
    announce("Older lines are shown");
  }

  async function filterLog() {
    const part = await readLog(wanted({}));
    if (!part) return;
    const kept = [...new FormData(document.getElementById("log-filter"))].filter(([, value]) => value);
    history.replaceState(null, "", `${location.pathname}${kept.length ? `?${new URLSearchParams(kept)}` : ""}`);
    logBox.replaceChildren(...part.box.children);
    logBox.dataset.last = part.box.dataset.last;
    document.getElementById("log-before").replaceWith(part.before);
    document.getElementById("silent")?.remove();
    if (part.silent) chip.after(part.silent);
    showTimes();
    toEnd();
    announce(countedLines(logBox.querySelectorAll("p").length));
  }

  if (logBox) {
    const wrap = document.querySelector("[data-wrap]");
    try { wrap.checked = localStorage.getItem("orchestrator-wrap") !== "no"; } catch (error) { /* not kept */ }
    logBox.classList.toggle("unwrapped", !wrap.checked);
    wrap.addEventListener("change", () => {
      logBox.classList.toggle("unwrapped", !wrap.checked);
      try { localStorage.setItem("orchestrator-wrap", wrap.checked ? "yes" : "no"); } catch (error) { /* not kept */ }
    });
    const filter = document.getElementById("log-filter");
    filter.addEventListener("submit", (event) => { event.preventDefault(); filterLog(); });
    filter.level.addEventListener("change", filterLog);
    chip.addEventListener("click", toEnd);
    logBox.addEventListener("scroll", () => {
      isFollowing = logBox.scrollHeight - logBox.scrollTop - logBox.clientHeight < 40;
      if (isFollowing) { added = 0; chip.hidden = true; } else if (stream && chip.hidden) { chip.textContent = "↓ Jump to the end"; chip.hidden = false; }
    });
    toEnd();
  }

  let stream = null, slot = null; // the slot is given back by calling it
  let isTaking = false, waiting = null;
  const SLOTS = 4;

  // A browser has six connections to a server, and a stream is one of them. All pages that are seen share a few slots for
  // streams; one that gets none is read again every few seconds.
  async function takeSlot() {
    if (!navigator.locks) return () => {};
    for (let number = 0; number < SLOTS; number += 1) {
      const free = await new Promise((taken) => {
        navigator.locks.request(`orchestrator-stream-${number}`, { ifAvailable: true }, (lock) => (lock ? new Promise(taken) : taken(null)));
      });
      if (free) return free;
    }
    return null;
  }

  function hangUp() {
    stream?.close();
    slot?.();
    stream = slot = null;
  }

  async function listen() {
    if (!main.dataset.live || stream || isTaking || document.hidden) return;
    isTaking = true;
    slot = await takeSlot();
    isTaking = false;
    const path = main.dataset.live;
    if (!slot) { say("on"); waiting ??= setTimeout(() => { waiting = null; soon(); }, AGAIN); return; } // then it asks again
    if (!path || document.hidden) { hangUp(); return; }
    stream = new EventSource(path);
    stream.onopen = () => say("on");
    stream.onerror = () => { if (stream.readyState === EventSource.CLOSED) refused(); else say("lost"); };
    // Something may have happened between the page and the stream, of which no event comes: each begins with a snapshot.
    for (const name of ["snapshot", "task", "tasks", "run", "activity", "workers", "progress"]) stream.addEventListener(name, soon);
    // Of very many lines that come at once a stream begins again, with a snapshot and without them: they are read, too.
    for (const name of ["snapshot", "task", "log", "end"]) stream.addEventListener(name, hear);
    stream.addEventListener("outage", ask); // it has begun, or is over
    stream.addEventListener("end", () => { hangUp(); say("off"); soon(); });
  }

  // The server gives no stream. The page itself says why when it is read again: there is nothing more to come, the
  // session has ended, or the server is not well; then the stream is asked for again.
  function refused() {
    hangUp();
    if (!outage) say("lost"); // without Redis there is no stream
    soon();
    setTimeout(listen, AGAIN);
  }

  listen();
  lightUp();
  ask();
  setInterval(ask, PULSE);
  let polled = Date.now();
  setInterval(() => {
    if (!main.dataset.poll || Date.now() - polled < 1000 * Number(main.dataset.poll)) return;
    polled = Date.now();
    soon();
  }, 1000);
  // A tab that nobody sees keeps no stream. When it is seen again, its stream begins with a snapshot, and it is read again.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) { hangUp(); return; }
    listen();
    ask();
    if (isAgain) { isAgain = false; soon(); }
  });

  // What has ended sends no events, and somebody may have retried it: it is read again when one comes back to it.
  addEventListener("focus", () => { if ("ended" in main.dataset) soon(); });

  // -- actions: the leader applies them a moment later, so the page is read again until it shows another state

  const ACTED = "orchestrator-acted";
  const PATIENCE = 8000; // milliseconds after which the page says that nothing has changed
  const AFTER = 6000; // milliseconds for which it is read after that: some parts of it are a few seconds old
  const SAID = 4000; // milliseconds for which a notice is shown at least

  let settle = () => {}; // called when the page has been read again

  function awaitChange() {
    let acted = null;
    try {
      acted = JSON.parse(sessionStorage.getItem(ACTED));
      sessionStorage.removeItem(ACTED);
    } catch (error) { /* not kept */ }
    const said = main.querySelector(".said:not(.bad)");
    if (!said || !(main.dataset.live || main.dataset.poll)) return;
    if (acted?.path !== location.pathname) acted = null;
    const asked = (place) => Number(main.dataset.asked?.split(" ")[place] ?? 0);
    const last = asked(1); // of the requests that wait; those that come later are of others
    const isWaiting = () => last > 0 && asked(0) > 0 && asked(0) <= last;
    const isUnchanged = () => isWaiting() || (acted !== null && acted.shows === main.dataset.shows);
    const isOver = () => "one" in main.dataset && acted !== null && !isUnchanged();
    if (acted === null && !isWaiting()) return;
    const begun = Date.now();
    let changed = isUnchanged() ? 0 : begun;
    const note = document.createElement("span");
    note.id = "unchanged";
    if (!changed) { said.append(note); say("on"); awaits = true; }
    settle = () => {
      const now = Date.now(), shown = document.getElementById("unchanged");
      if (isUnchanged()) {
        changed = 0;
        const text = ` The state has not changed yet${outage ? `: ${outage}` : ""}. This page goes on looking.`;
        if (now > begun + PATIENCE && shown && shown.textContent !== text) { shown.textContent = text; announce(text); }
        return;
      }
      changed ||= now;
      shown?.remove();
      if (isOver() && now > begun + SAID) main.querySelector(".said:not(.bad)")?.remove();
      if (now < changed + AFTER) return;
      clearInterval(looking);
      if (awaits && !stream) say("off");
      awaits = false;
      settle = () => {};
    };
    const looking = setInterval(() => { if (awaits) soon(); settle(); }, 500);
  }

  awaitChange();

  // -- graphs: they are made larger and smaller, and moved by dragging; the step that failed is in view

  const SMALLEST = 0.75, READABLE = 0.85; // of the full size: a graph that fits only below the first is shown in part, in the second
  const scales = new WeakMap(); // of each pane that was made larger or smaller; the others fit
  const current = new WeakMap(); // of each pane, the box that the Tab key leads to; arrow keys lead to the others
  let opened = ""; // the group that gets the focus when the page has come that shows it open, or closed

  function fitting(pane) {
    const svg = pane.querySelector("svg"), [wide, high] = ["width", "height"].map((side) => Number(svg.getAttribute(side)));
    const room = Math.min((pane.clientWidth - 24) / wide, (parseFloat(getComputedStyle(pane).maxHeight) - 26) / high);
    return room < SMALLEST ? READABLE : Math.min(1, room);
  }

  function zoom(pane, kind) {
    const before = pane.querySelector("svg").clientWidth / Number(pane.querySelector("svg").getAttribute("width"));
    const scale = kind === "fit" ? fitting(pane) : Math.min(3, Math.max(0.05, before * (kind === "in" ? 1.25 : 0.8)));
    if (kind === "fit") scales.delete(pane); else scales.set(pane, scale);
    const x = (pane.scrollLeft + pane.clientWidth / 2) / before, y = (pane.scrollTop + pane.clientHeight / 2) / before;
    scaleGraphs();
    pane.scrollTo(x * scale - pane.clientWidth / 2, y * scale - pane.clientHeight / 2);
    if (kind === "fit") toFailed(pane);
  }

  function scaleGraphs() {
    for (const pane of document.querySelectorAll(".graph")) {
      const svg = pane.querySelector("svg"), scale = scales.get(pane) ?? fitting(pane);
      for (const side of ["width", "height"]) svg.style[side] = `${Number(svg.getAttribute(side)) * scale}px`;
      const boxes = [...svg.querySelectorAll("a")], failed = svg.querySelector(".s-failed a");
      const focused = boxes.find((one) => one.dataset.key === current.get(pane)) ?? failed ?? boxes[0];
      for (const box of boxes) box.setAttribute("tabindex", box === focused ? 0 : -1);
    }
    drawMaps();
  }

  // Opens or closes a group where it stands: what one has scrolled, enlarged and focused stays.
  function toggleGroup(link) {
    history.pushState(null, "", link.getAttribute("href")); // `href` of an SVG is no text
    opened = link.dataset.group;
    version = "none";
    refresh();
  }

  window.addEventListener("popstate", () => { version = "none"; refresh(); });

  function focusOpened() {
    const link = opened && main.querySelector(`[data-key="${CSS.escape(opened)}"]`);
    if (!link) return;
    opened = "";
    const pane = link.closest(".graph"), box = link.getBoundingClientRect(), seen = pane.getBoundingClientRect();
    link.focus({ preventScroll: true });
    pane.scrollBy(box.x - seen.x - 40, box.y - seen.y - 40);
  }

  // Leads from a box of a graph to the next one in a direction; at the end of a row, to the next row.
  function toBox(box, key) {
    const boxes = [...box.closest("svg").querySelectorAll("a")];
    const [x, y] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[key];
    const from = box.getBoundingClientRect();
    let found = null, least = Infinity;
    for (const one of boxes) {
      const to = one.getBoundingClientRect();
      const [dx, dy] = [Math.max(to.left - from.right, from.left - to.right), Math.max(to.top - from.bottom, from.top - to.bottom)];
      const isAhead = x ? (to.left - from.left) * x > 0 && dx > 0 : (to.top - from.top) * y > 0 && dy > 0;
      const [along, beside] = x ? [dx, Math.max(dy, 0)] : [dy, Math.max(dx, 0)];
      const off = x ? to.top + to.height / 2 - from.top - from.height / 2 : to.left + to.width / 2 - from.left - from.width / 2;
      const far = along + 2 * beside + Math.abs(off) / 100;
      if (isAhead && beside <= 2 * along + 200 && far < least) { found = one; least = far; }
    }
    found ??= x && boxes[boxes.indexOf(box) + x];
    found?.focus();
    found?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  document.addEventListener("focusin", (event) => {
    const pane = event.target.closest(".graph");
    if (!pane || event.target === pane) return;
    current.set(pane, event.target.dataset.key);
    for (const box of pane.querySelectorAll("svg a")) box.setAttribute("tabindex", box === event.target ? 0 : -1);
  });

  // A large graph has a small picture of itself with the part that is in view; a click there shows that part.
  function drawMap(pane) {
    const map = pane.nextElementSibling, svg = pane.querySelector("svg");
    if (!map?.matches(".minimap")) return;
    const isWhole = pane.scrollWidth <= pane.clientWidth + 40 && pane.scrollHeight <= pane.clientHeight + 40;
    map.toggleAttribute("hidden", isWhole);
    if (isWhole) return;
    map.setAttribute("viewBox", svg.getAttribute("viewBox"));
    const [left, top, width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
    const boxes = [...svg.querySelectorAll("g.node")].map((node) => {
      const box = document.createElementNS(svg.namespaceURI, "rect");
      const [x, y] = node.getAttribute("transform").match(/[-\d.]+/g);
      for (const [name, value] of Object.entries({ class: node.getAttribute("class"), x, y, width: 172, height: 52 })) box.setAttribute(name, value);
      return box;
    });
    const scale = svg.clientWidth / width, view = document.createElementNS(svg.namespaceURI, "rect");
    const shown = { class: "view", x: left + pane.scrollLeft / scale, y: top + pane.scrollTop / scale, width: Math.min(width, pane.clientWidth / scale), height: Math.min(height, pane.clientHeight / scale) };
    for (const [name, value] of Object.entries(shown)) view.setAttribute(name, value);
    map.replaceChildren(...boxes, view);
  }

  function drawMaps() { for (const pane of document.querySelectorAll(".graph")) drawMap(pane); }

  document.addEventListener("scroll", (event) => { if (event.target.matches?.(".graph")) drawMap(event.target); }, true);
  window.addEventListener("resize", scaleGraphs);
  document.addEventListener("pointerdown", (event) => {
    const map = event.target.closest(".minimap");
    if (!map) return;
    const pane = map.previousElementSibling, box = map.getBoundingClientRect();
    pane.scrollTo((event.clientX - box.x) / box.width * pane.scrollWidth - pane.clientWidth / 2, (event.clientY - box.y) / box.height * pane.scrollHeight - pane.clientHeight / 2);
  });

  let dragged = null, isDragged = false;
  document.addEventListener("pointerdown", (event) => {
    const pane = event.target.closest(".graph");
    if (pane && event.button === 0 && event.pointerType === "mouse") dragged = { pane, x: event.clientX, y: event.clientY, far: false };
  });
  document.addEventListener("pointermove", (event) => {
    if (!dragged) return;
    const { pane, x, y } = dragged;
    dragged.far ||= Math.hypot(event.clientX - x, event.clientY - y) > 4;
    pane.classList.toggle("drags", dragged.far);
    if (!dragged.far) return;
    pane.scrollBy(dragged.x - event.clientX, dragged.y - event.clientY);
    Object.assign(dragged, { x: event.clientX, y: event.clientY });
  });
  document.addEventListener("pointerup", () => {
    dragged?.pane.classList.remove("drags");
    isDragged = Boolean(dragged?.far);
    dragged = null;
  });
  document.addEventListener("dragstart", (event) => { if (event.target.closest?.(".graph")) event.preventDefault(); }); // a group is a link
  document.addEventListener("click", (event) => { if (isDragged && event.detail && event.target.closest(".graph")) event.preventDefault(); });
  document.addEventListener("click", (event) => {
    const group = event.target.closest(".graph [data-group]");
    if (!group || event.defaultPrevented || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    toggleGroup(group);
  });
  document.addEventListener("wheel", (event) => {
    const pane = event.ctrlKey && event.target.closest?.(".graph");
    if (pane) { event.preventDefault(); zoom(pane, event.deltaY < 0 ? "in" : "out"); }
  }, { passive: false });
  function toFailed(pane) {
    const failed = pane.querySelector(".node.s-failed")?.getBoundingClientRect();
    const box = pane.getBoundingClientRect();
    if (failed) pane.scrollBy(failed.x - box.x - box.width / 2, failed.y - box.y - box.height / 2);
    else pane.scrollTo(0, 0);
  }

  scaleGraphs();
  document.querySelectorAll(".graph").forEach(toFailed);

  // -- forms

  // A question that somebody is about to answer stays where it is when it is decided elsewhere, and says so: no other
  // moves below the pointer.
  function holdAsked(next) {
    for (const asked of main.querySelectorAll("[data-asks]")) {
      const fields = fieldsOf(asked);
      const isBegun = asked.contains(document.activeElement) || fields.some((field) => field.value && field.value !== field.defaultValue);
      if (!isBegun || next.querySelector(`[data-key="${CSS.escape(asked.dataset.key)}"]`)) continue;
      const copy = document.importNode(asked, true);
      fieldsOf(copy).forEach((field, place) => { if (field.nodeName === "INPUT") field.setAttribute("value", fields[place].value); });
      for (const button of copy.querySelectorAll("button")) button.disabled = true;
      if (!copy.querySelector(".decided")) copy.prepend(Object.assign(document.createElement("p"), { className: "why decided", textContent: "This has been decided meanwhile, or its run has ended. Nothing that you typed was sent." }));
      const before = [...main.querySelectorAll("[data-asks]")].slice(0, [...main.querySelectorAll("[data-asks]")].indexOf(asked)).reverse()
        .map((one) => next.querySelector(`[data-key="${CSS.escape(one.dataset.key)}"]`)).find(Boolean);
      (before ?? next.querySelector(".waits > h2") ?? next.querySelector(".head")).after(copy);
    }
  }

  // Once a question is decided, the next one comes below the pointer, on the next page or when this one is read again. A
  // click at the same place decides nothing until the pointer has moved.
  const RESTED = "orchestrator-rested";
  const FAR = 8; // pixels from where the pointer rests
  const asksOf = (target) => target.closest?.("[data-asks]")?.dataset.key;
  let rested = null; // where the pointer rests, and the question that was there when it came
  try {
    rested = JSON.parse(sessionStorage.getItem(RESTED));
    sessionStorage.removeItem(RESTED);
  } catch (error) { /* not kept */ }

  function follow(event) {
    const { clientX: x, clientY: y } = event;
    if (!rested || Math.hypot(x - rested.x, y - rested.y) > FAR) rested = { x, y, asks: asksOf(event.target) };
  }

  document.addEventListener("pointermove", follow);
  document.addEventListener("pointerdown", follow);
  document.addEventListener("wheel", () => { rested = null; }, { passive: true }); // the reader moves the page
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-asks] [type=submit]");
    if (!button || !event.detail) return; // by a key
    if (rested && rested.asks !== asksOf(button)) {
      event.preventDefault();
      const text = "Another question has moved below the pointer. Move the pointer to decide it.";
      if (!button.form.querySelector(".moved")) button.form.append(Object.assign(document.createElement("p"), { className: "why moved", textContent: text, role: "alert" }));
      return;
    }
    const here = { x: event.clientX, y: event.clientY, asks: asksOf(button) };
    try { sessionStorage.setItem(RESTED, JSON.stringify(here)); } catch (error) { /* not kept */ }
  });

  // -- marked rows

  // While rows are marked, the table keeps the rows it has, in their newest state. Returns how many others there are;
  // null if nothing is marked.
  function holdMarked(next) {
    const held = main.querySelector(".tick input:checked, .grid input:checked")?.closest("table");
    if (!held) return null;
    let fresh = next.querySelector(".tick, .grid th")?.closest("table");
    if (!fresh) {
      fresh = document.createElement("table");
      (next.querySelector(".empty") ?? next.appendChild(fresh)).replaceWith(fresh);
    }
    const known = new Map([...held.querySelectorAll("[data-key]")].map((one) => [one.dataset.key, one]));
    const rows = [...fresh.querySelectorAll("[data-key]")];
    for (const row of rows) if (known.has(row.dataset.key) && row.nodeName === "TR") morph(known.get(row.dataset.key), row);
    fresh.replaceWith(held.cloneNode(true));
    return rows.filter((row) => !known.has(row.dataset.key)).length;
  }

  function sayFresh(count) {
    const held = count && main.querySelector(".tick input:checked, .grid input:checked")?.closest("table");
    if (!held) return;
    const button = Object.assign(document.createElement("button"), { type: "button", id: "fresh-rows", textContent: `Show ${count} new, unmark all` });
    (held.closest("form[action='/ui/compare'], .grid") ?? held).before(button);
  }

  // Whether what a button does can be done to a marked row, in the state that it shows.
  const isFor = (box, button) => box.dataset.may.split(" ").includes(button.dataset.chosen.split(" ")[0].toLowerCase());

  function countChosen() {
    const boxes = [...document.querySelectorAll("input[name=id][form=chosen]")];
    const count = boxes.filter((box) => box.checked).length;
    for (const button of document.querySelectorAll("[data-chosen]")) {
      const meant = boxes.filter((box) => box.checked && isFor(box, button)).length;
      button.classList.toggle("some", meant > 0);
      button.textContent = button.dataset.chosen.replace("%", `${meant} marked`);
    }
    for (const sure of document.querySelectorAll("details.sure:has([data-chosen])")) sure.open &&= count > 0;
    const all = document.querySelector("[data-all]");
    if (all) { all.checked = count > 0 && count === boxes.length; all.indeterminate = count > 0 && count < boxes.length; }
  }

  document.addEventListener("change", (event) => {
    const box = event.target;
    if (box.matches("[data-all]")) {
      for (const one of document.querySelectorAll("input[name=id][form=chosen]")) one.checked = box.checked;
    }
    if (box.matches("[data-submit]")) box.form.requestSubmit();
    if (document.getElementById("fresh-rows")) soon();
    countChosen();
  });

  // -- clicks

  async function copy(text) {
    try { await navigator.clipboard.writeText(text); } catch (error) {
      const field = document.createElement("textarea");
      field.value = text;
      document.body.append(field);
      field.select();
      document.execCommand("copy");
      field.remove();
    }
    announce(`Copied ${text}`);
  }

  document.addEventListener("click", (event) => {
    const older = event.target.closest("[data-older]");
    if (older) { event.preventDefault(); addOlder(older); }
    const sized = event.target.closest("[data-zoom]");
    if (sized) zoom(sized.parentElement.nextElementSibling.firstElementChild, sized.dataset.zoom);
    if (event.target.id === "fresh-rows") {
      for (const one of main.querySelectorAll(".tick input, .grid input")) one.checked = false;
      refresh();
    }
    const copied = event.target.closest("[data-copy]");
    if (copied) {
      copy(copied.dataset.copy || copied.nextElementSibling.textContent);
      copied.classList.add("copied");
      setTimeout(() => copied.classList.remove("copied"), 1200);
    }
    if (event.target.closest("[data-times]")) {
      const kinds = Object.keys(TIMES);
      times = kinds[(kinds.indexOf(times) + 1) % kinds.length];
      try { localStorage.setItem("orchestrator-times", times); } catch (error) { /* not kept */ }
      makeFormats();
      showTimes();
      announce(`Times: ${TIMES[times]}`);
    }
    if (event.target.closest("[data-theme-toggle]")) {
      const root = document.documentElement;
      const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
      root.dataset.theme = isDark ? "light" : "dark";
      try { localStorage.setItem("orchestrator-theme", root.dataset.theme); } catch (error) { /* not kept */ }
    }
    if (event.target.closest("[data-keys]")) keys.showModal();
    for (const open of document.querySelectorAll("details.sure[open]")) {
      if (!open.contains(event.target)) open.open = false;
    }
  });

  // The fields of parameters become the JSON that the server takes; it checks them. Numbers stay as they are written:
  // those of a script would round large ones.
  function gatherParams(form, data) {
    const name = form.dataset.params || "params";
    const given = [];
    for (const field of form.querySelectorAll("[data-param]")) {
      const { param, kind, json, empty } = field.dataset;
      let written = json && field.value === field.defaultValue ? json : field.value === "" ? empty : field.value;
      if (written === undefined) continue;
      if (written === field.value && (["string", "date", "datetime"].includes(kind) || !isJson(written))) written = JSON.stringify(written);
      given.push(`${JSON.stringify(param)}:${written}`);
    }
    const more = (data.get(name) || "{}").trim();
    if (!given.length || !isJson(more) || more[0] !== "{") return; // the server says what is wrong with it
    const rest = more.slice(1, -1).trim();
    data.set(name, `{${(rest ? [rest, ...given] : given).join(",")}}`);
  }

  function isJson(text) {
    try { JSON.parse(text); } catch (error) { return false; }
    return true;
  }

  // What was typed into a form is there again if the server refuses it.
  const TYPED = "orchestrator-typed";
  const fieldsOf = (form) => [...form.querySelectorAll("input:not([type=hidden], [type=password]), textarea, select")];
  const addressOf = (form) => form.dataset.nameInPath ?? form.getAttribute("action");

  function keepTyped(form) {
    const values = fieldsOf(form).map((field) => (field.type === "checkbox" ? field.checked : field.value));
    try { sessionStorage.setItem(TYPED, JSON.stringify({ path: location.pathname, to: addressOf(form), values })); } catch (error) { /* not kept */ }
  }

  function restoreTyped() {
    let typed = null;
    try {
      typed = JSON.parse(sessionStorage.getItem(TYPED));
      sessionStorage.removeItem(TYPED);
    } catch (error) { /* not kept */ }
    if (!typed?.values.length || typed.path !== location.pathname || !main.querySelector(".said.bad")) return;
    const form = [...main.querySelectorAll("form[method=post]")].find((one) => addressOf(one) === typed.to);
    const fields = form ? fieldsOf(form) : [];
    if (fields.length !== typed.values.length) return;
    fields.forEach((field, place) => { field[field.type === "checkbox" ? "checked" : "value"] = typed.values[place]; });
    for (let fold = form.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
  }

  restoreTyped();

  // While the server is away, the browser would leave the page for one of its own. Where it may be, it is asked before.
  const UNOPENED = "The server cannot be reached: this page stays. Try again when it is live.";
  const PROBE = 3000; // milliseconds in which a server answers that works
  let isReached = false; // it has just answered
  let isLeaving = false;
  const mayBeAway = () => light && (isAway() || !stream); // the end of a stream says it at once

  async function leave(go, show, text) {
    if (isLeaving) return;
    isLeaving = true;
    try {
      await fetch(document.querySelector("link[rel=icon]").href, { cache: "no-store", signal: AbortSignal.timeout(PROBE) });
      isReached = true;
      go();
    } catch (error) {
      for (const one of document.querySelectorAll(".unsent")) one.remove();
      const note = Object.assign(document.createElement("p"), { className: "why unsent", textContent: text, role: "alert" });
      show(note);
      note.scrollIntoView({ block: "nearest" });
      answered(false);
    } finally { isReached = isLeaving = false; }
  }

  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[href]");
    if (!link || event.defaultPrevented || event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
    if (link.target || link.hasAttribute("download") || link.origin !== location.origin || !mayBeAway()) return;
    if (link.hash && link.href.split("#")[0] === location.href.split("#")[0]) return;
    event.preventDefault();
    leave(() => location.assign(link.href), (note) => main.prepend(note), UNOPENED);
  });

  document.addEventListener("submit", (event) => {
    const form = event.target;
    if (!isReached && mayBeAway() && !event.defaultPrevented && form.method !== "dialog") {
      event.preventDefault();
      const again = form.method === "post" ? "Not sent: the server cannot be reached. Send it again when this page is live." : UNOPENED;
      leave(() => form.requestSubmit(event.submitter), (note) => form.append(note), again);
      return;
    }
    if (form.dataset.nameInPath) {
      form.action = form.dataset.nameInPath.replace("%", encodeURIComponent(form.querySelector("[data-name]").value));
    }
    submitter = event.submitter;
    if (form.method === "post") keepTyped(form);
    if (form.matches(".act") && main.dataset.shows) {
      const acted = JSON.stringify({ path: location.pathname, shows: main.dataset.shows });
      try { sessionStorage.setItem(ACTED, acted); } catch (error) { /* not kept */ }
    }
    if (form.method !== "post") return;
    isSending = true; // a page that is read again would offer the button again
    setTimeout(() => {
      for (const button of form.querySelectorAll("button")) button.disabled = true;
      if (event.submitter) event.submitter.textContent = "Working…";
      announce("Working…");
    });
  });

  // -- keys

  const keys = document.getElementById("keys");
  let isGoing = false;
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      for (const open of document.querySelectorAll("details.sure[open]")) { open.open = false; open.querySelector("summary").focus(); }
      if (document.activeElement?.id === "search") document.activeElement.blur();
    }
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.nodeName)) return;
    if (event.key === "?" && keys) { if (keys.open) keys.close(); else keys.showModal(); return; }
    if (keys?.open) return;
    const box = /^Arrow/.test(event.key) && event.target.closest(".graph svg a");
    if (box) {
      toBox(box, event.key);
      event.preventDefault();
    } else if (event.key === "/") {
      document.getElementById("search")?.focus();
      event.preventDefault();
    } else if (isGoing) {
      isGoing = false;
      const link = document.querySelector(`nav.side a[data-letter="${CSS.escape(event.key)}"]`);
      if (link) { link.click(); event.preventDefault(); }
    } else if (event.key === "g") {
      isGoing = true;
      setTimeout(() => { isGoing = false; }, 1500);
    } else if (event.key === "j" || event.key === "k") {
      toRow(event.key === "j" ? 1 : -1);
    } else if (event.key === "x") {
      document.activeElement.closest("tr")?.querySelector(".tick input")?.click();
    } else if (/^[a-z]$/.test(event.key)) {
      press(event.key);
      event.preventDefault();
    }
  });

  // Moves to the link of the next row of a list, or of the one before.
  function toRow(step) {
    const rows = [...main.querySelectorAll("table.list tbody tr")].filter((row) => isSeen(row) && row.querySelector("td a"));
    const place = rows.findIndex((row) => row.contains(document.activeElement));
    const row = rows[place < 0 ? 0 : Math.min(rows.length - 1, Math.max(0, place + step))];
    row?.querySelector("td.main a, td a").focus();
    row?.scrollIntoView({ block: "nearest" });
  }

  // Does what a key stands for in the row that has the focus, or else on the page; what asks first is only opened.
  function press(key) {
    const row = document.activeElement.closest("tbody tr");
    const found = [...document.querySelectorAll(`[aria-keyshortcuts="${key}"]`)].filter(isSeen);
    const wanted = found.find((one) => row?.contains(one)) ?? found.find((one) => !one.closest("tbody"));
    if (wanted?.nodeName !== "SUMMARY") { wanted?.click(); return; }
    wanted.parentElement.open = true;
    wanted.nextElementSibling.querySelector("button[type=submit]").focus();
  }

  const isSeen = (one) => one.getClientRects().length > 0;

  const here = document.querySelector("nav.side a[aria-current]");
  if (here && here.parentElement.scrollWidth > here.parentElement.clientWidth) {
    here.parentElement.scrollLeft = here.offsetLeft - 16;
  }
  showTimes();
  countChosen();
  setInterval(showTimes, 1000);
})();
