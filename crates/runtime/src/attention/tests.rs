//! Attention against double precision, in batches and on several threads.

use powerinfer_artifact::random::Random;
use powerinfer_tensor::CacheFormat;
use proptest::prelude::*;

use super::*;

/// KV cache and queries of some tokens.
struct Case {
    heads: Heads,
    window: Option<usize>,
    slopes: Option<Vec<f32>>,
    soft_cap: Option<f32>,
    sinks: Option<Vec<f32>>,
    queries: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl Case {
    fn new(heads: Heads, window: Option<usize>, with_slopes: bool, tokens: usize) -> Self {
        let mut random = Random::new(tokens as u64);
        let mut normal = |count: usize| {
            let numbers = (0..count).map(|_| random.normal() as f32);
            numbers.collect::<Vec<_>>()
        };
        Self {
            queries: normal(tokens * heads.count * heads.size),
            keys: normal(tokens * heads.kv_count * heads.size),
            values: normal(tokens * heads.kv_count * heads.size),
            slopes: with_slopes.then(|| {
                let slope = |head| 0.5f32.powi(head as i32 + 1);
                (0..heads.count).map(slope).collect()
            }),
            soft_cap: None,
            sinks: None,
            heads,
            window,
        }
    }

    fn tokens(&self) -> usize {
        self.queries.len() / (self.heads.count * self.heads.size)
    }

    /// Attention outputs of the tokens in batches of these sizes, the last one repeated.
    fn run(&self, format: CacheFormat, batches: &[usize], threads: &Threads) -> Vec<f32> {
        let Heads {
            count,
            kv_count,
            size,
            ..
        } = self.heads;
        let mut cache = LayerCache::new(kv_count, size, format, self.tokens()).unwrap();
        let mask = AttentionMask {
            window: self.window,
            soft_cap: self.soft_cap,
            slopes: self.slopes.as_deref(),
            sinks: self.sinks.as_deref(),
        };
        let mut out = vec![f32::NAN; self.queries.len()];
        let mut token = 0;
        let sizes = batches
            .iter()
            .chain(std::iter::repeat(&batches[batches.len() - 1]));
        for batch in sizes {
            let batch = token..self.tokens().min(token + batch);
            let own = batch.start * kv_count * size..batch.end * kv_count * size;
            let both = [&self.keys[own.clone()], &self.values[own]];
            cache.push_all(threads, &[], both, batch.len());
            let own = batch.start * count * size..batch.end * count * size;
            let (queries, mixed) = (&self.queries[own.clone()], &mut out[own]);
            attend(threads, self.heads, &mask, &[], &cache, queries, mixed);
            token = batch.end;
            if token == self.tokens() {
                return out;
            }
        }
        unreachable!("batches have no end")
    }

    /// The same for one head of one token, in double precision.
    fn exact(&self, token: usize, head: usize) -> Vec<f64> {
        let Heads {
            count,
            kv_count,
            size,
            ..
        } = self.heads;
        let kv_head = head / (count / kv_count);
        let query = &self.queries[(token * count + head) * size..][..size];
        let first = self
            .window
            .map_or(0, |window| (token + 1).saturating_sub(window));
        let score = |position: usize| {
            let key = &self.keys[(position * kv_count + kv_head) * size..][..size];
            let pairs = query.iter().zip(key);
            let product: f64 = pairs.map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
            let slopes = self.slopes.as_ref();
            let bias = slopes.map_or(0.0, |slopes| alibi_bias(slopes[head], position));
            let score = (product + f64::from(bias)) / (size as f64).sqrt();
            let cap = self.soft_cap.map(f64::from);
            cap.map_or(score, |cap| cap * (score / cap).tanh())
        };
        let scores: Vec<f64> = (first..=token).map(score).collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sinks = self.sinks.as_ref();
        let sink = sinks.map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[head]));
        let largest = largest.max(sink);
        let (mut sum, mut out) = ((sink - largest).exp(), vec![0.0; size]);
        for (score, position) in scores.iter().zip(first..) {
            let weight = (score - largest).exp();
            let value = &self.values[(position * kv_count + kv_head) * size..][..size];
            out.iter_mut()
                .zip(value)
                .for_each(|(out, value)| *out += weight * f64::from(*value));
            sum += weight;
        }
        out.into_iter().map(|out| out / sum).collect()
    }

    /// Fails if `found` is further off than `allowed` for `token`.
    fn check(&self, found: &[f32], token: usize, allowed: f64) {
        let Heads { count, size, .. } = self.heads;
        for head in 0..count {
            let found = &found[(token * count + head) * size..][..size];
            for (found, exact) in found.iter().zip(self.exact(token, head)) {
                let off = (f64::from(*found) - exact).abs();
                assert!(off <= allowed, "token {token} head {head}: {found} {exact}");
            }
        }
    }
}

/// How far results may be off whose values are normal.
fn allowed(format: CacheFormat) -> f64 {
    match format {
        CacheFormat::F32 => 1e-5,
        CacheFormat::F16 => 6e-3,
        CacheFormat::Q8_0 => 1e-1,
    }
}

