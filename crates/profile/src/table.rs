//! `neurons.parquet`: one row per neuron.

use std::{fs::File, path::Path};

use polars::prelude::{
    Column, DataFrame, ParallelStrategy, ParquetCompression, ParquetReader, ParquetWriter,
    PolarsError, SerReader,
};
use powerinfer_artifact::{ArtifactError, write::write_with};

use powerinfer_pool::panics::caught;

use crate::{Counts, LayerActivity, ProfileDocument, ProfileError};

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
    let floats = |name: &str, of: &dyn Fn(&LayerActivity) -> &[f32]| {
        let values: Vec<f32> = activities.iter().flat_map(of).copied().collect();
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
        floats("mean_magnitude", &|activity| &activity.magnitude),
        floats("mean_contribution", &|activity| &activity.contribution),
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
        ParquetWriter::new(file)
            .with_compression(ParquetCompression::Uncompressed)
            .finish(&mut frame)
            .map_err(failed)?;
        Ok(())
    })
}

/// Reads the table of a profile with document `body`.
pub(crate) fn read_table(
    path: &Path,
    body: &ProfileDocument,
) -> Result<Vec<LayerActivity>, ProfileError> {
    // Polars panics at some invalid files.
    caught(|| parse_table(path, body)).unwrap_or_else(|reason| {
        let path = path.to_owned();
        Err(ProfileError::Table { path, reason })
    })
}

fn parse_table(path: &Path, body: &ProfileDocument) -> Result<Vec<LayerActivity>, ProfileError> {
    let wrong = |reason: String| ProfileError::Table {
        path: path.to_owned(),
        reason,
    };
    let failed = |error: PolarsError| wrong(error.to_string());
    let file = File::open(path).map_err(ArtifactError::read(path))?;
    let frame = ParquetReader::new(file)
        .read_parallel(ParallelStrategy::None)
        .finish()
        .map_err(failed)?;
    let (layers, neurons) = (body.layers.len(), body.ffn_size);
    let rows = layers.checked_mul(neurons).filter(|rows| *rows > 0);
    let expected = |found: usize| {
        if Some(found) == rows {
            return Ok(());
        }
        Err(wrong(format!(
            "expected {layers} layers of {neurons} neurons without gaps, found {found} rows"
        )))
    };
    let integers = |name: &str| -> Result<Vec<u64>, ProfileError> {
        let column = frame.column(name).and_then(|column| column.u64().cloned());
        let values: Vec<u64> = column.map_err(failed)?.into_no_null_iter().collect();
        expected(values.len())?;
        Ok(values)
    };
    let floats = |name: &str| -> Result<Vec<f32>, ProfileError> {
        let column = frame.column(name).and_then(|column| column.f32().cloned());
        let values: Vec<f32> = column.map_err(failed)?.into_no_null_iter().collect();
        expected(values.len())?;
        Ok(values)
    };
    let (active, first_half) = (integers("active")?, integers("active_first_half")?);
    let (magnitude, contribution) = (floats("mean_magnitude")?, floats("mean_contribution")?);
    let sources = match body.sources.len() {
        0 => return Err(wrong("`profile.json` names no source".to_owned())),
        1 => vec![active.clone()],
        several => (0..several)
            .map(|source| integers(&source_column(source)))
            .collect::<Result<_, _>>()?,
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
            magnitude: magnitude[range.clone()].to_vec(),
            contribution: contribution[range.clone()].to_vec(),
            first_half: counts(body.first_half_tokens, &first_half),
            sources: sources
                .iter()
                .zip(&body.sources)
                .map(|(active, source)| counts(source.tokens, active))
                .collect(),
            locality: body.layers[layer].locality,
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
