"""`python -m trainkit`: the same program as `trainkit` and `./inv`."""

from trainkit.cli.program import main

if __name__ == "__main__":
    main()
