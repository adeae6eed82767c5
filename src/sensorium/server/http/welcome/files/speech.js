// Transcripts: what is said in audio or a video, with each word at its time.

import { make } from "./trace.js";

// Formats to ask for, the richest first. A model that lacks one answers 400, and gets the next one.
const WISHES = [
  { response_format: "verbose_json", "timestamp_granularities[]": ["word", "segment"] },
  { response_format: "verbose_json" },
  { response_format: "json" },
];
const LACKED = /^(timestamp_granularities|response_format)\b/; // fields that such an answer names
const MOST_MISSING = 8; // words in a row that a segment's text may spell in another way
let wish = 0; // what the model has given

/** Returns the server's transcript of a file. `call` sends a request, and throws if it is refused. */
export async function transcribe(file, model, call, signal) {
  for (;;) {
    const form = new FormData();
    for (const [name, values] of Object.entries({ model: model ?? [], ...WISHES[wish] }))
      for (const value of [values].flat()) form.append(name, value);
    form.append("file", file);
    try {
      return await (await call("v1/audio/transcriptions", { method: "POST", body: form, signal })).json();
    } catch (error) {
      if (!LACKED.test(error.param ?? "") || wish === WISHES.length - 1) throw error;
      wish++;
    }
  }
}

const plural = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

/** Returns the line below a transcript, which screen readers also read. */
export function describe({ text, language, duration, words, segments }) {
  if (!text) return "Nothing was said.";
  const counted = words ? [plural(words.length, "word")] : segments ? [plural(segments.length, "segment")] : [];
  const seconds = duration === undefined ? [] : [`${duration.toFixed(1)} s`];
  return ["Transcribed", language, ...seconds, ...counted].filter(Boolean).join(" · ");
}

function writeTime(seconds) {
  const [hours, rest] = [Math.floor(seconds / 3600), Math.floor(seconds) % 3600];
  const minutes = String(Math.floor(rest / 60)).padStart(hours ? 2 : 1, "0");
  return `${hours ? `${hours}:` : ""}${minutes}:${String(rest % 60).padStart(2, "0")}`;
}

/** Returns the text of a segment in pieces: strings, and words with their times, taken from `words`. */
function cut({ text, start, end }, words) {
  const pieces = [];
  for (let at = 0; ; ) {
    const come = words.slice(words.next, words.next + MOST_MISSING);
    const skipped = come.findIndex(({ word }) => text.includes(word, at));
    if (skipped < 0) return pieces.length ? [...pieces, text.slice(at)] : [{ word: text, start, end }];
    const found = come[skipped];
    const begin = text.indexOf(found.word, at);
    pieces.push(text.slice(at, begin), found);
    at = begin + found.word.length;
    words.next += skipped + 1;
  }
}

/** Returns a list of segments with words that light up while `player` plays them; a click goes to a word. */
export function drawTranscript({ text, segments, words = [] }, player) {
  if (!segments) return make("p", "transcript", text);
  const marks = []; // the words with their times, in order
  const go = (start) => {
    player.currentTime = start;
    player.play().catch(() => {}); // why it can't be played is said where the player is
  };
  const drawPiece = (piece) => {
    if (typeof piece === "string") return piece;
    const element = Object.assign(make("span", "word", piece.word), { onclick: () => go(piece.start) });
    marks.push({ ...piece, element });
    return element;
  };
  const rest = Object.assign([...words], { next: 0 });
  const rows = segments.map((segment, at) => {
    const time = writeTime(segment.start);
    const button = Object.assign(make("button", "time", time), {
      type: "button", tabIndex: at ? -1 : 0, ariaLabel: `Play from ${time}`, onclick: () => go(segment.start),
    });
    const pieces = cut({ ...segment, text: segment.text.trim() }, rest);
    return make("li", "", button, make("p", "", ...pieces.map(drawPiece)));
  });
  const list = Object.assign(make("ol", "transcript", ...rows), { ariaLabel: "Transcript" });
  list.addEventListener("keydown", moveFocus);
  follow(player, marks);
  return list;
}

/** Arrow keys go from time to time, so that a long transcript is one stop for the Tab key. */
function moveFocus(event) {
  const buttons = [...event.currentTarget.querySelectorAll(".time")];
  const at = buttons.indexOf(event.target);
  const last = buttons.length - 1;
  const next = { ArrowDown: Math.min(at + 1, last), ArrowUp: Math.max(at - 1, 0), Home: 0, End: last }[event.key];
  if (at < 0 || next === undefined) return;
  event.preventDefault();
  buttons[at].tabIndex = -1;
  buttons[next].tabIndex = 0;
  buttons[next].focus();
}

function follow(player, marks) {
  let now; // the word that is being said
  let frame;
  const show = () => {
    let [low, high] = [0, marks.length]; // the marks before `low` have begun, those from `high` on have not
    while (low < high) {
      const middle = (low + high) >> 1;
      if (marks[middle].start <= player.currentTime) low = middle + 1;
      else high = middle;
    }
    const mark = marks[low - 1];
    const next = mark && player.currentTime < mark.end ? mark.element : undefined;
    if (next !== now) {
      now?.classList.remove("now");
      next?.classList.add("now");
      now = next;
    }
    cancelAnimationFrame(frame);
    if (!player.paused) frame = requestAnimationFrame(show);
  };
  for (const type of ["play", "pause", "seeked", "timeupdate"]) player.addEventListener(type, show);
}
