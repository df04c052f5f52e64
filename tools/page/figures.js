// What is shown of looks: sentences, figures, tiers, charts, processes, savings. Must not know how they come.

import { Chart } from "./chart.js";
import { count, duration, share, short, size } from "./words.js";

const WIDTHS_S = [60, 120, 300];
const BINS = 100;
const CAUSES = { absent: "absent", limit: "limit", checksum: "damaged", header: "damaged" };
const ORDER = (name) => ["from hbm", "from ram", "from nvme"].indexOf(name) + 3 * Number(name.startsWith("missed"));
const FLOWS = { "load from": "load", "save to": "save", "move ram": "move", "move nvme": "promote" };
let tokens = null;
let bandwidth = null;
const at = (id) => document.querySelector(`#${id}`);

export function begin() {
  tokens = new Chart(at("tokens-chart"), { stacked: true, base: 1000, write: short, label: "Tokens a second", quiet: "Nobody asks at present" });
  bandwidth = new Chart(at("bandwidth-chart"), { stacked: false, base: 1024, write: size, label: "Bytes a second", quiet: "Nothing moves at present" });
}

export function show({ stats, interval, pressure, unwritten_blocks: unwritten }, points) {
  sentences(pressure);
  inShort(stats, points, unwritten);
  at("tier-list").replaceChildren(...stats.tiers.map((one) => tier(one, pressure)));
  const now = interval.at;
  const span = now - (points[0]?.at ?? now);
  const seconds = WIDTHS_S.find((width) => span <= width) ?? WIDTHS_S.at(-1);
  const recent = binned(points.filter((point) => now - point.at <= seconds), seconds / BINS);
  chartTokens(recent, seconds);
  chartBandwidth(recent, seconds);
}

// Looks in a row, made into one where they are closer together than what can be told apart.
function binned(points, seconds) {
  const bins = [];
  for (const point of points) {
    const bin = Math.floor(point.at / seconds);
    if (bins.at(-1)?.bin !== bin) bins.push({ bin, points: [] });
    bins.at(-1).points.push(point);
  }
  return bins.flatMap(({ points: some }) => {
    const whole = { at: some.at(-1).at, seconds: 0, hit_tokens: {}, miss_tokens: {}, bytes_a_second: {} };
    for (const one of some) whole.seconds += one.seconds;
    for (const one of some) {
      for (const part of ["hit_tokens", "miss_tokens"]) {
        for (const [name, number] of Object.entries(one[part])) whole[part][name] = (whole[part][name] ?? 0) + number;
      }
      for (const [name, rate] of Object.entries(one.bytes_a_second)) {
        whole.bytes_a_second[name] = (whole.bytes_a_second[name] ?? 0) + (rate * one.seconds) / whole.seconds;
      }
    }
    // What a look tells of a long time is drawn as long: level, not as a slope.
    return whole.seconds > 3 * seconds ? [{ ...whole, at: whole.at - whole.seconds + seconds }, whole] : [whole];
  });
}

function sentences(pressure) {
  const lines = pressure.map((text) => {
    const kind = text === "No pressure." ? "calm" : /faults|not written|damaged/.test(text) ? "bad" : "warn";
    return Object.assign(document.createElement("li"), { textContent: text, className: kind });
  });
  const told = lines.map((line) => line.textContent).join("\n");
  if (at("sentences").dataset.told !== told) {
    at("sentences").dataset.told = told; // said again only when it changes
    at("sentences").replaceChildren(...lines);
  }
}

function total(table) {
  return Object.values(table).reduce((sum, one) => sum + one, 0);
}

function inShort(stats, points, unwritten) {
  const asked = points.reduce((sum, point) => sum + point.asked_tokens, 0);
  const hit = points.reduce((sum, point) => sum + total(point.hit_tokens), 0);
  const ever = total(stats.hit_tokens);
  at("rate").textContent = asked ? share(hit, asked) : share(ever, stats.asked_tokens);
  at("rate-small").textContent = asked
    ? `of ${short(asked)} tokens in the last minutes; ${share(ever, stats.asked_tokens)} in all`
    : `of ${short(stats.asked_tokens)} tokens asked for in all`;
  at("served").textContent = short(ever);
  at("served-small").textContent = Object.entries(stats.hit_tokens).map(([tier, number]) => `${short(number)} from ${tier}`).join(", ");
  at("waiting").textContent = stats.tiers.length > 1 ? count(unwritten) : "–";
  at("waiting-small").textContent = stats.tiers.length > 1 ? "blocks, of all processes" : "the store has no nvme tier";
  const faults = Object.entries(stats.counters).filter(([name]) => name.startsWith("fault."));
  const number = faults.reduce((sum, [, one]) => sum + one, 0);
  at("faults").textContent = count(number);
  at("faults").classList.toggle("bad-text", number > 0);
  at("faults-small").textContent = faults.map(([name, one]) => `${count(one)} × ${name.slice(6).replace(".", ": ")}`).join(", ") || "none since the store was made";
}

