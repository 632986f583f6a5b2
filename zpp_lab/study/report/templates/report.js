"use strict";
// Charts: drawn from the specifications in the page, fitted to the width that there is.
const views = new Map();

function fit(spec, room) {
  const { side, legend } = spec.usermeta;
  const panels = spec.concat || [spec.facet ? spec.spec : spec];
  const most = spec.concat ? Math.min(spec.columns || 1, panels.length) : spec.facet ? spec.columns : 1;
  const width = panels[0].width;
  const fixed = spec.facet ? side : 0;  // facets share the axes of their first column
  let each = spec.facet ? 12 : side;
  if (room >= most * (width + each) + fixed + legend + 24) return spec;
  const least = spec.facet ? 110 : width;
  const columns = Math.max(1, Math.min(most, Math.floor((room - 24 - fixed) / (least + each))));
  const beside = columns === most && room >= columns * (180 + each) + fixed + legend + 24;
  if (!beside) {
    spec.config.legend = { ...spec.config.legend, orient: "bottom", direction: "vertical",
      columns: Math.max(1, Math.floor(room / Math.max(130, legend))),
      layout: { bottom: { anchor: "start", direction: "vertical", margin: 6 } } };
  }
  const phone = beside ? null : spec.usermeta.phone;  // of the figure with words beside its rows
  const left = room - 24 - fixed - (beside ? legend : phone ? phone.beside : 0);
  if (phone) {
    panels[0].height.step = phone.row;
    each = phone.side;
    spec.config.axisY = { labelFontSize: phone.font, labelLimit: phone.side - 14 };
    panels[0].layer = panels[0].layer.filter(
      layer => !/^head_|^words_/.test(layer.name) || layer.name === "words_label");
  }
  if (spec.concat || spec.facet) spec.columns = columns;
  for (const panel of panels) {
    panel.width = Math.min(panel.width, Math.floor(left / columns) - each);
    for (const layer of panel.layer || []) {
      if (/^head_|^words_/.test(layer.name)) layer.encoding.x.value += panel.width - width;
      if (layer.name === "words_label" && phone) {
        layer.encoding.x.value = panel.width + 8;
        layer.encoding.text.field = "short";
        layer.mark.fontSize = phone.font;
      }
      const axis = layer.encoding.x && layer.encoding.x.axis;
      if (axis && axis.values && panel.width < 400) {
        if (phone) axis.values = phone.ticks;
        else Object.assign(axis, { labelOverlap: "greedy", labelSeparation: 8 });
      }
      const title = layer.encoding.x && layer.encoding.x.title;
      if (typeof title === "string" && 7 * title.length > panel.width) {
        layer.encoding.x.title = title.split(/ (?=\()/);  // its unit goes to a second line
      }
    }
  }
  return spec;
}

async function draw(name) {
  if (views.has(name)) return;
  const place = document.getElementById("chart-" + name);
  const spec = JSON.parse(document.getElementById("spec-" + name).textContent);
  views.set(name, null);
  try {
    const room = place.clientWidth || document.querySelector("main").clientWidth;
    const made = await vegaEmbed(place, fit(spec, room), { renderer: "svg", actions: false });
    views.set(name, made.view);
    document.querySelector(`.save[data-figure="${name}"]`).hidden = false;
    if (hidden.length) made.view.signal("hidden", hidden).runAsync();
  } catch (error) {
    place.textContent = "This chart could not be drawn: " + error;
    console.error(error);
  }
}

async function save(name) {
  const svg = await views.get(name).toSVG();
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([svg], { type: "image/svg+xml" }));
  link.download = name + ".svg";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// The filter: rows and curves of the arms whose name or verdict row has every word.
let hidden = [];

function filterArms(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = [...document.querySelectorAll("#verdicts tbody tr")];
  const gone = rows.filter(row => !words.every(word => row.textContent.toLowerCase().includes(word)));
  hidden = gone.map(row => row.dataset.arm);
  const names = new Set(hidden);
  for (const row of document.querySelectorAll("tr[data-arm]")) row.hidden = names.has(row.dataset.arm);
  for (const view of views.values()) if (view) view.signal("hidden", hidden).runAsync();
  document.getElementById("filter-count").textContent =
    words.length ? `${rows.length - gone.length} of ${rows.length} arms shown` : "";
}

// Sorting: a button in each column's header; numbers by size, what has none last.
function sortKey(row, column) {
  const text = row.cells[column].textContent.trim();
  const number = parseFloat(text.replace(/^[<>]\s*/, "").replace(/\u2212/g, "-").replace(/[\u202f,]/g, ""));
  return { text, number, none: text === "" || text === "\u2013" };
}

function sortBy(table, column) {
  const head = table.tHead.rows[0].cells;
  const up = head[column].getAttribute("aria-sort") !== "ascending";
  const rows = [...table.tBodies[0].rows].map(row => ({ row, key: sortKey(row, column) }));
  const numeric = rows.every(({ key }) => key.none || /^[<>]?\s*[+\-\u2212]?[\d.]/.test(key.text));
  rows.sort((a, b) => {
    if (a.key.none !== b.key.none) return a.key.none ? 1 : -1;
    const order = numeric ? a.key.number - b.key.number : a.key.text.localeCompare(b.key.text);
    return (up ? 1 : -1) * order || 0;
  });
  table.tBodies[0].append(...rows.map(({ row }) => row));
  for (const cell of head) cell.removeAttribute("aria-sort");
  head[column].setAttribute("aria-sort", up ? "ascending" : "descending");
}

for (const table of document.querySelectorAll("table.sortable")) {
  [...table.tHead.rows[0].cells].forEach((cell, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...cell.childNodes);
    button.title = "sort by this column";
    button.addEventListener("click", () => sortBy(table, column));
    cell.append(button);
  });
}

