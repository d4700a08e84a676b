//! The program's files as another program reads and writes them, from the documented formats.

use std::path::Path;

use safetensors::SafeTensors;
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

/// A counts file.
pub struct Counts {
    pub tables: Vec<CountedTable>,
    pub floor: u64,
}

/// The rows of one table, the hottest first.
pub struct CountedTable {
    pub name: String,
    pub rows: Vec<u64>,
    pub counts: Vec<u64>,
}

/// A row of a table, given by its index, and its count.
pub struct CountedRow {
    pub table: usize,
    pub row: u64,
    pub count: u64,
}

impl Counts {
    pub fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let (_, about) = SafeTensors::read_metadata(&bytes).unwrap();
        let about = about.metadata().clone().unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let column = |name: &str| -> Vec<u64> {
            let numbers = tensors.tensor(name).unwrap().data().as_chunks().0.iter();
            numbers.map(|bytes| u64::from_le_bytes(*bytes)).collect()
        };
        let names: Vec<String> = serde_json::from_str(&about["tables"]).unwrap();
        let table = |name: String| {
            let (rows, counts) = (column(&format!("{name}.rows")), column(&format!("{name}.counts")));
            CountedTable { name, rows, counts }
        };
        Self { tables: names.into_iter().map(table).collect(), floor: about["floor"].parse().unwrap() }
    }

    /// The rows of all tables, the hottest first.
    pub fn hottest(&self) -> Vec<CountedRow> {
        let of = |(table, counted): (usize, &CountedTable)| {
            let rows = counted.rows.iter().zip(&counted.counts);
            rows.map(|(&row, &count)| CountedRow { table, row, count }).collect::<Vec<_>>()
        };
        let mut all: Vec<_> = self.tables.iter().enumerate().flat_map(of).collect();
        all.sort_by_key(|row| std::cmp::Reverse(row.count));
        all
    }
}

/// The header of a recording of tables, each a name and its rows.
pub fn recording_header<'a>(rate: f64, tables: impl Iterator<Item = (&'a str, u64)>) -> Vec<u8> {
    let tables: Vec<_> =
        tables.map(|(name, rows)| serde_json::json!({ "name": name, "rows": rows })).collect();
    let json = serde_json::json!({ "rate": rate, "tables": tables }).to_string().into_bytes();
    [b"FLTRACE1", &(json.len() as u32).to_le_bytes()[..], &json, &xxh3_64(&json).to_le_bytes()].concat()
}

/// A block of accesses, each the index of a table and a row.
pub fn recording_block(accesses: &[(u64, u64)]) -> Vec<u8> {
    let mut payload = Vec::new();
    for mut number in accesses.iter().flat_map(|&(table, row)| [table, row]) {
        while number >= 0x80 {
            payload.push(number as u8 | 0x80);
            number >>= 7;
        }
        payload.push(number as u8);
    }
    let (length, count) = (payload.len() as u32, accesses.len() as u32);
    [&length.to_le_bytes()[..], &count.to_le_bytes(), &xxh3_64(&payload).to_le_bytes(), &payload].concat()
}

/// A file of hot rows, each the index of its table among the names and its number.
pub fn hot_rows(tables: &[&str], rows: &[(u32, u64)]) -> Vec<u8> {
    let mut file = b"FLHOTROW\x01\0\0\0".to_vec();
    file.extend((tables.len() as u32).to_le_bytes());
    file.extend((rows.len() as u64).to_le_bytes());
    for name in tables {
        file.extend((name.len() as u16).to_le_bytes());
        file.extend(name.as_bytes());
    }
    for (table, row) in rows {
        file.extend(table.to_le_bytes());
        file.extend(row.to_le_bytes());
    }
    let sum = xxh3_128(&file);
    file.extend(sum.to_le_bytes());
    file
}
