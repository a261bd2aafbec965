//! One subcommand, one file.

pub(crate) mod bench;
pub(crate) mod cluster;
pub(crate) mod completions;
pub(crate) mod doctor;
pub(crate) mod eval;
pub(crate) mod export;
pub(crate) mod inspect;
pub(crate) mod list;
pub(crate) mod logits;
pub(crate) mod merge;
pub(crate) mod place;
pub(crate) mod prepare;
pub(crate) mod profile;
pub(crate) mod pull;
pub(crate) mod run;
pub(crate) mod serve;
pub(crate) mod simulate;
pub(crate) mod sweep;
pub(crate) mod synth;
pub(crate) mod tokenize;
pub(crate) mod train_predictors;
