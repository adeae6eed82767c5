// A live transcript: the microphone is sent to the server while it records, and words come back.

import { openMicrophone, RATE } from "./media.js";

const LAST = "last"; // the id of the commit behind the last audio
const EMPTY = "input_audio_buffer_commit_empty";
const MOST_UNSENT = 1 << 20; // bytes, about 24 seconds of audio; then the session ends, so that none is lost unnoticed
const TOO_SLOW = "The server or the connection is too slow for live audio. Listening has stopped: what was said last is lost.";
const TEXT = "conversation.item.input_audio_transcription.";

const encode = (samples) => btoa(String.fromCharCode(...new Uint8Array(samples.buffer)));

function connect(key) {
  const url = new URL("v1/realtime?intent=transcription", location.href);
  url.protocol = url.protocol.replace("http", "ws");
  const socket = new WebSocket(url, ["realtime", ...(key ? [`openai-insecure-api-key.${key}`] : [])]);
  return new Promise((resolve, reject) => {
    socket.onopen = () => resolve(socket);
    socket.onclose = () => reject(new Error("The server takes no live session now."));
  });
}

/** Listens until `end` is called, or the signal is aborted. `show(id, text)` gets the words of
 * each item as they come. Returns `end`, and the promise `ended` of why it ended: nothing, or an error. */
export async function listen(key, signal, show) {
  const stream = await openMicrophone();
  const context = new AudioContext({ sampleRate: RATE });
  let socket;
  const close = () => {
    stream.getTracks().forEach((track) => track.stop());
    if (context.state !== "closed") context.close();
    socket?.close();
  };
  try {
    await context.audioWorklet.addModule("welcome/worklet.js");
    socket = await connect(key);
  } catch (error) {
    close();
    throw error;
  }
  const send = (type, fields) => socket.readyState === WebSocket.OPEN && socket.send(JSON.stringify({ type, ...fields }));
  const capture = new AudioWorkletNode(context, "capture", { numberOfOutputs: 0 });
  context.createMediaStreamSource(stream).connect(capture);
  const open = new Set(); // items that are not complete
  let isLast = false;
  let fail;
  const ended = new Promise((resolve, reject) => {
    fail = (words) => (reject(new Error(words)), close());
    const finish = () => isLast && !open.size && (resolve(), close());
    const act = {
      "input_audio_buffer.committed": ({ item_id }) => open.add(item_id),
      [`${TEXT}delta`]: ({ item_id, delta }) => show(item_id, delta),
      [`${TEXT}completed`]: ({ item_id }) => (open.delete(item_id), finish()),
      [`${TEXT}failed`]: ({ item_id, error }) => (open.delete(item_id), show(item_id, error.message), finish()),
      error: ({ error }) => {
        if (error.event_id !== LAST || error.code !== EMPTY) return fail(error.message);
        isLast = true;
        finish();
      },
    };
    socket.onmessage = ({ data }) => {
      const event = JSON.parse(data);
      act[event.type]?.(event);
    };
    socket.onclose = ({ reason }) => reject(new Error(reason || "The connection was lost."));
    signal.addEventListener("abort", () => (resolve(), close()));
  });
  const audio = { input: { format: { type: "audio/pcm", rate: RATE } } };
  send("session.update", { session: { type: "transcription", audio } });
  capture.port.onmessage = ({ data }) => {
    if (socket.bufferedAmount < MOST_UNSENT) return send("input_audio_buffer.append", { audio: encode(data) });
    capture.port.onmessage = null;
    fail(TOO_SLOW);
  };
  const end = () => {
    stream.getTracks().forEach((track) => track.stop());
    capture.port.onmessage = null;
    // The second commit always finds nothing: when its answer comes, all items are known.
    for (let i = 0; i < 2; i++) send("input_audio_buffer.commit", { event_id: LAST });
  };
  return { end, ended };
}
