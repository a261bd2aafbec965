//! The token loop: run the prompt, then sample and run one token after the other until generation stops.
//!
//! ```text
//! reuse prefix ── run prompt ──▶ sample ── stop condition? ── cancelled? ──▶ yield token
//!                                   ▲                                            │
//!                                   └────── run token, and proposed ones ◀───────┘
//! ```
//!
//! [`run_pass`] and [`Ran::accept`] are the two halves of the loop, for any number of texts; a [`Generation`] repeats them.

use std::{collections::VecDeque, time::Instant};

use powerinfer_model::LanguageModel;

use crate::{Engine, Logits, RuntimeError, Session, Stage, Text, Token, Wanted};

/// A model that runs passes of texts: an [`Engine`], or any [`LanguageModel`] in a [`OneText`].
pub trait Passes {
    /// The tokens of a text so far.
    type Session;

    /// Number of tokens of `session`.
    fn position(&self, session: &Self::Session) -> usize;

    /// Tokens that `session` has room for.
    fn context(&self, session: &Self::Session) -> usize;

    /// Removes all tokens from index `tokens` on.
    fn truncate(&mut self, session: &mut Self::Session, tokens: usize);

    /// Keeps the longest prefix that `session` shares with `tokens`, but never all of `tokens`, so that at least the last
    /// one is run. Returns the number of kept tokens.
    fn keep_prefix(&mut self, session: &mut Self::Session, tokens: &[u32]) -> usize;

    /// How many tokens of a session can run in one pass and still give exactly the results that each gives alone.
    fn verified_together(&self) -> usize;

    /// Runs one token of every session except the last, which gets all remaining `tokens`. [`Self::logits`] then has a row
    /// for each of the other sessions, and the rows that are `wanted` for the last one.
    ///
    /// # Errors
    ///
    /// A token is outside the vocabulary, a context is full, or a device fails; the sessions are as before.
    fn pass(
        &mut self,
        sessions: &mut [&mut Self::Session],
        tokens: &[u32],
        wanted: Wanted,
    ) -> Result<(), RuntimeError>;

    /// Logits of the last pass, `[tokens, vocabulary]`; empty if they stayed on a device.
    fn logits(&self) -> &[f32];

    /// Length of a row of logits.
    fn vocabulary(&self) -> usize;

    /// The token with the [largest](Wanted::Largest) logit, which stayed on a device.
    ///
    /// # Errors
    ///
    /// The device fails, or no logits stayed on one.
    fn largest(&mut self) -> Result<u32, RuntimeError>;

    /// Called after tokens were sampled.
    fn sampled(&mut self) {}
}

impl Passes for Engine {
    type Session = Session;

    fn position(&self, session: &Session) -> usize {
        session.position()
    }

    fn context(&self, session: &Session) -> usize {
        session.context()
    }

    fn truncate(&mut self, session: &mut Session, tokens: usize) {
        session.truncate(tokens);
    }

    fn keep_prefix(&mut self, session: &mut Session, tokens: &[u32]) -> usize {
        session.keep_prefix(tokens)
    }

    fn verified_together(&self) -> usize {
        match self.observers.verification() {
            None => self.decode_batch_size(),
            Some(_) => 1,
        }
    }

    fn pass(
        &mut self,
        sessions: &mut [&mut Session],
        tokens: &[u32],
        wanted: Wanted,
    ) -> Result<(), RuntimeError> {
        self.run(sessions, tokens, wanted)
    }

    fn logits(&self) -> &[f32] {
        &self.logits
    }

    fn vocabulary(&self) -> usize {
        self.model.config.vocabulary_size
    }

    fn largest(&mut self) -> Result<u32, RuntimeError> {
        match self.executor.device_mut() {
            Some(device) => Ok(device.found_token()?),
            None => Err(RuntimeError::NoLogits),
        }
    }

    fn sampled(&mut self) {
        self.observers.end_stage(Stage::Sampling);
    }
}

/// Passes of any [`LanguageModel`], for one text at a time; the sequence of the model is its session.
#[derive(Debug)]
pub struct OneText<'a, M: ?Sized> {
    model: &'a mut M,
    context: usize,
    logits: Vec<f32>,
}

