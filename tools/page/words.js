// How numbers, sizes and times are written. Must not know where they come from.

const whole = new Intl.NumberFormat("en-US");
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function count(number) {
  return whole.format(Math.round(number));
}

export function short(number) {
  if (number < 10_000) return count(number);
  for (const [size, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (number >= size) return `${trimmed(number / size)} ${unit}`;
  }
  return count(number);
}

export function size(bytes) {
  let at = 0;
  while (bytes >= 1024 && at < UNITS.length - 1) {
    bytes /= 1024;
    at += 1;
  }
  return `${trimmed(bytes)} ${UNITS[at]}`;
}

export function share(part, of) {
  if (!of) return "–";
  const percent = (100 * part) / of;
  return `${percent >= 10 || percent === 0 ? Math.round(percent) : percent.toFixed(1)} %`;
}

export function ago(seconds) {
  if (seconds < 1.5) return "just now";
  return `${duration(Math.round(seconds))} ago`;
}

export function duration(seconds) {
  for (const [size_, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (seconds >= 2 * size_) return `${Math.round(seconds / size_)} ${unit}`;
  }
  return seconds < 10 ? `${trimmed(seconds)} s` : `${Math.round(seconds)} s`;
}

function trimmed(number) {
  const text = number >= 100 ? number.toFixed(0) : number >= 10 ? number.toFixed(1) : number.toFixed(2);
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}
