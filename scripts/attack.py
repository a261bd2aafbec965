"""Attacks on whole commands: kills, full disks, two writers, hostile programs for the Python sandbox.

attack.py prepare --golden FOLDER      makes the artifacts that are attacked, in `base` and `made`
attack.py kills|disk|writers|judges    prints one row of a table per stage: tries and findings

Run by scripts/attack.sh in a work folder; POWERINFER is the program.
"""

import argparse
import hashlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

POWERINFER = os.environ.get("POWERINFER", "powerinfer")
BASE = pathlib.Path("base")
PROFILE = "--data text.txt --trace-tokens 512 --seed 1"
PLACE = "--profile profile --predictors predictors --context 64 --hardware cpu-only --certify 1500"
# Name, command, and what it writes. Every command starts in a copy of BASE, where a valid result of other settings exists
# already; the bytes it writes depend on nothing but the command. Those of a sweep contain times.
STAGES = [
    ("profile", f"profile model {PROFILE} --tokens 4000 --out profile", "profile"),
    ("merge", "merge half-1 half-2 --out profile", "profile"),
    ("train-predictors", "train-predictors model --profile profile --steps 40 --out predictors", "predictors"),
    ("place", f"place model {PLACE} --vram 0 --quant q8_0 --out bundle", "bundle"),
    ("place again", "place bundle --vram 67M --context 48 --hardware rtx4090", "bundle"),
    ("prepare", f"prepare model {PROFILE} --tokens 2500 --steps 20 --context 64 --hardware cpu-only --vram 0 --certify 1500 --out .", "bundle profile predictors"),
    ("run", "run bundle -n 4 --prompt Tomorrow --prompt-cache cache.safetensors", "cache.safetensors"),
    ("synth", "synth --like model --out synth", "synth"),
    ("eval humaneval", "eval humaneval bundle --data problems.jsonl -n 4 --samples 2 --temperature 0.5 --out samples.jsonl", "samples.jsonl"),
    ("sweep", "sweep bundle --out sweep.jsonl --html sweep.html --policy dense,exact --tokens 300 --audit-tokens 50 --layer-tokens 50 -n 4 --repeats 1 --probe 1MiB", "sweep.jsonl"),
]


def command(line, **options):
    environment = os.environ | {"XDG_CACHE_HOME": str(pathlib.Path("cache").resolve()), "NO_COLOR": "1"}
    return subprocess.Popen([POWERINFER, "-q", *line.split()], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment, **options)


def run(line, folder, limit=120):
    """Exit code and messages of a command; None as the code if it does not end."""
    process = command(line, cwd=folder)
    try:
        output, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None, "no end"
    return process.returncode, output + errors


def good(line, folder):
    code, text = run(line, folder)
    if code != 0:
        sys.exit(f"`{line}` in {folder}: exit code {code}: {text}")


def digest(folder, outputs):
    """Digest of all files of `outputs`, but for unfinished ones."""
    found = hashlib.sha256()
    for output in outputs.split():
        for path in sorted([folder / output, *(folder / output).rglob("*")]):
            if path.is_file():
                found.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return found.hexdigest()


def result(stage, folder):
    """What a stage has written, without the times of a sweep."""
    if stage[0] != "sweep":
        return digest(folder, stage[2])
    rows = [json.loads(line) for line in open(folder / stage[2])]
    if not (folder / "sweep.html").exists():
        return "no page"
    return json.dumps([[row.get("placement"), row.get("quality")] for row in rows], sort_keys=True)


def damaged(stage, folder):
    """The first artifact that `stage` writes, is there, and is not intact."""
    for name in stage[2].split():
        path = folder / name
        if path.suffix == ".safetensors" and path.is_file() or any((path / inner).exists() for inner in ("manifest.json", "profile.json", "predictors.safetensors")):
            code, text = run(f"inspect {name} --verify", folder)
            if code != 0:
                return f"`{name}` is damaged: {text}"
    return None


def again(stage, folder, expected):
    """Runs a stage after a disturbance; what is wrong with it then."""
    # A new checkpoint is not overwritten.
    if stage[0] == "synth" and (folder / "synth").exists() and result(stage, folder) == expected:
        return None
    code, text = run(stage[1], folder)
    if code != 0:
        return f"run again: exit code {code}: {text}"
    return None if result(stage, folder) == expected else "run again: another result"


def copy(to):
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(BASE, to, symlinks=True)
    return to


