"""Assembles the PTX, and compares the machine code (SASS) with `sass_limits.json`. Run by `check-ptx.sh`."""

import json
import pathlib
import re
import subprocess
import sys
import sysconfig
import tempfile

import zstandard

import gpu_estimate
import sass

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIMITS = ROOT / "scripts/sass_limits.json"
TOOLS = pathlib.Path(sysconfig.get_paths()["purelib"]) / "nvidia"
CHIPS = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_120"]
# Chips with limits; the estimate is for the first.
READ = ["sm_90", "sm_89"]
# Weights in 16 bytes of a format, and bytes of the loads that are scales.
FORMATS = {"f32": (4, []), "f16": (8, []), "bf16": (8, []), "q8_0": (16, [2]), "q4_k": (32, [2, 4]), "q4_0": (32, [2]), "signs": (128, [])}
# Kernels that stream weights, and opcodes of the loads: in a GEMM, asynchronous copies bring tokens.
WEIGHTS = {"project": ".", "gate_up": ".", "down": ".", "predict": ".", "predict_by": ".", "gemm": r"LDG\.", "gemm_down": r"LDG\.", "gemm_wide": r"LDG\.", "gemm_down_wide": r"LDG\."}
# Figures of a kernel: title, whether more is better, what to do when it worsens.
FIGURES = {
    "registers": ("registers", False, "fewer thread blocks run at once; let variables live shorter or unroll less"),
    "instructions": ("loop", None, None),
    "bytes_per_load": ("bytes/load", None, None),
    "in_flight": ("in flight", True, "memory is waited for more often; issue all loads of an iteration before the first use, without branches"),
    "per_weight": ("per weight", False, "arithmetic may take longer than memory; move what does not change out of the loop"),
}


def run(*command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"error: {' '.join(map(str, command))}: {done.stderr}{done.stdout}")
    return done.stdout, done.stderr


