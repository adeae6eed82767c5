"""Grammars of answers: what `types.structured` says, compiled, and followed token by token.

The seam to llguidance, which nobody else imports.
"""
