"""Assembles the PTX, reads the machine code (SASS) and compares it with `sass_limits.json`. Run by `check-ptx.sh`.

Per kernel and chip, of the loop that streams data:
  registers   of a thread; spills and a stack are errors
  loop        instructions of an iteration
  bytes/load  mean size of its loads from global memory
  in flight   loads a thread has issued when it first uses one of them
  per weight  instructions of the loop per weight it reads
"""

import json
import pathlib
import re
import subprocess
import sys
import sysconfig
import tempfile

import gpu_estimate
import sass

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIMITS = ROOT / "scripts/sass_limits.json"
TOOLS = pathlib.Path(sysconfig.get_paths()["purelib"]) / "nvidia"
# The first chip is the one of the estimate; the chips in READ have limits.
CHIPS = ["sm_90", "sm_89", "sm_86", "sm_80", "sm_120"]
READ = CHIPS[:2]

# Weights in 16 bytes of a format, and sizes of loads that are scales.
FORMATS = {"f32": (4, ()), "f16": (8, ()), "bf16": (8, ()), "q8_0": (16, (2,)), "q4_k": (32, (2, 4)), "q4_0": (32, (2,)), "signs": (128, ())}
# Kernels that stream weights, and the loads that count: in a GEMM, tokens come by asynchronous copies.
WEIGHT_KERNELS = {"project": ".", "gate_up": ".", "down": ".", "predict": ".", "predict_by": ".", "gemm": r"LDG\.", "gemm_down": r"LDG\."}


def run(*command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"error: {pathlib.Path(command[0]).name}: {done.stderr}{done.stdout}")
    return done.stdout, done.stderr


def resources(said):
    """Registers of each kernel, and the functions that spill or have a stack, from what `ptxas -v` says."""
    registers, faults, kernel, function = {}, [], None, None
    for line in said.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            kernel = match[1]
        elif match := re.search(r"Function properties for (\w+)", line):
            function = match[1]
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            if any(int(size) for size in match.groups()):
                faults.append(f"{function}: {match[0]}")
        elif match := re.search(r"Used (\d+) registers", line):
            registers[kernel] = int(match[1])
    return registers, faults


