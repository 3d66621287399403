// The chat page. What a model or a server says enters the document as text alone; markdown.js draws answers.
"use strict";

const $ = (id) => document.getElementById(id);
const DECIMALS = ["temperature", "top_p"], WHOLE = ["top_k", "max_tokens", "seed"];
const FIELDS = ["system", ...DECIMALS, ...WHOLE, "thinking"];

const number = (value, digits = 0) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const tokens = (n) => `${number(n)} ${n === 1 ? "token" : "tokens"}`;
const bytes = (n) =>
  n >= 1e9 ? `${number(n / 1e9, 2)} GB` : n >= 1e6 ? `${number(n / 1e6, 1)} MB` : `${number(n / 1e3, 1)} kB`;

// What is kept ----------------------------------------------------------------------------------------------

function load(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

let messages = load("bytefloor.messages", []), settings = load("bytefloor.settings", {}), props = null;
let running = null, writing = null, phase = ""; // An answer on its way: how to abort it, its turn, what it waits for.

const isThere = (turn) => turn.role === "user" || turn.content || turn.reasoning || turn.stats?.isDone;

function keep() {
  try {
    localStorage.setItem("bytefloor.messages", JSON.stringify(messages.filter(isThere)));
    localStorage.setItem("bytefloor.settings", JSON.stringify(settings));
  } catch {
    say("This browser keeps no more: the chat will be gone when the page is closed.");
  }
}

const say = (words) => ($("status").textContent = words);

let retry = null;
function show(problem, otherwise) {
  retry = otherwise;
  $("problem").hidden = !problem;
  $("problem").firstElementChild.textContent = problem;
}

// The server ------------------------------------------------------------------------------------------------

class Refused extends Error {
  constructor(status, error) {
    super(error?.message ?? `The server answered with status ${status}.`);
    Object.assign(this, { status, code: error?.code });
  }
}

class Lost extends Error {}

/** What a promise of the network gives; Lost where the connection is. */
async function reached(promise) {
  try {
    return await promise;
  } catch (error) {
    throw error.name === "AbortError" ? error : new Lost();
  }
}

async function ask(path, options = {}) {
  const key = sessionStorage.getItem("bytefloor.key"), headers = { ...options.headers };
  if (key) headers.authorization = `Bearer ${key}`;
  const response = await reached(fetch(path, { ...options, headers, cache: "no-store" }));
  if (response.ok) return response;
  const found = await response.json().catch(() => null);
  throw new Refused(response.status, found?.error);
}

/** The objects of an event stream, to its [DONE]. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { done, value } = await reached(reader.read());
    if (done) throw new Lost();
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      if (!part.startsWith("data: ")) continue;
      const found = JSON.parse(part.slice(6));
      if (found.error) throw new Refused(0, found.error);
      yield found;
    }
  }
}

function inWords(error) {
  if (error instanceof Lost) return "The connection to the server was lost. Is it still running?";
  if (error.code === "context_length_exceeded")
    return `The conversation no longer fits in the context: ${error.message}. Begin a new chat, or shorten it.`;
  if (error.status === 503) return `The server takes no requests now: ${error.message}.`;
  if (error.status === 401) return "The server wants a key, and this is not it.";
  return error.message;
}

/** Learns what is served; then goes on with what needed it. */
async function meet(then) {
  try {
    props = await (await ask("props")).json();
  } catch (error) {
    return fail(error, () => meet(then));
  }
  show("");
  document.title = $("model").textContent = props.model;
  $("title").textContent = props.model;
  $("facts-line").textContent = [props.family, bytes(props.n_bytes), props.card ?? props.device].join(" · ");
  for (const name of [...DECIMALS, "top_k"]) $(name).placeholder = props.defaults[name];
  $("thinking-field").hidden = !props.supports_thinking;
  $("forget-key").hidden = !sessionStorage.getItem("bytefloor.key");
  const formats = Object.entries(props.formats).map(([name, n]) => `${name} ${number((100 * n) / props.n_bytes)}%`);
  const gbS = props.stream_gb_s, most = gbS && number((gbS * 1e9) / props.token_bytes.empty);
  const facts = {
    Name: props.title || props.model, Family: props.family, "On disk": `${bytes(props.n_bytes)}, ${props.container}`,
    Weights: `${number(props.n_weights / 1e6, 1)} million at ${number(props.bits_per_weight, 2)} bits`,
    Formats: formats.slice(0, 4).join(", "), Context: `${tokens(props.context)}, cache ${props.kv}`,
    "A token reads": gbS && `${bytes(props.token_bytes.empty)} to ${bytes(props.token_bytes.full)}`,
    Floor: gbS && `${most} tokens a second, at ${number(gbS)} GB/s`,
    Device: props.card ?? props.device, Notices: props.notices.join("; "),
  };
  for (const list of [$("facts"), $("facts-again")]) {
    const rows = Object.entries(facts).filter(([, value]) => value);
    list.replaceChildren(...rows.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
  }
  render();
  then?.();
}

/** Says what went wrong; where a key is missing, asks for it. */
function fail(error, otherwise) {
  show(inWords(error), otherwise);
  if (error.status !== 401) return;
  $("key-hint").textContent = sessionStorage.getItem("bytefloor.key")
    ? "The key it got is not the right one." : "It is kept until this tab is closed.";
  $("key-form").reset();
  if (!$("key-dialog").open) $("key-dialog").showModal();
}

// A turn ----------------------------------------------------------------------------------------------------

function request() {
  const body = { stream: true, stream_options: { include_usage: true }, return_progress: true };
  body.messages = messages.map(({ role, content, reasoning }) =>
    reasoning ? { role, content, reasoning_content: reasoning } : { role, content });
  if (settings.system) body.messages.unshift({ role: "system", content: settings.system });
  for (const name of [...DECIMALS, ...WHOLE]) {
    if (!settings[name]) continue;
    const value = Number(settings[name]);
    if (Number.isNaN(value)) throw new Error(`${name} is “${settings[name]}”: expected a number (Settings).`);
    body[name] = value;
  }
  if (settings.thinking && props?.supports_thinking)
    body.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
  return { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
}

/** Answers the last message. */
async function answer() {
  const turn = { role: "assistant", content: "", reasoning: "" }, controller = new AbortController();
  let options = null;
  show("");
  try {
    options = request();
  } catch (error) {
    return show(error.message, again);
  }
  [running, writing] = [controller, turn];
  messages.push(turn);
  phase = "Waiting for the server";
  render();
  say("The model answers.");
  const update = paced(() => redraw(turn));
  try {
    const began = performance.now();
    const response = await ask("v1/chat/completions", { ...options, signal: controller.signal });
    for await (const chunk of events(response)) {
      take(turn, chunk, began);
      update();
    }
    say(`The answer is complete: ${tokens(turn.stats?.n ?? 0)}.`);
  } catch (error) {
    if (error.name === "AbortError") say("Stopped.");
    else fail(error, error.status === 401 ? () => meet(again) : again);
    turn.note = error.name === "AbortError" ? "Stopped." : "The answer is not whole.";
  }
  update.cancel();
  if (running !== controller) return; // a new chat has begun meanwhile
  [running, writing, phase] = [null, null, ""];
  messages = messages.filter(isThere);
  keep();
  render();
  if (document.activeElement === document.body && matchMedia("(hover: hover)").matches) $("prompt").focus();
}

/** What a chunk adds to a turn. */
function take(turn, chunk, began) {
  const { prompt_progress: progress, timings, usage } = chunk, choice = chunk.choices?.[0], delta = choice?.delta ?? {};
  turn.stats ??= {};
  if (progress) {
    turn.stats.nPrompt = progress.total;
    const others = progress.waiting - 1;
    // Every request is in the queue for a moment, of which nobody needs to hear.
    if (progress.waiting && progress.time_ms < 100) phase = "Waiting for the server";
    else if (progress.waiting) phase = `In the queue${others > 0 ? `, with ${number(others)} more` : ""}`;
    else phase = `Reading the prompt: ${number(progress.processed)} of ${tokens(progress.total)}`;
  }
  if (delta.content || delta.reasoning_content) {
    turn.stats.firstS ??= (performance.now() - began) / 1e3;
    turn.content += delta.content ?? "";
    turn.reasoning += delta.reasoning_content ?? "";
    phase = turn.content ? "" : "Thinking";
  }
  const reason = choice?.finish_reason;
  if (reason && reason !== "stop") turn.note = `The answer was ended: ${choice.finish_detail}.`;
  if (timings) {
    const { predicted_n: n, predicted_per_second: tokS, floor_share: share } = timings;
    Object.assign(turn.stats, { n, tokS, share });
    turn.stats.used = turn.stats.nPrompt + n;
  }
  if (usage) {
    const { total_tokens: used, prompt_tokens_details: details } = usage;
    Object.assign(turn.stats, { used, cached: details.cached_tokens, isDone: true });
  }
}

const speed = ({ tokS, share }) =>
  [tokS && `${number(tokS, 1)} tok/s`, tokS && share !== undefined && `${number(100 * share, 1)}% of the floor`];

function showContext(used) {
  if (!props) return;
  $("context-text").textContent = `${number(used)} of ${tokens(props.context)}`;
  $("context-bar").style.width = `${Math.min(100, (100 * used) / props.context)}%`;
  $("context").setAttribute("aria-valuemax", props.context);
  $("context").setAttribute("aria-valuenow", used);
}

/** Runs work at most once a frame. */
function paced(work) {
  let frame = 0;
  const call = () => (frame ||= requestAnimationFrame(() => ((frame = 0), work())));
  call.cancel = () => cancelAnimationFrame(frame);
  return call;
}

// The conversation on the page ------------------------------------------------------------------------------

function render(scrolls = true) {
  $("log").replaceChildren(...messages.map(article));
  $("log").setAttribute("aria-busy", Boolean(running));
  $("empty").hidden = messages.length > 0;
  $("restore").hidden = !load("bytefloor.last", []).length;
  $("send").hidden = Boolean(running);
  $("stop").hidden = !running;
  if (!running) $("speed").textContent = "";
  showContext(messages.findLast((turn) => turn.stats?.used)?.stats.used ?? 0);
  if (scrolls) scrollTo(0, document.body.scrollHeight);
}

function redraw(turn) {
  const isAtEnd = innerHeight + scrollY >= document.body.scrollHeight - 80, place = messages.indexOf(turn);
  if (place < 0) return;
  fill($("log").children[place], turn);
  $("speed").textContent = speed(turn.stats ?? {}).filter(Boolean).join(" · ");
  if (turn.stats?.used) showContext(turn.stats.used);
  if (isAtEnd) scrollTo(0, document.body.scrollHeight);
}

function article(turn, place) {
  const isUser = turn.role === "user", element = make("article", { class: turn.role });
  element.append(make("h2", {}, isUser ? "You" : props?.model ?? "Model"));
  if (isUser) element.append(make("div", { class: "body" }, turn.content));
  else fill(element, turn);
  const isLast = place >= messages.length - (isUser ? 2 : 1) && !running;
  const actions = make("div", { class: "actions" });
  if (!isUser) actions.append(copyButton(() => turn.content));
  if (isLast) actions.append(make("button", { type: "button", onclick: () => edit(element, turn) }, "Edit"));
  if (isLast && !isUser) actions.append(make("button", { type: "button", onclick: again }, "Answer anew"));
  if (!isUser && turn.stats) actions.append(make("span", { class: "stats" }, figures(turn.stats)));
  if (actions.childNodes.length && turn !== writing) element.append(actions);
  return element;
}

function figures(stats) {
  const first = stats.firstS !== undefined && `first after ${number(stats.firstS, 2)} s`;
  const cached = stats.cached > 0 && `${number(stats.cached)} from the cache`;
  return [stats.n && tokens(stats.n), ...speed(stats), first, cached].filter(Boolean).join(" · ");
}

const PARTS = ["thought", "waiting", "body", "note"];
/** The parts of an answer, each made when there is something to show in it. */
function fill(element, turn) {
  const find = (name) => element.querySelector(`:scope > .${name}`);
  const part = (name, wanted, create) => {
    if (!wanted) return find(name)?.remove();
    const later = PARTS.slice(PARTS.indexOf(name) + 1).map(find).find(Boolean);
    return find(name) ?? element.insertBefore(create(), later ?? null);
  };
  const thought = part("thought", turn.reasoning, () =>
    make("details", { class: "thought" }, make("summary", {}, "Thoughts"), make("div")));
  if (thought) thought.lastChild.textContent = turn.reasoning;
  const waiting = part("waiting", turn === writing && phase, () => make("p", { class: "waiting" }));
  if (waiting) waiting.textContent = phase;
  const body = part("body", turn.content, () => make("div", { class: "body" }));
  if (body) draw(body, turn.content);
  const note = part("note", turn.note, () => make("p", { class: "note" }));
  if (note) note.textContent = turn.note;
}

function edit(element, turn) {
  const text = make("textarea", { "aria-label": turn.role === "user" ? "Your message" : "The answer" });
  text.value = turn.content;
  const save = () => {
    const content = text.value.trim();
    if (running || !content) return;
    turn.content = content;
    if (turn.role === "assistant") delete turn.note;
    else messages.length = messages.indexOf(turn) + 1;
    keep();
    render();
    if (turn.role === "user") answer();
  };
  const button = (words, onclick, kind) => make("button", { type: "button", class: kind, onclick }, words);
  const buttons = make("div", { class: "actions" }, button(turn.role === "user" ? "Ask" : "Save", save, "save"),
    button("Cancel", () => render(false), "cancel"));
  text.addEventListener("keydown", (event) => event.key === "Escape" && render(false));
  element.replaceChildren(element.firstChild, make("div", { class: "editor" }, text, buttons));
  text.focus();
}

function again() {
  if (running) return;
  if (messages.at(-1)?.role === "assistant") messages.pop();
  answer();
}

// Hands -----------------------------------------------------------------------------------------------------

const stop = () => running?.abort();

function send() {
  const content = $("prompt").value.trim();
  if (running || !content) return;
  if (messages.at(-1)?.role === "user") messages.pop(); // one that was never answered
  messages.push({ role: "user", content });
  $("prompt").value = "";
  grow();
  keep();
  answer();
}

function grow() {
  const box = $("prompt");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}

function startAnew(kept) {
  stop();
  [running, writing, phase] = [null, null, ""];
  if (messages.length) localStorage.setItem("bytefloor.last", JSON.stringify(messages));
  messages = kept;
  show("");
  keep();
  render();
  $("prompt").focus();
}

$("composer").addEventListener("submit", (event) => (event.preventDefault(), send()));
$("prompt").addEventListener("input", grow);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) stop();
});
$("stop").addEventListener("click", stop);
$("again").addEventListener("click", () => retry());
$("new").addEventListener("click", () => startAnew([]));
$("restore").addEventListener("click", () => startAnew(load("bytefloor.last", [])));
$("open-settings").addEventListener("click", () => $("settings").showModal());
for (const button of document.querySelectorAll("[data-close]"))
  button.addEventListener("click", () => button.closest("dialog").close());
for (const dialog of document.querySelectorAll("dialog"))
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
const fields = () => FIELDS.forEach((name) => ($(name).value = settings[name] ?? ""));
for (const name of FIELDS)
  $(name).addEventListener("input", () => ((settings[name] = $(name).value.trim()), keep()));
$("defaults").addEventListener("click", () => ((settings = {}), keep(), fields()));
$("forget-key").addEventListener("click", () => (sessionStorage.removeItem("bytefloor.key"), location.reload()));
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("bytefloor.key", $("key").value.trim());
  $("key-dialog").close();
  retry();
});

addEventListener("pagehide", () => {
  if (writing) writing.note = "The page was closed before the end.";
  keep();
});

fields();
render();
meet();
