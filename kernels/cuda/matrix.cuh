// Weight formats, in the planes of the Rust `Matrix`. A row is read by units of WIDTH weights, 16 bytes of quants and
// their scale: `load` requests one without using it, so that several can be in flight; `dot_unit`, `accumulate` and
// `unpack` use it. `weight` reads a single weight.
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

// Threads of a block whose warps compute a row each, of which a multiprocessor has one: more would norm and round the input
// once more each.
constexpr int GEMV_THREADS = 512;

// Dot product of a row with the float input, one weight at a time: slower, but without quantising the input.
template <class Format>
__device__ __forceinline__ float dot_f32(const Matrix& matrix, int row, const Input& x) {
  float sum = 0.0f;
#pragma unroll 1
  for (int column = lane_index(); column < matrix.columns; column += WARP)
    sum = fmaf(Format::weight(matrix, row, column), x.values[column], sum);
  return warp_sum(sum);
}

// Dot products of a row with the inputs of the tokens whose bit in `tokens` is set, in int8 if they have been quantised, by
// one warp, which reads the row once. The result of token t is in lane t; that of a single token, TOKENS = 1, in all lanes.
template <class Format, int TOKENS>
__device__ __forceinline__ float dot(const Matrix& matrix, int row, const Inputs& x, unsigned tokens) {
  // Units that a lane requests before it uses the first. Those of a batch are used so often that one ahead is enough.
  constexpr int LOADS = TOKENS == 1 ? 4 : 1;
  const int units = (matrix.columns + Format::WIDTH - 1) / Format::WIDTH, lane = lane_index();
  float product = 0.0f;
  if (Format::QUANTISED ? !x.first.low : matrix.columns % Format::WIDTH != 0) {
#pragma unroll 1
    for (int token = 0; token < TOKENS; token++) {
      if (TOKENS > 1 && !(tokens >> token & 1)) continue;
      const float sum = dot_f32<Format>(matrix, row, x[token]);
      if (TOKENS == 1 || lane == token) product = sum;
    }
    return product;
  }
  float sums[TOKENS] = {};
  typename Format::Unit loaded[LOADS];
  const auto load = [&](int first) {
#pragma unroll
    for (int index = 0; index < LOADS; index++)
      if (first + index * WARP < units) loaded[index] = Format::template load<true>(matrix, row, first + index * WARP);
  };
  if (TOKENS > 1) load(lane);
#pragma unroll 1
  for (int first = lane; first < units; first += LOADS * WARP) {
    if (TOKENS == 1) load(first);
    typename Format::Unit current[LOADS];
#pragma unroll
    for (int index = 0; index < LOADS; index++) current[index] = loaded[index];
    if (TOKENS > 1) load(first + WARP);
#pragma unroll
    for (int index = 0; index < LOADS; index++) {
      const int unit = first + index * WARP;
      if (unit >= units) continue;
#pragma unroll
      for (int token = 0; token < TOKENS; token++)
        if (TOKENS == 1 || (tokens >> token & 1)) sums[token] = Format::dot_unit(current[index], unit, x[token], sums[token]);
    }
  }
#pragma unroll
  for (int token = 0; token < TOKENS; token++) {
    if (TOKENS > 1 && !(tokens >> token & 1)) continue;
    const float sum = warp_sum(sums[token]);
    if (TOKENS == 1 || lane == token) product = sum;
  }
  return product;
}

// Requests a row into L2, by one warp.
template <class Format>
__device__ __forceinline__ void prefetch_row(const Matrix& matrix, int row) {
  constexpr int STEP = 128 / 16;
  const int units = (matrix.columns + Format::WIDTH - 1) / Format::WIDTH;
  for (int unit = lane_index() * STEP; unit < units; unit += WARP * STEP) Format::prefetch_unit(matrix, row, unit);
}

// 2^23: a float whose low bits are an integer below 2^23.
constexpr unsigned TWO_23 = 0x4b000000u;

// Float formats: `Element::unpack` converts the elements of 16 bytes.
template <class Element>
struct Plain {
  static constexpr bool QUANTISED = false;
  static constexpr int WIDTH = Element::WIDTH;
  typedef uint4 Unit;

  // The 16 bytes of a unit, in aligned rows.
  __device__ static __forceinline__ const uint4* quants_at(const Matrix& matrix, int row, int unit) {
    return static_cast<const uint4*>(matrix.quants) + (size_t(row) * matrix.columns / WIDTH + unit);
  }