fn threads(count: usize) -> Threads {
    Threads::new(Isa::detect().unwrap(), count).unwrap()
}

#[test]
fn attention_is_that_of_double_precision() {
    for format in CacheFormat::ALL {
        for (count, kv_count, size) in [
            (1, 1, 8),
            (4, 2, 64),
            (6, 1, 33),
            (8, 8, 80),
            (9, 3, 96),
            (8, 1, 128),
            (71, 1, 64),
            (2, 1, 256),
        ] {
            let heads = Heads {
                count,
                kv_count,
                size,
                query_size: size,
            };
            for (window, with_slopes, soft_cap) in [
                (None, false, None),
                (Some(5), false, Some(1.5)),
                (Some(70), true, None),
                (None, true, Some(20.0)),
            ] {
                let mut case = Case::new(heads, window, with_slopes, 100);
                case.soft_cap = soft_cap;
                if soft_cap.is_none() {
                    // Sinks below and above the scores.
                    case.sinks = Some((0..count).map(|head| head as f32 - 3.0).collect());
                }
                let found = case.run(format, &[40, 1], &threads(1));
                for token in [0, 1, 31, 32, 39, 40, 76, 99] {
                    case.check(&found, token, allowed(format));
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn batches_and_threads_change_no_bit(
        format in 0usize..3,
        kv_count in 1usize..4,
        group in 1usize..6,
        size in 1usize..70,
        window in proptest::option::of(1usize..900),
        with_slopes: bool,
        tokens in 1usize..1200,
        batches in proptest::collection::vec(1usize..600, 1..6),
    ) {
        let heads = Heads { count: kv_count * group, kv_count, size, query_size: size };
        let mut case = Case::new(heads, window, with_slopes, tokens);
        case.sinks = with_slopes.then(|| vec![0.5; heads.count]);
        let format = CacheFormat::ALL[format];
        let bits = |numbers: Vec<f32>| numbers.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        let one_by_one = bits(case.run(format, &[1], &threads(1)));
        prop_assert_eq!(&bits(case.run(format, &batches, &threads(1))), &one_by_one);
        prop_assert_eq!(&bits(case.run(format, &batches, &threads(3))), &one_by_one);
        prop_assert_eq!(&bits(case.run(format, &[1], &threads(2))), &one_by_one);
    }
}

#[test]
fn long_contexts_are_as_exact_as_short_ones() {
    let heads = Heads {
        count: 4,
        kv_count: 1,
        size: 16,
        query_size: 16,
    };
    let tokens = 32_768;
    for (format, window) in [
        (CacheFormat::F32, None),
        (CacheFormat::F16, None),
        (CacheFormat::Q8_0, None),
        (CacheFormat::F16, Some(4096)),
    ] {
        let mut case = Case::new(heads, window, false, tokens);
        // All but the last few tokens are only seen.
        let seen = tokens - 40;
        let mut cache = LayerCache::new(1, heads.size, format, tokens).unwrap();
        cache.push_all(&threads(2), &[], [&case.keys, &case.values], tokens);
        let mask = AttentionMask {
            window,
            soft_cap: None,
            slopes: None,
            sinks: None,
        };
        let run = |queries: &[f32]| {
            let mut mixed = vec![f32::NAN; queries.len()];
            attend(&threads(2), heads, &mask, &[], &cache, queries, &mut mixed);
            mixed
        };
        let mixed = run(&case.queries[seen * heads.count * heads.size..]);
        let last = run(&case.queries[(tokens - 1) * heads.count * heads.size..]);
        assert_eq!(last, mixed[39 * heads.count * heads.size..]);
        case.queries[seen * heads.count * heads.size..].copy_from_slice(&mixed);
        let found = std::mem::take(&mut case.queries);
        case.queries = Case::new(heads, window, false, tokens).queries;
        for token in [seen, tokens - 1] {
            case.check(&found, token, allowed(format) / 10.0);
        }
    }
}

#[test]
fn many_threads_share_the_heads_of_the_first_positions() {
    let heads = Heads {
        count: 32,
        kv_count: 32,
        size: 128,
        query_size: 128,
    };
    let threads = Threads::recording(Isa::detect().unwrap(), 16);
    let parts = || -> Vec<usize> {
        let jobs = threads.take_jobs().into_iter();
        jobs.map(|job| job.stages[0].len()).collect()
    };
    let numbers = vec![0.5; heads.count * heads.size];
    let mut cache = LayerCache::new(heads.kv_count, heads.size, CacheFormat::F16, 8).unwrap();
    cache.push_all(&threads, &[], [&numbers, &numbers], 1);
    assert_eq!(parts(), [16], "writing");
    // The job of the projections writes them like this.
    let position = cache.append(Vec::new(), 1).unwrap();
    assert_eq!(position.bytes, 16 * (16 << 10));
    drop(position);
    let mask = AttentionMask {
        window: None,
        soft_cap: None,
        slopes: None,
        sinks: None,
    };
    let mut mixed = vec![0.0; numbers.len()];
    attend(&threads, heads, &mask, &[], &cache, &numbers, &mut mixed);
    let found = parts();
    assert!(found.len() == 1 && found[0] >= 16, "attention: {found:?}");
}
