//! Merges profiles: shards of one text into the profile of a single run, and profiles of different texts into one.

use std::{collections::BTreeMap, path::Path};

use powerinfer_artifact::{Digest, Header, Shard, write::PartialFolder};

use crate::{
    LayerActivity, Profile, ProfileDocument, ProfileError, Settings, SourceSummary, Traces,
    profile::{self, CALIBRATION, SHARD, Subject, TRACE_TOKENS},
    traces,
};

/// Header setting: digests of the merged texts.
const TEXTS: &str = "texts";

/// Profiles of one text: all its shards in order, or a single profile.
struct Text<'a> {
    digest: Option<Digest>,
    profiles: Vec<&'a Profile>,
}

/// Merges `profiles` of one model into the folder `out`.
///
/// Counts are added exactly; means are weighted by tokens. Samples of shards are concatenated; different texts contribute
/// samples in proportion to their tokens.
///
/// # Errors
///
/// There are no profiles, they are of different models or sizes, a shard is missing, a text occurs twice, or a file cannot
/// be read or written.
pub fn merge(profiles: &[Profile], out: &Path) -> Result<Profile, ProfileError> {
    let first = profiles.first().ok_or(ProfileError::NothingToMerge)?;
    for profile in profiles {
        profile.check_model(&first.header().model)?;
        let (body, expected) = (profile.document(), first.document());
        let sizes = |body: &ProfileDocument| (body.layers.len(), body.ffn_size, body.hidden_size);
        if sizes(body) != sizes(expected) {
            return Err(unfit(profile, "its layers have different sizes".to_owned()));
        }
        if body.experts != expected.experts {
            let reason =
                "only some of the profiles have expert selections; measure the others again";
            return Err(unfit(profile, reason.to_owned()));
        }
    }
    let texts = texts(profiles)?;
    check_disjoint(&texts)?;
    let sources: Vec<SourceSummary> = texts
        .iter()
        .flat_map(|text| text.profiles[0].document().sources.clone())
        .collect();

    let body = first.document();
    let mut activities = vec![LayerActivity::new(body.ffn_size, sources.len()); body.layers.len()];
    let mut offset = 0;
    for text in &texts {
        for profile in &text.profiles {
            for (sum, activity) in activities.iter_mut().zip(profile.activities()) {
                sum.add(&among_all_sources(activity, offset, sources.len()));
            }
        }
        offset += text.profiles[0].document().sources.len();
    }

    let trace_tokens = profiles.iter().map(trace_tokens).max().unwrap_or(0);
    let header = header(first, &texts, trace_tokens);
    let folder = PartialFolder::open(out, profile::contents())?;
    folder.clear()?;
    for layer in 0..body.layers.len() {
        let mut samples = Vec::new();
        for profile in texts.iter().flat_map(|text| &text.profiles) {
            samples.push((profile.traces(layer)?, part_tokens(profile)));
        }
        let wanted = Settings::samples(trace_tokens);
        let joined = Traces::join(body.hidden_size, body.ffn_size, &samples, wanted);
        let header = Header {
            format: traces::FORMAT.to_owned(),
            version: traces::VERSION,
            ..header.clone()
        };
        joined.write(&Traces::path(folder.path(), layer), &header)?;
    }
    let parts = profiles.iter().map(part_tokens);
    let part_tokens = parts.fold([0; 2], |[a, b], [x, y]| [a + x as u64, b + y as u64]);
    let subject = Subject {
        hidden_size: body.hidden_size,
        has_exact_zeros: body.has_exact_zeros,
        experts: body.experts.as_ref(),
        part_tokens,
        sources: &sources,
    };
    let body = ProfileDocument::new(subject, &activities);
    let reserved = reserved_of_all(&texts)?;
    Profile::write(folder.path(), header, body, &activities, &reserved)?;
    Profile::open(folder.path())?;
    folder.finish()?;
    Profile::open(out)
}

/// Reserved texts of all profiles, interleaved. Shards of one text reserved the same. Texts that share a source name are
/// left out, since one profile may have counted what the other reserved.
fn reserved_of_all(texts: &[Text<'_>]) -> Result<Vec<Vec<u32>>, ProfileError> {
    let names = |text: &Text<'_>| {
        let sources = &text.profiles[0].document().sources;
        sources
            .iter()
            .map(|source| source.name.clone())
            .collect::<Vec<_>>()
    };
    let mut queues = Vec::new();
    for text in texts {
        let others = texts.iter().filter(|other| other.digest != text.digest);
        let others: Vec<String> = others.flat_map(names).collect();
        if names(text).iter().any(|name| others.contains(name)) {
            continue;
        }
        queues.push(text.profiles[0].reserved()?.into_iter());
    }
    let mut all = Vec::new();
    loop {
        let before = all.len();
        for queue in &mut queues {
            all.extend(queue.next());
        }
        if all.len() == before {
            return Ok(all);
        }
    }
}

