//! The data flags of `train`: what is trained on, in which order, and what is held out.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::anyhow;

use super::Args;
use crate::cli::InputError;
use crate::cli::flags::whole;
use crate::cli::training_flags::{data_path, is_pipe, no_samples, readable_twice};
use crate::dataset::{
    Feed, FeedFiles, FieldOptions, FileAt, FollowedDir, HeldOut, Learned, Shuffle, Stop, can_be_followed,
};
use crate::learnlog;
use crate::schema::Schema;
use crate::store::format::Checksum;
use crate::trainer::cursor::{Cursor, RunIdentity, ValidFile, Validating};
use crate::types::RawBatch;

/// Flags of the data.
#[derive(Debug, clap::Args)]
pub(crate) struct DataFlags {
    /// Files to train on, read in this order; - is standard input. With --format synthetic a
    /// description, such as rows=100000,seed=1
    #[arg(long, value_name = "FILE", num_args = 1.., required_unless_present_any = ["follow", "learned"])]
    #[arg(value_parser = data_path)]
    pub data: Vec<PathBuf>,
    /// Trains on the files of this directory, in the order of their names, as they are renamed into it
    #[arg(long, value_name = "DIR", conflicts_with_all = ["data", "shuffle", "valid_ratio"])]
    pub follow: Option<PathBuf>,
    /// Ends after the file of this name, or before a file whose name is greater
    #[arg(long, value_name = "NAME")]
    follow_until: Option<String>,
    /// Trains on the samples that clients sent to the server, and waits for more
    #[arg(long, conflicts_with_all = ["data", "follow", "shuffle", "valid_ratio", "epochs", "early_stop"])]
    #[arg(conflicts_with = "save_best")]
    pub learned: bool,
    /// Ends when all samples of the log were trained on, and does not wait for more
    #[arg(long)]
    learned_until_end: bool,
    #[command(flatten)]
    order: OrderFlags,
    /// Share of the samples that is held out for validation and never trained on
    #[arg(long, value_name = "R", conflicts_with = "valid", value_parser = ratio)]
    pub valid_ratio: Option<f64>,
}

/// Flags of the order of samples, which `train` shares with `serve --train`.
#[derive(Debug, clap::Args)]
pub(crate) struct OrderFlags {
    /// Shuffles within consecutive blocks of this many samples
    #[arg(long, value_name = "N", value_parser = whole::<u32>(2, 1 << 28))]
    shuffle: Option<u32>,
    /// Seed of shuffling, and of what is held out [default: --seed]
    #[arg(long, value_name = "N", value_parser = whole::<u64>(0, u64::MAX))]
    data_seed: Option<u64>,
}

impl OrderFlags {
    /// The first of these flags that is given.
    pub(crate) fn given(&self) -> Option<&'static str> {
        self.shuffle.map(|_| "--shuffle").or(self.data_seed.map(|_| "--data-seed"))
    }
}

/// Where the samples of `serve --train` come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SampleSource {
    /// The files of a directory, as they are renamed into it.
    Followed(PathBuf),
    /// Files, once, in this order.
    Files(Vec<PathBuf>),
    /// The samples that clients send to the server.
    Learned,
}

impl SampleSource {
    /// The source of these words.
    ///
    /// # Errors
    /// When this program has no such source.
    pub(crate) fn parse(words: &[&str]) -> Result<Self, String> {
        let &[first, ref more @ ..] = words else { return Err(NO_SOURCE.to_owned()) };
        let (followed, dir) = match first.strip_prefix("follow:") {
            Some(dir) => (true, dir),
            None => (Path::new(first).is_dir(), first),
        };
        match (first, more) {
            _ if words.contains(&"") || dir.is_empty() => Err(NO_SOURCE.to_owned()),
            ("learn", []) => Ok(Self::Learned),
            (_, []) if followed => Ok(Self::Followed(dir.into())),
            (_, more) if followed || first == "learn" => {
                Err(format!("expected one source, or files, got {} after {first}", more.join(" ")))
            }
            _ => Ok(Self::Files(words.iter().map(PathBuf::from).collect())),
        }
    }

    /// The data flags that `train` has for this source.
    #[must_use]
    pub(crate) fn flags(self, follow_until: Option<String>, order: OrderFlags) -> DataFlags {
        let learned = matches!(self, Self::Learned);
        let (data, follow) = match self {
            Self::Followed(dir) => (Vec::new(), Some(dir)),
            Self::Files(files) => (files, None),
            Self::Learned => (Vec::new(), None),
        };
        DataFlags { data, follow, follow_until, learned, learned_until_end: false, order, valid_ratio: None }
    }
}

