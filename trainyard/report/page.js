/* What the page does: switches, the table of classes, the order of errors, and fresh figures. */

const settings = {
  x: "steps", smoothing: 0.02, log: false, hidden: {}, theme: "auto", order: "loss",
  key: "trainyard report",
  load() {
    try {
      Object.assign(this, JSON.parse(localStorage.getItem(this.key) || "{}"), { hidden: {} });
    } catch { /* a browser that keeps nothing for files */ }
  },
  save() {
    const { x, smoothing, log, theme, order } = this;
    try {
      localStorage.setItem(this.key, JSON.stringify({ x, smoothing, log, theme, order }));
    } catch { /* as above */ }
  },
};

let plots = [];
let data = {};

function begin() {
  data = JSON.parse(document.getElementById("data").textContent);
  const figures = [...document.querySelectorAll("figure[data-chart]")];
  const byName = new Map(data.charts.map((chart) => [chart.name, chart]));
  const onRead = (at) => plots.forEach((plot) => plot.read(at));
  plots = figures.map((figure) =>
    new Plot(figure, byName.get(figure.dataset.chart), data, settings, onRead));
  document.documentElement.classList.add("script");
  redraw();
  beginClasses();
  beginErrors();
}

function redraw() {
  for (const plot of plots) {
    plot.draw();
    plot.read(null);
  }
}

/* --- switches: those outside <main> stay when figures are made anew --- */

function connect(name, type, apply) {
  for (const input of document.querySelectorAll(`input[name="${name}"]`)) {
    if (type === "radio") input.checked = String(settings[name]) === input.value;
    else if (type === "checkbox") input.checked = settings[name];
    else input.value = Math.sqrt(settings[name] / 0.2) * 100;
    input.addEventListener("input", () => {
      if (type === "radio") settings[name] = input.value;
      else if (type === "checkbox") settings[name] = input.checked;
      else settings[name] = 0.2 * (input.value / 100) ** 2;
      apply(input);
      settings.save();
    });
    apply(input);
  }
}

