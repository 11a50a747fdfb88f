"""torchrun, but that the ranks are forks of its agent, not programs that import everything anew.

`python -m tests.dlrm.elastic_agent` takes torchrun's words. The module that they name has a function `train`.
"""

import gc
import sys
from importlib import import_module

from torch.distributed import run
from torch.distributed.launcher.api import elastic_launch

from tests.dlrm.forks import LATE


def forking(config, entrypoint):
    """Launches ranks. The words of what torchrun itself would launch are `-u`, `-m`, the module and its own."""
    return lambda *words: elastic_launch(config, import_module(words[2]).train)(*words[3:])


if __name__ == "__main__":
    for name in LATE:
        import_module(name)
    gc.freeze()
    run.elastic_launch = forking
    run.main(["--start-method=fork", *sys.argv[1:]])
