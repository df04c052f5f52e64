// Charts over time, as SVG: stacked areas or lines, with a legend that tells the values under the cursor. Drawn anew
// with every look; arrow keys move the cursor. Must not know what the series mean.

const NS = "http://www.w3.org/2000/svg";
const TICKS = [1, 2, 5, 10, 20, 50, 100, 200, 500];

function draw(name, attributes, into, text) {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  into.append(made);
  return made;
}

// The end of an axis: a round number in units of the base, 1000 or 1024.
function ceiling(value, base) {
  for (let unit = 1; ; unit *= base) {
    const found = TICKS.map((step) => step * unit).find((step) => step >= value);
    if (found) return found;
  }
}

export class Chart {
  // series: [{name, color}], points: [{at, values: {name: number}}], oldest first; seconds: width in time.
  constructor(element, { stacked, base, write, label, quiet }) {
    this.base = base;
    this.stacked = stacked;
    this.write = write;
    this.label = label;
    this.quiet = quiet;
    this.series = [];
    this.points = [];
    this.cursor = null;
    this.svg = draw("svg", { role: "img", tabindex: "0" }, element);
    this.legend = document.createElement("ul");
    this.legend.className = "legend";
    element.append(this.legend);
    this.svg.addEventListener("pointermove", (event) => this.#point(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.#move(null));
    this.svg.addEventListener("blur", () => this.#move(null));
    this.svg.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  show(series, points, seconds) {
    Object.assign(this, { series, points, seconds });
    this.draw();
  }

  draw() {
    const width = this.svg.clientWidth;
    const height = this.svg.clientHeight;
    if (!width || !this.seconds) return;
    const letter = parseFloat(getComputedStyle(this.svg).fontSize);
    Object.assign(this, { left: 4.6 * letter, bottom: 1.8 * letter, top: 0.7 * letter, letter });
    this.svg.replaceChildren();
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const sums = this.points.map(({ values }) => {
      const all = this.series.map(({ name }) => values[name] ?? 0);
      return this.stacked ? all.reduce((sum, one) => sum + one, 0) : Math.max(0, ...all);
    });
    const most = ceiling(Math.max(0, ...sums), this.base);
    const now = this.points.at(-1)?.at ?? 0;
    this.x = (at) => this.left + (width - this.left - 4) * (1 - (now - at) / this.seconds);
    const y = (value) => this.top + (height - this.top - this.bottom) * (1 - value / most);
    const quiet = !sums.some((sum) => sum > 0);
    this.#axes(width, height, most, y, quiet);
    if (this.stacked) this.#areas(y);
    else this.#lines(y);
    if (quiet) draw("text", { class: "quiet", x: width / 2 + this.left / 2, y: height / 2, "text-anchor": "middle" }, this.svg, this.quiet);
    this.#cursor(height);
    this.#tell();
  }

  #axes(width, height, most, y, quiet) {
    for (const part of quiet ? [0] : [0, 0.5, 1]) {
      const at = y(most * part);
      draw("line", { class: "grid", x1: this.left, x2: width, y1: at, y2: at }, this.svg);
      draw("text", { x: this.left - 0.6 * this.letter, y: at + 0.35 * this.letter, "text-anchor": "end" }, this.svg, this.write(most * part));
    }
    const past = this.seconds > 60 ? `${Math.round(this.seconds / 60)} min ago` : "a minute ago";
    for (const [part, text, anchor] of [[0, past, "start"], [1, "now", "end"]]) {
      draw("text", { x: this.left + (width - this.left - 4) * part, y: height - 0.3 * this.letter, "text-anchor": anchor }, this.svg, text);
    }
  }

  #areas(y) {
    const base = this.points.map(() => 0);
    for (const { name, color } of this.series) {
      const low = this.points.map(({ at }, i) => `${this.x(at).toFixed(1)},${y(base[i]).toFixed(1)}`);
      this.points.forEach(({ values }, i) => { base[i] += values[name] ?? 0; });
      const high = this.points.map(({ at }, i) => `${this.x(at).toFixed(1)},${y(base[i]).toFixed(1)}`);
      if (high.length) draw("path", { d: `M${high.join("L")}L${low.reverse().join("L")}Z`, fill: `var(--${color})`, "fill-opacity": 0.85 }, this.svg);
    }
  }

  #lines(y) {
    for (const { name, color } of this.series) {
      const line = this.points.map(({ at, values }) => `${this.x(at).toFixed(1)},${y(values[name] ?? 0).toFixed(1)}`);
      if (line.length) draw("path", { class: "lines", d: `M${line.join("L")}`, stroke: `var(--${color})` }, this.svg);
    }
  }

  #cursor(height) {
    if (this.cursor === null || !this.points[this.cursor]) return;
    const at = this.x(this.points[this.cursor].at);
    draw("line", { class: "cursor", x1: at, x2: at, y1: this.top, y2: height - this.bottom }, this.svg);
  }

  #tell() {
    const chosen = this.points[this.cursor ?? this.points.length - 1];
    const rows = this.series.map(({ name, color }) => {
      const row = document.createElement("li");
      const swatch = document.createElement("span");
      swatch.className = "swatch";
      swatch.style.background = `var(--${color})`;
      const value = document.createElement("b");
      value.textContent = this.write(chosen?.values[name] ?? 0);
      row.append(swatch, `${name} `, value);
      return row;
    });
    this.legend.replaceChildren(...rows);
    const now = this.points.at(-1);
    const when = this.cursor === null || !now ? "now" : `${Math.round(now.at - chosen.at)} seconds ago`;
    const told = this.series.map(({ name }) => `${name} ${this.write(chosen?.values[name] ?? 0)}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.label}, ${when}: ${told || this.quiet}. Arrow keys move through time.`);
  }

  #point(x) {
    if (!this.points.length || !this.x) return;
    let best = 0;
    this.points.forEach(({ at }, i) => {
      if (Math.abs(this.x(at) - x) < Math.abs(this.x(this.points[best].at) - x)) best = i;
    });
    this.#move(best);
  }

  #key(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -30, PageDown: 30, Home: -1e9, End: 1e9 };
    if (event.key === "Escape") this.#move(null);
    if (!(event.key in steps) || !this.points.length) return;
    event.preventDefault();
    const last = this.points.length - 1;
    this.#move(Math.min(last, Math.max(0, (this.cursor ?? last) + steps[event.key])));
  }

  #move(at) {
    if (this.cursor === at) return;
    this.cursor = at;
    this.draw();
  }
}
