"""Estimated time of a token, kernel by kernel, from the machine code and the shapes of a model. Nothing here is measured.

time = gap + before + max(memory, issue, latency) + after
  memory   bytes / bandwidth; it is the floor
  issue    instructions of the main loop / what the schedulers of the busy multiprocessors issue
  latency  of the busiest warp: trips to memory, each for as many bytes as are in flight, and its own instructions
  before   what a block does before its main loop: the longer of a warp's waiting and of all warps' instructions
  after    sums across blocks
What the main loop loads and issues is read from the machine code (SASS); grids are those of `kernels/src/cuda`. What happens
before and after the loop is stated in `launches`, as read in the sources: change it together with a kernel.
"""

import dataclasses
from math import ceil, log2

# An H100: cycles per microsecond, bytes per microsecond, cycles of a load from memory and from L2.
MULTIPROCESSORS, SCHEDULERS, CLOCK, BANDWIDTH, MEMORY, L2 = 132, 4, 1750, 3.0e6, 480, 260
# Of a multiprocessor: threads, registers, bytes of shared memory.
THREADS, REGISTERS, SHARED = 2048, 65536, 227 * 1024
# Microseconds between two kernels of a graph, and of the host per token: graph launch, copies, sampling.
GAP, HOST = 1.0, 80.0
# Cycles: between two instructions of a lone warp, a shuffle, a barrier, `is_last_block` (two fences and an atomic).
STEP, SHUFFLE, BARRIER, LAST_BLOCK = 2, 29, 30, 1000
WARP_SUM = 5 * SHUFFLE
# Of the hidden units of a predictor, the share above zero.
ACTIVE_UNITS = 0.5
Q4_0, Q8_0 = 18 / 32, 34 / 32


@dataclasses.dataclass
class Model:
    name: str
    hidden: int
    layers: int
    ffn: int
    heads: int
    kv_heads: int
    head_size: int = 128
    vocabulary: int = 32000
    rank: int = 256
    active: float = 0.1
    # Positions in the cache, and those it has room for.
    positions: int = 288
    context: int = 4096


MODELS = [Model("7B", 4096, 32, 11008, 32, 32), Model("70B", 8192, 80, 28672, 64, 8)]


@dataclasses.dataclass
class Launch:
    label: str
    kernel: str
    blocks: int
    threads: int
    # Of a block: bytes of shared memory.
    shared: int
    # Read from memory; all lanes together ask for `asked`, more if they share what they load.
    bytes: float
    # The busiest warp runs the main loop `rounds` times, and each of its lanes loads so many bytes in it.
    rounds: int
    lane_bytes: float
    # Cycles of a round beside the loop's own instructions.
    round_cycles: int = 0
    # Before the loop: loads from L2 one after the other, instructions of a warp, and further cycles of waiting.
    before: tuple = (0, 0, 0)
    after_cycles: int = 0
    asked: float = 0
    times: int = 1
    # Figures of the main loop that its instructions do not show: `bytes`, `instructions`, `in_flight_bytes`.
    stated: dict = dataclasses.field(default_factory=dict)