def figures(kernel, registers, code):
    """Figures of a kernel's main loop."""
    form = next((form for form in FORMATS if kernel.endswith("_" + form)), "")
    name = kernel.removesuffix("_" + form)
    loop = sass.main_loop(code, WEIGHTS.get(name, "."))
    loads, sizes = sass.in_flight(loop), [one.loaded for one in loop if one.loaded]
    found = {"registers": registers, "instructions": len(loop), "bytes_per_load": round(sum(sizes) / max(1, len(sizes)), 1),
             "in_flight": loads[0], "in_flight_bytes": loads[1], "bytes": sum(sizes)}
    if name in WEIGHTS:
        width, scales = FORMATS[form]
        counted = [one.loaded for one in loop if one.loaded not in [0, *scales] and re.match(WEIGHTS[name], one.opcode)]
        # A load of one byte brings one weight.
        weights = sum(size * width // 16 if size > 1 else 1 for size in counted)
        if weights:
            found["per_weight"] = round(len(loop) / weights, 2)
    return found


def assemble(folder):
    """Figures by chip and kernel, and what spills."""
    by_chip, faults = {chip: {} for chip in READ}, []
    for compressed in sorted((ROOT / "kernels/ptx").glob("*.ptx.zst")):
        file, most = folder / compressed.stem, []
        file.write_bytes(zstandard.decompress(compressed.read_bytes()))
        for chip in CHIPS:
            binary = folder / f"{file.stem}.cubin"
            said = run(TOOLS / "cuda_nvcc/bin/ptxas", "-v", f"-arch={chip}", file, "-o", binary)[1]
            registers = {kernel: int(count) for kernel, count in re.findall(r"(?s)entry function '(\w+)'.*?Used (\d+) registers", said)}
            most.append(f"{chip} {max(registers.values())}")
            for function, properties in re.findall(r"Function properties for (\S+)\n\s*(.*)", said):
                if re.search(r"\b[1-9]", properties):
                    faults.append(f"{function} for {chip}: {properties}: use fewer registers, and constant indices of arrays")
            if chip in READ:
                found = sass.parse(run(TOOLS / "cu13/bin/nvdisasm", "-c", binary)[0])
                by_chip[chip].update({kernel: figures(kernel, count, found[kernel]) for kernel, count in registers.items()})
        print(f"{file.name}: registers at most: {', '.join(most)}")
    return by_chip, faults


def write_limits(by_chip):
    """Limits from what was measured: registers as they are allocated, by eight; 10% more instructions per weight."""
    lines = []
    for kernel in sorted(by_chip[READ[0]]):
        chips = {}
        for chip in READ:
            measured = by_chip[chip][kernel]
            chips[chip] = {"registers": -(-measured["registers"] // 8) * 8, "in_flight": measured["in_flight"]}
            if "per_weight" in measured:
                chips[chip]["per_weight"] = round(1.1 * measured["per_weight"], 2)
        lines.append(f"{json.dumps(kernel)}: {json.dumps(chips)}")
    LIMITS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def worsened(by_chip):
    """What exceeds its limit."""
    limits, found = json.loads(LIMITS.read_text()), []
    for chip, kernel, measured in ((chip, *one) for chip, kernels in by_chip.items() for one in sorted(kernels.items())):
        if chip not in limits.get(kernel, {}):
            found.append(f"{kernel} for {chip} has no limits")
        for figure, limit in limits.get(kernel, {}).get(chip, {}).items():
            _, is_gain, advice = FIGURES[figure]
            value = measured.get(figure)
            if value is None or (value < limit if is_gain else value > limit):
                found.append(f"{kernel} for {chip}: {figure} {value}, limit {limit}: {advice}")
    return found


def print_table(rows):
    """All columns but the first aligned to the right."""
    widths = [max(len(str(row[column])) for row in rows) for column in range(len(rows[0]))]
    for first, *others in rows:
        print("  ".join([first.ljust(widths[0]), *(str(cell).rjust(width) for cell, width in zip(others, widths[1:]))]).rstrip())


def self_test():
    """Reads listings whose figures are known."""
    def listing(kernel, lines):
        return f".text.{kernel}:\n" + "".join(f"{line}:\n" if line.startswith(".") else f"/*0000*/ {line} ;\n" for line in lines.split("; "))

    # Eight instructions for two blocks of 32 weights; left out are a fallback with small loads and the path of a diverged warp.
    lines = ("LDC R1, c[0x0][0x28]; .L_x_1; @!P1 BRA `(.L_x_2); LDG.E.U16 R4, [R2.64]; IMAD R6, R4, 0x2, RZ; BRA `(.L_x_3); .L_x_2; "
             "LDG.E.NA.128.CONSTANT R8, [R2.64]; @!P2 LDG.E.NA.128.CONSTANT R12, [R2.64+0x200]; LDG.E.U16 R16, [R18.64]; FADD R6, R11, R6; "
             "FADD R6, R15, R16; .L_x_3; BRA.DIV UR6, `(.L_x_4); .L_x_5; @P0 BRA `(.L_x_1); EXIT; .L_x_4; BRA `(.L_x_5)")
    code = sass.parse(listing("project_q4_0", lines))["project_q4_0"]
    assert {start: len(body) for start, body in sass.loops(code).items()} == {1: 11}
    measured = figures("project_q4_0", 40, code)
    assert (measured["in_flight"], measured["in_flight_bytes"], measured["instructions"], measured["per_weight"]) == (3, 34, 8, 0.12), measured
    # Asynchronous copies: while one group is waited for, another is under way.
    lines = ".L_x_1; LDGSTS.E.BYPASS.128 [R53], [R28.64]; LDGDEPBAR; DEPBAR.LE SB0, 0x1; LDS R4, [R5]; @P0 BRA `(.L_x_1); EXIT"
    assert figures("copy", 8, sass.parse(listing("copy", lines))["copy"])["in_flight"] == 2


def main():
    options = sys.argv[1:]
    if not set(options) <= {"--write", "--estimate"}:
        sys.exit("usage: check-ptx.sh [--write] [--estimate]")
    self_test()
    with tempfile.TemporaryDirectory() as folder:
        by_chip, errors = assemble(pathlib.Path(folder))
    for chip, kernels in by_chip.items():
        print()
        print_table([[chip, *(title for title, *_ in FIGURES.values())],
                     *([kernel, *(measured.get(figure, "-") for figure in FIGURES)] for kernel, measured in sorted(kernels.items()))])
    if "--estimate" in options:
        gpu_estimate.print_estimates(by_chip[READ[0]], print_table)
    if "--write" in options:
        write_limits(by_chip)
    worse = worsened(by_chip)
    for line in errors + worse:
        print(f"error: {line}", file=sys.stderr)
    if worse:
        print("hint: if intended, run scripts/check-ptx.sh --write", file=sys.stderr)
    sys.exit(1 if errors or worse else 0)


main()
