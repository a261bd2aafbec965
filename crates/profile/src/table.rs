//! `neurons.parquet`: one row per neuron.

use std::{
    fs::{self, File},
    io::{self, Cursor},
    mem,
    path::Path,
    time::Duration,
};

use polars::prelude::{
    Column, DataFrame, ParallelStrategy, ParquetCompression, ParquetReader, ParquetWriter,
    PolarsError, SerReader,
};
use powerinfer_artifact::{ArtifactError, write::write_with};
use powerinfer_guard::{
    panics::caught,
    worker::{Work, in_worker},
};

use crate::{Counts, LayerActivity, ProfileDocument, ProfileError, activity::in_units};

/// Time to read the table of the largest models.
const TIME_LIMIT: Duration = Duration::from_secs(600);

/// Name of the column with the counts of a source.
fn source_column(source: usize) -> String {
    format!("active_source_{source}")
}

/// Writes one row per neuron. Counts per source are omitted for a single source.
pub(crate) fn write_table(path: &Path, activities: &[LayerActivity]) -> Result<(), ProfileError> {
    let failed = |error: PolarsError| ProfileError::Table {
        path: path.to_owned(),
        reason: error.to_string(),
    };
    let integers = |name: String, of: &dyn Fn(&LayerActivity) -> &[u64]| {
        let values: Vec<u64> = activities.iter().flat_map(of).copied().collect();
        Column::new(name.into(), values)
    };
    let floats = |name: &str, of: &dyn Fn(&LayerActivity) -> Vec<f32>| {
        let values: Vec<f32> = activities.iter().flat_map(of).collect();
        Column::new(name.into(), values)
    };
    let places = |name: &str, of: fn(usize, usize) -> usize| {
        let rows = activities.iter().enumerate().flat_map(|(layer, activity)| {
            (0..activity.active.len()).map(move |neuron| of(layer, neuron) as u32)
        });
        Column::new(name.into(), rows.collect::<Vec<_>>())
    };
    let tokens = activities
        .iter()
        .flat_map(|activity| std::iter::repeat_n(activity.tokens, activity.active.len()));
    let mut columns = vec![
        places("layer", |layer, _| layer),
        places("neuron", |_, neuron| neuron),
        Column::new("tokens".into(), tokens.collect::<Vec<_>>()),
        integers("active".to_owned(), &|activity| &activity.active),
        integers("active_first_half".to_owned(), &|activity| {
            &activity.first_half.active
        }),
        floats("mean_magnitude", &LayerActivity::magnitude),
        floats("mean_contribution", &LayerActivity::contribution),
        integers(MAGNITUDE_SUM.to_owned(), &|activity| {
            &activity.magnitude_sum
        }),
        floats("down_norm", &|activity| activity.down_norms.clone()),
    ];
    let sources = activities.first().map_or(0, |first| first.sources.len());
    if sources > 1 {
        columns.extend((0..sources).map(|source| {
            integers(source_column(source), &|activity| {
                &activity.sources[source].active
            })
        }));
    }
    let rows = activities.iter().map(|activity| activity.active.len());
    let mut frame = DataFrame::new(rows.sum(), columns).map_err(failed)?;
    write_with(path, |temporary| {
        let file = File::create(temporary).map_err(ArtifactError::write(path))?;
        let writer = ParquetWriter::new(file).with_compression(ParquetCompression::Uncompressed);
        // Polars panics if it cannot start its threads.
        match caught(|| writer.finish(&mut frame)) {
            Ok(written) => written.map(drop).map_err(failed),
            Err(reason) => Err(ArtifactError::write(path)(io::Error::other(reason)).into()),
        }
    })
}

/// Column with the sum of magnitudes.
const MAGNITUDE_SUM: &str = "magnitude_sum";

/// Columns of a table: integers `active`, `active_first_half`, `magnitude_sum` and those of sources, floats `down_norm`.
type Columns = (Vec<Vec<u64>>, Vec<f32>);

