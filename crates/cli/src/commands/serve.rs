//! `powerinfer serve`: a bundle behind an OpenAI-compatible API.

use std::net::{AddrParseError, IpAddr, Ipv4Addr, SocketAddr};

use anyhow::{Context, Result, bail};
use powerinfer_artifact::{ByteSize, mapped_file::FileBytes, shell_quoted};
use powerinfer_bundle::Bundle;
use powerinfer_pool::environment;
use powerinfer_server::{MAX_PARALLEL, Server, ServerSettings};
use powerinfer_text::{SpecialText, Tokenizer};
use serde_json::json;

use crate::{
    engine::{EngineArguments, open_engine},
    hint::Advised,
    model_argument::{DEMO, prepared_name},
    output::{Output, print},
    progress::interrupted,
    special_token_arguments::SpecialTokenArguments,
};

/// Bundle, address and limits.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Requests without `temperature` use the model's default. If it has none, they use 0, which always picks the most likely token.\n\nExamples:\n  powerinfer serve demo\n  powerinfer serve ./my-model.powerinfer --port 11434 --parallel 16\n  curl localhost:8080/v1/completions -d '{\"prompt\": \"def add(a, b):\"}'"
)]
pub(crate) struct ServeArguments {
    /// Bundle, a folder with a bundle in it, or the name of a model prepared here
    #[arg(default_value = DEMO)]
    bundle: String,
    /// Address to listen on; `0.0.0.0` for all of this machine's
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", value_parser = host)]
    host: IpAddr,
    /// Port to listen on; 0 for any that is free
    #[arg(long, value_name = "PORT", default_value_t = 8080)]
    port: u16,
    /// Requests that are decoded together, at most [default: 4, or fewer if memory is short]
    #[arg(long, alias = "np", value_name = "N", value_parser = parallel)]
    parallel: Option<usize>,
    /// Texts that may wait; requests beyond them are refused with status 429
    #[arg(long, value_name = "N", default_value_t = 256)]
    queue: usize,
    /// Tokens of a prompt and its answer, at most [default: the plan's]
    #[arg(long, alias = "ctx-size", value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    context: Option<u32>,
    /// Name of the model in responses and requests [default: as in `powerinfer list`]
    #[arg(long, value_name = "NAME")]
    alias: Option<String>,
    /// Refuse requests without `Authorization: Bearer KEY`
    #[arg(
        long,
        value_name = "KEY",
        env = "POWERINFER_API_KEY",
        hide_env_values = true
    )]
    api_key: Option<String>,
    /// Let web pages of this origin use the API, such as `https://example.org`, or `*` for all
    #[arg(long, value_name = "ORIGIN")]
    allow_origin: Option<String>,
    #[command(flatten)]
    special_tokens: SpecialTokenArguments,
    #[command(flatten)]
    engine: EngineArguments,
    /// While only one request runs, guess repeated text and verify several tokens at once, if that is faster; the text
    /// stays the same
    #[arg(long, conflicts_with = "verify_every", help_heading = "Execution")]
    speculate: bool,
    /// Check the FFNs of every K-th decoded token against dense, and report their errors in `/metrics`; a layer that
    /// exceeds its certified error falls back to a lossless policy
    #[arg(long, value_name = "K", help_heading = "Execution", value_parser = clap::value_parser!(u32).range(1..))]
    verify_every: Option<u32>,
}

fn host(text: &str) -> Result<IpAddr, String> {
    if text == "localhost" {
        return Ok(Ipv4Addr::LOCALHOST.into());
    }
    let refuse = |_| "give an IP address without a port, such as 127.0.0.1; `--port` sets the port";
    text.parse()
        .map_err(|error: AddrParseError| refuse(error).to_owned())
}

fn parallel(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(count @ 1..=MAX_PARALLEL) => Ok(count),
        _ => Err(format!("it is not between 1 and {MAX_PARALLEL}")),
    }
}

