/* Charts out of the data that the page holds: drawn to the width that there is, read by pointer or
   keyboard. The same pictures as draw.py makes, against steps, epochs or time. */
"use strict";

const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes = {}, ...children) {
  const made = name.startsWith("svg:")
    ? document.createElementNS(SVG, name.slice(4))
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

/* --- round numbers --- */

function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const power = 10 ** Math.floor(Math.log10((high - low) / count));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= ((high - low) / count) * 0.7);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n <= Math.floor(high / step + 1e-9); n++) {
    found.push(Number((n * step).toPrecision(12)));
  }
  return found;
}

function logTicks(low, high) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const factors = last - first <= 3 ? [1, 2, 5] : [1];
  const found = [];
  for (let power = first; power <= last; power++) {
    for (const factor of factors) found.push(Number((factor * 10 ** power).toPrecision(6)));
  }
  return found.filter((value) => value >= low * 0.999 && value <= high * 1.001);
}

function padded(low, high) {
  const room = (high - low) * 0.04 || Math.abs(high) * 0.1 || 1;
  return [low - room, high + room];
}

const trimmed = (value, digits) => String(Number(value.toPrecision(digits)));
const thousands = (value) => Math.round(value).toLocaleString("en-US");

function short(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return trimmed(value / 1e6, 4) + "M";
  if (size >= 1e4) return trimmed(value / 1e3, 4) + "k";
  if (size >= 1e3) return thousands(value);
  if (size > 0 && size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
  return trimmed(value, 4);
}

const gigabytes = (value) => short(Number((value / 1e9).toPrecision(3))) + " GB";

function tickText(kind, value) {
  if (kind === "percent") return trimmed(100 * value, 6) + "%";
  return kind === "bytes" ? gigabytes(value) : short(value);
}

function valueText(kind, value) {
  if (kind === "loss" && Math.abs(value) >= 1e-3) return value.toFixed(4);
  if (kind === "percent") return (100 * value).toFixed(2) + "%";
  if (kind === "count") return thousands(value);
  if (kind === "bytes") return gigabytes(value);
  return short(Number(value.toPrecision(kind === "number" ? 4 : 3)));
}

/* --- steps, epochs, time --- */

const X_AXES = { steps: "steps", epochs: "epochs", seconds: "time" };

function timeUnit(longest) {
  if (longest >= 7200) return ["hours", 3600];
  return longest >= 120 ? ["minutes", 60] : ["seconds", 1];
}

function interpolated(from, to, value) {
  let low = 0, high = from.length - 1;
  if (high < 0) return value;
  if (value <= from[0]) return from[0] > 0 ? (to[0] * value) / from[0] : to[0];
  if (value >= from[high]) return to[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (from[middle] <= value) low = middle;
    else high = middle;
  }
  return to[low] + ((to[high] - to[low]) * (value - from[low])) / (from[high] - from[low]);
}

/* The mean over a window around each point, narrower near the ends; as curves.smoothed. */
function smoothed(steps, values, share) {
  if (!share || steps.length < 3) return values;
  const start = steps[0], end = steps[steps.length - 1], found = [];
  let first = 0, stop = 0, sum = 0;
  for (const step of steps) {
    const half = Math.min((share * (end - start)) / 2, step - start, end - step) + 1e-9;
    while (stop < steps.length && steps[stop] <= step + half) sum += values[stop++];
    while (steps[first] < step - half) sum -= values[first++];
    found.push(sum / (stop - first));
  }
  return found;
}

function nearest(sorted, value) {
  let low = 0, high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle;
    else high = middle;
  }
  return Math.abs(sorted[low] - value) <= Math.abs(sorted[high] - value) ? low : high;
}

class Plot {
  constructor(figure, chart, data, settings, onRead) {
    Object.assign(this, { figure, chart, data, settings, onRead });
    this.box = figure.querySelector(".plot");
    this.readout = figure.querySelector(".readout");
    this.keys = [...figure.querySelectorAll(".key")];
    this.rest = this.keys.map((key) => key.querySelector(".value").textContent);
    this.hidden = new Set(settings.hidden[chart.name] || []);
    this.keys.forEach((key, number) => this.makeSwitch(key, number));
    this.box.setAttribute("tabindex", "0");
    this.box.setAttribute("role", "application");
    this.box.setAttribute("aria-label", `${chart.title}: arrow keys read values`);
    this.box.addEventListener("pointermove", (event) => this.onPointer(event));
    this.box.addEventListener("pointerleave", () => onRead(null));
    this.box.addEventListener("blur", () => onRead(null));
    this.box.addEventListener("keydown", (event) => this.onKey(event));
  }

