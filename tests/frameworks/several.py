"""Run a script several times in one process, each time with other arguments: importing a framework takes long.

``python -m tests.frameworks.several SCRIPT '[[9876, ["--epochs", "2"]], [9877, ["--resume", "last.ckpt"]]]'``, with a
port for each run: ranks that leave their process group and meet again must not find what they left the first time.
"""

from __future__ import annotations

import json
import os
import runpy
import sys

if __name__ == "__main__":
    _, script, runs = sys.argv
    for port, arguments in json.loads(runs):
        # not the store of torchrun, which is the same for all runs
        os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")
