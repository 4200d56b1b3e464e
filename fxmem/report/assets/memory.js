"use strict";
// Memory over the step: as the model is, under the plan, phases shaded, the budget a line.

function showMemory(section, data, nodeNamed) {
  const { x, before_bytes, after_bytes, recompute, label, labels, phases } = data.timeline;
  const again = after_bytes.map((nbytes, i) => (recompute[i] ? nbytes : null));
  const top = Math.max(data.eager_peak_bytes, data.planned_peak_bytes);
  const budget = data.budget_bytes != null && data.budget_bytes <= 1.5 * top ? data.budget_bytes : null;
  const numAgain = again.filter((nbytes) => nbytes != null).length;
  const kept = largestOf(before_bytes);
  const asItIs = kept === data.eager_peak_bytes; // ops in place and what the model's code holds make a difference
  const before = asItIs ? "as it is" : "recomputing nothing";
  showKey(section, [
    [
      "",
      "var(--eager)",
      `${before}: peak ${bytesText(kept)}${asItIs ? "" : ` (the model as it is: ${bytesText(data.eager_peak_bytes)})`}`,
    ],
    ["", "var(--plan)", `under the plan: peak ${bytesText(data.planned_peak_bytes)}`],
    ...(numAgain ? [["dot", "var(--recompute)", "computing something again"]] : []),
    ...(data.budget_bytes != null ? [["dash", "none", `budget ${bytesText(data.budget_bytes)}`]] : []),
  ]);

  const readout = section.querySelector(".readout");
  const tell = (i) => {
    if (i == null) {
      readout.textContent = `The peak under the plan is at ${data.peak_at}.`;
      return;
    }
    const phase = (phases.find(([, begin, end]) => x[i] >= begin - 0.5 && x[i] < end - 0.5) || [""])[0];
    const node = nodeNamed.get(labels[label[i]]);
    const place = node ? [node.module, node.line].filter(Boolean).join(", ") : "";
    const what = recompute[i] ? "computing again" : phase;
    const was = before_bytes[i] == null ? "" : `${before} ${bytesText(before_bytes[i])}, `;
    const op = labels[label[i]] && labels[label[i]] !== phase ? ` ${labels[label[i]]}` : "";
    readout.textContent = `${what}${op}${place ? ` (${place})` : ""}: ${was}under the plan ${bytesText(after_bytes[i])}`;
  };

  const options = {
    height: innerWidth > 600 ? 340 : 260,
    scales: { x: { time: false }, y: { range: [0, 1.1 * Math.max(top, budget || 0)] } },
    series: [
      {},
      { stroke: () => styleOf("eager"), width: 1.6, spanGaps: true, points: { show: false } },
      { stroke: () => styleOf("plan"), width: 1.8, points: { show: false } },
      {
        stroke: () => styleOf("recompute"),
        paths: () => null,
        points: { show: true, size: numAgain > 200 ? 3 : 6, fill: () => styleOf("recompute") },
      },
    ],
    hooks: {
      drawClear: [(plot) => shadePhases(plot, phases)],
      draw: [(plot) => budget != null && dashedLine(plot, "y", budget)],
      setCursor: [(plot) => tell(plot.cursor.idx)],
    },
    axes: [{ show: false }, bytesAxis()],
  };
  tell(null);
  return plotIn(section, options, [x, before_bytes, after_bytes, again]);
}

/** An uPlot in the section's `.plot`, as wide as it is, drawn again when width or colours change. */
function plotIn(section, options, columns) {
  const element = section.querySelector(".plot");
  const plot = new uPlot(
    { legend: { show: false }, cursor: { y: false }, width: element.clientWidth, ...options },
    columns,
    element,
  );
  new ResizeObserver(() => {
    if (element.clientWidth && element.clientWidth !== plot.width)
      plot.setSize({ width: element.clientWidth, height: plot.height });
  }).observe(element);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plot.redraw());
  return plot;
}

const axisColours = () => ({
  stroke: () => styleOf("soft"),
  grid: { stroke: () => styleOf("line"), width: 1 },
  ticks: { stroke: () => styleOf("line"), width: 1 },
});

const bytesAxis = () => ({ ...axisColours(), size: 72, values: bytesTexts });

function shadePhases(plot, phases) {
  const { ctx, bbox } = plot;
  const ratio = devicePixelRatio;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.font = `${12 * ratio}px system-ui, sans-serif`;
  ctx.textBaseline = "top";
  for (const [name, begin, end] of phases) {
    const left = plot.valToPos(begin - 0.5, "x", true);
    const right = plot.valToPos(end - 0.5, "x", true);
    ctx.fillStyle = styleOf(name);
    ctx.fillRect(left, bbox.top, right - left, bbox.height);
    ctx.fillStyle = styleOf("soft");
    const from = Math.max(left, bbox.left);
    if (Math.min(right, bbox.left + bbox.width) - from > ctx.measureText(name).width + 10 * ratio)
      ctx.fillText(name, from + 5 * ratio, bbox.top + 4 * ratio);
  }
  ctx.restore();
}

/** A dashed line at a value of one axis. */
function dashedLine(plot, axis, value) {
  const { ctx, bbox } = plot;
  const at = plot.valToPos(value, axis, true);
  ctx.save();
  ctx.strokeStyle = styleOf("budget");
  ctx.lineWidth = 1.5 * devicePixelRatio;
  ctx.setLineDash([6 * devicePixelRatio, 4 * devicePixelRatio]);
  ctx.beginPath();
  if (axis === "y") {
    ctx.moveTo(bbox.left, at);
    ctx.lineTo(bbox.left + bbox.width, at);
  } else {
    ctx.moveTo(at, bbox.top);
    ctx.lineTo(at, bbox.top + bbox.height);
  }
  ctx.stroke();
  ctx.restore();
}
