// Peers and trainers as tables: the columns that swarm-status has, with its headings and its texts, and what a peer has
// contributed.

import { each, el, say, set } from "./dom.js";
import { bytes, compareBlocks, duration, number } from "./format.js";

const MOST_ROWS = 100; // Until somebody asks for all.
const CONTRIBUTIONS = [
  { name: "contributed", heading: "contributed", help: "Samples that count through it at its stages, since the run began." },
  { name: "sent", heading: "sent", help: "Bytes that it sent for averages, since the run began." },
  { name: "served", heading: "served", help: "For how long it was seen to serve." },
];

/** A table of peers that can be sorted and searched; `open(key)` shows a peer's figures. */
export class PeerTable {
  constructor(table, find, open) {
    this.table = table;
    this.find = find;
    this.open = open;
    this.order = { name: "stage", isDown: false };
    this.head = el("tr");
    this.body = el("tbody");
    table.append(el("caption", { class: "unseen" }, "All peers of the run"), el("thead", {}, this.head), this.body);
    this.more = el("button", { type: "button", class: "quiet more", on: { click: () => this.#showAll() } });
    table.parentElement.after(this.more);
    find.addEventListener("input", () => this.#fill());
  }

  /** Show a run as it is now. */
  show(run) {
    this.run = run;
    const figures = run.figures.peer;
    this.columns = [
      { name: "stage", heading: "stage", help: "The stage that it serves.", text: ({ stage }) => String(stage), by: ({ stage }) => stage },
      ...run.columns.peer.map((name) => ({
        name,
        heading: figures[name].heading,
        help: figures[name].help,
        isText: figures[name].is_text,
        text: ({ cells }) => cells[name] ?? "",
        by: (row) => row[name],
      })),
      ...CONTRIBUTIONS.map((column) => ({ ...column, ...this.#contribution(column.name) })),
    ];
    each(this.head, this.columns, ({ name }) => name, (column) => this.#makeHeading(column), (cell, column) => {
      const isSorted = this.order.name === column.name;
      set(cell, { "aria-sort": isSorted ? (this.order.isDown ? "descending" : "ascending") : null });
    });
    this.#fill();
  }

  #contribution(name) {
    const of = (row) => this.run.contributions[row.peer_id] ?? {};
    const samples = (row) => of(row).given?.samples ?? 0;
    const sent = (row) => of(row).given?.num_bytes ?? 0;
    return {
      contributed: { text: (row) => number(samples(row)), by: samples },
      sent: { text: (row) => bytes(sent(row)), by: sent },
      served: { text: (row) => duration(of(row).serving_seconds ?? 0), by: (row) => of(row).serving_seconds ?? 0 },
    }[name];
  }

  #makeHeading({ name, heading, help, isText }) {
    const sort = () => {
      this.order = { name, isDown: this.order.name === name ? !this.order.isDown : !isText && name !== "stage" };
      this.show(this.run);
    };
    return el("th", { scope: "col", class: isText ? "text" : null },
      el("button", { type: "button", title: help, on: { click: sort } }, heading));
  }

  #fill() {
    if (!this.run) return;
    const wanted = this.find.value.trim().toLowerCase();
    const rows = Object.entries(this.run.peers).map(([key, row]) => ({ key, ...row }));
    const found = rows.filter(({ name, peer_id, state }) => `${name} ${peer_id} ${state}`.toLowerCase().includes(wanted));
    const { by } = this.columns.find(({ name }) => name === this.order.name) ?? this.columns[0];
    const sign = this.order.isDown ? -1 : 1;
    const order = this.order.name === "stage" ? compareBlocks : compare;
    found.sort((a, b) => sign * order(by(a), by(b)) || compareBlocks(a.stage, b.stage) || compare(a.name, b.name));
    const num = this.isWhole ? found.length : MOST_ROWS;
    say(this.more, `Show all ${number(found.length)} peers`);
    set(this.more, { hidden: found.length > num ? null : "" });
    each(this.body, found.slice(0, num), ({ key }) => key, (row) => this.#makeRow(row), (element, row) => this.#showRow(element, row));
  }

  #showAll() {
    this.isWhole = true;
    this.#fill();
  }

  #makeRow({ key }) {
    const button = el("button", { type: "button", class: "link", on: { click: () => this.open(key) } });
    const row = el("tr");
    row.button = button;
    return row;
  }

  #showRow(element, row) {
    set(element, { "data-state": row.state });
    each(element, this.columns, ({ name }) => name, (column) => makeCell(column, element.button), (cell, column) =>
      say(column.name === "name" ? element.button : cell, column.text(row)),
    );
  }
}

/** Show a run's trainers in a table. */
export function showTrainers(table, run) {
  if (!table.parts) {
    table.parts = { head: el("tr"), body: el("tbody") };
    const caption = el("caption", { class: "unseen" }, "All trainers of the run");
    table.append(caption, el("thead", {}, table.parts.head), table.parts.body);
  }
  const figures = run.figures.trainer;
  const columns = run.columns.trainer.map((name) => ({ name, ...figures[name], isText: figures[name].is_text }));
  each(table.parts.head, columns, ({ name }) => name, (column) =>
    el("th", { scope: "col", class: column.isText ? "text" : null, title: column.help }, column.heading), () => {});
  const rows = run.trainers.length ? run.trainers : [{ name: "", cells: { name: "nobody trains now" } }];
  each(table.parts.body, rows, (row) => rows.indexOf(row), () => el("tr"), (element, row) =>
    each(element, columns, ({ name }) => name, (column) => makeCell(column), (cell, { name }) => say(cell, row.cells[name] ?? "")),
  );
}

function makeCell({ name, isText }, button) {
  if (name !== "name") return el("td", { class: [isText ? "text" : "", name === "state" ? "state-cell" : ""].join(" ").trim() || null });
  return button ? el("th", { scope: "row", class: "text" }, button) : el("th", { scope: "row", class: "text" });
}

function compare(a, b) {
  return a < b ? -1 : a > b ? 1 : 0;
}