impl<'a, M: LanguageModel + ?Sized> OneText<'a, M> {
    /// Generates with `model`, whose sequence may have up to `context` tokens.
    pub fn new(model: &'a mut M, context: usize) -> Self {
        Self {
            model,
            context,
            logits: Vec::new(),
        }
    }

    /// The model.
    pub fn model(&mut self) -> &mut M {
        self.model
    }
}

impl<M: LanguageModel + ?Sized> Passes for OneText<'_, M> {
    type Session = ();

    fn position(&self, (): &()) -> usize {
        self.model.position()
    }

    fn context(&self, (): &()) -> usize {
        self.context
    }

    /// Nothing is removed, because nothing is proposed.
    fn truncate(&mut self, (): &mut (), _tokens: usize) {}

    fn keep_prefix(&mut self, (): &mut (), _tokens: &[u32]) -> usize {
        self.model.reset();
        0
    }

    fn verified_together(&self) -> usize {
        1
    }

    fn pass(&mut self, _: &mut [&mut ()], tokens: &[u32], _: Wanted) -> Result<(), RuntimeError> {
        self.logits = self.model.forward_last(tokens)?;
        Ok(())
    }

    fn logits(&self) -> &[f32] {
        &self.logits
    }

    fn vocabulary(&self) -> usize {
        self.model.config().vocabulary_size
    }

    fn largest(&mut self) -> Result<u32, RuntimeError> {
        Err(RuntimeError::NoLogits)
    }
}

/// A text and its session.
pub type Running<'a, S> = (&'a mut S, &'a mut Text);

/// A piece of a prompt that runs in the same pass as texts.
#[derive(Debug)]
pub struct Piece<'a, S> {
    /// The prompt's session.
    pub session: &'a mut S,
    /// Tokens of the piece, at least one.
    pub tokens: &'a [u32],
    /// Which of their logits are needed.
    pub wanted: Wanted,
}

/// A token that was sampled from the logits of a pass.
#[derive(Debug)]
pub struct Sampled<'a> {
    /// Index of its text in the pass.
    pub text: usize,
    /// Index in the pass of the token before it.
    pub row: usize,
    /// Logits that it was sampled from, `[vocabulary]`; empty if they stayed on a device.
    pub logits: &'a [f32],
    /// The token, or why the text cannot be continued.
    pub token: Result<Token, RuntimeError>,
}

/// A pass that has run, and whose logits have not been sampled from yet.
#[derive(Debug)]
#[must_use]
pub struct Ran {
    texts: usize,
    /// Tokens that were proposed after the pending one of the only text.
    proposed: Vec<u32>,
}

