"""Estimated time of a token, kernel by kernel, from the machine code (SASS) and a model's shapes. Nothing here is measured.

time = gap + before + max(memory, issue, latency) + after
  memory   bytes / bandwidth: the floor
  issue    instructions of the main loop / what the schedulers of the busy multiprocessors issue
  latency  of the busiest warp: trips to memory, each for as many bytes as are in flight, and its instructions
  before   of a block's main loop: the longer of what a warp waits for and what all warps issue
  after    the main loop: sums across blocks
The main loop's bytes, loads in flight and instructions are read from the machine code; grids are those of `kernels/src/cuda`.
What surrounds the loop is stated in `launches`, as read in the sources: a change of a kernel changes it too.
"""

import dataclasses
from math import ceil, log2

# H100: cycles per microsecond, bytes per microsecond, cycles of a load from memory and from L2.
MULTIPROCESSORS, SCHEDULERS, CLOCK, BANDWIDTH, MEMORY, L2 = 132, 4, 1750, 3.0e6, 480, 260
# Of a multiprocessor: threads, registers, bytes of shared memory.
THREADS, REGISTERS, SHARED = 2048, 65536, 227 * 1024
# Microseconds between two kernels of a graph; of the host per token: graph launch, copies, sampling.
GAP, HOST = 1.0, 80.0
# Cycles: between two instructions of a lone warp, a shuffle, a sum over the lanes, a barrier, `is_last_block`.
STEP, SHUFFLE, WARP_SUM, BARRIER, LAST_BLOCK = 2, 29, 145, 30, 1000
# Share of a predictor's hidden units above zero.
ACTIVE_UNITS = 0.5
# Bytes per weight.
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
    positions: int = 288
    # Positions that the cache has room for.
    context: int = 4096


MODELS = [Model("7B", 4096, 32, 11008, 32, 32), Model("70B", 8192, 80, 28672, 64, 8)]


@dataclasses.dataclass
class Launch:
    label: str
    kernel: str
    blocks: int
    threads: int
    # Bytes of shared memory of a block; bytes read from memory.
    shared: int
    bytes: float
    # The busiest warp runs the main loop `rounds` times. In each, a lane loads so many bytes, and waits further cycles.
    rounds: int
    lane_bytes: float
    round_cycles: int = 0
    # Loads from L2 one after the other, instructions of a warp, further cycles.
    before: tuple = (0, 0, 0)
    after_cycles: int = 0
    # Bytes that all lanes load, where they share some.
    loaded: float = 0
    # Figures of the main loop that its instructions do not show, such as `in_flight_bytes` of copies in inner loops.
    stated: dict = dataclasses.field(default_factory=dict)


