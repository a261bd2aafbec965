//! Sampling that permits only texts of a JSON schema.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use llguidance::{
    JsonCompileOptions, Matcher, ParserFactory,
    api::TopLevelGrammar,
    toktrie::{ApproximateTokEnv, TokRxInfo, TokTrie},
};
use powerinfer_runtime::Sampler;
use powerinfer_text::Tokenizer;
use serde_json::{Value, json};

use crate::schema::close_objects;

/// Makes constraints for the tokens of one tokenizer.
pub(crate) struct Constraints {
    tokenizer: Arc<Tokenizer>,
    /// The bytes of all tokens, prepared by the first request that needs them.
    factory: OnceLock<Result<ParserFactory, String>>,
}

/// A compiled schema, shared by the texts of a request.
pub(crate) struct Grammar(Mutex<Matcher>);

/// Grammar of a text, and its state after the text so far.
pub(crate) struct Constraint {
    matcher: Matcher,
    masked: Vec<f32>,
}

impl Grammar {
    /// The constraint of a new text.
    pub(crate) fn start(&self) -> Constraint {
        let matcher = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Constraint {
            matcher: matcher.clone(),
            masked: Vec::new(),
        }
    }
}

impl Constraints {
    /// Constraints for the tokens of `tokenizer`.
    pub(crate) fn new(tokenizer: Arc<Tokenizer>) -> Self {
        Self {
            tokenizer,
            factory: OnceLock::new(),
        }
    }

    /// Any JSON object.
    ///
    /// # Errors
    ///
    /// Fails as [`Self::schema`].
    pub(crate) fn object(&self) -> Result<Grammar, String> {
        self.schema(json!({ "type": "object" }))
    }

    /// JSON of `schema`. This takes time, within the library's limits: call it on a worker.
    ///
    /// # Errors
    ///
    /// Fails if the schema is invalid or uses what is not supported, and for models without an end-of-text token.
    pub(crate) fn schema(&self, mut schema: Value) -> Result<Grammar, String> {
        let factory = self.factory.get_or_init(|| factory(&self.tokenizer));
        let factory = factory.as_ref().map_err(Clone::clone)?;
        // Models without a sense of JSON would fill it with spaces; these are Python's separators.
        let grammar = JsonCompileOptions {
            whitespace_flexible: false,
            item_separator: ", ".to_owned(),
            key_separator: ": ".to_owned(),
            coerce_one_of: true,
            ..JsonCompileOptions::default()
        };
        if !schema.is_object() {
            return Err("the schema is not a JSON object".to_owned());
        }
        close_objects(&mut schema);
        grammar.apply_to(&mut schema);
        let parser = factory.create_parser(TopLevelGrammar::from_json_schema(schema));
        let mut matcher = Matcher::new(parser);
        // The first token is worked out here, and not on the thread of the model for each text.
        match matcher.compute_mask_or_eos() {
            Err(error) => Err(reason(&error)),
            Ok(_) => Ok(Grammar(Mutex::new(matcher))),
        }
    }
}

/// Reported if no token in the vocabulary can continue a text that follows the schema.
const NO_TOKEN: &str = "no token of this model can continue the text in the given format";

/// First line of `error`: the reason, without the dump of the library's state that follows it.
fn reason(error: &impl ToString) -> String {
    let text = error.to_string();
    match text.lines().next() {
        None | Some("NoExtension" | "NoExtensionBias") => NO_TOKEN.to_owned(),
        Some(first) => first.to_owned(),
    }
}

fn factory(tokenizer: &Tokenizer) -> Result<ParserFactory, String> {
    let end = tokenizer
        .eos()
        .ok_or("the model has no end-of-text token")?;
    let size = tokenizer.vocabulary_size() as u32;
    // Ids may have gaps; a token without bytes is never permitted.
    let bytes = |id| match tokenizer.is_special(id) {
        // The library's mark of special tokens.
        true => [
            &[0xff],
            tokenizer.token_bytes(id).unwrap_or_default().as_slice(),
        ]
        .concat(),
        false => tokenizer.token_bytes(id).unwrap_or_default(),
    };
    let words: Vec<Vec<u8>> = (0..size).map(bytes).collect();
    let mut trie = TokTrie::from(&TokRxInfo::new(size, end.id), &words);
    if tokenizer.stop_ids().len() > 1 {
        trie = trie.with_eos_tokens(tokenizer.stop_ids());
    }
    let mut factory = ParserFactory::new_simple(&(Arc::new(ApproximateTokEnv::new(trie)) as _))
        .map_err(|error| error.to_string())?;
    factory.quiet();
    Ok(factory)
}

impl powerinfer_runtime::Constraint for Constraint {
    /// Fails also if working out which tokens are permitted exceeds the library's limits.
    fn sample(&mut self, logits: &[f32], sampler: &mut Sampler) -> Result<u32, String> {
        let permitted = self.matcher.compute_mask_or_eos();
        let permitted = permitted.map_err(|error| reason(&error))?;
        self.masked.clear();
        self.masked.resize(logits.len(), f32::NEG_INFINITY);
        let mut is_any = false;
        for id in permitted.iter() {
            if let Some(logit) = logits.get(id as usize) {
                self.masked[id as usize] = *logit;
                is_any = true;
            }
        }
        if !is_any {
            return Err(NO_TOKEN.to_owned());
        }
        let id = sampler.sample(&self.masked);
        let consumed = self.matcher.consume_token(id);
        consumed.map_err(|error| error.to_string())?;
        Ok(id)
    }

    fn is_complete(&self) -> bool {
        self.matcher.is_stopped()
    }
}
