"""Estimated time of a token, and of the products of a prompt, kernel by kernel, from the machine code (SASS) and a model's shapes.
Two constants are fitted to kernels measured on an H200 (`START`, `REACHED`); `print_calibration` compares.

time = gap + start + before + max(memory, L2, tensor, issue, latency) + after
  memory   bytes / bandwidth, without what arrives before the main loop; then the first trip and the last iteration
  issue    instructions of the main loop / what the schedulers of the busy multiprocessors issue
  L2, tensor  bytes and products of a GEMM's tiles / what L2 and the tensor cores deliver
  latency  of the busiest warp: trips to memory, each for as many bytes as are in flight, and its instructions
  before   of a block's main loop: the input from L2, then the longer of what a warp waits for and what all warps issue
  after    the main loop: sums across blocks
  floor    bytes / bandwidth
The main loop's bytes, loads in flight and instructions are read from the machine code; grids are those of `kernels/src/cuda`.
What surrounds the loop, and a GEMM's instructions, are stated in `launches` and `products`, as read in the sources and the machine
code: a change of a kernel changes them too.
"""

import dataclasses
from math import ceil, log2

# H100: cycles per microsecond, bytes per microsecond, cycles of a load from memory and from L2.
MULTIPROCESSORS, SCHEDULERS, CLOCK, BANDWIDTH, MEMORY, L2 = 132, 4, 1750, 3.0e6, 480, 260
# Bytes per cycle from L2: of all multiprocessors (5.5 TB/s), and of one.
L2_BANDWIDTH, L2_PORT = 3140, 64
# Of a multiprocessor: threads, registers, bytes of shared memory; f16 products per cycle of `mma.sync`, 62% of the peak.
THREADS, REGISTERS, SHARED, TENSOR = 2048, 65536, 227 * 1024, 1270
# Microseconds between two kernels of a graph; of the host per token: graph launch, copies, sampling.
GAP, HOST = 1.0, 80.0
# Fitted: additional microseconds of a kernel run alone; share of the limit of issue and tensor cores that a prompt's products reach.
START, REACHED = 2.8, 0.41
# Bytes per microsecond of the H200 on which kernels were measured; else it counts as an H100.
MEASURED_BANDWIDTH = 4.0e6
# Microseconds of the kernels of a layer of 7B in q4_0 alone on that card (Nsight Compute, caches not flushed), 80 positions, 10% of the
# neurons, and of 64 tokens of a prompt, 2026-11-26.
MEASURED = {
    "q, k, v": 13.8, "attention, 80 positions": 5.6, "output": 8.0, "predictor A, rank 256": 6.6, "predictor B, rank 256": 6.8,
    "gate, up, 10%": 7.4, "down, 10%": 8.8, "head": 26.5, "arg max": 5.0,
}
MEASURED_PROMPT = {
    "input of attention": 6.8, "query": 31.0, "key": 31.0, "value": 31.0, "input of output": 4.5, "output": 35.4, "input of FFN": 6.1,
    "gate": 59.9, "up": 59.9, "down": 71.4,
}
# Cycles: between two instructions of a lone warp, a shuffle, a sum over the lanes, a barrier, a load from shared memory, a division,
# `is_last_block`.
STEP, SHUFFLE, WARP_SUM, BARRIER, SHARED_LOAD, DIVISION, LAST_BLOCK = 2, 29, 145, 30, 30, 60, 1000
# Of a prefetched line of 128 bytes, what is taken to arrive: L2 may be filled by 64 bytes.
PREFETCHED = 0.5
# Bytes per microsecond over the link: copies from pinned memory (measured), and reads to memory that is not pinned (assumed).
LINK, READ_BACK = 55e3, 10e3
# Neurons on the GPU that are multiplied at a time for a prompt.
RESIDENT_NEURONS = 4096
# Share of neurons in main memory in the measured 2.5 GB plan of 7B. All keys and values are there too.
COLD = 0.92
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
    # Blocks that have work.
    blocks: int
    threads: int
    # Bytes of shared memory of a block; bytes read from memory.
    shared: int
    bytes: float
    # The busiest warp runs the main loop `rounds` times. In each, a lane loads so many bytes, and waits further cycles.
    rounds: int
    lane_bytes: float
    round_cycles: int = 0
    # Cycles that a warp waits, instructions of a warp, bytes of the input.
    before: tuple = (0, 0, 0)
    after_cycles: int = 0
    # Bytes that all lanes load, where they share some.
    loaded: float = 0
    # Bytes requested at the start of `before`.
    early: float = 0
    # Trips to memory, where they are not `lane_bytes` by bytes in flight.
    trips: object = None
    # Figures of the main loop that its instructions do not show, as inner loops count once.
    stated: dict = dataclasses.field(default_factory=dict)
    # Bytes from L2, and products of the tensor cores, in the main loop.
    l2: float = 0
    products: float = 0
    # Additional microseconds; see `START`.
    start: float = START
    # Number of identical launches, one after another.
    repeat: int = 1


