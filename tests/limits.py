"""How long tests wait. Benchmarks read it too, in an environment without pytest."""

from __future__ import annotations

# seconds after which what is waited for never comes: a limit against hanging, not for slow machines
HANGS = 900.0
