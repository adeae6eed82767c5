"""Computes attention over a paged KV cache, and inside the packed sequences of encoders."""

ATTENTION_BACKENDS = ("auto", "flashinfer", "varlen", "triton", "torch")
