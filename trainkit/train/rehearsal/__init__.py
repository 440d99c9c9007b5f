"""Ranks without their devices, their memory and their peers: one rank of a world of any size is
built and takes a step in this process, and what it would say to others is written down."""
