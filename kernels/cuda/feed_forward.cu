// FFN of a token, or of a batch of tokens, over the hot neurons: a predictor or gate signs predict the active neurons; `gate_up`
// computes h = act(gate . x) * (up . x) of the predicted ones; `down` accumulates h_i * down_i in a fixed order and merges the
// host's sum over the cold neurons.
#include "masks.cuh"
#include "matrix.cuh"
#include "neurons.cuh"

struct Predict {
  // [tokens, rank]: A . x.
  const float* units;
  // B transposed, [rank, neurons].
  Matrix b;
  // [ceil(rank / 32), neurons]: scales of B's blocks of 32 units; null if B is not scaled.
  const float* b_scales;
  const float* bias;
  float threshold;
  // Whether hidden units are A . x itself; else ReLU is applied.
  int is_linear;
  Masks masks;
};

// Neurons per block, hidden units that a thread adds up before their sum is scaled, and rows of B that it requests before
// it uses the first.
constexpr int PREDICT_NEURONS = 64;
constexpr int PREDICT_THREADS = 256;
constexpr int UNITS = BLOCK / 2;
constexpr int UNITS_IN_FLIGHT = 4;
// Blocks per multiprocessor that registers leave room for.
constexpr int PREDICT_BLOCKS = 2;

// Logits B . units + bias against the threshold. Grid: (ceil(neurons / 64), tokens), blocks of 256. A thread takes
// WIDTH neurons and every `groups`-th half block of hidden units, of which only those that are not 0 are read.
template <class Format>
__device__ __forceinline__ void predict(const Predict& a) {
  constexpr int WIDTH = Format::WIDTH, ROW_THREADS = PREDICT_NEURONS / WIDTH, GROUPS = PREDICT_THREADS / ROW_THREADS;
  constexpr int PARTS = PREDICT_THREADS / PREDICT_NEURONS, PITCH = PREDICT_THREADS + 1;
  SharedMemory shared;
  const int thread = threadIdx.x, group = thread / ROW_THREADS, neurons = a.b.columns, rank = a.b.rows;
  const int blocks = blocks_of(rank), first_neuron = blockIdx.x * PREDICT_NEURONS;
  const int within = thread % PREDICT_NEURONS;
  float logit = a.bias[min(first_neuron + within, neurons - 1)];
  // [WIDTH, threads]: sums of a thread's neurons; [PARTS, neurons]: sums of every PARTS-th group.
  float* sums = shared.allocate<float>(WIDTH * PITCH);
  float* parts = shared.allocate<float>(PREDICT_THREADS);
  float* units = shared.allocate<float>(blocks * BLOCK);
  float* scales = shared.allocate<float>(a.b_scales ? blocks * PREDICT_NEURONS : 0);
  if (a.b_scales) {
    const float* from = a.b_scales + first_neuron;
    for (int i = thread; i < blocks * PREDICT_NEURONS / 4; i += PREDICT_THREADS) {
      const int block = i / (PREDICT_NEURONS / 4), column = i % (PREDICT_NEURONS / 4) * 4;
      if (neurons % 4 == 0) {
        if (first_neuron + column < neurons) copy_to_shared(scales + 4 * i, from + size_t(block) * neurons + column);
      } else {  // rows are not 16-byte aligned
#pragma unroll 1
        for (int index = 0; index < 4 && first_neuron + column + index < neurons; index++)
          scales[4 * i + index] = from[size_t(block) * neurons + column + index];
      }
    }
  }
  // NaN becomes 0 either way.
  load_ahead<4, PREDICT_THREADS>(a.units + size_t(blockIdx.y) * rank, rank, thread, [&](int unit, float value) {
    units[unit] = a.is_linear && value == value ? value : fmaxf(value, 0.0f);
  });
  for (int unit = rank + thread; unit < blocks * BLOCK; unit += PREDICT_THREADS) units[unit] = 0.0f;
#pragma unroll
  for (int index = 0; index < WIDTH; index++) sums[index * PITCH + thread] = 0.0f;
  wait_for_copies();
  __syncthreads();
  const int column_thread = thread % ROW_THREADS;
  const int column_unit = min(first_neuron / WIDTH + column_thread, (neurons - 1) / WIDTH);
#pragma unroll 1
  for (int half = group; half < 2 * blocks; half += GROUPS) {
    const float* values = units + half * UNITS;
    unsigned active = 0;
    for (int unit = 0; unit < UNITS; unit++) active |= unsigned(values[unit] != 0.0f) << unit;
    float half_sums[WIDTH] = {};
#pragma unroll 1
    while (active) {
      typename Format::Unit loaded[UNITS_IN_FLIGHT];
      float coefficients[UNITS_IN_FLIGHT];
#pragma unroll
      for (int index = 0; index < UNITS_IN_FLIGHT; index++) {
        coefficients[index] = 0.0f;
        if (!active) continue;
        const int unit = __ffs(int(active)) - 1;
        coefficients[index] = values[unit];
        loaded[index] = Format::load(a.b, half * UNITS + unit, column_unit);
        active &= active - 1;
      }
#pragma unroll
      for (int index = 0; index < UNITS_IN_FLIGHT; index++)
        if (coefficients[index] != 0.0f) Format::accumulate(loaded[index], coefficients[index], half_sums);
    }
    const float* scale = scales + half / 2 * PREDICT_NEURONS + column_thread * WIDTH;
#pragma unroll
    for (int index = 0; index < WIDTH; index++)
      sums[index * PITCH + thread] += a.b_scales ? half_sums[index] * scale[index] : half_sums[index];
  }
  __syncthreads();
  const float* sums_of_neuron = sums + within % WIDTH * PITCH + within / WIDTH;
  float part = 0.0f;
#pragma unroll 4
  for (int other = thread / PREDICT_NEURONS; other < GROUPS; other += PARTS) part += sums_of_neuron[other * ROW_THREADS];
  parts[thread] = part;
  __syncthreads();
  if (thread >= PREDICT_NEURONS) return;
  const int neuron = first_neuron + thread, word = neuron / WORD;
  if (word * WORD >= neurons) return;
#pragma unroll
  for (int index = 0; index < PARTS; index++) logit += parts[index * PREDICT_NEURONS + thread];
  write_mask(a.masks, blockIdx.y, word, neurons, logit >= a.threshold);
}

