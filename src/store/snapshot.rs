//! Lists the versions of a model, and checks and maps one of them. (Writing is in `write`.)
//!
//! Opening checks the manifest, the length and checksum of every file, and the name, type and shape of every
//! tensor, so that later code can rely on them. That costs one read of the files, which also brings them into
//! the page cache. The checksum is computed through a small buffer and not through the mapping, because
//! touched pages of a mapping count as memory of the process. A server would then count the optimizer state,
//! which it never reads again.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use xxhash_rust::xxh3::Xxh3;

use super::bytes::{Bytes, MappedFile, open_regular};
use super::format::{self, Checksum, Dtype, FormatError, Manifest};
use super::table::{State, Table};
use super::{EmbeddingStore, Refusal, StoreError, check_name};
use crate::schema::{self, Schema};
use crate::types::Version;

/// Bytes read and hashed at a time.
const CHUNK_BYTES: usize = 1 << 20;

pub(crate) const MANIFEST: &str = "MANIFEST.json";
pub(crate) const MODEL: &str = "model.toml";
pub(crate) const DENSE: &str = "dense.safetensors";
pub(crate) const TABLES: &str = "tables";
pub(crate) const WEIGHT: &str = "weight";
/// A reserved tensor name, for the row ids of future tables with rows not numbered from 0.
pub(crate) const KEYS: &str = "keys";

/// A version, checked and mapped.
#[derive(Debug)]
pub struct Opened {
    /// The parsed `model.toml`.
    pub schema: Schema,
    /// The text of `model.toml`.
    pub model_toml: String,
    /// Dense tensors by name, weights and optimizer state. The store does not check their names and shapes.
    /// The model does, through `accept` of [`open_latest`].
    pub dense: BTreeMap<String, Dense>,
    /// The rows, and the number of the version.
    pub store: EmbeddingStore,
    /// Notes of the writer, such as the number of steps.
    pub metadata: BTreeMap<String, String>,
}

/// A dense tensor of a version.
#[derive(Debug)]
pub struct Dense {
    shape: Vec<usize>,
    values: Bytes,
}

impl Dense {
    /// Elements along each axis, slowest first.
    #[must_use]
    pub(crate) fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Row-major.
    #[must_use]
    pub(crate) fn values(&self) -> &[f32] {
        self.values.floats()
    }
}

/// The highest good version, and the higher ones that were refused.
#[derive(Debug)]
#[allow(missing_docs)]
pub(crate) struct Latest {
    pub opened: Opened,
    /// Highest version first.
    #[cfg_attr(not(test), expect(dead_code))] // tests read it
    pub refused: Vec<Refusal>,
}

