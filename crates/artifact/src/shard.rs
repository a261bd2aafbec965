//! Shards: runs that together cover a text, a model's layers or a list of items.

use std::{collections::BTreeMap, ops::Range, path::Path};

/// Missing shards that a message names, at most.
const MOST_NAMED: usize = 8;

/// One of several runs that together cover a text, a model's layers or a list of items.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    /// Index, from 1.
    pub index: usize,
    /// Number of shards.
    pub count: usize,
}

impl Shard {
    /// The only shard of an undivided run.
    pub const WHOLE: Self = Self { index: 1, count: 1 };

    /// Name of the file or folder that a run without shards calls `name`: `profile-1-of-4`, `sweep-1-of-4.jsonl`.
    pub fn file_name(self, name: &str) -> String {
        let Self { index, count } = self;
        match name.rsplit_once('.') {
            _ if self == Self::WHOLE => name.to_owned(),
            Some((stem, extension)) => format!("{stem}-{index}-of-{count}.{extension}"),
            None => format!("{name}-{index}-of-{count}"),
        }
    }

    /// Which of `items` items, in order, it covers: shards differ by at most one item.
    pub fn range(self, items: usize) -> Range<usize> {
        // In 128 bits, since `count` is any number that a user types.
        let edge = |index: usize| (items as u128 * index as u128 / self.count as u128) as usize;
        edge(self.index - 1)..edge(self.index)
    }

    /// Places of `shards`, which are all of one run, by index. Messages call what a shard covers `what`, and a run `run`.
    ///
    /// # Errors
    ///
    /// The place of one that cannot be merged, with the reason: it is of another number of shards, is there twice, or others are
    /// missing.
    pub fn order(
        shards: &[(Self, &Path)],
        what: &str,
        run: &str,
    ) -> Result<Vec<usize>, (usize, String)> {
        let count = shards.first().map_or(1, |(shard, _)| shard.count);
        let mut places = BTreeMap::new();
        for (place, (shard, _)) in shards.iter().enumerate() {
            if shard.count != count {
                return Err((
                    place,
                    format!(
                        "it is shard {shard}, others belong to a different number of shards; merge shards of one run"
                    ),
                ));
            }
            if let Some(first) = places.insert(shard.index, place) {
                let first = shards[first].1.display();
                return Err((
                    place,
                    format!("it covers the same {what} as `{first}`; name each one once"),
                ));
            }
        }
        let are = match count - places.len() {
            0 => return Ok(places.into_values().collect()),
            1 => "one of its shards is",
            _ => "some of its shards are",
        };
        let named: Vec<String> = (1..=count)
            .filter(|index| !places.contains_key(index))
            .map(|index| Self { index, count }.to_string())
            .take(MOST_NAMED)
            .collect();
        let missing = match count - places.len() - named.len() {
            0 => named.join(", "),
            more => format!("{} and {more} more", named.join(", ")),
        };
        Err((
            0,
            format!("{are} missing: {missing}; {run} the missing shards, then merge all"),
        ))
    }
}

impl std::fmt::Display for Shard {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}/{}", self.index, self.count)
    }
}

impl std::str::FromStr for Shard {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split_once('/');
        let parts = parts.and_then(|(i, n)| Some((i.parse().ok()?, n.parse().ok()?)));
        match parts {
            Some((index, count)) if 1 <= index && index <= count => Ok(Self { index, count }),
            _ => Err("a shard is `i/n` with 1 ≤ i ≤ n, as `3/16`".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_shard_is_written_as_a_fraction() {
        assert_eq!("2/3".parse(), Ok(Shard { index: 2, count: 3 }));
        for wrong in ["0/3", "4/3", "3", "a/b", "1/0", "-1/2", ""] {
            assert!(wrong.parse::<Shard>().is_err(), "{wrong}");
        }
        let shard = Shard { index: 2, count: 3 };
        assert_eq!(shard.file_name("profile"), "profile-2-of-3");
        assert_eq!(shard.file_name("sweep.jsonl"), "sweep-2-of-3.jsonl");
        assert_eq!(Shard::WHOLE.file_name("sweep.jsonl"), "sweep.jsonl");
    }

    #[test]
    fn missing_shards_are_named_up_to_a_number() {
        let path = Path::new("a");
        let order = |count| {
            let shard = Shard { index: 1, count };
            Shard::order(&[(shard, path)], "text", "profile")
        };
        assert_eq!(order(1), Ok(vec![0]));
        let (_, reason) = order(3).unwrap_err();
        assert!(reason.contains("missing: 2/3, 3/3;"), "{reason}");
        let (_, reason) = order(usize::MAX).unwrap_err();
        let more = format!("and {} more;", usize::MAX - 9);
        assert!(reason.contains(&more), "{reason}");
    }

    proptest! {
        #[test]
        fn shards_partition_their_items(items in 0usize..500, count in 1usize..40) {
            let mut next = 0;
            for index in 1..=count {
                let range = Shard { index, count }.range(items);
                prop_assert_eq!(range.start, next);
                prop_assert!(range.len().abs_diff(items / count) <= 1);
                next = range.end;
            }
            prop_assert_eq!(next, items);
        }
    }
}
