// Prefill: GEMM over many tokens on the tensor cores. Inputs are converted to f16 once, each token divided by a power
// of two of its own; weight tiles are dequantised to f16 in shared memory. With two terms, a value is the sum of an f16
// and the f16 of its residual, and three products approximate f32 precision.
#include "matrix.cuh"
#include "neurons.cuh"

// Weight rows, tokens and columns of a tile.
constexpr int TILE_ROWS = 64;
constexpr int TILE_TOKENS = 64;
constexpr int TILE_COLUMNS = 64;
// Row stride of a tile in f16, padded against shared memory bank conflicts.
constexpr int PITCH = TILE_COLUMNS + 8;
constexpr int WEIGHT_TILE = TILE_ROWS * PITCH, TOKEN_TILE = TILE_TOKENS * PITCH;
// f16 per asynchronous copy of 16 bytes.
constexpr int COPY_ELEMENTS = 8;
// Rows and tokens of one mma instruction.
constexpr int MMA_ROWS = 16;
constexpr int MMA_TOKENS = 8;
// Warps along the rows and along the tokens of a tile.
constexpr int ROW_WARPS = TILE_ROWS / MMA_ROWS;
constexpr int TOKEN_WARPS = 2;
constexpr int GEMM_THREADS = ROW_WARPS * TOKEN_WARPS * WARP;
constexpr int WARP_TOKENS = TILE_TOKENS / TOKEN_WARPS;
// Blocks per multiprocessor that registers leave room for.
constexpr int GEMM_BLOCKS = 2;
// Stages of columns whose tokens have memory: two are in flight while one is computed.
constexpr int STAGES = 3;

// Vectors of several tokens in f16.
struct F16Buffer {
  // [terms, tokens, stride]: values divided by their token's scale, zero-padded to whole tiles; the second term holds
  // the residuals of the first.
  uint16_t* values;
  // [tokens].
  float* scales;
  int tokens;
  int stride;
  int terms;
};

// Scale of a token whose largest magnitude has these bits: the power of two that brings it near the end of the f16
// range; NaN if it is not finite.
__device__ __forceinline__ float scale_of(unsigned largest, float& inverse) {
  inverse = 0.0f;
  if (largest >= 0x7f800000u) return __uint_as_float(0x7fc00000u);
  const int exponent = max(int(largest >> 23), 27);
  inverse = __uint_as_float(unsigned(268 - exponent) << 23);
  return __uint_as_float(unsigned(exponent - 14) << 23);
}

// Stores an already scaled value of a token, and its residual if there are two terms.
__device__ __forceinline__ void write_f16(const F16Buffer& to, int token, int column, float value) {
  const size_t index = size_t(token) * to.stride + column;
  const uint16_t high = float_to_f16(value);
  to.values[index] = high;
  if (to.terms > 1) to.values[size_t(to.tokens) * to.stride + index] = float_to_f16(value - f16_to_float(high));
}

// Maximum over the threads of a block. `scratch` holds one element per warp.
__device__ __forceinline__ unsigned block_max(unsigned value, unsigned* scratch) {
  value = warp_max(value);
  if (lane_index() == 0) scratch[warp_index()] = value;
  __syncthreads();
  for (int warp = 0; warp < warp_count(); warp++) value = max(value, scratch[warp]);
  __syncthreads();
  return value;
}

struct ToF16 {
  // [tokens, columns].
  const float* x;
  int columns;
  Norm norm;
  F16Buffer out;
  // norm(x) in mapped host memory, [tokens, columns]; null if the host does not need it.
  float* host_input;
};

// out = f16(norm(x)). Grid: one block of 256 per token.
KERNEL(256, to_f16, ToF16) {
  SharedMemory shared;
  const int token = blockIdx.x;
  const size_t start = size_t(token) * a.columns;
  const float* x = load_normed<256>(shared, a.x + start, a.columns, a.norm);
  unsigned* scratch = shared.allocate<unsigned>(WARP);
  unsigned largest = 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < a.columns; i += blockDim.x) {
    largest = max(largest, __float_as_uint(x[i]) & 0x7fffffffu);
    if (a.host_input) a.host_input[start + i] = x[i];
  }
  float inverse;
  const float scale = scale_of(block_max(largest, scratch), inverse);
