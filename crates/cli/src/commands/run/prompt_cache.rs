//! `run --prompt-cache FILE`: the KV state of a prompt, reused by prompts with a common prefix.

use std::path::{Path, PathBuf};

use crate::hint::Advised;
use anyhow::{Result, bail};
use powerinfer_artifact::prompt_cache::PromptCacheFile;
use powerinfer_runtime::{Engine, Session};

/// The file, and what is written to it.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Prompt cache")]
pub(crate) struct PromptCacheArguments {
    /// Cache the prompt's KV state in this file, and reuse the longest common prefix
    #[arg(long, value_name = "FILE", conflicts_with = "interactive", value_parser = crate::values::new_file)]
    pub(super) prompt_cache: Option<PathBuf>,
    /// Store the generated tokens too
    #[arg(long, requires = "prompt_cache")]
    prompt_cache_all: bool,
    /// Do not change the file
    #[arg(long, requires = "prompt_cache", conflicts_with = "prompt_cache_all")]
    prompt_cache_ro: bool,
}

/// The prompt cache of one generation.
pub(super) struct PromptCache<'a> {
    arguments: &'a PromptCacheArguments,
    /// Tokens that the file has.
    known: Vec<u32>,
    /// Tokens of the prompt that need not be computed.
    pub(super) taken: usize,
}

impl<'a> PromptCache<'a> {
    /// Makes `session` reuse the longest common prefix with `prompt`, from the file or from what it has.
    pub(super) fn open(
        arguments: &'a PromptCacheArguments,
        engine: &Engine,
        session: &mut Session,
        prompt: &[u32],
    ) -> Result<Self> {
        let mut cache = Self {
            arguments,
            known: Vec::new(),
            taken: 0,
        };
        match &arguments.prompt_cache {
            Some(path) if path.exists() => {
                let file = PromptCacheFile::open(path)?;
                cache.taken = engine.load_prompt_cache(session, path, &file, prompt)?;
                cache.known = file.tokens().to_vec();
            }
            Some(path) if arguments.prompt_cache_ro => bail!(Advised::new(
                format!("there is no prompt cache `{}`", path.display()),
                "leave out `--prompt-cache-ro` once to make it"
            )),
            _ => cache.taken = session.keep_prefix(prompt),
        }
        Ok(cache)
    }

    /// Keeps the prompt, which `session` has now.
    pub(super) fn keep_prompt(&self, engine: &Engine, session: &Session) -> Result<()> {
        if self.arguments.prompt_cache_all {
            Ok(())
        } else {
            self.keep(engine, session)
        }
    }

    /// Keeps prompt and answer, if `--prompt-cache-all` is set.
    pub(super) fn keep_all(&self, engine: &Engine, session: &Session) -> Result<()> {
        if self.arguments.prompt_cache_all {
            self.keep(engine, session)
        } else {
            Ok(())
        }
    }

    /// Writes what `session` has, unless the file has it already.
    fn keep(&self, engine: &Engine, session: &Session) -> Result<()> {
        let is_known = self.known.starts_with(session.tokens());
        match self.path() {
            Some(path) if !is_known => Ok(engine.save_prompt_cache(session, path)?),
            _ => Ok(()),
        }
    }

    /// The file, if it may be written.
    fn path(&self) -> Option<&Path> {
        let path = self.arguments.prompt_cache.as_deref();
        path.filter(|_| !self.arguments.prompt_cache_ro)
    }
}
