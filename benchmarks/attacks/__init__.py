"""Attacks on a real server, and the neighbours who must not pay for them.

Each module holds one attack: `FLAGS` that its server needs beyond the defaults, and `attack(url)`,
a context manager that attacks while its block runs and leaves nothing running behind it. The tests
in `tests/integration/attacks` and the benchmark `benchmarks/attack_costs.py` use the same modules.
"""
