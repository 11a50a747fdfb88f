"""What the agent has learned, in a checkpoint and out of it."""

import json
import threading
from dataclasses import replace

import pytest

from benchmarks.small_table import small_table
from sluice.agent.tuner.stage_model import Sighting, StageModel
from sluice.agent.tuner.tuner import Tuner
from sluice.dlrm.training import assemble, loaders
from tests.product import CheckpointMeta, Config, Journal, KnobMemory, world


@pytest.mark.filterwarnings(
    "ignore::FutureWarning"
)  # torch of torchrec, see sluice.dlrm.telemetry.silence_warnings
@pytest.mark.parametrize(
    ("machine", "schema", "registry"),
    [
        ("same", "same", True),
        ("another", "same", False),
        ("same", "another", False),
        ("same", "another", True),
    ],
)
def test_it_goes_on_with_what_it_knew_on_the_same_machine_where_the_registry_knows_no_better(
    tmp_path, monkeypatch, machine, schema, registry
):
    """Also across schemas, without a registry: stages that are still there are known, and those that are gone left; but
    nothing counts as settled there, so that the new pipeline is opened anew."""
    settled, recall = [], Tuner.recall

    def noted(self, state, learned):
        settled.append(learned.get("settled", True))
        return recall(self, state, learned)

    monkeypatch.setattr(Tuner, "recall", noted)
    table = small_table(tmp_path / "table", rows=2000, values=20, row_group_rows=512)
    config = Config(data=table.uri, version=table.version, batch_size=256, reader="arrow")
    conditions = loaders.conditions(config, tmp_path, 0)
    with (
        world() as here,
        loaders.training(config, table, rank=0, local_ranks=1, conditions=conditions) as loader,
    ):
        kept = KnobMemory(loader, config, say=print, ranks=1)

        def learned(workers):
            known = StageModel(name="decode", seen=(Sighting(0, workers, -14.0, 9.0, 0.0),))
            return {"stages": {"decode": known.to_dict(), "gone": known.to_dict()}}

        before = {
            "machine": kept.context.machine if machine == "same" else machine,
            "schema": kept.context.schema if schema == "same" else schema,
            "learned": learned(7),
        }
        assert (
            replace(CheckpointMeta.of(table, {}), agent=before).following(table, {}).agent == before
        )
        kept.learned = learned(5) if registry else None
        with assemble.tuned(
            config,
            loader,
            here,
            kept,
            Journal(),
            agent=json.loads(json.dumps(before)),
        ) as controller:
            assert controller is not None
            assert not any(thread.name == "sluice-member" for thread in threading.enumerate()), (
                "it is the only rank"
            )
            next(iter(loader))
            while controller.reason is None:  # its thread may be at the first look, and be slow
                controller.step()
                threading.Event().wait(0.01)
            after = json.loads(json.dumps(assemble.agent_of(controller, kept)))
    assert (after["machine"], after["schema"]) == (kept.context.machine, kept.context.schema)
    decode = after["learned"]["stages"].get("decode", {"seen": ()})
    points = {sighting["workers"] for sighting in decode["seen"]}
    assert (7 in points) == (machine == "same" and not (registry and schema != "same"))
    assert (5 in points) == (registry and schema != "same")
    assert settled == ([] if machine == "another" else [registry or schema == "same"])
    assert "gone" not in after["learned"]["stages"]