#define PREDICT(name, Format) \
  KERNEL_OF_BLOCKS(PREDICT_THREADS, PREDICT_BLOCKS, predict_##name, Predict) { predict<Format>(a); }
FOR_ALL_FORMATS(PREDICT)

struct PredictBySigns {
  // [tokens, columns].
  const float* x;
  Norm norm;
  // [neurons, words]: sign bits of gate, 32 columns per word, an even number of words.
  const unsigned* signs;
  int neurons;
  int columns;
  int min_agreements;
  Masks masks;
};

// Predicts the neurons whose gate row agrees in sign with the input in at least `min_agreements` columns
// (SparseInfer, Shin et al. 2024). Grid: (any, tokens), blocks of 256, which take a word of 32 neurons at a time: four
// per warp.
KERNEL_OF_BLOCKS(256, 3, predict_by_signs, PredictBySigns) {
  constexpr int LANES = 8, PAIRS_IN_FLIGHT = 8;
  SharedMemory shared;
  const int lane = lane_index(), pairs = (a.columns + 2 * WORD - 1) / (2 * WORD);
  const float* x = load_normed<256>(shared, a.x + size_t(blockIdx.y) * a.columns, a.columns, a.norm);
  uint2* signs = shared.allocate<uint2>(pairs);
  int* predicted = shared.allocate<int>(WORD);
  for (int word = warp_index(); word < 2 * pairs; word += warp_count()) {
    const int column = word * WORD + lane;
    const bool negative = column < a.columns && __float_as_uint(x[min(column, a.columns - 1)]) >> 31;
    const unsigned bits = __ballot_sync(ALL_LANES, negative);
    if (lane == 0) reinterpret_cast<unsigned*>(signs)[word] = bits;
  }
  __syncthreads();
  const int within = warp_index() * (WARP / LANES) + lane / LANES;
  for (int word = blockIdx.x; word * WORD < a.neurons; word += gridDim.x) {
    const uint2* row = reinterpret_cast<const uint2*>(a.signs) + size_t(min(word * WORD + within, a.neurons - 1)) * pairs;
    int differ = 0;
#pragma unroll 1
    for (int first = lane % LANES; first < pairs; first += LANES * PAIRS_IN_FLIGHT) {
      uint2 loaded[PAIRS_IN_FLIGHT];
#pragma unroll
      for (int index = 0; index < PAIRS_IN_FLIGHT; index++) loaded[index] = row[min(first + index * LANES, pairs - 1)];
#pragma unroll
      for (int index = 0; index < PAIRS_IN_FLIGHT; index++) {
        const uint2 own = signs[min(first + index * LANES, pairs - 1)];
        const int different = __popc(loaded[index].x ^ own.x) + __popc(loaded[index].y ^ own.y);
        differ += first + index * LANES < pairs ? different : 0;
      }
    }
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) differ += __shfl_xor_sync(ALL_LANES, differ, distance);
    if (lane % LANES == 0) predicted[within] = a.columns - differ >= a.min_agreements;
    __syncthreads();
    if (warp_index() == 0) write_mask(a.masks, blockIdx.y, word, a.neurons, predicted[lane]);
    __syncthreads();
  }
}

