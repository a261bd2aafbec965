// Weight formats, in the planes of the Rust `Matrix`. A format provides `dot` (a row times the input, by one warp),
// `weights` (WIDTH dequantised weights of a row, by one thread) and `weight` (one of them).
#pragma once
#include "input.cuh"

// A row-major matrix [rows, columns].
struct Matrix {
  // Floats, int8, or pairs of nibbles in blocks of 32 columns.
  const void* quants;
  // q8_0, q4_0: one f16 per block; q4_k: d and dmin per super-block; null for floats.
  const void* scales;
  // q4_k: a 6-bit scale and a 6-bit minimum per block.
  const void* factors;
  int rows;
  int columns;
};

__device__ __forceinline__ int blocks_of(int columns) { return (columns + BLOCK - 1) / BLOCK; }

// The low or the high nibbles of the four bytes of `word`.
__device__ __forceinline__ unsigned low_nibbles(unsigned word) { return word & 0x0f0f0f0fu; }
__device__ __forceinline__ unsigned high_nibbles(unsigned word) { return word >> 4 & 0x0f0f0f0fu; }

// Dot product of 16 signed bytes.
__device__ __forceinline__ int dot16(uint4 a, uint4 b, int sum) {
  sum = dot4(a.x, b.x, sum);
  sum = dot4(a.y, b.y, sum);
  sum = dot4(a.z, b.z, sum);
  return dot4(a.w, b.w, sum);
}

// Dot product of a block of nibbles with a block of int8.
__device__ __forceinline__ int dot_nibbles(uint4 quants, uint4 low, uint4 high) {
  const uint4 first = {low_nibbles(quants.x), low_nibbles(quants.y), low_nibbles(quants.z), low_nibbles(quants.w)};
  const uint4 second = {high_nibbles(quants.x), high_nibbles(quants.y), high_nibbles(quants.z), high_nibbles(quants.w)};
  return dot16(second, high, dot16(first, low, 0));
}

// 16-byte loads that a lane issues before it uses the first.
constexpr int LOADS_IN_FLIGHT = 4;

// Dot product of a row with the float input, one weight at a time: slower, but without quantising the input.
template <class Format>
__device__ __forceinline__ float dot_f32(const Matrix& matrix, int row, const Input& x) {
  float sum = 0.0f;
#pragma unroll 1
  for (int column = lane_index(); column < matrix.columns; column += WARP)
    sum = fmaf(Format::weight(matrix, row, column), x.values[column], sum);
  return warp_sum(sum);
}

// Float formats: `Element::at` reads one element, `Element::unpack` the elements of 16 bytes.
template <class Element>
struct Plain {
  static constexpr bool QUANTISED = false;
  // Weights per 16 bytes.
  static constexpr int WIDTH = Element::WIDTH;

  __device__ static __forceinline__ float dot(const Matrix& matrix, int row, const Input& x, bool) {
    const int lane = lane_index(), columns = matrix.columns;
    const size_t start = size_t(row) * columns;
    float sum = 0.0f;
    if (columns % WIDTH != 0) return dot_f32<Plain>(matrix, row, x);  // rows are not 16-byte aligned
    const uint4* loads = static_cast<const uint4*>(matrix.quants) + start / WIDTH;
    const int units = columns / WIDTH;
    for (int first = lane; first < units; first += LOADS_IN_FLIGHT * WARP) {
      uint4 loaded[LOADS_IN_FLIGHT];
#pragma unroll
      for (int index = 0; index < LOADS_IN_FLIGHT; index++) {
        const int unit = first + index * WARP;
        if (unit < units) loaded[index] = load_once(loads + unit);
      }
#pragma unroll
      for (int index = 0; index < LOADS_IN_FLIGHT; index++) {
        const int unit = first + index * WARP;
        if (unit >= units) break;
        float weights[WIDTH];
        Element::unpack(loaded[index], weights);
        const float4* inputs = reinterpret_cast<const float4*>(x.values + unit * WIDTH);
#pragma unroll
        for (int four = 0; four < WIDTH / 4; four++) {
          const float4 input = inputs[four];
          sum = fmaf(weights[4 * four], input.x, sum);
          sum = fmaf(weights[4 * four + 1], input.y, sum);
          sum = fmaf(weights[4 * four + 2], input.z, sum);
          sum = fmaf(weights[4 * four + 3], input.w, sum);
        }
      }
    }
    return warp_sum(sum);
  }

