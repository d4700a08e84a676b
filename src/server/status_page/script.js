"use strict";
// Reads status.json every two seconds and shows it. Elements are made once and then only change their text,
// so that focus, selection and scrolling stay. All texts are set as text, never as HTML.

/** Without the name and the password that the address of the page may have, which fetch refuses. */
const SOURCE = new URL("status.json", location.href);
SOURCE.username = SOURCE.password = "";

const EVERY_MS = 2000;
const LIMIT_MS = 10000;
const STALE_MS = 7000;

/** The last answer, when it arrived, and why there is none since. */
let now = null, arrived = performance.now(), failure = "";

// Elements

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const byId = (id) => document.getElementById(id);

function set(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Shows a text, or a figure with its exact value and the series that it is of. */
function show(node, cell) {
  if (typeof cell === "string") return set(node, cell);
  if (!node.firstElementChild) node.replaceChildren(element("data"));
  const data = node.firstElementChild;
  data.value = cell.value ?? "";
  if (cell.key) data.dataset.series = cell.key;
  set(data, cell.text);
}

/** What changes with each answer, of the part that is being made. */
let live = [];

function update(change) {
  live.push(change);
  change();
}

/** Makes a part. Its `live` changes it. */
function part(make) {
  const outer = live;
  live = [];
  try {
    return { node: make(), live };
  } finally {
    live = outer;
  }
}

// Values

const digits = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const few = new Intl.NumberFormat("en-US", { maximumSignificantDigits: 3 });
const count = (value) => digits.format(value);
const versions = (value) => count(value) + (value === 1 ? " version" : " versions");
const perSecond = (value) => few.format(value) + "/s";
/** A share in percent. Only all is 100 %. */
const share = (value) => (value > 0.995 && value < 1 ? Math.min(99.99, 100 * value).toFixed(2)
  : (100 * value).toFixed(1)) + " %";
const quality = (value) => value.toFixed(4);

function duration(seconds) {
  if (seconds === 0) return "0 s";
  if (seconds < 0.001) return few.format(1e6 * seconds) + " \u00b5s";
  if (seconds < 1) return few.format(1e3 * seconds) + " ms";
  if (seconds < 100) return few.format(seconds) + " s";
  const minutes = Math.round(seconds / 60), hours = Math.floor(minutes / 60);
  if (hours < 1) return minutes + " min";
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  for (; value >= 1024 && at < 4; at++) value /= 1024;
  return (at === 0 ? count(value) : value.toFixed(1)) + " " + units[at];
}

/** The time of day in UTC, as in the log; with the date, unless that is today. */
function clock(unixMs) {
  const parts = (ms) => new Date(ms).toISOString().slice(0, 19).split("T");
  const [date, text] = parts(unixMs);
  return date === parts(now.unix_ms)[0] ? text : `${date} ${text}`;
}

const utc = (unixMs) => clock(unixMs) + " UTC";

const NONE = "\u2013";

/** A figure: a value, or a dash if there is none. */
const derived = (value, format) => ({ value, text: value == null ? NONE : format(value) });

function key(name, labels) {
  const escaped = (text) => text.replaceAll("\\", "\\\\").replaceAll('"', '\\"').replaceAll("\n", "\\n");
  const pairs = Object.entries(labels).map(([label, value]) => `${label}="${escaped(value)}"`);
  return "flechette_" + name + (pairs.length ? `{${pairs.join(",")}}` : "");
}

const value = (name, labels = {}) => now.series[key(name, labels)];

/** The figure of a series of the metrics page. */
function series(name, labels, format) {
  return { key: key(name, labels), ...derived(value(name, labels), format) };
}

const statusOf = (name) => now.models.find((model) => model.name === name) ?? {};
const plotsOf = (name) => now.plots.models[name];

// Parts of a section

/** A list of figures: pairs of a title and a function that returns the figure. */
function figures(pairs, kind = "small") {
  const list = element("dl", { class: "figures " + kind });
  for (const [title, figure] of pairs) {
    const shown = element("dd");
    update(() => show(shown, figure()));
    list.append(element("div", {}, element("dt", {}, title), shown));
  }
  return list;
}

/** A table whose rows may change. Columns: [title, class]. The first cell of a row is its header. */
function table(title, columns, rows) {
  const heads = columns.map(([text, kind]) => element("th", { scope: "col", class: kind ?? "" }, text));
  const body = element("tbody");
  const whole = element("table", {}, element("thead", {}, element("tr", {}, ...heads)), body);
  // It can be scrolled by keyboard.
  const attributes = { class: "scroll", tabindex: "0", role: "region", "aria-label": title };
  const scroll = element("div", attributes, whole);
  // A shadow shows that there are rows below.
  const shade = () => {
    const below = scroll.scrollHeight - scroll.clientHeight - scroll.scrollTop;
    scroll.classList.toggle("more", below > 1);
  };
  scroll.addEventListener("scroll", shade);
  update(() => {
    const wanted = rows();
    while (body.rows.length > wanted.length) body.deleteRow(-1);
    wanted.forEach((cells, at) => {
      const row = body.rows[at] ?? body.insertRow();
      cells.forEach((cell, i) => {
        const make = () => element(i === 0 ? "th" : "td", { class: columns[i][1] ?? "" });
        const node = row.cells[i] ?? row.appendChild(make());
        if (i === 0) node.scope = "row";
        if (cell.bar !== undefined) return showShare(node, cell);
        if (cell.alarm !== undefined) node.classList.toggle("bad", cell.alarm);
        show(node, cell.alarm === undefined ? cell : cell.text);
      });
    });
    shade();
  });
  return scroll;
}

function showShare(node, cell) {
  if (!node.firstElementChild) node.append(element("span", { class: "share" }), element("span"));
  node.firstElementChild.style.backgroundSize = `${100 * (cell.value ?? 0)}%`;
  show(node.lastElementChild, cell);
}

/** A part that can be folded. In a wide window it is open at first. */
function unfolded(title, ...children) {
  const part = folded(title, ...children);
  part.open = matchMedia("(min-width: 60rem)").matches;
  return part;
}

/** A part that is folded at first, so that the last events are not far below. */
function folded(title, ...children) {
  return element("details", {}, element("summary", {}, title), ...children);
}

function chip(text) {
  const node = element("span", {});
  update(() => {
    const [words, kind] = text();
    node.className = words ? "chip " + kind : "";
    set(node, words);
  });
  return node;
}

// Plots

/** The next number of the form 1, 2 or 5 times a power of ten. */
function round(most) {
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= most) ?? most;
}