const NO_SOURCE: &str = "expected a directory, files or learn after the =";

/// Gets the cursor of a version, and removes the samples before it.
pub(crate) type Consumer = Arc<dyn Fn(&str) + Send + Sync>;

/// Parses a share of samples.
fn ratio(text: &str) -> Result<f64, String> {
    let ratio = text.parse().ok().filter(|&ratio: &f64| ratio > 0.0 && ratio < 1.0);
    ratio.ok_or_else(|| "expected a number above 0 and below 1".to_owned())
}

impl DataFlags {
    /// Whether files or samples may appear while training runs, so that the cursor names a file.
    pub(crate) fn follows(&self) -> bool {
        self.follow.is_some() || self.learned
    }

    /// The flag of the data, and its first path.
    fn first(&self) -> (&'static str, &Path) {
        match &self.follow {
            None if self.learned => ("--learned", Path::new("state/learn")),
            Some(dir) => ("--follow", dir),
            None => ("--data", self.data.first().map_or(Path::new(""), PathBuf::as_path)),
        }
    }

    /// The error for data without samples.
    pub(crate) fn no_samples(&self) -> anyhow::Error {
        let (flag, path) = self.first();
        no_samples(flag, path)
    }
}

impl Args {
    /// The data of the run. Reading it ends when `stop` is set.
    pub(crate) fn feed(&self, schema: &Schema, stop: &Stop) -> Feed {
        let flags = &self.data;
        let seed = flags.order.data_seed.unwrap_or(self.run.training.seed);
        let files = match &flags.follow {
            None if flags.learned => {
                FeedFiles::Learned(Learned::new(&self.learned_log(), flags.learned_until_end))
            }
            Some(dir) => FeedFiles::Followed(FollowedDir::new(dir, flags.follow_until.clone())),
            None => FeedFiles::List(flags.data.clone()),
        };
        Feed {
            format: self.run.training.format.given(),
            files,
            schema: schema.clone(),
            options: self.run.training.read_options(),
            shuffle: flags.order.shuffle.map(|samples| Shuffle { samples, seed }),
            held_out: flags.valid_ratio.map(|ratio| HeldOut { ratio, seed }),
            stop: stop.clone(),
        }
    }

    /// The log of `--learned`.
    fn learned_log(&self) -> PathBuf {
        learnlog::folder(&self.models, &self.name)
    }

    /// Removes the samples of the log that a version was trained on, which has this cursor. `None` for other
    /// data.
    pub(crate) fn consumer(&self) -> Option<Consumer> {
        let log = self.learned_log();
        let consume = move |cursor: &str| {
            let Ok(Cursor { file: Some(FileAt { name, .. }), log: of_cursor, .. }) = Cursor::parse(cursor)
            else {
                return;
            };
            let consumed = learnlog::id_of(&log).and_then(|id| {
                // A new log in the place of a deleted one has files of the same names.
                let is_another = of_cursor.is_some() && id != of_cursor;
                if is_another { Ok(0) } else { learnlog::remove_consumed(&log, &name) }
            });
            if let Err(reason) = consumed {
                tracing::warn!(%reason, "samples that were trained on are not removed");
            }
        };
        self.data.learned.then(|| Arc::new(consume) as _)
    }

    /// Everything that decides what the run trains, for its cursor.
    pub(crate) fn cursor_run(&self, feed: &Feed) -> anyhow::Result<RunIdentity> {
        let optimizer = self.run.training.optimizer()?;
        // Learned samples have neither lines nor fields.
        let lines = Some(&self.run.training.format).filter(|_| !self.data.learned);
        let format = lines.and_then(|lines| lines.given());
        Ok(RunIdentity {
            format: format.map_or_else(String::new, |format| format.to_string()),
            fields: lines.map_or_else(FieldOptions::default, |lines| lines.fields()),
            files: feed.names(),
            begins: self.data.data.iter().map(|path| begin_sum("--data", path)).collect::<Result<_, _>>()?,
            follow: self.data.follow.as_deref().map(last_name),
            learned: self.data.learned,
            batch: self.run.training.batch,
            seed: self.run.training.seed,
            shuffle: feed.shuffle,
            held_out: feed.held_out,
            lr: optimizer.lr,
            schedule: optimizer.schedule,
            replicas: Some(self.run.replicas as u64),
            lambda: Some(if self.run.replicas == 1 { 1 } else { self.run.lambda }),
            validating: self.validating(feed)?,
        })
    }

