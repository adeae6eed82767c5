"""Reads the files of a checkpoint with nothing but the standard library.

What is wrong with a model's files can so be told before torch and Transformers are imported, which
takes seconds. Files are found and downloaded elsewhere (`models.checkpoint`).
"""