def launches(model):
    """Launches of a layer, others for comparison, and those of the head."""
    hidden, ffn, size, width = model.hidden, model.ffn, model.head_size, model.heads * model.head_size

    def row_blocks(rows):
        return min(ceil(rows / 16), MULTIPROCESSORS)

    def input_vector(columns, norm):
        # Per 4096 columns 8 loads at once: 33 instructions. Rounding: 137 per 4096 columns; waits: shared memory, four shuffles, two
        # divisions, two chains of eight. Around them 230 instructions: segments, prefetches, addresses.
        loads, rounds = ceil(columns / 4096), columns / 4096
        waits = loads * L2 + rounds * (2 * SHARED_LOAD + 4 * SHUFFLE + 2 * DIVISION + 16 * STEP) + 2 * BARRIER
        instructions, read = 230 + loads * 33 + rounds * 137, 4 * columns
        if norm:
            # Squares: 32 instructions per 2048 columns, a sum over 16 warps, square root and two divisions; then the weights, which
            # come from memory: 46 instructions per 4096.
            waits += columns / 2048 * (SHARED_LOAD + 8 * STEP) + WARP_SUM + 2 * BARRIER + 5 * SHARED_LOAD + 3 * DIVISION
            waits += loads * (MEMORY + SHARED_LOAD) + BARRIER
            instructions, read = instructions + columns / 2048 * 32 + loads * 46 + 140, 2 * read
        return waits, instructions, read

    def project(label, kernel, rows, columns, bytes_per_weight, norm, accumulate=False):
        blocks = row_blocks(rows)
        # Per row: 83 instructions for the segment and the result, a sum over the lanes; a sum in place loads it.
        cycles = WARP_SUM + 83 * STEP + accumulate * L2
        return Launch(label, kernel, blocks, 512, columns * 21 // 4 + 128, rows * columns * bytes_per_weight,
                      ceil(rows / (16 * blocks)), columns * bytes_per_weight / 32, cycles, input_vector(columns, norm),
                      early=PREFETCHED * min(rows, 16 * blocks) * columns * bytes_per_weight)

    def attention(label, positions):
        group, tiles = model.heads // model.kv_heads, ceil((positions - 1) / 32)
        queries, kernel = (1, "attention_f16") if group == 1 else (4, "attention_grouped_f16")
        chunks = ceil(group / queries)
        heads = model.kv_heads * chunks
        used = min(tiles, 32, ceil(4 * MULTIPROCESSORS / heads), ceil(model.context / 32))
        # The first tile of keys and values is requested after one trip: cache and position. Meanwhile warps load query, key and
        # rotation, then the value, one head after the other; the split with the new position scores it.
        items = ceil((queries + 1) / 4)
        trips = 1 + 2 * items + 1
        waits = trips * L2 + items * 5 * SHARED_LOAD + 2 * BARRIER + 4 * SHARED_LOAD + WARP_SUM
        # A tile: a thread copies 8 pieces of 16 bytes in two loops, scores 4 pieces and adds 8 rows. Instructions around and in
        # these loops, then waits: four barriers, a maximum over the lanes, two exponentials, shared memory 13 times.
        around, copy, score, add = (137, 26, 27, 17) if queries == 1 else (151, 26, 68, 38)
        pieces = size * 2 / 16
        copies, scores, adds = 2 * 32 * pieces / 128, pieces / 4, 32 / (128 / (size / 4))
        tile = {"instructions": around + copies * copy + scores * score + adds * add, "bytes": copies * 16, "in_flight_bytes": copies * 16}
        round_cycles = 4 * BARRIER + WARP_SUM + 2 * DIVISION + (scores + adds + 1) * SHARED_LOAD
        # Sums of 4 row groups; then maxima of the splits, and their values: eight at once, the rest as 4, 2, 1.
        merge = used // 8 + bin(used % 8).count("1")
        after = queries * (54 * STEP + 2 * SHARED_LOAD) + WARP_SUM + BARRIER + LAST_BLOCK
        after += L2 + 2 * WARP_SUM + 2 * DIVISION + BARRIER + queries * (merge * L2 + (30 + used * 5) * STEP)
        read = 4 * positions * model.kv_heads * size
        rounds = ceil(tiles / used)
        # Copies of the next tile have half of this one's time: not counted.
        return Launch(label, kernel, heads * used, 128, 4 * (4 * queries * 32 + 2 * queries * size + 2 * size) + 64 * 17 * 16, read,
                      rounds, copies * 16, round_cycles, (waits, 250 + items * 300 + 40, 0), after, read * chunks,
                      read * min(1, used / tiles), rounds - 1, tile, start=0.3 * START)

    def predict(label, kernel):
        # A thread takes half a block of hidden units and 16 neurons, and loads the rows of active units, four at once; the busiest
        # of the 8 threads that share a warp with its neurons has 11 of 16.
        units, rounds = model.rank * ACTIVE_UNITS * ffn, ceil(model.rank / 16 / 64)
        iterations = ceil(11 / 4)
        # Before: scales of the units' blocks from memory. Around the loads: which units are active, sums in shared memory.
        return Launch(label, kernel, ceil(ffn / 64), 256, 4 * (16 * 257 + 256 + 3 * model.rank), units * Q8_0 + model.rank / 32 * ffn * 4,
                      rounds, iterations * 72, 154 * STEP + iterations * 2 * SHARED_LOAD + 8 * SHARED_LOAD,
                      (MEMORY + BARRIER, 200, 4 * model.rank), 2 * BARRIER + 4 * (2 * SHARED_LOAD + 12 * STEP) + 2 * SHARED_LOAD + 80,
                      units * Q8_0)

    def gate_up(label, kernel, active):
        blocks, neurons = row_blocks(ffn), ffn * active
        if active == 1:
            waits, instructions, read = input_vector(hidden, True)
        else:
            # The predictor has kept the input: it is copied while every block counts the mask's bits, 512 words at a time, by a
            # prefix sum over 16 warps. Each warp then searches its neuron's bit: 32 words at a time.
            steps, searched = ceil(ffn / 32 / 512), 1 + ceil(log2(ffn / 32) / 5)
            waits = steps * (L2 + 6 * SHUFFLE + 2 * BARRIER + 5 * SHARED_LOAD) + searched * (SHARED_LOAD + SHUFFLE) + 2 * BARRIER
            instructions, read = 200 + steps * 170 + searched * 25 + 40, hidden * 5 // 4
        # Gate, then up, each with its sum over the lanes and the activation function; the gate's first rows are prefetched.
        return Launch(label, kernel, blocks, 512, hidden * 21 // 4 + 128 + (active < 1) * ffn // 4, 2 * neurons * hidden * Q4_0,
                      2 * ceil(neurons / (16 * blocks)), hidden * Q4_0 / 32, WARP_SUM + 120 * STEP, (waits, instructions, read),
                      early=PREFETCHED * min(neurons, 16 * blocks) * hidden * Q4_0)

    def down(label, kernel, active):
        tiles = ceil(hidden / 512)
        chunks = ceil(2 * MULTIPROCESSORS / tiles)
        words = ceil(ffn / 32 / chunks)
        # Eight words at a time: load h, list the active neurons by a prefix sum over the block. All are listed before rows are read,
        # unless they exceed the list.
        steps = ceil(words / 8)
        waits = steps * (L2 + 6 * SHUFFLE + 3 * BARRIER + 3 * SHARED_LOAD)
        # A thread takes every 16th row, four at once.
        rounds = ceil(words * 32 * active / 64)
        # 32 sums to shared memory, by all warps of the multiprocessor; 16 parts of two columns; then the last block adds four columns a
        # thread over half of the chunks, 8 loads at once, the rest as 4, 2, 1; then both halves and the residual, which is loaded.
        resident, half = ceil(tiles * chunks / MULTIPROCESSORS), ceil(chunks / 2)
        merge = half // 8 + bin(half % 8).count("1")
        after = resident * 8 * 32 + BARRIER + 2 * (52 * STEP + 2 * SHARED_LOAD) + LAST_BLOCK
        after += merge * L2 + (60 + half * 8) * STEP + BARRIER + SHARED_LOAD + L2 + 2 * 40 * STEP
        return Launch(label, kernel, tiles * chunks, 256, 4 * (16 * (32 * 17 + 16) + 2 * 512 + 32), ffn * active * hidden * Q4_0, rounds,
                      72, 2 * SHARED_LOAD, (waits, 80 + steps * 140, 4 * words * 32), after)

    qkv_rows, logits, share = width + 2 * model.kv_heads * size, model.vocabulary, f"{100 * model.active:.0f}%"
    return [
        project("q, k, v", "project_q4_0", qkv_rows, hidden, Q4_0, True),
        attention(f"attention, {model.positions} positions", model.positions),
        project("output", "project_q4_0", hidden, width, Q4_0, False, True),
        project(f"predictor A, rank {model.rank}", "project_q8_0", model.rank, hidden, Q8_0, True),
        predict(f"predictor B, rank {model.rank}", "predict_q8_0"),
        gate_up(f"gate, up, {share}", "gate_up_q4_0", model.active),
        down(f"down, {share}", "down_q4_0", model.active),
    ], [
        attention(f"attention, {model.context} positions", model.context),
        gate_up("gate, up, dense", "gate_up_q4_0", 1),
        down("down, dense", "down_q4_0", 1),
    ], [
        project("head", "project_q4_0", logits, hidden, Q4_0, True),
        # A logit a thread at a time, then two reductions in shared memory of eight steps each.
        Launch("arg max", "arg_max", 32, 256, 2064, 4 * logits, 1, 4 * logits / 8192, 0, (0, 0, 0),
               16 * (BARRIER + 2 * SHARED_LOAD + 20 * STEP) + LAST_BLOCK + L2, start=0.3 * START),
    ]