#pragma unroll 1
  for (int i = threadIdx.x; i < a.out.stride; i += blockDim.x)
    write_f16(a.out, token, i, i < a.columns ? x[i] * inverse : 0.0f);
  if (threadIdx.x == 0) a.out.scales[token] = scale;
}

struct ActivateGateUp {
  Neurons ffn;
  // [tokens, count]: gate . x, replaced by h.
  float* gate;
  // [tokens, count]: up . x; null if the FFN is not gated.
  const float* up;
  // [tokens, mask_words]: predicted neurons; null for all.
  const unsigned* mask;
  int mask_words;
  // Mask bit of the first of the `count` neurons.
  int first_neuron;
  int count;
  F16Buffer out;
  // Running count of neurons with h != 0.
  unsigned* down_rows;
};

// h = act(gate) * up of the neurons which the mask and the filter keep, also in f16. Grid: one block of 256 per token.
KERNEL(256, activate_gate_up, ActivateGateUp) {
  SharedMemory shared;
  unsigned* scratch = shared.allocate<unsigned>(WARP);
  const int token = blockIdx.x;
  float* gate = a.gate + size_t(token) * a.count;
  const float* up = a.up + size_t(token) * a.count;
  const unsigned* mask = a.mask + size_t(token) * a.mask_words;
  unsigned largest = 0;
  int active_rows = 0;
#pragma unroll 1
  for (int neuron = threadIdx.x; neuron < a.count; neuron += blockDim.x) {
    float h = 0.0f;
    const int index = a.first_neuron + neuron;
    if (!a.mask || mask[index / 32] >> index % 32 & 1) {
      const float activation = activate(a.ffn, gate[neuron]);
      if (passes_gate(a.ffn, neuron, activation)) {
        h = activation;
        if (a.ffn.kind == GATED) h *= up[neuron];
        if (a.ffn.kind == DOUBLY_GATED) h *= activate(a.ffn, up[neuron]);
        h = coefficient(a.ffn, neuron, h);
      }
    }
    gate[neuron] = h;
    active_rows += h != 0.0f;
    largest = max(largest, __float_as_uint(h) & 0x7fffffffu);
  }
  float inverse;
  const float scale = scale_of(block_max(largest, scratch), inverse);
  // Each thread reads only the elements it wrote.
#pragma unroll 1
  for (int neuron = threadIdx.x; neuron < a.out.stride; neuron += blockDim.x)
    write_f16(a.out, token, neuron, neuron < a.count ? gate[neuron] * inverse : 0.0f);
  if (threadIdx.x == 0) a.out.scales[token] = scale;
  active_rows = warp_sum(active_rows);
  if (lane_index() == 0) atomicAdd(a.down_rows, unsigned(active_rows));
}

struct Gemm {
  // [outputs, inputs]; for `gemm_down` [inputs, outputs].
  Matrix matrix;
  F16Buffer x;
  // [outputs], added to every token; null for none.
  const float* bias;
  const float* offset;
  // [tokens, outputs]: the cold neurons' sums in mapped host memory, added; null for none.
  const float* cold;
  // [tokens, outputs].
  float* out;
  // out += instead of out =.
  int accumulate;
  // [tiles, splits, TILE_TOKENS, TILE_ROWS], and one counter per tile, all 0; not used without splits.
  float* partial;
  unsigned* counters;
};