/// Runs the pending token of each of `texts`, and `piece`. If there is one text and no piece, the tokens that it proposes
/// run in the same pass.
///
/// # Errors
///
/// The errors of [`Passes::pass`], or a text has no pending token.
pub fn run_pass<P: Passes>(
    passes: &mut P,
    texts: &mut [Running<'_, P::Session>],
    piece: Option<Piece<'_, P::Session>>,
) -> Result<Ran, RuntimeError> {
    let mut ran = Ran {
        texts: texts.len(),
        proposed: Vec::new(),
    };
    if let ([(session, text)], None) = (&mut *texts, &piece) {
        let token = text.pending().ok_or(RuntimeError::NoPending)?;
        let room = passes.context(session) - passes.position(session);
        let room = room.min(passes.verified_together()).saturating_sub(1);
        ran.proposed.extend_from_slice(text.propose(room));
        let started = Instant::now();
        if ran.proposed.is_empty() {
            let wanted = if text.needs_largest_only() {
                Wanted::Largest(text.vocabulary())
            } else {
                Wanted::Last
            };
            passes.pass(&mut [session], &[token], wanted)?;
        } else {
            let tokens = [&[token], &ran.proposed[..]].concat();
            passes.pass(&mut [session], &tokens, Wanted::All)?;
        }
        if let Some(speculation) = text.speculation_mut() {
            speculation.observe_pass(1 + ran.proposed.len(), started.elapsed());
        }
        return Ok(ran);
    }
    let pending = texts.iter().map(|(_, text)| text.pending());
    let pending = pending.collect::<Option<Vec<u32>>>();
    let mut tokens = pending.ok_or(RuntimeError::NoPending)?;
    let mut sessions: Vec<&mut P::Session> = texts
        .iter_mut()
        .map(|(session, _)| &mut **session)
        .collect();
    let mut wanted = Wanted::Last;
    if let Some(piece) = piece {
        tokens.extend_from_slice(piece.tokens);
        sessions.push(piece.session);
        wanted = piece.wanted;
    }
    passes.pass(&mut sessions, &tokens, wanted)?;
    Ok(ran)
}

impl Ran {
    /// Tokens of texts in the pass.
    pub fn tokens(&self) -> usize {
        self.texts + self.proposed.len()
    }

    /// Tokens that the only text proposed.
    pub fn proposed(&self) -> usize {
        self.proposed.len()
    }

    /// Logits of the piece, `[tokens, vocabulary]`; empty without a piece.
    pub fn piece_logits<'a, P: Passes>(&self, passes: &'a P) -> &'a [f32] {
        // The logits of a single text can stay on the device.
        let rows = passes.logits().get(self.tokens() * passes.vocabulary()..);
        rows.unwrap_or_default()
    }

    /// Samples the next token of each of `texts`, which must be those of the pass; a single text also gets every correctly
    /// proposed token before it. Calls `each` with every token. Returns the number of accepted proposals.
    ///
    /// # Errors
    ///
    /// A device fails. `each` gets the errors of a [`Constraint`](crate::Constraint).
    pub fn accept<P: Passes>(
        self,
        passes: &mut P,
        texts: &mut [Running<'_, P::Session>],
        mut each: impl FnMut(Sampled<'_>),
    ) -> Result<usize, RuntimeError> {
        let mut accepted = 0;
        for (index, (session, text)) in texts.iter_mut().enumerate() {
            let position = passes.position(session) - self.proposed.len();
            loop {
                let row = index + accepted;
                let token = accept_row(passes, session, text, row, position + accepted);
                let (logits, token) = token?;
                let token = token.map(|token| Token {
                    text: index,
                    ..token
                });
                let id = token.as_ref().ok().map(|token| token.id);
                each(Sampled {
                    text: index,
                    row,
                    logits,
                    token,
                });
                if text.stop_reason().is_some()
                    || id.is_none()
                    || self.proposed.get(accepted).copied() != id
                {
                    break;
                }
                accepted += 1;
            }
            if !self.proposed.is_empty() {
                if let Some(speculation) = text.speculation_mut() {
                    speculation.observe_accepted(accepted, self.proposed.len());
                }
                passes.truncate(session, position + accepted);
            }
        }
        passes.sampled();
        Ok(accepted)
    }
}

/// Samples the token after row `row` of the last pass; the session had `position` tokens then. Also returns the row.
fn accept_row<'a, P: Passes>(
    passes: &'a mut P,
    session: &P::Session,
    text: &mut Text,
    row: usize,
    position: usize,
) -> Result<(&'a [f32], Result<Token, RuntimeError>), RuntimeError> {
    let (context, size) = (passes.context(session), passes.vocabulary());
    if passes.logits().is_empty() {
        let token = passes.largest()?;
        return Ok((&[], text.accept(Logits::Largest(token), position, context)));
    }
    let logits = &passes.logits()[row * size..][..size];
    Ok((logits, text.accept(Logits::Host(logits), position, context)))
}

/// Generation of texts: an iterator over their tokens, stop tokens included.
///
/// A token is run only when the next one is asked for, so a session never has the token that was returned last;
/// [`Generation::finish`] runs it. The sessions can be continued.
#[derive(Debug)]
pub struct Generation<'a, P: Passes, C> {
    passes: &'a mut P,
    texts: Vec<Running<'a, P::Session>>,
    is_cancelled: C,
    /// Whether the logits of a prompt have not been sampled from yet.
    after_prompt: bool,
    sampled: VecDeque<Token>,
}