    /// How the epochs are validated; `None` if the run has no epochs, because validation then affects
    /// nothing, and for `serve --train`, which continues a run of `train` whatever its validation flags were.
    fn validating(&self, feed: &Feed) -> anyhow::Result<Option<Validating>> {
        if !self.alone || self.data.follows() {
            return Ok(None);
        }
        let file =
            |path: &Path| begin_sum("--valid", path).map(|begin| ValidFile { name: feed.name(path), begin });
        // Otherwise the losses decide nothing.
        let decides = self.early_stop.is_some() || self.save_best;
        let valid = self.valid.as_deref().filter(|_| decides).map(file).transpose()?;
        Ok(Some(Validating { valid, early_stop: self.early_stop, save_best: self.save_best }))
    }

    /// Opens every file once, so that a file that cannot be used is reported before hours of training.
    pub(crate) fn check_data(&self, schema: &Schema) -> anyhow::Result<()> {
        if self.valid.is_some() {
            self.run.training.format.format()?;
        }
        self.check_sources()?;
        if self.data.learned {
            if self.valid.is_none() {
                self.run.training.format.fields().check_unused("learned samples")?;
            }
            self.check_learned_log()?;
        } else {
            self.run.training.format.warn_of_lists(schema);
        }
        self.check_read_again()?;
        self.open_each(schema)
    }

    /// The flags of one source of samples are not given with another one, and its directory exists.
    fn check_sources(&self) -> Result<(), InputError> {
        // clap does not ask for --follow here, because it conflicts with --data.
        if self.data.follow_until.is_some() && self.data.follow.is_none() {
            return Err(InputError(anyhow!("--follow-until: used only with --follow")));
        }
        if self.data.learned_until_end && !self.data.learned {
            return Err(InputError(anyhow!("--learned-until-end: used only with --learned")));
        }
        let order = &self.data.order;
        if order.data_seed.is_some() && order.shuffle.is_none() && self.data.valid_ratio.is_none() {
            return Err(InputError(anyhow!("--data-seed: used only with --shuffle or --valid-ratio")));
        }
        // Otherwise no file is the last one, and training would not end.
        if let Some(name) = self.data.follow_until.as_ref().filter(|name| !can_be_followed(name)) {
            let expected = "expected the name of a file in the directory, which does not begin with \".\" or \
                            end with \".tmp\" or \".part\"";
            return Err(InputError(anyhow!("--follow-until: {expected}, got {name:?}")));
        }
        match self.data.follow.as_ref().filter(|dir| !dir.is_dir()) {
            Some(dir) => Err(InputError(anyhow!("--follow: {}: not a directory", dir.display()))),
            None => Ok(()),
        }
    }

    /// The log of learned samples exists, and its end is known.
    fn check_learned_log(&self) -> anyhow::Result<()> {
        let log = self.learned_log();
        if !log.is_dir() {
            let reason = "no samples were sent to a server (learn.enabled)";
            return Err(InputError(anyhow!("--learned: {}: {reason}", log.display())).into());
        }
        // With `serve --train` the server opens the log later. After a power failure, the end of the log is
        // not known before that, and the cursor would be past it.
        let repaired = learnlog::repair(&log).map_err(anyhow::Error::from);
        repaired.map_err(|error| match self.alone {
            true => InputError(anyhow!("--learned: {error}")).into(),
            false => error.context("--learned"),
        })?;
        if !self.data.learned_until_end && !self.run.publish.publishes() {
            tracing::warn!(
                "--learned: without --publish-every this run writes its only version, and removes samples \
                 from the log, when a signal ends it"
            );
        }
        Ok(())
    }

    /// Whether data can be read only once.
    pub(crate) fn reads_pipe(&self) -> bool {
        self.data.data.iter().any(|path| is_pipe(path))
    }

