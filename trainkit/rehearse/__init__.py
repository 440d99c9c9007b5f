"""A job looked at from end to end before any node waits for it: what check, plan, preflight and
stages know, the real data, and every distinct rank built without its memory."""
