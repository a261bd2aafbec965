//! Speculative decoding without a second model: the text so far proposes the next tokens (prompt lookup), and one pass
//! verifies them all.
//!
//! The longest end of the text that occurs earlier is looked up, and what followed it there is proposed. A token is
//! accepted if it is the one that is sampled from the model's own logits, so the text and the random numbers used are
//! those of decoding token by token.
//!
//! How many tokens are proposed maximises the expected tokens per second. With probability α of each to be accepted, a
//! pass of k proposals gives 1 + α + … + α^k tokens (Leviathan et al., 2023, equation 1) in the time of 1 + c·k
//! passes of one token. α is estimated by the length of what was found, c from the measured times of passes.

use std::time::Duration;

/// Most tokens that are proposed at a time.
const MOST: usize = 24;

/// Longest end of the text that is looked up.
const LONGEST: usize = 16;

/// Probability at first that a token is accepted, by the length of what was found: 1, 2, 3 to 4, 5 to 8, 9 to 16 tokens.
const ACCEPTED: [f64; 5] = [0.3, 0.5, 0.6, 0.7, 0.8];

/// Number of observations that [`ACCEPTED`] counts as.
const PRIOR: f64 = 2.0;

/// Cost at first of one more token of a pass, in passes of one token. High, because a wasted proposal costs as much, and a
/// found repetition of several tokens is tried nevertheless.
const MORE: f64 = 0.5;

/// Factor of the weight of earlier observations after a pass.
const KEPT: f64 = 0.95;

/// The same of a token if something was found but a proposal did not pay, so that it is tried again at times.
const KEPT_WHEN_SKIPPED: f64 = 0.995;

/// Proposes tokens of one text.
#[derive(Debug)]
pub struct Speculation {
    text: Vec<u32>,
    proposed: Vec<u32>,
    /// Index in `rates` of the last proposal.
    class: usize,
    rates: [Rate; ACCEPTED.len()],
    /// Seconds of a pass of one token.
    single: Option<f64>,
    /// Cost of one more token, in passes of one token.
    more: f64,
    /// Whether it is the cost of the caller.
    is_fixed: bool,
    /// Whether it has been measured.
    is_measured: bool,
    counts: SpeculationCounts,
}

/// Observed acceptance, recent ones with more weight.
#[derive(Debug, Clone, Copy, Default)]
struct Rate {
    accepted: f64,
    verified: f64,
}

/// Counts of proposed and accepted tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SpeculationCounts {
    /// Passes.
    pub passes: u64,
    /// Passes with proposed tokens.
    pub proposals: u64,
    /// Tokens proposed.
    pub proposed: u64,
    /// Accepted tokens.
    pub accepted: u64,
}

impl Speculation {
    /// Proposes continuations of `prompt`.
    pub fn new(prompt: &[u32]) -> Self {
        Self {
            text: prompt.to_vec(),
            proposed: Vec::with_capacity(MOST),
            class: 0,
            rates: Default::default(),
            single: None,
            more: MORE,
            is_fixed: false,
            is_measured: false,
            counts: SpeculationCounts::default(),
        }
    }

    /// Proposes continuations of `prompt` as if each more token of a pass cost `more` passes of one token, so that
    /// proposals depend on the text alone.
    pub fn with_cost(prompt: &[u32], more: f64) -> Self {
        Self {
            more,
            is_fixed: true,
            ..Self::new(prompt)
        }
    }

    /// Counts of proposed and accepted tokens so far.
    pub fn counts(&self) -> SpeculationCounts {
        self.counts
    }

    /// Appends a token to the text.
    pub fn push(&mut self, token: u32) {
        self.text.push(token);
    }

    /// Returns the tokens to verify after the text, at most `most`; none if nothing is found or it does not pay.
    pub fn propose(&mut self, most: usize) -> &[u32] {
        self.proposed.clear();
        let is_known = self.is_fixed || self.single.is_some();
        if is_known && let Some((length, next)) = find(&self.text) {
            self.class = length.next_power_of_two().ilog2() as usize;
            let best = best_length(self.accepted(), self.more, MOST.min(most));
            if best == 0 && most > 0 {
                self.rates[self.class].fade(KEPT_WHEN_SKIPPED);
                if !self.is_fixed {
                    self.more = MORE + (self.more - MORE) * KEPT_WHEN_SKIPPED;
                }
            }
            let found = &self.text[next..];
            // A text of one period goes on behind its end.
            self.proposed.extend(found.iter().cycle().take(best));
        }
        &self.proposed
    }

    /// Probability that a token of the last proposal is accepted.
    fn accepted(&self) -> f64 {
        let rate = self.rates[self.class];
        (rate.accepted + PRIOR * ACCEPTED[self.class]) / (rate.verified + PRIOR)
    }

    /// Observes that a pass of `tokens` tokens took `time`.
    pub fn observe_pass(&mut self, tokens: usize, time: Duration) {
        self.counts.passes += 1;
        if self.is_fixed {
            return;
        }
        let time = time.as_secs_f64();
        match (tokens, self.single) {
            (1, None) => self.single = Some(time),
            (1, Some(single)) => self.single = Some(single + 0.1 * (time - single)),
            (_, None) => {}
            (_, Some(single)) => {
                let more = (time / single - 1.0) / (tokens - 1) as f64;
                let weight = if self.is_measured { 0.2 } else { 1.0 };
                self.more += weight * (more.clamp(0.0, 2.0) - self.more);
                self.is_measured = true;
            }
        }
    }

