// Several runs side by side: a row for each, of which one is shown below.

import { each, el, say, set } from "./dom.js";
import { loss, number } from "./format.js";

const HEADINGS = ["run", "state", "loss", "tokens/s", "step", "peers", "samples/s"];

/** What a run does, and whether that is good, idle or bad; before the first look nothing is known. */
export function stateOf(run) {
  if (!run?.peers) return ["waiting", run?.fault ? "Cannot be seen" : "Looking at the run"];
  if (run.fault) return ["bad", "The run cannot be seen"];
  if (!Object.keys(run.peers).length) return ["bad", "No peer is there"];
  if (run.is_training) return ["live", "Training"];
  return ["idle", run.trainers.length ? "Waiting for a step" : "Nobody trains"];
}

/** Show all runs in a table, in a section that is hidden where there is one alone; `choose(id)` shows one below. */
export function showRuns(section, table, runs, chosen, choose) {
  const rows = Object.entries(runs);
  const isShared = (name) => rows.filter(([, run]) => run.name === name).length > 1;
  set(section, { hidden: rows.length > 1 ? null : "" });
  if (!table.body) {
    table.body = el("tbody");
    const headings = HEADINGS.map((text, index) => el("th", { scope: "col", class: index < 2 ? "text" : null }, text));
    table.append(el("caption", { class: "unseen" }, "All runs"), el("thead", {}, el("tr", {}, ...headings)), table.body);
  }
  each(table.body, rows, ([id]) => id, ([id]) => makeRow(id, choose), (row, [id, run]) => {
    const now = run.figures_now ?? {};
    const [kind, state] = stateOf(run);
    set(row.button, { "aria-pressed": id === chosen ? "true" : "false", title: id });
    say(row.button, isShared(run.name) ? id : run.name);
    set(row.texts[0], { "data-kind": kind });
    [state, loss(now.loss), number(now.tokens_per_second), number(now.step), number(now.peers), number(now.samples_per_second)]
      .forEach((text, index) => say(row.texts[index], text));
  });
}

function makeRow(id, choose) {
  const button = el("button", { type: "button", class: "link", on: { click: () => choose(id) } });
  const cells = HEADINGS.slice(1).map((_, index) => el("td", { class: index ? null : "text run-state" }));
  const row = el("tr", {}, el("th", { scope: "row", class: "text" }, button), ...cells);
  Object.assign(row, { button, texts: cells });
  return row;
}
