"""Main loop of a kernel and what it loads, from a listing of its machine code (SASS) by `nvdisasm`."""

import dataclasses
import re

LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\d\s+)?([A-Z][A-Z0-9_.]*)\s*(.*?)\s*;")
# Flags and partial sums of other thread blocks are loaded past L1 (`STRONG`); they are not streamed.
LOAD = re.compile(r"(LDG|LDGSTS)\.(?!.*STRONG)")
SIZES = {".128": 16, ".64": 8, ".U16": 2, ".S16": 2, ".U8": 1, ".S8": 1}
WIDE = 16


@dataclasses.dataclass
class Instruction:
    opcode: str
    operands: str
    is_conditional: bool
    # Index of the instruction that it may jump to.
    target: object = None
    # Bytes a thread loads from global memory.
    loaded: int = 0

    def __post_init__(self):
        if LOAD.match(self.opcode):
            self.loaded = next((size for suffix, size in SIZES.items() if suffix in self.opcode), 4)
        # Registers read or written. Operands of matrix products and stores of 16 bytes count as four, which they have at most.
        count = 4 if re.match(r"HMMA|ST.*\.128", self.opcode) else 1
        self.registers, first = set(), None
        for number, is_pair in re.findall(r"\bR(\d+)(\.64)?", self.operands):
            first = int(number) if first is None else first
            self.registers.update(range(int(number), int(number) + max(count, 2 if is_pair else 1)))
        is_copy = self.opcode.startswith("LDGSTS")
        self.results = set(range(first, first + max(1, self.loaded // 4))) if self.loaded and not is_copy else set()


def parse(listing):
    """Instructions of each kernel."""
    kernels, labels, code = {}, {}, None
    for line in listing.splitlines():
        if match := re.match(r"\.text\.(\w+):", line):
            code = kernels.setdefault(match[1], [])
        elif match := re.match(r"(\.L_x_\d+):", line):
            labels[match[1]] = len(code)
        elif match := LINE.search(line):
            predicate, opcode, operands = match.groups()
            # Diverged warps run a shuffle out of line, by BRA.DIV; that path is left out. A CALL of a label is a jump.
            is_jump = opcode.startswith(("BRA", "CALL")) and ".DIV" not in opcode
            label = re.search(r"\((\.L_x_\d+)\)", operands) if is_jump else None
            is_conditional = bool(predicate) or ".DIV" in opcode or bool(re.match(r"!?U?P\d", operands))
            code.append(Instruction(opcode, operands, is_conditional, label and label[1]))
    for instruction in (one for instructions in kernels.values() for one in instructions):
        instruction.target = labels.get(instruction.target)
    return kernels


def successors(code, index):
    one = code[index]
    ends = (one.opcode.startswith(("BRA", "EXIT", "RET")) or one.target is not None) and not one.is_conditional
    following = [] if ends or index + 1 == len(code) else [index + 1]
    return following + ([] if one.target is None else [one.target])


def reachable(edges, start, without):
    """What can be reached from `start` by `edges`, not through `without`."""
    found, waiting = {start}, [start]
    while waiting:
        for index in edges[waiting.pop()]:
            if index not in found and index != without:
                found.add(index)
                waiting.append(index)
    return found


def loops(code):
    """Natural loops: first instruction, and the set of all."""
    forwards = [successors(code, index) for index in range(len(code))]
    backwards = [[] for _ in code]
    for index, following in enumerate(forwards):
        for other in following:
            backwards[other].append(index)
    found, live = {}, reachable(forwards, 0, None)
    for end in sorted(live):
        for start in forwards[end]:
            # A backward branch closes a loop only if every path to it passes its target.
            if start <= end and (start == 0 or end == start or end not in reachable(forwards, 0, start)):
                body = reachable(backwards, end, start) & live if end != start else set()
                found[start] = found.get(start, {start}) | body
    return found


def hot_path(code, start, body):
    """One iteration of a loop: the path with most bytes in loads of 16 bytes, then most bytes, then most instructions.

    Fallbacks for unaligned rows are thus left out. Inner loops count once.
    """
    best, following = {}, {}
    for index in sorted(body, reverse=True):
        size, after = code[index].loaded, successors(code, index)
        choices = [(best[other], other) for other in after if other > index and other in best]
        choices += [((0, 0, 0), None)] if start in after else []
        if choices:
            rest, following[index] = max(choices, key=lambda choice: choice[0])
            best[index] = (rest[0] + size * (size >= WIDE), rest[1] + size, rest[2] + 1)
    path, index = [], start
    while index is not None:
        path.append(code[index])
        index = following.get(index)
    return path


def main_loop(code, counted):
    """One iteration of the loop that streams data, among the loops with loads whose opcode matches `counted`.

    Of the outermost loops it is one with loads of 16 bytes if there are any, with most instructions. In it, it is the innermost with such
    loads, else the innermost; of several, the one that loads most. Asynchronous copies count where they are waited for.
    """
    def loads(body, least):
        return any(code[index].loaded >= least and re.match(counted, code[index].opcode) for index in body)

    def wide(path):
        waits = any(one.opcode.startswith("DEPBAR") for one in path)
        return sum(one.loaded for one in path if one.loaded >= WIDE and (one.results or waits))

    every = loops(code)
    found = {start: body for start, body in sorted(every.items()) if loads(body, 1)}
    if not found:
        return []
    outermost = max(found.values(), key=lambda body: (loads(body, WIDE), len(body)))
    paths = {start: hot_path(code, start, body) for start, body in found.items() if body <= outermost}
    chosen = {start: every[start] for start, path in paths.items() if wide(path)}
    rivals = chosen or every
    chosen = [start for start in chosen or paths if not any(other < every[start] for other in rivals.values())] or paths
    return max((paths[start] for start in chosen), key=lambda path: (wide(path), sum(one.loaded for one in path)))


def in_flight(path):
    """Most loads, and their bytes, that a thread has issued when it first uses one of them; all if it uses none here."""
    most, pending, groups = (0, 0), [], 0
    # The second pass sees the loads that an iteration issues for the next.
    for one in path * 2:
        used = [place for place, (load, _) in enumerate(pending) if load.results & one.registers]
        if one.opcode.startswith("DEPBAR"):
            # Waits until at most so many groups of asynchronous copies are under way.
            ended = groups - int(one.operands.split(",")[1], 16)
            used = [place for place, (load, group) in enumerate(pending) if not load.results and group < ended]
        if used:
            most = max(most, (sum(load.loaded for load, _ in pending), -len(pending)))
            pending = pending[max(used) + 1 :]
        if one.loaded:
            pending.append((one, groups))
        groups += one.opcode == "LDGDEPBAR"
    return (-most[1], most[0]) if most[0] else (len(pending) // 2, sum(load.loaded for load, _ in pending) // 2)
