// Pictures, videos and audio: chosen, dropped, drawn or recorded, as parts of a message.

export const RATE = 16000; // what speech encoders take
const PIECE = 3 << 20; // bytes that are read at once: without a rest, in base64
const EXTENSIONS = {
  image: /\.(png|jpe?g|webp|gif|avif|tiff?|bmp)$/i,
  video: /\.(mp4|m4v|mov|webm|mkv|avi)$/i,
  audio: /\.(wav|mp3|flac|ogg|oga|opus|m4a|aac)$/i,
};
export const WORDS = { image: "Picture", video: "Video", audio: "Audio" };

export function findKind(file) {
  const kind = file.type.split("/")[0];
  return kind in EXTENSIONS
    ? kind
    : Object.keys(EXTENSIONS).find((name) => EXTENSIONS[name].test(file.name));
}

function encode(piece, name) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onerror = () => reject(new Error(`${name} can't be read.`));
    reader.onload = () => resolve(new Blob([reader.result.split(",")[1]]));
    reader.readAsDataURL(piece);
  });
}

/** Returns what is kept of a file: its bytes as a data URL for the server, and a URL to show it.
 * The data URL is a Blob, made in pieces: a long video is longer than a string can be. */
export async function readMedia(file) {
  const kind = findKind(file);
  if (!kind) throw new Error(`${file.name} is no picture, video or audio.`);
  const type = /^[\w.+-]+\/[\w.+-]+$/.test(file.type) ? file.type : "application/octet-stream";
  const pieces = [`data:${type};base64,`];
  for (let at = 0; at < file.size; at += PIECE)
    pieces.push(await encode(file.slice(at, at + PIECE), file.name));
  return { kind, name: file.name, url: new Blob(pieces), preview: URL.createObjectURL(file) };
}

export const forget = (media) => media.forEach((item) => URL.revokeObjectURL(item.preview));

/** Returns the JSON of a value. It may have Blobs in place of strings, if they need no escapes. */
export function makeBody(value) {
  const mark = `media ${Math.random()}`;
  const blobs = [""];
  const put = (_, inner) => (inner instanceof Blob ? (blobs.push(inner), mark) : inner);
  return new Blob(JSON.stringify(value, put).split(mark).flatMap((text, at) => [blobs[at], text]));
}

export function makePart({ kind, url }) {
  const name = `${kind}_url`;
  return { type: name, [name]: { url } };
}

export function drawMedia({ kind, name, preview }) {
  const element = document.createElement({ image: "img", video: "video", audio: "audio" }[kind]);
  element.src = preview;
  if (kind === "image") element.alt = name;
  else Object.assign(element, { controls: true, playsInline: true, preload: "metadata" });
  element.setAttribute("aria-label", `${WORDS[kind]} ${name}`);
  element.title = name;
  return element;
}

export async function openMicrophone() {
  if (!navigator.mediaDevices || !window.MediaRecorder)
    throw new Error("Browsers let a page record only over https, or from this machine (localhost).");
  return navigator.mediaDevices.getUserMedia({ audio: true }).catch((error) => {
    const isMissing = error.name === "NotFoundError";
    throw new Error(isMissing ? "There is no microphone." : `The microphone can't be used: ${error.message}.`);
  });
}

/** Records until the function it returns is called, which gives a WAV file: 16 kHz, mono, 16 bits. */
export async function record() {
  const stream = await openMicrophone();
  const recorder = new MediaRecorder(stream);
  const pieces = [];
  recorder.ondataavailable = (event) => pieces.push(event.data);
  const ended = new Promise((resolve) => (recorder.onstop = resolve)); // or the microphone is gone
  recorder.start();
  return async () => {
    if (recorder.state !== "inactive") recorder.stop();
    await ended;
    stream.getTracks().forEach((track) => track.stop());
    const encoded = await new Blob(pieces).arrayBuffer();
    const decoder = new OfflineAudioContext(1, 1, RATE); // it resamples what it decodes
    const sound = await decoder.decodeAudioData(encoded).catch(() => {
      throw new Error("Nothing was recorded.");
    });
    const time = new Date().toTimeString().slice(0, 8).replaceAll(":", ".");
    return new File([makeWav(mixDown(sound))], `voice ${time}.wav`, { type: "audio/wav" });
  };
}

function mixDown(sound) {
  const mixed = new Float32Array(sound.length);
  for (let channel = 0; channel < sound.numberOfChannels; channel++)
    sound.getChannelData(channel).forEach((value, at) => (mixed[at] += value / sound.numberOfChannels));
  return mixed;
}

function makeWav(samples) {
  const size = 2 * samples.length;
  const word = (text) => [...text].reduce((sum, letter, at) => sum | (letter.charCodeAt(0) << (8 * at)), 0);
  const header = Uint32Array.of(
    word("RIFF"), 36 + size, word("WAVE"),
    word("fmt "), 16, 0x10001, RATE, 2 * RATE, 0x100002, // PCM, one channel; two bytes of 16 bits
    word("data"), size);
  return new Blob([header, Int16Array.from(samples, (value) => 32767 * Math.max(-1, Math.min(1, value)))]);
}

const fill = (colour, outline) => (pen) => {
  pen.fillStyle = colour;
  pen.beginPath();
  outline(pen);
  pen.fill();
};
const write = (text) => (pen) => {
  pen.fillStyle = "#101010";
  pen.font = "bold 60px Helvetica, Arial, sans-serif";
  pen.textAlign = "center";
  pen.fillText(text, 112, 134);
};
const CIRCLE = fill("#e02020", (pen) => pen.arc(112, 112, 66, 0, 7));
const LEFT = fill("#2050e0", (pen) => pen.rect(24, 74, 76, 76));
const RIGHT = fill("#20a040", (pen) => pen.arc(162, 112, 40, 0, 7));
export const EXAMPLES = [
  { name: "circle.png", question: "What is this?", draw: [CIRCLE] },
  { name: "shapes.png", question: "What is on the left?", draw: [LEFT, RIGHT] },
  { name: "word.png", question: "What does it say?", draw: [write("hello")] },
  { name: "digits.png", question: "Which digits?", draw: [write("2718")] },
];

export function drawExample({ draw }) {
  const canvas = Object.assign(document.createElement("canvas"), { width: 224, height: 224 });
  const pen = canvas.getContext("2d");
  pen.fillStyle = "#ffffff";
  pen.fillRect(0, 0, 224, 224);
  draw.forEach((step) => step(pen));
  return canvas;
}
