//! Open bundles, memory-mapped.

use std::{
    collections::BTreeMap,
    io::ErrorKind,
    path::{Path, PathBuf},
    sync::Arc,
};

use powerinfer_artifact::{
    ArtifactError, Digest, Header, TensorFile,
    certificate::{self, Certificate},
    counted,
    document::Document,
    mapped_file::{FileBytes, Residence},
    placement_inputs::{self, LayerInputs},
    plan::Plan,
    predictor_file::{self, PredictorFile},
    progress::{Interrupted, Progress},
    token_texts,
    write::FolderLock,
};
use powerinfer_model::{Files, ModelConfig};
use powerinfer_tensor::Format;

use crate::{
    BundleError, FORMAT, Manifest, VERSION,
    manifest::{DENSE_VERSION, MANIFEST, NEXT_PLAN, PLAN, PLAN_FORMAT, PLAN_VERSION, WEIGHTS},
};

/// Extent of the integrity check when a bundle is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IntegrityCheck {
    /// Compares the digests of small files, and of all files while they take no noticeable time (below a
    /// gibibyte each).
    Quick,
    /// Compares the digests of all files.
    Full,
}

/// Size up to which the digest of a file is always compared.
const ALWAYS_CHECKED_BYTES: u64 = 1 << 30;

/// Open bundle. Each of its files was opened once: the bytes in use are those whose digest was compared.
#[derive(Debug)]
pub struct Bundle {
    folder: PathBuf,
    /// All files except weights and predictors, by name.
    files: Arc<BTreeMap<String, FileBytes>>,
    pub(crate) manifest: Document<Manifest>,
    pub(crate) plan: Document<Plan>,
    quant: Format,
    weights: TensorFile,
    predictors: Option<PredictorFile>,
    certificate: Option<Document<Certificate>>,
}

/// Attempts to open a bundle while other runs replace its plan.
const ATTEMPTS: usize = 4;

impl Bundle {
    /// Opens the bundle in `folder`.
    ///
    /// # Errors
    ///
    /// There is no bundle, or one of its files cannot be read, is damaged or does not belong to it.
    pub fn open(folder: &Path, check: IntegrityCheck) -> Result<Self, BundleError> {
        let path = folder.join(MANIFEST);
        if !path.exists() {
            return Err(BundleError::Missing {
                path: folder.to_owned(),
            });
        }
        let state = || (std::fs::read(&path).ok(), folder.join(NEXT_PLAN).exists());
        let mut before = state();
        for _ in 1..ATTEMPTS {
            let found = Self::open_once(folder, check);
            let now = state();
            if found.is_ok() || now == before {
                return found;
            }
            before = now;
        }
        Self::open_once(folder, check)
    }

    fn open_once(folder: &Path, check: IntegrityCheck) -> Result<Self, BundleError> {
        let path = folder.join(MANIFEST);
        let manifest = read_manifest(&path)?;
        manifest.check_seal(&path)?;
        if let Err(reason) = manifest.body.config.validate() {
            return Err(BundleError::Configuration { path, reason });
        }
        let (plan_path, plan) = open_plan(folder, &manifest.body)?;
        let mut files = open_files(folder, &manifest.body, check)?;
        refuse_foreign(folder, &manifest.body)?;
        let mut take = |name: &str| {
            let path = folder.join(name);
            let absent = || ArtifactError::read(&path)(ErrorKind::NotFound.into());
            Ok::<_, ArtifactError>((files.remove(name).ok_or_else(absent)?, path))
        };
        let quant = manifest
            .body
            .quant
            .parse()
            .map_err(|_| ArtifactError::WrongFormat {
                path: path.clone(),
                expected: format!(
                    "bundle with weights in one of the formats {}",
                    Format::names()
                ),
                found: format!("a bundle with `{}` weights", manifest.body.quant),
            })?;
        let plan = Document::<Plan>::parse(&plan, &plan_path, PLAN_FORMAT, PLAN_VERSION)?;
        plan.header
            .check_model(&plan_path, &manifest.header.model)?;
        check_plan(&plan_path, &plan.body, &manifest.body.config)?;
        let mut predictors = None;
        if manifest.body.predictors {
            let (bytes, path) = take(predictor_file::FILE)?;
            let file = PredictorFile::from_bytes(&path, bytes)?.refuse_shard()?;
            file.header().check_model(&path, &manifest.header.model)?;
            predictors = Some(file);
        }
        let mut certificate = None;
        if manifest.body.certificate {
            let (bytes, path) = take(certificate::FILE)?;
            let (format, version) = (certificate::FORMAT, certificate::VERSION);
            let document = Document::<Certificate>::parse(&bytes, &path, format, version)?;
            document.header.check_model(&path, &manifest.header.model)?;
            certificate = Some(document);
        }
        let (bytes, path) = take(WEIGHTS)?;
        let weights = TensorFile::from_bytes(&path, bytes)?;
        Ok(Self {
            folder: folder.to_owned(),
            files: Arc::new(files),
            manifest,
            plan,
            quant,
            weights,
            predictors,
            certificate,
        })
    }

