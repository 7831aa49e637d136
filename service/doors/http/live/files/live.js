// The live page: shows the events of the stream in tiles and drawings.

import { byteTicks, due, frames } from "./canvas.js";
import { Chart, Rows, plain } from "./chart.js";
import { bytes, count, digits, duration, exact, plural, share } from "./format.js";
import { PageMap } from "./map.js";
import { Stream } from "./stream.js";
import { useTheme } from "./theme.js";
import { Icicle } from "./tree.js";

const KEY = "attnd-key";
const BUSY_S = 2; // the engine is busy if the last snapshot is older than this
const REASONS = {
  out_of_pages: "out of pages",
  overloaded: "queue full",
  deadline_exceeded: "deadline",
  cancelled: "cancelled",
};
const STAGES = {
  queue: "queue",
  plan: "plan",
  copy_in: "copy in",
  kernel: "kernel",
  copy_out: "copy out",
  encode: "encode",
};
const byId = (id) => document.getElementById(id);

const rows = new Rows();
let layers = 1;
const map = new PageMap(byId("map"), byId("map-legend"), byId("map-read"));
const tree = new Icicle(byId("tree"), byId("tree-legend"), byId("tree-read"));
const chart = (id, options) => new Chart(byId(id), byId(`${id}-legend`), byId(`${id}-read`), rows, options);
const charts = [
  chart("throughput", {
    series: [["attention", "attention"], ["other", "others"], ["failed", "rejected or failed"]],
    unit: (value) => `${plain(value)}/s`,
    empty: "no operations",
    least: 4,
  }),
  chart("latency", {
    series: Object.entries(STAGES),
    value: (row, name) => {
      const turns = row[rows.index("turns")];
      return turns > 0 ? (1000 * row[rows.index(name)]) / turns : 0;
    },
    unit: duration,
    empty: "no operations",
    least: 0.1,
  }),
  chart("traffic", {
    series: [["read", "read from the pool"], ["saved", "saved by cascade"]],
    unit: (value) => `${bytes(value)}/s`,
    empty: "no attention",
    steps: byteTicks,
    least: 4096,
  }),
  chart("rejections", {
    series: Object.entries(REASONS),
    unit: (value) => `${plain(value)}/s`,
    empty: "none rejected",
    least: 4,
  }),
  chart("evictions", {
    series: [["evicted", "cached pages evicted"]],
    unit: (value) => `${plain(value)}/s`,
    empty: "none evicted",
    least: 4,
  }),
];
const drawings = [map, tree, ...charts];

// Handlers of the stream's events, by name.

const handlers = {
  service(info) {
    rows.columns = info.columns;
    layers = info.num_layers;
    const sizes = { fp32: 4, fp16: 2, bf16: 2 };
    const page = 2 * info.num_kv_heads * info.head_dim * (sizes[info.dtype] ?? 1) * info.page_size * info.num_layers;
    const shape = `${plural(info.num_layers, "layer")} × ${plural(info.num_kv_heads, "KV head")} × ${info.head_dim}, ${info.dtype}`;
    const facts = [`${info.backend} on ${info.device}`, shape, `pages of ${plural(info.page_size, "token")}, ${bytes(page)}`];
    write("service", `${facts.join(" · ")} · ${info.version}`);
  },
  pool(pool) {
    write("used", share(pool.referenced, pool.total));
    const counts = [`${exact(pool.referenced)} of ${exact(pool.total)} pages referenced`, `${exact(pool.cached)} cached`];
    if (pool.host) counts.push(`${exact(pool.host)} in host memory`);
    if (pool.disk) counts.push(`${exact(pool.disk)} on disk`);
    if (pool.host_records) counts.push(`${plural(pool.host_records, "record")} in host memory`);
    if (pool.disk_records) counts.push(`${plural(pool.disk_records, "record")} on disk`);
    write("used-of", counts.join(", "));
    for (const one of byId("split").children) one.style.flexGrow = pool[one.className];
    write("sequences", exact(pool.sequences));
    write("sequences-more", `${plural(pool.nodes, "node")}, ${plural(pool.leases, "lease")}`);
    map.setPool(pool);
    tree.setPool(pool);
    document.body.dataset.pool = JSON.stringify(pool);
  },
  pages(pages) {
    map.set(pages);
  },
  tree(parts) {
    tree.set(parts);
  },
  load(load) {
    write("waiting", exact(load.waiting ?? 0));
    write("inflight", `${exact(load.inflight ?? 0)} in flight`);
    write("sessions", exact(load.sessions ?? 0));
    showState(load.age_s > BUSY_S ? "busy" : "live", load.age_s);
  },
  summary({ totals, latency, seconds }) {
    write("saved", share(rows.sum("saved"), rows.sum("saved") + rows.sum("read")));
    write("saved-more", `${bytes(totals.saved)} in all`);
    const rejected = Object.keys(REASONS).reduce((sum, name) => sum + rows.sum(name), 0);
    write("rejected", exact(rejected));
    write("evicted", `${plural(rows.sum("evicted"), "page")} evicted`);
    fillStages(latency);
    byId("latency-title").title = `over ${digits(seconds)} s`;
    document.body.dataset.totals = JSON.stringify(totals);
  },
  rows(added) {
    rows.add(added);
    const row = rows.last;
    const of = (name) => row[rows.index(name)] ?? 0;
    write("operations", `${plain(of("attention") + of("other") + of("failed"))}/s`);
    write("operations-more", `${plain(of("attention"))}/s attention`);
    write("tokens", `${count(of("tokens") / layers)}/s`);
    for (const one of charts) {
      one.refresh();
      due(one);
    }
  },
};

