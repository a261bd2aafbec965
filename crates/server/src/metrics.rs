//! Counters of the server, in Prometheus' text format.

use powerinfer_runtime::{Observers, Statistics};
use prometheus::{
    Gauge, Histogram, HistogramOpts, IntCounter, IntGauge, Opts, Registry, TextEncoder,
    core::Collector,
};

/// Counters, gauges and histograms of the server.
pub(crate) struct Metrics {
    registry: Registry,
    /// Requests that were answered or begun to be.
    pub(crate) requests: IntCounter,
    /// Requests refused because the queue was full.
    pub(crate) refused: IntCounter,
    /// Texts that were generated to their end.
    pub(crate) finished: IntCounter,
    /// Texts whose client went away.
    pub(crate) cancelled: IntCounter,
    running: IntGauge,
    waiting: IntGauge,
    /// Tokens of prompts that were run.
    pub(crate) prompt_tokens: IntCounter,
    /// Tokens of prompts whose keys and values were reused.
    pub(crate) cached_tokens: IntCounter,
    /// Seconds from a request's arrival to its first token.
    pub(crate) first_token: Histogram,
    /// Seconds from a token of a text to the next.
    pub(crate) between_tokens: Histogram,
    /// Sequences of a decoding pass.
    pub(crate) batch: Histogram,
    /// Tokens that texts have proposed.
    pub(crate) proposed_tokens: IntCounter,
    /// Proposed tokens that were sampled.
    pub(crate) accepted_tokens: IntCounter,
    tokens: IntCounter,
    neurons: IntCounter,
    neurons_computed: IntCounter,
    bytes_read: IntCounter,
    verified_tokens: IntGauge,
    ffn_error: Gauge,
    drifted_layers: IntGauge,
    graph_retries: IntGauge,
}

/// Upper bounds of the buckets of times, in seconds.
const SECONDS: [f64; 14] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0,
];

impl Metrics {
    /// All at zero.
    #[expect(clippy::expect_used, reason = "names are constants")]
    pub(crate) fn new() -> Self {
        let registry = Registry::new();
        let counter = |name: &str, help: &str| {
            let counter = IntCounter::with_opts(Opts::new(format!("powerinfer_{name}"), help));
            register(&registry, counter.expect("a valid name"))
        };
        let gauge = |name: &str, help: &str| {
            let gauge = IntGauge::with_opts(Opts::new(format!("powerinfer_{name}"), help));
            register(&registry, gauge.expect("a valid name"))
        };
        let histogram = |name: &str, help: &str, buckets: &[f64]| {
            let options = HistogramOpts::new(format!("powerinfer_{name}"), help);
            let histogram = Histogram::with_opts(options.buckets(buckets.to_vec()));
            register(&registry, histogram.expect("a valid name"))
        };
        let ffn_error = Gauge::with_opts(Opts::new(
            "powerinfer_verified_ffn_error",
            "Mean relative error of the FFN outputs of verified tokens",
        ));
        Self {
            requests: counter("requests_total", "Requests accepted"),
            refused: counter(
                "requests_refused_total",
                "Requests refused because the queue was full",
            ),
            finished: counter("texts_finished_total", "Texts generated to their end"),
            cancelled: counter("texts_cancelled_total", "Texts whose client went away"),
            running: gauge("texts_running", "Texts that are being generated"),
            waiting: gauge("texts_waiting", "Texts that wait"),
            prompt_tokens: counter("prompt_tokens_total", "Tokens of prompts that were run"),
            cached_tokens: counter(
                "cached_prompt_tokens_total",
                "Tokens of prompts whose keys and values were reused",
            ),
            first_token: histogram(
                "time_to_first_token_seconds",
                "Time from a request's arrival to its first token",
                &SECONDS,
            ),
            between_tokens: histogram(
                "time_between_tokens_seconds",
                "Time from a token of a text to the next",
                &SECONDS,
            ),
            batch: histogram(
                "decode_batch_size",
                "Sequences of a decoding pass",
                &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0],
            ),
            proposed_tokens: counter("proposed_tokens_total", "Tokens proposed by speculation"),
            accepted_tokens: counter(
                "accepted_tokens_total",
                "Proposed tokens that were accepted",
            ),
            tokens: counter(
                "tokens_total",
                "Tokens run, of prompts and of generated texts",
            ),
            neurons: counter(
                "ffn_neurons_total",
                "FFN neurons of all layers, for each token",
            ),
            neurons_computed: counter(
                "ffn_neurons_computed_total",
                "FFN neurons that were computed",
            ),
            bytes_read: counter(
                "bytes_read_total",
                "Bytes of weights and KV cache that were read",
            ),
            verified_tokens: gauge(
                "verified_tokens",
                "Tokens whose FFNs were compared with dense",
            ),
            ffn_error: register(&registry, ffn_error.expect("a valid name")),
            drifted_layers: gauge(
                "drifted_layers",
                "Layers that exceeded their certified error and run a lossless policy",
            ),
            graph_retries: gauge(
                "graph_retries",
                "Passes that the GPU ran again without graphs",
            ),
            registry,
        }
    }

    /// Adds what was computed with `running` texts.
    pub(crate) fn count(&self, counts: &Statistics, running: usize, observers: &Observers) {
        self.graph_retries.set(observers.graph_retries() as i64);
        self.running.set(running as i64);
        self.tokens.inc_by(counts.tokens);
        self.neurons.inc_by(counts.neurons);
        self.neurons_computed.inc_by(counts.neurons_computed);
        self.bytes_read.inc_by(counts.all_bytes_read());
        if let Some(verification) = observers.verification()
            && verification.tokens() as i64 != self.verified_tokens.get()
        {
            self.verified_tokens.set(verification.tokens() as i64);
            self.ffn_error.set(verification.mean());
            self.drifted_layers.set(verification.alarms().len() as i64);
        }
    }

    /// All of them, while `waiting` texts wait.
    pub(crate) fn encode(&self, waiting: usize) -> String {
        self.waiting.set(waiting as i64);
        let families = self.registry.gather();
        TextEncoder::new()
            .encode_to_string(&families)
            .unwrap_or_default()
    }

    /// Texts that are being generated.
    pub(crate) fn running(&self) -> i64 {
        self.running.get()
    }
}

#[expect(clippy::expect_used, reason = "names are constants, each used once")]
fn register<C: Collector + Clone + 'static>(registry: &Registry, metric: C) -> C {
    let registered = registry.register(Box::new(metric.clone()));
    registered.expect("a name of its own");
    metric
}
