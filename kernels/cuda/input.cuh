// The input vectors of a GEMV, normalised and, for quantised rows, quantised to int8. Every thread block repeats
// this for itself, which saves a kernel launch and a round trip.
#pragma once
#include "block.cuh"

enum NormKind { NO_NORM, ROOT_MEAN_SQUARE, LAYER_NORM };

struct Norm {
  const float* weight;
  // Null without bias.
  const float* bias;
  float epsilon;
  int kind;
};

// A vector in shared memory. The int8 values of a block are split into its first and second 16 columns, which
// meet the low and the high nibbles of four-bit weights.
struct Input {
  // Zero-padded to whole blocks.
  float* values;
  uint4* low;
  uint4* high;
  // Per block: the scale, and the sum of the int8 values.
  float* scales;
  int* sums;
};

// Vectors of several tokens, `stride` bytes apart. Quantised ones share `values`, which hold the last.
struct Inputs {
  Input first;
  int stride;

  __device__ __forceinline__ Input operator[](int token) const {
    const auto shifted = [&](auto* at) { return reinterpret_cast<decltype(at)>(reinterpret_cast<char*>(at) + token * stride); };
    return {shifted(first.values), shifted(first.low), shifted(first.high), shifted(first.scales), shifted(first.sums)};
  }
};

// Tokens of a thread block that computes a batch.
constexpr int BATCH = 8;

// Loads norm(x) to `values` in shared memory, zero-padded to whole blocks, by a block of THREADS. `scratch` holds one element
// per warp. A vector of 4096 takes one round trip.
template <int THREADS>
__device__ __forceinline__ void load_normed(float* values, float* scratch, const float* x, int columns, const Norm& norm) {
  constexpr int LOADS = 4096 / THREADS;
  const int padded = (columns + BLOCK - 1) / BLOCK * BLOCK;
  float sum = 0.0f;
  load_ahead<LOADS, THREADS>(x, columns, threadIdx.x, [&](int i, float value) {
    values[i] = value;
    sum += value;
  });
  for (int i = columns + threadIdx.x; i < padded; i += THREADS) values[i] = 0.0f;
  if (norm.kind == NO_NORM) {
    __syncthreads();
    return;
  }
  const float mean = norm.kind == LAYER_NORM ? block_sum(sum, scratch) / float(columns) : 0.0f;
  float squares = 0.0f;
#pragma unroll 4
  for (int i = threadIdx.x; i < columns; i += THREADS) {
    values[i] -= mean;
    squares = fmaf(values[i], values[i], squares);
  }
  const float scale = 1.0f / sqrtf(block_sum(squares, scratch) / float(columns) + norm.epsilon);
  load_ahead<LOADS, THREADS>(norm.weight, columns, threadIdx.x, [&](int i, float weight) {
    values[i] = values[i] * scale * weight;
  });
  if (norm.bias) {
    load_ahead<LOADS, THREADS>(norm.bias, columns, threadIdx.x, [&](int i, float bias) { values[i] += bias; });
  }
  __syncthreads();
}

// The same in memory of `shared`.
template <int THREADS>
__device__ __forceinline__ float* load_normed(SharedMemory& shared, const float* x, int columns, const Norm& norm) {
  float* values = shared.allocate<float>((columns + BLOCK - 1) / BLOCK * BLOCK);
  load_normed<THREADS>(values, shared.allocate<float>(WARP), x, columns, norm);
  return values;
}

