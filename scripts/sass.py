"""Figures of a kernel's machine code (SASS), from a listing of `nvdisasm`: its main loop and what that loop loads."""

import dataclasses
import re

LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?(U?P\d)\s+)?([A-Z][A-Z0-9_.]*)\s*(.*?)\s*;")
REGISTER = re.compile(r"\bR(\d+)(\.64)?")
# Loads of the same data by several thread blocks bypass L1 (`STRONG`): flags and partial sums, not weights.
LOAD = re.compile(r"(LDG|LDGSTS)\.(?!.*STRONG)")
WIDE = 16


@dataclasses.dataclass
class Instruction:
    opcode: str
    operands: str
    # Not always executed.
    is_predicated: bool
    # Label of a branch, then index of its target.
    target: object = None

    @property
    def loaded_bytes(self):
        """Bytes a thread loads from global memory."""
        if not LOAD.match(self.opcode):
            return 0
        for suffix, size in ((".128", 16), (".64", 8), (".U8", 1), (".S8", 1), (".U16", 2), (".S16", 2)):
            if suffix in self.opcode:
                return size
        return 4

    def registers(self):
        """Registers it reads or writes. Operands of matrix products and stores of 16 bytes
        count as four registers, which they have at most."""
        found = set()
        wide = 4 if re.match(r"HMMA|ST.*\.128", self.opcode) else 1
        for number, is_pair in REGISTER.findall(self.operands):
            found.update(range(int(number), int(number) + max(wide, 2 if is_pair else 1)))
        return found

    def loaded_registers(self):
        first = int(REGISTER.search(self.operands).group(1))
        return set(range(first, first + max(1, self.loaded_bytes // 4)))


def parse(listing):
    """Instructions of each kernel."""
    kernels, labels, code = {}, {}, None
    for line in listing.splitlines():
        if match := re.match(r"\.text\.(\w+):", line):
            code = kernels.setdefault(match[1], [])
        elif match := re.match(r"(\.L_x_\d+):", line):
            labels[match[1]] = len(code)
        elif match := LINE.search(line):
            _, predicate, opcode, operands = match.groups()
            # Diverged warps run a shuffle out of line, by BRA.DIV; that path is left out. A CALL of a label is a jump.
            label = re.search(r"\((\.L_x_\d+)\)", operands) if opcode.startswith(("BRA", "CALL")) else None
            target = label[1] if label and ".DIV" not in opcode else None
            is_predicated = bool(predicate) or ".DIV" in opcode or bool(re.match(r"!?U?P\d", operands))
            code.append(Instruction(opcode, operands, is_predicated, target))
    for instructions in kernels.values():
        for instruction in instructions:
            instruction.target = labels.get(instruction.target)
    return kernels


def successors(code, index):
    one = code[index]
    ends = (one.opcode.startswith(("BRA", "EXIT", "RET")) or one.target is not None) and not one.is_predicated
    following = [] if ends or index + 1 >= len(code) else [index + 1]
    return following + ([one.target] if one.target is not None else [])


def reachable(edges, start, without):
    """Instructions that can be reached from `start` by `edges`, not through `without`."""
    found, open_ends = {start}, [start]
    while open_ends:
        for index in edges(open_ends.pop()):
            if index not in found and index != without:
                found.add(index)
                open_ends.append(index)
    return found


def loops(code):
    """Natural loops: first instruction, and the set of all."""
    forwards = [successors(code, index) for index in range(len(code))]
    backwards = [[] for _ in code]
    for index, following in enumerate(forwards):
        for other in following:
            backwards[other].append(index)
    found = {}
    live = reachable(forwards.__getitem__, 0, None)
    for end, following in enumerate(forwards):
        for start in following:
            # A backward branch closes a loop only if every path to it passes its target.
            if start > end or end not in live or (start and end in reachable(forwards.__getitem__, 0, start)):
                continue
            body = reachable(backwards.__getitem__, end, start) if start != end else set()
            found[start] = found.get(start, set()) | (body & live) | {start}
    return found


def hot_path(code, start, body):
    """One iteration of a loop: the path with most bytes in loads of 16 bytes, then most bytes, then most instructions.

    Fallbacks for unaligned rows are thus left out. Inner loops count once.
    """
    best, following = {}, {}
    for index in sorted(body, reverse=True):
        size = code[index].loaded_bytes
        own = (size if size >= WIDE else 0, size, 1)
        after = successors(code, index)
        choices = [(best[other], other) for other in after if other > index and other in best]
        if start in after:
            choices.append(((0, 0, 0), None))
        if choices:
            rest, following[index] = max(choices, key=lambda choice: choice[0])
            best[index] = tuple(map(sum, zip(own, rest)))
    path, index = [], start
    while index is not None:
        path.append(code[index])
        index = following.get(index)
    return path


def main_loop(code, counted):
    """One iteration of the loop that streams data, chosen among the loops with loads that match `counted`.

    Among the outermost loops it is one with loads of 16 bytes if there are any, with most instructions; in it, the innermost
    loop that loads most per iteration.
    """
    found = {
        start: body for start, body in loops(code).items()
        if any(code[index].loaded_bytes and re.match(counted, code[index].opcode) for index in body)
    }
    if not found:
        return []
    outermost = max(found.values(), key=lambda body: (any(code[index].loaded_bytes >= WIDE for index in body), len(body)))
    inner = {start: body for start, body in found.items() if body <= outermost}
    innermost = {
        start: body for start, body in inner.items() if not any(other < body for other in loops(code).values())
    } or inner
    paths = [hot_path(code, start, body) for start, body in sorted(innermost.items())]
    return max(paths, key=lambda path: [sum(one.loaded_bytes for one in path if one.loaded_bytes >= WIDE),
                                        sum(one.loaded_bytes for one in path)])


def in_flight(path):
    """Most loads, and their bytes, that a thread has issued when it first uses one of them."""
    most, pending, groups = (0, 0), [], 0
    # The second pass sees the loads that an iteration issues for the next.
    for one in path * 2:
        size, used = one.loaded_bytes, one.registers()
        hit = max((place for place, (wanted, *_) in enumerate(pending) if wanted and wanted & used), default=None)
        if one.opcode == "LDGDEPBAR":
            groups += 1
        if one.opcode.startswith("DEPBAR"):
            # Waits until at most that many groups of asynchronous copies are pending.
            kept = groups - int(one.operands.split(",")[1].strip(), 16)
            waited = [place for place, (wanted, _, group) in enumerate(pending) if not wanted and group < kept]
            hit = max(waited, default=None)
        if hit is not None:
            most = max(most, (sum(bytes for _, bytes, _ in pending), -len(pending)))
            pending = pending[hit + 1 :]
        if size:
            wanted = set() if one.opcode.startswith("LDGSTS") else one.loaded_registers()
            pending.append((wanted, size, groups))
    return -most[1], most[0]
