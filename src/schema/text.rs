//! Writes a schema as the text of a `model.toml`. [`Schema::parse`] reads back an equal schema.
//!
//! The text is not written by serde, so that each entry has a few lines with its options inline, in a
//! readable order.

use std::fmt::{self, Display, Write};

use super::{AbsentDefault, Arity, Loss, Pooling, Schema, Transform};

impl Schema {
    /// The schema as TOML.
    #[must_use]
    pub fn to_toml(&self) -> String {
        TomlText(self).to_string()
    }
}

struct TomlText<'a>(&'a Schema);

impl Display for TomlText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Schema { architecture, loss, dense, features, tables } = self.0;
        match loss {
            Loss::BinaryCrossEntropy => writeln!(f, "loss = \"binary_cross_entropy\"")?,
        }
        writeln!(f, "\n[architecture]")?;
        architecture.write_toml(f)?;
        for entry in dense {
            writeln!(f, "\n[[dense]]\nname = {}", quoted(&entry.name))?;
            writeln!(f, "transform = {}", transform(entry.transform))?;
        }
        for entry in features {
            writeln!(f, "\n[[features]]\nname = {}", quoted(&entry.name))?;
            writeln!(f, "table = {}", quoted(&entry.table))?;
            if let Some(table) = &entry.wide_table {
                writeln!(f, "wide_table = {}", quoted(table))?;
            }
            match entry.arity {
                Arity::OneHot => writeln!(f, "arity = \"one_hot\"")?,
                Arity::MultiHot { max } => writeln!(f, "arity = {{ multi_hot = {{ max = {max} }} }}")?,
            }
            match entry.pooling {
                Pooling::Sum => writeln!(f, "pooling = \"sum\"")?,
                Pooling::Mean => writeln!(f, "pooling = \"mean\"")?,
            }
            if let Some(hash) = entry.hash {
                writeln!(f, "hash = {{ seed = {}, modulus = {} }}", hash.seed, hash.modulus)?;
            }
        }
        for entry in tables {
            writeln!(f, "\n[[tables]]\nname = {}", quoted(&entry.name))?;
            writeln!(f, "rows = {}\ndim = {}\nelement = \"{}\"", entry.rows, entry.dim, entry.element)?;
            match entry.default {
                AbsentDefault::Zeros => writeln!(f, "default = \"zeros\"")?,
                AbsentDefault::Row(row) => writeln!(f, "default = {{ row = {row} }}")?,
                AbsentDefault::Error => writeln!(f, "default = \"error\"")?,
            }
            if let Some(bits) = entry.lossy_bits {
                writeln!(f, "lossy_bits = {bits}")?;
            }
        }
        Ok(())
    }
}

fn transform(transform: Transform) -> String {
    match transform {
        Transform::None => "\"none\"".into(),
        Transform::Log1p => "\"log1p\"".into(),
        Transform::Standardize { mean, std } => {
            format!("{{ standardize = {{ mean = {}, std = {} }} }}", float(mean), float(std))
        }
    }
}

/// The shortest text that a TOML parser reads as an f64 that rounds to `value`.
fn float(value: f32) -> String {
    let short = format!("{value:?}");
    let reads_back = short.parse::<f64>().is_ok_and(|wide| wide as f32 == value);
    if value.is_nan() {
        "nan".into()
    } else if reads_back {
        short
    } else {
        format!("{:?}", f64::from(value))
    }
}

/// A TOML basic string.
fn quoted(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            c if c.is_control() => {
                // Writing to a String cannot fail.
                let _ = write!(quoted, "\\u{:04X}", c as u32);
            }
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}
