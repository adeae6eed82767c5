"""Runs the checks on a GPU without pytest, and prints a table.

    PYTHONPATH=src:. python tests/gpu/run.py [--only WORD ...] [--skip WORD ...] [--list]

A word selects the checks that have it in their names. Ends with 1 if a check failed. Without a GPU
the checks run on the CPU, and those that need CUDA are skipped: slow, and no proof of anything but
the checks themselves.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections import Counter
from time import perf_counter

import torch
import transformers

from tests.gpu.checks import Check, get_checks
from tests.gpu.setting import UnavailableError, get_device


def run_check(check: Check, *, is_verbose: bool) -> str:
    """Its outcome, printed as a row of the table."""
    start = perf_counter()
    try:
        outcome, note = "ok", check.run()
    except UnavailableError as error:
        outcome, note = "skipped", str(error)
    except Exception as error:  # a table has a row for every check
        outcome, note = "FAILED", f"{type(error).__name__}: {error}"
        if is_verbose or not isinstance(error, AssertionError):
            traceback.print_exc()
    row = f"{outcome:8s}{perf_counter() - start:7.1f} s  {check.name:58s} {note}"
    print(row if outcome == "FAILED" else row[:220], flush=True)
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD")
    parser.add_argument("--skip", nargs="+", default=[], metavar="WORD")
    parser.add_argument("--list", action="store_true", help="print the names and end")
    parser.add_argument("--verbose", action="store_true", help="print every traceback")
    arguments = parser.parse_args()
    checks = [
        check
        for check in get_checks()
        if any(word in check.name for word in arguments.only)
        and not any(word in check.name for word in arguments.skip)
    ]
    if arguments.list:
        print("\n".join(check.name for check in checks))
        return
    transformers.utils.logging.disable_progress_bar()
    name = torch.cuda.get_device_name() if get_device() == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}")
    outcomes = Counter(run_check(check, is_verbose=arguments.verbose) for check in checks)
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())))
    sys.exit(bool(outcomes["FAILED"]) or not outcomes["ok"])


if __name__ == "__main__":
    main()