class Findings:
    def __init__(self):
        self.rows = {}
        self.texts = []

    def tried(self, name, finding=None):
        row = self.rows.setdefault(name, [0, 0])
        row[0] += 1
        if finding:
            row[1] += 1
            finding = " ".join(finding.split())
            print(f"{name}: {finding}", file=sys.stderr, flush=True)
            self.texts.append(f"* {name}: {finding[:300]}")

    def report(self, attack):
        for name, (tries, findings) in self.rows.items():
            print(f"| {attack} | {name} | {tries} | {findings} |")
        pathlib.Path(f"{attack.replace(' ', '-')}.findings").write_text("\n".join(self.texts))
        return 1 if self.texts else 0


# A machine whose GPU computes even the smallest models faster, as its CPU takes long to start a kernel.
SLOW_HOST = """
name = "slow host"
description = "a CPU that takes long to start kernels"
[cpu]
threads = 16
read_bandwidth_bytes_per_second = 60e9
ram_bytes = 64000000000
kernel_seconds = 2e-5
[gpu]
name = "a GPU"
read_bandwidth_bytes_per_second = 8e11
vram_bytes = 24000000000
pcie_bandwidth_bytes_per_second = 25e9
pcie_latency_seconds = 1e-5
sync_seconds = 2e-5
kernel_launch_seconds = 5e-6
context_bytes = 67108864
"""


def prepare(arguments):
    BASE.mkdir()
    shutil.copytree(arguments.golden / "models/llama-relu-gqa", BASE / "model")
    for unneeded in ("expected.json", "expected.safetensors", "sparse.safetensors"):
        (BASE / "model" / unneeded).unlink()
    shutil.copy(arguments.golden / "../../README.md", BASE / "text.txt")
    row = {"prompt": 'def double(x):\n    """Twice x."""\n', "entry_point": "double", "canonical_solution": "    return 2 * x\n",
           "test": "def check(candidate):\n    assert candidate(3) == 6\n"}
    (BASE / "problems.jsonl").write_text("".join(json.dumps(row | {"task_id": f"p/{index}"}) + "\n" for index in range(6)))
    good(f"profile model {PROFILE} --tokens 3000 --out profile", BASE)
    for part in (1, 2):
        good(f"profile model {PROFILE} --tokens 3000 --shard {part}/2 --out half-{part}", BASE)
    good("train-predictors model --profile profile --steps 5 --out predictors", BASE)
    good(f"place model {PLACE} --vram 0 --quant f16 --out bundle", BASE)
    good("run bundle -n 4 --prompt Hello --prompt-cache cache.safetensors", BASE)
    # Those that are mutated in process.
    for name in ("bundle", "profile", "predictors"):
        shutil.copytree(BASE / name, f"made/{name}")
    (BASE / "slow-host.toml").write_text(SLOW_HOST)
    # All of the model on a GPU, and two of three layers.
    for name, vram in (("whole", "68M"), ("part", "69075000B")):
        folder = pathlib.Path("made/contexts", name).resolve()
        folder.mkdir(parents=True)
        place = PLACE.replace("cpu-only", "slow-host.toml")
        good(f"place model {place} --vram {vram} --policy exact --quant f16 --out {folder}/bundle", BASE)
        (folder / "steps").write_bytes(random.Random(name).randbytes(96))
    os.mkdir("made/cache")
    shutil.copy(BASE / "cache.safetensors", "made/cache/prompt.safetensors")


def references():
    """What each stage writes, and its time."""
    found = {}
    for stage in STAGES:
        folder = copy(pathlib.Path("reference"))
        started = time.monotonic()
        good(stage[1], folder)
        found[stage[0]] = (result(stage, folder), time.monotonic() - started)
    return found


def kills(arguments, findings, source):
    """Kills at random times, up to three in a row; then the command must give what it gives undisturbed."""
    expected = references()
    end = time.monotonic() + arguments.seconds
    while True:
        for stage in STAGES:
            if time.monotonic() > end:
                return
            folder = copy(pathlib.Path("killed"))
            before, duration = expected[stage[0]]
            finding = None
            for _ in range(source.randint(1, 3)):
                process = command(stage[1], cwd=folder)
                time.sleep(source.uniform(0, 1.05 * duration))
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                finding = finding or damaged(stage, folder)
            finding = finding or again(stage, folder, before)
            leftover = [path.name for path in folder.rglob(".*partial*")]
            if leftover:
                finding = finding or f"left over: {leftover}"
            findings.tried(stage[0], finding)