def figures(kernel, code):
    """Figures of the main loop of a kernel."""
    name, form = next(((kernel[: -len(form) - 1], form) for form in FORMATS if kernel.endswith("_" + form)), (kernel, None))
    loop = sass.main_loop(code, WEIGHT_KERNELS.get(name, "."))
    sizes = [one.loaded_bytes for one in loop if one.loaded_bytes]
    loads, size = sass.in_flight(loop)
    found = {"instructions": len(loop), "bytes": sum(sizes), "bytes_per_load": round(sum(sizes) / max(1, len(sizes)), 1),
             "in_flight": loads, "in_flight_bytes": size}
    if name in WEIGHT_KERNELS:
        width, scales = FORMATS[form]
        counted = [one.loaded_bytes for one in loop if re.match(WEIGHT_KERNELS[name], one.opcode)]
        # A load below two bytes brings one weight.
        weights = sum(max(1, size * width // 16) if size > 1 else 1 for size in counted if size and size not in scales)
        found["per_weight"] = round(len(loop) / weights, 2)
    return found


def assemble(folder):
    """Figures by chip and kernel."""
    by_chip, failed = {chip: {} for chip in READ}, False
    for file in sorted((ROOT / "kernels/ptx").glob("*.ptx")):
        most = []
        for chip in CHIPS:
            binary = folder / f"{file.stem}.cubin"
            _, said = run(TOOLS / "cuda_nvcc/bin/ptxas", "-v", f"-arch={chip}", file, "-o", binary)
            registers, faults = resources(said)
            most.append(f"{chip} {max(registers.values())}")
            for fault in faults:
                failed = True
                print(f"error: {file.name} for {chip}: {fault}: use fewer registers or arrays with constant indices", file=sys.stderr)
            if chip in READ:
                listing, _ = run(TOOLS / "cu13/bin/nvdisasm", "-c", binary)
                for kernel, code in sass.parse(listing).items():
                    by_chip[chip][kernel] = {"registers": registers[kernel], **figures(kernel, code)}
        print(f"{file.name}: no spills; registers at most: {', '.join(most)}" if not failed else file.name)
    return by_chip, failed


def limits(by_chip):
    """Limits from what was measured: registers as they are allocated, by eight; 10 % more instructions."""
    found = {}
    for chip, kernels in by_chip.items():
        for kernel, measured in sorted(kernels.items()):
            limit = {"registers": -(-measured["registers"] // 8) * 8, "in_flight": measured["in_flight"]}
            if "per_weight" in measured:
                limit["per_weight"] = round(1.1 * measured["per_weight"], 2)
            found.setdefault(kernel, {})[chip] = limit
    return found


def compare(by_chip):
    """What is worse than its limit."""
    known = json.loads(LIMITS.read_text())
    advice = {
        "registers": ("at most", "fewer thread blocks run at once; shorten the lives of variables or unroll less"),
        "in_flight": ("at least", "memory is waited for more often; issue all loads of an iteration, without branches, before the first use"),
        "per_weight": ("at most", "arithmetic may take longer than memory; move what does not change out of the loop"),
    }
    worse = []
    for chip, kernels in by_chip.items():
        for kernel, measured in sorted(kernels.items()):
            if chip not in known.get(kernel, {}):
                worse.append(f"{kernel} for {chip} has no limits: run scripts/check-ptx.sh --write")
                continue
            for figure, limit in known[kernel][chip].items():
                sign = -1 if figure == "in_flight" else 1
                if figure not in measured or sign * measured[figure] > sign * limit:
                    bound, what = advice[figure]
                    worse.append(f"{kernel} for {chip}: {figure} {measured.get(figure)}, limit {bound} {limit}: {what}; "
                                 "if intended, run scripts/check-ptx.sh --write")
    return worse


def print_table(rows):
    """Columns aligned, all but the first to the right."""
    widths = [max(len(str(row[column])) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [str(cell).rjust(width) for cell, width in zip(row, widths)]
        print("  ".join([str(row[0]).ljust(widths[0]), *cells[1:]]).rstrip())


def print_figures(by_chip):
    columns = {"registers": "registers", "instructions": "loop", "bytes_per_load": "bytes/load", "in_flight": "in flight", "per_weight": "per weight"}
    for chip, kernels in by_chip.items():
        print()
        rows = [[chip, *columns.values()]]
        for kernel, measured in sorted(kernels.items()):
            rows.append([kernel, *(measured.get(column, "-") for column in columns)])
        print_table(rows)


def self_test():
    """Reads a listing whose figures are known."""
    listing = """
.text.project_q4_0:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/              @!P1 BRA `(.L_x_2) ;
        /*0020*/                   LDG.E.U16 R4, desc[UR8][R2.64] ;
        /*0030*/                   IMAD.U32 R6, R4, 0x2, RZ ;
        /*0040*/                   BRA `(.L_x_3) ;
.L_x_2:
        /*0050*/                   LDG.E.NA.128.CONSTANT R8, desc[UR8][R2.64] ;
        /*0060*/              @!P2 LDG.E.NA.128.CONSTANT R12, desc[UR8][R2.64+0x200] ;
        /*0070*/                   LDG.E.U16 R16, desc[UR8][R18.64] ;
        /*0080*/                   FADD R6, R11, R6 ;
        /*0090*/                   FADD R6, R15, R16 ;
.L_x_3:
        /*00a0*/                   BRA.DIV UR6, `(.L_x_4) ;
.L_x_5:
        /*00b0*/               @P0 BRA `(.L_x_1) ;
        /*00c0*/                   LDG.E.STRONG.GPU R4, desc[UR8][R2.64] ;
        /*00d0*/                   EXIT ;
.L_x_4:
        /*00e0*/                   BRA `(.L_x_5) ;
"""
    code = sass.parse(listing)["project_q4_0"]
    assert {start: len(body) for start, body in sass.loops(code).items()} == {1: 11}, "one loop, without what is out of line"
    measured = figures("project_q4_0", code)
    # Eight instructions for two blocks of 32 weights; the fallback for unaligned rows is left out.
    assert measured == {"instructions": 8, "bytes": 34, "bytes_per_load": 11.3, "in_flight": 3, "in_flight_bytes": 34, "per_weight": 0.12}, measured


def main():
    options = set(sys.argv[1:])
    if options - {"--write", "--estimate"}:
        sys.exit("usage: check-ptx.sh [--write | --estimate]")
    self_test()
    with tempfile.TemporaryDirectory() as folder:
        by_chip, failed = assemble(pathlib.Path(folder))
    print_figures(by_chip)
    if "--estimate" in options:
        gpu_estimate.print_estimates(by_chip[CHIPS[0]], print_table)
    if "--write" in options:
        # One line per kernel.
        lines = [f"{json.dumps(kernel)}: {json.dumps(limit)}" for kernel, limit in sorted(limits(by_chip).items())]
        LIMITS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        print(f"\nwrote {LIMITS.relative_to(ROOT)}")
    worse = compare(by_chip)
    for line in worse:
        print(f"error: {line}", file=sys.stderr)
    sys.exit(1 if failed or worse else 0)


main()
