"""Turns sounds into text: the rules of speech models, without an engine and without HTTP."""
