"""Run by torchtitan's own interpreter: where the configuration of a command line and the one that
trainkit makes of a job's document differ, as a line of JSON.

    python titan_beside.py DOCUMENT --module llama3 --config llama3_8b ...
"""

import json
import sys

from torchtitan.config import ConfigManager

from trainkit.engines.torchtitan.inside.config import config_of
from trainkit.engines.torchtitan.inside.describe import leaves


def main() -> None:
    theirs = ConfigManager().parse_args(sys.argv[2:])
    ours = config_of(sys.argv[1])
    both = [{name: value for name, value, _ in leaves(each)} for each in (theirs, ours)]
    found = {
        name: [side.get(name) for side in both]
        for name in dict.fromkeys([*both[0], *both[1]])
        if both[0].get(name) != both[1].get(name)
    }
    print("[beside] " + json.dumps(found))


if __name__ == "__main__":
    main()
