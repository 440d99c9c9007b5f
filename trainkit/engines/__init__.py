"""What is executed: one file an engine, all of them in `registry`. Importing this package costs
nothing: `rank`, a part of it, runs in images that have neither trainkit's packages nor its Python.
"""