  // WIDTH weights of `row` from `column`, a multiple of WIDTH; zeros past the end.
  __device__ static __forceinline__ void weights(const Matrix& matrix, int row, int column, float (&out)[WIDTH]) {
    const size_t start = size_t(row) * matrix.columns + column;
    if (matrix.columns % WIDTH == 0) {
      Element::unpack(load_once(static_cast<const uint4*>(matrix.quants) + start / WIDTH), out);
      return;
    }
#pragma unroll
    for (int index = 0; index < WIDTH; index++) {
      out[index] = column + index < matrix.columns ? Element::at(matrix.quants, start + index) : 0.0f;
    }
  }

  __device__ static __forceinline__ float weight(const Matrix& matrix, int row, int column) {
    return Element::at(matrix.quants, size_t(row) * matrix.columns + column);
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
    return f16_to_float(static_cast<const uint16_t*>(numbers)[index]);
  }
  __device__ static __forceinline__ void unpack(uint4 bits, float (&out)[WIDTH]) {
    const unsigned words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int word = 0; word < 4; word++) {
      out[2 * word] = f16_to_float(uint16_t(words[word]));
      out[2 * word + 1] = f16_to_float(uint16_t(words[word] >> 16));
    }
  }
};

struct Bf16 {
  static constexpr int WIDTH = 8;
  __device__ static __forceinline__ float at(const void* numbers, size_t index) {
    return bf16_to_float(static_cast<const uint16_t*>(numbers)[index]);
  }
  __device__ static __forceinline__ void unpack(uint4 bits, float (&out)[WIDTH]) {
    const unsigned words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int word = 0; word < 4; word++) {
      out[2 * word] = bf16_to_float(words[word] & 0xffffu);
      out[2 * word + 1] = bf16_to_float(words[word] >> 16);
    }
  }
};

// int8 weights with an f16 scale per block.
struct Q8_0 {
  static constexpr bool QUANTISED = true;
  static constexpr int WIDTH = 16;

  __device__ static __forceinline__ float scale_of(const Matrix& matrix, size_t block) {
    return f16_to_float(static_cast<const uint16_t*>(matrix.scales)[block]);
  }

