//! `train --from`: the version that training continues from.

use std::path::Path;

use anyhow::anyhow;

use super::read_schema;
use crate::cli::InputError;
use crate::schema::Schema;
use crate::store::{self, Opened, Purpose};
use crate::trainer::is_exact;
use crate::trainer::optim::Optimizer;
use crate::types::VersionSelector;

/// Reads the value of `--from`.
///
/// # Errors
/// What is expected.
pub(crate) fn parse(text: &str) -> Result<VersionSelector, String> {
    VersionSelector::parse(text).ok_or_else(|| "expected the number of a version, or latest".to_owned())
}

/// Opens and checks the version that `--from` selects.
///
/// # Errors
/// When the model has no such version, or it is not good.
pub(crate) fn open(from: VersionSelector, models: &Path, name: &str) -> anyhow::Result<Opened> {
    let opened = match from {
        VersionSelector::Latest => store::open_to_continue(models, name, Purpose::Train),
        VersionSelector::Version(version) => store::open(models, name, version, Purpose::Train),
    };
    opened.map_err(|e| InputError(anyhow!("--from: {e}")).into())
}

/// The schema to train: that of the file, or of the version. If both are given, they must be equal.
///
/// # Errors
/// When the file is not a valid schema, or differs from the version's schema.
pub(crate) fn schema_of(file: Option<&Path>, from: Option<&Opened>) -> anyhow::Result<Schema> {
    let file = file.map(|path| anyhow::Ok((path, read_schema(path)?))).transpose()?;
    match (file, from) {
        (Some((_, schema)), None) => Ok(schema),
        (None, Some(opened)) => Ok(opened.schema.clone()),
        (Some((path, schema)), Some(opened)) => match opened.schema.first_difference(&schema) {
            None => Ok(schema),
            Some(difference) => {
                let version = opened.store.version();
                let error = anyhow!(
                    "--model-config: {}: not the schema of version {version}: {difference}",
                    path.display()
                );
                Err(InputError(error).into())
            }
        },
        // clap requires one of them.
        (None, None) => Err(InputError(anyhow!("--model-config: missing")).into()),
    }
}

/// Logs where training continues, and warns if it is not to the bit.
pub(crate) fn log(model: &str, opened: &Opened, optimizer: Optimizer) {
    let version = opened.store.version().0;
    if is_exact(opened, optimizer) {
        let steps = opened.training.map(|training| training.steps);
        tracing::info!(model, version, steps, "training continues to the bit");
    } else {
        tracing::warn!(
            model,
            version,
            optimizer = opened.metadata.get("optimizer").map_or("unknown", String::as_str),
            "training continues from the rows and dense weights only; steps and optimizer state start at 0, \
             because another optimizer wrote the version, or it has no checkpoint"
        );
    }
}
