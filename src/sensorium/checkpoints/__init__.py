"""Reads the files of a checkpoint with nothing but the standard library.

So a command can report what is wrong with a model's files before it imports torch and Transformers,
which takes seconds. `models.checkpoint` finds and downloads files.
"""