// Adds a warp's products of one stage of columns. `rows` and `columns` are the addresses that this lane passes to `load_matrices`
// for the weights and the tokens; a tile of residuals follows each tile if there are two terms. `tokens` of the tile are left from the
// warp's first on, none if it is not positive.
template <int TERMS>
__device__ __forceinline__ void multiply(const uint16_t* rows, const uint16_t* columns, int tokens, float (&sums)[WARP_TOKENS / MMA_TOKENS][4]) {
#pragma unroll(TERMS == 1 ? TILE_COLUMNS / 16 : 1)
  for (int step = 0; step < TILE_COLUMNS; step += 16) {
    unsigned weights[TERMS][4];
    for (int term = 0; term < TERMS; term++) load_matrices(rows + step + term * WEIGHT_TILE, weights[term]);
#pragma unroll
    for (int pair = 0; pair < WARP_TOKENS / MMA_TOKENS; pair += 2) {
      if (pair * MMA_TOKENS >= tokens) break;
      unsigned fragments[TERMS][4];
      for (int term = 0; term < TERMS; term++)
        load_matrices(columns + pair * MMA_TOKENS * PITCH + step + term * TOKEN_TILE, fragments[term]);
#pragma unroll
      for (int second = 0; second < 2; second++) {
        float(&tile_sums)[4] = sums[pair + second];
        const unsigned values[2] = {fragments[0][2 * second], fragments[0][2 * second + 1]};
        if (TERMS == 1) {
          mma_m16n8k16(tile_sums, weights[0], values);
          continue;
        }
        // Tensor cores truncate: over thousands of columns, sums of one sign would lose a part in ten thousand. The product of
        // both residuals is below f32 precision.
        const unsigned residuals[2] = {fragments[TERMS - 1][2 * second], fragments[TERMS - 1][2 * second + 1]};
        float step_sums[4] = {};
        mma_m16n8k16(step_sums, weights[TERMS - 1], values);
        mma_m16n8k16(step_sums, weights[0], residuals);
        mma_m16n8k16(step_sums, weights[0], values);
#pragma unroll
        for (int index = 0; index < 4; index++) tile_sums[index] += step_sums[index];
      }
    }
  }
}

