// Rows of weights in the formats that bundles hold, in the same planes: what a warp makes of a row times
// a vector, and what a thread makes of a few weights of a row.
#pragma once
#include "input.cuh"

// A matrix [rows, columns] whose rows lie one after the other in each plane.
struct Matrix {
  // Numbers: plain ones, bytes, or pairs of nibbles, 32 to a block.
  const void* quants;
  // Per block an f16, of q4_k per eight blocks two; null for plain formats.
  const void* scales;
  // Of q4_k, per block a scale and a minimum of 6 bits.
  const void* factors;
  int rows;
  int columns;
};

__device__ __forceinline__ int blocks_of(int columns) { return (columns + BLOCK - 1) / BLOCK; }

// The four bytes of nibbles of `word`, low or high.
__device__ __forceinline__ unsigned low_nibbles(unsigned word) { return word & 0x0f0f0f0fu; }
__device__ __forceinline__ unsigned high_nibbles(unsigned word) { return word >> 4 & 0x0f0f0f0fu; }

// Products of 16 bytes each.
__device__ __forceinline__ int dot16(uint4 a, uint4 b, int sum) {
  sum = dot4(a.x, b.x, sum);
  sum = dot4(a.y, b.y, sum);
  sum = dot4(a.z, b.z, sum);
  return dot4(a.w, b.w, sum);
}

// Products of the nibbles of a block with a block of bytes.
__device__ __forceinline__ int dot_nibbles(uint4 quants, uint4 low, uint4 high) {
  const uint4 first = {low_nibbles(quants.x), low_nibbles(quants.y), low_nibbles(quants.z), low_nibbles(quants.w)};
  const uint4 second = {high_nibbles(quants.x), high_nibbles(quants.y), high_nibbles(quants.z), high_nibbles(quants.w)};
  return dot16(second, high, dot16(first, low, 0));
}

// Loads that a lane has on their way at once.
constexpr int IN_FLIGHT = 4;

// The product of a row with numbers that are not rounded, weight by weight: exact, and slower.
template <class Format>
__device__ __forceinline__ float dot_exactly(const Matrix& matrix, int row, const Input& x) {
  float sum = 0.0f;
#pragma unroll 1
  for (int column = lane_index(); column < matrix.columns; column += WARP)
    sum = fmaf(Format::weight(matrix, row, column), x.values[column], sum);
  return warp_sum(sum);
}

// Plain numbers: `Number::at` reads one, `Number::unpack` the numbers of 16 bytes.
template <class Number>
struct Plain {
  static constexpr bool QUANTISED = false;
  // Weights that 16 bytes hold.
  static constexpr int WIDTH = Number::WIDTH;

  __device__ static __forceinline__ float dot(const Matrix& matrix, int row, const Input& x, bool) {
    const int lane = lane_index(), columns = matrix.columns;
    const size_t start = size_t(row) * columns;
    float sum = 0.0f;
    if (columns % WIDTH != 0) return dot_exactly<Plain>(matrix, row, x);  // rows begin anywhere
    const uint4* place = static_cast<const uint4*>(matrix.quants) + start / WIDTH;
    const int units = columns / WIDTH;
    for (int first = lane; first < units; first += IN_FLIGHT * WARP) {
      uint4 loaded[IN_FLIGHT];
#pragma unroll
      for (int index = 0; index < IN_FLIGHT; index++) {
        const int unit = first + index * WARP;
        if (unit < units) loaded[index] = load_once(place + unit);
      }
#pragma unroll
      for (int index = 0; index < IN_FLIGHT; index++) {
        const int unit = first + index * WARP;
        if (unit >= units) break;
        float weights[WIDTH];
        Number::unpack(loaded[index], weights);
        const float4* numbers = reinterpret_cast<const float4*>(x.values + unit * WIDTH);
#pragma unroll
        for (int four = 0; four < WIDTH / 4; four++) {
          const float4 by = numbers[four];
          sum = fmaf(weights[4 * four], by.x, sum);
          sum = fmaf(weights[4 * four + 1], by.y, sum);
          sum = fmaf(weights[4 * four + 2], by.z, sum);
          sum = fmaf(weights[4 * four + 3], by.w, sum);
        }
      }
    }
    return warp_sum(sum);
  }

  // The WIDTH weights of `row` from `column` on, a multiple of WIDTH; zeros past the end.
  __device__ static __forceinline__ void weights(const Matrix& matrix, int row, int column, float (&out)[WIDTH]) {
    const size_t start = size_t(row) * matrix.columns + column;
    if (matrix.columns % WIDTH == 0) {
      Number::unpack(load_once(static_cast<const uint4*>(matrix.quants) + start / WIDTH), out);
      return;
    }
#pragma unroll
    for (int index = 0; index < WIDTH; index++) {
      out[index] = column + index < matrix.columns ? Number::at(matrix.quants, start + index) : 0.0f;
    }
  }

