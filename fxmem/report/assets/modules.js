"use strict";
// Bytes by module as an icicle: columns are levels of the module path, heights are bytes, shades are what they are.

const PARTS = {
  saved_bytes: ["kept", "kept-tint"],
  recomputed_bytes: ["recomputed", "recomputed-tint"],
  parameters_bytes: ["parameters", "parameters-tint"],
  gradients_bytes: ["gradients", "gradients-tint"],
  optimizer_state_bytes: ["optimizer state", "state-tint"],
};
const MEASURES = {
  "saved for the backward": ["saved_bytes", "recomputed_bytes"],
  "parameters, gradients, optimizer state": ["parameters_bytes", "gradients_bytes", "optimizer_state_bytes"],
  "all of these": Object.keys(PARTS),
};

function showModules(section, modules) {
  const icicle = section.querySelector(".icicle");
  const tree = moduleTree(modules);
  let measure = Object.keys(MEASURES)[0];
  let root, focus;
  const crumbs = h("span", { class: "crumbs" });
  const select = h(
    "select",
    { "aria-label": "what is measured", onchange: (event) => change(event.target.value) },
    Object.keys(MEASURES).map((name) => h("option", {}, name)),
  );
  section.querySelector(".controls").replaceChildren(select, crumbs);

  function change(name) {
    measure = name;
    root = d3.partition()(summed(tree, MEASURES[measure]));
    focus = root;
    showKey(
      section,
      MEASURES[measure].map((part) => ["", `var(--${PARTS[part][1]})`, PARTS[part][0]]),
    );
    draw();
  }

  function draw() {
    const columns = Math.min(focus.height + 1, icicle.clientWidth > 700 ? 5 : 3);
    const width = icicle.clientWidth / columns,
      height = icicle.clientHeight;
    const scale = height / (focus.x1 - focus.x0 || 1);
    const cells = focus
      .descendants()
      .filter((d) => d.depth - focus.depth < columns && (d.x1 - d.x0) * scale >= 2 && d.value > 0);
    icicle.replaceChildren(
      ...cells.map((d) =>
        cell(d, (d.depth - focus.depth) * width, (d.x0 - focus.x0) * scale, width, (d.x1 - d.x0) * scale),
      ),
    );
    if (!cells.length) icicle.append(h("p", { class: "hint" }, "Nothing of this kind."));
    const path = focus.ancestors().reverse();
    crumbs.replaceChildren(
      ...path.flatMap((d, i) => [
        i ? " › " : "",
        d === focus ? d.data.name : h("button", { onclick: () => zoom(d) }, d.data.name),
      ]),
    );
  }

  function zoom(d) {
    focus = d;
    tip.hide();
    draw();
  }

  function cell(d, left, top, width, height) {
    const place = `left:${left}px;top:${top}px;width:${width}px;height:${height}px`;
    const attributes = {
      style: `${place};background:${shades(d, MEASURES[measure])}`,
      ...tipped(() => told(d, MEASURES[measure])),
      onclick: () => zoom(d === focus && d.parent ? d.parent : d),
    };
    if (height < 16) return h("div", { ...attributes, "aria-label": d.data.name });
    const size = bytesText(d.value);
    return height > 34
      ? h("div", attributes, d.data.name, h("small", {}, size))
      : h("div", attributes, `${d.data.name}  ${size}`);
  }

  new ResizeObserver(draw).observe(icicle);
  change(measure);
}

/** Modules by path, those in between included: {name, title, kind, own, children}. */
function moduleTree(modules) {
  const root = { name: "model", title: "the whole model", kind: "", own: null, children: [] };
  const known = new Map([["", root]]);
  const at = (path) => {
    if (known.has(path)) return known.get(path);
    const cut = path.lastIndexOf(".");
    const node = { name: path.slice(cut + 1), title: path, kind: "", own: null, children: [] };
    known.set(path, node);
    at(path.slice(0, Math.max(cut, 0))).children.push(node);
    return node;
  };
  for (const row of modules) {
    const node = at(row.path);
    node.own = row;
    node.kind = row.kind;
  }
  for (const node of known.values()) {
    node.children = inRuns(node.children, (run) => {
      const name = runName(run.map((child) => child.name));
      return { name, title: `${node.title} ${name}`, kind: "", own: null, children: run };
    });
  }
  return root;
}

/** The hierarchy with `value`, the sum of the parts, and `parts`, each by name. */
function summed(tree, parts) {
  const root = d3
    .hierarchy(tree)
    .sum((node) => (node.own ? parts.reduce((sum, part) => sum + (node.own[part] || 0), 0) : 0));
  return root.eachAfter((d) => {
    d.parts = Object.fromEntries(
      parts.map((part) => [
        part,
        ((d.data.own && d.data.own[part]) || 0) + (d.children || []).reduce((sum, child) => sum + child.parts[part], 0),
      ]),
    );
  });
}

/** A background whose bands are as wide as the parts are large. */
function shades(d, parts) {
  let from = 0;
  const stops = parts.map((part) => {
    const to = from + (100 * d.parts[part]) / d.value;
    const stop = `var(--${PARTS[part][1]}) ${from.toFixed(2)}% ${to.toFixed(2)}%`;
    from = to;
    return stop;
  });
  return `linear-gradient(90deg, ${stops.join(", ")})`;
}

function told(d, parts) {
  return [d.data.title, d.data.kind, ...parts.map((part) => `${PARTS[part][0]}: ${bytesText(d.parts[part])}`)];
}
