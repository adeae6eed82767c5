// The page at `/`: a conversation with the model, over the same routes that all clients use.

import {
  EXAMPLES, drawExample, drawMedia, findKind, forget, makeBody, makePart, readMedia, record,
} from "./media.js";
import { listen } from "./live.js";
import { describe, drawTranscript, transcribe } from "./speech.js";
import { drawTrace, make } from "./trace.js";

const $ = (id) => document.getElementById(id);
let model; // what the server calls it
let numAsked = 0; // how often it was asked for that
let complaint = ""; // why that was not found out
let messages = []; // what was said, with all media
let shown = []; // media of the conversation
let attached = []; // media of the next question
let running; // the AbortController of the answer that comes
let isBeginning = false; // with an example that was clicked
let reading = Promise.resolve(); // done when all files that came are attached, or refused
let live; // while it listens live: its `stop`
let recording; // while it records: the promise of what ends it

const makeError = ({ message, param }, status) => Object.assign(new Error(message), { param, status });

async function call(path, options = {}) {
  const key = String.fromCharCode(...new TextEncoder().encode($("key").value.trim())); // its bytes
  const isForm = options.body instanceof FormData; // its type has a boundary, which the browser makes
  const type = isForm ? {} : { "Content-Type": "application/json" };
  const headers = { ...type, ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers }).catch(() => {
    throw new Error("The server does not answer. Is it still running?");
  });
  if (response.ok) return response;
  const answer = await response.json().catch(() => ({}));
  throw makeError(answer.error ?? { message: `The server answered ${response.status}.` }, response.status);
}

