// Many tokens at once: what is multiplied is halved once, each token over a power of two of its own, and tiles
// of weights, unpacked to halves in shared memory, are multiplied with tiles of tokens on the tensor cores.
#include "matrix.cuh"
#include "neurons.cuh"

// Rows, tokens and columns of a tile.
constexpr int TILE_ROWS = 32;
constexpr int TILE_TOKENS = 64;
constexpr int TILE_COLUMNS = 64;
// F16Buffer from one row of a tile to the next: no two of those that a warp reads together share a bank.
constexpr int PITCH = TILE_COLUMNS + 8;
// F16Buffer of 16 bytes.
constexpr int PIECE = 8;
// Rows and columns that tensor cores take at once, and tokens.
constexpr int CORE_ROWS = 16;
constexpr int CORE_TOKENS = 8;
// Warps that share a tile's rows, and those that share its tokens.
constexpr int ROW_WARPS = TILE_ROWS / CORE_ROWS;
constexpr int TOKEN_WARPS = 2;
constexpr int GEMM_THREADS = ROW_WARPS * TOKEN_WARPS * WARP;
constexpr int WARP_TOKENS = TILE_TOKENS / TOKEN_WARPS;

// The numbers of some tokens as halves.
struct F16Buffer {
  // [parts, tokens, padded]: numbers over their token's scale, zeros behind them up to whole tiles; where there
  // is a second part, what the first leaves.
  uint16_t* numbers;
  // One a token.
  float* scales;
  int tokens;
  int padded;
  int parts;
};

// What a token's numbers are divided by, the largest of which has these bits: a power of two that brings it near
// the end of what a half can be. What is not finite shows.
__device__ __forceinline__ float scale_of(unsigned largest, float& inverse) {
  inverse = 0.0f;
  if (largest >= 0x7f800000u) return __uint_as_float(0x7fc00000u);
  const int exponent = max(int(largest >> 23), 27);
  inverse = __uint_as_float(unsigned(268 - exponent) << 23);
  return __uint_as_float(unsigned(exponent - 14) << 23);
}

// Writes number `column` of a token over its scale.
__device__ __forceinline__ void write_half(const F16Buffer& to, int token, int column, float value) {
  const size_t place = size_t(token) * to.padded + column;
  const uint16_t half = float_to_half(value);
  to.numbers[place] = half;
  if (to.parts > 1) to.numbers[size_t(to.tokens) * to.padded + place] = float_to_half(value - half_to_float(half));
}

// The largest of the bits that threads of a block have; `scratch` has a place a warp.
__device__ __forceinline__ unsigned block_largest(unsigned value, unsigned* scratch) {
  value = warp_largest(value);
  if (lane_index() == 0) scratch[warp_index()] = value;
  __syncthreads();
  for (int warp = 0; warp < warp_count(); warp++) value = max(value, scratch[warp]);
  __syncthreads();
  return value;
}

struct ToF16 {
  // [tokens, columns]; a token is a block.
  const float* x;
  int columns;
  Norm norm;
  F16Buffer to;
  // The normed numbers, where the processor beside reads them; null where it does not.
  float* for_host;
};

// Norms tokens and halves them.
KERNEL(256, to_f16, ToF16) {
  SharedMemory shared;
  const int token = blockIdx.x;
  const size_t start = size_t(token) * a.columns;
  const float* x = load_normed(shared, a.x + start, a.columns, a.norm);
  unsigned* scratch = shared.take<unsigned>(WARP);
  unsigned largest = 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < a.columns; i += blockDim.x) {
    largest = max(largest, __float_as_uint(x[i]) & 0x7fffffffu);
    if (a.for_host) a.for_host[start + i] = x[i];
  }
  float inverse;
  const float scale = scale_of(block_largest(largest, scratch), inverse);
#pragma unroll 1
  for (int i = threadIdx.x; i < a.to.padded; i += blockDim.x)
    write_half(a.to, token, i, i < a.columns ? x[i] * inverse : 0.0f);
  if (threadIdx.x == 0) a.to.scales[token] = scale;
}