    /// Adds `certificate` and the token ids of the texts it was measured on, and reopens the bundle.
    ///
    /// # Errors
    ///
    /// Another run changes the bundle, or a file cannot be written.
    pub fn certify(
        self,
        certificate: Certificate,
        texts: &[Vec<u32>],
    ) -> Result<Self, BundleError> {
        let folder = self.folder;
        let lock = FolderLock::new(&folder)?;
        check_unchanged(&folder, &self.manifest)?;
        let mut manifest = self.manifest.clone();
        // While its files are replaced there is no certificate.
        let had_certificate = std::mem::take(&mut manifest.body.certificate);
        for name in [certificate::FILE, certificate::TEXT_FILE] {
            manifest.body.files.remove(name);
        }
        let mut manifest = manifest.sealed();
        if had_certificate {
            manifest.write(&folder.join(MANIFEST))?;
        }
        token_texts::write(&folder.join(certificate::TEXT_FILE), texts)?;
        let mut header = Header::new(
            certificate::FORMAT,
            certificate::VERSION,
            self.manifest.header.model.clone(),
            self.manifest.header.seed,
        );
        header.inputs = self.manifest.header.inputs.clone();
        let document = Document {
            header,
            body: certificate,
        };
        document.write(&folder.join(certificate::FILE))?;
        check_unchanged(&folder, &manifest)?;
        manifest.body.certificate = true;
        for name in [certificate::FILE, certificate::TEXT_FILE] {
            let digest = Digest::of_file(&folder.join(name))?;
            manifest.body.files.insert(name.to_owned(), digest);
        }
        // The manifest is written last: until then the bundle is unchanged.
        manifest.sealed().write(&folder.join(MANIFEST))?;
        drop(lock);
        Self::open(&folder, IntegrityCheck::Quick)
    }

    /// Returns the certificate, if the bundle was certified.
    pub fn certificate(&self) -> Option<&Certificate> {
        self.certificate.as_ref().map(|document| &document.body)
    }

    /// Reads the token ids of the texts that the certificate was measured on.
    ///
    /// # Errors
    ///
    /// The file is missing or damaged.
    pub fn certificate_texts(&self) -> Result<Vec<Vec<u32>>, BundleError> {
        let (path, bytes) = self.file(certificate::TEXT_FILE)?;
        Ok(token_texts::parse(&path, bytes)?)
    }

    /// Returns the path and bytes of the file `name`.
    fn file(&self, name: &str) -> Result<(PathBuf, FileBytes), ArtifactError> {
        let path = self.folder.join(name);
        match self.files.get(name) {
            Some(bytes) => Ok((path, bytes.clone())),
            None => Err(ArtifactError::read(&path)(ErrorKind::NotFound.into())),
        }
    }

    /// Returns whether there is a certificate and it matches the bundle's texts, policies, thresholds and KV cache
    /// format.
    pub fn certificate_matches(&self) -> bool {
        self.certificate().is_some_and(|certificate| {
            let texts = self.certificate_texts();
            certificate.layers.len() == self.plan().layers.len()
                && certificate.decisions == certificate::certified_settings(self.plan())
                && texts.is_ok_and(|t| token_texts::digest(&t) == certificate.scoring.digest)
        })
    }