  __device__ static __forceinline__ float dot(const Matrix& matrix, int row, const Input& x, bool int8) {
    if (!int8) return dot_f32<Q8_0>(matrix, row, x);
    const int blocks = blocks_of(matrix.columns), half_blocks = 2 * blocks;
    const size_t start = size_t(row) * blocks;
    const uint4* loads = static_cast<const uint4*>(matrix.quants) + 2 * start;
    float sum = 0.0f;
    for (int first = lane_index(); first < half_blocks; first += LOADS_IN_FLIGHT * WARP) {
      uint4 loaded[LOADS_IN_FLIGHT];
      float scales[LOADS_IN_FLIGHT];
#pragma unroll
      for (int index = 0; index < LOADS_IN_FLIGHT; index++) {
        const int half_block = first + index * WARP;
        if (half_block >= half_blocks) continue;
        loaded[index] = load_once(loads + half_block);
        scales[index] = scale_of(matrix, start + half_block / 2);
      }
#pragma unroll
      for (int index = 0; index < LOADS_IN_FLIGHT; index++) {
        const int half_block = first + index * WARP;
        if (half_block >= half_blocks) break;
        const int product = dot16(loaded[index], (half_block % 2 ? x.high : x.low)[half_block / 2], 0);
        sum = fmaf(float(product), scales[index] * x.scales[half_block / 2], sum);
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
    const size_t half_block = size_t(row) * 2 * blocks_of(matrix.columns) + column / WIDTH;
    const uint4 bits = load_once(static_cast<const uint4*>(matrix.quants) + half_block);
    unpack(bits, scale_of(matrix, half_block / 2), out);
  }

  __device__ static __forceinline__ float weight(const Matrix& matrix, int row, int column) {
    const size_t block = size_t(row) * blocks_of(matrix.columns) + column / BLOCK;
    const int8_t quant = static_cast<const int8_t*>(matrix.quants)[block * BLOCK + column % BLOCK];
    return float(quant) * scale_of(matrix, block);
  }
};

// Nibbles in blocks of 32: byte j holds column j in its low and column j + 16 in its high nibble. A weight is
// `(nibble - BIAS) * scale - minimum`; `Scales::of` reads scale and minimum of a block.
template <class Scales>
struct Nibbles {
  static constexpr bool QUANTISED = true;
  static constexpr int WIDTH = 32;

  __device__ static __forceinline__ float dot(const Matrix& matrix, int row, const Input& x, bool int8) {
    if (!int8) return dot_f32<Nibbles>(matrix, row, x);
    const int blocks = blocks_of(matrix.columns);
    const uint4* loads = static_cast<const uint4*>(matrix.quants) + size_t(row) * blocks;
    float sum = 0.0f;
    for (int first = lane_index(); first < blocks; first += LOADS_IN_FLIGHT * WARP) {
      uint4 loaded[LOADS_IN_FLIGHT];
      float2 scales[LOADS_IN_FLIGHT];
#pragma unroll
      for (int index = 0; index < LOADS_IN_FLIGHT; index++) {
        const int block = first + index * WARP;
        if (block >= blocks) continue;
        loaded[index] = load_once(loads + block);
        scales[index] = Scales::of(matrix, row, block);
      }
#pragma unroll
      for (int index = 0; index < LOADS_IN_FLIGHT; index++) {
        const int block = first + index * WARP;
        if (block >= blocks) break;
        const float2 scale = scales[index];
        const int product = dot_nibbles(loaded[index], x.low[block], x.high[block]) - Scales::BIAS * x.sums[block];
        const float minima = Scales::HAS_MINIMA ? scale.y * float(x.sums[block]) : 0.0f;
        sum = fmaf(fmaf(float(product), scale.x, -minima), x.scales[block], sum);
      }
    }
    return warp_sum(sum);
  }

  __device__ static __forceinline__ float dequantise(unsigned nibble, float2 scale) {
    return fmaf(float(int(nibble) - Scales::BIAS), scale.x, Scales::HAS_MINIMA ? -scale.y : 0.0f);
  }

  __device__ static __forceinline__ void unpack(uint4 bits, float2 scale, float (&out)[WIDTH]) {
    const unsigned words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int column = 0; column < BLOCK / 2; column++) {
      const unsigned byte = words[column / 4] >> column % 4 * 8;
      out[column] = dequantise(byte & 15, scale);
      out[column + BLOCK / 2] = dequantise(byte >> 4 & 15, scale);
    }
  }

  __device__ static __forceinline__ void weights(const Matrix& matrix, int row, int column, float (&out)[WIDTH]) {
    const int block = column / BLOCK;
    const size_t index = size_t(row) * blocks_of(matrix.columns) + block;
    unpack(load_once(static_cast<const uint4*>(matrix.quants) + index), Scales::of(matrix, row, block), out);
  }

  __device__ static __forceinline__ float weight(const Matrix& matrix, int row, int column) {
    const int block = column / BLOCK, within = column % BLOCK;
    const size_t index = size_t(row) * blocks_of(matrix.columns) + block;
    const unsigned byte = static_cast<const uint8_t*>(matrix.quants)[index * (BLOCK / 2) + within % (BLOCK / 2)];
    return dequantise(within < BLOCK / 2 ? byte & 15 : byte >> 4, Scales::of(matrix, row, block));
  }
};

// One f16 scale per block; nibbles are biased by 8.
struct Q4_0Scales {
  static constexpr int BIAS = 8;
  static constexpr bool HAS_MINIMA = false;
  __device__ static __forceinline__ float2 of(const Matrix& matrix, int row, int block) {
    const size_t index = size_t(row) * blocks_of(matrix.columns) + block;
    return {f16_to_float(static_cast<const uint16_t*>(matrix.scales)[index]), 0.0f};
  }
};

// A 6-bit scale and a 6-bit minimum per block, multiplied by the super-block's d and dmin.
struct Q4KScales {
  static constexpr int BIAS = 0;
  static constexpr bool HAS_MINIMA = true;
  __device__ static __forceinline__ float2 of(const Matrix& matrix, int row, int block) {
    const int blocks = blocks_of(matrix.columns), supers = (blocks + SUPER_BLOCK - 1) / SUPER_BLOCK;
    const unsigned both =
        static_cast<const unsigned*>(matrix.scales)[size_t(row) * supers + block / SUPER_BLOCK];
    const unsigned factors = static_cast<const uint16_t*>(matrix.factors)[size_t(row) * blocks + block];
    return {f16_to_float(uint16_t(both)) * float(factors & 0xff),
            f16_to_float(uint16_t(both >> 16)) * float(factors >> 8)};
  }
};

using Q4_0 = Nibbles<Q4_0Scales>;
using Q4K = Nibbles<Q4KScales>;

// Instantiates a kernel for every format.
#define FOR_ALL_FORMATS(define) \
  define(f32, Plain<F32>)       \
  define(f16, Plain<F16>)       \
  define(bf16, Plain<Bf16>)     \
  define(q8_0, Q8_0)            \
  define(q4_k, Q4K)             \
  define(q4_0, Q4_0)
