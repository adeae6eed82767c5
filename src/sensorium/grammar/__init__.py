"""Compiles the grammars of `types.structured`, and follows them token by token.

This is the only package that imports llguidance.
"""
