//! Sums of rows on several threads: the `down` projection, for one token and for several.

use std::{cell::Cell, ops::Range};

use powerinfer_kernels::{AXPY_GROUP_ROWS, Arithmetic, relative_axpy_cost};
use powerinfer_tensor::{BLOCK, Matrix};

use super::{PARTS_PER_THREAD, SUMS_PER_THREAD, Threads, WORTH_SPLITTING, Work, add};
use crate::{ActivationFormat, ffn::Active, memory::PREFILL_BATCH, scratch::ThreadBuffer};

/// Maximum number of parts of a list of rows; each part is summed separately.
const SUM_PARTS: usize = 32;
/// Fewest rows with non-zero coefficients in a part, except for the last.
const LEAST_PART_ROWS: usize = 64;
/// Coefficients that are counted together.
const COUNTED_AT_ONCE: usize = 16;
/// Number of groups whose rows each token adds in one call if tokens share few rows; a stripe of these rows stays in
/// the second-level cache.
const GROUPS_AT_ONCE: usize = 2;
/// Maximum number of dense groups that a call adds in integers.
const DENSE_GROUPS_AT_ONCE: usize = 8;
/// Columns that a thread takes of a sum over many tokens, or a multiple.
const STRIPE_COLUMNS: usize = 512;
/// Columns that a thread takes of a sum over many tokens, or a multiple, if stripes of [`STRIPE_COLUMNS`] are fewer than threads.
const LEAST_BATCH_COLUMNS: usize = 128;
/// Columns that a thread takes at most if tokens are processed one by one: rows are read a quarter faster in long
/// pieces.
const LONG_STRIPE_COLUMNS: usize = 2048;
/// Columns that a thread takes at least if rows are read once.
const LEAST_STRIPE_COLUMNS: usize = 1024;
/// Approximate units of work per thread, if threads share parts.
const UNITS_PER_THREAD: usize = 2;
/// Minimum number of columns of a unit.
const LEAST_UNIT_COLUMNS: usize = 512;
/// Maximum number of units of a part.
const MAX_PIECES: usize = 8;
/// Maximum number of units of a list.
const MAX_UNITS: usize = SUM_PARTS * MAX_PIECES;