impl<'a, P: Passes, C: FnMut() -> bool> Generation<'a, P, C> {
    /// Runs `prompt`, at least one token, and starts to generate `text`. The prefix that `session` has in common with
    /// the prompt is reused. `is_cancelled` is called before every pass.
    ///
    /// Returns the generation and the number of reused tokens.
    ///
    /// # Errors
    ///
    /// The prompt does not fit the context, or the model fails.
    pub fn start(
        passes: &'a mut P,
        session: &'a mut P::Session,
        text: &'a mut Text,
        prompt: &[u32],
        is_cancelled: C,
    ) -> Result<(Self, usize), RuntimeError> {
        let reused = passes.keep_prefix(session, prompt);
        text.begin(prompt);
        let wanted = if text.needs_largest_only() {
            Wanted::Largest(text.vocabulary())
        } else {
            Wanted::Last
        };
        passes.pass(&mut [session], &prompt[reused..], wanted)?;
        let mut generation = Self::resume(passes, vec![(session, text)], is_cancelled);
        generation.after_prompt = true;
        Ok((generation, reused))
    }

    /// Continues `texts` that have pending tokens, all of them in each pass. `is_cancelled` is called before every pass.
    pub fn resume(passes: &'a mut P, texts: Vec<Running<'a, P::Session>>, is_cancelled: C) -> Self {
        Self {
            passes,
            sampled: VecDeque::with_capacity(texts.len()),
            texts,
            is_cancelled,
            after_prompt: false,
        }
    }

    /// The model, between two tokens.
    pub fn passes(&mut self) -> &mut P {
        self.passes
    }

    /// The model, and the session of the first text.
    pub fn parts(&self) -> (&P, &P::Session) {
        (&*self.passes, &*self.texts[0].0)
    }

    /// Text `index`.
    pub fn text(&mut self, index: usize) -> &mut Text {
        self.texts[index].1
    }

    /// Runs the pending token of each text, so that its session has every token. Texts that ended with a stop token have
    /// none.
    ///
    /// # Errors
    ///
    /// The model fails.
    pub fn finish(&mut self) -> Result<(), RuntimeError> {
        for (session, text) in &mut self.texts {
            let is_room = self.passes.position(session) < self.passes.context(session);
            if let Some(token) = text.take_pending().filter(|_| is_room) {
                self.passes.pass(&mut [session], &[token], Wanted::Last)?;
            }
        }
        Ok(())
    }

    /// Runs a pass, and samples from its logits.
    fn step(&mut self) -> Result<(), RuntimeError> {
        if self.after_prompt {
            self.after_prompt = false;
            let (session, text) = &mut self.texts[0];
            if text.stop_reason().is_none() {
                let position = self.passes.position(session);
                let (_, token) = accept_row(self.passes, session, text, 0, position)?;
                self.sampled.push_back(token?);
                self.passes.sampled();
            }
            return Ok(());
        }
        if (self.is_cancelled)() {
            self.texts.iter_mut().for_each(|(_, text)| text.cancel());
            return Ok(());
        }
        let mut refused = None;
        let mut keep = |token: Result<Token, RuntimeError>, place: usize| match token {
            Ok(token) => self.sampled.push_back(Token {
                text: place,
                ..token
            }),
            Err(error) => refused = Some(error),
        };
        if let [(session, text)] = &mut self.texts[..] {
            let mut only = [(&mut **session, &mut **text)];
            let ran = run_pass(self.passes, &mut only, None)?;
            ran.accept(self.passes, &mut only, |sampled| keep(sampled.token, 0))?;
        } else {
            let texts = self.texts.iter_mut().enumerate();
            let running = texts.filter(|(_, (_, text))| text.stop_reason().is_none());
            let (places, mut texts): (Vec<usize>, Vec<_>) = running
                .map(|(place, (session, text))| (place, (&mut **session, &mut **text)))
                .unzip();
            let ran = run_pass(self.passes, &mut texts, None)?;
            let each = |sampled: Sampled<'_>| keep(sampled.token, places[sampled.text]);
            ran.accept(self.passes, &mut texts, each)?;
        }
        refused.map_or(Ok(()), Err)
    }
}

impl<P: Passes, C: FnMut() -> bool> Iterator for Generation<'_, P, C> {
    type Item = Result<Token, RuntimeError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(token) = self.sampled.pop_front() {
                return Some(Ok(token));
            }
            let texts = self.texts.iter();
            if texts
                .map(|(_, text)| text.stop_reason())
                .all(|reason| reason.is_some())
            {
                return None;
            }
            if let Err(error) = self.step() {
                self.texts.iter_mut().for_each(|(_, text)| text.cancel());
                return Some(Err(error));
            }
        }
    }
}
