//! A list of numbers, filtered, mapped and arranged, then reduced.

use crate::minipython::draft::{Draft, Parameter};
use crate::minipython::pipeline::{Pipeline, Source};
use crate::minipython::subject::Subject;
use powerinfer_artifact::random::Random;
use powerinfer_datasets::minipython::Kind;

/// Draws a task; the reduction counts as a step.
pub(in crate::minipython) fn draw(steps: usize, random: &mut Random) -> Draft {
    let pipeline = Pipeline::draw(steps, random);
    let subject = Subject::numbers(random);
    let source = Source::list(subject);
    Draft {
        combination: pipeline.key(),
        parameters: vec![Parameter {
            name: subject.name,
            kind: Kind::Ints,
        }],
        docstring: pipeline.docstring(&source, random),
        body: pipeline.body(&source),
    }
}
