"use strict";
// Starts the page: reads the data, hands each section its part, hides those that have none.

function nodesOf(table) {
  const { texts } = table;
  return records(table).map((node) => ({
    ...node,
    module: texts[node.module],
    line: texts[node.line],
    parts: texts[node.module] ? texts[node.module].split(".") : [],
  }));
}

/** Peaks as bars on one scale, the budget a mark on each. */
function showPeaks(element, data) {
  const shown = data.budget_bytes != null && data.budget_bytes <= 2 * data.eager_peak_bytes;
  const scale = Math.max(data.eager_peak_bytes, data.planned_peak_bytes, shown ? data.budget_bytes : 0);
  const width = (nbytes) => `${(100 * nbytes) / scale}%`;
  const row = (name, nbytes, colour) => [
    h("span", {}, name),
    h(
      "span",
      { class: "bar" },
      colour ? h("i", { style: `width:${width(nbytes)};background:var(--${colour})` }) : "",
      shown ? h("i", { class: "mark", style: `left:${width(data.budget_bytes)}` }) : "",
    ),
    h("span", { class: "number" }, bytesText(nbytes)),
  ];
  element.replaceChildren(
    ...row("peak as it is", data.eager_peak_bytes, "eager"),
    ...row("peak under the plan", data.planned_peak_bytes, "plan"),
    ...(shown ? row("budget", data.budget_bytes, "") : []),
  );
}

function showFigures(section, data) {
  const rows = data.figures.map(([name, nbytes]) =>
    h(
      "tr",
      {},
      h("td", { class: "name" }, name),
      h("td", { class: "number" }, nbytes == null ? "none" : bytesText(nbytes)),
      h("td", { class: "number" }, nbytes == null ? "" : nbytes.toLocaleString("en")),
    ),
  );
  section.querySelector(".table").append(
    h(
      "table",
      {},
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          ["of one training step", "", "bytes"].map((text, i) => h("th", { class: i ? "number" : "" }, text)),
        ),
      ),
      h("tbody", {}, rows),
    ),
  );
  section
    .querySelector(".notes")
    .append(...[`the peak under the plan is at ${data.peak_at}`, ...data.notes].map((note) => h("li", {}, note)));
}

function start(data) {
  const nodes = nodesOf(data.nodes),
    modules = records(data.modules),
    points = records(data.frontier);
  const storages = records(data.storages).map((row) => ({
    ...row,
    decision: { keep: "kept", drop: "recomputed" }[row.decision],
  }));
  const nodeNamed = new Map(nodes.map((node) => [node.name, node]));
  const { after_bytes, label, labels } = data.timeline;
  const peak = after_bytes.reduce((best, nbytes, i) => (nbytes > after_bytes[best] ? i : best), 0);
  const sections = {
    memory: [after_bytes.length > 1, (s) => showMemory(s, data, nodeNamed)],
    modules: [modules.length > 0, (s) => showModules(s, modules)],
    graph: [nodes.length > 0, (s) => showGraph(s, nodes, nodeNamed.get(labels[label[peak]]))],
    tables: [modules.length + storages.length > 0, (s) => showTables(s, modules, storages)],
    frontier: [points.length > 1, (s) => showFrontier(s, data, points)],
    advice: [data.advice != null, (s) => showAdvice(s, data.advice)],
    figures: [true, (s) => showFigures(s, data)],
  };
  showPeaks(document.getElementById("peaks"), data);
  const nav = document.querySelector("nav");
  for (const [id, [known, show]] of Object.entries(sections)) {
    const section = document.getElementById(id);
    section.hidden = !known;
    if (!known) continue;
    nav.append(h("a", { href: `#${id}` }, section.querySelector("h2").textContent));
    show(section);
  }
}

start(JSON.parse(document.getElementById("data").textContent));
document.documentElement.dataset.ready = String(Math.round(performance.now()));
