// Prefill: GEMM over many tokens on the tensor cores. Inputs are converted to f16 once, each token divided by a power
// of two of its own; weight tiles are dequantised to f16 in shared memory. With two terms, a value is the sum of an f16
// and the f16 of its residual, and three products approximate f32 precision.
#include "matrix.cuh"
#include "neurons.cuh"

// Columns of a tile.
constexpr int TILE_COLUMNS = 64;
// Padding after each row of a tile, in f16: avoids shared memory bank conflicts.
constexpr int PADDING = 8;
// Row stride of tokens in shared memory, in f16.
constexpr int PITCH = TILE_COLUMNS + PADDING;
// f16 per asynchronous copy of 16 bytes.
constexpr int COPY_ELEMENTS = 8;
// Rows and tokens of one mma instruction.
constexpr int MMA_ROWS = 16;
constexpr int MMA_TOKENS = 8;
// Warps along the rows and along the tokens of a tile.
constexpr int ROW_WARPS = 4;
constexpr int TOKEN_WARPS = 2;
constexpr int GEMM_THREADS = ROW_WARPS * TOKEN_WARPS * WARP;
// Stages of columns whose tokens have memory: two are in flight while one is computed.
constexpr int STAGES = 3;

// For few tokens: more blocks, each of which unpacks fewer weights.
struct Narrow {
  static constexpr int ROWS = 64;
  static constexpr int TOKENS = 64;
  // Blocks per multiprocessor for which there are enough registers.
  static constexpr int BLOCKS = 2;
  // Whether inputs may have residuals.
  static constexpr bool HAS_RESIDUALS = true;
};

// For many tokens: each weight is unpacked once per 128 tokens, and each product reads fewer bytes of shared memory.
struct Wide {
  static constexpr int ROWS = 128;
  static constexpr int TOKENS = 128;
  static constexpr int BLOCKS = 1;
  static constexpr bool HAS_RESIDUALS = false;
};

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

