"""From the text of an answer to what it holds: reasoning, content, tool calls."""