  makeSwitch(key, number) {
    const button = element("button", { type: "button" });
    button.append(...key.childNodes);
    key.append(button);
    const show = () => {
      button.setAttribute("aria-pressed", String(!this.hidden.has(number)));
      this.settings.hidden[this.chart.name] = [...this.hidden];
    };
    button.addEventListener("click", () => {
      if (!this.hidden.delete(number)) this.hidden.add(number);
      show();
      this.draw();
      this.settings.save();
    });
    show();
  }

  /* What is drawn of each curve that is not switched off, by places on the x axis. */
  curves() {
    const { x, smoothing } = this.settings;
    const to = (series) => {
      const axes = this.data.axes[series.group];
      return (step) => (x === "steps" ? step : interpolated(axes.steps, axes[x], step));
    };
    return this.chart.series.flatMap((series, number) => {
      if (this.hidden.has(number)) return [];
      const steps = series.ms || series.s, means = series.mv || series.v, at = to(series);
      const soft = (values) => (series.noisy ? smoothed(steps, values, smoothing) : values);
      const isRaw = !series.noisy || (!smoothing && !series.ms);
      return [{
        series, number,
        raw: { xs: series.s.map(at), ys: series.v },
        line: isRaw
          ? { xs: series.s.map(at), ys: series.v, steps: series.s }
          : { xs: steps.map(at), ys: soft(means), steps },
        band: series.low && { xs: steps.map(at), low: soft(series.low), high: soft(series.high) },
      }];
    });
  }

