#!/usr/bin/env bash
# Attacks the program: mutated inputs for every reader, kills, full disks, two writers, foreign files around every output, hostile
# programs in the Python sandbox, inherited descriptors, 64 clients of the server, and clients that combine tricks. Prints a table of
# tries and findings; if there are findings, keeps their inputs and exits with 1.
#
# usage: scripts/attack.sh [MINUTES] [REPORT]
#   MINUTES  time of all attacks together [default: 2]
#   REPORT   file for the table, such as docs/reports/attack.md [default: none]
# SEED=N selects other tries, POWERINFER=path uses an existing binary; with PROFILE=release the release build is attacked.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
seconds=$((60 * ${1:-2}))
report=${2:-}
seed=${SEED:-1}
profile=${PROFILE:-dev}
cargo build --locked --profile "$profile" -p powerinfer-cli -p powerinfer-attack
built=$(realpath "${CARGO_TARGET_DIR:-target}")/${profile/dev/debug}
export POWERINFER=${POWERINFER:-$built/powerinfer}
work=$(mktemp -d)
server=
stop() { [ -z "$server" ] || { kill "$server" && wait "$server" || true; }; }
trap 'stop; [ -e "$work/findings" ] || rm -rf "$work"' EXIT
cd "$work"
attack() { python3 -B "$root/scripts/attack.py" "$@"; }
attack_files() { python3 -B "$root/scripts/attack_files.py" "$@"; }
attack prepare --golden "$root/tests/golden"
found=0

{
  printf '# Attacks\n\nMade by `scripts/attack.sh %s` with seed %s on %s cores of %s; %s build.\n' "$((seconds / 60))" "$seed" "$(nproc)" \
    "$(grep -m1 'model name' /proc/cpuinfo | cut -d: -f2 | sed 's/^ *//')" "$profile"
  printf '\n## Mutated inputs\n\nIn process, with a counting allocator. A finding is a panic, the end of the process, over 256 MiB or 10 s for one\n'
  printf 'input, a status of 500, a flipped bit that is not noticed, or logits that are not finite. Most mutated inputs of bundles,\n'
  printf 'profiles, predictors and prompt caches get digests that match.\n\n'
  "$built/powerinfer-attack" --golden "$root/tests/golden" --made made --out findings --seconds $((seconds * 44 / 100)) --seed "$seed" || found=1
  printf '\n## Whole commands\n\n'
  printf 'Kills: one to three at random times; then every artifact is intact, and the command run again gives the bytes that it gives\n'
  printf 'undisturbed. Full disk: a file system that is full at a random point; the error says so, and with more space the command\n'
  printf 'gives the same bytes. Two writers: two commands with other settings write to one place at a time. Hostile programs: none\n'
  printf 'passes, outlives its time, or leaves a file. Foreign files: files, folders and links of others in and around every output stay as\n'
  printf 'they were. Open descriptors: those that the program inherits reach neither judged programs nor workers.\n\n'
  printf '| attack | on | tries | findings |\n|---|---|--:|--:|\n'
  attack kills --seconds $((seconds * 11 / 100)) --seed "$seed" || found=1
  attack disk --seconds $((seconds * 9 / 100)) --seed "$seed" || found=1
  attack writers --seconds $((seconds * 8 / 100)) --seed "$seed" || found=1
  attack judges --seconds $((seconds * 8 / 100)) --seed "$seed" || found=1
  attack_files files --seconds $((seconds * 5 / 100)) --seed "$seed" || found=1
  attack_files descriptors --seconds $((seconds / 100)) --seed "$seed" || found=1
  cat ./*.findings
  printf '\n## Server\n\n'
  "$POWERINFER" serve base/bundle --port 0 --parallel 16 > server.out 2> server.err &
  server=$!
  port=
  for _ in $(seq 100); do
    port=$(grep -ho 'listening on http://[0-9.]*:[0-9]*' server.out | grep -o '[0-9]*$' | head -1 || true)
    [ -z "$port" ] || break
    sleep 0.1
  done
  python3 -B "$root/scripts/bench_server.py" soak "$port" --pid "$server" --clients 64 --prompt 8 24 --tokens 16 --vocabulary 600 \
    --seconds $((seconds * 8 / 100)) || found=1
  stop
  server=
  printf '\nClients that combine tricks, that hold 1,024 connections, and whose requests are bombs. A finding is `/health` after more\n'
  printf 'than 2 s, a status of 500, 1 GiB more of memory, or a server that runs on 20 s after SIGTERM.\n\n'
  printf '| attack | on | tries | findings |\n|---|---|--:|--:|\n'
  for clients in combined held bombs; do
    python3 -B "$root/scripts/attack_server.py" $clients --seconds $((seconds * 4 / 100)) --seed "$seed" || found=1
  done
  cat {combined-clients,held-connections,request-bombs}.findings || found=1
  [ "$found" = 0 ] || mkdir -p findings
} > report.md
cat report.md
[ -z "$report" ] || cp report.md "$root/$report"
if [ -e findings ]; then
  echo "there are findings; their inputs are in $work" >&2
  exit 1
fi
