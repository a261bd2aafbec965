//! A new list, each number changed by the first rule that fits it.

use crate::minipython::arrangement::Arrangement;
use crate::minipython::condition::{Condition, Count};
use crate::minipython::draft::{Draft, Parameter};
use crate::minipython::mapping::Mapping;
use crate::minipython::subject::Subject;
use powerinfer_artifact::random::Random;
use powerinfer_datasets::minipython::Kind;

/// What happens to the numbers that no condition fits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rest {
    Keep,
    Drop,
    Map(Mapping),
}

/// What happens to the new list at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Finish {
    Sum,
    Arrange(Arrangement),
}

/// Conditions with what they do, the rest, and the end.
#[derive(Debug, Clone)]
struct Rules {
    cases: Vec<(Condition, Mapping)>,
    rest: Rest,
    finish: Option<Finish>,
}

/// Draws a task: one rule, a rule with an else, two rules with an else, the same rearranged.
pub(in crate::minipython) fn draw(steps: usize, random: &mut Random) -> Draft {
    let subject = Subject::numbers(random);
    let rules = Rules::draw(steps, random);
    Draft {
        combination: rules.key(),
        parameters: vec![Parameter {
            name: subject.name,
            kind: Kind::Ints,
        }],
        docstring: rules.docstring(subject, random),
        body: rules.body(subject),
    }
}

impl Rules {
    fn draw(steps: usize, random: &mut Random) -> Self {
        let conditions = match steps {
            1 | 2 => vec![Condition::draw(random)],
            _ => {
                let (first, second) = Condition::cascade(random);
                vec![first, second]
            }
        };
        let mut cases: Vec<(Condition, Mapping)> = Vec::new();
        for condition in conditions {
            let mapping = Mapping::draw_after(cases.last().map(|it| it.1), random);
            cases.push((condition, mapping));
        }
        let rest = match (steps, random.below(4)) {
            (1, _) | (3 | 4, 0) => Rest::Keep,
            (3 | 4, 1) => Rest::Drop,
            _ => Rest::Map(Mapping::draw_after(cases.last().map(|it| it.1), random)),
        };
        let finish = (steps == 4).then(|| match random.below(3) {
            0 => Finish::Sum,
            _ => Finish::Arrange(Arrangement::draw(random)),
        });
        Self {
            cases,
            rest,
            finish,
        }
    }

    fn key(&self) -> String {
        let mut keys: Vec<String> = self
            .cases
            .iter()
            .map(|(condition, mapping)| format!("{}>{}", condition.key(), mapping.key()))
            .collect();
        keys.push(match self.rest {
            Rest::Keep => "else>keep".to_owned(),
            Rest::Drop => "else>drop".to_owned(),
            Rest::Map(mapping) => format!("else>{}", mapping.key()),
        });
        keys.extend(self.finish.map(|finish| match finish {
            Finish::Sum => "sum".to_owned(),
            Finish::Arrange(arrangement) => arrangement.key(),
        }));
        keys.join("|")
    }

    fn docstring(&self, subject: Subject, random: &mut Random) -> String {
        let Subject {
            name, noun, nouns, ..
        } = subject;
        let outcome = match self.finish {
            None => random
                .pick(&[
                    "Return the new list.",
                    "Return the list.",
                    "Return the result.",
                ])
                .to_owned(),
            Some(Finish::Sum) => random
                .pick(&[
                    "Return the sum of the results.",
                    "Add up the results and return that.",
                ])
                .to_owned(),
            Some(Finish::Arrange(arrangement)) => {
                let told = arrangement.imperative("the results", random);
                format!("Then {told} and return them.")
            }
        };
        if let ([(condition, mapping)], true) = (&self.cases[..], random.chance(50)) {
            let these = condition.restrict(&format!("{nouns} in {name}"), random);
            let told = mapping.imperative(&format!("each of the {these}"), random);
            let rest = match self.rest {
                Rest::Map(mapping) => mapping.imperative("each of the others", random),
                _ => random
                    .pick(&["leave the others alone", "keep the rest unchanged"])
                    .to_owned(),
            };
            let told = crate::minipython::phrase::capitalised(&told);
            return format!("{told}, {rest}. {outcome}");
        }
        let condition_first = random.chance(50);
        let mut told = Vec::new();
        for (index, (condition, mapping)) in self.cases.iter().enumerate() {
            let predicate = condition.predicate(Count::One, random);
            let change = mapping.imperative("it", random);
            let again = match index {
                0 => "",
                _ => "else ",
            };
            told.push(match condition_first {
                true => format!("{again}if it is {predicate} {change}"),
                false => format!("{again}{change} if it is {predicate}"),
            });
        }
        let rest = match self.rest {
            Rest::Keep => random.pick(&["keep it", "leave it as it is"]).to_owned(),
            Rest::Drop => random.pick(&["drop it", "leave it out"]).to_owned(),
            Rest::Map(mapping) => mapping.imperative("it", random),
        };
        told.push(format!("{} {rest}", random.pick(&["else", "otherwise"])));
        let told = told.join(", ");
        match random.below(3) {
            0 => format!("For each {noun} in {name}, {told}. {outcome}"),
            1 => format!("Make a list from {name}: for every {noun} {told}. {outcome}"),
            _ => format!("Rewrite {name} so: for each {noun}, {told}. {outcome}"),
        }
    }

    fn body(&self, subject: Subject) -> Vec<String> {
        let Subject { name, item, .. } = subject;
        if let [(condition, mapping)] = &self.cases[..] {
            let value = mapping.expression(item);
            let test = condition.test(item);
            let rest = match self.rest {
                Rest::Map(mapping) => mapping.expression(item),
                _ => item.to_owned(),
            };
            return vec![format!(
                "return [{value} if {test} else {rest} for {item} in {name}]"
            )];
        }
        let mut body = vec!["result = []".to_owned(), format!("for {item} in {name}:")];
        for (index, (condition, mapping)) in self.cases.iter().enumerate() {
            let word = match index {
                0 => "if",
                _ => "elif",
            };
            body.push(format!("    {word} {}:", condition.test(item)));
            body.push(format!(
                "        result.append({})",
                mapping.expression(item)
            ));
        }
        let rest = match self.rest {
            Rest::Drop => None,
            Rest::Keep => Some(item.to_owned()),
            Rest::Map(mapping) => Some(mapping.expression(item)),
        };
        if let Some(rest) = rest {
            body.push("    else:".to_owned());
            body.push(format!("        result.append({rest})"));
        }
        body.push(match self.finish {
            None => "return result".to_owned(),
            Some(Finish::Sum) => "return sum(result)".to_owned(),
            Some(Finish::Arrange(arrangement)) => {
                format!("return {}", arrangement.expression("result"))
            }
        });
        body
    }
}