  __device__ static __forceinline__ float weight(const Matrix& matrix, int row, int column) {
    return Number::at(matrix.quants, size_t(row) * matrix.columns + column);
  }
};

struct F32 {
  static constexpr int WIDTH = 4;
  __device__ static __forceinline__ float at(const void* numbers, size_t index) {
    return static_cast<const float*>(numbers)[index];
  }
  __device__ static __forceinline__ void unpack(uint4 bits, float (&out)[WIDTH]) {
    out[0] = __uint_as_float(bits.x);
    out[1] = __uint_as_float(bits.y);
    out[2] = __uint_as_float(bits.z);
    out[3] = __uint_as_float(bits.w);
  }
};

struct F16 {
  static constexpr int WIDTH = 8;
  __device__ static __forceinline__ float at(const void* numbers, size_t index) {
    return half_to_float(static_cast<const uint16_t*>(numbers)[index]);
  }
  __device__ static __forceinline__ void unpack(uint4 bits, float (&out)[WIDTH]) {
    const unsigned words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int word = 0; word < 4; word++) {
      out[2 * word] = half_to_float(uint16_t(words[word]));
      out[2 * word + 1] = half_to_float(uint16_t(words[word] >> 16));
    }
  }
};

struct Bf16 {
  static constexpr int WIDTH = 8;
  __device__ static __forceinline__ float at(const void* numbers, size_t index) {
    return brain_to_float(static_cast<const uint16_t*>(numbers)[index]);
  }
  __device__ static __forceinline__ void unpack(uint4 bits, float (&out)[WIDTH]) {
    const unsigned words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int word = 0; word < 4; word++) {
      out[2 * word] = brain_to_float(words[word] & 0xffffu);
      out[2 * word + 1] = brain_to_float(words[word] >> 16);
    }
  }
};

// Bytes with an f16 scale for every 32.
struct Q8_0 {
  static constexpr bool QUANTISED = true;
  static constexpr int WIDTH = 16;

  __device__ static __forceinline__ float scale_of(const Matrix& matrix, size_t block) {
    return half_to_float(static_cast<const uint16_t*>(matrix.scales)[block]);
  }

  __device__ static __forceinline__ float dot(const Matrix& matrix, int row, const Input& x, bool rounded) {
    if (!rounded) return dot_exactly<Q8_0>(matrix, row, x);
    const int blocks = blocks_of(matrix.columns), halves = 2 * blocks;
    const size_t start = size_t(row) * blocks;
    const uint4* place = static_cast<const uint4*>(matrix.quants) + 2 * start;
    float sum = 0.0f;
    for (int first = lane_index(); first < halves; first += IN_FLIGHT * WARP) {
      uint4 loaded[IN_FLIGHT];
      float scales[IN_FLIGHT];
#pragma unroll
      for (int index = 0; index < IN_FLIGHT; index++) {
        const int half = first + index * WARP;
        if (half >= halves) continue;
        loaded[index] = load_once(place + half);
        scales[index] = scale_of(matrix, start + half / 2);
      }
#pragma unroll
      for (int index = 0; index < IN_FLIGHT; index++) {
        const int half = first + index * WARP;
        if (half >= halves) break;
        const int product = dot16(loaded[index], (half % 2 ? x.high : x.low)[half / 2], 0);
        sum = fmaf(float(product), scales[index] * x.scales[half / 2], sum);
      }
    }
    return warp_sum(sum);
  }

  __device__ static __forceinline__ void unpack(uint4 bits, float scale, float (&out)[WIDTH]) {
    const unsigned words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int column = 0; column < WIDTH; column++)
      out[column] = float(int8_t(words[column / 4] >> column % 4 * 8)) * scale;
  }

  __device__ static __forceinline__ void weights(const Matrix& matrix, int row, int column, float (&out)[WIDTH]) {
    const size_t half = size_t(row) * 2 * blocks_of(matrix.columns) + column / WIDTH;
    const uint4 bits = load_once(static_cast<const uint4*>(matrix.quants) + half);
    unpack(bits, scale_of(matrix, half / 2), out);
  }

  __device__ static __forceinline__ float weight(const Matrix& matrix, int row, int column) {
    const size_t block = size_t(row) * blocks_of(matrix.columns) + column / BLOCK;
    const int8_t quant = static_cast<const int8_t*>(matrix.quants)[block * BLOCK + column % BLOCK];
    return float(quant) * scale_of(matrix, block);
  }
};

// Nibbles in blocks of 32: byte j has column j below and column j + 16 above. `Scales::of` reads what makes
// weights of a block's nibbles: `number * scale - minimum`.
template <class Scales>
struct Nibbles {
  static constexpr bool QUANTISED = true;
  static constexpr int WIDTH = 32;

