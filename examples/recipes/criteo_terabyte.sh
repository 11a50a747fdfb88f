#!/bin/sh
# Criteo's 24 days as MLPerf uses them (DCN-v2). Options after OUT go to the trainer, and override those below.
#
#     sh examples/recipes/criteo_terabyte.sh DAYS OUT [--stop-auc 0.80275 …]
#
# DAYS is the folder with day_0 to day_LAST (default 23), unpacked. RANKS: trainer processes on this machine (default 8).
# SPEC: another feature spec. The lines with their days are written to OUT/lines. They are as large as the logs.
set -eu
days=$1 out=$2 last=${LAST:-23}
shift 2
mkdir -p "$out/lines"
day=0
while [ "$day" -lt "$last" ]; do
    awk -v day="$day" '{ print day "\t" $0 }' "$days"/day_$day* > "$out/lines/day_$day"
    day=$((day + 1))
done
half=$(($(cat "$days"/day_$last* | wc -l) / 2))
awk -v half="$half" '{ print (NR > half ? 23.5 : 23) "\t" $0 }' "$days"/day_$last* > "$out/lines/day_$last"
spark-submit --properties-file spark-defaults.conf etl/job.py --spec "${SPEC:-features/criteo_terabyte.toml}" \
    --input "$out/lines" --output "$out/table"
torchrun --nproc-per-node="${RANKS:-8}" -m sluice.dlrm.train --data "$out/table" --run-dir "$out/run" \
    --model dcn --cross-layers 3 --cross-rank 512 --width 128 --dense-layers 512,256 \
    --over-layers 1024,1024,512,256 --batch-size 65536 --table-optimiser adagrad --lr 0.005 \
    --dense-optimiser adagrad --dense-lr 0.005 --epochs 1 --evals 20 "$@"
python -m dlrm.evaluate --run-dir "$out/run" --data "$out/table" --split test
