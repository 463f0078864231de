/* Charts from the data in the page, drawn to the available width, read by pointer or keyboard. */
"use strict";

function element(name, attributes = {}, ...children) {
  const made = name.startsWith("svg:")
    ? document.createElementNS("http://www.w3.org/2000/svg", name.slice(4))
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

/* --- numbers --- */

/* About `count` multiples of 1, 2 or 5 times a power of ten in [low, high]. */
function ticks(low, high, count) {
  const wanted = (high - low) / count, power = 10 ** Math.floor(Math.log10(wanted));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= wanted * 0.7);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n <= high / step + 1e-9; n++) {
    found.push(Number((n * step).toPrecision(12)));
  }
  return found;
}

/* 1, 2 and 5 times powers of ten in [low, high]; powers alone for over three decades. */
function logTicks(low, high) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const powers = Array.from({ length: last - first + 1 }, (_, n) => 10 ** (first + n));
  const factors = last - first <= 3 ? [1, 2, 5] : [1];
  return powers.flatMap((power) => factors.map((factor) => Number((factor * power).toPrecision(6))))
    .filter((value) => value >= low * 0.999 && value <= high * 1.001);
}

/* The range with a margin on both sides, also around a single value. */
function padded(low, high) {
  const room = (high - low) * 0.04 || Math.abs(high) * 0.1 || 1;
  return [low - room, high + room];
}

const decimal = (value, digits) => value.toLocaleString("en-US", { maximumSignificantDigits: digits });
const whole = (value) => Math.round(value).toLocaleString("en-US");