def launches(model):
    """Launches of a layer, others for comparison, and those of the head."""
    hidden, ffn, size, width = model.hidden, model.ffn, model.head_size, model.heads * model.head_size

    def row_blocks(rows):
        return min(ceil(rows / 8), 4 * MULTIPROCESSORS)

    def input_vector(columns, norm):
        # Every block loads the whole vector from L2, one element a thread at a time, then the norm's weights alike. Each warp then
        # rounds blocks of 32 to int8: 80 instructions, among them ten shuffles and two divisions, in 500 cycles.
        steps, instructions = columns / 256, 42 if norm else 17
        return steps * (2 if norm else 1), steps * (instructions + 80), steps * (instructions * STEP + 500)

    def project(label, kernel, rows, columns, bytes_per_weight, norm):
        blocks = row_blocks(rows)
        return Launch(label, kernel, blocks, 256, columns * 21 // 4 + 128, rows * columns * bytes_per_weight,
                      ceil(rows / (8 * blocks)), columns * bytes_per_weight / 32, WARP_SUM, input_vector(columns, norm))

    def attention(label, kernel, positions):
        group, tiles = model.heads // model.kv_heads, ceil(positions / 32)
        splits = max(1, min(ceil(2 * MULTIPROCESSORS / model.kv_heads), ceil(model.context / 64)))
        queries, elements = ceil(group / 4), ceil(group * size / 128)
        # The position; a warp's queries and the key: load and rotate; the value. Each step waits for its load.
        trips = 1 + (queries + 1) * (size // 32 + size // 64) + size // 32
        # Per tile and query a dot product of scalar loads from shared memory and two reductions; per element a sum of 32 values.
        round_cycles = queries * 1200 + elements * 350 + 4 * BARRIER
        # Per element, one load after the other: each split's maximum twice, and what the used splits hold.
        merge = elements * (2 * splits + min(splits, tiles)) * L2
        return Launch(label, kernel, model.kv_heads * splits, 128, 4 * (2 * group * size + group * 32 + 64 * (size + 4)),
                      4 * positions * model.kv_heads * size, ceil(tiles / splits), size, round_cycles,
                      (trips, trips * 40, trips * 40 * STEP), LAST_BLOCK + merge)

    def predict(label, kernel):
        # A warp takes 32 units and loads their values. A lane is a neuron and loads quant and scale of each active unit.
        units = model.rank * ACTIVE_UNITS * ffn
        return Launch(label, kernel, ceil(ffn / 32), 256, 1024, units * Q8_0, ceil(model.rank / 256), 32 * ACTIVE_UNITS * 3, L2,
                      (0, 40, 80), L2 + 2 * BARRIER + 8 * 30, units * 3)

    def gate_up(label, kernel, active):
        blocks, neurons = row_blocks(ffn), ffn * active
        trips, instructions, cycles = input_vector(hidden, True)
        if active < 1:
            # Every block counts the mask's bits, 256 words at a time, by a prefix sum; each warp searches its neuron's bit.
            steps = ceil(ffn / 32 / 256)
            trips, instructions = trips + steps, instructions + steps * 100
            cycles += steps * 2 * (WARP_SUM + BARRIER) + log2(ffn / 32) * 40
        # Gate, then up, each with its sum over the lanes and the activation function.
        return Launch(label, kernel, blocks, 256, hidden * 21 // 4 + 128, 2 * neurons * hidden * Q4_0,
                      2 * ceil(neurons / (8 * blocks)), hidden * Q4_0 / 32, WARP_SUM + 150, (trips, instructions, cycles))

    def down(label, kernel, active):
        tiles = ceil(hidden / 512)
        chunks = ceil(2 * MULTIPROCESSORS / tiles)
        words = ceil(ffn / 32 / chunks)
        # Eight words at a time: load h, list the active neurons by a prefix sum over the block.
        steps = ceil(words / 8)
        # Sums of 16 row groups meet in shared memory: per warp eight stores, 32 cycles each as lanes hit the same banks. The last
        # block adds two columns a thread over the chunks, 16 loads at a time.
        stores = ceil(tiles * chunks / MULTIPROCESSORS) * 8 * 8 * 32
        return Launch(label, kernel, tiles * chunks, 256, 37 * 1024, ffn * active * hidden * Q4_0, ceil(words * 32 * active / 16),
                      18, 0, (steps, steps * 100, steps * (WARP_SUM + 3 * BARRIER + 120)),
                      stores + 200 + LAST_BLOCK + 2 * (ceil(chunks / 16) + 1) * L2)

    qkv_rows, logits, share = width + 2 * model.kv_heads * size, model.vocabulary, f"{100 * model.active:.0f} %"
    return [
        project("q, k, v", "project_q4_0", qkv_rows, hidden, Q4_0, True),
        attention(f"attention, {model.positions} positions", "attention_f16", model.positions),
        project("output", "project_q4_0", hidden, width, Q4_0, False),
        project(f"predictor A, rank {model.rank}", "project_q8_0", model.rank, hidden, Q8_0, True),
        predict(f"predictor B, rank {model.rank}", "predict_q8_0"),
        gate_up(f"gate, up, {share}", "gate_up_q4_0", model.active),
        down(f"down, {share}", "down_q4_0", model.active),
    ], [
        attention(f"attention, {model.context} positions", "attention_f16", model.context),
        gate_up("gate, up, dense", "gate_up_q4_0", 1),
        down("down, dense", "down_q4_0", 1),
    ], [
        project("head", "project_q4_0", logits, hidden, Q4_0, True),
        # A logit a thread at a time, then two reductions in shared memory.
        Launch("arg max", "arg_max", 32, 256, 2064, 4 * logits, 1, 4 * logits / 8192, 0, (0, 0, 0), 32 * BARRIER + LAST_BLOCK + L2),
    ]


def estimate(launch, loop):
    """Terms in microseconds, and what they follow from."""
    warps, busy = launch.threads // 32, min(launch.blocks, MULTIPROCESSORS)
    registers = -(-loop["registers"] // 8) * 8 * launch.threads
    resident = min(THREADS // launch.threads, REGISTERS // registers, SHARED // (launch.shared + 1024))
    waves = ceil(launch.blocks / (MULTIPROCESSORS * resident))
    instructions = (launch.loaded or launch.bytes) / (32 * loop["bytes"]) * loop["instructions"]
    trips = launch.rounds * ceil(launch.lane_bytes / loop["in_flight_bytes"])
    own = ceil(launch.lane_bytes / loop["bytes"]) * loop["instructions"] * STEP + launch.round_cycles
    before_trips, before_instructions, before_cycles = launch.before
    issued_before = ceil(launch.blocks / MULTIPROCESSORS) * warps / SCHEDULERS * before_instructions
    cycles = {
        "before": max(waves * (before_trips * L2 + before_cycles), issued_before),
        "memory": launch.bytes / BANDWIDTH * CLOCK,
        "issue": instructions / (busy * SCHEDULERS),
        "latency": waves * (trips * MEMORY + launch.rounds * own),
        "after": launch.after_cycles,
    }
    terms = {term: value / CLOCK for term, value in cycles.items()}
    time = GAP + terms["before"] + max(terms["memory"], terms["issue"], terms["latency"]) + terms["after"]
    return {"resident": resident, "instructions": instructions, "trips": trips, **terms, "time": time, "floor": terms["memory"]}


def print_estimates(figures, print_table):
    """One table per model; `figures` are those of the main loops by kernel."""
    terms = ["before", "memory", "issue", "latency", "after", "time", "floor"]
    for model in MODELS:
        print(f"\nEstimate in microseconds: {model.name} in q4_0 on an H100, {model.positions} positions, {model.active:.0%} of the neurons")
        rows, token = [["", "blocks", "fit an SM", "MB", "M instr.", "trips", *terms]], [HOST, 0]
        for title, times, part in zip(["a layer", None, "the head"], [model.layers, 0, 1], launches(model)):
            total = [0, 0]
            for launch in part:
                if launch.kernel not in figures:
                    print(f"left out: {launch.label}: no kernel {launch.kernel}")
                    continue
                found = estimate(launch, {**figures[launch.kernel], **launch.stated})
                total = [total[0] + found["time"], total[1] + found["floor"]]
                rows.append([launch.label, launch.blocks, found["resident"], f"{launch.bytes / 1e6:.2f}",
                             f"{found['instructions'] / 1e6:.2f}", found["trips"], *(f"{found[term]:.1f}" for term in terms)])
            token = [value + times * added for value, added in zip(token, total)]
            if title:
                rows.append([f"sum of {title}", *[""] * 10, *(f"{value:.1f}" for value in total)])
        rows.append([f"token, with {HOST:.0f} of the host", *[""] * 10, *(f"{value:.0f}" for value in token)])
        print_table(rows)
