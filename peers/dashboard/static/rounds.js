// The newest rounds, and who took part: a row for each peer, a cell for each round.

import { each, el, say, set } from "./dom.js";
import { compareBlocks, moment } from "./format.js";

const MOST_SHOWN = 48;

/** Show a run's rounds in `root`. */
export function showRounds(root, run) {
  const numbers = Object.keys(run.rounds).map(Number).sort((a, b) => a - b).slice(-MOST_SHOWN);
  if (!root.parts) {
    root.parts = { table: el("table"), none: el("p", { class: "note" }, "No round has ended while this page watched.") };
    root.parts.body = el("tbody");
    root.parts.foot = el("td", { class: "cells ends" });
    const caption = el("caption", { class: "unseen" }, "Peers, and the rounds in whose averages they took part");
    root.parts.table.append(caption, root.parts.body,
      el("tfoot", {}, el("tr", {}, el("td", { colspan: 2 }), root.parts.foot)));
    root.append(root.parts.none, root.parts.table);
  }
  const { parts } = root;
  set(parts.none, { hidden: numbers.length ? "" : null });
  set(parts.table, { hidden: numbers.length ? null : "" });
  if (!numbers.length) return;
  const isAtEnd = root.scrollLeft + root.clientWidth >= root.scrollWidth - 8 || !parts.body.firstChild;
  each(parts.body, rowsOf(run, numbers), ({ key }) => key, makeRow, (row, item) => fill(row, item, run, numbers));
  say(parts.foot, "");
  parts.foot.append(el("span", {}, `round ${numbers[0]}`), el("span", {}, `${numbers[numbers.length - 1]}`));
  // On a small screen the newest rounds are seen, unless somebody looks at older ones.
  if (isAtEnd) root.scrollLeft = root.scrollWidth;
}

/** The peers that took part in some round, or should have, by stage and name. */
function rowsOf(run, numbers) {
  const rows = new Map();
  for (const number of numbers) {
    for (const [stage, part] of Object.entries(run.rounds[number].stages)) {
      for (const id of [...part.took_part, ...part.missing]) {
        const key = `${stage}/${id}`;
        if (!rows.has(key)) rows.set(key, { key, id, stage, name: nameOf(run, id) });
      }
    }
  }
  return [...rows.values()].sort((a, b) => compareBlocks(a.stage, b.stage) || (a.name < b.name ? -1 : 1));
}

function nameOf(run, id) {
  return run.contributions[id]?.name ?? id.slice(0, 8);
}

function makeRow({ stage }) {
  const parts = { name: el("th", { scope: "row" }), share: el("td", { class: "share" }), cells: el("td", { class: "cells" }) };
  const row = el("tr", { "data-stage": stage }, parts.name, parts.share, parts.cells);
  row.parts = parts;
  return row;
}

function fill({ parts }, { id, stage, name }, run, numbers) {
  const marks = numbers.map((number) => {
    const part = run.rounds[number].stages[stage];
    if (part?.took_part.includes(id)) return "in";
    return part?.missing.includes(id) ? "out" : "away";
  });
  const taken = marks.filter((mark) => mark === "in").length;
  const due = marks.filter((mark) => mark !== "away").length;
  parts.name.replaceChildren(el("span", { class: "stage" }, stage), name);
  say(parts.share, `${taken} of ${due}`);
  each(parts.cells, numbers.map((number, index) => ({ number, mark: marks[index] })), ({ number }) => number,
    () => el("i"), (cell, { number, mark }) => set(cell, {
      class: `cell ${mark}`,
      title: mark === "away" ? null : `round ${number}, ${moment(run.rounds[number].at)}: ${mark === "in" ? "took part" : "did not take part"}`,
    }));
}