  __device__ static __forceinline__ float dot(const Matrix& matrix, int row, const Input& x, bool rounded) {
    if (!rounded) return dot_exactly<Nibbles>(matrix, row, x);
    const int blocks = blocks_of(matrix.columns);
    const uint4* place = static_cast<const uint4*>(matrix.quants) + size_t(row) * blocks;
    float sum = 0.0f;
    for (int first = lane_index(); first < blocks; first += IN_FLIGHT * WARP) {
      uint4 loaded[IN_FLIGHT];
      float2 scales[IN_FLIGHT];
#pragma unroll
      for (int index = 0; index < IN_FLIGHT; index++) {
        const int block = first + index * WARP;
        if (block >= blocks) continue;
        loaded[index] = load_once(place + block);
        scales[index] = Scales::of(matrix, row, block);
      }
#pragma unroll
      for (int index = 0; index < IN_FLIGHT; index++) {
        const int block = first + index * WARP;
        if (block >= blocks) break;
        const float2 scale = scales[index];
        const int product = dot_nibbles(loaded[index], x.low[block], x.high[block]) - Scales::BIAS * x.sums[block];
        const float less = Scales::HAS_MINIMA ? scale.y * float(x.sums[block]) : 0.0f;
        sum = fmaf(fmaf(float(product), scale.x, -less), x.scales[block], sum);
      }
    }
    return warp_sum(sum);
  }

  __device__ static __forceinline__ float one(unsigned number, float2 scale) {
    return fmaf(float(int(number) - Scales::BIAS), scale.x, Scales::HAS_MINIMA ? -scale.y : 0.0f);
  }

  __device__ static __forceinline__ void unpack(uint4 bits, float2 scale, float (&out)[WIDTH]) {
    const unsigned words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int column = 0; column < BLOCK / 2; column++) {
      const unsigned byte = words[column / 4] >> column % 4 * 8;
      out[column] = one(byte & 15, scale);
      out[column + BLOCK / 2] = one(byte >> 4 & 15, scale);
    }
  }

  __device__ static __forceinline__ void weights(const Matrix& matrix, int row, int column, float (&out)[WIDTH]) {
    const int block = column / BLOCK;
    const size_t place = size_t(row) * blocks_of(matrix.columns) + block;
    unpack(load_once(static_cast<const uint4*>(matrix.quants) + place), Scales::of(matrix, row, block), out);
  }

  __device__ static __forceinline__ float weight(const Matrix& matrix, int row, int column) {
    const int block = column / BLOCK, within = column % BLOCK;
    const size_t place = size_t(row) * blocks_of(matrix.columns) + block;
    const unsigned byte = static_cast<const uint8_t*>(matrix.quants)[place * (BLOCK / 2) + within % (BLOCK / 2)];
    return one(within < BLOCK / 2 ? byte & 15 : byte >> 4, Scales::of(matrix, row, block));
  }
};

// An f16 scale a block; numbers are biased by 8.
struct SimpleScales {
  static constexpr int BIAS = 8;
  static constexpr bool HAS_MINIMA = false;
  __device__ static __forceinline__ float2 of(const Matrix& matrix, int row, int block) {
    const size_t place = size_t(row) * blocks_of(matrix.columns) + block;
    return {half_to_float(static_cast<const uint16_t*>(matrix.scales)[place]), 0.0f};
  }
};

// A scale and a minimum of 6 bits a block, multiples of two f16 that eight blocks share.
struct SharedScales {
  static constexpr int BIAS = 0;
  static constexpr bool HAS_MINIMA = true;
  __device__ static __forceinline__ float2 of(const Matrix& matrix, int row, int block) {
    const int blocks = blocks_of(matrix.columns), supers = (blocks + SUPER_BLOCK - 1) / SUPER_BLOCK;
    const unsigned both =
        static_cast<const unsigned*>(matrix.scales)[size_t(row) * supers + block / SUPER_BLOCK];
    const unsigned factors = static_cast<const uint16_t*>(matrix.factors)[size_t(row) * blocks + block];
    return {half_to_float(uint16_t(both)) * float(factors & 0xff),
            half_to_float(uint16_t(both >> 16)) * float(factors >> 8)};
  }
};

using Q4_0 = Nibbles<SimpleScales>;
using Q4K = Nibbles<SharedScales>;

// Names a kernel once for every format.
#define FOR_ALL_FORMATS(define) \
  define(f32, Plain<F32>)       \
  define(f16, Plain<F16>)       \
  define(bf16, Plain<Bf16>)     \
  define(q8_0, Q8_0)            \
  define(q4_k, Q4K)             \
  define(q4_0, Q4_0)
