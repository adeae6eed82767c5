"""`python -m sensorium` is the command `sensorium`."""

from sensorium.cli import main

if __name__ == "__main__":
    main()