function write(id, text) {
  const element = byId(id);
  if (element.textContent !== text) element.textContent = text;
}

function fillStages(latency) {
  const body = byId("stages").tBodies[0];
  if (!body.rows.length) {
    for (const [name, words] of Object.entries(STAGES)) {
      const row = body.insertRow();
      const head = document.createElement("th");
      head.scope = "row";
      const square = document.createElement("span");
      square.className = "swatch";
      square.style.background = `var(--${name})`;
      head.append(square, words);
      row.append(head);
      for (let at = 0; at < 4; at++) row.insertCell();
    }
  }
  Object.keys(STAGES).forEach((name, at) => {
    const [number, ...times] = latency[name] ?? [0, 0, 0, 0];
    const cells = [exact(number), ...times.map((ms) => (number ? duration(ms) : "–"))];
    cells.forEach((text, cell) => (body.rows[at].cells[cell + 1].textContent = text));
  });
}

// The connection.

let isPaused = false;
const stream = new Stream("live/stream", (name, value) => handlers[name]?.(value), showConnection);

function showState(state, age = 0) {
  const words = { live: "live", busy: `busy: last seen ${digits(age)} s ago`, paused: "paused", lost: "connection lost", key: "needs a key" };
  byId("state").dataset.state = state;
  write("state", words[state]);
}

function showConnection(state, text) {
  byId("trouble").hidden = state !== "lost";
  document.querySelector("main").toggleAttribute("data-stale", state !== "live");
  if (state === "live") {
    if (byId("state").dataset.state !== "busy") showState("live");
    return;
  }
  showState(state);
  if (state === "key") askForKey(text);
  else write("trouble", text);
}

// Buttons and keys.

/** Stops the stream while the page is paused or hidden; the service sends the missing events on resume. */
function follow() {
  if (isPaused || document.hidden) stream.stop();
  else stream.start();
}

function pause() {
  isPaused = !isPaused;
  byId("pause").setAttribute("aria-pressed", isPaused);
  write("pause", isPaused ? "Resume" : "Pause");
  follow();
  if (isPaused) {
    byId("trouble").hidden = true;
    showState("paused");
  }
}

function toggle(button, part) {
  const isShown = part.hidden;
  part.hidden = !isShown;
  button.setAttribute("aria-expanded", isShown);
  return isShown;
}

function askForKey(why = "") {
  if (byId("key-form").hidden) toggle(byId("key"), byId("key-form"));
  write("key-why", why || "Kept in this tab only.");
  byId("key-input").focus();
}

function useKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
  byId("key-input").value = "";
  if (!byId("key-form").hidden) toggle(byId("key"), byId("key-form"));
  if (isPaused) pause();
  stream.use(key);
}

byId("pause").addEventListener("click", pause);
byId("help").addEventListener("click", () => toggle(byId("help"), byId("keys")));
byId("key").addEventListener("click", () => toggle(byId("key"), byId("key-form")) && askForKey());
byId("key-forget").addEventListener("click", () => useKey(""));
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key-input").value.trim());
});
addEventListener("keydown", (event) => {
  if (event.target instanceof HTMLInputElement || event.ctrlKey || event.metaKey || event.altKey) return;
  const button = { p: "pause", t: "theme", k: "key", "?": "help" }[event.key];
  if (!button) return;
  event.preventDefault();
  byId(button).click();
});
new ResizeObserver(() => drawings.forEach(due)).observe(document.querySelector("main"));
document.addEventListener("visibilitychange", follow);

globalThis.attnd = { frames, map, rows };
fillStages({});
useTheme(byId("theme"), drawings);
stream.use(sessionStorage.getItem(KEY) ?? "");