def disk(arguments, findings, source):
    """A file system that becomes full at a random point; then, with more space, the command must succeed."""
    mounted = pathlib.Path("mounted")
    mounted.mkdir(exist_ok=True)

    def mount(options):
        return subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", mounted], capture_output=True).returncode == 0

    if not mount("size=256M"):
        print("skipped: full disks need the right to mount", file=sys.stderr)
        return
    subprocess.run(["umount", mounted], check=True)
    expected = references()
    kilobytes = {}
    end = time.monotonic() + arguments.seconds
    while True:
        for stage in STAGES:
            if time.monotonic() > end:
                return
            mount("size=256M")
            try:
                folder = copy(mounted / "work")
                os.sync()
                used = (shutil.disk_usage(mounted).used >> 10) + 4
                if stage[0] not in kilobytes:
                    good(stage[1], folder)
                    # Old and new files may exist side by side.
                    kilobytes[stage[0]] = max(64, 2 * ((shutil.disk_usage(mounted).used >> 10) - used) + 512)
                    folder = copy(mounted / "work")
                size = used + source.randint(0, kilobytes[stage[0]])
                mount_again = ["mount", "-o", f"remount,size={size}k", mounted]
                subprocess.run(mount_again, check=True)
                environment, os.environ["TMPDIR"] = os.environ.get("TMPDIR"), str(folder.resolve())
                code, text = run(stage[1], folder)
                finding = None
                if code not in (0, 1):
                    finding = f"full disk: exit code {code}: {text}"
                elif code == 1 and "o space left" not in text and "quota" not in text:
                    finding = f"full disk: the message does not say so: {text}"
                elif code == 0 and result(stage, folder) != expected[stage[0]][0]:
                    finding = "full disk: success with another result"
                subprocess.run(["mount", "-o", "remount,size=256M", mounted], check=True)
                finding = finding or damaged(stage, folder)
                finding = finding or again(stage, folder, expected[stage[0]][0])
                if environment is None:
                    del os.environ["TMPDIR"]
                findings.tried(stage[0], finding)
            finally:
                subprocess.run(["umount", "-l", mounted], check=True)


def writers(arguments, findings, source):
    """Two commands of different settings that write to the same place."""
    other = {
        "profile": (f"profile model {PROFILE} --tokens 2500 --out profile", "profile"),
        "train-predictors": ("train-predictors model --profile profile --steps 20 --out predictors", "predictors"),
        "place": (f"place model {PLACE} --vram 0 --quant q4_0 --out bundle", "bundle"),
        "place again": ("place bundle --vram 0 --context 32 --hardware cpu-only", "bundle"),
        "run": ("run bundle -n 4 --prompt Yesterday --prompt-cache cache.safetensors", "cache.safetensors"),
    }
    stages = {stage[0]: stage for stage in STAGES}
    pairs = [(stages[name], (name, *line)) for name, line in other.items()]
    pairs.append((stages["place"], stages["place again"]))
    expected = []
    for pair in pairs:
        results = set()
        # One after the other in either order, and each alone.
        for order in (pair[:1], pair[1:], pair, pair[::-1]):
            folder = copy(pathlib.Path("reference"))
            for stage in order:
                good(stage[1], folder)
            results.add(digest(folder, pair[0][2]))
        expected.append(results)
    duration = references()
    end = time.monotonic() + arguments.seconds
    while True:
        for pair, results in zip(pairs, expected):
            if time.monotonic() > end:
                return
            folder = copy(pathlib.Path("shared"))
            first = command(pair[0][1], cwd=folder)
            time.sleep(source.uniform(0, duration[pair[0][0]][1]))
            second = command(pair[1][1], cwd=folder)
            texts = [process.communicate(timeout=120) for process in (first, second)]
            codes = [first.returncode, second.returncode]
            finding = damaged(pair[0], folder)
            if 0 not in codes or not set(codes) <= {0, 1}:
                finding = finding or f"exit codes {codes}: {texts}"
            # A bundle that is placed again before it is certified is neither, and intact.
            elif pair != pairs[-1] and digest(folder, pair[0][2]) not in results:
                finding = finding or f"neither result, exit codes {codes}"
            findings.tried(" and ".join(dict.fromkeys(stage[0] for stage in pair)), finding)