async function* stream(body, signal) {
  const response = await call("v1/chat/completions", { method: "POST", body: makeBody(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { done, value } = await reader.read().catch(() => ({ done: true }));
    if (done) throw new Error("The connection was lost.");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const text = event.replace(/^data: /, "");
      if (text === "[DONE]") return;
      const chunk = JSON.parse(text);
      if (chunk.error) throw makeError(chunk.error);
      yield chunk;
    }
  }
}

async function findModel() {
  const own = ++numAsked;
  try {
    const { data } = await (await call("v1/models")).json();
    if (own !== numAsked) return; // it was asked again, with another key
    model = data[0].id;
    $("model").textContent = model;
    setAbilities(data[0].capabilities ?? []);
    if (document.activeElement === $("key")) focusInput();
    $("key-row").hidden = true;
    if ($("notice").textContent === complaint) notify(""); // another's words stay
  } catch (error) {
    if (own !== numAsked) return;
    complaint = explain(error, []);
    notify(complaint);
  }
}

const chats = () => document.body.classList.contains("chats");
const focusInput = () => (chats() ? $("question") : $("sounds")).focus();

/** Shows the parts of the page for what the model can do; by default a conversation. */
function setAbilities(capabilities) {
  const transcribes = capabilities.includes("transcription");
  document.body.classList.toggle("transcribes", transcribes);
  document.body.classList.toggle("chats", capabilities.includes("chat") || !transcribes);
  $("live").hidden = !capabilities.includes("realtime");
  $("composer").ariaLabel = chats() ? "Your question" : "Your recording";
  $("turns").ariaLabel = chats() ? "Conversation" : "Transcripts";
  if (chats()) return;
  $("new").replaceChildren("Clear");
  $("new").ariaLabel = "Clear all transcripts";
}

function notify(words) {
  $("notice").textContent = words;
  $("notice").hidden = !words;
}

/** Describes an error. Items of `media`, which the question has, are named by their file names. */
function explain(error, media) {
  if (error.status === 401) {
    $("key-row").hidden = false;
    $("key").focus();
    return $("key").value ? "This is not the server's API key." : "This server needs an API key.";
  }
  const [, message, part] = /^messages\[(\d+)\]\.content\[(\d+)\]/.exec(error.param ?? "") ?? [];
  const item = Number(message) === messages.length ? media[part] : undefined;
  return item ? error.message.replace(/^messages\S*: /, () => `${item.name}: `) : error.message;
}

/** Adds `files`, or a promise of them, to the question, or transcribes them. */
function attach(files) {
  if (!chats()) return transcribeAll(files);
  reading = Promise.all([files, reading]).then(async ([come]) => {
    const read = await Promise.allSettled(come.map(readMedia));
    attached.push(...read.flatMap(({ value }) => value ?? []));
    notify(read.flatMap(({ reason }) => reason?.message ?? []).join(" "));
    drawAttached();
  }).catch((error) => notify(error.message));
  return reading;
}

function drawAttached() {
  const items = attached.map((item) => {
    const remove = Object.assign(make("button", "remove", "×"), { type: "button", ariaLabel: `Remove ${item.name}` });
    remove.onclick = () => {
      attached = attached.filter((other) => other !== item);
      forget([item]);
      drawAttached();
      $("question").focus();
    };
    return make("li", item.kind, drawMedia(item), remove);
  });
  $("media").replaceChildren(...items);
}

function drawTurn(question, media) {
  const asked = make("div", "asked", ...media.map(drawMedia), ...(question ? [make("p", "", question)] : []));
  const thought = make("p", "thought");
  const answer = Object.assign(make("p", "answer"), { ariaLive: "polite", ariaBusy: "true" });
  const turn = make("li", "turn", asked, thought, answer);
  document.querySelectorAll(".trace details").forEach((details) => (details.open = false));
  $("intro").hidden = true;
  $("turns").append(turn);
  return { turn, answer, thought };
}

const isAtEnd = () => innerHeight + scrollY > document.documentElement.scrollHeight - 120;
const goToEnd = () => scrollTo({ top: document.documentElement.scrollHeight });

function setRunning(controller) {
  running = controller;
  const [seen, unseen] = running ? [$("stop"), $("send")] : [$("send"), $("stop")];
  seen.hidden = false;
  if (document.activeElement === unseen) seen.focus();
  unseen.hidden = true;
  $("new").disabled = !$("turns").children.length;
}

async function ask(question, media) {
  const controller = new AbortController();
  const { turn, answer, thought } = drawTurn(question, media);
  const content = [...media.map(makePart), ...(question ? [{ type: "text", text: question }] : [])];
  const asked = { role: "user", content };
  setRunning(controller);
  notify("");
  goToEnd();
  let failure, reason;
  try {
    const body = { model, messages: [...messages, asked], max_tokens: $("max-tokens").valueAsNumber || 256 };
    for await (const chunk of stream({ ...body, stream: true, trace: true }, controller.signal)) {
      const wasAtEnd = isAtEnd();
      const { delta = {}, finish_reason } = chunk.choices[0] ?? {};
      reason = finish_reason ?? reason;
      thought.append(delta.reasoning_content ?? "");
      answer.append(delta.content ?? "");
      if (chunk.sensorium_trace) turn.append(drawTrace(chunk.sensorium_trace));
      if (wasAtEnd) goToEnd();
    }
  } catch (error) {
    failure = controller.signal.aborted ? "Stopped." : explain(error, media);
  }
  if (running !== controller) return forget(media); // a new conversation has begun
  setRunning(undefined);
  answer.ariaBusy = "false";
  if (failure) turn.append(Object.assign(make("p", "failure", failure), { role: "alert" }));
  const text = answer.textContent;
  const remark = reason === "length" ? "Cut off by the limit of tokens." : text ? "" : "The answer is empty.";
  if (!failure && remark) answer.after(make("p", "remark", remark));
  if (text || !failure) {
    messages.push(asked, { role: "assistant", content: text });
    shown.push(...media);
  } else { // it was not said: back to where it can be mended
    attached = [...media, ...attached];
    $("question").value ||= question;
    drawAttached();
  }
  fitQuestion();
  if (failure) goToEnd();
}

/** Transcribes `files`, or a promise of them, one by one until one is stopped. */
function transcribeAll(files) {
  reading = Promise.all([files, reading]).then(async ([come]) => {
    if (running) throw new Error("Something else is being answered: wait for it, or stop it.");
    notify("");
    for (const file of come) if (!(await hear(file))) return;
  }).catch((error) => notify(error.message));
  return reading;
}

/** Transcribes a file, and shows the words at their times. Returns false if it was stopped. */
async function hear(file) {
  const kind = findKind(file) ?? "audio"; // the server says what is wrong with it
  if (kind === "image") throw new Error(`${file.name} is no audio or video.`);
  const media = { kind, name: file.name, preview: URL.createObjectURL(file) };
  const controller = new AbortController();
  const player = drawMedia(media);
  const status = Object.assign(make("p", "remark", "Listening …"), { role: "status" });
  const turn = make("li", "turn", make("div", "asked", player, make("p", "", file.name)), status);
  player.onerror = () => player.replaceWith(make("p", "remark", "This browser can't play it."));
  $("intro").hidden = true;
  $("turns").append(turn);
  setRunning(controller);
  goToEnd();
  let failure;
  try {
    const answer = await transcribe(file, model, call, controller.signal);
    status.before(drawTranscript(answer, player));
    status.textContent = describe(answer);
  } catch (error) {
    failure = controller.signal.aborted ? "Stopped." : explain(error, []).replace(/^file: /, "");
    status.replaceWith(Object.assign(make("p", "failure", failure), { role: "alert" }));
  }
  if (running !== controller) return forget([media]); // all was cleared meanwhile
  setRunning(undefined);
  shown.push(media);
  turn.scrollIntoView();
  return !controller.signal.aborted;
}

/** Starts to transcribe what the microphone records, or stops. */
async function toggleLive() {
  if (live) return live.stop();
  if (running) return notify("Something else is being answered: wait for it, or stop it.");
  const controller = new AbortController();
  const lines = new Map(); // item -> its line
  const text = Object.assign(make("div", "transcript live"), { ariaLabel: "Live transcript", ariaLive: "polite" });
  const status = Object.assign(make("p", "remark", "Listening …"), { role: "status" });
  const turn = make("li", "turn", text, status);
  const show = (id, words) => {
    const wasAtEnd = isAtEnd();
    if (!lines.has(id)) lines.set(id, text.appendChild(make("p", "")));
    lines.get(id).append(words);
    if (wasAtEnd) goToEnd();
  };
  $("intro").hidden = true;
  $("turns").append(turn);
  setRunning(controller);
  notify("");
  goToEnd();
  let failure;
  try {
    const { end, ended } = await listen($("key").value.trim(), controller.signal, show);
    const stop = () => {
      live.stop = () => {}; // it is clicked once more
      end();
      status.textContent = "Finishing: what was said last is being written down …";
      setLive("Finishing …");
    };
    live = { stop };
    setLive("Stop listening");
    await ended;
  } catch (error) {
    failure = error.message;
  }
  live = undefined;
  setLive("");
  if (running !== controller) return; // all was cleared meanwhile
  setRunning(undefined);
  if (failure) status.replaceWith(Object.assign(make("p", "failure", failure), { role: "alert" }));
  else status.textContent = lines.size ? "Transcribed live." : "Nothing was said.";
}

/** Shows what a click on the button does while it listens, or that it does not listen. */
function setLive(words) {
  $("live").ariaPressed = String(Boolean(words));
  $("live").textContent = words || "Listen live";
}

async function send() {
  if (running) return;
  if ($("record").ariaPressed === "true") toggleRecording(); // what is said belongs to the question
  await reading;
  const question = $("question").value.trim();
  if (running || (!question && !attached.length)) return;
  const media = attached;
  attached = [];
  $("question").value = "";
  drawAttached();
  fitQuestion();
  await ask(question, media);
}

function startOver() {
  running?.abort();
  forget(shown);
  [messages, shown] = [[], []];
  document.querySelectorAll("#turns :is(audio, video)").forEach((player) => player.pause());
  $("turns").replaceChildren();
  $("intro").hidden = false;
  setRunning(undefined);
  notify("");
  focusInput();
}

async function toggleRecording() {
  const before = recording;
  const now = before ? undefined : record();
  recording = now;
  notify("");
  if (before) attach(before.then(async (end) => [await end()]));
  await now?.catch((error) => {
    if (recording === now) recording = undefined;
    notify(error.message);
  });
  $("record").ariaPressed = String(Boolean(recording));
  $("record").textContent = recording ? "Stop recording" : "Record";
}

function fitQuestion() {
  $("question").style.height = "auto";
  $("question").style.height = `${$("question").scrollHeight}px`;
}

for (const example of EXAMPLES) {
  const canvas = Object.assign(drawExample(example), { ariaHidden: "true" });
  const button = Object.assign(make("button", "", canvas, example.question), { type: "button" });
  button.onclick = async () => {
    if (running || isBeginning) return; // it was clicked twice
    isBeginning = true;
    try {
      const blob = await new Promise((resolve) => canvas.toBlob(resolve));
      const media = [await readMedia(new File([blob], example.name, { type: "image/png" }))];
      if (running) forget(media); // something else was asked meanwhile
      else ask(example.question, media);
    } finally {
      isBeginning = false;
    }
  };
  $("examples").append(make("li", "", button));
}

const on = (target, type, act) => target.addEventListener(type, act);
on($("composer"), "submit", (event) => {
  event.preventDefault();
  send();
});
on($("question"), "keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
});
on($("question"), "input", fitQuestion);
on($("files"), "change", async () => {
  await attach([...$("files").files]);
  $("files").value = "";
});
on($("sounds"), "change", async () => {
  await transcribeAll([...$("sounds").files]);
  $("sounds").value = "";
});
on($("stop"), "click", () => running?.abort());
on($("new"), "click", startOver);
on($("record"), "click", toggleRecording);
on($("live"), "click", toggleLive);
on($("key"), "change", () => {
  sessionStorage.sensoriumKey = $("key").value.trim();
  findModel();
});
on(window, "keydown", (event) => event.key === "Escape" && running?.abort());
const take = ({ files }) => files.length && attach([...files]);
on(window, "paste", (event) => take(event.clipboardData));
const hasFiles = (event) => event.dataTransfer.types.includes("Files");
const isText = (event) => event.target === $("question") && !hasFiles(event);
on(window, "dragover", (event) => {
  if (!isText(event)) event.preventDefault();
  $("drop").hidden = !hasFiles(event);
});
on(window, "dragleave", (event) => event.relatedTarget || ($("drop").hidden = true));
on(window, "drop", (event) => {
  if (!isText(event)) event.preventDefault();
  $("drop").hidden = true;
  take(event.dataTransfer);
});
$("key").value = sessionStorage.sensoriumKey ?? "";
findModel();
