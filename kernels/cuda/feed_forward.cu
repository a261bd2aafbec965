// The FFN of one token with the hot neurons it needs: a predictor or signs predict them, gate and up are
// multiplied and activated in one kernel, rows of down are added up in two stages whose order is fixed,
// and what the processor beside made of the cold ones is added in the same step.
#include "matrix.cuh"
#include "neurons.cuh"

// Neurons of a word of a mask.
constexpr int WORD = 32;

// Where it is said which neurons are predicted, a bit each, token after token.
struct Masks {
  unsigned* all;
  // The same in memory that the processor beside sees; null where it has no neurons.
  unsigned* for_host;
  // What the row of down of each neuron is multiplied by, of one token; those that nobody predicts get 0.
  float* products;
  int hot_count;
};

// Writes the decisions about 32 neurons, one a lane, for one of some tokens.
__device__ __forceinline__ void decide(const Masks& masks, int token, int word, int neurons, bool predicted) {
  const int neuron = word * WORD + lane_index();
  const unsigned bits = __ballot_sync(ALL_LANES, neuron < neurons && predicted);
  if (neuron < masks.hot_count) masks.products[neuron] = 0.0f;
  if (lane_index() != 0) return;
  const int place = token * ((neurons + WORD - 1) / WORD) + word;
  masks.all[place] = bits;
  if (masks.for_host) masks.for_host[place] = bits;
}

struct Predict {
  // What the predictor's hidden layer says, before relu: [tokens, units]. A token is a row of the grid.
  const float* middle;
  // Row j is what unit j says of every neuron.
  Matrix units;
  // Per 32 units, what that is multiplied by for each neuron; null for by nothing.
  const float* scales;
  const float* bias;
  float threshold;
  Masks masks;
};

// Rows that a warp reads at once.
constexpr int UNITS_AT_ONCE = 4;

template <class Format>
__device__ __forceinline__ void predict(const Predict& a) {
  SharedMemory shared;
  float* sums = shared.take<float>(warp_count() * WORD);
  const int lane = lane_index(), neurons = a.units.columns, rank = a.units.rows;
  const int neuron = min(int(blockIdx.x) * WORD + lane, neurons - 1);
  const float* middle = a.middle + size_t(blockIdx.y) * rank;
  float sum = 0.0f;
  for (int first = warp_index() * BLOCK; first < rank; first += warp_count() * BLOCK) {
    const float own = first + lane < rank ? middle[first + lane] : 0.0f;
    unsigned living = __ballot_sync(ALL_LANES, own > 0.0f);
    float of_block = 0.0f;
    while (living) {
      float weights[UNITS_AT_ONCE], values[UNITS_AT_ONCE];
#pragma unroll
      for (int index = 0; index < UNITS_AT_ONCE; index++) {
        const int unit = __ffs(int(living)) - 1;
        values[index] = __shfl_sync(ALL_LANES, own, max(unit, 0));
        weights[index] = unit < 0 ? 0.0f : Format::weight(a.units, first + unit, neuron);
        living &= living - 1;
      }
#pragma unroll
      for (int index = 0; index < UNITS_AT_ONCE; index++) of_block = fmaf(values[index], weights[index], of_block);
    }
    sum += a.scales ? of_block * a.scales[size_t(first / BLOCK) * neurons + neuron] : of_block;
  }
  sums[warp_index() * WORD + lane] = sum;
  __syncthreads();
  if (warp_index() != 0) return;
  float logit = a.bias[neuron];
  for (int warp = 0; warp < warp_count(); warp++) logit += sums[warp * WORD + lane];
  decide(a.masks, blockIdx.y, blockIdx.x, neurons, logit >= a.threshold);
}

