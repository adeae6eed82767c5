"""Runs transcripts: gives the windows of sounds to an engine, as the rules of `speech` ask."""
