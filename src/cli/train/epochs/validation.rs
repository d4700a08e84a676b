//! Validation after an epoch: the best epoch so far, its version, and the early stop.

use super::{Epochs, is_of_version};
use crate::cli::train::publishing::WrittenVersions;
use crate::cli::train::trained::Trained;
use crate::cli::train::{Args, evaluate};
use crate::cli::{error_line, or_dash};
use crate::dataset::DataPosition;
use crate::trainer::cursor::Best;
use crate::types::Version;

impl Epochs<'_> {
    /// Validates after an epoch.
    pub(super) fn validate(
        &mut self,
        epoch: u32,
        model: &mut Trained,
        versions: &mut WrittenVersions<'_>,
    ) -> anyhow::Result<()> {
        let Args { epochs, early_stop, save_best, .. } = *self.args;
        // The evaluation of the written version follows a single epoch at once.
        if epochs == 1 && early_stop.is_none() && !save_best {
            return Ok(());
        }
        let quality = match evaluate::trained(self.args, self.feed, model) {
            Ok(None) => return Ok(()),
            Ok(Some(quality)) if !self.feed.stop.interrupted() => quality,
            unusable => {
                // The epoch is validated when the run continues.
                self.position = DataPosition { samples: self.epoch_samples, ..DataPosition::begin(epoch) };
                self.failed = unusable.err();
                return Ok(());
            }
        };
        let better = self.validation.add(epoch, quality.log_loss);
        let auc = or_dash(quality.auc, 4);
        let best = if better { " (best so far)" } else { "" };
        let (samples, log_loss) = (quality.samples, quality.log_loss);
        self.progress.print(&format!(
            "epoch {epoch} of {epochs}: validation: {samples} rows, AUC {auc}, log loss {log_loss:.4}{best}"
        ));
        self.validated.push((epoch, quality));
        if better && save_best {
            self.write_best(model, versions)?;
        }
        let bad = u64::from(self.validation.bad_epochs);
        if early_stop.is_some_and(|limit| bad >= u64::from(limit)) {
            self.progress.print(&format!("early stop: {bad} epoch(s) without a smaller log loss"));
        }
        Ok(())
    }

    /// Checks that the gate lets the present state through. Without a step, the weights are those of the last
    /// version, which has passed it.
    ///
    /// # Errors
    /// What the gate found.
    pub(crate) fn check_gate(&self) -> Result<(), String> {
        if self.progress.samples() == 0 {
            Ok(())
        } else {
            self.args.run.publish.check(&self.progress.progressive)
        }
    }

    /// Writes a version of the epoch that is the best so far, if the gate lets it through.
    pub(super) fn write_best(
        &mut self,
        model: &mut Trained,
        versions: &mut WrittenVersions<'_>,
    ) -> anyhow::Result<()> {
        if let Err(reason) = self.check_gate() {
            self.progress.print(&format!("the best version so far is not published: {reason}"));
            return Ok(());
        }
        self.best_is_in(Some(Best::THIS));
        let notes = self.cut_notes(model.state());
        match versions.write_best(model, &notes) {
            Ok(version) => self.best_is_in(Some(version)),
            Err(error) if is_of_version(&error) => {
                self.best_is_in(None);
                let reason = error_line(error.as_ref());
                self.progress.print(&format!("the best version so far could not be written: {reason}"));
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Notes the version of the best epoch so far; `None` if there is none, or not any more.
    pub(crate) fn best_is_in(&mut self, version: Option<Version>) {
        if let Some(best) = &mut self.validation.best {
            best.version = version;
        }
    }

    /// The best epoch, if it has no version although `--save-best` asks for it.
    #[must_use]
    pub(crate) fn unwritten_best(&self) -> Option<u32> {
        let best = self.validation.best.filter(|best| self.args.save_best && best.version.is_none());
        best.map(|best| best.epoch)
    }

    /// The version of the best epoch, if it was written.
    #[must_use]
    pub(crate) fn best_version(&self) -> Option<Version> {
        self.validation.best.and_then(|best| best.version)
    }
}
