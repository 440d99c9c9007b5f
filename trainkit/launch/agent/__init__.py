"""The program on each host that starts, watches and ends the ranks there. It imports the
standard library and trainkit.base only."""
