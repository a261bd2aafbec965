// Attention over the KV cache, for one token or several consecutive ones: q and k are normalised and rotated (RoPE), k
// and v appended to the cache; thread blocks split the positions (Flash-Decoding, Dao et al. 2023), and the last block
// of a KV head merges the splits in order.
#include "block.cuh"
#include "input.cuh"

// Positions per tile, one per lane.
constexpr int TILE = WARP;
// Threads per block.
constexpr int ATTENTION_THREADS = 128;

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
  // The cache: [kv_heads, context, head_size] each.
  void* keys;
  void* values;
  int heads;
  int kv_heads;
  int head_size;
  int context;
  // Sliding window in positions, including the token's own; 0 for no window.
  int window;
  // Whether `append_kv` has stored k and v of all tokens; otherwise there is one token, and `attention` stores them.
  int in_cache;
  // Position of the first token.
  const int* position;
  // log2(e) / sqrt(head_size): the softmax uses exp2.
  float scale;
  // [tokens, kv_heads, splits, group, head_size + 2]: weighted values, maximum score, sum of weights of each split.
  float* partial;
  // [tokens, kv_heads], all 0.
  unsigned* counters;
  // [tokens, heads, head_size].
  float* out;
};

struct F16Cache {
  typedef uint16_t Element;
  __device__ static __forceinline__ float load(Element element) { return f16_to_float(element); }
  __device__ static __forceinline__ Element store(float value) { return float_to_f16(value); }
};

struct F32Cache {
  typedef float Element;
  __device__ static __forceinline__ float load(Element element) { return element; }
  __device__ static __forceinline__ Element store(float value) { return value; }
};

// out = scale * rope(norm(x)) for one head of a token, in shared memory, by one warp.
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
    const float inverse_norm = 1.0f / sqrtf(warp_sum(squares) / float(size) + norm.epsilon);
#pragma unroll 1
    for (int i = lane; i < size; i += WARP) out[i] = out[i] * inverse_norm * norm.weight[i] + (norm.bias ? norm.bias[i] : 0.0f);
  }
  __syncwarp();
#pragma unroll 1
  for (int pair = lane; pair < a.pairs; pair += WARP) {
    const float2 rotation = a.sin_cos[size_t(token) * a.pairs + pair];
    const float first = out[pair], second = out[pair + a.pairs];
    out[pair] = first * rotation.y - second * rotation.x;
    out[pair + a.pairs] = first * rotation.x + second * rotation.y;
  }
  __syncwarp();
#pragma unroll 1
  for (int i = lane; i < size; i += WARP) out[i] *= scale;
}

// Loads a tile of cache rows as floats, `stride` apart; zeros for positions outside of first..end.
template <class Cache>
__device__ __forceinline__ void load_tile(const typename Cache::Element* rows, int size, int stride, int start,
                                          int first, int end, float* tile) {
  for (int i = threadIdx.x; i < TILE * size; i += blockDim.x) {
    const int row = i / size, column = i % size, position = start + row;
    const bool visible = position >= first && position < end;
    tile[row * stride + column] = visible ? Cache::load(rows[size_t(position) * size + column]) : 0.0f;
  }
}

