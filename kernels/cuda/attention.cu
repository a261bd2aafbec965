// Attention over the KV cache, for tokens of one sequence or several: q and k are normalised and rotated (RoPE), k
// and v appended to the cache; thread blocks split the positions (Flash-Decoding, Dao et al. 2023), and the last block
// of a KV head merges the splits in order.
#include "matrix.cuh"

// Positions per tile, one per lane.
constexpr int TILE = WARP;
// Threads per block, and their warps: each keeps the softmax of one query.
constexpr int ATTENTION_THREADS = 128;
constexpr int ATTENTION_WARPS = ATTENTION_THREADS / WARP;
// Blocks per multiprocessor that registers leave room for, and with scales.
constexpr int ATTENTION_BLOCKS = 5, Q8_BLOCKS = 3;

// The KV cache of a layer and a sequence: [kv_heads, context, head_size] each. q8_0: heads are padded to whole blocks, and scales
// follow, [kv_heads, blocks, context], so that those of a tile are adjacent.
struct CachePlace {
  void* keys;
  void* values;
  int context;
  int padding;
};

struct Attention {
  // query: [tokens, heads, head_size]; key, value: [tokens, kv_heads, head_size].
  const float* query;
  const float* key;
  const float* value;
  Norm query_norm;
  Norm key_norm;
  // [tokens, pairs]: sine and cosine of the rotary angle of the pair (i, i + pairs).
  const float2* sin_cos;
  int pairs;
  // [heads]: ALiBi slopes; null for none.
  const float* alibi_slopes;
  // [heads]: attention sinks, scores without values; null for none.
  const float* sinks;
  // Of the first token, those of the following ones `cache_stride` further. In device memory, context included, so that a captured
  // graph runs for any sequence.
  const CachePlace* cache;
  int cache_stride;
  int heads;
  int kv_heads;
  int head_size;
  // Sliding window in positions, including the token's own; 0 for no window.
  int window;
  // Whether `append_kv` has stored k and v of all tokens; otherwise `attention` stores them.
  int is_stored;
  // [tokens].
  const int* position;
  // log2(e) / sqrt(head_size): the softmax uses exp2.
  float scale;
  // [tokens, heads, splits, 2]: maximum score and sum of weights of each split; then its weighted values,
  // [tokens, heads, splits, head_size].
  float* partial;
  // [tokens, heads], all 0.
  unsigned* counters;
  // [tokens, heads, head_size].
  float* out;
  int tokens;
};

struct F16Cache : F16 {
  static constexpr bool QUANTISED = false;
  typedef uint16_t Element;
  __device__ static __forceinline__ Element store(float value) { return float_to_f16(value); }
  __device__ static __forceinline__ void unpack(uint4 bits, float, float (&out)[WIDTH]) { F16::unpack(bits, out); }
  __device__ static __forceinline__ float4 load_four(const Element* elements, float) {
    const uint2 bits = *reinterpret_cast<const uint2*>(elements);
    return {f16_to_float(uint16_t(bits.x)), f16_to_float(uint16_t(bits.x >> 16)), f16_to_float(uint16_t(bits.y)),
            f16_to_float(uint16_t(bits.y >> 16))};
  }
};

struct F32Cache : F32 {
  static constexpr bool QUANTISED = false;
  typedef float Element;
  __device__ static __forceinline__ Element store(float value) { return value; }
  __device__ static __forceinline__ void unpack(uint4 bits, float, float (&out)[WIDTH]) { F32::unpack(bits, out); }
  __device__ static __forceinline__ float4 load_four(const Element* elements, float) {
    return *reinterpret_cast<const float4*>(elements);
  }
};

struct Q8Cache {
  static constexpr bool QUANTISED = true;
  static constexpr int WIDTH = 16;
  typedef int8_t Element;
  __device__ static __forceinline__ void unpack(uint4 bits, float scale, float (&out)[WIDTH]) {
#pragma unroll
    for (int index = 0; index < WIDTH; index++) out[index] = Q8_0::quant({bits, 0}, index) * scale;
  }
  __device__ static __forceinline__ float4 load_four(const Element* elements, float scale) {
    const Q8_0::Unit unit = {{*reinterpret_cast<const unsigned*>(elements), 0, 0, 0}, 0};
    return {Q8_0::quant(unit, 0) * scale, Q8_0::quant(unit, 1) * scale, Q8_0::quant(unit, 2) * scale, Q8_0::quant(unit, 3) * scale};
  }
};

// Elements of a head in the cache.
template <class Cache>
__device__ __forceinline__ int stored_size(int size) { return Cache::QUANTISED ? (size + BLOCK - 1) / BLOCK * BLOCK : size; }

// Scales of the first block of a head in a plane, one per position; those of the next block are `context` further.
__device__ __forceinline__ uint16_t* scales_of(void* plane, const Attention& a, int context, int kv_head) {
  const size_t blocks = (a.head_size + BLOCK - 1) / BLOCK;
  uint16_t* scales = reinterpret_cast<uint16_t*>(static_cast<int8_t*>(plane) + a.kv_heads * context * blocks * BLOCK);
  return scales + kv_head * blocks * context;
}

