//! `powerinfer eval perplexity` and `powerinfer eval fidelity`: the effect of skipping neurons on the probabilities of text.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::ValueEnum;
use powerinfer_artifact::{
    Progress, counted,
    plan::{Plan, Policy},
};
use powerinfer_bundle::Bundle;
use powerinfer_eval::{
    Fidelity, Likelihood, MIN_INTERVAL_TOKENS, Subject, TextSize, Windows, fidelity, format,
    statistics::Interval, token_losses,
};
use powerinfer_model::{Checkpoint, ModelConfig};
use powerinfer_pipeline::{check_paths, texts};
use powerinfer_planner::certify;
use powerinfer_reference::ReferenceModel;
use powerinfer_text::Tokenizer;
use serde_json::{Value, json};

use super::divergence_json;
use crate::{
    certificate_table,
    engine::{
        PolicyArgument,
        evaluated::{SubjectArguments, certificate_texts},
    },
    hint::Advised,
    model_argument::{self, DEMO},
    output::{Output, Table, percent, print, print_json},
    progress::Bar,
};

/// Bundle, text and policies.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  powerinfer eval perplexity demo --tokens 2000\n  powerinfer eval fidelity ./my-model.powerinfer --data held-out.txt"
)]
pub(crate) struct TextArguments {
    #[command(flatten)]
    subject: SubjectArguments,
    /// Text, in any format that `profile --data` reads; may be given several times. Give text that the profile
    /// has not seen [default: for `demo` tasks it was not trained on, else the text of the bundle's
    /// certificate]
    #[arg(long, value_name = "FILE|DIR|-")]
    data: Vec<PathBuf>,
    /// Maximum number of tokens to read [default: 16384, or the certificate's whole text]
    #[arg(long, value_name = "N")]
    tokens: Option<usize>,
    /// Tokens of a window [default: the context of the bundle, at most 512]
    #[arg(long, value_name = "N")]
    window: Option<usize>,
    /// Tokens between the beginnings of two windows [default: half a window]
    #[arg(long, value_name = "N")]
    stride: Option<usize>,
    /// Whether each text begins with the BOS token
    #[arg(long, value_name = "WHEN", default_value = "auto")]
    bos: BosArgument,
    /// Policies to compare with `dense` [default: all that the bundle can follow in every layer, and
    /// its plan if that mixes policies or skips inputs]
    #[arg(long, value_name = "POLICY", value_delimiter = ',')]
    policy: Vec<PolicyArgument>,
    /// Measure the bundle's certificate again, on its own text, and fail if it differs
    #[arg(long, conflicts_with_all = ["data", "tokens", "window", "stride", "bos", "policy"])]
    certificate: bool,
    /// Compare with this model under the reference engine instead of the bundle's own `dense`, which includes the
    /// cost of quantisation
    #[arg(long, value_name = "MODEL", conflicts_with = "certificate")]
    against: Option<String>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// Whether a text begins with the BOS token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum BosArgument {
    /// If the tokenizer adds it
    Auto,
    /// Always; an error if the tokenizer has none
    Always,
    /// Never
    Never,
}

impl BosArgument {
    /// Adds or removes the BOS token of `texts`.
    fn apply(self, texts: &mut [Vec<u32>], tokenizer: &Tokenizer) -> Result<()> {
        let bos = tokenizer.bos().map(|bos| bos.id);
        match (self, bos) {
            (Self::Auto, _) | (Self::Never, None) => {}
            (Self::Always, None) => {
                bail!(Advised::new(
                    "the tokenizer has no BOS token",
                    "leave `--bos` out"
                ))
            }
            (Self::Always, Some(bos)) => texts
                .iter_mut()
                .filter(|text| text.first() != Some(&bos))
                .for_each(|text| text.insert(0, bos)),
            (Self::Never, Some(bos)) => texts
                .iter_mut()
                .filter(|text| text.first() == Some(&bos))
                .for_each(|text| {
                    text.remove(0);
                }),
        }
        Ok(())
    }
}

/// Figures to show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shown {
    /// Perplexity.
    Perplexity,
    /// Perplexity, KL divergence and agreement.
    Fidelity,
}

/// Half-width of an interval of the rise that counts as precise.
const PRECISE: f64 = 0.001;

/// Results of one policy.
struct Row {
    /// A policy, or `planned`.
    policy: String,
    fidelity: Fidelity,
    computed_share: f64,
}