struct GateUp {
  // [tokens, columns].
  const float* x;
  Norm norm;
  Matrix gate;
  const float* gate_bias;
  // Zero rows if the FFN is not gated.
  Matrix up;
  const float* up_bias;
  Neurons ffn;
  // [tokens, mask_words]: predicted neurons; null for all. h of those which no token needs is 0 already.
  const unsigned* mask;
  int mask_words;
  // Rows of gate and up on the device.
  int hot_count;
  // [tokens, hot_count]: h, the output.
  float* activations;
  // Whether quantised rows are multiplied with the int8 input.
  int int8;
  // At most BATCH.
  int tokens;
  // The int8 input as the predictor has stored it; null if `x` is to be normed and rounded.
  const uint4* rounded;
  // [tokens, columns]: norm(x) in mapped host memory; null if the predictor has stored it, or the host has no neurons of the layer:
  // then `flag` is null, too. It is set to the step number once the host can read the input and the mask.
  float* host_input;
  unsigned* flag;
  const unsigned* step;
  // Running counts of gate rows read, and of neurons with h != 0 for any token.
  unsigned* gate_rows;
  unsigned* union_rows;
};

// Position of set bit number `index` of a mask, by a warp; `before` holds the number of set bits before each word.
__device__ __forceinline__ int find_bit(const unsigned* mask, const int* before, int words, int index) {
  const int lane = lane_index();
  // A search by 32 at a time.
  int word = 0;
  for (int step = words > WARP * WARP ? WARP * WARP : WARP; step > 0; step /= WARP) {
    const int other = word + lane * step;
    word += (__popc(__ballot_sync(ALL_LANES, other < words && before[min(other, words - 1)] <= index)) - 1) * step;
  }
  const unsigned bits = mask[word], earlier = bits & ((1u << lane) - 1);
  const bool is_it = (bits >> lane & 1) && before[word] + __popc(earlier) == index;
  return word * WORD + __ffs(int(__ballot_sync(ALL_LANES, is_it))) - 1;
}

