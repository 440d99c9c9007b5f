"""python -m trainkit.engines.torchtitan.inside.main DOCUMENT WORD...: torchtitan.train of a job.

torchtitan takes a configuration by the names of a module and of a function in it. The module is
made here; the words behind the document are its own parser's, over what the function returns.
"""

from __future__ import annotations

import functools
import sys
import types

from torchtitan import train

from trainkit.engines.torchtitan.inside.config import config_of

MODULE = "trainkit_job"


def main() -> None:
    """Train. Ends as torchtitan.train does."""
    module = types.ModuleType(MODULE)
    setattr(module, "job", functools.partial(config_of, sys.argv[1]))  # noqa: B010
    sys.modules[MODULE] = module
    sys.argv[1:] = ["--module", MODULE, "--config", "job", *sys.argv[2:]]
    train.main()


if __name__ == "__main__":
    main()