def launches(model):
    """Launches of a layer, and those of the head."""
    hidden, ffn = model.hidden, model.ffn

    def row_blocks(rows):
        return min(ceil(rows / 8), 4 * MULTIPROCESSORS)

    def input_shared(columns):
        return columns * 5 + columns // 4 + 128

    def input_vector(columns, norm):
        # Each block of 256 threads loads the whole vector from L2, one element a thread at a time, then again the norm's weights; then
        # each warp rounds blocks of 32 to int8: 80 instructions with ten shuffles, two divisions and a load, 500 cycles.
        steps = columns / 256
        instructions = steps * ((42 if norm else 17) + 80)
        return (steps * (2 if norm else 1), instructions, steps * ((42 if norm else 17) * STEP + 500))

    def project(label, kernel, rows, columns, size, norm, times=1):
        blocks = row_blocks(rows)
        return Launch(label, kernel, blocks, 256, input_shared(columns), rows * columns * size, ceil(rows / (8 * blocks)), columns * size / 32,
                      WARP_SUM, input_vector(columns, norm), times=times)

    def attention(label, kernel, positions, times=1):
        group, size = model.heads // model.kv_heads, model.head_size
        splits = max(1, min(ceil(2 * MULTIPROCESSORS / model.kv_heads), ceil(model.context / 64)))
        tiles = ceil(positions / 32)
        rounds = ceil(tiles / splits)
        elements = ceil(group * size / 128)
        # The position; query heads of a warp, and one key: load, rotate; value: load. Each step waits for its load.
        trips = 1 + (ceil(group / 4) + 1) * (size // 32 + size // 64) + size // 32
        # Per tile, a warp's queries: a dot product of scalar loads from shared memory with conflicts, two reductions; then a thread's
        # elements: the weighted sum of 32 values; barriers.
        round_cycles = ceil(group / 4) * 1200 + elements * 350 + 4 * BARRIER
        # Merge: per element one load after the other: each split's maximum twice, and what the used splits hold.
        merge = elements * (2 * splits + min(splits, tiles)) * L2
        shared = (2 * group * size + group * 32 + 2 * 32 * (size + 4)) * 4
        return Launch(label, kernel, model.kv_heads * splits, 128, shared, 2 * 2 * positions * model.kv_heads * size, rounds,
                      2 * 32 * size * 2 / 128, round_cycles, (trips, trips * 40, trips * 40 * STEP), LAST_BLOCK + merge, times=times)

    def predict(kernel, size):
        # Per warp: blocks of 32 units, whose values it loads first. A lane is a neuron, and loads quant and scale of each active unit.
        units = 32 * ACTIVE_UNITS
        rounds, loaded = ceil(model.rank / 256), 3
        return Launch(f"predictor B, rank {model.rank}", kernel, ceil(ffn / 32), 256, 1024, model.rank * ACTIVE_UNITS * ffn * size, rounds,
                      units * loaded, L2, (0, 40, 80), L2 + 2 * BARRIER + 8 * 30, asked=model.rank * ACTIVE_UNITS * ffn * loaded)

    def gate_up(label, kernel, active, times=1):
        blocks, neurons = row_blocks(ffn), ffn * active
        trips, instructions, cycles = input_vector(hidden, True)
        if active < 1:
            # Each block counts the mask's bits, 256 words at a time: a load, a prefix sum; each warp then searches its neuron.
            steps = ceil(ffn / 32 / 256)
            trips, instructions = trips + steps, instructions + steps * 100
            cycles += steps * (2 * WARP_SUM + 2 * BARRIER) + log2(ffn / 32) * 40
        # Gate, then up: each waits for its own row, and for the sum over the lanes.
        return Launch(label, kernel, blocks, 256, input_shared(hidden), 2 * neurons * hidden * Q4_0, 2 * ceil(neurons / (8 * blocks)),
                      hidden * Q4_0 / 32, WARP_SUM + 150, (trips, instructions, cycles), times=times)

    def down(label, kernel, active, times=1):
        tiles = ceil(hidden / 512)
        chunks = max(1, ceil(2 * MULTIPROCESSORS / tiles))
        words = ceil(ffn / 32 / chunks)
        # Eight words at a time: load h, list the active neurons by a prefix sum over the block.
        steps = ceil(words / 8)
        before = (steps, steps * 100, steps * (WARP_SUM + 3 * BARRIER + 8 * 15))
        # Sums of the 16 row groups meet in shared memory: eight stores of 16 bytes, 32 cycles each as all lanes hit the same banks. The last
        # block adds two columns a thread over the chunks, up to 16 loads at a time.
        blocks_each = ceil(tiles * chunks / MULTIPROCESSORS)
        after = blocks_each * 8 * 8 * 32 + 200 + LAST_BLOCK + 2 * (ceil(chunks / 16) + 1) * L2
        return Launch(label, kernel, tiles * chunks, 256, 37 * 1024, ffn * active * hidden * Q4_0, ceil(words * 32 * active / 16),
                      18, 0, before, after, times=times)

    width = model.heads * model.head_size
    rows = width + 2 * model.kv_heads * model.head_size
    per_cent = f"{100 * model.active:.0f} %"
    layer = [
        project("q, k, v", "project_q4_0", rows, hidden, Q4_0, True),
        attention(f"attention, {model.positions} positions", "attention_f16", model.positions),
        project("output", "project_q4_0", hidden, width, Q4_0, False),
        project(f"predictor A, rank {model.rank}", "project_q8_0", model.rank, hidden, Q8_0, True),
        predict("predict_q8_0", Q8_0),
        gate_up(f"gate, up, {per_cent}", "gate_up_q4_0", model.active),
        down(f"down, {per_cent}", "down_q4_0", model.active),
        # For comparison, not in the sum.
        attention(f"attention, {model.context} positions", "attention_f16", model.context, times=0),
        gate_up("gate, up, dense", "gate_up_q4_0", 1, times=0),
        down("down, dense", "down_q4_0", 1, times=0),
    ]
    # The largest of the logits: 32 blocks, a logit a thread at a time, two reductions in shared memory.
    logits = model.vocabulary
    arg_max = Launch("arg max", "arg_max", 32, 256, 2064, logits * 4, 1, logits / 8192 * 4, 0, (0, 0, 0), 2 * 8 * 2 * BARRIER + LAST_BLOCK + L2)
    return layer, [project("head", "project_q4_0", logits, hidden, Q4_0, True), arg_max]


def estimate(launch, loop):
    """Terms in microseconds, by name."""
    warps = launch.threads // 32
    resident = min(THREADS // launch.threads, REGISTERS // (-(-loop["registers"] // 8) * 8 * launch.threads), SHARED // (launch.shared + 1024))
    waves = ceil(launch.blocks / (MULTIPROCESSORS * resident))
    schedulers = SCHEDULERS * min(launch.blocks, MULTIPROCESSORS)
    iterations = (launch.asked or launch.bytes) / (32 * loop["bytes"])
    instructions = iterations * loop["instructions"]
    trips = launch.rounds * ceil(launch.lane_bytes / loop["in_flight_bytes"])
    own = launch.rounds * (ceil(launch.lane_bytes / loop["bytes"]) * loop["instructions"] * STEP + launch.round_cycles)
    before_trips, before_instructions, before_cycles = launch.before
    per_scheduler = ceil(launch.blocks / MULTIPROCESSORS) * warps / SCHEDULERS
    terms = {
        "before": max(waves * (before_trips * L2 + before_cycles), per_scheduler * before_instructions) / CLOCK,
        "memory": launch.bytes / BANDWIDTH,
        "issue": instructions / schedulers / CLOCK,
        "latency": waves * (trips * MEMORY + own) / CLOCK,
        "after": launch.after_cycles / CLOCK,
    }
    terms["time"] = GAP + terms["before"] + max(terms["memory"], terms["issue"], terms["latency"]) + terms["after"]
    return {"resident": resident, "instructions": instructions, "trips": trips, **terms}


def print_estimates(figures, print_table):
    """One table per model; `figures` are those of the main loops by kernel."""
    header = ["blocks", "an SM", "MB", "M instr.", "trips", "before", "memory", "issue", "latency", "after", "time", "floor"]
    for model in MODELS:
        layer, head = launches(model)
        print(f"\nEstimate, H100, {model.name} in q4_0, {model.positions} positions, microseconds:")
        rows, totals = [["", *header]], []
        for part, times in ((layer, model.layers), (head, 1)):
            total = [0.0, 0.0]
            for launch in part:
                if launch.kernel not in figures:
                    print(f"left out: {launch.label}: there is no kernel {launch.kernel}")
                    continue
                found = estimate(launch, {**figures[launch.kernel], **launch.stated})
                total = [total[0] + launch.times * found["time"], total[1] + launch.times * found["memory"]]
                rows.append([launch.label, launch.blocks, found["resident"], f"{launch.bytes / 1e6:.2f}", f"{found['instructions'] / 1e6:.2f}", found["trips"],
                             *(f"{found[term]:.1f}" for term in header[5:-1]), f"{found['memory']:.1f}"])
            totals.append([times * value for value in total])
            rows.append(["sum of a layer" if times > 1 else "sum of the head", *[""] * 10, *(f"{value:.1f}" for value in total)])
        time, floor = (sum(values) for values in zip(*totals))
        rows.append([f"token, with {HOST:.0f} of the host", *[""] * 10, f"{time + HOST:.0f}", f"{floor:.0f}"])
        print_table(rows)
