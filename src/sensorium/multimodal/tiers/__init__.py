"""Copies of processed media and of encoder outputs outside of this process, which outlive it."""