    /// Reads the planner inputs of each layer, with which the bundle can be re-planned.
    ///
    /// # Errors
    ///
    /// [`BundleError::NoPlacementInputs`], or the file cannot be read or does not belong to the bundle.
    pub fn placement_inputs(&self) -> Result<Vec<LayerInputs>, BundleError> {
        if !self.manifest.body.placement_inputs {
            return Err(BundleError::NoPlacementInputs {
                folder: self.folder.clone(),
            });
        }
        let (path, bytes) = self.file(placement_inputs::FILE)?;
        let config = self.config();
        let (layers, neurons) = (config.layer_count, config.ffn_size);
        let (header, layers) = placement_inputs::parse(&path, bytes, layers, neurons)?;
        header.check_model(&path, &self.manifest.header.model)?;
        Ok(layers)
    }

    /// Returns the version of the bundle format.
    pub fn version(&self) -> u32 {
        self.manifest.header.version
    }

    /// Returns whether `folder` has a bundle's manifest; the bundle may be damaged.
    pub fn is_bundle(folder: &Path) -> bool {
        folder.join(MANIFEST).exists()
    }

    /// Returns the folder of the bundle.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the model's configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.manifest.body.config
    }

    /// Returns the header of the manifest.
    pub fn header(&self) -> &Header {
        &self.manifest.header
    }

    /// Returns the manifest with its header.
    pub fn manifest_document(&self) -> &Document<Manifest> {
        &self.manifest
    }

    /// Returns the plan.
    pub fn plan(&self) -> &Plan {
        &self.plan.body
    }

    /// Replaces the plan in memory; the files are unchanged.
    ///
    /// # Errors
    ///
    /// `plan` is inconsistent or for another number of layers or neurons.
    pub fn with_plan(mut self, plan: Plan) -> Result<Self, BundleError> {
        let path = self.folder.join(PLAN);
        check_plan(&path, &plan, self.config())?;
        self.plan.body = plan;
        Ok(self)
    }

    /// Returns the digest in its manifest, which covers all files but a plan that replaces the first.
    pub fn digest(&self) -> Option<Digest> {
        self.manifest.body.seal
    }

    /// Returns the format of the weights.
    pub fn quant(&self) -> Format {
        self.quant
    }

    /// Returns the file with the weights.
    pub fn weights(&self) -> &TensorFile {
        &self.weights
    }

    /// Sets where weights and predictors reside, see
    /// [`FileBytes::set_residence`](powerinfer_artifact::mapped_file::FileBytes::set_residence).
    ///
    /// # Errors
    ///
    /// There is not enough memory, or the lock limit is too low.
    pub fn set_residence(&mut self, residence: Residence) -> Result<(), BundleError> {
        self.weights.set_residence(residence)?;
        if let Some(predictors) = &mut self.predictors {
            predictors.set_residence(residence)?;
        }
        Ok(())
    }

    /// Reads weights and predictors into memory, see [`FileBytes::read_ahead`].
    ///
    /// # Errors
    ///
    /// [`Interrupted`] if `progress` stops the work.
    ///
    /// [`FileBytes::read_ahead`]: powerinfer_artifact::mapped_file::FileBytes::read_ahead
    pub fn read_ahead(&self, progress: &dyn Progress) -> Result<(), Interrupted> {
        progress.begin("reading the bundle", self.bytes(), "bytes");
        self.weights.read_ahead(progress)?;
        if let Some(predictors) = &self.predictors {
            predictors.tensors().read_ahead(progress)?;
        }
        progress.end();
        Ok(())
    }

    /// Returns the size of weights and predictors in bytes.
    pub fn bytes(&self) -> u64 {
        let predictors = self.predictors.as_ref();
        let predictors = predictors.map_or(0, |found| found.tensors().bytes().len());
        (self.weights.bytes().len() + predictors) as u64
    }

    /// Returns the total size in bytes of the files that the manifest lists.
    pub fn bytes_on_disk(&self) -> u64 {
        let files = self.manifest_document().body.files.keys();
        let length = |name: &String| {
            std::fs::metadata(self.folder().join(name)).map_or(0, |found| found.len())
        };
        files.map(length).sum()
    }

    /// Returns the predictors, if the bundle has any.
    pub fn predictors(&self) -> Option<&PredictorFile> {
        self.predictors.as_ref()
    }

    /// Returns whether the files `names` are those in `files`, absent ones included.
    pub fn has_files(&self, names: &[&str], files: &Files) -> bool {
        let packed = &self.manifest.body.files;
        names.iter().all(|name| match files.read(name) {
            Ok(bytes) => {
                bytes.map(|bytes| Digest::from_content(&bytes)).as_ref() == packed.get(*name)
            }
            Err(_) => false,
        })
    }

    /// Returns the files next to the weights: tokenizer, templates, generation settings.
    pub fn files(&self) -> Files {
        Files::Opened {
            folder: self.folder.clone(),
            files: Arc::clone(&self.files),
        }
    }

    /// Returns the bytes of weights and predictors.
    pub fn large_files(&self) -> Vec<FileBytes> {
        let predictors = self.predictors.as_ref().map(PredictorFile::tensors);
        let files = std::iter::once(&self.weights).chain(predictors);
        files.map(TensorFile::file_bytes).collect()
    }
}