pub(crate) fn run(arguments: &ServeArguments, output: Output) -> Result<()> {
    let allow_origin = match &arguments.allow_origin {
        None => None,
        Some(origin) => Some(
            origin
                .parse()
                .context("`--allow-origin` is not an origin")?,
        ),
    };
    let mut engine = open_engine(&arguments.bundle, &arguments.engine, output)?;
    if engine.uses_device() && arguments.verify_every.is_some() {
        bail!(Advised::new(
            "`--verify-every` works only on the CPU",
            "add `--device cpu`, or omit it"
        ));
    }
    if let Some(every) = arguments.verify_every {
        let verification = arguments.engine.verification(every, &engine);
        engine.verify(verification);
    }
    let limit = engine.context_limit();
    if let Some(context) = arguments.context
        && context as usize > limit
    {
        bail!(Advised::new(
            format!("`--context {context}` exceeds the plan's {limit}"),
            match engine.bundle().config().context_length {
                most if context as usize > most => {
                    format!("the model was made for at most {most} tokens: omit the option")
                }
                _ => format!(
                    "omit the option, or re-plan the bundle: `powerinfer place {} --context {context}`",
                    shell_quoted(&engine.bundle().folder().to_string_lossy())
                ),
            }
        ));
    }
    let settings = ServerSettings {
        alias: arguments
            .alias
            .clone()
            .or_else(|| prepared_name(engine.bundle().folder())),
        parallel: arguments.parallel,
        queue: arguments.queue,
        speculates: arguments.speculate,
        context: arguments.context.map(|context| context as usize),
        api_key: arguments.api_key.clone(),
        allow_origin,
        message_tokens: arguments.special_tokens.in_messages(),
    };
    let uses_device = engine.uses_device();
    let files = engine.bundle().large_files();
    let tokenizer = powerinfer_pipeline::tokenizer(&engine.bundle().files())?;
    let example = example_prompt(engine.bundle(), &tokenizer);
    let address = SocketAddr::new(arguments.host, arguments.port);
    if environment::value("OLLAMA_HOST").is_some_and(|set| *set != *address.to_string()) {
        output
            .say("`OLLAMA_HOST` sets the address for clients only; here use `--host` and `--port`");
    }
    let server = Server::bind(engine, tokenizer, settings, address)?;
    let address = server.address()?;
    let mut shown = address;
    if address.ip().is_unspecified() {
        shown.set_ip(Ipv4Addr::LOCALHOST.into());
    }
    if !address.ip().is_loopback() && arguments.api_key.is_none() {
        output
            .say("every machine that reaches this one can use the model; `--api-key` restricts it");
    }
    if uses_device && server.parallel() == 1 {
        output.say("the plan's budget of GPU memory has room for the KV cache of one request; a shorter `--context` makes room for more");
    }
    output.say(format!(
        "`{}`: up to {} requests at a time, each of up to {} tokens ({} of KV cache)",
        server.model_name(),
        server.parallel(),
        server.context(),
        ByteSize(server.cache_bytes()),
    ));
    output.say(format!(
        "to chat or complete text: open http://{shown} in a browser"
    ));
    let key = match arguments.api_key {
        Some(_) => " -H 'Authorization: Bearer KEY'",
        None => "",
    };
    let body = json!({ "prompt": example, "max_tokens": 32 }).to_string();
    output.say(format!(
        "for programs: curl http://{shown}/v1/completions{key} -d {}",
        shell_quoted(&body)
    ));
    output.say(format!("for clients of Ollama: OLLAMA_HOST={shown}"));
    print(format!("listening on http://{address}\n"))?;
    server.run(|unfinished| {
        if let Err(error) = files.iter().try_for_each(FileBytes::check_unchanged) {
            // Running requests are not finished: their tokens would come from other weights.
            crate::fail(&error.into());
            std::process::exit(1);
        }
        let stops = interrupted();
        if stops && unfinished > 0 {
            output.say("finishing the running requests; press Ctrl-C again to stop at once");
        }
        stops
    })?;
    Ok(())
}

/// The beginning of a text like those that the model was profiled on, from the bundle's certificate if there is one.
fn example_prompt(bundle: &Bundle, tokenizer: &Tokenizer) -> String {
    let texts = bundle.certificate_texts().unwrap_or_default();
    let first = texts
        .first()
        .map_or(&[][..], |text| &text[..text.len().min(24)]);
    let text = tokenizer
        .decode(first, SpecialText::Skip)
        .unwrap_or_default();
    let line = text.lines().map(str::trim).find(|line| line.len() > 2);
    line.unwrap_or("Once").to_owned()
}
