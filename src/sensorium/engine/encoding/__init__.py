"""Remote encoders: the service, and its transport over a Unix socket."""
