"""The program that holds one run: attempts, agents, rendezvous, failures, retries, the stop."""