function tier(one, pressure) {
  const made = document.createElement("div");
  const full = pressure.some((sentence) => sentence.startsWith(`${one.name} is full`));
  made.className = full ? "tier full" : "tier";
  made.dataset.tier = one.name;
  const told = document.createElement("dl");
  told.append(
    Object.assign(document.createElement("dt"), { textContent: one.name }),
    Object.assign(document.createElement("dd"), { textContent: `${count(one.blocks)} blocks${full ? ", full" : ""}` }),
  );
  const meter = document.createElement("div");
  meter.className = "meter";
  const text = `${size(one.used_bytes)} in blocks, ${size(one.allocated_bytes)} allocated of ${size(one.budget_bytes)}`;
  for (const [name, value] of [["role", "meter"], ["aria-label", one.name], ["aria-valuemin", 0], ["aria-valuemax", one.budget_bytes], ["aria-valuenow", one.used_bytes], ["aria-valuetext", text]]) meter.setAttribute(name, value);
  for (const [kind, bytes] of [["allocated", one.allocated_bytes], ["used", one.used_bytes]]) {
    const fill = Object.assign(document.createElement("i"), { className: kind });
    fill.style.width = `${Math.min(100, (100 * bytes) / one.budget_bytes)}%`;
    meter.append(fill);
  }
  const below = document.createElement("dl");
  below.append(
    Object.assign(document.createElement("dd"), { textContent: `${size(one.used_bytes)} in blocks` }),
    Object.assign(document.createElement("dd"), { textContent: `${size(one.allocated_bytes)} of ${size(one.budget_bytes)}` }),
  );
  made.append(told, meter, below);
  return made;
}

function chartTokens(points, seconds) {
  const names = new Map();
  for (const { hit_tokens: hits } of points) for (const name of Object.keys(hits)) names.set(`from ${name}`, name);
  for (const { miss_tokens: misses } of points) for (const name of Object.keys(misses)) names.set(`missed: ${name}`, CAUSES[name] ?? "other");
  const series = [...names].map(([name, color]) => ({ name, color })).sort((a, b) => ORDER(a.name) - ORDER(b.name));
  const shown = points.map((point) => {
    const values = {};
    for (const [name, number] of Object.entries(point.hit_tokens)) values[`from ${name}`] = number / point.seconds;
    for (const [name, number] of Object.entries(point.miss_tokens)) values[`missed: ${name}`] = number / point.seconds;
    return { at: point.at, values };
  });
  tokens.show(series, shown, seconds);
}

function chartBandwidth(points, seconds) {
  const names = new Set(points.flatMap((point) => Object.keys(point.bytes_a_second)));
  const series = [...names].sort().map((name) => {
    const flow = FLOWS[name.split(" ").slice(0, 2).join(" ")] ?? "other";
    return { name, color: name.startsWith("load from") ? (name.endsWith("ram") ? "load" : "load-low") : flow };
  });
  bandwidth.show(series, points.map(({ at: when, bytes_a_second: values }) => ({ at: when, values })), seconds);
}

export function engines(processes) {
  const lines = processes.map((one) => {
    const line = document.createElement("li");
    const name = document.createElement("span");
    name.append(one.name ?? "a process elsewhere", " ", Object.assign(document.createElement("small"), { textContent: `pid ${one.pid}${one.self ? ", this server" : ""}` }));
    const uses = ["ram", one.nvme && "nvme", one.hbm && "hbm"].filter(Boolean).join(", ");
    const since = one.since ? `, for ${duration(Math.max(0, Math.round(Date.now() / 1000 - one.since)))}` : "";
    line.append(name, Object.assign(document.createElement("small"), { textContent: `${uses}${since}` }));
    return line;
  });
  at("engine-list").replaceChildren(...lines);
}

export function savings({ total: all, cost }) {
  const list = document.createElement("dl");
  const line = (name, text) => list.append(Object.assign(document.createElement("dt"), { textContent: name }), Object.assign(document.createElement("dd"), { textContent: text }));
  line("Tokens reused", count(all.reused_tokens));
  line("Of the tokens asked for", share(all.reused_tokens, all.asked_tokens));
  if (all.prefill_s_not_repeated !== null) line("Prefill not repeated", duration(all.prefill_s_not_repeated));
  line("Loads took", duration(all.load_s));
  line("Restored, then computed anyway", count(all.recomputed_tokens));
  line("Written to nvme", size(cost.nvme_written_bytes));
  const note = Object.assign(document.createElement("p"), {
    textContent: all.prefill_s_not_repeated === null ? "Seconds of prefill are known once a prompt was measured of which nothing was found. kvstore savings tells more." : "kvstore savings tells it by namespace and day, and in money.",
  });
  at("savings-list").replaceChildren(list, note);
}
