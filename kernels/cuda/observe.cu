// Who fires: counted on the card while text goes through a layer, so that only counts leave it (the paper's
// neuron information table, PowerInfer §6.1).
#include "block.cuh"

// Spans of tokens before, in which a neuron may have fired already.
constexpr int WINDOWS = 3;

struct Observe {
  // [tokens, neurons]: what rows of down are multiplied by. A thread has a neuron.
  const float* products;
  int tokens;
  int neurons;
  // Tokens of the same text before these.
  int before;
  // The longest at the end, 32 tokens at most.
  int windows[WINDOWS];
  // [neurons]: on how many tokens of texts that are counted together each fired.
  unsigned* active;
  // [neurons]: sums of absolute products.
  double* magnitude;
  // [neurons]: a bit for each token before, the last one lowest: whether the neuron fired there.
  unsigned* recent;
  // A window each: how often neurons fired that had fired within it, and how often any did.
  uint64_t* reuse;
  // Not 0 once a product was not finite.
  unsigned* strange;
};

KERNEL(256, observe, Observe) {
  const int neuron = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned count = 0, recent = 0;
  int reused[WINDOWS] = {0, 0, 0}, fired[WINDOWS] = {0, 0, 0};
  if (neuron < a.neurons) {
    if (a.before > 0) recent = a.recent[neuron];
    double magnitude = a.magnitude[neuron];
    bool strange = false;
    const float* product = a.products + neuron;
#pragma unroll 4
    for (int token = 0; token < a.tokens; token++, product += a.neurons) {
      const float magnitude_here = fabsf(*product);
      const bool fires = magnitude_here != 0.0f;
      magnitude += double(magnitude_here);
      strange |= !(magnitude_here < __uint_as_float(0x7f800000u));
      count += fires;
#pragma unroll
      for (int window = 0; window < WINDOWS; window++) {
        const int length = a.windows[window];
        // Where the text is shorter, a window would look less used than it is.
        const bool counts = fires && a.before + token >= length;
        fired[window] += counts;
        reused[window] += counts && (recent << (32 - length)) != 0;
      }
      recent = recent << 1 | unsigned(fires);
    }
    a.active[neuron] += count;
    a.magnitude[neuron] = magnitude;
    a.recent[neuron] = recent;
    if (strange) *a.strange = 1;
  }
#pragma unroll
  for (int window = 0; window < WINDOWS; window++) {
    const int among = warp_sum(reused[window]), all = warp_sum(fired[window]);
    if (lane_index() == 0) {
      atomicAdd(a.reuse + 2 * window, uint64_t(among));
      atomicAdd(a.reuse + 2 * window + 1, uint64_t(all));
    }
  }
}
