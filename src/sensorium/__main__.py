"""`python -m sensorium`: the command, of this very interpreter."""

from sensorium.cli import main

if __name__ == "__main__":
    main()
