"use strict";
// What every budget costs, and advice.

function showFrontier(section, data, points) {
  const rising = [...points].reverse();
  const x = rising.map((point) => point.peak_bytes),
    y = rising.map((point) => 100 * point.overhead_ratio);
  showKey(section, [
    ["", "var(--plan)", "time more for each peak (estimate)"],
    [
      "dot",
      "var(--recompute)",
      `this plan: ${bytesText(data.planned_peak_bytes)}, ${percentText(data.overhead_ratio)} more time`,
    ],
    ...(data.budget_bytes != null ? [["dash", "none", `budget ${bytesText(data.budget_bytes)}`]] : []),
  ]);
  const readout = section.querySelector(".readout");
  const tell = (i) => {
    const text = (point) =>
      `a peak of ${bytesText(point.peak_bytes)} costs ${percentText(point.overhead_ratio)} more time`;
    readout.textContent =
      i == null
        ? `The least peak found is ${bytesText(x[0])}, at ${percentText(rising[0].overhead_ratio)} more time.`
        : `${text(rising[i])}.`;
  };
  tell(null);
  return plotIn(
    section,
    {
      height: 260,
      scales: {
        x: {
          time: false,
          range: [
            x[0] - 0.04 * (x[x.length - 1] - x[0] || x[0]),
            x[x.length - 1] + 0.04 * (x[x.length - 1] - x[0] || x[0]),
          ],
        },
        y: { range: [0, 1.15 * (largestOf(y) || 1)] },
      },
      series: [
        {},
        {
          stroke: () => styleOf("plan"),
          width: 1.8,
          paths: uPlot.paths.stepped({ align: 1 }),
          points: { show: points.length < 40, size: 6 },
        },
      ],
      axes: [
        { ...axisColours(), values: bytesTexts, space: 90, label: "peak of the training step", labelSize: 24 },
        { ...axisColours(), size: 60, values: (_, splits) => splits.map((v) => `${Number(v.toPrecision(3))} %`) },
      ],
      hooks: {
        draw: [
          (plot) =>
            data.budget_bytes != null &&
            data.budget_bytes <= plot.scales.x.max &&
            data.budget_bytes >= plot.scales.x.min &&
            dashedLine(plot, "x", data.budget_bytes),
          (plot) => planPoint(plot, data),
        ],
        setCursor: [(plot) => tell(plot.cursor.idx)],
      },
    },
    [x, y],
  );
}

function planPoint(plot, data) {
  const { ctx } = plot;
  ctx.save();
  ctx.fillStyle = styleOf("recompute");
  ctx.beginPath();
  ctx.arc(
    plot.valToPos(data.planned_peak_bytes, "x", true),
    plot.valToPos(100 * data.overhead_ratio, "y", true),
    5 * devicePixelRatio,
    0,
    2 * Math.PI,
  );
  ctx.fill();
  ctx.restore();
}

const ADVICE_TABLE = [
  { name: "label", label: "habit" },
  { name: "peak_bytes", label: "peak then", kind: "bytes" },
  { name: "saved_bytes", label: "saves", kind: "bytes" },
  { name: "disruption", label: "changes" },
  { name: "fits", label: "fits" },
  { name: "what", label: "what to write, or why not" },
];

function showAdvice(section, advice) {
  const rows = records(advice).map((row) => ({
    ...row,
    fits: { true: "yes", false: "no" }[row.fits] || "–",
    what: row.saved_bytes ? [row.line, row.note].filter(Boolean).join("; ") : row.note,
  }));
  section.querySelector(".verdict").textContent = advice.verdict;
  sortable(section.querySelector(".table"), ADVICE_TABLE, rows, () => {});
}
