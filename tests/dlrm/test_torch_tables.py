"""Tables of 16 bits: rounding by chance, updates against the formula; and what a backward pass holds at its peak."""

import os

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from sluice.dlrm.optim.torch_tables import _DROPPED_BITS, TorchTables, round_at_random
from tests.run_program import last_json, run_program

KINDS = {
    torch.float32: SparseType.FP32,
    torch.float16: SparseType.FP16,
    torch.bfloat16: SparseType.BF16,
}
OPTIMISERS = [
    EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    EmbOptimType.EXACT_ADAGRAD,
    EmbOptimType.EXACT_SGD,
]
RATE, EPS = 0.05, 1e-8


def fbgemms(rows, dtype, optimiser, features, rate=RATE):
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(n, width, EmbeddingLocation.HOST, ComputeDevice.CPU) for n, width in rows],
        feature_table_map=features,
        weights_precision=KINDS[dtype],
        optimizer=optimiser,
        learning_rate=rate,
        eps=EPS,
        stochastic_rounding=True,
        table_names=[f"t{i}" for i in range(len(rows))],
    )


def ours(rows, dtype, optimiser, features, *, seed=0, first_rows=None, rate=RATE):
    tables = fbgemms(rows, dtype, optimiser, features, rate)
    tables.__class__ = TorchTables
    tables.start(seed, first_rows or [0] * len(rows), [0] * len(rows))
    return tables


@pytest.mark.parametrize("dtype", _DROPPED_BITS, ids=str)
def test_a_value_becomes_one_of_its_neighbours_and_stays_on_average(dtype):
    """Also where float16 has no full precision left, down to 0."""
    g = torch.Generator().manual_seed(1)
    values = torch.randn(200, generator=g) * torch.logspace(0, -8, 200)
    values[:3] = torch.tensor([0.0, 1.0, -0.5])
    chance = torch.randint(
        0, 1 << _DROPPED_BITS[dtype], (4000, 200), generator=g, dtype=torch.int32
    )
    rounded = round_at_random(values.expand(4000, 200).contiguous(), dtype, chance)
    nearest = values.to(dtype)
    gap = (
        torch.nextafter(nearest.abs(), torch.tensor(9, dtype=dtype)).float() - nearest.float().abs()
    )
    assert rounded.dtype == dtype
    assert ((rounded.float() - values).abs() < gap * 1.0001).all()
    assert (rounded[:, :3].float() == values[:3]).all(), "what needs no rounding has moved"
    assert ((rounded.double().mean(0) - values).abs() <= 5 * gap.double() / 4000**0.5).all()


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("optimiser", OPTIMISERS, ids=lambda o: o.value)
def test_lookups_and_updates_are_those_of_fbgemms_float32_to_a_unit(dtype, optimiser):
    """Two tables of unlike widths; one is looked up by two features, and bags hold no, one or several ids."""
    rows, features, batch = [(7, 4), (5, 8)], [0, 0, 1], 6
    g = torch.Generator().manual_seed(3)
    lengths = torch.randint(0, 4, (3 * batch,), generator=g)
    counts = lengths.view(3, batch).sum(1).tolist()
    ids = torch.cat(
        [
            torch.randint(0, rows[t][0], (count,), generator=g)
            for t, count in zip(features, counts, strict=True)
        ]
    )
    ends = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    direction = torch.randn(batch, 4 + 4 + 8, generator=g)
    both = [
        ours(rows, dtype, optimiser, features),
        fbgemms(rows, torch.float32, optimiser, features),
    ]
    before = [torch.randn(size, generator=g).to(dtype) for size in rows]
    pooled = []
    for tables in both:
        for weight, value in zip(tables.split_embedding_weights(), before, strict=True):
            weight.copy_(value)
        pooled.append(tables(ids, ends))
        pooled[-1].backward(direction)
    torch.testing.assert_close(*pooled, rtol=0, atol=1e-5)
    unit = {torch.float32: 1e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[dtype]
    for mine, theirs, value in zip(
        *(tables.split_embedding_weights() for tables in both), before, strict=True
    ):
        torch.testing.assert_close(mine.float(), theirs, rtol=unit, atol=1e-6)
        assert (mine != value).any()
    for mine, theirs in zip(*(tables.split_optimizer_states() for tables in both), strict=True):
        torch.testing.assert_close(mine[0].flatten(), theirs[0].flatten())


def test_chance_hangs_on_seed_step_and_place_alone():
    """A table cut by rows is rounded as the whole one; another step, and another seed, round otherwise."""
    ids, ends = torch.arange(64), torch.arange(65)

    def after(seed, step, first=0, count=64):
        tables = ours(
            [(count, 8)],
            torch.float16,
            EmbOptimType.EXACT_SGD,
            [0],
            seed=seed,
            first_rows=[first],
            rate=3e-4,
        )
        tables.split_embedding_weights()[0].fill_(1.0)
        tables.step = step
        tables(ids[:count], ends[: count + 1]).sum().backward()
        return tables.split_embedding_weights()[0]

    whole = after(1, 5)
    assert torch.equal(torch.cat([after(1, 5, 0, 40), after(1, 5, 40, 24)]), whole)
    for other in (after(2, 5), after(1, 6)):
        assert 0.2 < (other != whole).float().mean() < 0.8
    assert 0.2 < (whole[:, :1] != whole[:, 1:]).float().mean() < 0.8, "columns are rounded alike"


PEAK = """
import json, sys, torch
import benchmarks.trainer as bench
from sluice.dlrm.model.ranker import TableLayout, loss_of
from sluice.dlrm.options import Config, ModelConfig, Table
from sluice.dlrm.ranks import machine, world
from sluice.dlrm.sharding.apply import placed
from sluice.dlrm.telemetry.silence_warnings import quiet
from sluice.dlrm.training.assemble import parts_of

def memory(kind):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(kind))

quiet()
bench.ROWS, bench.COLUMNS, rows = 150_000, 8, 32_768
batches, peaks = bench.synthetic(rows, 3), {}
with world() as here:
    for dtype in ("fp32", "fp16"):
        config = Config(data="none", version=0, batch_size=rows,
                        model=ModelConfig(table_dtype=dtype, dense_layers=(16,), over_layers=(16,)))
        layout = TableLayout(config.model, [Table(name=f"C{n}", rows=bench.ROWS, width=16) for n in range(8)])
        parts = parts_of(config, layout, bench.DENSE, placed(config, layout.tables, machine(1, 1)), here)
        for number in range(2):
            bench.step(parts, batches[number], number, here)
        loss = loss_of(parts.model(*layout.features(batches[2])), batches[2].label, batches[2].weight)
        before = memory("VmRSS")
        open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
        torch.autograd.backward(loss)
        peaks[dtype] = memory("VmHWM") - before
        del parts, loss
print(json.dumps(peaks))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK),
    reason="Linux alone tells a process's peak anew",
)
def test_the_backward_pass_holds_at_its_peak_what_the_plan_says(repo):
    """Memory is handed back at once (blocks of 64 KiB are mapped), so the process's size is what is in use. The plan
    says 48 MiB; a table's own gradients would be 73 MiB more in float32."""
    done = run_program(
        "-c",
        PEAK,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": str(repo)},
        check=True,
    )
    planned = 4 * 3 * 32_768 * 8 * 16
    for dtype, peak in last_json(done).items():
        assert 0.6 * planned < peak < 1.1 * planned, f"{dtype}: {peak / 2**20:.1f} MiB"
