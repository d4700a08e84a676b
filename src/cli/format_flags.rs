//! The flags that say how data files are read, shared by all commands that read data.

use std::convert::Infallible;

use anyhow::anyhow;

use crate::cli::InputError;
use crate::cli::flags::whole;
use crate::dataset::{FieldOptions, Format, ReadOptions};
use crate::schema::{Arity, Schema};

/// Flags of a data format.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct FormatFlags {
    // `None` only for learned samples, if a command may train on them (`cli::command`).
    #[arg(long, value_name = "F", required = true, help = format!("Format of the data: {}", Format::names()))]
    format: Option<Format>,
    #[command(flatten)]
    fields: FieldFlags,
}

/// Flags of the fields of a line.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct FieldFlags {
    #[command(flatten)]
    names: NameFlags,
    /// ASCII character between the ids of a multi-hot feature; without it, a field is one id
    #[arg(long, value_name = "C", value_parser = separator)]
    separator: Option<char>,
}

/// Flags of the names of columns.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct NameFlags {
    /// Names of the fields, for files without a header: a,b,c; _ is a field that is not read
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = name)]
    pub columns: Option<Vec<String>>,
    /// Name of the label's column [default: click for avazu-csv, otherwise label]
    #[arg(long, value_name = "NAME", value_parser = name)]
    pub label: Option<String>,
}

/// The flag of malformed lines.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct MalformedFlag {
    /// Most malformed lines to skip; with more, the data is refused
    #[arg(long, value_name = "N", default_value_t = ReadOptions::default().malformed_lines)]
    #[arg(value_parser = whole::<u64>(0, u64::MAX))]
    pub max_malformed: u64,
}

/// Parses a name. It is checked with the other names.
pub(crate) fn name(text: &str) -> Result<String, Infallible> {
    Ok(text.trim().to_owned())
}

fn separator(text: &str) -> Result<char, String> {
    let mut chars = text.chars();
    match (chars.next(), chars.next()) {
        (Some(separator), None) if separator.is_ascii() => Ok(separator),
        _ => Err("expected one ASCII character, such as |".to_owned()),
    }
}

impl FormatFlags {
    /// # Errors
    /// When the data is learned samples.
    pub(crate) fn format(&self) -> anyhow::Result<Format> {
        self.format.ok_or_else(|| InputError(anyhow!("--format: missing")).into())
    }

    /// The format, if it is given.
    pub(crate) fn given(&self) -> Option<Format> {
        self.format
    }

    /// How the fields of a line are named and divided.
    pub(crate) fn fields(&self) -> FieldOptions {
        self.fields.options()
    }

    /// Warns that features which may have several ids are read as one, because that is only right for data
    /// without lists, and nothing else shows it.
    pub(crate) fn warn_of_lists(&self, schema: &Schema) {
        let lists = schema.features.iter().filter(|feature| matches!(feature.arity, Arity::MultiHot { .. }));
        let lists: Vec<&str> = lists.map(|feature| feature.name.as_str()).collect();
        if self.format != Some(Format::Synthetic) && self.fields.separator.is_none() && !lists.is_empty() {
            let names = lists.join(", ");
            tracing::warn!("without --separator, each field of these multi-hot features is one id: {names}");
        }
    }
}

impl FieldFlags {
    /// How the fields of a line are named and divided.
    pub(crate) fn options(&self) -> FieldOptions {
        FieldOptions { separator: self.separator, ..self.names.options() }
    }
}

impl NameFlags {
    /// How the fields of a line are named.
    pub(crate) fn options(&self) -> FieldOptions {
        FieldOptions { columns: self.columns.clone(), label: self.label.clone(), separator: None }
    }
}
