//! An OpenAI-compatible server over one model, with continuous batching.
//!
//! ```text
//! api ─▶ TextRequest ─▶ Texts ─ jobs ─▶ Scheduler (a thread of its own) ─▶ Engine
//!  ▲                      │ ◀─ tokens ──┘
//!  └── text, scores ◀─ Choice
//! ```
//!
//! Start with `scheduler`, which decides what runs next; `generation.rs` turns tokens into text, and `api` has a file for
//! each group of routes.
//!
//! Internal: programs use the crate `powerinfer`; this interface changes without notice.

mod api;
mod capacity;
mod choice;
mod connection;
mod constraint;
mod generation;
mod metrics;
mod scheduler;
mod schema;
mod stops;
mod workers;

use std::{
    io,
    net::{SocketAddr, TcpListener},
    sync::Arc,
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use axum::http::HeaderValue;
use powerinfer_artifact::{ByteSize, Hint};
use powerinfer_runtime::{Engine, RuntimeError, SamplingSettings};
use powerinfer_text::{MessageTokens, Tokenizer};
use serde_json::{Value, json};
use tokio::sync::Semaphore;

pub use crate::capacity::{DEFAULT_PARALLEL, MAX_PARALLEL};
pub use crate::connection::SHUTDOWN_LIMIT;
use crate::{
    api::error::ApiError,
    capacity::Capacity,
    connection::Places,
    constraint::{Constraints, Grammar},
    generation::TextFormat,
    metrics::Metrics,
    scheduler::{Scheduler, SchedulerHandle, SchedulerSettings},
    workers::Workers,
};

/// Time between two questions whether to stop.
const STOP_INTERVAL: Duration = Duration::from_millis(50);

/// Time limit for the pass that is running when the server stops.
const ENGINE_LIMIT: Duration = Duration::from_secs(10);

/// Threads that read requests: at most this many large requests need memory at the same time.
const WORKERS: usize = 4;

/// Threads that compile schemas.
const COMPILERS: usize = 2;

/// How to serve a model.
#[derive(Debug, Clone)]
pub struct ServerSettings {
    /// The model's name in responses and requests; `None` for that of the bundle.
    pub alias: Option<String>,
    /// Requests that run at the same time, 1 to [`MAX_PARALLEL`]; none for [`DEFAULT_PARALLEL`], or fewer if memory
    /// has no room for their KV caches.
    pub parallel: Option<usize>,
    /// Texts that may wait; a request beyond them is refused.
    pub queue: usize,
    /// Tokens of a prompt and its text, at most; none for the plan's context.
    pub context: Option<usize>,
    /// Whether the text of a request that runs alone proposes tokens that are verified together, on the CPU.
    pub speculates: bool,
    /// Key that requests must carry.
    pub api_key: Option<String>,
    /// Origin whose pages may call the API from a browser, or `*`.
    pub allow_origin: Option<HeaderValue>,
    /// How special tokens in messages are treated.
    pub message_tokens: MessageTokens,
}

/// Why a server could not start or go on.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The address cannot be used.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The cause.
        source: io::Error,
    },
    /// A thread or the network of the system failed.
    #[error("the system refused a thread or a socket")]
    System(#[from] io::Error),
    /// The limit of open files leaves no room for connections.
    #[error(
        "a process may open {limit} files here, and the server needs {needed}; raise it with `ulimit -n`"
    )]
    Files {
        /// Files that the process may open.
        limit: usize,
        /// Files that a server needs.
        needed: usize,
    },
    /// The KV caches of the requests do not fit memory.
    #[error(
        "the KV caches of {parallel} requests need up to {needed}, and {free} of memory are free beside the weights, \
         enough for {room}"
    )]
    Memory {
        /// Requests that run at the same time.
        parallel: usize,
        /// Bytes of their KV caches.
        needed: ByteSize,
        /// Bytes of memory that the weights leave free.
        free: ByteSize,
        /// Requests that fit.
        room: usize,
    },
    /// The thread that runs the model has panicked.
    #[error("the thread that runs the model has failed; this is a bug, please report it")]
    Engine,
    /// The model's sampling settings cannot be read or are invalid.
    #[error(transparent)]
    Sampling(#[from] powerinfer_model::ModelError),
    /// There is no memory for the KV cache.
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
}

impl ServerError {
    /// The remedy, if it takes a command or an option.
    pub fn hint(&self) -> Option<Hint> {
        match self {
            Self::Listen { .. } => Some(Hint::OtherPort),
            Self::Memory { .. } => Some(Hint::FewerRequests),
            Self::Sampling(error) => error.hint(),
            Self::Runtime(error) => error.hint(),
            Self::System(_) | Self::Files { .. } | Self::Engine => None,
        }
    }
}

/// A model behind an address.
pub struct Server {
    listener: TcpListener,
    places: Places,
    service: Arc<Service>,
    scheduler: Scheduler,
}