// Rounds a head in shared memory, padded to whole blocks, as the CPU's cache does, by one warp, and stores it at a position of a
// plane if `stores`.
__device__ __forceinline__ void round_to_q8(const Attention& a, int context, float* head, void* plane, int kv_head, int position,
                                            bool stores) {
  const int lane = lane_index(), blocks = (a.head_size + BLOCK - 1) / BLOCK;
  int8_t* quants = static_cast<int8_t*>(plane) + (size_t(kv_head) * context + position) * blocks * BLOCK;
  uint16_t* scales = scales_of(plane, a, context, kv_head) + position;
#pragma unroll 1
  for (int block = 0; block < blocks; block++) {
    const float x = head[block * BLOCK + lane];
    const float scale = warp_max(fabsf(x)) / 127.0f;
    const float scaled = x * (scale == 0.0f ? 0.0f : 1.0f / scale);
    // To the nearest, ties away from 0.
    const int whole = scaled == scaled ? int(scaled) : 0;
    const int quant = whole + (fabsf(scaled - float(whole)) >= 0.5f ? (scaled < 0.0f ? -1 : 1) : 0);
    // A block with a NaN shows it; larger scales than f16 has saturate.
    const bool has_nan = __ballot_sync(ALL_LANES, x != x) != 0;
    const uint16_t stored = has_nan ? 0x7e00 : float_to_f16(fminf(scale, 65504.0f));
    head[block * BLOCK + lane] = float(quant) * f16_to_float(stored);
    if (!stores) continue;
    quants[block * BLOCK + lane] = int8_t(quant);
    if (lane == 0) scales[size_t(block) * context] = stored;
  }
}

__device__ __forceinline__ float4 fused(float factor, float4 x, float4 addend) {
  return {fmaf(factor, x.x, addend.x), fmaf(factor, x.y, addend.y), fmaf(factor, x.z, addend.z),
          fmaf(factor, x.w, addend.w)};
}

// sum + x . key for a piece of a key in registers.
template <int WIDTH>
__device__ __forceinline__ float dot_piece(const float* x, const float (&key)[WIDTH], float sum) {
  const float4* fours = reinterpret_cast<const float4*>(x);
#pragma unroll
  for (int four = 0; four < WIDTH / 4; four++) {
    const float4 x_four = fours[four];
    sum = fmaf(x_four.x, key[4 * four], sum);
    sum = fmaf(x_four.y, key[4 * four + 1], sum);
    sum = fmaf(x_four.z, key[4 * four + 2], sum);
    sum = fmaf(x_four.w, key[4 * four + 3], sum);
  }
  return sum;
}

// ALiBi bias of a query head at the position of a key, scaled as scores are.
__device__ __forceinline__ float position_bias(const Attention& a, int head, int key_position) {
  if (!a.alibi_slopes) return 0.0f;
  return round_to_bf16(a.alibi_slopes[head] * round_to_bf16(float(key_position))) * a.scale;
}

// Weight of a query head's attention sink if `maximum` is the largest scaled score. If the sink exceeds it by far, this is infinity, and
// the head's output 0.
__device__ __forceinline__ float sink_weight(const Attention& a, int head, float maximum) {
  return a.sinks ? exp2f(a.sinks[head] * 1.4426950f - maximum) : 0.0f;
}

// Asynchronous copies of rows of a head to a tile in shared memory: a thread copies one piece of every `step`-th row.
template <class Cache>
struct TileCopies {
  typedef typename Cache::Element Element;
  static constexpr int WIDTH = Cache::WIDTH;
  int stored, stride, piece, first_row, step;

  __device__ __forceinline__ TileCopies(int head_size) : stored(stored_size<Cache>(head_size)) {
    const int pieces = (stored + WIDTH - 1) / WIDTH;
    // Pieces between rows: odd, so that the lanes of a quarter-warp read one piece of 8 rows from all banks.
    stride = pieces | 1;
    step = ATTENTION_THREADS / pieces;
    piece = threadIdx.x % pieces;
    // Threads left over have no rows.
    first_row = threadIdx.x / pieces < step ? threadIdx.x / pieces : TILE;
  }

  // Starts the copies of `rows` rows from the one at `from`, in a group of their own.
  __device__ __forceinline__ void start(const Element* from, int rows, uint4* to) const {
#pragma unroll 1
    for (int row = first_row; row < rows; row += step) {
      const Element* elements = from + size_t(row) * stored + piece * WIDTH;
      if (stored % WIDTH == 0) {
        copy_to_shared(to + row * stride + piece, elements);
      } else {  // rows are not 16-byte aligned
#pragma unroll 1
        for (int index = 0; index < WIDTH; index++)
          reinterpret_cast<Element*>(to + row * stride + piece)[index] = piece * WIDTH + index < stored ? elements[index] : Element(0);
      }
    }
    commit_copies();
  }
};

// out = scale * rope(norm(x)) for one head of a token, in shared memory, by one warp.
__device__ __forceinline__ void load_head(const Attention& a, int token, const float* x, const Norm& norm,
                                          float scale, float* out) {
  const int lane = lane_index(), size = a.head_size;
  float sum = 0.0f, squares = 0.0f;
  load_ahead<4, WARP>(x, size, lane, [&](int i, float value) {
    out[i] = value;
    sum += value;
  });
  if (norm.kind != NO_NORM) {
    const float mean = norm.kind == LAYER_NORM ? warp_sum(sum) / float(size) : 0.0f;
#pragma unroll 1
    for (int i = lane; i < size; i += WARP) {
      out[i] -= mean;
      squares = fmaf(out[i], out[i], squares);
    }
    const float inverse_norm = 1.0f / sqrtf(warp_sum(squares) / float(size) + norm.epsilon);
    load_ahead<4, WARP>(norm.weight, size, lane, [&](int i, float weight) {
      out[i] = out[i] * inverse_norm * weight + (norm.bias ? norm.bias[i] : 0.0f);
    });
  }
  __syncwarp();
  load_ahead<2, WARP>(a.sin_cos + size_t(token) * a.pairs, a.pairs, lane, [&](int pair, float2 rotation) {
    const float first = out[pair], second = out[pair + a.pairs];
    out[pair] = first * rotation.y - second * rotation.x;
    out[pair + a.pairs] = first * rotation.x + second * rotation.y;
  });
  __syncwarp();
#pragma unroll 1
  for (int i = lane; i < size; i += WARP) out[i] *= scale;
}

