// The pipeline as a picture: trainers, then stage after stage with its peers, and the hops between them.

import { each, el, say, set } from "./dom.js";
import { blockOf, count, duration, number } from "./format.js";

const MOST_NAMED = 16; // Peers of a stage that are shown with their names; more of them are dots.
const MOST_LINES = 160; // Hops between two stages that are drawn one by one; more of them are one band.
const SVG = "http://www.w3.org/2000/svg";

/** Draws runs into `root`; `open(key)` shows a peer's figures. */
export class Pipeline {
  constructor(root, open) {
    this.root = root;
    this.open = open;
    this.svg = document.createElementNS(SVG, "svg");
    set(this.svg, { class: "links", "aria-hidden": "true" });
    this.columns = el("div", { class: "columns" });
    root.append(this.svg, this.columns);
    this.hovered = null;
    root.addEventListener("pointerover", (event) => this.#look(event.target));
    root.addEventListener("pointerleave", () => this.#look(null));
    root.addEventListener("focusin", (event) => this.#look(event.target));
    new ResizeObserver(() => this.#drawLinks()).observe(this.columns);
  }

  /** Show a run as it is now. */
  show(run) {
    this.run = run;
    const blocks = run.stages.map((stage) => ({ stage, peers: [] }));
    const byStage = new Map(blocks.map((block) => [block.stage, block]));
    for (const [key, peer] of Object.entries(run.peers)) byStage.get(peer.stage)?.peers.push({ key, ...peer });
    for (const block of blocks) block.peers.sort((a, b) => (a.name < b.name ? -1 : a.name > b.name ? 1 : 0));
    this.fastest = Math.max(1e-9, ...Object.values(run.peers).map((peer) => peer.samples_per_second));
    const stages = new Map(blocks.map(({ stage }) => [blockOf(stage)[0], []]));
    for (const block of blocks) stages.get(blockOf(block.stage)[0]).push(block);
    this.next = new Set(run.paths.flatMap((path) => path.slice(1).map((stage, index) => `${path[index]} ${stage}`)));
    each(this.columns, [[{ stage: -1, peers: [] }], ...stages.values()], ([{ stage }]) => stage, makeColumn, (column, variants) =>
      each(column, variants, ({ stage }) => stage, makeBlock, (element, block) =>
        block.stage < 0 ? this.#showTrainers(element) : this.#showStage(element, block),
      ),
    );
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.#drawLinks());
  }

  #showTrainers({ parts }) {
    const { trainers } = this.run;
    say(parts.heading, "Trainers");
    say(parts.note, trainers.length ? count(trainers.length, "trainer") : "nobody trains now");
    each(parts.list, trainers, (row) => trainers.indexOf(row), makeTrainer, (item, row) => {
      say(item.parts.name, row.name);
      say(item.parts.rate, `step ${number(row.step)}`);
      item.parts.chip.row = trainers.indexOf(row);
    });
  }

  #showStage(element, { stage, peers }) {
    const { parts } = element;
    const serving = peers.filter((peer) => peer.state === "serving");
    const rate = serving.reduce((sum, peer) => sum + peer.samples_per_second, 0);
    const isEmpty = this.run.empty_stages.includes(stage);
    say(parts.heading, `Stage ${stage}`);
    say(parts.note, isEmpty ? "no peer" : `${count(serving.length, "peer")}, ${number(rate)} samples/s`);
    set(element, { "data-empty": isEmpty || null });
    const isDots = peers.length > MOST_NAMED;
    set(parts.list, { class: isDots ? "chips dots" : "chips" });
    const done = serving.reduce((sum, peer) => sum + peer.samples, 0) / this.run.round_samples[stage];
    parts.progress.style.setProperty("--share", Math.min(1, done || 0).toFixed(3));
    set(parts.progress, { title: `${number(100 * Math.min(1, done || 0))} % of this round's samples` });
    each(parts.list, peers, (peer) => `${peer.key} ${isDots}`, (peer) => this.#makePeer(peer, isDots), (item, peer) =>
      this.#showPeer(item, peer),
    );
  }

  #makePeer({ key }, isDot) {
    const button = el("button", { type: "button", class: "chip", on: { click: () => this.open(key) } },
      el("span", { class: "dot" }));
    button.key = key;
    const item = el("li", {}, button);
    item.parts = { button };
    if (!isDot) {
      Object.assign(item.parts, { name: el("span", { class: "name" }), rate: el("span", { class: "rate" }) });
      button.append(item.parts.name, item.parts.rate);
    }
    return item;
  }

  #showPeer({ parts }, peer) {
    const way = wayOf(peer);
    const rate = peer.state === "serving" ? number(peer.samples_per_second) : peer.cells.state ?? peer.state;
    if (parts.name) {
      say(parts.name, peer.name);
      say(parts.rate, way ? `${way} ${rate}` : rate);
      parts.button.style.setProperty("--share", (peer.samples_per_second / this.fastest).toFixed(3));
    }
    const figures = `${number(peer.samples_per_second)} samples/s, round ${number(peer.round)}${uptime(this.run, peer)}`;
    const more = [way, peer.waiting_for ? `waits for ${peer.waiting_for}` : ""].filter(Boolean).map((text) => `, ${text}`);
    const title = `${peer.name}: ${peer.cells.state ?? peer.state}, ${figures}${more.join("")}`;
    set(parts.button, { "data-state": peer.state, "data-way": way, title, "aria-label": title });
  }

