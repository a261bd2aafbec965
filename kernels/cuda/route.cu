// Router of a mixture of experts: selects each token's experts, and writes their weights and the mask of their neurons.
#include "masks.cuh"

struct Route {
  // [tokens, experts].
  const float* logits;
  // [tokens]: logit of the shared expert's weight; null if that weight is `shared_weight`.
  const float* shared_logits;
  // [neurons]: block of each neuron, an expert or the shared one; block_count for neurons that are not computed.
  const uint16_t* blocks;
  // [tokens, blocks]: weights, 0 for experts that are not selected; and the same in mapped host memory, or null.
  float* weights;
  float* host_weights;
  // [blocks, hidden]: biases of down, null for none; and [tokens, hidden]: their sum over the blocks, times the weights.
  const float* biases;
  float* bias_sums;
  int experts;
  int block_count;
  int per_token;
  // Whether scores are sigmoids of the logits; else they are exponentials.
  int is_sigmoid;
  // Whether scores are divided by the sum over all experts; else over the selected ones.
  int sums_all;
  int neurons;
  // Whether only neurons remain that are already in the mask.
  int intersects;
  int hidden;
  // Factor of the weights of selected experts.
  float scale;
  float shared_weight;
  Masks masks;
};

constexpr int ROUTE_THREADS = 256;
// Words of the mask that a block writes.
constexpr int ROUTE_WORDS = 64;

// Orders all floats as integers: NaN with a positive sign is the largest.
__device__ __forceinline__ unsigned order_of(float x) {
  const unsigned bits = __float_as_uint(x);
  return bits >> 31 ? ~bits : bits | 1u << 31;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Grid: (ceil(words / ROUTE_WORDS), tokens), blocks of ROUTE_THREADS. Every block selects the experts for itself: an expert's rank is the
// number of experts with larger logits, or with equal ones and lower indices.
KERNEL(ROUTE_THREADS, route, Route) {
  SharedMemory shared;
  const int token = blockIdx.y, experts = a.experts;
  float* logits = shared.allocate<float>(experts);
  float* weights = shared.allocate<float>(a.block_count + 1);
  float* scratch = shared.allocate<float>(WARP);
  for (int expert = threadIdx.x; expert < experts; expert += ROUTE_THREADS)
    logits[expert] = a.logits[size_t(token) * experts + expert];
  __syncthreads();
  float largest = __uint_as_float(0xff800000u);
  for (int expert = lane_index(); expert < experts; expert += WARP) largest = fmaxf(largest, logits[expert]);
  largest = warp_max(largest);
  float sum = 0.0f;
  for (int expert = threadIdx.x; expert < experts; expert += ROUTE_THREADS) {
    const float logit = logits[expert];
    const unsigned order = order_of(logit);
    int rank = 0;
    for (int other = 0; other < experts; other++) {
      const unsigned other_order = order_of(logits[other]);
      rank += other_order > order || (other_order == order && other < expert);
    }
    const bool is_selected = rank < a.per_token;
    const float score = a.is_sigmoid ? sigmoid(logit) : expf(logit - largest);
    weights[expert] = is_selected ? score : 0.0f;
    sum += a.sums_all || is_selected ? score : 0.0f;
  }
  if (threadIdx.x == 0) weights[a.block_count] = 0.0f;
  sum = block_sum(sum, scratch);
  // Each thread reads the weights that it wrote.
  for (int block = threadIdx.x; block < a.block_count; block += ROUTE_THREADS) {
    float weight = block < experts ? weights[block] : a.shared_weight;
    // Multiplied first: equal weights times their number are exactly 1.
    if (block < experts && weight != 0.0f) weight = weight * a.scale / sum;
    if (block == experts && a.shared_logits) weight = sigmoid(a.shared_logits[token]);
    weights[block] = weight;
    if (blockIdx.x > 0) continue;
    a.weights[size_t(token) * a.block_count + block] = weight;
    if (a.host_weights) a.host_weights[size_t(token) * a.block_count + block] = weight;
  }
  __syncthreads();
  for (int i = blockIdx.x * ROUTE_THREADS + threadIdx.x; a.biases && i < a.hidden; i += gridDim.x * ROUTE_THREADS) {
    float bias = 0.0f;
    for (int block = 0; block < a.block_count; block++)
      if (weights[block] != 0.0f) bias = fmaf(weights[block], a.biases[size_t(block) * a.hidden + i], bias);
    a.bias_sums[size_t(token) * a.hidden + i] = bias;
  }
  const int words = (a.neurons + WORD - 1) / WORD, first_word = blockIdx.x * ROUTE_WORDS;
  for (int word = first_word + warp_index(); word < min(first_word + ROUTE_WORDS, words); word += warp_count()) {
    const int neuron = word * WORD + lane_index();
    // A weight that is NaN makes the result NaN.
    bool is_computed = weights[a.blocks[min(neuron, a.neurons - 1)]] != 0.0f;
    if (a.intersects) {
      // The lane that overwrites the word reads it.
      const unsigned own = lane_index() == 0 ? a.masks.device[token * words + word] : 0;
      const unsigned predicted = __shfl_sync(ALL_LANES, own, 0);
      is_computed = is_computed && predicted >> lane_index() & 1;
    }
    write_mask(a.masks, token, word, a.neurons, is_computed);
  }
}