    /// What is read more than once is no pipe.
    fn check_read_again(&self) -> anyhow::Result<()> {
        let (data, valid) = (&self.data.data, &self.valid);
        // A restart begins at the first sample of a pipe, and would train on the files again.
        if let Some(pipe) = data.iter().find(|path| !self.alone && data.len() > 1 && is_pipe(path)) {
            let error = anyhow!("--train: {}: a pipe must be the only file", pipe.display());
            return Err(InputError(error).into());
        }
        if self.epochs > 1 {
            readable_twice("--epochs", data)?;
        }
        // Read after each epoch, and for the written version.
        let valid_twice = self.epochs > 1 || self.early_stop.is_some() || self.save_best;
        if let Some(pipe) = valid.as_ref().filter(|path| valid_twice && is_pipe(path)) {
            let error = anyhow!("--valid: {}: a pipe cannot be read after every epoch", pipe.display());
            return Err(InputError(error).into());
        }
        if self.data.valid_ratio.is_some() {
            readable_twice("--valid-ratio", data)?;
        }
        Ok(())
    }

    fn open_each(&self, schema: &Schema) -> anyhow::Result<()> {
        let (data, valid) = (&self.data.data, &self.valid);
        for path in data.iter().chain(valid).filter(|path| !is_pipe(path)) {
            let mut reader = self.run.training.open(std::slice::from_ref(path), schema)?;
            if Some(path) == valid.as_ref() {
                // Reads one sample now, so that missing labels are reported before training and not after it.
                if reader.read(1, &mut RawBatch::default())? == 0 {
                    return Err(InputError(anyhow!("--valid: {}: no samples", path.display())).into());
                }
            }
        }
        Ok(())
    }
}

/// The last name of a directory's path, which `.` and `..` do not have.
fn last_name(dir: &Path) -> String {
    let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
    name(dir).or_else(|| name(&dir.canonicalize().ok()?)).unwrap_or_default()
}

/// A checksum of the first bytes of a file; no text for what is not a file. Short, because a file may grow
/// until a run continues. If the first line is longer, for example because it names many columns, as many
/// bytes after it count too.
fn begin_sum(flag: &str, path: &Path) -> anyhow::Result<String> {
    const BYTES: u64 = 4096;
    const LONGEST_LINE: u64 = 1 << 20;
    if !path.is_file() {
        return Ok(String::new());
    }
    let read = || {
        let (mut file, mut begin) = (BufReader::new(File::open(path)?), Vec::new());
        file.by_ref().take(BYTES).read_to_end(&mut begin)?;
        if begin.len() as u64 == BYTES && !begin.contains(&b'\n') {
            file.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut begin)?;
            file.take(BYTES).read_to_end(&mut begin)?;
        }
        io::Result::Ok(begin)
    };
    let begin = read().map_err(|e| InputError(anyhow!("{flag}: {}: {e}", path.display())))?;
    Ok(Checksum::of(&begin).to_string())
}

#[cfg(test)]
#[cfg(not(flechette_loom))]
mod tests {
    use super::*;

    #[test]
    fn files_differ_after_a_long_first_line_or_in_their_first_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let sum = |text: String| {
            let path = dir.path().join("data");
            std::fs::write(&path, text).unwrap();
            begin_sum("--data", &path).unwrap()
        };
        let header = vec!["column"; 1000].join(",");
        assert_ne!(sum(format!("{header}\n1")), sum(format!("{header}\n2")));
        assert_ne!(sum("1\n".to_owned()), sum("2\n".to_owned()));
        let rows = "1,2,3\n".repeat(1000);
        assert_eq!(sum(format!("{rows}4\n")), sum(rows), "it has grown");
    }

    #[test]
    fn a_source_is_a_followed_directory_files_or_learned_samples() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_str().unwrap();
        assert_eq!(SampleSource::parse(&[path]), Ok(SampleSource::Followed(path.into())));
        assert_eq!(SampleSource::parse(&["follow:later"]), Ok(SampleSource::Followed("later".into())));
        assert_eq!(SampleSource::parse(&["learn"]), Ok(SampleSource::Learned));
        assert_eq!(SampleSource::parse(&["a.tsv"]), Ok(SampleSource::Files(vec!["a.tsv".into()])));
        assert_eq!(
            SampleSource::parse(&["a", "learn"]),
            Ok(SampleSource::Files(vec!["a".into(), "learn".into()]))
        );
        for wrong in
            [&[][..], &[""], &["follow:"], &["a", ""], &["learn", "a"], &[path, "a"], &["follow:d", "a"]]
        {
            assert!(SampleSource::parse(wrong).is_err(), "{wrong:?}");
        }
    }
}