function applyTheme() {
  if (settings.theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = settings.theme;
}

function applySmoothing(input) {
  const text = settings.smoothing ? `${trimmed(100 * settings.smoothing, 2)}% of the run` : "off";
  input.setAttribute("aria-valuetext", text);
  document.getElementById("smoothing-value").textContent = text;
  redraw();
}

/* --- classes: searched, sorted, a page at a time --- */

const COLUMNS = [["Class", 0], ["", null], ["Top-1", 2], ["Top-5", 3], ["Images", 1]];
const classes = { sort: 2, descending: false, wanted: "", count: 60 };

function beginClasses() {
  const box = document.getElementById("classes-table");
  if (!box || !data.classes.length) return;
  const input = element("input", { type: "search", id: "classes-search", autocomplete: "off" });
  const found = element("span", { class: "detail", role: "status" });
  const more = element("button", { type: "button", class: "more" });
  const scroll = box.querySelector(".scroll");
  input.value = classes.wanted;
  input.addEventListener("input", () => {
    classes.wanted = input.value;
    showClasses(scroll, found, more);
  });
  more.addEventListener("click", () => {
    classes.count += 200;
    showClasses(scroll, found, more);
  });
  box.prepend(element("p", { class: "search" },
    element("label", { for: "classes-search" }, "Find a class "), input, found));
  box.append(more);
  showClasses(scroll, found, more);
}

function showClasses(scroll, found, more) {
  const { sort, descending, wanted, count } = classes, sign = descending ? -1 : 1;
  const words = wanted.trim().toLowerCase();
  const order = (a, b) => (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
  const rows = data.classes
    .filter((row) => row[0].toLowerCase().includes(words))
    .sort((a, b) => sign * order(a[sort], b[sort]));
  const cell = (text, name = "td") => element(name, { class: "number" }, text);
  const percent = (value) => (100 * value).toFixed(1) + "%";
  const body = rows.slice(0, count).map((row) => element("tr", {},
    element("th", { scope: "row" }, row[0]), element("td", {}, meter(row[2])),
    cell(percent(row[2])), cell(percent(row[3])), cell(thousands(row[1]))));
  const again = (column) => {
    classes.descending = classes.sort === column ? !classes.descending : column === 1;
    classes.sort = column;
    showClasses(scroll, found, more);
    scroll.querySelector(`[data-column="${column}"]`).focus();
  };
  const heads = COLUMNS.map(([name, column]) => {
    if (column === null) return element("td", {});
    const button = element("button", { type: "button", "data-column": column }, name);
    button.addEventListener("click", () => again(column));
    const how = column !== sort ? null : descending ? "descending" : "ascending";
    return element("th", { scope: "col", class: column ? "number" : null, "aria-sort": how }, button);
  });
  found.textContent = `${thousands(rows.length)} of ${thousands(data.classes.length)}`;
  more.textContent = `Show more of the ${thousands(rows.length)} classes`;
  more.hidden = rows.length <= count;
  scroll.querySelector("table").replaceChildren(
    element("caption", {}, "Classes, sorted by the marked column"),
    element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...body));
}

function meter(share) {
  const bar = (width, kind) => element("svg:rect", { width, height: 8, class: kind });
  return element("svg:svg", { viewBox: "0 0 100 8", class: "meter", preserveAspectRatio: "none", "aria-hidden": "true" },
    bar(100, "track"), bar(Math.round(1000 * share) / 10, "bar"));
}

/* --- errors --- */

function beginErrors() {
  const grid = document.getElementById("errors-grid");
  if (!grid) return;
  connect("order", "radio", () => {
    const value = (tile) => Number(tile.dataset[settings.order]);
    grid.append(...[...grid.children].sort((a, b) => value(b) - value(a)));
  });
}

/* --- fresh figures, where the page is served while a run goes on --- */

async function refresh(state) {
  const answer = await fetch(location.pathname, {
    headers: state.tag ? { "If-None-Match": state.tag } : {}, cache: "no-store",
  });
  if (answer.status === 304) return;
  if (!answer.ok) throw new Error(String(answer.status));
  const isFirst = !state.tag;
  state.tag = answer.headers.get("ETag");
  const text = await answer.text();
  if (!isFirst) replace(new DOMParser().parseFromString(text, "text/html"));
}

function replace(fresh) {
  const navigation = (page) => page.querySelector("nav").textContent;
  if (navigation(fresh) !== navigation(document)) {  // sections have come: begin anew
    location.reload();
    return;
  }
  const open = [...document.querySelectorAll("details[open][id]")].map((details) => details.id);
  const focused = document.activeElement && document.activeElement.id;
  const { scrollX, scrollY } = window;
  // The switches of the curves stay as they are.
  const sections = [...document.querySelectorAll("section:not(#curves)")].map(({ id }) => id);
  for (const id of ["headline", "charts", "data", ...sections]) {
    document.getElementById(id)?.replaceWith(fresh.getElementById(id));
  }
  for (const id of open) document.getElementById(id)?.setAttribute("open", "");
  begin();
  if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  window.scrollTo(scrollX, scrollY);
}

async function watch() {
  const state = { tag: null };
  const say = (words) => {
    const status = document.getElementById("live");
    if (status.textContent !== words) status.textContent = words;
  };
  for (;;) {
    try {
      if (!document.hidden) await refresh(state);
      say("live");
    } catch {
      say("no longer updated: trainyard report has ended");
    }
    await new Promise((done) => setTimeout(done, 2000));
  }
}

settings.load();
connect("theme", "radio", applyTheme);
begin();
connect("x", "radio", redraw);
connect("log", "checkbox", redraw);
connect("smoothing", "range", applySmoothing);
let width = 0;
new ResizeObserver(([entry]) => {
  if (entry.contentRect.width !== width) redraw();
  width = entry.contentRect.width;
}).observe(document.querySelector("main"));
if (document.getElementById("live")) watch();
