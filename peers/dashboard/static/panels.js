// What stands around the picture: key figures, events, how to join, and one peer's figures.

import { each, el, say, set } from "./dom.js";
import { count, duration, figure, loss, moment, number, words } from "./format.js";
import { stateOf } from "./runs.js";

const MOST_NOTES = 8;

/** The run in a few large numbers. */
export function showNow(root, run) {
  const now = run.figures_now ?? {};
  const peers = Object.values(run.peers);
  const serving = peers.filter(({ state }) => state === "serving").length;
  const round = Math.max(0, ...peers.map((peer) => peer.round));
  const tiles = [
    { name: "Loss", value: loss(now.loss), note: "nats per token" },
    { name: "Throughput", value: number(now.tokens_per_second), note: "tokens/s" },
    { name: "Step", value: number(now.step ?? null), note: `peers are at round ${number(round)}` },
    { name: "Peers", value: number(serving), note: peersNote(run, peers.length - serving) },
    { name: "Pace", value: number(now.samples_per_second), note: "samples/s at the slowest stage" },
  ];
  each(root, tiles, ({ name }) => name, ({ name }) => {
    const parts = { value: el("dd", { class: "value" }), note: el("dd", { class: "note" }) };
    const tile = el("div", {}, el("dt", {}, name), parts.value, parts.note);
    tile.parts = parts;
    return tile;
  }, (tile, { value, note }) => {
    say(tile.parts.value, value);
    say(tile.parts.note, note);
  });
}

function peersNote(run, numOthers) {
  if (run.empty_stages.length) return `nobody at stage ${run.empty_stages.join(", ")}`;
  const stages = `over ${count(run.stages.length, "stage")}`;
  return numOthers ? `serving ${stages}, ${numOthers} more not` : `serving ${stages}`;
}

/** Stages whose peers are all silent. */
function silentStages(run) {
  const peersOf = (stage) => Object.values(run.peers).filter((peer) => peer.stage === stage);
  return run.stages.filter((stage) => {
    const peers = peersOf(stage);
    return peers.length > 0 && peers.every(({ state }) => state === "unreachable");
  });
}

/** Which peer a stage without one had last, and until when, if anybody knows. */
function lastPeer(run, stage) {
  const last = run.last_peers[stage];
  if (!last) return "";
  return ` (${last.name} ${last.has_left ? "left" : "was last heard of"} at ${moment(last.last_at)})`;
}

/** What waits for a peer of a stage. */
function waiting(run, stage) {
  const paths = run.waiting_paths[stage];
  return paths ? `${paths} cannot go on without one` : "training waits for one";
}

/** What is wrong, or waited for, now. */
export function showNotes(list, run) {
  const names = Object.fromEntries(Object.values(run.peers).map(({ peer_id, name }) => [peer_id, name]));
  const all = [...Object.values(run.peers), ...run.trainers];
  const lines = [
    ...run.empty_stages.map((stage) => ({ kind: "bad", text: `Stage ${stage} has no peer${lastPeer(run, stage)}: ${waiting(run, stage)}.` })),
    ...silentStages(run).map((stage) => ({ kind: "bad", text: `No peer of stage ${stage} answers${lastPeer(run, stage)}: ${waiting(run, stage)}.` })),
    ...all.flatMap(({ name, refusals }) => (refusals ?? []).map((text) => ({ kind: "bad", text: `${name}: ${text}` }))),
    ...all.flatMap(({ name, bans }) => (bans ?? []).map(({ peer_id, reason, until }) => ({
      kind: "bad",
      text: `${name} leaves ${names[peer_id] ?? peer_id.slice(0, 8)} alone until ${moment(until)}: ${reason}`,
    }))),
    ...all.filter(({ waiting_for }) => waiting_for).map(({ name, waiting_for }) => ({ kind: "plain", text: `${name} waits for ${waiting_for}` })),
    ...all.filter(({ idle_because }) => idle_because).sort((a, b) => a.computing_share - b.computing_share).slice(0, 1)
      .map(({ name, idle_because }) => ({ kind: "plain", text: `${name} is ${idle_because}` })),
  ];
  const shown = lines.slice(0, MOST_NOTES);
  if (lines.length > MOST_NOTES) shown.push({ kind: "plain", text: `and ${lines.length - MOST_NOTES} more` });
  each(list, shown, ({ text }) => text, ({ kind, text }) => el("li", { "data-kind": kind }, text), () => {});
  set(list, { hidden: shown.length ? null : "" });
}

