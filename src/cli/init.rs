//! `flechette init`: writes the `model.toml` of a known data set, or of one's own data.

mod own;

use anyhow::anyhow;
use clap::ValueEnum;

use crate::cache::key::{FlatKeys, KeyWidth};
use crate::cli::flags::whole;
use crate::cli::{InputError, print};
use crate::dataset::Format;
use crate::schema::preset::{self, ArchKind, SyntheticShape};
use crate::schema::{MAX_DIM, MAX_FEATURES, MAX_IDS, MAX_ROWS, Schema};
use crate::types::{Element, TableId};
use own::OwnFlags;

/// Flags of `init`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Data set that gives the columns of the model; csv and tsv are your own data
    #[arg(long)]
    dataset: Dataset,
    #[command(flatten)]
    own: OwnFlags,
    /// Dense inputs: with csv and tsv the names of their columns, a,b; with synthetic their number
    /// [default: none; synthetic: 4]
    #[arg(long, value_name = "NAMES")]
    dense: Option<String>,
    #[arg(long, help = format!("Architecture: {}", ArchKind::names()))]
    arch: ArchKind,
    /// Elements of an embedding row
    #[arg(long, value_name = "D", value_parser = whole::<usize>(1, MAX_DIM as u64))]
    dim: usize,
    /// Rows of every table; raw strings are hashed to this number of rows
    #[arg(long, value_name = "N", value_parser = whole::<u64>(1, MAX_ROWS))]
    rows: u64,
    /// Element type of stored rows: f32, f16 or int8; tables whose rows would not get shorter keep f32
    #[arg(long, value_name = "E", default_value_t)]
    element: Element,
    /// Number of features; each has a table [synthetic only; default 8]
    #[arg(long, value_name = "T", value_parser = whole::<usize>(1, MAX_FEATURES as u64))]
    tables: Option<usize>,
    /// Makes all features multi-hot, with at most this many ids per sample [synthetic only; default one-hot]
    #[arg(long, value_name = "MAX", value_parser = whole::<u32>(1, u64::from(MAX_IDS)))]
    multi_hot: Option<u32>,
    /// Bits of a key that identifies any row of any table, 2 to 64. Tables that do not fit get fewer rows:
    /// their ids are hashed, and ids with the same hash share a row
    #[arg(long, value_name = "BITS", value_parser = whole::<u32>(2, 64))]
    lossy_bits: Option<u32>,
    /// How the tables divide the values of these keys: size_aware, or fixed_length for comparison
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
    Csv,
    Tsv,
    Synthetic,
}

const DEFAULT_TABLES: usize = 8;
const DEFAULT_DENSE: usize = 4;

/// Writes the schema to standard output.
///
/// # Errors
/// When the flags make no valid schema, or standard output cannot be written.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    print(&schema(&args)?.to_toml())
}

/// Divides keys of this number of bits among the tables. Tables that get too few bits for their rows hash
/// their ids.
fn limit_key_bits(schema: &mut Schema, bits: u32, coding: Coding) -> anyhow::Result<()> {
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

/// Checks that no flag is given that the data set does not use.
fn check_unused(args: &Args) -> Result<(), InputError> {
    let own = matches!(args.dataset, Dataset::Csv | Dataset::Tsv);
    let synthetic = args.dataset == Dataset::Synthetic;
    let others = [
        ("--tables", args.tables.is_some() && !synthetic, "synthetic"),
        ("--multi-hot", args.multi_hot.is_some() && !synthetic, "synthetic"),
        ("--dense", args.dense.is_some() && !synthetic && !own, "csv, tsv and synthetic"),
    ];
    let of_own = args.own.given().map(|(flag, given)| (flag, given && !own, "csv and tsv"));
    match others.into_iter().chain(of_own).find(|(_, unused, _)| *unused) {
        None => Ok(()),
        Some((flag, _, only)) => Err(InputError(anyhow!("{flag}: only for --dataset {only}"))),
    }
}

/// The shape of generated data.
fn shape(args: &Args) -> Result<SyntheticShape, InputError> {
    let dense = args.dense.as_deref().map(whole(0, MAX_FEATURES as u64)).transpose();
    Ok(SyntheticShape {
        tables: args.tables.unwrap_or(DEFAULT_TABLES),
        rows: args.rows,
        dense: dense.map_err(|error| InputError(anyhow!("--dense: {error}")))?.unwrap_or(DEFAULT_DENSE),
        multi_hot: args.multi_hot,
    })
}

fn schema(args: &Args) -> Result<Schema, InputError> {
    check_unused(args)?;
    let mut schema = match args.dataset {
        Dataset::Criteo => preset::criteo(args.arch, args.dim, args.rows),
        Dataset::Avazu => preset::avazu(args.arch, args.dim, args.rows),
        Dataset::Csv => own::schema(args, Format::Csv)?,
        Dataset::Tsv => own::schema(args, Format::Tsv)?,
        Dataset::Synthetic => preset::synthetic(args.arch, args.dim, shape(args)?),
    };
    schema = schema.stored_as(args.element);
    if let Some(bits) = args.lossy_bits {
        limit_key_bits(&mut schema, bits, args.coding).map_err(|e| InputError(e.context("--lossy-bits")))?;
    }
    schema.check().map_err(|error| InputError(error.into()))?;
    Ok(schema)
}
