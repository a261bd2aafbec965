// Attention of a token, or of some that follow each other: heads are normed and rotated, keys and values join
// the cache, and what is seen is shared between blocks (Flash-Decoding, Dao et al. 2023), whose parts the last one
// merges in order.
#include "block.cuh"
#include "input.cuh"

// Positions that are looked at together, one a lane.
constexpr int TILE = WARP;
// Threads of a block: enough for a tile of values.
constexpr int ATTENTION_THREADS = 128;

struct Attention {
  // [tokens, heads, head_size], and [tokens, kv_heads, head_size] twice.
  const float* query;
  const float* key;
  const float* value;
  Norm query_norm;
  Norm key_norm;
  // [tokens, pairs]: sine and cosine of each pair of numbers that is rotated, (i, i + pairs).
  const float2* rotations;
  int pairs;
  // ALiBi's, one a head; null for none.
  const float* slopes;
  // [kv_heads, context, head_size] each.
  void* keys;
  void* values;
  int heads;
  int kv_heads;
  int head_size;
  int context;
  // Positions a token sees, itself among them; 0 for all.
  int window;
  // Whether keys and values of all tokens are in the cache; if not, there is one token, and they join it.
  int appended;
  // The first token's.
  const int* position;
  // What scores are multiplied by, times log2(e): powers of two are cheaper than those of e.
  float scale;
  // [tokens, kv_heads, splits, group, head_size + 2].
  float* partial;
  // One a token and KV head, all 0.
  unsigned* counters;
  // [tokens, heads, head_size].
  float* out;
};

struct HalfCache {
  typedef uint16_t Number;
  __device__ static __forceinline__ float load(Number number) { return half_to_float(number); }
  __device__ static __forceinline__ Number store(float value) { return float_to_half(value); }
};

struct FloatCache {
  typedef float Number;
  __device__ static __forceinline__ float load(Number number) { return number; }
  __device__ static __forceinline__ Number store(float value) { return value; }
};

// A head of a token, normed, rotated and scaled, in shared memory; by one warp.
__device__ __forceinline__ void load_head(const Attention& a, int token, const float* x, const Norm& norm,
                                          float scale, float* out) {
  const int lane = lane_index(), size = a.head_size;
  float sum = 0.0f, squares = 0.0f;
#pragma unroll 1
  for (int i = lane; i < size; i += WARP) {
    out[i] = x[i];
    sum += x[i];
  }
  if (norm.kind != NO_NORM) {
    const float mean = norm.kind == LAYER_NORM ? warp_sum(sum) / float(size) : 0.0f;
#pragma unroll 1
    for (int i = lane; i < size; i += WARP) {
      out[i] -= mean;
      squares = fmaf(out[i], out[i], squares);
    }
    const float by = 1.0f / sqrtf(warp_sum(squares) / float(size) + norm.epsilon);
#pragma unroll 1
    for (int i = lane; i < size; i += WARP) out[i] = out[i] * by * norm.weight[i] + (norm.bias ? norm.bias[i] : 0.0f);
  }
  __syncwarp();
#pragma unroll 1
  for (int pair = lane; pair < a.pairs; pair += WARP) {
    const float2 turn = a.rotations[size_t(token) * a.pairs + pair];
    const float first = out[pair], second = out[pair + a.pairs];
    out[pair] = first * turn.y - second * turn.x;
    out[pair + a.pairs] = first * turn.x + second * turn.y;
  }
  __syncwarp();
#pragma unroll 1
  for (int i = lane; i < size; i += WARP) out[i] *= scale;
}

// Rows of a tile of the cache as floats, `stride` apart; zeros for positions outside of `first..end`.
template <class Cache>
__device__ __forceinline__ void load_tile(const typename Cache::Number* rows, int size, int stride, int start,
                                          int first, int end, float* tile) {
  for (int i = threadIdx.x; i < TILE * size; i += blockDim.x) {
    const int row = i / size, column = i % size, position = start + row;
    const bool seen = position >= first && position < end;
    tile[row * stride + column] = seen ? Cache::load(rows[size_t(position) * size + column]) : 0.0f;
  }
}

