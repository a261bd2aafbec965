#!/usr/bin/env bash
# Profiles a large model as a Slurm array job: one shard of the text per task, followed by a merge.
#
# usage: MODEL=/models/llama-70b DATA=/data/text OUT=/shared/profile \
#          sbatch --parsable scripts/profile-slurm.sh
#        then, with the job ID that it prints:
#        sbatch --dependency=afterok:NUMBER --wrap 'powerinfer merge /shared/profile-*-of-16 --out /shared/profile'
#
# A killed task resumes when it is submitted again.
#SBATCH --job-name=powerinfer-profile
#SBATCH --array=1-16
#SBATCH --cpus-per-task=16
#SBATCH --mem=32G
#SBATCH --time=12:00:00
#SBATCH --requeue
set -euo pipefail

: "${MODEL:?the model: a folder or a GGUF file}"
: "${DATA:?calibration text: a file or a folder}"
: "${OUT:?the merged profile, on storage shared by all nodes}"
shard="${SLURM_ARRAY_TASK_ID:?this is an array job, see the head of this file}"
shards="${SLURM_ARRAY_TASK_COUNT:?this is an array job, see the head of this file}"

exec powerinfer profile "$MODEL" --data "$DATA" --tokens "${TOKENS:-1000000}" \
  --shard "$shard/$shards" --out "$OUT-$shard-of-$shards"
