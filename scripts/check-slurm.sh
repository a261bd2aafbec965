#!/usr/bin/env bash
# Prepares the demo on a Slurm of its own, started on this machine without systemd: 4 shards of the text, 3 of the predictors, 2 of
# the certificate. A task is killed by `scancel --signal=KILL` and requeued. The bundle has the bytes of `prepare` in one process.
# Installs Slurm and MUNGE with apt if possible; exits with 75 without them. POWERINFER=path uses an existing binary.
#
# usage: scripts/check-slurm.sh
set -euo pipefail
cd "$(dirname "$0")/.."
skip() {
  echo "skipped the check on Slurm: $1" >&2
  exit 75
}
fail() {
  echo "error: $1" >&2
  tail -n 20 "$scratch"/submit.log "$scratch"/slurm/*.log "$scratch"/many.powerinfer/cluster/logs/* 2> /dev/null >&2 || true
  exit 1
}
[ "$(id -u)" = 0 ] || skip "it starts Slurm's daemons as root"
if ! command -v slurmctld > /dev/null || ! command -v slurmd > /dev/null || ! command -v munged > /dev/null; then
  command -v apt-get > /dev/null || skip "Slurm not found, and no apt to install it"
  (apt-get update -q && apt-get install -y -q --no-install-recommends slurm-wlm munge) > /dev/null 2>&1 || true
  command -v slurmctld > /dev/null && command -v slurmd > /dev/null && command -v munged > /dev/null \
    || skip "Slurm not found, and it cannot be installed"
fi
if [ -z "${POWERINFER:-}" ]; then
  cargo build --locked -p powerinfer-cli
  POWERINFER=${CARGO_TARGET_DIR:-target}/debug/powerinfer
fi
POWERINFER=$(realpath "$POWERINFER")
scratch=$(mktemp -d)
slurm=$scratch/slurm
watcher=
stop() {
  [ -z "$watcher" ] || kill "$watcher" 2> /dev/null || true
  scancel --me > /dev/null 2>&1 || true
  for daemon in slurmd slurmctld munged; do
    [ ! -s "$slurm/$daemon.pid" ] || kill "$(cat "$slurm/$daemon.pid")" 2> /dev/null || true
  done
  rm -rf "$scratch" 2> /dev/null || { sleep 2; rm -rf "$scratch"; }
}
trap stop EXIT

mkdir -p "$slurm/state" "$slurm/spool"
chmod 755 "$scratch" # munged refuses a socket in a folder of one user
head -c 1024 /dev/urandom > "$slurm/munge.key"
chmod 600 "$slurm/munge.key"
munged --force --key-file="$slurm/munge.key" --socket="$slurm/munge.socket" --pid-file="$slurm/munged.pid" \
  --log-file="$slurm/munged.log" --seed-file="$slurm/munge.seed" > /dev/null 2>&1 || skip "munged does not start"
host=$(hostname -s)
cores=$(nproc)
cat > "$slurm/slurm.conf" << END
ClusterName=check
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=16817
SlurmdPort=16818
AuthType=auth/munge
AuthInfo=socket=$slurm/munge.socket
SlurmUser=root
StateSaveLocation=$slurm/state
SlurmdSpoolDir=$slurm/spool
SlurmctldPidFile=$slurm/slurmctld.pid
SlurmdPidFile=$slurm/slurmd.pid
SlurmctldLogFile=$slurm/slurmctld.log
SlurmdLogFile=$slurm/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
JobAcctGatherType=jobacct_gather/none
NodeName=$host NodeAddr=127.0.0.1 CPUs=$cores RealMemory=$(awk '/^MemTotal/ { print int($2 / 1024) }' /proc/meminfo) State=UNKNOWN
PartitionName=main Nodes=$host Default=YES MaxTime=INFINITE State=UP
END
export SLURM_CONF=$slurm/slurm.conf
slurmctld > /dev/null 2>&1 || skip "slurmctld does not start"
slurmd > /dev/null 2>&1 || skip "slurmd does not start"
for _ in $(seq 60); do
  sinfo --noheader --states=idle 2> /dev/null | grep -q . && break
  sleep 1
done
sinfo --noheader --states=idle 2> /dev/null | grep -q . || skip "Slurm starts, but its node is not idle after a minute"

cd "$scratch"
options=(--tokens 20000 --trace-tokens 8000 --method trained --steps 200 --hardware pc-low --vram 70M --certify 1024)
"$POWERINFER" cluster slurm demo "${options[@]}" --out many.powerinfer --nodes 4 --cores 1 --train-shards 3 --certify-shards 2 \
  --submit > submit.log 2>&1 &
watcher=$!

# Kills the step of the first task of `3-train`, once it has trained a layer. It is stopped before, or it may end first.
folder=many.powerinfer/predictors-1-of-3.partial
for _ in $(seq 3000); do
  ls "$folder"/layer-*.safetensors > /dev/null 2>&1 && break
  kill -0 "$watcher" 2> /dev/null || fail "the jobs ended before a task could be killed"
  sleep 0.02
done
pkill --signal STOP --full -- '^[^ ]*/powerinfer .*train-predictors .*--shard 1/3' || fail "the first task of 3-train has ended"
squeue --all --array --format='%A %F %K %j %T' > squeue.log
job=$(awk '$4 == "powerinfer-3-train" && $3 == 1 && $5 == "RUNNING" { print $2 "_1" }' squeue.log)
[ -n "$job" ] || fail "the first task of 3-train does not run"
# It may ask twice, and be told that the task is back in the queue.
scancel --signal=KILL "$job.0" || true
# Slurm holds a requeued job for two minutes, and takes some seconds to end it before: freed as soon as it is pending, otherwise it
# starts by itself.
for _ in $(seq 1200); do
  scontrol update JobId="$job" StartTime=now 2> /dev/null && break
  sleep 0.1
done
wait "$watcher" || fail "the jobs failed"
watcher=
log=many.powerinfer/cluster/logs/3-train-1.log
grep -q 'was killed (exit code 137); it goes back into the queue' "$log" || fail "the task was not killed"
grep -q 'resuming after' "$log" || fail "the killed task did not resume"

"$POWERINFER" -q prepare demo "${options[@]}" --out one.powerinfer
for part in profile predictors bundle; do
  diff -r "many.powerinfer/$part" "one.powerinfer/$part" || fail "$part is not that of one process"
done
# Submitted again, all is up to date.
before=$(find many.powerinfer/bundle -type f -exec sha256sum {} + | sort)
timeout 300 "$POWERINFER" cluster slurm demo "${options[@]}" --out many.powerinfer --nodes 4 --cores 1 --train-shards 3 \
  --certify-shards 2 --submit > submit.log 2>&1 || fail "submitted again, the jobs fail"
[ "$before" = "$(find many.powerinfer/bundle -type f -exec sha256sum {} + | sort)" ] || fail "submitted again, the bundle changes"
# A task that fails is named, with its log.
if timeout 300 "$POWERINFER" cluster slurm demo "${options[@]}" --recall 7 --out bad.powerinfer --nodes 2 --cores 1 --submit > submit.log 2>&1; then
  fail "a wrong option is not reported"
fi
grep -q 'stage `3-train`, task 1 failed with exit code 1' submit.log || fail "the failed task is not named"
echo "a preparation on Slurm, in 4, 3 and 2 shards with a task killed, has the bytes of one process"
