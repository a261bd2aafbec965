//! One step of a pipeline over numbers, and how a pipeline is told and written.

use super::arrangement::Arrangement;
use super::condition::{Condition, usual_numbers};
use super::difficulty::COMPLEMENT_PERCENT;
use super::mapping::Mapping;
use super::phrase::{indented, narrate};
use super::reduction::Reduction;
use super::subject::Subject;
use powerinfer_artifact::random::Random;

/// A step from one list of numbers to the next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Operation {
    /// Keep the numbers that pass.
    Keep(Condition),
    /// Change every number.
    Map(Mapping),
    /// Rearrange the list.
    Arrange(Arrangement),
}

use Operation::{Arrange, Keep, Map};

/// Operations and what is returned at the end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Pipeline {
    /// In the order in which they are applied.
    pub operations: Vec<Operation>,
    /// Applied to what the operations leave.
    pub reduction: Reduction,
}

impl Operation {
    fn draw_after(before: Option<&Self>, random: &mut Random) -> Self {
        loop {
            let operation = match random.below(20) {
                0..=7 => Keep(Condition::draw(random)),
                8..=15 => Map(match before {
                    Some(&Map(mapping)) => Mapping::draw_after(Some(mapping), random),
                    _ => Mapping::draw_after(None, random),
                }),
                _ => Arrange(Arrangement::draw(random)),
            };
            let clash = match (before, &operation) {
                (Some(Keep(_)), Keep(_)) => true,
                (Some(Arrange(before)), Arrange(now)) => now.is_order() || !before.is_order(),
                _ => false,
            };
            if !clash {
                return operation;
            }
        }
    }

    fn key(&self) -> String {
        match self {
            Keep(condition) => format!("keep:{}", condition.key()),
            Map(mapping) => mapping.key(),
            Arrange(arrangement) => arrangement.key(),
        }
    }

    fn line(&self, list: &str, item: &str) -> String {
        match self {
            Keep(condition) => {
                let test = condition.test(item);
                format!("{list} = [{item} for {item} in {list} if {test}]")
            }
            Map(mapping) => {
                let expression = mapping.expression(item);
                format!("{list} = [{expression} for {item} in {list}]")
            }
            Arrange(arrangement) => format!("{list} = {}", arrangement.expression(list)),
        }
    }

    fn clause(&self, source: Option<&Source>, random: &mut Random) -> String {
        match self {
            Keep(condition) => {
                let nouns = match source {
                    Some(source) => source.nouns(random),
                    None => random.pick(&["ones", "results", "values"]).to_owned(),
                };
                match condition.complement() {
                    Some(complement) if random.chance(COMPLEMENT_PERCENT) => {
                        let verb = random.pick(&["drop", "remove", "discard", "leave out"]);
                        format!("{verb} the {}", complement.restrict(&nouns, random))
                    }
                    _ => {
                        let verb = random.pick(&["keep", "take", "select", "keep only"]);
                        format!("{verb} the {}", condition.restrict(&nouns, random))
                    }
                }
            }
            Map(mapping) => {
                let object = match source {
                    Some(source) => source.each(random),
                    None => random
                        .pick(&["each", "each of them", "each one"])
                        .to_owned(),
                };
                mapping.imperative(&object, random)
            }
            Arrange(arrangement) => {
                let object = match source {
                    Some(source) => source.whole(),
                    None => random.pick(&["them", "the result", "them"]).to_owned(),
                };
                arrangement.imperative(&object, random)
            }
        }
    }
}

/// Where the numbers of a pipeline come from.
#[derive(Debug, Clone)]
pub(super) struct Source {
    /// The list and the loop variable over it.
    pub subject: Subject,
    /// How the docstring names the whole list: `xs`, "the integers from 1 to n".
    pub told: String,
    /// The Python expression that is iterated.
    pub iterable: String,
}

impl Source {
    /// A list parameter.
    pub(super) fn list(subject: Subject) -> Self {
        Self {
            subject,
            told: subject.name.to_owned(),
            iterable: subject.name.to_owned(),
        }
    }

    fn is_list(&self) -> bool {
        self.told == self.subject.name
    }

    fn nouns(&self, random: &mut Random) -> String {
        match self.is_list() {
            true => {
                let preposition = random.pick(&["in", "of", "in"]);
                format!("{} {preposition} {}", self.subject.nouns, self.told)
            }
            false => self.told.trim_start_matches("the ").to_owned(),
        }
    }

    fn each(&self, random: &mut Random) -> String {
        match self.is_list() {
            true => {
                let each = random.pick(&["each", "every"]);
                format!("{each} {} in {}", self.subject.noun, self.told)
            }
            false => format!("each of {}", self.told),
        }
    }

    fn whole(&self) -> String {
        self.told.clone()
    }
}

impl Pipeline {
    /// A pipeline of `steps` steps, counting the reduction unless it is the list itself.
    pub(super) fn draw(steps: usize, random: &mut Random) -> Self {
        loop {
            let reduction = match random.chance(35) {
                true => Reduction::List,
                false => Reduction::draw(random),
            };
            let count = steps - usize::from(reduction != Reduction::List);
            let mut operations: Vec<Operation> = Vec::with_capacity(count);
            for _ in 0..count {
                operations.push(Operation::draw_after(operations.last(), random));
            }
            let pipeline = Self {
                operations,
                reduction,
            };
            if pipeline.is_sensible() {
                return pipeline;
            }
        }
    }

