// The perception trace of an answer: what caches spared, and milliseconds by stage.

import { WORDS } from "./media.js";

// In the order of a request. A stage with a dash is a part of the last one without a dash.
const STAGES = {
  parse: "read the request",
  wait_thread: "wait for a thread",
  render: "chat template",
  perceive: "perceive",
  fetch: "– fetch",
  hash: "– hash",
  wait: "– wait for another",
  decode: "– decode",
  process: "– process",
  transfer: "to the model",
  queue: "queue",
  prefill: "read the prompt",
  encode: "– encode media",
};
const CHIPS = {
  processor: { hit: "✓ not decoded again", miss: "decoded, processed" },
  transfer: { none: "✓ not sent again", shared: "in shared memory", tensors: "sent to the model" },
  encoder: { hit: "✓ not encoded again", miss: "encoded", skipped: "✓ in the prefix cache" },
};
const firsts = new Map(); // the first trace that an item, by its hash, was in

export function make(tag, className, ...content) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...content);
  return element;
}

const say = (ms) => (ms === undefined ? "" : ms < 10 ? ms.toFixed(1) : Math.round(ms).toString());
const getFirstWord = ({ ms }) => ms.total - (ms.generate ?? 0);

export function drawTrace(trace) {
  const known = trace.items.filter((item) => firsts.has(item.mm_hash));
  const isRepeated = known.length > 0 && known.length === trace.items.length;
  const first = isRepeated ? firsts.get(trace.items.at(-1).mm_hash) : undefined;
  trace.items.forEach((item) => firsts.has(item.mm_hash) || firsts.set(item.mm_hash, trace));
  const panel = make("section", "trace", drawSummary(trace, first));
  panel.setAttribute("aria-label", "Perception trace");
  if (trace.items.length) panel.append(make("ul", "items", ...trace.items.map(drawItem)));
  panel.append(make("details", "", make("summary", "", "Where the time went"), drawStages(trace, first)));
  panel.lastChild.open = true;
  return panel;
}

function drawSummary(trace, first) {
  const words = [make("strong", "", `${say(getFirstWord(trace))} ms`), " to the first word"];
  if (first) words.push(` (the first time ${say(getFirstWord(first))} ms)`);
  words.push(`, ${say(trace.ms.total)} ms in all. `);
  words.push(`${trace.num_cached_tokens} of ${trace.num_prompt_tokens} prompt tokens came from the prefix cache.`);
  return make("p", "", ...words);
}

function drawItem(item) {
  const chips = Object.entries(CHIPS).map(([level, texts]) => {
    const text = texts[item[level]] ?? item[level];
    return make("span", text.startsWith("✓") ? "chip spared" : "chip", text);
  });
  return make("li", "", make("b", "", WORDS[item.modality] ?? item.modality), ...chips);
}

function drawStages(trace, first) {
  const names = [...new Set([...Object.keys(STAGES), ...Object.keys(trace.ms)])].filter(
    (name) => !["generate", "total"].includes(name)
      && Math.max(trace.ms[name] ?? 0, first?.ms[name] ?? 0) >= 0.05);
  const longest = Math.max(...names.flatMap((name) => [trace.ms[name] ?? 0, first?.ms[name] ?? 0]));
  const columns = first ? ["first", "now"] : ["now"];
  const head = ["until the first word", "", ...columns.map((name) => `${name}, ms`)];
  const table = make("table", "", make("tr", "", ...head.map((text) => make(text ? "th" : "td", "", text))));
  for (const name of names) {
    const times = first ? [first.ms[name], trace.ms[name]] : [trace.ms[name]];
    const bars = times.map((ms, at) => {
      const bar = make("i", columns[at]);
      bar.style.width = `${(100 * (ms ?? 0)) / longest}%`;
      return bar;
    });
    const label = make("th", "", STAGES[name] ?? name);
    label.scope = "row";
    const numbers = times.map((ms) => make("td", "number", say(ms) || "–"));
    table.append(make("tr", "", label, make("td", "bars", ...bars), ...numbers));
  }
  return table;
}