// Grid: any number of blocks of GEMV_THREADS; a warp computes one neuron at a time, for up to TOKENS tokens.
template <class Format, int TOKENS>
__device__ __forceinline__ void gate_up(const GateUp& a) {
  SharedMemory shared;
  const int columns = a.gate.columns, tokens = TOKENS == 1 ? 1 : a.tokens, lane = lane_index();
  const bool is_sender = blockIdx.x == 0 && threadIdx.x == 0;
  Inputs x = {};
  if (Format::QUANTISED && a.rounded) {
    x = request_int8(shared, a.rounded, columns, tokens);
    if (a.flag && is_sender) release_to_host(a.flag, *a.step);
  }
  // Every block compacts the union of the masks for itself: its words, and the number of set bits before each.
  int count = a.hot_count;
  const int words = (a.hot_count + WORD - 1) / WORD;
  unsigned* mask = nullptr;
  int* before = nullptr;
  if (a.mask) {
    mask = shared.allocate<unsigned>(words);
    before = shared.allocate<int>(words);
    int* scratch = shared.allocate<int>(WARP);
    count = 0;
    for (int start = 0; start < words; start += blockDim.x) {
      const int word = start + threadIdx.x;
      unsigned bits = 0;
      for (int token = 0; token < tokens && word < words; token++) bits |= a.mask[token * a.mask_words + word];
      const int last = a.hot_count - word * WORD;
      if (last > 0 && last < WORD) bits &= (1u << last) - 1;
      int total;
      const int prefix = block_prefix(__popc(bits), total, scratch);
      if (word < words) {
        mask[word] = bits;
        before[word] = count + prefix;
      }
      count += total;
    }
    __syncthreads();
  }
  if (is_sender) atomicAdd(a.gate_rows, unsigned(count));
  const auto neuron_at = [&](int index) { return a.mask ? find_bit(mask, before, words, index) : index; };
  // Tokens that need a neuron, a bit each.
  const auto tokens_of = [&](int neuron) {
    const unsigned all = (1u << tokens) - 1;
    if (TOKENS == 1 || !a.mask) return all;
    const unsigned word = a.mask[min(lane, tokens - 1) * a.mask_words + neuron / WORD];
    return __ballot_sync(ALL_LANES, word >> neuron % WORD & 1) & all;
  };
  const int step = gridDim.x * warp_count(), first = blockIdx.x * warp_count() + warp_index();
  int neuron = first < count ? neuron_at(first) : 0;
  if (first < count) {
    prefetch_row<Format>(a.gate, neuron);
    if (a.ffn.kind != UNGATED && a.ffn.filter == ALL_NEURONS) prefetch_row<Format>(a.up, neuron);
  }
  const auto to_host = [&](int token, const float* values) {
    if (!a.host_input || blockIdx.x > 0) return;
    for (int i = threadIdx.x; i < columns; i += GEMV_THREADS) a.host_input[size_t(token) * columns + i] = values[i];
    if (token + 1 < tokens) return;
    __syncthreads();
    if (is_sender) release_to_host(a.flag, *a.step);
  };
  if (Format::QUANTISED && a.rounded) {
    wait_for_copies();
    __syncthreads();
  } else {
    x = load_inputs<GEMV_THREADS>(shared, a.x, columns, tokens, a.norm, Format::QUANTISED && a.int8, to_host);
  }
  unsigned in_union = 0;
  for (int index = first; index < count; index += step) {
    if (index > first) neuron = neuron_at(index);
    unsigned active = tokens_of(neuron);
    // A lane is a token.
    float h = 0.0f;
    // Gate first: up is not read for neurons which the gate leaves inactive.
#pragma unroll 1
    for (int stage = 0; stage < 2; stage++) {
      const Matrix& matrix = stage == 0 ? a.gate : a.up;
      const float* bias = stage == 0 ? a.gate_bias : a.up_bias;
      float product = dot<Format, TOKENS>(matrix, neuron, x, active);
      if (bias) product += bias[neuron];
      product = stage == 0 ? activate(a.ffn, product) : up_factor(a.ffn, product);
      h = stage == 0 ? product : h * product;
      if (stage == 1) break;
      active &= __ballot_sync(ALL_LANES, passes_gate(a.ffn, neuron, h));
      if (!active || a.ffn.kind == UNGATED) break;
    }
    h = active >> lane & 1 ? coefficient(a.ffn, lane, neuron, h) : 0.0f;
    if (lane < tokens) a.activations[size_t(lane) * a.hot_count + neuron] = h;
    in_union += __ballot_sync(ALL_LANES, h != 0.0f) != 0;
  }
  if (in_union > 0 && lane == 0) atomicAdd(a.union_rows, in_union);
}

