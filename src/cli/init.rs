//! `flechette init`: writes the `model.toml` of a known data set.

use std::io::{self, Write};

use anyhow::anyhow;
use clap::ValueEnum;

use crate::cache::key::{FlatKeys, KeyWidth};
use crate::cli::InputError;
use crate::schema::Schema;
use crate::schema::preset::{self, ArchKind, SyntheticShape};
use crate::types::{Element, TableId};

/// Flags of `init`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Whose columns the model reads
    #[arg(long)]
    dataset: Dataset,
    #[arg(long, help = format!("Architecture: {}", ArchKind::names()))]
    arch: ArchKind,
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
    /// Give all tables together flat keys of so many bits, by hashing ids into fewer rows: ids that meet
    /// share a row
    #[arg(long, value_name = "BITS")]
    lossy_bits: Option<u32>,
    /// How tables share the lossy bits: size_aware, or fixed_length to compare with
    #[arg(long, value_name = "CODING", default_value = "size_aware", requires = "lossy_bits")]
    coding: Coding,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Coding {
    SizeAware,
    FixedLength,
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
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let schema = schema(&args)?;
    let mut out = io::stdout().lock();
    out.write_all(schema.to_toml().as_bytes())?;
    Ok(out.flush()?)
}

/// Shares so many bits of flat key among the tables; those that get too few hash their ids.
fn lose_bits(schema: &mut Schema, bits: u32, coding: Coding) -> anyhow::Result<()> {
    let rows: Vec<u64> = schema.tables.iter().map(|t| t.rows).collect();
    let width = KeyWidth::new(bits).ok_or_else(|| anyhow!("expected 2 to 64, got {bits}"))?;
    let keys = match coding {
        Coding::SizeAware => FlatKeys::new(&rows, width)?,
        Coding::FixedLength => FlatKeys::fixed_length(&rows, width)?,
    };
    for (t, table) in schema.tables.iter_mut().enumerate() {
        let code = keys.code(TableId(t as u32)).filter(|code| !code.is_exact());
        table.lossy_bits = code.map(|code| code.bits());
    }
    Ok(())
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
    let mut schema = match args.dataset {
        Dataset::Criteo => preset::criteo(args.arch, args.dim, args.rows),
        Dataset::Avazu => preset::avazu(args.arch, args.dim, args.rows),
        Dataset::Synthetic => preset::synthetic(args.arch, args.dim, shape),
    };
    schema = schema.stored_as(args.element);
    if let Some(bits) = args.lossy_bits {
        lose_bits(&mut schema, bits, args.coding).map_err(|e| InputError(e.context("--lossy-bits")))?;
    }
    schema.check().map_err(|error| InputError(error.into()))?;
    Ok(schema)
}
