"""What is said: words, voices, and the synthesizers that speak."""