struct ActivateGateUp {
  Neurons neurons;
  // [tokens, count]: what gate gives, and then what rows of down are multiplied by. A token is a block.
  float* gate;
  // The same of up; null where there is none.
  const float* up;
  // Who is predicted, [tokens, words]; null for everyone.
  const unsigned* mask;
  int words;
  // The first of these neurons in the mask.
  int first;
  int count;
  F16Buffer to;
  // How many neurons are added, in all that was launched.
  unsigned* computed;
};

// Makes of gate and up what rows of down are multiplied by, of the neurons that are computed, and halves that.
KERNEL(256, activate_gate_up, ActivateGateUp) {
  SharedMemory shared;
  unsigned* scratch = shared.take<unsigned>(WARP);
  const int token = blockIdx.x;
  float* gate = a.gate + size_t(token) * a.count;
  const float* up = a.up + size_t(token) * a.count;
  const unsigned* mask = a.mask + size_t(token) * a.words;
  unsigned largest = 0;
  int computed = 0;
#pragma unroll 1
  for (int neuron = threadIdx.x; neuron < a.count; neuron += blockDim.x) {
    float product = 0.0f;
    const int place = a.first + neuron;
    if (!a.mask || mask[place / 32] >> place % 32 & 1) {
      const float activation = activate(a.neurons, gate[neuron]);
      if (passes_gate(a.neurons, neuron, activation)) {
        product = activation;
        if (a.neurons.kind == GATED) product *= up[neuron];
        if (a.neurons.kind == DOUBLY_GATED) product *= activate(a.neurons, up[neuron]);
        product = coefficient(a.neurons, neuron, product);
      }
    }
    gate[neuron] = product;
    computed += product != 0.0f;
    largest = max(largest, __float_as_uint(product) & 0x7fffffffu);
  }
  float inverse;
  const float scale = scale_of(block_largest(largest, scratch), inverse);
  // Every thread reads what it has written itself.
#pragma unroll 1
  for (int neuron = threadIdx.x; neuron < a.to.padded; neuron += blockDim.x)
    write_half(a.to, token, neuron, neuron < a.count ? gate[neuron] * inverse : 0.0f);
  if (threadIdx.x == 0) a.to.scales[token] = scale;
  computed = warp_sum(computed);
  if (lane_index() == 0) atomicAdd(a.computed, unsigned(computed));
}

struct Gemm {
  // [outputs, inputs], or where rows are neurons [inputs, outputs].
  Matrix matrix;
  F16Buffer x;
  // Added to every token, one number an output; null for none.
  const float* bias;
  const float* offset;
  // [tokens, outputs], added, in memory of the processor beside; null for none.
  const float* beside;
  // [tokens, outputs].
  float* out;
  // Whether products are added to what is there.
  int add;
};

