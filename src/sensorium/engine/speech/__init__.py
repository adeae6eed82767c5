"""Runs transcripts: gives windows of audio to an engine, as the rules of `speech` ask."""