# Completions of `def double(x):`. None may pass: they are wrong, or right after what the sandbox must refuse.
PROGRAMS = """
while True: pass
y = 3\\nwhile True: y = y * y
return 10 ** 10 ** 10
return 'a' * 10 ** 12
l = []\\nwhile True: l.append(l[:])
return double(x)
def f(n): return f(n + 1)\\nreturn f(0)
print('passed'); return x
print('{"verdict": "passed"}', flush=True); return None
import os; os._exit(0)
import sys; sys.exit(0)
raise SystemExit(0)
raise KeyboardInterrupt
raise AssertionError('passed')
import os; os.kill(os.getppid(), 9); return 0
import os; os.kill(-1, 9); return 0
import os\\nwhile True: os.fork()
import subprocess; return subprocess.run(['true']).returncode
import socket; socket.socket(); return 2 * x
import socket; socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); return 2 * x
import ctypes; ctypes.string_at(0); return 0
import sys\\nf = sys._getframe()\\nwhile f.f_back: f = f.f_back\\nf.f_globals['check'] = lambda c: None\\nreturn 0
import sys\\nf = sys._getframe()\\nwhile f.f_back: f = f.f_back\\nfor c in f.f_code.co_consts: print(c)\\nos = __import__('os'); os._exit(0)
import builtins; builtins.AssertionError = ValueError; return 0
class A(int):\\n    def __eq__(self, o): return True\\nreturn A(x)
class A:\\n    def __eq__(self, o): return True\\n    def __ne__(self, o): return False\\nreturn A()
class A(int):\\n    __eq__ = lambda s, o: True\\n    __hash__ = None\\nreturn A()
import os\\nfor fd in range(64):\\n    try: os.write(fd, b'passed')\\n    except OSError: pass\\nos._exit(0)
import os; open('/tmp/powerinfer-escaped', 'w').write('x'); return 2 * x
import os; os.symlink('/etc/passwd', 'x'); return 0
open('/etc/shadow').read(); return 2 * x
return open('/proc/1/environ').read()
import os; return os.listdir('/')
import os; os.chdir('/proc/self/fd'); return os.listdir('.')
import signal; signal.signal(signal.SIGALRM, lambda *a: None); signal.signal(signal.SIGTERM, signal.SIG_IGN)\\nwhile True: pass
import threading; threading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start(); return 0
import gc\\nfor o in gc.get_objects():\\n    if isinstance(o, dict) and 'check' in o: o['check'] = lambda c: None\\nreturn 0
import inspect; return inspect.stack()
import atexit, os; atexit.register(lambda: os._exit(0)); return 0
import sys; sys.settrace(lambda *a: sys.exit(0)); return 0
import sys; sys.stdout.close(); sys.stderr.close(); return 0
import resource; resource.setrlimit(resource.RLIMIT_CPU, (-1, -1))\\nwhile True: pass
import mmap; return mmap.mmap(-1, 1 << 40)
import subprocess; subprocess.run(['/bin/true'], check=True); return 2 * x
exec('x = ' + '(' * 100000); return 0
return eval('1' + '+1' * 1000000)
import re; return re.match('(a+)+$', 'a' * 40 + 'b')
return [0] * (1 << 40)
x = 'a'\\nfor i in range(100): x += x\\nreturn x
return sum(range(1 << 62))
""".strip().splitlines()


def judges(arguments, findings, source):
    """Hostile programs: none passes, none outlives its time, none leaves a file or a process."""
    problem = json.dumps({"task_id": "double", "prompt": 'def double(x):\n    """Twice x."""\n', "entry_point": "double",
                          "canonical_solution": "    return 2 * x\n",
                          "test": "def check(candidate):\n    assert candidate(3) == 6, 'three'\n    assert candidate(-7) == -14\n"})
    pathlib.Path("problem.jsonl").write_text(problem + "\n")
    escaped = pathlib.Path("/tmp/powerinfer-escaped")
    end = time.monotonic() + arguments.seconds
    order = PROGRAMS.copy()
    source.shuffle(order)
    while True:
        for program in order:
            if time.monotonic() > end:
                return
            completion = "    " + program.replace("\\n", "\n    ") + "\n"
            # Twice the right program around it: a sandbox must not be left in a bad state.
            rows = ["    return 2 * x\n", completion, "    return 2 * x\n"]
            pathlib.Path("completions.jsonl").write_text("".join(json.dumps({"task_id": "double", "completion": row}) + "\n" for row in rows))
            started = time.monotonic()
            code, text = run("eval humaneval --data problem.jsonl --completions completions.jsonl --json", ".")
            finding = None
            if "cannot be judged" in text and code != 0:
                print(f"skipped: {text}", file=sys.stderr)
                return
            try:
                verdicts = [sample["verdict"] for task in json.loads(text)["rows"][0]["tasks"] for sample in task["completions"]]
            except (ValueError, KeyError, TypeError):
                verdicts = [text[:200]]
            if [verdict == "passed" for verdict in verdicts] != [True, False, True]:
                finding = f"verdicts {verdicts}"
            elif time.monotonic() - started > 12:
                finding = f"it took {time.monotonic() - started:.0f} s"
            elif escaped.exists():
                finding = "it wrote a file"
                escaped.unlink()
            findings.tried("Python sandbox", f"{finding}: {program}" if finding else None)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attack", choices=["prepare", "kills", "disk", "writers", "judges"])
    parser.add_argument("--golden", type=pathlib.Path)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.attack == "prepare":
        return prepare(arguments)
    findings = Findings()
    globals()[arguments.attack](arguments, findings, random.Random(arguments.seed))
    names = {"kills": "kill", "disk": "full disk", "writers": "two writers", "judges": "hostile program"}
    return findings.report(names[arguments.attack])


if __name__ == "__main__":
    sys.exit(main())
