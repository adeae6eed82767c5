"""A ceiling for the memory of a process that decodes what strangers send.

Limits on pixels and seconds are checked before anything is allocated for them. Some containers
need memory before they say what they hold: a file of a kilobyte can list a hundred million samples
of which FFmpeg makes a table. Below a ceiling that is a refused file.
"""

from __future__ import annotations

import resource
from pathlib import Path

_STATUS = Path("/proc/self/status")


def limit_memory_growth(num_bytes: int) -> None:
    """This process may take that much more than it has now. For processes that do nothing else:
    any allocation beyond fails, not only a decoder's. Without Linux' accounts it does nothing.
    """
    if not _STATUS.exists():
        return
    fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    num_used = int(fields["VmData"].split()[0]) * 1024
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = num_used + num_bytes
    resource.setrlimit(
        resource.RLIMIT_DATA,
        (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most),
    )
