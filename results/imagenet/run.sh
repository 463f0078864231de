#!/bin/bash
# The reference run of the ImageNet table, on one machine of 8 GPUs: five seeds, then the record.
#
#   trainyard data prepare imagenet-1k ARCHIVES data/imagenet
#   results/imagenet/run.sh [RECIPE] [DATA]
set -euo pipefail
recipe=${1:-resnet50-32ep} data=${2:-data/imagenet} runs=()
for seed in 0 1 2 3 4; do
    runs+=("runs/$recipe-seed-$seed")
    trainyard launch local "$recipe" --ranks 8 --data "$data" --run "${runs[-1]}" --run.seed "$seed"
done
python results/board.py --add "${runs[@]}" --task imagenet --name "$recipe"
python results/board.py > results/README.new
mv results/README.new results/README.md
