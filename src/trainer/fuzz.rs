//! Versions whose checksums are right, but whose contents are not those of their schema.

use proptest::prelude::*;
use proptest::sample::Index;

use super::optim::{Optimizer, OptimizerKind};
use super::start::{initialise, resume};
use crate::fuzz::bytes::changes;
use crate::fuzz::run;
use crate::schema::preset::{self, ArchKind};
use crate::store::tests::fuzz::{Published, WORDS, change_header};
use crate::store::{self, Purpose};

#[test]
fn a_version_to_resume_from() {
    let mut schema = preset::avazu(ArchKind::Dcn, 2, 5);
    schema.features.truncate(2);
    schema.tables.truncate(2);
    let optimizer = Optimizer::new(OptimizerKind::Adam, 0.1);
    let models = tempfile::tempdir().unwrap();
    let version = initialise(&schema, optimizer, 1).unwrap().save(models.path(), "m").unwrap();
    let mut published = Published::new(models.path().join("m/1"));
    // A valid schema may ask for gigabytes of weights.
    published.files.retain(|(name, _)| name != "model.toml");
    run((any::<Index>(), changes(WORDS), any::<bool>()), |(file, changes, header)| {
        let (name, bytes) = file.get(&published.files);
        let mut bytes = bytes.clone();
        if header && name.ends_with(".safetensors") {
            change_header(&mut bytes, &changes);
        } else {
            changes.iter().for_each(|change| change.apply(&mut bytes, &[]));
        }
        published.change(name, &bytes, true);
        let opened = store::open(models.path(), "m", version, Purpose::Train);
        let resumed = opened.ok().map(|opened| resume(opened, optimizer));
        published.restore(name);
        resumed.is_some_and(|resumed| resumed.is_ok())
    });
}