fn read_manifest(path: &Path) -> Result<Document<Manifest>, ArtifactError> {
    Document::read_versions(path, FORMAT, DENSE_VERSION..=VERSION)
}

/// Checks that `plan`, read from `path`, is consistent and fits `config`.
fn check_plan(path: &Path, plan: &Plan, config: &ModelConfig) -> Result<(), BundleError> {
    plan.validate().map_err(|source| BundleError::Plan {
        path: path.to_owned(),
        source,
    })?;
    let shape = |layers: usize, neurons: usize| {
        format!(
            "{} of {}",
            counted(layers, "layer"),
            counted(neurons, "neuron")
        )
    };
    let odd = plan
        .layers
        .iter()
        .find(|layer| layer.neuron_count != config.ffn_size);
    if plan.layers.len() != config.layer_count || odd.is_some() {
        return Err(BundleError::PlanShape {
            path: path.to_owned(),
            expected: shape(config.layer_count, config.ffn_size),
            found: shape(
                plan.layers.len(),
                odd.map_or(config.ffn_size, |layer| layer.neuron_count),
            ),
        });
    }
    Ok(())
}

/// Checks that the manifest in `folder` is still `manifest`: another run may have replaced the bundle.
pub(crate) fn check_unchanged(
    folder: &Path,
    manifest: &Document<Manifest>,
) -> Result<(), BundleError> {
    match read_manifest(&folder.join(MANIFEST)) {
        Ok(found) if found == *manifest => Ok(()),
        _ => Err(ArtifactError::Busy {
            path: folder.to_owned(),
        }
        .into()),
    }
}

/// Reads the plan that `manifest` refers to and also returns its path: if a run was killed right after writing the manifest, the
/// plan is still under the name of the next plan.
///
/// # Errors
///
/// The plan cannot be read, or neither file is the one in the manifest.
pub(crate) fn open_plan(
    folder: &Path,
    manifest: &Manifest,
) -> Result<(PathBuf, Vec<u8>), ArtifactError> {
    let [current, next] = [PLAN, NEXT_PLAN].map(|name| folder.join(name));
    let read = |path: &Path| std::fs::read(path).map_err(ArtifactError::read(path));
    let check =
        |path: &Path, bytes: &[u8]| check_digest(path, manifest, PLAN, Digest::from_content(bytes));
    let found = read(&current).and_then(|bytes| {
        check(&current, &bytes)?;
        Ok((current, bytes))
    });
    let next_bytes = || read(&next).ok().filter(|bytes| check(&next, bytes).is_ok());
    found.or_else(|error| match next_bytes() {
        Some(bytes) => Ok((next.clone(), bytes)),
        None => Err(error),
    })
}

