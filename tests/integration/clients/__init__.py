"""Tests of other projects' client libraries, in their own environment, with a default server."""
