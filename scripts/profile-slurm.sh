#!/usr/bin/env bash
# Profiles a large model as a Slurm array job: one shard of the text a task, then merged.
#
# usage: MODEL=/models/llama-70b DATA=/data/text OUT=/shared/profile \
#          sbatch --parsable scripts/profile-slurm.sh
#        then, with the number it prints:
#        sbatch --dependency=afterok:NUMBER --wrap 'powerinfer merge /shared/profile-*-of-16 --out /shared/profile'
#
# A task that is killed goes on where it stopped when it is submitted again.
#SBATCH --job-name=powerinfer-profile
#SBATCH --array=1-16
#SBATCH --cpus-per-task=16
#SBATCH --mem=32G
#SBATCH --time=12:00:00
#SBATCH --requeue
set -euo pipefail

: "${MODEL:?the model: a folder, a GGUF file}"
: "${DATA:?text to calibrate on: a file or a folder}"
: "${OUT:?where the merged profile will be, on storage that all nodes share}"
shard="${SLURM_ARRAY_TASK_ID:?this is an array job, see the head of this file}"
shards="${SLURM_ARRAY_TASK_COUNT:?this is an array job, see the head of this file}"

exec powerinfer profile "$MODEL" --data "$DATA" --tokens "${TOKENS:-1000000}" \
  --shard "$shard/$shards" --out "$OUT-$shard-of-$shards"
