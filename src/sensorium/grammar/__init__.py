"""Compiles grammars and follows them token by token; no other package imports llguidance."""
