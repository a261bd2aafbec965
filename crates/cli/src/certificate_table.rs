//! A certificate in words and a table.

use powerinfer_artifact::{Shard, certificate::Certificate, counted};
use powerinfer_bundle::Bundle;
use powerinfer_planner::certify::windows_file;

use crate::output::{Output, Table, percent};

/// The certificate in lines.
pub(crate) fn describe(certificate: &Certificate) -> String {
    let Certificate {
        scoring,
        perplexity_rise,
        ..
    } = certificate;
    let begins = match scoring.bos_token {
        Some(token) => format!("each text after token {token}"),
        None => "no token before a text".to_owned(),
    };
    let verdict = match (certificate.holds(), certificate.tokens_needed()) {
        (true, _) => format!(
            "within the {} allowed",
            share(certificate.perplexity_budget)
        ),
        (false, Some(tokens)) => format!(
            "not sure to be within the {} allowed, about {tokens} tokens would tell",
            share(certificate.perplexity_budget)
        ),
        (false, None) => format!(
            "more than the {} allowed",
            share(certificate.perplexity_budget)
        ),
    };
    let divergence = match certificate.tokens_to_first_divergence {
        None => "in none of the texts".to_owned(),
        Some(tokens) => format!(
            "after {} (median), in {} of the texts",
            counted(tokens, "token"),
            percent(1.0 - certificate.texts_without_divergence)
        ),
    };
    format!(
        "certified on {} reserved tokens in {}: window {}, stride {}, {begins}\n\
         perplexity        {:.4} as planned, {:.4} dense: {:+.3}% ({:+.3} to {:+.3}, 95% confidence), {verdict}\n\
         KL divergence     {:.5} nats on average, {:.5} for 99% of the tokens\n\
         top-1 agreement   {}; first other token {divergence}\n\
         FFN neurons       {} computed\n",
        scoring.tokens,
        counted(scoring.texts, "text"),
        scoring.window,
        scoring.stride,
        certificate.perplexity,
        certificate.dense_perplexity,
        100.0 * perplexity_rise.value,
        100.0 * perplexity_rise.low,
        100.0 * perplexity_rise.high,
        certificate.kl_divergence_mean.value,
        certificate.kl_divergence_p99,
        percent(certificate.top1_agreement),
        percent(certificate.ffn_neurons_computed),
    )
}

/// The errors of the layers as a table.
pub(crate) fn layers(certificate: &Certificate) -> String {
    let mut table = Table::new(&[
        "layer",
        "policy",
        "FFN error",
        "99%",
        "error bound",
        "contributions",
    ]);
    for layer in &certificate.layers {
        table.row(vec![
            layer.layer.to_string(),
            layer.policy.to_string(),
            percent(layer.relative_error),
            percent(layer.relative_error_p99),
            percent(layer.error_bound),
            percent(layer.contribution_recall),
        ]);
    }
    table.to_string()
}

/// A share in percent, without needless zeros.
fn share(share: f64) -> String {
    format!("{}%", (share * 1e6).round() / 1e4)
}

/// State of the certificate of `bundle`: `complete`, `incomplete` or `none`.
pub(crate) fn state(bundle: &Bundle) -> &'static str {
    match bundle.certificate() {
        Some(_) => "complete",
        // An interrupted certification leaves the file of its windows.
        None if windows_file(bundle.folder(), Shard::WHOLE).exists() => INCOMPLETE,
        None => "none",
    }
}

/// State of a bundle whose certification was interrupted.
pub(crate) const INCOMPLETE: &str = "incomplete";

/// Says in a line what a bundle is certified for.
pub(crate) fn say_certificate(bundle: &Bundle, output: Output) {
    if let Some(certificate) = bundle.certificate() {
        output.say(format!(
            "certified on {} reserved tokens: perplexity {:+.2}% relative to `dense` (95% interval {:+.2} to {:+.2}), top-1 agreement {}, {} of the FFN neurons computed",
            certificate.scoring.tokens,
            100.0 * certificate.perplexity_rise.value,
            100.0 * certificate.perplexity_rise.low,
            100.0 * certificate.perplexity_rise.high,
            percent(certificate.top1_agreement),
            percent(certificate.ffn_neurons_computed),
        ));
    }
}
