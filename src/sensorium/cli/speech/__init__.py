"""What the command that transcribes needs: files, clients of a server, and what it writes."""
