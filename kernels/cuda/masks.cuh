// Bit masks of the neurons that each token computes.
#pragma once
#include "block.cuh"

// Neurons per word of a bit mask.
constexpr int WORD = 32;

// Output of a predictor or a router: bit masks [tokens, ceil(neurons / 32)].
struct Masks {
  unsigned* device;
  // The same masks in mapped host memory; null if the host has no neurons of the layer.
  unsigned* host;
  // [tokens, hot_count]: h, cleared here so that neurons outside the mask contribute 0.
  float* activations;
  // Activations per token; 0 if they need not be cleared.
  int hot_count;
};

// Writes one mask word of a token; each lane holds the decision for one neuron.
__device__ __forceinline__ void write_mask(const Masks& masks, int token, int word, int neurons, bool predicted) {
  const int neuron = word * WORD + lane_index();
  const unsigned bits = __ballot_sync(ALL_LANES, neuron < neurons && predicted);
  if (neuron < masks.hot_count) masks.activations[size_t(token) * masks.hot_count + neuron] = 0.0f;
  if (lane_index() != 0) return;
  const int index = token * ((neurons + WORD - 1) / WORD) + word;
  masks.device[index] = bits;
  if (masks.host) masks.host[index] = bits;
}
