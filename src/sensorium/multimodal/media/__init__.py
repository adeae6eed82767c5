"""From what a caller sends to pixels and samples: within limits, and no sooner than needed."""
