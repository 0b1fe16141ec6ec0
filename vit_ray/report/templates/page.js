"use strict";
for (const table of document.querySelectorAll("table")) makeSortable(table);
document.body.classList.remove("no-scripts");
window.addEventListener("hashchange", openTarget);
openTarget();
if (document.getElementById("vega")) unpack().then(drawAll);

// The drawing script is compressed; the page's policy allows it by its hash.
async function unpack() {
  const packed = atob(document.getElementById("vega").textContent);
  const bytes = new Blob([Uint8Array.from(packed, (one) => one.charCodeAt(0))]);
  const script = document.createElement("script");
  script.textContent = await new Response(
    bytes.stream().pipeThrough(new DecompressionStream("gzip"))).text();
  document.body.append(script);
}

// Each chart is drawn again over the static chart for readers without scripts; a closed one has no
// width before it is opened.
function drawAll() {
  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    const fold = figure.querySelector(".fold");
    if (fold) fold.addEventListener("toggle", () => draw(figure), {once: true});
    else draw(figure);
  }
}

async function draw(figure) {
  const place = figure.querySelector(".chart");
  const spec = JSON.parse(document.getElementById(figure.dataset.chart).textContent);
  if (place.clientWidth < 480) makeNarrow(spec);
  const options = {
    // Only errors: it is normal that no point of a line is selected.
    mode: "vega-lite", logLevel: 1, renderer: "svg", actions: false, defaultStyle: false,
    tooltip: {theme: "page", disableDefaultStyle: true},
    ast: true, // expressions are interpreted: the page's policy forbids turning text into code
  };
  const drawing = document.createElement("div");
  drawing.style.width = "100%";
  place.append(drawing); // it needs a width before anything is drawn in it
  const {view} = await vegaEmbed(drawing, spec, options);
  place.querySelector(".still").remove();
  for (const empty of drawing.querySelectorAll("g.mark-symbol:empty"))
    empty.setAttribute("aria-label", "points of the line that is picked");
  figure.addEventListener("change", () => {
    const off = [...figure.querySelectorAll("input[value]:not(:checked)")].map((box) => box.value);
    const run = figure.querySelector("select")?.value ?? "";
    const seeds = figure.querySelector(".seeds")?.checked ?? true;
    view.signal("hidden", off).signal("picked", run === "" ? null : Number(run))
      .signal("seeds", seeds).runAsync();
  });
  if (figure.querySelector("select")) view.addEventListener("click", (_, item) => {
    const line = item?.datum?.line ?? (Array.isArray(item?.items) ? item.items[0]?.datum?.line : undefined);
    if (line === undefined) return;
    figure.querySelector("select").value = String(line);
    figure.dispatchEvent(new Event("change"));
  });
  place.addEventListener("keydown", (event) => walk(event, place));
  figure.dataset.drawn = "yes";
}

// Names at the ends of lines are inside, so that the lines have the full width.
function makeNarrow(spec) {
  for (const layer of spec.layer.filter((one) => one.name?.startsWith("late_")))
    Object.assign(layer.mark, {align: "right", dx: -2, dy: -10});
  spec.padding.right = 8;
}

// Arrow keys move from point to point and show the values of each, Escape hides them.
function walk(event, place) {
  const step = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[event.key];
  const points = [...place.querySelectorAll(".mark-symbol.role-mark path")];
  if (event.key === "Escape")
    document.getElementById("vg-tooltip-element")?.classList.remove("visible");
  if (!step || !points.length) return;
  event.preventDefault();
  const last = place.dataset.at === undefined ? (step > 0 ? -1 : 0) : Number(place.dataset.at);
  const at = (last + step + points.length) % points.length;
  points[last]?.dispatchEvent(over("pointerout", 0, 0));
  place.dataset.at = at;
  const box = points[at].getBoundingClientRect();
  for (const kind of ["pointerover", "pointermove"])
    points[at].dispatchEvent(over(kind, box.x + box.width / 2, box.y + box.height / 2));
}

function over(kind, x, y) {
  return new PointerEvent(kind, {bubbles: true, clientX: x, clientY: y});
}

function makeSortable(table) {
  const body = table.tBodies[0];
  table.querySelectorAll("thead th").forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const falls = head.getAttribute("aria-sort") === "ascending";
      for (const other of table.querySelectorAll("[aria-sort]")) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", falls ? "descending" : "ascending");
      const rows = [...body.rows].sort((a, b) => compare(a.cells[column], b.cells[column], falls));
      body.append(...rows);
    });
  });
}

// Unknown values come last, in either sort order.
function compare(a, b, falls) {
  const [x, y] = [a, b].map((cell) => cell.dataset.value ?? cell.textContent);
  if (x === "" || y === "") return (x === "") - (y === "");
  const isNumber = a.classList.contains("number");
  return (falls ? -1 : 1) * (isNumber ? x - y : x.localeCompare(y, undefined, {numeric: true}));
}

function openTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target?.tagName === "DETAILS") { target.open = true; target.scrollIntoView(); }
}
