//! Whether messages may contain special tokens, a flag of `run` and `serve`.

use powerinfer_text::MessageTokens;

/// Special tokens in messages.
#[derive(Debug, clap::Args)]
pub(crate) struct SpecialTokenArguments {
    /// Recognise special tokens such as `</s>` in the messages of a chat, instead of reading them as text
    #[arg(long)]
    trusted_special_tokens: bool,
}

impl SpecialTokenArguments {
    /// How special tokens in messages are treated.
    pub(crate) fn in_messages(&self) -> MessageTokens {
        if self.trusted_special_tokens {
            MessageTokens::Trusted
        } else {
            MessageTokens::Plain
        }
    }
}
