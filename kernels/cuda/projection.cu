// GEMV with a fused norm: Q, K and V in one launch, the attention output, a predictor's hidden layer, the LM head.
// `norm_in_place`, `arg_max` and `embed` are the remaining operations on vectors.
#include "matrix.cuh"

// One of up to three matrices that share the input.
struct Segment {
  Matrix matrix;
  // [rows]; null for none.
  const float* bias;
  // [tokens, rows].
  float* out;
};

struct Projection {
  // [tokens, columns].
  const float* x;
  Norm norm;
  Segment segments[3];
  int segment_count;
  // Whether quantised rows are multiplied with the int8 input.
  int int8;
  // out += instead of out =.
  int accumulate;
  int tokens;
  // Tokens of a thread block, at most BATCH.
  int tokens_at_once;
  // The int8 input, and norm(x), [tokens, columns], in mapped host memory, for a kernel that reads the same; null for none.
  uint4* rounded;
  float* host_input;
};

// Grid: (any, ceil(tokens / tokens_at_once)), blocks of GEMV_THREADS; a warp computes one row at a time, for up to TOKENS tokens.
template <class Format, int TOKENS>
__device__ __forceinline__ void project(const Projection& a) {
  const int columns = a.segments[0].matrix.columns, lane = lane_index();
  const int first_token = TOKENS == 1 ? 0 : blockIdx.y * a.tokens_at_once;
  const int tokens = TOKENS == 1 ? 1 : min(a.tokens_at_once, a.tokens - first_token);
  int rows = 0;
  for (int index = 0; index < a.segment_count; index++) rows += a.segments[index].matrix.rows;
  const int step = gridDim.x * warp_count(), first_row = blockIdx.x * warp_count() + warp_index();
  // Index of the segment of `row`, which becomes the row within it.
  const auto find_segment = [&](int& row) {
    int index = 0;
    while (row >= a.segments[index].matrix.rows) row -= a.segments[index++].matrix.rows;
    return index;
  };
  if (first_row < rows) {
    int row = first_row;
    const int index = find_segment(row);
    prefetch_row<Format>(a.segments[index].matrix, row);
  }
  SharedMemory shared;
  const float* start = a.x + size_t(first_token) * columns;
  const auto to_host = [&](int token, const float* values) {
    if (!a.host_input || blockIdx.x > 0) return;
    float* to = a.host_input + size_t(first_token + token) * columns;
    for (int i = threadIdx.x; i < columns; i += GEMV_THREADS) to[i] = values[i];
  };
  const Inputs x = load_inputs<GEMV_THREADS>(shared, start, columns, tokens, a.norm, Format::QUANTISED && a.int8, to_host);
  if (a.rounded && blockIdx.x == 0) store_int8(x, tokens, a.rounded + size_t(first_token) * x.stride / sizeof(uint4));
  for (int number = first_row; number < rows; number += step) {
    int row = number;
    const Segment& segment = a.segments[find_segment(row)];
    float product = dot<Format, TOKENS>(segment.matrix, row, x, (1u << tokens) - 1);
    if (lane >= tokens) continue;
    if (segment.bias) product += segment.bias[row];
    float* out = segment.out + size_t(first_token + lane) * segment.matrix.rows + row;
    *out = a.accumulate ? *out + product : product;
  }
}

#define PROJECT(name, Format)                                                              \
  KERNEL_OF_BLOCKS(GEMV_THREADS, 1, project_##name, Projection) { project<Format, 1>(a); }               \
  KERNEL_OF_BLOCKS(GEMV_THREADS, 1, project_batch_##name, Projection) { project<Format, BATCH>(a); }
FOR_ALL_FORMATS(PROJECT)

struct NormInPlace {
  // [tokens, columns].
  float* x;
  int columns;
  Norm norm;
};

// Grid: one block of 256 per token.
KERNEL(256, norm_in_place, NormInPlace) {
  SharedMemory shared;
  float* x = a.x + size_t(blockIdx.x) * a.columns;
  const float* normed = load_normed<256>(shared, x, a.columns, a.norm);
  for (int i = threadIdx.x; i < a.columns; i += blockDim.x) x[i] = normed[i];
}

struct ArgMax {
  const float* x;
  int count;
  // [blocks]: maximum of each block, and its index.
  float* largest;
  int* indices;
  unsigned* counter;
  int* out;
};

// Whether (x, index) comes before (other, other_index): larger, or equal and earlier. NaN never does.
__device__ __forceinline__ bool is_better(float x, int index, float other, int other_index) {
  return x > other || (x == other && index < other_index);
}

// Index of the largest element, the first of equal ones. Grid: up to 32 blocks of 256; the last block reduces the
// blocks' results.
KERNEL(256, arg_max, ArgMax) {
  SharedMemory shared;
  float* values = shared.allocate<float>(blockDim.x);
  int* indices = shared.allocate<int>(blockDim.x);
  unsigned* scratch = shared.allocate<unsigned>(1);
  const float least = __uint_as_float(0xff800000u);
  float best = least;
  int best_index = a.count;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < a.count; i += gridDim.x * blockDim.x) {
    const float x = a.x[i];
    if (is_better(x, i, best, best_index)) best = x, best_index = i;
  }
  for (int stage = 0; stage < 2; stage++) {
    values[threadIdx.x] = best;
    indices[threadIdx.x] = best_index;
    __syncthreads();
    for (int stride = blockDim.x / 2; stride > 0; stride /= 2) {
      const int other = threadIdx.x + stride;
      if (threadIdx.x < stride && is_better(values[other], indices[other], values[threadIdx.x], indices[threadIdx.x])) {
        values[threadIdx.x] = values[other];
        indices[threadIdx.x] = indices[other];
      }
      __syncthreads();
    }
    if (stage == 1) break;
    if (threadIdx.x == 0) {
      a.largest[blockIdx.x] = values[0];
      a.indices[blockIdx.x] = indices[0];
    }
    if (!is_last_block(a.counter, gridDim.x, scratch)) return;
    best = least;
    best_index = a.count;
    for (int i = threadIdx.x; i < gridDim.x; i += blockDim.x) {
      const float x = load_gpu_scope(a.largest + i);
      const int block_index = __float_as_uint(load_gpu_scope(reinterpret_cast<const float*>(a.indices) + i));
      if (is_better(x, block_index, best, best_index)) best = x, best_index = block_index;
    }
  }
  if (threadIdx.x == 0) *a.out = indices[0] < a.count ? indices[0] : 0;
}

struct Embed {
  // [vocabulary, columns], in mapped host memory or on the device.
  Matrix table;
  const unsigned* token;
  float scale;
  // [columns].
  float* out;
};

// Row of a token times a scale. Grid: a thread per column, blocks of 256.
#define EMBED(name, Format)                                                                              \
  KERNEL(256, embed_##name, Embed) {                                                                     \
    const int column = blockIdx.x * blockDim.x + threadIdx.x;                                            \
    if (column < a.table.columns) a.out[column] = Format::weight(a.table, *a.token, column) * a.scale;   \
  }
FOR_ALL_FORMATS(EMBED)
