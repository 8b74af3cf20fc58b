// Figures over time, drawn by uPlot: what the dashboard remembers, and what comes while the page is open.

import { loss, number, moment } from "./format.js";

const SPAN_SECONDS = { hour: 3600, day: 86400, all: Infinity };
const HEIGHT = 210;

/** One chart of one figure. */
export class Chart {
  constructor(root, { figure, label, format, color }) {
    Object.assign(this, { root, figure, label, format, color });
    new ResizeObserver(() => this.plot?.setSize({ width: root.clientWidth, height: HEIGHT })).observe(root);
    addEventListener("themechange", () => this.#make());
  }

  /** Show a figure of a history, as far back as `range` says. */
  show(history, range) {
    const { at, columns } = history[range];
    const values = columns[this.figure] ?? at.map(() => null);
    const begin = at.length ? at[at.length - 1] - SPAN_SECONDS[range] : 0;
    const first = Math.max(0, at.findIndex((when) => when >= begin));
    this.data = [at.slice(first), values.slice(first).map((value) => value ?? null)];
    if (this.plot) this.plot.setData(this.data);
    else this.#make();
    this.#describe();
  }

  #make() {
    if (!this.data) return;
    this.plot?.destroy();
    const style = getComputedStyle(document.documentElement);
    const [line, faint, text] = [this.color, "--hairline", "--muted"].map((name) => style.getPropertyValue(name).trim());
    const font = `12px ${getComputedStyle(document.body).fontFamily}`;
    const axis = { stroke: text, font, grid: { stroke: faint, width: 1 }, ticks: { show: false } };
    const options = {
      width: this.root.clientWidth,
      height: HEIGHT,
      padding: [8, 8, 0, 0],
      legend: { show: true, live: true },
      cursor: { y: false, points: { size: 7 } },
      axes: [
        { ...axis, grid: { show: false }, size: 28, space: 80, values: clocks },
        { ...axis, size: 56, gap: 6, values: (_, ticks) => ticks.map((tick) => number(tick)) },
      ],
      scales: { y: { range: (_, low, high) => around(low, high) } },
      series: [
        { label: "Time", value: (_, at) => (at === null ? "–" : moment(at)) },
        {
          label: this.label,
          stroke: line,
          width: 2,
          fill: `${line}14`,
          spanGaps: false,
          points: { show: false },
          value: (_, value) => this.format(value),
        },
      ],
    };
    this.plot = new uPlot(options, this.data, this.root);
  }

  #describe() {
    const known = this.data[1].filter((value) => value !== null);
    const text = known.length
      ? `${this.label}: from ${this.format(known[0])} to ${this.format(known[known.length - 1])}, ` +
        `between ${this.format(Math.min(...known))} and ${this.format(Math.max(...known))}`
      : `${this.label}: nothing is known yet`;
    this.root.setAttribute("aria-label", text);
  }
}

/** Add what was seen just now to each range whose next span has begun. */
export function append(history, at, figures) {
  for (const range of Object.values(history)) {
    const last = range.at[range.at.length - 1] ?? -Infinity;
    if (at < last + range.span_seconds) continue;
    range.at.push(at - (at % range.span_seconds));
    for (const [name, value] of Object.entries(figures)) range.columns[name] ??= range.at.slice(1).map(() => null);
    for (const [name, column] of Object.entries(range.columns)) column.push(figures[name] ?? null);
  }
}

export const formats = { loss, number };

function around(low, high) {
  if (low === null || high === null) return [0, 1];
  const room = (high - low || Math.abs(high) || 1) * 0.08;
  return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
}

function clocks(_, ticks, __, ___, step) {
  return ticks.map((tick) => {
    const when = new Date(tick * 1000);
    if (step >= 86400) return when.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
    const parts = step < 60 ? { second: "2-digit" } : {};
    return when.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", ...parts });
  });
}