#define PREDICT(name, Format) \
  KERNEL(256, predict_##name, Predict) { predict<Format>(a); }
FOR_ALL_FORMATS(PREDICT)

struct PredictBySigns {
  // [tokens, columns]; a token is a row of the grid.
  const float* x;
  Norm norm;
  // [neurons, words], the signs of gate, 32 to a word; words are a multiple of 2.
  const unsigned* signs;
  int neurons;
  int columns;
  int agreements;
  Masks masks;
};

// Counts the signs of gate that agree with those of the input (SparseInfer, Shin et al. 2024).
KERNEL(256, predict_by_signs, PredictBySigns) {
  SharedMemory shared;
  const int lane = lane_index(), words = (a.columns + 2 * WORD - 1) / (2 * WORD) * 2;
  const float* x = load_normed(shared, a.x + size_t(blockIdx.y) * a.columns, a.columns, a.norm);
  unsigned* signs = shared.take<unsigned>(words);
  for (int word = warp_index(); word < words; word += warp_count()) {
    const int column = word * WORD + lane;
    const bool negative = column < a.columns && __float_as_uint(x[min(column, a.columns - 1)]) >> 31;
    const unsigned bits = __ballot_sync(ALL_LANES, negative);
    if (lane == 0) signs[word] = bits;
  }
  __syncthreads();
  const int groups = (a.neurons + WORD - 1) / WORD;
  for (int group = blockIdx.x * warp_count() + warp_index(); group < groups; group += gridDim.x * warp_count()) {
    bool predicted = false;
    for (int index = 0; index < WORD && group * WORD + index < a.neurons; index++) {
      const unsigned* row = a.signs + size_t(group * WORD + index) * words;
      int differ = 0;
      for (int word = lane; word < words; word += WARP) differ += __popc(row[word] ^ signs[word]);
      differ = warp_sum(differ);
      if (lane == index) predicted = a.columns - differ >= a.agreements;
    }
    decide(a.masks, blockIdx.y, group, a.neurons, predicted);
  }
}

struct GateUp {
  const float* x;
  Norm norm;
  Matrix gate;
  const float* gate_bias;
  // Without rows where the FFN has none.
  Matrix up;
  const float* up_bias;
  Neurons neurons;
  // Who is predicted; null for everyone. Whoever is not has a product of 0 already.
  const unsigned* mask;
  // Rows of gate and up that are here.
  int hot_count;
  float* products;
  int rounded;
  // Where the processor beside reads the normed vector; null where it has no neurons. The flag gets
  // the number of the step when all that it needs is there.
  float* for_host;
  unsigned* flag;
  const unsigned* step;
  // How many neurons were looked at, in all that was launched.
  unsigned* looked_at;
};

// Place `index` among the set bits of a mask whose words begin with so many `before` them.
__device__ __forceinline__ int find_bit(const unsigned* mask, const int* before, int words, int index) {
  int low = 0, high = words - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (before[middle] <= index) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  unsigned bits = mask[low];
  for (int skipped = before[low]; skipped < index; skipped++) bits &= bits - 1;
  return low * WORD + __ffs(int(bits)) - 1;
}

template <class Format>
__device__ __forceinline__ void gate_up(const GateUp& a) {
  SharedMemory shared;
  const bool rounded = Format::QUANTISED && a.rounded;
  const Input x = load_input(shared, a.x, a.gate.columns, a.norm, rounded);
  if (a.for_host && blockIdx.x == 0) {
    for (int i = threadIdx.x; i < a.gate.columns; i += blockDim.x) a.for_host[i] = x.values[i];
    __syncthreads();
    if (threadIdx.x == 0) release_to_host(a.flag, *a.step);
  }
  // The words of the mask and how many bits come before each, for every block has to find its rows.
  int count = a.hot_count;
  const int words = (a.hot_count + WORD - 1) / WORD;
  unsigned* mask = nullptr;
  int* before = nullptr;
  if (a.mask) {
    mask = shared.take<unsigned>(words);
    before = shared.take<int>(words);
    int* scratch = shared.take<int>(WARP);
    count = 0;
    for (int start = 0; start < words; start += blockDim.x) {
      const int word = start + threadIdx.x;
      unsigned bits = word < words ? a.mask[word] : 0;
      const int last = a.hot_count - word * WORD;
      if (last > 0 && last < WORD) bits &= (1u << last) - 1;
      int total;
      const int prefix = block_prefix(__popc(bits), total, scratch);
      if (word < words) {
        mask[word] = bits;
        before[word] = count + prefix;
      }
      count += total;
    }
    __syncthreads();
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) atomicAdd(a.looked_at, unsigned(count));
  const int step = gridDim.x * warp_count();
  for (int index = blockIdx.x * warp_count() + warp_index(); index < count; index += step) {
    const int neuron = a.mask ? find_bit(mask, before, words, index) : index;
    float product = 0.0f;
    // Gate first: of a neuron that it leaves silent, the rest need not be read.
#pragma unroll 1
    for (int part = 0; part < 2; part++) {
      const Matrix& matrix = part == 0 ? a.gate : a.up;
      const float* bias = part == 0 ? a.gate_bias : a.up_bias;
      float dot = Format::dot(matrix, neuron, x, rounded);
      if (bias) dot += bias[neuron];
      if (part == 0 || a.neurons.kind == DOUBLY_GATED) dot = activate(a.neurons, dot);
      product = part == 0 ? dot : product * dot;
      const bool passes = part == 1 || passes_gate(a.neurons, neuron, product);
      if (part == 1 || !passes || a.neurons.kind == UNGATED) {
        product = passes ? coefficient(a.neurons, neuron, product) : 0.0f;
        break;
      }
    }
    if (lane_index() == 0) a.products[neuron] = product;
  }
}

#define GATE_UP(name, Format) \
  KERNEL(256, gate_up_##name, GateUp) { gate_up<Format>(a); }
FOR_ALL_FORMATS(GATE_UP)

struct Down {
  // [neurons, hidden]: a row is what a neuron adds.
  Matrix down;
  const float* products;
  int hot_count;
  // [chunks, hidden].
  float* partial;
  // One a tile of columns, all 0.
  unsigned* counters;
  // Added once; null for none.
  const float* bias;
  const float* offset;
  // What the cold neurons add, in memory of the processor beside, there when the flag holds the number of
  // the step; null for nothing. Whoever has waited for so many nanoseconds says so and goes on.
  const float* cold;
  const unsigned* flag;
  const unsigned* step;
  unsigned* gave_up;
  uint64_t patience;
  // What all is added to.
  float* hidden;
  // How many neurons were added, in all that was launched; null where nobody asks.
  unsigned* computed;
};

// Threads that read 16 bytes of the same row each, and rows that a block reads at once.
constexpr int ROW_THREADS = 16;
constexpr int DOWN_THREADS = 256;
constexpr int ROW_GROUPS = DOWN_THREADS / ROW_THREADS;
// Rows that are listed before they are added.
constexpr int LISTED = 2 * DOWN_THREADS;

template <class Format>
__device__ __forceinline__ void down(const Down& a) {
  constexpr int WIDTH = Format::WIDTH, COLUMNS = ROW_THREADS * WIDTH;
  SharedMemory shared;
  float* sums = shared.take<float>(ROW_GROUPS * COLUMNS);
  int* rows = shared.take<int>(LISTED);
  float* factors = shared.take<float>(LISTED);
  int* scratch = shared.take<int>(WARP);
  const int tile = blockIdx.x, chunk = blockIdx.y, chunks = gridDim.y;
  const int group = threadIdx.x / ROW_THREADS, member = threadIdx.x % ROW_THREADS;
  const int hidden = a.down.columns, column = tile * COLUMNS + member * WIDTH;

  float sum[WIDTH];
#pragma unroll
  for (int index = 0; index < WIDTH; index++) sum[index] = 0.0f;
  // Words of neurons go to chunks in turn: the hottest come first, and everyone gets some of them.
  const int words = (a.hot_count + WORD - 1) / WORD;
  int listed = 0, computed = 0;
  for (int start = chunk; start < words; start += chunks * warp_count()) {
    const int word = start + warp_index() * chunks, neuron = word * WORD + lane_index();
    const float product = word < words && neuron < a.hot_count ? a.products[neuron] : 0.0f;
    const bool counts = product != 0.0f;
    int total;
    const int place = listed + block_prefix(counts, total, scratch);
    if (counts) {
      rows[place] = neuron;
      factors[place] = product;
    }
    listed += total;
    computed += total;
    __syncthreads();
    if (listed <= LISTED - DOWN_THREADS && start + chunks * warp_count() < words) continue;
    if (column < hidden) {
      for (int index = group; index < listed; index += ROW_GROUPS) {
        float weights[WIDTH];
        Format::weights(a.down, rows[index], column, weights);
        const float factor = factors[index];
#pragma unroll
        for (int of = 0; of < WIDTH; of++) sum[of] = fmaf(factor, weights[of], sum[of]);
      }
    }
    listed = 0;
    __syncthreads();
  }
  if (a.computed && tile == 0 && threadIdx.x == 0) atomicAdd(a.computed, unsigned(computed));
#pragma unroll
  for (int index = 0; index < WIDTH; index++) sums[group * COLUMNS + member * WIDTH + index] = sum[index];
  __syncthreads();
  for (int index = threadIdx.x; index < COLUMNS; index += blockDim.x) {
    if (tile * COLUMNS + index >= hidden) continue;
    float all = 0.0f;
    for (int of = 0; of < ROW_GROUPS; of++) all += sums[of * COLUMNS + index];
    a.partial[size_t(chunk) * hidden + tile * COLUMNS + index] = all;
  }
  if (!is_last_block(a.counters + tile, chunks, reinterpret_cast<unsigned*>(scratch))) return;
  if (a.cold && threadIdx.x == 0 && a.flag) {
    const uint64_t since = nanoseconds();
    const unsigned step = *a.step;
    // Who waits in vain says so, and nobody after it waits; nor does anybody once the host has said so.
    for (unsigned polls = 1; acquire_from_host(a.flag) != step; polls++) {
      const bool is_over = nanoseconds() - since > a.patience;
      if (is_over) release_to_host(a.gave_up, step);
      if (is_over || (polls % 16 == 1 && acquire_from_host(a.gave_up) == step)) break;
    }
  }
  __syncthreads();
  for (int index = threadIdx.x; index < COLUMNS; index += blockDim.x) {
    const int place = tile * COLUMNS + index;
    if (place >= hidden) continue;
    float all = 0.0f;
    for (int of = 0; of < chunks; of++) all += load_from_blocks(a.partial + size_t(of) * hidden + place);
    if (a.bias) all += a.bias[place];
    if (a.offset) all += a.offset[place];
    if (a.cold) all += load_from_host(a.cold + place);
    a.hidden[place] += all;
  }
}

#define DOWN(name, Format) \
  KERNEL(DOWN_THREADS, down_##name, Down) { down<Format>(a); }
FOR_ALL_FORMATS(DOWN)
