"""Compiles grammars and checks answers token by token; only this package imports llguidance."""
