"""Attacks on things that belong to others: files around every output, and open descriptors.

attack_files.py files         foreign files, folders and links around the output of every command: all must stay as they were
attack_files.py descriptors   descriptors that the program inherits: no judged program and no worker may have them

Run by scripts/attack.sh after `attack.py prepare`; POWERINFER is the program.
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import signal
import sys
import time
import urllib.request

from attack import Findings, command, copy, run

PROFILE = "--data text.txt --trace-tokens 256 --seed 1 --tokens 900"
PLACE = "place model --profile profile --predictors predictors --context 32 --hardware cpu-only --certify none --vram 0"
# Commands that write the folder `out` (without `cluster`, which measures the machine for a long time), with the names that a folder of the kind has and the artifact of BASE that it is, if any.
FOLDERS = {
    "profile": (f"profile model {PROFILE} --out out", ["profile.json", "neurons.parquet", "traces/layer-000.safetensors"], "profile"),
    "merge": ("merge half-1 half-2 --out out", ["profile.json", "reserved.safetensors"], "profile"),
    "train-predictors": ("train-predictors model --profile profile --steps 2 --out out", ["predictors.safetensors", "layer-000.safetensors"], "predictors"),
    "place": (f"{PLACE} --out out", ["manifest.json", "weights.safetensors", "plan.json", "tokenizer.json"], "bundle"),
    "synth": ("synth --like model --out out", ["config.json", "model.safetensors"], None),
}
# Commands that write files, with those files, which belong to others beforehand: the named ones and others next to them.
FILES = {
    "place --html": (f"{PLACE} --out out --html page.html", ["page.html"]),
    "inspect --html": ("inspect profile --html page.html", ["page.html"]),
    "sweep": ("sweep bundle --out rows.jsonl --html page.html --policy dense --tokens 100 --audit-tokens 20 --layer-tokens 20 -n 2 --repeats 1 --probe 1MiB",
              ["rows.jsonl", "page.html", "page.csv", "page.json"]),
    "export": ("export bundle --to powerinfer model.powerinfer.gguf", ["model.powerinfer.gguf", "model.powerinfer.gguf.generated.gpuidx"]),
    "export gguf": ("export model --to gguf exported --any-activation", ["exported/model.gguf"]),
    "run": ("run bundle -n 2 --prompt Tomorrow --prompt-cache cache.safetensors", ["cache.safetensors"]),
    "eval": ("eval humaneval bundle --data problems.jsonl -n 2 --out samples.jsonl", ["samples.jsonl"]),
    "place": (f"{PLACE} --out out".replace("none", "300"), ["out-certificate.jsonl"]),
}
# Manifests of other programs, which name this one.
MANIFESTS = ['{"dependencies":["powerinfer-client"]}', '{"header":"powerinfer-bundle powerinfer-profile powerinfer-predictors"}']


class Precious:
    """Files, folders and links of others, and what is wrong with them later."""

    def __init__(self, folder, source):
        self.source = source
        self.files = {path: path.read_bytes() for path in (folder / "text.txt", folder / "half-1/profile.json", folder / "model/config.json")}
        self.links = {}

    def file(self, path, content=None):
        path.parent.mkdir(parents=True, exist_ok=True)
        content = content or f"mine {self.source.random()}\n"
        path.write_text(content)
        self.files[path] = content.encode()
        return path

    def link(self, path, to):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(to)
        self.links[path] = str(to)
        return path

    def damage(self):
        for path, content in self.files.items():
            if not path.is_file() or path.is_symlink():
                return f"`{path}` is gone"
            if path.read_bytes() != content:
                return f"`{path}` has other content"
        for path, to in self.links.items():
            if not path.is_symlink() or os.readlink(path) != to:
                return f"the link `{path}` is gone"
        return None


def artifact(folder, kind):
    """Makes `out` an artifact of this kind, if there is one."""
    if kind:
        shutil.copytree(folder / kind, folder / "out")


def foreign_folder(folder, mine, names, kind):
    mine.file(folder / "out/index.html")
    mine.file(folder / "out/src/main.js")
    for name in names:
        mine.file(folder / "out" / name, mine.source.choice(MANIFESTS))


def notes_in_artifact(folder, mine, names, kind):
    artifact(folder, kind)
    mine.file(folder / "out/notes.txt")
    mine.file(folder / "out/old/notes.txt")


def links_in_artifact(folder, mine, names, kind):
    artifact(folder, kind)
    mine.file(folder / "photos/cat")
    mine.link(folder / "out/here", ".")
    mine.link(folder / "out/photos", "../photos")


def link_to_foreign(folder, mine, names, kind):
    foreign_folder(folder, mine, names, kind)
    (folder / "out").rename(folder / "real")
    moved = {path: content for path, content in mine.files.items() if (folder / "out") in path.parents}
    mine.files = {path: content for path, content in mine.files.items() if path not in moved}
    mine.files |= {folder / "real" / path.relative_to(folder / "out"): content for path, content in moved.items()}
    mine.link(folder / "out", "real")


def link_to_artifact(folder, mine, names, kind):
    mine.file(folder / "disk/other.txt")
    if kind:
        artifact(folder, kind)
        (folder / "out").rename(folder / "disk/real")
    mine.link(folder / "out", "disk/real")


def link_to_itself(folder, mine, names, kind):
    mine.link(folder / "out", mine.source.choice([".", "..", "out", "../work"]))


def partial_is_link(folder, mine, names, kind):
    for name in [".powerinfer-run", "cat", *names]:
        mine.file(folder / "photos" / name)
    mine.link(folder / mine.source.choice(["out.partial", "out.old"]), "photos")


def links_in_partial(folder, mine, names, kind):
    (folder / "out.partial").mkdir()
    if mine.source.random() < 0.7:
        (folder / "out.partial/.powerinfer-run").write_text("")
    else:
        mine.link(folder / "out.partial/.powerinfer-run", "../photos/run")
    for name in names:
        mine.file(folder / "photos" / name)
        mine.link(folder / "out.partial" / name, os.path.relpath(folder / "photos" / name, (folder / "out.partial" / name).parent))
    mine.file(folder / "photos/run")
    mine.file(folder / "out.partial/notes.txt")
    mine.link(folder / "out.partial/here", mine.source.choice([".", "..", "../photos"]))


def rings_in_partial(folder, mine, names, kind):
    (folder / "out.partial").mkdir()
    (folder / "out.partial/.powerinfer-run").write_text("")
    for name in "abc":
        mine.link(folder / "out.partial" / name, ".")


def temporary_links(folder, mine, names, kind):
    # These links may be deleted, but not their targets.
    mine.file(folder / "photos/cat")
    artifact(folder, kind)
    for place in ["out", "out.partial"] if kind else ["out.partial"]:
        (folder / place).mkdir(exist_ok=True)
        (folder / place / ".powerinfer-x-1.partial").symlink_to("../photos")
        (folder / place / ".powerinfer-x-2.partial").symlink_to("../photos/cat")
    (folder / "out.partial/.powerinfer-run").write_text("")


def leftovers(folder, mine, names, kind):
    for ending, mark in [("old", names[0]), ("measuring", ".powerinfer-scratch"), ("partial", ".powerinfer-run")]:
        if mine.source.random() < 0.6:
            mine.file(folder / f"out.{ending}/thesis.txt")
            mine.file(folder / f"out.{ending}" / mark, mine.source.choice(MANIFESTS))


SITUATIONS = [foreign_folder, notes_in_artifact, links_in_artifact, link_to_foreign, link_to_artifact, link_to_itself, partial_is_link,
              links_in_partial, rings_in_partial, temporary_links, leftovers]


def around_folder(line, names, kind, situation, source):
    """Finding after a command whose output folder is in this situation, if any."""
    folder = copy(pathlib.Path("surrounded/work"))
    mine = Precious(folder, source)
    situation(folder, mine, names, kind)
    code, text = run(line, folder, limit=30)
    finding = mine.damage()
    if code not in (0, 1):
        finding = finding or f"exit code {code}: {text}"
    if situation is link_to_artifact and code != 0:
        finding = finding or f"a link to a folder is refused: {text}"
    return f"{situation.__name__}: {finding}" if finding else None


def around_files(line, names, source):
    """Finding after a command if one or more of its files already exist."""
    folder = copy(pathlib.Path("surrounded/work"))
    mine = Precious(folder, source)
    are_new = source.random() < 0.3
    for name in source.sample(names, source.randint(1, len(names))):
        path = folder / name
        path.unlink(missing_ok=True)
        if are_new:
            # The command is to write the link's target.
            (folder / "disk").mkdir(exist_ok=True)
            mine.link(path, os.path.relpath(folder / f"disk/{path.name}", path.parent))
        elif source.random() < 0.5:
            mine.file(path, f"<!doctype html>\n{source.random()}" if path.suffix == ".html" else None)
            (path.parent / f".powerinfer-{path.name}-1.partial").symlink_to(path.name)
        else:
            mine.file(folder / f"photos/{path.name}")
            mine.link(path, os.path.relpath(folder / f"photos/{path.name}", path.parent))
    (folder / "exported").mkdir(exist_ok=True)
    code, text = run(line, folder, limit=30)
    finding = mine.damage()
    return finding or (f"exit code {code}: {text}" if code not in ((0,) if are_new else (0, 1)) else None)


def files(arguments, findings, source):
    """Foreign files, folders and links around every output."""
    end = time.monotonic() + arguments.seconds
    tries = [(f"{name} in a folder", around_folder, (*each, situation)) for name, each in FOLDERS.items() for situation in SITUATIONS]
    tries += [(f"{name} in files", around_files, each) for name, each in FILES.items() for _ in range(3)]
    source.shuffle(tries)
    while True:
        for name, attack, given in tries:
            if time.monotonic() > end:
                return
            findings.tried(name, attack(*given, source))


# Prints its open descriptors as an error.
LISTER = """    import os, stat
    found = []
    for number in range(4096):
        try:
            found.append((number, stat.S_ISFIFO(os.fstat(number).st_mode)))
        except OSError:
            pass
    raise ValueError(str(found))
