// The input vector of a GEMV, normalised and, for quantised rows, quantised to int8. Every thread block repeats
// this for itself: reading the vector again costs less than another kernel launch.
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

// Loads norm(x) into shared memory, zero-padded to whole blocks.
__device__ __forceinline__ float* load_normed(SharedMemory& shared, const float* x, int columns, const Norm& norm) {
  const int padded = (columns + BLOCK - 1) / BLOCK * BLOCK;
  float* values = shared.allocate<float>(padded);
  float* scratch = shared.allocate<float>(WARP);
  for (int i = threadIdx.x; i < padded; i += blockDim.x) values[i] = i < columns ? x[i] : 0.0f;
  if (norm.kind == NO_NORM) {
    __syncthreads();
    return values;
  }
  float mean = 0.0f;
  if (norm.kind == LAYER_NORM) {
    float sum = 0.0f;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) sum += values[i];
    mean = block_sum(sum, scratch) / float(columns);
  }
  float squares = 0.0f;
  for (int i = threadIdx.x; i < columns; i += blockDim.x) {
    values[i] -= mean;
    squares = fmaf(values[i], values[i], squares);
  }
  const float scale = 1.0f / sqrtf(block_sum(squares, scratch) / float(columns) + norm.epsilon);
  for (int i = threadIdx.x; i < columns; i += blockDim.x) {
    values[i] = values[i] * scale * norm.weight[i] + (norm.bias ? norm.bias[i] : 0.0f);
  }
  __syncthreads();
  return values;
}

// Quantises `values` to int8 with one scale per block of 32, one warp per block; the same bits as `Isa::quantise`
// on the CPU.
__device__ __forceinline__ void quantise_blocks(Input& input, int blocks) {
  const int lane = lane_index();
  for (int block = warp_index(); block < blocks; block += warp_count()) {
    const float value = input.values[block * BLOCK + lane];
    // The bits of magnitudes sort like the magnitudes, NaN last.
    const unsigned bits = warp_max(__float_as_uint(value) & 0x7fffffffu);
    const float largest = __uint_as_float(bits);
    const bool finite = bits < 0x7f800000u;
    const bool some = finite && largest >= 1e-30f;
    const float scale = some ? largest / 127.0f : finite ? 0.0f : __uint_as_float(0x7fc00000u);
    const float inverse = some ? 127.0f / largest : 0.0f;
    // Adding 1.5 * 2^23 leaves the nearest integer, ties to even, in the low byte.
    const float scaled = some ? value * inverse : 0.0f;
    const int8_t quant = int8_t(__float_as_uint(scaled + 12582912.0f) & 0xff);
    int8_t* half = reinterpret_cast<int8_t*>(lane < BLOCK / 2 ? input.low : input.high);
    half[block * (BLOCK / 2) + lane % (BLOCK / 2)] = quant;
    const int sum = warp_sum(int(quant));
    if (lane == 0) {
      input.scales[block] = scale;
      input.sums[block] = sum;
    }
  }
  __syncthreads();
}

// Loads norm(x) into shared memory, and its int8 values if `int8`.
__device__ __forceinline__ Input load_input(SharedMemory& shared, const float* x, int columns, const Norm& norm,
                                            bool int8) {
  Input input = {};
  input.values = load_normed(shared, x, columns, norm);
  if (int8) {
    const int blocks = (columns + BLOCK - 1) / BLOCK;
    input.low = shared.allocate<uint4>(blocks);
    input.high = shared.allocate<uint4>(blocks);
    input.scales = shared.allocate<float>(blocks);
    input.sums = shared.allocate<int>(blocks);
    quantise_blocks(input, blocks);
  }
  return input;
}
