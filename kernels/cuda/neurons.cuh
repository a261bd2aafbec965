// Per-neuron part of an FFN: the activation function, the filter of neurons to skip, and the coefficient of the
// neuron's row of down.
#pragma once
#include "platform.cuh"

enum Activation { RELU, SQUARED_RELU, FAT_RELU, SILU, GELU_ERF, GELU_TANH, CLAMPED_SWISH };
enum FfnKind { UNGATED, GATED, DOUBLY_GATED, CLAMPED_GATED };
// The condition under which a neuron is computed, tested on act(gate) or, for CONTRIBUTION_THRESHOLD, on h.
enum Filter { ALL_NEURONS, NONZERO_GATE, GATE_THRESHOLD, SCALED_GATE_THRESHOLD, CONTRIBUTION_THRESHOLD };

struct Neurons {
  int kind;
  int activation;
  // Lowest input that FATReLU passes; limit of the clamped swish and, for CLAMPED_GATED, of up.
  float bound;
  int filter;
  float threshold;
  // [neurons] each; null where the filter does not use it.
  const float* gate_scale;
  const float* contribution_scale;
  const float* centre;
  // In a mixture of experts, [tokens, block_count]: routing weight of each block of neurons; [neurons]: block of each neuron. Else null.
  const float* weights;
  const uint16_t* blocks;
  int block_count;
};

// Not inlined: called once per neuron, and larger than its callers.
__device__ __noinline__ float activated(int activation, float bound, float x) {
  switch (activation) {
    case RELU:
      return fmaxf(x, 0.0f);
    case SQUARED_RELU:
      return fmaxf(x, 0.0f) * fmaxf(x, 0.0f);
    case FAT_RELU:
      return x >= bound ? x : 0.0f;
    case SILU:
      return x / (1.0f + expf(-x));
    case CLAMPED_SWISH: {
      const float clamped = x > bound ? bound : x;
      return clamped / (1.0f + expf(-1.702f * clamped));
    }
    case GELU_ERF:
      return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    default:
      return 0.5f * x * (1.0f + tanhf(0.7978846f * (x + 0.044715f * x * x * x)));
  }
}

__device__ __forceinline__ float activate(const Neurons& a, float x) {
  return activated(a.activation, a.bound, x);
}

// Factor of h from the product with the neuron's row of up.
__device__ __forceinline__ float up_factor(const Neurons& a, float product) {
  if (a.kind == DOUBLY_GATED) return activate(a, product);
  if (a.kind != CLAMPED_GATED) return product;
  // A NaN stays one.
  return (product > a.bound ? a.bound : product < -a.bound ? -a.bound : product) + 1.0f;
}

// Whether the filter keeps a neuron with this act(gate).
__device__ __forceinline__ bool passes_gate(const Neurons& a, int neuron, float activation) {
  switch (a.filter) {
    case NONZERO_GATE:
      return activation != 0.0f;
    case GATE_THRESHOLD:
      return fabsf(activation) >= a.threshold;
    case SCALED_GATE_THRESHOLD:
      return fabsf(activation) * a.gate_scale[neuron] >= a.threshold;
    default:
      return true;
  }
}

// Coefficient of the neuron's row of down: h times the token's routing weight, or 0 (after centring) where the contribution is below
// the threshold.
__device__ __forceinline__ float coefficient(const Neurons& a, int token, int neuron, float product) {
  if (a.weights) product *= a.weights[size_t(token) * a.block_count + a.blocks[neuron]];
  if (a.filter != CONTRIBUTION_THRESHOLD) return product;
  const float centred = a.centre ? product - a.centre[neuron] : product;
  return fabsf(centred) * a.contribution_scale[neuron] >= a.threshold ? centred : 0.0f;
}
