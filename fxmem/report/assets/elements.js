"use strict";
// Making elements, writing numbers, and the one tip that follows the pointer. Texts go into the page as text, never as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat(3).filter((child) => child != null && child !== ""));
  return element;
}

const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

/** Rows as objects by column name. */
const records = (table) => table.rows.map((row) => Object.fromEntries(table.columns.map((name, i) => [name, row[i]])));

const UNITS = [
  ["GB", 1e9, 1e8],
  ["MB", 1e6, 1e5],
  ["kB", 1e3, 1e3],
  ["B", 1, 0],
]; // name, bytes, least to be written in it

/** Four digits and a unit, as everywhere in fxmem: "8 GB", "0.2126 MB"; the unit is that which fits `like`. */
function bytesText(nbytes, like = nbytes) {
  const [unit, scale] = UNITS.find(([, , least]) => Math.abs(like) >= least);
  return `${Number((nbytes / scale).toPrecision(4))} ${unit}`;
}

/** The texts of an axis, in one unit. */
const bytesTexts = (_, splits) => splits.map((nbytes) => bytesText(nbytes, splits[splits.length - 1]));

/** The largest of numbers that may be missing; at least 0. */
const largestOf = (values) => values.reduce((most, value) => Math.max(most, value || 0), 0);

const percentText = (ratio) => `${(100 * ratio).toFixed(1)} %`;
const msText = (seconds) => (1e3 * seconds).toFixed(3);
const styleOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const MOST_CHILDREN = 48,
  RUN = 24;

/** Children in runs of a few, as often as there are too many of them to tell apart; `made(run)` is one of several. */
function inRuns(children, made) {
  let found = children;
  while (found.length > MOST_CHILDREN) {
    const runs = [];
    for (let i = 0; i < found.length; i += RUN) runs.push(found.slice(i, i + RUN));
    found = runs.map((run) => (run.length > 1 ? made(run) : run[0]));
  }
  return found;
}

/** The name of a run of things that have names: "0 … 23". */
const runName = (names) => `${names[0].split(" … ")[0]} … ${names[names.length - 1].split(" … ").pop()}`;

/** What the coloured marks of a picture mean: [class, colour, text]. */
function showKey(section, marks) {
  section
    .querySelector(".key")
    .replaceChildren(
      ...marks.map(([kind, colour, text]) =>
        h("span", {}, h("i", { class: kind, style: `background:${colour}` }), text),
      ),
    );
}

const tip = {
  show(event, title, lines) {
    const box = document.getElementById("tip");
    box.replaceChildren(h("b", {}, title), ...lines.filter(Boolean).map((line) => h("span", {}, line)));
    box.hidden = false;
    box.style.left = "0";
    const { width, height } = box.getBoundingClientRect();
    const left = Math.max(8, Math.min(event.clientX + 14, innerWidth - width - 12));
    const below = event.clientY + 18;
    box.style.left = `${left}px`;
    box.style.top = `${below + height < innerHeight - 8 ? below : Math.max(8, event.clientY - height - 14)}px`;
  },
  hide() {
    document.getElementById("tip").hidden = true;
  },
};

/** Attributes by which an element shows a tip while the pointer is over it, or once it was tapped, until the next tap.
    `told()` returns [title, ...lines]. */
function tipped(told) {
  const show = (event) => {
    const [title, ...lines] = told();
    tip.show(event, title, lines);
  };
  const touched = (event) => event.pointerType === "touch";
  return {
    onpointerenter: show,
    onpointermove: show,
    onpointerleave: (event) => touched(event) || tip.hide(),
    onpointerup: (event) => touched(event) && show(event),
  };
}

document.addEventListener("pointerdown", tip.hide, true);
document.addEventListener("scroll", tip.hide, true);