// Stores consecutive unpacked weights in f16, 16 bytes at a time (8 if `WIDTH` is 4).
template <int WIDTH>
__device__ __forceinline__ void store_f16(const float (&values)[WIDTH], uint16_t* to) {
  unsigned words[WIDTH / 2];
#pragma unroll
  for (int word = 0; word < WIDTH / 2; word++) words[word] = floats_to_f16(values[2 * word], values[2 * word + 1]);
  if (WIDTH == 4) {
    *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
    return;
  }
#pragma unroll
  for (int word = 0; word + 4 <= WIDTH / 2; word += 4)
    *reinterpret_cast<uint4*>(to + 2 * word) = {words[word], words[word + 1], words[word + 2], words[word + 3]};
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
  // Token of each row of the masks and of the routing weights; null if they have the order of `gate`.
  const unsigned* tokens;
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
  const int token = blockIdx.x, source = a.tokens ? int(a.tokens[token]) : token;
  float* gate = a.gate + size_t(token) * a.count;
  const float* up = a.up + size_t(token) * a.count;
  const unsigned* mask = a.mask + size_t(source) * a.mask_words;
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
        if (a.ffn.kind != UNGATED) h *= up_factor(a.ffn, up[neuron]);
        h = coefficient(a.ffn, source, neuron, h);
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

struct GatherTokens {
  F16Buffer x;
  // [out.tokens]: tokens of `x`.
  const unsigned* tokens;
  F16Buffer out;
};

// out[i] = x[tokens[i]]. Grid: one block of 256 per token of `out`.
KERNEL(256, gather_tokens, GatherTokens) {
  const int token = blockIdx.x, source = a.tokens[token];
  for (int term = 0; term < a.x.terms; term++) {
    const uint4* from = reinterpret_cast<const uint4*>(a.x.values + (size_t(term) * a.x.tokens + source) * a.x.stride);
    uint4* to = reinterpret_cast<uint4*>(a.out.values + (size_t(term) * a.out.tokens + token) * a.out.stride);
    for (int i = threadIdx.x; i < a.x.stride / COPY_ELEMENTS; i += blockDim.x) to[i] = from[i];
  }
  if (threadIdx.x == 0) a.out.scales[token] = a.x.scales[source];
}

struct ScatterTokens {
  // [count, columns].
  const float* x;
  // [count]: tokens of `out`, each at most once.
  const unsigned* tokens;
  int columns;
  // [tokens, columns].
  float* out;
};

// out[tokens[i]] += x[i]. Grid: one block of 256 per token of `x`.
KERNEL(256, scatter_tokens, ScatterTokens) {
  const float* from = a.x + size_t(blockIdx.x) * a.columns;
  float* to = a.out + size_t(a.tokens[blockIdx.x]) * a.columns;
  for (int i = threadIdx.x; i < a.columns; i += blockDim.x) to[i] += from[i];
}

struct Gemm {
  // [outputs, inputs]; for `gemm_down` [inputs, outputs].
  Matrix matrix;
  F16Buffer x;
  // [outputs] or [tokens, outputs], and [outputs]; null for none.
  const float* bias;
  const float* offset;
  // [tokens, outputs]: the cold neurons' sums in mapped host memory, added; null for none.
  const float* cold;
  // [tokens, outputs].
  float* out;
  // out += instead of out =.
  int accumulate;
  // Elements from the bias of a token to that of the next; 0 if all have the same.
  int bias_stride;
  // [tiles, splits, TILE_TOKENS, TILE_ROWS], and one counter per tile, all 0; not used without splits.
  float* partial;
  unsigned* counters;
};

// A tile of weights in shared memory, in f16. Its rows are rows of the stored matrix, so unpacked weights keep their order.
template <class Tile, bool BY_NEURON>
struct WeightTile {
  // Matrix rows in the tile, and weights per matrix row.
  static constexpr int ROWS = BY_NEURON ? TILE_COLUMNS : Tile::ROWS, WEIGHTS = BY_NEURON ? Tile::ROWS : TILE_COLUMNS;
  static constexpr int STRIDE = WEIGHTS + PADDING, SIZE = ROWS * STRIDE;

  // Address in `tile` that this lane passes to `load` for the 16 rows that start at `row`.
  __device__ static __forceinline__ const uint16_t* own(const uint16_t* tile, int row) {
    const int lane = lane_index(), low = lane % 8, middle = lane / 8 % 2 * 8, high = lane / 16 * 8;
    return BY_NEURON ? tile + (high + low) * STRIDE + row + middle : tile + (row + middle + low) * STRIDE + high;
  }

  // Loads the weights of 16 rows and of the 16 columns that start at `column`. `at` is this lane's address from `own`.
  __device__ static __forceinline__ void load(const uint16_t* at, int column, unsigned (&weights)[4]) {
    if (BY_NEURON) {
      load_matrices_transposed(at + column * STRIDE, weights);
    } else {
      load_matrices(at + column, weights);
    }
  }
};

// Adds a warp's products for one stage of columns to `sums`. `rows` and `columns` are this lane's addresses of weights and tokens.
// If there are two terms, each tile is followed by a tile of residuals. `tokens` counts the tokens of the tile from the warp's first
// on; if it is not positive, there are none.
template <class Tile, bool BY_NEURON, int TERMS, int ROW_TILES, int TOKEN_TILES>
__device__ __forceinline__ void multiply(const uint16_t* rows, const uint16_t* columns, int tokens, float (&sums)[ROW_TILES][TOKEN_TILES][4]) {
  typedef WeightTile<Tile, BY_NEURON> Weights;
  constexpr int MORE_ROWS = MMA_ROWS * (BY_NEURON ? 1 : Weights::STRIDE), TOKEN_TILE = Tile::TOKENS * PITCH;
#pragma unroll(TERMS == 1 ? TILE_COLUMNS / 16 : 1)
  for (int step = 0; step < TILE_COLUMNS; step += 16) {
    unsigned weights[ROW_TILES][TERMS][4];
#pragma unroll
    for (int row = 0; row < ROW_TILES; row++)
      for (int term = 0; term < TERMS; term++) Weights::load(rows + row * MORE_ROWS + term * Weights::SIZE, step, weights[row][term]);
#pragma unroll
    for (int pair = 0; pair < TOKEN_TILES; pair += 2) {
      if (pair * MMA_TOKENS >= tokens) break;
      unsigned fragments[TERMS][4];
      for (int term = 0; term < TERMS; term++)
        load_matrices(columns + pair * MMA_TOKENS * PITCH + step + term * TOKEN_TILE, fragments[term]);
#pragma unroll
      for (int second = 0; second < 2; second++) {
        const unsigned values[2] = {fragments[0][2 * second], fragments[0][2 * second + 1]};
        const unsigned residuals[2] = {fragments[TERMS - 1][2 * second], fragments[TERMS - 1][2 * second + 1]};
#pragma unroll
        for (int row = 0; row < ROW_TILES; row++) {
          float(&tile_sums)[4] = sums[row][pair + second];
          if (TERMS == 1) {
            mma_m16n8k16(tile_sums, weights[row][0], values);
            continue;
          }
          // Tensor cores truncate: over thousands of columns, sums of one sign would lose a part in ten thousand. The product of
          // both residuals is below f32 precision.
          float step_sums[4] = {};
          mma_m16n8k16(step_sums, weights[row][TERMS - 1], values);
          mma_m16n8k16(step_sums, weights[row][0], residuals);
          mma_m16n8k16(step_sums, weights[row][0], values);
#pragma unroll
          for (int index = 0; index < 4; index++) tile_sums[index] += step_sums[index];
        }
      }
    }
  }
}

// out = x . matrix^T + bias + offset + cold. Grid: (tiles of outputs, tiles of tokens, splits of the columns). While the tensor
// cores compute one stage of columns, the weights of the next stage are unpacked. Weights of the three stages after that (f32: two)
// are being loaded into registers in their stored format, and tokens of the next two stages are being copied to shared memory. The
// last block of a tile adds up the splits in order.
template <class Format, bool BY_NEURON, class Tile>
__device__ __forceinline__ void gemm(const Gemm& a) {
  typedef WeightTile<Tile, BY_NEURON> Weights;
  constexpr int WIDTH = Format::WIDTH;
  // Loads of WIDTH weights for each tile, and for each thread.
  constexpr int LOADS = Weights::ROWS * Weights::WEIGHTS / WIDTH, LOADS_PER_THREAD = (LOADS + GEMM_THREADS - 1) / GEMM_THREADS;
  constexpr int TOKEN_TILE = Tile::TOKENS * PITCH;
  const Matrix& matrix = a.matrix;
  const int inputs = BY_NEURON ? matrix.rows : matrix.columns, outputs = BY_NEURON ? matrix.columns : matrix.rows;
  const int first_row = blockIdx.x * Tile::ROWS, first_token = blockIdx.y * Tile::TOKENS;
  const int tokens = min(Tile::TOKENS, a.x.tokens - first_token), terms = Tile::HAS_RESIDUALS ? a.x.terms : 1;
  SharedMemory shared;
  // [buffer, term, matrix row, weight], and [stage, term, token, column].
  uint16_t* weights = shared.allocate<uint16_t>(2 * terms * Weights::SIZE);
  uint16_t* inputs_f16 = shared.allocate<uint16_t>(STAGES * terms * TOKEN_TILE);
  unsigned* is_last = shared.allocate<unsigned>(1);

  // Stages whose weights are in flight: f32 has registers for two.
  constexpr int AHEAD = sizeof(typename Format::Unit) * LOADS_PER_THREAD < 64 ? STAGES : STAGES - 1;
  typename Format::Unit loaded[AHEAD][LOADS_PER_THREAD];
  // Calls `use(index, matrix_row, start)` for the loads of this thread: row and first weight within the tile.
  const auto for_each_load = [&](auto use) {
#pragma unroll
    for (int index = 0; index < LOADS_PER_THREAD; index++) {
      const int load = threadIdx.x + index * GEMM_THREADS;
      if (load < LOADS) use(index, load / (Weights::WEIGHTS / WIDTH), load % (Weights::WEIGHTS / WIDTH) * WIDTH);
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
      uint16_t* to = weights + buffer * terms * Weights::SIZE + matrix_row * Weights::STRIDE + start;
      store_f16(values, to);
      if (terms == 1) return;
#pragma unroll
      for (int offset = 0; offset < WIDTH; offset++) values[offset] -= f16_to_float(float_to_f16(values[offset]));
      store_f16(values, to + Weights::SIZE);
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
      for (int token = 0; token < Tile::TOKENS; token += AT_ONCE)
        if (own + token < tokens) copy_to_shared(to + token * PITCH, from + token * a.x.stride);
      from += size_t(a.x.tokens) * a.x.stride;
      to += TOKEN_TILE;
    }
  };

  constexpr int WARP_ROWS = Tile::ROWS / ROW_WARPS, WARP_TOKENS = Tile::TOKENS / TOKEN_WARPS;
  const int lane = lane_index(), fragment_row = lane / 4, fragment_column = lane % 4;
  const int warp_row = warp_index() / TOKEN_WARPS * WARP_ROWS, warp_token = warp_index() % TOKEN_WARPS * WARP_TOKENS;
  float sums[WARP_ROWS / MMA_ROWS][WARP_TOKENS / MMA_TOKENS][4] = {};
  // This lane's addresses for loading rows and columns of the weights, then columns of two tiles of tokens.
  const uint16_t* own_weights = Weights::own(weights, warp_row);
  const uint16_t* own_tokens = inputs_f16 + (warp_token + lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2 * 8;
  const auto compute_stage = [&](int buffer, int slot) {
    const uint16_t *rows = own_weights + buffer * terms * Weights::SIZE, *columns = own_tokens + slot * terms * TOKEN_TILE;
    if (terms == 1) {
      multiply<Tile, BY_NEURON, 1>(rows, columns, tokens - warp_token, sums);
    } else {
      multiply<Tile, BY_NEURON, 2>(rows, columns, tokens - warp_token, sums);
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
  store_weights(loaded[0], first_stage % 2);
  if (first_stage + AHEAD < end) load_weights(first_stage + AHEAD, loaded[0]);
  int slot = 0;
#pragma unroll 1
  for (int first = first_stage; first < end; first += AHEAD) {
#pragma unroll
    for (int index = 0; index < AHEAD; index++) {
      const int stage = first + index;
      if (stage >= end) break;
      wait_for_copies_but<STAGES - 2>();
      __syncthreads();
      // No warp needs the tokens or the weights of the previous stage any more.
      const int ahead = stage + STAGES - 1;
      if (ahead < end) load_tokens(ahead, slot == 0 ? STAGES - 1 : slot - 1);
      commit_copies();
      constexpr int LAST = AHEAD - 1;
      auto& next = loaded[index == LAST ? 0 : index + 1];
      if (stage + 1 < end) store_weights(next, (stage + 1) % 2);
      if (stage + 1 + AHEAD < end) load_weights(stage + 1 + AHEAD, next);
      compute_stage(stage % 2, slot);
      slot = slot == STAGES - 1 ? 0 : slot + 1;
    }
  }
  __syncthreads();
  // Transposed through shared memory, which is now free, so that stores are coalesced.
  float* tile_sums = reinterpret_cast<float*>(weights);
  constexpr int STRIDE = Tile::ROWS + 4;
  static_assert(Tile::TOKENS * STRIDE * sizeof(float) <= (2 * Weights::SIZE + STAGES * TOKEN_TILE) * sizeof(uint16_t));
#pragma unroll
  for (int row = 0; row < WARP_ROWS / MMA_ROWS; row++) {
#pragma unroll
    for (int tile = 0; tile < WARP_TOKENS / MMA_TOKENS; tile++) {
#pragma unroll
      for (int index = 0; index < 4; index++) {
        const int token = warp_token + tile * MMA_TOKENS + 2 * fragment_column + index % 2;
        tile_sums[token * STRIDE + warp_row + row * MMA_ROWS + fragment_row + index / 2 * 8] = sums[row][tile][index];
      }
    }
  }
  __syncthreads();
  // Splits are added by four rows of a token at once.
  constexpr int FOURS = Tile::ROWS / 4, TILE_SIZE = Tile::TOKENS * FOURS;
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
  for (int element = threadIdx.x; element < tokens * Tile::ROWS; element += GEMM_THREADS) {
    const int tile_row = element % Tile::ROWS, row = first_row + tile_row, token = first_token + element / Tile::ROWS;
    if (row >= outputs) continue;
    const size_t index = size_t(token) * outputs + row;
    float sum = tile_sums[element / Tile::ROWS * STRIDE + tile_row] * a.x.scales[token];
    if (a.bias) sum += a.bias[size_t(token) * a.bias_stride + row];
    if (a.offset) sum += a.offset[row];
    if (a.cold) sum += load_sys_scope(a.cold + index);
    a.out[index] = a.accumulate ? a.out[index] + sum : sum;
  }
}

#define GEMM_KERNEL(name, Format, BY_NEURON, Tile) \
  KERNEL_OF_BLOCKS(GEMM_THREADS, Tile::BLOCKS, name, Gemm) { gemm<Format, BY_NEURON, Tile>(a); }
#define GEMM(name, Format) GEMM_KERNEL(gemm_##name, Format, false, Narrow)
FOR_ALL_FORMATS(GEMM)

// Rows of the matrix are inputs (neurons), as in down.
#define GEMM_DOWN(name, Format) GEMM_KERNEL(gemm_down_##name, Format, true, Narrow)
FOR_ALL_FORMATS(GEMM_DOWN)

// Weights in f32 always have residuals, which wide tiles do not support.
#define GEMM_WIDE(name, Format)                         \
  GEMM_KERNEL(gemm_wide_##name, Format, false, Wide)    \
  GEMM_KERNEL(gemm_down_wide_##name, Format, true, Wide)
FOR_SHORT_FORMATS(GEMM_WIDE)

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
