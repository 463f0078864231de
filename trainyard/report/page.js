/* Behaviour of the page: switches, the table of classes, the order of errors. */

const settings = { x: "steps", smoothing: 32, log: false, theme: "auto", order: "loss" };
const STORED = "trainyard-report";
const data = JSON.parse(document.getElementById("data").textContent);
const plots = [];

function beginPlots() {
  const onRead = (at) => plots.forEach((plot) => plot.read(at));
  for (const chart of data.charts) {
    const figure = document.querySelector(`figure[data-chart="${chart.name}"]`);
    plots.push(new Plot(figure, chart, data, settings, onRead));
  }
  redraw();
}

function redraw() {
  for (const plot of plots) plot.draw();
}

/* --- switches --- */

function loadSettings() {
  try {
    Object.assign(settings, JSON.parse(localStorage.getItem(STORED)));
  } catch { /* a browser without storage for files */ }
}

function saveSettings() {
  try {
    localStorage.setItem(STORED, JSON.stringify(settings));
  } catch { /* as above */ }
}

/* Keep a setting equal to its inputs; `apply` runs now and after each change. */
function connect(name, apply) {
  for (const input of document.querySelectorAll(`input[name="${name}"]`)) {
    if (input.type === "radio") input.checked = settings[name] === input.value;
    else if (input.type === "checkbox") input.checked = settings[name];
    else input.value = settings[name];
    input.addEventListener("input", () => {
      if (input.type === "radio") settings[name] = input.value;
      else settings[name] = input.type === "checkbox" ? input.checked : Number(input.value);
      apply(input);
      saveSettings();
    });
    if (input.type !== "radio" || input.checked) apply(input);
  }
}

function applyTheme() {
  if (settings.theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = settings.theme;
}

function applySmoothing(input) {
  const share = smoothingShare(settings), text = share ? `${decimal(100 * share, 2)}% of the run` : "off";
  input.setAttribute("aria-valuetext", text);
  document.getElementById("smoothing-value").textContent = text;
  redraw();
}

function sortErrors() {
  const grid = document.getElementById("errors-grid");
  const value = (tile) => Number(tile.dataset[settings.order]);
  grid.append(...[...grid.children].sort((a, b) => value(b) - value(a)));
}

/* --- classes: searched, sorted, some rows at a time --- */

const classes = { column: 2, descending: false, wanted: "", count: 60 };

function beginClasses() {
  const box = document.getElementById("classes-table");
  if (!box) return;
  const input = element("input", { type: "search", id: "classes-search", autocomplete: "off" });
  const found = element("span", { class: "detail", role: "status" });
  const more = element("button", { type: "button", class: "more" });
  const table = element("table"), label = "Classes, sorted by the marked column";
  const show = () => showClasses(table, found, more, label);
  input.value = classes.wanted;
  input.addEventListener("input", () => {
    classes.wanted = input.value;
    show();
  });
  more.addEventListener("click", () => {
    classes.count += 200;
    show();
  });
  table.addEventListener("click", ({ target }) => {
    if (!target.dataset.column) return;
    const column = Number(target.dataset.column);
    classes.descending = classes.column === column ? !classes.descending : column === 1;
    classes.column = column;
    show();
    table.querySelector(`[data-column="${column}"]`).focus();
  });
  box.replaceChildren(
    element("p", { class: "search" },
      element("label", { for: "classes-search" }, "Find a class "), input, found),
    element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, table), more);
  show();
}

function showClasses(table, found, more, label) {
  const { column, descending, wanted, count } = classes, sign = descending ? -1 : 1;
  const order = (a, b) => (column ? a - b : a.localeCompare(b, "en", { numeric: true }));
  const rows = data.classes
    .filter(([name]) => name.toLowerCase().includes(wanted.trim().toLowerCase()))
    .sort((a, b) => sign * order(a[column], b[column]));
  const number = (text) => element("td", { class: "number" }, text);
  const body = rows.slice(0, count).map(([name, images, first, ...others]) => element("tr", {},
    element("th", { scope: "row" }, name), number(whole(images)),
    element("td", { class: "number" }, meter(first), formatted(".1%", first)),
    ...others.map((share) => number(formatted(".1%", share)))));
  const heads = data.class_columns.map((name, n) => {
    const sorted = n !== column ? null : descending ? "descending" : "ascending";
    return element("th", { scope: "col", class: n ? "number" : null, "aria-sort": sorted },
      element("button", { type: "button", "data-column": n }, name));
  });
  found.textContent = `${whole(rows.length)} of ${whole(data.classes.length)}`;
  more.textContent = `Show more of the ${whole(rows.length)} classes`;
  more.hidden = rows.length <= count;
  table.replaceChildren(element("caption", {}, label),
    element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...body));
}

/* A bar for a share of 1. The number beside it says the same. */
function meter(share) {
  const bar = (width, kind) => element("svg:rect", { width, height: 8, class: kind });
  return element("svg:svg", { viewBox: "0 0 100 8", class: "meter", preserveAspectRatio: "none", "aria-hidden": true },
    bar(100, "track"), bar(Math.round(1000 * share) / 10, "bar"));
}

/* The name of a file copies its path. Elsewhere than in browsers, the list of paths is selected. */
async function copyPath({ target }) {
  if (!target.matches("button.file")) return;
  const name = target.textContent;
  await navigator.clipboard.writeText(target.title);
  target.textContent = "path copied";
  setTimeout(() => (target.textContent = name), 1200);
}

document.documentElement.classList.add("script");
document.addEventListener("click", copyPath);
loadSettings();
connect("theme", applyTheme);
connect("x", redraw);
connect("log", redraw);
connect("smoothing", applySmoothing);
connect("order", sortErrors);
beginClasses();
beginPlots(); // after the switches, so that each chart is drawn once
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth !== width) redraw();
  width = innerWidth;
});