// Up to QUERIES query heads that share a KV head. Grid: (kv_heads * ceil(group / QUERIES), splits, tokens), where a
// group is all query heads of a KV head. Splits take tiles in turn; those without a tile leave at once.
//
// Copies of keys are in flight while values are accumulated, those of values while keys are scored.
template <class Cache, int QUERIES>
__device__ __forceinline__ void attention(const Attention& a) {
  typedef typename Cache::Element Element;
  constexpr int WIDTH = Cache::WIDTH;
  static_assert(QUERIES <= ATTENTION_WARPS, "one warp per query");
  const float minus_infinity = __uint_as_float(0xff800000u);
  const int split = blockIdx.y, splits = gridDim.y, token = blockIdx.z, lane = lane_index(), warp = warp_index();
  const int group = a.heads / a.kv_heads, chunks = (group + QUERIES - 1) / QUERIES;
  const int kv_head = blockIdx.x / chunks, first_query = blockIdx.x % chunks * QUERIES;
  const int head = kv_head * group + first_query, queries = min(QUERIES, group - first_query);
  const int size = a.head_size, stored = stored_size<Cache>(size), pieces = (stored + WIDTH - 1) / WIDTH, padded = pieces * WIDTH;
  const TileCopies<Cache> copies(size);
  const int stride = copies.stride;
  // A thread accumulates four columns of every `row_groups`-th row of a tile.
  const int thread = threadIdx.x, fours = padded / 4, row_groups = ATTENTION_THREADS / fours, column = thread % fours * 4;
  // Threads left over have no rows.
  const int row_group = thread / fours < row_groups ? thread / fours : TILE;

  SharedMemory shared;
  float* scores = shared.allocate<float>(ATTENTION_WARPS * QUERIES * TILE);
  float* weights = shared.allocate<float>(QUERIES * TILE);
  float* rescale = shared.allocate<float>(QUERIES);
  float* factors = shared.allocate<float>(QUERIES);
  unsigned* scratch = shared.allocate<unsigned>(1);
  float* query = shared.allocate<float>(QUERIES * padded);
  float* own_key = shared.allocate<float>(padded);
  float* own_value = shared.allocate<float>(padded);
  // Scales of the tiles, [blocks, TILE] of keys and of values.
  const int scale_count = Cache::QUANTISED ? stored / BLOCK * TILE : 0;
  float* key_scales = shared.allocate<float>(scale_count);
  float* value_scales = shared.allocate<float>(scale_count);
  uint4* keys = shared.allocate<uint4>(TILE * stride);
  uint4* values = shared.allocate<uint4>(TILE * stride);
  // [row_groups, QUERIES, padded], once the tiles are done with.
  float* sums = reinterpret_cast<float*>(keys);

  const CachePlace cache = a.cache[token * a.cache_stride];
  const int position = a.position[token], first = a.window > 0 ? max(0, position + 1 - a.window) : 0;
  // Visible positions before the token's own.
  const int cached = position - first;
  const int used_splits = max(1, min((cached + TILE - 1) / TILE, splits));
  if (split >= used_splits) return;
  const size_t first_row = size_t(kv_head) * cache.context + first;
  const auto copy_tile = [&](const void* plane, int tile, uint4* to) {
    copies.start(static_cast<const Element*>(plane) + (first_row + tile * TILE) * stored, min(TILE, cached - tile * TILE), to);
  };
  // Scales of the next tile, on their way to shared memory.
  constexpr int SCALES = Cache::QUANTISED ? 4 : 1;
  uint16_t next_key_scales[SCALES] = {}, next_value_scales[SCALES] = {};
  const auto request_scales = [&](void* plane, int tile, uint16_t(&next)[SCALES]) {
#pragma unroll
    for (int index = 0; Cache::QUANTISED && index < SCALES; index++) {
      const int item = thread + index * ATTENTION_THREADS, row = item % TILE;
      const bool is_visible = item < scale_count && row < cached - tile * TILE;
      const uint16_t* scales = scales_of(plane, a, cache.context, kv_head) + size_t(item / TILE) * cache.context + first + tile * TILE;
      next[index] = is_visible ? scales[row] : 0;
    }
  };
  const auto keep_scales = [&](const uint16_t(&next)[SCALES], float* scales) {
#pragma unroll
    for (int index = 0; Cache::QUANTISED && index < SCALES; index++) {
      const int item = thread + index * ATTENTION_THREADS;
      if (item < scale_count) scales[item] = f16_to_float(next[index]);
    }
  };
  copy_tile(cache.keys, split, keys);
  request_scales(cache.keys, split, next_key_scales);
  copy_tile(cache.values, split, values);
  request_scales(cache.values, split, next_value_scales);

  // The last split begins with the token's own position.
  const bool begins = split == used_splits - 1;
#pragma unroll 1
  for (int item = warp; item < queries + begins; item += ATTENTION_WARPS) {
    const bool is_query = item < queries;
    const size_t own = (size_t(token) * a.kv_heads + kv_head) * size;
    const float* x = is_query ? a.query + (size_t(token) * a.heads + head + item) * size : a.key + own;
    float* to = is_query ? query + item * padded : own_key;
    load_head(a, token, x, is_query ? a.query_norm : a.key_norm, is_query ? a.scale : 1.0f, to);
    if (size + lane < padded) to[size + lane] = 0.0f;
    if (is_query) continue;
    if (size + lane < padded) own_value[size + lane] = 0.0f;
    const bool stores = !a.is_stored && first_query == 0;
    if constexpr (Cache::QUANTISED) {
      load_ahead<4, WARP>(a.value + own, size, lane, [&](int i, float value) { own_value[i] = value; });
      __syncwarp();
      round_to_q8(a, cache.context, own_key, cache.keys, kv_head, position, stores);
      round_to_q8(a, cache.context, own_value, cache.values, kv_head, position, stores);
    } else {
      load_ahead<4, WARP>(a.value + own, size, lane, [&](int i, float value) {
        const Element elements[2] = {Cache::store(own_key[i]), Cache::store(value)};
        own_key[i] = Cache::at(elements, 0);
        own_value[i] = Cache::at(elements, 1);
        if (!stores) return;
        static_cast<Element*>(cache.keys)[(first_row + cached) * size + i] = elements[0];
        static_cast<Element*>(cache.values)[(first_row + cached) * size + i] = elements[1];
      });
    }
  }
  __syncthreads();
  // Of the query with the index of the warp: the maximum score, and each lane's sum of weights.
  float maximum = minus_infinity, total = 0.0f;
  float4 accumulated[QUERIES] = {};
  if (begins) {
    if (warp < queries) {
      float score = 0.0f;
#pragma unroll 1
      for (int i = lane; i < size; i += WARP) score = fmaf(query[warp * padded + i], own_key[i], score);
      maximum = warp_sum(score) + position_bias(a, head + warp, position);
      total = lane == 0 ? 1.0f : 0.0f;
    }
    if (row_group == 0) {
#pragma unroll
      for (int index = 0; index < QUERIES; index++)
        accumulated[index] = *reinterpret_cast<const float4*>(own_value + column);
    }
  }

  for (int tile = split; tile * TILE < cached; tile += splits) {
    const int rows = min(TILE, cached - tile * TILE);
    keep_scales(next_key_scales, key_scales);
    wait_for_copies_but<1>();
    __syncthreads();
    // A lane is a position; warps share the columns.
    float score[QUERIES] = {};
#pragma unroll 1
    for (int column_piece = warp; column_piece < pieces; column_piece += ATTENTION_WARPS) {
      float key[WIDTH];
      const float scale = Cache::QUANTISED ? key_scales[column_piece * WIDTH / BLOCK * TILE + lane] : 1.0f;
      Cache::unpack(keys[lane * stride + column_piece], scale, key);
#pragma unroll
      for (int index = 0; index < QUERIES; index++) {
        if (index >= queries) break;
        score[index] = dot_piece(query + index * padded + column_piece * WIDTH, key, score[index]);
      }
    }
#pragma unroll
    for (int index = 0; index < QUERIES; index++) scores[(warp * QUERIES + index) * TILE + lane] = score[index];
    __syncthreads();
    copy_tile(cache.keys, tile + splits, keys);
    request_scales(cache.keys, tile + splits, next_key_scales);
    if (warp < queries) {
      float sum = position_bias(a, head + warp, first + tile * TILE + lane);
#pragma unroll
      for (int part = 0; part < ATTENTION_WARPS; part++) sum += scores[(part * QUERIES + warp) * TILE + lane];
      if (lane >= rows) sum = minus_infinity;
      const float new_maximum = fmaxf(maximum, warp_max(sum));
      const float weight = exp2f(sum - new_maximum), old_scale = exp2f(maximum - new_maximum);
      total = fmaf(total, old_scale, weight);
      maximum = new_maximum;
      weights[warp * TILE + lane] = weight;
      if (lane == 0) rescale[warp] = old_scale;
    }
    keep_scales(next_value_scales, value_scales);
    wait_for_copies_but<1>();
    __syncthreads();
#pragma unroll
    for (int index = 0; index < QUERIES; index++) {
      if (index >= queries) break;
      accumulated[index] = fused(rescale[index], accumulated[index], {});
    }
#pragma unroll 1
    for (int row = row_group; row < rows; row += row_groups) {
      const float scale = Cache::QUANTISED ? value_scales[column / BLOCK * TILE + row] : 1.0f;
      const float4 value = Cache::load_four(reinterpret_cast<const Element*>(values + row * stride) + column, scale);
#pragma unroll
      for (int index = 0; index < QUERIES; index++) {
        if (index >= queries) break;
        accumulated[index] = fused(weights[index * TILE + row], value, accumulated[index]);
      }
    }
    __syncthreads();
    copy_tile(cache.values, tile + splits, values);
    request_scales(cache.values, tile + splits, next_value_scales);
  }

  // Store this split; the last block of the queries merges all splits in order.
  const size_t head_index = size_t(token) * a.heads + head;
  float* values_of_splits = a.partial + 2 * size_t(gridDim.z) * a.heads * splits;
  if (warp < queries) {
    total = warp_sum(total);
    if (lane == 0) {
      factors[warp] = used_splits == 1 ? 1.0f / (total + sink_weight(a, head + warp, maximum)) : 1.0f;
      float* state = a.partial + 2 * ((head_index + warp) * splits + split);
      state[0] = maximum;
      state[1] = total;
    }
  }
  if (row_group < row_groups) {
#pragma unroll
    for (int index = 0; index < QUERIES; index++)
      *reinterpret_cast<float4*>(sums + (row_group * QUERIES + index) * padded + column) = accumulated[index];
  }
  __syncthreads();
  for (int index = 0; index < queries; index++) {
    float* out = used_splits == 1 ? a.out + (head_index + index) * size
                                  : values_of_splits + ((head_index + index) * splits + split) * size;
    for (int i = thread; i < size; i += ATTENTION_THREADS) {
      float sum = 0.0f;
#pragma unroll 4
      for (int part = 0; part < row_groups; part++) sum += sums[(part * QUERIES + index) * padded + i];
      out[i] = sum * factors[index];
    }
  }
  if (used_splits == 1) return;
  if (!is_last_block(a.counters + size_t(token) * gridDim.x + blockIdx.x, used_splits, scratch)) return;
  if (warp < queries) {
    // A lane is a split.
    const float* state = a.partial + 2 * ((head_index + warp) * splits + min(lane, used_splits - 1));
    const float split_maximum = load_gpu_scope(state), split_total = load_gpu_scope(state + 1);
    const float largest = warp_max(split_maximum);
    const float weight = lane < used_splits ? exp2f(split_maximum - largest) : 0.0f;
    weights[warp * TILE + lane] = weight / (warp_sum(weight * split_total) + sink_weight(a, head + warp, largest));
  }
  __syncthreads();
  for (int index = 0; index < queries; index++) {
    const float* splits_of_query = values_of_splits + (head_index + index) * splits * size;
    for (int i = thread; i < size; i += ATTENTION_THREADS) {
      float sum = 0.0f;
#pragma unroll 8
      for (int other = 0; other < used_splits; other++)
        sum = fmaf(load_gpu_scope(splits_of_query + other * size + i), weights[index * TILE + other], sum);
      a.out[(head_index + index) * size + i] = sum;
    }
  }
}