/// Reading a table in a worker, for [`work_as_worker`](powerinfer_guard::worker::work_as_worker): Polars panics at some invalid
/// files, and allocates what others ask for.
pub const WORK: Work = ("read-table", |request| {
    let columns = caught(|| {
        let (sources, file) = request.split_first_chunk().ok_or("no request")?;
        read_columns(file.to_vec(), usize::from_le_bytes(*sources))
    });
    match columns.and_then(|columns| columns) {
        Ok((integers, norms)) => {
            let integers = integers.iter().map(|column| bytemuck::cast_slice(column));
            let columns: Vec<&[u8]> = [&[1][..]]
                .into_iter()
                .chain(integers)
                .chain([bytemuck::cast_slice(&norms)])
                .collect();
            columns.concat()
        }
        Err(reason) => [&[0], reason.as_bytes()].concat(),
    }
});

fn read_columns(file: Vec<u8>, sources: usize) -> Result<Columns, String> {
    let failed = |error: PolarsError| error.to_string();
    let frame = ParquetReader::new(Cursor::new(file))
        .read_parallel(ParallelStrategy::None)
        .finish()
        .map_err(failed)?;
    let integers = |name: &str| {
        let column = frame.column(name).and_then(|column| column.u64().cloned());
        let column = column.map_err(failed)?;
        Ok::<Vec<u64>, String>(column.into_no_null_iter().collect())
    };
    let floats = |name: &str| {
        let column = frame.column(name).and_then(|column| column.f32().cloned());
        let column = column.map_err(failed)?;
        Ok::<Vec<f32>, String>(column.into_no_null_iter().collect())
    };
    // Earlier versions of the program wrote means alone.
    let (sums, norms) = if frame.column(MAGNITUDE_SUM).is_ok() {
        (integers(MAGNITUDE_SUM)?, floats("down_norm")?)
    } else {
        let (tokens, means) = (integers("tokens")?, floats("mean_magnitude")?);
        let contributions = floats("mean_contribution")?;
        let sums = means.iter().zip(tokens);
        let sum = |(mean, tokens): (&f32, u64)| in_units(f64::from(*mean) * tokens as f64);
        let norms = contributions.iter().zip(&means);
        let norm = |(contribution, mean): (&f32, &f32)| {
            if *mean > 0.0 {
                contribution / mean
            } else {
                0.0
            }
        };
        (sums.map(sum).collect(), norms.map(norm).collect())
    };
    let mut all = vec![integers("active")?, integers("active_first_half")?, sums];
    // A single source has all counts.
    if sources > 1 {
        for source in 0..sources {
            all.push(integers(&source_column(source))?);
        }
    }
    Ok((all, norms))
}

/// Reads the columns of the table `file`, of `rows` rows.
fn columns(file: &[u8], rows: usize, sources: usize) -> Result<Columns, String> {
    let request = [&sources.to_le_bytes(), file].concat();
    let answer = in_worker(WORK, &request, TIME_LIMIT)?;
    let (is_read, mut bytes) = match answer.split_first() {
        Some((status, rest)) => (*status == 1, rest),
        None => (false, &[][..]),
    };
    if !is_read {
        return Err(String::from_utf8_lossy(bytes).into_owned());
    }
    let integers = 3 + if sources > 1 { sources } else { 0 };
    if bytes.len() as u128 != rows as u128 * (8 * integers + 4) as u128 {
        return Err(format!("its columns do not have {rows} rows"));
    }
    let mut column = |width: usize| {
        let (column, rest) = bytes.split_at(width * rows);
        bytes = rest;
        column
    };
    let integers = (0..integers)
        .map(|_| bytemuck::pod_collect_to_vec(column(8)))
        .collect();
    Ok((integers, bytemuck::pod_collect_to_vec(column(4))))
}