/// State that the handlers of requests share.
pub(crate) struct Service {
    pub(crate) settings: ServerSettings,
    pub(crate) engine: SchedulerHandle,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) constraints: Constraints,
    /// Threads that read requests, encode texts and write long responses.
    pub(crate) workers: Workers,
    /// Threads that compile schemas, which takes longer.
    compilers: Workers,
    /// Bytes of bodies that may arrive.
    pub(crate) bodies: Arc<Semaphore>,
    /// The model's own settings.
    pub(crate) sampling: SamplingSettings,
    pub(crate) name: String,
    /// Bytes of weights and predictors.
    pub(crate) bytes: u64,
    /// Digest of the bundle, 64 hexadecimal digits.
    pub(crate) digest: String,
    /// Bytes of the model in GPU memory.
    pub(crate) device_bytes: u64,
    /// Number of parameters, such as `6.7B`.
    pub(crate) parameters: String,
    /// The model's layers, as `/v1/models` describes them.
    pub(crate) about: Value,
    pub(crate) context: usize,
    /// Tokens of the longest context that the plan has room for.
    plan_context: usize,
    /// Tokens of the longest context that the model supports.
    model_context: usize,
    /// When the plan was written.
    pub(crate) planned: SystemTime,
    /// Requests that run at the same time.
    pub(crate) parallel: usize,
    /// Bytes of the KV cache of one of them, at most.
    cache_bytes: u64,
    /// Tokens that the model knows.
    pub(crate) vocabulary: usize,
    /// Whether requests are decoded together.
    pub(crate) batches: bool,
    /// Whether the server listens on this machine's own address alone.
    pub(crate) is_loopback: bool,
    /// Whether clients learn how much of their prompts was cached: not those of a server that is open to strangers.
    pub(crate) reports_cache: bool,
    /// Seconds since 1970.
    pub(crate) started: u64,
}

impl Server {
    /// A server of `model` that listens on `address`.
    ///
    /// # Errors
    ///
    /// Fails if the address cannot be used, memory has no room for the requests, the system refuses threads or files, or the
    /// model's sampling settings are invalid.
    pub fn bind(
        mut engine: Engine,
        tokenizer: Tokenizer,
        settings: ServerSettings,
        address: SocketAddr,
    ) -> Result<Self, ServerError> {
        let listen = |source| ServerError::Listen { address, source };
        let places = Places::of_system()?;
        let listener = connection::listen(address).map_err(listen)?;
        let batches = engine.decode_batch_size() > 1;
        let sampling = SamplingSettings::of_model(&engine.bundle().files())?;
        let plan_context = engine.context_limit();
        let context = settings.context.unwrap_or(plan_context).min(plan_context);
        let model_context = engine.bundle().config().context_length;
        let plan = std::fs::metadata(engine.bundle().folder().join("plan.json"));
        let planned = plan.and_then(|plan| plan.modified()).unwrap_or(UNIX_EPOCH);
        let capacity = Capacity::new(&engine, context, settings.parallel)?;
        let cache_bytes = engine.session_bytes(context).iter().sum();
        let first = engine.new_session(context)?;
        let name = settings.alias.clone();
        let tokenizer = Arc::new(tokenizer);
        let metrics = Arc::new(Metrics::new());
        let started = SystemTime::now().duration_since(UNIX_EPOCH);
        let vocabulary = engine.bundle().config().vocabulary_size;
        let about = about(&engine);
        let (bytes, digest) = (
            engine.bundle().bytes_on_disk(),
            engine.bundle().digest().map(|digest| digest.to_string()),
        );
        let digest = digest.unwrap_or_default().replace("b3:", "");
        let on_device = engine.uses_device();
        let device_bytes = u64::from(on_device) * engine.bundle().plan().totals.gpu_bytes;
        let parameters = rounded(engine.bundle().config().parameters());
        let name = name.unwrap_or_else(|| engine.bundle().header().model.name.clone());
        let stop_tokens = [tokenizer.stop_ids(), &engine.bundle().config().end_of_text]
            .concat()
            .into();
        let scheduler_settings = SchedulerSettings {
            capacity,
            queue: settings.queue,
            speculates: settings.speculates
                && batches
                && engine.observers().verification().is_none(),
        };
        let sampled = tokenizer.vocabulary_size();
        let (scheduler, handle) = Scheduler::new(
            engine,
            first,
            scheduler_settings,
            stop_tokens,
            sampled,
            Arc::clone(&metrics),
        );
        let service = Service {
            engine: handle,
            metrics,
            constraints: Constraints::new(Arc::clone(&tokenizer)),
            tokenizer,
            sampling,
            name,
            bytes,
            digest,
            device_bytes,
            parameters,
            about,
            context,
            plan_context,
            model_context,
            planned,
            parallel: capacity.parallel,
            cache_bytes,
            vocabulary,
            batches,
            workers: Workers::start("request", WORKERS)?,
            compilers: Workers::start("schema", COMPILERS)?,
            bodies: Arc::new(Semaphore::new(api::BODY_BUDGET)),
            is_loopback: address.ip().is_loopback(),
            reports_cache: address.ip().is_loopback() || settings.api_key.is_some(),
            started: started.map_or(0, |since| since.as_secs()),
            settings,
        };
        Ok(Self {
            listener,
            places,
            service: Arc::new(service),
            scheduler,
        })
    }