#define GATE_UP(name, Format)                                                      \
  KERNEL_OF_BLOCKS(GEMV_THREADS, 1, gate_up_##name, GateUp) { gate_up<Format, 1>(a); }           \
  KERNEL_OF_BLOCKS(GEMV_THREADS, 1, gate_up_batch_##name, GateUp) { gate_up<Format, BATCH>(a); }
FOR_ALL_FORMATS(GATE_UP)

struct Down {
  // [neurons, hidden]: row i is the output column of neuron i.
  Matrix down;
  // [tokens, hot_count]: h.
  const float* activations;
  int hot_count;
  // Elements from the bias of a token to that of the next; 0 if all have the same.
  int bias_stride;
  // [tokens, chunks, hidden], rows padded to a multiple of four.
  float* partial;
  // [tokens, tiles of columns], all 0.
  unsigned* counters;
  // [hidden] or [tokens, hidden], and [hidden], added once; null for none.
  const float* bias;
  const float* offset;
  // [tokens, hidden]: the cold neurons' sum in mapped host memory, valid once `flag` holds the step number; null for none.
  // A block that waits longer than the timeout stores the step number in `timed_out` and continues.
  const float* cold;
  const unsigned* flag;
  const unsigned* step;
  unsigned* timed_out;
  uint64_t timeout_nanoseconds;
  // [tokens, hidden]: the residual stream, accumulated in place.
  float* hidden;
  // Running count of rows of down read; null for none.
  unsigned* down_rows;
};

// Threads per row, 16 bytes each, and rows that a block reads in parallel.
constexpr int ROW_THREADS = 16;
constexpr int DOWN_THREADS = 256;
constexpr int ROW_GROUPS = DOWN_THREADS / ROW_THREADS;
// Blocks per multiprocessor that registers leave room for.
constexpr int DOWN_BLOCKS = 3;
// Rows that a thread requests before it uses the first.
constexpr int ROWS_IN_FLIGHT = 4;
// Active rows that are listed in shared memory before they are accumulated.
constexpr int LIST_CAPACITY = 2 * DOWN_THREADS;

// Grid: (tokens, tiles of ROW_THREADS * WIDTH columns, chunks of neurons), blocks of 256: rows that several tokens need are
// read at about the same time. The last block of a tile adds up the chunks in order, then bias, offset and the cold sum.
template <class Format>
__device__ __forceinline__ void down(const Down& a) {
  constexpr int WIDTH = Format::WIDTH, COLUMNS = ROW_THREADS * WIDTH;
  // Sums in shared memory, so that neither threads nor columns that follow each other meet in a bank.
  constexpr int GROUP_STRIDE = WIDTH * (ROW_THREADS + 1) + ROW_THREADS;
  SharedMemory shared;
  float* sums = shared.allocate<float>(ROW_GROUPS * GROUP_STRIDE);
  int* rows = shared.allocate<int>(LIST_CAPACITY);
  float* coefficients = shared.allocate<float>(LIST_CAPACITY);
  int* scratch = shared.allocate<int>(WARP);
  const int token = blockIdx.x, tile = blockIdx.y, chunk = blockIdx.z, chunks = gridDim.z;
  const int group = threadIdx.x / ROW_THREADS, column_thread = threadIdx.x % ROW_THREADS;
  const int hidden = a.down.columns, column = tile * COLUMNS + column_thread * WIDTH;
  float* partial = a.partial + size_t(token) * chunks * ((hidden + 3) / 4 * 4) + tile * COLUMNS;

  float sum[WIDTH];
#pragma unroll
  for (int index = 0; index < WIDTH; index++) sum[index] = 0.0f;
  // Chunks take words of 32 neurons round-robin: neurons are sorted hottest first, so that work is balanced.
  const int words = (a.hot_count + WORD - 1) / WORD;
  int pending = 0, active_rows = 0;
  for (int start = chunk; start < words; start += chunks * warp_count()) {
    const int word = start + warp_index() * chunks, neuron = word * WORD + lane_index();
    const float h = word < words && neuron < a.hot_count ? a.activations[size_t(token) * a.hot_count + neuron] : 0.0f;
    const bool active = h != 0.0f;
    int total;
    const int slot = pending + block_prefix(active, total, scratch);
    if (active) {
      rows[slot] = neuron;
      coefficients[slot] = h;
    }
    pending += total;
    active_rows += total;
    __syncthreads();
    if (pending <= LIST_CAPACITY - DOWN_THREADS && start + chunks * warp_count() < words) continue;
    if (column < hidden) {
#pragma unroll 1
      for (int first = group; first < pending; first += ROWS_IN_FLIGHT * ROW_GROUPS) {
        typename Format::Unit loaded[ROWS_IN_FLIGHT];
#pragma unroll
        for (int index = 0; index < ROWS_IN_FLIGHT; index++) {
          const int slot = first + index * ROW_GROUPS;
          if (slot < pending) loaded[index] = Format::load(a.down, rows[slot], column / WIDTH);
        }
#pragma unroll
        for (int index = 0; index < ROWS_IN_FLIGHT; index++) {
          const int slot = first + index * ROW_GROUPS;
          if (slot < pending) Format::accumulate(loaded[index], coefficients[slot], sum);
        }
      }
    }
    pending = 0;
    __syncthreads();
  }
  if (a.down_rows && tile == 0 && threadIdx.x == 0) atomicAdd(a.down_rows, unsigned(active_rows));
#pragma unroll
  for (int index = 0; index < WIDTH; index++)
    sums[group * GROUP_STRIDE + index * (ROW_THREADS + 1) + column_thread] = sum[index];
  __syncthreads();
  for (int index = threadIdx.x; index < COLUMNS; index += blockDim.x) {
    if (tile * COLUMNS + index >= hidden) continue;
    float all = 0.0f;
    const float* parts = sums + index % WIDTH * (ROW_THREADS + 1) + index / WIDTH;
#pragma unroll
    for (int part = 0; part < ROW_GROUPS; part++) all += parts[part * GROUP_STRIDE];
    partial[size_t(chunk) * ((hidden + 3) / 4 * 4) + index] = all;
  }
  if (!is_last_block(a.counters + token * gridDim.y + tile, chunks, reinterpret_cast<unsigned*>(scratch))) return;
  if (a.cold && threadIdx.x == 0 && a.flag) {
    const uint64_t start = nanoseconds();
    const unsigned step = *a.step;
    // After one timeout, later blocks do not wait again; the host may also set `timed_out` to abort.
    for (unsigned polls = 1; acquire_from_host(a.flag) != step; polls++) {
      const bool expired = nanoseconds() - start > a.timeout_nanoseconds;
      if (expired) release_to_host(a.timed_out, step);
      if (expired || (polls % 16 == 1 && acquire_from_host(a.timed_out) == step)) break;
    }
  }
  // A thread adds four columns of every PARTS-th chunk.
  constexpr int FOURS = COLUMNS / 4, PARTS = DOWN_THREADS / FOURS;
  const int four = threadIdx.x % FOURS, first_part = threadIdx.x / FOURS;
  float4 added = {};
  if (tile * COLUMNS + four * 4 < hidden) {
#pragma unroll 8
    for (int part = first_part; part < chunks; part += PARTS) {
      const float4 more = load_gpu_scope(reinterpret_cast<const float4*>(partial + size_t(part) * ((hidden + 3) / 4 * 4)) + four);
      added = {added.x + more.x, added.y + more.y, added.z + more.z, added.w + more.w};
    }
  }
  reinterpret_cast<float4*>(sums)[threadIdx.x] = added;
  __syncthreads();
  for (int index = threadIdx.x; index < COLUMNS; index += blockDim.x) {
    const int out = tile * COLUMNS + index;
    if (out >= hidden) continue;
    float all = 0.0f;
#pragma unroll
    for (int part = 0; part < PARTS; part++) all += sums[part * COLUMNS + index];
    if (a.bias) all += a.bias[size_t(token) * a.bias_stride + out];
    if (a.offset) all += a.offset[out];
    if (a.cold) all += load_sys_scope(a.cold + size_t(token) * hidden + out);
    a.hidden[size_t(token) * hidden + out] += all;
  }
}

#define DOWN(name, Format) \
  KERNEL_OF_BLOCKS(DOWN_THREADS, DOWN_BLOCKS, down_##name, Down) { down<Format>(a); }
FOR_ALL_FORMATS(DOWN)
