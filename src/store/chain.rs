//! A chain: a version, and the versions that it builds on, down to a full one.

use std::path::Path;

use rayon::prelude::*;

use super::format::Base;
use super::link::Link;
use super::overlay::DeltaRows;
use super::record::StateShape;
use super::snapshot::Purpose;
use super::table::{State, Table};
use super::table_location::TableLocation;
use super::table_reader::TableParts;
use super::version_files::version_dir;
use super::{EmbeddingStore, StoreError, check_name};
use crate::config::TableMemory;
use crate::schema::{self, Schema};
use crate::types::{Element, TableId, Version};

/// The links of a chain that are read to open its last version.
pub(super) struct Chain {
    /// The rows of the first versions, if a loaded version has them. Without it, the first link is full.
    pub shared: Option<EmbeddingStore>,
    /// The links before the last, oldest first, without those whose rows are shared.
    earlier: Vec<Link>,
    /// The version itself.
    pub newest: Link,
}

impl Chain {
    /// Reads the manifests of a version and of those that it builds on, as far as no loaded version has their
    /// rows.
    ///
    /// # Errors
    /// [`StoreError`] for a name that no model can have, for a version that is missing or damaged, and for
    /// one that is not the base that the next one names.
    pub(super) fn read(
        models: &Path,
        name: &str,
        version: Version,
        loaded: &[&EmbeddingStore],
    ) -> Result<Self, StoreError> {
        check_name("model", name)?;
        let model = &models.join(name);
        let rows_of = |base: Base| {
            let mut found = loaded.iter().map(|store| store.up_to(base));
            found.find_map(Result::transpose).transpose()
        };
        let newest = Link::open(version_dir(model, version), version)?;
        let (mut earlier, mut shared) = (Vec::new(), rows_of(newest.hold.base)?);
        while shared.is_none() {
            let link = earlier.last().unwrap_or(&newest);
            let Some(base) = link.manifest.base else { break };
            if base.version.0.checked_add(1) != Some(link.version().0) {
                let path = link.manifest_path();
                return Err(StoreError::BaseNumber { path, version: link.version(), got: base.version });
            }
            shared = rows_of(base)?;
            if shared.is_none() {
                let opened = open_base(model, link, base)?;
                earlier.push(opened);
            }
        }
        earlier.reverse();
        Ok(Self { shared, earlier, newest })
    }

    /// Whether the rows of the version itself are shared, so that none of its tables is read.
    fn is_shared(&self) -> bool {
        self.shared.as_ref().is_some_and(|store| store.base() == Some(self.newest.hold.base))
    }

    /// The versions whose rows are not shared, oldest first.
    fn links(&self) -> impl Iterator<Item = &Link> {
        let newest = Some(&self.newest).filter(|_| !self.is_shared());
        self.earlier.iter().chain(newest)
    }

    fn table_bytes(&self) -> u64 {
        self.links().map(Link::table_bytes).fold(0, u64::saturating_add)
    }

    /// Chooses whether the files of tables are read into memory or mapped.
    pub(super) fn locate_tables(&mut self, memory: TableMemory) -> TableLocation {
        let location = TableLocation::choose(memory, self.table_bytes());
        let links = self.earlier.iter_mut().chain([&mut self.newest]);
        links.for_each(|link| link.in_ram = location.in_ram);
        location
    }

    /// Checks that all versions of the chain have the schema of the last one.
    ///
    /// # Errors
    /// [`StoreError::Schema`] with the first difference.
    pub(super) fn check_schemas(&self, schema: &Schema) -> Result<(), StoreError> {
        if let Some(shared) = &self.shared {
            self.newest.check_same_schema(schema, shared.version, &shared.schema)?;
        }
        let mut earlier = self.earlier.iter();
        earlier.try_for_each(|link| self.newest.check_same_schema(schema, link.version(), &link.schema()?.1))
    }