/* 1.5M, 20k, 1,500, 0.25, 2e-4. */
function short(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return decimal(value / 1e6, 4) + "M";
  if (size >= 1e4) return decimal(value / 1e3, 4) + "k";
  if (size > 0 && size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
  return decimal(value, 4);
}

/* A value in one of Python's formats: ".4f", ",.0f", ".2%" or ".3g". */
function formatted(form, value) {
  const [, digits, type] = form.match(/(\d)(.)$/);
  if (type === "g") return short(Number(value.toPrecision(digits)));
  const style = type === "%" ? "percent" : "decimal";
  return value.toLocaleString("en-US", { style, minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/* --- places in sorted columns --- */

/* The last place whose value is at most `value`, such that another follows. */
function before(sorted, value) {
  let low = 0, high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle;
    else high = middle;
  }
  return low;
}

function nearest(sorted, value) {
  const low = before(sorted, value), high = Math.min(low + 1, sorted.length - 1);
  return Math.abs(sorted[low] - value) <= Math.abs(sorted[high] - value) ? low : high;
}

function interpolated(from, to, value) {
  const last = from.length - 1;
  if (last < 0) return value;
  if (value <= from[0]) return from[0] > 0 ? (to[0] * value) / from[0] : to[0];
  if (value >= from[last]) return to[last];
  const n = before(from, value);
  return to[n] + ((to[n + 1] - to[n]) * (value - from[n])) / (from[n + 1] - from[n]);
}

/* The mean over a window around each point, `share` of the range of steps wide. Near the ends the
   window shrinks on both sides alike, so that the mean is not shifted. */
function smoothed(steps, values, share) {
  if (!share || steps.length < 3) return values;
  const start = steps[0], end = steps[steps.length - 1];
  let first = 0, stop = 0, sum = 0;
  return steps.map((step) => {
    const half = Math.min((share * (end - start)) / 2, step - start, end - step) + 1e-9;
    while (stop < steps.length && steps[stop] <= step + half) sum += values[stop++];
    while (steps[first] < step - half) sum -= values[first++];
    return sum / (stop - first);
  });
}

/* --- steps, epochs, time --- */

function timeUnit(longest) {
  if (longest >= 7200) return ["hours", 3600];
  return longest >= 120 ? ["minutes", 60] : ["seconds", 1];
}

/* A step on an x axis: "steps", "epochs" or "seconds". */
const placed = (axes, x, step) => (x === "steps" ? step : interpolated(axes.steps, axes[x], step));

/* The share of a run that the slider's position stands for; finer near 0. */
const smoothingShare = ({ smoothing }) => 0.2 * (smoothing / 100) ** 2;

const PAD = { left: 52, right: 14, top: 10, bottom: 36 };

class Plot {
  /* `onRead` receives the place on the x axis that is pointed at, null for none. */
  constructor(figure, chart, data, settings, onRead) {
    Object.assign(this, { chart, data, settings, onRead });
    this.hidden = new Set(); // numbers of curves that are switched off
    this.keys = chart.series.map((series, number) => this.key(series, number));
    this.box = element("div", {
      class: "plot", tabindex: 0, role: "application", "aria-label": `${chart.title}: arrow keys read values`,
    });
    this.readout = element("p", { class: "readout", "aria-live": "polite" });
    figure.querySelector("figcaption").append(element("ul", { class: "legend" }, ...this.keys));
    figure.querySelector("details").before(this.box, this.readout);
    this.box.addEventListener("pointermove", (event) => this.onPointer(event));
    this.box.addEventListener("pointerleave", () => onRead(null));
    this.box.addEventListener("blur", () => onRead(null));
    this.box.addEventListener("keydown", (event) => this.onKey(event));
  }

  /* An entry of the legend: a button that shows or hides its curve. */
  key({ name, colour, is_dashed }, number) {
    const button = element("button", { type: "button", "aria-pressed": !this.hidden.has(number) },
      element("span", { class: "swatch" }), `${name} `, element("span", { class: "value" }));
    button.addEventListener("click", () => {
      if (!this.hidden.delete(number)) this.hidden.add(number);
      button.setAttribute("aria-pressed", !this.hidden.has(number));
      this.draw();
    });
    return element("li", { class: `key c${colour}${is_dashed ? " dashed" : ""}` }, button);
  }

  /* The curves that are shown: raw values, the line, and the band, by places on the x axis. */
  curves() {
    const { x } = this.settings, share = smoothingShare(this.settings);
    return this.chart.series.map((series, number) => {
      const means = series.means || series, isSmooth = series.is_noisy && (share > 0 || series.means);
      const xs = (steps) => steps.map((step) => placed(this.data.axes[series.group], x, step));
      const smooth = (values) => (series.is_noisy ? smoothed(means.steps, values, share) : values);
      const raw = { xs: xs(series.steps), ys: series.values, steps: series.steps };
      const line = isSmooth ? { xs: xs(means.steps), ys: smooth(means.values), steps: means.steps } : raw;
      const { low, high } = series.band || {};
      const band = series.band && { xs: xs(means.steps), low: smooth(low), high: smooth(high) };
      return { series, number, raw, line, band };
    }).filter(({ number }) => !this.hidden.has(number));
  }

  limits() {
    const { from_zero, has_log, form } = this.chart, isLog = this.settings.log && has_log;
    const ends = this.shown.flatMap(({ raw: { xs } }) => [xs[0], xs[xs.length - 1]]);
    let left = Math.min(...ends), right = Math.max(...ends);
    if (left < 0.2 * right) left = 0;
    if (!(right > left)) [left, right] = padded(left, right);
    let values = this.shown.flatMap(({ raw, band }) => (band ? [...raw.ys, ...band.low, ...band.high] : raw.ys));
    if (isLog) values = values.filter((value) => value > 0).map(Math.log10);
    if (!values.length) values = [0];
    let [low, high] = padded(Math.min(...values), Math.max(...values));
    if (from_zero) [low, high] = [0, high > 0 ? high : 1];
    if (form.endsWith("%")) [low, high] = [Math.max(low, 0), Math.min(high, 1)];
    if (!(high > low)) [low, high] = padded(low, high);
    return { left, right, low, high, isLog };
  }

  draw() {
    const { is_large } = this.chart;
    const width = Math.max(this.box.clientWidth, 240), height = is_large ? 300 : 200;
    this.picture = element("svg:svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": true });
    this.box.replaceChildren(this.picture);
    this.shown = this.curves();
    this.cross = null;
    if (this.shown.length) {
      this.scale(width, height);
      this.drawGrid();
      if (is_large) this.drawMarks();
      for (const curve of this.shown) this.drawCurve(curve);
      this.picture.append((this.cross = element("svg:g", { class: "cross" })));
    }
    this.read(null);
  }

  /* Set the functions from values to pixels. */
  scale(width, height) {
    const { left, right, low, high, isLog } = (this.domain = this.limits());
    this.right = width - PAD.right;
    this.bottom = height - PAD.bottom;
    const across = this.right - PAD.left, tall = this.bottom - PAD.top;
    const rounded = (pixel) => Math.round(pixel * 10) / 10;
    this.x = (value) => rounded(PAD.left + ((value - left) / (right - left)) * across);
    this.y = (value) => {
      const place = isLog ? Math.log10(Math.max(value, 1e-30)) : value;
      return rounded(PAD.top + ((high - Math.min(Math.max(place, low), high)) / (high - low)) * tall);
    };
    this.value = (pixel) => left + ((pixel - PAD.left) / across) * (right - left);
  }

  add(name, attributes, ...children) {
    this.picture.append(element(name, attributes, ...children));
  }

  drawGrid() {
    const { low, high, left, right: most, isLog } = this.domain, { right, bottom } = this;
    const { is_large, form } = this.chart;
    for (const value of isLog ? logTicks(10 ** low, 10 ** high) : ticks(low, high, is_large ? 6 : 4)) {
      const y = this.y(value), text = form.endsWith("%") ? decimal(100 * value, 6) + "%" : short(value);
      this.add("svg:line", { x1: PAD.left, x2: right, y1: y, y2: y, class: "grid" });
      this.add("svg:text", { x: PAD.left - 8, y: y + 4, class: "tick", "text-anchor": "end" }, text);
    }
    const { x } = this.settings, [unit, size] = x === "seconds" ? timeUnit(most) : [x, 1];
    for (const value of ticks(left / size, most / size, Math.max(2, Math.floor(right / 75)))) {
      const at = this.x(value * size);
      this.add("svg:line", { x1: at, x2: at, y1: bottom, y2: bottom + 4, class: "axis" });
      this.add("svg:text", { x: at, y: bottom + 17, class: "tick", "text-anchor": "middle" }, short(value));
    }
    this.add("svg:line", { x1: PAD.left, x2: right, y1: bottom, y2: bottom, class: "axis" });
    this.add("svg:text", { x: right, y: bottom + 32, class: "unit", "text-anchor": "end" }, unit);
  }

  drawMarks() {
    for (const { step, text } of this.data.marks) {
      const x = this.x(placed(this.data.axes[0], this.settings.x, step));
      this.add("svg:g", { class: "mark" },
        element("svg:title", {}, `${text}, step ${whole(step)}`),
        element("svg:line", { x1: x, x2: x, y1: PAD.top, y2: this.bottom }),
        element("svg:path", { d: `M${x - 4} ${PAD.top}h8l-4 6z` }));
    }
  }

  drawCurve({ series, raw, line, band }) {
    const along = (xs, ys) => xs.map((x, n) => `${this.x(x)} ${this.y(ys[n])}`);
    const path = (points, kind) => element("svg:path", { d: `M${points.join("L")}`, class: kind });
    const parts = [path(along(line.xs, line.ys), series.is_dashed ? "line dashed" : "line")];
    if (line !== raw) parts.unshift(path(along(raw.xs, raw.ys), "line faint"));
    if (band) {
      const around = [...along(band.xs, band.high), ...along(band.xs, band.low).reverse()];
      parts.unshift(path(around, "band"));
    }
    if (series.has_dots || raw.xs.length === 1) {
      parts.push(...raw.xs.map((x, n) =>
        element("svg:circle", { cx: this.x(x), cy: this.y(raw.ys[n]), r: 2.5, class: "dot" })));
    }
    this.add("svg:g", { class: `c${series.colour}` }, ...parts);
  }

  /* --- reading values --- */

  onPointer(event) {
    if (this.cross) this.onRead(this.value(event.clientX - this.box.getBoundingClientRect().left));
  }

  onKey(event) {
    if (!this.cross) return;
    const { xs } = this.shown[0].line, last = xs.length - 1, page = Math.ceil(xs.length / 10);
    const now = this.at === null ? xs.length : nearest(xs, this.at);
    const moves = {
      ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last, PageUp: now - page, PageDown: now + page,
    };
    if (event.key === "Escape") this.onRead(null);
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.onRead(xs[Math.min(Math.max(moves[event.key], 0), last)]);
  }

  /* Show the values at a place on the x axis; the last values for null. */
  read(at) {
    this.at = at;
    this.keys.forEach((key, n) => this.tell(key, this.chart.series[n].values.at(-1)));
    this.readout.textContent = "";
    this.cross?.replaceChildren();
    if (at === null || !this.cross) return;
    const place = Math.min(Math.max(at, this.domain.left), this.domain.right), x = this.x(place);
    this.cross.append(element("svg:line", { x1: x, x2: x, y1: PAD.top, y2: this.bottom }));
    const texts = this.shown.map(({ series, number, line: { xs, ys } }) => {
      const n = nearest(xs, place);
      this.cross.append(element("svg:circle", {
        cx: this.x(xs[n]), cy: this.y(ys[n]), r: 4, class: `dot c${series.colour}`,
      }));
      return `${series.name} ${this.tell(this.keys[number], ys[n])}`;
    });
    const { series, line } = this.shown[0], axes = this.data.axes[series.group];
    const step = line.steps[nearest(line.xs, place)], [unit, size] = timeUnit(axes.seconds.at(-1));
    const epoch = placed(axes, "epochs", step), time = placed(axes, "seconds", step) / size;
    this.readout.append(
      `step ${whole(step)} · epoch ${epoch.toFixed(1)} · ${time.toFixed(1)} ${unit}`,
      element("span", { class: "hidden" }, `: ${texts.join(", ")}`));
  }

  /* Show a value in the legend; gives its text. */
  tell(key, value) {
    return (key.querySelector(".value").textContent = formatted(this.chart.form, value));
  }
}
