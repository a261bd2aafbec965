// What an FFN makes of the products of a neuron: its activation, whether it is computed further, and what its
// row of down is multiplied by.
#pragma once
#include "platform.cuh"

enum Activation { RELU, SQUARED_RELU, FAT_RELU, SILU, GELU_ERF, GELU_TANH };
enum FfnKind { UNGATED, GATED, DOUBLY_GATED };
// What decides, once a neuron's activation or its product is known, whether it is computed further.
enum Rule { EVERY_NEURON, NOT_ZERO, BY_GATE, BY_WEIGHTED_GATE, BY_CONTRIBUTION };

struct Neurons {
  int kind;
  int activation;
  // From which a fat relu passes.
  float fat_threshold;
  int rule;
  float threshold;
  // One a neuron, of those that the rule needs.
  const float* gate_scale;
  const float* contribution_scale;
  const float* centre;
};

// One copy for all kernels: it is called once a neuron, and larger than what calls it.
__device__ __noinline__ float activated(int activation, float fat_threshold, float x) {
  switch (activation) {
    case RELU:
      return fmaxf(x, 0.0f);
    case SQUARED_RELU:
      return fmaxf(x, 0.0f) * fmaxf(x, 0.0f);
    case FAT_RELU:
      return x >= fat_threshold ? x : 0.0f;
    case SILU:
      return x / (1.0f + expf(-x));
    case GELU_ERF:
      return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    default:
      return 0.5f * x * (1.0f + tanhf(0.7978846f * (x + 0.044715f * x * x * x)));
  }
}

__device__ __forceinline__ float activate(const Neurons& a, float x) {
  return activated(a.activation, a.fat_threshold, x);
}

// Whether a neuron that has this activation is computed further.
__device__ __forceinline__ bool passes_gate(const Neurons& a, int neuron, float activation) {
  switch (a.rule) {
    case NOT_ZERO:
      return activation != 0.0f;
    case BY_GATE:
      return fabsf(activation) >= a.threshold;
    case BY_WEIGHTED_GATE:
      return fabsf(activation) * a.gate_scale[neuron] >= a.threshold;
    default:
      return true;
  }
}

// What a neuron's row of down is multiplied by, once its product is known.
__device__ __forceinline__ float coefficient(const Neurons& a, int neuron, float product) {
  if (a.rule != BY_CONTRIBUTION) return product;
  const float centred = a.centre ? product - a.centre[neuron] : product;
  return fabsf(centred) * a.contribution_scale[neuron] >= a.threshold ? centred : 0.0f;
}
