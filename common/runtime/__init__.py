"""What a process needs around its service: time, cores, signals and an identity.

Not here: logging and metrics (`common.telemetry`), which this package neither knows nor needs.
"""

from common.runtime.boot import new_boot_id
from common.runtime.clock import Clock, SystemClock
from common.runtime.lifecycle import Lifecycle, end_with_parent
from common.runtime.threads import available_cores, resolve_threads

__all__ = [
    "Clock",
    "Lifecycle",
    "SystemClock",
    "available_cores",
    "end_with_parent",
    "new_boot_id",
    "resolve_threads",
]