def products(model, tokens=64):
    """Launches of a layer for a prompt: conversions to f16 and products. Left out are attention, prediction, activation."""
    hidden, ffn, width, keys = model.hidden, model.ffn, model.heads * model.head_size, model.kv_heads * model.head_size

    # Resident neurons are multiplied in pieces. The measured version, with 64 tokens, multiplied all of them at once.
    whole, rest = divmod(ffn, RESIDENT_NEURONS) if tokens > 64 else (0, ffn)
    pieces = [(count, neurons) for count, neurons in [(whole, RESIDENT_NEURONS), (1, rest)] if count * neurons]

    def of(count, neurons):
        return "" if neurons == ffn else f", {count} × {neurons} neurons"

    def to_f16(label, columns, norm):
        # Values pass three times, 256 at once: loaded, 16 at once; compared; converted and stored.
        passes = columns / 256
        waits = ceil(passes / 16) * L2 * (1 + norm) + passes * (2 * SHARED_LOAD + (30 + 20 * norm) * STEP) + 2 * WARP_SUM + 6 * BARRIER
        return Launch(label, "to_f16", tokens, 256, 4 * columns + 128, 0, 0, 0, before=(waits, 0, 4 * columns),
                      start=START if norm else START / 2)

    def gemm(label, kernel, outputs, columns, start=START):
        # More than 64 tokens run in tiles of 128 by 128, one block at once per multiprocessor; others run in tiles of 64 by 64, two blocks
        # at once. Tiles are split along the columns until a multiprocessor has one block (wide) or four (narrow).
        size, share = (128, 1) if tokens > 64 else (64, 4)
        kernel += "_wide_q4_0" if tokens > 64 else "_q4_0"
        tiles, stages = ceil(outputs / size) * ceil(tokens / size), ceil(columns / 64)
        splits = max(1, min(share * MULTIPROCESSORS // tiles, stages // 4))
        blocks, rounds = tiles * splits, ceil(stages / splits)
        # Instructions of a warp in a stage of 64 columns. Tiles of 64, as they were measured: 170; half of the warps also unpack 32 weights per lane, in 153, or
        # 198 if transposed. Wide tiles: all warps unpack that many and multiply four times as much. The loop covers three stages, so a
        # stage takes a third. Waits: four times operands from shared memory and the tensor cores; weights to shared memory; a barrier.
        instructions = 170 + (198 if "down" in kernel else 153) / 2 if size == 64 else 1230 / 3
        loop = {"instructions": instructions, "bytes": size * 64 * Q4_0 / 256}
        # Sums through shared memory; with splits, to the last block of a tile and back, eight at once, a fourth of a tile at a time.
        merge = LAST_BLOCK + max(4 * ceil(splits / 8) * L2, splits * size * size * 4 / L2_PORT)
        after = size * STEP + BARRIER + 4 * 60 * STEP * (size / 64) ** 2 + (splits > 1) * merge
        # The multiprocessor with the most blocks finishes last.
        uneven = ceil(blocks / MULTIPROCESSORS) * MULTIPROCESSORS / blocks if blocks > MULTIPROCESSORS else 1
        done = blocks * rounds * size * 64 * uneven
        return Launch(label, kernel, blocks, 256, 2 * 72 * 5 * size + 16, outputs * columns * Q4_0, rounds, loop["bytes"],
                      4 * (SHARED_LOAD + 35) + 2 * SHARED_LOAD + BARRIER, (MEMORY, 240, 0), after, done * Q4_0, trips=0, l2=done * 2,
                      products=done * min(tokens, size), stated={**loop, "in_flight_bytes": 3 * loop["bytes"]}, start=start)

    return [
        to_f16("input of attention", hidden, True),
        gemm("query", "gemm", width, hidden),
        gemm("key", "gemm", keys, hidden),
        gemm("value", "gemm", keys, hidden),
        to_f16("input of output", width, False),
        # It adds to the hidden state.
        gemm("output", "gemm", hidden, width, 1.5 * START),
        to_f16("input of FFN", hidden, True),
        *(part for count, neurons in pieces for part in [
            dataclasses.replace(gemm(f"gate{of(count, neurons)}", "gemm", neurons, hidden), repeat=count),
            dataclasses.replace(gemm(f"up{of(count, neurons)}", "gemm", neurons, hidden), repeat=count),
            dataclasses.replace(gemm(f"down{of(count, neurons)}", "gemm_down", hidden, neurons), repeat=count),
        ]),
    ]


def estimate(launch, loop):
    """Terms in microseconds, and what they follow from."""
    warps, busy = launch.threads // 32, min(launch.blocks, MULTIPROCESSORS)
    registers = -(-loop["registers"] // 8) * 8 * launch.threads
    resident = min(THREADS // launch.threads, REGISTERS // registers, SHARED // (launch.shared + 1024))
    waves = ceil(launch.blocks / (MULTIPROCESSORS * resident))
    instructions = (launch.loaded or launch.bytes) / (32 * loop["bytes"]) * loop["instructions"]
    trips = launch.rounds * ceil(launch.lane_bytes / loop["in_flight_bytes"]) if launch.trips is None else launch.trips
    own = ceil(launch.lane_bytes / loop["bytes"]) * loop["instructions"] * STEP + launch.round_cycles
    waits, instructions_before, input_bytes = launch.before
    issued = ceil(launch.blocks / MULTIPROCESSORS) * warps / SCHEDULERS * instructions_before
    # Blocks of a multiprocessor share the input in its L1.
    before = max(waves * (waits + instructions_before * STEP), issued) + waves * input_bytes / min(L2_PORT, L2_BANDWIDTH / busy)
    per_cycle = BANDWIDTH / CLOCK
    arrived = min(launch.early, max(0, before - MEMORY) * per_cycle)
    cycles = {
        "before": before,
        "memory": (launch.bytes - arrived) / per_cycle + MEMORY + own / max(1, launch.lane_bytes / loop["bytes"]),
        "L2": launch.l2 / L2_BANDWIDTH,
        "tensor": launch.products / (busy * TENSOR),
        "issue": instructions / (busy * SCHEDULERS),
        "latency": waves * (trips * MEMORY + launch.rounds * own),
        "after": launch.after_cycles,
        "floor": launch.bytes / per_cycle,
    }
    terms = {term: value / CLOCK for term, value in cycles.items()}
    longest = max(terms[term] for term in ["memory", "L2", "tensor", "issue", "latency"]) / (REACHED if launch.products else 1)
    time = GAP + launch.start + terms["before"] + longest + terms["after"]
    terms = {term: launch.repeat * value for term, value in {**terms, "time": time}.items()}
    return {"resident": resident, "instructions": instructions, "trips": trips, **terms}


def print_estimates(figures, print_table):
    """Two tables per model, of a token and of a prompt; `figures` are those of the main loops by kernel."""
    terms = ["before", "memory", "L2", "tensor", "issue", "latency", "after", "time", "floor"]

    def rows_of(title, part):
        """Rows of launches, their sum, and its time and floor."""
        rows, total = [], [0, 0]
        for launch in part:
            if launch.kernel not in figures:
                print(f"left out: {launch.label}: no kernel {launch.kernel}")
                continue
            found = estimate(launch, {**figures[launch.kernel], **launch.stated})
            total = [total[0] + found["time"], total[1] + found["floor"]]
            rows.append([launch.label, launch.blocks, found["resident"], f"{launch.bytes / 1e6:.2f}",
                         f"{found['instructions'] / 1e6:.2f}", found["trips"], *(f"{found[term]:.1f}" for term in terms)])
        return rows + ([sum_row(title, total, 1)] if title else []), total

    def sum_row(title, total, digits):
        return [title, *[""] * (3 + len(terms)), *(f"{value:.{digits}f}" for value in total)]

    columns = ["", "blocks", "fit an SM", "MB", "M instr.", "trips", *terms]
    for model in MODELS:
        print(f"\nEstimate in microseconds: {model.name} in q4_0 on an H100, {model.positions} positions, {model.active:.0%} of the neurons")
        rows, token = [columns], [HOST, 0]
        for title, times, part in zip(["sum of a layer", None, "sum of the head"], [model.layers, 0, 1], launches(model)):
            found, total = rows_of(title, part)
            rows += found
            token = [value + times * added for value, added in zip(token, total)]
        print_table([*rows, sum_row(f"token, with {HOST:.0f} of the host", token, 0)])
        for tokens in [64, 512]:
            print(f"\nEstimate in microseconds: products of {tokens} tokens of a prompt, {model.name} in q4_0 on an H100")
            rows, total = rows_of("sum of a layer", products(model, tokens))
            print_table([columns, *rows, sum_row("all layers", [value * model.layers for value in total], 0)])
    print_hybrid(figures, print_table)
    print_calibration(figures, print_table)


def print_hybrid(figures, print_table, tokens=512):
    """A table of estimates for a prompt, with a plan that keeps most neurons and all keys and values in main memory."""
    model = MODELS[0]
    times = {part.label: estimate(part, {**figures[part.kernel], **part.stated})["time"] for part in products(model, tokens)
             if part.kernel in figures}
    ffn = ["input of FFN", "gate", "up", "down"]
    multiplied = sum(time for label, time in times.items() if label.split(",")[0] in ffn)
    weights = COLD * 3 * model.ffn * model.hidden * Q4_0
    numbers = 2 * tokens * model.kv_heads * model.head_size * 4
    parts = [
        ["products of attention", "", sum(times.values()) - multiplied],
        # Products run while the next pieces are copied.
        ["cold neurons to the GPU, or products of the FFN", f"{weights / 1e6:.1f}", max(weights / LINK, multiplied)],
        ["keys and values to the host", f"{numbers / 1e6:.1f}", numbers / READ_BACK],
    ]
    total = sum(time for _, _, time in parts)
    print(f"\nEstimate in microseconds: a layer of 7B in q4_0 for {tokens} tokens of a prompt with 2.5 GB of VRAM")
    rows = [[label, size, f"{time:.0f}"] for label, size, time in [*parts, ["sum", "", total]]]
    print_table([["", "MB", "time"], *rows])
    print(f"{model.layers} layers: {tokens / model.layers / total * 1e6:.0f} tokens/s, without attention and storing keys on the host")


def print_calibration(figures, print_table):
    """A table of the measured kernels and their estimates on that card."""
    global BANDWIDTH
    usual, BANDWIDTH = BANDWIDTH, MEASURED_BANDWIDTH
    model = dataclasses.replace(MODELS[0], positions=80)
    parts = [([launch for part in launches(model) for launch in part], MEASURED), (products(model), MEASURED_PROMPT)]
    rows = [["", "measured", "estimated", "error"]]
    for part, measured in parts:
        for launch in part:
            if launch.label in measured and launch.kernel in figures:
                found, known = estimate(launch, {**figures[launch.kernel], **launch.stated})["time"], measured[launch.label]
                rows.append([launch.label, f"{known:.1f}", f"{found:.1f}", f"{found / known - 1:+.0%}"])
    BANDWIDTH = usual
    print("\nKernels measured on an H200, in microseconds, and their estimates")
    print_table(rows)
