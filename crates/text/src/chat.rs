//! [`ChatTemplate`]: formats a conversation as the prompt format that the model was trained on.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::error::Error as _;
use std::time::{Duration, SystemTime};

use chrono::{DateTime, Utc, format::StrftimeItems};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, Value};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, context};
use powerinfer_guard::worker::{KeptWorker, Work};
use serde::{Deserialize, Serialize};

use crate::TextError;
use crate::python_filters;
use crate::python_syntax::for_minijinja;
use crate::settings::TemplateSource;

/// Instructions that a template may execute, against loops without end; a message takes some tens.
const FUEL: u64 = 10_000_000;

/// Bytes of a rendered conversation, at most.
const MAX_BYTES: usize = 64 << 20;

/// Time limit for a conversation, which takes less than a millisecond. A template without end stops sooner, for lack of
/// fuel, unless the machine is busy.
const TIME_LIMIT: Duration = Duration::from_secs(60);

/// Message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Role of the speaker: `system`, `user`, `assistant`, or another one that the template supports.
    pub role: String,
    /// Text of the message.
    pub content: String,
}

/// Whether the rendered text ends with the header of an assistant message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GenerationPrompt {
    /// End with the header of an assistant message, for generation.
    Add,
    /// End with the last message.
    Omit,
}

/// Chat template of a checkpoint: Jinja, with the extensions of transformers.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    origin: String,
    source: String,
    /// Texts of `bos_token`, `eos_token` and other special tokens, by key.
    variables: BTreeMap<String, String>,
}

impl ChatTemplate {
    pub(crate) fn new(template: TemplateSource, variables: BTreeMap<String, String>) -> Self {
        Self {
            origin: template.origin,
            source: template.source,
            variables,
        }
    }

    /// Returns the template's source.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders a conversation, including special tokens.
    ///
    /// # Errors
    ///
    /// The template calls `raise_exception` or fails, or the process that renders it fails.
    pub fn render(
        &self,
        messages: &[Message],
        prompt: GenerationPrompt,
    ) -> Result<String, TextError> {
        self.ask(Some(messages), prompt)
    }

    /// Checks that the template can be parsed.
    ///
    /// # Errors
    ///
    /// [`TextError::TemplateSyntax`], or the process that parses the template fails.
    pub(crate) fn check(&self) -> Result<(), TextError> {
        self.ask(None, GenerationPrompt::Omit).map(|_| ())
    }

    fn ask(
        &self,
        messages: Option<&[Message]>,
        prompt: GenerationPrompt,
    ) -> Result<String, TextError> {
        let request = Request {
            source: Cow::Borrowed(&self.source),
            variables: Cow::Borrowed(&self.variables),
            messages: messages.map(Cow::Borrowed),
            add_generation_prompt: prompt == GenerationPrompt::Add,
        };
        let origin = self.origin.clone();
        let bytes = serde_json::to_vec(&request).expect("texts are plain JSON");
        let answer = WORKER.ask(&bytes, TIME_LIMIT);
        let answer = answer.map_err(|reason| TextError::TemplateWorker {
            origin: origin.clone(),
            reason,
        })?;
        let rendered: Result<String, Failure> = serde_json::from_slice(&answer)
            .unwrap_or_else(|error| Err(Failure::Failed(error.to_string())));
        rendered.map_err(|failure| match failure {
            Failure::Syntax(reason) => TextError::TemplateSyntax { origin, reason },
            Failure::Refused(reason) => TextError::TemplateRefused { origin, reason },
            Failure::Failed(reason) => TextError::TemplateFailed { origin, reason },
        })
    }

    /// Returns the file (and name) of the template, for messages.
    pub(crate) fn origin(&self) -> &str {
        &self.origin
    }
}

/// Messages and variables to render.
#[derive(Serialize, Deserialize)]
struct Request<'a> {
    source: Cow<'a, str>,
    variables: Cow<'a, BTreeMap<String, String>>,
    /// `None` if the template is only parsed.
    messages: Option<Cow<'a, [Message]>>,
    add_generation_prompt: bool,
}

/// Why a template was not rendered, with the reason.
#[derive(Debug, Serialize, Deserialize)]
enum Failure {
    Syntax(String),
    Refused(String),
    Failed(String),
}

/// Rendering in a worker, for [`work_as_worker`](powerinfer_guard::worker::work_as_worker): fuel ends a loop, but a template
/// can double a text forty times.
pub const WORK: Work = ("render", |request| {
    let request = serde_json::from_slice::<Request<'_>>(request);
    let rendered = request
        .map_err(|error| Failure::Failed(error.to_string()))
        .and_then(|request| rendered(&request));
    serde_json::to_vec(&rendered).expect("texts are plain JSON")
});

/// The worker of this process.
static WORKER: KeptWorker = KeptWorker::new(WORK);

fn rendered(request: &Request<'_>) -> Result<String, Failure> {
    let source = for_minijinja(&request.source);
    let environment = environment();
    let template = environment
        .template_from_named_str("chat_template", &source)
        .map_err(|error| Failure::Syntax(error.to_string()))?;
    let Some(messages) = &request.messages else {
        return Ok(String::new());
    };
    let conversation = context! {
        messages => Serde(messages),
        // Transformers passes these too, because templates test whether they are none.
        tools => (),
        documents => (),
        add_generation_prompt => request.add_generation_prompt,
        ..Serde(&request.variables),
    };
    let rendered = template.render(conversation).map_err(|error| {
        let mut cause = error.source();
        while let Some(inner) = cause {
            if let Some(refusal) = inner.downcast_ref::<Refusal>() {
                return Failure::Refused(refusal.0.clone());
            }
            cause = inner.source();
        }
        Failure::Failed(error.to_string())
    })?;
    if rendered.len() <= MAX_BYTES {
        Ok(rendered)
    } else {
        Err(Failure::Failed(format!(
            "its text is longer than {} MiB",
            MAX_BYTES >> 20
        )))
    }
}

/// Message of a template's `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refusal(String);

/// Creates a Jinja environment like that of transformers' `apply_chat_template`.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()
        .expect("the default delimiters are valid");
    environment.set_syntax(syntax);
    environment.set_fuel(Some(FUEL));
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    python_filters::add(&mut environment);
    environment.add_function(
        "raise_exception",
        |reason: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, "raise_exception")
                .with_source(Refusal(reason)))
        },
    );
    environment.add_function("strftime_now", |pattern: String| {
        format_time(SystemTime::now().into(), &pattern)
    });
    environment
}

/// Formats a time in UTC with English names; unknown directives are kept as they are.
fn format_time(time: DateTime<Utc>, pattern: &str) -> String {
    time.format_with_items(StrftimeItems::new_lenient(pattern))
        .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_formatted_as_by_strftime() {
        let at = |seconds, pattern: &str| {
            let time = DateTime::from_timestamp(seconds, 0).unwrap();
            format_time(time, pattern)
        };
        assert_eq!(
            at(0, "%A %d %B %Y %H:%M:%S"),
            "Thursday 01 January 1970 00:00:00"
        );
        assert_eq!(at(951_782_400, "%a %d %b %Y %j"), "Tue 29 Feb 2000 060");
        assert_eq!(
            at(1_735_689_599, "%d %b %Y %I:%M %p %Z"),
            "31 Dec 2024 11:59 PM UTC"
        );
        assert_eq!(at(4_107_542_400, "%e.%m.%y %I%p"), " 1.03.00 12AM");
        assert_eq!(at(0, "100%% %Q é %"), "100% %Q é %");
    }
}