  limits(curves) {
    const values = curves.flatMap(({ raw, band }) =>
      band ? [...raw.ys, ...band.low, ...band.high] : raw.ys);
    const xs = curves.flatMap(({ raw }) => [raw.xs[0], raw.xs[raw.xs.length - 1]]);
    let left = Math.min(...xs), right = Math.max(...xs);
    if (left < 0.2 * right) left = 0;
    if (!(right > left)) [left, right] = padded(left, right);
    const isLog = this.settings.log && this.chart.log;
    const used = isLog ? values.filter((value) => value > 0).map(Math.log10) : values;
    let low = Infinity, high = -Infinity;
    for (const value of used) {
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
    [low, high] = padded(low, high);
    if (this.chart.zero) [low, high] = [0, high > 0 ? high : 1];
    if (this.chart.kind === "percent") [low, high] = [Math.max(low, 0), Math.min(high, 1)];
    if (!(high > low)) [low, high] = padded(low, high);
    return { left, right, low, high, isLog };
  }

  draw() {
    const width = Math.max(this.box.clientWidth, 240), height = this.chart.large ? 300 : 200;
    const pad = { left: 52, right: 14, top: 10, bottom: 36 };
    const curves = (this.shown = this.curves());
    this.picture = element("svg:svg", {
      viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true",
    });
    this.box.replaceChildren(this.picture);
    if (!curves.length) return;
    const of = (this.domain = this.limits(curves));
    const inner = width - pad.left - pad.right, tall = height - pad.top - pad.bottom;
    const rounded = (value) => Math.round(value * 10) / 10;
    this.x = (value) => rounded(pad.left + ((value - of.left) / (of.right - of.left)) * inner);
    this.y = (value) => {
      const place = of.isLog ? Math.log10(Math.max(value, 1e-30)) : value;
      return rounded(pad.top + ((of.high - Math.min(Math.max(place, of.low), of.high)) / (of.high - of.low)) * tall);
    };
    this.back = (pixel) => of.left + ((pixel - pad.left) / inner) * (of.right - of.left);
    this.drawGrid({ width, height, pad });
    for (const curve of curves) this.drawCurve(curve);
    this.cross = element("svg:g", { class: "cross" });
    this.picture.append(this.cross);
  }

  drawGrid({ width, height, pad }) {
    const { low, high, left, right, isLog } = this.domain, bottom = height - pad.bottom;
    const line = (attributes) => this.picture.append(element("svg:line", attributes));
    const text = (attributes, words) => this.picture.append(element("svg:text", attributes, words));
    const values = isLog ? logTicks(10 ** low, 10 ** high) : ticks(low, high, this.chart.large ? 6 : 4);
    for (const value of values) {
      const y = this.y(value);
      line({ x1: pad.left, x2: width - pad.right, y1: y, y2: y, class: "grid" });
      text({ x: pad.left - 8, y: y + 4, class: "tick", "text-anchor": "end" }, tickText(this.chart.kind, value));
    }
    const [unit, size] = this.settings.x === "seconds" ? timeUnit(right) : [X_AXES[this.settings.x], 1];
    for (const value of ticks(left / size, right / size, Math.max(2, Math.floor(width / 75)))) {
      const x = this.x(value * size);
      line({ x1: x, x2: x, y1: bottom, y2: bottom + 4, class: "axis" });
      text({ x, y: bottom + 17, class: "tick", "text-anchor": "middle" }, short(value));
    }
    line({ x1: pad.left, x2: width - pad.right, y1: bottom, y2: bottom, class: "axis" });
    text({ x: width - pad.right, y: bottom + 32, class: "unit", "text-anchor": "end" }, unit);
    if (this.chart.large) this.drawMarks(pad.top, bottom);
  }

  drawMarks(top, bottom) {
    const axes = this.data.axes[0];
    for (const { step, text } of this.data.marks) {
      const x = this.x(this.settings.x === "steps" ? step : interpolated(axes.steps, axes[this.settings.x], step));
      const mark = element("svg:g", { class: "mark" },
        element("svg:title", {}, `${text}, step ${thousands(step)}`),
        element("svg:line", { x1: x, x2: x, y1: top, y2: bottom }),
        element("svg:path", { d: `M${x - 4} ${top}h8l-4 6z` }));
      this.picture.append(mark);
    }
  }

  path(xs, ys) {
    return "M" + xs.map((value, n) => `${this.x(value)} ${this.y(ys[n])}`).join("L");
  }

  drawCurve({ series, raw, line, band }) {
    const group = element("svg:g", { class: `c${series.colour}` });
    const add = (d, kind) => group.append(element("svg:path", { d, class: kind }));
    if (band) {
      const back = this.path([...band.xs].reverse(), [...band.low].reverse()).slice(1);
      add(`${this.path(band.xs, band.high)}L${back}Z`, "band");
    }
    if (series.noisy && line.ys !== raw.ys) add(this.path(raw.xs, raw.ys), "line faint");
    add(this.path(line.xs, line.ys), series.dashed ? "line dashed" : "line");
    if (series.dots || raw.xs.length === 1) {
      raw.xs.forEach((value, n) => group.append(
        element("svg:circle", { cx: this.x(value), cy: this.y(raw.ys[n]), r: 2.5, class: "dot" })));
    }
    this.picture.append(group);
  }

  /* --- reading values --- */

  onPointer(event) {
    if (!this.back) return;
    this.onRead(this.back(event.clientX - this.box.getBoundingClientRect().left));
  }

  onKey(event) {
    if (!this.shown.length) return;
    const xs = this.shown[0].line.xs, now = this.at === null ? xs.length : nearest(xs, this.at);
    const moves = {
      ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: xs.length - 1,
      PageUp: now - Math.ceil(xs.length / 10), PageDown: now + Math.ceil(xs.length / 10),
    };
    if (event.key === "Escape") this.onRead(null);
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.onRead(xs[Math.min(Math.max(moves[event.key], 0), xs.length - 1)]);
  }

  /* Show the values at a place on the x axis; null for the last ones. */
  read(at) {
    this.at = at;
    if (!this.cross) return;
    this.cross.replaceChildren();
    this.keys.forEach((key, n) => (key.querySelector(".value").textContent = this.rest[n]));
    this.readout.textContent = "";
    if (at === null || !this.shown.length) return;
    const place = Math.min(Math.max(at, this.domain.left), this.domain.right), x = this.x(place);
    const bottom = this.picture.getAttribute("height") - 36;
    this.cross.append(element("svg:line", { x1: x, x2: x, y1: 10, y2: bottom }));
    const said = [];
    for (const { series, number, line } of this.shown) {
      const n = nearest(line.xs, place), value = valueText(this.chart.kind, line.ys[n]);
      this.keys[number].querySelector(".value").textContent = value;
      said.push(`${series.name} ${value}`);
      this.cross.append(element("svg:circle", {
        cx: this.x(line.xs[n]), cy: this.y(line.ys[n]), r: 4, class: `dot c${series.colour}`,
      }));
    }
    const first = this.shown[0], axes = this.data.axes[first.series.group];
    const step = first.line.steps[nearest(first.line.xs, place)];
    const [unit, size] = timeUnit(axes.seconds[axes.seconds.length - 1]);
    const seconds = interpolated(axes.steps, axes.seconds, step);
    const epoch = interpolated(axes.steps, axes.epochs, step);
    this.readout.append(
      `step ${thousands(step)} · epoch ${epoch.toFixed(1)} · ${(seconds / size).toFixed(1)} ${unit}`,
      element("span", { class: "hidden" }, `: ${said.join(", ")}`));
  }
}
