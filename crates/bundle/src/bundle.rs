//! A bundle on disk, opened by mapping.

use std::path::{Path, PathBuf};

use powerinfer_artifact::{
    ArtifactError, Digest, Header, TensorFile,
    certificate::{self, Certificate},
    document::Document,
    mapped_file::Residence,
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
    manifest::{MANIFEST, NEXT_PLAN, PLAN, PLAN_FORMAT, PLAN_VERSION, WEIGHTS, check_seal, sealed},
};

/// How far to trust the files of a bundle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verification {
    /// Small files are compared with their digests, and large ones too while the whole bundle
    /// is below a gibibyte, where that takes no noticeable time.
    Quick,
    /// Every byte.
    Full,
}

/// Files up to this size are always verified.
const SMALL: u64 = 1 << 30;

/// An open bundle.
#[derive(Debug)]
pub struct Bundle {
    folder: PathBuf,
    pub(crate) manifest: Document<Manifest>,
    pub(crate) plan: Document<Plan>,
    quant: Format,
    weights: TensorFile,
    predictors: Option<PredictorFile>,
    certificate: Option<Document<Certificate>>,
}

/// How often a bundle is opened anew that somebody places again meanwhile.
const ATTEMPTS: usize = 4;

impl Bundle {
    /// Opens the bundle in `folder`.
    pub fn open(folder: &Path, verification: Verification) -> Result<Self, BundleError> {
        let path = folder.join(MANIFEST);
        if !path.exists() {
            return Err(BundleError::Missing {
                path: folder.to_owned(),
            });
        }
        let state = || (std::fs::read(&path).ok(), folder.join(NEXT_PLAN).exists());
        let mut before = state();
        for _ in 1..ATTEMPTS {
            let found = Self::open_once(folder, verification);
            let now = state();
            if found.is_ok() || now == before {
                return found;
            }
            before = now;
        }
        Self::open_once(folder, verification)
    }

    fn open_once(folder: &Path, verification: Verification) -> Result<Self, BundleError> {
        let path = folder.join(MANIFEST);
        let manifest = read_manifest(&path)?;
        check_seal(&path, &manifest)?;
        let plan_path = plan_path(folder, &manifest.body);
        verify(folder, &manifest.body, &plan_path, verification)?;
        let quant = manifest
            .body
            .quant
            .parse()
            .map_err(|_| ArtifactError::WrongFormat {
                path: path.clone(),
                expected: format!(
                    "bundle with weights this program knows ({})",
                    Format::names()
                ),
                found: format!("a bundle with `{}` weights", manifest.body.quant),
            })?;
        let plan = Document::<Plan>::read(&plan_path, PLAN_FORMAT, PLAN_VERSION)?;
        plan.header
            .check_model(&plan_path, &manifest.header.model)?;
        check_plan(&plan_path, &plan.body, &manifest.body.config)?;
        let predictors = manifest
            .body
            .predictors
            .then(|| PredictorFile::open(folder))
            .transpose()?;
        if let Some(predictors) = &predictors {
            predictors
                .header()
                .check_model(&folder.join(predictor_file::FILE), &manifest.header.model)?;
        }
        let certificate = manifest.body.certificate.then(|| {
            let path = folder.join(certificate::FILE);
            let document = Document::read(&path, certificate::FORMAT, certificate::VERSION)?;
            document.header.check_model(&path, &manifest.header.model)?;
            Ok::<_, ArtifactError>(document)
        });
        let certificate = certificate.transpose()?;
        let weights = TensorFile::open(&folder.join(WEIGHTS))?;
        Ok(Self {
            folder: folder.to_owned(),
            manifest,
            plan,
            quant,
            weights,
            predictors,
            certificate,
        })
    }

    /// Adds `certificate` and the texts it was measured on, and opens the bundle anew.
    pub fn certify(
        self,
        certificate: Certificate,
        texts: &[Vec<u32>],
    ) -> Result<Self, BundleError> {
        let folder = self.folder;
        let lock = FolderLock::of(&folder)?;
        check_still_here(&folder, &self.manifest)?;
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
        check_still_here(&folder, &self.manifest)?;
        let mut manifest = self.manifest.clone();
        manifest.body.certificate = true;
        for name in [certificate::FILE, certificate::TEXT_FILE] {
            let digest = Digest::of_file(&folder.join(name))?;
            manifest.body.files.insert(name.to_owned(), digest);
        }
        // The manifest comes last: until it is there, the bundle is what it was.
        sealed(manifest).write(&folder.join(MANIFEST))?;
        drop(lock);
        Self::open(&folder, Verification::Quick)
    }

    /// What the policies were shown to do, where that was measured.
    pub fn certificate(&self) -> Option<&Certificate> {
        self.certificate.as_ref().map(|document| &document.body)
    }

    /// The texts that the certificate was measured on, token ids each.
    pub fn certificate_texts(&self) -> Result<Vec<Vec<u32>>, BundleError> {
        Ok(token_texts::read(
            &self.folder.join(certificate::TEXT_FILE),
        )?)
    }

