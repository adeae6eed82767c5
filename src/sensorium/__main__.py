"""Runs the command with this interpreter: `python -m sensorium`."""

from sensorium.cli import main

if __name__ == "__main__":
    main()