    /// Observes that of the last `proposed` tokens the first `accepted` were sampled, and that the next one was not.
    pub fn observe_accepted(&mut self, accepted: usize, proposed: usize) {
        self.counts.proposals += 1;
        self.counts.proposed += proposed as u64;
        self.counts.accepted += accepted as u64;
        let rate = &mut self.rates[self.class];
        rate.fade(KEPT);
        rate.accepted += accepted as f64;
        rate.verified += (accepted + 1).min(proposed) as f64;
    }
}

impl Rate {
    fn fade(&mut self, kept: f64) {
        self.accepted *= kept;
        self.verified *= kept;
    }
}

/// Finds the longest end of `text`, up to [`LONGEST`] tokens, that occurs earlier, the latest if several are as long;
/// returns its length and the index of the token that followed it.
fn find(text: &[u32]) -> Option<(usize, usize)> {
    let (last, before) = text.split_last()?;
    let mut best = None;
    for (index, _) in before
        .iter()
        .enumerate()
        .rev()
        .filter(|(_, token)| *token == last)
    {
        let ends = text[..=index].iter().rev().zip(text.iter().rev());
        let length = ends.take(LONGEST).take_while(|(a, b)| a == b).count();
        if best.is_none_or(|(longest, _)| length > longest) {
            best = Some((length, index + 1));
        }
        if length == LONGEST {
            break;
        }
    }
    best
}

/// Returns the number of proposed tokens, at most `most`, with the largest expected number of tokens per time, if each is
/// accepted with probability `accepted` and costs `more`.
fn best_length(accepted: f64, more: f64, most: usize) -> usize {
    let (mut best, mut best_rate) = (0, 1.0);
    let (mut expected, mut all) = (1.0, 1.0);
    for length in 1..=most {
        all *= accepted;
        expected += all;
        let rate = expected / (1.0 + more * length as f64);
        if rate > best_rate {
            (best, best_rate) = (length, rate);
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_longest_end_that_occurs_earlier_is_found() {
        assert_eq!(find(&[]), None);
        assert_eq!(find(&[1, 2, 3]), None);
        assert_eq!(find(&[1, 2, 3, 1]), Some((1, 1)));
        // `7 1` is longer than the later `1`.
        assert_eq!(find(&[7, 1, 5, 1, 6, 7, 1]), Some((2, 2)));
        assert_eq!(find(&[1, 5, 1, 6, 1]), Some((1, 3)));
        assert_eq!(find(&[4; 40]), Some((LONGEST, 39)));
    }

    #[test]
    fn a_period_is_proposed_beyond_its_end() {
        let text = [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3];
        let mut speculation = Speculation::with_cost(&text, 0.0);
        assert_eq!(speculation.propose(7), [1, 2, 3, 1, 2, 3, 1]);
    }

    #[test]
    fn nothing_is_proposed_while_it_does_not_pay() {
        let mut speculation = Speculation::new(&[1, 2, 3, 4, 1, 2, 3]);
        assert!(speculation.propose(8).is_empty(), "no pass was measured");
        speculation.observe_pass(1, Duration::from_millis(10));
        assert!(!speculation.propose(8).is_empty());
        for _ in 0..40 {
            speculation.observe_accepted(0, 4);
        }
        assert!(speculation.propose(8).is_empty());
        // After a while it is tried again.
        let skipped = (0..2000).take_while(|_| speculation.propose(8).is_empty());
        assert!((50..1500).contains(&skipped.count()));
    }

    #[test]
    fn the_cost_of_a_token_is_measured() {
        let mut speculation = Speculation::new(&[]);
        for _ in 0..100 {
            speculation.observe_pass(1, Duration::from_millis(10));
            speculation.observe_pass(5, Duration::from_millis(18));
        }
        assert!((speculation.more - 0.2).abs() < 1e-3);
    }

    proptest! {
        #[test]
        fn the_best_length_is_that_of_the_formula(accepted in 0.0..0.99f64, more in 0.01..1.5f64) {
            let rate = |length: usize| {
                let tokens = (1.0 - accepted.powi(length as i32 + 1)) / (1.0 - accepted);
                tokens / (1.0 + more * length as f64)
            };
            let best = best_length(accepted, more, MOST);
            for length in 0..=MOST {
                prop_assert!(rate(best) >= rate(length) * (1.0 - 1e-9));
            }
        }

        #[test]
        fn what_is_found_is_the_end_of_the_text(text in prop::collection::vec(0..4u32, 0..60)) {
            let longest = (1..text.len()).rev().find(|length| {
                let end = &text[text.len() - length..];
                text[..text.len() - 1].windows(*length).any(|window| window == end)
            });
            let found = find(&text);
            prop_assert_eq!(found.map(|found| found.0), longest.map(|length| length.min(LONGEST)));
            if let Some((length, next)) = found {
                prop_assert_eq!(&text[next - length..next], &text[text.len() - length..]);
            }
        }
    }
}