thread_local! {
    /// Partial sums, `[parts, columns]`.
    static PARTIAL_SUMS: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
    /// Sums of all tokens, stripe by stripe.
    static STRIPES: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

impl Threads {
    /// `out += Σ_i coefficients[i] · matrix[rows[i]]`, rows in ascending order.
    ///
    /// Each [part](Parts) of the list is summed separately. The partial sums are added in order, and the total is added
    /// to `out`. A few threads divide integer sums by columns, so that no sums pass between them; more threads divide
    /// them by parts, because whole rows are read faster.
    pub(crate) fn add_rows_of(
        &self,
        matrix: &Matrix<'_>,
        rows: &[u32],
        coefficients: &[f32],
        out: &mut [f32],
    ) {
        let (columns, parts) = (out.len(), Parts::new(rows, coefficients));
        if columns == 0 || parts.count == 0 {
            return;
        }
        let bytes = rows.len() * matrix.row_bytes();
        let sum_part = |part: usize, columns: Range<usize>, next: &[u32], sum: &mut [f32]| {
            let listed = parts.range(part);
            let (rows, coefficients) = (&rows[listed.clone()], &coefficients[listed]);
            sum.fill(0.0);
            self.add_rows(matrix, rows, coefficients, next, columns, sum);
        };
        let stripe = columns
            .div_ceil(self.count())
            .next_multiple_of(STRIPE_COLUMNS);
        // Sums of floats and of most rows are bound by memory, which reads whole rows faster.
        let by_columns = self.sum_product(matrix) == Arithmetic::Integer
            && stripe >= LEAST_STRIPE_COLUMNS
            && rows.len() < matrix.rows() / 2;
        if self.count() == 1 || by_columns || bytes < WORTH_SPLITTING {
            let work = Work {
                out,
                bytes,
                step: stripe,
                most_parts: self.count(),
            };
            return self.share_values(work, |values, out| {
                ThreadBuffer(&PARTIAL_SUMS).stale(2 * out.len(), |sums| {
                    let (all, sum) = sums.split_at_mut(out.len());
                    sum_part(0, values.clone(), &rows[parts.range(0).end..], all);
                    for part in 1..parts.count {
                        sum_part(part, values.clone(), &rows[parts.range(part).end..], sum);
                        add(all, sum);
                    }
                    add(out, all);
                });
            });
        }
        ThreadBuffer(&PARTIAL_SUMS).stale(parts.count * columns, |sums| {
            let (bounds, units) = self.units(&parts, columns);
            let total = Work {
                bytes: parts.count * size_of_val(out),
                step: BLOCK,
                most_parts: PARTS_PER_THREAD * self.count(),
                out,
            };
            self.share_stages(
                (sums, &bounds[..=units]),
                |values, mut sums| {
                    let mut first = values.start;
                    // `sums` is one unit, or all of them if one thread runs them.
                    while !sums.is_empty() {
                        let (part, start) = (first / columns, first % columns);
                        let width = sums.len().min(columns - start);
                        let (sum, rest) = sums.split_at_mut(width);
                        sum_part(part, start..start + width, &[], sum);
                        (first, sums) = (first + width, rest);
                    }
                },
                |sums| &*sums,
                total,
                |columns_of, out, sums| {
                    let starts = columns_of.step_by(BLOCK);
                    for (start, out) in starts.zip(out.chunks_mut(BLOCK)) {
                        let mut all = [0.0; BLOCK];
                        let all = &mut all[..out.len()];
                        for (part, sums) in sums.chunks_exact(columns).enumerate() {
                            let sums = &sums[start..start + out.len()];
                            match part {
                                0 => all.copy_from_slice(sums),
                                _ => add(all, sums),
                            }
                        }
                        add(out, all);
                    }
                },
            );
        });
    }

    /// Bounds of the units into which threads divide partial sums `[parts, columns]`, and the number of units. The more
    /// rows a part lists, the fewer columns a unit has.
    pub(super) fn units(&self, parts: &Parts, columns: usize) -> ([usize; MAX_UNITS + 1], usize) {
        let listed = parts.range(parts.count - 1).end;
        // The sizes of parts differ by up to a group; a few more rows should not make the units smaller.
        let most = listed * columns * 5 / (4 * UNITS_PER_THREAD * self.count());
        let (mut bounds, mut units) = ([0; MAX_UNITS + 1], 0);
        for part in 0..parts.count {
            let rows = parts.range(part).len();
            let fits = |pieces: &usize| rows * columns.div_ceil(*pieces) <= most;
            let halves = (0..=MAX_PIECES.ilog2()).map(|power| 1 << power);
            let pieces = halves.clone().find(fits).unwrap_or(MAX_PIECES);
            let pieces = pieces.min((columns / LEAST_UNIT_COLUMNS).max(1));
            let step = columns.div_ceil(pieces).next_multiple_of(BLOCK);
            for start in (0..columns).step_by(step) {
                units += 1;
                bounds[units] = part * columns + columns.min(start + step);
            }
        }
        (bounds, units)
    }

    /// Arithmetic of sums of rows of `matrix`.
    fn sum_product(&self, matrix: &Matrix<'_>) -> Arithmetic {
        match self.activations {
            ActivationFormat::Int8 if matrix.format().has_nibbles() => Arithmetic::Integer,
            _ => Arithmetic::Float,
        }
    }

    /// `out[c] += Σ_i coefficients[i] · matrix[rows[i], columns.start + c]`, on the calling thread, which reads the rows
    /// `next` afterwards.
    fn add_rows(
        &self,
        matrix: &Matrix<'_>,
        rows: &[u32],
        coefficients: &[f32],
        next: &[u32],
        columns: Range<usize>,
        out: &mut [f32],
    ) {
        let isa = self.isa;
        match self.sum_product(matrix) {
            Arithmetic::Integer => {
                isa.axpy_rows_integer(matrix, rows, coefficients, next, columns, out);
            }
            Arithmetic::Float => isa.axpy_rows(matrix, rows, coefficients, columns, out),
        }
    }

    /// `out[t] += Σ_i coefficients[t][i] · matrix[rows[t][i]]` for every token t of `out [tokens, columns]`,
    /// bit-identical to [`Self::add_rows_of`]; returns the number of distinct rows.
    pub(crate) fn add_rows_of_batch(
        &self,
        matrix: &Matrix<'_>,
        active: &[Active],
        out: &mut [f32],
    ) -> usize {
        if let [one] = active {
            self.add_rows_of(matrix, &one.rows, &one.coefficients, out);
            return one.rows.len();
        }
        let product = self.sum_product(matrix);
        let tokens: Vec<_> = active
            .iter()
            .map(|one| (one, Parts::new(&one.rows, &one.coefficients)))
            .collect();
        let mut groups = Group::all(matrix.rows(), &tokens);
        let listed: usize = groups.iter().map(|group| group.listed).sum();
        self.by_chunks(&mut groups, 1, listed * size_of::<f32>(), |_, groups| {
            groups[0].prepare(matrix, active, product);
        });
        self.sum_groups(matrix, active, &groups, listed, out);
        groups.iter().map(|group| group.union.len()).sum()
    }

    /// Adds the sums of `groups`, in which all tokens together list `listed` rows, to `out [tokens, columns]`.
    fn sum_groups(
        &self,
        matrix: &Matrix<'_>,
        active: &[Active],
        groups: &[Group],
        listed: usize,
        out: &mut [f32],
    ) {
        let columns = matrix.columns();
        let tokens = out.len() / columns.max(1);
        let dense = groups.iter().filter(|group| group.is_dense);
        let [dense, sums] = dense.fold([0, 0], |[listed, sums], group| {
            [listed + group.listed, sums.max(group.tokens.len())]
        });
        if dense == 0 {
            return self.sum_by_tokens(matrix, active, groups, listed, out);
        }
        let most = if 2 * dense > listed {
            // The sums of a stripe stay in the cache: the fewer tokens share rows, the longer the stripe.
            STRIPE_COLUMNS * (PREFILL_BATCH / sums).max(1)
        } else {
            LONG_STRIPE_COLUMNS
        };
        // Stripes are short if there would otherwise be fewer stripes than threads.
        let unit = match columns / STRIPE_COLUMNS < self.count() {
            true => LEAST_BATCH_COLUMNS,
            false => STRIPE_COLUMNS,
        };
        let stripe_columns = columns
            .div_ceil(self.count())
            .next_multiple_of(unit)
            .min(most);
        // Stripes of columns, each `[tokens, columns of the stripe]`.
        ThreadBuffer(&STRIPES).zeroed(out.len(), |stripes| {
            let work = Work {
                out: &mut *stripes,
                bytes: listed * matrix.row_bytes(),
                step: stripe_columns * tokens,
                most_parts: self.most_parts(),
            };
            self.share_values(work, |values, stripes| {
                let starts = (values.start / tokens..).step_by(stripe_columns);
                for (start, stripe) in starts.zip(stripes.chunks_mut(stripe_columns * tokens)) {
                    let width = stripe.len() / tokens;
                    // Freed after each stripe, because kept buffers of many threads would exceed the planned memory.
                    let sums = &mut *vec![0.0; stripe.len()];
                    let columns = start..start + width;
                    for groups in groups.chunk_by(Group::is_added_with) {
                        let columns = columns.clone();
                        if groups[0].is_dense {
                            self.add_dense(matrix, active, groups, columns, sums, stripe);
                            continue;
                        }
                        for groups in groups.chunks(GROUPS_AT_ONCE) {
                            let active = (active, 0..tokens);
                            self.add_tokens(matrix, active, groups, columns.clone(), sums, stripe);
                        }
                    }
                }
            });
            let bytes = size_of_val(out);
            self.by_chunks(out, columns, bytes, |token, out| {
                for start in (0..columns).step_by(stripe_columns) {
                    let width = stripe_columns.min(columns - start);
                    let stripe = &stripes[start * tokens + token * width..][..width];
                    add(&mut out[start..start + width], stripe);
                }
            });
        });
    }

    /// Variant of [`Self::sum_groups`] for groups none of which is dense: threads divide the tokens and read whole rows.
    fn sum_by_tokens(
        &self,
        matrix: &Matrix<'_>,
        active: &[Active],
        groups: &[Group],
        listed: usize,
        out: &mut [f32],
    ) {
        let columns = matrix.columns();
        // Every part reads all rows.
        let work = Work {
            out,
            bytes: listed * matrix.row_bytes(),
            step: columns,
            most_parts: SUMS_PER_THREAD * self.count(),
        };
        self.share_values(work, |values, out| {
            let tokens = values.start / columns..values.end / columns;
            for start in (0..columns).step_by(LONG_STRIPE_COLUMNS) {
                let stripe = start..columns.min(start + LONG_STRIPE_COLUMNS);
                let length = tokens.len() * stripe.len();
                let sums = &mut *vec![0.0; 2 * length];
                let (sums, all) = sums.split_at_mut(length);
                for groups in groups.chunks(GROUPS_AT_ONCE) {
                    let tokens = tokens.clone();
                    self.add_tokens(matrix, (active, tokens), groups, stripe.clone(), sums, all);
                }
                let all = all.chunks_exact(stripe.len());
                for (out, all) in out.chunks_exact_mut(columns).zip(all) {
                    add(&mut out[stripe.clone()], all);
                }
            }
        });
    }

    /// Adds the rows of dense `groups` with the same tokens to the `sums [tokens, columns]` of parts. When a part ends, adds its sum to
    /// `out`. Runs on the calling thread.
    fn add_dense(
        &self,
        matrix: &Matrix<'_>,
        active: &[Active],
        groups: &[Group],
        columns: Range<usize>,
        sums: &mut [f32],
        out: &mut [f32],
    ) {
        let (width, tokens) = (columns.len(), &groups[0].tokens);
        if tokens.len() * width == sums.len() {
            return self.add_dense_groups(matrix, active, groups, columns, sums, out);
        }
        let of =
            |listed: &Listed| listed.token as usize * width..(listed.token as usize + 1) * width;
        let gather = |all: &[f32]| -> Vec<f32> {
            let own = tokens.iter().flat_map(|listed| &all[of(listed)]);
            own.copied().collect()
        };
        let [mut own_sums, mut own_out] = [gather(sums), gather(out)];
        self.add_dense_groups(matrix, active, groups, columns, &mut own_sums, &mut own_out);
        let own = own_sums
            .chunks_exact(width)
            .zip(own_out.chunks_exact(width));
        for (listed, (own_sum, own_out)) in tokens.iter().zip(own) {
            sums[of(listed)].copy_from_slice(own_sum);
            out[of(listed)].copy_from_slice(own_out);
        }
    }

    /// Variant of [`Self::add_dense`] whose `sums` and `out` contain only the groups' tokens.
    fn add_dense_groups(
        &self,
        matrix: &Matrix<'_>,
        active: &[Active],
        groups: &[Group],
        columns: Range<usize>,
        sums: &mut [f32],
        out: &mut [f32],
    ) {
        let (isa, product) = (self.isa, self.sum_product(matrix));
        let at_once = match product {
            Arithmetic::Integer => DENSE_GROUPS_AT_ONCE,
            Arithmetic::Float => 1,
        };
        for groups in groups.chunks(at_once) {
            let tokens = groups.iter().flat_map(|group| &group.tokens);
            let ends: Vec<bool> = tokens.map(|listed| listed.ends_part).collect();
            let rows = groups.iter().flat_map(|group| &group.union);
            let rows: Vec<u32> = rows.copied().collect();
            let mut coefficients = vec![0.0; groups[0].tokens.len() * rows.len()];
            let mut start = 0;
            for group in groups {
                let end = start + group.union.len();
                let of_tokens = coefficients.chunks_exact_mut(rows.len());
                group.spread(active, of_tokens.map(|own| &mut own[start..end]));
                start = end;
            }
            let (coefficients, columns) = (coefficients.as_slice(), columns.clone());
            match product {
                Arithmetic::Integer => isa.axpy_rows_batch_integer(
                    matrix,
                    &rows,
                    coefficients,
                    columns,
                    &ends,
                    sums,
                    out,
                ),
                Arithmetic::Float => {
                    let width = columns.len();
                    isa.axpy_rows_batch(matrix, &rows, coefficients, columns, sums);
                    let out = out.chunks_exact_mut(width);
                    let both = sums.chunks_exact_mut(width).zip(out).zip(&ends);
                    for ((sum, out), _) in both.filter(|(_, ends)| **ends) {
                        add(out, sum);
                        sum.fill(0.0);
                    }
                }
            }
        }
    }

    /// Adds the rows of up to [`GROUPS_AT_ONCE`] groups to `sums [tokens, columns]`, token by token. `sums` has the sum of the current
    /// part of each list in `active[tokens]`; when a part ends, its sum is added to `out`. The rows stay in the cache until every token
    /// has added its own.
    fn add_tokens(
        &self,
        matrix: &Matrix<'_>,
        (active, tokens): (&[Active], Range<usize>),
        groups: &[Group],
        columns: Range<usize>,
        sums: &mut [f32],
        out: &mut [f32],
    ) {
        let mut left = [[].as_slice(); GROUPS_AT_ONCE];
        for (left, group) in left.iter_mut().zip(groups) {
            *left = group.tokens_in(&tokens);
        }
        while let Some(token) = left
            .iter()
            .filter_map(|left| left.first())
            .map(|it| it.token)
            .min()
        {
            let Active { rows, coefficients } = &active[token as usize];
            let place = (token as usize - tokens.start) * columns.len();
            let sum = &mut sums[place..place + columns.len()];
            let add_listed = |listed: Range<usize>, sum: &mut [f32]| {
                if !listed.is_empty() {
                    let (rows, coefficients) = (&rows[listed.clone()], &coefficients[listed]);
                    self.add_rows(matrix, rows, coefficients, &[], columns.clone(), sum);
                }
            };
            let mut listed = 0..0;
            for left in &mut left {
                let Some((own, rest)) = left.split_first().filter(|(own, _)| own.token == token)
                else {
                    continue;
                };
                *left = rest;
                if listed.is_empty() {
                    listed.start = own.start as usize;
                }
                listed.end = own.end as usize;
                if own.ends_part {
                    add_listed(std::mem::take(&mut listed), sum);
                    add(&mut out[place..place + columns.len()], sum);
                    sum.fill(0.0);
                }
            }
            add_listed(listed, sum);
        }
    }
}

/// Parts of a list of rows in ascending order. They depend only on the rows with non-zero coefficients, so the order of additions is fixed
/// whether or not other rows are listed. Each part has about the same number of these rows, however they are distributed over the matrix.
/// All listed rows of a group whose coefficients are rounded together are in one part.
pub(crate) struct Parts {
    /// End of each part in the list.
    ends: [usize; SUM_PARTS],
    pub(super) count: usize,
}

impl Parts {
    pub(crate) fn new(rows: &[u32], coefficients: &[f32]) -> Self {
        let mut left = counted(coefficients);
        let least = left.div_ceil(SUM_PARTS).max(LEAST_PART_ROWS);
        let mut parts = Self {
            ends: [0; SUM_PARTS],
            count: 0,
        };
        let mut end = 0;
        while end < rows.len() {
            let start = end;
            let mut wanted = least.min(left);
            while wanted > 0 {
                let chunk = &coefficients[end..coefficients.len().min(end + COUNTED_AT_ONCE)];
                let found = counted(chunk);
                if found < wanted {
                    wanted -= found;
                    end += chunk.len();
                    continue;
                }
                // The part ends with the group of the last row that is counted.
                let mut last = (0..chunk.len()).filter(|index| chunk[*index] != 0.0);
                let last = end + last.nth(wanted - 1).expect("enough were found");
                let next = &rows[last..rows.len().min(last + AXPY_GROUP_ROWS)];
                let group = next[0] as usize / AXPY_GROUP_ROWS;
                end = last + next.partition_point(|row| *row as usize / AXPY_GROUP_ROWS == group);
                break;
            }
            left -= counted(&coefficients[start..end]);
            if left == 0 {
                end = rows.len();
            }
            parts.ends[parts.count] = end;
            parts.count += 1;
        }
        parts
    }

    /// Range of part `index` in the list.
    pub(super) fn range(&self, index: usize) -> Range<usize> {
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        start..self.ends[index]
    }

    /// Whether a part ends before entry `index` of the list.
    fn ends_at(&self, index: usize) -> bool {
        self.ends[..self.count].binary_search(&index).is_ok()
    }
}

/// Number of coefficients that are not 0.
fn counted(coefficients: &[f32]) -> usize {
    // Without branches, so that the compiler vectorises it.
    let counts = coefficients
        .iter()
        .map(|coefficient| u32::from(*coefficient != 0.0));
    counts.sum::<u32>() as usize
}

/// The rows of a token within a group: a non-empty range of the token's list.
struct Listed {
    token: u32,
    start: u32,
    end: u32,
    /// Whether one of the token's parts ends with these rows.
    ends_part: bool,
}

/// Rows of a matrix whose coefficients are rounded together, in sums for several tokens.
#[derive(Default)]
struct Group {
    first: usize,
    /// The tokens that list rows of the group, in ascending order.
    tokens: Vec<Listed>,
    /// Rows of all tokens.
    listed: usize,
    /// Rows that any token lists, in ascending order.
    union: Vec<u32>,
    /// Whether all rows of the union are added for every token of the group, because these tokens share most of them.
    is_dense: bool,
}

impl Group {
    /// The groups of a matrix with `rows` rows, without groups of which no token lists a row.
    fn all(rows: usize, tokens: &[(&Active, Parts)]) -> Vec<Self> {
        let mut groups = Vec::new();
        groups.resize_with(rows.div_ceil(AXPY_GROUP_ROWS), Self::default);
        for (token, (active, parts)) in tokens.iter().enumerate() {
            let mut start = 0;
            while let Some(row) = active.rows.get(start) {
                let index = *row as usize / AXPY_GROUP_ROWS;
                // A list has no more rows of a group than the group itself.
                let most = &active.rows[start..active.rows.len().min(start + AXPY_GROUP_ROWS)];
                let own = most.partition_point(|row| *row as usize / AXPY_GROUP_ROWS == index);
                groups[index].listed += own;
                groups[index].tokens.push(Listed {
                    token: token as u32,
                    start: start as u32,
                    end: (start + own) as u32,
                    ends_part: parts.ends_at(start + own),
                });
                start += own;
            }
        }
        for (index, group) in groups.iter_mut().enumerate() {
            group.first = index * AXPY_GROUP_ROWS;
        }
        groups.retain(|group| group.listed > 0);
        groups
    }

    /// The tokens of the group that are in `tokens`.
    fn tokens_in(&self, tokens: &Range<usize>) -> &[Listed] {
        let before = |end: usize| {
            self.tokens
                .partition_point(|own| (own.token as usize) < end)
        };
        &self.tokens[before(tokens.start)..before(tokens.end)]
    }

    /// Whether both groups can be added to the same sums in one call: both are dense and have the same tokens, or neither is dense.
    fn is_added_with(&self, other: &Self) -> bool {
        match (self.is_dense, other.is_dense) {
            (true, true) => {
                let mut both = self.tokens.iter().zip(&other.tokens);
                self.tokens.len() == other.tokens.len() && both.all(|(a, b)| a.token == b.token)
            }
            (a, b) => a == b,
        }
    }

    /// Sets the union and whether the group is dense.
    fn prepare(&mut self, matrix: &Matrix<'_>, active: &[Active], product: Arithmetic) {
        let first = self.first;
        let mut is_listed = [false; AXPY_GROUP_ROWS];
        let mut missing = AXPY_GROUP_ROWS.min(matrix.rows() - first);
        for listed in &self.tokens {
            for row in listed.rows(active) {
                let is_listed = &mut is_listed[*row as usize - first];
                missing -= usize::from(!*is_listed);
                *is_listed = true;
            }
            if missing == 0 {
                break;
            }
        }
        let rows = (first as u32..).zip(is_listed);
        self.union
            .extend(rows.filter_map(|(row, is_listed)| is_listed.then_some(row)));
        let (tokens, union) = (self.tokens.len(), self.union.len());
        let share = relative_axpy_cost(matrix.format(), tokens, product);
        self.is_dense = self.listed as f64 >= share * (tokens * union) as f64;
    }

    /// Sets each token's `coefficients [union]`, which must be 0, to the token's own for the rows that it lists.
    fn spread<'a>(&self, active: &[Active], coefficients: impl Iterator<Item = &'a mut [f32]>) {
        let mut places = [0u8; AXPY_GROUP_ROWS];
        for (place, row) in self.union.iter().enumerate() {
            places[*row as usize - self.first] = place as u8;
        }
        for (listed, out) in self.tokens.iter().zip(coefficients) {
            let own = &active[listed.token as usize].coefficients;
            let own = &own[listed.start as usize..listed.end as usize];
            if own.len() == out.len() {
                out.copy_from_slice(own);
                continue;
            }
            for (row, coefficient) in listed.rows(active).iter().zip(own) {
                out[usize::from(places[*row as usize - self.first])] = *coefficient;
            }
        }
    }
}

impl Listed {
    /// The token's rows of the group.
    fn rows<'a>(&self, active: &'a [Active]) -> &'a [u32] {
        &active[self.token as usize].rows[self.start as usize..self.end as usize]
    }
}