// Appends k and v of every token to the cache. Grid: (kv_heads, tokens), one warp each.
template <class Cache>
__device__ __forceinline__ void append_kv(const Attention& a) {
  typedef typename Cache::Element Element;
  SharedMemory shared;
  const int kv_head = blockIdx.x, token = blockIdx.y, size = a.head_size, lane = lane_index();
  float* key = shared.allocate<float>(stored_size<Cache>(size));
  float* value = shared.allocate<float>(Cache::QUANTISED ? stored_size<Cache>(size) : 0);
  const size_t from = (size_t(token) * a.kv_heads + kv_head) * size;
  const CachePlace cache = a.cache[token * a.cache_stride];
  const size_t to = (size_t(kv_head) * cache.context + a.position[token]) * size;
  load_head(a, token, a.key + from, a.key_norm, 1.0f, key);
  __syncwarp();
  if constexpr (Cache::QUANTISED) {
    if (size + lane < stored_size<Cache>(size)) key[size + lane] = value[size + lane] = 0.0f;
    for (int i = lane; i < size; i += WARP) value[i] = a.value[from + i];
    __syncwarp();
    round_to_q8(a, cache.context, key, cache.keys, kv_head, a.position[token], true);
    round_to_q8(a, cache.context, value, cache.values, kv_head, a.position[token], true);
  } else {
#pragma unroll 1
    for (int i = lane; i < size; i += WARP) {
      static_cast<Element*>(cache.keys)[to + i] = Cache::store(key[i]);
      static_cast<Element*>(cache.values)[to + i] = Cache::store(a.value[from + i]);
    }
  }
}

