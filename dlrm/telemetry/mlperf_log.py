"""Writes MLPerf's log lines, for tools that read them: one line an event, written at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TextIO

# The keys for the begin and the end of an interval; every other key is a point in time.
_INTERVALS = ("init", "run", "epoch", "block", "eval", "staging")


class MlLog:
    """`write("eval_accuracy", 0.80275, epoch_num=0.95)`, on the first rank only. Keys are MLPerf's own."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        self._stream, self._clock = stream, clock

    def write(self, key: str, value: Any = None, **metadata: Any) -> None:
        """Writes one line. `metadata` is what the key requires: epoch_num (a fraction of an epoch), or status for
        run_stop."""
        name, _, edge = key.rpartition("_")
        kind = {"start": "INTERVAL_START", "stop": "INTERVAL_END"}.get(
            edge if name in _INTERVALS else "", "POINT_IN_TIME"
        )
        line = {
            "namespace": "",
            "time_ms": int(self._clock() * 1000),
            "event_type": kind,
            "key": key,
            "value": value,
            "metadata": metadata,
        }
        self._stream.write(f":::MLLOG {json.dumps(line)}\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()

    def settings(
        self,
        *,
        batch_size: int,
        seed: int,
        train_rows: int,
        eval_rows: int,
        optimiser: str,
        lr: float,
        eps: float,
        warmup_steps: int = 0,
        decay_start_step: int = 0,
        decay_steps: int = 0,
    ) -> None:
        """Writes the settings that the rules for a recommender require before a run."""
        settings = {
            "global_batch_size": batch_size,
            "gradient_accumulation_steps": 1,
            "seed": seed,
            "train_samples": train_rows,
            "eval_samples": eval_rows,
            "opt_name": optimiser,
            "opt_base_learning_rate": lr,
            "opt_learning_rate_warmup_steps": warmup_steps,
            "opt_learning_rate_decay_start_step": decay_start_step,
            "opt_learning_rate_decay_steps": decay_steps,
        }
        if optimiser == "adagrad":
            settings |= {
                "opt_adagrad_learning_rate_decay": 0,
                "opt_adagrad_initial_accumulator_value": 0,
                "opt_adagrad_epsilon": eps,
                "opt_weight_decay": 0,
            }
        for key, value in settings.items():
            self.write(key, value)