    fn is_sensible(&self) -> bool {
        self.every_step_matters() && self.reduction_matters()
    }

    /// Whether, number by number, every filter passes some and stops some, and every change
    /// changes something and leaves different numbers different enough to go on with.
    fn every_step_matters(&self) -> bool {
        let mut values = usual_numbers();
        self.operations.iter().all(|operation| {
            let before = values.clone();
            match operation {
                Keep(condition) => {
                    values.retain(|&value| condition.holds(value));
                    condition.splits(&before)
                }
                Map(mapping) => {
                    for value in &mut values {
                        *value = mapping.apply(*value);
                    }
                    values != before && values.iter().any(|&value| value != values[0])
                }
                Arrange(_) => true,
            }
        })
    }

    fn reduction_matters(&self) -> bool {
        let changes_count = |operation: &Operation| {
            matches!(operation, Keep(_)) || matches!(operation, Arrange(it) if !it.is_order())
        };
        match self.reduction {
            // Counting what nothing was taken from, or what is only changed, asks nothing.
            Reduction::Count => {
                !matches!(self.operations.last(), Some(Map(_)))
                    && self.operations.iter().any(changes_count)
            }
            reduction if reduction.sees_order() => true,
            _ => !matches!(self.operations.last(), Some(Arrange(it)) if it.is_order()),
        }
    }

    /// Key of the combination.
    pub(super) fn key(&self) -> String {
        let mut keys: Vec<String> = self.operations.iter().map(Operation::key).collect();
        keys.push(self.reduction.key());
        keys.join("|")
    }

    /// The docstring.
    pub(super) fn docstring(&self, source: &Source, random: &mut Random) -> String {
        if random.chance(35)
            && let Some(nested) = self.nested(source, random)
        {
            return format!("Return {nested}.");
        }
        let clauses: Vec<String> = self
            .operations
            .iter()
            .enumerate()
            .map(|(index, operation)| operation.clause((index == 0).then_some(source), random))
            .collect();
        let whole = source.whole();
        if clauses.is_empty() {
            return format!("Return {}.", self.reduction.of(&whole, random));
        }
        let outcome = self.reduction.of_the_rest(random);
        let told_of = match self.reduction {
            Reduction::Count => None,
            _ if !source.is_list() => None,
            Reduction::List => Some(whole),
            _ => Some(self.reduction.of(&whole, random)),
        };
        narrate(&clauses, &outcome, told_of.as_deref(), random)
    }

    /// The nested noun phrase of a pipeline that filters, maps and reduces, in this order.
    fn nested(&self, source: &Source, random: &mut Random) -> Option<String> {
        let nouns = source.nouns(random);
        let these = match &self.operations[..] {
            [Keep(condition)] => condition.restrict(&nouns, random),
            [Map(mapping)] => mapping.nominal(&nouns)?,
            [Keep(condition), Map(mapping)] => {
                mapping.nominal(&condition.restrict(&nouns, random))?
            }
            _ => return None,
        };
        Some(self.reduction.of(&format!("the {these}"), random))
    }

    /// The body: one comprehension, one loop, or one line for each step.
    ///
    /// Which of them follows from the steps alone, so the docstring determines it.
    pub(super) fn body(&self, source: &Source) -> Vec<String> {
        self.comprehension(source)
            .or_else(|| self.gathering_loop(source))
            .unwrap_or_else(|| self.lines(source))
    }

    fn comprehension(&self, source: &Source) -> Option<Vec<String>> {
        let item = source.subject.item;
        let (value, test) = match &self.operations[..] {
            [Keep(condition)] => (item.to_owned(), Some(condition)),
            [Map(mapping)] => (mapping.expression(item), None),
            [Keep(condition), Map(mapping)] => (mapping.expression(item), Some(condition)),
            _ => return None,
        };
        let mut comprehension = format!("{value} for {item} in {}", source.iterable);
        if let Some(condition) = test {
            comprehension.push_str(&format!(" if {}", condition.test(item)));
        }
        let value = self.reduction.over_comprehension(&comprehension)?;
        Some(vec![format!("return {value}")])
    }

    fn gathering_loop(&self, source: &Source) -> Option<Vec<String>> {
        if self.operations.is_empty() {
            return None;
        }
        let item = source.subject.item;
        let gathering = self.reduction.gathering(item)?;
        let mut inner = vec![gathering.step];
        for operation in self.operations.iter().rev() {
            inner = match operation {
                Keep(condition) => std::iter::once(format!("if {}:", condition.test(item)))
                    .chain(indented(inner))
                    .collect(),
                Map(mapping) => std::iter::once(mapping.statement(item))
                    .chain(inner)
                    .collect(),
                Arrange(_) => return None,
            };
        }
        let mut body = vec![
            gathering.start.to_owned(),
            format!("for {item} in {}:", source.iterable),
        ];
        body.extend(indented(inner));
        body.push(format!("return {}", gathering.variable));
        Some(body)
    }

    fn lines(&self, source: &Source) -> Vec<String> {
        let (list, item) = (source.subject.name, source.subject.item);
        let mut body = Vec::new();
        if !source.is_list() {
            body.push(format!("{list} = list({})", source.iterable));
        }
        body.extend(self.operations.iter().map(|it| it.line(list, item)));
        body.extend(self.reduction.over_list(list, item));
        body
    }
}
