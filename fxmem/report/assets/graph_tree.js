"use strict";
// The graph as a tree of modules. Each group is a run of nodes that follow one another, so data flows forward between groups.

/** The outermost group: {id, label, title, begin, end, node, children, kept_bytes, dropped_bytes, in_place, seconds}, `node` null
    but of single ops. */
function graphTree(nodes) {
  const seen = new Set();
  let ids = 0;
  const leaf = (i) => ({
    id: ids++,
    label: nodes[i].name,
    title: nodes[i].name,
    begin: i,
    end: i + 1,
    node: nodes[i],
    children: [],
    ...sums(nodes, i, i + 1),
  });

  const group = (label, title, begin, end, children) => ({
    id: ids++,
    label,
    title,
    begin,
    end,
    node: null,
    ...sums(nodes, begin, end),
    children: inRuns(children, (run) => {
      const name = runName(run.map((child) => child.label));
      return group(name, `${title} ${name}`, run[0].begin, run[run.length - 1].end, run);
    }),
  });

  function childrenOf(begin, end, depth) {
    const children = [];
    for (let i = begin, j; i < end; i = j) {
      const parts = nodes[i].parts;
      j = i + 1;
      if (parts.length <= depth) {
        children.push(leaf(i));
        continue;
      }
      while (j < end && nodes[j].parts.length > depth && nodes[j].parts[depth] === parts[depth]) j++;
      const inside = childrenOf(i, j, depth + 1);
      const only = inside.length === 1 && !inside[0].node ? inside[0] : null; // a module with one module in it is one box
      if (only) {
        children.push({ ...only, label: `${parts[depth]}.${only.label}` });
        continue;
      }
      const path = parts.slice(0, depth + 1).join(".");
      children.push(group(seen.has(path) ? `${parts[depth]}, again` : parts[depth], path, i, j, inside));
      seen.add(path);
    }
    return children;
  }
  const root = group("model", "the model", 0, nodes.length, childrenOf(0, nodes.length, 0));
  while (root.children.length === 1 && root.children[0].children.length) root.children = root.children[0].children;
  return root;
}

function sums(nodes, begin, end) {
  let kept_bytes = 0,
    dropped_bytes = 0,
    in_place = 0,
    seconds = 0;
  for (let i = begin; i < end; i++) {
    kept_bytes += nodes[i].kept_bytes;
    dropped_bytes += nodes[i].dropped_bytes;
    in_place += nodes[i].in_place;
    seconds += nodes[i].seconds;
  }
  return { kept_bytes, dropped_bytes, in_place, seconds };
}

/** Edges between the children of a group, once each, as pairs of ids; "in" stands for all that comes from before it. */
function edgesWithin(group, nodes) {
  const childAt = new Int32Array(group.end - group.begin);
  group.children.forEach((child, c) => childAt.fill(c, child.begin - group.begin, child.end - group.begin));
  const found = new Map();
  for (let i = group.begin; i < group.end; i++) {
    const to = group.children[childAt[i - group.begin]].id;
    for (const read of nodes[i].reads) {
      const from = read < group.begin ? "in" : group.children[childAt[read - group.begin]].id;
      if (from !== to) found.set(`${from} ${to}`, [from, to]);
    }
  }
  return [...found.values()];
}