/// The names of the models in a directory, sorted: each subdirectory that has a version, good or not.
///
/// # Errors
/// [`StoreError`] when `dir` is missing, is not a directory, or cannot be read.
pub(crate) fn models(dir: &Path) -> Result<Vec<String>, StoreError> {
    let mut names = Vec::new();
    for name in entry_names(dir)? {
        if check_name("model", &name).is_ok() && dir.join(&name).is_dir() && !versions(dir, &name)?.is_empty()
        {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

/// The version numbers of a model, ascending, good or not.
///
/// # Errors
/// [`StoreError`] when the directory of the model is missing or cannot be read.
pub(crate) fn versions(models: &Path, name: &str) -> Result<Vec<Version>, StoreError> {
    check_name("model", name)?;
    let names = entry_names(&models.join(name))?;
    let mut versions: Vec<Version> = names.iter().filter_map(|name| version_number(name)).collect();
    versions.sort();
    Ok(versions)
}

/// Opens a version after checking all of it.
///
/// # Errors
/// [`StoreError`] for the first bad file, in the order manifest, schema, dense, tables.
pub fn open(models: &Path, name: &str, version: Version) -> Result<Opened, StoreError> {
    check_name("model", name)?;
    let dir = models.join(name).join(version.to_string());
    require_dir(&dir)?;
    let reader = Reader { manifest: read_manifest(&dir)?, dir };

    let (path, text) = reader.checked(MODEL)?;
    let model_toml = String::from_utf8(text.bytes().to_vec())
        .map_err(|e| StoreError::Schema { path: path.clone(), reason: e.to_string() })?;
    let schema = parse_schema(&model_toml).map_err(|reason| StoreError::Schema { path, reason })?;
    reader.check_list(&schema)?;
    let dense = reader.dense()?;
    // Tables are checked in parallel. The error returned is that of the first bad table in schema order.
    let tables: Vec<_> = schema.tables.par_iter().map(|table| reader.table(table)).collect();
    let tables = tables.into_iter().collect::<Result<_, _>>()?;
    let store = EmbeddingStore::new(version, tables);
    Ok(Opened { schema, model_toml, dense, store, metadata: reader.manifest.metadata })
}

/// Opens the highest good version. Each refused version is logged with its reason. `accept` can also refuse a
/// version, for reasons that the store cannot check, such as the shapes of dense weights.
///
/// # Errors
/// [`StoreError::NoGoodVersion`] with all refusals, or the error of reading the directory.
pub(crate) fn open_latest(
    models: &Path,
    name: &str,
    accept: impl Fn(&Opened) -> Result<(), String>,
) -> Result<Latest, StoreError> {
    let mut refused = Vec::new();
    for version in versions(models, name)?.into_iter().rev() {
        let accepted = open(models, name, version).and_then(|opened| match accept(&opened) {
            Ok(()) => Ok(opened),
            Err(reason) => Err(StoreError::NotAccepted { reason }),
        });
        match accepted {
            Ok(opened) => return Ok(Latest { opened, refused }),
            Err(reason) => {
                tracing::warn!(model = name, %version, %reason, "version refused");
                refused.push(Refusal { version, reason });
            }
        }
    }
    Err(StoreError::NoGoodVersion { model: name.to_owned(), refused })
}

/// Parses the text of a `model.toml`.
pub(crate) fn parse_schema(text: &str) -> Result<Schema, String> {
    Schema::parse(text).map_err(|e| e.to_string())
}

/// The path of a table file in its version.
pub(crate) fn table_file(table: &str) -> String {
    format!("{TABLES}/{table}.safetensors")
}

/// Parses the name of a version directory. Signs and leading zeros are refused, so each number has one name.
fn version_number(name: &str) -> Option<Version> {
    name.parse().ok().filter(|number: &u64| number.to_string() == name).map(Version)
}

/// The names in a directory. Names that are not UTF-8 are left out, because models and versions have none.
fn entry_names(dir: &Path) -> Result<Vec<String>, StoreError> {
    let at = |e| match require_dir(dir) {
        Ok(()) => StoreError::at(dir, e),
        Err(better) => better,
    };
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).map_err(at)? {
        names.extend(entry.map_err(at)?.file_name().into_string());
    }
    Ok(names)
}

fn require_dir(path: &Path) -> Result<(), StoreError> {
    match fs::metadata(path) {
        Ok(meta) if meta.is_dir() => Ok(()),
        Ok(_) => Err(StoreError::NotADirectory { path: path.to_owned() }),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            Err(StoreError::MissingDirectory { path: path.to_owned() })
        }
        Err(e) => Err(StoreError::at(path, e)),
    }
}

fn open_file(path: &Path) -> Result<File, StoreError> {
    open_regular(path).map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => StoreError::MissingFile { path: path.to_owned() },
        _ => StoreError::at(path, e),
    })
}

