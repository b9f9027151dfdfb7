// The page at /. What a model wrote is only ever inserted as text nodes; nothing here makes HTML out of strings.

import { ask, get } from "./stream.js";
import { Controls } from "./controls.js";

const $ = (id) => document.getElementById(id);
const ORIGINS = { accepted: "accepted draft token", rescued: "rescued draft token", recovered: "recovered: the target's, in place of a rejected draft", target: "the target's own" };
const controls = new Controls();
let running = null; // the AbortController of the run in progress

class Pane {
  constructor(id) {
    this.root = $(id);
    this.output = this.root.querySelector(".output");
    this.reset();
  }

  reset() {
    this.output.replaceChildren();
    this.root.querySelectorAll("dd").forEach((cell) => { cell.textContent = "–"; });
    this.counts = { accepted: 0, rescued: 0, recovered: 0, target: 0 };
    this.tokens = 0;
    this.text = "";
    this.speed = null;
    this.started = performance.now();
    this.share(0);
  }

  add(tokens) {
    if (!tokens.length) return;
    const now = performance.now();
    if (!this.tokens) {
      this.first = now;
      this.set("first", milliseconds((now - this.started) / 1000));
    }
    const atEnd = this.output.scrollHeight - this.output.scrollTop - this.output.clientHeight < 40;
    for (const { text, origin } of tokens) {
      const known = origin in ORIGINS ? origin : "target";
      this.counts[known] += 1;
      this.tokens += 1;
      this.text += text;
      if (!text) continue; // part of a character, or text that a stop string may still claim
      const span = document.createElement("span");
      span.className = `token ${known}`;
      span.title = ORIGINS[known];
      span.textContent = text;
      this.output.append(span);
    }
    if (atEnd) this.output.scrollTop = this.output.scrollHeight;
    if (now > this.first) this.live((this.tokens - 1) / (now - this.first) * 1000);
  }

  // Every rejection puts one recovered token into the text, so kept / (kept + recovered) is accepted / judged.
  live(speed) {
    const kept = this.counts.accepted + this.counts.rescued;
    const judged = kept + this.counts.recovered;
    this.set("tokens", this.tokens);
    this.set("speed", speed.toFixed(1));
    if (judged) this.set("acceptance", percent(kept / judged));
  }

  // The server's own figures take the place of what was seen here.
  finish(stats) {
    this.set("tokens", this.tokens);
    if (!stats) return;
    this.speed = stats.tokens_per_second ?? null;
    if (this.speed) this.set("speed", this.speed.toFixed(1));
    if (stats.first_token_seconds) this.set("first", milliseconds(stats.first_token_seconds));
    if (stats.acceptance_rate != null) this.set("acceptance", percent(stats.acceptance_rate));
    if (stats.mean_acceptance_length != null) this.set("length", stats.mean_acceptance_length.toFixed(2));
    this.set("calls", stats.target_calls);
    const kept = Object.entries(stats.accepted_by ?? {}).sort((a, b) => b[1] - a[1]);
    if (kept.length) this.set("drafters", kept.map(([name, count]) => `${name} ${count}`).join(", "));
  }

  set(figure, value) {
    const cell = this.root.querySelector(`[data-figure="${figure}"]`);
    if (cell) cell.textContent = value;
  }

  share(value) {
    this.root.querySelector(".bar i").style.setProperty("--share", value);
  }
}

const speculative = new Pane("speculative");
const plain = new Pane("plain");

