// The table of prefixes: order, search, pages; pin, unpin and evict, each after asking. Must not know the rest.

import { ask } from "./net.js";
import { askFor } from "./asking.js";
import { ago, count, size } from "./words.js";

const LIMIT = 10;
const LASTING = [["", "for good"], ["3600", "an hour"], ["86400", "a day"], ["604800", "a week"], ["2592000", "30 days"]];
const rows = document.querySelector("#rows");
const tabs = [...document.querySelectorAll("[role=tab]")];
const view = { sort: "hottest", search: "", offset: 0, may: false };
let running = 0;

export function allow(may) {
  if (view.may === may) return;
  view.may = may;
  refresh();
}

export async function refresh() {
  const mine = ++running;
  const asked = new URLSearchParams({ sort: view.sort, search: view.search, offset: view.offset, limit: LIMIT });
  const told = await ask("GET", `/v1/prefixes?${asked}`);
  if (mine !== running || rows.contains(document.activeElement) && document.querySelector("#ask").open) return;
  if (view.offset && view.offset >= told.total) {
    view.offset = 0;
    await refresh();
    return;
  }
  show(told);
}

function show({ prefixes, total }) {
  const held = document.activeElement?.dataset?.act;
  rows.replaceChildren(...prefixes.map(row));
  if (!prefixes.length) {
    const line = document.createElement("tr");
    line.append(Object.assign(cell(view.search ? "Nothing fits this search." : "Nothing is stored yet."), { colSpan: 8, className: "none" }));
    rows.append(line);
  }
  if (held) rows.querySelector(`[data-act="${held}"]`)?.focus();
  const last = Math.min(view.offset + LIMIT, total);
  document.querySelector("#page-text").textContent = total ? `${count(view.offset + 1)}–${count(last)} of ${count(total)}` : "";
  document.querySelector("#back").disabled = view.offset === 0;
  document.querySelector("#next").disabled = last >= total;
}

function cell(content, kind = "", label = "") {
  const made = document.createElement("td");
  made.className = kind;
  if (label) made.dataset.label = label;
  made.append(...[content].flat());
  return made;
}

function row(one) {
  const line = document.createElement("tr");
  const key = Object.assign(document.createElement("code"), { textContent: one.key.slice(0, 12), title: one.key });
  const where = Object.entries(one.blocks).filter(([, blocks]) => blocks).map(([tier, blocks]) => {
    const part = document.createElement("span");
    const swatch = Object.assign(document.createElement("span"), { className: `swatch ${tier}` });
    part.append(swatch, `${tier} ${count(blocks)}`);
    return part;
  });
  const label = one.label || one.namespace.slice(0, 12);
  line.append(
    cell(label),
    cell(key),
    cell(count(one.tokens), "n", "tokens"),
    cell(size(one.bytes), "n"),
    cell(where, "where"),
    cell(ago(one.idle_s), "n", "used"),
    cell(one.names.map((name) => chip(name, one)), ""),
    cell([button("Pin", one, pin), button("Evict", one, evict, true)], "acts"),
  );
  return line;
}

function button(text, one, run, danger = false) {
  const made = Object.assign(document.createElement("button"), { type: "button", textContent: text, className: danger ? "danger" : "" });
  made.setAttribute("aria-label", `${text} ${one.key.slice(0, 12)} of ${one.label}`);
  made.dataset.act = `${text}-${one.key}`;
  made.disabled = !view.may || !one.whole;
  if (!one.whole) made.title = "Its beginning was evicted";
  else if (!view.may) made.title = "Needs the token";
  made.addEventListener("click", () => run(one));
  return made;
}

function chip({ name, pinned }, one) {
  const made = Object.assign(document.createElement("span"), { className: "chip" });
  made.append(pinned ? `${name}` : `${name} (expired)`);
  if (view.may) {
    const off = Object.assign(document.createElement("button"), { type: "button", textContent: "×" });
    off.setAttribute("aria-label", `Unpin ${name}`);
    off.dataset.act = `Unpin-${one.key}-${name}`;
    off.addEventListener("click", () => unpin(name));
    made.append(off);
  }
  return made;
}

function pin(one) {
  askFor({
    title: "Pin this prefix",
    text: `${count(one.tokens)} tokens of ${one.label || "a namespace without a label"} are kept from eviction, in every tier and process.`,
    button: "Pin",
    inputs: [
      { name: "name", label: "What to call it", value: "" },
      { name: "ttl", label: "Keep it", options: LASTING },
    ],
    run: async ({ name, ttl }) => {
      const asked = { key: one.key, namespace: one.namespace, pin_as: name };
      const told = await ask("POST", "/v1/pin", ttl ? { ...asked, ttl: Number(ttl) } : asked);
      await refresh();
      return `Pinned ${count(told.tokens)} tokens as “${told.name}”.`;
    },
  });
}

function unpin(name) {
  askFor({
    title: `Unpin “${name}”?`,
    text: "The name is forgotten. The blocks stay, and may be evicted like any others.",
    button: "Unpin",
    run: async () => {
      await ask("POST", "/v1/unpin", { name });
      await refresh();
      return `Forgot “${name}”.`;
    },
  });
}

async function evict(one) {
  const asked = { namespace: one.namespace, prefix: one.key };
  let would = null;
  try {
    would = await ask("POST", "/v1/evict", asked);
  } catch (error) {
    askFor({ title: "This cannot be evicted", text: `${error.message}. ${error.remedy ?? ""}`, button: "Well", run: async () => "" });
    return;
  }
  askFor({
    title: "Evict this prefix?",
    text: `${blocks(would.blocks)} would go, for all engines, with everything that continues it${would.names.length ? `, of what these names keep too: ${would.names.join(", ")}` : ""}. It has to be computed again when somebody asks.`,
    button: "Evict",
    danger: true,
    run: async () => {
      const done = await ask("POST", "/v1/evict", { ...asked, dry_run: false, confirm: would.confirm });
      await refresh();
      return `Evicted ${blocks(done.blocks)}.`;
    },
  });
}

function blocks(counts) {
  return Object.entries(counts).map(([tier, number]) => `${count(number)} blocks of ${tier}`).join(" and ");
}

function choose(tab) {
  Object.assign(view, { sort: tab.dataset.sort, offset: 0 });
  for (const one of tabs) {
    one.setAttribute("aria-selected", String(one === tab));
    one.tabIndex = one === tab ? 0 : -1;
  }
}

// failed: called with what a refresh ends in, when it fails.
export function begin(failed) {
  const again = () => refresh().catch(failed);
  tabs.forEach((tab, at) => {
    tab.addEventListener("click", () => { choose(tab); again(); });
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = tabs[(at + step + tabs.length) % tabs.length];
      choose(next);
      next.focus();
      again();
    });
  });
  choose(tabs[0]);
  let typing;
  document.querySelector("#search").addEventListener("input", (event) => {
    clearTimeout(typing);
    typing = setTimeout(() => {
      Object.assign(view, { search: event.target.value.trim(), offset: 0 });
      again();
    }, 200);
  });
  document.querySelector("#back").addEventListener("click", () => { view.offset = Math.max(0, view.offset - LIMIT); again(); });
  document.querySelector("#next").addEventListener("click", () => { view.offset += LIMIT; again(); });
}
