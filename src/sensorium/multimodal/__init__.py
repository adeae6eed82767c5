"""Media items: how they are fetched, decoded, hashed, processed, cached and put into prompts."""
