// A vector that rows are multiplied with: normed, and for quantised rows rounded, by every block for
// itself, since reading it again costs less than another kernel.
#pragma once
#include "block.cuh"

enum NormKind { NO_NORM, ROOT_MEAN_SQUARE, LAYER_NORM };

struct Norm {
  const float* weight;
  // Null for none.
  const float* bias;
  float epsilon;
  int kind;
};

// The vector in shared memory. Of rounded ones, first and second halves of blocks apart, as the low and
// the high nibbles of four-bit weights want them.
struct Input {
  // Padded with zeros to whole blocks.
  float* values;
  uint4* low;
  uint4* high;
  // One a block, and sums of its quants.
  float* scales;
  int* sums;
};

// Normed numbers of `x`, in shared memory, zeros up to the end of the last block.
__device__ __forceinline__ float* load_normed(SharedMemory& shared, const float* x, int columns, const Norm& norm) {
  const int padded = (columns + BLOCK - 1) / BLOCK * BLOCK;
  float* values = shared.take<float>(padded);
  float* scratch = shared.take<float>(WARP);
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

// Rounds `values` to bytes with a scale for every 32, a warp a block of them; the numbers of the
// processor's half.
__device__ __forceinline__ void round_blocks(Input& input, int blocks) {
  const int lane = lane_index();
  for (int block = warp_index(); block < blocks; block += warp_count()) {
    const float value = input.values[block * BLOCK + lane];
    // Bits of magnitudes are ordered as the magnitudes are, and those of NaNs come last.
    const unsigned bits = warp_largest(__float_as_uint(value) & 0x7fffffffu);
    const float largest = __uint_as_float(bits);
    const bool finite = bits < 0x7f800000u;
    const bool some = finite && largest >= 1e-30f;
    const float scale = some ? largest / 127.0f : finite ? 0.0f : __uint_as_float(0x7fc00000u);
    const float inverse = some ? 127.0f / largest : 0.0f;
    // Adding 1.5 * 2^23 leaves the nearest whole number, ties to even, in the last byte.
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

// Takes a vector into shared memory; `rounded` where rows are quantised and bytes are asked for.
__device__ __forceinline__ Input load_input(SharedMemory& shared, const float* x, int columns, const Norm& norm,
                                            bool rounded) {
  Input input = {};
  input.values = load_normed(shared, x, columns, norm);
  if (rounded) {
    const int blocks = (columns + BLOCK - 1) / BLOCK;
    input.low = shared.take<uint4>(blocks);
    input.high = shared.take<uint4>(blocks);
    input.scales = shared.take<float>(blocks);
    input.sums = shared.take<int>(blocks);
    round_blocks(input, blocks);
  }
  return input;
}
