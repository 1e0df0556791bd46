// Behavior of every page: live updates, times in the reader's zone, copying of ids, keyboard shortcuts.
"use strict";
(() => {
  const content = () => document.getElementById("content");
  const ANNOUNCEMENT_TIME = 5000; // milliseconds for which screen readers find an announcement
  let announcementTimer = null;
  function announce(text) {
    document.getElementById("announced").textContent = text;
    clearTimeout(announcementTimer);
    announcementTimer = setTimeout(() => { document.getElementById("announced").textContent = ""; }, ANNOUNCEMENT_TIME);
  }

  // -- times

  const UNITS = [[86400, "d"], [3600, "h"], [60, "m"], [1, "s"]];
  const TIMES = { ago: "ago", local: "local", utc: "UTC" }; // display of times: ages, or timestamps in a zone
  let times = "ago", exact, clock, precise, hour, moment; // the mode from TIMES, and formats
  try { times = localStorage.getItem("orchestrator-times") in TIMES ? localStorage.getItem("orchestrator-times") : "ago"; } catch (error) { /* no storage */ }

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
      if (field.value && field.dataset.zone !== zoneNow) field.value = convertZone(field.value, zoneNow === "UTC");
      field.dataset.zone = field.previousElementSibling.textContent = zoneNow;
    }
  }

  // Converts the value of a time field to UTC, or from UTC to the reader's zone.
  function convertZone(text, isToUtc) {
    const at = new Date(isToUtc ? text : `${text}Z`);
    return isToUtc ? at.toISOString().slice(0, 16) : new Date(at - at.getTimezoneOffset() * 60000).toISOString().slice(0, 16);
  }

  let submitter = null; // the button that submitted a form

  // Completes the data of a form: the server reads times as UTC.
  document.addEventListener("formdata", (event) => {
    for (const field of event.target.querySelectorAll("[data-zone=local]")) {
      if (field.value) event.formData.set(field.name, convertZone(field.value, true));
    }
    if ("params" in event.target.dataset) gatherParams(event.target, event.formData);
    if (event.target.getAttribute("id") === "chosen") { // not `target.id`: the form has fields named `id`
      const boxes = [...document.querySelectorAll("input[name=id][form=chosen]:checked")];
      event.formData.delete("id");
      for (const box of boxes.filter((checkbox) => isAllowed(checkbox, submitter))) event.formData.append("id", box.value);
    }
  });

  // Refill a filter that the server rejected with the typed values.
  for (const [name, value] of document.querySelector("[data-refused]") ? new URLSearchParams(location.search) : []) {
    for (const field of document.querySelectorAll(`form[role=search] [name="${CSS.escape(name)}"]`)) {
      if (field.type === "checkbox") field.checked ||= field.value === value;
      else field.value = value;
    }
  }

  makeFormats();

  let clockSkew = 0; // milliseconds by which the server's clock is ahead of the reader's; 0 below MIN_SKEW
  const MIN_SKEW = 5000; // milliseconds; a smaller difference may be network latency
  const serverNow = () => Date.now() + clockSkew;

  function setClock(answer) {
    const skew = Date.parse(answer.headers.get("Date")) - Date.now();
    clockSkew = Math.abs(skew) > MIN_SKEW ? skew + 999 : 0; // `Date` has whole seconds: round up, or past events appear in the future
  }

  function age(moment) {
    const seconds = (serverNow() - moment) / 1000;
    const [unit, name] = UNITS.find(([size]) => Math.abs(seconds) >= size) || [1, "s"];
    return seconds < 0 ? `in ${Math.round(-seconds / unit)}${name}` : `${Math.floor(seconds / unit)}${name} ago`;
  }

  // Formats the time since `start`, in the server's format of durations.
  function elapsed(start) {
    const seconds = Math.max(0, (serverNow() - start) / 1000);
    if (seconds < 59.95) return `${seconds.toFixed(1)}s`;
    const total = Math.round(seconds);
    const index = UNITS.findIndex(([size]) => total >= size);
    const [large, largeName] = UNITS[index], [small, smallName] = UNITS[index + 1];
    const rest = Math.floor((total % large) / small);
    return rest ? `${Math.floor(total / large)}${largeName} ${rest}${smallName}` : `${Math.floor(total / large)}${largeName}`;
  }

  function showTimes() {
    for (const element of document.querySelectorAll("[data-title]")) {
      const at = new Date(element.dataset.at), inChart = element.nodeName === "title";
      const title = element.dataset.title.replace("%", inChart ? `${moment.format(at).slice(0, 16)} ${zone()}` : exact.format(at));
      const property = inChart ? "textContent" : "title";
      if (element[property] !== title) element[property] = title;
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
      const text = "lasts" in time.dataset ? elapsed(at.getTime()) : "moment" in time.dataset ? `${moment.format(at)} ${zone()}` : times === "ago" ? age(at.getTime()) : moment.format(at);
      if (time.textContent !== text) time.textContent = text;
    }
  }

  // -- live updates

  const main = content();
  const indicator = document.querySelector(".live");
  const LIVE_TITLE = indicator?.title; // tooltip while the system works
  const MIN_INTERVAL = 1000; // milliseconds between two refreshes of a page, at least
  const STALE_AFTER = 2000; // milliseconds without the server after which the page shows its age
  const RECONNECT_DELAY = 5000; // milliseconds until a refused event stream is requested again
  const HEALTH_INTERVAL = 4000; // milliseconds between two health checks: an outage sends no events
  const MAX_LINES = 2000; // log lines on the page
  let version = "none"; // ETag of the displayed page
  let lastRefresh = 0, timer = null, isReading = false, isRefreshDue = false, isCheckingHealth = false;
  let knownAt = Date.now(), staleTimer = null;
  let streamState = "off"; // of the event stream: "on", "off" (no events are expected), or "lost"
  let isServerUp = true; // the latest request got an answer
  let isAwaitingChange = false; // the page does not show the effect of the reader's action yet
  let isSending = false; // a form was sent, and the next page is loading
  let outage = ""; // why no task can run, although the server answers
  const isDisconnected = () => streamState === "lost" || !isServerUp;

  // Shows the state of the page: "on", "off" (the stream is being opened), "still" (the page has no stream), "lost" (no
  // connection: the page is out of date), or "stopped" (the page is current, but the system has an outage).
  function updateIndicator() {
    if (!indicator) return;
    const before = indicator.dataset.state;
    indicator.dataset.state = isDisconnected() ? "lost" : outage ? "stopped" : streamState === "on" ? "on" : main.dataset.live ? "off" : "still";
    if (isDisconnected()) {
      if (staleTimer === null) { indicator.lastElementChild.textContent = "not connected"; staleTimer = setTimeout(showStale, STALE_AFTER); }
      return;
    }
    clearTimeout(staleTimer);
    staleTimer = null;
    for (const notice of document.querySelectorAll(".unsent")) notice.remove();
    const still = main.dataset.poll ? `${"ended" in main.dataset ? "ended, " : ""}refreshed every ${main.dataset.poll} s` : "not updated";
    const text = outage || (indicator.dataset.state === "still" ? still : "live");
    if (indicator.lastElementChild.textContent === text) return;
    indicator.lastElementChild.textContent = text;
    if (outage) announce(text);
    else if (["lost", "stopped"].includes(before)) announce(`Reconnected: ${text}`);
  }

  function setStreamState(state) { streamState = state; updateIndicator(); }
  function setServerUp(isUp) { isServerUp = isUp; updateIndicator(); }

  function showStale() {
    const at = hour.format(knownAt);
    indicator.lastElementChild.textContent = `not connected, showing the state as of ${at}`;
    announce(indicator.lastElementChild.textContent);
    for (const element of main.querySelectorAll("[data-stale]")) element.textContent = element.dataset.stale.replace("%", at);
  }

  // Morphs the page into a newer version. The server omits the content of rows that the displayed version already has.
  function update(html, newVersion) {
    const newPage = new DOMParser().parseFromString(html, "text/html");
    const notice = main.querySelector(".said");
    const next = newPage.getElementById("content");
    if (notice && !next.querySelector(".said")) next.prepend(document.importNode(notice, true));
    keepOpenQuestions(next);
    const fresh = keepMarkedRows(next);
    morph.isTorn = false;
    morph(main, next);
    offerFreshRows(fresh);
    version = morph.isTorn || fresh !== null || !newVersion ? "none" : newVersion;
    if (morph.isTorn) isRefreshDue = true; // an omitted row moved to another table: read the full page
    scaleGraphs();
    focusToggledGroup();
    onRefreshed();
    if (document.title !== newPage.title) document.title = newPage.title;
    showTimes();
    countChosen();
  }

  async function refresh() {
    timer = null;
    if (isReading) { isRefreshDue = true; return; }
    if (document.hidden) { isRefreshDue = true; return; }
    if (isSending) return;
    isReading = true;
    try {
      const answer = await fetch(location.href, { headers: { Accept: "text/html", "If-None-Match": version, ...(isAwaitingChange && { "Orchestrator-Awaits": "1" }) }, redirect: "manual" });
      // Reload for the login page after the session ended, or for the refusal after the reader lost the permission.
      if (answer.type === "opaqueredirect" || [401, 403].includes(answer.status)) { location.reload(); return; }
      if (answer.status >= 500) setServerUp(false);
      if (!answer.ok && answer.status !== 304) return;
      if (answer.ok && !isSending) update(await answer.text(), answer.headers.get("ETag"));
      knownAt = Date.now();
      if (!stream && streamState === "lost") streamState = "off";
      listen(); // an ended run may have been restarted
      setServerUp(true);
    } catch (error) { setServerUp(false); } finally {
      isReading = false;
      lastRefresh = Date.now();
      if (isRefreshDue && !document.hidden) { isRefreshDue = false; scheduleRefresh(); }
    }
  }

  function scheduleRefresh() {
    if (timer === null) timer = setTimeout(refresh, Math.max(50, lastRefresh + MIN_INTERVAL - Date.now()));
  }

  // Asks the server whether the system works, independently of events. Refreshes the page when the answer has changed.
  async function checkHealth() {
    if (!main.dataset.pulse || document.hidden || isCheckingHealth) return;
    isCheckingHealth = true;
    try {
      const answer = await fetch(main.dataset.pulse, { redirect: "manual", signal: AbortSignal.timeout(2 * HEALTH_INTERVAL) });
      if (answer.status >= 500) setServerUp(false);
      setClock(answer);
      const isLive = main.dataset.live || main.dataset.poll; // never refresh other pages, such as forms
      if (isLive && (answer.type === "opaqueredirect" || answer.status === 401)) scheduleRefresh();
      if (!answer.ok) return;
      const health = await answer.json();
      const isChanged = outage !== health.outage || (main.dataset.troubles ?? health.troubles) !== health.troubles;
      if (isLive && (isChanged || !isServerUp)) scheduleRefresh();
      if (streamState === "on") knownAt = Date.now();
      outage = health.outage;
      if (indicator) indicator.title = health.message || LIVE_TITLE;
      setServerUp(true);
    } catch (error) { setServerUp(false); } finally { isCheckingHealth = false; }
  }

  // -- the log of a task or a run: the server renders the lines; new lines go to the end, older lines to the beginning

  const logBox = document.getElementById("log");
  const chip = document.getElementById("log-end");
  const LOG_DELAY = 300; // milliseconds for which events are batched into one read of the log
  let isFollowing = true, logTimer = null, isReadingLog = false, newLines = 0;
  const { compare } = new Intl.Collator("en", { numeric: true });
  // Log rows in the order of storage. Within one answer, rows of several tasks are in the order of time.
  const rowsInStoredOrder = () => [...logBox.children].sort((a, b) => compare(a.dataset.entry, b.dataset.entry));

  function scrollToEnd() {
    logBox.scrollTop = logBox.scrollHeight;
    isFollowing = true;
    newLines = 0;
    chip.hidden = true;
  }

  async function readLog(address) {
    const answer = await fetch(address, { headers: { Accept: "text/html" }, redirect: "manual" });
    if (!answer.ok) return null;
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    return { box: page.getElementById("log"), before: page.getElementById("log-before"), silent: page.getElementById("silent") };
  }

  function logAddress(cursor) {
    const query = new URLSearchParams(new FormData(document.getElementById("log-filter")));
    for (const [name, value] of Object.entries(cursor)) query.set(name, value);
    return `${logBox.dataset.after}?${query}`;
  }

  function scheduleLogRead() { if (logBox) logTimer ??= setTimeout(addNew, LOG_DELAY); }

  async function addNew() {
    logTimer = null;
    if (isReadingLog) { scheduleLogRead(); return; }
    isReadingLog = true;
    const last = logBox.dataset.last;
    let part = null;
    try { part = await readLog(logAddress(last ? { after: last, ...(isFollowing && { tail: "true" }) } : {})); } catch (error) { scheduleLogRead(); } finally { isReadingLog = false; }
    if (!part || logBox.dataset.last !== last) return; // the reader changed the filter meanwhile
    const rows = [...part.box.children];
    const before = logBox.querySelector("p:last-of-type")?.dataset.attempt;
    if (before && rows[0]?.nodeName === "DIV" && rows[1]?.dataset.attempt === before) rows.shift();
    const skipped = Number(part.before.dataset.earlier), rowsBefore = [...logBox.children]; // the server skips all but the newest lines
    if (part.box.dataset.last !== logBox.dataset.last) logBox.append(...rows);
    logBox.dataset.last = part.box.dataset.last;
    const lines = rows.filter((row) => row.nodeName === "P").length;
    if (!lines) return;
    scheduleLogRead(); // one answer may hold only a part of the new lines
    document.getElementById("silent")?.remove();
    const gone = skipped ? rowsBefore : isFollowing ? rowsInStoredOrder().slice(0, -MAX_LINES) : [];
    for (const row of gone) row.remove();
    const notices = [...gone.map((row) => row.matches(".l-dropped") && row.lastElementChild), ...part.before.querySelectorAll(".l-dropped")];
    if (gone.length || skipped) countEarlier(gone.filter((row) => row.nodeName === "P").length + skipped, notices.filter(Boolean));
    showTimes();
    if (isFollowing) { scrollToEnd(); return; }
    newLines += lines;
    chip.textContent = `↓ ${newLines} new ${newLines === 1 ? "line" : "lines"}`;
    chip.hidden = false;
  }

  const countedLines = (count) => `${count.toLocaleString("en")} ${count === 1 ? "line" : "lines"}`;

  // Adds lines that were removed at the beginning to the count of older lines. Keeps notices about dropped lines.
  function countEarlier(gone, notices) {
    const box = document.getElementById("log-before");
    box.dataset.earlier = Number(box.dataset.earlier) + gone;
    const older = box.querySelector("[data-older]") ?? Object.assign(document.createElement("a"), { className: "button", textContent: "Show older lines" });
    older.dataset.older = "";
    older.href = logAddress({ before: rowsInStoredOrder()[0].dataset.entry });
    const text = document.createElement("p");
    text.append(`${countedLines(Number(box.dataset.earlier))} before these. `, older);
    const dropped = notices.map((notice) => Object.assign(document.createElement("p"), { className: "l-dropped", textContent: notice.textContent }));
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
    announce("Older lines loaded");
  }

  async function filterLog() {
    const part = await readLog(logAddress({}));
    if (!part) return;
    const filters = [...new FormData(document.getElementById("log-filter"))].filter(([, value]) => value);
    history.replaceState(null, "", `${location.pathname}${filters.length ? `?${new URLSearchParams(filters)}` : ""}`);
    logBox.replaceChildren(...part.box.children);
    logBox.dataset.last = part.box.dataset.last;
    document.getElementById("log-before").replaceWith(part.before);
    document.getElementById("silent")?.remove();
    if (part.silent) chip.after(part.silent);
    showTimes();
    scrollToEnd();
    announce(countedLines(logBox.querySelectorAll("p").length));
  }

  if (logBox) {
    const wrap = document.querySelector("[data-wrap]");
    try { wrap.checked = localStorage.getItem("orchestrator-wrap") !== "no"; } catch (error) { /* no storage */ }
    logBox.classList.toggle("unwrapped", !wrap.checked);
    wrap.addEventListener("change", () => {
      logBox.classList.toggle("unwrapped", !wrap.checked);
      try { localStorage.setItem("orchestrator-wrap", wrap.checked ? "yes" : "no"); } catch (error) { /* no storage */ }
    });
    const filter = document.getElementById("log-filter");
    filter.addEventListener("submit", (event) => { event.preventDefault(); filterLog(); });
    filter.level.addEventListener("change", filterLog);
    chip.addEventListener("click", scrollToEnd);
    logBox.addEventListener("scroll", () => {
      isFollowing = logBox.scrollHeight - logBox.scrollTop - logBox.clientHeight < 40;
      if (isFollowing) { newLines = 0; chip.hidden = true; } else if (stream && chip.hidden) { chip.textContent = "↓ Jump to the end"; chip.hidden = false; }
    });
    scrollToEnd();
  }

  let stream = null, releaseSlot = null;
  let isTakingSlot = false, slotTimer = null;
  const SLOTS = 4;

  // Takes one of the slots for event streams; returns the function that releases the slot, or null. A browser opens at
  // most six connections to a server, and a stream occupies one, so all visible pages share a few slots. A page without
  // a slot refreshes every few seconds.
  async function takeSlot() {
    if (!navigator.locks) return () => {};
    for (let number = 0; number < SLOTS; number += 1) {
      const release = await new Promise((resolve) => {
        navigator.locks.request(`orchestrator-stream-${number}`, { ifAvailable: true }, (lock) => (lock ? new Promise(resolve) : resolve(null)));
      });
      if (release) return release;
    }
    return null;
  }

  function closeStream() {
    stream?.close();
    releaseSlot?.();
    stream = releaseSlot = null;
  }

  async function listen() {
    if (!main.dataset.live || stream || isTakingSlot || document.hidden) return;
    isTakingSlot = true;
    releaseSlot = await takeSlot();
    isTakingSlot = false;
    const path = main.dataset.live;
    if (!releaseSlot) { setStreamState("on"); slotTimer ??= setTimeout(() => { slotTimer = null; scheduleRefresh(); }, RECONNECT_DELAY); return; } // the refresh calls listen() again
    if (!path || document.hidden) { closeStream(); return; }
    stream = new EventSource(path);
    stream.onopen = () => setStreamState("on");
    stream.onerror = () => { if (stream.readyState === EventSource.CLOSED) onStreamRefused(); else setStreamState("lost"); };
    // Each stream begins with a snapshot: no event tells of changes between the loading of the page and the stream's start.
    for (const name of ["snapshot", "task", "tasks", "run", "activity", "workers", "progress"]) stream.addEventListener(name, scheduleRefresh);
    // Read the log after a snapshot, too: a burst of very many lines restarts the stream, which then omits these lines.
    for (const name of ["snapshot", "task", "log", "end"]) stream.addEventListener(name, scheduleLogRead);
    stream.addEventListener("outage", checkHealth); // an outage began or ended
    stream.addEventListener("end", () => { closeStream(); setStreamState("off"); scheduleRefresh(); });
  }

  // Handles a refused stream. The refreshed page tells why: no more events are expected, the session has ended, or the
  // server has a problem. In the last case the stream is requested again.
  function onStreamRefused() {
    closeStream();
    if (!outage) setStreamState("lost"); // without Redis there is no stream
    scheduleRefresh();
    setTimeout(listen, RECONNECT_DELAY);
  }

  listen();
  updateIndicator();
  checkHealth();
  setInterval(checkHealth, HEALTH_INTERVAL);
  let lastPoll = Date.now();
  setInterval(() => {
    if (!main.dataset.poll || Date.now() - lastPoll < 1000 * Number(main.dataset.poll)) return;
    lastPoll = Date.now();
    scheduleRefresh();
  }, 1000);
  // A hidden tab closes its stream. The new stream of a tab shown again begins with a snapshot, which refreshes the page.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) { closeStream(); return; }
    listen();
    checkHealth();
    if (isRefreshDue) { isRefreshDue = false; scheduleRefresh(); }
  });

  // An ended task or run sends no events, but a user may have retried it: refresh when the window gets the focus.
  addEventListener("focus", () => { if ("ended" in main.dataset) scheduleRefresh(); });

  // -- actions: the leader applies them a moment later, so the page refreshes until it shows another state

  const ACTED_KEY = "orchestrator-acted";
  const UNCHANGED_DELAY = 8000; // milliseconds after which the page reports that the state has not changed yet
  const READS_AFTER_CHANGE = 6000; // milliseconds of refreshing after the change: some parts of a page are a few seconds old
  const MIN_NOTICE_TIME = 4000; // milliseconds for which a notice is displayed, at least

  let onRefreshed = () => {}; // called after each refresh

  function awaitChange() {
    let acted = null;
    try {
      acted = JSON.parse(sessionStorage.getItem(ACTED_KEY));
      sessionStorage.removeItem(ACTED_KEY);
    } catch (error) { /* no storage */ }
    const notice = main.querySelector(".said:not(.bad)");
    if (!notice || !(main.dataset.live || main.dataset.poll)) return;
    if (acted?.path !== location.pathname) acted = null;
    const request = (index) => Number(main.dataset.asked?.split(" ")[index] ?? 0); // 0: the first pending one, 1: the last
    const last = request(1); // later requests are other people's
    const isWaiting = () => last > 0 && request(0) > 0 && request(0) <= last;
    const isUnchanged = () => isWaiting() || (acted !== null && acted.shows === main.dataset.shows);
    const isOver = () => "one" in main.dataset && acted !== null && !isUnchanged();
    if (acted === null && !isWaiting()) return;
    const start = Date.now();
    let changed = isUnchanged() ? 0 : start;
    const note = document.createElement("span");
    note.id = "unchanged";
    if (!changed) { notice.append(note); setStreamState("on"); isAwaitingChange = true; }
    onRefreshed = () => {
      const now = Date.now(), unchanged = document.getElementById("unchanged");
      if (isUnchanged()) {
        changed = 0;
        const text = ` The state has not changed yet${outage ? `: ${outage}` : ""}. Still waiting.`;
        if (now > start + UNCHANGED_DELAY && unchanged && unchanged.textContent !== text) { unchanged.textContent = text; announce(text); }
        return;
      }
      changed ||= now;
      unchanged?.remove();
      if (isOver() && now > start + MIN_NOTICE_TIME) main.querySelector(".said:not(.bad)")?.remove();
      if (now < changed + READS_AFTER_CHANGE) return;
      clearInterval(changeTimer);
      if (isAwaitingChange && !stream) setStreamState("off");
      isAwaitingChange = false;
      onRefreshed = () => {};
    };
    const changeTimer = setInterval(() => { if (isAwaitingChange) scheduleRefresh(); onRefreshed(); }, 500);
  }

  awaitChange();

  // -- graphs: zooming, dragging, scrolling to the failed step

  const MIN_SCALE = 0.75, READABLE_SCALE = 0.85; // a graph that fits only below MIN_SCALE is shown in part, at READABLE_SCALE
  const scales = new WeakMap(); // scale of each zoomed pane; other panes fit their graph
  const current = new WeakMap(); // the box of each pane that the Tab key focuses; arrow keys focus the other boxes
  let toggledGroup = ""; // the group to focus after the refresh that shows it open or closed

  function fitScale(pane) {
    const svg = pane.querySelector("svg"), [wide, high] = ["width", "height"].map((side) => Number(svg.getAttribute(side)));
    const room = Math.min((pane.clientWidth - 24) / wide, (parseFloat(getComputedStyle(pane).maxHeight) - 26) / high);
    return room < MIN_SCALE ? READABLE_SCALE : Math.min(1, room);
  }

  function zoom(pane, kind) {
    const before = pane.querySelector("svg").clientWidth / Number(pane.querySelector("svg").getAttribute("width"));
    const scale = kind === "fit" ? fitScale(pane) : Math.min(3, Math.max(0.05, before * (kind === "in" ? 1.25 : 0.8)));
    if (kind === "fit") scales.delete(pane); else scales.set(pane, scale);
    const x = (pane.scrollLeft + pane.clientWidth / 2) / before, y = (pane.scrollTop + pane.clientHeight / 2) / before;
    scaleGraphs();
    pane.scrollTo(x * scale - pane.clientWidth / 2, y * scale - pane.clientHeight / 2);
    if (kind === "fit") scrollToFailed(pane);
  }

  function scaleGraphs() {
    for (const pane of document.querySelectorAll(".graph")) {
      const svg = pane.querySelector("svg"), scale = scales.get(pane) ?? fitScale(pane);
      for (const side of ["width", "height"]) svg.style[side] = `${Number(svg.getAttribute(side)) * scale}px`;
      const boxes = [...svg.querySelectorAll("a")], failed = svg.querySelector(".s-failed a");
      const focused = boxes.find((box) => box.dataset.key === current.get(pane)) ?? failed ?? boxes[0];
      for (const box of boxes) box.setAttribute("tabindex", box === focused ? 0 : -1);
    }
    drawMaps();
  }

  // Opens or closes a group without loading another page, so that scroll position, zoom and focus stay.
  function toggleGroup(link) {
    history.pushState(null, "", link.getAttribute("href")); // `link.href` of an SVG link is an object
    toggledGroup = link.dataset.group;
    version = "none";
    refresh();
  }

  window.addEventListener("popstate", () => { version = "none"; refresh(); });

  function focusToggledGroup() {
    const link = toggledGroup && main.querySelector(`[data-key="${CSS.escape(toggledGroup)}"]`);
    if (!link) return;
    toggledGroup = "";
    const pane = link.closest(".graph"), box = link.getBoundingClientRect(), seen = pane.getBoundingClientRect();
    link.focus({ preventScroll: true });
    pane.scrollBy(box.x - seen.x - 40, box.y - seen.y - 40);
  }

  // Focuses the next box of a graph in the direction of an arrow key; at the end of a row, the first box of the next row.
  function focusNextBox(box, key) {
    const boxes = [...box.closest("svg").querySelectorAll("a")];
    const [x, y] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[key];
    const from = box.getBoundingClientRect();
    let nearest = null, leastDistance = Infinity;
    for (const candidate of boxes) {
      const to = candidate.getBoundingClientRect();
      const [dx, dy] = [Math.max(to.left - from.right, from.left - to.right), Math.max(to.top - from.bottom, from.top - to.bottom)];
      const isAhead = x ? (to.left - from.left) * x > 0 && dx > 0 : (to.top - from.top) * y > 0 && dy > 0;
      const [along, beside] = x ? [dx, Math.max(dy, 0)] : [dy, Math.max(dx, 0)];
      const off = x ? to.top + to.height / 2 - from.top - from.height / 2 : to.left + to.width / 2 - from.left - from.width / 2;
      const distance = along + 2 * beside + Math.abs(off) / 100;
      if (isAhead && beside <= 2 * along + 200 && distance < leastDistance) { nearest = candidate; leastDistance = distance; }
    }
    nearest ??= x && boxes[boxes.indexOf(box) + x];
    nearest?.focus();
    nearest?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  document.addEventListener("focusin", (event) => {
    const pane = event.target.closest(".graph");
    if (!pane || event.target === pane) return;
    current.set(pane, event.target.dataset.key);
    for (const box of pane.querySelectorAll("svg a")) box.setAttribute("tabindex", box === event.target ? 0 : -1);
  });

  // Draws the minimap of a graph that exceeds its pane, with the visible part. A click in the minimap scrolls the pane.
  function drawMap(pane) {
    const map = pane.nextElementSibling, svg = pane.querySelector("svg");
    if (!map?.matches(".minimap")) return;
    const isAllVisible = pane.scrollWidth <= pane.clientWidth + 40 && pane.scrollHeight <= pane.clientHeight + 40;
    map.toggleAttribute("hidden", isAllVisible);
    if (isAllVisible) return;
    map.setAttribute("viewBox", svg.getAttribute("viewBox"));
    const [left, top, width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
    const boxes = [...svg.querySelectorAll("g.node")].map((node) => {
      const box = document.createElementNS(svg.namespaceURI, "rect");
      const [x, y] = node.getAttribute("transform").match(/[-\d.]+/g);
      for (const [name, value] of Object.entries({ class: node.getAttribute("class"), x, y, width: 172, height: 52 })) box.setAttribute(name, value);
      return box;
    });
    const scale = svg.clientWidth / width, view = document.createElementNS(svg.namespaceURI, "rect");
    const viewport = { class: "view", x: left + pane.scrollLeft / scale, y: top + pane.scrollTop / scale, width: Math.min(width, pane.clientWidth / scale), height: Math.min(height, pane.clientHeight / scale) };
    for (const [name, value] of Object.entries(viewport)) view.setAttribute(name, value);
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
    if (pane && event.button === 0 && event.pointerType === "mouse") dragged = { pane, x: event.clientX, y: event.clientY, isMoved: false };
  });
  document.addEventListener("pointermove", (event) => {
    if (!dragged) return;
    const { pane, x, y } = dragged;
    dragged.isMoved ||= Math.hypot(event.clientX - x, event.clientY - y) > 4;
    pane.classList.toggle("drags", dragged.isMoved);
    if (!dragged.isMoved) return;
    pane.scrollBy(dragged.x - event.clientX, dragged.y - event.clientY);
    Object.assign(dragged, { x: event.clientX, y: event.clientY });
  });
  document.addEventListener("pointerup", () => {
    dragged?.pane.classList.remove("drags");
    isDragged = Boolean(dragged?.isMoved);
    dragged = null;
  });
  document.addEventListener("dragstart", (event) => { if (event.target.closest?.(".graph")) event.preventDefault(); }); // a group is a link, which browsers drag
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
  function scrollToFailed(pane) {
    const failed = pane.querySelector(".node.s-failed")?.getBoundingClientRect();
    const box = pane.getBoundingClientRect();
    if (failed) pane.scrollBy(failed.x - box.x - box.width / 2, failed.y - box.y - box.height / 2);
    else pane.scrollTo(0, 0);
  }

  scaleGraphs();
  document.querySelectorAll(".graph").forEach(scrollToFailed);

  // -- forms

  // Keeps a question that the reader has begun to answer in place when another user decides it, with a notice. Another
  // question must not move below the pointer.
  function keepOpenQuestions(next) {
    for (const question of main.querySelectorAll("[data-asks]")) {
      const fields = fieldsOf(question);
      const isBegun = question.contains(document.activeElement) || fields.some((field) => field.value && field.value !== field.defaultValue);
      if (!isBegun || next.querySelector(`[data-key="${CSS.escape(question.dataset.key)}"]`)) continue;
      const copy = document.importNode(question, true);
      fieldsOf(copy).forEach((field, index) => { if (field.nodeName === "INPUT") field.setAttribute("value", fields[index].value); });
      for (const button of copy.querySelectorAll("button")) button.disabled = true;
      if (!copy.querySelector(".decided")) copy.prepend(Object.assign(document.createElement("p"), { className: "why decided", textContent: "This was decided in the meantime, or the run has ended. Your input was not sent." }));
      const before = [...main.querySelectorAll("[data-asks]")].slice(0, [...main.querySelectorAll("[data-asks]")].indexOf(question)).reverse()
        .map((previous) => next.querySelector(`[data-key="${CSS.escape(previous.dataset.key)}"]`)).find(Boolean);
      (before ?? next.querySelector(".waits > h2") ?? next.querySelector(".head")).after(copy);
    }
  }

  // After a decision, the next page or a refresh shows the next question below the pointer. A click at the same place
  // decides nothing until the pointer has moved.
  const POINTER_KEY = "orchestrator-rested";
  const POINTER_RANGE = 8; // pixels; a smaller movement of the pointer does not count
  const questionAt = (target) => target.closest?.("[data-asks]")?.dataset.key;
  let pointerRest = null; // the pointer's position, and the question that was there when the pointer arrived
  try {
    pointerRest = JSON.parse(sessionStorage.getItem(POINTER_KEY));
    sessionStorage.removeItem(POINTER_KEY);
  } catch (error) { /* no storage */ }

  function trackPointer(event) {
    const { clientX: x, clientY: y } = event;
    if (!pointerRest || Math.hypot(x - pointerRest.x, y - pointerRest.y) > POINTER_RANGE) pointerRest = { x, y, asks: questionAt(event.target) };
  }

  document.addEventListener("pointermove", trackPointer);
  document.addEventListener("pointerdown", trackPointer);
  document.addEventListener("wheel", () => { pointerRest = null; }, { passive: true }); // the reader scrolls the page
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-asks] [type=submit]");
    if (!button || !event.detail) return; // `detail` is 0 for a key
    if (pointerRest && pointerRest.asks !== questionAt(button)) {
      event.preventDefault();
      const text = "The page has changed: another question is now under the pointer. Move the pointer before you click.";
      if (!button.form.querySelector(".moved")) button.form.append(Object.assign(document.createElement("p"), { className: "why moved", textContent: text, role: "alert" }));
      return;
    }
    const here = { x: event.clientX, y: event.clientY, asks: questionAt(button) };
    try { sessionStorage.setItem(POINTER_KEY, JSON.stringify(here)); } catch (error) { /* no storage */ }
  });

  // -- marked rows

  // Keeps the rows of a table with marked rows, and updates them. Returns the number of new rows that are not shown, or
  // null if no row is marked.
  function keepMarkedRows(next) {
    const markedTable = main.querySelector(".tick input:checked, .grid input:checked")?.closest("table");
    if (!markedTable) return null;
    let fresh = next.querySelector(".tick, .grid th")?.closest("table");
    if (!fresh) {
      fresh = document.createElement("table");
      (next.querySelector(".empty") ?? next.appendChild(fresh)).replaceWith(fresh);
    }
    const rowsByKey = new Map([...markedTable.querySelectorAll("[data-key]")].map((row) => [row.dataset.key, row]));
    const rows = [...fresh.querySelectorAll("[data-key]")];
    for (const row of rows) if (rowsByKey.has(row.dataset.key) && row.nodeName === "TR") morph(rowsByKey.get(row.dataset.key), row);
    fresh.replaceWith(markedTable.cloneNode(true));
    return rows.filter((row) => !rowsByKey.has(row.dataset.key)).length;
  }

  function offerFreshRows(count) {
    const markedTable = count && main.querySelector(".tick input:checked, .grid input:checked")?.closest("table");
    if (!markedTable) return;
    const button = Object.assign(document.createElement("button"), { type: "button", id: "fresh-rows", textContent: `Show ${count} new and clear marks` });
    (markedTable.closest("form[action='/ui/compare'], .grid") ?? markedTable).before(button);
  }

  // Returns whether the action of a button applies to a marked row in its displayed state.
  const isAllowed = (box, button) => box.dataset.may.split(" ").includes(button.dataset.chosen.split(" ")[0].toLowerCase());

  function countChosen() {
    const boxes = [...document.querySelectorAll("input[name=id][form=chosen]")];
    const count = boxes.filter((box) => box.checked).length;
    for (const button of document.querySelectorAll("[data-chosen]")) {
      const eligible = boxes.filter((box) => box.checked && isAllowed(box, button)).length;
      button.classList.toggle("some", eligible > 0);
      button.textContent = button.dataset.chosen.replace("%", `${eligible} marked`);
    }
    for (const confirmation of document.querySelectorAll("details.sure:has([data-chosen])")) confirmation.open &&= count > 0;
    const all = document.querySelector("[data-all]");
    if (all) { all.checked = count > 0 && count === boxes.length; all.indeterminate = count > 0 && count < boxes.length; }
  }

  document.addEventListener("change", (event) => {
    const box = event.target;
    if (box.matches("[data-all]")) {
      for (const row of document.querySelectorAll("input[name=id][form=chosen]")) row.checked = box.checked;
    }
    if (box.matches("[data-submit]")) box.form.requestSubmit();
    if (document.getElementById("fresh-rows")) scheduleRefresh();
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
    const zoomButton = event.target.closest("[data-zoom]");
    if (zoomButton) zoom(zoomButton.parentElement.nextElementSibling.firstElementChild, zoomButton.dataset.zoom);
    if (event.target.id === "fresh-rows") {
      for (const box of main.querySelectorAll(".tick input, .grid input")) box.checked = false;
      refresh();
    }
    const copied = event.target.closest("[data-copy]");
    if (copied) {
      copy(copied.dataset.copy || copied.nextElementSibling.textContent);
      copied.classList.add("copied");
      setTimeout(() => copied.classList.remove("copied"), 1200);
    }
    if (event.target.closest("[data-times]")) {
      const modes = Object.keys(TIMES);
      times = modes[(modes.indexOf(times) + 1) % modes.length];
      try { localStorage.setItem("orchestrator-times", times); } catch (error) { /* no storage */ }
      makeFormats();
      showTimes();
      announce(`Times: ${TIMES[times]}`);
    }
    if (event.target.closest("[data-theme-toggle]")) {
      const root = document.documentElement;
      const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
      root.dataset.theme = isDark ? "light" : "dark";
      try { localStorage.setItem("orchestrator-theme", root.dataset.theme); } catch (error) { /* no storage */ }
    }
    if (event.target.closest("[data-keys]")) keys.showModal();
    for (const open of document.querySelectorAll("details.sure[open]")) {
      if (!open.contains(event.target)) open.open = false;
    }
  });

  // Combines the fields of parameters into the JSON object that the server expects and checks. Numbers keep their text:
  // JavaScript numbers would round large integers.
  function gatherParams(form, data) {
    const name = form.dataset.params || "params";
    const members = [];
    for (const field of form.querySelectorAll("[data-param]")) {
      const { param, kind, json, empty } = field.dataset;
      let value = json && field.value === field.defaultValue ? json : field.value === "" ? empty : field.value;
      if (value === undefined) continue;
      if (value === field.value && (["string", "date", "datetime"].includes(kind) || !isJson(value))) value = JSON.stringify(value);
      members.push(`${JSON.stringify(param)}:${value}`);
    }
    const typed = (data.get(name) || "{}").trim();
    if (!members.length || !isJson(typed) || typed[0] !== "{") return; // the server reports the mistake
    const typedMembers = typed.slice(1, -1).trim();
    data.set(name, `{${(typedMembers ? [typedMembers, ...members] : members).join(",")}}`);
  }

  function isJson(text) {
    try { JSON.parse(text); } catch (error) { return false; }
    return true;
  }

  // Typed values of a form are stored when it is sent, and restored if the server rejects them.
  const TYPED_KEY = "orchestrator-typed";
  const fieldsOf = (form) => [...form.querySelectorAll("input:not([type=hidden], [type=password]), textarea, select")];
  const addressOf = (form) => form.dataset.nameInPath ?? form.getAttribute("action");

  function keepTyped(form) {
    const values = fieldsOf(form).map((field) => (field.type === "checkbox" ? field.checked : field.value));
    try { sessionStorage.setItem(TYPED_KEY, JSON.stringify({ path: location.pathname, to: addressOf(form), values })); } catch (error) { /* no storage */ }
  }

  function restoreTyped() {
    let typed = null;
    try {
      typed = JSON.parse(sessionStorage.getItem(TYPED_KEY));
      sessionStorage.removeItem(TYPED_KEY);
    } catch (error) { /* no storage */ }
    if (!typed?.values.length || typed.path !== location.pathname || !main.querySelector(".said.bad")) return;
    const form = [...main.querySelectorAll("form[method=post]")].find((candidate) => addressOf(candidate) === typed.to);
    const fields = form ? fieldsOf(form) : [];
    if (fields.length !== typed.values.length) return;
    fields.forEach((field, index) => { field[field.type === "checkbox" ? "checked" : "value"] = typed.values[index]; });
    for (let fold = form.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
  }

  restoreTyped();

  // While the server is unreachable, following a link would replace the page by the browser's error page. If the server
  // may be unreachable, probe it first.
  const UNREACHABLE = "The server cannot be reached, so this page stays open. Try again when it is live.";
  const PROBE_TIMEOUT = 3000; // milliseconds for a working server to answer
  let isReached = false; // the server has answered the probe
  let isLeaving = false;
  const mayBeDisconnected = () => indicator && (isDisconnected() || !stream); // an open stream reports a lost connection at once

  async function leaveIfReachable(navigate, show, text) {
    if (isLeaving) return;
    isLeaving = true;
    try {
      await fetch(document.querySelector("link[rel=icon]").href, { cache: "no-store", signal: AbortSignal.timeout(PROBE_TIMEOUT) });
      isReached = true;
      navigate();
    } catch (error) {
      for (const notice of document.querySelectorAll(".unsent")) notice.remove();
      const note = Object.assign(document.createElement("p"), { className: "why unsent", textContent: text, role: "alert" });
      show(note);
      note.scrollIntoView({ block: "nearest" });
      setServerUp(false);
    } finally { isReached = isLeaving = false; }
  }

  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[href]");
    if (!link || event.defaultPrevented || event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
    if (link.target || link.hasAttribute("download") || link.origin !== location.origin || !mayBeDisconnected()) return;
    if (link.hash && link.href.split("#")[0] === location.href.split("#")[0]) return;
    event.preventDefault();
    leaveIfReachable(() => location.assign(link.href), (note) => main.prepend(note), UNREACHABLE);
  });

  document.addEventListener("submit", (event) => {
    const form = event.target;
    if (!isReached && mayBeDisconnected() && !event.defaultPrevented && form.method !== "dialog") {
      event.preventDefault();
      const text = form.method === "post" ? "Not sent: the server cannot be reached. Send it again when this page is live." : UNREACHABLE;
      leaveIfReachable(() => form.requestSubmit(event.submitter), (note) => form.append(note), text);
      return;
    }
    if (form.dataset.nameInPath) {
      form.action = form.dataset.nameInPath.replace("%", encodeURIComponent(form.querySelector("[data-name]").value));
    }
    submitter = event.submitter;
    if (form.method === "post") keepTyped(form);
    if (form.matches(".act") && main.dataset.shows) {
      const acted = JSON.stringify({ path: location.pathname, shows: main.dataset.shows });
      try { sessionStorage.setItem(ACTED_KEY, acted); } catch (error) { /* no storage */ }
    }
    if (form.method !== "post") return;
    isSending = true; // a refresh would enable the button again
    setTimeout(() => {
      for (const button of form.querySelectorAll("button")) button.disabled = true;
      if (event.submitter) event.submitter.textContent = "Working…";
      announce("Working…");
    });
  });

  // -- keys

  const keys = document.getElementById("keys");
  let isGoPressed = false;
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
      focusNextBox(box, event.key);
      event.preventDefault();
    } else if (event.key === "/") {
      document.getElementById("search")?.focus();
      event.preventDefault();
    } else if (isGoPressed) {
      isGoPressed = false;
      const link = document.querySelector(`nav.side a[data-letter="${CSS.escape(event.key)}"]`);
      if (link) { link.click(); event.preventDefault(); }
    } else if (event.key === "g") {
      isGoPressed = true;
      setTimeout(() => { isGoPressed = false; }, 1500);
    } else if (event.key === "j" || event.key === "k") {
      focusNextRow(event.key === "j" ? 1 : -1);
    } else if (event.key === "x") {
      document.activeElement.closest("tr")?.querySelector(".tick input")?.click();
    } else if (/^[a-z]$/.test(event.key)) {
      press(event.key);
      event.preventDefault();
    }
  });

  // Focuses the link of the next row (1) or the previous row (-1) of a list.
  function focusNextRow(step) {
    const rows = [...main.querySelectorAll("table.list tbody tr")].filter((row) => isVisible(row) && row.querySelector("td a"));
    const index = rows.findIndex((row) => row.contains(document.activeElement));
    const row = rows[index < 0 ? 0 : Math.min(rows.length - 1, Math.max(0, index + step))];
    row?.querySelector("td.main a, td a").focus();
    row?.scrollIntoView({ block: "nearest" });
  }

  // Activates the element with a shortcut key, in the focused row or else on the page. An action that needs a
  // confirmation only opens the confirmation.
  function press(key) {
    const row = document.activeElement.closest("tbody tr");
    const matches = [...document.querySelectorAll(`[aria-keyshortcuts="${key}"]`)].filter(isVisible);
    const target = matches.find((element) => row?.contains(element)) ?? matches.find((element) => !element.closest("tbody"));
    if (target?.nodeName !== "SUMMARY") { target?.click(); return; }
    target.parentElement.open = true;
    target.nextElementSibling.querySelector("button[type=submit]").focus();
  }

  const isVisible = (element) => element.getClientRects().length > 0;

  const here = document.querySelector("nav.side a[aria-current]");
  if (here && here.parentElement.scrollWidth > here.parentElement.clientWidth) {
    here.parentElement.scrollLeft = here.offsetLeft - 16;
  }
  showTimes();
  countChosen();
  setInterval(showTimes, 1000);
})();
