"""The parts of the command that transcribes: files, clients of a server, and output."""