    /// The address that the server listens on.
    ///
    /// # Errors
    ///
    /// The system does not say.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Requests that run at the same time.
    pub fn parallel(&self) -> usize {
        self.service.parallel
    }

    /// Bytes of the KV cache of one request, at most.
    pub fn cache_bytes(&self) -> u64 {
        self.service.cache_bytes
    }

    /// Tokens of a prompt and its text, at most.
    pub fn context(&self) -> usize {
        self.service.context
    }

    /// The model's name in responses.
    pub fn model_name(&self) -> &str {
        &self.service.name
    }

    /// Answers requests until `should_stop`, which is asked twenty times a second with the number of requests that run or wait,
    /// and finishes those that have begun within [`SHUTDOWN_LIMIT`].
    ///
    /// # Errors
    ///
    /// Fails if the system refuses threads or sockets, or the thread of the model has panicked.
    pub fn run(self, mut should_stop: impl FnMut(usize) -> bool) -> Result<(), ServerError> {
        let scheduler = self.scheduler;
        let engine = thread::Builder::new()
            .name("engine".to_owned())
            .spawn(move || scheduler.run())?;
        // One thread answers all connections: it starts no others that the system might refuse, and none of its tasks
        // takes long, since workers do what depends on the size of a request.
        let network = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let service = Arc::clone(&self.service);
        let unfinished =
            || usize::try_from(service.metrics.running()).unwrap_or(0) + service.engine.queued();
        let stop = async {
            while !should_stop(unfinished()) && !engine.is_finished() {
                tokio::time::sleep(STOP_INTERVAL).await;
            }
        };
        let router = api::router(self.service);
        network.block_on(connection::serve(self.listener, self.places, router, stop))?;
        drop((network, service));
        // All senders of jobs are gone, except that of a worker in the middle of a request. Neither it nor a long pass keeps the
        // process alive.
        let end = Instant::now() + ENGINE_LIMIT;
        while !engine.is_finished() {
            if Instant::now() > end {
                return Ok(());
            }
            thread::sleep(STOP_INTERVAL);
        }
        engine.join().map_err(|_| ServerError::Engine)
    }
}

impl Service {
    /// Compiles the format that texts must have, once for all texts of a request.
    pub(crate) async fn compile(
        self: &Arc<Self>,
        format: TextFormat,
    ) -> Result<Option<Grammar>, ApiError> {
        if matches!(format, TextFormat::Text) {
            return Ok(None);
        }
        let service = Arc::clone(self);
        let compile = move || match format {
            TextFormat::Text => Ok(None),
            TextFormat::JsonObject => service.constraints.object().map(Some),
            TextFormat::JsonSchema(schema) => service.constraints.schema(schema).map(Some),
        };
        let compiled = self.compilers.run(compile).await?;
        compiled.map_err(|error| ApiError::invalid_value("response_format", error))
    }

    /// Advice on how to serve a longer context, if the model supports one.
    pub(crate) fn longer_context(&self) -> Option<&'static str> {
        if self.context < self.plan_context {
            Some("serve with a longer `--context`")
        } else if self.context < self.model_context {
            Some("re-plan the model with a longer context: `powerinfer place MODEL --context N`")
        } else {
            None
        }
    }

    /// Refuses a prompt that is empty, does not fit the context, or has tokens outside the vocabulary.
    pub(crate) fn check_prompt(&self, prompt: &[u32]) -> Result<(), ApiError> {
        if prompt.is_empty() {
            return Err(ApiError::invalid_value("prompt", "it has no tokens"));
        }
        if prompt.len() > self.context {
            let length = format!(
                "{} tokens long, and the context holds {}",
                prompt.len(),
                self.context
            );
            return Err(ApiError::too_long(&length, self.longer_context()));
        }
        match prompt.iter().find(|id| **id as usize >= self.vocabulary) {
            Some(id) => Err(ApiError::invalid_value(
                "prompt",
                format!(
                    "token {id} is outside the vocabulary of {}",
                    self.vocabulary
                ),
            )),
            None => Ok(()),
        }
    }
}

/// A number of parameters as models are named: `3.5M`, `6.7B`.
fn rounded(parameters: u64) -> String {
    let parameters = parameters as f64;
    if parameters < 1e9 {
        format!("{:.1}M", parameters / 1e6)
    } else {
        format!("{:.1}B", parameters / 1e9)
    }
}

/// The model's layers: neurons, how many of them are hot, the policy, and the device of the hot ones.
fn about(engine: &Engine) -> Value {
    let plan = engine.bundle().plan();
    let on_gpu = engine.uses_device();
    let layers = plan.layers.iter().zip(engine.policies());
    let layers: Vec<Value> = layers
        .map(|(layer, policy)| {
            json!({ "hot_neurons": layer.hot_count, "policy": policy.to_string(), "hot_on_gpu": on_gpu && layer.hot_count > 0 })
        })
        .collect();
    json!({
        "context_length": engine.context_limit(),
        "neurons_per_layer": engine.bundle().config().ffn_size,
        "format": engine.bundle().quant().to_string(),
        "layers": layers,
    })
}
