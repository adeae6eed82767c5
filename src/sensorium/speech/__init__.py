"""Turns audio into text: the rules of speech models, without an engine and without HTTP."""