  __device__ static __forceinline__ void prefetch_unit(const Matrix& matrix, int row, int unit) {
    prefetch(quants_at(matrix, row, unit));
  }

  template <bool ALIGNED = false>
  __device__ static __forceinline__ Unit load(const Matrix& matrix, int row, int unit) {
    if (ALIGNED || matrix.columns % WIDTH == 0) return load_once(quants_at(matrix, row, unit));
    const size_t start = size_t(row) * matrix.columns + unit * WIDTH;
    // The row is not 16-byte aligned.
    constexpr int PER_WORD = WIDTH / 4;
    unsigned words[4] = {};
#pragma unroll
    for (int index = 0; index < WIDTH; index++) {
      if (unit * WIDTH + index >= matrix.columns) break;
      words[index / PER_WORD] |= Element::bits(matrix.quants, start + index) << index % PER_WORD * 16;
    }
    return {words[0], words[1], words[2], words[3]};
  }

  __device__ static __forceinline__ float dot_unit(const Unit& unit, int index, const Input& x, float sum) {
    float weights[WIDTH];
    unpack(unit, weights);
    const float4* inputs = reinterpret_cast<const float4*>(x.values + index * WIDTH);
#pragma unroll
    for (int four = 0; four < WIDTH / 4; four++) {
      const float4 input = inputs[four];
      sum = fmaf(weights[4 * four], input.x, sum);
      sum = fmaf(weights[4 * four + 1], input.y, sum);
      sum = fmaf(weights[4 * four + 2], input.z, sum);
      sum = fmaf(weights[4 * four + 3], input.w, sum);
    }
    return sum;
  }

  __device__ static __forceinline__ void accumulate(const Unit& unit, float coefficient, float (&sums)[WIDTH]) {
    float weights[WIDTH];
    unpack(unit, weights);
#pragma unroll
    for (int column = 0; column < WIDTH; column++) sums[column] = fmaf(coefficient, weights[column], sums[column]);
  }

  __device__ static __forceinline__ void unpack(const Unit& unit, float (&out)[WIDTH]) { Element::unpack(unit, out); }

  __device__ static __forceinline__ float weight(const Matrix& matrix, int row, int column) {
    return Element::at(matrix.quants, size_t(row) * matrix.columns + column);
  }
};

struct F32 {
  static constexpr int WIDTH = 4;
  __device__ static __forceinline__ unsigned bits(const void* numbers, size_t index) {
    return static_cast<const unsigned*>(numbers)[index];
  }
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
  __device__ static __forceinline__ unsigned bits(const void* numbers, size_t index) {
    return static_cast<const uint16_t*>(numbers)[index];
  }
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
  __device__ static __forceinline__ unsigned bits(const void* numbers, size_t index) {
    return static_cast<const uint16_t*>(numbers)[index];
  }
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
  // Half a block.
  struct Unit {
    uint4 quants;
    uint16_t scale;
  };

  __device__ static __forceinline__ const uint16_t* scale_at(const Matrix& matrix, int row, int block) {
    return static_cast<const uint16_t*>(matrix.scales) + (size_t(row) * blocks_of(matrix.columns) + block);
  }

  __device__ static __forceinline__ const uint4* quants_at(const Matrix& matrix, int row, int unit) {
    return static_cast<const uint4*>(matrix.quants) + (size_t(row) * 2 * blocks_of(matrix.columns) + unit);
  }

  template <bool ALIGNED = false>
  __device__ static __forceinline__ Unit load(const Matrix& matrix, int row, int unit) {
    return {load_once(quants_at(matrix, row, unit)), load_once(scale_at(matrix, row, unit / 2))};
  }

  __device__ static __forceinline__ void prefetch_unit(const Matrix& matrix, int row, int unit) {
    prefetch(quants_at(matrix, row, unit));
    prefetch(scale_at(matrix, row, unit / 2));
  }

  __device__ static __forceinline__ float dot_unit(const Unit& unit, int index, const Input& x, float sum) {
    const int product = dot16(unit.quants, (index % 2 ? x.high : x.low)[index / 2], 0);
    return fmaf(float(product), f16_to_float(unit.scale) * x.scales[index / 2], sum);
  }

