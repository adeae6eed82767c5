"""Media items: their names, their processing and their places in a prompt."""