function svg(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** The path of a line in a box of 1000 by 100. A missing value breaks the line. */
function path(points, { from, to, low, high }) {
  let text = "", pen = "M";
  for (const [x, y] of points) {
    if (y == null) { pen = "M"; continue; }
    const right = (1000 * (x - from)) / (to - from), down = 100 - (100 * (y - low)) / (high - low);
    // A line of no length is a dot, for a value without neighbours.
    text += `${pen}${right.toFixed(1)} ${down.toFixed(1)}` + (pen === "M" ? "h0" : "");
    pen = "L";
  }
  return text;
}

/**
 * A small plot. `lines` are [name, points()], `format` is of their values, `axes(values)` returns the limits
 * of the plot and the texts at the ends of its horizontal axis.
 */
function plot(title, lines, format, axes) {
  const kinds = ["first", "second"];
  const legend = lines.map((_, at) => element("span", { class: kinds[at] }));
  const paths = lines.map((_, at) => svg("path", { class: kinds[at], "stroke-linecap": "round" }));
  const middle = svg("path", { class: "middle", d: "M0 50H1000" });
  const shape = { viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img" };
  const box = svg("svg", shape, middle, ...paths);
  const [top, bottom, left, right] = [0, 1, 2, 3].map(() => element("span"));
  update(() => {
    const points = lines.map(([, of]) => of());
    const values = points.flat().map(([, y]) => y).filter((y) => y != null);
    const limits = axes(values);
    const said = [];
    lines.forEach(([name], at) => {
      const known = points[at].map(([, y]) => y).filter((y) => y != null);
      const last = known.length ? format(known.at(-1)) : NONE;
      set(legend[at], `${name} ${last}`);
      const ends = [Math.min(...known), Math.max(...known)];
      const [least, most] = ends.map((y) => known.length ? format(y) : NONE);
      said.push(`${name}: last ${last}, least ${least}, most ${most}`);
      paths[at].setAttribute("d", path(points[at], limits));
    });
    box.setAttribute("aria-label", `${title}, ${limits.left} to ${limits.right}. ${said.join(". ")}.`);
    set(top, format(limits.high));
    set(bottom, limits.low ? format(limits.low) : "0");
    set(left, limits.left);
    set(right, limits.right);
  });
  const y = element("div", { class: "y", "aria-hidden": "true" }, top, bottom);
  const x = element("div", { class: "x", "aria-hidden": "true" }, left, right);
  const names = element("div", { class: "legend" }, ...legend);
  const caption = element("figcaption", {}, element("h3", {}, title), names);
  return element("figure", {}, caption, element("div", { class: "axes" }, y, box, x));
}

/** The lower end of an axis of shares: near the lowest one, so that a fall from 99 % to 95 % is seen. */
function lowest(shares) {
  const least = shares.length ? Math.min(...shares) : 0;
  return [0.99, 0.98, 0.95, 0.9, 0.8, 0.5].find((low) => least > low) ?? 0;
}

/** A plot over the last minutes of fields of the history: at most ten, and at least one. */
function overTime(title, model, fields, format, ofShares) {
  const points = (field) => () => {
    const intervals = plotsOf(model)?.intervals ?? [];
    return intervals.map((rates, at) => [now.plots.times[at], rates[field]]);
  };
  const lines = fields.map(([name, field]) => [name, points(field)]);
  const limits = (values) => {
    const to = now.unix_ms, oldest = now.plots.times[0] ?? to;
    const minutes = Math.min(10, Math.max(1, Math.ceil((to - oldest) / 60000)));
    const most = ofShares ? 1 : round(Math.max(0, ...values)) || 1, low = ofShares ? lowest(values) : 0;
    return { from: to - 60000 * minutes, to, low, high: most, left: `${minutes} min ago`, right: "now" };
  };
  return plot(title, lines, format, limits);
}

function aucPlot(model) {
  const limits = (values) => {
    const points = plotsOf(model)?.auc ?? [];
    const [from, to] = [points[0]?.[0] ?? 0, points.at(-1)?.[0] ?? 1];
    const low = Math.floor(20 * Math.min(0.95, ...values)) / 20;
    const high = Math.ceil(20 * Math.max(low + 0.05, ...values)) / 20;
    return { from, to: Math.max(to, from + 1), low, high, left: count(from), right: count(to) + " samples" };
  };
  return plot("AUC of training", [["AUC", () => plotsOf(model)?.auc ?? []]], quality, limits);
}

/** The values of the plots over time, the newest first. Closed at first. */
function valuesPart(model, fields) {
  const rows = () => (plotsOf(model)?.intervals ?? []).map((rates, at) => [
    clock(now.plots.times[at]),
    ...fields.map(([, field, format]) => derived(rates[field], format)),
  ]);
  const columns = [["Time (UTC)", "time"], ...fields.map(([name]) => [name, "number"])];
  const part = element("details", {}, element("summary", {}, "Plots as a table"));
  part.append(table(`Plots of ${model}`, columns, () => part.open ? rows().reverse() : []));
  part.addEventListener("toggle", () => showModels());
  return part;
}

// The section of a model

const CODES = [
  "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
  "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE",
  "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
];

function byCode(model) {
  const known = CODES.filter((code) => code === "OK" || value("requests_total", { model, code }) > 0);
  return known.map((code) => [code, series("requests_total", { model, code }, count)]);
}

function tableRows(model, cache) {
  const rate = (name) => {
    const of = (metric) => value(metric, { model, table: name });
    const [hits, misses] = [of("cache_hits_total"), of("cache_misses_total")];
    return { bar: true, ...derived(hits + misses > 0 ? hits / (hits + misses) : null, share) };
  };
  const counter = (name) => (of) => series(of, { model, table: name }, count);
  const counters = ["cache_hits_total", "cache_misses_total", "cache_evictions_total"].filter(() => cache);
  counters.push("absent_ids_total");
  const row = (name) => [name, ...(cache ? [rate(name)] : []), ...counters.map(counter(name))];
  return (statusOf(model).tables ?? []).map(row);
}

function labelRows(model) {
  return (statusOf(model).labels ?? []).map(({ label, follows, version }) => [
    label,
    version == null ? "not loaded" : String(version),
    follows == null ? "the latest version" : "version " + follows,
  ]);
}

function versionsPart(model) {
  const own = { model };
  const columns = [["Label"], ["Version", "number"], ["Follows"]];
  const loaded = () => {
    const all = statusOf(model).versions ?? [];
    return (all.length === 1 ? "version " : "versions ") + all.join(", ");
  };
  return unfolded(
    "Versions",
    figures([
      ["Loaded", loaded],
      ["Taken over", () => series("switches_total", own, versions)],
      ["Refused", () => series("switches_refused_total", own, versions)],
      ["Loaded for", () => series("serving_version_age_seconds", own, duration)],
    ]),
    table(`Labels of ${model}`, columns, () => labelRows(model)),
  );
}

function trainingPart(model) {
  const own = { model };
  const state = (value) => value > 0 ? "running" : value < 0 ? "failed" : "ended";
  const speed = () => derived(plotsOf(model)?.last_minute.trained_per_second, perSecond);
  return unfolded("Training", figures([
    ["State", () => series("training_state", own, state)],
    ["Steps", () => series("training_steps_total", own, count)],
    ["Samples", () => series("training_samples_total", own, count)],
    ["Speed, last minute", speed],
    ["AUC", () => series("progressive_auc", own, quality)],
    ["Log loss", () => series("progressive_log_loss", own, quality)],
    ["Calibration", () => series("progressive_calibration", own, quality)],
    ["Published", () => series("publishes_total", own, versions)],
    ["Not published", () => series("publishes_failed_total", own, versions)],
  ]));
}

function cachePart(model) {
  const own = { model };
  return folded("Cache", figures([
    ["Used by rows", () => series("cache_used_bytes", own, bytes)],
    ["Room for rows", () => series("cache_pool_bytes", own, bytes)],
    ["Limit, with the index", () => series("cache_capacity_bytes", own, bytes)],
    ["Entries", () => series("cache_entries", own, count)],
    ["Room for entries", () => series("cache_entries_max", own, count)],
    ["Pointers", () => series("cache_pointers", own, count)],
    ["Inserted", () => series("cache_inserted_total", own, count)],
    ["Not admitted", () => series("cache_not_admitted_total", own, count)],
    ["Found no room", () => series("cache_rejected_total", own, count)],
  ]));
}

function modelTitle(model) {
  const { architecture, features, tables } = statusOf(model);
  const about = `${architecture}, ${features} features, ${tables.length} tables`;
  const training = { running: ["training", "good"], ended: ["training has ended", ""] };
  return element(
    "div",
    { class: "title" },
    element("h2", {}, model),
    chip(() => statusOf(model).state === "ready" ? ["ready", "good"] : ["loading", "warn"]),
    chip(() => statusOf(model).newer_refused?.length ? ["older version", "warn"] : ["", ""]),
    chip(() => statusOf(model).overloaded ? ["overloaded", "bad"] : ["", ""]),
    chip(() => {
      const state = statusOf(model).training;
      return state === "failed" ? ["training has failed", "bad"] : training[state] ?? ["", ""];
    }),
    element("small", {}, about),
  );
}

const REQUESTS = [["served", "requests_per_second", perSecond], ["failed", "failed_per_second", perSecond]];
const LATENCY = [["p50", "p50_seconds", duration], ["p99", "p99_seconds", duration]];
const HIT_RATE = [["hit rate", "hit_rate", share]];

function servedModel(model, { cache, training, plots }) {
  const own = { model };
  const minute = (field, format) => () => derived(plotsOf(model)?.last_minute[field], format);
  const group = (title, ...pairs) => element("div", {}, element("h3", {}, title), figures(pairs, "large"));
  const node = element("div", {}, modelTitle(model), element(
    "div",
    { class: "groups" },
    group(
      "Last minute",
      ["Served", minute("requests_per_second", perSecond)],
      ["Failed", minute("failed_per_second", perSecond)],
      ["Samples", minute("samples_per_second", perSecond)],
      ["p50 latency", minute("p50_seconds", duration)],
      ["p99 latency", minute("p99_seconds", duration)],
      ...(cache ? [["Cache hit rate", minute("hit_rate", share)]] : []),
    ),
    group(
      "Now",
      ["Serving version", () => series("serving_version", own, String)],
      ["Freshness", () => series("freshness_seconds", own, duration)],
      ["Waiting samples", () => series("queue_samples", own, count)],
    ),
  ));
  if (plots) {
    node.append(element(
      "div",
      { class: "plots" },
      overTime("Requests", model, REQUESTS, perSecond),
      overTime("Latency", model, LATENCY, duration),
      ...(cache ? [overTime("Cache hit rate", model, HIT_RATE, share, true)] : []),
      ...(training ? [aucPlot(model)] : []),
    ), valuesPart(model, [...REQUESTS, ...LATENCY, ...(cache ? HIT_RATE : [])]));
  } else {
    node.append(element("p", { class: "note" }, "No plots: the server keeps those of its first 32 models."));
  }
  const numbers = (...titles) => titles.map((title) => [title, "number"]);
  const ofCache = cache ? numbers("Hit rate", "Hits", "Misses", "Evicted") : [];
  const ofTable = [["Table"], ...ofCache, ...numbers("Absent ids")];
  const ofStatus = [["Status"], ...numbers("Requests")];
  const tables = folded(
    cache ? "Hit rate by table" : "Tables",
    table(`Tables of ${model}`, ofTable, () => tableRows(model, cache)),
  );
  const requests = folded("Requests by status", table(`Requests of ${model}`, ofStatus, () => byCode(model)));
  const others = element(
    "div",
    {},
    ...(training ? [trainingPart(model)] : []),
    cache ? cachePart(model) : element("p", { class: "note" }, "No cache: rows are read from the tables."),
  );
  const left = element("div", {}, versionsPart(model), tables, requests);
  node.append(element("div", { class: "columns" }, left, others));
  return node;
}

function otherModel(model) {
  const chipOf = { loading: ["loading", "warn"], refused: ["not served", "bad"] };
  const reason = element("p", { class: "note" });
  update(() => set(reason, statusOf(model).reason ?? ""));
  const title = element("div", { class: "title" }, element("h2", {}, model));
  title.append(chip(() => chipOf[statusOf(model).state] ?? ["", ""]));
  return element("div", {}, title, reason);
}

// The whole page

/** The sections of the models: name to { form, node, live }. */
const sections = new Map();
let made = 0, common = null;

function showModels() {
  const names = now.models.map((model) => model.name);
  for (const name of [...sections.keys()].filter((name) => !names.includes(name))) {
    sections.get(name).node.remove();
    sections.delete(name);
  }
  for (const model of now.models) {
    const form = {
      served: model.architecture !== "",
      tables: model.tables,
      cache: value("cache_capacity_bytes", { model: model.name }) > 0,
      training: model.training != null,
      plots: plotsOf(model.name) !== undefined,
    };
    const text = JSON.stringify(form), old = sections.get(model.name);
    if (old?.form === text) {
      old.live.forEach((change) => change());
      continue;
    }
    const make = () => form.served ? servedModel(model.name, form) : otherModel(model.name);
    const { node, live } = part(make);
    const id = old?.node.id ?? `model-${++made}`;
    const section = element("section", { id, "aria-label": "Model " + model.name }, node);
    old?.node.replaceWith(section);
    sections.set(model.name, { form: text, node: section, live });
  }
  const nodes = names.map((name) => sections.get(name).node), parent = byId("models");
  if (nodes.some((node, at) => parent.children[at] !== node)) {
    parent.replaceChildren(...nodes);
    const link = (href, text) => element("li", {}, element("a", { href }, text));
    const links = names.map((name) => link("#" + sections.get(name).node.id, name));
    const list = element("ul", {}, ...links, link("#events", "Last events"), link("#server", "Server"));
    byId("contents").replaceChildren(list);
  }
}

function showCommon() {
  common ??= part(() => {
    const columns = [["Time (UTC)", "time"], ["Event"], ["Model", "name"], ["What", "text"]];
    const alarms = ["refused", "gone", "not_published", "training_failed", "overload_began"];
    const what = (kind) => ({ alarm: alarms.includes(kind), text: kind.replaceAll("_", " ") });
    const row = ({ unix_ms, kind, model, text }) => [clock(unix_ms), what(kind), model, text];
    byId("events").append(table("List of events", columns, () => now.events.map(row)));
    const none = element("p", { class: "note" });
    update(() => set(none, now.events.length ? "" : "Nothing has happened yet."));
    byId("events").append(none);
    const plain = (name, format) => () => ({ key: name, ...derived(now.series[name], format) });
    const expiry = "flechette_tls_certificate_expiry_seconds";
    byId("server").append(figures([
      ["gRPC", () => now.grpc],
      ["HTTP", () => now.http],
      ["Started", plain("process_start_time_seconds", (time) => utc(1000 * time))],
      ["Memory", plain("process_resident_memory_bytes", bytes)],
      ["Processor time", plain("process_cpu_seconds_total", duration)],
      ["Threads", plain("process_threads", count)],
      ["Open files", plain("process_open_fds", count)],
      ["Limit of open files", plain("process_max_fds", count)],
      ["Models not served", () => series("models_not_served", {}, count)],
      ...(expiry in now.series ? [["Certificate expires", plain(expiry, (time) => utc(1000 * time))]] : []),
    ]));
    return null;
  });
  common.live.forEach((change) => change());
}

/** What somebody has to look at, as sentences. */
function problems(stale) {
  const found = failure ? [failure] : [];
  if (stale && !failure) found.push("The server does not answer.");
  if (found.length && now) found[0] += ` All figures and states are those of ${utc(now.unix_ms)}.`;
  if (now?.not_ready) found.push(`The server is not ready: ${now.not_ready}`);
  for (const model of now?.models ?? []) {
    const { name, state, reason, missing, newer_refused, serving, training, overloaded } = model;
    const { stuck, no_learning } = model;
    if (state === "refused") found.push(`Model ${name} is not served: ${reason}`);
    found.push(...missing.map((reason) => `Model ${name}: not loaded: ${reason}`));
    if (newer_refused.length) {
      found.push(`Model ${name} serves an older version, ${serving}: ${newer_refused.join("; ")}`);
    }
    // If the served version is stuck, the server is not ready, and says so.
    for (const version of stuck.filter((version) => version !== serving)) {
      found.push(`Model ${name}: a call of version ${version} does not end.`);
    }
    if (no_learning) found.push(`Model ${name} takes no learned samples: ${no_learning}`);
    if (overloaded) found.push(`Model ${name} refuses requests because of load.`);
    if (value("device_lost", { model: name })) {
      found.push(`Model ${name}: the device has failed; the host computes.`);
    }
    if (training === "failed") {
      const event = now.events.find((event) => event.kind === "training_failed" && event.model === name);
      const version = value("serving_version", { model: name });
      const reason = event?.text ?? "the log says why";
      found.push(`Training of ${name} has failed: ${reason}. Version ${version} stays served.`);
    }
  }
  return found;
}

function showState() {
  const stale = performance.now() - arrived > STALE_MS && !document.hidden;
  const seconds = Math.round((performance.now() - arrived) / 1000);
  const since = stale ? `no answer for ${seconds} s; ` : "";
  set(byId("age"), now ? `${since}figures of ${utc(now.unix_ms)}` : "");
  byId("age").className = stale ? "stale" : "";
  const silent = failure !== "" || stale, sentences = problems(stale), list = byId("problems");
  // What the chips of the models say is old then.
  byId("models").classList.toggle("old", silent);
  const some = sentences.length === 1 ? "1 problem" : `${sentences.length} problems`;
  const [text, kind] = silent ? ["no connection", "old"]
    : !now ? ["asking the server", ""]
    : now.not_ready ? ["not ready", "warn"]
    : sentences.length ? [`ready, ${some}`, "warn"] : ["ready", "good"];
  set(byId("state"), text);
  byId("state").className = "chip " + kind;
  if (JSON.stringify(sentences) !== list.dataset.shown) {
    list.dataset.shown = JSON.stringify(sentences);
    document.title = (sentences.length ? `(${sentences.length}) ` : "") + "Flechette " + location.host;
    list.replaceChildren(...sentences.map((sentence) => element("li", {}, sentence)));
  }
}

async function refresh() {
  let trouble = "The server does not answer";
  try {
    const answer = await fetch(SOURCE, { cache: "no-store", signal: AbortSignal.timeout(LIMIT_MS) });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const next = await answer.json();
    // Another program may have another page.
    if (now && now.program !== next.program) location.reload();
    [now, arrived, failure] = [next, performance.now(), ""];
    trouble = "This page cannot show the answer";
    set(byId("program"), `${now.program}, ${location.host}`);
    showModels();
    showCommon();
  } catch (error) {
    failure = `${trouble} (${error.message}).`;
  }
  showState();
}

async function run() {
  for (;;) {
    // A page that is not seen asks for nothing.
    if (!document.hidden) await refresh();
    await new Promise((done) => setTimeout(done, EVERY_MS));
  }
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) return;
  // Nothing was asked for meanwhile.
  arrived = performance.now();
  refresh();
});
setInterval(showState, 1000);
run();
