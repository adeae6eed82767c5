// Runs in the browser's audio thread: samples of the microphone as 16-bit integers, 100 ms at a time.

const SIZE = 1600;

class Capture extends AudioWorkletProcessor {
  #samples = new Int16Array(SIZE);
  #filled = 0;

  process([[samples = []]]) {
    for (const value of samples) {
      this.#samples[this.#filled++] = 32767 * Math.max(-1, Math.min(1, value));
      if (this.#filled < SIZE) continue;
      this.port.postMessage(this.#samples);
      this.#samples = new Int16Array(SIZE);
      this.#filled = 0;
    }
    return true;
  }
}

registerProcessor("capture", Capture);