  #look(target) {
    const key = target?.closest?.(".chip")?.key ?? null;
    if (key === this.hovered) return;
    this.hovered = key;
    for (const path of this.svg.children) set(path, { "data-near": path.ends?.includes(key) || null });
    set(this.svg, { "data-looked": key });
  }

  /** Hops are drawn between where the browser has put the peers. */
  #drawLinks() {
    if (!this.run) return;
    const origin = this.root.getBoundingClientRect();
    set(this.svg, { width: this.root.scrollWidth, height: this.root.scrollHeight });
    const columns = [...this.columns.children];
    const lines = [];
    for (let index = 0; index + 1 < columns.length; index += 1) {
      const from = chipsOf(columns[index]);
      const to = chipsOf(columns[index + 1]);
      if (!from.length || !to.length) continue;
      if (from.length * to.length > MOST_LINES) {
        lines.push({ from: columns[index], to: columns[index + 1], kind: "band", ends: [] });
        continue;
      }
      for (const a of from) for (const b of to) if (this.#leads(a, b)) lines.push({ from: a, to: b, ...this.#hop(a, b) });
    }
    const boxes = new Map();
    const boxOf = (element) => {
      if (!boxes.has(element)) boxes.set(element, element.getBoundingClientRect());
      return boxes.get(element);
    };
    const drawn = lines.map((line) => ({ ...line, d: curve(boxOf(line.from), boxOf(line.to), origin) }));
    while (this.svg.children.length > drawn.length) this.svg.lastChild.remove();
    while (this.svg.children.length < drawn.length) this.svg.append(document.createElementNS(SVG, "path"));
    drawn.forEach((line, index) => {
      const path = this.svg.children[index];
      path.ends = line.ends;
      set(path, { d: line.d, class: line.kind, "data-near": line.ends.includes(this.hovered) || null });
    });
    set(this.svg, { "data-live": this.run.is_training || null });
  }

  /** Whether a path leads from one peer's block to another's. */
  #leads(a, b) {
    const [from, to] = [this.run.peers[a.key]?.stage, this.run.peers[b.key].stage];
    return !this.next.size || from === undefined || this.next.has(`${from} ${to}`);
  }

  /** What is known of the way from one peer, or trainer, to another: measured, given up for a while, or possible. */
  #hop(a, b) {
    const to = this.run.peers[b.key];
    const from = this.run.peers[a.key] ?? this.run.trainers[a.row];
    const names = (list) => Array.isArray(list) && list.some(({ peer_id }) => peer_id === to.peer_id);
    const kind = names(from?.bans) ? "hop banned" : names(from?.links) ? "hop used" : "hop";
    return { kind, ends: [a.key, b.key].filter(Boolean) };
  }
}

/** How others reach a peer, unless they just do: punched, relayed, or by a tunnel that nobody uses now. */
function wayOf(peer) {
  return peer.reached && peer.reached !== "direct" ? peer.reached : null;
}

function uptime(run, peer) {
  return peer.started_at ? `, up ${duration(Math.max(0, run.at - peer.started_at))}` : "";
}

function makeColumn() {
  return el("div", { class: "column" });
}

function makeBlock() {
  const parts = {
    heading: el("h3"),
    note: el("p", { class: "note" }),
    progress: el("div", { class: "progress" }),
    list: el("ul", { class: "chips" }),
  };
  const element = el("div", { class: "block" }, parts.heading, parts.note, parts.progress, parts.list);
  element.parts = parts;
  return element;
}

function makeTrainer() {
  const [name, rate] = [el("span", { class: "name" }), el("span", { class: "rate" })];
  const chip = el("span", { class: "chip trainer" }, el("span", { class: "dot" }), name, rate);
  const item = el("li", {}, chip);
  item.parts = { chip, name, rate };
  return item;
}

function chipsOf(column) {
  return [...column.querySelectorAll(".chip")].filter((chip) => chip.dataset.state === "serving" || !chip.key);
}

/** From the side of one box to that of another: to the right, or down where they are below each other. */
function curve(a, b, origin) {
  const isAcross = b.left >= a.right - 1;
  const [x1, y1] = isAcross ? [a.right, a.top + a.height / 2] : [a.left + a.width / 2, a.bottom];
  const [x2, y2] = isAcross ? [b.left, b.top + b.height / 2] : [b.left + b.width / 2, b.top];
  const [dx, dy] = isAcross ? [(x2 - x1) / 2, 0] : [0, (y2 - y1) / 2];
  const points = [[x1, y1], [x1 + dx, y1 + dy], [x2 - dx, y2 - dy], [x2, y2]];
  const [start, ...rest] = points.map(([x, y]) => `${(x - origin.left).toFixed(1)} ${(y - origin.top).toFixed(1)}`);
  return `M${start}C${rest.join(" ")}`;
}
