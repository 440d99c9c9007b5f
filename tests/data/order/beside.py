"""Whether an extension's function lets Python go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def ticks_beside(call: Callable[[], object]) -> int:
    """How often this thread gets its turn, at most every millisecond, while another calls it."""
    worker = threading.Thread(target=call)
    worker.start()
    ticks = 0
    while worker.is_alive():
        time.sleep(0.001)
        ticks += 1
    return ticks
