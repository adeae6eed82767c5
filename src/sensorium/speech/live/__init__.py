"""Speech that is transcribed while it is spoken: raw audio, voices, turns, and live sessions."""
