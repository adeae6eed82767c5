"""Tests of other projects' client libraries, which have their own virtual environment."""
