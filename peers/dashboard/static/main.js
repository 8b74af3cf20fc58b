// swarm's dashboard: hears what the swarm does, and shows it. It asks for nothing but its own address.

import { append, Chart, formats } from "./charts.js";
import { el, each, say, set } from "./dom.js";
import { follow } from "./live.js";
import { showDetails, showEvents, showJoin, showNotes, showNow, showState } from "./panels.js";
import { Pipeline } from "./pipeline.js";
import { showRounds } from "./rounds.js";
import { showRuns } from "./runs.js";
import { PeerTable, showTrainers } from "./tables.js";

const STILL_SECONDS = 90; // A run whose step has not changed for so long does not train.
const byId = (id) => document.getElementById(id);
const view = { state: {}, history: {}, heardAt: 0, isConnected: false, why: "Connecting", chosen: null, opened: null };
const lookedAt = new Map(); // By run, the time of the look that was shown last.
const steps = new Map(); // By run, its last step and when it was seen to change.

const pipeline = new Pipeline(byId("pipeline"), open);
const peerTable = new PeerTable(byId("peers"), byId("find"), open);
const charts = [
  new Chart(byId("loss"), { figure: "loss", label: "Loss", format: formats.loss, color: "--accent" }),
  new Chart(byId("throughput"), { figure: "tokens_per_second", label: "Tokens/s", format: formats.number, color: "--second" }),
];
const dialog = byId("details");

byId("range").addEventListener("change", drawCharts);
dialog.addEventListener("close", () => (view.opened = null));
dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
setInterval(drawState, 1000);
follow({ heard, lost, refused });

function heard(state, history) {
  Object.assign(view, { state, heardAt: Date.now(), isConnected: true });
  if (history) view.history = history;
  for (const [id, run] of Object.entries(state.runs)) {
    if (!run.peers) continue;
    noteStep(id, run);
    if (!history && run.at !== lookedAt.get(id) && view.history[id]) append(view.history[id], run.at, run.figures_now);
    lookedAt.set(id, run.at);
  }
  draw();
}

/** The run that is shown below the others. */
function chosen() {
  const runs = view.state.runs ?? {};
  const id = view.chosen in runs ? view.chosen : Object.keys(runs)[0];
  return [id, runs[id]];
}

function choose(id) {
  Object.assign(view, { chosen: id, opened: null });
  draw();
}

function lost(why) {
  Object.assign(view, { isConnected: false, why });
  drawState();
}

/** Ask for the token. */
function refused(wasWrong) {
  set(byId("ask"), { hidden: null });
  set(byId("main"), { hidden: "" });
  say(byId("refused"), wasWrong ? "That is not the token." : "");
  Object.assign(view, { isConnected: false, why: "Locked" });
  drawState();
  byId("token").focus();
  return new Promise((resolve) => {
    byId("ask").onsubmit = (event) => {
      event.preventDefault();
      set(byId("ask"), { hidden: "" });
      resolve(byId("token").value.trim());
    };
  });
}

function noteStep(id, run) {
  const step = run.figures_now?.step ?? null;
  const known = steps.get(id);
  if (!known || known.step !== step) steps.set(id, { step, at: known ? run.at : -Infinity });
  // At first sight it is not known whether it moves: then a trainer that has a throughput counts.
  const since = steps.get(id).at;
  const moves = since === -Infinity ? (run.figures_now?.tokens_per_second ?? 0) > 0 : run.at - since < STILL_SECONDS;
  run.is_training = run.trainers.length > 0 && moves;
}

function draw() {
  const [id, run] = chosen();
  showRuns(byId("several"), byId("runs"), view.state.runs, id, choose);
  set(byId("one"), { hidden: run.peers ? null : "" });
  set(byId("main"), { hidden: run.peers || Object.keys(view.state.runs).length > 1 ? null : "" });
  if (!run.peers) {
    drawState();
    return;
  }
  document.title = `${run.name} · swarm`;
  say(byId("name"), run.name);
  each(byId("facts"), Object.entries({ Run: run.run, ...run.facts }), ([name]) => name,
    ([name]) => el("span", { title: name }), (element, [, value]) => say(element, value));
  showNow(byId("now"), run);
  pipeline.show(run);
  showNotes(byId("notes"), run);
  showRounds(byId("rounds"), run);
  peerTable.show(run);
  showTrainers(byId("trainers"), run);
  showEvents(byId("events"), run);
  showJoin(byId("join"), run);
  if (view.opened) showDetails(dialog, run, view.opened);
  drawCharts();
  drawState();
}

function drawCharts() {
  const history = view.history[chosen()[0]];
  if (!history) return;
  const range = document.querySelector("input[name=range]:checked").value;
  for (const chart of charts) chart.show(history, range);
}

function drawState() {
  const [, run] = chosen();
  if (view.isConnected && !run?.peers) view.why = "Looking at the run";
  const elements = { state: byId("state"), fault: byId("fault"), foot: byId("foot") };
  showState(elements, { ...view, run, isConnected: view.isConnected && Boolean(run?.peers) });
}

function open(key) {
  view.opened = key;
  showDetails(dialog, chosen()[1], key);
  dialog.showModal();
}
