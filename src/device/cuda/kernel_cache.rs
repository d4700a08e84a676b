//! Caches compiled kernels on disk, so that a restarted server does not compile them again.
//!
//! An entry is one file. Its key lists everything that the image depends on. The file's name has the kernel,
//! the target and a hash of the key. The file contains the whole key, so that a hash collision is detected,
//! and a checksum of the image:
//!
//! ```text
//! "FLKERN1\n"  key bytes (u32)  image bytes (u32)  xxh3-64 of the image (u64)  key  image
//! ```
//!
//! Numbers are little-endian. A file is written under a temporary name and then renamed, so that no reader
//! sees a part of it. If a file is damaged, a warning is logged and the kernel is compiled again. A folder to
//! which another user may write is not used, because its contents are executed.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::{Xxh3, xxh3_64, xxh3_128};

use super::compile::{NvrtcRelease, Target};
use super::sources::{HEADERS, KernelFile};

const MAGIC: &[u8; 8] = b"FLKERN1\n";
const HEAD_BYTES: usize = 24;

/// Everything that an image depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry<'a> {
    /// The source; the headers are part of the key too.
    pub kernel: &'a KernelFile,
    pub target: Target,
    /// Compiler options without the target.
    pub options: &'a [&'a str],
    pub nvrtc: NvrtcRelease,
    /// The driver's CUDA version.
    pub driver: i32,
}

impl Entry<'_> {
    fn key(&self) -> String {
        let mut source = Xxh3::new();
        let headers = HEADERS.iter().map(|header| header.text);
        for text in headers.chain([self.kernel.text]) {
            source.update(&(text.len() as u64).to_le_bytes());
            source.update(text.as_bytes());
        }
        let Self { kernel, target, options, nvrtc, driver } = self;
        format!(
            "kernel {} source {:032x} options {} target {target} nvrtc {nvrtc} driver {driver}",
            kernel.name,
            source.digest128(),
            options.join(" "),
        )
    }

    fn file_name(&self) -> String {
        let hash = xxh3_128(self.key().as_bytes());
        format!("{}-{}-{hash:032x}.image", self.kernel.name, self.target)
    }
}

/// The cache in one folder.
#[derive(Clone, Debug)]
pub(crate) struct KernelCache {
    folder: PathBuf,
}

impl KernelCache {
    /// A cache in this folder, which is created when the first image is stored.
    #[must_use]
    pub(crate) fn new(folder: &Path) -> Self {
        Self { folder: folder.to_owned() }
    }

    /// The image of an entry; `None` if there is none.
    ///
    /// # Errors
    /// A sentence for the log when the file is unreadable or damaged.
    pub(crate) fn get(&self, entry: &Entry) -> Result<Option<Vec<u8>>, String> {
        let path = self.folder.join(entry.file_name());
        let failed = |what: &dyn std::fmt::Display| {
            format!("kernel cache {}: {what}: the kernel is compiled again", path.display())
        };
        let file = match check_folder(&self.folder).and_then(|()| fs::read(&path)) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(&error)),
        };
        image_of(&file, &entry.key()).map(|image| Some(image.to_vec())).map_err(|what| failed(&what))
    }

    /// Stores an entry's image.
    ///
    /// # Errors
    /// A sentence for the log when the file cannot be written.
    pub(crate) fn put(&self, entry: &Entry, image: &[u8]) -> Result<(), String> {
        let (key, name) = (entry.key(), entry.file_name());
        // The process id, because another process may write the same entry at the same time.
        let temporary = self.folder.join(format!("{name}.{}", std::process::id()));
        let written = make_folder(&self.folder)
            .and_then(|()| check_folder(&self.folder))
            .and_then(|()| fs::write(&temporary, file_of(image, &key)))
            .and_then(|()| fs::rename(&temporary, self.folder.join(name)));
        written.map_err(|error| {
            // On a full disk the write may have left part of the file.
            let _ = fs::remove_file(&temporary);
            format!(
                "kernel cache {}: {error}: the compiled kernel is not stored (device.kernel_cache)",
                self.folder.display()
            )
        })
    }
}

fn make_folder(folder: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder)
}

/// # Errors
/// When another user may write to the folder, or it cannot be looked at.
#[cfg(unix)]
fn check_folder(folder: &Path) -> io::Result<()> {
    use std::os::unix::fs::MetadataExt;
    let (found, user) = (fs::metadata(folder)?, rustix::process::geteuid().as_raw());
    if found.uid() != user || found.mode() & 0o022 != 0 {
        let (owner, mode) = (found.uid(), found.mode() & 0o7777);
        return Err(io::Error::other(format!(
            "expected a folder of user {user} to which no other user may write, got one of user {owner} with \
             mode {mode:o}"
        )));
    }
    Ok(())
}

#[cfg(not(unix))]
fn check_folder(_: &Path) -> io::Result<()> {
    Ok(())
}

fn file_of(image: &[u8], key: &str) -> Vec<u8> {
    let mut file = Vec::with_capacity(HEAD_BYTES + key.len() + image.len());
    file.extend_from_slice(MAGIC);
    file.extend_from_slice(&(key.len() as u32).to_le_bytes());
    file.extend_from_slice(&(image.len() as u32).to_le_bytes());
    file.extend_from_slice(&xxh3_64(image).to_le_bytes());
    file.extend_from_slice(key.as_bytes());
    file.extend_from_slice(image);
    file
}

fn image_of<'f>(file: &'f [u8], key: &str) -> Result<&'f [u8], String> {
    let Some((head, body)) = file.split_at_checked(HEAD_BYTES) else {
        return Err(format!("expected at least {HEAD_BYTES} bytes, got {}", file.len()));
    };
    let Some(image) = body.strip_prefix(key.as_bytes()) else {
        return Err("expected the key of the entry, got another key".to_owned());
    };
    // The key and the image determine the head, so it is computed again and compared.
    if head != &file_of(image, key)[..HEAD_BYTES] {
        return Err("the head or the checksum does not match the contents".to_owned());
    }
    Ok(image)
}

#[cfg(test)]
mod tests;