// Grid: (kv_heads, splits, tokens). A group is the query heads that share a KV head.
template <class Cache>
__device__ __forceinline__ void attention(const Attention& a) {
  typedef typename Cache::Element Element;
  const int kv_head = blockIdx.x, split = blockIdx.y, splits = gridDim.y, token = blockIdx.z;
  const int group = a.heads / a.kv_heads, size = a.head_size, stride = size + 4;
  const float minus_infinity = __uint_as_float(0xff800000u);
  SharedMemory shared;
  float* queries = shared.allocate<float>(group * size);
  float* sums = shared.allocate<float>(group * size);
  float* weights = shared.allocate<float>(group * TILE);
  float* maxima = shared.allocate<float>(group);
  float* exp_sums = shared.allocate<float>(group);
  float* rescale = shared.allocate<float>(group);
  float* keys = shared.allocate<float>(TILE * stride);
  float* values = shared.allocate<float>(TILE * stride);
  unsigned* scratch = shared.allocate<unsigned>(1);

  const int position = *a.position + token, end = position + 1;
  const int first = a.window > 0 ? max(0, end - a.window) : 0;
  const int first_tile = first / TILE, tiles = (end + TILE - 1) / TILE - first_tile;
  const int tiles_per_split = (tiles + splits - 1) / splits;
  const int start = min(tiles, split * tiles_per_split), stop = min(tiles, start + tiles_per_split);
  const size_t plane = size_t(kv_head) * a.context * size;
  Element* key_cache = static_cast<Element*>(a.keys) + plane;
  Element* value_cache = static_cast<Element*>(a.values) + plane;

  for (int query = warp_index(); query < group; query += warp_count()) {
    const int head = kv_head * group + query;
    const float* x = a.query + (size_t(token) * a.heads + head) * size;
    load_head(a, token, x, a.query_norm, a.scale, queries + query * size);
  }
  for (int i = threadIdx.x; i < group * size; i += blockDim.x) sums[i] = 0.0f;
  for (int i = threadIdx.x; i < group; i += blockDim.x) {
    maxima[i] = minus_infinity;
    exp_sums[i] = 0.0f;
  }
  // The split with the token's own position appends k and v first.
  if (!a.in_cache && start < stop && stop == tiles) {
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
    // Scores and online softmax: one warp per query, one lane per position.
    const int key_position = tile_start + lane_index();
    for (int query = warp_index(); query < group; query += warp_count()) {
      const float* q = queries + query * size;
      const float* key = keys + lane_index() * stride;
      float score = 0.0f;
      for (int i = 0; i < size; i++) score = fmaf(q[i], key[i], score);
      if (a.alibi_slopes) {
        const float slope = a.alibi_slopes[kv_head * group + query];
        score += round_to_bf16(slope * round_to_bf16(float(key_position))) * a.scale;
      }
      if (key_position < first || key_position >= end) score = minus_infinity;
      const float old_max = maxima[query], new_max = fmaxf(old_max, warp_max(score));
      const float weight = score == minus_infinity ? 0.0f : exp2f(score - new_max);
      const float total = warp_sum(weight);
      weights[query * TILE + lane_index()] = weight;
      __syncwarp();
      if (lane_index() == 0) {
        const float old_scale = old_max == minus_infinity ? 0.0f : exp2f(old_max - new_max);
        rescale[query] = old_scale;
        exp_sums[query] = exp_sums[query] * old_scale + total;
        maxima[query] = new_max;
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < group * size; i += blockDim.x) {
      const int query = i / size, column = i % size;
      float sum = sums[i] * rescale[query];
      for (int row = 0; row < TILE; row++) sum = fmaf(weights[query * TILE + row], values[row * stride + column], sum);
      sums[i] = sum;
    }
    __syncthreads();
  }

  // Store this split; the last block of the KV head merges all splits in order.
  const int width = size + 2;
  const size_t head_index = size_t(token) * a.kv_heads + kv_head;
  float* partial = a.partial + head_index * splits * group * width;
  float* split_partial = partial + size_t(split) * group * width;
#pragma unroll 1
  for (int i = threadIdx.x; i < group * size; i += blockDim.x) split_partial[i / size * width + i % size] = sums[i];
#pragma unroll 1
  for (int i = threadIdx.x; i < group; i += blockDim.x) {
    split_partial[i * width + size] = maxima[i];
    split_partial[i * width + size + 1] = exp_sums[i];
  }
  if (!is_last_block(a.counters + head_index, splits, scratch)) return;
#pragma unroll 1
  for (int i = threadIdx.x; i < group * size; i += blockDim.x) {
    const int query = i / size, column = i % size;
    const float* query_partial = partial + query * width;
    float maximum = minus_infinity;
#pragma unroll 1
    for (int other_split = 0; other_split < splits; other_split++)
      maximum = fmaxf(maximum, load_gpu_scope(query_partial + size_t(other_split) * group * width + size));
    float sum = 0.0f, total = 0.0f;
#pragma unroll 1
    for (int other_split = 0; other_split < splits; other_split++) {
      const float* other = query_partial + size_t(other_split) * group * width;
      const float split_max = load_gpu_scope(other + size);
      if (split_max == minus_infinity) continue;
      const float weight = exp2f(split_max - maximum);
      sum = fmaf(load_gpu_scope(other + column), weight, sum);
      total = fmaf(load_gpu_scope(other + size + 1), weight, total);
    }
    a.out[(head_index * group + query) * size + column] = sum / total;
  }
}

// Appends k and v of every token to the cache. Grid: (kv_heads, tokens), one warp each.
template <class Cache>
__device__ __forceinline__ void append_kv(const Attention& a) {
  typedef typename Cache::Element Element;
  SharedMemory shared;
  const int kv_head = blockIdx.x, token = blockIdx.y, size = a.head_size;
  float* key = shared.allocate<float>(size);
  const size_t from = (size_t(token) * a.kv_heads + kv_head) * size;
  const size_t to = (size_t(kv_head) * a.context + *a.position + token) * size;
  load_head(a, token, a.key + from, a.key_norm, 1.0f, key);
  __syncwarp();
#pragma unroll 1
  for (int i = lane_index(); i < size; i += WARP) {
    static_cast<Element*>(a.keys)[to + i] = Cache::store(key[i]);
    static_cast<Element*>(a.values)[to + i] = Cache::store(a.value[from + i]);
  }
}

KERNEL(WARP, append_kv_f16, Attention) { append_kv<F16Cache>(a); }
KERNEL(WARP, append_kv_f32, Attention) { append_kv<F32Cache>(a); }
KERNEL(ATTENTION_THREADS, attention_f16, Attention) { attention<F16Cache>(a); }
KERNEL(ATTENTION_THREADS, attention_f32, Attention) { attention<F32Cache>(a); }
