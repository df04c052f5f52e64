// Asks the server: calls, the stream of looks, and the token, which stays in this tab. Must not know the page.

const KEY = "kvstore-token";
const SILENCE_MS = 30_000;

export class Problem extends Error {
  constructor(status, detail, remedy) {
    super(detail);
    this.status = status;
    this.remedy = remedy;
  }
}

// A token may come behind the address, where no server sees it: http://127.0.0.1:8717/#token=…
export function takeTokenFromAddress() {
  const found = /^#token=(.+)$/.exec(location.hash);
  if (found) {
    setToken(decodeURIComponent(found[1]));
    history.replaceState(null, "", location.pathname);
  }
}

export function token() {
  return sessionStorage.getItem(KEY);
}

export function setToken(given) {
  if (given) sessionStorage.setItem(KEY, given);
  else sessionStorage.removeItem(KEY);
}

function headers(more) {
  const known = token();
  return known ? { ...more, Authorization: `Bearer ${known}` } : more;
}

async function problemOf(response) {
  const told = await response.json().catch(() => ({}));
  return new Problem(response.status, told.detail ?? response.statusText, told.remedy ?? "");
}

export async function ask(method, path, body) {
  const given = body === undefined ? {} : { "Content-Type": "application/json" };
  const sent = body === undefined ? undefined : JSON.stringify(body);
  const limit = AbortSignal.timeout(SILENCE_MS);
  const response = await fetch(path, { method, headers: headers(given), body: sent, signal: limit });
  if (!response.ok) throw await problemOf(response);
  return response.json();
}

// Looks, as they come, until the stream ends or is silent for too long.
export async function* looks(signal) {
  const response = await fetch("/v1/events", { headers: headers({}), signal });
  if (!response.ok) throw await problemOf(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      let bell;
      const silence = new Promise((_, refuse) => {
        bell = setTimeout(() => refuse(new Error("the stream is silent")), SILENCE_MS);
      });
      const { value, done } = await Promise.race([reader.read(), silence]).finally(() => clearTimeout(bell));
      if (done) return;
      text += value;
      const parts = text.split("\n\n");
      text = parts.pop();
      for (const part of parts) {
        const data = /^data: (.*)$/m.exec(part);
        if (data && part.includes("event: look")) yield JSON.parse(data[1]);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
