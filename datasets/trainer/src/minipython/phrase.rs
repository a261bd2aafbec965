//! Pieces of English and of Python that every family joins its docstrings and bodies from.

use powerinfer_artifact::random::Random;

/// `text` with its first letter in upper case.
pub(super) fn capitalised(text: &str) -> String {
    let mut characters = text.chars();
    match characters.next() {
        Some(first) => first.to_ascii_uppercase().to_string() + characters.as_str(),
        None => String::new(),
    }
}

/// The clause with its leading verb as a gerund: `drop them` becomes `dropping them`.
pub(super) fn gerund(clause: &str) -> String {
    let (verb, rest) = clause.split_once(' ').unwrap_or((clause, ""));
    let stem = match verb {
        "drop" | "skip" | "cap" | "clip" | "put" | "flip" | "cut" | "swap" => {
            verb.to_owned() + &verb[verb.len() - 1..]
        }
        _ => verb.strip_suffix('e').unwrap_or(verb).to_owned(),
    };
    match rest {
        "" => format!("{stem}ing"),
        _ => format!("{stem}ing {rest}"),
    }
}

/// `a`, `a and b`, `a, b and c`.
pub(super) fn enumeration(items: &[String]) -> String {
    match items {
        [] => String::new(),
        [only] => only.clone(),
        [head @ .., last] => format!("{} and {last}", head.join(", ")),
    }
}

/// A small count as a word or as digits.
pub(super) fn count_word(count: i64, random: &mut Random) -> String {
    match count {
        2 if random.chance(60) => "two".to_owned(),
        3 if random.chance(60) => "three".to_owned(),
        4 if random.chance(60) => "four".to_owned(),
        5 if random.chance(60) => "five".to_owned(),
        _ => count.to_string(),
    }
}

/// A threshold or an addend as the key of a combination names it: by its ten.
pub(super) fn ten(constant: i64) -> String {
    format!("{}s", constant / 10 * 10)
}

/// The expression, in brackets if it has an operator outside brackets.
pub(super) fn bracketed(expression: &str) -> String {
    let mut depth = 0;
    let operator = expression.chars().any(|character| {
        match character {
            '(' | '[' => depth += 1,
            ')' | ']' => depth -= 1,
            _ => {}
        }
        depth == 0 && character == ' '
    });
    match operator || expression.starts_with('-') {
        true => format!("({expression})"),
        false => expression.to_owned(),
    }
}

/// The lines, one level deeper.
pub(super) fn indented(lines: impl IntoIterator<Item = String>) -> impl Iterator<Item = String> {
    lines.into_iter().map(|line| format!("    {line}"))
}

/// Tells `clauses` in the order they happen, then what to return: `outcome` is a noun phrase.
///
/// `told_of` is the same noun phrase about the untouched input, for the order that names the
/// outcome first; without it that order is not used.
pub(super) fn narrate(
    clauses: &[String],
    outcome: &str,
    told_of: Option<&str>,
    random: &mut Random,
) -> String {
    let (Some(first), Some(last)) = (clauses.first(), clauses.last()) else {
        return format!("Return {outcome}.");
    };
    let style = random.below(6);
    if let (4 | 5, Some(told_of)) = (style, told_of) {
        let gerunds: Vec<String> = clauses.iter().map(|clause| gerund(clause)).collect();
        return format!("Return {told_of} after {}.", enumeration(&gerunds));
    }
    if clauses.len() == 1 {
        let joint = random.pick(&[" and return", ", then return", " and give back"]);
        return format!("{}{joint} {outcome}.", capitalised(first));
    }
    let middle = &clauses[1..clauses.len() - 1];
    match style {
        0 => {
            let told: Vec<String> = std::iter::once(format!("first {first}"))
                .chain(middle.iter().map(|clause| format!("then {clause}")))
                .chain([format!("then {last}")])
                .collect();
            format!("{}. Return {outcome}.", capitalised(&told.join(", ")))
        }
        1 => {
            let told: Vec<String> = clauses.iter().map(|clause| capitalised(clause)).collect();
            format!("{}. Return {outcome}.", told.join(". "))
        }
        2 => format!(
            "{}, then {last} and return {outcome}.",
            capitalised(&clauses[..clauses.len() - 1].join(", "))
        ),
        _ => format!("{} and return {outcome}.", capitalised(&clauses.join(", "))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gerunds_follow_english_spelling() {
        assert_eq!(gerund("drop them"), "dropping them");
        assert_eq!(gerund("take the first"), "taking the first");
        assert_eq!(gerund("keep"), "keeping");
        assert_eq!(gerund("square each"), "squaring each");
    }

    #[test]
    fn enumerations_end_in_and() {
        let items = ["a", "b", "c"].map(str::to_owned);
        assert_eq!(enumeration(&items), "a, b and c");
        assert_eq!(enumeration(&items[..1]), "a");
    }
}
