"""What is drawn: shapes, emoji and lines of text, rendered in batches."""