// Weights over tokens: a tile of outputs a block. While a stage of columns is multiplied, the next one's weights
// are on their way to registers and its tokens to shared memory.
template <class Format, bool BY_NEURON>
__device__ __forceinline__ void gemm(const Gemm& a) {
  constexpr int WIDTH = Format::WIDTH;
  // Rows of the matrix that a tile has something of, how many weights of each, and runs of them.
  constexpr int LINES = BY_NEURON ? TILE_COLUMNS : TILE_ROWS, RUN = BY_NEURON ? TILE_ROWS : TILE_COLUMNS;
  constexpr int RUNS = LINES * RUN / WIDTH, EACH = (RUNS + GEMM_THREADS - 1) / GEMM_THREADS;
  const Matrix& matrix = a.matrix;
  const int inputs = BY_NEURON ? matrix.rows : matrix.columns, outputs = BY_NEURON ? matrix.columns : matrix.rows;
  const int first_row = blockIdx.x * TILE_ROWS, first_token = blockIdx.y * TILE_TOKENS;
  const int tokens = min(TILE_TOKENS, a.x.tokens - first_token), parts = a.x.parts;
  SharedMemory shared;
  // [stage, part, row, column], and [stage, part, token, column].
  uint16_t* weights = shared.take<uint16_t>(2 * parts * TILE_ROWS * PITCH);
  uint16_t* numbers = shared.take<uint16_t>(2 * parts * TILE_TOKENS * PITCH);
  const int row_part = TILE_ROWS * PITCH, token_part = TILE_TOKENS * PITCH;

  float loaded[EACH][WIDTH];
  const auto load_weights = [&](int stage) {
#pragma unroll
    for (int index = 0; index < EACH; index++) {
      const int run = threadIdx.x + index * GEMM_THREADS;
      if (run >= RUNS) break;
      const int line = run / (RUN / WIDTH), start = run % (RUN / WIDTH) * WIDTH;
      const int row = line + (BY_NEURON ? stage * TILE_COLUMNS : first_row);
      const int column = start + (BY_NEURON ? first_row : stage * TILE_COLUMNS);
      if (row < matrix.rows && column < matrix.columns) {
        Format::weights(matrix, row, column, loaded[index]);
      } else {
#pragma unroll
        for (int of = 0; of < WIDTH; of++) loaded[index][of] = 0.0f;
      }
    }
  };
  const auto store_weights = [&](int buffer) {
#pragma unroll
    for (int index = 0; index < EACH; index++) {
      const int run = threadIdx.x + index * GEMM_THREADS;
      if (run >= RUNS) break;
      const int line = run / (RUN / WIDTH), start = run % (RUN / WIDTH) * WIDTH;
      uint16_t* tile = weights + buffer * parts * row_part;
#pragma unroll 1
      for (int part = 0; part < parts; part++, tile += row_part) {
#pragma unroll
        for (int of = 0; of < WIDTH; of += 2) {
          const uint16_t half = float_to_half(loaded[index][of]), next = float_to_half(loaded[index][of + 1]);
          if (BY_NEURON) {
            tile[(start + of) * PITCH + line] = half;
            tile[(start + of + 1) * PITCH + line] = next;
          } else {
            *reinterpret_cast<unsigned*>(tile + line * PITCH + start + of) = half | unsigned(next) << 16;
          }
          // What a part leaves is the next one's.
          loaded[index][of] -= half_to_float(half);
          loaded[index][of + 1] -= half_to_float(next);
        }
      }
    }
  };
  const auto load_numbers = [&](int stage, int buffer) {
    uint16_t* tile = numbers + buffer * parts * token_part;
    constexpr int PIECES = TILE_COLUMNS / PIECE;
#pragma unroll 1
    for (int piece = threadIdx.x; piece < parts * TILE_TOKENS * PIECES; piece += GEMM_THREADS) {
      const int part = piece / (TILE_TOKENS * PIECES), token = piece / PIECES % TILE_TOKENS;
      const int column = piece % PIECES * PIECE;
      uint16_t* to = tile + part * token_part + token * PITCH + column;
      if (token < tokens) {
        const size_t row = size_t(part) * a.x.tokens + first_token + token;
        copy_to_shared(to, a.x.numbers + row * a.x.padded + stage * TILE_COLUMNS + column);
      } else {
        *reinterpret_cast<uint4*>(to) = uint4{0, 0, 0, 0};
      }
    }
  };

  const int lane = lane_index(), of_eight = lane / 4, of_four = lane % 4;
  const int warp_row = warp_index() / TOKEN_WARPS * CORE_ROWS, warp_token = warp_index() % TOKEN_WARPS * WARP_TOKENS;
  float sums[WARP_TOKENS / CORE_TOKENS][4];
#pragma unroll
  for (int tile = 0; tile < WARP_TOKENS / CORE_TOKENS; tile++) {
#pragma unroll
    for (int index = 0; index < 4; index++) sums[tile][index] = 0.0f;
  }
  // Two halves beside each other.
  const auto pair = [](const uint16_t* halves) { return *reinterpret_cast<const unsigned*>(halves); };
  const auto multiply_stage = [&](int buffer) {
    const uint16_t* rows = weights + buffer * parts * row_part + (warp_row + of_eight) * PITCH + 2 * of_four;
    const uint16_t* columns = numbers + buffer * parts * token_part + (warp_token + of_eight) * PITCH + 2 * of_four;
#pragma unroll 1
    for (int step = 0; step < TILE_COLUMNS; step += 16) {
      const uint16_t* row = rows + step;
      const unsigned first[4] = {pair(row), pair(row + 8 * PITCH), pair(row + 8), pair(row + 8 * PITCH + 8)};
      unsigned first_left[4] = {0, 0, 0, 0};
      if (parts > 1) {
        row += row_part;
        first_left[0] = pair(row);
        first_left[1] = pair(row + 8 * PITCH);
        first_left[2] = pair(row + 8);
        first_left[3] = pair(row + 8 * PITCH + 8);
      }
#pragma unroll
      for (int tile = 0; tile < WARP_TOKENS / CORE_TOKENS; tile++) {
        if (warp_token + tile * CORE_TOKENS >= tokens) break;
        const uint16_t* column = columns + tile * CORE_TOKENS * PITCH + step;
        const unsigned second[2] = {pair(column), pair(column + 8)};
        multiply_tiles(sums[tile], first, second);
        if (parts > 1) {
          // What both leave together is too small to count.
          const unsigned left[2] = {pair(column + token_part), pair(column + token_part + 8)};
          multiply_tiles(sums[tile], first_left, second);
          multiply_tiles(sums[tile], first, left);
        }
      }
    }
  };

  const int stages = (inputs + TILE_COLUMNS - 1) / TILE_COLUMNS;
#pragma unroll 1
  for (int next = 0; next <= stages; next++) {
    const bool more = next < stages;
    if (more) {
      load_weights(next);
      load_numbers(next, next % 2);
    }
    if (next > 0) multiply_stage((next - 1) % 2);
    if (more) store_weights(next % 2);
    wait_for_copies();
    __syncthreads();
  }
  // Through shared memory, which nobody needs any more, so that a warp writes outputs that follow each other.
  float* products = reinterpret_cast<float*>(weights);
  constexpr int STRIDE = TILE_ROWS + 1;
#pragma unroll
  for (int tile = 0; tile < WARP_TOKENS / CORE_TOKENS; tile++) {
#pragma unroll
    for (int index = 0; index < 4; index++) {
      const int token = warp_token + tile * CORE_TOKENS + 2 * of_four + index % 2;
      products[token * STRIDE + warp_row + of_eight + index / 2 * 8] = sums[tile][index];
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int index = threadIdx.x; index < tokens * TILE_ROWS; index += GEMM_THREADS) {
    const int of_tile = index / TILE_ROWS, within = index % TILE_ROWS;
    const int row = first_row + within, token = first_token + of_tile;
    if (row >= outputs) continue;
    const size_t place = size_t(token) * outputs + row;
    float sum = products[of_tile * STRIDE + within] * a.x.scales[token];
    if (a.bias) sum += a.bias[row];
    if (a.offset) sum += a.offset[row];
    if (a.beside) sum += load_from_host(a.beside + place);
    a.out[place] = a.add ? a.out[place] + sum : sum;
  }
}

#define GEMM(name, Format) \
  KERNEL(GEMM_THREADS, gemm_##name, Gemm) { gemm<Format, false>(a); }
FOR_ALL_FORMATS(GEMM)

// Rows of the matrix are neurons, as those of down are.
#define GEMM_DOWN(name, Format) \
  KERNEL(GEMM_THREADS, gemm_down_##name, Gemm) { gemm<Format, true>(a); }
FOR_ALL_FORMATS(GEMM_DOWN)

struct SignalHost {
  unsigned* flag;
  const unsigned* step;
};

// Says to the processor beside that it can read what kernels before have written for it.
KERNEL(WARP, signal_host, SignalHost) {
  if (threadIdx.x == 0) release_to_host(a.flag, *a.step);
}