    /// The tables of the last version.
    ///
    /// # Errors
    /// [`StoreError`] of the first bad table in schema order.
    pub(super) fn tables(&self, schema: &Schema, purpose: Purpose) -> Result<Vec<Table>, StoreError> {
        if self.is_shared() {
            // A restart must find the files, although no table is read now.
            self.newest.check_table_lengths()?;
        }
        // Tables are checked in parallel. The error returned is that of the first bad table in schema order.
        let table =
            |(t, declared): (usize, &schema::TableSchema)| self.table(TableId(t as u32), declared, purpose);
        let tables: Vec<_> = schema.tables.par_iter().enumerate().map(table).collect();
        tables.into_iter().collect()
    }

    /// The rows of a table: those that are shared or those of the first link, and then those of the deltas.
    fn table(
        &self,
        id: TableId,
        declared: &schema::TableSchema,
        purpose: Purpose,
    ) -> Result<Table, StoreError> {
        let mut parts = self.table_parts(declared, purpose)?;
        // If some link has no checkpoint, training has only the served rows of the others.
        if parts.windows(2).any(|pair| row_type(&pair[0].1) != row_type(&pair[1].1)) {
            parts = self.table_parts(declared, Purpose::Serve)?;
        }
        let mut parts = parts.into_iter();
        let mut table = match self.shared.as_ref().and_then(|store| store.table(id)) {
            Some(shared) => shared.clone(),
            None => {
                let full = parts.next().and_then(|(_, TableParts { element, weight, states, .. })| {
                    Table::from_parts(declared, element, weight, states)
                });
                // The reader has checked every shape.
                full.ok_or_else(|| StoreError::Tables { expected: 1, got: 0 })?
            }
        };
        let deltas = parts.filter_map(|(version, TableParts { keys, weight, states, .. })| {
            Some(DeltaRows { version, keys: keys?, weight, states })
        });
        table.add_deltas(deltas)?;
        Ok(table)
    }

    /// The rows of a table in each link, except in the deltas that changed none of them, which say nothing
    /// about its states.
    fn table_parts(
        &self,
        declared: &schema::TableSchema,
        purpose: Purpose,
    ) -> Result<Vec<(Version, TableParts)>, StoreError> {
        let parts = self.links().map(|link| Ok((link.version(), link.table(declared, purpose)?)));
        let parts = parts.collect::<Result<Vec<_>, StoreError>>()?;
        Ok(parts.into_iter().filter(|(_, parts)| parts.rows() != Some(0)).collect())
    }

    /// The rows of the last version, which keep all versions of the chain in use.
    pub(super) fn store(&self, schema: &Schema, tables: Vec<Table>, memory: TableMemory) -> EmbeddingStore {
        let shared = self.shared.as_ref();
        let holds = shared.map_or(&[][..], |store| &store.links).iter();
        // The version itself is held anew, because its directory may have been restored since.
        let older = holds.filter(|hold| hold.base != self.newest.hold.base);
        let older = older.chain(self.earlier.iter().map(|link| &link.hold));
        EmbeddingStore {
            version: self.newest.version(),
            tables,
            links: older.chain([&self.newest.hold]).cloned().collect(),
            merged: shared.map_or(1, |store| store.merged),
            schema: schema.clone().into(),
            on_disk: shared.is_some_and(|store| store.on_disk),
            memory,
        }
    }
}

/// Opens the version on which a link builds, and checks that it is the one that the link names.
fn open_base(model: &Path, link: &Link, base: Base) -> Result<Link, StoreError> {
    let (path, number) = (link.manifest_path(), base.version);
    let opened = match Link::open(version_dir(model, number), number) {
        Ok(opened) => opened,
        Err(source) => return Err(StoreError::Base { path, base: number, source: Box::new(source) }),
    };
    let got = opened.hold.base.xxh3_128;
    if got != base.xxh3_128 {
        return Err(StoreError::BaseDiffers { path, base: number, expected: base.xxh3_128, got });
    }
    Ok(opened)
}

/// What the rows of a table must have in common in all links.
fn row_type(parts: &TableParts) -> (Element, Vec<StateShape<'_>>) {
    (parts.element, parts.states.iter().map(State::shape).collect())
}