template <class Cache>
__device__ __forceinline__ void attend(const Attention& a) {
  typedef typename Cache::Number Number;
  const int kv_head = blockIdx.x, split = blockIdx.y, splits = gridDim.y, token = blockIdx.z;
  const int group = a.heads / a.kv_heads, size = a.head_size, stride = size + 4;
  const float nothing = __uint_as_float(0xff800000u);  // minus infinity
  SharedMemory shared;
  float* queries = shared.take<float>(group * size);
  float* sums = shared.take<float>(group * size);
  float* weights = shared.take<float>(group * TILE);
  float* largest = shared.take<float>(group);
  float* totals = shared.take<float>(group);
  float* shrink = shared.take<float>(group);
  float* keys = shared.take<float>(TILE * stride);
  float* values = shared.take<float>(TILE * stride);
  unsigned* scratch = shared.take<unsigned>(1);

  const int position = *a.position + token, end = position + 1;
  const int first = a.window > 0 ? max(0, end - a.window) : 0;
  const int first_tile = first / TILE, tiles = (end + TILE - 1) / TILE - first_tile;
  const int each = (tiles + splits - 1) / splits;
  const int start = min(tiles, split * each), stop = min(tiles, start + each);
  const size_t plane = size_t(kv_head) * a.context * size;
  Number* key_cache = static_cast<Number*>(a.keys) + plane;
  Number* value_cache = static_cast<Number*>(a.values) + plane;

  for (int query = warp_index(); query < group; query += warp_count()) {
    const int head = kv_head * group + query;
    const float* x = a.query + (size_t(token) * a.heads + head) * size;
    load_head(a, token, x, a.query_norm, a.scale, queries + query * size);
  }
  for (int i = threadIdx.x; i < group * size; i += blockDim.x) sums[i] = 0.0f;
  for (int i = threadIdx.x; i < group; i += blockDim.x) {
    largest[i] = nothing;
    totals[i] = 0.0f;
  }
  // Whoever looks at the token itself puts it into the cache before.
  if (!a.appended && start < stop && stop == tiles) {
    if (warp_index() == 0) {
      load_head(a, token, a.key + kv_head * size, a.key_norm, 1.0f, keys);
      __syncwarp();
      for (int i = lane_index(); i < size; i += WARP) {
        key_cache[size_t(position) * size + i] = Cache::store(keys[i]);
        value_cache[size_t(position) * size + i] = Cache::store(a.value[kv_head * size + i]);
      }
    }
  }
  __syncthreads();

  for (int tile = start; tile < stop; tile++) {
    const int tile_start = (first_tile + tile) * TILE;
    load_tile<Cache>(key_cache, size, stride, tile_start, first, end, keys);
    load_tile<Cache>(value_cache, size, stride, tile_start, first, end, values);
    __syncthreads();
    // A warp a query, a lane a position.
    const int own = tile_start + lane_index();
    for (int query = warp_index(); query < group; query += warp_count()) {
      const float* by = queries + query * size;
      const float* key = keys + lane_index() * stride;
      float score = 0.0f;
      for (int i = 0; i < size; i++) score = fmaf(by[i], key[i], score);
      if (a.slopes) {
        const float slope = a.slopes[kv_head * group + query];
        score += round_to_brain(slope * round_to_brain(float(own))) * a.scale;
      }
      if (own < first || own >= end) score = nothing;
      const float before = largest[query], now = fmaxf(before, warp_largest(score));
      const float weight = score == nothing ? 0.0f : exp2f(score - now);
      const float total = warp_sum(weight);
      weights[query * TILE + lane_index()] = weight;
      __syncwarp();
      if (lane_index() == 0) {
        const float by_largest = before == nothing ? 0.0f : exp2f(before - now);
        shrink[query] = by_largest;
        totals[query] = totals[query] * by_largest + total;
        largest[query] = now;
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < group * size; i += blockDim.x) {
      const int query = i / size, column = i % size;
      float sum = sums[i] * shrink[query];
      for (int row = 0; row < TILE; row++) sum = fmaf(weights[query * TILE + row], values[row * stride + column], sum);
      sums[i] = sum;
    }
    __syncthreads();
  }

  // What this block has seen; then the last of the head's blocks merges what all have, in their order.
  const int width = size + 2;
  const size_t place = size_t(token) * a.kv_heads + kv_head;
  float* partial = a.partial + place * splits * group * width;
  float* own = partial + size_t(split) * group * width;
#pragma unroll 1
  for (int i = threadIdx.x; i < group * size; i += blockDim.x) own[i / size * width + i % size] = sums[i];
#pragma unroll 1
  for (int i = threadIdx.x; i < group; i += blockDim.x) {
    own[i * width + size] = largest[i];
    own[i * width + size + 1] = totals[i];
  }
  if (!is_last_block(a.counters + place, splits, scratch)) return;
#pragma unroll 1
  for (int i = threadIdx.x; i < group * size; i += blockDim.x) {
    const int query = i / size, column = i % size;
    const float* of_query = partial + query * width;
    float most = nothing;
#pragma unroll 1
    for (int other = 0; other < splits; other++)
      most = fmaxf(most, load_from_blocks(of_query + size_t(other) * group * width + size));
    float sum = 0.0f, total = 0.0f;
#pragma unroll 1
    for (int other = 0; other < splits; other++) {
      const float* part = of_query + size_t(other) * group * width;
      const float of_part = load_from_blocks(part + size);
      if (of_part == nothing) continue;
      const float by = exp2f(of_part - most);
      sum = fmaf(load_from_blocks(part + column), by, sum);
      total = fmaf(load_from_blocks(part + size + 1), by, total);
    }
    a.out[(place * group + query) * size + column] = sum / total;
  }
}

// Keys and values of a token join the cache, a KV head a block.
template <class Cache>
__device__ __forceinline__ void append(const Attention& a) {
  typedef typename Cache::Number Number;
  SharedMemory shared;
  const int kv_head = blockIdx.x, token = blockIdx.y, size = a.head_size;
  float* key = shared.take<float>(size);
  const size_t from = (size_t(token) * a.kv_heads + kv_head) * size;
  const size_t to = (size_t(kv_head) * a.context + *a.position + token) * size;
  load_head(a, token, a.key + from, a.key_norm, 1.0f, key);
  __syncwarp();
#pragma unroll 1
  for (int i = lane_index(); i < size; i += WARP) {
    static_cast<Number*>(a.keys)[to + i] = Cache::store(key[i]);
    static_cast<Number*>(a.values)[to + i] = Cache::store(a.value[from + i]);
  }
}

KERNEL(WARP, append_kv_f16, Attention) { append<HalfCache>(a); }
KERNEL(WARP, append_kv_f32, Attention) { append<FloatCache>(a); }
KERNEL(ATTENTION_THREADS, attention_f16, Attention) { attend<HalfCache>(a); }
KERNEL(ATTENTION_THREADS, attention_f32, Attention) { attend<FloatCache>(a); }