pub(crate) fn run(arguments: &TextArguments, shown: Shown, output: Output) -> Result<()> {
    check_paths(&arguments.data)?;
    let subject = arguments.subject.open(output)?;
    let bundle = subject.bundle()?;
    if arguments.certificate {
        let Some(bundle) = &bundle else {
            bail!(Advised::new(
                "a model has no certificate",
                "give a bundle made from it"
            ));
        };
        return measure_again(bundle, arguments.json, output);
    }
    if arguments.against.is_some() && bundle.is_none() {
        bail!(Advised::new(
            "`--against` compares a bundle with a model, and this is not a bundle",
            "without it, `eval fidelity` compares the two engines"
        ));
    }
    let tokenizer = subject.tokenizer();
    let (config, context, name) = match (&bundle, subject.checkpoint()) {
        (Some(bundle), _) => (
            bundle.config(),
            bundle.plan().budget.context_tokens as usize,
            &bundle.header().model.name,
        ),
        (None, Some(checkpoint)) => (
            checkpoint.config(),
            checkpoint.config().context_length,
            &checkpoint.identity().name,
        ),
        (None, None) => unreachable!("it is a bundle or a model"),
    };
    let length = arguments.window.unwrap_or(context.min(512));
    if length < 2 || length > context {
        bail!(Advised::new(
            format!("`--window` is {length}"),
            format!("the bundle has room for 2 to {context} tokens")
        ));
    }
    let stride = arguments.stride.unwrap_or((length / 2).max(1));
    if stride == 0 || stride >= length {
        bail!(Advised::new(
            format!("`--stride` is {stride}"),
            format!(
                "with windows of {length} tokens it can be 1 to {}",
                length - 1
            )
        ));
    }
    let certified = match &bundle {
        Some(bundle) => certificate_texts(bundle, &arguments.data, arguments.tokens, output)?,
        None => None,
    };
    let mut texts = match certified {
        Some(texts) => texts,
        None => texts(
            &arguments.data,
            name == DEMO,
            config,
            tokenizer,
            arguments.tokens.unwrap_or(16_384),
            &Bar::new(output),
        )?,
    };
    arguments.bos.apply(&mut texts, tokenizer)?;
    let extent = TextSize::new(&texts, tokenizer)?;
    let windows = Windows { length, stride };
    let total: usize = texts.iter().map(|text| text.len().saturating_sub(1)).sum();
    if total < 2 {
        bail!(Advised::new(
            "the text has no tokens to score",
            "give more text with `--data`"
        ));
    }
    let bar = Bar::new(output);
    let mut advance = |tokens| bar.advance(tokens).map_err(anyhow::Error::from);
    let mut dense = match &arguments.against {
        Some(name) => {
            let checkpoint = model_argument::open_checkpoint(name, output)?;
            check_against(&checkpoint, bundle.as_ref(), config, output)?;
            Subject::Reference(Box::new(ReferenceModel::load(&checkpoint)?))
        }
        None => subject.model(Some(Policy::Dense), output)?,
    };
    // A model is compared with itself under our engine.
    let packed = match shown {
        Shown::Fidelity => subject.packed()?,
        Shown::Perplexity => None,
    };
    let others = packed.as_ref().unwrap_or(&subject);
    let choices = match (&bundle, &packed) {
        (Some(bundle), _) => choices(&arguments.policy, bundle, arguments.against.is_some()),
        (None, Some(_)) => vec![("runtime, float32".to_owned(), Some(Policy::Dense))],
        (None, None) => Vec::new(),
    };
    if bundle.is_none() && !arguments.policy.is_empty() {
        bail!(Advised::new(
            "an unpacked model runs dense",
            "use `--engine runtime`, or a bundle, for `--policy`"
        ));
    }
    others.check_policies(choices.iter().map(|(_, policy)| *policy), output)?;
    let (mut rows, mut of_dense) = (Vec::new(), Likelihood::default());
    for (policy, choice) in choices {
        let mut other = others.model(choice, output.silent())?;
        bar.begin(&policy, total as u64, "tokens");
        let fidelity = fidelity(&mut dense, &mut other, &texts, windows, &mut advance)?;
        bar.end();
        of_dense = fidelity.dense();
        rows.push(Row {
            policy,
            fidelity,
            computed_share: other.computed_share(),
        });
    }
    if rows.is_empty() {
        bar.begin("dense", total as u64, "tokens");
        of_dense = token_losses(&mut dense, &texts, windows, &mut advance)?.likelihood();
        bar.end();
    }
    let bos_token = tokenizer
        .bos()
        .filter(|bos| texts.iter().all(|text| text.first() == Some(&bos.id)))
        .map(|bos| bos.text.clone());
    if arguments.json {
        let dense = of_dense;
        let rows: Vec<Value> = rows.iter().map(|row| row.to_json(extent)).collect();
        return print_json(&json!({
            "tokens": total, "words": extent.words, "bytes": extent.bytes,
            "window": length, "stride": stride, "bos_token": bos_token, "against": arguments.against,
            "dense_perplexity": dense.perplexity(),
            "dense_word_perplexity": dense.word_perplexity(extent.words),
            "dense_bits_per_byte": dense.bits_per_byte(extent.bytes),
            "policies": rows,
        }));
    }
    let baseline = match arguments.against {
        Some(_) => "reference",
        None => "dense",
    };
    print(table((baseline, of_dense), &rows, shown, extent))?;
    report(
        (baseline, of_dense),
        &rows,
        shown,
        windows,
        bos_token.as_deref(),
        output,
    );
    Ok(())
}