/// Checks that `found`, the digest of the file `name` at `path`, is the one in the manifest.
fn check_digest(
    path: &Path,
    manifest: &Manifest,
    name: &str,
    found: Digest,
) -> Result<(), ArtifactError> {
    let expected = manifest.files.get(name);
    if expected == Some(&found) {
        return Ok(());
    }
    Err(ArtifactError::Damaged {
        path: path.to_owned(),
        expected: expected.map_or_else(|| "nothing of it".to_owned(), Digest::to_string),
        found: found.to_string(),
    })
}

/// Refuses files that the manifest does not name: a chat template, say, that nothing vouches for.
fn refuse_foreign(folder: &Path, manifest: &Manifest) -> Result<(), BundleError> {
    let entries = std::fs::read_dir(folder).map_err(ArtifactError::read(folder))?;
    let mut foreign: Vec<PathBuf> = Vec::new();
    for entry in entries {
        let path = entry.map_err(ArtifactError::read(folder))?.path();
        let name = path.file_name().and_then(|name| name.to_str());
        let is_own = name.is_some_and(|name| {
            // Names of unfinished files begin with a dot; interrupted runs may leave the next plan, and a certificate that
            // the manifest does not name yet: neither is read.
            manifest.files.contains_key(name)
                || [
                    MANIFEST,
                    NEXT_PLAN,
                    certificate::FILE,
                    certificate::TEXT_FILE,
                ]
                .contains(&name)
                || name.starts_with('.')
        });
        if !is_own {
            foreign.push(path);
        }
    }
    match foreign.into_iter().min() {
        None => Ok(()),
        Some(path) => Err(BundleError::Foreign { path }),
    }
}

/// Opens each file of `manifest` except the plan once and compares its digest with the manifest. Weights, predictors and large
/// files stay mapped; the others are read.
fn open_files(
    folder: &Path,
    manifest: &Manifest,
    check: IntegrityCheck,
) -> Result<BTreeMap<String, FileBytes>, ArtifactError> {
    let mut files = BTreeMap::new();
    for name in manifest.files.keys().filter(|name| *name != PLAN) {
        let path = folder.join(name);
        let mut bytes = FileBytes::open(&path)?;
        let is_large = bytes.len() as u64 > ALWAYS_CHECKED_BYTES;
        if !is_large && ![WEIGHTS, predictor_file::FILE].contains(&name.as_str()) {
            bytes.set_residence(Residence::Loaded)?;
        }
        if check == IntegrityCheck::Full || !is_large {
            check_digest(&path, manifest, name, bytes.digest()?)?;
        }
        files.insert(name.clone(), bytes);
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use powerinfer_artifact::{plan::Policy, progress::Silent};
    use powerinfer_model::Checkpoint;

    use super::*;
    use crate::{PackInputs, pack};

    #[test]
    fn an_open_bundle_is_independent_of_its_paths() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models");
        let checkpoint = Checkpoint::open(&golden.join("llama-relu-gqa")).unwrap();
        let config = checkpoint.config();
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("bundle");
        let plan = Plan::unplaced(config.layer_count, config.ffn_size, Policy::Dense, 16);
        let orders = vec![(0..config.ffn_size as u32).collect(); config.layer_count];
        let inputs = PackInputs {
            companions: &["tokenizer.json"],
            ..PackInputs::new(&checkpoint, &orders, plan, Format::F16)
        };
        drop(pack(&inputs, &out, &Silent).unwrap());
        let [weights, tokenizer] = [WEIGHTS, "tokenizer.json"].map(|name| out.join(name));
        let before = [&weights, &tokenizer].map(|path| std::fs::read(path).unwrap());

        let mut bundle = Bundle::open(&out, IntegrityCheck::Full).unwrap();
        std::fs::remove_dir_all(&out).unwrap();
        std::fs::create_dir(&out).unwrap();
        std::fs::write(&weights, b"other weights").unwrap();
        std::fs::write(&tokenizer, b"another tokenizer").unwrap();
        assert_eq!(bundle.weights().bytes(), before[0]);
        let read = bundle.files().read("tokenizer.json").unwrap().unwrap();
        assert_eq!(&read[..], before[1]);
        bundle.set_residence(Residence::Loaded).unwrap();
        assert_eq!(bundle.weights().bytes(), before[0]);
        assert!(Bundle::open(&out, IntegrityCheck::Quick).is_err());
    }
}
