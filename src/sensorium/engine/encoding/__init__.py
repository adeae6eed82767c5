"""Remote encoders: the service, and its transport over a socket of one machine."""