// out = x . matrix^T + bias + offset + cold. Grid: (tiles of outputs, tiles of tokens, splits of the columns). While the tensor
// cores compute one stage of columns, the weights of the next three (f32: two) are on their way to registers in their stored
// format, the tokens of the next two to shared memory. The last block of a tile adds up the splits in order.
template <class Format, bool BY_NEURON>
__device__ __forceinline__ void gemm(const Gemm& a) {
  constexpr int WIDTH = Format::WIDTH;
  // Matrix rows that a tile covers, its weights per row, and loads of WIDTH weights.
  constexpr int MATRIX_ROWS = BY_NEURON ? TILE_COLUMNS : TILE_ROWS, ROW_WEIGHTS = BY_NEURON ? TILE_ROWS : TILE_COLUMNS;
  constexpr int LOADS = MATRIX_ROWS * ROW_WEIGHTS / WIDTH, LOADS_PER_THREAD = (LOADS + GEMM_THREADS - 1) / GEMM_THREADS;
  const Matrix& matrix = a.matrix;
  const int inputs = BY_NEURON ? matrix.rows : matrix.columns, outputs = BY_NEURON ? matrix.columns : matrix.rows;
  const int first_row = blockIdx.x * TILE_ROWS, first_token = blockIdx.y * TILE_TOKENS;
  const int tokens = min(TILE_TOKENS, a.x.tokens - first_token), terms = a.x.terms;
  SharedMemory shared;
  // [buffer, term, row, column], and [stage, term, token, column].
  uint16_t* weights = shared.allocate<uint16_t>(2 * terms * TILE_ROWS * PITCH);
  uint16_t* inputs_f16 = shared.allocate<uint16_t>(STAGES * terms * TILE_TOKENS * PITCH);
  unsigned* is_last = shared.allocate<unsigned>(1);

  // Stages whose weights are in flight: f32 has registers for two.
  constexpr int AHEAD = sizeof(typename Format::Unit) * LOADS_PER_THREAD < 64 ? STAGES : STAGES - 1;
  typename Format::Unit loaded[AHEAD][LOADS_PER_THREAD];
  // Calls `use(index, matrix_row, start)` for the loads of this thread: row and first weight within the tile.
  const auto for_each_load = [&](auto use) {
#pragma unroll
    for (int index = 0; index < LOADS_PER_THREAD; index++) {
      const int load = threadIdx.x + index * GEMM_THREADS;
      if (load < LOADS) use(index, load / (ROW_WEIGHTS / WIDTH), load % (ROW_WEIGHTS / WIDTH) * WIDTH);
    }
  };
  const auto load_weights = [&](int stage, auto& units) {
    for_each_load([&](int index, int matrix_row, int start) {
      const int row = matrix_row + (BY_NEURON ? stage * TILE_COLUMNS : first_row);
      const int column = start + (BY_NEURON ? first_row : stage * TILE_COLUMNS);
      // Zero bits are zero weights.
      units[index] = typename Format::Unit{};
      if (row < matrix.rows && column < matrix.columns) units[index] = Format::load(matrix, row, column / WIDTH);
    });
  };
  const auto store_weights = [&](const auto& units, int buffer) {
    for_each_load([&](int index, int matrix_row, int start) {
      float values[WIDTH];
      Format::unpack(units[index], values);
      const auto store = [&](uint16_t* tile) {
#pragma unroll
        for (int offset = 0; offset < WIDTH; offset += 2) {
          const uint16_t value = float_to_f16(values[offset]), next = float_to_f16(values[offset + 1]);
          if (BY_NEURON) {
            tile[(start + offset) * PITCH + matrix_row] = value;
            tile[(start + offset + 1) * PITCH + matrix_row] = next;
          } else {
            *reinterpret_cast<unsigned*>(tile + matrix_row * PITCH + start + offset) = value | unsigned(next) << 16;
          }
        }
      };
      uint16_t* tile = weights + buffer * terms * WEIGHT_TILE;
      store(tile);
      if (terms == 1) return;
#pragma unroll
      for (int offset = 0; offset < WIDTH; offset++) values[offset] -= f16_to_float(float_to_f16(values[offset]));
      store(tile + WEIGHT_TILE);
    });
  };
  // Tokens past the last are not copied: their sums are not stored.
  const auto load_tokens = [&](int stage, int slot) {
    constexpr int COPIES = TILE_COLUMNS / COPY_ELEMENTS, AT_ONCE = GEMM_THREADS / COPIES;
    const int own = threadIdx.x / COPIES, column = threadIdx.x % COPIES * COPY_ELEMENTS;
    const uint16_t* from = a.x.values + size_t(first_token + own) * a.x.stride + stage * TILE_COLUMNS + column;
    uint16_t* to = inputs_f16 + slot * terms * TOKEN_TILE + own * PITCH + column;
#pragma unroll 1
    for (int term = 0; term < terms; term++) {
#pragma unroll
      for (int token = 0; token < TILE_TOKENS; token += AT_ONCE)
        if (own + token < tokens) copy_to_shared(to + token * PITCH, from + token * a.x.stride);
      from += size_t(a.x.tokens) * a.x.stride;
      to += TOKEN_TILE;
    }
  };

  const int lane = lane_index(), fragment_row = lane / 4, fragment_column = lane % 4;
  const int warp_row = warp_index() / TOKEN_WARPS * MMA_ROWS, warp_token = warp_index() % TOKEN_WARPS * WARP_TOKENS;
  float sums[WARP_TOKENS / MMA_TOKENS][4] = {};
  // Addresses that this lane passes to `load_matrices`: rows and columns of the weights, then columns of two tiles of tokens.
  const int matrix_row = lane % 8, low = lane / 8 % 2 * 8, high = lane / 16 * 8;
  const uint16_t* own_weights = weights + (warp_row + low + matrix_row) * PITCH + high;
  const uint16_t* own_tokens = inputs_f16 + (warp_token + high + matrix_row) * PITCH + low;
  const auto compute_stage = [&](int buffer, int slot) {
    const uint16_t *rows = own_weights + buffer * terms * WEIGHT_TILE, *columns = own_tokens + slot * terms * TOKEN_TILE;
    if (terms == 1) {
      multiply<1>(rows, columns, tokens - warp_token, sums);
    } else {
      multiply<2>(rows, columns, tokens - warp_token, sums);
    }
  };

  const int splits = gridDim.z, split = blockIdx.z, all_stages = (inputs + TILE_COLUMNS - 1) / TILE_COLUMNS;
  const int first_stage = all_stages * split / splits, end = all_stages * (split + 1) / splits;
#pragma unroll
  for (int slot = 0; slot < AHEAD; slot++)
    if (first_stage + slot < end) load_weights(first_stage + slot, loaded[slot]);
  // A group of copies for each stage, empty past the end.
#pragma unroll 1
  for (int slot = 0; slot < STAGES - 1; slot++) {
    if (first_stage + slot < end) load_tokens(first_stage + slot, slot);
    commit_copies();
  }
  int slot = 0;
#pragma unroll 1
  for (int first = first_stage; first < end; first += AHEAD) {
#pragma unroll
    for (int index = 0; index < AHEAD; index++) {
      const int stage = first + index;
      if (stage >= end) break;
      store_weights(loaded[index], stage % 2);
      if (stage + AHEAD < end) load_weights(stage + AHEAD, loaded[index]);
      wait_for_copies_but<STAGES - 2>();
      __syncthreads();
      // No warp needs the tokens of the stage before any more.
      const int ahead = stage + STAGES - 1;
      if (ahead < end) load_tokens(ahead, slot == 0 ? STAGES - 1 : slot - 1);
      commit_copies();
      compute_stage(stage % 2, slot);
      slot = slot == STAGES - 1 ? 0 : slot + 1;
    }
  }
  __syncthreads();
  // Transposed through the weights' shared memory, which is free now, for coalesced stores.
  float* tile_sums = reinterpret_cast<float*>(weights);
  constexpr int STRIDE = TILE_ROWS + 4;
#pragma unroll
  for (int tile = 0; tile < WARP_TOKENS / MMA_TOKENS; tile++) {
#pragma unroll
    for (int index = 0; index < 4; index++) {
      const int token = warp_token + tile * MMA_TOKENS + 2 * fragment_column + index % 2;
      tile_sums[token * STRIDE + warp_row + fragment_row + index / 2 * 8] = sums[tile][index];
    }
  }
  __syncthreads();
  // Splits are added by four rows of a token at once.
  constexpr int FOURS = TILE_ROWS / 4, TILE_SIZE = TILE_TOKENS * FOURS;
  const auto tile_sum = [&](int four) { return reinterpret_cast<float4*>(tile_sums + four / FOURS * STRIDE + four % FOURS * 4); };
  float4* partial = reinterpret_cast<float4*>(a.partial) + size_t(blockIdx.y * gridDim.x + blockIdx.x) * splits * TILE_SIZE;
  if (splits > 1) {
    for (int four = threadIdx.x; four < tokens * FOURS; four += GEMM_THREADS) partial[split * TILE_SIZE + four] = *tile_sum(four);
    if (!is_last_block(a.counters + blockIdx.y * gridDim.x + blockIdx.x, splits, is_last)) return;
#pragma unroll 1
    for (int four = threadIdx.x; four < tokens * FOURS; four += GEMM_THREADS) {
      float4 added = {};
#pragma unroll 8
      for (int part = 0; part < splits; part++) {
        const float4 more = load_gpu_scope(partial + part * TILE_SIZE + four);
        added = {added.x + more.x, added.y + more.y, added.z + more.z, added.w + more.w};
      }
      *tile_sum(four) = added;
    }
    __syncthreads();
  }
#pragma unroll 4
  for (int element = threadIdx.x; element < tokens * TILE_ROWS; element += GEMM_THREADS) {
    const int tile_row = element % TILE_ROWS, row = first_row + tile_row, token = first_token + element / TILE_ROWS;
    if (row >= outputs) continue;
    const size_t index = size_t(token) * outputs + row;
    float sum = tile_sums[element / TILE_ROWS * STRIDE + tile_row] * a.x.scales[token];
    if (a.bias) sum += a.bias[row];
    if (a.offset) sum += a.offset[row];
    if (a.cold) sum += load_sys_scope(a.cold + index);
    a.out[index] = a.accumulate ? a.out[index] + sum : sum;
  }
}

#define GEMM(name, Format) \
  KERNEL_OF_BLOCKS(GEMM_THREADS, GEMM_BLOCKS, gemm_##name, Gemm) { gemm<Format, false>(a); }
FOR_ALL_FORMATS(GEMM)

// Rows of the matrix are inputs (neurons), as in down.
#define GEMM_DOWN(name, Format) \
  KERNEL_OF_BLOCKS(GEMM_THREADS, GEMM_BLOCKS, gemm_down_##name, Gemm) { gemm<Format, true>(a); }
FOR_ALL_FORMATS(GEMM_DOWN)

struct SignalHost {
  unsigned* flag;
  const unsigned* step;
};

// Stores the step number in the flag after all previous kernels: the host may read what they wrote for it. One warp.
KERNEL(WARP, signal_host, SignalHost) {
  if (threadIdx.x == 0) release_to_host(a.flag, *a.step);
}

struct Empty {
  uint64_t unused;
};

// An empty kernel, to measure launches.
KERNEL(WARP, empty, Empty) {}