fn unfit(profile: &Profile, reason: String) -> ProfileError {
    ProfileError::NotMergeable {
        path: profile.folder().to_owned(),
        reason,
    }
}

/// Shard of the text that `profile` covers.
fn shard(profile: &Profile) -> Result<Option<Shard>, ProfileError> {
    let Some(setting) = profile.header().settings.get(SHARD) else {
        return Ok(None);
    };
    let text = setting.as_str().unwrap_or_default();
    let shard = text.parse::<Shard>();
    shard.map(Some).map_err(|reason| unfit(profile, reason))
}

/// Groups profiles by text, and checks that every text is complete and occurs once.
fn texts(profiles: &[Profile]) -> Result<Vec<Text<'_>>, ProfileError> {
    let mut texts: Vec<Text<'_>> = Vec::new();
    for profile in profiles {
        let digest = profile.header().inputs.get(CALIBRATION).copied();
        match texts.iter_mut().find(|text| text.digest == digest) {
            Some(text) => text.profiles.push(profile),
            None => texts.push(Text {
                digest,
                profiles: vec![profile],
            }),
        }
    }
    for text in &mut texts {
        let shards = text.profiles.iter().map(|profile| {
            let shard = shard(profile)?.unwrap_or(Shard::WHOLE);
            Ok((shard, profile.folder()))
        });
        let shards = shards.collect::<Result<Vec<_>, ProfileError>>()?;
        let order = Shard::order(&shards, "text", "profile")
            .map_err(|(place, reason)| unfit(text.profiles[place], reason))?;
        text.profiles = order
            .into_iter()
            .map(|place| text.profiles[place])
            .collect();
    }
    Ok(texts)
}

/// Digests of the texts of `profile`: one, or those of an earlier merge.
fn constituents(profile: &Profile) -> Vec<String> {
    let header = profile.header();
    match header
        .settings
        .get(TEXTS)
        .and_then(serde_json::Value::as_array)
    {
        Some(texts) => texts
            .iter()
            .filter_map(|text| text.as_str().map(str::to_owned))
            .collect(),
        None => {
            let digest = header.inputs.get(CALIBRATION);
            digest.map(ToString::to_string).into_iter().collect()
        }
    }
}

/// Checks that no text is counted twice.
fn check_disjoint(texts: &[Text<'_>]) -> Result<(), ProfileError> {
    let mut seen: BTreeMap<String, &Profile> = BTreeMap::new();
    for profile in texts.iter().filter_map(|text| text.profiles.first()) {
        for digest in constituents(profile) {
            if let Some(other) = seen.insert(digest, profile) {
                return Err(unfit(
                    profile,
                    format!(
                        "it shares a text with `{}`; merge each text once",
                        other.folder().display()
                    ),
                ));
            }
        }
    }
    Ok(())
}

/// Moves the sources of `activity` to `offset..` of `total` sources.
fn among_all_sources(activity: &LayerActivity, offset: usize, total: usize) -> LayerActivity {
    let mut wide = LayerActivity::new(activity.active.len(), total);
    wide.sources[offset..offset + activity.sources.len()].clone_from_slice(&activity.sources);
    LayerActivity {
        sources: wide.sources,
        ..activity.clone()
    }
}

/// Setting of `profile`: samples per layer.
fn trace_tokens(profile: &Profile) -> usize {
    let setting = profile.header().settings.get(TRACE_TOKENS);
    setting
        .and_then(serde_json::Value::as_u64)
        .map_or(0, |tokens| tokens as usize)
}

/// Tokens of each part of `profile`.
fn part_tokens(profile: &Profile) -> [usize; 2] {
    let body = profile.document();
    [body.training_tokens as usize, body.held_out_tokens as usize]
}

/// Header of a single run over all texts.
fn header(first: &Profile, texts: &[Text<'_>], trace_tokens: usize) -> Header {
    let model = first.header().model.clone();
    let seed = first.header().seed;
    let header = Header::new(profile::FORMAT, profile::VERSION, model, seed);
    let digest = match texts {
        [
            Text {
                digest: Some(only), ..
            },
        ] => *only,
        several => {
            let digests = several.iter().flat_map(|text| text.digest);
            let digests: Vec<String> = digests.map(|digest| digest.to_string()).collect();
            Digest::of_parts(digests.iter().map(String::as_bytes))
        }
    };
    let header = header
        .with_input(CALIBRATION, digest)
        .with_setting(TRACE_TOKENS, trace_tokens);
    let constituents: Vec<String> = texts
        .iter()
        .filter_map(|text| text.profiles.first())
        .flat_map(|profile| constituents(profile))
        .collect();
    match constituents.len() {
        0 | 1 => header,
        _ => header.with_setting(TEXTS, constituents),
    }
}
