//! A byte-level BPE tokenizer for the demo's language, trained on the same grammar.

use anyhow::anyhow;
use tokenizers::{
    AddedToken, PreTokenizerWrapper, Tokenizer, TokenizerBuilder,
    models::bpe::{BPE, BpeTrainerBuilder},
    normalizers::NFC,
    pre_tokenizers::{byte_level::ByteLevel, digits::Digits, sequence::Sequence},
    processors::template::TemplateProcessing,
};

use crate::minipython::{Split, tasks};

/// Token that begins every text.
pub(crate) const BEGIN: u32 = 0;
/// Token that ends every text.
pub(crate) const END: u32 = 1;
/// Size of the vocabulary.
const VOCABULARY: usize = 1024;

/// Trains the tokenizer on texts of the training split. Digits stay single, so that a constant
/// can be copied digit by digit.
pub(crate) fn train(seed: u64) -> anyhow::Result<Tokenizer> {
    let special = |text: &str| AddedToken::from(text.to_owned(), true);
    let mut trainer = BpeTrainerBuilder::new()
        .show_progress(false)
        .vocab_size(VOCABULARY)
        .min_frequency(2)
        .special_tokens(vec![special("<s>"), special("</s>")])
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .build();
    let bytes = ByteLevel::default().add_prefix_space(false);
    let template = TemplateProcessing::builder()
        .try_single("<s> $A")
        .map_err(|error| anyhow!("{error}"))?
        .special_tokens(vec![("<s>", BEGIN)])
        .build()?;
    let mut tokenizer =
        TokenizerBuilder::<BPE, NFC, PreTokenizerWrapper, TemplateProcessing, ByteLevel>::new()
            .with_model(BPE::default())
            .with_normalizer(None)
            .with_pre_tokenizer(Some(
                Sequence::new(vec![Digits::new(true).into(), bytes.into()]).into(),
            ))
            .with_post_processor(Some(template))
            .with_decoder(Some(bytes))
            .build()
            .map_err(|error| anyhow!("{error}"))?;
    let texts: Vec<String> = tasks(Split::Training, seed)
        .take(30_000)
        .map(|task| task.text())
        .collect();
    tokenizer
        .train(&mut trainer, texts.into_iter())
        .map_err(|error| anyhow!("{error}"))?;
    let text = tokenizer
        .to_string(false)
        .map_err(|error| anyhow!("{error}"))?;
    text.parse().map_err(|error| anyhow!("{error}"))
}
