"use strict";
// The graph as a tree of modules. Each group is a run of nodes that follow one another, so data flows forward between groups.

const MOST_CHILDREN = 48, RUN = 24;

/** The outermost group: {id, label, path, begin, end, depth, children, kept_bytes, dropped_bytes, in_place}. */
function graphTree(nodes) {
  let ids = 0;
  const leaf = (i) => ({ id: ids++, label: nodes[i].name, begin: i, end: i + 1, node: nodes[i], children: [], ...sums(nodes, i, i + 1) });

  function group(label, path, begin, end, children) {
    return { id: ids++, label, path, begin, end, node: null, children: inRuns(path, children), ...sums(nodes, begin, end) };
  }

  /** Children in runs of a few, as often as there are too many of them. */
  function inRuns(path, children) {
    let found = children;
    while (found.length > MOST_CHILDREN) {
      const runs = [];
      for (let i = 0; i < found.length; i += RUN) runs.push(found.slice(i, i + RUN));
      found = runs.map((run) => run.length === 1 ? run[0]
        : { id: ids++, label: `${nameOf(run[0])} … ${nameOf(run[run.length - 1])}`, path, begin: run[0].begin, end: run[run.length - 1].end, node: null, children: run, ...sums(nodes, run[0].begin, run[run.length - 1].end) });
    }
    return found;
  }

  function childrenOf(begin, end, depth) {
    const children = [];
    for (let i = begin, j; i < end; i = j) {
      const parts = nodes[i].parts;
      j = i + 1;
      if (parts.length <= depth) { children.push(leaf(i)); continue; }
      while (j < end && nodes[j].parts.length > depth && nodes[j].parts[depth] === parts[depth]) j++;
      const inside = childrenOf(i, j, depth + 1);
      const only = inside.length === 1 && !inside[0].node ? inside[0] : null; // a module with one module in it is one box
      if (only) children.push({ ...only, label: `${parts[depth]}.${only.label}` });
      else children.push(group(parts[depth], parts.slice(0, depth + 1).join("."), i, j, inside));
    }
    return children;
  }
  const root = group("model", "", 0, nodes.length, childrenOf(0, nodes.length, 0));
  while (root.children.length === 1 && root.children[0].children.length) root.children = root.children[0].children;
  return root;
}

const nameOf = (group) => group.label.split(" … ")[0];

function sums(nodes, begin, end) {
  let kept_bytes = 0, dropped_bytes = 0, in_place = 0, seconds = 0;
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
