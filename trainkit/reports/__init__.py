"""What a person wants to see of runs: one record a run, the ledger of its time, pages and pictures.

Only files of the run folder are read. Their writers may have been killed at any time, and
whatever they hold is shown as text.
"""
