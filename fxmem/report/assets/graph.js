"use strict";
// The graph, opened by hand: only what is open is laid out, each open module by itself and then as one box of its parent.

const BOX = { width: 232, height: 46 },
  ENTRY = { width: 96, height: 20 },
  HEAD = 28,
  PAD = 12;
const DECISIONS = { kept: "kept", recomputed: "recomputed", "in place": "inplace", "nothing saved": "none" };

function showGraph(section, nodes, peakNode) {
  const canvas = section.querySelector(".canvas");
  const root = graphTree(nodes);
  const open = new Set([root.id]);
  showKey(section, [
    ["", "var(--kept-tint)", "saved and kept"],
    ["", "var(--recomputed-tint)", "dropped and recomputed"],
    ["", "var(--inplace-tint)", "in place: takes no memory of its own"],
    ["", "var(--none-tint)", "nothing saved"],
  ]);

  const path = peakNode ? pathTo(root, nodes.indexOf(peakNode)) : [];
  const toPeak = () => {
    path.forEach((group) => group.children.length && open.add(group.id));
    draw();
    scrollTo(path[path.length - 1].id);
  };
  const closeAll = () => {
    open.clear();
    open.add(root.id);
    draw();
  };
  section
    .querySelector(".controls")
    .replaceChildren(
      ...(path.length ? [h("button", { onclick: toPeak }, "Show where the peak is")] : []),
      h("button", { onclick: closeAll }, "Close all modules"),
      h("span", { class: "hint" }, `${nodes.length.toLocaleString("en")} ops`),
    );

  function toggle(group) {
    if (!group.children.length) return;
    tip.hide();
    if (!open.delete(group.id)) open.add(group.id);
    draw();
    scrollTo(group.id);
  }

  function draw() {
    const laid = layout(root, open, nodes);
    canvas.replaceChildren(
      svg(
        "svg",
        { width: laid.width, height: laid.height, role: "group", "aria-label": "graph of the model" },
        svg(
          "defs",
          {},
          svg(
            "marker",
            {
              id: "tip-of-arrow",
              viewBox: "0 0 8 8",
              refX: 7,
              refY: 4,
              markerWidth: 7,
              markerHeight: 7,
              orient: "auto",
            },
            svg("path", { d: "M0 0 8 4 0 8z" }),
          ),
        ),
        drawn(laid, 0, 0),
      ),
    );
  }

  function drawn(laid, left, top) {
    const { group } = laid;
    if (!laid.children) return box(group, left, top);
    const inside = [
      ...laid.edges.map((points) => edge(points, left, top)),
      ...(laid.entry ? [entry(left + laid.entry.x, top + laid.entry.y)] : []),
      ...laid.children.map(({ laid: child, x, y }) => drawn(child, left + x, top + y)),
    ];
    if (group === root) return svg("g", {}, inside);
    const head = {
      "data-id": group.id,
      class: "box open",
      tabindex: 0,
      role: "button",
      "aria-expanded": "true",
      "aria-label": group.label,
      ...pressed(() => toggle(group)),
      ...tipped(() => toldOf(group)),
    };
    return svg(
      "g",
      {},
      svg(
        "g",
        head,
        svg("rect", { class: "back", x: left, y: top, width: laid.width, height: laid.height, rx: 6 }),
        svg("text", { x: left + 10, y: top + 18 }, short(`▾ ${group.label}`, laid.width - 20)),
      ),
      inside,
    );
  }

  function box(group, left, top) {
    const decision = decisionOf(group),
      closed = group.children.length > 0;
    const marks = {
      "data-id": group.id,
      class: `box${path[path.length - 1] === group ? " peak" : ""}`,
      tabindex: 0,
      role: "button",
      "aria-label": group.label,
      "aria-expanded": closed ? "false" : null,
      ...pressed(() => toggle(group)),
      ...tipped(() => toldOf(group)),
    };
    return svg(
      "g",
      marks,
      svg("rect", {
        class: "back",
        x: left,
        y: top,
        ...BOX,
        rx: closed ? 6 : 2,
        fill: `var(--${closed ? "panel" : `${DECISIONS[decision]}-tint`})`,
      }),
      closed ? bar(group, left, top) : null,
      svg("text", { x: left + 10, y: top + 19 }, short(`${closed ? "▸ " : ""}${group.label}`, BOX.width - 20)),
      svg(
        "text",
        { class: "soft", x: left + 10, y: top + 35 },
        short(closed ? sizesOf(group) : opSizes(group), (BOX.width - 20) * 1.06),
      ),
    );
  }

  const scrollTo = (id) => {
    const found = canvas.querySelector(`[data-id="${id}"]`).getBoundingClientRect(),
      view = canvas.getBoundingClientRect();
    canvas.scrollBy({
      left: found.left + Math.min(found.width, view.width) / 2 - view.left - view.width / 2,
      top: found.top - view.top - Math.max(20, (view.height - found.height) / 2),
    });
  };

  draw();
  canvas.scrollLeft = (canvas.scrollWidth - canvas.clientWidth) / 2;
}

