#!/bin/sh
# Criteo Kaggle, split 8:1:1: from train.txt to a test AUC. Options after OUT go to the trainer, and override those below.
#
#     sh examples/recipes/criteo_kaggle.sh train.txt OUT [--epochs 1 …]
#
# RANKS: trainer processes on this machine (default 1). SPEC: another feature spec.
set -eu
logs=$1 out=$2
shift 2
spark-submit --properties-file spark-defaults.conf etl/job.py --spec "${SPEC:-features/criteo_kaggle.toml}" \
    --input "$logs" --output "$out/table"
torchrun --nproc-per-node="${RANKS:-1}" -m sluice.dlrm.train --data "$out/table" --run-dir "$out/run" --seed 2019 \
    --model dlrm --width 16 --dense-layers 512,256,64 --over-layers 512,256 --batch-size 8192 \
    --table-optimiser rowwise_adagrad --lr 0.05 --dense-optimiser adam --dense-lr 0.001 --epochs 2 --evals 4 "$@"
python -m dlrm.evaluate --run-dir "$out/run" --data "$out/table" --split test --best
