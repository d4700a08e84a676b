//! The file of scores that `score --out` writes.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::anyhow;

use crate::cli::{InputError, output};
use crate::server::proto::PredictResponse;

/// It is written under a temporary name and renamed when it is complete. A pipe or a
/// terminal is written directly.
pub(super) struct ScoreFile {
    path: PathBuf,
    temporary: Option<PathBuf>,
    file: BufWriter<File>,
}

impl ScoreFile {
    pub(super) fn create(path: &Path) -> anyhow::Result<Self> {
        let wrong = |e: io::Error| InputError(anyhow!("--out: {}: {e}", path.display()));
        if path.metadata().is_ok_and(|meta| !meta.is_file() && !meta.is_dir()) {
            let file = File::options().write(true).open(path).map_err(wrong)?;
            return Ok(Self { path: path.to_owned(), temporary: None, file: BufWriter::new(file) });
        }
        // A link stays a link.
        let path = if path.is_symlink() { path.canonicalize().map_err(wrong)? } else { path.to_owned() };
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let temporary = path.with_file_name(format!(".{name}.{}.tmp", std::process::id()));
        let file = BufWriter::new(File::create(&temporary).map_err(wrong)?);
        Ok(Self { path, temporary: Some(temporary), file })
    }

    /// Writes scores one per line, with their logits if there are any, and a `nan` for each skipped line.
    /// `skips` has, for each skipped line, the number of scores before it.
    pub(super) fn write(
        &mut self,
        PredictResponse { scores, logits, .. }: &PredictResponse,
        skips: &[usize],
    ) -> anyhow::Result<()> {
        let mut skips = skips.iter().peekable();
        let mut write = || -> io::Result<()> {
            for before in 0..=scores.len() {
                while skips.next_if(|&&skip| skip == before).is_some() {
                    writeln!(self.file, "nan")?;
                }
                match (scores.get(before), logits.get(before)) {
                    (Some(score), Some(logit)) => writeln!(self.file, "{score}\t{logit}")?,
                    (Some(score), None) => writeln!(self.file, "{score}")?,
                    (None, _) => {}
                }
            }
            Ok(())
        };
        write().map_err(|error| output::unwritten("--out", &self.path, error))
    }

    pub(super) fn finish(mut self) -> anyhow::Result<()> {
        let mut finish = || -> io::Result<()> {
            self.file.flush()?;
            if let Some(temporary) = &self.temporary {
                fs::rename(temporary, &self.path)?;
                self.temporary = None;
            }
            Ok(())
        };
        let finished = finish();
        finished.map_err(|error| output::unwritten("--out", &self.path, error))
    }
}

impl Drop for ScoreFile {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary {
            // The error that left the file incomplete is reported, so an error of this removal is not.
            let _ = fs::remove_file(temporary);
        }
    }
}