// Queries of a warp and of a thread block of `attention_prompt`.
constexpr int WARP_QUERIES = 4, PROMPT_QUERIES = WARP_QUERIES * ATTENTION_WARPS;

// Attention of consecutive tokens of one sequence, whose keys and values `append_kv` has stored: a tile of them is read once for
// PROMPT_QUERIES queries, those of the heads of a group at as many tokens as that takes. Grid: (kv_heads, tiles of queries),
// blocks of 128. A lane scores a position for the queries of its warp, then adds up FOURS times four columns: heads have at most
// 256.
template <class Cache>
__device__ __forceinline__ void attention_prompt(const Attention& a) {
  typedef typename Cache::Element Element;
  constexpr int WIDTH = Cache::WIDTH, FOURS = 2;
  const float minus_infinity = __uint_as_float(0xff800000u);
  const int thread = threadIdx.x, lane = lane_index(), warp = warp_index(), kv_head = blockIdx.x;
  const int size = a.head_size, stored = stored_size<Cache>(size), pieces = (stored + WIDTH - 1) / WIDTH, padded = pieces * WIDTH;
  const TileCopies<Cache> copies(size);
  const int stride = copies.stride, group = a.heads / a.kv_heads, all = a.tokens * group, first_query = blockIdx.y * PROMPT_QUERIES;

  SharedMemory shared;
  float* queries = shared.allocate<float>(PROMPT_QUERIES * padded);
  // [warp, position, query].
  float4* weights = shared.allocate<float4>(ATTENTION_WARPS * TILE) + warp * TILE;
  const int scale_count = Cache::QUANTISED ? stored / BLOCK * TILE : 0;
  float* key_scales = shared.allocate<float>(scale_count);
  float* value_scales = shared.allocate<float>(scale_count);
  uint4* keys = shared.allocate<uint4>(TILE * stride);
  uint4* values = shared.allocate<uint4>(TILE * stride);

  const auto first_of = [&](int position) { return a.window > 0 ? max(0, position + 1 - a.window) : 0; };
  const CachePlace cache = *a.cache;
  const int first = first_of(a.position[first_query / group]);
  const int end = a.position[(min(first_query + PROMPT_QUERIES, all) - 1) / group] + 1;
  const auto copy_tile = [&](void* plane, int tile, uint4* to, float* scales) {
    const int rows = min(TILE, end - first - tile * TILE), position = first + tile * TILE;
    copies.start(static_cast<const Element*>(plane) + (size_t(kv_head) * cache.context + position) * stored, rows, to);
    if (!Cache::QUANTISED) return;
#pragma unroll 1
    for (int item = thread; item < scale_count; item += ATTENTION_THREADS) {
      const uint16_t* of_block = scales_of(plane, a, cache.context, kv_head) + size_t(item / TILE) * cache.context + position;
      scales[item] = item % TILE < rows ? f16_to_float(of_block[item % TILE]) : 0.0f;
    }
  };
  copy_tile(cache.keys, 0, keys, key_scales);
  copy_tile(cache.values, 0, values, value_scales);

  // Queries of the warp; those past the last repeat it.
  int tokens[WARP_QUERIES], heads[WARP_QUERIES], positions[WARP_QUERIES];
  const float* own_queries = queries + warp * WARP_QUERIES * padded;
#pragma unroll
  for (int index = 0; index < WARP_QUERIES; index++) {
    const int query = min(first_query + warp * WARP_QUERIES + index, all - 1);
    tokens[index] = query / group;
    heads[index] = kv_head * group + query % group;
    positions[index] = a.position[tokens[index]];
    float* to = queries + (warp * WARP_QUERIES + index) * padded;
    load_head(a, tokens[index], a.query + (size_t(tokens[index]) * a.heads + heads[index]) * size, a.query_norm, a.scale, to);
    if (size + lane < padded) to[size + lane] = 0.0f;
  }
  __syncwarp();

  float maxima[WARP_QUERIES], totals[WARP_QUERIES] = {};
  float4 sums[WARP_QUERIES][FOURS] = {};
#pragma unroll
  for (int index = 0; index < WARP_QUERIES; index++) maxima[index] = minus_infinity;
  const int tiles = (end - first + TILE - 1) / TILE;
#pragma unroll 1
  for (int tile = 0; tile < tiles; tile++) {
    const int position = first + tile * TILE + lane, rows = min(TILE, end - first - tile * TILE);
    wait_for_copies_but<1>();
    __syncthreads();
    float scores[WARP_QUERIES] = {};
#pragma unroll 1
    for (int column_piece = 0; column_piece < pieces; column_piece++) {
      float key[WIDTH];
      const float scale = Cache::QUANTISED ? key_scales[column_piece * WIDTH / BLOCK * TILE + lane] : 1.0f;
      Cache::unpack(keys[lane * stride + column_piece], scale, key);
#pragma unroll
      for (int index = 0; index < WARP_QUERIES; index++)
        scores[index] = dot_piece(own_queries + index * padded + column_piece * WIDTH, key, scores[index]);
    }
    float tile_weights[WARP_QUERIES], rescale[WARP_QUERIES];
#pragma unroll
    for (int index = 0; index < WARP_QUERIES; index++) {
      float score = scores[index] + position_bias(a, heads[index], position);
      if (position > positions[index] || position < first_of(positions[index])) score = minus_infinity;
      const float maximum = fmaxf(maxima[index], warp_max(score));
      // A query may see nothing of its first tiles.
      const float base = maximum == minus_infinity ? 0.0f : maximum;
      tile_weights[index] = exp2f(score - base);
      rescale[index] = exp2f(maxima[index] - base);
      totals[index] = fmaf(totals[index], rescale[index], tile_weights[index]);
      maxima[index] = maximum;
    }
    weights[lane] = {tile_weights[0], tile_weights[1], tile_weights[2], tile_weights[3]};
    __syncthreads();
    copy_tile(cache.keys, tile + 1, keys, key_scales);
    wait_for_copies_but<1>();
    __syncthreads();
#pragma unroll
    for (int index = 0; index < WARP_QUERIES; index++) {
#pragma unroll
      for (int four = 0; four < FOURS; four++) sums[index][four] = fused(rescale[index], sums[index][four], {});
    }
#pragma unroll 2
    for (int row = 0; row < rows; row++) {
      const float4 weight = weights[row];
#pragma unroll
      for (int four = 0; four < FOURS; four++) {
        const int column = (lane + four * WARP) * 4;
        if (column >= padded) continue;
        const float scale = Cache::QUANTISED ? value_scales[column / BLOCK * TILE + row] : 1.0f;
        const float4 value = Cache::load_four(reinterpret_cast<const Element*>(values + row * stride) + column, scale);
        sums[0][four] = fused(weight.x, value, sums[0][four]);
        sums[1][four] = fused(weight.y, value, sums[1][four]);
        sums[2][four] = fused(weight.z, value, sums[2][four]);
        sums[3][four] = fused(weight.w, value, sums[3][four]);
      }
    }
    __syncthreads();
    copy_tile(cache.values, tile + 1, values, value_scales);
  }
#pragma unroll
  for (int index = 0; index < WARP_QUERIES; index++) {
    const float inverse = 1.0f / (warp_sum(totals[index]) + sink_weight(a, heads[index], maxima[index]));
    if (first_query + warp * WARP_QUERIES + index >= all) continue;
    float* out = a.out + (size_t(tokens[index]) * a.heads + heads[index]) * size;
#pragma unroll
    for (int four = 0; four < FOURS; four++) {
      const float4 sum = sums[index][four];
      const float columns[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
      for (int column = 0; column < 4; column++) {
        const int to = (lane + four * WARP) * 4 + column;
        if (to < size) out[to] = columns[column] * inverse;
      }
    }
  }
}

// Queries per warp and per thread block in `attention_tiles`, and columns of the largest heads that it supports.
constexpr int TILE_QUERIES = 16, BLOCK_QUERIES = TILE_QUERIES * ATTENTION_WARPS, MOST_COLUMNS = 128;

// Like `attention_prompt`, but on tensor cores (FlashAttention, Dao et al. 2022), for f16 caches whose heads have 16, 32, … 128 numbers.
// Each query and weight is split into an f16 and the f16 of its residual, so that products have the precision of f32. A lane's fragments
// are laid out as in `mma_m16n8k16`: two rows (queries), and two adjacent columns of each tile of 8. Grid: (kv_heads, tiles of queries).
__device__ __forceinline__ void attention_tiles(const Attention& a) {
  const float minus_infinity = __uint_as_float(0xff800000u);
  const int thread = threadIdx.x, lane = lane_index(), warp = warp_index(), kv_head = blockIdx.x, size = a.head_size;
  const TileCopies<F16Cache> copies(size);
  // Distance between the rows of each tile, in f16 numbers.
  const int pitch = copies.stride * 8;
  const int group = a.heads / a.kv_heads, all = a.tokens * group, first_query = blockIdx.y * BLOCK_QUERIES;

  SharedMemory shared;
  // `queries`: [term, query, column]; `keys` and `values`: [position, column].
  uint16_t* queries = shared.allocate<uint16_t>(2 * BLOCK_QUERIES * pitch);
  float* head = shared.allocate<float>(ATTENTION_WARPS * size) + warp * size;
  uint4* keys = shared.allocate<uint4>(TILE * copies.stride);
  uint4* values = shared.allocate<uint4>(TILE * copies.stride);

  const auto first_of = [&](int position) { return a.window > 0 ? max(0, position + 1 - a.window) : 0; };
  const CachePlace cache = *a.cache;
  const int first = first_of(a.position[first_query / group]);
  const int end = a.position[(min(first_query + BLOCK_QUERIES, all) - 1) / group] + 1;
  const auto copy_tile = [&](const void* plane, int tile, uint4* to) {
    const int position = first + tile * TILE, rows = max(0, min(TILE, end - position));
    copies.start(static_cast<const uint16_t*>(plane) + (size_t(kv_head) * cache.context + position) * size, rows, to);
    // Positions past the end have weight 0, but 0 times NaN is NaN: fill them with zeros.
    for (int piece = rows * copies.stride + thread; piece < TILE * copies.stride; piece += ATTENTION_THREADS) to[piece] = uint4{};
  };
  copy_tile(cache.keys, 0, keys);
  copy_tile(cache.values, 0, values);

  // Indices past the last query repeat that query.
  const auto query_at = [&](int index) { return min(first_query + warp * TILE_QUERIES + index, all - 1); };
  const int term = BLOCK_QUERIES * pitch;
#pragma unroll 1
  for (int index = 0; index < TILE_QUERIES; index++) {
    const int query = query_at(index), token = query / group;
    const size_t from = size_t(token) * a.heads + kv_head * group + query % group;
    load_head(a, token, a.query + from * size, a.query_norm, a.scale, head);
    __syncwarp();
    uint16_t* to = queries + (warp * TILE_QUERIES + index) * pitch;
#pragma unroll 1
    for (int i = lane; i < size; i += WARP) {
      const uint16_t high = float_to_f16(head[i]);
      to[i] = high;
      to[term + i] = float_to_f16(head[i] - f16_to_float(high));
    }
    __syncwarp();
  }
  // The lane's two rows.
  int positions[2], heads[2], tokens[2];
#pragma unroll
  for (int row = 0; row < 2; row++) {
    const int query = query_at(lane / 4 + 8 * row);
    tokens[row] = query / group;
    heads[row] = kv_head * group + query % group;
    positions[row] = a.position[tokens[row]];
  }
  const int last_position = a.position[query_at(TILE_QUERIES - 1) / group];

  // Addresses that this lane passes to loads of queries, keys and values.
  const int low = lane % 8, middle = lane / 8 % 2 * 8, high = lane / 16 * 8;
  const uint16_t* own_queries = queries + (warp * TILE_QUERIES + middle + low) * pitch + high;
  const uint16_t* own_keys = reinterpret_cast<const uint16_t*>(keys) + (high + low) * pitch + middle;
  const uint16_t* own_values = reinterpret_cast<const uint16_t*>(values) + (middle + low) * pitch + high;
  float maxima[2] = {minus_infinity, minus_infinity}, totals[2] = {};
  float sums[MOST_COLUMNS / 8][4] = {};
  const int tiles = (end - first + TILE - 1) / TILE;
#pragma unroll 1
  for (int tile = 0; tile < tiles; tile++) {
    const int first_position = first + tile * TILE;
    // Positions after `last_position` are masked for all queries of the warp.
    const bool is_seen = first_position <= last_position;
    float scores[TILE / 8][4] = {};
    wait_for_copies_but<1>();
    __syncthreads();
    if (is_seen) {
#pragma unroll 1
      for (int column = 0; column < size; column += 16) {
        unsigned query[2][4];
        for (int index = 0; index < 2; index++) load_matrices(own_queries + index * term + column, query[index]);
#pragma unroll
        for (int pair = 0; pair < TILE / 16; pair++) {
          unsigned key[4];
          load_matrices(own_keys + pair * 16 * pitch + column, key);
#pragma unroll
          for (int second = 0; second < 2; second++) {
            const unsigned operand[2] = {key[2 * second], key[2 * second + 1]};
            mma_m16n8k16(scores[2 * pair + second], query[1], operand);
            mma_m16n8k16(scores[2 * pair + second], query[0], operand);
          }
        }
      }
      float tile_maxima[2] = {maxima[0], maxima[1]};
#pragma unroll
      for (int eight = 0; eight < TILE / 8; eight++) {
#pragma unroll
        for (int index = 0; index < 4; index++) {
          const int row = index / 2, position = first_position + eight * 8 + lane % 4 * 2 + index % 2;
          float& score = scores[eight][index];
          score += position_bias(a, heads[row], position);
          if (position > positions[row] || position < first_of(positions[row])) score = minus_infinity;
          tile_maxima[row] = fmaxf(tile_maxima[row], score);
        }
      }
      float base[2], rescale[2];
#pragma unroll
      for (int row = 0; row < 2; row++) {
        // Four lanes share a row.
        for (int step = 1; step < 4; step *= 2) tile_maxima[row] = fmaxf(tile_maxima[row], __shfl_xor_sync(ALL_LANES, tile_maxima[row], step));
        // A query may see nothing of its first tiles.
        base[row] = tile_maxima[row] == minus_infinity ? 0.0f : tile_maxima[row];
        rescale[row] = exp2f(maxima[row] - base[row]);
        maxima[row] = tile_maxima[row];
        totals[row] *= rescale[row];
      }
#pragma unroll
      for (int eight = 0; eight < TILE / 8; eight++) {
#pragma unroll
        for (int index = 0; index < 4; index++) {
          float& weight = scores[eight][index];
          weight = exp2f(weight - base[index / 2]);
          totals[index / 2] += weight;
        }
      }
#pragma unroll
      for (int eight = 0; eight < MOST_COLUMNS / 8; eight++) {
#pragma unroll
        for (int index = 0; index < 4; index++) sums[eight][index] *= rescale[index / 2];
      }
    }
    __syncthreads();
    copy_tile(cache.keys, tile + 1, keys);
    wait_for_copies_but<1>();
    __syncthreads();
    if (is_seen) {
#pragma unroll
      for (int pair = 0; pair < TILE / 16; pair++) {
        // Operand `a` of `mma_m16n8k16`: for every 8 positions, weights of the lane's first row, then of its second.
        unsigned weights[2][4];
#pragma unroll
        for (int part = 0; part < 4; part++) {
          const float* both = scores[2 * pair + part / 2] + part % 2 * 2;
          weights[0][part] = floats_to_f16(both[0], both[1]);
          weights[1][part] = floats_to_f16(both[0] - f16_to_float(uint16_t(weights[0][part])), both[1] - f16_to_float(uint16_t(weights[0][part] >> 16)));
        }
#pragma unroll
        for (int sixteen = 0; sixteen < MOST_COLUMNS / 16; sixteen++) {
          if (sixteen * 16 >= size) break;
          unsigned value[4];
          load_matrices_transposed(own_values + pair * 16 * pitch + sixteen * 16, value);
#pragma unroll
          for (int second = 0; second < 2; second++) {
            const unsigned operand[2] = {value[2 * second], value[2 * second + 1]};
            mma_m16n8k16(sums[2 * sixteen + second], weights[1], operand);
            mma_m16n8k16(sums[2 * sixteen + second], weights[0], operand);
          }
        }
      }
    }
    __syncthreads();
    copy_tile(cache.values, tile + 1, values);
  }
#pragma unroll
  for (int row = 0; row < 2; row++) {
    float total = totals[row];
    for (int step = 1; step < 4; step *= 2) total += __shfl_xor_sync(ALL_LANES, total, step);
    if (first_query + warp * TILE_QUERIES + lane / 4 + 8 * row >= all) continue;
    const float inverse = 1.0f / (total + sink_weight(a, heads[row], maxima[row]));
    float* out = a.out + (size_t(tokens[row]) * a.heads + heads[row]) * size + lane % 4 * 2;
#pragma unroll
    for (int eight = 0; eight < MOST_COLUMNS / 8; eight++) {
      if (eight * 8 >= size) break;
      *reinterpret_cast<float2*>(out + eight * 8) = {sums[eight][2 * row] * inverse, sums[eight][2 * row + 1] * inverse};
    }
  }
}

KERNEL_OF_BLOCKS(ATTENTION_THREADS, 3, attention_tiles_f16, Attention) { attention_tiles(a); }

// One query head per KV head, and several; prompts.
#define ATTENTION(name, Cache, BLOCKS)                                                                                       \
  KERNEL(WARP, append_kv_##name, Attention) { append_kv<Cache>(a); }                                                         \
  KERNEL_OF_BLOCKS(ATTENTION_THREADS, BLOCKS, attention_##name, Attention) { attention<Cache, 1>(a); }                       \
  KERNEL_OF_BLOCKS(ATTENTION_THREADS, BLOCKS, attention_grouped_##name, Attention) { attention<Cache, ATTENTION_WARPS>(a); } \
  KERNEL_OF_BLOCKS(ATTENTION_THREADS, 3, attention_prompt_##name, Attention) { attention_prompt<Cache>(a); }
ATTENTION(f32, F32Cache, ATTENTION_BLOCKS)
ATTENTION(f16, F16Cache, ATTENTION_BLOCKS)
ATTENTION(q8_0, Q8Cache, Q8_BLOCKS)
