"""Client libraries of others, in an environment of their own, against the default server."""