// Quantises the values to int8 with one scale per block of 32, four lanes per block; the same bits as `Isa::quantise`
// on the CPU.
__device__ __forceinline__ void quantise(const float* vector, const Input& input, int columns) {
  constexpr int LANES = 4, WIDTH = BLOCK / LANES;
  const int blocks = (columns + BLOCK - 1) / BLOCK, part = threadIdx.x % LANES;
#pragma unroll 1
  for (int first = warp_index() * (WARP / LANES); first < blocks; first += warp_count() * (WARP / LANES)) {
    const int block = first + lane_index() / LANES;
    const float4* fours = reinterpret_cast<const float4*>(vector + min(block, blocks - 1) * BLOCK + part * WIDTH);
    const float4 four = fours[0], next = fours[1];
    const float values[WIDTH] = {four.x, four.y, four.z, four.w, next.x, next.y, next.z, next.w};
    // The bits of magnitudes sort like the magnitudes, NaN last.
    unsigned bits = 0;
#pragma unroll
    for (int index = 0; index < WIDTH; index++) bits = max(bits, __float_as_uint(values[index]) & 0x7fffffffu);
#pragma unroll
    for (int distance = 1; distance < LANES; distance *= 2) bits = max(bits, __shfl_xor_sync(ALL_LANES, bits, distance));
    const float largest = __uint_as_float(bits);
    const bool finite = bits < 0x7f800000u;
    const bool some = finite && largest >= 1e-30f;
    const float inverse = some ? 127.0f / largest : 0.0f;
    unsigned words[2] = {};
    int sum = 0;
#pragma unroll
    for (int index = 0; index < WIDTH; index++) {
      // Adding 1.5 * 2^23 leaves the nearest integer, ties to even, in the low byte.
      const float scaled = some ? values[index] * inverse : 0.0f;
      const unsigned quant = __float_as_uint(scaled + 12582912.0f) & 0xff;
      words[index / 4] |= quant << index % 4 * 8;
      sum += int(int8_t(quant));
    }
#pragma unroll
    for (int distance = 1; distance < LANES; distance *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
    if (block >= blocks) continue;
    uint4* half = part < LANES / 2 ? input.low : input.high;
    reinterpret_cast<uint2*>(half + block)[part % (LANES / 2)] = {words[0], words[1]};
    if (part == 0) {
      input.scales[block] = some ? largest / 127.0f : finite ? 0.0f : __uint_as_float(0x7fc00000u);
      input.sums[block] = sum;
    }
  }
  __syncthreads();
}

// Memory of int8 inputs, without values.
__device__ __forceinline__ Inputs allocate_int8(SharedMemory& shared, int columns, int tokens) {
  const int blocks = (columns + BLOCK - 1) / BLOCK;
  Inputs inputs = {};
  char* start = shared.next;
  inputs.first.low = shared.allocate<uint4>(blocks);
  inputs.first.high = shared.allocate<uint4>(blocks);
  inputs.first.scales = shared.allocate<float>(blocks);
  inputs.first.sums = shared.allocate<int>(blocks);
  inputs.stride = int(shared.next - start);
  shared.next += (tokens - 1) * inputs.stride;
  return inputs;
}

// Loads norm(x), [tokens, columns], in int8 if `int8`. Calls `use(token, values)` with the values of each token.
template <int THREADS, class Use>
__device__ __forceinline__ Inputs load_inputs(SharedMemory& shared, const float* x, int columns, int tokens, const Norm& norm,
                                              bool int8, Use use) {
  const int padded = (columns + BLOCK - 1) / BLOCK * BLOCK;
  float* scratch = shared.allocate<float>(WARP);
  float* first = shared.allocate<float>(int8 ? padded : tokens * padded);
  Inputs inputs = int8 ? allocate_int8(shared, columns, tokens) : Inputs{{}, padded * int(sizeof(float))};
  inputs.first.values = first;
#pragma unroll 1
  for (int token = 0; token < tokens; token++) {
    const Input input = inputs[token];
    float* values = int8 ? inputs.first.values : input.values;
    load_normed<THREADS>(values, scratch, x + size_t(token) * columns, columns, norm);
    use(token, values);
    if (int8) quantise(values, input, columns);
  }
  return inputs;
}

// Stores int8 inputs for kernels that read the same.
__device__ __forceinline__ void store_int8(const Inputs& inputs, int tokens, uint4* to) {
  const uint4* from = inputs.first.low;
  for (int i = threadIdx.x; i < tokens * inputs.stride / int(sizeof(uint4)); i += blockDim.x) to[i] = from[i];
}

// Requests inputs that `store_int8` has stored; they are complete after a wait for copies and a barrier.
__device__ __forceinline__ Inputs request_int8(SharedMemory& shared, const uint4* from, int columns, int tokens) {
  const Inputs inputs = allocate_int8(shared, columns, tokens);
  for (int i = threadIdx.x; i < tokens * inputs.stride / int(sizeof(uint4)); i += blockDim.x)
    copy_to_shared(inputs.first.low + i, from + i);
  commit_copies();
  return inputs;
}