    /// Whether the certificate is of the text and of the decisions that are here.
    pub fn certificate_is_of_this(&self) -> bool {
        self.certificate().is_some_and(|certificate| {
            let texts = self.certificate_texts();
            certificate.layers.len() == self.plan().layers.len()
                && certificate.decisions == certificate::decisions(&self.plan().layers)
                && texts.is_ok_and(|t| token_texts::digest(&t) == certificate.scoring.digest)
        })
    }

    /// Per layer, what placing this again takes.
    pub fn placing(&self) -> Result<Vec<LayerInputs>, BundleError> {
        if !self.manifest.body.placing {
            return Err(BundleError::PlacedForGood {
                folder: self.folder.clone(),
            });
        }
        let path = self.folder.join(placement_inputs::FILE);
        let config = self.config();
        let (header, layers) = placement_inputs::read(&path, config.layer_count, config.ffn_size)?;
        header.check_model(&path, &self.manifest.header.model)?;
        Ok(layers)
    }

    /// Version of the bundle's format.
    pub fn version(&self) -> u32 {
        self.manifest.header.version
    }

    /// Whether `folder` holds a bundle, whole or not.
    pub fn is_bundle(folder: &Path) -> bool {
        folder.join(MANIFEST).exists()
    }

    /// Where it is.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Sizes and constants of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.manifest.body.config
    }

    /// Who made it, from what.
    pub fn header(&self) -> &Header {
        &self.manifest.header
    }

    /// The manifest.
    pub fn manifest_document(&self) -> &Document<Manifest> {
        &self.manifest
    }

    /// Where everything lives.
    pub fn plan(&self) -> &Plan {
        &self.plan.body
    }

    /// Follows `plan` from now on, here alone: the files stay as they are.
    ///
    /// Fails for a plan that cannot be, or that is of another number of layers or neurons.
    pub fn with_plan(mut self, plan: Plan) -> Result<Self, BundleError> {
        let path = self.folder.join(PLAN);
        check_plan(&path, &plan, self.config())?;
        self.plan.body = plan;
        Ok(self)
    }

    /// Format of the weights.
    pub fn quant(&self) -> Format {
        self.quant
    }

    /// The weights.
    pub fn weights(&self) -> &TensorFile {
        &self.weights
    }

    /// Holds weights and predictors as `residence` says, for who is going to read them again and again.
    pub fn hold(&mut self, residence: Residence) -> Result<(), BundleError> {
        self.weights.set_residence(residence)?;
        if let Some(predictors) = &mut self.predictors {
            predictors.set_residence(residence)?;
        }
        Ok(())
    }

    /// Reads weights and predictors into memory, which has room for them; see [`FileBytes::read_ahead`].
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

    /// Bytes of weights and predictors.
    pub fn bytes(&self) -> u64 {
        let predictors = self.predictors.as_ref();
        let predictors = predictors.map_or(0, |found| found.tensors().bytes().len());
        (self.weights.bytes().len() + predictors) as u64
    }

    /// The predictors, where there are any.
    pub fn predictors(&self) -> Option<&PredictorFile> {
        self.predictors.as_ref()
    }

    /// The files beside the weights: tokenizer, templates, generation settings.
    pub fn files(&self) -> Files {
        Files::Folder(self.folder.clone())
    }
}

fn read_manifest(path: &Path) -> Result<Document<Manifest>, ArtifactError> {
    Document::read(path, FORMAT, VERSION)
}

/// Fails where `plan`, which is in `path`, cannot be, or is not of the model of `config`.
fn check_plan(path: &Path, plan: &Plan, config: &ModelConfig) -> Result<(), BundleError> {
    plan.validate().map_err(|source| BundleError::Plan {
        path: path.to_owned(),
        source,
    })?;
    let shape = |layers: usize, neurons: usize| format!("{layers} layers of {neurons} neurons");
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

/// Fails where `folder` has another manifest by now: somebody else may have put another bundle there.
pub(crate) fn check_still_here(
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

/// The plan that the manifest speaks of: a run that was killed just after it had written the manifest
/// left it under the name of the next one.
pub(crate) fn plan_path(folder: &Path, manifest: &Manifest) -> PathBuf {
    let [usual, next] = [PLAN, NEXT_PLAN].map(|name| folder.join(name));
    let is_meant = |path: &Path| Digest::of_file(path).ok().as_ref() == manifest.files.get(PLAN);
    match !is_meant(&usual) && next.exists() && is_meant(&next) {
        true => next,
        false => usual,
    }
}

/// Compares files with the manifest's digests.
fn verify(
    folder: &Path,
    manifest: &Manifest,
    plan: &Path,
    verification: Verification,
) -> Result<(), BundleError> {
    for (name, expected) in &manifest.files {
        let path = match name.as_str() {
            PLAN => plan.to_owned(),
            name => folder.join(name),
        };
        let length = std::fs::metadata(&path)
            .map_err(ArtifactError::read(&path))?
            .len();
        if verification == Verification::Quick && length > SMALL {
            continue;
        }
        let found = Digest::of_file(&path)?;
        if found != *expected {
            let (expected, found) = (expected.to_string(), found.to_string());
            return Err(ArtifactError::Damaged {
                path,
                expected,
                found,
            }
            .into());
        }
    }
    Ok(())
}