/// The checksum of a whole file, read through a buffer.
fn checksum(mut file: &File) -> io::Result<Checksum> {
    let mut hash = Xxh3::new();
    let mut buffer = vec![0; CHUNK_BYTES];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(Checksum(hash.digest128())),
            Ok(bytes) => hash.update(&buffer[..bytes]),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

fn read_manifest(dir: &Path) -> Result<Manifest, StoreError> {
    let path = dir.join(MANIFEST);
    let file = MappedFile::map(&open_file(&path)?).map_err(|e| StoreError::at(&path, e))?;
    Manifest::parse(file.bytes()).map_err(|source| StoreError::Format { path, source })
}

/// Reads the files of a version and checks them against its manifest.
struct Reader {
    dir: PathBuf,
    manifest: Manifest,
}

impl Reader {
    /// Maps a file after checking its length and checksum.
    fn checked(&self, file: &str) -> Result<(PathBuf, MappedFile), StoreError> {
        let path = self.dir.join(file);
        let Some(entry) = self.manifest.files.get(file) else {
            return Err(StoreError::MissingFile { path });
        };
        let at = |e| StoreError::at(&path, e);
        let open = open_file(&path)?;
        let got = open.metadata().map_err(at)?.len();
        if got != entry.bytes {
            return Err(StoreError::Size { path, expected: entry.bytes, got });
        }
        let got = checksum(&open).map_err(at)?;
        if got != entry.xxh3_128 {
            return Err(StoreError::Checksum { path, expected: entry.xxh3_128, got });
        }
        let map = MappedFile::map(&open).map_err(at)?;
        Ok((path, map))
    }

    /// Checks that every file in the manifest belongs to the schema.
    fn check_list(&self, schema: &Schema) -> Result<(), StoreError> {
        let mut wanted = BTreeSet::from([MODEL.to_owned(), DENSE.to_owned()]);
        for table in &schema.tables {
            check_name("table", &table.name)?;
            wanted.insert(table_file(&table.name));
        }
        match self.manifest.files.keys().find(|file| !wanted.contains(*file)) {
            Some(file) => {
                Err(StoreError::UnexpectedFile { path: self.dir.join(MANIFEST), file: file.clone() })
            }
            None => Ok(()),
        }
    }

    fn tensors(&self, file: &str) -> Result<(PathBuf, MappedFile, Vec<format::Tensor>), StoreError> {
        let (path, map) = self.checked(file)?;
        match format::parse_header(map.bytes()) {
            Ok(tensors) => Ok((path, map, tensors)),
            Err(source) => Err(StoreError::Format { path, source }),
        }
    }

    fn dense(&self) -> Result<BTreeMap<String, Dense>, StoreError> {
        let (path, map, tensors) = self.tensors(DENSE)?;
        let dense = tensors.into_iter().map(|tensor| {
            let shape = tensor.shape.iter().map(|&axis| axis as usize).collect();
            expect_dtype(&path, &tensor, Dtype::F32)?;
            let values = floats(&path, &map, &tensor)?;
            Ok((tensor.name, Dense { shape, values }))
        });
        dense.collect()
    }

    fn table(&self, declared: &schema::Table) -> Result<Table, StoreError> {
        let (path, map, tensors) = self.tensors(&table_file(&declared.name))?;
        let (rows, dim) = (declared.stored_rows(), declared.dim as u64);
        let (dtype, weight_width) = format::weight_type(declared.element, declared.dim);
        let mut weight = None;
        let mut states = Vec::new();
        for tensor in tensors {
            let (dtype, wanted): (_, &[u64]) =
                if tensor.name == WEIGHT { (dtype, &[weight_width]) } else { (Dtype::F32, &[dim, 1]) };
            expect_dtype(&path, &tensor, dtype)?;
            let width = match tensor.shape[..] {
                [r, width] if r == rows && wanted.contains(&width) && tensor.name != KEYS => width,
                _ => {
                    let expected = match tensor.name.as_str() {
                        WEIGHT => format!("shape [{rows}, {weight_width}]"),
                        KEYS => "no tensor of this reserved name".to_owned(),
                        _ => format!("shape [{rows}, {dim}] or [{rows}, 1]"),
                    };
                    let got = format!("shape {:?}", tensor.shape);
                    return Err(StoreError::Tensor { path, tensor: tensor.name, expected, got });
                }
            };
            if tensor.name == WEIGHT {
                weight = Bytes::mapped(&map, tensor.begin as usize..tensor.end as usize);
            } else {
                let data = floats(&path, &map, &tensor)?;
                states.push(State::new(tensor.name, width as usize, data));
            }
        }
        let table = weight.and_then(|weight| Table::from_parts(declared, weight, states));
        table.ok_or_else(|| StoreError::Tensor {
            path,
            tensor: WEIGHT.to_owned(),
            expected: format!("shape [{rows}, {weight_width}]"),
            got: "nothing".to_owned(),
        })
    }
}

fn expect_dtype(path: &Path, tensor: &format::Tensor, expected: Dtype) -> Result<(), StoreError> {
    let (tensor, got) = (tensor.name.clone(), tensor.dtype);
    let source = FormatError::Dtype { tensor, expected, got };
    if got == expected { Ok(()) } else { Err(StoreError::Format { path: path.to_owned(), source }) }
}

fn floats(path: &Path, map: &MappedFile, tensor: &format::Tensor) -> Result<Bytes, StoreError> {
    // The header parser has checked that the tensor is within the file, so only alignment can fail here. In
    // the files of our writer, data begins on a page and each tensor is a multiple of 4 bytes.
    Bytes::mapped_floats(map, tensor.begin as usize..tensor.end as usize).ok_or_else(|| StoreError::Format {
        path: path.to_owned(),
        source: FormatError::Unaligned { got: tensor.begin },
    })
}
