"""A program that runs its first argument: the rank of tests/launch/agent/test_agent_forks.py."""

from __future__ import annotations

import sys

exec(sys.argv[1])