/** What happened, the newest first. */
export function showEvents(list, run) {
  const events = run.events.map((event) => ({ ...event, key: `${event.at} ${event.text}` })).reverse();
  each(list, events, ({ key }) => key, ({ at, kind, text }) =>
    el("li", { "data-kind": kind }, el("time", { datetime: new Date(at * 1000).toISOString() }, moment(at)), el("span", {}, text)), () => {});
}

/** The lines with which one comes to the run, each to be copied. */
export function showJoin(root, run) {
  const lines = Object.entries(run.join ?? {}).map(([purpose, line]) => ({ purpose, line }));
  each(root, lines, ({ purpose }) => purpose, ({ purpose }) => {
    const code = el("code");
    const button = el("button", { type: "button", class: "quiet", "aria-label": `Copy: ${purpose}` }, "Copy");
    button.addEventListener("click", () => copy(code, button));
    const part = el("div", { class: "recipe" }, el("h3", {}, purpose),
      el("div", { class: "line" }, el("pre", { tabindex: "0", "aria-label": purpose }, code), button));
    part.code = code;
    return part;
  }, (part, { line }) => say(part.code, line));
}

async function copy(code, button) {
  try {
    await navigator.clipboard.writeText(code.textContent);
  } catch {
    // Browsers lend the clipboard to pages with TLS, or of this machine: elsewhere the text is marked.
    getSelection().selectAllChildren(code);
    say(button, "Marked");
    return;
  }
  say(button, "Copied");
  setTimeout(() => say(button, "Copy"), 2000);
}

/** All figures of one peer, in a dialog. */
export function showDetails(dialog, run, key) {
  const peer = run.peers[key];
  const list = dialog.querySelector("dl");
  if (!peer) {
    list.keyed = undefined;
    list.replaceChildren(el("dd", {}, "This peer is not there any more."));
    return;
  }
  say(dialog.querySelector("h2"), `${peer.name}, stage ${peer.stage}`);
  const given = run.contributions[peer.peer_id];
  const seen = given
    ? [{ name: "first seen", text: moment(given.first_seen), help: "By this page." },
       { name: "seen to serve", text: duration(given.serving_seconds), help: "As long as this page watched." }]
    : [];
  if (given?.named) seen.unshift({ name: "named as a liar", text: given.named, help: "Signed by most members of a round." });
  const told = Object.entries(run.figures.peer).map(([name, { help, unit }]) => ({ name: words(name), text: figure(peer[name], unit), help }));
  if (!list.keyed) list.replaceChildren();
  each(list, [...told, ...seen], ({ name }) => name, ({ name, help }) => {
    const value = el("dd", { class: "value" });
    const part = el("div", {}, el("dt", {}, name), value, el("dd", { class: "note" }, help));
    part.value = value;
    return part;
  }, (part, { text }) => say(part.value, text));
}

/** Whether the page is up to date, at the top and at the bottom. */
export function showState(elements, { run, heardAt, isConnected, why }) {
  const age = (Date.now() - heardAt) / 1000;
  const isLate = run && age > Math.max(15, 5 * run.interval_seconds);
  const [kind, text] = !isConnected ? ["bad", why] : isLate ? ["bad", "The run cannot be seen"] : stateOf(run);
  say(elements.state, text);
  set(elements.state, { "data-kind": kind });
  const fault = run?.fault ? `The run has not been seen since ${moment(run.at)}: ${run.fault}` : "";
  say(elements.fault, fault);
  set(elements.fault, { hidden: fault ? null : "" });
  say(elements.foot, run?.at ? `Seen at ${moment(run.at)}, by one look for all who watch. This page changes nothing.` : "");
}
