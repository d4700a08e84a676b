//! The counts file; the parent module describes its format. It is written value by value through one buffer.
//! The same counts always give the same bytes.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use safetensors::tensor::{Dtype, SafeTensors};
use serde_json::{Map, Value, json};

use super::ranked::{Ranked, RankedTable};
use super::{CountsError, RowCount};

const FORMAT: &str = "flechette-counts";
const VERSION: &str = "1";
/// Bytes of a row number, and of a count.
const VALUE_BYTES: usize = size_of::<u64>();

/// Writes the name of each table and its counted rows, in the given order. Replaces the file at `path`.
pub(crate) fn write<I>(path: &Path, floor: u64, tables: &[(&str, I)]) -> Result<(), CountsError>
where
    I: ExactSizeIterator<Item = RowCount> + Clone,
{
    let file = File::create(path).and_then(|file| {
        let mut file = BufWriter::new(file);
        write_to(&mut file, floor, tables)?;
        file.flush()
    });
    file.map_err(|cause| CountsError::Io { path: path.into(), cause })
}

fn write_to<I>(out: &mut impl Write, floor: u64, tables: &[(&str, I)]) -> io::Result<()>
where
    I: ExactSizeIterator<Item = RowCount> + Clone,
{
    let sizes = tables.iter().map(|(name, rows)| (*name, rows.len()));
    let mut header = header(floor, sizes).to_string().into_bytes();
    // Padded with spaces to align the values.
    header.resize(header.len().next_multiple_of(VALUE_BYTES), b' ');
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(&header)?;
    for (_, rows) in tables {
        rows.clone().try_for_each(|counted| out.write_all(&counted.row.to_le_bytes()))?;
        rows.clone().try_for_each(|counted| out.write_all(&counted.count.to_le_bytes()))?;
    }
    Ok(())
}

/// The header for tables of these names and lengths.
fn header<'a>(floor: u64, sizes: impl Iterator<Item = (&'a str, usize)> + Clone) -> Value {
    let names: Vec<&str> = sizes.clone().map(|(name, _)| name).collect();
    let about = json!({
        "format": FORMAT, "version": VERSION, "floor": floor.to_string(), "tables": json!(names).to_string(),
    });
    let mut header = Map::from_iter([("__metadata__".to_owned(), about)]);
    let mut begin = 0;
    for (name, len) in sizes {
        for column in ["rows", "counts"] {
            let end = begin + VALUE_BYTES * len;
            let tensor = json!({ "dtype": "U64", "shape": [len], "data_offsets": [begin, end] });
            header.insert(format!("{name}.{column}"), tensor);
            begin = end;
        }
    }
    Value::Object(header)
}

impl Ranked {
    /// Writes the file, or replaces it.
    ///
    /// # Errors
    /// [`CountsError::Io`].
    pub(crate) fn write(&self, path: &Path) -> Result<(), CountsError> {
        let tables: Vec<_> = self.tables.iter().map(|table| (table.name.as_str(), table.counted())).collect();
        write(path, self.floor, &tables)
    }

    /// Reads and checks a file of counts, which any program may have written.
    ///
    /// # Errors
    /// [`CountsError`] when the file cannot be read or has another format.
    pub(crate) fn read(path: &Path) -> Result<Self, CountsError> {
        let io = |cause| CountsError::Io { path: path.into(), cause };
        let bytes = std::fs::read(path).map_err(io)?;
        parse(&bytes).map_err(|reason| CountsError::Form { path: path.into(), reason })
    }
}

fn parse(bytes: &[u8]) -> Result<Ranked, String> {
    let (_, about) = SafeTensors::read_metadata(bytes).map_err(|e| format!("not a safetensors file: {e}"))?;
    let tensors = SafeTensors::deserialize(bytes).map_err(|e| format!("not a safetensors file: {e}"))?;
    let about = about.metadata().clone().unwrap_or_default();
    let value = |key: &str| about.get(key).map_or("", String::as_str);
    if (value("format"), value("version")) != (FORMAT, VERSION) {
        let (format, version) = (value("format"), value("version"));
        return Err(format!("expected format {FORMAT:?} {VERSION}, got {format:?} {version}"));
    }
    let floor =
        value("floor").parse().map_err(|_| format!("floor: expected a number, got {:?}", value("floor")))?;
    let names: Vec<String> = serde_json::from_str(value("tables"))
        .map_err(|e| format!("tables: expected a list of names: {e}"))?;
    if let Some((_, name)) = names.iter().enumerate().find(|(at, name)| names[..*at].contains(name)) {
        return Err(format!("tables: expected distinct names, got {name:?} twice"));
    }
    let table = |name: String| {
        let column = |column: &str| column_of(&tensors, &format!("{name}.{column}"));
        let (rows, counts) = (column("rows")?, column("counts")?);
        if rows.len() != counts.len() {
            return Err(format!("table {name:?}: {} rows, {} counts", rows.len(), counts.len()));
        }
        if let Some(at) = counts.windows(2).position(|two| two[0] < two[1]) {
            return Err(format!(
                "table {name:?}: expected descending counts, count {} is larger than the one before",
                at + 2
            ));
        }
        let mut ascending = rows.clone();
        ascending.sort_unstable();
        if let Some(two) = ascending.windows(2).find(|two| two[0] == two[1]) {
            return Err(format!("table {name:?}: expected distinct rows, got {} twice", two[0]));
        }
        Ok(RankedTable { name, rows, counts })
    };
    Ok(Ranked { tables: names.into_iter().map(table).collect::<Result<_, _>>()?, floor })
}

fn column_of(tensors: &SafeTensors<'_>, name: &str) -> Result<Vec<u64>, String> {
    let view = tensors.tensor(name).map_err(|_| format!("tensor {name:?} is missing"))?;
    if view.dtype() != Dtype::U64 || view.shape().len() != 1 {
        let (got, shape) = (view.dtype(), view.shape());
        return Err(format!("tensor {name:?}: expected U64 of one dimension, got {got:?} of {shape:?}"));
    }
    Ok(view.data().as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect())
}

#[cfg(test)]
mod tests;
