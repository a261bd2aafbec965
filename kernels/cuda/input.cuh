// The input vector of a GEMV, normalised and, for quantised rows, quantised to int8. Every thread block repeats
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

// The vector in shared memory. The int8 values of a block are split into its first and second 16 columns, which
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

// Elements that a thread requests before it uses the first: a vector of 4096 takes one round trip.
constexpr int INPUT_LOADS = 16;
constexpr int INPUT_THREADS = 256;

// Loads norm(x) into shared memory, zero-padded to whole blocks.
__device__ __forceinline__ float* load_normed(SharedMemory& shared, const float* x, int columns, const Norm& norm) {
  const int padded = (columns + BLOCK - 1) / BLOCK * BLOCK;
  float* values = shared.allocate<float>(padded);
  float* scratch = shared.allocate<float>(WARP);
  float sum = 0.0f;
  load_ahead<INPUT_LOADS, INPUT_THREADS>(x, columns, threadIdx.x, [&](int i, float value) {
    values[i] = value;
    sum += value;
  });
  for (int i = columns + threadIdx.x; i < padded; i += blockDim.x) values[i] = 0.0f;
  if (norm.kind == NO_NORM) {
    __syncthreads();
    return values;
  }
  const float mean = norm.kind == LAYER_NORM ? block_sum(sum, scratch) / float(columns) : 0.0f;
  float squares = 0.0f;
#pragma unroll 4
  for (int i = threadIdx.x; i < columns; i += blockDim.x) {
    values[i] -= mean;
    squares = fmaf(values[i], values[i], squares);
  }
  const float scale = 1.0f / sqrtf(block_sum(squares, scratch) / float(columns) + norm.epsilon);
  load_ahead<INPUT_LOADS, INPUT_THREADS>(norm.weight, columns, threadIdx.x, [&](int i, float weight) {
    values[i] = values[i] * scale * weight;
  });
  if (norm.bias) {
    load_ahead<INPUT_LOADS, INPUT_THREADS>(norm.bias, columns, threadIdx.x, [&](int i, float bias) { values[i] += bias; });
  }
  __syncthreads();
  return values;
}

// Quantises the values to int8 with one scale per block of 32, four lanes per block; the same bits as `Isa::quantise`
// on the CPU.
__device__ __forceinline__ void quantise(SharedMemory& shared, Input& input, int columns) {
  constexpr int LANES = 4, WIDTH = BLOCK / LANES;
  const int blocks = (columns + BLOCK - 1) / BLOCK, part = threadIdx.x % LANES;
  input.low = shared.allocate<uint4>(blocks);
  input.high = shared.allocate<uint4>(blocks);
  input.scales = shared.allocate<float>(blocks);
  input.sums = shared.allocate<int>(blocks);
#pragma unroll 1
  for (int first = warp_index() * (WARP / LANES); first < blocks; first += warp_count() * (WARP / LANES)) {
    const int block = first + lane_index() / LANES;
    const float4* fours = reinterpret_cast<const float4*>(input.values + min(block, blocks - 1) * BLOCK + part * WIDTH);
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