function percent(value) { return `${Math.round(value * 100)} %`; }
function milliseconds(seconds) { return seconds < 10 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(1)} s`; }

function say(message, wrong = false) {
  $("status").textContent = message;
  $("status").classList.toggle("wrong", wrong);
}

function showOrigins() {
  for (const item of document.querySelectorAll(".legend li")) {
    const count = speculative.counts[item.dataset.origin];
    item.querySelector("b").textContent = speculative.tokens ? `${count} (${percent(count / speculative.tokens)})` : "0";
  }
}

// The longest draft of greedy requests' tuned strategy with as many requests as run now.
async function showLength() {
  try {
    const { running, draft_length_by_batch: table } = await get("/health", controls.key);
    const sizes = Object.keys(table).map(Number).sort((a, b) => a - b);
    const length = table[sizes.find((size) => size >= running) ?? sizes.at(-1)];
    speculative.set("force", length == null ? "the strategy's own" : `${length}, ${running} at once`);
  } catch { /* the answer matters, not this figure */ }
}

// One answer into one pane.
async function decode(pane, speculation, signal) {
  const { path, body } = controls.request();
  let stats = null;
  for await (const chunk of ask(path, { ...body, speculation: { ...speculation, stats: true, trace: true } }, controls.key, signal)) {
    const part = chunk.speculation;
    if (part?.tokens) pane.add(part.tokens);
    else pane.add(untraced(chunk));
    if (part?.target_calls != null) stats = part;
    if (pane === speculative) showOrigins();
  }
  pane.finish(stats);
}

// A server that does not say where tokens come from still has a text.
function untraced(chunk) {
  const choice = chunk.choices?.[0];
  const text = choice?.delta?.content ?? choice?.text;
  return text ? [{ text, origin: "target" }] : [];
}

async function run() {
  if (running) return;
  running = new AbortController();
  const compare = $("compare").checked;
  speculative.reset();
  plain.reset();
  showOrigins();
  $("verdict").hidden = true;
  plain.root.hidden = !compare;
  toggle(true);
  try {
    say("Decoding with speculation …");
    const watch = setInterval(showLength, 500);
    try {
      await decode(speculative, controls.speculation(), running.signal);
    } finally {
      clearInterval(watch);
    }
    if (compare) {
      say("Decoding plainly, for comparison …");
      await decode(plain, { enabled: false }, running.signal);
      judge();
    }
    say(summary());
  } catch (error) {
    explain(error);
  } finally {
    running = null;
    toggle(false);
  }
}

function toggle(busy) {
  const held = document.activeElement;
  $("run").disabled = busy;
  $("stop").disabled = !busy;
  $("results").setAttribute("aria-busy", busy);
  if (held === $("run") && busy) $("stop").focus(); // a disabled button would lose the focus to nowhere
  if (held === $("stop") && !busy) $("run").focus();
}

function judge() {
  if (!speculative.speed || !plain.speed) return;
  const ratio = speculative.speed / plain.speed;
  const fastest = Math.max(speculative.speed, plain.speed);
  speculative.share(speculative.speed / fastest);
  plain.share(plain.speed / fastest);
  $("ratio").textContent = `${ratio.toFixed(2)} ×`;
  const { offer, strategy } = controls;
  const why = !strategy.lossless ? "." : offer.exact ? ", which should not be: please report it." : ": this model's passes are not exact.";
  const differ = `The texts differ${why}`;
  const same = speculative.text === plain.text ? "Both texts are the same." : differ;
  $("verdict-text").textContent = `the speed of plain decoding, on this prompt. ${controls.greedy ? same : ""}`;
  $("verdict").hidden = false;
}

function summary() {
  const { accepted, rescued } = speculative.counts;
  const parts = [`${speculative.tokens} tokens, ${accepted + rescued} of them from the draft`];
  if (speculative.speed) parts.push(`${speculative.speed.toFixed(1)} tokens per second`);
  if (!$("verdict").hidden) parts.push(`${$("ratio").textContent} plain decoding`);
  return `Done: ${parts.join(", ")}.`;
}

function explain(error) {
  if (error.name === "AbortError") return say("Stopped.");
  say(`Not answered: ${error.message}`, true);
  if (error.status === 401 || error.status === 403) controls.askForKey();
}

async function start() {
  try {
    const offer = await get("/v1/speculation", controls.key);
    controls.show(offer);
    $("model").textContent = `${offer.model} · ${offer.default}`;
    say("");
    if (offer.card) await showCard();
  } catch (error) {
    explain(error);
  }
}

// How the bundle was tuned. A link carries no key: where the server needs one, it would be refused.
async function showCard() {
  const { speed, strategy, exact, loses, needs } = await get("/card.json", controls.key);
  const range = speed?.low == null ? "" : ` [${speed.low.toFixed(2)}, ${speed.high.toFixed(2)}]`;
  const sure = needs ? ` Not yet sure: ${needs}.` : "";
  $("card-ratio").textContent = speed ? `${speed.ratio.toFixed(2)} ×` : "Plain decoding";
  $("card-text").textContent = speed
    ? `the speed of plain decoding with ${strategy}${range} on ${speed.prompts} prompt${speed.prompts === 1 ? "" : "s"}; ${loses ?? (exact ? "exact" : "exact but for near-ties")}.${sure}`
    : "was chosen when this model was tuned.";
  $("card-link").hidden = controls.key !== "";
  $("card").hidden = false;
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  controls.ready ? run() : start().then(() => controls.ready && run());
});
$("stop").addEventListener("click", () => running?.abort());
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
start();