const filter = document.getElementById("filter");
if (filter) {  // a page of speeds has few arms and none
  filter.closest(".filter").hidden = false;
  filter.addEventListener("input", () => filterArms(filter.value));
}

for (const button of document.querySelectorAll(".save")) {
  button.addEventListener("click", () => save(button.dataset.figure));
}

// Folds: links and printing open them; their charts are drawn once those in sight are.
const folds = [...document.querySelectorAll("main details")];
const contents = document.querySelector("#contents details");
const unfold = document.getElementById("unfold");
const desktop = matchMedia("(min-width: 1120px)");
const links = [...contents.querySelectorAll("a")];
let opened = [];

function reveal() {
  const place = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
  const fold = place && (place.closest("details") || place.querySelector(":scope > details"));
  if (fold) fold.open = true;
}

function mark() {
  const top = link => document.querySelector(link.hash).getBoundingClientRect().top;
  const asked = links.find(link =>
    link.hash === location.hash && top(link) >= -1 && top(link) < innerHeight);
  const here = asked || links.filter(link => top(link) < innerHeight / 3).pop() || links[0];
  for (const link of links) link.toggleAttribute("aria-current", link === here);
}

function layout() { contents.open = desktop.matches; }

unfold.addEventListener("click", () => {
  const open = folds.some(fold => !fold.open);
  for (const fold of folds) fold.open = open;
  unfold.textContent = open ? "Fold all" : "Unfold all";
});
for (const link of links) link.addEventListener("click", () => { layout(); setTimeout(reveal); });
desktop.addEventListener("change", layout);
addEventListener("hashchange", () => { reveal(); mark(); });
addEventListener("scroll", mark, { passive: true });
addEventListener("beforeprint", () => {
  opened = folds.filter(fold => !fold.open);
  for (const fold of opened) fold.open = true;
});
addEventListener("afterprint", () => { for (const fold of opened) fold.open = false; });
layout();
reveal();
mark();

const charts = [...document.querySelectorAll(".chart")];
const folded = charts.filter(place => place.closest("details"));
const named = place => place.id.slice("chart-".length);
for (const place of folded) {
  place.closest("details").addEventListener("toggle", () => draw(named(place)));
}
Promise.all(charts.filter(place => !folded.includes(place)).map(place => draw(named(place))))
  .then(async () => {
    for (const place of folded) {
      await new Promise(later => setTimeout(later));
      await draw(named(place));
    }
  });
