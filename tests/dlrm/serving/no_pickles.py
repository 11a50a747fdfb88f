"""Takes a run through every program that reads one, and prints what was looked up by pickles meanwhile.

python -m tests.dlrm.serving.no_pickles RUN
"""

import json
import sys
import traceback
from pathlib import Path

if __name__ == "__main__":
    run = sys.argv[1]
    from sluice.dlrm import evaluate, train
    from sluice.dlrm.serving.served_model import Servable
    from sluice.dlrm.telemetry.silence_warnings import quiet

    quiet()
    looked_up: list[str] = []

    def listen(event: str, args: tuple) -> None:
        if event == "pickle.find_class":
            looked_up.append(
                f"{args[0]}.{args[1]}, from {''.join(traceback.format_stack(limit=12))}"
            )

    sys.addaudithook(listen)
    evaluate.main(["--run-dir", run])
    Servable.load(Path(run))
    train.main(["--run-dir", run, "--resume"])
    print(json.dumps(looked_up), flush=True)