"""


def workers(parent):
    """Descriptors of each worker of a process that lead to the inherited file."""
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if f"\nPPid:\t{parent}\n" in (process / "status").read_text() and b"__worker" in (process / "cmdline").read_bytes():
                links = [os.readlink(link) for link in (process / "fd").iterdir()]
                found.append([link for link in links if link.endswith("/inherited")])
        except OSError:
            pass
    return found


def descriptors(arguments, findings, source):
    """Descriptors that a careless parent leaves open reach neither judged programs nor workers."""
    pathlib.Path("inherited").write_text("secret")
    problem = {"task_id": "double", "prompt": "def double(x):\n", "entry_point": "double", "canonical_solution": "    return 2 * x\n",
               "test": "def check(candidate):\n    assert candidate(3) == 6\n"}
    pathlib.Path("problem.jsonl").write_text(json.dumps(problem) + "\n")
    end = time.monotonic() + arguments.seconds
    while True:
        numbers = sorted({3, source.randint(4, 31), source.randint(32, 63), source.randint(64, 900)})
        secret = os.open("inherited", os.O_RDWR)
        secret = os.dup2(secret, 1000, inheritable=False)
        for number in numbers:
            os.dup2(secret, number, inheritable=True)
        try:
            findings.tried("Python sandbox", judged(numbers))
            findings.tried("template worker", template(numbers))
        finally:
            for number in [*numbers, secret]:
                os.close(number)
        if time.monotonic() > end:
            return


def judge(completion, numbers):
    pathlib.Path("completions.jsonl").write_text(json.dumps({"task_id": "double", "completion": completion}) + "\n")
    line = "eval humaneval --data problem.jsonl --completions completions.jsonl --json"
    return command(line, cwd=".", pass_fds=numbers)


def judged(numbers):
    output, errors = judge(LISTER, numbers).communicate(timeout=60)
    if "cannot be judged" in errors:
        print(f"skipped: {errors}", file=sys.stderr)
        return None
    detail = json.loads(output)["rows"][0]["tasks"][0]["completions"][0]["detail"]
    # It receives calls and sends answers through two pipes.
    found = detail.removeprefix("ValueError: ")
    return None if found.count("True") == 2 and "False" not in found else f"open descriptors: {detail}"


def template(numbers):
    process = command("serve base/bundle --port 0", cwd=".", pass_fds=numbers)
    try:
        port = process.stdout.readline().rsplit(":", 1)[1].strip()
        models = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=30))
        body = json.dumps({"model": models["data"][0]["id"], "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", body, {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=30).read()
        found = workers(process.pid)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    if not found:
        return "no worker was seen"
    return f"a worker has {found[0]}" if found[0] else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attack", choices=["files", "descriptors"])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    findings = Findings()
    globals()[arguments.attack](arguments, findings, random.Random(arguments.seed))
    return findings.report({"files": "foreign files", "descriptors": "open descriptors"}[arguments.attack])


if __name__ == "__main__":
    sys.exit(main())