/** The groups from below the root down to the node at a place. */
function pathTo(root, place) {
  const path = [];
  for (let at = root; at.children.length;) {
    at = at.children.find((child) => child.begin <= place && place < child.end);
    if (!at) break;
    path.push(at);
  }
  return path;
}

/** A closed group has the size of a box; an open one {width, height, children, edges, entry}, inside coordinates. */
function layout(group, open, nodes) {
  if (!group.children.length || !open.has(group.id)) return { group, ...BOX };
  const inside = new dagre.graphlib.Graph()
    .setGraph({ rankdir: "TB", nodesep: 18, ranksep: 24, marginx: PAD, marginy: PAD })
    .setDefaultEdgeLabel(() => ({}));
  const laid = group.children.map((child) => layout(child, open, nodes));
  laid.forEach((child) => inside.setNode(String(child.group.id), { width: child.width, height: child.height }));
  const edges = edgesWithin(group, nodes);
  if (edges.some(([from]) => from === "in")) inside.setNode("in", { ...ENTRY });
  edges.forEach(([from, to]) => inside.setEdge(String(from), String(to)));
  dagre.layout(inside);
  const head = group.label === "model" ? 0 : HEAD;
  const corner = (name) => {
    const at = inside.node(name);
    return { x: at.x - at.width / 2, y: at.y - at.height / 2 + head };
  };
  return {
    group,
    width: Math.max(inside.graph().width, BOX.width),
    height: inside.graph().height + head,
    children: laid.map((child) => ({ laid: child, ...corner(String(child.group.id)) })),
    edges: inside.edges().map((e) => inside.edge(e).points.map(({ x, y }) => ({ x, y: y + head }))),
    entry: inside.hasNode("in") ? corner("in") : null,
  };
}

function edge(points, left, top) {
  const at = ({ x, y }) => `${(left + x).toFixed(1)} ${(top + y).toFixed(1)}`;
  const middle = (a, b) => ({ x: (a.x + b.x) / 2, y: (a.y + b.y) / 2 });
  const curves = points
    .slice(1, -1)
    .map((point, i) => `Q${at(point)} ${at(i + 3 === points.length ? points[i + 2] : middle(point, points[i + 2]))}`);
  return svg("path", {
    class: "edge",
    d: `M${at(points[0])}${curves.length ? curves.join("") : `L${at(points[points.length - 1])}`}`,
    "marker-end": "url(#tip-of-arrow)",
  });
}

const entry = (left, top) =>
  svg("text", { class: "soft", x: left + ENTRY.width / 2, y: top + 14, "text-anchor": "middle" }, "from outside");

/** A strip at the foot of a closed module: how much of what it saves is kept, how much recomputed. */
function bar(group, left, top) {
  const saved = group.kept_bytes + group.dropped_bytes;
  if (!saved) return null;
  const width = (BOX.width - 2) * (group.kept_bytes / saved),
    y = top + BOX.height - 6;
  return [
    svg("rect", { x: left + 1, y, width, height: 5, fill: "var(--kept)" }),
    svg("rect", { x: left + 1 + width, y, width: BOX.width - 2 - width, height: 5, fill: "var(--recomputed)" }),
  ];
}

function decisionOf(group) {
  if (group.dropped_bytes) return "recomputed";
  if (group.kept_bytes) return "kept";
  return group.in_place ? "in place" : "nothing saved";
}

function sizesOf(group) {
  const parts = [
    [group.kept_bytes, "kept"],
    [group.dropped_bytes, "recomputed"],
  ].filter(([nbytes]) => nbytes);
  return parts.map(([nbytes, what]) => `${bytesText(nbytes)} ${what}`).join(", ") || "nothing saved";
}

const opSizes = (group) =>
  `${group.kept_bytes + group.dropped_bytes ? sizesOf(group) : decisionOf(group)}, ${group.node.op.replace(/^aten\.|\.\w+$/g, "")}`;

function toldOf(group) {
  const { node } = group,
    ops = group.end - group.begin;
  const time = `about ${msText(group.seconds)} ms forward`;
  if (!node)
    return [group.title, `${ops} ops`, sizesOf(group), group.in_place ? `${group.in_place} ops in place` : "", time];
  return [
    node.name,
    node.op,
    `creates ${bytesText(node.nbytes)}`,
    `for the backward: ${sizesOf(group)}`,
    node.in_place ? "done in place" : "",
    node.module,
    node.line,
    time,
  ];
}

/** A text that fits a width; what is too long loses its middle. */
function short(text, width) {
  const most = Math.max(4, Math.floor(width / 7));
  return text.length <= most ? text : `${text.slice(0, Math.ceil(most / 2) - 1)}…${text.slice(-Math.floor(most / 2))}`;
}

const pressed = (act) => ({
  onclick: act,
  onkeydown: (event) => {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      act();
    }
  },
});
