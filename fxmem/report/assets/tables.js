"use strict";
// Tables to sort and to filter. A column is {name, label, kind}: kind "bytes", "ms" and "percent" are numbers, else text.

const FIRST_ROWS = 200;
const WRITTEN = { bytes: bytesText, ms: msText, percent: percentText };

const MODULE_TABLE = [
  { name: "path", label: "module" },
  { name: "kind", label: "class" },
  { name: "parameters_bytes", label: "parameters", kind: "bytes" },
  { name: "gradients_bytes", label: "gradients", kind: "bytes" },
  { name: "optimizer_state_bytes", label: "optimizer", kind: "bytes" },
  { name: "saved_bytes", label: "saved, kept", kind: "bytes" },
  { name: "recomputed_bytes", label: "recomputed", kind: "bytes" },
  { name: "seconds", label: "ms forward", kind: "ms" },
];
const STORAGE_TABLE = [
  { name: "name", label: "saved tensor" },
  { name: "nbytes", label: "bytes", kind: "bytes" },
  { name: "decision", label: "plan" },
  { name: "source", label: "where" },
  { name: "reason", label: "why it has to be kept" },
];

function showTables(section, modules, storages) {
  const choices = [
    ["modules", MODULE_TABLE, modules],
    ["saved tensors", STORAGE_TABLE, storages],
  ].filter(([, , rows]) => rows.length);
  const holder = section.querySelector(".table");
  const search = h("input", {
    type: "search",
    placeholder: "filter, such as conv",
    "aria-label": "filter rows",
    oninput: () => current.filter(search.value),
  });
  const count = h("span", { class: "hint" });
  let current;
  const choose = (i) => {
    buttons.forEach((button, b) => button.setAttribute("aria-pressed", String(b === i)));
    current = sortable(
      holder,
      choices[i][1],
      choices[i][2],
      (shown, all) => (count.textContent = shown === all ? `${all} rows` : `${shown} of ${all} rows`),
      true,
    );
    current.filter(search.value);
  };
  const buttons = choices.map(([name], i) => h("button", { onclick: () => choose(i) }, name));
  section.querySelector(".controls").replaceChildren(...buttons, search, count);
  choose(0);
}

/** Write a table into `holder`, with a row of sums if `summing`; `told(shown, all)` gets the numbers of rows. Returns {filter}. */
function sortable(holder, columns, rows, told, summing) {
  let by = null,
    down = true,
    words = [],
    most = FIRST_ROWS;
  const texts = rows.map((row) =>
    columns
      .filter((c) => !c.kind)
      .map((c) => row[c.name])
      .join(" ")
      .toLowerCase(),
  );
  const largest = Object.fromEntries(
    columns.filter((c) => c.kind === "bytes").map((c) => [c.name, largestOf(rows.map((row) => row[c.name])) || 1]),
  );

  function sort(column) {
    down = by === column ? !down : Boolean(column.kind);
    by = column;
    draw();
  }

  function order(a, b) {
    const one = a[by.name],
      other = b[by.name];
    if (one == null || other == null) return (one == null) - (other == null);
    const found = by.kind ? one - other : String(one).localeCompare(String(other), "en", { numeric: true });
    return down ? -found : found;
  }

  function draw() {
    const found = rows.filter((_, i) => words.every((word) => texts[i].includes(word)));
    if (by) found.sort(order);
    const head = columns.map((c) =>
      h(
        "th",
        {
          class: c.kind ? "number" : "",
          scope: "col",
          "aria-sort": by === c ? (down ? "descending" : "ascending") : "none",
        },
        h("button", { onclick: () => sort(c) }, c.label, by === c ? (down ? " ↓" : " ↑") : ""),
      ),
    );
    const body = found.slice(0, most).map((row) =>
      h(
        "tr",
        {},
        columns.map((c, i) => cellOf(row, c, i, largest)),
      ),
    );
    const sums = columns.map((c, i) =>
      c.kind === "bytes" || c.kind === "ms"
        ? h("td", { class: "number" }, WRITTEN[c.kind](found.reduce((sum, row) => sum + (row[c.name] || 0), 0)))
        : h("td", {}, i ? "" : "all of these"),
    );
    const more =
      found.length > most
        ? h(
            "p",
            {},
            h(
              "button",
              {
                onclick: () => {
                  most = Infinity;
                  draw();
                },
              },
              `Show all ${found.length} rows`,
            ),
          )
        : "";
    holder.replaceChildren(
      h("table", {}, h("thead", {}, h("tr", {}, head), summing ? h("tr", {}, sums) : ""), h("tbody", {}, body)),
      more,
    );
    told(found.length, rows.length);
  }

  draw();
  return {
    filter: (text) => {
      words = text.toLowerCase().split(/\s+/).filter(Boolean);
      draw();
    },
  };
}

function cellOf(row, column, place, largest) {
  const value = row[column.name];
  if (!column.kind)
    return h("td", { class: place ? "text" : "name" }, value === "" && !place ? "(the model itself)" : String(value));
  if (value == null) return h("td", { class: "number" }, "–");
  const share =
    column.kind === "bytes" && value > 0
      ? h("span", { class: "share", style: `width:${Math.ceil((46 * value) / largest[column.name])}px` })
      : "";
  return h("td", { class: "number" }, share, value === 0 ? "0" : WRITTEN[column.kind](value));
}
