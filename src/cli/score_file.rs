//! The file of scores that `score --out` and `train --valid-out` write.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use super::output;

/// A file of scores. It is written under a temporary name and renamed when it is complete. A pipe, a
/// terminal or standard output is written directly.
pub(crate) struct ScoreFile {
    /// The flag that names it, for errors.
    flag: &'static str,
    path: PathBuf,
    temporary: Option<PathBuf>,
    file: BufWriter<File>,
}

impl ScoreFile {
    /// # Errors
    /// When the file cannot be created.
    pub(crate) fn create(flag: &'static str, path: &Path) -> io::Result<Self> {
        let direct = if output::is_stdout(path) {
            // What is printed later follows the scores, also in a file.
            Some(File::from(io::stdout().as_fd().try_clone_to_owned()?))
        } else if path.metadata().is_ok_and(|meta| !meta.is_file() && !meta.is_dir()) {
            Some(File::options().write(true).open(path)?)
        } else {
            None
        };
        if let Some(file) = direct {
            return Ok(Self { flag, path: path.to_owned(), temporary: None, file: BufWriter::new(file) });
        }
        // A link stays a link.
        let path = if path.is_symlink() { path.canonicalize()? } else { path.to_owned() };
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let temporary = path.with_file_name(format!(".{name}.{}.tmp", std::process::id()));
        let file = BufWriter::new(File::create(&temporary)?);
        Ok(Self { flag, path, temporary: Some(temporary), file })
    }

    /// Writes scores one per line, with their logits if there are any, and a `nan` for each skipped line.
    /// `skips` has, for each skipped line, the number of scores before it.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub(crate) fn write(&mut self, scores: &[f32], logits: &[f32], skips: &[usize]) -> anyhow::Result<()> {
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
        write().map_err(|error| output::unwritten(self.flag, &self.path, error))
    }

    /// Gives the complete file its name.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub(crate) fn finish(mut self) -> anyhow::Result<()> {
        let mut finish = || -> io::Result<()> {
            self.file.flush()?;
            if let Some(temporary) = &self.temporary {
                self.file.get_ref().sync_all()?;
                fs::rename(temporary, &self.path)?;
                self.temporary = None;
            }
            Ok(())
        };
        let finished = finish();
        finished.map_err(|error| output::unwritten(self.flag, &self.path, error))
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

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests {
    use super::*;

    #[test]
    fn the_file_of_scores_appears_when_it_is_complete() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("scores");
        let mut out = ScoreFile::create("--out", &path).unwrap();
        out.write(&[0.1, 1e-9, 0.333_333_34], &[], &[]).unwrap();
        assert!(!path.exists());
        out.finish().unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(text, "0.1\n0.000000001\n0.33333334\n");
        let mut unfinished = ScoreFile::create("--out", &path).unwrap();
        unfinished.write(&[0.9], &[], &[]).unwrap();
        drop(unfinished);
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_skipped_line_keeps_its_place_among_the_scores() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("scores");
        let mut out = ScoreFile::create("--out", &path).unwrap();
        out.write(&[0.5, 0.25], &[], &[0, 1, 1]).unwrap();
        out.write(&[0.75], &[-2.5], &[1]).unwrap();
        out.write(&[], &[], &[0, 0]).unwrap();
        out.finish().unwrap();
        let lines = "nan 0.5 nan nan 0.25 0.75\t-2.5 nan nan nan ".replace(' ', "\n");
        assert_eq!(fs::read_to_string(&path).unwrap(), lines);
    }
}