/// Refuses a model with another vocabulary than `config`; reports if `bundle` was made from another model.
fn check_against(
    checkpoint: &Checkpoint,
    bundle: Option<&Bundle>,
    config: &ModelConfig,
    output: Output,
) -> Result<()> {
    let (own, other) = (config.vocabulary_size, checkpoint.config().vocabulary_size);
    let name = &checkpoint.identity().name;
    if own != other {
        bail!(Advised::new(
            format!("`{name}` has {other} tokens, and what it is compared with has {own}"),
            "give the model that the bundle was made from"
        ));
    }
    let made_of = bundle.map(|bundle| bundle.header().model.fingerprint);
    if made_of.is_some_and(|made_of| made_of != checkpoint.identity().fingerprint) {
        output.say(format!(
            "the bundle was not made from `{name}`: the two differ in more than format and policy"
        ));
    }
    Ok(())
}

/// Policies to compare with `dense`: those asked for, or all that the bundle can follow.
pub(super) fn choices(
    asked: &[PolicyArgument],
    bundle: &Bundle,
    with_dense: bool,
) -> Vec<(String, Option<Policy>)> {
    let forced = |policy: Policy| (policy.to_string(), Some(policy));
    if !asked.is_empty() {
        let asked: Vec<Policy> = asked.iter().map(|policy| (*policy).into()).collect();
        let has_others = asked.iter().any(|policy| *policy != Policy::Dense);
        let is_first = |place: usize| !asked[..place].contains(&asked[place]);
        // The first row is `dense` in any case.
        let is_shown = |place: &usize| {
            is_first(*place) && (with_dense || !has_others || asked[*place] != Policy::Dense)
        };
        let places = (0..asked.len()).filter(is_shown);
        return places.map(|place| forced(asked[place])).collect();
    }
    let Plan { layers, .. } = bundle.plan();
    let summaries = bundle.predictors().map_or(&[][..], |file| file.layers());
    let all = |has: &dyn Fn(usize) -> bool| (0..layers.len()).all(has);
    let can = |policy: &Policy| match policy {
        Policy::Dense => with_dense,
        Policy::Exact => bundle.config().activation.has_exact_zeros(),
        Policy::Predicted => all(&|layer| summaries.get(layer).is_some_and(|s| s.rank > 0)),
        Policy::SignBit => all(&|layer| summaries.get(layer).is_some_and(|s| s.sign_bit.is_some())),
        Policy::Threshold => all(&|layer| layers[layer].threshold.is_some()),
    };
    let mut choices: Vec<_> = Policy::ALL.into_iter().filter(can).map(forced).collect();
    let first = layers.first().map(|layer| layer.policy);
    let is_mixed = layers.iter().any(|layer| Some(layer.policy) != first);
    let skips_inputs = layers.iter().any(|layer| layer.input_thresholds.is_some());
    if is_mixed || skips_inputs || choices.is_empty() {
        choices.push(("planned".to_owned(), None));
    }
    choices
}

/// Measures the certificate of `bundle` again and compares.
fn measure_again(bundle: &Bundle, json: bool, output: Output) -> Result<()> {
    let Some(written) = bundle.certificate() else {
        bail!(Advised::new(
            format!(
                "the bundle in `{}` has no certificate",
                bundle.folder().display()
            ),
            "`powerinfer place MODEL` makes one if the profile has held-out text"
        ));
    };
    if !bundle.certificate_matches() {
        bail!(Advised::new(
            format!(
                "the certificate of the bundle in `{}` is for another plan or another text",
                bundle.folder().display()
            ),
            "run `powerinfer place MODEL` again"
        ));
    }
    let found = certify::measure_again(bundle, written, &Bar::new(output))?;
    if json {
        print_json(&found)?;
    } else {
        print(certificate_table::describe(&found) + &certificate_table::layers(&found))?;
    }
    if let Some(difference) = certify::difference(written, &found) {
        bail!(Advised::new(
            format!("measured again, {difference}"),
            "the bundle is not what was certified"
        ));
    }
    output.say("measured again: equal to the certificate");
    Ok(())
}

