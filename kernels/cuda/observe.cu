// Activation counts of a layer's neurons, accumulated on the device so that only the counts are copied to the host
// (the neuron information table of PowerInfer, §6.1). Grid: one thread per neuron, blocks of 256.
#include "block.cuh"

// Windows of preceding tokens over which reuse of active neurons is counted.
constexpr int WINDOWS = 3;

struct Observe {
  // [tokens, neurons]: h = act(gate) * up.
  const float* activations;
  int tokens;
  int neurons;
  // Tokens of the same text that were counted before these.
  int preceding;
  // Window lengths in tokens, ascending, at most 32.
  int windows[WINDOWS];
  // [neurons]: tokens on which the neuron was active.
  unsigned* active_tokens;
  // [neurons]: sum of |h|.
  double* magnitude;
  // [neurons]: activity on the last 32 tokens, one bit per token, the latest in bit 0.
  unsigned* history;
  // [windows, 2]: activations of neurons that were also active within the window, and all activations.
  uint64_t* reuse;
  // Set to 1 when a value is NaN or infinite.
  unsigned* not_finite;
};

KERNEL(256, observe, Observe) {
  const int neuron = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned count = 0, history = 0;
  int reused[WINDOWS] = {0, 0, 0}, active_count[WINDOWS] = {0, 0, 0};
  if (neuron < a.neurons) {
    if (a.preceding > 0) history = a.history[neuron];
    double magnitude = a.magnitude[neuron];
    bool not_finite = false;
    const float* product = a.activations + neuron;
#pragma unroll 4
    for (int token = 0; token < a.tokens; token++, product += a.neurons) {
      const float magnitude_here = fabsf(*product);
      const bool active = magnitude_here != 0.0f;
      magnitude += double(magnitude_here);
      not_finite |= !(magnitude_here < __uint_as_float(0x7f800000u));
      count += active;
#pragma unroll
      for (int window = 0; window < WINDOWS; window++) {
        const int length = a.windows[window];
        // Tokens without a full window before them would bias reuse downwards.
        const bool counts = active && a.preceding + token >= length;
        active_count[window] += counts;
        reused[window] += counts && (history << (32 - length)) != 0;
      }
      history = history << 1 | unsigned(active);
    }
    a.active_tokens[neuron] += count;
    a.magnitude[neuron] = magnitude;
    a.history[neuron] = history;
    if (not_finite) atomicExch(a.not_finite, 1u);
  }
#pragma unroll
  for (int window = 0; window < WINDOWS; window++) {
    const int reused_sum = warp_sum(reused[window]), active_sum = warp_sum(active_count[window]);
    if (lane_index() == 0) {
      atomicAdd(a.reuse + 2 * window, uint64_t(reused_sum));
      atomicAdd(a.reuse + 2 * window + 1, uint64_t(active_sum));
    }
  }
}
