"""Processing of items in processes of their own."""