fn table(
    (baseline, dense): (&str, Likelihood),
    rows: &[Row],
    shown: Shown,
    extent: TextSize,
) -> String {
    let mut headings = vec!["policy", "FFN neurons", "perplexity", "rise (95%)"];
    headings.extend(match shown {
        Shown::Perplexity => ["per word", "bits per byte"].as_slice(),
        Shown::Fidelity => &["KL mean", "KL 99%", "top-1 agreement", "first other token"],
    });
    let mut table = Table::new(&headings);
    let mut row =
        |policy: &str, computed: f64, likelihood: Likelihood, rise: String, rest: [String; 4]| {
            let mut cells = vec![
                policy.to_owned(),
                percent(computed),
                format!("{:.4}", likelihood.perplexity()),
                rise,
            ];
            match shown {
                Shown::Perplexity => cells.extend([
                    match likelihood.word_perplexity(extent.words) {
                        usual @ ..1e6 => format!("{usual:.4}"),
                        huge => format!("{huge:.2e}"),
                    },
                    format!("{:.4}", likelihood.bits_per_byte(extent.bytes)),
                ]),
                Shown::Fidelity => cells.extend(rest),
            }
            table.row(cells);
        };
    let none = || "–".to_owned();
    let nothing = [none(), none(), none(), none()];
    row(baseline, 1.0, dense, none(), nothing);
    for Row {
        policy,
        fidelity,
        computed_share,
    } in rows
    {
        let rest = [
            format!("{:.5}", fidelity.mean_divergence().value),
            format!("{:.5}", fidelity.divergence_p99()),
            percent(fidelity.top1_agreement()),
            match fidelity.tokens_to_first_divergence() {
                Some(tokens) => format!("after {tokens}"),
                None => "none".to_owned(),
            },
        ];
        let rise = format::rise(fidelity.perplexity_rise(), dense.tokens);
        row(policy, *computed_share, fidelity.other(), rise, rest);
    }
    table.to_string()
}

/// Reports how it was measured, and how much text a precise figure takes.
fn report(
    (baseline, dense): (&str, Likelihood),
    rows: &[Row],
    shown: Shown,
    windows: Windows,
    bos_token: Option<&str>,
    output: Output,
) {
    let tokens = dense.tokens;
    let begins = match bos_token {
        Some(token) => format!("each text after `{token}`"),
        None => "no token before a text".to_owned(),
    };
    output.say(format!(
        "{} scored: window {}, stride {}, {begins}",
        counted(tokens, "token"),
        windows.length,
        windows.stride
    ));
    if !rows.is_empty() {
        output.detail(format!(
            "rise: of perplexity over `{baseline}`, with its 95% interval by the paired bootstrap of blocks of 64 tokens"
        ));
    }
    if shown == Shown::Fidelity {
        output.say(
            "KL divergence in nats; first other token: tokens of a text before its arg max first differs (median)",
        );
    }
    for row in rows {
        let rise = row.fidelity.perplexity_rise();
        let verdict = match () {
            () if row.fidelity.largest_difference() == 0.0 => "every logit is the same".to_owned(),
            () if tokens < MIN_INTERVAL_TOKENS => "too little text for an interval".to_owned(),
            () if rise.low <= 0.0 && rise.high >= 0.0 => format!(
                "no difference shown; minimum detectable effect {:.3}%",
                100.0 * rise.half_width()
            ),
            () => continue,
        };
        output.say(format!("{} relative to {baseline}: {verdict}", row.policy));
    }
    let widths = rows.iter().map(|row| row.fidelity.perplexity_rise());
    let widest = widths.map(Interval::half_width).fold(0.0, f64::max);
    if widest > PRECISE && tokens >= MIN_INTERVAL_TOKENS {
        let needed = tokens as f64 * (widest / PRECISE).powi(2);
        output.say(format!(
            "an interval of ± {:.1}% takes about {needed:.0} tokens",
            100.0 * PRECISE
        ));
    }
}

impl Row {
    fn to_json(&self, extent: TextSize) -> Value {
        let fidelity = &self.fidelity;
        json!({
            "policy": self.policy,
            "ffn_neurons_computed": self.computed_share,
            "perplexity": fidelity.other().perplexity(),
            "word_perplexity": fidelity.other().word_perplexity(extent.words),
            "bits_per_byte": fidelity.other().bits_per_byte(extent.bytes),
            "perplexity_rise": fidelity.perplexity_rise(),
            "kl_divergence_mean": divergence_json(fidelity),
            "kl_divergence_p99": fidelity.divergence_p99(),
            "largest_logit_difference": fidelity.largest_difference(),
            "top1_agreement": fidelity.top1_agreement(),
            "tokens_to_first_divergence": fidelity.tokens_to_first_divergence(),
            "texts_without_divergence": fidelity.texts_without_divergence(),
        })
    }
}
