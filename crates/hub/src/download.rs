//! Download of one file: to a temporary name, resumed, checked, then renamed.

use std::{
    fs::{self, File, OpenOptions},
    io::{Read, Seek, SeekFrom, Write},
    path::Path,
};

use powerinfer_artifact::{ArtifactError, Progress};
use ureq::Response;

use crate::{
    HubError, ModelName,
    cache::ModelCache,
    checksum::Checksum,
    client::{Client, Failure, Follow, RETRIES, protocol, shown},
    remote_file::{RemoteFile, content_range},
};

/// Bytes read at once.
const CHUNK: usize = 1 << 16;
/// Bytes an attempt must have received to reset the count of failures.
const PROGRESS: u64 = 1 << 20;

/// Downloads the content of `remote` unless the cache has it.
pub(crate) fn fetch_blob(
    client: &Client,
    model: &ModelName,
    cache: &ModelCache,
    remote: &RemoteFile,
    progress: &dyn Progress,
) -> Result<(), HubError> {
    let _lock = cache.lock(&remote.etag, &remote.name, progress)?;
    let blob = cache.blob(&remote.etag);
    if cache.has_blob(&remote.etag, remote.size) {
        return Ok(());
    }
    if let Some(folder) = blob.parent() {
        fs::create_dir_all(folder).map_err(ArtifactError::write(folder))?;
    }
    let path = cache.partial(&remote.etag);
    let mut partial = Partial::open(&path, remote, progress)?;
    let mut failed = 0;
    while partial.checksum.length() < remote.size {
        let before = partial.checksum.length();
        match partial.fetch_rest(client, model, progress) {
            Ok(()) => break,
            Err(Failure::Lasting(error)) => return Err(error),
            Err(Failure::Passing(error)) => {
                if partial.checksum.length() >= before.saturating_add(PROGRESS) {
                    failed = 0;
                }
                if failed == RETRIES {
                    return Err(partial.broke_off(error));
                }
                client.pause(failed, progress)?;
                failed += 1;
            }
        }
    }
    partial.finish(&blob)
}

/// A partly downloaded file.
struct Partial<'a> {
    remote: &'a RemoteFile,
    path: &'a Path,
    file: File,
    /// Checksum of the bytes in `file`.
    checksum: Checksum,
}

impl<'a> Partial<'a> {
    /// Opens the file and reads the bytes of an earlier attempt.
    fn open(
        path: &'a Path,
        remote: &'a RemoteFile,
        progress: &dyn Progress,
    ) -> Result<Self, HubError> {
        let mut options = OpenOptions::new();
        let file = options.create(true).truncate(false).read(true).write(true);
        let file = file.open(path).map_err(ArtifactError::write(path))?;
        let mut partial = Self {
            remote,
            path,
            file,
            checksum: Checksum::new(&remote.etag, remote.size),
        };
        let length = partial.file.metadata().map_err(ArtifactError::read(path))?;
        if length.len() > remote.size {
            partial.start_over()?;
        }
        let mut chunk = vec![0; CHUNK];
        loop {
            let read = partial.file.read(&mut chunk);
            match read.map_err(ArtifactError::read(path))? {
                0 => return Ok(partial),
                read => partial.checksum.update(&chunk[..read]),
            }
            progress.advance(0)?;
        }
    }

    /// Discards all bytes.
    fn start_over(&mut self) -> Result<(), HubError> {
        let emptied = self.file.set_len(0);
        emptied
            .and_then(|()| self.file.seek(SeekFrom::Start(0)))
            .map_err(ArtifactError::write(self.path))?;
        self.checksum = Checksum::new(&self.remote.etag, self.remote.size);
        Ok(())
    }

    /// Requests the missing bytes and appends them until the connection ends.
    fn fetch_rest(
        &mut self,
        client: &Client,
        model: &ModelName,
        progress: &dyn Progress,
    ) -> Result<(), Failure> {
        let (remote, have) = (self.remote, self.checksum.length());
        let start = (have > 0).then_some(have);
        let response = client.send("GET", &remote.address, start, Follow::Anywhere)?;
        match response.status() {
            206 => match content_range(&response) {
                Some((first, total))
                    if first == have && total.is_none_or(|total| total == remote.size) => {}
                _ => {
                    let reason = "it sends another part of the file than was requested";
                    return Err(protocol(&remote.address, reason).into());
                }
            },
            // The server does not resume, or does not have this range: start over.
            200 if have == 0 => {}
            200 => self.start_over()?,
            416 if have > 0 => {
                self.start_over()?;
                return Err(Failure::Passing(protocol(
                    &remote.address,
                    "it has no such part of the file",
                )));
            }
            300.. => return Err(client.refusal(model, &remote.address, &response)),
            status => {
                let reason = format!("HTTP {status} was not expected");
                return Err(protocol(&remote.address, reason).into());
            }
        }
        self.take(response, progress)
    }

    /// Appends the body of `response`.
    fn take(&mut self, response: Response, progress: &dyn Progress) -> Result<(), Failure> {
        let cut = |reason: String| {
            Failure::Passing(HubError::Unreachable {
                address: shown(&self.remote.address),
                reason,
            })
        };
        let mut reader = response.into_reader();
        let mut chunk = vec![0; CHUNK];
        loop {
            let read = match reader.read(&mut chunk) {
                Ok(0) if self.checksum.length() < self.remote.size => {
                    return Err(cut("the connection was closed".to_owned()));
                }
                Ok(0) => return Ok(()),
                Ok(read) => read,
                Err(error) => return Err(cut(error.to_string())),
            };
            if read as u64 > self.remote.size - self.checksum.length() {
                self.start_over()?;
                let reason = "it is longer than it said";
                return Err(protocol(&self.remote.address, reason).into());
            }
            self.file
                .write_all(&chunk[..read])
                .map_err(ArtifactError::write(self.path))?;
            self.checksum.update(&chunk[..read]);
            progress.advance(read as u64)?;
        }
    }

    /// The error after the last attempt.
    fn broke_off(&self, error: HubError) -> HubError {
        HubError::BrokeOff {
            file: self.remote.name.to_string(),
            received: self.checksum.length(),
            size: self.remote.size,
            reason: match error {
                HubError::Unreachable { reason, .. } | HubError::Protocol { reason, .. } => reason,
                HubError::Status { status, .. } => format!("HTTP {status}"),
                error => error.to_string(),
            },
        }
    }

    /// Renames the file to `blob` if its checksum is right; removes it otherwise.
    fn finish(self, blob: &Path) -> Result<(), HubError> {
        if let Err(mismatch) = self.checksum.finish() {
            drop(self.file);
            fs::remove_file(self.path).map_err(ArtifactError::write(self.path))?;
            return Err(HubError::Damaged {
                file: self.remote.name.to_string(),
                kind: mismatch.kind,
                expected: mismatch.expected,
                found: mismatch.found,
            });
        }
        self.file
            .sync_all()
            .map_err(ArtifactError::write(self.path))?;
        drop(self.file);
        Ok(fs::rename(self.path, blob).map_err(ArtifactError::write(blob))?)
    }
}
