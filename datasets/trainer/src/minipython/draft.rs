//! What a family draws before it becomes a task: signature, docstring and body, still apart.

use powerinfer_datasets::minipython::Kind;

/// One parameter of the function to write.
#[derive(Debug, Clone)]
pub(super) struct Parameter {
    /// Its name in the signature.
    pub name: &'static str,
    /// What it may be called with.
    pub kind: Kind,
}

/// A drawn task whose parts are not joined yet.
#[derive(Debug, Clone)]
pub(super) struct Draft {
    /// Canonical key of what is asked, without the family and without names or phrasing.
    pub combination: String,
    /// In the order of the signature.
    pub parameters: Vec<Parameter>,
    /// One paragraph, ending with a full stop.
    pub docstring: String,
    /// Lines of the body; each carries its indentation relative to the body.
    pub body: Vec<String>,
}
