"""What `scripts/test_install.py` and `scripts/make_constraints.py` have in common."""
