"""The tests, by kind: see CONTRIBUTING.md.

This is the first module of them that is loaded. The garbage collector would take a seventh of the
time in which all others are; it is on again when they are collected.
"""

import gc
import sys

if "pytest" in sys.modules:  # and not a program that a test runs, which would never have it again
    gc.disable()
