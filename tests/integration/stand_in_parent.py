"""Runs the real supervisor with children that compute nothing.

    python stand_in_parent.py FOLDER OPTIONS GRACE_S

OPTIONS are fields of `ServeOptions` as JSON. GRACE_S is how many seconds processes may take to end
after their requests. The exit status and the message of an error are those of `sensorium serve`.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec

from sensorium.server.logs import set_up_logging
from sensorium.server.options import ServeOptions
from sensorium.server.processes.supervisor import Commands, RestartPolicy, Supervisor
from sensorium.types.errors import SensoriumError

_CHILD = str(Path(__file__).parent / "stand_in_child.py")


def main() -> None:
    folder, options = sys.argv[1], msgspec.json.decode(sys.argv[2], type=ServeOptions)
    set_up_logging("parent", log_format=options.log_format, log_level=options.log_level)
    command = (sys.executable, "-P", _CHILD)
    supervisor = Supervisor(
        options,
        commands=Commands(core=(*command, "core", folder), frontend=(*command, "frontend", folder)),
        make_policy=lambda: RestartPolicy(first_pause_s=0.01, max_pause_s=0.05),
        grace_s=float(sys.argv[3]),
    )
    try:
        sys.exit(asyncio.run(supervisor.run()))
    except SensoriumError as error:
        sys.exit(f"sensorium: {error}")


if __name__ == "__main__":
    main()
