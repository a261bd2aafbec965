//! Routing in mixtures of experts: the kernel `route` of `route.cu`.

use super::{
    Buffer, DeviceError, Gpu, GpuLinear, HostBuffer, PredictedMask, arguments,
    gpu::{THREADS, WARP, WORD},
    prediction::masks,
};

/// Mask words that one thread block writes.
const WORDS: usize = 64;

/// A layer's router on a device.
#[derive(Debug)]
pub struct Router {
    /// `[experts, hidden]`: projection to the logits of the experts.
    pub linear: GpuLinear,
    /// `[1, hidden]`: projection to the logit of the shared expert's weight; `None` if that weight is `shared_weight`.
    pub shared_gate: Option<GpuLinear>,
    /// Weight of the shared expert if `shared_gate` is `None`.
    pub shared_weight: f32,
    /// `[neurons]`: index of each neuron's block, that is, of its expert; the shared expert is the last block. Neurons whose index is
    /// `block_count` are not computed.
    pub blocks: Buffer<u16>,
    /// `[blocks, hidden]`: down bias of each block; `None` if blocks have no biases.
    pub biases: Option<Buffer<f32>>,
    /// Number of blocks.
    pub block_count: usize,
    /// Number of experts that a token selects.
    pub per_token: usize,
    /// Whether scores are sigmoids of the logits; otherwise they are exponentials.
    pub is_sigmoid: bool,
    /// Whether scores are divided by their sum over all experts; otherwise by their sum over the selected ones.
    pub sums_all: bool,
    /// Factor of the routing weights of the selected experts.
    pub scale: f32,
}

/// Buffers for the routing weights of some tokens.
#[derive(Debug)]
pub struct Routes {
    /// `[tokens, experts]`: logits of the router.
    pub logits: Buffer<f32>,
    /// `[tokens]`: logit of the shared expert's weight.
    pub shared_logits: Buffer<f32>,
    /// `[tokens, blocks]`: routing weights, 0 for experts that are not selected.
    pub weights: Buffer<f32>,
    /// `[tokens, hidden]`: sums of the blocks' down biases, times their routing weights; empty if blocks have no biases.
    pub bias_sums: Buffer<f32>,
    /// Copy of `weights` in mapped host memory.
    pub host: HostBuffer,
}

/// Routing weights of an FFN's neurons.
#[derive(Debug, Clone, Copy)]
pub struct Routing<'a> {
    /// `[tokens, blocks]`: routing weights.
    pub weights: &'a Buffer<f32>,
    /// Index of the block of each neuron in the layer.
    pub blocks: &'a Buffer<u16>,
    /// Number of blocks.
    pub block_count: usize,
    /// Index in the layer of the FFN's first neuron.
    pub first: usize,
}

impl Router {
    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        let shared = self.shared_gate.as_ref().map_or(0, GpuLinear::bytes);
        let biases = self.biases.as_ref().map_or(0, Buffer::bytes);
        self.linear.bytes() + shared + self.blocks.bytes() + biases
    }
}

impl Gpu {
    /// Selects each token's experts from the logits in `routes`; writes their weights to `routes` and the mask of their neurons to `mask`.
    ///
    /// If `is_predicted`, only neurons that are already in the mask remain. If `for_host`, the weights are also written to host memory.
    ///
    /// If the blocks have down biases, their weighted sums are also written to `routes`.
    ///
    /// If logits are equal, the expert with the lower index is preferred.
    ///
    /// # Errors
    ///
    /// The launch fails, or the experts do not fit into the shared memory of a thread block.
    ///
    /// # Panics
    ///
    /// A shape does not match.
    pub fn route(
        &self,
        router: &Router,
        routes: &mut Routes,
        for_host: bool,
        mask: &mut PredictedMask<'_>,
        is_predicted: bool,
    ) -> Result<(), DeviceError> {
        let (neurons, experts) = (router.blocks.len(), router.linear.matrix.rows());
        let tokens = routes.logits.len() / experts;
        let blocks = router.block_count;
        assert_eq!(routes.logits.len(), tokens * experts, "a logit per expert");
        assert!(routes.weights.len() == tokens * blocks && blocks >= experts);
        assert!(!for_host || routes.host.len() >= tokens * blocks);
        let has_gate = router.shared_gate.is_some();
        assert!(!has_gate || routes.shared_logits.len() == tokens);
        let hidden = match &router.biases {
            None => 0,
            Some(biases) => {
                let hidden = biases.len() / blocks;
                assert_eq!(biases.len(), blocks * hidden, "a bias per block");
                assert_eq!(routes.bias_sums.len(), tokens * hidden, "a sum per token");
                hidden
            }
        };
        let arguments = arguments::Route {
            logits: routes.logits.address(),
            shared_logits: if has_gate {
                routes.shared_logits.address()
            } else {
                0
            },
            blocks: router.blocks.address(),
            weights: routes.weights.address(),
            host_weights: if for_host { routes.host.address(0) } else { 0 },
            biases: router.biases.as_ref().map_or(0, Buffer::address),
            bias_sums: routes.bias_sums.address(),
            experts: experts as i32,
            block_count: blocks as i32,
            per_token: router.per_token as i32,
            is_sigmoid: router.is_sigmoid.into(),
            sums_all: router.sums_all.into(),
            neurons: neurons as i32,
            intersects: is_predicted.into(),
            hidden: hidden as i32,
            scale: router.scale,
            shared_weight: router.shared_weight,
            masks: masks(mask, neurons, tokens),
        };
        let grid = [
            neurons.div_ceil(WORD).div_ceil(WORDS) as u32,
            tokens as u32,
            1,
        ];
        let floats = |count: usize| (count * 4).next_multiple_of(16);
        let shared = floats(experts) + floats(blocks + 1) + floats(WARP);
        self.launch("route", grid, THREADS, shared, "experts", &arguments)
    }
}
