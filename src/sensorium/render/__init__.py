"""Turns messages into a prompt: text with one marker per media item, and the unchanged media.

Nothing here fetches or decodes media.
"""