  // Quant number `column` as a float. Biased by 128, its byte becomes the low byte of 2^23 + byte.
  __device__ static __forceinline__ float quant(const Unit& unit, int column) {
    const unsigned words[4] = {unit.quants.x, unit.quants.y, unit.quants.z, unit.quants.w};
    const unsigned byte = byte_permute(words[column / 4] ^ 0x80808080u, TWO_23, 0x7440 | column % 4);
    return __uint_as_float(byte) - 8388736.0f;
  }

  __device__ static __forceinline__ void accumulate(const Unit& unit, float coefficient, float (&sums)[WIDTH]) {
    const float factor = coefficient * f16_to_float(unit.scale);
#pragma unroll
    for (int column = 0; column < WIDTH; column++) sums[column] = fmaf(factor, quant(unit, column), sums[column]);
  }

  __device__ static __forceinline__ void unpack(const Unit& unit, float (&out)[WIDTH]) {
    const float scale = f16_to_float(unit.scale);
#pragma unroll
    for (int column = 0; column < WIDTH; column++) out[column] = quant(unit, column) * scale;
  }

  __device__ static __forceinline__ float weight(const Matrix& matrix, int row, int column) {
    const size_t block = size_t(row) * blocks_of(matrix.columns) + column / BLOCK;
    const int8_t quant = static_cast<const int8_t*>(matrix.quants)[block * BLOCK + column % BLOCK];
    return float(quant) * f16_to_float(*scale_at(matrix, row, column / BLOCK));
  }
};

// Nibbles in blocks of 32: byte j holds column j in its low and column j + 16 in its high nibble. A weight is
// `(nibble - BIAS) * scale - minimum`; `Scales::load` requests scale and minimum of a block, `Scales::of` converts them.
template <class Scales>
struct Nibbles {
  static constexpr bool QUANTISED = true;
  static constexpr int WIDTH = 32;
  // A block.
  struct Unit {
    uint4 quants;
    typename Scales::Bits scales;
  };

  __device__ static __forceinline__ const uint4* quants_at(const Matrix& matrix, int row, int unit) {
    return static_cast<const uint4*>(matrix.quants) + (size_t(row) * blocks_of(matrix.columns) + unit);
  }

  template <bool ALIGNED = false>
  __device__ static __forceinline__ Unit load(const Matrix& matrix, int row, int unit) {
    return {load_once(quants_at(matrix, row, unit)), Scales::load(matrix, row, unit)};
  }

  __device__ static __forceinline__ void prefetch_unit(const Matrix& matrix, int row, int unit) {
    prefetch(quants_at(matrix, row, unit));
    Scales::prefetch_block(matrix, row, unit);
  }

  __device__ static __forceinline__ float dot_unit(const Unit& unit, int index, const Input& x, float sum) {
    const float2 scale = Scales::of(unit.scales);
    const int product = dot_nibbles(unit.quants, x.low[index], x.high[index]) - Scales::BIAS * x.sums[index];
    const float minima = Scales::HAS_MINIMA ? scale.y * float(x.sums[index]) : 0.0f;
    return fmaf(fmaf(float(product), scale.x, -minima), x.scales[index], sum);
  }

  // Calls `use(column, x)` with x = (nibble - BIAS) * 16^(column % 4) for every column: nibble number k of 16 bits is the
  // integer nibble * 16^k in the low bits of a float.
  template <class Use>
  __device__ static __forceinline__ void for_each_nibble(uint4 quants, Use use) {
    const unsigned words[4] = {quants.x, quants.y, quants.z, quants.w};
#pragma unroll
    for (int byte = 0; byte < BLOCK / 2; byte++) {
      const unsigned bits = words[byte / 4] >> byte % 4 / 2 * 16;
#pragma unroll
      for (int high = 0; high < 2; high++) {
        const int place = byte % 2 * 2 + high;
        const float biased = __uint_as_float(and_or(bits, 15u << 4 * place, TWO_23));
        use(byte + high * (BLOCK / 2), place, biased - float((1 << 23) + (Scales::BIAS << 4 * place)));
      }
    }
  }

