//! `init --dataset csv` and `tsv`: the schema of one's own data. Every column is a feature, except the label,
//! the dense columns, the skipped ones and those without a name.

use std::path::PathBuf;

use anyhow::anyhow;

use super::Args;
use crate::cli::InputError;
use crate::cli::format_flags::{NameFlags, name};
use crate::cli::training_flags::data_path;
use crate::dataset::{Format, column_names, has_name, label_of, listed};
use crate::schema::Schema;
use crate::schema::preset::{self, OwnColumns};

/// Flags of one's own data.
#[derive(Debug, clap::Args)]
pub(crate) struct OwnFlags {
    /// File whose first line names the columns [csv and tsv only]
    #[arg(long, value_name = "FILE", value_parser = data_path)]
    data: Option<PathBuf>,
    #[command(flatten)]
    names: NameFlags,
    /// Columns that are no inputs: a,b [csv and tsv only]
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = name)]
    skip: Vec<String>,
}

impl OwnFlags {
    /// The flags, and whether each is given.
    pub(super) fn given(&self) -> [(&'static str, bool); 4] {
        let NameFlags { columns, label } = &self.names;
        [
            ("--data", self.data.is_some()),
            ("--columns", columns.is_some()),
            ("--label", label.is_some()),
            ("--skip", !self.skip.is_empty()),
        ]
    }
}

/// The schema of the columns of a file, or of named columns.
pub(super) fn schema(args: &Args, format: Format) -> Result<Schema, InputError> {
    let OwnFlags { data, names, skip } = &args.own;
    let error = |text: String| InputError(anyhow!(text));
    if data.is_none() && names.columns.is_none() {
        let dataset = format.name();
        return Err(error(format!(
            "--dataset {dataset}: the columns are needed: --data FILE or --columns NAMES"
        )));
    }
    let columns = column_names(format, data.as_deref(), names.columns.as_deref());
    let columns = columns.map_err(|error| InputError(error.into()))?;
    let dense = args.dense.iter().flat_map(|names| names.split(',')).map(|name| name.trim().to_owned());
    let inputs = Inputs { columns, label: label_of(format, &names.options()), dense: dense.collect(), skip };
    inputs.check()?;
    let columns = OwnColumns { features: inputs.features(), dense: inputs.dense };
    Ok(preset::own(args.arch, args.dim, args.rows, columns))
}

/// The columns, and what the flags say about them.
struct Inputs<'a> {
    columns: Vec<String>,
    label: String,
    dense: Vec<String>,
    skip: &'a [String],
}

impl Inputs<'_> {
    /// Checks that the flags name columns, and each for one purpose.
    fn check(&self) -> Result<(), InputError> {
        let Self { columns, label, dense, skip } = self;
        let lists = [("--label", std::slice::from_ref(label)), ("--dense", dense), ("--skip", skip)];
        for (flag, name) in lists.iter().flat_map(|(flag, names)| names.iter().map(move |name| (flag, name)))
        {
            let wrong = |reason: String| Err(InputError(anyhow!("{flag}: {name:?} {reason}")));
            if !(has_name(name) && columns.contains(name)) {
                let exist = listed(columns.iter().map(String::as_str));
                return wrong(format!("is not a column, expected one of {exist}"));
            }
            if *flag != "--label" && name == label {
                return wrong("is the label".to_owned());
            }
            if *flag == "--skip" && dense.contains(name) {
                return wrong("is also in --dense".to_owned());
            }
        }
        Ok(())
    }

    /// The columns with names that are nothing else.
    fn features(&self) -> Vec<String> {
        let Self { columns, label, dense, skip } = self;
        let is_other = |name| name == label || dense.contains(name) || skip.contains(name);
        columns.iter().filter(|name| has_name(name) && !is_other(name)).cloned().collect()
    }
}
