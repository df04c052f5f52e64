// The page put together: asks the server, keeps what came, and hands each part what it shows.

import { ask, looks, setToken, takeTokenFromAddress, token } from "./net.js";
import { askFor, say } from "./asking.js";
import * as prefixes from "./prefixes.js";
import * as figures from "./figures.js";

const KEPT = 300;
const SLOW_MS = 5_000;
const BUSY_S = 10;
const WAIT_MS = [500, 1_000, 2_000, 4_000, 8_000];
const page = document.body;
const state = { server: null, points: [], told: null, tries: 0 };

function linked(how, text) {
  page.dataset.link = how;
  document.querySelector("#link-text").textContent = text;
  document.querySelector("#lost").hidden = how !== "lost";
}

function isWork(point) {
  return point.asked_tokens > 0 || Object.keys(point.bytes_a_second).length > 0;
}

function show() {
  if (!state.told) return;
  figures.show(state.told, state.points);
  const blocks = state.told.stats.tiers.reduce((sum, tier) => sum + tier.blocks, 0);
  document.querySelector("#empty").hidden = blocks > 0 || page.dataset.link === "lost";
  const busy = state.points.some((point) => state.told.interval.at - point.at < BUSY_S && isWork(point));
  page.dataset.state = blocks ? (busy ? "busy" : "quiet") : "empty";
}

function failed(error) {
  if (error.status === 401) needToken(error);
  else if (error.status === undefined) return;
  else say([error.message, error.remedy].filter(Boolean).join(". "));
}

function needToken(error) {
  if (token()) setToken(null);
  if (document.querySelector("#ask").open) return;
  askFor({
    title: "This server asks for its token",
    text: "It is the content of the file given with --token-file, or KVSTORE_TOKEN. It stays in this tab.",
    button: "Go on",
    inputs: [{ name: "token", label: error?.message ?? "Token", kind: "password" }],
    run: async (given) => {
      setToken(given.token.trim());
      try {
        await serverOnce();
        if (!state.server.may_change && !state.server.read_only) throw new Error("This is not the token.");
      } catch (problem) {
        setToken(null);
        throw problem;
      }
      slowly();
      return "Pin and evict can be used now.";
    },
  });
}

async function serverOnce() {
  state.server = await ask("GET", "/v1/server");
  const { path, read_only: readOnly, may_change: may } = state.server;
  document.querySelector("#path").textContent = path;
  document.title = `kvstore ${path}`;
  const note = document.querySelector("#read-only");
  note.hidden = may;
  document.querySelector("#read-only-text").textContent = readOnly
    ? "Read-only: this server was started without a token. Start it with --token-file to pin and evict."
    : "Read-only until you unlock it with the server's token.";
  const lock = document.querySelector("#lock");
  lock.hidden = readOnly;
  lock.textContent = may ? "Lock" : "Unlock";
  page.dataset.may = String(may);
  prefixes.allow(may);
}

async function slowly() {
  try {
    const [, processes, savings] = await Promise.all([prefixes.refresh(), ask("GET", "/v1/processes"), ask("GET", "/v1/savings")]);
    figures.engines(processes.processes);
    figures.savings(savings);
  } catch (error) {
    failed(error);
  }
}

async function follow(signal) {
  await serverOnce();
  const before = await ask("GET", `/v1/history?most=${KEPT}`);
  state.points = before.looks;
  slowly();
  for await (const told of looks(signal)) {
    state.tries = 0;
    state.told = told;
    if (told.interval.at > (state.points.at(-1)?.at ?? 0)) state.points.push(told.interval);
    state.points.splice(0, state.points.length - KEPT);
    linked("live", "Live");
    show();
  }
}

let stop = null;
async function run() {
  for (;;) {
    if (document.hidden) {
      await new Promise((go) => document.addEventListener("visibilitychange", go, { once: true }));
      continue;
    }
    stop = new AbortController();
    try {
      await follow(stop.signal);
    } catch (error) {
      if (!document.hidden) {
        linked("lost", "No answer");
        show();
        failed(error);
      }
    }
    await new Promise((go) => setTimeout(go, WAIT_MS[Math.min(state.tries++, WAIT_MS.length - 1)]));
  }
}

document.addEventListener("visibilitychange", () => { if (document.hidden) stop?.abort(); });
document.querySelector("#lock").addEventListener("click", () => {
  if (!token()) { needToken(); return; }
  setToken(null);
  serverOnce().catch(failed);
});

const THEMES = { auto: "Theme: auto", light: "Theme: light", dark: "Theme: dark" };
function theme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  localStorage.setItem("kvstore-theme", name);
  document.querySelector("#theme").textContent = THEMES[name];
}
document.querySelector("#theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  theme(names[(names.indexOf(localStorage.getItem("kvstore-theme") ?? "auto") + 1) % names.length]);
});
theme(localStorage.getItem("kvstore-theme") in THEMES ? localStorage.getItem("kvstore-theme") : "auto");

takeTokenFromAddress();
prefixes.begin(failed);
figures.begin();
setInterval(() => { if (!document.hidden && page.dataset.link === "live") slowly(); }, SLOW_MS);
run();
