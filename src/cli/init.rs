//! `flechette init`: writes the `model.toml` of a known data set.

use std::io::{self, Write};

use anyhow::anyhow;
use clap::ValueEnum;

use crate::cli::InputError;
use crate::schema::Schema;
use crate::schema::preset::{self, Kind, SyntheticShape};
use crate::types::Element;

/// Flags of `init`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Whose columns the model reads
    #[arg(long)]
    dataset: Dataset,
    /// Architecture: dlrm, dcn, dcnv2, deepfm or wide_deep
    #[arg(long)]
    arch: Kind,
    /// Elements of an embedding row
    #[arg(long, value_name = "D")]
    dim: usize,
    /// Rows of every table; raw strings are hashed into so many
    #[arg(long, value_name = "N")]
    rows: u64,
    /// How rows are stored: f32, f16 or int8; only where that makes them shorter
    #[arg(long, value_name = "E", default_value_t)]
    element: Element,
    /// Features, a table each [synthetic only; default 8]
    #[arg(long, value_name = "T")]
    tables: Option<usize>,
    /// Up to so many ids a sample in every feature [synthetic only; default one-hot]
    #[arg(long, value_name = "MAX")]
    multi_hot: Option<u32>,
    /// Dense inputs [synthetic only; default 4]
    #[arg(long, value_name = "W")]
    dense: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Dataset {
    Criteo,
    Avazu,
    Synthetic,
}

/// Features of a synthetic model when `--tables` does not say.
const DEFAULT_TABLES: usize = 8;
/// Dense inputs of a synthetic model when `--dense` does not say.
const DEFAULT_DENSE: usize = 4;

/// Writes the schema to standard output.
///
/// # Errors
/// Flags that make no valid schema, and what standard output says.
pub fn run(args: Args) -> anyhow::Result<()> {
    let schema = schema(&args)?;
    let mut out = io::stdout().lock();
    out.write_all(schema.to_toml().as_bytes())?;
    Ok(out.flush()?)
}

fn schema(args: &Args) -> Result<Schema, InputError> {
    let own = [
        ("--tables", args.tables.is_some()),
        ("--multi-hot", args.multi_hot.is_some()),
        ("--dense", args.dense.is_some()),
    ];
    if let Some((flag, _)) = own.iter().find(|(_, given)| *given && args.dataset != Dataset::Synthetic) {
        return Err(InputError(anyhow!("{flag}: only for --dataset synthetic, others have fixed columns")));
    }
    let shape = SyntheticShape {
        tables: args.tables.unwrap_or(DEFAULT_TABLES),
        rows: args.rows,
        dense: args.dense.unwrap_or(DEFAULT_DENSE),
        multi_hot: args.multi_hot,
    };
    let limit = crate::schema::MAX_FEATURES;
    for (flag, count) in [("--tables", shape.tables), ("--dense", shape.dense)] {
        if count > limit {
            return Err(InputError(anyhow!("{flag}: at most {limit}, got {count}")));
        }
    }
    let schema = match args.dataset {
        Dataset::Criteo => preset::criteo(args.arch, args.dim, args.rows),
        Dataset::Avazu => preset::avazu(args.arch, args.dim, args.rows),
        Dataset::Synthetic => preset::synthetic(args.arch, args.dim, shape),
    };
    let schema = schema.stored_as(args.element);
    schema.check().map_err(|error| InputError(error.into()))?;
    Ok(schema)
}
