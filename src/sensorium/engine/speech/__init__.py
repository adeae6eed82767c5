"""Runs transcripts: sends windows of audio to an engine, as the rules in `speech` demand."""
