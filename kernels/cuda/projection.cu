// Rows times a normed vector: query, key and value at once, what attention puts out, a predictor's
// hidden layer, the head.
#include "matrix.cuh"

// A matrix, and where its products go.
struct Segment {
  Matrix matrix;
  // One number a row; null for none.
  const float* bias;
  float* out;
};

struct Projection {
  // [tokens, columns]; a token is a row of the grid.
  const float* x;
  Norm norm;
  Segment segments[3];
  int segment_count;
  // Whether quantised rows are multiplied with bytes.
  int rounded;
  // Whether products are added to what is there.
  int add;
};

template <class Format>
__device__ __forceinline__ void project(const Projection& a) {
  SharedMemory shared;
  const int columns = a.segments[0].matrix.columns, token = blockIdx.y;
  const bool rounded = Format::QUANTISED && a.rounded;
  const Input x = load_input(shared, a.x + size_t(token) * columns, columns, a.norm, rounded);
  int rows = 0;
  for (int index = 0; index < a.segment_count; index++) rows += a.segments[index].matrix.rows;
  const int step = gridDim.x * warp_count();
  for (int row = blockIdx.x * warp_count() + warp_index(); row < rows; row += step) {
    int index = 0, of_segment = row;
    while (of_segment >= a.segments[index].matrix.rows) of_segment -= a.segments[index++].matrix.rows;
    const Segment& segment = a.segments[index];
    float product = Format::dot(segment.matrix, of_segment, x, rounded);
    if (lane_index() != 0) continue;
    if (segment.bias) product += segment.bias[of_segment];
    float* out = segment.out + size_t(token) * segment.matrix.rows + of_segment;
    *out = a.add ? *out + product : product;
  }
}

#define PROJECT(name, Format) \
  KERNEL(256, project_##name, Projection) { project<Format>(a); }
FOR_ALL_FORMATS(PROJECT)

struct NormInPlace {
  // [tokens, columns]; a token is a block.
  float* x;
  int columns;
  Norm norm;
};

KERNEL(256, norm_in_place, NormInPlace) {
  SharedMemory shared;
  float* x = a.x + size_t(blockIdx.x) * a.columns;
  const float* normed = load_normed(shared, x, a.columns, a.norm);
  for (int i = threadIdx.x; i < a.columns; i += blockDim.x) x[i] = normed[i];
}

struct ArgMax {
  const float* x;
  int count;
  // A place a block each.
  float* largest;
  int* places;
  unsigned* counter;
  int* out;
};

// Whether the first is to be preferred: larger, or as large and earlier. What is no number comes last.
__device__ __forceinline__ bool is_better(float x, int place, float other, int other_place) {
  return x > other || (x == other && place < other_place);
}

// The place of the largest number, the first of equal ones.
KERNEL(256, arg_max, ArgMax) {
  SharedMemory shared;
  float* values = shared.take<float>(blockDim.x);
  int* places = shared.take<int>(blockDim.x);
  unsigned* scratch = shared.take<unsigned>(1);
  const float least = __uint_as_float(0xff800000u);
  float best = least;
  int place = a.count;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < a.count; i += gridDim.x * blockDim.x) {
    const float x = a.x[i];
    if (is_better(x, i, best, place)) best = x, place = i;
  }
  for (int stage = 0; stage < 2; stage++) {
    values[threadIdx.x] = best;
    places[threadIdx.x] = place;
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
      const int other = threadIdx.x + half;
      if (threadIdx.x < half && is_better(values[other], places[other], values[threadIdx.x], places[threadIdx.x])) {
        values[threadIdx.x] = values[other];
        places[threadIdx.x] = places[other];
      }
      __syncthreads();
    }
    if (stage == 1) break;
    if (threadIdx.x == 0) {
      a.largest[blockIdx.x] = values[0];
      a.places[blockIdx.x] = places[0];
    }
    if (!is_last_block(a.counter, gridDim.x, scratch)) return;
    best = least;
    place = a.count;
    for (int i = threadIdx.x; i < gridDim.x; i += blockDim.x) {
      const float x = load_from_blocks(a.largest + i);
      const int of_block = __float_as_uint(load_from_blocks(reinterpret_cast<const float*>(a.places) + i));
      if (is_better(x, of_block, best, place)) best = x, place = of_block;
    }
  }
  if (threadIdx.x == 0) *a.out = places[0] < a.count ? places[0] : 0;
}