  __device__ static __forceinline__ void accumulate(const Unit& unit, float coefficient, float (&sums)[WIDTH]) {
    const float2 scale = Scales::of(unit.scales);
    const float factor = coefficient * scale.x, minimum = coefficient * scale.y;
    const float factors[4] = {factor, factor / 16.0f, factor / 256.0f, factor / 4096.0f};
    for_each_nibble(unit.quants, [&](int column, int place, float nibble) {
      if (Scales::HAS_MINIMA) sums[column] -= minimum;
      sums[column] = fmaf(factors[place], nibble, sums[column]);
    });
  }

  __device__ static __forceinline__ void unpack(const Unit& unit, float (&out)[WIDTH]) {
    const float2 scale = Scales::of(unit.scales);
    const float factors[4] = {scale.x, scale.x / 16.0f, scale.x / 256.0f, scale.x / 4096.0f};
    for_each_nibble(unit.quants, [&](int column, int place, float nibble) {
      out[column] = fmaf(nibble, factors[place], Scales::HAS_MINIMA ? -scale.y : 0.0f);
    });
  }

  __device__ static __forceinline__ float weight(const Matrix& matrix, int row, int column) {
    const int block = column / BLOCK, within = column % BLOCK;
    const size_t index = size_t(row) * blocks_of(matrix.columns) + block;
    const unsigned byte = static_cast<const uint8_t*>(matrix.quants)[index * (BLOCK / 2) + within % (BLOCK / 2)];
    const int nibble = within < BLOCK / 2 ? byte & 15 : byte >> 4;
    const float2 scale = Scales::of(Scales::load(matrix, row, block));
    return fmaf(float(nibble - Scales::BIAS), scale.x, Scales::HAS_MINIMA ? -scale.y : 0.0f);
  }
};

// One f16 scale per block; nibbles are biased by 8.
struct Q4_0Scales {
  static constexpr int BIAS = 8;
  static constexpr bool HAS_MINIMA = false;
  typedef uint16_t Bits;
  __device__ static __forceinline__ Bits load(const Matrix& matrix, int row, int block) {
    return load_once(Q8_0::scale_at(matrix, row, block));
  }
  __device__ static __forceinline__ void prefetch_block(const Matrix& matrix, int row, int block) {
    prefetch(Q8_0::scale_at(matrix, row, block));
  }
  __device__ static __forceinline__ float2 of(Bits scale) { return {f16_to_float(scale), 0.0f}; }
};

// A 6-bit scale and a 6-bit minimum per block, multiplied by the super-block's d and dmin.
struct Q4KScales {
  static constexpr int BIAS = 0;
  static constexpr bool HAS_MINIMA = true;
  struct Bits {
    unsigned both;
    uint16_t factors;
  };
  __device__ static __forceinline__ const unsigned* scales_at(const Matrix& matrix, int row, int block) {
    const int supers = (blocks_of(matrix.columns) + SUPER_BLOCK - 1) / SUPER_BLOCK;
    return static_cast<const unsigned*>(matrix.scales) + (size_t(row) * supers + block / SUPER_BLOCK);
  }
  __device__ static __forceinline__ const uint16_t* factors_at(const Matrix& matrix, int row, int block) {
    return static_cast<const uint16_t*>(matrix.factors) + (size_t(row) * blocks_of(matrix.columns) + block);
  }
  __device__ static __forceinline__ Bits load(const Matrix& matrix, int row, int block) {
    return {load_once(scales_at(matrix, row, block)), load_once(factors_at(matrix, row, block))};
  }
  __device__ static __forceinline__ void prefetch_block(const Matrix& matrix, int row, int block) {
    prefetch(scales_at(matrix, row, block));
    prefetch(factors_at(matrix, row, block));
  }
  __device__ static __forceinline__ float2 of(Bits bits) {
    return {f16_to_float(uint16_t(bits.both)) * float(bits.factors & 0xff),
            f16_to_float(uint16_t(bits.both >> 16)) * float(bits.factors >> 8)};
  }
};

using Q4_0 = Nibbles<Q4_0Scales>;
using Q4K = Nibbles<Q4KScales>;

// Instantiates a kernel for every format of at most 16 bits per weight.
#define FOR_SHORT_FORMATS(define) \
  define(f16, Plain<F16>)         \
  define(bf16, Plain<Bf16>)       \
  define(q8_0, Q8_0)              \
  define(q4_k, Q4K)               \
  define(q4_0, Q4_0)

// Instantiates a kernel for every format.
#define FOR_ALL_FORMATS(define) define(f32, Plain<F32>) FOR_SHORT_FORMATS(define)