/// Reads the table of a profile with document `body`.
pub(crate) fn read_table(
    path: &Path,
    body: &ProfileDocument,
) -> Result<Vec<LayerActivity>, ProfileError> {
    let wrong = |reason: String| ProfileError::Table {
        path: path.to_owned(),
        reason,
    };
    let file = fs::read(path).map_err(ArtifactError::read(path))?;
    let (layers, neurons) = (body.layers.len(), body.ffn_size);
    let rows = layers.checked_mul(neurons).filter(|rows| *rows > 0);
    let rows = rows.ok_or_else(|| wrong("`profile.json` has no neurons".to_owned()))?;
    let (mut integers, norms) = columns(&file, rows, body.sources.len()).map_err(wrong)?;
    let [active, first_half, sums] = [0, 1, 2].map(|column| mem::take(&mut integers[column]));
    let sources = match body.sources.len() {
        0 => return Err(wrong("`profile.json` names no source".to_owned())),
        1 => vec![active.clone()],
        _ => integers.split_off(3),
    };
    let activity = |layer: usize| {
        let range = layer * neurons..(layer + 1) * neurons;
        let counts = |tokens: u64, active: &[u64]| Counts {
            tokens,
            active: active[range.clone()].to_vec(),
        };
        LayerActivity {
            tokens: body.tokens,
            active: active[range.clone()].to_vec(),
            magnitude_sum: sums[range.clone()].to_vec(),
            down_norms: norms[range.clone()].to_vec(),
            first_half: counts(body.first_half_tokens, &first_half),
            sources: sources
                .iter()
                .zip(&body.sources)
                .map(|(active, source)| counts(source.tokens, active))
                .collect(),
            locality: body.layers[layer].locality,
            experts: None,
        }
    };
    let activities: Vec<LayerActivity> = (0..layers).map(activity).collect();
    for activity in &activities {
        let parts = [&activity.first_half].into_iter().chain(&activity.sources);
        let over = |counts: &Counts, tokens: u64, limit: &[u64]| {
            counts.tokens > tokens
                || counts.active.iter().any(|active| *active > counts.tokens)
                || counts
                    .active
                    .iter()
                    .zip(limit)
                    .any(|(part, all)| part > all)
        };
        if over(&activity.counts(), body.tokens, &activity.active)
            || parts
                .into_iter()
                .any(|part| over(part, body.tokens, &activity.active))
        {
            return Err(wrong(
                "a neuron is active on more tokens than there were".to_owned(),
            ));
        }
    }
    Ok(activities)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_of_other_rows_or_sources_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("neurons.parquet");
        let counts = |active: Vec<u64>| Counts { tokens: 9, active };
        let activity = LayerActivity {
            tokens: 9,
            active: vec![9, 4, 0],
            magnitude_sum: vec![3 << 32, 1 << 31, 0],
            down_norms: vec![2.0, 0.5, 0.25],
            first_half: counts(vec![4, 2, 0]),
            sources: vec![counts(vec![9, 4, 0])],
            locality: Default::default(),
            experts: None,
        };
        write_table(&path, &[activity]).unwrap();
        let bytes = fs::read(&path).unwrap();
        let (integers, norms) = columns(&bytes, 3, 1).unwrap();
        assert_eq!(
            integers,
            [vec![9, 4, 0], vec![4, 2, 0], vec![3 << 32, 1 << 31, 0]]
        );
        assert_eq!(norms, [2.0, 0.5, 0.25]);
        assert!(columns(&bytes, 2, 1).is_err());
        assert!(columns(&bytes, 3, 2).is_err());
        assert!(columns(&bytes[..bytes.len() / 2], 3, 1).is_err());
    }

    #[test]
    fn tables_with_means_alone_are_read() {
        let column = |name: &str, values: [u64; 2]| Column::new(name.into(), values);
        let floats = |name: &str, values: [f32; 2]| Column::new(name.into(), values);
        let columns = vec![
            column("tokens", [8, 8]),
            column("active", [8, 0]),
            column("active_first_half", [4, 0]),
            floats("mean_magnitude", [0.25, 0.0]),
            floats("mean_contribution", [0.5, 0.0]),
        ];
        let mut frame = DataFrame::new(2, columns).unwrap();
        let mut file = Vec::new();
        ParquetWriter::new(&mut file).finish(&mut frame).unwrap();
        let (integers, norms) = read_columns(file, 1).unwrap();
        assert_eq!(integers[2], [2 << 32, 0]);
        assert_eq!(norms, [2.0, 0.0]);
    }
}
