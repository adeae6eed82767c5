"""One test for each attack that a neighbour paid for in version 0.1."""
